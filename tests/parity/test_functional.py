"""torch.func, functional_call, parametrizations, lazy modules: what works equals plain PyTorch; the rest says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import zeor
from tests.parity.calls import STAGES, Mlp, Parts, compare, finish, parts_of, plain_step

# ---- functional_call


def called_with_its_own_parameters(model: Any, optimizer: Any, parts: Parts) -> None:
    """The model's own parameters, by name: the same as calling it."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    losses = [F.mse_loss(functional_call(model, own, (x,)), y) for x, y in parts]
    torch.stack(losses).mean().backward()
    finish(optimizer)


def test_functional_call_with_the_models_own_parameters(ranks):
    ranks(compare, 2, called_with_its_own_parameters, Mlp, timeout=60)


def foreign_values() -> None:
    x, y = parts_of(0, dist.get_world_size())[dist.get_rank()]
    for stage in STAGES:
        torch.manual_seed(3)
        model = Mlp().double()
        values = {name: param.detach() * 2 for name, param in model.named_parameters()}
        want = functional_call(model, values, (x,))
        zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        with pytest.raises(RuntimeError, match=r"in the place of parameter 'gain' \(by torch.func.functional_call"):
            functional_call(model, values, (x,))
        one = {"layers.1.weight": values["layers.1.weight"]}
        with pytest.raises(RuntimeError, match=r"in the place of parameter 'layers.1.weight' .* zeor.full_params"):
            functional_call(model, one, (x,))
        with zeor.full_params(model):
            assert torch.equal(functional_call(model, values, (x,)), want), f"stage {stage}"
        F.mse_loss(model(x), y).backward()  # the model is as it was
        assert model.gain.grad is not None


def test_functional_call_with_other_values_is_refused_and_works_inside_full_params(ranks):
    ranks(foreign_values, 2)


def per_sample() -> None:
    x, y = parts_of(0, dist.get_world_size())[dist.get_rank()]
    torch.manual_seed(3)
    plain = Mlp().double()

    def loss(params: dict[str, Tensor], model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, params, (x.unsqueeze(0),)).squeeze(0), y)

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        params = {name: param.detach() for name, param in model.named_parameters()}
        return vmap(grad(lambda p, x, y: loss(p, model, x, y)), in_dims=(None, 0, 0))(params, x, y)

    wanted = gradients(plain)
    for stage in STAGES:
        torch.manual_seed(3)
        model = Mlp().double()
        zeor.shard(model, stage=stage)
        with zeor.full_params(model):
            found = gradients(model)
        for name, want in wanted.items():
            assert found[name].shape == (4, *plain.get_parameter(name).shape)
            torch.testing.assert_close(found[name], want, rtol=0, atol=1e-12)
        views = dict(model.named_parameters())
        with pytest.raises(RuntimeError, match=r"zeor.full_params\(model\)"):
            grad(lambda p, model=model: loss(p, model, x[0], y[0]))(views)


def test_gradients_per_sample_by_vmap_inside_full_params(ranks):
    ranks(per_sample, 2)


def over_inputs(model: Any, optimizer: Any, parts: Parts) -> None:
    """torch.func over inputs needs no parameter: the jacobian of a model inside its loss."""
    losses = []
    for x, y in parts:
        out = model(x)
        losses.append(F.mse_loss(out, y) + out.pow(2).mean())
    torch.stack(losses).mean().backward()
    slopes = [torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x) for x, _ in parts]
    assert all(slope.shape == (2, 4, 3) and slope.abs().sum() > 0 for slope in slopes)
    finish(optimizer)


def test_the_jacobian_with_respect_to_inputs(ranks):
    ranks(compare, 2, over_inputs, Mlp, timeout=60)


# ---- parametrizations


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def weight_norm() -> nn.Module:
    model = Mlp()
    for layer in [*model.layers, model.first]:
        parametrizations.weight_norm(layer)
    return model


def old_weight_norm() -> nn.Module:
    model = Mlp()
    for layer in model.layers:
        torch.nn.utils.weight_norm(layer)
    return model


def orthogonal() -> nn.Module:
    model = Mlp()
    for layer in model.layers:
        parametrizations.orthogonal(layer)
    return model


def own_parametrization() -> nn.Module:
    model = Mlp()
    for layer in model.layers[1:]:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    return model


def spectral_norm() -> nn.Module:
    model = Mlp()
    for layer in [*model.layers, model.last]:
        parametrizations.spectral_norm(layer)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "build", [weight_norm, old_weight_norm, orthogonal, own_parametrization], ids=lambda build: build.__name__
)
def test_parametrizations(ranks, build):
    ranks(compare, 2, plain_step, build, timeout=60)


def one_forward(model: Any, optimizer: Any, parts: Parts) -> None:
    """Every forward in training moves spectral_norm's vectors: here as often as a rank's."""
    x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    F.mse_loss(model(x), y).backward()
    finish(optimizer)


def test_spectral_norm_and_its_buffers(ranks):
    ranks(compare_spectral, 2)


def compare_spectral() -> None:
    compare(one_forward, spectral_norm)
    torch.manual_seed(11)
    model = spectral_norm().double()
    zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    for step in range(2):
        plain_step(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), [parts_of(step, 2)[dist.get_rank()]])
    vectors = model.last.parametrizations.weight[0]._u
    seen = [torch.empty_like(vectors) for _ in range(dist.get_world_size())]
    dist.all_gather(seen, vectors)
    assert all(torch.equal(seen[0], other) for other in seen), "ranks' vectors are apart"


def test_weight_normed_layers_are_units_of_their_own():
    model = zeor.shard(weight_norm(), stage=3)
    names = [unit.name for unit in vars(model)["_zeor_sharded"].engine.units]
    assert {f"layers.{number}" for number in range(4)} <= set(names), names


# ---- what cannot be


def put_in_place(model: Any) -> None:
    model.layers[1]._parameters["weight"] = nn.Parameter(torch.zeros(5, 5, dtype=torch.float64))


def pruned(model: Any) -> None:
    with torch.no_grad():
        prune.custom_from_mask(model.layers[1], "weight", torch.ones(5, 5))


def exchanged(change: Callable[[Any], None]) -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    for stage in (1, 2):
        torch.manual_seed(3)
        model = Mlp().double()
        zeor.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        change(model)
        with pytest.raises(RuntimeError, match=r"in the place of parameter 'layers.1.weight'.*full_params"):
            model(x)


@pytest.mark.parametrize("change", [put_in_place, pruned], ids=lambda change: change.__name__)
def test_a_parameter_exchanged_after_shard_is_named(ranks, change):
    ranks(exchanged, 2, change)


def test_a_lazy_module_is_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(5))
    with pytest.raises(ValueError, match=r"'1.weight' .* lazy .* run one forward .* zeor.shard"):
        zeor.shard(model)
    model(torch.ones(2, 3))
    zeor.shard(model)
    assert model(torch.ones(2, 3)).shape == (2, 5)
