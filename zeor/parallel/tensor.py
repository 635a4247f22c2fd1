"""Models that tensor parallelism has cut: which ranks stand beside ours, and what is refused before anything changes.

torch's `parallelize_module` and transformers' `apply_tensor_parallelism` make parameters DTensors over a mesh
dimension. Here their mesh is found and compared with the ranks that zeor was given. What a parameter is,
memory/placed.py knows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeor.comm.agree import exchange, same_everywhere, together
from zeor.comm.axes import Axes, Axis, TensorRanks, group_of, make_axis
from zeor.comm.meshes import ranks_on
from zeor.features.recompute import asks_products
from zeor.memory.placed import Placed, is_placed, local_tensor
from zeor.plan import Plan


def tensor_ranks(model: nn.Module, axes: Axes, deterministic: bool, timeout: float) -> TensorRanks | None:
    """The ranks beside this one, where the model has DTensors; TypeError, on every rank, where they cannot be taken.
    Ranks of all places along the mesh come here together."""
    placed = [(name, param) for name, param in model.named_parameters() if is_placed(param)]
    ours = ranks_on(axes.everyone)

    def check() -> None:
        _check_buffers(model)
        _check(placed, ours)

    together(axes.everyone, check, "check of the model's DTensors", TypeError)
    same_everywhere(axes.everyone, "DTensors", [f"{name!r}: {param.placements}" for name, param in placed])  # type: ignore[attr-defined]
    if not placed:
        return None
    return _stand(placed[0][1].device_mesh, axes, deterministic, timeout)  # type: ignore[attr-defined]


def _check(named: Sequence[tuple[str, Any]], ours: Sequence[int]) -> None:
    for name, param in named:
        mesh, (first, other) = param.device_mesh, named[0]
        if mesh != other.device_mesh:
            raise TypeError(
                f"Parameter {name!r} is a DTensor over {mesh}, and {first!r} over {other.device_mesh}; zeor takes "
                "DTensors over one mesh: parallelize all of them over one."
            )
        for dim in range(mesh.ndim):
            _check_apart(name, param, dim, ours)
        Placed(name, param)


def _check_buffers(model: nn.Module) -> None:
    """parallelize_module replicates the buffers of a module that it cuts."""
    name = next((name for name, buffer in model.named_buffers() if is_placed(buffer)), None)
    if name is not None:
        raise TypeError(
            f"Buffer {name!r} is a DTensor, and zeor takes plain buffers beside tensor parallelism: after "
            "parallelize_module assign buffer.full_tensor() in its place."
        )


def _check_apart(name: str, param: Any, dim: int, ours: Sequence[int]) -> None:
    """Along each dimension of its mesh this rank alone is one of ours."""
    mesh = param.device_mesh
    ranks = dist.get_process_group_ranks(mesh.get_group(dim))
    if len(set(ranks) & set(ours)) > 1:
        known = mesh.mesh_dim_names
        called = f"mesh dimension {known[dim]!r}" if known else f"dimension {dim} of its mesh"
        raise TypeError(
            f"Parameter {name!r} is a DTensor over {called} of ranks {ranks}, and zeor was given ranks {list(ours)} to "
            "shard over: they share more than this rank; give zeor.shard the data-parallel dimension alone, as by "
            "mesh=mesh['dp'], and no model that fully_shard has sharded; or, where these are parameters of experts and "
            "its ranks see different data, experts=mesh['ep']."
        )


def _stand(mesh: Any, axes: Axes, deterministic: bool, timeout: float) -> TensorRanks:
    """Groups of the ranks beside this one, and of all that hold the model."""
    device, everyone = axes.device, axes.everyone
    dims = []
    for dim in range(mesh.ndim):
        axis = make_axis(mesh.get_group(dim), device, deterministic, timeout)
        axis.name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"tensor {dim}"
        dims.append(axis)
    beside = sorted(mesh.mesh.flatten().tolist())
    rows = _rows(everyone, beside)
    ranks = sorted({rank for row in rows for rank in row})
    coords = tuple(mesh.get_coordinate())
    if len(ranks) != everyone.size * len(beside):
        raise TypeError(
            f"The ranks of the model's DTensors, {rows}, are no grid with the {everyone.size} ranks that zeor was "
            "given; make both from one mesh: init_device_mesh(..., (dp, tp), mesh_dim_names=('dp', 'tp'))."
        )
    whole = make_axis(group_of(ranks), device, deterministic, timeout) if len(ranks) > 1 else everyone
    if whole is not everyone:
        whole.name = " x ".join([everyone.name, *(axis.name for axis in dims)])
    place = 0
    for coordinate, axis in zip(coords, dims):
        place = place * axis.size + coordinate
    found = exchange(whole, [place, everyone.rank], "exchange about the places of ranks")
    if whole.fake:
        found = [[other, rank] for other in range(len(beside)) for rank in range(everyone.size)]
    if len(set(map(tuple, found))) != whole.size or len(found) != everyone.size * math.prod(axis.size for axis in dims):
        raise TypeError("The model's DTensors and the ranks that zeor was given do not stand on one grid of ranks.")
    return TensorRanks(tuple(dims), coords, whole, tuple((beside, ours) for beside, ours in found))


def _rows(everyone: Axis, beside: list[int]) -> list[list[int]]:
    """The ranks beside each of ours. In an imagined world nobody answers: there they lie as they do here."""
    if not everyone.fake:
        return exchange(everyone, beside, "exchange about the mesh of the model's DTensors")
    ours = ranks_on(everyone)
    return [[rank + other - ours[everyone.rank] for rank in beside] for other in ours]


def check_plan(model: nn.Module, plan: Plan) -> None:
    """ValueError where something was asked for that does not know DTensors."""
    name = next(name for name, param in model.named_parameters() if is_placed(param))
    if plan.precision.float8 is not None:
        raise ValueError(
            f"precision='fp8' multiplies plain weights in 8 bits, and {name!r} is a DTensor; use precision='bf16'."
        )
    if plan.recompute == "auto":
        raise ValueError(
            f"recompute='auto' lets each rank compute other blocks again, and those of a model with {name!r}, a "
            "DTensor, send messages; use recompute=True, or name the blocks."
        )
    if asks_products(plan.recompute):
        raise ValueError(
            f"recompute='products' keeps plain tensors, and those of a model with {name!r}, a DTensor, are none; use "
            "recompute=True."
        )
    if plan.wire is not None and plan.wire.auto:
        raise ValueError(
            f"wire='auto' is chosen apart by ranks that hold other parts of {name!r}, a DTensor, and what all of them "
            "hold would no longer be the same; name a format."
        )
    compiled = next((each for each, module in model.named_modules() if module._compiled_call_impl is not None), None)
    if plan.compile is not False or compiled is not None:
        asked = "compile=" if compiled is None else f"compile() of module {compiled!r}"
        raise ValueError(
            f"{asked} cannot trace {name!r}, a DTensor that zeor shards further; leave it out of a model that tensor "
            "or expert parallelism has cut."
        )


# ---- ties that were undone


def check_ties(model: nn.Module) -> None:
    """Tensor parallelism makes a new parameter in each place, so what was one parameter in two places is two.
    ValueError where transformers says that they are tied; a warning where two have the same values."""
    params = dict(model.named_parameters(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", None)
    for name, other in tied.items() if isinstance(tied, dict) else ():
        one, two = params.get(name), params.get(other)
        if one is not None and two is not None and one is not two:
            raise ValueError(
                f"{name!r} and {other!r} are tied in this model, and tensor parallelism has made two parameters of "
                f"them; assign the object itself before zeor.shard ({name} = {other}), and make the optimizer then."
            )
    known: dict[Any, str] = {}
    for name, param in model.named_parameters():
        local = local_tensor(param)
        if not is_placed(param) or param.is_meta or local.dim() < 2 or local.numel() < 2:
            continue
        key = (tuple(param.shape), param.dtype, *_fingerprint(local))
        if key in known and bool((local != local.reshape(-1)[0]).any()):
            warnings.warn(
                f"{known[key]!r} and {name!r} have the same values and are two parameters: if they were tied, "
                "parallelize_module has undone it; assign the object itself (b.weight = a.weight) before zeor.shard, "
                "and make the optimizer after that.",
                stacklevel=4,
            )
        known.setdefault(key, name)


# ---- parameters that all these ranks share


def check_replicas(model: nn.Module, axes: Axes) -> None:
    """ValueError, on every rank, where a parameter that is whole on each of the ranks beside this one differs there:
    they would train different models."""
    if axes.tensor is None or axes.tensor.whole.fake:
        return
    shared = [(name, param) for name, param in model.named_parameters() if not is_placed(param) and not param.is_meta]
    sums = [_fingerprint(param) for _, param in shared]
    everyone = exchange(axes.whole, sums, "comparison of parameters that tensor parallelism has not cut")
    told = [rank for rank, (_, ours) in enumerate(axes.tensor.places) if ours == 0]  # whose values count
    for rank in told[1:]:
        odd = next((number for number, (a, b) in enumerate(zip(everyone[told[0]], everyone[rank])) if a != b), None)
        if odd is not None:
            raise ValueError(
                f"Parameter {shared[odd][0]!r} is whole on every tensor-parallel rank, and rank {told[0]} of the mesh "
                f"has other values than rank {rank}; give all of them the same seed before the model is made, or the "
                "same weights."
            )


def _fingerprint(value: Tensor) -> list[int]:
    raw = value.detach().contiguous().view(-1).view(torch.uint8)
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    weights = torch.arange(1, words.numel() + 1, device=words.device)
    return [int(words.sum()), int((words * weights).sum()), int(raw[words.numel() * 8 :].sum())]
