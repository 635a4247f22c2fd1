"""recompute="auto": what fits, what a recomputation would keep, and that bits do not depend on it.

`Net` counts how often each block is computed. Three steps compute everything twice (one makes the state, one is
measured, in one ranks agree); from the fourth on what is kept is computed once. Products here are too narrow to be
kept apart, save where a test says so.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeor
from tests.every_product import every_product
from zeor import api
from zeor.features import keeping
from zeor.features.keeping import Alive
from zeor.features.levels import Interval, Kept, Need
from zeor.features.products import Counted
from zeor.features.recompute import AutoRecompute

WIDTH, ROWS, BLOCKS, STEPS = 8, 4, 4, 7
# In fp32: what tanh made, dropout's mask, and dropout's input, alive when torch ends the recomputation at the mask.
BLOCK_KEEPS = 4 * (2 * ROWS * WIDTH + ROWS * WIDTH + ROWS * WIDTH)


# ---- what is measured on a host


def test_alive_is_what_operations_made_and_somebody_holds():
    weight = torch.ones(8, 8, requires_grad=True)
    with Alive() as alive:
        x = torch.ones(4, 8)
        y = (x @ weight.t()).tanh()  # the product is gone; what tanh made is saved, and x for the weight's gradient
        y.view(-1)
        torch.ones(1000)
    assert alive.nbytes() == 2 * x.nbytes
    del x, y
    assert alive.nbytes() == 0


# ---- training


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + nn.functional.dropout(self.down(self.up(x).tanh()), 0.3, self.training)


class Net(nn.Module):
    def __init__(self, twice=False, frozen=False):
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.order = [*range(BLOCKS), *([0] if twice else [])]
        if frozen:
            self.embed.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


def train(stage, recompute, room=None, rows=(ROWS,) * STEPS, micro=1, together=False, net=None, **options):
    torch.manual_seed(5)
    model = Net(**(net or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, units=[Block], recompute=recompute, **options)
    before, keeping.free_host_nbytes = keeping.free_host_nbytes, lambda: room
    try:
        torch.manual_seed(8)
        calls, losses = [], []
        for step in range(STEPS):
            for block in model.blocks:
                block.calls = 0
            parts = []
            with Counted() as run:
                for part in range(micro):
                    seed = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
                    parts.append(model(torch.randn(rows[step], 3, generator=seed)).square().mean())
                    if not together:
                        parts[-1].backward()
                for loss in parts if together else ():
                    loss.backward()
            losses += [loss.item() for loss in parts]
            optimizer.step()
            optimizer.zero_grad()
            calls.append([block.calls for block in model.blocks])
    finally:
        keeping.free_host_nbytes = before
    found = api._state(model).engine.find(AutoRecompute)
    needs = [] if found is None else list(found.keeping._needs)
    with zeor.full_params(model):
        return losses, [param.detach().clone() for param in model.parameters()], calls, needs, run.count


def same(found, wanted):
    assert found[0] == wanted[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


ALL_TWICE, ALL_ONCE = [2] * BLOCKS, [1] * BLOCKS


def compare(setting):
    for stage in (0, 1, 2, 3):
        wanted = train(stage, True, **setting)
        found = train(stage, "auto", **setting)
        same(found, wanted)
        micro, once = setting.get("micro", 1), [1] * BLOCKS
        if setting.get("net"):
            once[0] = 2
        saved = 0 if setting.get("together") else micro - 1  # ranks agree when the third step's first backward ends
        each_step = [2 * micro, 2 * micro, 2 * micro - saved, *[micro] * (STEPS - 3)]
        assert found[2] == [[times * each for each in once] for times in each_step], (stage, found[2])
        assert len(found[3]) == (micro if setting.get("together") else 1) * sum(once)
        assert set(found[3]) == {Need(BLOCK_KEEPS, 0)}, (found[3], BLOCK_KEEPS)


def test_bits_are_those_of_computing_everything_again_and_what_fits_is_computed_once(ranks):
    for world in (1, 2):
        ranks(compare, world, {})


def test_a_block_that_is_called_twice(ranks):
    ranks(compare, 2, {"net": {"twice": True}})


def test_micro_batches_and_forwards_before_backwards(ranks):
    ranks(compare, 2, {"micro": 2})
    ranks(compare, 2, {"micro": 2, "together": True})


def test_settled_paths_hear_of_it_a_step_later(ranks):
    ranks(settled, 2)


def settled():
    found = train(3, "auto", paths="static")
    same(found, train(3, True))
    assert found[2] == [ALL_TWICE] * 4 + [ALL_ONCE] * (STEPS - 4)


def limited(world_room):
    """By rank: for how many calls there is room."""
    mine = world_room[dist.get_rank()]
    room = int(mine * BLOCK_KEEPS / keeping.HOST_SHARE) + 1
    found = train(3, "auto", room=room)
    same(found, train(3, True))
    return found[2]


def test_the_last_calls_are_kept_and_no_more_than_fit_on_any_rank(ranks):
    least = [2] * (BLOCKS - 1) + [1]
    assert ranks(limited, 2, (1, 3)) == [[ALL_TWICE] * 3 + [least] * (STEPS - 3)] * 2
    assert ranks(limited, 2, (0, 4)) == [[ALL_TWICE] * STEPS] * 2


def larger():
    """The fifth batch is larger on rank 0: all of it is computed again there, and rank 1 goes on."""
    rows = [ROWS] * 4 + [2 * ROWS if dist.get_rank() == 0 else ROWS] + [ROWS, 2 * ROWS]
    found = train(3, "auto", rows=rows)
    same(found, train(3, True, rows=rows))
    return found[2][3:]


# ---- products


# The results of both products: that of the second goes into dropout, whose mask comes last.
PRODUCTS_KEEP = 4 * (2 * ROWS * WIDTH + ROWS * WIDTH)
MIDDLE = Need(BLOCK_KEEPS, PRODUCTS_KEEP)


@every_product()
def middle(kept_by_rank, **setting):
    """By rank: for what there is room. Needs; how often blocks are computed, and how many products run, in the last
    step."""
    setting.setdefault("stage", 3)
    needs = [MIDDLE] * BLOCKS
    room = int(kept_by_rank[dist.get_rank()].nbytes(needs) / keeping.HOST_SHARE) + 1
    found = train(recompute="auto", room=room, **setting)
    same(found, train(recompute=True, **setting))
    return found[3], found[2][-1], found[4] - train(recompute=False, **setting)[4]


def test_the_last_calls_keep_their_products_where_there_is_no_room_for_more(ranks):
    for stage, world in [(0, 1), (1, 2), (2, 2), (3, 1), (3, 2)]:
        needs, calls, more = ranks(middle, world, [Kept(3, 0)] * 2, stage=stage)[0]
        assert needs == [MIDDLE] * BLOCKS
        assert (calls, more) == (ALL_TWICE, 2)  # the first block's


def test_ranks_agree_on_both_numbers(ranks):
    room = [Kept(BLOCKS, 1), Kept(BLOCKS, 2)]
    assert [each[1:] for each in ranks(middle, 2, room)] == [([2] * (BLOCKS - 1) + [1], 0)] * 2
    room = [Kept(BLOCKS, 3), Kept(2, 0)]
    assert [each[1:] for each in ranks(middle, 2, room)] == [(ALL_TWICE, 2 * (BLOCKS - 2))] * 2


def test_products_of_several_micro_batches_and_of_frozen_parts(ranks):
    frozen = ranks(middle, 2, [Kept(BLOCKS - 1, 0)] * 2, net={"frozen": True})[0]
    assert frozen[1:] == ([1] + [2] * (BLOCKS - 1), 0)
    micro = ranks(middle, 2, [Kept(BLOCKS, 0)] * 2, micro=2)[0]
    assert micro[1:] == ([4] * BLOCKS, 0)


def test_larger_inputs_are_computed_again_and_measured_once(ranks):
    first, second = ranks(larger, 2)
    assert first == [ALL_ONCE, ALL_TWICE, ALL_ONCE, ALL_ONCE]
    assert second == [ALL_ONCE] * 3 + [ALL_TWICE]


def frozen():
    found = train(3, "auto", net={"frozen": True})
    same(found, train(3, True, net={"frozen": True}))
    # The first block takes no part in backward.
    assert found[2] == [[1] + [2] * (BLOCKS - 1)] * 3 + [ALL_ONCE] * (STEPS - 3)


def test_what_no_backward_comes_to_is_never_measured(ranks):
    ranks(frozen, 2)


# ---- memory that runs out, and other models: played


class Played:
    """An accelerator's memory, as far as Keeping asks."""

    def __init__(self, total):
        self.total, self.ooms = total, 0

    total_nbytes = lambda self: self.total
    failures = lambda self: self.ooms
    used_nbytes = reset_peak = lambda self: 0


def played(needs, total, budget=None):
    made = keeping.Keeping(torch.device("cpu"), budget)
    made._memory, made._needs = Played(total), [need if isinstance(need, Need) else Need(need, need) for need in needs]
    made._measured_shapes = [{()} for _ in needs]
    made._intervals, made._measures = [Interval(0, frozenset(range(len(needs))))], True
    made.end_step()
    return made


def test_after_memory_ran_out_half_as_many_are_kept():
    made = played([10] * 8, 1000)
    assert made._most == (8, 8)
    for most in (4, 2, 1, 0, 0):
        made._memory.ooms += 1
        made.end_step()
        assert made._most.products == most and made.kept_nbytes == 10 * most
    made.end_step()
    assert made.kept_nbytes == 0


def test_after_memory_ran_out_products_are_the_last_to_go():
    made = played([Need(10, 4)] * 8, 1000)
    found = []
    for _ in range(4):
        found.append((made._most, made.kept_nbytes))
        made._memory.ooms += 1
        made.end_step()
    assert found == [((8, 8), 80), ((8, 1), 38), ((4, 0), 16), ((2, 0), 8)]


def test_a_budget_of_the_device_and_other_models_count():
    first = played([10] * 8, 1000, budget=int(41 / (1 - keeping.HOLES)))
    assert first._most.products == 4 and first.kept_nbytes == 40
    second = played([10] * 8, 1 + int(61 / (1 - keeping.HOLES)))
    assert second._most.products == 2
    second._measures = True
    first._measure()
    assert not first._measures


def test_evaluation_is_left_alone(ranks):
    ranks(evaluated, 1)


def evaluated():
    model = Net()
    zeor.shard(model, torch.optim.SGD(model.parameters()), recompute="auto", units=[Block])
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert [block.calls for block in model.blocks] == ALL_ONCE


# ---- compiled blocks


class Pure(nn.Module):
    """As `Block`, without what a graph cannot have. The buffer counts how often a trial would show."""

    def __init__(self, inner):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen.add_(1)
        return x + nn.functional.dropout(self.down(self.up(x).tanh()), 0.3, self.training)


INNER = (2 * WIDTH, 2 * WIDTH, 3 * WIDTH, 3 * WIDTH)
# What tanh made, dropout's mask (a byte each), and what dropout was given.
PURE_KEEPS = [4 * ROWS * inner + ROWS * WIDTH for inner in INNER]


class PureNet(nn.Module):
    def __init__(self, own_checkpoints=False):
        super().__init__()
        self.embed, self.head, self.own = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3), own_checkpoints
        self.blocks = nn.ModuleList(map(Pure, INNER))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.own else block(x)
        return self.head(x)


def train_compiled(stage, recompute, room=None, own=False):
    """Losses and parameters; of each step how much each block has saved, and how many graphs there are; needs that were
    measured; what the blocks' buffers have counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(5)
    model = PureNet(own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, units=[Pure], recompute=recompute, compile={"backend": "aot_eager"})
    before, keeping.free_host_nbytes = keeping.free_host_nbytes, lambda: room
    graphs, losses, kept = [], [], []
    try:
        torch.manual_seed(8)
        for step in range(STEPS):
            seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
            loss = model(torch.randn(ROWS, 3, generator=seed)).square().mean()
            kept.append(saved_by_block(loss))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        keeping.free_host_nbytes = before
    found = api._state(model).engine.find(AutoRecompute)
    needs = [] if found is None else list(found.keeping._needs)
    counted = [block.seen.item() for block in model.blocks]
    with zeor.full_params(model):
        params = [param.detach().clone() for param in model.parameters()]
    return (losses, params), kept, graphs, needs, counted


def saved_by_block(loss):
    """How many tensors each block's graph has saved; they are not read, as at stage 3 that is not allowed here."""
    found, nodes = [], [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if "CompiledFunction" in type(node).__name__:
            found.append(len(node._raw_saved_tensors))
        nodes += [each for each, _ in node.next_functions if each is not None and each.next_functions]
    return found[::-1]


def compare_compiled(room, kept):
    for stage in (1, 3):
        wanted, again, _, _, counted = train_compiled(stage, True)
        whole = train_compiled(stage, False)[1]
        assert len(again[0]) == BLOCKS and all(a != b for a, b in zip(again[0], whole[0], strict=True))
        found, saved, graphs, needs, counts = train_compiled(stage, "auto", room)
        same(found, wanted)
        assert counts == counted  # a trial changes no buffer
        late = [all_of if keeps else none for keeps, all_of, none in zip(kept, whole[0], again[0], strict=True)]
        assert saved == [again[0]] * 3 + [late] * (STEPS - 3), (stage, saved)
        assert needs == [Need(each, each) for each in PURE_KEEPS], needs
        assert train_compiled(stage, "products")[1] == [whole[0]] * STEPS  # the compiler's own choice
        # Two kinds of blocks, and two graphs of each: those for kept activations are there after the second step.
        assert graphs == [2, *[4] * (STEPS - 1)]


@pytest.mark.whole
@pytest.mark.long
def test_compiled_blocks_keep_what_fits(ranks):
    ranks(compare_compiled, 2, None, [True] * BLOCKS, timeout=300)
    ranks(compare_compiled, 2, int(PURE_KEEPS[-1] / keeping.HOST_SHARE) + 1, [False] * 3 + [True], timeout=300)


def compiled_in_checkpoints_of_their_own():
    found, _, graphs, needs, counted = train_compiled(3, "auto", own=True)
    wanted, _, _, _, plainly = train_compiled(3, False, own=True)
    same(found, wanted)
    assert counted == plainly and needs == [] and graphs[-1] <= 4, (counted, plainly, graphs)


def test_compiled_blocks_inside_checkpoints_of_the_model_s_own_are_computed_again_once(ranks):
    ranks(compiled_in_checkpoints_of_their_own, 1, timeout=300)
