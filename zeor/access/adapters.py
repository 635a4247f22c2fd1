"""What peft has put around a model, undone in names and values: the parameters of the model without adapters.

    base_model.model.layers.0.q_proj.base_layer.weight        ->  layers.0.q_proj.weight, to which scale * B A is added
    base_model.model.head.modules_to_save.default.weight      ->  head.weight, in the place of the original module's

peft is never imported: its layers are known by what they are made of. What cannot be merged by adding a product (DoRA,
convolutions, other adapters than LoRA's) is refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

MERGED_NBYTES = 32 << 20  # of a product, made at a time


class Product(NamedTuple):
    """scale * B A, which is added to a parameter. A and B by their names."""

    a: str
    b: str
    scale: float
    transposed: bool  # the parameter is kept as (in, out)


class Outside(NamedTuple):
    """A parameter as the model without adapters has it: its name there, and what is added to it."""

    name: str
    adds: tuple[Product, ...] = ()

    @property
    def factors(self) -> tuple[str, ...]:
        return tuple(name for product in self.adds for name in (product.a, product.b))


def without_adapters(model: nn.Module) -> dict[str, Outside]:
    """Every parameter that the model without adapters has too, by its name in this one. ValueError where an adapter
    cannot be merged."""
    return _Reading(model).found


def add_product(into: Tensor, product: Product, factors: Mapping[str, Tensor]) -> None:
    """Adds it, as peft's merge does; where it is large by some rows at a time."""
    a, b = (factors[name].to(into.dtype) for name in (product.a, product.b))
    left, right = (a.t(), b.t()) if product.transposed else (b, a)
    rows = max(1, MERGED_NBYTES // (into.shape[1] * into.element_size()))
    for begin in range(0, into.shape[0], rows):
        if product.transposed and rows >= into.shape[0]:
            into.add_((b @ a).t() * product.scale)  # in this order: the bits of peft's
        else:
            into[begin : begin + rows].add_((left[begin : begin + rows] @ right) * product.scale)


class _Reading:
    """Of one model."""

    def __init__(self, model: nn.Module):
        self._names = {id(param): name for name, param in model.named_parameters()}
        uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
        self._tied = {param for param, count in uses.items() if count > 1}
        self._adds: dict[str, tuple[Product, ...]] = {}
        self._inner = _path_of_base(model)
        self._shortened: dict[str, str] = {}  # paths that peft has lengthened -> what they were
        self._inside: list[str] = []  # paths of what is not in the model without adapters
        for path, module in model.named_modules():
            if isinstance(getattr(module, "base_layer", None), nn.Module):
                self._layer(path, module)
            elif isinstance(getattr(module, "original_module", None), nn.Module):
                self._saved(path, module)
        self.found = {name: out for name in self._names.values() if (out := self._outside(name)) is not None}

    def _layer(self, path: str, module: Any) -> None:
        """A layer of an adapter, around the one that was there."""
        self._shortened[f"{path}.base_layer"] = path
        names = getattr(module, "adapter_layer_names", ())
        self._inside.extend(f"{path}.{name}" for name in names)
        if getattr(module, "disable_adapters", False):
            return
        active = [
            name for name in module.active_adapters
            if name not in module.merged_adapters and any(name in getattr(module, kind) for kind in names)
        ]  # fmt: skip
        if active:
            weight = getattr(module.base_layer, "weight", None)
            if id(weight) not in self._names or not _is_plain_lora(module, active):
                raise ValueError(
                    f"zeor.push cannot merge the adapter of {path!r} ({type(module).__name__}), which is more than a "
                    "product that is added to one weight; push a model with plain LoRA, or merge a copy of this one "
                    "inside `with zeor.full_params(model, to_rank=0):`."
                )
            name = self._names[id(weight)]
            if id(weight) in self._tied:
                raise ValueError(
                    f"zeor.push cannot merge the adapter of {path!r}: its weight {name!r} is tied to another layer's, "
                    "which would change too; leave tied layers without adapters, or untie them."
                )
            self._adds[name] = tuple(self._product(module, adapter) for adapter in active)

    def _product(self, module: Any, adapter: str) -> Product:
        if adapter in module.lora_embedding_A:
            a, b, transposed = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter], True
        else:
            a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            transposed = bool(getattr(module, "fan_in_fan_out", False))
        return Product(self._names[id(a)], self._names[id(b)], float(module.scaling[adapter]), transposed)

    def _saved(self, path: str, module: Any) -> None:
        """A module of which adapters have copies that train as a whole."""
        copies = getattr(module, "modules_to_save", None)
        if copies is None:
            raise ValueError(
                f"zeor.push knows nothing of the adapter of {path!r} ({type(module).__name__}); merge a copy of the "
                "model inside `with zeor.full_params(model, to_rank=0):`."
            )
        used = "" if module.disable_adapters else next((name for name in module.active_adapters if name in copies), "")
        chosen = f"{path}.modules_to_save.{used}" if used else f"{path}.original_module"
        self._shortened[chosen] = path
        others = [f"{path}.original_module", *(f"{path}.modules_to_save.{name}" for name in copies)]
        self._inside.extend(each for each in others if each != chosen)

    def _outside(self, name: str) -> Outside | None:
        if any(name.startswith(f"{path}.") for path in self._inside):
            return None
        if not name.startswith(self._inner):
            raise ValueError(
                f"zeor.push: parameter {name!r} belongs to an adapter that is no part of the model's layers (a prompt, "
                "a prefix), and cannot be merged; push the base model."
            )
        plain = name
        for path, short in sorted(self._shortened.items(), key=lambda item: -len(item[0])):  # the innermost first
            if plain.startswith(f"{path}."):
                plain = short + plain.removeprefix(path)
        return Outside(plain.removeprefix(self._inner), self._adds.get(name, ()))


def _path_of_base(model: Any) -> str:
    """What peft's own wrapper puts before all names."""
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return ""
    base = model.get_base_model()
    return next(f"{path}." for path, module in model.named_modules() if module is base and path)


def _is_plain_lora(module: Any, active: list[str]) -> bool:
    """Whether each of these is scale * B A of matrices, and nothing beside."""
    if not all(hasattr(module, name) for name in ("lora_A", "lora_B", "lora_embedding_A", "scaling")):
        return False
    variants = {*getattr(module, "lora_variant", ()), *module.lora_magnitude_vector}
    weight = module.base_layer.weight
    plain = weight.dim() == 2 and weight.is_floating_point() and not variants & set(active)
    return plain and all(_is_product(module, name) for name in active)


def _is_product(module: Any, adapter: str) -> bool:
    if adapter in module.lora_embedding_A:
        return True
    layers = (module.lora_A[adapter], module.lora_B[adapter])
    return all(layer.weight.dim() == 2 and layer.bias is None for layer in layers)
