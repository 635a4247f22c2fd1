"""push: whole weights in buckets, to a process of plain torch too; what is exported is what arrives, in every bit."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zeor
from examples import engine as engines
from tests import loops
from tests.covering import covering
from tests.parity import divided
from zeor.access.push import ALIGNED, Bucket, Part, _packed
from zeor.access.sharded import state_of


def trained(precision: str | None = None, **options: Any) -> nn.Module:
    model = loops.net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, precision=precision, **options)
    loops.train(model, optimizer, range(2), lambda m, step: loops.own_loss(m, step, torch.float32).float())
    return model


def received(model: nn.Module, **options: Any) -> tuple[dict[str, Tensor], list[Bucket]]:
    found: dict[str, Tensor] = {}
    buckets: list[Bucket] = []

    def send(bucket: Bucket) -> None:
        buckets.append(bucket)
        found.update((name, value.clone()) for name, value in bucket.tensors)

    zeor.push(model, send, **options)
    return found, buckets


def exported(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    zeor.export(model, folder, dtype=dtype)
    return safetensors.torch.load_file(folder / "model.safetensors")


FACTORS = {
    "stage": (0, 1, 2, 3), "precision": (None, "bf16", "fp16"), "offload": (None, "host", "disk"),
    "dtype": (None, torch.bfloat16, torch.float64), "cap": (None, 800),
}  # fmt: skip


def check_as_exported(rows: list[dict[str, Any]], folder: str) -> None:
    for number, row in enumerate(rows):
        offload = row["offload"] and zeor.Offload(
            moments=row["offload"], master=row["offload"], folder=f"{folder}/disk-{number}"
        )
        model = trained(row["precision"], stage=row["stage"], offload=offload)
        dtype, cap = row["dtype"], row["cap"]
        found, buckets = received(model, max_bytes=cap, dtype=dtype, buffers=True)
        wanted = exported(model, Path(folder) / f"out-{number}", dtype)
        if dist.get_rank():
            assert not buckets
            continue
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert value.dtype == found[name].dtype and torch.equal(value, found[name]), (row, name)
        assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
        assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
        assert all(bucket.flat.nbytes <= (cap or 1 << 28) for bucket in buckets)
        assert (len(buckets) == 1) == (cap is None)


def test_what_is_pushed_is_what_is_exported(ranks, tmp_path):
    ranks(check_as_exported, 2, covering(FACTORS, strength=2), str(tmp_path))


def check_another_process(folder: str) -> dict[str, str]:
    model = trained("bf16")
    if dist.get_rank():
        zeor.push(model, _never, 700)
        exported(model, Path(folder), None)
        return {}
    with engines.start() as engine:
        zeor.push(model, engine.send, 700)
        found = engine.digests()
    assert found == engines.digests(exported(model, Path(folder), None))
    return found


def _never(bucket: Bucket) -> None:
    raise AssertionError("this rank does not send")


def test_a_process_of_plain_torch_has_every_bit(ranks, tmp_path):
    found = ranks(check_another_process, 2, str(tmp_path / "out"))[0]
    assert len(found) == len(list(loops.net().parameters()))


def check_every_rank() -> tuple[int, list[str]]:
    found, _ = received(trained(stage=3), max_bytes=500, to="all")
    alone, _ = received(trained(stage=3), max_bytes=500, to=1)
    assert bool(alone) == (dist.get_rank() == 1)
    return len(found), list(engines.digests(found).values())


def test_every_rank_or_another_one_may_send(ranks):
    first, second = ranks(check_every_rank, 2)
    assert first == second and first[0] == len(list(loops.net().parameters()))


def check_average() -> None:
    """Inside applied() the engine gets the average."""
    model = trained()
    average = zeor.ema(model, 0.5)
    average.update()
    optimizer = state_of(model).steppers[0].optimizer
    for step in (3, 4):
        loops.train(model, optimizer, range(step, step + 1), lambda m, n: loops.own_loss(m, n, torch.float32))
        average.update()
    weights, _ = received(model)
    with average.applied():
        wanted = dict(zeor.iter_full(model))
        found, _ = received(model)
    if not dist.get_rank():
        loops.assert_equal({name: found[name] for name in wanted}, wanted)
        assert not any(torch.equal(found[name], weights[name]) for name in wanted)


def test_the_average_is_pushed_where_it_stands_in_the_weights_place(ranks):
    ranks(check_average, 2)


def check_divided(kind: str, stage: int) -> None:
    """Tensor parallelism: whole tensors, on a rank of the whole mesh."""
    mesh = divided.new_mesh(2, 2)
    wanted = {name: param.detach().clone() for name, param in divided.made(kind).named_parameters()}
    model = divided.made(kind)
    divided.cut(kind, model, mesh["tp"])
    model = zeor.shard(model, stage=stage, mesh=mesh["dp"])
    found, buckets = received(model, to=3, max_bytes=10_000)
    assert bool(found) == (dist.get_rank() == 3)
    if found:
        assert len(buckets) > 1
        loops.assert_equal({name: found[name] for name in wanted}, wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_tensor_parallelism_has_cut_is_sent_whole(ranks, stage):
    ranks(check_divided, 4, "sequence", stage)


def check_memory(stage: int, precision: str | None, adapters: bool) -> None:
    """At most a bucket and one unit above the slices, on the rank that sends; of the ledger."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)) for _ in range(6)))
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model = zeor.shard(model, stage=stage, precision=precision)
    engine = state_of(model).engine
    for cap in (30_000, 60_000, 400_000):
        engine.ledger.reset_peak()
        before = engine.ledger.live_nbytes
        zeor.push(model, lambda bucket: None, cap)
        unit = max(sum(4 * math.prod(slot.shape) for slot in unit.slots) for unit in engine.units)
        whole = sum(4 * math.prod(slot.shape) for slot in engine.slots)
        assert engine.ledger.live_nbytes == before
        peak = engine.ledger.peak_nbytes - before
        assert 0 < peak <= min(cap, whole) + unit
        if dist.get_rank():  # it only passes on
            assert peak <= unit


@pytest.mark.parametrize("adapters", [False, True])
def test_a_push_takes_a_bucket_and_a_unit(ranks, adapters):
    for stage, precision in ((0, None), (1, "bf16"), (3, None), (3, "bf16")):
        ranks(check_memory, 2, stage, precision, adapters)


# ---- adapters


def llama(tie: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tie, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted(model: nn.Module | None = None, **options: Any) -> Any:
    base = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4, "lora_alpha": 8, "init_lora_weights": False}
    return peft.get_peft_model(llama() if model is None else model, peft.LoraConfig(**{**base, **options}))


class Stored(nn.Module):
    """A layer that keeps its weight as (in, out), as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = transformers.pytorch_utils.Conv1D(12, 8)


def two_adapters() -> Any:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


def disabled() -> Any:
    model = adapted()
    model.base_model.disable_adapter_layers()
    return model


MODELS = {
    "linears": adapted,
    "rank-stabilised": lambda: adapted(use_rslora=True),
    "modules to save": lambda: adapted(modules_to_save=["lm_head"]),
    "embedding": lambda: adapted(target_modules=["embed_tokens", "k_proj"]),
    "tied embeddings": lambda: adapted(llama(tie=True)),
    "transposed": lambda: adapted(Stored(), target_modules=["layer"], fan_in_fan_out=True),
    "two adapters": two_adapters,
    "a scale of its own": lambda: adapted(alpha_pattern={"q_proj": 5}, rank_pattern={"v_proj": 2}),
}


def check_merged(make: Any, stage: int) -> None:
    model = make()
    plain = copy.deepcopy(model).merge_and_unload()
    before = loops.values(model)
    model = zeor.shard(model, stage=stage)
    found, _ = received(model, max_bytes=6000)
    if not dist.get_rank():
        wanted = dict(plain.named_parameters())
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
    with zeor.full_params(model):
        loops.assert_equal(loops.values(model), before)


@pytest.mark.parametrize("kind", MODELS)
def test_lora_is_merged_in_peft_s_bits(ranks, kind):
    for stage in (0, 3):
        ranks(check_merged, 2, MODELS[kind], stage)


def check_disabled() -> None:
    model = disabled()
    wanted = {name: value.clone() for name, value in llama().named_parameters()}
    found, _ = received(zeor.shard(model))
    if not dist.get_rank():
        assert found.keys() == wanted.keys()
        loops.assert_equal({name: found[name] for name in wanted}, wanted)


def test_adapters_that_are_switched_off_are_left_out(ranks):
    ranks(check_disabled, 2)


def check_rounding() -> None:
    """Under bf16 the product is added to the exact masters, and the sum is rounded once."""
    model = adapted()
    plain = copy.deepcopy(model).merge_and_unload().to(torch.bfloat16)
    found, _ = received(zeor.shard(model, precision="bf16"), dtype=torch.bfloat16)
    if not dist.get_rank():
        loops.assert_equal({name: found[name] for name, _ in plain.named_parameters()}, dict(plain.named_parameters()))


def test_merged_weights_are_rounded_once(ranks):
    ranks(check_rounding, 2)


REFUSED = {
    "DoRA": (lambda: adapted(use_dora=True), "cannot merge the adapter of"),
    "biases": (lambda: adapted(lora_bias=True, target_modules=["q_proj"]), "cannot merge the adapter of"),
    "IA3": (
        lambda: peft.get_peft_model(
            llama(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
        ),
        "cannot merge the adapter of",
    ),
    "a tied weight": (lambda: adapted(llama(tie=True), target_modules=["embed_tokens"]), "is tied to another layer's"),
    "a prompt": (
        lambda: peft.get_peft_model(
            llama(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        ),
        "no part of the model's layers",
    ),
}  # fmt: skip


def check_refused(make: Any) -> str:
    model = zeor.shard(make())
    with pytest.raises(ValueError) as caught:
        zeor.push(model, _never)
    return str(caught.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_product_is_refused_on_every_rank(ranks, kind):
    make, said = REFUSED[kind]
    first, second = ranks(check_refused, 2, make)
    assert said in first and first == second


# ---- errors


def check_asked(options: dict[str, Any]) -> str:
    model = trained()
    with pytest.raises(ValueError) as caught:
        zeor.push(model, _never, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_bytes": 100}, "'blocks.0.up.weight' alone takes 168; give at least that"),
        ({"to": 2}, "zeor.push(to=2): give a rank from 0 to 1, or 'all'."),
        ({"to": "some"}, "zeor.push(to='some'): give a rank from 0 to 1, or 'all'."),
        ({"dtype": torch.int8}, "give a floating-point dtype"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(ranks, options, said):
    for text in ranks(check_asked, 2, options):
        assert said in text


def check_failing(to: int | str) -> list[str]:
    """What send raises ends the push on every rank, and training goes on."""
    model, plain = loops.net(), loops.net()
    optimizer, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    zeor.shard(model, optimizer)
    calls = []

    def send(bucket: Bucket) -> None:
        calls.append(bucket.number)
        if bucket.number == 2 and dist.get_rank() == 0:
            raise OSError("the engine is gone")

    with pytest.raises(Exception) as caught:
        zeor.push(model, send, 700, to=to)
    assert len(calls) == (3 if to == "all" or dist.get_rank() == 0 else 0)
    assert state_of(model).engine.ledger.live.get("push", 0) == 0
    loops.train(model, optimizer, range(2), loops.own_loss)
    loops.train(plain, theirs, range(2))
    found, _ = received(model, to="all")
    loops.assert_close(found, loops.values(plain))
    return [type(caught.value).__name__, str(caught.value)]


@pytest.mark.parametrize("to", [0, "all"])
def test_a_receiver_that_fails_ends_it_everywhere(ranks, to):
    assert ranks(check_failing, 2, to) == [
        ["OSError", "the engine is gone"],
        ["RuntimeError", "On rank 0: OSError: the engine is gone"],
    ]


# ---- packing


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 8])), max_size=30), st.integers(2400, 9000))
def test_parts_are_packed_in_order_without_overlap_under_the_cap(sizes, cap):
    kinds = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    parts = [Part(str(n), None, "", kinds[size], torch.Size([numel]), 0) for n, (numel, size) in enumerate(sizes)]
    buckets = _packed(parts, cap)
    assert [part.name for bucket in buckets for part in bucket] == [part.name for part in parts]
    for bucket in buckets:
        assert bucket[-1].end <= cap
        assert all(part.begin % ALIGNED == 0 for part in bucket)
        assert all(a.end <= b.begin for a, b in itertools.pairwise(bucket))
    for bucket, after in itertools.pairwise(buckets):  # a bucket is not left half empty
        assert -(-bucket[-1].end // ALIGNED) * ALIGNED + after[0].end > cap
