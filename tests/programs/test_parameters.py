"""What users do to parameters, item by item: right, or refused in one sentence, at every stage.

The random programs of test_programs.py mix these habits; here each stands alone, with the value it must give.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

import zeor

STAGES = [0, 1, 2, 3]
WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.run: Callable[[Block, Tensor, Any], Any] = lambda block, x, extra: block.lin(x)

    def forward(self, x: Tensor, extra: Any = None) -> Any:
        return self.run(self, x, extra)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        for block in self.blocks:
            x = block(x, extra)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(rank: int) -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank + 7))


Prepare, Loss, Build = Callable[[Net], Any], Callable[[Net, Tensor], Tensor], Callable[[], Net]


def plain_grads(prepare: Prepare, loss: Loss, build: Build = net) -> dict[str, Tensor]:
    """The mean over ranks of each rank's gradients, in one process."""
    world, total = dist.get_world_size(), {}
    for rank in range(world):
        model = build()
        prepare(model)
        loss(model, batch(rank)).backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                total[name] = total.get(name, 0) + param.grad / world
    return total


def compare(stage: int, prepare: Prepare, loss: Loss, build: Build = net) -> None:
    """Gradients under zeor equal plain ones."""
    wanted = plain_grads(prepare, loss, build)
    model = build()
    prepare(model)
    zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    loss(model, batch(dist.get_rank())).backward()
    with zeor.full_params(model, grads=True):
        found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        assert set(found) == set(wanted)
        for name, grad in found.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-9, atol=1e-9, msg=name)


def square(model: Net, x: Tensor) -> Tensor:
    return model(x).square().mean()


def in_block(run: Callable[[Block, Tensor, Any], Any]) -> Callable[[Net], None]:
    def prepare(model: Net) -> None:
        model.blocks[1].run = run

    return prepare


# ---- 1: detached reads


def check_detached(stage: int) -> None:
    compare(stage, in_block(lambda b, x, _: b.lin(x) - b.lin.weight.detach().mean(0)), square)
    compare(stage, in_block(lambda b, x, _: b.lin(x) * b.lin.bias.data), square)

    def proximal(model: Net, x: Tensor) -> Tensor:
        head = model.head.weight
        return square(model, x) + (model.blocks[0].lin(x) * head.detach().sum()).mean()

    if stage < 3:
        compare(stage, lambda model: None, proximal)
        model, _ = sharded(stage)
        copied = model.state_dict()["head.weight"].clone()
        assert not copied.requires_grad and copied.numpy().shape == (WIDTH, WIDTH)


def sharded(stage: int, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = net()
    return zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, **options)


@pytest.mark.parametrize("stage", STAGES)
def test_a_detached_read_stops_gradients(ranks, stage):
    ranks(check_detached, 2, stage)


# ---- 2: mutable arguments


@dataclass
class Inputs:
    x: Tensor
    seen: list


def check_containers(stage: int) -> None:
    def append(block: Block, x: Tensor, extra: list) -> Tensor:
        extra.append(block.lin.weight.square().sum())
        return block.lin(x)

    def loss(model: Net, x: Tensor) -> Tensor:
        extra: list = []
        y = model(x, extra)
        assert len(extra) == 1
        return y.square().mean() + extra[0]

    compare(stage, in_block(append), loss)


def check_root_containers(stage: int) -> None:
    """Under precision= the model's own arguments are cast, and what forward puts into them is the caller's."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, cache: dict, notes: list, inputs: Inputs) -> Tensor:
            y = self.lin(cache["x"]) + self.lin(notes[0]) + self.lin(inputs.x)
            cache["y"] = y
            notes.append(y.sum())
            inputs.seen.append(y)
            return y

    model = Root()
    zeor.shard(model, stage=stage, precision="bf16")
    x = torch.randn(2, WIDTH)
    cache, notes, inputs = {"x": x}, [x], Inputs(x, [])
    y = model(cache, notes, inputs)
    assert cache["y"] is y and cache["x"] is x and cache["y"].dtype == torch.bfloat16
    assert len(notes) == 2 and notes[0] is x and notes[1].requires_grad
    assert inputs.x is x and inputs.seen[0] is y


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_unit_puts_into_a_container_is_the_callers(ranks, stage):
    ranks(check_containers, 2, stage)
    ranks(check_root_containers, 2, stage)


# ---- 4: hooks that were there before


def check_early_hooks(stage: int) -> None:
    seen: list[str] = []

    def prepare(model: Net) -> None:
        model.head.weight.register_hook(lambda grad: grad * 3)
        handle = model.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append("gone"))
        model.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append(f"kept {p.grad is not None}"))
        handle.remove()

    compare(stage, prepare, square)
    assert seen == ["kept True"] * (dist.get_world_size() + 1)  # once for each plain replica, then zeor's

    model = net()
    calls: list[int] = []
    handle = model.head.bias.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    zeor.shard(model, stage=stage)
    square(model, batch(0)).backward()
    handle.remove()
    square(model, batch(0)).backward()
    assert calls == [1]


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_put_on_before_shard_are_kept_and_can_be_removed(ranks, stage):
    ranks(check_early_hooks, 2, stage)


# ---- 7, 17: what sharding would change is refused or warned of


def refused(call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        assert all(word in str(error) for word in words), str(error)
        return
    raise AssertionError("nothing was raised")


def check_refusals(stage: int) -> None:
    tied = net()
    tied.head.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
    tied.head.weight.data = tied.blocks[0].lin.weight.data
    refused(lambda: zeor.shard(tied, stage=stage), "share memory", "head.weight", "blocks.0.lin.weight")

    again = net()
    again.extra = nn.Parameter(again.head.weight.detach())
    refused(lambda: zeor.shard(again, stage=stage), "share memory", "extra")

    buffered = net()
    buffered.register_buffer("alias", buffered.head.weight.data.view(-1))
    refused(lambda: zeor.shard(buffered, stage=stage), "share memory", "alias")
    assert type(buffered.head.weight) is nn.Parameter, "a refused model is as it was"

    limited = nn.Sequential(nn.Embedding(5, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH))
    refused(lambda: zeor.shard(limited, stage=stage), "max_norm", "full_params")

    old = net()
    square(old, batch(0)).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zeor.shard(old, stage=stage)
    assert any("gradients from before" in str(each.message) for each in caught)
    assert old.head.weight.grad is None

    model, _ = sharded(stage)
    refused(lambda: model.blocks.append(Block().double()), "added", "zeor.unshard")
    refused(lambda: setattr(model, "scale", nn.Parameter(torch.ones(1))), "added", "zeor.unshard")


@pytest.mark.parametrize("stage", [1, 3])
def test_what_sharding_would_change_is_refused_or_warned_of(ranks, stage):
    ranks(check_refusals, 2, stage)


# ---- 8: custom Functions


class FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight.t()).square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        y = 2 * grads[0] * (x @ weight.t())
        return y @ weight, y.t() @ x


class FusedNet(Net):
    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return FusedHead.apply(x, self.head.weight)


def check_functions(stage: int) -> None:
    def prepare(model: Net) -> None:
        model.__class__ = FusedNet

    compare(stage, prepare, lambda model, x: model(x))


@pytest.mark.parametrize("stage", STAGES)
def test_a_custom_function_over_another_units_weight_trains_it(ranks, stage):
    ranks(check_functions, 2, stage)


# ---- 14: one object


def check_identity(stage: int) -> None:
    model, optimizer = sharded(stage)
    weight = model.blocks[1].lin.weight
    weight.note = 7
    known, keys, weak, seen = {id(weight): "mine"}, {weight: 1}, WeakTensorKeyDictionary(), {}
    weak[weight] = "weak"

    def run(block: Block, x: Tensor, _: Any) -> Tensor:
        own = block.lin.weight
        seen.update(same=own is weight, note=own.note, by_id=known[id(own)], key=keys[own], weak=weak[own])
        seen["in groups"] = any(own is param for group in optimizer.param_groups for param in group["params"])
        seen["grad"] = own.grad
        return block.lin(x)

    model.blocks[1].run = run
    square(model, batch(0)).backward()
    assert seen == {
        "same": True, "note": 7, "by_id": "mine", "key": 1, "weak": "weak", "in groups": True, "grad": None,
    }  # fmt: skip
    square(model, batch(0)).backward()
    assert seen["grad"] is weight.grad and weight.grad is not None
    with zeor.full_params(model):
        assert model.blocks[1].lin.weight is weight and type(weight) is nn.Parameter
        weight.later = 8
    assert weight.later == 8


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_is_one_object_everywhere(ranks, stage):
    ranks(check_identity, 2, stage)


# ---- 15: memory that somebody keeps


def check_kept(stage: int) -> None:
    """A tensor over a weight, kept from forward, shows new values after each step, and never torn ones."""
    model, optimizer = sharded(stage)
    plain = net()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    kept: dict[int, list[Tensor]] = {0: [], 1: []}

    def keep(into: list[Tensor]) -> Callable:
        def run(block: Block, x: Tensor, _: Any) -> Tensor:
            if not into:
                into.append(block.lin.weight.detach().t())
                into.append(torch.from_dlpack(block.lin.weight.detach()))
            return block.lin(x)

        return run

    for number, each in enumerate((model, plain)):
        each.blocks[1].run = keep(kept[number])
    for _ in range(3):
        square(model, batch(0)).backward()
        square(plain, batch(0)).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        for mine, theirs in zip(kept[0], kept[1]):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    with zeor.full_params(model):
        torch.testing.assert_close(model.blocks[1].lin.weight, plain.blocks[1].lin.weight, rtol=1e-9, atol=1e-9)


def check_assigned_data(stage: int) -> None:
    model, _ = sharded(stage)
    plain = nn.Linear(WIDTH, WIDTH).double()
    if stage == 3:
        refused(lambda: setattr(plain.weight, "data", model.head.weight.data), "incompatible tensor type")
        assert plain.weight.sum().isfinite()
    else:
        plain.weight.data = model.head.weight.data
        assert torch.equal(plain.weight, model.head.weight)


@pytest.mark.parametrize("stage", STAGES)
def test_kept_tensors_follow_each_step(ranks, stage):
    ranks(check_kept, 2, stage)
    ranks(check_assigned_data, 2, stage)


# ---- 16, 22: edits of gradients


def check_gradient_edits(stage: int) -> None:
    mask = torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) < 0.5

    def edit(grad: Tensor) -> None:
        grad[mask] = 0
        grad[1] = 0.5
        grad[0, 1:3] = torch.tensor([7.0, 8.0], dtype=torch.float64)
        grad.masked_fill_(mask.t(), -1.0)
        grad.clamp_(-2, 2)

    wanted = plain_grads(lambda model: None, square)["head.weight"].clone()
    edit(wanted)
    model, _ = sharded(stage)
    square(model, batch(dist.get_rank())).backward()
    model.head.weight.grad.norm()  # is remembered, and must be forgotten
    edit(model.head.weight.grad)
    torch.testing.assert_close(model.head.weight.grad.norm(), wanted.norm(), rtol=1e-9, atol=1e-9)
    if stage == 0:
        model.head.weight.grad.view(-1).mul_(3)
        wanted.mul_(3)
        torch.testing.assert_close(model.head.weight.grad.norm(), wanted.norm(), rtol=1e-9, atol=1e-9)
    with zeor.full_params(model, grads=True):
        torch.testing.assert_close(model.head.weight.grad, wanted, rtol=1e-9, atol=1e-9)


def check_gradient_copies() -> None:
    """bf16 at world 1: what is read is a copy in the parameter's dtype, and writes to it reach the gradient."""
    model = net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zeor.shard(model, optimizer, precision=zeor.Precision(compute=torch.bfloat16, reduce=torch.float32))
    square(model, batch(0).float()).backward()
    before = model.head.bias.grad.norm().item()
    flat = model.head.bias.grad.view(-1)
    flat.zero_()
    assert before > 0 and model.head.bias.grad.norm().item() == 0


@pytest.mark.parametrize("stage", STAGES)
def test_elements_of_gradients_can_be_edited(ranks, stage):
    ranks(check_gradient_edits, 2, stage)


def test_writes_to_a_gradient_that_was_read_reach_it(ranks):
    ranks(check_gradient_copies, 1)


# ---- 18: dtypes


def check_dtypes(stage: int) -> None:
    class Mixed(Net):
        def forward(self, x: Tensor, extra: Any = None) -> Tensor:
            assert self.head.weight.dtype == torch.bfloat16
            for block in self.blocks:
                x = block(x).float().to(self.head.weight.dtype)
            return self.head(x)

    model = net().float()
    model.__class__ = Mixed
    zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision="bf16")
    assert all(param.dtype == torch.bfloat16 for param in model.parameters())
    assert all(value.dtype == torch.bfloat16 for value in model.state_dict().values())
    x = batch(0).float().requires_grad_()
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).float().sum().backward()
    assert model.head.weight.grad.dtype == torch.bfloat16 and model.head.weight.grad.norm() > 0
    with zeor.full_params(model):
        assert all(param.dtype == torch.float32 for param in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_has_the_dtype_that_it_computes_in(ranks, stage):
    ranks(check_dtypes, 2, stage)


# ---- 22: hooks of others for what autograd saves, a default device


def check_saved_elsewhere(stage: int) -> None:
    def on_cpu(model: Net, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return square(model, x)

    def doubled(model: Net, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            return square(model, x)

    compare(stage, lambda model: None, on_cpu)
    compare(stage, lambda model: None, doubled)


def check_default_device(stage: int) -> None:
    wanted = plain_grads(lambda model: None, square)
    model = net()
    with torch.device("meta"):
        zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    square(model, batch(dist.get_rank())).backward()
    with zeor.full_params(model, grads=True):
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad, wanted[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_others_for_saved_tensors_and_a_default_device(ranks, stage):
    ranks(check_saved_elsewhere, 2, stage)
    ranks(check_default_device, 2, stage)


# ---- 27: the root's parameters in the user's loss


class Clip(Net):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.7))


def check_scale(stage: int) -> None:
    """`model.logit_scale.exp()` after model(...): what the root holds stays until backward is over."""

    def build() -> Net:
        torch.manual_seed(0)
        return Clip().double()

    compare(stage, lambda model: None, lambda model, x: (model(x) * model.logit_scale.exp()).square().mean(), build)


@pytest.mark.parametrize("stage", STAGES)
def test_the_roots_parameters_can_be_read_in_the_users_loss(ranks, stage):
    ranks(check_scale, 2, stage)


# ---- 19, 21, 22: ordinary calls


def check_ordinary_calls(stage: int) -> None:
    model, optimizer = sharded(stage)
    square(model, batch(0)).backward()
    assert model.to("cpu") is model and model.cpu() is model and model.double() is model
    assert model.to(device="cpu", dtype=torch.float64) is model
    refused(model.float, "sharded as torch.float64", "zeor.unshard")
    refused(lambda: model.to(torch.bfloat16), "sharded as torch.float64", "zeor.unshard")
    optimizer.step()
    optimizer.zero_grad()
    average = torch.zeros(WIDTH, dtype=torch.float64)
    if stage < 3:
        average.mul_(0.9).add_(model.head.bias.detach())
        assert torch.equal(average, model.head.bias)
        target = net()
        target.load_state_dict(model.state_dict())
        assert torch.equal(target.head.weight, model.head.weight)
        target.head.bias.data.copy_(model.head.bias)
    else:
        refused(lambda: average.add_(model.head.bias.detach()), "head.bias", "zeor.full_params")
        refused(lambda: net().load_state_dict(model.state_dict()), "zeor.full_params")


@pytest.mark.parametrize("stage", STAGES)
def test_ordinary_calls_do_what_they_do_in_plain_pytorch(ranks, stage):
    ranks(check_ordinary_calls, 2, stage)


def check_kept_files(stage: int, folder: str) -> None:
    """save_pretrained of a sharded model whose parameters are whole."""
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    zeor.shard(model, stage=stage)
    if dist.get_rank() > 0:
        return  # transformers writes on the first rank alone
    model.save_pretrained(folder)
    again = transformers.GPT2LMHeadModel.from_pretrained(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize("stage", [1, 2])
def test_save_pretrained_where_parameters_are_whole(ranks, stage, tmp_path):
    ranks(check_kept_files, 2, stage, str(tmp_path))
