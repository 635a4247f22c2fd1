"""Checkpoints that transformers converts while it loads them: which tensors of the files make which parameter.

transformers 5 keeps, say, the experts of Mixtral as one parameter, `experts.gate_up_proj`, where the files hold
`experts.0.w1.weight`, `experts.0.w3.weight` and so on. Which patterns, and how, is the library's own table, and its own
operations convert here: loading as `from_pretrained`, writing as `save_pretrained`. What comes out is first found
out with tensors on the meta device, which have shapes and no values.

Nothing but one parameter's sources is ever held: where the conversion stacks (experts), only some of the stack.
transformers is asked only where the model is one of its own.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeor.checkpoint.files.tensorfile import Reader, TensorEntry

_PART_NBYTES = 64 << 20  # of a stack, converted at a time


@dataclass
class Converted:
    """A parameter, and what of the files makes it: `sources` by the pattern that found them, in the order of names."""

    converter: Any
    layer: str  # the name that the converter is asked for
    name: str  # the parameter's own: a converter may make several
    model: Any
    sources: dict[str, list[TensorEntry]] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def pieces(self, reader: Reader, start: int, numel: int) -> Iterator[tuple[int, Tensor]]:
        """As Reader.pieces. Of a stack only those that hold these elements are read."""
        if not self._stacks():
            yield 0, self._converted(reader.whole).reshape(-1)[start : start + numel]
            return
        each = self.numel // self.shape[0]
        first, last = start // each, -(-(start + numel) // each)
        step = max(1, _PART_NBYTES // (each * self.dtype.itemsize))
        done = 0
        for begin in range(first, last, step):
            end = min(last, begin + step)
            values = self._converted(reader.whole, slice(begin, end)).reshape(-1)
            values = values[max(0, start - begin * each) : min(values.numel(), start + numel - begin * each)]
            yield done, values
            done += values.numel()

    def whole(self, reader: Reader) -> Tensor:
        return self._converted(reader.whole)

    def learn_shape(self) -> dict[str, Tensor]:
        """By a conversion without values; returns all that it makes."""
        made = self._made(lambda entry: torch.empty(entry.shape, dtype=entry.dtype, device="meta"), slice(None))
        return {name: _one(value) for name, value in made.items()}

    def _stacks(self) -> bool:
        """Whether one element of every list of sources makes one row of the parameter: the first operation stacks them
        along dimension 0, and the others leave that alone."""
        first, *rest = self.converter.operations
        lengths = {len(entries) for entries in self.sources.values()}
        alone = all(type(each).__name__ in ("Concatenate", "Transpose") and _leaves_first(each) for each in rest)
        return (
            type(first).__name__ == "MergeModulelist" and first.dim == 0 and alone and lengths == {self.shape[0]}
            and self.numel > 0
        )  # fmt: skip

    def _converted(self, read: Callable[[TensorEntry], Tensor], part: slice = slice(None)) -> Tensor:
        return _one(self._made(read, part)[self.name])

    def _made(self, read: Callable[[TensorEntry], Tensor], part: slice) -> dict[str, Any]:
        converter = copy.deepcopy(self.converter)
        for pattern, entries in self.sources.items():
            for entry in entries[part]:
                converter.collected_tensors[pattern].append(lambda entry=entry: read(entry))
        return dict(converter.convert(self.layer, model=self.model, config=self.model.config))


WeightSource = TensorEntry | Converted


def pieces(reader: Reader, source: WeightSource, start: int, numel: int) -> Iterator[tuple[int, Tensor]]:
    """Elements [start, start + numel) of a flattened tensor, a piece at a time: (elements before it, piece)."""
    if isinstance(source, Converted):
        return source.pieces(reader, start, numel)
    return reader.pieces(source, start, numel)


def whole(reader: Reader, source: WeightSource) -> Tensor:
    return source.whole(reader) if isinstance(source, Converted) else reader.whole(source)


# ---- from files to a model


def as_model_names(model: nn.Module, known: Iterable[str], entries: dict[str, TensorEntry]) -> dict[str, WeightSource]:
    """What the files hold by the model's names, as from_pretrained would find it. What it knows no place for keeps its
    name. `known`: the model's names."""
    library = _library(model)
    if library is None:
        return dict(entries)
    mapping = _table(model, legacy=True)
    renamings, converters = _of_kind(library, mapping)
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    names, prefix = dict.fromkeys(known, True), getattr(model, "base_model_prefix", None)
    found: dict[str, WeightSource] = {}
    for name in sorted(entries, key=library.dot_natural_key):
        new, pattern = library.rename_source_key(name, renamings, converters, prefix, names)
        if new not in names and name in names:  # it has the model's names already
            new, pattern = library.rename_source_key(name, [], [], prefix, names)
        if new not in names:
            found[name] = entries[name]
        elif pattern is None:
            found[new] = entries[name]
        else:
            group = found.get(new)
            if not isinstance(group, Converted):
                group = found[new] = Converted(by_pattern[pattern], new, new, model)
            group.sources.setdefault(pattern, []).append(entries[name])
    groups = [each for each in found.values() if isinstance(each, Converted)]
    for group in groups:
        found.update(_made_by(group))
    return found


def remember(model: nn.Module, entries: Iterable[str], known: Iterable[str]) -> None:
    """What the files were, where from_pretrained keeps it: a later save_pretrained or export writes them so again."""
    library = _library(model)
    if library is None:
        return
    mapping = _table(model, legacy=True)
    renamings, converters = _of_kind(library, mapping)
    names = dict.fromkeys(known, True)
    for name in entries:
        library.rename_source_key(name, renamings, converters, getattr(model, "base_model_prefix", None), names)
    object.__setattr__(model, "_weight_conversions", [each for each in mapping if each.was_used()])


def _made_by(group: Converted) -> dict[str, Converted]:
    """Every parameter that a group of sources makes. One that cannot be converted says what was there."""
    try:
        made = group.learn_shape()
    except Exception as error:
        held = sum(map(len, group.sources.values()))
        raise ValueError(
            f"transformers cannot make {group.layer!r} of the {held} tensors that the files hold for it "
            f"({type(error).__name__}: {error}); load the files of this very architecture."
        ) from error
    return {
        name: Converted(group.converter, group.layer, name, group.model, group.sources, tuple(value.shape), value.dtype)
        for name, value in made.items()
    }


# ---- from a model to files


class Reverse:
    """Parameters by the names of files, as save_pretrained would write them: put in one by one, each comes out, or all
    that a group of them makes, when the group is whole."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model, self._library = model, _library(model)
        self._renamings: list[Any] = []
        self._groups: dict[str, tuple[Any, dict[str, str]]] = {}  # by first name: converter, pattern by parameter
        self._group_of: dict[str, str] = {}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        if self._library is not None:
            self._find(names)

    def _find(self, names: Sequence[str]) -> None:
        library = self._library
        backwards = [each.reverse_transform() for each in _used(self._model)[::-1]]
        self._renamings, converters = _of_kind(library, backwards)
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        for name in sorted(names, key=library.dot_natural_key):
            new, pattern = library.apply_converters(name, converters)
            if pattern is not None:
                self._groups.setdefault(new, (by_pattern[pattern], {}))[1][name] = pattern
                self._group_of[name] = new

    def only(self, names: Iterable[str]) -> None:
        """Groups of which not all parameters are written are left as they are: a part of them makes nothing."""
        written = set(names)
        for group, (_, members) in list(self._groups.items()):
            if not written.issuperset(members):
                del self._groups[group]
                for name in members:
                    del self._group_of[name]

    def name(self, name: str) -> str:
        """Of a parameter that is only renamed."""
        return name if self._library is None else self._library.apply_renamings(name, self._renamings)

    def put(self, name: str, value: Tensor) -> dict[str, Tensor]:
        group = self._group_of.get(name)
        if group is None:
            return {self.name(name): value}
        waiting = self._waiting.setdefault(group, {})
        waiting[name] = value
        converter, members = self._groups[group]
        if len(waiting) < len(members):
            return {}
        converter = copy.deepcopy(converter)
        for member, pattern in members.items():  # in the order of names
            converter.collected_tensors[pattern].append(waiting[member])
        del self._waiting[group], waiting
        made = converter.convert(group, model=self._model, config=self._model.config)
        return {self.name(each): _one(tensor).contiguous() for each, tensor in made.items()}

    def converts(self, name: str) -> bool:
        return name in self._group_of


# ---- the library


def _library(model: Any) -> Any:
    """transformers.core_model_loading, where the model is one of transformers and that knows conversions."""
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None) if transformers is not None else None
    if kind is None or not isinstance(model, kind):
        return None
    try:
        library = importlib.import_module("transformers.core_model_loading")
        importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping  # noqa: B018
    except (ImportError, AttributeError):  # before 5.0 nothing was converted
        return None
    wanted = ("rename_source_key", "dot_natural_key", "apply_converters", "apply_renamings", "WeightConverter")
    return library if all(hasattr(library, name) for name in wanted) else None


def _table(model: Any, legacy: bool) -> list[Any]:
    table = importlib.import_module("transformers.conversion_mapping")
    return list(table.get_model_conversion_mapping(model, add_legacy=legacy))


def _used(model: Any) -> list[Any]:
    """What from_pretrained converted; of a model that it did not make, what it would. As revert_weight_conversion."""
    known = getattr(model, "_weight_conversions", None)
    if known is not None:
        return list(known)
    return [each for each in _table(model, legacy=False) if type(each).__name__ != "PrefixChange"]


def _of_kind(library: Any, mapping: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    converters = [each for each in mapping if isinstance(each, library.WeightConverter)]
    return [each for each in mapping if isinstance(each, library.WeightRenaming)], converters


def _leaves_first(operation: Any) -> bool:
    dims = [getattr(operation, name) for name in ("dim", "dim0", "dim1") if hasattr(operation, name)]
    return bool(dims) and all(isinstance(dim, int) and dim >= 1 for dim in dims)


def _one(value: Tensor | list[Tensor]) -> Tensor:
    return value[0] if isinstance(value, list) else value


def shapes_of(reverse: Reverse, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """By the names of files: what putting these in makes, without values."""
    found: dict[str, Tensor] = {}
    for name, (dtype, shape) in tensors.items():
        found.update(reverse.put(name, torch.empty(shape, dtype=dtype, device="meta")))
    return found
