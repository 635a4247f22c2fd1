"""The planner on its own: it makes no tensor, is exact at any world, and refuses what it does not know.

That its numbers are what the engine really holds is in tests/step/test_memory.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zeor
from zeor.layout import lay_out
from zeor.tools.gpt import GPT, GPTConfig


class NothingIsMade(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)), f"{func} made a tensor"
        return result


class Weights(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        return build()


def test_predicting_a_7b_model_on_4096_ranks_makes_no_tensor() -> None:
    model = on_meta(lambda: GPT(GPTConfig(layers=32, width=4096, heads=32, context=4096, vocab=50257)))
    with NothingIsMade():
        found = zeor.predict(model, world=4096, stage=3, precision="bf16")
    numel = sum(param.numel() for param in model.parameters())
    per_element = 2 + 2 + 2 + 8  # compute, gradient, the other half of the master, moments
    assert found.resident == pytest.approx(per_element * numel / 4096, rel=0.01)


@pytest.mark.parametrize("world", [1, 3, 5, 16, 64])
def test_moments_are_those_of_the_rank_with_the_most_elements(world: int) -> None:
    """The first lane's gaps lie with early ranks, the others' with the last: no lane alone tells which rank it is."""
    shapes = [[(1,), (3001,), (1,), (700, 13)], [(5, 1)], [(67, 3), (3,)]]
    model = on_meta(lambda: nn.ModuleList([Weights(part) for part in shapes]))
    found = zeor.predict(model, world=world, stage=2, units=[Weights]).moments
    layouts = [lay_out(part, world) for part in shapes]
    elements = [sum(s.numel for layout in layouts for s in layout.segments(rank)) for rank in range(world)]
    assert found == 2 * 4 * max(elements)


def test_an_optimizer_is_a_name_or_a_number() -> None:
    model = on_meta(lambda: nn.Linear(64, 64, bias=False))
    assert zeor.predict(model, optimizer=3).moments == 3 * 4 * 64 * 64
    assert zeor.predict(model, optimizer="Adagrad").moments == 4 * 64 * 64
    assert zeor.predict(model, optimizer="SGD").moments == 0


def test_mistakes_get_one_sentence() -> None:
    model = on_meta(lambda: nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"optimizer='RMSProp' is not known to the planner \(did you mean 'RMSprop'"):
        zeor.predict(model, optimizer="RMSProp")
    with pytest.raises(TypeError, match=r"zeor.predict has no option 'prefech' \(did you mean 'prefetch'\?\)"):
        zeor.predict(model, prefech=2)
    with pytest.raises(ValueError, match="stage=4 is not a ZeRO stage"):
        zeor.predict(model, stage=4)
    with pytest.raises(TypeError, match=r"optimizer=-1; give its name in torch\.optim, such as 'AdamW', or the number"):
        zeor.predict(model, optimizer=-1)
    with pytest.raises(ValueError, match="hierarchy='auto': hosts that are elsewhere cannot be asked"):
        zeor.predict(model, world=4, hierarchy="auto")
