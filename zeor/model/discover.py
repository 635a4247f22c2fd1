"""Finding units: which modules are gathered, freed and reduced as one.

Pure bookkeeping over a module tree; it allocates nothing and knows no mesh. The first unit is always
the root's: everything no other unit holds, including parameters tied across units.

Note [How units are found]
~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Repeated blocks: the children of a ModuleList or Sequential that share a class with a sibling and
   hold parameters are units, outermost first.
2. What is left is walked by size: a module of at most a quarter of the model, or one that
   holds parameters of its own (its children may be used without being called: attention's output
   projection is), becomes a unit if it is at least a hundredth of the model. Smaller ones stay with
   the root: one collective per tiny layer is the field's most common reason for slowness.
3. A parameter whose owners lie in several units goes to the root.
4. So do small ones: see Note [Small parameters] in keys.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

Owner = tuple[nn.Module, str]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass
class UnitSpec:
    """A unit to be: its module and its parameters by name, each with every place that holds it."""

    name: str
    module: nn.Module
    params: list[tuple[str, nn.Parameter, list[Owner]]]


def find_units(model: nn.Module, units: Sequence[nn.Module | type] | None = None, small: int = 0) -> list[UnitSpec]:
    """The root's unit first, then the others in the order of registration. Units without parameters of
    their own are left out, the root's excepted. `small`: elements of a parameter that goes to the root's."""
    names = {module: name for name, module in model.named_modules()}
    chosen = _by_hand(model, units, names) if units is not None else _by_itself(model)
    home = _homes(model, set(chosen))
    specs = {model: UnitSpec("root", model, [])}
    for module in model.modules():
        if module in chosen and module is not model:
            specs[module] = UnitSpec(names[module], module, [])
    for name, param, owners in named_owners(model):
        homes = {home[module] for module, _ in owners}
        unit = homes.pop() if len(homes) == 1 and param.numel() > small else model
        specs[unit].params.append((name, param, owners))
    return [spec for spec in specs.values() if spec.params or spec.module is model]


def named_owners(model: nn.Module) -> list[tuple[str, nn.Parameter, list[Owner]]]:
    """Every parameter once, under its first name, with all the places that hold it."""
    found: dict[nn.Parameter, tuple[str, list[Owner]]] = {}
    for prefix, module in model.named_modules():
        for attr, param in module._parameters.items():
            if param is not None:
                name = f"{prefix}.{attr}" if prefix else attr
                found.setdefault(param, (name, []))[1].append((module, attr))
    return [(name, param, owners) for param, (name, owners) in found.items()]


def _homes(model: nn.Module, chosen: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    """For each module, the innermost chosen module that contains it."""
    home: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, unit: nn.Module) -> None:
        if module in home:
            return
        unit = module if module in chosen else unit
        home[module] = unit
        for child in module.children():
            visit(child, unit)

    visit(model, model)
    return home


def _by_hand(model: nn.Module, units: Sequence[nn.Module | type], names: dict[nn.Module, str]) -> list[nn.Module]:
    chosen: list[nn.Module] = []
    for wanted in units:
        if isinstance(wanted, nn.Module):
            if wanted not in names:
                raise ValueError(f"units= holds a {type(wanted).__name__} that is not part of the model.")
            chosen.append(wanted)
        elif isinstance(wanted, type):
            of_class = [module for module in model.modules() if isinstance(module, wanted)]
            if not of_class:
                raise ValueError(f"units= names the class {wanted.__name__}, which the model does not contain.")
            chosen.extend(of_class)
        else:
            raise TypeError(f"units= holds {wanted!r}; give modules of the model or module classes.")
    for module in chosen:
        if isinstance(module, _CONTAINERS):
            raise ValueError(f"units= holds {names[module]!r}, a container that is never called; name its children.")
    return chosen


def _by_itself(model: nn.Module) -> list[nn.Module]:
    total = numel(model)
    blocks = repeated_blocks(model)
    chosen = list(blocks)
    _by_size(model, set(blocks), total, chosen)
    return chosen


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Step 1 of Note [How units are found]."""
    found: list[nn.Module] = []
    _repeated(model, found)
    return found


def _repeated(module: nn.Module, found: list[nn.Module]) -> None:
    """Step 1 of Note [How units are found]."""
    children = list(module.children())
    taken: set[nn.Module] = set()
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        # A parametrization (weight_norm, say) gives each module a class of its own.
        kinds = Counter(type_before_parametrizations(child) for child in children if numel(child))
        for child in children:
            repeats = kinds[type_before_parametrizations(child)] > 1
            if repeats and numel(child) and not isinstance(child, _CONTAINERS):
                found.append(child)
                taken.add(child)
    for child in children:
        if child not in taken:
            _repeated(child, found)


def _by_size(module: nn.Module, blocks: set[nn.Module], total: int, chosen: list[nn.Module]) -> None:
    """Step 2 of Note [How units are found]."""
    for child in module.children():
        if child in blocks:
            continue
        size, holds_blocks = numel(child), any(m in blocks for m in child.modules())
        splits = isinstance(child, _CONTAINERS) or holds_blocks
        atomic = bool(child._parameters) and not holds_blocks
        if splits or (size > total // 4 and not atomic):
            _by_size(child, blocks, total, chosen)
        elif size * 100 >= total:
            chosen.append(child)


def numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
