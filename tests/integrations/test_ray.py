"""Ray Train: checkpoints reported by each save, a killed worker, and a run that goes on at another number of workers.

Ray is not among the packages of the `dev` extra: `pip install "ray[train]"`, then
`pytest -m "" tests/integrations/test_ray.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.launching import start

pytest.importorskip("ray.train")
pytestmark = [pytest.mark.whole, pytest.mark.timeout(1200)]
STEPS, MORE = 8, 12  # five steps are an epoch: runs stop and go on within one


def go(what: str, storage: str, workers: int, steps: int) -> dict[str, Any]:
    return start("ray_program", 1, what, storage, str(workers), str(steps), timeout=600)[0]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    whole, killed = (str(tmp_path_factory.mktemp(name)) for name in ("whole", "killed"))
    return {
        "plain": go("plain", "", 1, MORE),
        "whole": go("whole", whole, 2, STEPS),
        "killed": go("killed", killed, 2, STEPS),
        "on two": go("whole", whole, 2, MORE),
        "on three": go("whole", killed, 3, MORE),
    }


def test_each_save_is_a_checkpoint_that_ray_knows_and_deletes(found):
    whole = found["whole"]
    assert list(whole["kept"]) == whole["folders"] == ["step-000000000006", "step-000000000008"]
    assert whole["last"] == "step-000000000008"
    assert [each["workers"] for each in whole["kept"].values()] == [2, 2]


def test_losses_are_those_of_one_process(found):
    plain = found["plain"]["losses"]
    for name, world in {"whole": 2, "on two": 2, "on three": 3}.items():
        for metrics in found[name]["kept"].values():
            if metrics["workers"] == world:
                assert metrics["loss"] == pytest.approx(plain[metrics["step"] - 1], rel=0, abs=1e-5)
    assert plain[-1] < plain[0] - 0.5


def test_a_run_whose_worker_was_killed_goes_on_by_itself_to_the_same_bits(found):
    whole, killed = found["whole"], found["killed"]
    assert killed["killed"] and killed["begun"] == {"begun-0": 2, "begun-1": 2}  # all workers began twice
    assert killed["weights"] == whole["weights"]
    assert killed["kept"] == whole["kept"]


def test_it_goes_on_at_as_many_workers_and_at_three(found):
    for name, world in {"on two": 2, "on three": 3}.items():
        assert [each["workers"] for each in found[name]["kept"].values()] == [world, world]
        assert found[name]["last"] == "step-000000000012"
    for name, (_, squares) in found["plain"]["weights"].items():
        for run in ("on two", "on three"):
            assert found[run]["weights"][name][1] == pytest.approx(squares, rel=1e-4), name
