"""A parameter that is a DTensor: which part of it this rank has along mesh dimensions that are not zeor's.

Tensor parallelism (torch's `parallelize_module`, transformers' `apply_tensor_parallelism`) makes parameters DTensors.
zeor shards the part of each that this rank has, its local tensor, over the ranks that have the same part. `Placed`
knows the rest: global shape, placements, and which boxes of the whole parameter the local elements are. It sends
nothing but where a gradient has placements from which torch itself must redistribute.

torch.distributed.tensor is imported by whoever made the first DTensor, and never here before that.

Note [Partial gradients]
~~~~~~~~~~~~~~~~~~~~~~~~
A parameter that is replicated along a mesh dimension may get a whole gradient on each rank of it (the bias of a row
layer), or a part of the sum (a norm whose input is cut by sequence). Placements tell which, but only in backward. So
such parameters lie in lanes that are summed over the dimension, once per reduce (`LaneKey.sums`). A gradient that is
whole already counts on the dimension's first rank alone: adding zeros changes no bit.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.layout.boxes import Box, boxes_of_range

_slots: dict[str, Any] = {}  # DTensor's own descriptors, by name


def dtensor_class() -> Any:
    """torch's DTensor; None where nobody can have made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else getattr(module, "DTensor", None)


def is_placed(value: Any) -> bool:
    kind = dtensor_class()
    return kind is not None and isinstance(value, kind)


def local_tensor(value: Tensor) -> Tensor:
    """The local tensor of a DTensor, whatever its class makes of the name; any other tensor as it is."""
    if not is_placed(value):
        return value
    found: Tensor = _slot("_local_tensor").__get__(value)
    return found


def put_local(value: Any, local: Tensor) -> None:
    """The same DTensor over another local tensor."""
    _slot("_local_tensor").__set__(value, local)


def _slot(name: str) -> Any:
    if name not in _slots:
        _slots[name] = vars(dtensor_class())[name]
    return _slots[name]


def wrapped(spec: Any, local: Tensor) -> Any:
    """A DTensor laid out as `spec` says, in the local tensor's dtype; it needs no gradient."""
    meta = spec.tensor_meta
    if meta.dtype != local.dtype:
        spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=local.dtype))
    return dtensor_class()(local, spec, requires_grad=False)


def replicated_dims(param: Tensor) -> tuple[int, ...]:
    """The mesh dimensions along which a gradient of it may be partial: see Note [Partial gradients]."""
    if not is_placed(param):
        return ()
    placements: Sequence[Any] = param.placements  # type: ignore[attr-defined]
    return tuple(dim for dim, placement in enumerate(placements) if placement.is_replicate())


def cut_dims(param: Tensor) -> tuple[int, ...]:
    """The mesh dimensions along which ranks have different elements of it."""
    placements: Sequence[Any] = param.placements if is_placed(param) else ()  # type: ignore[attr-defined]
    return tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())


def held_shape(param: Tensor) -> torch.Size:
    """Of what lies in a lane."""
    return local_tensor(param).shape


class Run(NamedTuple):
    """Elements of one dimension that lie side by side in the whole parameter."""

    begin: int
    length: int


class Placed:
    """Of one parameter; TypeError, naming it, where its placements are none that can be cut."""

    def __init__(self, name: str, param: Any):
        self.name, self.spec = name, param._spec
        self.mesh, self.placements = param.device_mesh, tuple(param.placements)
        self.shape = tuple(param.shape)
        self.local_shape = tuple(local_tensor(param).shape)
        self._contiguous = torch.empty(self.shape, device="meta").stride()
        self.spec = self._row_major()
        self._check()
        self._runs = [self._runs_of(dim) for dim in range(len(self.shape))]
        found = tuple(sum(run.length for run in runs) for runs in self._runs)
        if found != self.local_shape:
            raise TypeError(
                f"Parameter {name!r} is a DTensor of {self.shape} with placements {self.placements}, by which this "
                f"rank has {found} of it, and it has {self.local_shape}; make it by torch's distribute_tensor."
            )

    def _row_major(self) -> Any:
        spec = self.spec
        meta = spec.tensor_meta
        if tuple(meta.stride) == self._contiguous:
            return spec
        return type(spec)(spec.mesh, spec.placements, tensor_meta=meta._replace(stride=self._contiguous))

    def _check(self) -> None:
        for dim, placement in enumerate(self.placements):
            if not placement.is_replicate() and not _is_shard(placement):
                raise TypeError(
                    f"Parameter {self.name!r} is a DTensor that is {placement} along mesh dimension "
                    f"{self.dim_name(dim)!r}, which zeor cannot cut; redistribute it to Shard or Replicate before "
                    "zeor.shard."
                )

    def dim_name(self, dim: int) -> str:
        names = self.mesh.mesh_dim_names
        return str(names[dim]) if names else str(dim)

    @property
    def cut(self) -> frozenset[int]:
        """The mesh dimensions along which ranks have different elements."""
        return frozenset(dim for dim, placement in enumerate(self.placements) if not placement.is_replicate())

    def describe(self) -> str:
        names = (f"{self.dim_name(dim)}={placement}" for dim, placement in enumerate(self.placements))
        return f"DTensor({', '.join(names)})"

    # ---- where local elements lie

    def _runs_of(self, dim: int) -> list[Run]:
        """Of one dimension, in the order of the local tensor: torch's own placements divide a row of numbers."""
        size, count = self.shape[dim], len(self.shape)
        numbers = torch.arange(size).view([size if each == dim else 1 for each in range(count)])
        coordinate = self.mesh.get_coordinate()
        for mesh_dim, placement in enumerate(self.placements):
            if _is_shard(placement) and placement.dim % count == dim:
                parts, _ = placement._split_tensor(numbers, self.mesh.size(mesh_dim), with_padding=False)
                numbers = parts[coordinate[mesh_dim]]
        runs: list[Run] = []
        for number in numbers.reshape(-1).tolist():
            if runs and number == runs[-1].begin + runs[-1].length:
                runs[-1] = Run(runs[-1].begin, runs[-1].length + 1)
            else:
                runs.append(Run(number, 1))
        return runs

    def boxes(self, start: int, stop: int) -> list[Box]:
        """Elements [start, stop) of the flattened local tensor as boxes of the whole parameter: one after another they
        are those elements, in order."""
        found: list[Box] = []
        for box in boxes_of_range(self.local_shape, start, stop):
            found.extend(self._global_boxes(box))
        return found

    def _global_boxes(self, box: Box) -> Iterator[Box]:
        pieces = [_within(runs, begin, length) for runs, begin, length in zip(self._runs, *box)]
        several = [dim for dim, runs in enumerate(pieces) if len(runs) > 1]
        last = several[-1] if several else 0
        # What lies before the last dimension that is in several runs goes row by row, so that the order stays.
        rows = [[Run(at, 1) for run in runs for at in range(run.begin, sum(run))] for runs in pieces[:last]]
        for runs in itertools.product(*rows, *pieces[last:]):
            yield Box(tuple(run.begin for run in runs), tuple(run.length for run in runs))

    # ---- values

    def wrap(self, local: Tensor) -> Any:
        return wrapped(self.spec, local)

    def cut_out(self, whole: Tensor) -> Tensor:
        """This rank's part of a plain tensor of the global shape."""
        for dim, runs in enumerate(self._runs):
            parts = [whole.narrow(dim, run.begin, run.length) for run in runs]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)
        return whole

    def local_of(self, value: Tensor) -> Tensor:
        """This rank's part of a value of the whole parameter: a DTensor on the same mesh, a plain tensor of the global
        shape or one that can be expanded to it."""
        if is_placed(value):
            return self._redistributed(value, self.placements)
        return value if value.dim() == 0 else self.cut_out(value.expand(self.shape))

    def _redistributed(self, value: Any, placements: Sequence[Any]) -> Tensor:
        if value.device_mesh != self.mesh:
            raise ValueError(
                f"{self.name!r} is a DTensor over {self.mesh}; it was given one over {value.device_mesh}; put that on "
                "the parameter's own mesh first."
            )
        if tuple(value.placements) != tuple(placements):
            value = value.redistribute(placements=placements)
        local = local_tensor(value)
        wait = getattr(local, "wait", None)  # torch has begun a collective and not waited for it
        return local if wait is None else wait()

    def take(self, grad: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """This rank's part of a gradient as autograd made it, and the mesh dimensions along which that is partial."""
        if not is_placed(grad):
            return (grad if tuple(grad.shape) == self.local_shape else self.cut_out(grad)), ()
        theirs: Any = grad
        wanted = [
            given if given.is_partial() and mine.is_replicate() and _sums(given) else mine
            for given, mine in zip(theirs.placements, self.placements)
        ]
        local = self._redistributed(theirs, wanted)
        return local, tuple(dim for dim, placement in enumerate(wanted) if placement.is_partial())


def _is_shard(placement: Any) -> bool:
    """Shard, or torch's _StridedShard, which is no Shard by its class."""
    return hasattr(placement, "dim") and hasattr(placement, "_split_tensor")


def _sums(placement: Any) -> bool:
    return getattr(placement, "reduce_op", "") == "sum"


def _within(runs: Sequence[Run], begin: int, length: int) -> list[Run]:
    """The part [begin, begin + length) of what the runs hold one after another."""
    found, at = [], 0
    for run in runs:
        low, high = max(begin, at), min(begin + length, at + run.length)
        if low < high:
            found.append(Run(run.begin + low - at, high - low))
        at += run.length
    return found
