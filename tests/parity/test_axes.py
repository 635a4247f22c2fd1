"""A stage for each of two axes: at one shape of mesh all pairs of stages give the same bits, with whatever else is on.

Every setting is compared with stages 0 and 0 at its shape; float64 with plain PyTorch in one process. What is at rest
and what is sent equal their formulas for each axis. Six ranks, 2 x 3, run by torchrun in `make test-all`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from tests import covering, loops, offloads
from tests.offloads import CHUNK
from tests.parity.models import FACTORS, Setting, largest, placed, product, reference, train
from tests.parity.test_stages import check
from zeor import Offload
from zeor.access.sharded import state_of

PAIRS = (*itertools.product(range(4), range(3)), (3, 3))  # inside, across
SHAPES = ((2, 2), (1, 4), (4, 1))
OTHERS = {name: values for name, values in FACTORS.items() if name != "stage"}


def settings_at(shape: tuple[int, int], select: Callable) -> list[Setting]:
    """Every pair of stages with every value of every other factor: a row in which each pair of values meets."""
    return [Setting(**row, shape=shape) for row in select({"stage": PAIRS, **OTHERS})]


# ---- bits


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_all_pairs_of_stages_give_the_same_bits(ranks: Callable, shape: tuple[int, int]) -> None:
    """Each pair of stages once, all values of the other factors among them."""
    settings = settings_at(shape, lambda factors: covering.covering(factors, strength=2))
    settings = list({setting.stage: setting for setting in settings}.values())
    assert {setting.stage for setting in settings} == set(PAIRS)
    check(ranks, 4, settings)


@pytest.mark.whole
def test_all_pairs_of_factors_give_the_same_bits(ranks: Callable) -> None:
    check(ranks, 4, settings_at((2, 2), lambda factors: covering.covering(factors, strength=2)))


@pytest.mark.whole
@pytest.mark.parametrize("optimizer", FACTORS["optimizer"])
@pytest.mark.parametrize("precision", FACTORS["precision"])
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_product_of_pairs(ranks: Callable, shape: tuple[int, int], precision: str, optimizer: str) -> None:
    varied = {name: FACTORS[name] for name in ("micro", "clip", "overlap")}
    settings = product(stage=PAIRS, **varied, optimizer=[optimizer], precision=[precision], shape=[shape])
    for first in range(0, len(settings), 78):
        check(ranks, 4, settings[first : first + 78])


def compare_with_plain(settings: list[Setting]) -> list[float]:
    return [largest(train(setting), reference(setting, dist.get_world_size())) for setting in settings]


@pytest.mark.parametrize("all_pairs", [False, pytest.param(True, marks=pytest.mark.whole)], ids=["once", "pairs"])
@pytest.mark.parametrize("shape", SHAPES)
def test_float64_is_plain_pytorch_in_one_process(ranks: Callable, shape: tuple[int, int], all_pairs: bool) -> None:
    """Each pair of stages once; or every value of every factor with every value of every other."""
    factors = {"stage": PAIRS, **OTHERS, "optimizer": ("AdamW", "SGD"), "precision": ("fp64",)}
    settings = [Setting(**row, shape=shape) for row in covering.covering(factors, strength=2)]
    if not all_pairs:
        settings = list({setting.stage: setting for setting in settings}.values())
    for found in ranks(compare_with_plain, 4, settings, timeout=240):
        assert max(found) < 1e-10, dict(zip(map(str, settings), found))


@pytest.mark.whole
def test_two_nodes_of_three_ranks(tmp_path: Path) -> None:
    """Six processes by torchrun, as users start them; their digests must be one for each precision."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "6"]
    told = subprocess.run(
        [*command, "-m", "tests.parity.test_axes", str(tmp_path)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    for precision in ("fp32", "bf16"):
        found = json.loads((tmp_path / f"{precision}.json").read_text())
        assert len(found) == len(PAIRS) and len(set(found.values())) == 1, found


def six_ranks(folder: Path) -> None:
    """What torchrun runs: digests of all pairs of stages on two nodes of three ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for precision in ("fp32", "bf16"):
        found = {}
        for pair in PAIRS:
            setting = Setting(pair, micro="3", clip="zeor", optimizer="AdamW", precision=precision, shape=(2, 3))
            found[str(pair)] = train(setting).digest()
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, found)
        assert all(each == found for each in digests), f"ranks hold other parameters: {digests}"
        if dist.get_rank() == 0:
            (folder / f"{precision}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


# ---- with what users add


def trained(pair: tuple[int, int], make: Callable = offloads.adamw, loop: str = "clip", **options: Any) -> Any:
    """Everything a run leaves, whole: parameters and the optimizers' state."""
    where = placed(Setting(pair, shape=(2, 2)))
    model, optimizers = offloads.made(make, **where, **options)
    losses = [offloads.one_step(model, optimizers, step, loop) for step in range(3)]
    return {**offloads.whole(model), "losses": torch.tensor(losses)}


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if param.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def streamed(model: nn.Module) -> torch.optim.Optimizer:
    return zeor.optim.AdamW(model.parameters(), lr=1e-2)


FEATURES: dict[str, dict[str, Any]] = {
    "host": {"offload": Offload(chunk=CHUNK), "loop": "accumulate"},
    "disk": {"offload": Offload("disk", "disk", folder=True, chunk=CHUNK), "precision": "bf16"},
    "release": {"release": True, "loop": "plain"},
    "release from the host": {"release": True, "loop": "no_sync", "offload": Offload(chunk=CHUNK), "precision": "bf16"},
    "small moments": {"moments": "bf16", "precision": "bf16", "make": streamed},
    "owners": {"make": muon, "loop": "backwards"},
    "delay": {"delay": 1, "offload": Offload(chunk=CHUNK), "loop": "plain"},
    "views": {"precision": "bf16", "loop": "backwards"},
}


INT8 = {"moments": "int8", "precision": "bf16", "make": streamed}


def same_with(folder: str, name: str, pairs: list[tuple[int, int]]) -> None:
    options = dict(FEATURES.get(name, INT8))
    if isinstance(options.get("offload"), Offload) and options["offload"].folder:
        options["offload"] = Offload("disk", "disk", folder=folder, chunk=CHUNK)
    wanted = trained(pairs[0], **options)
    for pair in pairs[1:]:
        offloads.same(trained(pair, **options), wanted, (name, pair))


@pytest.mark.parametrize("name", FEATURES)
def test_features_do_not_change_a_bit_between_pairs(ranks: Callable, tmp_path: Path, name: str) -> None:
    ranks(same_with, 4, str(tmp_path), name, [(1, 1), (0, 1), (2, 0), (1, 2), (3, 0), (3, 1), (3, 2), (3, 3)])


@pytest.mark.whole
def test_int8_moments_are_the_same_where_updates_are_cut_alike(ranks: Callable, tmp_path: Path) -> None:
    """Blocks of 8-bit moments begin where a rank's slice does, so they depend on how updates are cut alone."""
    for pairs in ([(1, 1), (1, 2), (2, 1), (3, 1), (3, 3)], [(1, 0), (2, 0), (3, 0)], [(0, 1), (0, 2)]):
        ranks(same_with, 4, str(tmp_path), "int8 moments", pairs)


def gradients_at_rest() -> None:
    away = Offload(grads="host", chunk=CHUNK)
    for loop, options in {"backwards": {}, "clip": {}, "plain": {"release": True}}.items():
        wanted = trained((0, 0), loop=loop)
        for pair in ((2, 0), (3, 0), (3, 1)):
            offloads.same(trained(pair, loop=loop, offload=away, **options), wanted, (loop, pair))


def test_gradients_at_rest_on_the_host_change_no_bit(ranks: Callable) -> None:
    """Where all nodes keep the same sums these are gathered across first."""
    ranks(gradients_at_rest, 4)


@pytest.mark.whole
@pytest.mark.parametrize("name", FEATURES)
def test_features_at_every_pair(ranks: Callable, tmp_path: Path, name: str) -> None:
    ranks(same_with, 4, str(tmp_path), name, [(1, 1), *PAIRS])


def joined(pair: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Ranks with unequal numbers of batches, an average of the weights, and weights that are streamed out."""
    model = loops.net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zeor.shard(model, optimizer, **placed(Setting(pair, shape=(2, 2))))
    average = zeor.ema(model, 0.9, optimizer=optimizer)
    with zeor.join(model):
        for step in range((3, 1, 3, 2)[dist.get_rank()]):
            loops.own_loss(model, step, torch.float32).backward()
            zeor.clip_grad_norm_(model, 0.05)
            optimizer.step()
            optimizer.zero_grad()
    found = {name: value.clone() for name, value in zeor.iter_full(model, max_bytes=1 << 12)}
    with zeor.full_params(model):
        assert all(torch.equal(found[name], param) for name, param in model.named_parameters())
    with average.applied(), zeor.full_params(model):
        return {**found, **{f"{name} averaged": param.detach().clone() for name, param in model.named_parameters()}}


def check_joined() -> None:
    wanted = joined((0, 0))
    for pair in PAIRS[1:]:
        loops.assert_equal(joined(pair), wanted)


def test_join_the_average_and_streamed_weights_at_every_pair(ranks: Callable) -> None:
    ranks(check_joined, 4)


# ---- what rests and what is sent


def measured(pair: tuple[int, int] | int, shape: tuple[int, int] = (2, 2)) -> dict[str, Any]:
    """At rest between backward and step, and sent by the third step, along each axis, by gathers and reduces."""
    where = {"stage": pair} if isinstance(pair, int) else placed(Setting(pair, shape=shape))
    model, optimizers = offloads.made(**where, keep_whole=0)
    for step in range(2):
        offloads.one_step(model, optimizers, step, "plain")
    before = zeor.traffic(model)["bytes_by_axis"]
    offloads.loss_of(model, 2).backward()
    rest = zeor.report(model)
    optimizers[0].step()
    model.zero_grad()
    after = zeor.traffic(model)["bytes_by_axis"]
    sent = {axis: after[axis].get("gather", 0) + after[axis].get("reduce", 0) for axis in after}
    for axis, verbs in before.items():
        sent[axis] -= verbs.get("gather", 0) + verbs.get("reduce", 0)
    lanes = [lane for unit in state_of(model).engine.units for lane in unit.lanes]
    return {
        "rest": rest,
        "sent": sent,
        "model": sum(lane.layout.numel for lane in lanes) * 4,
        "params": sum(param.numel() for param in model.parameters()),
    }


def sent_by(pair: tuple[int, int], shape: tuple[int, int], n: int, used: int) -> dict[str, int]:
    """By hand. n: bytes of the model; used: bytes of all the units that passes gather, each time they do.

    A whole gather or reduce along an axis of W ranks sends (W-1)/W of its bytes. Inside comes first in a reduce, so
    that a part of 1/I crosses; sums and new values go back the way on which they are needed."""
    outer, inner = shape
    near, far = (lambda nbytes: nbytes * (inner - 1) // inner), (lambda nbytes: nbytes * (outer - 1) // outer)
    inside, across = pair
    sent = {"gpu": near(n), "node": far(n // inner)}
    if (inside, across) == (0, 0):  # the sum, to everybody
        return {"gpu": 2 * near(n), "node": 2 * far(n // inner)}
    if inside == 0:  # updates are cut across alone: a node needs its part of the sum, and then everything new
        return {"gpu": near(n) + near(n // outer), "node": far(n // inner) + far(n)}
    if pair != (3, 3):  # at stage 0 the sum of what a node updates, else what was updated: it crosses once more
        sent["node"] += far(n // inner)
    if inside < 3:
        sent["gpu"] += near(n)
    else:
        sent["gpu"] += near(used)
    if pair == (3, 3):
        sent["node"] += far(used // inner)
    return sent


def cuts(pair: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    """In how many parts weights and moments are cut, by hand: stage 1 cuts moments along its axis, 3 weights too."""
    outer, inner = shape
    inside, across = pair
    return (inner if inside == 3 else 1) * (outer if across == 3 else 1), (inner if inside else 1) * (
        outer if across else 1
    )


def check_formulas(shape: tuple[int, int]) -> None:
    plain = measured(3)
    n, world = plain["model"], dist.get_world_size()
    values = 2 * 4 * plain["params"]  # of two moments
    used = plain["sent"]["ranks"] * world // (world - 1) - n  # what passes gather, less the reduce
    assert used > n
    for pair in PAIRS:
        found = measured(pair, shape)
        assert found["model"] == n, "a lane is cut alike, whatever the axes"
        wanted = sent_by(pair, shape, n, used)
        assert {axis: found["sent"].get(axis, 0) for axis in wanted} == wanted, (shape, pair)
        rest = torch.tensor([found["rest"]["compute"], found["rest"]["moments"]])
        dist.all_reduce(rest)  # over all ranks: moments are made for elements there are, and the last ranks have fewer
        assert rest.tolist() == [world * n // parts for n, parts in zip((n, values), cuts(pair, shape))], (shape, pair)


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_at_rest_and_sent_are_those_of_the_formulas(ranks: Callable, shape: tuple[int, int]) -> None:
    ranks(check_formulas, 4, shape)


if __name__ == "__main__":
    six_ranks(Path(sys.argv[1]))
