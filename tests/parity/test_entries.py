"""Methods other than forward, and submodules called by themselves: equal to plain PyTorch at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeor
from tests.parity.calls import Mlp, Parts, compare, finish, mean, mse, rank_of


class Coder(nn.Module):
    """An autoencoder whose methods use parameters of the root: a gain and a small norm."""

    class Side(nn.Module):
        def __init__(self, inner: int, outer: int):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
            self.enter, self.leave, self.norm = nn.Linear(inner, 5), nn.Linear(5, outer), nn.LayerNorm(outer)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return self.norm(self.leave(x))

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.encoder, self.decoder = nn.Parameter(torch.tensor(1.1)), self.Side(3, 4), self.Side(4, 2)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.encoder(x) * self.gain * scale

    def decode(self, code: Tensor) -> dict[str, Tensor]:
        return {"out": self.decoder(code) + self.gain, "gain": self.gain}

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """As in Lightning: a method that calls the model, and uses parameters before and after."""
        return F.mse_loss(self(x * self.gain), y) + self.gain.pow(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))["out"]


METHODS = ("encode", "decode", "step", "encoder.forward", "decoder.forward")


def encode_only(model: Any, optimizer: Any, parts: Parts) -> None:
    mean([model.encode(x, scale=0.5).pow(2).mean() for x, _ in parts]).backward()
    finish(optimizer)


def encode_both_then_decode(model: Any, optimizer: Any, parts: Parts) -> None:
    losses = []
    for x, y in parts:
        one, two = model.encode(x), model.encode(-x, scale=2.0)
        decoded = model.decode(one + two)
        losses.append(F.mse_loss(decoded["out"], y) + F.cosine_similarity(one, two).mean() + decoded["gain"])
    mean(losses).backward()
    finish(optimizer)


def methods_and_forward_in_turns(model: Any, optimizer: Any, parts: Parts) -> None:
    """Passes of different kinds, two backward passes, an evaluation in between."""
    mse(model, parts).backward()
    codes = [model.encode(x) for x, _ in parts]
    with torch.no_grad():
        assert all(torch.isfinite(model.encode(x)).all() for x, _ in parts)
        mse(model, parts)
    mean([F.mse_loss(model.decode(code)["out"], y) for code, (_, y) in zip(codes, parts)]).backward()
    finish(optimizer)


def a_method_that_calls_the_model(model: Any, optimizer: Any, parts: Parts) -> None:
    mean([model.step(x, y) for x, y in parts]).backward()
    finish(optimizer)


def a_submodule_called_directly(model: Any, optimizer: Any, parts: Parts) -> None:
    mean([F.mse_loss(model.decoder(model.encoder(x)), y) for x, y in parts]).backward()
    finish(optimizer)


def a_method_inside_a_checkpoint(model: Any, optimizer: Any, parts: Parts) -> None:
    codes = [checkpoint(model.encode, x, use_reentrant=False) for x, _ in parts]
    mean([F.mse_loss(model.decode(code)["out"], y) for code, (_, y) in zip(codes, parts)]).backward()
    finish(optimizer)


def a_method_without_gradients(model: Any, optimizer: Any, parts: Parts) -> None:
    """A frozen encoder: its codes are constants."""
    with torch.no_grad():
        codes = [model.encode(x) for x, _ in parts]
    mean([F.mse_loss(model.decode(code)["out"], y) for code, (_, y) in zip(codes, parts)]).backward()
    finish(optimizer)


class Trouble(Exception):
    pass


def a_method_that_raises(model: Any, optimizer: Any, parts: Parts) -> None:
    def trouble(*args: Any) -> None:
        raise Trouble

    handle = model.encoder.layers[1].register_forward_pre_hook(trouble)
    with pytest.raises(Trouble):
        model.encode(parts[0][0])
    handle.remove()
    encode_both_then_decode(model, optimizer, parts)


LOOPS = [
    encode_only, encode_both_then_decode, methods_and_forward_in_turns, a_method_that_calls_the_model,
    a_submodule_called_directly, a_method_inside_a_checkpoint, a_method_without_gradients, a_method_that_raises,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_methods(ranks, loop):
    ranks(compare, 2, loop, Coder, {"methods": METHODS, "units": [nn.Linear]}, timeout=60)


def encode_or_decode(model: Any, optimizer: Any, parts: Parts) -> None:
    """Inside one method, ranks take different paths."""
    losses = []
    for number, (x, y) in enumerate(parts):
        model.path = [0, 1] if rank_of(number, parts) else [3]
        losses.append(F.mse_loss(model.walk(x), y))
    mean(losses).backward()
    finish(optimizer)


class Walker(Mlp):
    path: list[int]

    def walk(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.path:
            x = x + torch.tanh(self.layers[number](x))
        return self.last(x) * self.gain


def test_ranks_take_different_paths_inside_a_method(ranks):
    ranks(compare, 2, encode_or_decode, Walker, {"methods": ["walk"]}, timeout=60)


def test_methods_on_three_ranks(ranks):
    ranks(compare, 3, encode_both_then_decode, Coder, {"methods": METHODS, "overlap": False}, timeout=60)


# ---- a unit by itself needs no naming


def one_unit_by_itself(model: Any, optimizer: Any, parts: Parts) -> None:
    mean([model.last(torch.tanh(model.layers[1](model.first(x)))).pow(2).mean() for x, _ in parts]).backward()
    mse(model, parts).backward()
    finish(optimizer)


def test_units_called_by_themselves(ranks):
    ranks(compare, 2, one_unit_by_itself, Mlp, timeout=60)


# ---- the rules


def inputs_are_cast() -> None:
    for stage in (1, 3):
        torch.manual_seed(1)
        model = Coder()
        zeor.shard(model, stage=stage, precision="bf16", methods="encode")
        code = model.encode(torch.randn(2, 3))
        assert code.dtype is torch.bfloat16 and code.requires_grad


def test_the_inputs_of_a_method_are_cast_to_the_compute_dtype(ranks):
    ranks(inputs_are_cast, 2)


def orders_per_method() -> None:
    torch.manual_seed(1)
    model = Coder().double()
    zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, methods=METHODS)
    engine = vars(model)["_zeor_sharded"].engine
    names = [unit.name for unit in engine.units]
    for _ in range(2):
        code = model.encode(torch.randn(2, 3).double())
        model.decode(code)["out"].sum().backward()
        with torch.no_grad():
            model.encode(torch.randn(2, 3).double())
    learned = {kind: [names[i] for i in engine.passes.orders[kind]] for kind in engine.passes.orders.learned}
    inside = {kind: {name.split(".")[0] for name in order} for kind, order in learned.items()}
    assert inside["train encode"] == inside["eval encode"] == {"root", "encoder"}, learned
    assert inside["train decode"] == {"root", "decoder"} and "train" not in learned


def test_each_method_learns_an_order_of_its_own(ranks):
    ranks(orders_per_method, 2)


def without_naming() -> None:
    torch.manual_seed(1)
    model = Coder().double()
    zeor.shard(model, stage=3, units=[nn.Linear])
    x = torch.randn(2, 3).double()
    with pytest.raises(RuntimeError, match=r"'encode', called outside .* zeor.shard\(..., methods=\('encode',\)\)"):
        model.encode(x)
    with pytest.raises(RuntimeError, match=r"methods=\('decoder.forward',\)"):
        model.decoder(torch.randn(2, 4).double())
    assert model(x).shape == (2, 2)  # a pass still works


def test_a_method_that_is_not_named_says_what_to_write(ranks):
    ranks(without_naming, 2)


class Streamer(Mlp):
    def stream(self, x: Tensor) -> Any:
        yield self(x)


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ("encod", r"Coder has no method 'encod' \(did you mean 'encode'\?\)"),
        (["encodr.forward"], r"no module 'encodr' \(did you mean 'encoder'\?\)"),
        (["forward"], "an entry already"),
        (["encoder"], r"is a module; to call it by itself name 'encoder.forward'"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(methods, sentence):
    with pytest.raises(ValueError, match=sentence):
        zeor.shard(Coder(), methods=methods)


def test_a_generator_is_refused():
    with pytest.raises(ValueError, match="'stream', a generator or coroutine"):
        zeor.shard(Streamer(), methods=["stream"])


def comes_and_goes() -> None:
    import copy
    import pickle

    torch.manual_seed(1)
    model = Coder().double()
    x = torch.randn(2, 3).double()
    want = model.encode(x).detach()
    zeor.shard(model, stage=3, methods=METHODS)
    with zeor.full_params(model):
        assert "encode" not in vars(model)
        assert torch.equal(model.encode(x), want)
        twin = copy.deepcopy(model)
        assert torch.equal(pickle.loads(pickle.dumps(twin)).encode(x), want)
    assert torch.equal(model.encode(x), want)
    zeor.unshard(model)
    assert "encode" not in vars(model) and torch.equal(model.encode(x), want)
    dist.barrier()


def test_methods_are_the_users_own_again_inside_full_params_and_after_unshard(ranks):
    ranks(comes_and_goes, 2)
