"""What transformers leaves to the gradients of plain parameters: sums over tensor-parallel ranks, by hooks of its own.

A norm between a column and a row layer (the q and k norms of Qwen3) sees this rank's heads alone, so its gradient is a
part of the sum. transformers puts a hook on such a parameter at its first forward, which all-reduces `param.grad` when
autograd has accumulated it. zeor takes gradients away as they arrive, sums them over ranks once per step (Note [Partial
gradients] in memory/placed.py), and tells transformers' own bookkeeping that the hook is there already.

What is relied on is read by tests/parallel/test_internals.py: the style's name in the model's plan, the names of two
functions inside `install_forward`, and a dictionary that one of them remembers hooked parameters in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from zeor.memory.placed import is_placed

STYLE = "replicated_with_grad_allreduce"  # in a plan
FORWARD = "ReplicatedWithGradAllReduce.install_forward.<locals>.tp_forward"
HOOK = "ReplicatedWithGradAllReduce.install_forward.<locals>._all_reduce_grad"
REMEMBERED = "is_already_hooked"


class Hooked(NamedTuple):
    """A module whose parameters' gradients transformers sums: which of its parameters have the hook, by name."""

    name: str
    module: nn.Module
    done: dict[str, Any]

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return {attr: param for attr, param in self.module._parameters.items() if param is not None}


def find_hooked(model: nn.Module) -> list[Hooked]:
    """RuntimeError, naming a module, where the model's plan asks for such sums and transformers does not make them as
    it did in the versions known here."""
    found = []
    styles: dict[str, str] = getattr(model, "tp_plan", None) or {}
    wanted = {name for name, style in styles.items() if style == STYLE}
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if getattr(forward, "__qualname__", "") == FORWARD:
            done = _variables(forward).get(REMEMBERED)
            if isinstance(done, dict):
                found.append(Hooked(name, module, done))
                continue
        elif not (getattr(module, "_is_hooked", False) and _generic(name) in wanted):
            continue
        raise RuntimeError(
            f"The gradients of {name!r} are parts of sums over tensor-parallel ranks, and this version of transformers "
            "sums them in a way that zeor does not know; use transformers 5.22 or 5.23, or a plan without "
            f"{STYLE!r}."
        )
    return found


def _variables(function: Any) -> dict[str, Any]:
    """What a function remembers from where it was defined."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    return {name: cell.cell_contents for name, cell in cells}


def _generic(name: str) -> str:
    """As plans name modules: with a star for the number of a layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def partial_params(hooked: list[Hooked]) -> Iterator[Tensor]:
    """Those that are plain: of a DTensor placements tell."""
    for each in hooked:
        yield from (param for param in each.params.values() if not is_placed(param))


def mark(hooked: list[Hooked]) -> None:
    """transformers finds its hooks in place, and there are none."""
    for each in hooked:
        for attr, param in each.params.items():
            each.done[attr] = param
            hooks = param._post_accumulate_grad_hooks
            for key in [key for key, hook in (hooks or {}).items() if getattr(hook, "__qualname__", "") == HOOK]:
                del hooks[key]


def unmark(hooked: list[Hooked]) -> None:
    """The model is no longer sharded: its next forward puts the hooks on."""
    for each in hooked:
        each.done.clear()
