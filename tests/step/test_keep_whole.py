"""Small parameters, which stay whole on every rank at stage 3: read and written anywhere, and trained as all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
import zeor.plan
from tests import loops
from zeor.access.sharded import state_of
from zeor.memory.param import Whole
from zeor.memory.roles import Residency

SMALL = 20  # elements: biases, norms and the scale of loops.Net, and none of its matrices
STEPS = 4
HOST = "update on the host"  # by torch's fused CPU kernel, whose bits depend on where in an array an element lies
NEAR = {"rtol": 1e-6, "atol": 1e-9}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no overlap": {"overlap": False},
    "bf16": {"precision": "bf16"},
    "offload": {"offload": "host"},
    HOST: {"offload": {"update": "host"}},
    "compute on the host": {"offload": {"compute": "host", "grads": "host"}},
    "delay": {"delay": 1},
    "release": {"release": True},
    "recompute": {"recompute": True},
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def values(model: nn.Module) -> dict[str, Tensor]:
    with zeor.full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def trained(stage: int, keep_whole: int, options: dict[str, Any], clip: bool = False) -> tuple[dict[str, Tensor], list]:
    dtype = torch.float32 if "precision" in options else torch.float64
    model = loops.net(dtype)
    _, optimizer = zeor.shard(model, adam(model), stage=stage, keep_whole=keep_whole, **options)
    norms = []
    for step in range(STEPS):
        loops.own_loss(model, step, dtype).backward()
        if clip:
            norms.append(zeor.clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return values(model), norms


def both(options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return trained(3, SMALL, options)[0], trained(3, 0, options)[0]


@pytest.mark.parametrize(
    ("name", "world"),
    [*((name, 2) for name in PLANS), ("bf16", 3), ("compute on the host", 3), ("compute on the host", 1)],
)
def test_training_is_the_same_with_and_without_small_parameters_kept_whole(ranks, name, world):
    for kept, sliced in ranks(both, world, PLANS[name]):
        for key, value in sliced.items():
            torch.testing.assert_close(kept[key], value, **(NEAR if name == HOST else {"rtol": 0, "atol": 0}))


def clipped_at(stage: int) -> tuple[dict[str, Tensor], list]:
    return trained(stage, SMALL, {}, clip=True)


def test_norms_and_weights_are_the_same_bits_at_every_stage(ranks):
    """The layout is the same at every stage: norms add up what each rank has."""
    first_values, first_norms = ranks(clipped_at, 3, 0)[0]
    assert len(first_norms) == STEPS and all(norm > 0.5 for norm in first_norms)
    for stage in (1, 2, 3):
        found, norms = ranks(clipped_at, 3, stage)[0]
        assert norms == first_norms
        assert all(torch.equal(found[key], value) for key, value in first_values.items())


# ---- read and written outside forward


class Towers(nn.Module):
    """As CLIP: the temperature is used in the user's loss, and clamped after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 40), nn.Linear(6, 40)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(y)


def contrast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    left, right = model(x, y)
    logits = model.logit_scale.exp() * left @ right.T / 40
    return nn.functional.cross_entropy(logits, torch.arange(len(x)))


def pairs(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore


def clip_loop(world: int, sharded: bool, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Every rank has the same pairs, so one plain process is the reference."""
    torch.manual_seed(0)
    model = Towers().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)
    if sharded:
        zeor.shard(model, optimizer, stage=3, keep_whole=1024, units=[nn.Linear], **options)
    scale, seen = model.logit_scale, []
    for step in range(STEPS):
        contrast(model, *pairs(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(0.0, 1.1)
        if not sharded or dist.get_rank() == step % world:  # one rank alone, as a log would
            seen.append(scale.item())
            seen.append(model.left.bias.sum().item())
    return seen, values(model) if sharded else {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["plain", "offload", HOST, "compute on the host"])
def test_a_small_parameter_is_read_on_one_rank_and_clamped_on_all(ranks, name):
    seen, expected = clip_loop(1, False, {})
    assert 1.1 in seen, "the clamp must have held something back"
    found = ranks(clip_loop, 2, 2, True, PLANS[name])
    for step in range(STEPS):
        mine = found[step % 2][0][step // 2 * 2 : step // 2 * 2 + 2]
        torch.testing.assert_close(mine, seen[2 * step : 2 * step + 2], **loops.TIGHT)
    for _, got in found:
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, **(NEAR if name == HOST else loops.TIGHT))


# ---- what it costs


def layout_and_bytes(keep_whole: int) -> tuple[dict[str, bool], dict[str, int], dict[str, int], dict[str, int], bool]:
    model = loops.net()
    _, optimizer = zeor.shard(model, adam(model), stage=3, keep_whole=keep_whole)
    predicted = zeor.predict(model, world=dist.get_world_size(), stage=3, keep_whole=keep_whole).as_dict()
    loops.train(model, optimizer, range(2), loops.own_loss)
    before = dict(zeor.traffic(model)["calls"])
    loops.train(model, optimizer, range(2, 3), loops.own_loss)
    calls = {verb: count - before.get(verb, 0) for verb, count in zeor.traffic(model)["calls"].items()}
    engine = state_of(model).engine
    engine.drain()
    whole = {slot.name: isinstance(slot.param, Whole) for slot in engine.slots}
    in_root = all(slot.unit is engine.units[0] for slot in engine.slots if slot.lane.key.stays_whole)
    return whole, zeor.report(model), predicted, calls, in_root


def test_one_reduce_and_one_publish_serve_all_small_parameters(ranks):
    kept = ranks(layout_and_bytes, 2, SMALL)[0]
    sliced = ranks(layout_and_bytes, 2, 0)[0]
    shapes = {name: param.numel() for name, param in loops.net().named_parameters()}
    assert kept[0] == {name: numel <= SMALL for name, numel in shapes.items()} and kept[4]
    assert not any(sliced[0].values())
    for _, report, predicted, _, _ in (kept, sliced):
        assert {role: report[role] for role in ("compute", "master", "moments", "padding")} == {
            role: predicted[role] for role in ("compute", "master", "moments", "padding")
        }
    assert sum(kept[3].values()) <= sum(sliced[3].values()) + 2, (kept[3], sliced[3])


def default() -> list[str]:
    zeor.plan.KEEP_WHOLE = 1024
    try:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 33))
        zeor.shard(model, stage=3)
    finally:
        zeor.plan.KEEP_WHOLE = 0
    slots = state_of(model).engine.slots
    assert all((slot.lane.column.compute is Residency.FULL) == slot.lane.key.stays_whole for slot in slots)
    return sorted(slot.name for slot in slots if slot.lane.key.stays_whole)


def test_by_itself_parameters_of_up_to_1024_elements_stay_whole(ranks):
    assert ranks(default, 2) == [["0.bias", "0.weight", "1.bias"]] * 2


def test_a_wrong_number_is_refused():
    for wrong in (-1, 1.5, True, "small"):
        with pytest.raises(ValueError, match=r"keep_whole=.*elements stay whole"):
            zeor.shard(nn.Linear(2, 2), keep_whole=wrong)


# ---- frozen, thawed, saved


def thaw() -> dict[str, Tensor]:
    model = loops.net()
    model.scale.requires_grad_(False)
    for block in model.blocks:
        block.norm.requires_grad_(False)
    _, optimizer = zeor.shard(model, adam(model), stage=3, keep_whole=SMALL)
    loops.train(model, optimizer, range(2), loops.own_loss)
    frozen = {"scale": model.scale.item(), "norm": model.blocks[0].norm.weight.sum().item()}
    assert frozen == {"scale": 1.5, "norm": loops.FEATURES}
    model.scale.requires_grad_(True)
    for block in model.blocks:
        block.norm.requires_grad_(True)
    loops.train(model, optimizer, range(2, STEPS), loops.own_loss)
    assert model.scale.item() != 1.5
    return values(model)


def test_small_parameters_can_be_frozen_and_unfrozen(ranks):
    model = loops.net()
    optimizer = adam(model)
    small = [model.scale, *(p for block in model.blocks for p in block.norm.parameters())]
    for param in small:
        param.requires_grad_(False)
    loops.train(model, optimizer, range(2))
    for param in small:
        param.requires_grad_(True)
    loops.train(model, optimizer, range(2, STEPS))
    for found in ranks(thaw, 2):
        for name, param in model.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), **loops.TIGHT)


def save_at(folder: str, keep_whole: int) -> None:
    model = loops.net()
    _, optimizer = zeor.shard(model, adam(model), stage=3, keep_whole=keep_whole)
    loops.train(model, optimizer, range(2), loops.own_loss)
    zeor.save(folder, model, optimizer, step=2)


def go_on_at(folder: str, keep_whole: int) -> dict[str, Tensor]:
    model = loops.net(seed=9)
    _, optimizer = zeor.shard(model, adam(model), stage=3, keep_whole=keep_whole)
    zeor.load(folder, model, optimizer)
    scale = model.scale.item() if keep_whole else None
    loops.train(model, optimizer, range(2, STEPS), loops.own_loss)
    assert scale is None or scale != model.scale.item()
    return values(model)


@pytest.mark.parametrize(("saved", "loaded"), [(SMALL, 0), (0, SMALL), (SMALL, SMALL)])
def test_checkpoints_load_with_another_keep_whole(ranks, tmp_path, saved, loaded):
    ranks(save_at, 2, str(tmp_path), saved)
    (expected, _), *_ = ranks(trained, 2, 3, SMALL, {})
    for found in ranks(go_on_at, 3 if loaded else 2, str(tmp_path), loaded):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **loops.TIGHT)
