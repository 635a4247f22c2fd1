"""Buffers that training changes (BatchNorm's running statistics): made the same on every rank at each step.

Knows the persistent buffers of a model, by the module that holds them, and which modules changed theirs since
the last time all ranks had the same; that travels with the exchange that ends a backward. A step then sends
all that changed anywhere in one collective. Non-persistent buffers are caches and stay each rank's own.

Note [Seeing a change]
~~~~~~~~~~~~~~~~~~~~~~
Normalisation writes running statistics behind autograd's version counters, but counts its batches in the open. So
a module whose buffers show any change (a new object, or a new version) is taken to have changed them all.

Note [Which value wins]
~~~~~~~~~~~~~~~~~~~~~~~
"mean": of floating buffers the mean over the ranks that changed them; elements equal on all of these keep their
bits. Others (counters, masks): the value of the first rank that changed them. "rank0": rank 0's, as DDP does.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeor.comm import verbs
from zeor.comm.agree import same_everywhere
from zeor.comm.axes import Axes, Axis
from zeor.step.extension import Extension

log = logging.getLogger("zeor")

ALIGN_NBYTES = 16  # of each dtype's part in the message: the widest element there is
SAME, CHANGED, OTHER_SHAPE = range(3)


class _Seen(NamedTuple):
    """A buffer as it was when all ranks had the same."""

    tensor: Tensor
    version: int
    shape: torch.Size
    dtype: torch.dtype


class _Holder:
    """One module and its persistent buffers."""

    def __init__(self, name: str, module: nn.Module, names: list[str]):
        self.name, self._module, self._names = name, module, names
        self.look()

    def buffers(self) -> list[Tensor]:
        held = (self._module._buffers.get(name) for name in self._names)
        return [buffer for buffer in held if buffer is not None]

    def look(self) -> None:
        """All ranks have the same: remember what they look like."""
        self._seen = [_Seen(b, _version(b), b.shape, b.dtype) for b in self.buffers()]

    def state(self) -> int:
        now, seen = self.buffers(), self._seen
        if len(now) != len(seen) or any((b.shape, b.dtype) != (s.shape, s.dtype) for b, s in zip(now, seen)):
            return OTHER_SHAPE
        changed = any(b is not s.tensor or _version(b) != s.version for b, s in zip(now, seen))
        return CHANGED if changed else SAME


class ModuleBuffers(Extension):
    """The buffers of one sharded model."""

    def __init__(self, axes: Axes, model: nn.Module, how: str):
        self._axes, self._how = axes, how
        axis = axes.everyone
        idle = axis.size == 1 or axis.fake or how == "local"
        self._holders = [] if idle else holders(model)
        self._mine = [SAME] * len(self._holders)  # as last told
        self._most = self._least = list(self._mine)  # over ranks
        self._warned = False

    @property
    def told_count(self) -> int:
        return 2 * len(self._holders)

    def told(self) -> list[int]:
        """What changed here since the last step that sent anything; both signs, so that the largest over ranks
        says for each module whether any rank, and whether every rank, changed it."""
        self._mine = [holder.state() for holder in self._holders]
        return [*self._mine, *(-state for state in self._mine)]

    def needs_answer(self) -> bool:
        """Where a rank skips a module others run, what is sent differs from step to step."""
        return any(self._mine)

    def heard(self, largest: Sequence[int]) -> None:
        count = len(self._holders)
        self._most, self._least = list(largest[:count]), [-state for state in largest[count:]]

    def end_step(self) -> None:
        """A step: what any rank changed becomes the same on all. One collective, or none."""
        if OTHER_SHAPE in self._most:
            self._warn()
        chosen = [i for i, state in enumerate(self._most) if state == CHANGED]
        if not chosen:
            return
        here = [self._holders[i] for i in chosen]
        by_all = all(self._least[i] == CHANGED for i in chosen)
        changed = None if by_all else [self._mine[i] for i in chosen]
        send(self._axes.everyone, [h.buffers() for h in here], self._how, changed)
        for i in chosen:
            self._holders[i].look()
            self._mine[i] = self._most[i] = self._least[i] = SAME

    def go_on(self, before: ModuleBuffers) -> None:
        """In the place of another one of the same model: what has changed since all ranks had the same is known."""
        if len(before._holders) == len(self._holders):
            self._holders, self._warned = before._holders, before._warned

    def all_same(self) -> None:
        """Somebody else has made every buffer the same on all ranks."""
        for holder in self._holders:
            holder.look()
        self._most = [SAME] * len(self._holders)

    def _warn(self) -> None:
        if not self._warned:
            name = self._holders[self._most.index(OTHER_SHAPE)].name
            warnings.warn(
                f"Training changed the shape or dtype of a buffer of module {name!r}, so its buffers stay each rank's "
                "own; register such a buffer with persistent=False, or use zeor.shard(..., buffers='local').",
                stacklevel=3,
            )
        self._warned = True


def holders(model: nn.Module) -> list[_Holder]:
    """Every module with persistent buffers, each buffer once."""
    found, seen = [], set()
    for prefix, module in model.named_modules():
        names = []
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                names.append(name)
        if names:
            found.append(_Holder(prefix or "root", module, names))
    return found


def sync_now(axis: Axis, model: nn.Module, how: str) -> None:
    """All persistent buffers, whether they changed or not. Every rank of the mesh calls it."""
    if how not in ("mean", "rank0"):
        raise ValueError(f"zeor.sync_buffers(how={how!r}): use 'mean' or 'rank0'.")
    if axis.size == 1 or axis.fake:
        return
    found = holders(model)
    lines = [f"{h.name!r}: {[(tuple(b.shape), b.dtype) for b in h.buffers()]}" for h in found]
    same_everywhere(axis, "buffers", lines)
    if found:
        send(axis, [holder.buffers() for holder in found], how, None)


@torch.no_grad()
def send(axis: Axis, groups: list[list[Tensor]], how: str, changed: list[int] | None) -> None:
    """Make these buffers the same on all ranks. `changed`: whether this rank changed each group; None: all did."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    owner: dict[torch.dtype, list[int]] = {}  # the group of each
    for number, group in enumerate(groups):
        for buffer in group:
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
            owner.setdefault(buffer.dtype, []).append(number)
    flags = torch.tensor([] if changed is None else changed, dtype=torch.uint8)
    flats = ([buffer.detach().reshape(-1).to(axis.device) for buffer in buffers] for buffers in by_dtype.values())
    parts = [flags.to(axis.device), *(torch.cat(flat).view(torch.uint8) for flat in flats)]
    message = torch.cat([_padded(part) for part in parts])
    if how == "rank0":
        verbs.broadcast(axis, message, "broadcast of rank 0's buffers")
        rows = message.unsqueeze(0)
    else:
        rows = verbs.gather_vector(axis, message, "exchange of the ranks' buffers")
    who = rows[:, : flags.numel()].bool() if changed is not None and how == "mean" else None  # ranks x groups
    begin = _padded(flags).numel()
    for dtype, buffers in by_dtype.items():
        nbytes = sum(buffer.numel() for buffer in buffers) * dtype.itemsize
        values = rows[:, begin : begin + nbytes].view(dtype)
        begin += -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
        _put(buffers, _agreed(values, _per_element(who, owner[dtype], buffers)))


def _agreed(values: Tensor, who: Tensor | None) -> Tensor:
    """One row out of one row per rank; see Note [Which value wins]. `who`: of the same shape, the ranks that count."""
    first = values[0]
    if who is not None:
        first = values.gather(0, who.to(torch.uint8).argmax(0, keepdim=True)).squeeze(0)
    if len(values) == 1 or not (values.is_floating_point() or values.is_complex()):
        return first
    wide = torch.promote_types(values.dtype, torch.float32)
    other = values != first
    if who is not None:
        other &= who
    away = torch.where(other, values.to(wide) - first.to(wide), 0.0).sum(0)
    count = len(values) if who is None else who.sum(0)
    return torch.where(other.any(0), first.to(wide) + away / count, first.to(wide)).to(values.dtype)


def _per_element(who: Tensor | None, owner: list[int], buffers: list[Tensor]) -> Tensor | None:
    if who is None:
        return None
    groups = torch.repeat_interleave(torch.tensor(owner), torch.tensor([buffer.numel() for buffer in buffers]))
    return who[:, groups.to(who.device)]


def _put(buffers: list[Tensor], flat: Tensor) -> None:
    # As normalisation itself writes them: a graph that read the old values in training does not need them.
    with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
        parts = flat.split([buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [part.view(buffer.shape) for buffer, part in zip(buffers, parts)])


def _padded(part: Tensor) -> Tensor:
    return nn.functional.pad(part, (0, -part.numel() % ALIGN_NBYTES))


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
