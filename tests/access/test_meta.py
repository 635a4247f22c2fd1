"""Models built without values: sharded on the meta device, refused until filled, initialised by their own modules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from tests import loops

STAGES = [0, 1, 2, 3]


class Rotary(nn.Module):
    """A buffer computed at construction and saved nowhere."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10 ** (torch.arange(width) / width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inv_freq.to(x.dtype)


class Zoo(nn.Module):
    """Modules of torch.nn that draw random numbers in several ways, in blocks of their own and at the root."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8, padding_idx=2)
        self.rotary = Rotary(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True) for _ in range(2))
        self.lstm = nn.LSTM(8, 7, num_layers=2)
        self.conv, self.bn = nn.Conv1d(7, 6, 3), nn.BatchNorm1d(6)
        self.inner = nn.Transformer(8, 2, 1, 1, 12, batch_first=True)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)


def build_zoo(seed: int) -> Zoo:
    torch.manual_seed(seed)
    return Zoo()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    return dict(zeor.iter_full(model, buffers=True))


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def meta_net(dtype: torch.dtype = torch.float64) -> loops.Net:
    with zeor.on_meta():
        return loops.net(dtype)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def init_scale(module: nn.Module) -> None:
    if hasattr(module, "scale"):
        nn.init.ones_(module.scale)


# ---- on_meta


def test_on_meta_keeps_buffers_real_and_parameters_without_memory():
    with zeor.on_meta():
        model = build_zoo(0)
        tied = nn.Linear(8, 13, bias=False)
        tied.weight = model.embed.weight
    assert all(param.is_meta and type(param) is nn.Parameter for param in model.parameters())
    assert tied.weight is model.embed.weight
    assert torch.equal(model.rotary.inv_freq, build_zoo(0).rotary.inv_freq)
    assert model.bn.running_var.tolist() == [1.0] * 6
    assert not nn.Linear(2, 2).weight.is_meta, "outside the context modules are plain again"


def test_on_meta_keeps_classes_attributes_and_frozen_parameters():
    class Marked(nn.Parameter):
        pass

    with zeor.on_meta():
        module = nn.Module()
        given = Marked(torch.ones(3), requires_grad=False)
        given.note = "kept"
        module.register_parameter("weight", given)
    assert type(module.weight) is Marked and module.weight.note == "kept" and not module.weight.requires_grad
    with pytest.raises(ZeroDivisionError), zeor.on_meta():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta


# ---- shard


def check_refusals(stage: int) -> None:
    model = meta_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = zeor.shard(model, optimizer, stage=stage)
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in loops.net().parameters()]
    assert all(p.device.type == "cpu" for p in model.parameters())
    named = "Parameter 'scale' was on the meta device when zeor.shard ran and has no values yet"
    ways = r"zeor.load_pretrained\(model, folder\) or zeor.init_parameters\(model\)"
    x, _ = loops.batch(0)
    for use in (
        lambda: model(x),
        lambda: model.blocks[0](x),
        optimizer.step,
        lambda: model.scale + 1,
        lambda: zeor.full_params(model).__enter__(),
        lambda: zeor.iter_full(model),
        lambda: zeor.unshard(model, optimizer),
    ):
        with pytest.raises(RuntimeError, match=named) as caught:
            use()
        assert caught.match(ways)


@pytest.mark.parametrize("stage", STAGES)
def test_an_unfilled_model_refuses_to_compute_and_says_how_to_fill_it(ranks, stage):
    ranks(check_refusals, 2, stage)


def check_filled_by_state_dict(stage: int, precision: str | None) -> None:
    reference = loops.net(torch.float32)
    model = meta_net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = zeor.shard(model, optimizer, stage=stage, precision=precision)
    model.load_state_dict(reference.state_dict())
    eager = loops.net(torch.float32)
    theirs = torch.optim.AdamW(eager.parameters(), lr=0.01)
    eager, theirs = zeor.shard(eager, theirs, stage=stage, precision=precision)
    assert zeor.report(model) == zeor.report(eager)
    for pair in ((model, optimizer), (eager, theirs)):
        loops.train(*pair, range(2), lambda m, step: loops.own_loss(m, step, torch.float32).float())
    assert_same(full_state(model), full_state(eager))


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_filled_meta_model_trains_as_one_that_was_sharded_with_values(ranks, stage, precision):
    ranks(check_filled_by_state_dict, 2, stage, precision)


def check_partly_meta(stage: int) -> None:
    torch.manual_seed(dist.get_rank())
    model = loops.Net().double()
    with torch.no_grad():
        model.head.weight.fill_(float(dist.get_rank() + 1))
    model.blocks[1].to("meta")
    model.blocks[0].up.to("meta")
    model = zeor.shard(model, stage=stage)
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.weight' was on the meta device"):
        model(loops.batch(0)[0])
    zeor.init_parameters(model, seed=3, missing_only=True)
    found = full_state(model)
    assert bool((found["head.weight"] == 1.0).all()), "rank 0's, and kept"
    assert all(bool(value.isfinite().all()) for value in found.values())
    assert model(loops.batch(0)[0]).isfinite().all()


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_with_and_without_values_in_one_unit(ranks, stage):
    ranks(check_partly_meta, 2, stage)


def check_rank_0_holds_the_values(stage: int) -> None:
    rank = dist.get_rank()
    model = loops.net() if rank == 0 else meta_net()
    model.register_buffer("mask", torch.full((3,), 7.0) if rank == 0 else torch.empty(3, device="meta"))
    model = zeor.shard(model, stage=stage, device="cpu")
    found = full_state(model)
    assert found.pop("mask").tolist() == [7.0] * 3
    assert_same(found, loops.values(loops.net()))


@pytest.mark.parametrize("stage", STAGES)
def test_rank_0_may_hold_the_values_of_a_model_the_others_describe(ranks, stage):
    ranks(check_rank_0_holds_the_values, 3, stage)


def check_values_rank_0_lacks() -> str:
    model = meta_net() if dist.get_rank() == 0 else loops.net()
    with pytest.raises(ValueError) as caught:
        zeor.shard(model, device="cpu")
    return str(caught.value)


def test_values_that_rank_0_lacks_are_refused_on_every_rank(ranks):
    texts = ranks(check_values_rank_0_lacks, 2)
    assert set(texts) == {
        "Parameter 'scale' has values on rank 1 but is on the meta device on rank 0, whose values count; build the "
        "model on meta on every rank, or with values on rank 0."
    }


def check_seed_is_rank(stage: int) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    return full_state(zeor.shard(loops.Net().double(), stage=stage))


@pytest.mark.parametrize("stage", STAGES)
def test_seed_equal_to_rank_gives_rank_0s_values_everywhere(ranks, stage):
    torch.manual_seed(0)
    wanted = loops.values(loops.Net().double())
    for found in ranks(check_seed_is_rank, 3, stage):
        assert_same(found, wanted)


def test_devices_that_cannot_be():
    for device, text in (("meta", "holds no values"), ("no such", "is not a device"), ("cuda", "accelerator here")):
        if device == "cuda" and torch.accelerator.is_available():
            continue
        with pytest.raises(ValueError, match=text):
            zeor.shard(meta_net(), device=device)


def test_state_an_optimizer_made_on_meta_is_refused_by_name():
    model = meta_net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Adagrad has made its 'sum' of 'scale' on the meta device.*after zeor.shard"):
        zeor.shard(model, optimizer)


def check_adagrad_after(stage: int) -> None:
    model = zeor.shard(meta_net(), stage=stage)
    zeor.init_parameters(model, init=lambda m: nn.init.constant_(m.scale, 1.5) if hasattr(m, "scale") else None)
    zeor.shard(model, torch.optim.Adagrad(model.parameters(), lr=0.1))


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_that_makes_state_at_once_follows_the_sharding(ranks, stage):
    ranks(check_adagrad_after, 2, stage)


def check_write_context(stage: int) -> None:
    model = zeor.shard(meta_net(), stage=stage)
    with torch.no_grad(), zeor.full_params(model, write=True):
        assert all(bool(param.isnan().all()) for param in model.parameters())
        for name, param in model.named_parameters():
            if name != "head.bias":
                param.data.fill_(float(dist.get_rank() + 2))
    with pytest.raises(RuntimeError, match=r"'head\.bias' was on the meta device"):
        model(loops.batch(0)[0])
    with torch.no_grad(), zeor.full_params(model, write=True):
        model.head.bias.zero_()
    found = full_state(model)
    assert bool((found.pop("head.bias") == 0).all()) and all(bool((value == 2).all()) for value in found.values())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_write_context_fills_what_is_written_in_it(ranks, stage):
    ranks(check_write_context, 2, stage)


# ---- init_parameters


def check_init(stage: int, how: str, eager: bool = True) -> dict[str, Tensor]:
    if how == "on_meta":
        with zeor.on_meta():
            model = build_zoo(99)
    else:
        with torch.device("meta"):
            model = build_zoo(99)
        model.rotary = Rotary(8)  # nothing could compute it again
    model = zeor.shard(model, stage=stage)
    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    zeor.init_parameters(model, seed=11, eager=eager)
    assert torch.equal(torch.get_rng_state(), before)
    return full_state(model)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("stage, world", [(0, 2), (1, 2), (2, 3), (3, 1), (3, 2), (3, 3), (3, 4)])
def test_meta_init_equals_eager_init_at_any_world_and_stage(ranks, stage, world):
    wanted = plain_state(build_zoo(11))
    for how in ("on_meta", "meta"):
        for found in ranks(check_init, world, stage, how):
            assert_same(found, wanted)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("stage, world", [(0, 2), (1, 2), (2, 3), (3, 2), (3, 3)])
def test_streams_by_position_are_the_same_at_any_world_and_stage(ranks, stage, world):
    (wanted,) = ranks(check_init, 1, 3, "on_meta", False)
    like_eager = plain_state(build_zoo(11))
    assert {name: value.shape for name, value in wanted.items()} == {n: v.shape for n, v in like_eager.items()}
    assert any(not torch.equal(value, like_eager[name]) for name, value in wanted.items())
    for how in ("on_meta", "meta"):
        for found in ranks(check_init, world, stage, how, False):
            assert_same(found, wanted)


class Twice(nn.Module):
    """Its weights are drawn once more after its biases, which lie in another unit where there are several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)

    def reset_parameters(self) -> None:
        self.codes.fill_(7)
        for q, k in zip(self.first.parameters(), self.second.parameters(), strict=True):
            k.data.copy_(q.data)  # written to is the one whose unit comes first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def check_twice(stage: int, init: bool) -> dict[str, Tensor]:
    with zeor.on_meta():
        model = Twice()
    model = zeor.shard(model, stage=stage, units=[nn.Linear])
    again = (lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None) if init else None
    zeor.init_parameters(model, seed=5, init=again)
    found = full_state(model)
    assert found["codes"].tolist() == [7, 7, 7]
    for name in ("weight", "bias"):
        assert torch.equal(found[f"first.{name}"], found[f"second.{name}"])
    x = torch.ones(2, 64)
    before = model(x)  # units stay gathered behind it
    zeor.init_parameters(model, seed=6, init=again)
    with zeor.full_params(model):
        wanted = model(x)
    assert torch.equal(model(x), wanted) and not torch.equal(before, wanted), "nothing stale is read"
    return found


@pytest.mark.parametrize("init", [False, True])
def test_units_and_what_is_drawn_twice_or_copied_do_not_show_in_the_values(ranks, init):
    (wanted,) = ranks(check_twice, 1, 3, init)
    for stage in (1, 3):
        for found in ranks(check_twice, 2, stage, init):
            assert_same(found, wanted)


def check_memory_of_init(eager: bool) -> tuple[int, int]:
    """The largest number of full values alive at once, as the initialisers see it."""
    from zeor.access.initialise import _Values

    with zeor.on_meta():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model = zeor.shard(model)
    live: list[int] = []
    plain = _Values.full

    def counted(self: Any, slot: Any) -> Tensor:
        value = plain(self, slot)
        live.append(sum(value.nbytes for value in self._live.values()))
        return value

    _Values.full = counted  # type: ignore[method-assign]
    try:
        zeor.init_parameters(model, eager=eager)
    finally:
        _Values.full = plain  # type: ignore[method-assign]
    return max(live, default=0), sum(p.numel() * 4 for p in model[0].parameters())


def test_one_unit_at_a_time_is_whole_while_a_model_is_initialised(ranks):
    for most, unit in ranks(check_memory_of_init, 2, True):
        assert most == unit
    for most, _ in ranks(check_memory_of_init, 2, False):
        assert most == 0, "what is drawn by position is never whole"


class Reaching(nn.Module):
    """Its own initialiser changes, and reads, what its children have drawn: over all units."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(0.5)
                layer.bias.copy_(self.layers[0].weight[0] + layer.weight.data.sum())


def check_reaching(precision: str | None, eager: bool) -> dict[str, Tensor]:
    with zeor.on_meta():
        model = Reaching()
    model = zeor.shard(model, precision=precision)
    zeor.init_parameters(model, seed=4, eager=eager)
    return full_state(model)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_an_initialiser_may_reach_over_the_whole_model(ranks, precision):
    torch.manual_seed(4)
    wanted = plain_state(Reaching())
    for found in ranks(check_reaching, 2, precision, True):
        assert_same(found, wanted)
    (alone,) = ranks(check_reaching, 1, None, False)
    for found in ranks(check_reaching, 2, None, False):
        assert_same(found, alone)


def check_named() -> list[str]:
    texts = []
    with zeor.on_meta():
        model = nn.Sequential(nn.Linear(6, 6), Scale())
    model = zeor.shard(model)
    for init in (None, lambda module: None):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            zeor.init_parameters(model, init=init)
        texts.append(str(caught.value))
    with pytest.raises(RuntimeError, match="has no values yet"):
        model(torch.zeros(2, 6))
    zeor.init_parameters(model, init=init_scale)
    assert dict(zeor.iter_full(model))["1.scale"].tolist() == [1.0] * 6
    return texts


def test_a_module_that_cannot_be_initialised_is_named(ranks):
    for missing, unwritten in ranks(check_named, 2):
        assert missing.startswith("Module '1' (Scale) holds '1.scale' but has no reset_parameters; give it one, or")
        assert unwritten.startswith("No initialiser wrote all of parameter '1.scale' of a Scale; pass")


def check_buffer_named() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Rotary(8))
    model[1].reset_parameters = lambda: None
    model = zeor.shard(model)
    with pytest.raises(RuntimeError) as caught:
        zeor.init_parameters(model)
    assert model[1].inv_freq.is_meta, "put back"
    return str(caught.value)


def test_a_buffer_that_nothing_restores_is_named(ranks):
    for text in ranks(check_buffer_named, 2):
        assert text == (
            "Buffer '1.inv_freq' is on the meta device and no initialiser of Rotary writes it; build the model inside "
            "`with zeor.on_meta():`, which keeps buffers real."
        )


def check_buffer_left() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Rotary(8))
    model = zeor.shard(model)
    model.load_state_dict(nn.Sequential(nn.Linear(8, 8)).state_dict())
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(1, 8))
    model[1].inv_freq = torch.ones(8)
    assert model(torch.zeros(1, 8)).shape == (1, 8)
    return str(caught.value)


def test_a_buffer_still_on_meta_stops_the_first_forward(ranks):
    assert ranks(check_buffer_left, 2)[0].startswith("Buffer '1.inv_freq' is still on the meta device; build the model")


def check_differing() -> str:
    with zeor.on_meta():
        model = zeor.shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    with pytest.raises(ValueError) as caught:
        zeor.init_parameters(model, init=lambda module: nn.init.constant_(module.weight, float(dist.get_rank())))
    return str(caught.value)


def test_initialisers_that_give_each_rank_other_values_are_refused(ranks):
    texts = set(ranks(check_differing, 2))
    assert len(texts) == 1
    assert "The ranks' initial values differ: rank 0 has '0.weight' with the checksum" in texts.pop()


def check_transformers(stage: int) -> dict[str, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    with zeor.on_meta():
        model = LlamaForCausalLM(config)
    model = zeor.shard(model, stage=stage)
    zeor.init_parameters(model, seed=2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    eager = LlamaForCausalLM(config)
    for (name, found), (_, wanted) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.equal(found, wanted), name
    tokens = torch.arange(12).view(2, 6)
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
    return full_state(model)


@pytest.mark.long
def test_transformers_models_are_initialised_by_their_own_rule(ranks):
    first = ranks(check_transformers, 1, 3)[0]
    assert abs(float(first["model.layers.0.mlp.up_proj.weight"].std()) - 0.5) < 0.1, "initializer_range, not kaiming"
    assert bool((first["model.norm.weight"] == 1).all())
    for found in (*ranks(check_transformers, 2, 3), *ranks(check_transformers, 2, 1)):
        assert_same(found, first)


def test_on_meta_parameters_that_are_drawn_by_hand_cost_no_nan():
    """nn.Parameter(torch.randn(...)) has no initialiser: it is named, not left as it is."""
    with zeor.on_meta():
        model = nn.Sequential(nn.Linear(3, 3))
        model.register_parameter("token", nn.Parameter(torch.randn(math.prod((1, 3)))))
    model = zeor.shard(model)
    with pytest.raises(ValueError, match=r"Module 'the root' \(Sequential\) holds 'token'"):
        zeor.init_parameters(model)
