"""One rank's part of a model that is not cut yet, by sizes alone: a pipeline's stage, and of its matrices a part.

    pp      stages with equally many of the model's repeated blocks; what is registered before the blocks is the first
            one's, what comes after them the last one's
    tp      `cut` says along which dimension: a dimension by pattern of names, or transformers' own plan of the model

A model that is cut already (DTensors, over a fake process group too) needs none of this: predict counts what it holds.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeor.model.discover import named_owners, repeated_blocks

_COLUMNS, _ROWS = "colwise", "rowwise"  # in the words of transformers' plans


def parts_of(model: nn.Module, pp: int, tp: int, cut: Mapping[str, int] | None) -> list[nn.Module]:
    """What a rank of each stage holds, on the meta device, for counting alone; ValueError where it cannot be told."""
    for name, size in (("pp", pp), ("tp", tp)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r}; give how many ranks there are: 1, 2, 3, ...")
    dims = _dims(model, cut) if tp > 1 else {}
    stages = _stages(model, pp) if pp > 1 else {}
    return [_part(model, tp, dims, {name for name, at in stages.items() if at != number}) for number in range(pp)]


def _dims(model: nn.Module, cut: Mapping[str, int] | None) -> dict[str, int]:
    """By name of a parameter: the dimension along which it is cut."""
    names = {name: (param, owners[0]) for name, param, owners in named_owners(model)}
    if cut is None:
        plan = getattr(model, "tp_plan", None)
        if not isinstance(plan, Mapping) or not plan:
            raise ValueError(
                "tp= needs to know how matrices are cut, and the model has no plan of its own (tp_plan); give cut=, a "
                "dimension by pattern of names, such as {'*.up.weight': 0, '*.down.weight': 1}."
            )
        found = {name: _by_style(name, owner, plan) for name, (_, owner) in names.items()}
        return {name: dim for name, dim in found.items() if dim is not None}
    dims: dict[str, int] = {}
    for pattern, dim in cut.items():
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            raise ValueError(f"cut={{{pattern!r}: {dim}}}: no parameter of the model has such a name.")
        dims.update(dict.fromkeys(fitting, dim))
    return dims


def _by_style(name: str, owner: tuple[nn.Module, str], plan: Mapping[str, str]) -> int | None:
    module, attr = owner
    generic = ".".join("*" if part.isdigit() else part for part in name.split("."))
    style = plan.get(generic) or plan.get(generic.rpartition(".")[0]) or ""
    if _COLUMNS in style:
        return 0
    if _ROWS in style and attr != "bias":
        return 0 if isinstance(module, nn.Embedding) else 1
    return None


def _stages(model: nn.Module, pp: int) -> dict[str, int]:
    """By name of a parameter: the stage that has it."""
    blocks = repeated_blocks(model)
    if len(blocks) < pp:
        raise ValueError(f"pp={pp} stages need as many repeated blocks, and the model has {len(blocks)}.")
    inside = {id(param): at * pp // len(blocks) for at, block in enumerate(blocks) for param in block.parameters()}
    found, seen = {}, False
    for name, param, _ in named_owners(model):
        seen = seen or id(param) in inside
        found[name] = inside.get(id(param), pp - 1 if seen else 0)
    return found


def _part(model: nn.Module, tp: int, dims: Mapping[str, int], without: set[str]) -> nn.Module:
    kept: dict[int, Any] = {}
    for name, param, _ in named_owners(model):
        shape = list(param.shape)
        if name in dims:
            shape[dims[name]] = -(-shape[dims[name]] // tp)  # the first rank's part: none is larger
        meta = torch.empty(shape, dtype=param.dtype, device="meta")
        kept[id(param)] = None if name in without else nn.Parameter(meta, requires_grad=param.requires_grad)
    # In a copy each parameter is the one that stands for it here: what `memo` knows is not copied.
    memo: dict[int, Any] = dict(kept)
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)
