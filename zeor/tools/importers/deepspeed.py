"""A DeepSpeed ZeRO checkpoint as parameters and an optimizer by name.

    SOURCE/latest                                        names the folder below
    SOURCE/TAG/mp_rank_00_model_states.pt                stages 1 and 2: names, shapes, buffers, frozen parameters
    SOURCE/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt stage 3: the same for rank R
    SOURCE/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   masters and moments, flat

Stages 1 and 2 flatten a group and give each rank an equal range of it; stage 3 gives each rank an equal range of each
parameter, and flattens those. Values are the fp32 masters. Knows plain values only: `read_file` unpickles elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.tensorfile import TensorEntry
from zeor.tools.importers.foreign import Foreign, Value, joined, value_here, value_of
from zeor.tools.importers.state_dicts import as_list

ReadFile = Callable[[Path], Any]  # a file's values; its tensors as entries of a safetensors file
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt")
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum", "initial_lr")  # what a torch optimizer has too


def read(source: Path, read_file: ReadFile) -> Foreign:
    folder = _folder(source)
    optim, model = _files(folder, "optim"), _files(folder, "model")
    main = folder / "mp_rank_00_model_states.pt"
    if not optim:
        raise CheckpointError(f"{folder} holds no ..._optim_states.pt, so it is no DeepSpeed ZeRO checkpoint.")
    models = [read_file(path) for path in (model or [main])]
    ranks = [_optimizer_of(read_file(path), path) for path in optim]
    written_by = ranks[0].get("partition_count")
    count = max(as_list(written_by)) if as_list(written_by) else written_by or len(ranks)
    if count != len(ranks):
        raise CheckpointError(f"{folder} was written by {count} ranks, but holds the state of {len(ranks)}.")
    kind = _Stage3 if _Stage3.masters_key in ranks[0] else _Stage12
    return kind(folder, models, ranks).foreign()


def _folder(source: Path) -> Path:
    latest = source / "latest"
    if not latest.is_file():
        return source
    tag = latest.read_text().strip()
    if not re.fullmatch(r"\w[\w.-]*", tag):
        raise CheckpointError(f"{latest} names {tag[:60]!r}, which is no plain folder name; that is refused.")
    return source / tag


def _files(folder: Path, kind: str) -> list[Path]:
    """By rank; all of them must be there."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _RANK.fullmatch(path.name)
        if match and match[3] == kind:
            if int(match[2]):
                raise CheckpointError(f"{path} belongs to a tensor-parallel run, which zeor cannot import.")
            found[int(match[1])] = path
    missing = next((rank for rank in range(len(found)) if rank not in found), None)
    if missing is not None:
        raise CheckpointError(f"{folder} lacks the {kind} states of rank {missing}.")
    return [found[rank] for rank in range(len(found))]


def _optimizer_of(tree: Any, path: Path) -> dict[str, Any]:
    found = tree.get("optimizer_state_dict") if isinstance(tree, dict) else None
    if not isinstance(found, dict) or not any(kind.masters_key in found for kind in (_Stage12, _Stage3)):
        raise CheckpointError(f"{path} holds no ZeRO state; zeor imports checkpoints of stages 1, 2 and 3.")
    return found


class _ZeroRun:
    """What both layouts share. `models` are the model states of one rank or of all, `ranks` the optimizers'."""

    masters_key: str  # in the state of a rank: its masters, flat
    base_key: str  # and the state of the optimizer that ZeRO wraps

    def __init__(self, folder: Path, models: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]]):
        self._folder, self._models, self._ranks, self._world = folder, models, ranks, len(ranks)
        self._main = models[0]
        self._shapes: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(shape) for name, shape in group.items()} for group in as_list(self._main.get("param_shapes"))
        ]
        if not self._shapes:
            raise CheckpointError(f"{folder} does not say the shapes of its parameters; save it by a newer DeepSpeed.")
        self._base: list[dict[str, Any]] = [rank.get(self.base_key) or {} for rank in ranks]

    def _value(self, name: str, flats: Sequence[Sequence[TensorEntry]]) -> Value:
        """A parameter out of flat tensors: [rank][group]."""
        raise NotImplementedError

    def _moments(self, key: str) -> list[list[TensorEntry]] | None:
        """[rank][group] of one entry, where every group has it."""
        found = []
        for base in self._base:
            entries = [state.get(key) if isinstance(state, dict) else None for state in self._by_group(base)]
            if not entries or not all(isinstance(entry, TensorEntry) for entry in entries):
                return None
            found.append(entries)
        return found  # type: ignore[return-value]

    @staticmethod
    def _by_group(base: dict[str, Any]) -> list[Any]:
        state = base.get("state")
        return [state[key] for key in sorted(state)] if isinstance(state, dict) else as_list(state)

    def foreign(self) -> Foreign:
        masters = [as_list(rank[self.masters_key]) for rank in self._ranks]
        found = Foreign({name: self._value(name, masters) for group in self._shapes for name in group})
        for key in self._keys():
            moments = self._moments(key)
            if moments is not None:
                for name in found.params:
                    found.state.setdefault(name, {})[key] = self._value(name, moments)
        step = self._step()
        if step is not None and found.state:
            for entries in found.state.values():
                entries["step"] = step
        found.groups = self._groups()
        self._add_rest(found)
        return found

    def _keys(self) -> list[str]:
        first: Any = next(iter(self._by_group(self._base[0])), {})
        entries = first.items() if isinstance(first, dict) else ()
        return [key for key, value in entries if isinstance(value, TensorEntry)]

    def _step(self) -> Any:
        """Of a parameter; some optimizers keep it in their groups."""
        places = [*self._by_group(self._base[0]), *as_list(self._base[0].get("param_groups"))]
        for place in places:
            step = place.get("step") if isinstance(place, dict) else None
            if isinstance(step, (int, float, Tensor)):
                return step if isinstance(step, Tensor) else torch.tensor(float(step))  # as torch's own keep it
        return None

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; each is of one or, at stage 3, of several of those that `param_shapes` lists."""
        saved = [group for group in as_list(self._base[0].get("param_groups")) if isinstance(group, dict)]
        numbers = [number for group in saved for number in as_list(group.get("params"))]
        if sorted(map(str, numbers)) != sorted(map(str, range(len(self._shapes)))):
            raise CheckpointError(f"{self._folder}: the groups of the optimizer do not fit the parameters' shapes.")
        groups = []
        for group in saved:
            settings = {key: group[key] for key in _SETTINGS if key in group}
            if "betas" in settings:
                settings["betas"] = tuple(settings["betas"])
            names = [name for number in as_list(group["params"]) for name in self._shapes[number]]
            groups.append({"params": names, **settings})
        return groups

    def _add_rest(self, found: Foreign) -> None:
        """Buffers, frozen and tied parameters, own dtypes, the step."""
        module = self._main.get("module") or {}
        for name in as_list(self._main.get("buffer_names")):
            if name in module:
                found.buffers[name] = _whole(module[name], name)
        for name, shape in (self._main.get("frozen_param_shapes") or {}).items():
            fragments = [(model.get("frozen_param_fragments") or {}).get(name) for model in self._models]
            found.params[name] = self._frozen(name, tuple(shape), fragments)
        shared = self._main.get("shared_params")
        pairs = shared.items() if isinstance(shared, dict) else as_list(shared)
        found.aliases.update({str(pair[0]): str(pair[1]) for pair in pairs})
        for name, value in module.items():  # at stage 1 nothing else says that there are frozen ones
            known = name in found.params or name in found.buffers or name in found.aliases
            if not known and isinstance(value, (TensorEntry, Tensor)):
                found.params[name] = _whole(value, name)
        for name in found.params:
            if isinstance(module.get(name), TensorEntry):
                found.own_dtypes[name] = module[name].dtype
        steps = self._main.get("global_steps")
        found.step = steps if isinstance(steps, int) and steps >= 0 else 0

    def _frozen(self, name: str, shape: tuple[int, ...], fragments: Sequence[Any]) -> Value:
        entry = fragments[0]
        if not isinstance(entry, TensorEntry) or math.prod(entry.shape) != math.prod(shape):
            raise CheckpointError(f"{self._folder} lacks the frozen parameter {name!r}.")
        return Value(shape, entry.dtype, lambda: joined([(entry, 0, entry.numel)]).view(shape))


class _Stage12(_ZeroRun):
    """Each group flat, each rank an equal range of it."""

    masters_key, base_key = "single_partition_of_fp32_groups", "base_optimizer_state"

    def _value(self, name: str, flats: Sequence[Sequence[TensorEntry]]) -> Value:
        for number, shapes in enumerate(self._shapes):
            if name in shapes:
                names = list(shapes)
                begin = sum(math.prod(shapes[other]) for other in names[: names.index(name)])
                return _cut(name, shapes[name], begin, [rank[number] for rank in flats])
        raise AssertionError(name)


class _Stage3(_ZeroRun):
    """Each parameter padded to a multiple of the ranks; each rank's ranges flat, in sub-groups of some length."""

    masters_key, base_key = "fp32_flat_groups", "optimizer_state_dict"

    def _value(self, name: str, flats: Sequence[Sequence[TensorEntry]]) -> Value:
        shapes = {key: shape for group in self._shapes for key, shape in group.items()}
        names = list(shapes)
        parts = {key: -(-math.prod(shape) // self._world) for key, shape in shapes.items()}
        begin, left = sum(parts[other] for other in names[: names.index(name)]), math.prod(shapes[name])
        ranges: list[tuple[TensorEntry, int, int]] = []
        for rank in flats:
            taken = min(parts[name], left)
            ranges += _ranges(name, rank, begin, taken)
            left -= taken
        return Value(shapes[name], flats[0][0].dtype, lambda: joined(ranges).view(shapes[name]))

    def _frozen(self, name: str, shape: tuple[int, ...], fragments: Sequence[Any]) -> Value:
        if not all(isinstance(entry, TensorEntry) for entry in fragments) or len(fragments) != self._world:
            raise CheckpointError(f"{self._folder} lacks parts of the frozen parameter {name!r}.")
        return _cut(name, shape, 0, fragments)


def _cut(name: str, shape: tuple[int, ...], begin: int, flats: Sequence[TensorEntry]) -> Value:
    """Elements [begin, begin + numel) of tensors laid end to end."""
    ranges = _ranges(name, flats, begin, math.prod(shape))
    return Value(shape, flats[0].dtype, lambda: joined(ranges).view(shape))


def _ranges(name: str, flats: Sequence[TensorEntry], begin: int, count: int) -> list[tuple[TensorEntry, int, int]]:
    ranges, position = [], 0
    for entry in flats:
        first, last = max(begin, position), min(begin + count, position + entry.numel)
        if first < last:
            ranges.append((entry, first - position, last - first))
        position += entry.numel
    if sum(length for *_, length in ranges) != count:
        raise CheckpointError(f"The flat state is too short to hold {name!r}; the checkpoint is not whole.")
    return ranges


def _whole(value: Any, name: str) -> Value:
    if isinstance(value, Tensor):
        return value_here(value)
    if isinstance(value, TensorEntry):
        return value_of(value, "")
    raise CheckpointError(f"{name!r} is no tensor.")
