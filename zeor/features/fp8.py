"""precision="fp8": linears that multiply in 8 bits, by torchao's float8 training.

Which linears (`choose`), whether the machine can (`check`), and their modules while the model is sharded: each stays
the object that it was and changes its class, so that hooks, names, ties and parameters stay. Where weights rest as
codes the class is another one (coded_linear.py; Note [Codes] in memory/float8.py). Inside zeor.full_params, and after
zeor.unshard, they are plain linears.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zeor.memory import device as devices
from zeor.memory.float8 import CODE_ATTRIBUTE
from zeor.model.discover import repeated_blocks
from zeor.plan import Float8, Plan
from zeor.step.coded import CodedLane
from zeor.step.extension import Extension
from zeor.step.unit import Slot

GRANULE = 16  # both sides of a weight are multiples of it: what float8 units take
_ROUTERS = {"router", "gate", "gating", "switch"}  # a linear of this very name may choose experts: see _routes
log = logging.getLogger("zeor")


def check(fp8: Float8, device: torch.device) -> None:
    """One sentence where torchao is missing, or the device has no float8 units."""
    try:
        from torchao.float8 import float8_training_tensor  # noqa: F401 (is it there? 0.13 gave it this name)
    except ImportError as error:
        raise ImportError(
            "precision='fp8' computes by torchao 0.13 or newer, which is not installed here; run `pip install -U "
            "torchao`, or use precision='bf16'."
        ) from error
    lacks = devices.lacks_float8(device, fp8.recipe)
    if lacks:
        raise RuntimeError(f"precision='fp8' with the recipe {fp8.recipe!r} {lacks}; use precision='bf16' here.")


# ---- which linears


def choose(
    model: nn.Module, fp8: Float8, units: Sequence[nn.Module | type] | None
) -> tuple[dict[str, nn.Linear], Counter[str]]:
    """The linears by name, and how many others are not among them, by reason."""
    chosen: dict[str, nn.Linear] = {}
    left: Counter[str] = Counter()
    inside = _inside_blocks(model, units)
    shared = _shared_weights(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            reason = _why_not(module, shared) or _filtered(model, name, module, fp8, module in inside)
            if reason:
                left[reason] += 1
            else:
                chosen[name] = module
    return chosen, left


def _why_not(linear: nn.Linear, shared: set[nn.Parameter]) -> str:
    """What no filter can overrule."""
    if _is_float8(linear):
        return "converted by yourself"
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
        return "of a class of their own"
    if linear.weight in shared:
        return "with a weight that another module uses too"
    if not linear.weight.numel() or linear.in_features % GRANULE or linear.out_features % GRANULE:
        return f"with a side that is no multiple of {GRANULE}"
    return ""


def _filtered(model: nn.Module, name: str, linear: nn.Linear, fp8: Float8, inside: bool) -> str:
    if fp8.filter is not None:
        return "" if fp8.filter(linear, name) else "by your filter"
    if not inside:
        return "outside repeated blocks"
    if _routes(model, name, linear):
        return "that route"
    return "of adapters" if any(word.startswith("lora") for word in name.split(".")) else ""


def _routes(model: nn.Module, name: str, linear: nn.Linear) -> bool:
    """Whether it chooses experts. The gate of a gated MLP (SwiGLU) often has a router's name: it stands beside a linear
    of its own shape, or it is as wide as its input at least, and a router has one output for each expert."""
    parent, _, last = name.rpartition(".")
    if last not in _ROUTERS or linear.out_features >= linear.in_features:
        return False
    beside = model.get_submodule(parent).named_children()
    others = [each for at, each in beside if each is not linear and not at.startswith("lora")]
    return not any(isinstance(each, nn.Linear) and each.weight.shape == linear.weight.shape for each in others)


def _inside_blocks(model: nn.Module, units: Sequence[nn.Module | type] | None) -> set[nn.Module]:
    """Modules below a repeated block, or below a unit that the user named. A block that is a linear itself may be a
    head, and is not below one."""
    blocks = repeated_blocks(model)
    for wanted in units or ():
        blocks += [m for m in model.modules() if m is wanted or (isinstance(wanted, type) and isinstance(m, wanted))]
    return {inner for block in blocks for inner in block.modules() if inner is not block}


def _shared_weights(model: nn.Module) -> set[nn.Parameter]:
    holders = [param for module in model.modules() for param in module._parameters.values() if param is not None]
    return {param for param, count in Counter(holders).items() if count > 1}


def _is_float8(module: nn.Module) -> bool:
    return any(base.__name__ == "Float8Linear" for base in type(module).__mro__)


# ---- their modules


class Float8Linears(Extension):
    """The linears of one model that multiply in 8 bits. `coded`: trained weights rest as codes."""

    def __init__(self, linears: dict[str, nn.Linear], left: Counter[str], fp8: Float8, coded: bool, emulate: bool):
        from zeor.features import coded_linear

        self._fp8, self._left, self._emulates = fp8, left, emulate
        self._attributes, kind, config = _as_float8(fp8, emulate)
        self._names = coded_linear.CODES, coded_linear.SCALE
        self._code = config.cast_config_weight.target_dtype
        marked = _mark(linears.values(), self._code) if coded else []
        self.classes = {linear: coded_linear.CodedLinear if linear in marked else kind for linear in linears.values()}
        self._bound: list[tuple[nn.Module, CodedLane, int]] = []
        self._handles: list[Any] = []
        self.resume()

    def resume(self) -> None:
        self._here = True
        for linear, kind in self.classes.items():
            linear.__class__ = kind
            vars(linear).update(self._attributes)
        self._hand_codes()

    def pause(self) -> None:
        """Plain linears, as they came."""
        self._here = False
        for linear in self.classes:
            linear.__class__ = nn.Linear
            for name in (*self._attributes, *self._names):
                vars(linear).pop(name, None)

    def undo(self) -> None:
        """For good: the model is not sharded after all, or no longer."""
        self.pause()
        self.end()
        self.mark(False)

    def end(self) -> None:
        """Others have the linears."""
        for handle in self._handles:
            handle.remove()

    def mark(self, here: bool) -> None:
        """Whether lanes that are made now are to hold codes of these weights: while it is paused, others may be."""
        if here:
            for module in dict.fromkeys(module for module, _, _ in self._bound):
                vars(module)[CODE_ATTRIBUTE] = self._code
        else:
            _unmark(self.classes)

    def bind(self, model: nn.Module, slots: Sequence[Slot]) -> None:
        """Lanes are there: each linear gets the codes of its weight."""
        for slot in slots:
            if isinstance(slot.lane, CodedLane):
                self._bound += [(module, slot.lane, slot.index) for module, _ in slot.owners]
        self._hand_codes()
        for module in _outermost_compiled(model):
            inner = set(module.modules())
            lanes = list(dict.fromkeys(lane for linear, lane, _ in self._bound if linear in inner))
            if lanes:
                self._show_native_inside(module, lanes)

    def _show_native_inside(self, module: nn.Module, lanes: Sequence[CodedLane]) -> None:
        """torch.compile makes nothing of a parameter whose class answers reads by itself. Inside a compiled module only
        its linears look at these parameters, and they read no value."""

        def show(native: bool) -> None:
            for lane in lanes if self._here else ():
                lane.show_native(native)

        before, after = torch._dynamo.disable(lambda *_: show(True)), torch._dynamo.disable(lambda *_: show(False))
        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _hand_codes(self) -> None:
        codes, scale = self._names
        for module, lane, index in self._bound:
            vars(module).update({codes: lane.codes[index], scale: lane.scale_of[index]})

    def tell(self) -> None:
        """One line: which linears, and why others are not."""
        found = len(self.classes)
        coded = sum(CODE_ATTRIBUTE in vars(linear) for linear in self.classes)
        others = "; ".join(f"{count} {reason}" for reason, count in self._left.most_common())
        log.info(
            "fp8 (%s): %d of %d linears%s%s", self._fp8.recipe, found, found + sum(self._left.values()),
            f", {coded} of them with weights as 8-bit codes" if coded else "", f"; not: {others}" if others else "",
        )  # fmt: skip
        if not found:
            log.warning("precision='fp8': no linear computes in 8 bits; zeor.Float8(filter=...) can choose others.")
        elif self._emulates:
            log.warning("precision='fp8' is emulated on a CPU, which is slow and serves tests; speed needs a GPU.")


def _as_float8(fp8: Float8, emulate: bool) -> tuple[dict[str, Any], type, Any]:
    """(attributes, class, config) of a linear that torchao converts."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(fp8.recipe)
    config = dataclasses.replace(config, emulate=emulate, pad_inner_dim=fp8.pad)
    plain = nn.Linear(GRANULE, GRANULE, device="meta")
    made = convert_to_float8_training(nn.Sequential(plain), config=config)[0]
    return {name: value for name, value in vars(made).items() if name not in vars(plain)}, type(made), config


def convert(model: nn.Module, plan: Plan, units: Any, device: torch.device, world: int) -> Float8Linears | None:
    """The chosen linears, converted in place; None where the plan asks for no fp8."""
    fp8 = plan.precision.float8
    if fp8 is None:
        return None
    check(fp8, device)
    if fp8.codes and plan.streams:
        raise ValueError(
            "Float8.codes=True holds codes where the update is on the device, and offload=, moments= or delay= stream "
            "it chunk by chunk; leave codes= out: weights then rest in bf16 and are cast at each call (the same bits)."
        )
    linears, left = choose(model, fp8, units)
    return Float8Linears(linears, left, fp8, _codes(fp8, plan, world), device.type == "cpu")


# ---- which weights rest as codes


def _codes(fp8: Float8, plan: Plan, world: int) -> bool:
    """By themselves where there are several ranks: on one they cost a byte more than bf16 with its split master."""
    return fp8.recipe == "tensorwise" and not plan.streams and (world > 1 if fp8.codes is None else fp8.codes)


def _mark(linears: Iterable[nn.Linear], dtype: torch.dtype) -> list[nn.Linear]:
    """Those whose weights are trained, so that their lanes are made of codes (spec/keys.py)."""
    trained = [linear for linear in linears if linear.weight.requires_grad]
    for linear in trained:
        vars(linear)[CODE_ATTRIBUTE] = dtype
    return trained


def _unmark(linears: Iterable[nn.Linear]) -> None:
    for linear in linears:
        vars(linear).pop(CODE_ATTRIBUTE, None)


@contextlib.contextmanager
def foreseen(model: nn.Module, plan: Plan, units: Any, world: int) -> Iterator[None]:
    """Inside, weights are marked as `convert` would mark them, or has done, for whoever asks what lanes there are."""
    fp8, marked = plan.precision.float8, []
    converted = any(CODE_ATTRIBUTE in vars(module) for module in model.modules())
    if fp8 is not None and _codes(fp8, plan, world) and not converted:
        marked = _mark(choose(model, fp8, units)[0].values(), torch.float8_e4m3fn)
    try:
        yield
    finally:
        _unmark(marked)


# ---- torch.compile


def _outermost_compiled(module: nn.Module) -> list[nn.Module]:
    if module._compiled_call_impl is not None:
        return [module]
    return [found for child in module.children() for found in _outermost_compiled(child)]
