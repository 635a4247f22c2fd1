"""The whole state of a sharded optimizer, in the layout of torch's own state_dict: on one rank, streamed, and back.

`zeor.save` and `zeor.load` are for going on; these are for others who want a plain optimizer's state (a file of
another library, a look at the moments). State travels parameter by parameter, so a rank that keeps nothing needs room
for the state of one. From another rank come numbers, text and tensors, never a pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from zeor.access.sharded import ATTRIBUTE
from zeor.comm import verbs
from zeor.comm.agree import exchange
from zeor.comm.attendance import attend
from zeor.comm.axes import Axis
from zeor.features import settings
from zeor.model.wrapped import unwrapped
from zeor.optim.parts import mark
from zeor.optim.parts.pieces import leaves, put_leaf
from zeor.optim.parts.segments import check_cuttable
from zeor.optim.stepper import Stepper
from zeor.step import events


def full_state(
    model: nn.Module, optimizer: Optimizer, *, to_rank: int | None = 0, device: Any = "cpu"
) -> dict[str, Any]:
    """The optimizer's whole state, as the state_dict() of a plain optimizer over the whole model gives it.

    Every rank calls it. `to_rank` gets the state, on `device`, and all others {}; None: all ranks get it. A rank that
    gets nothing needs memory for the state of one parameter at a time. It loads into a plain optimizer over the same
    groups, and into a sharded one by zeor.load_full_state."""
    stepper = stepper_of(model, optimizer)
    axis = stepper.axes.everyone
    check_rank("zeor.full_state", "to_rank", to_rank, axis.size)
    _begin(stepper, "zeor.full_state")
    keeps, state = to_rank in (None, axis.rank), {}
    for index, _, found in _stream(stepper):
        if keeps and found:
            state[index] = tree_map_only(Tensor, lambda value: value.detach().to(device, copy=True), found)
    if not keeps:
        return {}
    segments = stepper.segments
    with segments.in_groups():
        groups = type(optimizer).state_dict(optimizer)["param_groups"]
    return {"state": state, "param_groups": groups}


def iter_state(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name of the parameter, its whole state) one after the other, on every rank, without ever holding all of it.
    Every rank iterates to the end; a parameter without state yet comes with {}."""
    stepper = stepper_of(model, optimizer)
    _begin(stepper, "zeor.iter_state")
    return ((name, found) for _, name, found in _stream(stepper))


def load_full_state(
    model: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any], *, from_rank: int | None = 0
) -> None:
    """Load a plain optimizer's state_dict (what zeor.full_state gives) into a sharded one, settings of groups too.

    Every rank calls it. Rank `from_rank` gives the state and the others anything, {} say; each keeps its own part.
    None: every rank gives the whole. What does not fit raises on every rank before anything changes."""
    stepper = stepper_of(model, optimizer)
    axis = stepper.axes.everyone
    if from_rank is None:
        optimizer.load_state_dict(state_dict)
        return
    check_rank("zeor.load_full_state", "from_rank", from_rank, axis.size)
    _begin(stepper, "zeor.load_full_state")
    mine = _told(stepper, state_dict) if axis.rank == from_rank else None
    told = exchange(axis, mine, "exchange about the whole state of an optimizer")
    found = told[from_rank if axis.size > 1 else 0]
    if isinstance(found, str):
        raise ValueError(f"zeor.load_full_state: {found}")
    params = _params(optimizer)
    taken: dict[int, Any] = {}
    for index, entries in found["state"]:
        whole: dict[str, Any] = {}
        given = state_dict["state"][index] if axis.rank == from_rank else {}
        for path, kind, *about in entries:
            put_leaf(whole, tuple(path), _received(axis, from_rank, given, (path, kind, about)))
        cut = stepper.segments.cut_state(params[index], whole)
        if stepper.segments.of(params[index]) is not None:
            taken[index] = cut
    groups = [dict(group) for group in optimizer.param_groups]
    settings.take_over(groups, found["groups"])
    first = 0
    for group in groups:
        count = len(group["params"])
        group["params"], first = list(range(first, first + count)), first + count
    stepper.state.drain()
    stepper.state.take_cut({"state": taken, "param_groups": groups})


def stepper_of(model: nn.Module, optimizer: Optimizer) -> Stepper:
    """What drives this optimizer: zeor.shard gave it to the model, or it is of zeor.optim."""
    state = vars(unwrapped(model)).get(ATTRIBUTE)
    drop_in = getattr(optimizer, "_zeor", None)
    found = [drop_in] if isinstance(drop_in, Stepper) else []
    found += [each for each in (state.steppers if state is not None else ()) if each.optimizer is optimizer]
    if not found:
        raise ValueError(
            f"This {type(optimizer).__name__} was not sharded with the model; give zeor.shard the model and it first."
        )
    stepper: Stepper = found[0]
    return stepper


def check_rank(who: str, option: str, rank: int | None, size: int) -> None:
    """ValueError where no rank has this number."""
    if rank is not None and not (isinstance(rank, int) and 0 <= rank < size):
        raise ValueError(f"{who}({option}={rank!r}): give a rank, 0 to {size - 1}, or None for all.")


def _begin(stepper: Stepper, what: str) -> None:
    announcer = stepper.engine.announcer
    stepper.engine.refuse_divided(f"{what} knows no tensor parallelism yet; zeor.save keeps all of the state.")
    if announcer.block is None:
        attend(stepper.axes.everyone, what)
    announcer.announce(events.OTHER, what, meets=False)
    stepper.state.heed_new_state()
    stepper.state.drain()


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _stream(stepper: Stepper) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for index, param in enumerate(_params(stepper.optimizer)):
        yield index, stepper.segments.slots[id(param)].name, stepper.segments.whole(param)


# ---- what a rank that gives a state tells the others


def _told(stepper: Stepper, state_dict: dict[str, Any]) -> dict[str, Any] | str:
    """What the others must know of a state dict, as JSON; or what is wrong with it."""
    try:
        _check(stepper, state_dict)
        described = [[index, _described(state)] for index, state in state_dict["state"].items()]
        return {"state": described, "groups": settings.encode(state_dict["param_groups"])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ValueError):
            return str(error)
        return f"this is no state_dict() of an optimizer ({type(error).__name__}: {error})."


def _check(stepper: Stepper, state_dict: dict[str, Any]) -> None:
    if mark.KEY in state_dict:
        raise ValueError(f"{mark.NOTE}; or give what zeor.full_state made.")
    params, name = _params(stepper.optimizer), type(stepper.optimizer).__name__
    wanted = [len(group["params"]) for group in stepper.optimizer.param_groups]
    given = [len(group["params"]) for group in state_dict["param_groups"]]
    if wanted != given:
        raise ValueError(
            f"the state dict has groups of {given} parameters, and the {name} groups of {wanted}; make it alike."
        )
    mark.check_whole(stepper.segments, state_dict)
    for index, state in state_dict["state"].items():
        if not isinstance(index, int) or index >= len(params):
            raise ValueError(f"the state dict has state for {index!r}, and the {name} has {len(params)} parameters.")
        slot = stepper.segments.slots[id(params[index])]
        if stepper.owners.cut and id(params[index]) not in stepper.owners.owned:
            check_cuttable(slot.name, slot.shape, state)


def _described(state: dict[str, Any]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for path, value in leaves(state):
        if isinstance(value, Tensor) and type(value) is Tensor:
            dtype = str(value.dtype).removeprefix("torch.")
            found.append([path, "number", dtype, value.item()] if value.dim() == 0 else
                         [path, "tensor", dtype, list(value.shape)])  # fmt: skip
        elif value is None or isinstance(value, (bool, int, float, str)):
            found.append([path, "plain", value])
        else:
            raise ValueError(f"{'/'.join(map(str, path))!r} is a {type(value).__name__}, which cannot travel.")
    return found


def _received(axis: Axis, rank: int, given: Any, entry: tuple[Sequence[Any], str, list[Any]]) -> Any:
    """One value of a parameter's state, on every rank."""
    path, kind, about = entry
    if kind == "plain":
        return about[0]
    dtype = getattr(torch, about[0])
    if kind == "number":
        return torch.tensor(about[1], dtype=dtype)
    if axis.rank == rank:
        for part in path:
            given = given[part]
        value = given.detach().to(axis.device).contiguous()
    else:
        value = torch.empty(about[1], dtype=dtype, device=axis.device)
    verbs.broadcast(axis, value, f"broadcast of {'/'.join(map(str, path))!r} of an optimizer", rank)
    return value
