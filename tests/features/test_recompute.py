"""`zeor.shard(..., recompute=)`: the same bits as without, at every stage, for every kind of call; and what it keeps.

Here every tensor counts as large enough to be sent to the host, whose blocks are small.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeor
from tests.every_product import every_product
from tests.loops import assert_equal, values
from zeor.access.sharded import state_of
from zeor.features import activations
from zeor.features.products import Counted
from zeor.features.recompute import KeepsProducts, Recompute

WIDTH, ROWS, STEPS = 6, 4, 3


class Block(nn.Module):
    """Dropout, keyword arguments, several outputs, an input that several calls share."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 9), nn.Linear(9, width)
        self.drop = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x, side=None, *, scale=1.0):
        self.calls += 1
        inner = self.drop(torch.tanh(self.up(self.norm(x))))
        y = x + self.down(inner) * scale
        return (y if side is None else y * side["gate"]), inner.mean()


class Net(nn.Module):
    def __init__(self, blocks=3, twice=False, frozen=False, tied=False):
        super().__init__()
        self.twice = twice
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)
        if frozen:
            self.embed.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
            self.blocks[1].up.requires_grad_(False)

    def forward(self, x):
        gate = torch.sigmoid(x.mean(dim=1, keepdim=True))
        x, extra = self.embed(x), 0.0
        for block in [*self.blocks, *(self.blocks[:1] if self.twice else ())]:
            x, mean = block(x, {"gate": gate}, scale=0.5)
            extra = extra + mean
        return self.head(x) + extra


def setup_small():
    activations.LEAST_NBYTES, activations.BLOCK_NBYTES = 1, 1 << 12


def recompute_of(model):
    found = state_of(model).engine
    return found.find(Recompute) or found.feature(KeepsProducts)


def nothing_is_out(shelf):
    """Every byte of every block is free again."""
    gc.collect()
    shelf._take_back()
    return [sum(end - begin for begin, end in ranges) for ranges in shelf._free] == [b.numel() for b in shelf.blocks]


def batch(step):
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(10 * step + rank))


@every_product()
def train(stage, recompute, accumulate=1, precision=None, **net):
    setup_small()
    torch.manual_seed(5)
    model = Net(**net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, units=[Block], recompute=recompute, precision=precision)
    torch.manual_seed(8)
    losses = []
    for step in range(STEPS):
        parts = [model(batch(step + 100 * i)).float().square().mean() for i in range(accumulate)]
        for loss in parts:  # all forwards before any backward
            loss.backward()
        losses += [loss.item() for loss in parts]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = recompute_of(model)
    if found.shelf is not None:
        del loss, parts
        assert nothing_is_out(found.shelf) and found.shelf.nbytes
    calls = [block.calls for block in model.blocks]
    with zeor.full_params(model):
        return losses, values(model), calls


def compare(**setting):
    for stage in (0, 1, 2, 3):
        losses, params, calls = train(stage, False, **setting)
        for recompute in (True, "offload", "products"):
            again = train(stage, recompute, **setting)
            assert again[0] == losses, (stage, recompute)
            assert_equal(again[1], params)
            computed = [0 if setting.get("frozen") and i == 0 else c for i, c in enumerate(calls)]
            assert again[2] == [c + more for c, more in zip(calls, computed)], (stage, recompute, again[2])


SETTINGS = {
    "plain": {},
    "a unit called twice": {"twice": True},
    "frozen parts": {"frozen": True},
    "several forwards before backward": {"accumulate": 2},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_bits_are_those_without_and_each_call_is_computed_twice(ranks, setting):
    ranks(compare, 2, **SETTINGS[setting])


def test_a_world_of_one(ranks):
    ranks(compare, 1)


# ---- which units


def made(recompute, units=None, stage=3, **net):
    setup_small()
    torch.manual_seed(5)
    return zeor.shard(Net(**net), stage=stage, units=units, recompute=recompute)


def chosen(model):
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in recompute_of(model).modules]


def test_single_layers_and_units_around_other_units_are_left_out():
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert chosen(made(True)) == blocks  # embed and head are units too
    assert chosen(made(True, units=[Block, nn.Linear])) == blocks
    assert chosen(made(False)) == []
    torch.manual_seed(5)
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(2, 2))
    assert chosen(zeor.shard(model, units=[nn.Sequential, Block], recompute=True)) == ["0.0", "0.1"]


def test_modules_and_classes_can_be_named():
    assert chosen(made([Block])) == ["blocks.0", "blocks.1", "blocks.2"]
    model = Net()
    zeor.shard(model, recompute=[model.blocks[1], nn.LayerNorm, "offload"])
    assert chosen(model) == ["blocks.1", "blocks.0.norm", "blocks.2.norm"]  # of two in each other the outer one
    assert recompute_of(model).shelf is not None
    model(batch(0)).sum().backward()
    assert [block.calls for block in model.blocks] == [1, 2, 1]


@pytest.mark.parametrize("wrong", ["ofload", 1, None, [], [True], ["ofload"], ()])
def test_what_is_not_known_is_refused(wrong):
    known = r"recompute=.* is not known; use False, True, 'auto', 'products', 'offload', or a list"
    with pytest.raises(ValueError, match=known):
        zeor.shard(Net(), recompute=wrong)


def test_products_that_stay_and_inputs_that_leave_are_not_asked_for_together():
    with pytest.raises(ValueError, match=r"names both 'offload'.* and 'products'.*; leave one of them out"):
        zeor.shard(Net(), recompute=[Block, "offload", "products"])


def test_a_class_the_model_does_not_have_is_refused_before_anything_is_sharded():
    model = Net()
    with pytest.raises(ValueError, match="recompute= names the class Conv2d, which is no part of the model"):
        zeor.shard(model, recompute=[nn.Conv2d])
    assert not hasattr(model, "_zeor_sharded") and type(model.head.weight) is nn.Parameter


# ---- kept tensors


def kept_nbytes(model, x, called=None):
    """Bytes that autograd holds on the device between forward and backward, parameters left out."""
    params = {id(slot.param) for slot in vars(model)["_zeor_sharded"].engine.slots}
    found: dict[int, int] = {}

    def pack(tensor):
        if id(tensor) not in params and not isinstance(tensor, nn.Parameter):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = (model if called is None else called)(x).sum()
    nbytes = sum(found.values())
    loss.backward()
    return nbytes


def test_only_inputs_are_kept_and_with_offload_not_even_those():
    x = torch.randn(64, 3)
    one_input = 64 * WIDTH * 4
    nothing, inputs, offloaded = (kept_nbytes(made(how, units=[Block]), x) for how in (False, True, "offload"))
    assert nothing > 3 * 5 * one_input
    assert inputs >= 3 * one_input
    assert offloaded <= inputs - 3 * one_input + one_input  # the last block's output goes into the head


def products_run(model, step):
    with Counted() as run:
        model(batch(step)).square().mean().backward()
    return run.count


@every_product()
def test_with_products_kept_only_what_is_cheap_is_computed_again():
    again, kept = made(True), made([Block, "products"])
    assert chosen(kept) == chosen(again)
    # Two products in each of three blocks; the second of a block is needed, as its result is scaled.
    assert [products_run(again, step) - products_run(kept, step) for step in range(3)] == [0, 6, 6]


def test_the_host_memory_of_a_step_is_used_again():
    model = made("offload")
    shelf = recompute_of(model).shelf
    for step in range(4):
        model(batch(step)).sum().backward()
        assert len(shelf.blocks) == 1
    for rows in (7, 3, 11, 2):  # of other sizes too
        model(torch.randn(rows, 3)).sum().backward()
    assert len(shelf.blocks) == 1 and nothing_is_out(shelf)


def test_a_part_larger_than_a_block_gets_a_larger_block():
    setup_small()
    shelf = activations.Shelf(torch.device("cpu"))
    parts = [shelf.cut(5000), shelf.cut(100), shelf.cut(20_000)]
    assert [part.bytes.numel() for part in parts] == [5120, 512, 20_480]
    assert len({part.bytes.data_ptr() for part in parts}) == 3
    assert all(math.log2(block.numel()).is_integer() for block in shelf.blocks)
    before = shelf.nbytes
    del parts
    assert nothing_is_out(shelf)
    shelf.cut(20_480 + 5120 + 512 if len(shelf.blocks) == 1 else 20_480)
    assert shelf.nbytes == before


# ---- ends of a graph


@pytest.mark.parametrize("recompute", [True, "offload"])
def test_backward_twice_and_never(recompute):
    model, plain = made(recompute), made(False)
    grads = []
    for each in (plain, model):
        torch.manual_seed(1)
        loss = each(batch(0)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        with zeor.full_params(each, grads=True):
            grads.append({name: param.grad.clone() for name, param in each.named_parameters()})
    assert_equal(grads[1], grads[0])
    model(batch(1))  # and nothing more
    with torch.no_grad():
        model(batch(1))
    if recompute == "offload":
        del loss
        assert nothing_is_out(recompute_of(model).shelf)


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.fails = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x):
        if self.fails:
            raise ValueError("as wanted")
        return torch.tanh(self.inner(x))


def test_a_forward_that_raised_leaves_nothing_and_the_next_is_right():
    setup_small()
    results = []
    for recompute in (False, "offload"):
        torch.manual_seed(2)
        model = nn.Sequential(*[Fails() for _ in range(3)])
        zeor.shard(model, stage=3, recompute=recompute)
        model[2].fails = recompute is not False
        if model[2].fails:
            with pytest.raises(ValueError, match="as wanted"):
                model(torch.ones(2, WIDTH))
            assert nothing_is_out(recompute_of(model).shelf)
        model[2].fails = False
        model(torch.ones(2, WIDTH)).sum().backward()
        with zeor.full_params(model, grads=True):
            results.append({name: param.grad.clone() for name, param in model.named_parameters()})
    assert_equal(results[1], results[0])


class InPlace(Fails):
    def forward(self, x):
        return self.inner(x.mul_(2.0))


def test_an_input_changed_in_place_is_refused():
    setup_small()
    model = zeor.shard(nn.Sequential(Fails(), InPlace(), InPlace()), recompute="offload")
    with pytest.raises(RuntimeError, match=r"of shape \(2, 6\), was changed in place in the unit or after it"):
        model(torch.ones(2, WIDTH)).sum().backward()


def double_backward(recompute, stage):
    setup_small()
    torch.manual_seed(5)
    model = zeor.shard(Net().eval(), stage=stage, units=[Block], recompute=recompute)
    x = batch(0).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    with zeor.full_params(model, grads=True):
        return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def compare_double_backward():
    for stage in (1, 3):
        want = double_backward(False, stage)
        for recompute in (True, "offload"):
            assert_equal(double_backward(recompute, stage), want)


def test_gradients_of_gradients(ranks):
    ranks(compare_double_backward, 2)


# ---- beside other things


def test_evaluation_is_left_alone():
    model = made("offload")
    with torch.no_grad():
        model(batch(0))
    assert [block.calls for block in model.blocks] == [1, 1, 1] and recompute_of(model).shelf.nbytes == 0


@every_product()
def test_autocast_is_the_same_when_computed_again():
    grads = []
    for recompute in (False, True, "offload", "products"):
        model = made(recompute, stage=1)
        for _ in range(2):  # the second time products are kept
            model.zero_grad()
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch(0)).float().square().mean()
            loss.backward()
        with zeor.full_params(model, grads=True):
            grads.append({name: param.grad.clone() for name, param in model.named_parameters()})
    for each in grads[1:]:
        assert_equal(each, grads[0])


def test_full_params_copies_and_unshard_see_the_users_forward():
    model = made(True)
    assert "forward" in vars(model.blocks[0])
    with zeor.full_params(model):
        assert not [name for name in vars(model.blocks[0]) if name == "forward" or name.startswith("_zeor")]
        other = copy.deepcopy(model)
    assert "forward" in vars(model.blocks[0]) and "forward" not in vars(other.blocks[0])
    other(batch(0)).sum().backward()
    assert other.blocks[0].calls == 1
    zeor.unshard(model)
    assert "forward" not in vars(model.blocks[0])
    model(batch(0)).sum().backward()
    assert model.blocks[0].calls == 1


def test_a_forward_of_the_users_own_on_the_instance_is_kept():
    torch.manual_seed(5)
    model, seen = Net(), []
    inner = model.blocks[0].forward

    def mine(*args, **kwargs):
        seen.append(1)
        return inner(*args, **kwargs)

    model.blocks[0].forward = mine
    zeor.shard(model, recompute=True)
    model(batch(0)).sum().backward()
    assert len(seen) == 2
    zeor.unshard(model)
    assert model.blocks[0].forward is mine


class Checkpoints(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x, _ = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def own_checkpoints(reentrant, stage):
    found = []
    for recompute in (False, "offload"):
        setup_small()
        torch.manual_seed(5)
        model = zeor.shard(Checkpoints(reentrant), stage=stage, units=[Block], recompute=recompute)
        torch.manual_seed(6)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                model(batch(step)).square().mean().backward()
        told = [str(w.message) for w in caught if "checkpoints its own activations" in str(w.message)]
        assert len(told) == (1 if recompute and not reentrant else 0)
        assert [block.calls for block in model.blocks] == [4, 4, 4]
        with zeor.full_params(model, grads=True):
            found.append({name: param.grad.clone() for name, param in model.named_parameters()})
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_checkpoints_itself_is_computed_no_third_time(ranks, reentrant):
    ranks(own_checkpoints, 2, reentrant, 3)


# ---- transformers


def language_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    return GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=16, n_layer=3, n_head=2, vocab_size=50))


@every_product()
def train_language_model(recompute, own=False):
    setup_small()
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, stage=3, recompute=recompute)
    if own:
        model.gradient_checkpointing_enable()
    torch.manual_seed(9)
    losses = []
    for step in range(2):
        tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(step + 7 * dist.get_rank()))
        # A cache gives keys another layout in memory, and attention another order of sums.
        cache = {} if recompute else {"use_cache": False}
        loss = model(input_ids=tokens, labels=tokens, **cache).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with zeor.full_params(model):
        return losses, values(model)


def compare_language_models():
    losses, params = train_language_model(False)
    for recompute, own in [(True, False), ("offload", False), ("offload", True), ("products", True)]:
        again = train_language_model(recompute, own)
        assert again[0] == losses, (recompute, own)
        assert_equal(again[1], params)


@pytest.mark.long
def test_a_language_model_of_transformers_with_its_cache_and_its_own_checkpoints(ranks):
    ranks(compare_language_models, 2)


# ---- compiled


class Pure(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x, *, scale):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * scale


class PureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Pure() for _ in range(10))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def train_compiled(how, recompute, stage):
    setup_small()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(5)
    model = PureNet()
    if how == "in place":
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zeor.shard(model, optimizer, stage=stage, units=[Pure], recompute=recompute)
    called = torch.compile(model, backend="aot_eager") if how == "whole" else model
    for step in range(STEPS):
        called(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if recompute and how != "not at all":
            kept = kept_nbytes(model, batch(step), called)
            optimizer.zero_grad()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with zeor.full_params(model):
        return values(model), graphs, kept if recompute else 0


def compare_compiled(how, stage):
    want, _, _ = train_compiled("not at all", False, stage)
    kept = []
    for recompute in (True, "offload"):
        found, graphs, nbytes = train_compiled(how, recompute, stage)
        assert_equal(found, want)
        assert 1 <= graphs <= 6, graphs  # not one for each of ten blocks
        kept.append(nbytes)
    assert kept[1] <= kept[0] - 9 * ROWS * WIDTH * 4, kept


@pytest.mark.long
@pytest.mark.parametrize("how, stage", [("in place", 3), ("in place", 1), ("whole", 3)])
def test_compiled_units_are_computed_again_by_the_compiler_and_offloaded(ranks, how, stage):
    ranks(compare_compiled, 2, how, stage, timeout=300)


# ---- streams, played on the host


class Stream:
    """Work is done at once; what waited for what is written down."""

    def __init__(self, log):
        self._log, self._events = log, 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def wait_stream(self, other):
        self._log.append("side waits for compute")

    def record_event(self):
        self._events += 1
        self._log.append(f"event {self._events}")
        return self._events

    def wait_event(self, event):
        self._log.append(f"compute waits for {event}")


def played_shelf(monkeypatch):
    """A shelf that believes in streams, and what it did."""
    setup_small()
    log: list[str] = []
    shelf = activations.Shelf(torch.device("cpu"))
    monkeypatch.setattr(shelf, "_stream", Stream(log))
    monkeypatch.setattr(shelf, "compute_stream", lambda: Stream(log))
    return shelf, log


def test_an_input_is_held_until_its_copy_is_waited_for(monkeypatch):
    shelf, log = played_shelf(monkeypatch)
    inputs = [torch.full((3,), float(i)) for i in range(4)]
    kept, refs = [], []
    for x in inputs:
        kept.append(activations.Kept(shelf, ((x,), {})))
        kept[-1].inputs()  # forward
        refs.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
    del x
    inputs.clear()
    gc.collect()
    # The first two are let go of once the compute stream waits for their copies; the last two are held.
    assert [ref.expired() for ref in refs] == [True, True, False, False]
    assert [line for line in log if line.startswith("compute")] == ["compute waits for 1", "compute waits for 2"]
    log.clear()
    for number in (3, 2):  # the last two never travel back; when the third is asked for, the second is on its way
        (x,), _ = kept[number].inputs()
        assert x.tolist() == [float(number)] * 3
    assert log == ["compute waits for 4", "side waits for compute", "event 5", "compute waits for 3"]
    log.clear()
    (x,), _ = kept[1].inputs()  # arrived by event 5, and the first one is sent for
    assert x.tolist() == [1.0] * 3
    assert log == ["side waits for compute", "event 6", "compute waits for 5"]
    (x,), _ = kept[1].inputs()
    assert x.tolist() == [1.0] * 3  # retain_graph: it is brought again
    log.clear()
    del kept[0], x
    gc.collect()
    assert log == ["compute waits for 6"]  # on its way and never asked for: its memory must not be reused before
    del kept
    assert nothing_is_out(shelf)


def test_what_is_not_worth_it_or_not_ours_stays(monkeypatch):
    shelf, _ = played_shelf(monkeypatch)
    activations.LEAST_NBYTES = 64
    shared = torch.randn(32)
    kept = activations.Kept(shelf, ((shared,), {}))
    assert len(kept.aways) == 1
    stays = {
        "small": torch.randn(3), "integers": torch.arange(99), "a parameter": nn.Parameter(torch.randn(99)),
        "spread out": torch.randn(1, 99).expand(5, 99), "a leaf": torch.randn(99, requires_grad=True),
        "seen before": shared.view(4, 8),
    }  # fmt: skip
    again = activations.Kept(shelf, ((), stays))
    assert not again.aways
    again.inputs()
    _, brought = again.inputs()
    assert all(brought[name] is tensor for name, tensor in stays.items())
    turned = torch.randn(8, 9).t()
    other = activations.Kept(shelf, ((turned, turned), {}))
    assert len(other.aways) == 1
    other.inputs()
    (one, two), _ = other.inputs()
    assert one is two and torch.equal(one, turned) and one.stride() == turned.stride()


def test_where_memory_cannot_be_pinned_plain_memory_is_used_and_said_once(caplog, monkeypatch):
    shelf, _ = played_shelf(monkeypatch)
    shelf._pins = True
    plain = torch.empty

    def refuses(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand more")
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuses)
    parts = [shelf.cut(1 << 12), shelf.cut(1 << 16)]
    assert len(shelf.blocks) == 2 and len(parts) == 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "could not be pinned for offloaded inputs (CUDA error: out of memory)" in told[0]
