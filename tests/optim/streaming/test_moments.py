"""Moments in small formats: each step stores what the exact step makes of what was stored, within `error_bound`; and
weights stay near those of exact moments.

Bounds. Of one step: a stored moment differs from the one computed in fp32 by at most small.error_bound. Of a run: Adam
moves a weight by at most about lr a step whatever its moments are, so two runs of n steps differ by at most 2 n lr
there; what is asserted of a few steps is a part of that, as stated below.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeor
from tests import offloads
from tests.offloads import CHUNK, left, made, one_step, run
from zeor import Offload
from zeor.access.sharded import state_of
from zeor.memory import small
from zeor.optim.streaming.moments import UNSIGNED

LR, STEPS = 1e-2, 5


def moments_of(model: Any) -> dict[tuple[str, str], torch.Tensor]:
    stepper = state_of(model).steppers[0]
    return {(p.name, str(p.key[0])): p.value.clone() for p in stepper.state.pieces() if p.begin is not None}


def check_each_step(format: str, options: dict[str, Any]) -> int:
    """Two runs, one of them exact. Before every step the exact one is given the other's moments and weights, as they
    are stored; after it, what the other stores is what the exact one has, encoded."""
    inexact, exact = made(moments=format, **options), made(**{**options, "offload": None})
    checked = 0
    for step in range(4):
        stored, wanted = state_of(inexact[0]).steppers[0], state_of(exact[0]).steppers[0]
        wanted.state.put(list(stored.state.pieces()))
        with zeor.full_params(inexact[0]), zeor.full_params(exact[0], write=True), torch.no_grad():
            for mine, theirs in zip(exact[0].parameters(), inexact[0].parameters()):
                mine.copy_(theirs)
        for model, optimizers in (inexact, exact):
            one_step(model, optimizers, step, "clip")
        found, computed = moments_of(inexact[0]), moments_of(exact[0])
        assert found.keys() == computed.keys()
        for (name, key), value in computed.items():
            bound = small.error_bound(value, format, key not in UNSIGNED)
            assert ((found[name, key].double() - value.double()).abs() <= bound).all(), (step, name, key)
            checked += 1
        # A step uses the moments before they are stored, so weights are exact.
        offloads.same(only_weights(inexact[0]), only_weights(exact[0]), step)
    return checked


def only_weights(model: Any) -> dict[str, Any]:
    return {name: value for name, value in left(model).items() if "/" not in name}


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_each_step_stores_the_exact_moments_within_the_bound_and_exact_weights(ranks, format):
    for options in ({"stage": 3}, {"stage": 2, "precision": "bf16", "offload": Offload(chunk=CHUNK)}):
        assert min(ranks(check_each_step, 2, format, options)) >= 4 * 2 * 7


def check_drift(format: str) -> tuple[float, float]:
    """(largest, root mean square) difference of weights from exact moments' after some steps, in units of lr."""
    exact, inexact = (run(stage=2, steps=STEPS, moments=each) for each in ("exact", format))
    apart = torch.cat([(inexact[k] - exact[k]).flatten().double() for k in exact if "/" not in k and k != "losses"])
    return apart.abs().max().item() / LR, apart.square().mean().sqrt().item() / LR


@pytest.mark.parametrize(("format", "largest", "typical"), [("bf16", 0.1, 0.01), ("int8", 1.0, 0.1)])
def test_weights_stay_near_those_of_exact_moments(ranks, format, largest, typical):
    """Of the 5 lr a weight may have moved."""
    for found in ranks(check_drift, 2, format):
        assert 0 < found[0] < largest and 0 < found[1] < typical, found


def check_bytes() -> dict[str, int]:
    found = {}
    for format in ("exact", "bf16", "int8"):
        model, optimizers = made(stage=1, moments=format, offload=Offload(chunk=CHUNK))
        one_step(model, optimizers, 0, "plain")
        found[format] = zeor.report(model)["moments"]
    return found


def test_small_formats_take_half_and_a_quarter_of_the_bytes(ranks):
    for found in ranks(check_bytes, 2):
        assert found["bf16"] == found["exact"] // 2
        codes = found["exact"] // 4
        assert codes < found["int8"] < 1.1 * codes


def check_other_optimizers(names: list[str]) -> None:
    """A small format on the host has the bits of the same on the device, whatever the state is."""
    makers = {
        "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.5),
        "adamax": lambda m: torch.optim.Adamax(m.parameters()),
        "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
        "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    }
    for name in names:
        for format in ("bf16", "int8"):
            wanted = run(makers[name], stage=3, moments=format)
            weights = [wanted[key] for key, _ in offloads.net().named_parameters()]
            assert all(weight.isfinite().all() for weight in weights), (name, format)
            found = run(makers[name], stage=3, moments=format, offload=Offload(chunk=CHUNK))
            offloads.same(found, wanted, (name, format))


def test_every_sort_of_state_can_be_small(ranks):
    ranks(check_other_optimizers, 2, ["amsgrad", "sgd", "rmsprop", "adamax", "adadelta", "rprop"])


def check_float64() -> dict[str, Any]:
    torch.manual_seed(0)
    model = offloads.net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, stage=2, offload=Offload(chunk=CHUNK))
    for _ in range(3):
        model(torch.ones(2, offloads.WIDTH, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = left(model)
    plain = offloads.net().double()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        plain(torch.ones(2, offloads.WIDTH, dtype=torch.float64)).square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-10, atol=1e-12)
    return {str(value.dtype) for name, value in found.items() if "/" in name and "step" not in name}


def test_a_float64_model_keeps_its_dtype_and_equals_plain_torch(ranks):
    assert ranks(check_float64, 2) == [{"torch.float64"}] * 2
