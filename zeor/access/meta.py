"""Models without values: parameters on the meta device, from construction until something fills them.

`on_meta()` builds such a model; `settle` decides, when a model is sharded, what of it has no values (unfilled.py): rank
0's word counts, so rank 0 may hold a model that the others only describe. Filling is done elsewhere (initialise.py,
checkpoint/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeor.comm import verbs
from zeor.comm.agree import exchange
from zeor.comm.axes import Axis
from zeor.memory.param import made_over
from zeor.step.unfilled import BufferPlace, Unfilled
from zeor.step.unit import Slot


@contextmanager
def on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device (no memory, no values) and their buffers real,
    so that what is computed at construction and saved nowhere (rotary frequencies, masks) is right.

    Shard the model, then fill it: zeor.load_pretrained or zeor.init_parameters. Not for several threads at once:
    it changes how torch.nn.Module registers parameters while it is open.
    """
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        plain(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = made_over(param, param.detach().to("meta"))

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]  # for a while
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]  # as it was


def settle(axis: Axis, model: nn.Module, slots: Sequence[Slot], unfilled: Unfilled) -> None:
    """Which parameters and buffers have no values: those on meta on rank 0. Raises where another rank has values
    that rank 0 lacks, as they would be lost."""
    buffers = list(named_buffers(model))
    mine = [
        "".join("m" if slot.param.is_meta else "v" for slot in slots),
        "".join("m" if buffer.value.is_meta else "v" for buffer in buffers if buffer.value is not None),
    ]
    everyone = exchange(axis, mine, "exchange about parameters on the meta device")
    kinds = (("Parameter", [slot.name for slot in slots]), ("Buffer", [buffer.name for buffer in buffers]))
    for (kind, names), place in zip(kinds, (0, 1)):
        first = everyone[0][place]
        for rank, marks in enumerate(row[place] for row in everyone):
            for name, here, there in zip(names, first, marks):
                if here == "m" and there == "v":
                    raise ValueError(
                        f"{kind} {name!r} has values on rank {rank} but is on the meta device on rank 0, whose values "
                        "count; build the model on meta on every rank, or with values on rank 0."
                    )
    unfilled.slots = dict.fromkeys(slot for slot, mark in zip(slots, everyone[0][0]) if mark == "m")
    unfilled.buffers = [buffer for buffer, mark in zip(buffers, everyone[0][1]) if mark == "m"]


def check_states(optimizers: Sequence[Optimizer], slots: Sequence[Slot]) -> None:
    """State that an optimizer made in its constructor in the likeness of a meta parameter has no values either."""
    for optimizer in optimizers:
        for slot in slots:
            for key, value in optimizer.state.get(slot.param, {}).items():
                if isinstance(value, Tensor) and value.is_meta:
                    raise ValueError(
                        f"{type(optimizer).__name__} has made its {key!r} of {slot.name!r} on the meta device, without "
                        "values; make the optimizer after zeor.shard(model), then call zeor.shard(model, optimizer)."
                    )


def named_buffers(model: nn.Module) -> Iterator[BufferPlace]:
    """Every buffer once, with the place that holds it."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for attr, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield BufferPlace(module, attr, f"{prefix}.{attr}" if prefix else attr)


@torch.no_grad()
def receive_values(slots: Sequence[Slot], device: torch.device, unfilled: Unfilled) -> None:
    """Memory for what rank 0 holds and this rank only describes; the values come when the unit is packed."""
    for slot in slots:
        if slot.param.is_meta and slot not in unfilled.slots:
            made = nn.Parameter(torch.empty_like(slot.param, device=device), requires_grad=slot.param.requires_grad)
            torch.utils.swap_tensors(slot.param, made)


@torch.no_grad()
def place_buffers(axis: Axis, model: nn.Module, unfilled: Unfilled) -> None:
    """Every buffer that has values: on the mesh's device, rank 0's everywhere."""
    absent = {(buffer.module, buffer.attr) for buffer in unfilled.buffers}
    for module, attr, name in named_buffers(model):
        buffer = module._buffers[attr]
        assert buffer is not None
        if (module, attr) in absent:
            continue
        if buffer.is_meta or buffer.device.type != axis.device.type:
            placed = torch.empty_like(buffer, device=axis.device)
            if not buffer.is_meta:
                placed.copy_(buffer)
            replace_buffer(model, buffer, placed)
            buffer = placed
        verbs.broadcast(axis, buffer, f"broadcast of buffer {name!r}")


def replace_buffer(model: nn.Module, buffer: Tensor, placed: Tensor) -> None:
    """In every module that holds it."""
    for module in model.modules():
        for attr, found in module._buffers.items():
            if found is buffer:
                module._buffers[attr] = placed
