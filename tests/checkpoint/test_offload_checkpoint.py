"""Runs whose state rests elsewhere are saved, loaded, cut anew and given back like any other.

Exact moments come back in every bit wherever they go. Those in int8 come back in every bit where they are cut the
same; at another cut a block has other neighbours, so they are encoded anew, once, within small.error_bound.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zeor
from tests import offloads
from tests.offloads import CHUNK, adamw, left, made, one_step, same, whole
from zeor import Offload
from zeor.memory import small
from zeor.optim.streaming.moments import UNSIGNED

SAVED, MORE = 2, 2


def place(name: str, folder: str) -> dict[str, Any]:
    on_disk = {"folder": folder, "chunk": CHUNK}
    return {
        "none": {},
        "host": {"offload": Offload(chunk=CHUNK)},
        "disk": {"offload": Offload("disk", "disk", **on_disk)},
        "away": {"offload": Offload("disk", "host", "host", "disk", **on_disk), "stage": 3},
        "updated on the host": {"offload": Offload(update="host", chunk=CHUNK)},
        "int8": {"moments": "int8"},
        "int8 host": {"moments": "int8", "offload": Offload(chunk=CHUNK)},
        "int8 disk": {"moments": "int8", "offload": Offload("disk", "disk", **on_disk)},
        "bf16 host": {"moments": "bf16", "offload": Offload(chunk=CHUNK)},
    }[name]


def steps(model: Any, optimizers: list[Any], which: range) -> None:
    for step in which:
        one_step(model, optimizers, step, "clip")


def saved_run(root: str, name: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(everything at the save, this rank's part of everything a few steps later)"""
    model, optimizers = made(**{"stage": 2, "precision": "bf16", **options, **place(name, root)})
    steps(model, optimizers, range(SAVED))
    zeor.save(f"{root}/{name}", model, optimizers[0], step=SAVED)
    at_save = whole(model)
    steps(model, optimizers, range(SAVED, SAVED + MORE))
    return at_save, left(model)


def loaded_run(root: str, source: str, name: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizers = made(**{"stage": 2, "precision": "bf16", **options, **place(name, root)})
    steps(model, optimizers, range(100, 101))  # state of its own, all of which must go
    assert zeor.load(f"{root}/{source}", model, optimizers[0]).step == SAVED
    at_load = whole(model)
    steps(model, optimizers, range(SAVED, SAVED + MORE))
    return at_load, left(model)


EXACT = ("none", "host", "disk", "away")


def check_round_trips(root: str) -> None:
    """At one world: a run that was saved anywhere goes on anywhere, as if nothing had happened."""
    runs = {name: saved_run(root, name, {}) for name in (*EXACT, "int8", "int8 disk")}
    for name in EXACT:
        same(runs[name][0], runs["none"][0], name)
    pairs = [("none", "host"), ("host", "none"), ("host", "disk"), ("disk", "away"), ("away", "host"), ("away", "none")]
    for source, target in pairs:
        at_load, later = loaded_run(root, source, target, {})
        same(at_load, runs["none"][0], (source, target))
        same(later, runs["none"][1], (source, target))
    for source, target in [("int8", "int8 host"), ("int8 disk", "int8"), ("int8", "int8 disk")]:
        at_load, later = loaded_run(root, source, target, {})
        same(at_load, runs["int8"][0], (source, target))
        same(later, runs["int8"][1], (source, target))


@pytest.mark.long
def test_state_moves_between_tiers_through_a_checkpoint_in_every_bit(ranks, tmp_path):
    ranks(check_round_trips, 2, str(tmp_path))


def check_stages(root: str) -> None:
    wanted = saved_run(root, "int8 host", {"stage": 1})
    for stage in (2, 3):
        same(loaded_run(root, "int8 host", "int8 disk", {"stage": stage})[0], wanted[0], stage)


def test_int8_moments_are_cut_the_same_at_stages_1_to_3(ranks, tmp_path):
    ranks(check_stages, 2, str(tmp_path))


# ---- other worlds


def save_again(root: str, source: str, name: str, target: str) -> dict[str, Any]:
    model, optimizers = made(stage=2, precision="bf16", **place(name, root))
    zeor.load(f"{root}/{source}", model, optimizers[0])
    zeor.save(f"{root}/{target}", model, optimizers[0], step=SAVED)
    return whole(model)


def test_exact_state_is_the_same_in_every_bit_at_worlds_2_1_3(ranks, tmp_path):
    wanted = ranks(saved_run, 2, str(tmp_path), "disk", {})[0][0]
    same(ranks(save_again, 1, str(tmp_path), "disk", "host", "one")[0], wanted, "at 1")
    same(ranks(save_again, 3, str(tmp_path), "one", "disk", "three")[0], wanted, "at 3")
    same(ranks(save_again, 2, str(tmp_path), "three", "updated on the host", "two")[0], wanted, "at 2 again")


def encoded_once(exact: dict[str, Any]) -> dict[str, Any]:
    """What int8 moments make of these values where every parameter is cut into blocks from its beginning, as in a world
    of one; each within the bound."""
    found = dict(exact)
    for name, value in exact.items():
        key = name.rpartition("/")[2]
        if "/" in name and key != "step":
            signed = key not in UNSIGNED
            codes = torch.empty(value.numel(), dtype=torch.int8 if signed else torch.uint8)
            scales = torch.empty(small.scale_count(value.numel()))
            small.encode_into(codes, scales, value.flatten(), signed)
            found[name] = torch.empty(value.numel())
            small.decode_into(found[name], codes, scales)
            bound = small.error_bound(value, "int8", signed)
            assert ((found[name].double() - value.flatten().double()).abs() <= bound).all(), name
            found[name] = found[name].view(value.shape)
    return found


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> set[str]:
    """Which sorts of values differ; steps and weights must not."""
    return {name.rpartition("/")[2] for name in offloads.differences(found, wanted)}


def test_int8_state_at_other_worlds_is_encoded_anew_once(ranks, tmp_path):
    wanted = ranks(saved_run, 2, str(tmp_path), "int8 host", {})[0][0]
    one = ranks(save_again, 1, str(tmp_path), "int8 host", "int8", "one")[0]
    assert apart(one, wanted) == {"exp_avg", "exp_avg_sq"}, "blocks have other neighbours"
    same(one, encoded_once(wanted), "at 1")
    three = ranks(save_again, 3, str(tmp_path), "one", "int8 disk", "three")[0]
    assert apart(three, one) <= {"exp_avg", "exp_avg_sq"}
    exact = ranks(save_again, 3, str(tmp_path), "three", "host", "exact")[0]
    same(exact, three, "what int8 stands for, as exact moments")
    same(ranks(save_again, 1, str(tmp_path), "exact", "int8 disk", "again")[0], encoded_once(exact), "at 1 again")


# ---- without files


def check_state_dict(path: str) -> None:
    for name in ("host", "disk", "int8 host", "updated on the host", "bf16 host"):
        options = {"stage": 2, "precision": "bf16", **place(name, path)}
        model, optimizers = made(**options)
        steps(model, optimizers, range(SAVED))
        state, weights = optimizers[0].state_dict(), {}
        with zeor.full_params(model):
            weights = {key: value.clone() for key, value in model.state_dict().items()}
        kept = {k: {n: v.clone() for n, v in entry.items()} for k, entry in state["state"].items()}
        before = whole(model)
        again, others = made(**options)
        steps(again, others, range(50, 51))
        with zeor.full_params(again, write=True):
            again.load_state_dict(weights)
        others[0].load_state_dict(state)
        same(whole(again), before, name)
        for each, its in ((model, optimizers), (again, others)):
            steps(each, its, range(SAVED, SAVED + MORE))
        same(left(again), left(model), name)
        # The state dict that was handed out is a snapshot, as far as torch's own is: the load has not changed it.
        assert state["param_groups"] == optimizers[0].state_dict()["param_groups"], name
        assert kept.keys() == state["state"].keys()


def test_state_dict_and_load_state_dict_go_round(ranks, tmp_path):
    ranks(check_state_dict, 2, str(tmp_path))


def check_state_dict_alone() -> None:
    """Reading the state between steps changes nothing."""
    wanted = offloads.run(stage=3, offload=Offload(chunk=CHUNK))
    model, optimizers = made(stage=3, offload=Offload(chunk=CHUNK))
    losses = []
    for step in range(3):
        losses.append(one_step(model, optimizers, step, "plain"))
        optimizers[0].state_dict()
        whole(model)
    same({**left(model), "losses": torch.tensor(losses)}, wanted)


def test_looking_at_state_changes_nothing(ranks):
    ranks(check_state_dict_alone, 2)


def check_unshard(path: str) -> None:
    for name in ("host", "disk", "int8 host", "updated on the host"):
        model, optimizers = made(stage=2, precision="bf16", **place(name, path))
        steps(model, optimizers, range(SAVED))
        wanted = whole(model)
        zeor.unshard(model, optimizers[0])
        found = {key: param.detach() for key, param in model.named_parameters()}
        for key, param in model.named_parameters():
            for entry, value in optimizers[0].state[param].items():
                found[f"{key}/{entry}"] = value
                assert value.device.type == "cpu" and (value.dim() == 0 or value.shape == param.shape)
        same(found, wanted, name)
        one_step(model, optimizers, 9, "plain_again")  # plain torch
        zeor.shard(model, optimizers[0], stage=3, **place("host", path))
        again = whole(model)
        assert {int(value) for key, value in again.items() if key.endswith("/step")} == {SAVED + 1}
        one_step(model, optimizers, 10, "plain")


def test_unshard_gives_whole_state_back_and_shard_takes_it(ranks, tmp_path):
    ranks(check_unshard, 2, str(tmp_path))


def check_before_shard(path: str) -> None:
    """State that an optimizer held before shard()."""

    def started(**options: Any) -> dict[str, Any]:
        model = offloads.net()
        optimizer = adamw(model)
        for step in range(2):
            model(torch.ones(2, offloads.WIDTH) * step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        zeor.shard(model, optimizer, **options)
        for step in range(2):
            one_step(model, [optimizer], step, "plain")
        return left(model)

    for stage in (1, 3):
        wanted = started(stage=stage)
        for name in ("host", "disk"):
            same(started(stage=stage, **place(name, path)), wanted, (stage, name))
    same(started(stage=3, **place("int8 disk", path)), started(stage=3, moments="int8"))


def test_state_from_before_shard_is_taken_along(ranks, tmp_path):
    ranks(check_before_shard, 2, str(tmp_path))


# ---- averages, full parameters, asynchronous saves


def averaged(options: dict[str, Any]) -> dict[str, Any]:
    model, optimizers = made(stage=options.pop("stage", 2), precision="bf16", **options)
    average = zeor.ema(model, 0.5, optimizer=optimizers[0])
    steps(model, optimizers, range(3))
    found: dict[str, Any] = {f"ema {key}": value for key, value in average.state_dict()["values"].items()}
    with average.applied(), torch.no_grad():
        found["loss"] = offloads.loss_of(model, 5).item()
        with zeor.full_params(model):
            found.update({f"applied {key}": param.detach().clone() for key, param in model.named_parameters()})
    steps(model, optimizers, range(3, 4))
    return {**found, **left(model)}


def check_ema(path: str) -> None:
    wanted = averaged({})
    for name in ("host", "disk", "away", "updated on the host"):
        found = averaged(place(name, path))
        if name == "updated on the host":
            assert found.keys() == wanted.keys()
        else:
            same(found, wanted, name)


def test_an_average_reads_masters_wherever_they_are(ranks, tmp_path):
    ranks(check_ema, 2, str(tmp_path))


def written(options: dict[str, Any]) -> dict[str, Any]:
    model, optimizers = made(**{"stage": 3, "precision": "bf16", **options})
    steps(model, optimizers, range(2))
    with zeor.full_params(model, write=True), torch.no_grad():
        model.head.weight.mul_(0.5)
        model.blocks[0].up.bias.fill_(0.25)
    steps(model, optimizers, range(2, 4))
    return left(model)


def check_written(path: str) -> None:
    wanted = written({})
    for name in ("host", "disk", "away"):
        same(written(place(name, path)), wanted, name)


def test_what_is_written_in_full_params_reaches_the_masters(ranks, tmp_path):
    ranks(check_written, 2, str(tmp_path))


def check_asynchronous(root: str) -> None:
    for name in ("disk", "int8 host"):
        model, optimizers = made(stage=2, precision="bf16", **place(name, root))
        steps(model, optimizers, range(SAVED))
        wanted = whole(model)
        saving = zeor.save(f"{root}/later {name}", model, optimizers[0], step=SAVED, asynchronous=True)
        steps(model, optimizers, range(SAVED, SAVED + MORE))  # meanwhile
        saving.wait()
        again, others = made(stage=2, precision="bf16", **place(name, root))
        zeor.load(f"{root}/later {name}", again, others[0])
        same(whole(again), wanted, name)


def test_an_asynchronous_save_holds_the_values_of_its_moment(ranks, tmp_path):
    ranks(check_asynchronous, 2, str(tmp_path))


# ---- folders


def check_shared(folder: str) -> int:
    """Two runs of one process beside each other in one folder."""
    offload = Offload("disk", "disk", folder=folder, chunk=CHUNK)
    wanted = offloads.run(stage=2, precision="bf16")
    runs = [made(stage=2, precision="bf16", offload=offload) for _ in range(2)]
    losses: list[list[float]] = [[], []]
    for step in range(3):
        for mine, (model, optimizers) in zip(losses, runs):
            mine.append(one_step(model, optimizers, step, "plain"))
    for mine, (model, _) in zip(losses, runs):
        same({**left(model), "losses": torch.tensor(mine)}, wanted)
    return len(os.listdir(folder))


def test_two_runs_share_a_folder_and_leave_nothing(ranks, tmp_path):
    assert max(ranks(check_shared, 2, str(tmp_path))) == 4
    ranks(int, 2)  # by now what the ranks held is gone
    assert os.listdir(tmp_path) == []


LIVES = """
import os, signal, sys
import torch
import zeor
from tests import offloads
from zeor import Offload

folder, checkpoints, result = sys.argv[1:]
torch.set_num_threads(1)

def life(killed):
    offload = Offload("disk", "disk", folder=folder, chunk=256)
    model, optimizers = offloads.made(stage=2, precision="bf16", offload=offload)
    begin = 0
    if not killed:
        begin = zeor.load(checkpoints, model, optimizers[0]).step
        assert begin == 2 and len(os.listdir(folder)) == 1, os.listdir(folder)
    for step in range(begin, 5):
        offloads.one_step(model, optimizers, step, "plain")
        if killed and step == 1:
            zeor.save(checkpoints, model, optimizers[0], step=2)
        if killed and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save(offloads.left(model), result)

for killed in (True, False):
    pid = os.fork()
    if not pid:
        try:
            life(killed)
        finally:
            sys.stdout.flush()
            os._exit(0 if sys.exc_info()[0] is None else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if killed else 0), status
    print(sorted(os.listdir(folder)))
"""


@pytest.mark.long
def test_a_killed_run_resumes_from_its_checkpoint_and_its_leftovers_go(ranks, tmp_path):
    folder, checkpoints, result = tmp_path / "offload", tmp_path / "checkpoints", tmp_path / "result.pt"
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", LIVES, folder, checkpoints, result],
        capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    after_kill, _ = ended.stdout.splitlines()[-2:]
    assert after_kill.count("zeor-offload-") == 1, "the killed run left its arrays"
    wanted = ranks(uninterrupted, 1)[0]
    same(torch.load(result, weights_only=True), wanted)


def uninterrupted() -> dict[str, Any]:
    model, optimizers = made(stage=2, precision="bf16")
    for step in range(5):
        one_step(model, optimizers, step, "plain")
    return left(model)
