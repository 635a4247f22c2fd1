"""torch.compile and sharding: unit by unit with no recompiles after the second step, the same loss, plain names.

On the CPU with a backend that needs no C++ compiler; tests/gpu/test_compile_gpu.py does the same with inductor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests.parity.calls import STAGES, finish, mse, parts_of

BACKEND = {"backend": "aot_eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.first, self.last = nn.Parameter(torch.tensor(1.1)), nn.Linear(3, 5), nn.Linear(5, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.gain


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train(how: str, stage: int, steps: int = 4) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Losses, compiled graphs after each step, and the parameters at the end."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(3)
    model: Any = Net().double()
    blocks = list(model.blocks)
    if how == "in place":
        for block in blocks:
            block.compile(fullgraph=True, **BACKEND)
    if how == "wrapped":
        for number, block in enumerate(blocks):
            model.blocks[number] = torch.compile(block, **BACKEND)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, units=[Block], compile=BACKEND if how == "by option" else False)
    if how == "after shard":
        for block in blocks:
            block.compile(**BACKEND)
    called = torch.compile(model, **BACKEND) if how == "whole" else model
    losses, compiled = [], []
    for step in range(steps):
        loss = mse(called, [parts_of(step, dist.get_world_size())[dist.get_rank()]])
        loss.backward()
        finish(optimizer)
        losses.append(loss.item())
        compiled.append(graphs())
        if step == 1:
            torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.error_on_recompile = False
    assert list(model.state_dict()) == list(Net().state_dict()), "names are not the plain model's"
    assert [unit.name for unit in vars(model)["_zeor_sharded"].engine.units][1:] == [f"blocks.{i}" for i in range(3)]
    with zeor.full_params(called):
        return losses, compiled, {name: value.clone() for name, value in model.state_dict().items()}


def compare_compiled(how: str) -> None:
    for stage in STAGES:
        losses, compiled, values = train(how, stage)
        want, none, wanted = train("not at all", stage)
        assert none[-1] == 0 and compiled[1] >= 1, f"compiled {compiled}, plain {none}"
        assert compiled[1] == compiled[-1], f"stage {stage} recompiled: graphs after each step {compiled}"
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=0, atol=1e-12)
        for name, value in wanted.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("how", ["in place", "wrapped", "after shard", "by option"])
def test_compiled_units_do_not_recompile_and_keep_loss_and_names(ranks, how):
    ranks(compare_compiled, 2, how, timeout=300)


@pytest.mark.long
def test_a_whole_model_compiled_breaks_its_graph_at_units_and_is_right(ranks):
    ranks(compare_compiled, 2, "whole", timeout=300)


@pytest.mark.long
def test_a_wrapped_model_is_told_to_compile_in_place():
    with pytest.raises(TypeError, match=r"wrapped by torch.compile; .* model.compile\(\) .* block.compile\(\)"):
        zeor.shard(torch.compile(Net(), **BACKEND))


# ---- zeor.shard(..., compile=)


class Talkative(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            print(end="")  # nothing, but torch.compile cannot know
        return super().forward(x)


def told(caplog: pytest.LogCaptureFixture, rows: list[int], options: Any, block: type = Block) -> list[str]:
    """What one process is told in steps over batches of so many rows, each followed by an evaluation."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Net()
    model.blocks = nn.ModuleList(block() for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, compile=options)
    caplog.clear()
    for count in rows:
        model(torch.ones(count, 3)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(count, 3))
    return [record.message for record in caplog.records if record.message.startswith("compile=")]


@pytest.mark.long
def test_late_graphs_and_graph_breaks_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, [4, 4, 4, 4], BACKEND) == []
    late = told(caplog, [4, 4, 4, 5, 6, 7], BACKEND)
    assert len(late) == 1 and "another graph at step 4" in late[0]
    assert told(caplog, [4, 4, 4, 5, 6, 7], {**BACKEND, "dynamic": True}) == []
    broken = told(caplog, [3, 3, 3], BACKEND, Talkative)
    assert len(broken) == 1 and "broke graphs at 1 place(s)" in broken[0]


@pytest.mark.long
def test_what_is_compiled_already_stays() -> None:
    model = Net()
    model.blocks[0].compile(**BACKEND)
    before = model.blocks[0]._compiled_call_impl
    zeor.shard(model, compile=BACKEND)
    assert model.blocks[0]._compiled_call_impl is before
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    assert model.first._compiled_call_impl is None and model._compiled_call_impl is None


def test_what_compile_does_not_know_is_refused_before_anything_changes() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"compile='fast' is not known; use False, True, or options of torch.compile"):
        zeor.shard(model, compile="fast")
    for wrong in ({"foo": 1}, {"backend": "nobody's"}, {"mode": "nobody's"}):
        with pytest.raises(ValueError, match=r"torch.compile does not take compile=\{'\w+': "):
            zeor.shard(model, compile=wrong)
    with pytest.raises(ValueError, match=r"'eager'\} does not repeat random numbers where a unit is computed again"):
        zeor.shard(model, compile={"backend": "eager"}, recompute=True)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    zeor.shard(model)


def test_unshard_leaves_blocks_as_they_were() -> None:
    model = Net()
    model.blocks[0].compile(**BACKEND)
    zeor.shard(model, compile=BACKEND)
    zeor.unshard(model)
    assert [block._compiled_call_impl is not None for block in model.blocks] == [True, False, False]


def test_a_model_without_blocks_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    zeor.shard(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), compile=BACKEND)
    assert [record.message for record in caplog.records if "no blocks" in record.message]
