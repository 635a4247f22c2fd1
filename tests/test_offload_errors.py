"""What is asked of offload and updates and cannot be: each refusal is one sentence that says what to do."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeor
from tests import offloads
from tests.tiers.test_files import needs_mount
from zeor import Offload
from zeor.plan import Plan
from zeor.tiers import folders

NEEDS_A_FOLDER = (
    "Offload to disk needs a folder on the disk that is to hold it: zeor.Offload(folder=...); only offload='disk' has "
    "one by itself, ZEOR_OFFLOAD_FOLDER or zeor-offload in the current directory."
)
ONLY_AUTO = "is kept by auto=True alone, and here the places are fixed; give auto=True, or leave the budget out."
BY_AUTO = "names a place, but auto=True places moments and master by what is free; leave one of them out."
OFFLOADS: list[tuple[dict[str, Any], str]] = [
    (
        {"moments": "hos"},
        "Offload.moments='hos': 'hos' is not a tier (did you mean 'host'?); use one of ['device', 'host', 'disk'].",
    ),
    (
        {"grads": {"device": 0.5, "dsk": 0.5}},
        "Offload.grads={'device': 0.5, 'dsk': 0.5}: 'dsk' is not a tier (did you mean 'disk'?); use one of ['device', "
        "'host', 'disk'].",
    ),
    ({"master": "gpu"}, "Offload.master='gpu': 'gpu' is not a tier; use one of ['device', 'host', 'disk']."),
    (
        {"compute": {"device": 0.5, "host": 0.4}},
        "Offload.compute={'device': 0.5, 'host': 0.4}: the fractions add up to 0.9; let them add up to 1.",
    ),
    (
        {"moments": {"device": 1.5, "host": -0.5}},
        "Offload.moments={'device': 1.5, 'host': -0.5}: 1.5 is not a fraction; give numbers from 0 to 1.",
    ),
    ({"moments": {"host": True}}, "Offload.moments={'host': True}: True is not a fraction; give numbers from 0 to 1."),
    ({"moments": {}}, "Offload.moments={}: the fractions add up to 0; let them add up to 1."),
    ({"moments": None}, "Offload.moments=None: None is not a tier; use one of ['device', 'host', 'disk']."),
    (
        {"moments": "disk"},
        NEEDS_A_FOLDER,
    ),
    (
        {"grads": {"device": 0.5, "disk": 0.5}},
        NEEDS_A_FOLDER,
    ),
    ({"update": "hots"}, "Offload.update='hots' is not known (did you mean 'host'?); use one of ['device', 'host']."),
    (
        {"device_budget": "40 gigs"},
        "Offload.device_budget='40 gigs'; give bytes, as a number or as text such as '40GiB'.",
    ),
    ({"host_budget": 0}, "Offload.host_budget=0; give bytes, as a number or as text such as '40GiB'."),
    ({"host_budget": True}, "Offload.host_budget=True; give bytes, as a number or as text such as '40GiB'."),
    ({"chunk": 0}, "Offload.chunk=0; give a whole number of at least 1."),
    ({"chunk": 1000}, "Offload.chunk=1000; give a multiple of 256 elements."),
    ({"threads": 0.5}, "Offload.threads=0.5; give a whole number of at least 1."),
    *[
        (
            {"moments": value},
            f"Offload.moments={value!r}: {tier!r} is not a tier{hint}; use one of ['device', 'host', 'disk'].",
        )
        for value, tier, hint in [
            (["host"], ["host"], " (did you mean 'host'?)"),
            (("host",), ("host",), " (did you mean 'host'?)"),
            (("hi",), ("hi",), ""),
            (({}, 1), ({}, 1), ""),
            (((["host"], 1.0),), ["host"], " (did you mean 'host'?)"),
            ({3: 1.0}, 3, ""),
        ]
    ],
    *[
        ({"auto": True, name: value}, f"Offload.{name}={value!r}; give bytes, as a number or as text such as '40GiB'.")
        for name in ("device_budget", "host_budget")
        for value in (
            float("nan"),
            float("inf"),
            -float("inf"),
            "nan",
            "inf",
            "infGiB",
            "1e400",
            0.5,
            "40iB",
            "40BG",
            "GB",
        )
    ],
    *[
        ({name: value}, f"Offload.{name}={value!r}; give True or False.")
        for name in ("pin", "auto")
        for value in ("no", "yes", 1, 0, None)
    ],
    ({"device_budget": 1000, "host_budget": 1000}, f"Offload.device_budget {ONLY_AUTO}"),
    ({"moments": "host", "host_budget": "40GiB"}, f"Offload.host_budget {ONLY_AUTO}"),
    *[
        (
            {"auto": True, "update": "host", **places},
            "Offload.auto streams state through the device, which update='host' does not; leave one of them out, and "
            "with update='host' name the places: moments='host', master='host'.",
        )
        for places in ({}, {"moments": "host", "master": "host"}, {"folder": "x"})
    ],
    ({"auto": True, "moments": "disk", "folder": "x"}, f"Offload.moments='disk' {BY_AUTO}"),
    ({"auto": True, "moments": "disk"}, f"Offload.moments='disk' {BY_AUTO}"),
    ({"auto": True, "master": "device"}, f"Offload.master='device' {BY_AUTO}"),
    (
        {"auto": True, "master": {"device": 0.5, "host": 0.5}},
        f"Offload.master={{'device': 0.5, 'host': 0.5}} {BY_AUTO}",
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), OFFLOADS, ids=range(len(OFFLOADS)))
def test_an_offload_that_cannot_be_is_refused_in_a_sentence(fields, sentence):
    with pytest.raises(ValueError) as caught:
        Offload(**fields)
    assert str(caught.value) == sentence


HOST_ALONE = (
    "Offload.update='host' goes with moments and master on the host and compute on the device, and without delay; "
    "leave the other out, or Offload.update."
)
PLANS: list[tuple[dict[str, Any], str]] = [
    (
        {"offload": "hosts"},
        "offload='hosts' is not known (did you mean 'host'?); use 'host', 'disk', 'auto', a zeor.Offload, or None.",
    ),
    ({"offload": 3}, "offload=3 is not known; use 'host', 'disk', 'auto', a zeor.Offload, or None."),
    ({"moments": "int4"}, "moments='int4' is not known (did you mean 'int8'?); use one of ['exact', 'bf16', 'int8']."),
    ({"release": "yes"}, "release='yes'; give True or False."),
    ({"delay": 2}, "delay=2; an update is applied at once (0) or one step late (1)."),
    ({"delay": True}, "delay=True; an update is applied at once (0) or one step late (1)."),
    (
        {"release": True, "delay": 1},
        "release=True updates inside backward, so it cannot be delayed; leave one of them out.",
    ),
    *[
        (
            {"release": True, "nonfinite": nonfinite},
            f"release=True updates before all gradients are known, so nonfinite={nonfinite!r} cannot keep a step from "
            "being taken; leave one of them out.",
        )
        for nonfinite in ("skip", "raise")
    ],
    (
        {"delay": 1, "offload": Offload(grads="host")},
        "With delay=1 gradients stay on the device; leave Offload.grads there.",
    ),
    *[
        (
            {"stage": stage, "offload": Offload(compute="host")},
            f"Offload.compute is away, but at stage {stage} compute is whole; use stage=3.",
        )
        for stage in (0, 1, 2)
    ],
    *[
        (
            {"stage": stage, "offload": Offload(grads=place, folder="x")},
            f"Offload.grads is away, but at stage {stage} gradients are whole; use stage=2 or 3.",
        )
        for stage in (0, 1)
        for place in ("host", "disk", {"device": 0.5, "host": 0.5})
    ],
    ({"delay": 1, "offload": Offload(update="host")}, HOST_ALONE),
    ({"offload": Offload(update="host", moments="disk", folder="x")}, HOST_ALONE),
    ({"offload": Offload(update="host", compute="host")}, HOST_ALONE),
    (
        {"moments": "int8", "offload": Offload(update="host")},
        "moments='int8' are updated on the device; leave out update='host'.",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), PLANS, ids=range(len(PLANS)))
def test_a_plan_that_cannot_be_is_refused_in_a_sentence(options, sentence):
    with pytest.raises(ValueError) as caught:
        Plan.parse(options)
    assert str(caught.value) == sentence


def test_a_field_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(TypeError, match=r"^zeor.Offload has no field 'momments' \(did you mean 'moments'\?\)\.$"):
        Plan.parse({"offload": {"momments": "host"}})
    with pytest.raises(TypeError, match=r"^zeor has no option 'offlod' \(did you mean 'offload'\?\)\.$"):
        Plan.parse({"offlod": "host"})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("40GiB", 40 << 30),
        ("40 gib", 40 << 30),
        ("1.5GB", 1_500_000_000),
        ("512MiB", 512 << 20),
        ("7kb", 7000),
        ("100B", 100),
        ("1TiB", 1 << 40),
        ("2TB", 2 * 10**12),
        ("40G", 40 << 30),
        ("40GB", 40 * 10**9),
        ("1.5M", 3 << 19),
        ("8k", 8 << 10),
        ("1 t", 1 << 40),
        (2.5e9, 2_500_000_000),
    ],
)
def test_budgets_are_numbers_or_text(text, nbytes):
    assert Offload(auto=True, host_budget=text).host_budget == nbytes


HALVES = {"host": 0.5, "device": 0.5}


def test_ways_to_say_the_same():
    assert Plan.parse({"offload": "host"}).offload == Offload() == Offload.parse({"moments": "host"})
    assert Plan.parse({"offload": "auto"}).offload == Offload(auto=True) == Offload("host", {"host": 1}, auto=True)
    again = Offload(HALVES, HALVES)
    assert Offload(again.moments, again.master) == again and again.moments == (("device", 0.5), ("host", 0.5))
    assert [Plan.parse({"stage": stage, "offload": Offload(grads="host")}).stage for stage in (2, 3)] == [2, 3]
    assert Offload({"host": 1, "device": 0}) == Offload({"host": 1.0}) == Offload("host")
    assert Offload({"disk": 0.5, "device": 0.5}, folder="x").moments == (("device", 0.5), ("disk", 0.5))
    assert not Offload("device", "device").away and Offload().away
    assert not Plan().streams and Plan.parse({"offload": "host"}).streams and Plan(moments="int8").streams


def test_disk_alone_is_the_folder_of_the_environment_or_one_in_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value, folder in ((None, "zeor-offload"), ("", "zeor-offload"), ("a/b", "a/b"), (f"{tmp_path}/c", "c")):
        if value is None:
            monkeypatch.delenv("ZEOR_OFFLOAD_FOLDER", raising=False)
        else:
            monkeypatch.setenv("ZEOR_OFFLOAD_FOLDER", value)
        wanted = Offload("disk", "disk", folder=tmp_path / folder)
        assert Plan.parse({"offload": "disk"}).offload == wanted
    assert list(tmp_path.iterdir()) == [], "nothing is made by asking"


# ---- at shard()


def refused(options: dict[str, Any]) -> str:
    model = offloads.net()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        zeor.shard(model, offloads.adamw(model), **options)
    assert all(type(param) is nn.Parameter for param in model.parameters()), "nothing of the model has changed"
    return str(caught.value)


def test_a_folder_whose_parent_is_missing_is_refused_at_shard(ranks, tmp_path):
    folder = tmp_path / "not" / "there"
    for precision in (None, "bf16"):
        options = {"offload": Offload("disk", "disk", folder=folder), "precision": precision}
        for text in ranks(refused, 2, options):
            assert f"The offload folder {folder} cannot be made because {folder.parent} does not exist" in text


def test_ranks_that_ask_for_different_offloads_are_told(ranks):
    def differ() -> str:
        return refused({"offload": "host" if dist.get_rank() else None})

    for text in ranks(differ, 2):
        assert text.startswith("The ranks' plans differ: ") and "offload" in text


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    paths: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"mount{len(paths)}"
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)
        paths.append(path)
        return path

    yield mount
    for path in paths:
        subprocess.run(["umount", path], check=True)


@needs_mount
def test_a_disk_too_small_for_the_state_is_one_sentence_before_training(ranks, mounted):
    folder = mounted("size=64k")
    for precision, kept in ((None, 8 * 2784), ("bf16", 10 * 2784)):
        options = {"offload": Offload("disk", "disk", folder=folder), "precision": precision, "stage": 2}
        (folder / "fill").write_bytes(bytes(shutil.disk_usage(folder).free - 16384))
        found = ranks(refused, 2, options)
        (folder / "fill").unlink()
        assert found[0] == found[1]
        assert found[0].startswith(f"The offload folder {folder} of rank 0 has ")
        assert f"bytes free, but 2 rank(s) will keep about {kept:,} there; free some space, choose another" in found[0]
    ranks(int, 2)
    assert list(folder.iterdir()) == [], "nothing is left of it"


@needs_mount
def test_a_disk_that_cannot_be_written_to_is_refused_at_shard(ranks, mounted):
    folder = mounted("ro")
    for text in ranks(refused, 2, {"offload": Offload("disk", "disk", folder=folder)}):
        assert f"The offload folder {folder} cannot be used (Read-only file system)" in text


def test_one_rank_that_cannot_use_its_folder_stops_all_of_them(ranks, tmp_path):
    def one_fails(folder: str) -> str:
        if dist.get_rank() == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(folders, "_open", fails)
                return refused({"offload": Offload("disk", "disk", folder=folder)})
        return refused({"offload": Offload("disk", "disk", folder=folder)})

    def fails(folder: Path) -> None:
        raise RuntimeError("its disk is broken.")

    first, second = ranks(one_fails, 2, str(tmp_path))
    assert second == "its disk is broken."
    assert first == "Rank 1 cannot offload to disk: its disk is broken."


def ranks_with_folders_of_their_own(folder: str) -> list[str]:
    rank = torch.distributed.get_rank()
    model = torch.nn.Linear(8, 8)
    own = Path(folder) / f"disk{rank}"
    own.mkdir()
    offload = zeor.Offload("disk", "disk", folder=str(own))
    model, optimizer = zeor.shard(model, torch.optim.AdamW(model.parameters()), offload=offload)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return [path.name[:13] for path in own.iterdir()]


def test_each_rank_may_have_a_disk_of_its_own(ranks, tmp_path):
    assert ranks(ranks_with_folders_of_their_own, 2, str(tmp_path)) == [["zeor-offload-"], ["zeor-offload-"]]


def on_disk_alone(current: str, named: str | None) -> list[int]:
    """How many arrays each sub-folder of the folder holds while a model trains, to the bits of one without offload."""
    wanted = offloads.run(stage=2, precision="bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(current)
        patch.delenv("ZEOR_OFFLOAD_FOLDER", raising=False)
        if named is not None:
            patch.setenv("ZEOR_OFFLOAD_FOLDER", named)
        model, optimizers = offloads.made(stage=2, precision="bf16", offload="disk")
    losses = [offloads.one_step(model, optimizers, step, "plain") for step in range(3)]
    offloads.same({**offloads.left(model), "losses": torch.tensor(losses)}, wanted)
    found = [len(list(each.glob("*.array"))) for each in Path(current, named or "zeor-offload").iterdir()]
    dist.barrier()  # the other rank has looked too
    return found


@pytest.mark.parametrize(("named", "rest"), [(None, []), ("mine", ["mine"])])
def test_disk_alone_trains_and_leaves_only_a_folder_that_was_named(ranks, tmp_path, named, rest):
    for found in ranks(on_disk_alone, 2, str(tmp_path), named):
        assert len(found) == 2 and all(found)
    ranks(int, 2)  # by now what the ranks held is gone
    assert [path.name for path in tmp_path.rglob("*")] == rest


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_small_moments_of_a_float64_model_are_refused_before_anything_changes(moments):
    model = nn.Linear(4, 4, dtype=torch.float64)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=f"moments='{moments}'.*'weight' is float64; use moments='exact'"):
        zeor.shard(model, torch.optim.AdamW(model.parameters()), moments=moments)
    assert type(model.weight) is nn.Parameter and torch.equal(model.weight, before)
