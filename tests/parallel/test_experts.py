"""Models with expert parallelism: which ranks hold what, what is sent and held, and what is refused on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zeor
from examples.experts import divide
from tests.optim.owners.test_owners import Shampoo
from tests.parallel.test_tensor import text_of
from tests.parity.divided import adamw, new_mesh, whole
from tests.parity.mixtures import Mixed, batch, compared, loss_of, made, mesh_of, one_step, reference, sharded
from zeor.access.sharded import state_of
from zeor.features.pipeline import _check_plan
from zeor.parallel.experts import _imagined, same_experts

EXPERTS = ("gate", "up", "down")

# ---- which ranks hold the same experts


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_ranks_with_the_same_experts_are_a_grid(ep: int, inside: int, across: int, neighbours: bool) -> None:
    """ep divides the inner axis of ep * inside ranks, by neighbours or by strides: what is left has inside x across
    ranks, whose lines and coordinates are those of a grid."""
    members = [(i, a) for a in range(across) for i in range(ep * inside)]
    coords = [i % ep if neighbours else i // inside for i, _ in members]
    for me in range(len(members)):
        found = same_experts(members, coords, me)
        assert me in found.ranks and {coords[rank] for rank in found.ranks} == {coords[me]}
        assert found.members == [(i, a) for a in range(across) for i in range(inside)]
        mine = found.members[found.ranks.index(me)]
        by_place = dict(zip(found.members, found.ranks))
        assert found.lines[0] == [by_place[i, mine[1]] for i in range(inside)]
        assert found.lines[1] == [by_place[mine[0], a] for a in range(across)]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_lines_of_an_imagined_world(outer: int, ep: int, inner: int) -> None:
    """One rank of a mesh (outer, ep, inner) knows the lines of all."""
    mesh = torch.arange(outer * ep * inner).view(outer, ep, inner)
    lines = {rank: line for line in mesh.movedim(1, 2).reshape(-1, ep).tolist() for rank in line}
    for rank, line in lines.items():
        assert _imagined(list(lines), lines[rank]) == [[other, *lines[other]] for other in lines], (rank, line)


def axes_seen(setting: Mixed, options: dict[str, Any]) -> tuple[list[int], list[int], tuple[int, int]]:
    model, _, _ = sharded(Mixed(setting.shape, setting.stage, over=setting.over, options=options))
    axes = state_of(model).engine.axes
    assert axes.experts is not None and axes.experts.tensor is not None
    everyone = axes.experts.everyone
    same = dist.get_process_group_ranks(everyone.gather) if everyone.gather else [dist.get_rank()]
    return same, [place for place, _ in axes.experts.tensor.places], axes.experts.sizes


@pytest.mark.parametrize(
    ("over", "options", "same", "sizes"),
    [
        ("all", {}, [[0, 2], [1, 3]], (2, 1)),
        ("mesh", {}, [[0, 2], [1, 3]], (1, 2)),
        ("crossed", {}, [[0, 1], [2, 3]], (2, 1)),
        ("all", {"hierarchy": 2}, [[0, 2], [1, 3]], (1, 2)),
    ],
    ids=str,
)
def test_axes_of_experts(ranks: Callable, over: str, options: dict[str, Any], same: list, sizes: tuple) -> None:
    for rank, (found, places, their_sizes) in enumerate(ranks(axes_seen, 4, Mixed((2, 2), over=over), options)):
        assert found == next(line for line in same if rank in line)
        assert places == [next(n for n, line in enumerate(same) if each in line) for each in range(4)]
        assert their_sizes == sizes


# ---- gradients


class Rows(nn.Module):
    """Each rank multiplies its own rows; nothing is sent, so gradients are known."""

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))
        self.one = nn.Parameter(torch.ones(1, 5, dtype=torch.float64))
        self.dense = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: float) -> Tensor:
        mine = [each.to_local().sum() * x for each in (self.three, self.one) if each.to_local().numel()]
        return sum(mine) + self.dense.sum() * x


def uneven(stage: int) -> tuple[dict[str, Tensor], float]:
    mesh = new_mesh(2, 2, names=("dp", "ep"))
    model = Rows()
    for name in ("three", "one"):
        setattr(model, name, nn.Parameter(distribute_tensor(getattr(model, name).detach(), mesh["ep"], [Shard(0)])))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zeor.shard(model, optimizer, experts=mesh["ep"], stage=stage, keep_whole=0)
    model(float(dist.get_rank() + 1)).backward()
    norm = float(zeor.clip_grad_norm_(model, math.inf))
    optimizer.step()
    return whole(model), norm


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_experts_that_ranks_hold_unequally_many_of(ranks: Callable, stage: int) -> None:
    """Rank r has factor r + 1; ranks 0 and 2 hold rows 0 and 1 of three, and the one; ranks 1 and 3 hold row 2. All are
    divided by four."""
    three = torch.tensor([[1.0], [1.0], [1.5]], dtype=torch.float64).expand(3, 5)  # (1 + 3) / 4, (2 + 4) / 4
    one, dense = torch.full((1, 5), 1.0, dtype=torch.float64), torch.full((5,), 2.5, dtype=torch.float64)
    wanted = {"three": 1 - three, "one": 1 - one, "dense": 1 - dense}
    for found, norm in ranks(uneven, 4, stage):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), found
        assert norm == pytest.approx(float(torch.cat([three.flatten(), one.flatten(), dense]).norm()), abs=1e-12)


def thawed(stage: int) -> dict[str, Tensor]:
    setting = Mixed((2, 2), stage)
    model, optimizer, rank = sharded(setting)
    frozen = [param for name, param in model.named_parameters() if "experts" in name]
    for step in range(3):
        for param in frozen:
            param.requires_grad_(step != 1)
        one_step(model, optimizer, step, rank, setting)
    return whole(model)


def test_experts_are_frozen_for_a_step(ranks: Callable) -> None:
    model = made()
    optimizer = adamw(model)
    for step in range(3):
        for name, param in model.named_parameters():
            param.requires_grad_(step != 1 or "experts" not in name)
        for rank in range(4):
            (loss_of(model, *batch(step, 0, rank)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(thawed, 4, 3):
        for name, param in model.named_parameters():
            assert torch.allclose(found[name], param, rtol=0, atol=1e-10), name


def held(stage: int) -> dict[str, Any]:
    model, _, rank = sharded(Mixed((2, 2), stage, options={"keep_whole": 0}))
    weight = model.blocks[0].mixture.experts.up
    loss_of(model, *batch(0, 0, rank)).backward()
    grad = weight.grad
    assert isinstance(grad, DTensor) and grad.placements == weight.placements == (Shard(0),)
    assert grad.shape == weight.shape == (4, 16, 24)
    return {"full": grad.full_tensor(), "norm": float(grad.norm())}


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_dtensors_of_the_mean_over_all_ranks(ranks: Callable, stage: int) -> None:
    model = made()
    for rank in range(4):
        (loss_of(model, *batch(0, 0, rank)) / 4).backward()
    wanted = model.blocks[0].mixture.experts.up.grad
    for found in ranks(held, 4, stage):
        assert torch.allclose(found["full"], wanted, rtol=0, atol=1e-12)
        assert found["norm"] == pytest.approx(float(wanted.norm()), abs=1e-12)


# ---- with whatever else is on

ALIKE: list[dict[str, Any]] = [
    {"overlap": False}, {"recompute": True}, {"keep_whole": 0}, {"paths": "static"}, {"prefetch": 2},
    {"deterministic": True}, {"nonfinite": "raise"}, {"release": True}, {"offload": "host"},
    {"offload": {"master": "host", "moments": "host", "grads": "host"}}, {"offload": {"compute": "host"}},
    {"offload": "auto"},
]  # fmt: skip


def trained(options: list[dict[str, Any]]) -> list[bytes]:
    found = []
    for number, each in enumerate(options):
        setting = Mixed((2, 2), (3, 2)[number % 2], options={"precision": "bf16", **each})
        model, optimizer, rank = sharded(setting)
        for step in range(3):
            one_step(model, optimizer, step, rank, setting)
        found.append(b"".join(value.numpy().tobytes() for value in whole(model).values()))
    return found


@pytest.mark.whole
def test_options_change_no_bit(ranks: Callable) -> None:
    for found in ranks(trained, 4, [{}, {}, *ALIKE], timeout=240):
        assert [each == found[0] for each in found] == [True] * (2 + len(ALIKE))


def by_count() -> dict[str, Tensor]:
    """The mean over all tokens, of which ranks have unequally many."""
    model, optimizer, rank = sharded(Mixed((2, 2), 3))
    for step in range(3):
        tokens, targets = batch(step, 0, rank)
        kept = targets[:, rank:]
        logits = model(tokens)[:, rank:]
        summed = nn.functional.cross_entropy(logits.flatten(0, 1), kept.flatten(), reduction="sum")
        zeor.mean_loss(model, summed, kept.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def test_mean_loss_counts_tokens_of_all_ranks(ranks: Callable) -> None:
    model = made()
    optimizer = adamw(model)
    for step in range(3):
        count = 0
        for rank in range(4):
            tokens, targets = batch(step, 0, rank)
            kept = targets[:, rank:]
            count += kept.numel()
            logits = model(tokens)[:, rank:]
            nn.functional.cross_entropy(logits.flatten(0, 1), kept.flatten(), reduction="sum").backward()
        for param in model.parameters():
            param.grad /= count
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(by_count, 4):
        for name, param in model.named_parameters():
            assert torch.allclose(found[name], param, rtol=0, atol=1e-10), name


def matrices_and_experts(model: nn.Module) -> list[torch.optim.Optimizer]:
    """An optimizer of whole matrices for what every rank shares, and an element-wise one for experts and the rest."""
    named = dict(model.named_parameters())
    matrices = [name for name, param in named.items() if param.dim() == 2 and "experts" not in name]
    others = [param for name, param in named.items() if name not in matrices]
    return [Shampoo([named[name] for name in matrices]), torch.optim.AdamW(others, lr=1e-2)]


def owned(stage: int) -> dict[str, Tensor]:
    model, optimizers, rank = sharded(Mixed((2, 2), stage), matrices_and_experts)
    for step in range(3):
        loss_of(model, *batch(step, 0, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def test_matrices_beside_experts_have_owners(ranks: Callable) -> None:
    model = made()
    optimizers = matrices_and_experts(model)
    for step in range(3):
        for rank in range(4):
            (loss_of(model, *batch(step, 0, rank)) / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found in ranks(owned, 4, 3):
        for name, param in model.named_parameters():
            assert torch.allclose(found[name], param, rtol=0, atol=1e-8), name


def by_axis() -> dict[str, Tensor]:
    """Parameters are cut inside ep groups, the rest over all ranks."""
    setting = Mixed((2, 2), {"dp": 1, "ep": 3}, over="mesh", clip="zeor")
    model, optimizer, rank = sharded(setting)
    for step in range(3):
        one_step(model, optimizer, step, rank, setting)
    return whole(model)


def test_updates_on_the_host(ranks: Callable) -> None:
    """They are the stock optimizer's, which is one process's within rounding."""
    setting = Mixed((2, 2), 3, clip="zeor", options={"offload": {"update": "host"}})
    for far, _ in ranks(compared, 4, setting):
        assert far < 1e-10


def test_a_stage_for_each_axis(ranks: Callable) -> None:
    wanted, _ = reference(4, 1, True)
    for found in ranks(by_axis, 4):
        assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-10


# ---- what is sent, and held


def counted(stage: int, over: str) -> tuple[dict[str, Any], dict[tuple[str, str], float]]:
    """What a step sent, by axis and verb, and what the lanes say that it should be."""
    options = {"keep_whole": 0, "nonfinite": "ignore", "buffers": "local"}  # nothing else is gathered
    setting = Mixed((2, 2), stage, over=over, options=options)
    model, optimizer, rank = sharded(setting)
    for step in range(2):
        one_step(model, optimizer, step, rank, setting)
    wanted: dict[tuple[str, str], float] = {}
    for unit in state_of(model).engine.units:
        for lane in unit.lanes:
            axis = lane.axes.everyone
            once = lane.layout.numel * 8 * (axis.size - 1) / axis.size
            for verb in ("reduce", "gather"):
                wanted[axis.name, verb] = wanted.get((axis.name, verb), 0) + once
    return zeor.traffic(model)["last_step"], wanted


@pytest.mark.parametrize("stage", [2, 3])
def test_each_lane_sends_along_its_own_axes(ranks: Callable, stage: int) -> None:
    """At stage 2 each is gathered once per step; at stage 3 in forward, and again in backward but for the last."""
    for found, wanted in ranks(counted, 4, stage, "all"):
        assert {axis for axis, _ in wanted} == {"ranks", "experts"}
        for (axis, verb), nbytes in wanted.items():
            if verb == "reduce" or stage == 2:
                assert found[axis][verb] == nbytes, (axis, verb)
            else:
                assert nbytes < found[axis][verb] <= 2 * nbytes


def reported(setting: Mixed) -> tuple[dict[str, int], dict[str, int]]:
    mesh, model = mesh_of(setting), made().float()
    divide(model, mesh["ep"])
    world = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape)) if setting.over != "all" else setting.world
    said = zeor.predict(model, world=world, stage=setting.stage, experts=mesh["ep"], keep_whole=32)
    optimizer = adamw(model)
    over = None if setting.over == "all" else mesh
    zeor.shard(model, optimizer, stage=setting.stage, mesh=over, experts=mesh["ep"], keep_whole=32)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, *batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
    return zeor.report(model), said.as_dict()


PREDICTED = [Mixed(shape, stage, over=over) for shape, stage, over in itertools.product(
    ((1, 4), (2, 2)), (1, 2, 3), ("all", "mesh"))]  # fmt: skip


def all_reported(settings: list[Mixed]) -> list[Any]:
    return [reported(setting) for setting in settings]


def test_ranks_hold_what_was_predicted(ranks: Callable) -> None:
    by_rank = ranks(all_reported, 4, PREDICTED, timeout=240)
    experts = sum(param.numel() for name, param in made().named_parameters() if "experts" in name)
    dense = sum(param.numel() for param in made().parameters()) - experts
    for number, setting in enumerate(PREDICTED):
        found, said = [each[number][0] for each in by_rank], by_rank[0][number][1]
        for role in ("compute", "grad", "master", "padding"):
            assert {rank[role] for rank in found} == {said[role]}, (setting, role)
        assert max(rank["moments"] for rank in found) == said["moments"], setting
        assert all(rank["transient_peak"] <= said["transient"] for rank in found), setting
        if setting.stage == 3:
            small = 32 * 40  # what stays whole, at most
            assert (dense + experts) * 4 // 4 <= said["compute"] <= (dense + experts) * 4 // 4 + small * 4


# ---- what is refused


def cut_model(mesh: Any) -> nn.Module:
    model = made()
    divide(model, mesh)
    return model


def refusals() -> dict[str, str]:
    mesh = new_mesh(2, 2, names=("dp", "ep"))
    ep, model = mesh["ep"], cut_model(mesh["ep"])
    experts = model.blocks[0].mixture.experts
    found = {
        "nothing said": text_of(lambda: zeor.shard(model)),
        "a name": text_of(lambda: zeor.shard(model, experts="ep")),
        "two dimensions": text_of(lambda: zeor.shard(model, experts=mesh)),
        "no experts": text_of(lambda: zeor.shard(made(), experts=ep)),
        "another dimension": text_of(lambda: zeor.shard(model, experts=mesh["dp"])),
        "other ranks": text_of(lambda: zeor.shard(model, mesh=mesh["dp"], experts=ep)),
        "one rank alone says so": text_of(lambda: zeor.shard(model, experts=ep if dist.get_rank() else None)),
        "fp8": text_of(lambda: zeor.shard(model, experts=ep, precision="fp8")),
        "compile": text_of(lambda: zeor.shard(model, experts=ep, compile=True)),
        "recompute": text_of(lambda: zeor.shard(model, experts=ep, recompute="auto")),
    }
    for name, option in OPTIONS.items():
        found[name] = text_of(lambda option=option: zeor.shard(model, experts=ep, **option))
    whole_gate = distribute_tensor(torch.ones(4, 16, 24, dtype=torch.float64), ep, [Replicate()])
    gate, experts.gate = experts.gate, nn.Parameter(whole_gate)
    found["replicated"] = text_of(lambda: zeor.shard(model, experts=ep))
    experts.gate = nn.Parameter(distribute_tensor(whole_gate.to_local(), mesh, [Shard(1), Shard(0)]))
    found["tensor parallelism too"] = text_of(lambda: zeor.shard(model, experts=ep))
    experts.gate = gate

    optimizer = adamw(model)
    zeor.shard(model, optimizer, experts=ep, plan="auto")  # nothing was changed by all that
    found["join"] = text_of(lambda: zeor.join(model).__enter__())
    found["wires later"] = text_of(lambda: zeor.set_wire(model, "bf16"))
    found["replan"] = text_of(lambda: zeor.replan(model, optimizer, stage=2))
    found["one rank"] = text_of(lambda: zeor.full_params(model, to_rank=0).__enter__())
    found["whole state"] = text_of(lambda: zeor.full_state(model, optimizer))
    found["penalty"] = text_of(lambda: zeor.penalty(model, lambda p: p.abs().sum()))
    found["initialise"] = text_of(lambda: zeor.init_parameters(model))
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "wire=": {"wire": "bf16"},
    "delay=1": {"delay": 1},
    "moments='bf16'": {"moments": "bf16"},
}
SAID: dict[str, list[str]] = {
    "nothing said": ["TypeError", "'blocks.0.mixture.experts.gate' is a DTensor", "experts=mesh['ep']"],
    "a name": ["TypeError", "experts='ep'", "experts=mesh['ep']"],
    "two dimensions": ["TypeError", "experts=mesh['ep']"],
    "no experts": ["TypeError", "no parameter of the model is a DTensor", "distribute_tensor"],
    "another dimension": ["TypeError", "'blocks.0.mixture.experts.gate' is a DTensor over", "experts= holds the ranks"],
    "other ranks": ["ValueError", "experts= holds the ranks", "mesh=mesh['dp', 'ep']"],
    "one rank alone says so": ["TypeError", "On rank 0", "experts=mesh['ep']"],
    "fp8": ["ValueError", "precision='fp8'", "use precision='bf16'"],
    "compile": ["ValueError", "compile= cannot trace", "expert parallelism"],
    "recompute": ["ValueError", "recompute='auto'", "use recompute=True"],
    **{option: ["ValueError", f"{option} does not know lanes", "experts="] for option in OPTIONS},
    "replicated": ["TypeError", "'blocks.0.mixture.experts.gate'", "it is no expert's", "plain parameter"],
    "tensor parallelism too": ["TypeError", "'blocks.0.mixture.experts.gate'", "no tensor parallelism"],
    "join": ["ValueError", "expert parallelism", "equally many batches"],
    "wires later": ["ValueError", "zeor.set_wire", "experts="],
    "replan": ["RuntimeError", "zeor.replan", "cut by expert parallelism"],
    "one rank": ["RuntimeError", "zeor.full_params(to_rank=)", "zeor.iter_full"],
    "whole state": ["RuntimeError", "zeor.full_state", "zeor.save"],
    "penalty": ["RuntimeError", "zeor.penalty", "cut by expert parallelism"],
    "initialise": ["RuntimeError", "zeor.init_parameters", "zeor.load_pretrained"],
}


def test_refusals_are_one_sentence_on_every_rank(ranks: Callable) -> None:
    for found in ranks(refusals, 4):
        assert found.keys() == SAID.keys()
        for what, parts in SAID.items():
            assert all(part in found[what] for part in parts), (what, found[what])


def in_a_pipeline() -> str:
    model, _, _ = sharded(Mixed((1, 2)))
    return text_of(lambda: _check_plan("Stage 0 of the pipeline", state_of(model)))


def test_stages_with_experts_are_refused(ranks: Callable) -> None:
    for found in ranks(in_a_pipeline, 2):
        assert found.startswith("ValueError: Stage 0 of the pipeline was sharded with experts=")


def matrices() -> str:
    mesh = new_mesh(2, 2, names=("dp", "ep"))
    model = Rows()
    model.three = nn.Parameter(distribute_tensor(model.three.detach(), mesh["ep"], [Shard(0)]))
    model.one = nn.Parameter(distribute_tensor(model.one.detach(), mesh["ep"], [Shard(0)]))
    muon = torch.optim.Muon([model.three], lr=0.1)
    return text_of(lambda: zeor.shard(model, muon, experts=mesh["ep"]))


def test_optimizers_of_whole_matrices_are_refused_for_experts(ranks: Callable) -> None:
    for found in ranks(matrices, 4):
        assert "Muon computes on whole matrices" in found and "'three'" in found and "'ep'" in found
