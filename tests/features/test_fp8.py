"""precision="fp8": torchao's linears under sharding, emulated on CPU ranks; weights as 8-bit codes.

Every run is compared in bits with one at stage 0 whose weights rest in bf16 and are cast by torchao at each call; that
one with plain PyTorch and torchao in one process.
"""

from __future__ import annotations

import ast
import copy
import logging
import pickle
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F

import zeor
from tests.covering import PAIRS
from tests.every_product import every_product
from tests.loops import assert_equal
from zeor.access.sharded import state_of
from zeor.features import fp8
from zeor.features.products import Counted
from zeor.memory import device as devices
from zeor.plan import Plan
from zeor.step import coded

WIDTH, WORDS, STEPS, ROWS = 32, 48, 3, 2
INNER = ["attention", "up", "down"]
# The largest difference of a loss over STEPS steps to plain PyTorch with torchao; ties of the cast to bf16 are all that
# differs, and gradients of several ranks, which are averaged in fp32 and rounded to bf16 once.
PLAIN_BOUND = 2e-3


class Block(nn.Module):
    """A weight that is small enough to stay whole (attention), a bias, a router and a layer of no use to fp8."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)
        self.router, self.odd = nn.Linear(width, 16), nn.Linear(16, 5)

    def forward(self, x):
        x = x + torch.tanh(self.attention(self.norm(x)))
        x = x + self.down(F.gelu(self.up(x)))
        return x * self.odd(self.router(x)).mean(-1, keepdim=True).sigmoid()


class Net(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(rank=0, world=1, steps=STEPS):
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        whole = torch.randint(0, WORDS, (world, 2 * ROWS, 17), generator=generator)
        yield whole[rank]


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def as_fp8(recipe="tensorwise", **options):
    return zeor.Precision(fp8=zeor.Float8(recipe, **options))


def make(precision, kind=torch.optim.AdamW, **options):
    torch.manual_seed(3)
    model = Net()
    optimizer = kind(model.parameters(), lr=1e-2)
    return zeor.shard(model, optimizer, precision=precision, **options)


def steps(model, optimizer, micro=1, data=None):
    losses = []
    data = data or batches(dist.get_rank() if dist.is_initialized() else 0, world())
    for tokens in data:
        parts = tokens.chunk(micro)
        for number, part in enumerate(parts):
            loss = loss_of(model, part) / micro
            if number + 1 < micro:
                with zeor.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def full(model):
    with zeor.full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def train(precision, micro=1, **options):
    model, optimizer = make(precision, **options)
    losses = steps(model, optimizer, micro)
    return losses, full(model)


def assert_same(run, reference, what):
    assert run[0] == reference[0], f"{what}: losses {run[0]}, not {reference[0]}"
    assert_equal(run[1], reference[1])


# ---- bits


def _stages(micro, recipe):
    reference = train(as_fp8(recipe, codes=False), micro, stage=0)
    before = dict(Net().named_parameters())
    assert all(not torch.equal(before[name], value) for name, value in reference[1].items()), "it did not train"
    for stage in (0, 1, 2, 3):
        for codes in (False, True) if recipe == "tensorwise" else (None,):
            run = train(as_fp8(recipe, codes=codes), micro, stage=stage)
            assert_same(run, reference, f"stage {stage}, codes {codes}")
    return reference[0]


@pytest.mark.parametrize("world, micro", [(1, 2), (2, 1), (3, 2)])
def test_stages_and_codes_give_the_same_bits(ranks, world, micro):
    losses = ranks(_stages, world, micro, "tensorwise")
    assert len(losses[0]) == STEPS * micro and len(set(losses[0])) == STEPS * micro


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_rowwise_recipes_give_the_same_bits_at_all_stages(ranks, recipe):
    assert len(ranks(_stages, 2, 1, recipe)[0]) == STEPS


def _plain(world_size, recipe="tensorwise"):
    """Masters in fp32, a bf16 copy converted by torchao; each rank's batch in turn, gradients averaged in fp32."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(3)
    masters = Net()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    computes = copy.deepcopy(masters).bfloat16()
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(
        computes, config=config, module_filter_fn=lambda module, name: name.split(".")[-1] in INNER
    )
    losses = [[] for _ in range(world_size)]
    for step in zip(*(batches(rank, world_size) for rank in range(world_size))):
        with torch.no_grad():
            for compute, master in zip(computes.parameters(), masters.parameters()):
                compute.copy_(master)
        grads = []
        for rank, tokens in enumerate(step):
            loss = loss_of(computes, tokens)
            grads.append(torch.autograd.grad(loss, list(computes.parameters())))
            losses[rank].append(loss.item())
        for master, parts in zip(masters.parameters(), zip(*grads)):
            master.grad = torch.stack([part.float() for part in parts]).mean(0)
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        optimizer.step()
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_losses_are_those_of_plain_torchao(ranks, world):
    expected = _plain(world)
    for rank, (losses, _) in enumerate(ranks(train, world, as_fp8(codes=True), stage=3)):
        apart = max(abs(a - b) for a, b in zip(losses, expected[rank], strict=True))
        assert apart <= PLAIN_BOUND, f"rank {rank}: {losses}, not {expected[rank]}"
    assert train(as_fp8(codes=False))[0] != train("bf16")[0], "8 bits change nothing?"


def _on_two_nodes(pairs):
    reference = train(as_fp8(codes=False), 2, stage={"node": 0, "gpu": 0}, hierarchy=2)
    for inside, across in pairs:
        stage = {"node": across, "gpu": inside}
        run = train(as_fp8(codes=True), 2, stage=stage, hierarchy=2)
        assert_same(run, reference, str(stage))
    return reference[0]


STAGE_PAIRS = [(inside, across) for inside in range(4) for across in range(4) if across < 3 or inside == 3]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(0, 2), (1, 0), (3, 0), (3, 1), (3, 3)], id="some"),
        pytest.param(STAGE_PAIRS, id="all", marks=pytest.mark.whole),
    ],
)
def test_stage_pairs_give_the_same_bits(ranks, pairs):
    assert len(set(ranks(_on_two_nodes, 4, pairs, timeout=240)[0])) == 2 * STEPS


FACTORS = {
    "stage": [0, 1, 2, 3],
    "micro": [1, 2],
    "recompute": [False, True, "auto"],
    "compile": [False, {"backend": "aot_eager"}],
    "offload": [None, "host"],
    "overlap": [True, False],
}


def _with_others(rows):
    known = {micro: train(as_fp8(codes=False), micro, stage=0) for micro in FACTORS["micro"]}
    for row in rows:
        options = dict(row)
        micro = options.pop("micro")
        model, optimizer = make(as_fp8(), **options)
        assert bool(coded_lanes(model)) == (row["offload"] is None), "a streamed update makes no codes"
        assert_same((steps(model, optimizer, micro), full(model)), known[micro], str(row))
    return len(rows)


@pytest.mark.whole
@pytest.mark.parametrize("select", PAIRS)
def test_recompute_compile_accumulation_and_offload_keep_the_bits(ranks, select):
    factors = {name: [repr(value) for value in values] for name, values in FACTORS.items()}  # rows are hashed
    rows = [{name: ast.literal_eval(value) for name, value in row.items()} for row in select(factors)]
    assert ranks(_with_others, 2, rows, timeout=280)[0] == len(rows) > 7


@every_product()
def _products(recompute):
    """How many ran, too."""
    with Counted() as run:
        found = train(as_fp8(), stage=3, recompute=recompute)
    return found, run.count


def _with_products():
    (known, again), (found, fewer) = _products(True), _products("products")
    assert_same(found, known, "products")
    return again - fewer


def test_products_by_codes_are_kept_where_the_rest_is_computed_again(ranks):
    # Of three blocks all five linears, as the last one's result goes into a sigmoid; from the second step on.
    assert ranks(_with_products, 2)[0] == 3 * 5 * (STEPS - 1)


def _matrix_optimizer():
    class Matrices(torch.optim.Muon):
        def __init__(self, params, lr):
            super().__init__([p for p in params if p.dim() == 2], lr=lr)

    runs = [
        train(as_fp8(codes=codes), kind=Matrices, stage=stage)
        for codes, stage in ((False, 0), (True, 0), (True, 1), (True, 3))
    ]
    for run in runs[1:]:
        assert_same(run, runs[0], "Muon")
    return runs[0][0]


def test_owners_publish_codes(ranks):
    assert len(ranks(_matrix_optimizer, 2)[0]) == STEPS


def _released():
    plain = [p.dim() for p in Net().parameters()]
    assert max(plain) == 2
    found = []
    for codes, release in ((False, False), (True, True)):
        model, optimizer = make(as_fp8(codes=codes), release=release)
        losses = []
        for tokens in batches(dist.get_rank(), world()):
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, full(model)))
    assert_same(found[1], found[0], "release")
    return found[0][0]


def test_release_updates_inside_backward_and_codes_follow(ranks):
    assert len(ranks(_released, 2)[0]) == STEPS


# ---- bytes


def coded_lanes(model):
    return [lane for unit in state_of(model).engine.units for lane in unit.lanes if lane.coded]


class Stack(nn.Module):
    """Blocks of nothing but a linear without bias: all that is gathered is its weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _gathered(precision, stage):
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zeor.shard(model, optimizer, precision=precision, stage=stage)
    for _ in range(2):
        model(torch.ones(16, 64)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zeor.traffic(model)["bytes_by_verb"]["gather"], zeor.report(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gathers_send_half_the_bytes_of_bf16(ranks, stage):
    numel = 3 * 64 * 64
    for (wide, as_bf16), (narrow, as_codes) in zip(
        ranks(_gathered, 2, "bf16", stage), ranks(_gathered, 2, as_fp8(), stage), strict=True
    ):
        assert wide > 0 and narrow * 2 == wide
        held = numel if stage < 3 else numel // 2
        assert as_bf16["compute"] == 2 * held and as_codes["compute"] == held
        assert as_bf16["master"] == numel and as_codes["master"] == 2 * numel  # a remainder of 2 bytes; fp32


def _predicted(stage):
    model, optimizer = make(as_fp8(), stage=stage)
    steps(model, optimizer)
    return zeor.report(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_predictions_count_codes(ranks, stage):
    model = Net()
    found = zeor.predict(model, world=2, stage=stage, precision=as_fp8())
    measured = ranks(_predicted, 2, stage)
    for role in ("compute", "master"):
        assert getattr(found, role) == measured[0][role], role
    wide = zeor.predict(model, world=2, stage=stage, precision="bf16")
    assert found.compute < wide.compute and found.master > wide.master
    assert not any(fp8.CODE_ATTRIBUTE in vars(module) for module in model.modules())
    assert zeor.predict(model, stage=stage, precision="fp8") == zeor.predict(model, stage=stage, precision="bf16")


def _agreements(precision, stage):
    """In STEPS steps, once settled: how many, and the bytes that this rank sends of them."""
    model, optimizer = make(precision, stage=stage)
    steps(model, optimizer)
    before = zeor.traffic(model)
    steps(model, optimizer)
    after = zeor.traffic(model)
    return [after[kind]["agree"] - before[kind]["agree"] for kind in ("calls", "bytes_by_verb")]


@pytest.mark.parametrize("stage", [1, 3])
def test_scales_of_all_weights_are_one_exchange_per_step(ranks, stage):
    calls, nbytes = ranks(_agreements, 2, as_fp8(), stage)[0]
    others, beside = ranks(_agreements, 2, "bf16", stage)[0]
    weights = 3 * len(INNER)
    assert calls - others == STEPS and nbytes - beside == STEPS * 4 * weights


def _casts(codes, micro):
    """Elements cast here by zeor, and calls of torchao's cast for a weight, in one step."""
    from torchao.float8 import float8_linear
    from torchao.float8.float8_training_tensor import GemmInputRole

    model, optimizer = make(as_fp8(codes=codes), stage=3)
    found = {"zeor": 0, "torchao": 0}
    encode, cast = coded.encode_into, float8_linear.hp_tensor_to_float8_dynamic

    def encode_into(into, *args):
        found["zeor"] += into.numel()
        encode(into, *args)

    def to_float8(*args, gemm_input_role, **kwargs):
        found["torchao"] += gemm_input_role is GemmInputRole.WEIGHT
        return cast(*args, gemm_input_role=gemm_input_role, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coded, "encode_into", encode_into)
        patch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", to_float8)
        steps(model, optimizer, micro, data=batches(dist.get_rank(), world(), steps=1))
    return found


def test_weights_are_cast_once_per_step(ranks):
    weights = 3 * (WIDTH * WIDTH + 8 * WIDTH * WIDTH)
    for micro in (1, 2, 4):
        found = ranks(_casts, 2, True, micro)
        assert sum(each["zeor"] for each in found) == weights and not any(each["torchao"] for each in found)
    at_each_call = ranks(_casts, 2, False, 2)[0]
    assert at_each_call["zeor"] == 0 and at_each_call["torchao"] >= 2 * 3 * len(INNER)


# ---- what a user holds


def _reads_and_writes(stage):
    model, optimizer = make(as_fp8(codes=True), stage=stage)
    weight, exact = model.blocks[0].up.weight, full(model)["blocks.0.up.weight"]
    assert weight.dtype == torch.bfloat16 and weight.shape == (4 * WIDTH, WIDTH) and weight.is_contiguous()
    assert weight.stride() == (WIDTH, 1)
    seen = {}
    model.blocks[0].up.register_forward_hook(lambda module, args, out: seen.update(now=module.weight * 1))
    steps(model, optimizer, data=batches(steps=1))
    exact = full(model)["blocks.0.up.weight"]
    loss_of(model, next(batches()))
    error = (seen["now"].float() - exact).abs()
    assert 0 < error.max() <= exact.abs().max() / 16  # e4m3 has three bits of mantissa
    with pytest.raises(RuntimeError, match=r"8-bit codes, so only whole values"), torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="full_params"):
        pickle.dumps(model.state_dict()["blocks.0.up.weight"])
    value = torch.randn(4 * WIDTH, WIDTH)
    with torch.no_grad():
        weight.copy_(value)
    assert torch.equal(full(model)["blocks.0.up.weight"], value)
    with zeor.full_params(model, write=True):
        assert type(model.blocks[0].up) is nn.Linear
        model.blocks[0].up.weight.data.mul_(2)
    assert type(model.blocks[0].up).__name__ == "CodedLinear" and model.blocks[0].up.weight is weight
    assert torch.equal(full(model)["blocks.0.up.weight"], 2 * value)
    model.load_state_dict({**Net().state_dict(), "blocks.0.up.weight": value})
    mine = loss_of(model, next(batches())).item()
    other, _ = make(as_fp8(codes=False), stage=0)
    other.load_state_dict(full(model))
    assert mine == loss_of(other, next(batches())).item()  # codes followed every write
    return True


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reads_see_codes_and_writes_reach_the_master(ranks, stage):
    assert all(ranks(_reads_and_writes, 2, stage))


def test_a_read_in_forward_trains_the_weight():
    grads = []
    for codes in (True, False):
        model, _ = make(as_fp8(codes=codes))
        (loss_of(model, next(batches())) + model.blocks[0].up.weight.float().square().sum()).backward()
        with zeor.full_params(model, grads=True):
            grads.append(model.blocks[0].up.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1], rtol=0.1, atol=0.1)  # the read sees three bits of mantissa
    assert grads[0].abs().max() > 0


def test_modules_parameters_and_hooks_stay_the_same_objects():
    torch.manual_seed(0)
    model = Net()
    linear, weight, calls = model.blocks[0].up, model.blocks[0].up.weight, []
    linear.register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    model, optimizer = zeor.shard(model, optimizer, precision=as_fp8(codes=True))
    assert model.blocks[0].up is linear and linear.weight is weight
    loss_of(model, next(batches())).backward()
    assert calls == [1]
    optimizer.zero_grad()
    model, optimizer = zeor.unshard(model, optimizer)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    assert model.blocks[0].up is linear and linear.weight is weight and type(weight) is nn.Parameter
    assert set(vars(linear)) == set(vars(nn.Linear(1, 1)))
    assert_equal(dict(model.named_parameters()), values)
    loss_of(model, next(batches())).backward()
    assert weight.grad is not None and calls == [1, 1]


# ---- other ways to fill and read a model


def _saved_nbytes(folder):
    """By dtype."""
    found = Counter()
    for path in Path(folder).rglob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                tensor = tensors.get_tensor(name)
                found[tensor.dtype] += tensor.nbytes
    return found


def _saved_and_loaded(folder):
    runs = {}
    for name, precision, stage in (("codes", as_fp8(), 3), ("bf16", "bf16", 2)):
        model, optimizer = make(precision, stage=stage)
        steps(model, optimizer)
        zeor.save(f"{folder}/{name}", model, optimizer, step=1)
        runs[name] = full(model)
    assert _saved_nbytes(f"{folder}/codes") == _saved_nbytes(f"{folder}/bf16")
    assert not {torch.bfloat16, torch.float8_e4m3fn} & set(_saved_nbytes(f"{folder}/codes"))
    for name in runs:
        found = []
        for precision, stage in ((as_fp8(), 3), (as_fp8(), 1), (as_fp8(codes=False), 0)):
            model, optimizer = make(precision, stage=stage)
            zeor.load(f"{folder}/{name}", model, optimizer)
            assert_equal(full(model), runs[name])
            found.append((steps(model, optimizer), full(model)))
        for run in found[1:]:
            assert_same(run, found[0], f"{name} loaded")
        model, optimizer = make("bf16", stage=3)
        zeor.load(f"{folder}/{name}", model, optimizer)
        assert_equal(full(model), runs[name])
    return True


def test_checkpoints_hold_masters_and_load_with_fp8_and_without(ranks, tmp_path):
    assert all(ranks(_saved_and_loaded, 2, str(tmp_path)))


def _from_meta():
    found = []
    for codes, stage in ((False, 0), (True, 1), (True, 3)):
        with zeor.on_meta():
            model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = zeor.shard(model, optimizer, precision=as_fp8(codes=codes), stage=stage)
        zeor.init_parameters(model, seed=5)
        found.append((steps(model, optimizer), full(model)))
    for run in found[1:]:
        assert_same(run, found[0], "from meta")
    return found[0][0]


def test_models_on_meta_are_filled_and_trained(ranks):
    assert len(ranks(_from_meta, 2)[0]) == STEPS


def _averaged():
    found = []
    for codes, stage in ((False, 0), (True, 2), (True, 3)):
        model, optimizer = make(as_fp8(codes=codes), stage=stage)
        average = zeor.ema(model, 0.5)
        average.update()
        steps(model, optimizer)
        average.update()
        with average.applied(), torch.no_grad():
            inside = loss_of(model, next(batches())).item()
        with torch.no_grad():
            found.append((inside, loss_of(model, next(batches())).item()))
    assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]
    return True


def test_averages_take_the_weights_place(ranks):
    assert all(ranks(_averaged, 2))


# ---- which linears


def test_default_filter_takes_blocks_linears_alone(caplog):
    with caplog.at_level(logging.INFO, "zeor"):
        model, _ = make("fp8")
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind == "Float8Linear"} == {
        f"blocks.{number}.{name}" for number in range(3) for name in INNER
    }
    lines = [record.getMessage() for record in caplog.records]
    line = next(text for text in lines if text.startswith("fp8 (tensorwise)"))
    assert line == (
        "fp8 (tensorwise): 9 of 16 linears; not: 3 that route; 3 with a side that is no multiple of 16; "
        "1 outside repeated blocks"
    )
    assert any("emulated on a CPU" in text for text in lines)


class Gated(nn.Module):
    """A gated MLP whose gate has a router's name, or a router of `experts` experts."""

    def __init__(self, width, inner, experts=0):
        super().__init__()
        self.gate = nn.Linear(width, experts or inner, bias=False)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)


@pytest.mark.parametrize(
    ("made", "gates"), [((32, 96), 2), ((64, 32), 2), ((32, 32), 2), ((64, 96, 16), 0)], ids=str
)
def test_the_gate_of_a_gated_mlp_is_no_router(made, gates):
    chosen, left = fp8.choose(nn.Sequential(Gated(*made), Gated(*made)), zeor.Float8(), None)
    assert sum(name.endswith("gate") for name in chosen) == gates and len(chosen) == 4 + gates
    assert left["that route"] == 2 - gates


def test_a_filter_and_units_choose_others():
    model = Net()
    model.blocks[0].none = nn.Linear(0, 16, bias=False, device="meta")
    chosen, left = fp8.choose(model, zeor.Float8(filter=lambda linear, name: name.endswith("up")), None)
    assert list(chosen) == [f"blocks.{number}.up" for number in range(3)] and left["by your filter"] == 10
    single = nn.Sequential(nn.Sequential(nn.Linear(16, 16)), nn.Linear(16, 16))
    assert list(fp8.choose(single, zeor.Float8(), None)[0]) == []
    assert list(fp8.choose(single, zeor.Float8(), [single[0]])[0]) == ["0.0"]


def test_tied_adapters_and_own_classes_are_left_alone():
    model = Net(blocks=2)
    model.blocks[0].up.weight = model.blocks[1].up.weight
    model.blocks[0].lora_a = nn.Linear(WIDTH, 16)
    model.blocks[0].attention = nn.modules.linear.NonDynamicallyQuantizableLinear(WIDTH, WIDTH)
    chosen, left = fp8.choose(model, zeor.Float8(), None)
    assert set(chosen) == {"blocks.0.down", "blocks.1.attention", "blocks.1.down"}
    assert left["with a weight that another module uses too"] == 2
    assert left["of adapters"] == 1 and left["of a class of their own"] == 1


def test_frozen_linears_compute_in_8_bits_and_rest_in_bf16():
    model = Net()
    model.blocks[0].requires_grad_(False)
    model, _ = zeor.shard(model, torch.optim.SGD(model.blocks[1:].parameters(), lr=0.1), precision=as_fp8(codes=True))
    assert type(model.blocks[0].up).__name__ == "Float8Linear"
    assert type(model.blocks[1].up).__name__ == "CodedLinear"
    loss_of(model, next(batches())).backward()
    model.blocks[0].requires_grad_(True)
    loss_of(model, next(batches())).backward()
    assert model.blocks[0].up.weight.grad.norm() > 0


def test_models_that_the_user_converted_keep_working(caplog):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def converted():
        torch.manual_seed(3)
        model = Net()
        convert_to_float8_training(model.blocks, config=Float8LinearConfig(emulate=True),
                                   module_filter_fn=lambda module, name: name.split(".")[-1] in INNER)  # fmt: skip
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    reference = train(as_fp8(codes=False))
    for precision in ("bf16", "fp8"):
        with caplog.at_level(logging.INFO, "zeor"):
            model, optimizer = zeor.shard(*converted(), precision=precision)
        assert_same((steps(model, optimizer), full(model)), reference, precision)
    assert any("9 converted by yourself" in record.getMessage() for record in caplog.records)


# ---- errors


def test_without_torchao_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = Net()
    with pytest.raises(ImportError, match="pip install -U torchao"):
        zeor.shard(model, precision="fp8")
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


@pytest.mark.parametrize(
    "found, recipe, lacks",
    [((8, 0), "tensorwise", "8.9"), ((8, 9), "tensorwise", ""), ((8, 9), "rowwise", "9.0"), ((9, 0), "rowwise", "")],
)
def test_gpus_without_float8_units_are_named(monkeypatch, found, recipe, lacks):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    said = devices.lacks_float8(torch.device("cuda"), recipe)
    assert bool(lacks) == bool(said) and (not lacks or (lacks in said and "an old one" in said))
    if lacks:
        with pytest.raises(RuntimeError, match=r"float8 units.*precision='bf16'"):
            fp8.check(zeor.Float8(recipe), torch.device("cuda"))


def test_a_refused_shard_leaves_plain_linears():
    model = Net()
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError):
        zeor.shard(model, stranger, precision=as_fp8(codes=True))
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    assert set(vars(model.blocks[0].up)) == set(vars(nn.Linear(1, 1)))


def test_options_that_do_not_fit_are_refused():
    for options, said in (
        ({"recipe": "tensorwize"}, "did you mean 'tensorwise'"),
        ({"recipe": "rowwise", "codes": True}, "scales differ between forward and backward"),
        ({"filter": 3}, "a function of a linear"),
        ({"codes": "yes"}, "True, False or None"),
        ({"pad": 1}, "True or False"),
    ):
        with pytest.raises(ValueError, match=said):
            zeor.Float8(**options)
    with pytest.raises(ValueError, match="leave compute= out"):
        zeor.Precision(compute=torch.float16, fp8="tensorwise")
    with pytest.raises(ValueError, match=r"zeor\.Float8"):
        zeor.Precision(fp8=8)
    assert make(as_fp8(pad=True))[0].blocks[0].up.config.pad_inner_dim
    assert not make(as_fp8())[0].blocks[0].up.config.pad_inner_dim
    with pytest.raises(ValueError, match="leave codes= out"):
        zeor.shard(Net(), precision=as_fp8(codes=True), offload="host")
    assert zeor.Precision(fp8="rowwise") == as_fp8("rowwise") and as_fp8().compute == torch.bfloat16
    plan = Plan.parse({"precision": as_fp8(filter=lambda linear, name: True)})
    assert "0x" not in plan.describe()["precision"]  # ranks compare it
