"""`zeor.join`: ranks with unequal numbers of batches end together, and every step is the one that plain PyTorch takes
on the batches that were there.

Rank r of W has COUNTS[r] batches; a step's reference loss is the mean over the ranks that still have one.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeor
from tests.loops import TIGHT, assert_close, assert_equal, batch, net, values
from zeor.step import reduces

COUNTS = {2: [5, 7], 3: [4, 0, 2], 4: [3, 1, 3, 2]}
MAX_NORM = 0.05


def loss_of(model, step, rank, world, dtype=torch.float64):
    x, y = batch(step, dtype)
    return (model(x[rank::world]) - y[rank::world]).square().mean()


def optimizer_of(model, name="AdamW"):
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return getattr(torch.optim, name)(model.parameters(), lr=0.02)


def reference(world, name="AdamW", micro=1, clip=False, gamma=1.0):
    """Plain PyTorch: a micro-batch counts the mean over the ranks that have it; leftovers make a last, shorter step."""
    counts = COUNTS[world]
    model = net()
    optimizer = optimizer_of(model, name)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    norms = []
    for first in range(0, max(counts), micro):
        for step in range(first, min(first + micro, max(counts))):
            there = [rank for rank in range(world) if counts[rank] > step]
            (sum(loss_of(model, step, rank, world) for rank in there) / len(there)).backward()
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return values(model), norms, optimizer.param_groups[0]["lr"]


def run(stage, name="AdamW", micro=1, no_sync=False, clip="none", gamma=1.0, overlap=True, dtype=torch.float64):
    """On ranks: the loop as users write it, each over its own number of batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = net(dtype)
    optimizer = optimizer_of(model, name)
    zeor.shard(model, optimizer, stage=stage, overlap=overlap)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    norms, longest = [], max(COUNTS[world])
    with zeor.join(model, on_step=scheduler.step):
        for step in range(COUNTS[world][rank]):
            last = (step + 1) % micro == 0 or step + 1 == longest
            with zeor.no_sync(model) if no_sync and not last else nullcontext():
                loss_of(model, step, rank, world, dtype).backward()
            if not last:
                continue
            if clip == "stock":
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            elif clip == "zeor":
                norms.append(zeor.clip_grad_norm_(model, MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    settings = (optimizer.param_groups[0]["lr"], scheduler.last_epoch)
    with zeor.full_params(model):
        return values(model), norms, settings


def check(found, wanted, world):
    params, norms, lr = wanted
    for rank, (mine, mine_norms, (my_lr, _)) in enumerate(found):
        assert_close(mine, params)
        assert mine_norms == pytest.approx(norms[: len(mine_norms)], rel=1e-9), rank
        assert my_lr == pytest.approx(lr)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_five_against_seven_batches_equal_plain_pytorch(ranks, stage):
    found = ranks(run, 2, stage)
    check(found, reference(2), 2)


@pytest.mark.parametrize("world", [3, 4])
def test_ranks_without_any_batch_and_ranks_that_leave_one_by_one(ranks, world):
    for stage in (2, 3):
        check(ranks(run, world, stage), reference(world), world)


def stages_in_bits(kwargs):
    first = run(0, **kwargs)
    for stage in (1, 2, 3):
        for overlap in (True, False):
            again = run(stage, overlap=overlap, **kwargs)
            assert_equal(again[0], first[0])
            assert again[1:] == first[1:]
    return first


@pytest.mark.parametrize("clip", ["stock", "zeor"])
def test_clipping_momentum_and_a_scheduler_inside_join(ranks, clip):
    kwargs = {"name": "SGD", "clip": clip, "gamma": 0.8}
    found = ranks(stages_in_bits, 2, kwargs)
    check(found, reference(2, "SGD", clip=True, gamma=0.8), 2)
    assert [settings[1] for _, _, settings in found] == [7, 7]  # on_step moved the scheduler of the rank that left


@pytest.mark.parametrize("no_sync", [False, True])
def test_accumulation_inside_join_counts_each_micro_batch_over_the_ranks_that_had_it(ranks, no_sync):
    """With 5 against 7 and two micro-batches a step, rank 0 leaves in the middle of an accumulation."""
    found = ranks(stages_in_bits, 2, {"micro": 2, "no_sync": no_sync})
    check(found, reference(2, micro=2), 2)


def test_stages_give_the_same_bits_in_fp32(ranks):
    found = ranks(stages_in_bits, 3, {"dtype": torch.float32, "clip": "zeor"})
    assert_equal(found[0][0], found[1][0])


# ---- ways through the model


class Experts(nn.Module):
    """Each batch goes through one expert or two; `way` says which. One is entered twice, one recomputed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 5)

    def forward(self, x, way):
        x = self.first(x)
        for expert in way:
            x = torch.tanh(checkpoint(self.experts[expert], x, use_reentrant=False))
        return self.head(x)

    def encode(self, x):
        return self.experts[2](self.first(x))


# By rank and step. Rank 1 goes on where rank 0 has ended, by ways that nobody took before.
WAYS = {2: [[[0], [0, 1]], [[1], [1, 0], [3], [0, 3, 3], [2, 1]]], 3: [[[0]], [[3, 1], [2]], [[0, 2], [1, 1], [3]]]}


def experts(seed=2):
    torch.manual_seed(seed)
    return Experts().double()


def expert_loss(model, step, rank, world):
    x, y = batch(step)
    return (model(x[rank::world], WAYS[world][rank][step]) - y[rank::world]).square().mean()


def train_experts(stage):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = experts()
    optimizer = optimizer_of(model)
    zeor.shard(model, optimizer, stage=stage, units=[nn.Linear])
    with zeor.join(model):
        for step in range(len(WAYS[world][rank])):
            expert_loss(model, step, rank, world).backward()
            zeor.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    with zeor.full_params(model):
        return values(model)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_on_different_ways_through_the_model_while_another_has_left(ranks, stage, world):
    model = experts()
    optimizer = optimizer_of(model)
    for step in range(max(map(len, WAYS[world]))):
        there = [rank for rank in range(world) if len(WAYS[world][rank]) > step]
        (sum(expert_loss(model, step, rank, world) for rank in there) / len(there)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    for mine in ranks(train_experts, world, stage):
        assert_close(mine, values(model))


def train_by_a_method(stage):
    rank = dist.get_rank()
    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=stage, methods=("encode",))
    with zeor.join(model):
        for step in range(COUNTS[2][rank]):
            with torch.no_grad():
                model.encode(batch(step)[0])
            model.encode(batch(step)[0][rank::2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with zeor.full_params(model):
        return values(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_method_in_the_place_of_forward(ranks, stage):
    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        there = [rank for rank in range(2) if COUNTS[2][rank] > step]
        (sum(model.encode(batch(step)[0][r::2]).square().mean() for r in there) / len(there)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine in ranks(train_by_a_method, 2, stage):
        assert_close(mine, values(model))


def only_unsynced(stage):
    """Rank 1 alone uses an expert, and only inside no_sync; all ranks must come to know that it has a gradient."""
    rank = dist.get_rank()
    model = experts()
    patience, reduces.PATIENCE_SECONDS = reduces.PATIENCE_SECONDS, 0.5  # ranks differ by what no forward tells
    zeor.shard(model, stage=stage, units=[nn.Linear])
    reduces.PATIENCE_SECONDS = patience
    x, y = batch(0)
    with zeor.no_sync(model):
        (model(x[rank::2], [2] if rank else [0]) - y[rank::2]).square().mean().backward()
    (model(x[rank::2], [0]) - y[rank::2]).square().mean().backward()
    norm = zeor.clip_grad_norm_(model, 1e9).item()
    with zeor.full_params(model, grads=True):
        return norm, {n: p.grad if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_one_rank_has_from_no_sync_alone_is_everybodys(ranks, stage):
    model = experts()
    x, y = batch(0)
    for way in ([[0], [2]], [[0], [0]]):
        sum((model(x[r::2], way[r]) - y[r::2]).square().mean() / 2 for r in range(2)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for mine, grads in ranks(only_unsynced, 2, stage):
        assert mine == pytest.approx(norm, rel=1e-10)
        for name, param in model.named_parameters():
            if param.grad is None:
                assert grads[name] is None
            else:
                torch.testing.assert_close(grads[name], param.grad, **TIGHT)


# ---- evaluation and other things inside


def evaluate(stage):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = zeor.shard(net(), stage=stage)  # no optimizer yet
    seen = []
    with zeor.join(model), torch.no_grad():
        for step in range(COUNTS[world][rank]):
            seen.append(loss_of(model, step, rank, world).item())
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_evaluation_before_any_optimizer_exists(ranks, stage):
    found = ranks(evaluate, 2, stage)
    model = net()
    for rank in range(2):
        wanted = [loss_of(model, step, rank, 2).item() for step in range(COUNTS[2][rank])]
        assert found[rank] == pytest.approx(wanted, rel=1e-12)


def train_with_more(stage):
    """What loops do beside the four verbs: totals, full parameters, clamping, finiteness, gradients to zero."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=stage)
    totals, shown = [], []
    with zeor.join(model):
        for step in range(COUNTS[world][rank]):
            loss = loss_of(model, step, rank, world)
            loss.backward()
            totals.append(zeor.total(1, loss.detach()))
            assert torch.isfinite(model.head.weight.grad).all()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            with zeor.full_params(model):
                shown.append(model.head.bias.detach().clone())
    with zeor.full_params(model):
        return values(model), totals, shown


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_totals_clamping_and_full_params_inside_join(ranks, stage):
    found = ranks(train_with_more, 2, stage)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        there = [rank for rank in range(2) if COUNTS[2][rank] > step]
        losses = [loss_of(model, step, rank, 2) for rank in there]
        (sum(losses) / len(there)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        for rank in there:
            count, loss = found[rank][1][step]
            assert count == len(there)
            assert loss == pytest.approx(sum(each.item() for each in losses), rel=1e-9)
            torch.testing.assert_close(found[rank][2][step], model.head.bias.detach(), **TIGHT)
    for rank in range(2):
        assert_close(found[rank][0], values(model))


def join_then_go_on(stage):
    """After the block all ranks train on together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = net()
    optimizer = optimizer_of(model)
    zeor.shard(model, optimizer, stage=stage)
    for _ in range(2):
        with zeor.join(model):
            for step in range(COUNTS[world][rank]):
                loss_of(model, step, rank, world).backward()
                for group in optimizer.param_groups:  # a schedule by hand, on the ranks that are there
                    group["lr"] = 0.02 / (1 + step)
                optimizer.step()
                optimizer.zero_grad()
        loss_of(model, 20, rank, world).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zeor.full_params(model):
        return values(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_after_the_block_gradients_settings_and_averages_are_those_of_all_ranks(ranks, stage):
    found = ranks(join_then_go_on, 2, stage)
    model = net()
    optimizer = optimizer_of(model)
    for _ in range(2):
        for step in [*range(7), 20]:
            there = [rank for rank in range(2) if step == 20 or COUNTS[2][rank] > step]
            (sum(loss_of(model, step, rank, 2) for rank in there) / len(there)).backward()
            if step != 20:
                optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
            optimizer.step()
            optimizer.zero_grad()
    for mine in found:
        assert_close(mine, values(model))


def agreements(inside):
    """Small exchanges of three steps, after two that learn the orders."""
    model = net()
    optimizer = optimizer_of(model)
    zeor.shard(model, optimizer, stage=3)

    def train(steps):
        for step in steps:
            loss_of(model, step, dist.get_rank(), 2).backward()
            zeor.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

    train(range(2))
    before = zeor.traffic(model)["calls"].get("agree", 0)
    with zeor.join(model) if inside else nullcontext():
        train(range(3))
    return zeor.traffic(model)["calls"]["agree"] - before


def test_while_all_are_there_an_event_costs_one_small_exchange(ranks):
    without, inside = ranks(agreements, 2, False)[0], ranks(agreements, 2, True)[0]
    assert without == 3 * 3  # the ends of forward and backward, the norms
    assert inside == without + 3 * 4 + 1  # forward, backward, norms and step of each; the end of the block


# ---- several models, drop-ins


def gan(stage, nested):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    maker, judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)), net(seed=5)
    maker = maker.double()
    optimizers = [torch.optim.SGD(maker.parameters(), lr=0.05), torch.optim.SGD(judge.parameters(), lr=0.05)]
    if stage is not None:
        zeor.shard(maker, optimizers[0], stage=stage)
        zeor.shard(judge, optimizers[1], stage=stage)
    steps = []
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, g) for o, g in zip(optimizers, (0.9, 0.8))]

    def turn(step, there):
        """One step of each; the loss is the mean over ranks that are there."""
        for which in range(2):
            loss = 0.0
            for rank in there:
                fake = maker(batch(step)[0][rank::world, :4])
                loss = loss + (judge(fake if which == 0 else fake.detach()).square().mean() - which) ** 2 / len(there)
            loss.backward()
            optimizers[which].step()
            schedulers[which].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        steps.append(step)

    if stage is None:
        for step in range(7):
            turn(step, [rank for rank in range(2) if COUNTS[2][rank] > step])
        return values(maker), values(judge), [o.param_groups[0]["lr"] for o in optimizers]
    block = zeor.join([maker, judge], on_step=dict(zip(optimizers, (s.step for s in schedulers))))
    if nested:
        with zeor.join(maker):
            zeor.join(judge).__enter__()
    with block:
        for step in range(COUNTS[world][rank]):
            turn(step, [rank])
    with zeor.full_params(maker), zeor.full_params(judge):
        return values(maker), values(judge), [o.param_groups[0]["lr"] for o in optimizers]


def gan_reference():
    real, dist.get_world_size = dist.get_world_size, lambda: 2
    rank, dist.get_rank = dist.get_rank, lambda: 0
    try:
        return gan(None, False)
    finally:
        dist.get_world_size, dist.get_rank = real, rank


@pytest.mark.parametrize("stage", [1, 3])
def test_two_models_in_one_block(ranks, stage):
    found = ranks(gan, 2, stage, False)
    maker, judge, rates = gan_reference()
    for mine in found:
        assert_close(mine[0], maker)
        assert_close(mine[1], judge)
        assert mine[2] == pytest.approx(rates)


def sentence_of(fn, *args):
    try:
        fn(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


def test_nested_blocks_are_refused_with_the_way_to_write_them(ranks):
    for text in ranks(sentence_of, 2, gan, 3, True):
        assert "give all models to one block: zeor.join([model, other])" in text


def forgets_a_model():
    rank = dist.get_rank()
    model, teacher = zeor.shard(net(), stage=3), zeor.shard(net(seed=9), stage=3)
    with zeor.join(model):
        for step in range(COUNTS[2][rank]):
            with torch.no_grad():
                teacher(batch(step)[0])


def test_a_sharded_model_that_the_block_does_not_know_is_refused(ranks):
    for text in ranks(sentence_of, 2, forgets_a_model):
        assert "a forward without gradients inside a zeor.join that knows only of other models" in text


def drop_in(stage, name):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = net()
    optimizer = getattr(zeor.optim, name)(model.parameters(), lr=0.02, stage=stage)
    with zeor.join(optimizer):
        for step in range(COUNTS[world][rank]):
            loss_of(model, step, rank, world).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            if step % 2:
                optimizer.zero_grad()
            else:
                for param in model.parameters():
                    param.grad = None
    return values(model)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_drop_in_optimizer_in_the_place_of_the_model(ranks, stage, world):
    wanted = reference(world, "AdamW", clip=True)[0]
    for mine in ranks(drop_in, world, stage, "AdamW"):
        assert_close(mine, wanted)


def two_optimizers(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


def train_with_two_optimizers(stage):
    rank = dist.get_rank()
    model = net(torch.float32)
    optimizers = two_optimizers(model)
    zeor.shard(model, optimizers, stage=stage)
    with zeor.join(model):
        for step in range(COUNTS[2][rank]):
            loss_of(model, step, rank, 2, torch.float32).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    with zeor.full_params(model):
        return values(model)


def test_two_optimizers_one_of_them_over_whole_matrices(ranks):
    found = {stage: ranks(train_with_two_optimizers, 2, stage) for stage in (0, 2, 3)}
    model = net(torch.float32)
    optimizers = two_optimizers(model)
    for step in range(7):
        there = [rank for rank in range(2) if COUNTS[2][rank] > step]
        (sum(loss_of(model, step, rank, 2, torch.float32) for rank in there) / len(there)).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    for stage in (0, 2, 3):
        for mine in found[stage]:
            assert_equal(mine, found[0][0])
    assert_close(found[0][0], values(model), rtol=0.02, atol=1e-4)  # Muon computes in bfloat16


def train_with_a_scaler(stage):
    rank = dist.get_rank()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeor.shard(model, optimizer, stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with zeor.join(model):
        for step in range(COUNTS[2][rank]):
            loss = loss_of(model, step, rank, 2) * (float("inf") if step == 5 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            zeor.clip_grad_norm_(model, MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    with zeor.full_params(model):
        return values(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_scaler_skips_a_step_on_ranks_that_have_left_too(ranks, stage):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (0, 1, 2, 3, 4, 6):  # the loss of step 5 is infinite
        there = [rank for rank in range(2) if COUNTS[2][rank] > step]
        (sum(loss_of(model, step, rank, 2) for rank in there) / len(there)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    for mine in ranks(train_with_a_scaler, 2, stage):
        assert_close(mine, values(model))


# ---- errors


def fails(where, stage):
    rank = dist.get_rank()
    model = net()
    optimizer = optimizer_of(model)
    zeor.shard(model, optimizer, stage=stage)

    def boom(*args):
        if rank == 1 and armed:
            raise ArithmeticError(f"no good {where}")

    armed = False
    if where == "in forward":
        model.blocks[1].register_forward_pre_hook(boom)
    with zeor.join(model):
        for step in range(COUNTS[2][rank]):
            armed = step == 3
            out = model(batch(step)[0])
            if where == "in backward":
                out.register_hook(boom)
                model.blocks[0].register_full_backward_hook(boom)
            out.square().mean().backward()
            if where == "between":
                boom()
            optimizer.step()
            optimizer.zero_grad()
    return "done"


def text_of_failure(where, stage):
    try:
        return fails(where, stage)
    except (ArithmeticError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("where", ["in forward", "in backward", "between"])
@pytest.mark.filterwarnings("ignore:zeor. a backward raised")
def test_an_exception_on_one_rank_is_raised_on_every_rank(ranks, where, stage):
    first, second = ranks(text_of_failure, 2, where, stage, timeout=60)
    assert second == f"ArithmeticError: no good {where}"
    assert first.startswith(f"RuntimeError: zeor.join: rank 1 raised ArithmeticError: no good {where}")


def fails_after_leaving(stage):
    """Rank 0 is out of data; the other two go on until rank 2 raises."""
    rank = dist.get_rank()
    model = net()
    optimizer = optimizer_of(model)
    zeor.shard(model, optimizer, stage=stage)
    with zeor.join(model):
        for step in range(2 + 2 * rank):
            loss_of(model, step, rank, 3).backward()
            if rank == 2 and step == 3:
                raise ArithmeticError("too late")
            optimizer.step()
            optimizer.zero_grad()


def test_an_exception_reaches_ranks_that_have_left(ranks):
    for stage in (2, 3):
        texts = ranks(lambda stage: _caught(fails_after_leaving, stage), 3, stage, timeout=60)
        assert texts[2] == "too late"
        assert all("rank 2 raised ArithmeticError: too late" in text for text in texts[:2])


def _caught(fn, *args):
    try:
        fn(*args)
    except Exception as error:
        return str(error)
    return "nothing was raised"


def different_loops(stage):
    rank = dist.get_rank()
    model = net()
    optimizer = optimizer_of(model)
    zeor.shard(model, optimizer, stage=stage)
    with zeor.join(model):
        loss_of(model, 0, rank, 2).backward()
        if rank == 0:
            zeor.clip_grad_norm_(model, 1.0)
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_do_different_things_raise_one_sentence(ranks, stage):
    for text in ranks(sentence_of, 2, different_loops, stage, timeout=60):
        assert "rank 0 comes to the norms of the gradients while rank 1 comes to a step of an optimizer" in text


def writes_after_somebody_left():
    rank = dist.get_rank()
    model = zeor.shard(net(), stage=3)
    with zeor.join(model):
        for step in range(1 + rank):
            loss_of(model, step, rank, 2).backward()
            with zeor.full_params(model, write=True):
                pass


def test_what_a_rank_that_left_cannot_follow_is_refused(ranks):
    for text in ranks(sentence_of, 2, writes_after_somebody_left, timeout=60):
        assert "zeor.full_params(write=True) was called inside zeor.join after rank 0 had run out of data" in text


def calls_a_unit_alone():
    rank = dist.get_rank()
    model = zeor.shard(net(), stage=3)
    with zeor.join(model), torch.no_grad():
        for step in range(1 + rank):
            model.head(batch(step)[0])


def test_a_unit_called_alone_is_refused_once_a_rank_has_left(ranks):
    for text in ranks(sentence_of, 2, calls_a_unit_alone, timeout=60):
        assert "Unit 'head', outside the model's forward, was called inside zeor.join after rank 0 had" in text


def noisy_gradients():
    rank = dist.get_rank()
    model = net()
    optimizer = optimizer_of(model)
    zeor.shard(model, optimizer, stage=2)
    with zeor.join(model):
        for step in range(1 + rank):
            loss_of(model, step, rank, 2).backward()
            model.head.weight.grad.add_(torch.ones(model.head.weight.shape, dtype=torch.float64))
            optimizer.step()
            optimizer.zero_grad()


def test_a_change_of_gradients_that_cannot_travel_is_refused_by_name(ranks):
    for text in ranks(sentence_of, 2, noisy_gradients, timeout=60):
        assert "add_ on the gradient of 'head.weight' was given a Tensor of many numbers inside zeor.join" in text


# ---- group settings


def drifts(stage, setting):
    rank = dist.get_rank()
    model = net()
    optimizer = optimizer_of(model)
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.5})
    zeor.shard(model, optimizer, stage=stage)
    for step in range(3):
        loss_of(model, step, rank, 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and setting == "lr":
            optimizer.param_groups[1]["lr"] = 0.5 / (1 + rank)
        elif step == 1:
            optimizer.param_groups[1]["betas"] = (0.9, 0.99 + rank / 1000)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_learning_rates_that_drift_apart_raise_on_every_rank(ranks, stage):
    for text in ranks(sentence_of, 2, drifts, stage, "lr"):
        assert "rank 0 has lr=0.5 in group 1 of optimizer 0 (AdamW), rank 1 has lr=0.25 in group 1" in text
        assert "zeor.total" in text


def test_other_settings_that_drift_apart_are_named_too(ranks):
    for text in ranks(sentence_of, 2, drifts, 1, "betas"):
        assert "rank 0 has betas=(0.9, 0.99) in group 1" in text and "rank 1 has betas=(0.9, 0.991)" in text


def saves_inside(verb, folder, when):
    """`when`: all ranks are still there, or one has left."""
    rank, model = dist.get_rank(), net()
    _, optimizer = zeor.shard(model, optimizer_of(model), stage=3)
    verbs = {
        "save": lambda: zeor.save(folder, model, optimizer, step=1),
        "load": lambda: zeor.load(folder, model, optimizer),
        "export": lambda: zeor.export(model, folder),
    }
    with zeor.join(model):
        for step in range(COUNTS[2][rank]):
            loss_of(model, step, rank, 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == (0 if when == "all" else max(COUNTS[2]) - 1):
                verbs[verb]()


@pytest.mark.parametrize("verb", ["save", "load", "export"])
def test_a_checkpoint_after_a_rank_has_left_is_refused_at_once_on_every_rank(ranks, tmp_path, verb):
    for text in ranks(sentence_of, 2, saves_inside, verb, str(tmp_path), "left"):
        assert f"zeor.{verb} was called inside zeor.join after rank" in text
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_while_all_are_there_is_made(ranks, tmp_path):
    assert ranks(sentence_of, 2, saves_inside, "save", str(tmp_path), "all") == ["nothing was raised"] * 2
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000000001"]
