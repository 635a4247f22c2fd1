"""Wires in training: stages that send the same things by the same wire give the same bits, with whatever else is on.

Along one axis: the reduce wire does the same at all stages, the gather wire at stages 1 to 3 (at stage 0 it is for
sums of gradients). Along two axes: wherever updates are cut alike. What every rank computes with is what was decoded,
and masters are never that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from tests import offloads
from tests.offloads import CHUNK
from tests.parity.models import Setting, placed
from zeor import Offload, Wire
from zeor.access.sharded import state_of

BOTH = Wire("int8", "int4", rounding="stochastic", rotate=True)
WIRES = [
    "bf16",
    "int8",
    Wire("fp8", "fp8_e5m2", rounding="stochastic"),
    Wire(reduce="int4"),
    BOTH,
]
STAGES = (1, 2, 3)


def made(make: Callable = offloads.adamw, **options: Any) -> Any:
    """Only biases, norms and the scale are small."""
    return offloads.made(make, keep_whole=30, **options)


def run(stage: Any, make: Callable = offloads.adamw, loop: str = "clip", steps: int = 3, **options: Any) -> Any:
    """Everything a run leaves, whole."""
    where = {"stage": stage} if isinstance(stage, int) else placed(Setting(stage, shape=(2, 2)))
    model, optimizers = made(make, **where, **options)
    losses = [offloads.one_step(model, optimizers, step, loop) for step in range(steps)]
    return {**offloads.whole(model), "losses": torch.tensor(losses)}


def same_bits(stages: Any, **options: Any) -> None:
    wanted = run(stages[0], **options)
    assert all(value.isfinite().all() for value in wanted.values())
    for stage in stages[1:]:
        offloads.same(run(stage, **options), wanted, (stage, options))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world", [2, 3])
def test_stages_give_the_same_bits_by_the_same_wire(ranks, world, precision):
    for wire in WIRES if world == 2 else [BOTH]:
        ranks(same_bits, world, STAGES, wire=wire, precision=precision)


def test_a_reduce_wire_gives_the_same_bits_at_stage_0_too(ranks):
    ranks(same_bits, 2, (0, 1, 2, 3), wire=Wire(reduce="int8", rounding="stochastic"))
    ranks(same_bits, 2, (0, 3), wire=Wire(reduce="int4", rotate=True), precision="bf16")


def test_differences_at_stages_1_and_2(ranks):
    for precision, wire in ((None, "int4"), ("bf16", "int4"), ("bf16", Wire("int2", "int4"))):
        ranks(same_bits, 2, (1, 2), wire=wire, precision=precision)


FEATURES: dict[str, dict[str, Any]] = {
    "accumulation": {"loop": "accumulate"},
    "no_sync": {"loop": "no_sync", "precision": "bf16"},
    "several backwards": {"loop": "backwards"},
    "no overlap": {"overlap": False, "prefetch": 0},
    "recompute": {"recompute": True, "precision": "bf16"},
    "host": {"offload": Offload(chunk=CHUNK), "precision": "bf16"},
    "disk": {"offload": Offload("disk", "disk", folder=True, chunk=CHUNK), "precision": "bf16"},
    "release": {"release": True, "loop": "plain"},
    "delay": {"delay": 1, "offload": Offload(chunk=CHUNK), "loop": "plain", "precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "float reduces": {"precision": zeor.Precision(torch.bfloat16, torch.float32)},
}


def same_feature(folder: str, name: str, stages: Any, wire: Any) -> None:
    options = dict(FEATURES[name])
    if isinstance(options.get("offload"), Offload) and options["offload"].folder:
        options["offload"] = Offload("disk", "disk", folder=folder, chunk=CHUNK)
    same_bits(stages, wire=wire, **options)


@pytest.mark.parametrize("name", FEATURES)
def test_features_do_not_change_a_bit_between_stages(ranks, tmp_path, name):
    ranks(same_feature, 2, str(tmp_path), name, STAGES, BOTH)


@pytest.mark.parametrize("name", ["accumulation", "host", "delay"])
def test_features_beside_differences(ranks, tmp_path, name):
    ranks(same_feature, 2, str(tmp_path), name, (1, 2), "int4")


# ---- optimizers that look at whole matrices


def matrices(model: nn.Module) -> list[torch.optim.Optimizer]:
    owned = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(owned, lr=0.05), torch.optim.AdamW(others, lr=1e-2)]


def test_matrices_that_travel_to_their_owners_beside_wires(ranks):
    """What owners are sent is exact; what is reduced and gathered goes by codes."""
    for wire, stages in ((BOTH, STAGES), ("int4", (1, 2))):
        ranks(same_bits, 2, stages, make=matrices, wire=wire)


# ---- two axes

ACROSS = Wire(across="int8", rounding="stochastic")
PAIRS = ((1, 1), (2, 1), (3, 1), (3, 3), (1, 2))


def test_a_wire_across_gives_the_same_bits_where_updates_are_cut_alike(ranks):
    for precision in (None, "bf16"):
        ranks(same_bits, 4, PAIRS, wire=Wire(across=Wire(reduce="int4", rotate=True)), precision=precision)
    ranks(same_bits, 4, ((1, 1), (2, 2), (3, 1)), wire=ACROSS, precision="bf16")
    ranks(same_bits, 4, ((2, 1), (3, 2)), wire=Wire(across="int4"))
    ranks(same_bits, 4, ((3, 1), (3, 2)), wire=Wire("int8", "int8", across="int4"))


# ---- what is computed with, and what stays exact


def images(stage: int, wire: Any, precision: Any) -> None:
    """After a step every rank reads the same, which is not what the masters are; those are updated exactly."""
    model, optimizers = made(stage=stage, wire=wire, precision=precision)
    for step in range(2):
        offloads.one_step(model, optimizers, step, "clip")
    engine = state_of(model).engine
    seen = apart = 0
    for unit in engine.units:
        unit.start_gather()
        unit.wait()
        for lane in unit.lanes:
            mine, master = lane.full.flat.clone(), lane.gather_master()
            rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, mine)
            assert all(torch.equal(row, mine) for row in rows), "ranks compute with different weights"
            exact = master.to(lane.key.compute_dtype)
            if lane.key.stays_whole:
                assert torch.equal(mine, exact)
                continue
            seen += 1
            apart += not torch.equal(mine, exact)
            largest = float((mine.float() - master.float()).abs().max())
            assert largest < 0.07 * float(master.abs().max()), largest
        unit.free()
    assert seen and apart == seen


@pytest.mark.parametrize("stage, wire", [(1, "int8"), (2, "int4"), (3, "int8"), (3, "fp8")])
def test_all_ranks_compute_with_what_was_decoded(ranks, stage, wire):
    for precision in (None, "bf16"):
        ranks(images, 2, stage, wire, precision)


def test_at_stage_0_sums_that_travel_back_as_codes_are_the_same_on_every_rank(ranks):
    """Each updates everything by what it has decoded, its own part of the sum too."""
    for wire in (BOTH, Wire("int4", "int4")):
        first, *others = ranks(run, 3, 0, wire=wire, precision="bf16")
        del first["losses"]  # of its own rows
        for each in others:
            del each["losses"]
            offloads.same(each, first, wire)


def read_after_steps(wire: Any) -> dict[str, float]:
    """What this rank's forward reads, of stage 0 along two axes: sums travel back along one axis after the other."""
    model, optimizers = made(wire=wire, **placed(Setting((0, 0), shape=(2, 2))))
    for step in range(2):
        offloads.one_step(model, optimizers, step, "clip")
    return {name: float(param.detach().double().sum()) for name, param in model.named_parameters()}


def test_at_stage_0_along_two_axes_ranks_read_the_same_weights(ranks):
    """On the second axis several ranks encode the same sum: they round it alike."""
    first, *others = ranks(read_after_steps, 4, Wire("int8", "int8", rounding="stochastic"))
    assert all(each == first for each in others)


def masters_apart(stage: int, wire: Any, steps: int) -> float:
    """How far masters have come apart from those of exact training, over how far they went. Steps are far below the
    unit of a weight's block: masters that were what was decoded would not move, or jump."""

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    exact, coded = (run(stage, sgd, "plain", steps, wire=each, precision="bf16") for each in (None, wire))
    start, moved, apart = dict(offloads.net().named_parameters()), 0.0, 0.0
    for name, value in start.items():
        moved += float((exact[name] - value).norm() ** 2)
        apart += float((coded[name] - exact[name]).norm() ** 2)
    return float((apart / moved) ** 0.5)


@pytest.mark.parametrize("stage, wire", [(1, "int8"), (2, "int4"), (3, "int8")])
def test_masters_are_never_what_was_decoded(ranks, stage, wire):
    for apart in ranks(masters_apart, 2, stage, wire, 20):
        assert apart < 0.05


# ---- what users write


def written(stage: int, wire: Any) -> Any:
    """A clamp after each step, whole values, and an average."""
    model, optimizers = made(stage=stage, wire=wire)
    average = zeor.ema(model, 0.9, optimizer=optimizers[0])
    for step in range(3):
        offloads.one_step(model, optimizers, step, "clip")
    with zeor.full_params(model, write=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    offloads.one_step(model, optimizers, 3, "clip")
    with average.applied(), zeor.full_params(model):
        found = {f"{name} averaged": param.detach().clone() for name, param in model.named_parameters()}
    streamed = dict(zeor.iter_full(model, max_bytes=1 << 12))
    with zeor.full_params(model):
        assert all(torch.equal(streamed[name], param) for name, param in model.named_parameters())
    return {**found, **offloads.whole(model)}


def same_written(stages: Any, wire: Any) -> None:
    wanted = written(stages[0], wire)
    for stage in stages[1:]:
        offloads.same(written(stage, wire), wanted, stage)


def test_whole_values_averages_and_streams(ranks):
    ranks(same_written, 2, STAGES, "int8")
    ranks(same_written, 2, (1, 2), "int4")


def clamped(stage: int, wire: Any) -> None:
    """A write in place reaches the master where it changed something, and leaves the rest of it exact."""
    model, optimizers = made(stage=stage, wire=wire)
    for step in range(2):
        offloads.one_step(model, optimizers, step, "clip")
    with zeor.full_params(model):
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
    edge = {name: value.abs().median() for name, value in before.items()}
    names = {param: name for name, param in model.named_parameters()}

    def clamp(module: nn.Linear, args: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-edge[names[module.weight]], edge[names[module.weight]])

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(clamp) for module in linears]
    with torch.no_grad():
        offloads.loss_of(model, 2)
    for hook in hooks:
        hook.remove()
    with zeor.full_params(model):
        for linear in linears:
            name, param = names[linear.weight], linear.weight
            assert float(param.abs().max()) <= float(edge[name]) * 1.05, name
            kept = before[name].abs() < edge[name] * 0.8
            assert kept.float().mean() > 0.2 and torch.equal(param[kept], before[name][kept]), name


@pytest.mark.parametrize("stage, wire", [(1, "int8"), (2, "int4"), (3, "int8")])
def test_writes_in_place_reach_the_master_alone_where_they_changed_something(ranks, stage, wire):
    ranks(clamped, 2, stage, wire)


# ---- checkpoints


def resumed(folder: str, stage: Any, wire: Any, precision: Any, asynchronous: bool) -> Any:
    """What a run that saved half-way leaves, and one that went on from what it saved."""
    options = {"stage": stage, "wire": wire, "precision": precision}
    model, optimizers = made(**options)
    for step in range(6):
        if step == 3:
            saving = zeor.save(folder, model, optimizers, step=step, asynchronous=asynchronous)
        offloads.one_step(model, optimizers, step, "backwards")
    if asynchronous:
        saving.wait()
    wanted = offloads.whole(model)
    model, optimizers = made(**options)
    offloads.one_step(model, optimizers, 7, "clip")  # another past
    step = zeor.load(folder, model, optimizers).step
    for number in range(step, 6):
        offloads.one_step(model, optimizers, number, "backwards")
    offloads.same(offloads.whole(model), wanted, (stage, wire, precision))
    return wanted


@pytest.mark.parametrize(
    "stage, wire, precision",
    [(0, BOTH, None), (1, "int4", None), (2, "int4", "bf16"), (3, BOTH, "bf16"), (2, Wire("int8", "fp8"), None)],
)
def test_a_run_that_resumes_has_the_bits_of_the_one_that_went_on(ranks, tmp_path, stage, wire, precision):
    ranks(resumed, 2, str(tmp_path), stage, wire, precision, asynchronous=stage == 2)


def loads(folder: str, stage: int, wire: Any) -> Any:
    model, optimizers = made(stage=stage, wire=wire)
    zeor.load(folder, model, optimizers)
    found = offloads.whole(model)
    offloads.one_step(model, optimizers, 0, "clip")
    return found


def test_a_checkpoint_holds_masters_at_any_ranks_and_wire(ranks, tmp_path):
    ranks(resumed, 2, str(tmp_path), 2, "int4", None, False)
    first = ranks(loads, 2, str(tmp_path), 2, "int4")[0]
    for world, stage, wire in ((1, 3, "int8"), (3, 3, None), (4, 1, BOTH)):
        offloads.same(ranks(loads, world, str(tmp_path), stage, wire)[0], first, (world, stage, wire))


# ---- frozen weights, and weights that are codes already


def frozen(stages: Any, wire: Any) -> None:
    """Frozen weights travel at stage 3 alone; by an exact gather the bits are those of stage 2."""
    found = []
    for stage in stages:
        model = offloads.net()
        for param in model.blocks[0].parameters():
            param.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        zeor.shard(model, optimizer, stage=stage, wire=wire, keep_whole=30, precision="bf16")
        losses = [offloads.one_step(model, [optimizer], step, "clip") for step in range(3)]
        model.blocks[0].requires_grad_(True)  # from here on it trains, by the same wire
        optimizer.add_param_group({"params": list(model.blocks[0].parameters())})
        losses += [offloads.one_step(model, [optimizer], step, "clip") for step in range(3, 5)]
        found.append({**offloads.whole(model), "losses": torch.tensor(losses)})
    for each in found[1:]:
        offloads.same(each, found[0], wire)


def test_frozen_weights_and_what_is_unfrozen(ranks):
    ranks(frozen, 2, STAGES, Wire(reduce="int8"))
    ranks(frozen, 2, (1, 2), "int4")
    ranks(frozen, 2, (3,), "int8")


def traffic_of_codes(wire: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zeor.shard(model, optimizer, stage=3, precision="fp8", wire=wire, units=blocks)
    for step in range(2):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        model(x.bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zeor.traffic(model)


def test_weights_in_fp8_travel_as_their_own_codes(ranks):
    pytest.importorskip("torchao")
    [exact, coded] = [ranks(traffic_of_codes, 2, wire)[0]["bytes_by_verb"] for wire in (None, Wire("int8", "int4"))]
    assert coded["gather"] == exact["gather"] and coded["reduce"] < 0.4 * exact["reduce"]
