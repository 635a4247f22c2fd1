"""State that rests elsewhere changes no bit: every tier, format, stage, precision and loop against the run beside it
whose state is on the device. `make test` takes every triple of them, `make test-all` every combination.

Formats: exact moments are compared with the run without offload; bf16 and int8 with the same format on the device. How
far a small format is from exact is in tests/optim/streaming/test_moments.py.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeor
from tests import offloads
from tests.covering import LATER, Row, covering
from tests.offloads import CHUNK, LOOPS, adamw, left, made, one_step, run, same
from tests.parity.test_release import ALL_RANKS, ONE_RANK, branches_run
from zeor import Offload

HALVES = {"device": 0.5, "host": 0.5}
THIRDS = {"device": 0.3, "host": 0.3, "disk": 0.4}
fused = functools.partial(adamw, fused=True)


def places(stage: int, path: str) -> dict[str, Offload]:
    """Every sort of place there is at a stage."""
    on_disk = {"folder": path, "chunk": CHUNK}
    found = {
        "host": Offload(chunk=CHUNK),
        "disk": Offload("disk", "disk", **on_disk),
        "moments alone": Offload("host", "device", chunk=CHUNK),
        "master alone": Offload("device", "disk", **on_disk),
        "halves": Offload(HALVES, HALVES, chunk=CHUNK),
        "thirds": Offload(THIRDS, {"host": 0.5, "disk": 0.5}, **on_disk),
    }
    if stage >= 2:
        found["grads on the host"] = Offload(grads="host", chunk=CHUNK)
        found["grads on disk"] = Offload("disk", "host", "disk", **on_disk)
        found["only grads"] = Offload("device", "device", HALVES, chunk=CHUNK)
    if stage == 3:
        found["compute on the host"] = Offload(compute="host", chunk=CHUNK)
        found["compute on disk"] = Offload("disk", "disk", "disk", "disk", **on_disk)
        found["only compute"] = Offload("device", "device", "device", THIRDS, **on_disk)
    return found


STAGES, PRECISIONS, FORMATS = (0, 1, 2, 3), (None, "bf16", "fp16"), ("exact", "bf16", "int8")
FACTORS = {"stage": STAGES, "precision": PRECISIONS, "place": tuple(places(3, "")), "moments": FORMATS, "loop": LOOPS}


def is_there(row: Row) -> bool:
    """Whether a stage has such a place."""
    return row["place"] in places(row["stage"], "")


def check_places(path: str, rows: list[Row]) -> int:
    """Every row against the run on the device that is the same otherwise."""
    wanted: dict[Any, Any] = {}
    for row in rows:
        options = {**row, "steps": 2}
        offload = places(row["stage"], path)[options.pop("place")]
        key = tuple(options.values())
        if key not in wanted:
            wanted[key] = run(**options)
        same(run(offload=offload, **options), wanted[key], row)
    return len(rows)


@pytest.mark.long
@pytest.mark.parametrize("select", [pytest.param(partial(covering, strength=1), id="each"), *LATER])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_state_at_rest_elsewhere_changes_no_bit(ranks, tmp_path, stage, precision, select):
    chosen = select({**FACTORS, "stage": (stage,), "precision": (precision,)}, allowed=is_there)
    rows = [row for row in chosen if (row["stage"], row["precision"]) == (stage, precision)]
    assert {row["place"] for row in rows} == set(places(stage, ""))
    assert ranks(check_places, 2, str(tmp_path), rows, timeout=280) == [len(rows)] * 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "formats"),
    [
        pytest.param(1, ("exact", "int8"), marks=pytest.mark.whole),
        pytest.param(3, ("exact", "int8")),
        pytest.param(4, ("int8",), marks=pytest.mark.whole),
    ],
)
def test_nor_at_other_worlds(ranks, tmp_path, world, formats):
    rows = covering({**FACTORS, "stage": (3,), "precision": ("bf16",), "moments": formats}, strength=1)
    assert ranks(check_places, world, str(tmp_path), rows) == [len(rows)] * world


def check_on_host(stage: int) -> int:
    """The stock fused step over the host's memory, against the same over the device's."""
    count = 0
    threads = torch.get_num_threads()
    for number, (precision, loop) in enumerate(zip((None, "bf16", "fp16", "bf16", None), LOOPS)):
        options = {"stage": stage, "precision": precision, "loop": loop, "steps": 2}
        grads = "host" if stage >= 2 and number else "device"
        offload = Offload((HALVES, "host")[number % 2], grads=grads, update="host", chunk=CHUNK, threads=2)
        same(run(fused, offload=offload, **options), run(fused, **options), options)
        count += 1
    assert torch.get_num_threads() == threads
    return count


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_on_the_host_is_the_fused_step(ranks, stage):
    assert ranks(check_on_host, 2, stage) == [5, 5]


# ---- who has a gradient, and which parameters there are


def check_branches(path: str) -> None:
    """Parameters of one lane that have taken different numbers of steps."""
    for stage, ways in ((1, ONE_RANK), (3, ALL_RANKS)):
        for moments in ("exact", "int8"):
            wanted = branches_run(ways, stage=stage, moments=moments)
            grads = "host" if stage >= 2 else "device"
            for offload in (Offload(grads=grads, chunk=CHUNK), Offload("disk", "disk", folder=path, chunk=CHUNK)):
                found = branches_run(ways, stage=stage, moments=moments, offload=offload)
                same(found, wanted, (stage, moments, offload))


def test_parameters_without_a_gradient_are_left_alone(ranks, tmp_path):
    ranks(check_branches, 2, str(tmp_path))


def grown_run(**options: Any) -> dict[str, Any]:
    """An optimizer that comes later than the model, freezing and thawing, and a group added on the way."""
    model = offloads.net(3)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    zeor.shard(model, **options)
    later = [param for name, param in model.named_parameters() if name.startswith("blocks.2.down")]
    first = [param for param in model.parameters() if not any(param is each for each in later)]
    optimizer = torch.optim.AdamW(first, lr=0.01)
    zeor.shard(model, optimizer)
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": later, "lr": 0.02})
        if step == 3:
            model.blocks[1].requires_grad_(True)
            model.blocks[0].down.requires_grad_(False)
        one_step(model, [optimizer], step, "clip")
    return left(model)


def check_grown(path: str) -> None:
    for stage in (1, 3):
        wanted = grown_run(stage=stage, precision="bf16")
        for offload in (Offload(chunk=CHUNK), Offload("disk", "disk", folder=path, chunk=CHUNK)):
            same(grown_run(stage=stage, precision="bf16", offload=offload), wanted, (stage, offload))
        away = Offload(update="host", chunk=CHUNK)
        assert grown_run(stage=stage, precision="bf16", offload=away).keys() == wanted.keys()


def test_frozen_thawed_and_added_parameters(ranks, tmp_path):
    ranks(check_grown, 2, str(tmp_path))


def skipped_run(**options: Any) -> dict[str, Any]:
    model, (optimizer,) = made(nonfinite="skip", **options)
    for step in range(4):
        loss = offloads.loss_of(model, step)
        (loss * float("inf") if step == 1 and dist.get_rank() == 1 else loss).backward()
        if step == 2:
            zeor.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return left(model)


def check_skipped(path: str) -> None:
    for stage in (1, 2, 3):
        wanted = skipped_run(stage=stage)
        assert {int(value) for name, value in wanted.items() if "'step'" in name} == {3}, "one of four was skipped"
        grads = "disk" if stage >= 2 else "device"
        for offload in (Offload(chunk=CHUNK), Offload("disk", "host", grads, folder=path, chunk=CHUNK)):
            same(skipped_run(stage=stage, offload=offload), wanted, (stage, offload))


def test_a_step_that_is_skipped_leaves_all_of_it_alone(ranks, tmp_path):
    ranks(check_skipped, 2, str(tmp_path))
