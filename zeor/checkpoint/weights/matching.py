"""Which tensor of a file goes where in a model: by name, shape and kind of number; names alone, no values.

A tied parameter is one target with several names, of which one suffices. What does not fit is one sentence that lists
names, with the rename= that would help where a prefix is all that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zeor.checkpoint.files.names import listed
from zeor.checkpoint.weights.conversions import WeightSource

Rename = Callable[[str], "str | None"]  # the model's name of a tensor in a file; None leaves it out


@dataclass
class Target:
    """A parameter or persistent buffer: every name it has and every place that holds it."""

    names: list[str]
    tensor: Tensor
    is_buffer: bool
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass
class Match:
    pairs: list[tuple[Target, WeightSource]]
    missing: list[str]
    unexpected: list[str]


def find_targets(model: nn.Module) -> list[Target]:
    """What a state dict of the model would hold, in its order; shared tensors once."""
    found: dict[int, Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for is_buffer, tensors in ((False, module._parameters), (True, persistent)):
            for attr, tensor in tensors.items():
                if tensor is not None:
                    target = found.setdefault(id(tensor), Target([], tensor, is_buffer))
                    target.names.append(f"{prefix}.{attr}" if prefix else attr)
                    target.owners.append((module, attr))
    return list(found.values())


def match(
    targets: Sequence[Target],
    entries: dict[str, WeightSource],
    rename: Rename | None,
    path: str,
    strict: bool,
    elsewhere: Container[str] = (),
) -> Match:
    """Pairs of targets and tensors. ValueError with every name that does not fit. `elsewhere`: names that other ranks
    have a place for."""
    renamed = _renamed(entries, rename, path)
    known = {name for target in targets for name in target.names}
    result = Match([], [], [name for name in renamed if name not in known and name not in elsewhere])
    wrong: list[str] = []
    for target in targets:
        given = [name for name in target.names if name in renamed]
        for name in given:
            text = _misfit(name, target.tensor, renamed[name])
            if text:
                wrong.append(text)
        if given:
            result.pairs.append((target, renamed[given[-1]]))  # of several the last, as load_state_dict does it
        else:
            result.missing.append(target.name)
    if wrong or (strict and (result.missing or result.unexpected)):
        raise ValueError(_sentence(path, result, wrong, strict))
    return result


def _renamed(entries: dict[str, WeightSource], rename: Rename | None, path: str) -> dict[str, WeightSource]:
    if rename is None:
        return entries
    result: dict[str, WeightSource] = {}
    origin: dict[str, str] = {}
    for name, entry in entries.items():
        new = rename(name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(f"rename({name!r}) gave {new!r}; it must give a name, or None to leave the tensor out.")
        if new in result:
            raise ValueError(f"rename gives {origin[new]!r} and {name!r} of {path} the same name {new!r}.")
        result[new], origin[new] = entry, name
    return result


def _misfit(name: str, tensor: Tensor, entry: WeightSource) -> str:
    if tuple(tensor.shape) != entry.shape:
        return f"{name!r} has shape {entry.shape} in the file and {tuple(tensor.shape)} in the model"
    if kind_of(tensor.dtype) != kind_of(entry.dtype):
        return f"{name!r} is {entry.dtype} in the file and {tensor.dtype} in the model"
    return ""


def kind_of(dtype: torch.dtype) -> str:
    """Numbers of one kind may be converted into each other."""
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _sentence(path: str, found: Match, wrong: list[str], strict: bool) -> str:
    parts = []
    if strict and found.missing:
        parts.append(f"{len(found.missing)} missing: {listed([repr(name) for name in found.missing])}")
    if strict and found.unexpected:
        parts.append(f"{len(found.unexpected)} unexpected: {listed([repr(name) for name in found.unexpected])}")
    if wrong:
        parts.append(f"{len(wrong)} of another kind: {listed(wrong)}")
    if wrong:
        advice = "Load the files of this very architecture"
    else:
        prefix = _prefix_hint(found.missing, found.unexpected)
        advice = f"Pass rename={prefix}" if prefix else "Pass rename= to map the file's names to the model's"
        advice += ", or strict=False to load what fits"
    return f"{path} does not fit the model; {'; '.join(parts)}. {advice}."


def _prefix_hint(missing: list[str], unexpected: list[str]) -> str:
    """The rename that would do where names differ by a prefix alone."""
    for short, long, code in ((missing, unexpected, "removeprefix({0!r})"), (unexpected, missing, "")):
        for name in short[:1]:
            prefix = next((other[: -len(name)] for other in long if other.endswith("." + name)), "")
            if prefix and sum(prefix + each in set(long) for each in short) * 2 > len(short):
                return f"lambda name: name.{code.format(prefix)}" if code else f"lambda name: {prefix!r} + name"
    return ""
