"""docs/plain-loops.md: every block runs as printed, at two ranks, and gives what the same lines give in one process.

What the `dev` extra brings runs in `make test`. For the rest: `pip install NAME`, then
`pytest -m "" tests/integrations/test_plain_loops.py`; those that are not installed are left out.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.integrations.launching import start
from tests.integrations.plain_loops_program import AFTER, PAGE, STAGES, blocks

DEV = ("peft", "bitsandbytes", "torchao", "schedulefree", "tqdm")
REST = tuple(name for name in AFTER if name not in DEV)
_KEPT: dict[str, Any] = {}


def needs(tool: str) -> Any:
    missing = find_spec(tool) is None  # not imported: timm's torchvision may ask for a shim
    return pytest.param(tool, marks=[pytest.mark.whole, pytest.mark.skipif(missing, reason=f"no {tool}")])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(two ranks' findings, one process's) of a tool; those of the dev extra share their processes."""

    def of(tool: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        tools = DEV if tool in DEV else (tool,)
        if tools[0] not in _KEPT:
            folder = str(tmp_path_factory.mktemp("plain"))
            one = start("plain_loops_program", 1, "one", folder, *tools)[0]
            _KEPT[tools[0]] = start("plain_loops_program", 2, "two", folder, *tools), one
        return _KEPT[tools[0]]

    return of


def test_the_page_has_a_program_for_each_tool_that_is_run():
    printed = PAGE.read_text().count("```python\n") - 1  # the first says what comes before all
    assert printed == len(AFTER) + 1  # two of peft
    assert len(blocks("peft")) == len(blocks("Optimizers with 8-bit states")) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "tool", [pytest.param("peft", marks=pytest.mark.whole), "schedulefree", "tqdm", *map(needs, REST)]
)
def test_a_program_gives_what_the_same_lines_give_in_one_process(found, tool):
    two, one = found(tool)
    for stage in STAGES:
        for rank in two:
            assert rank[f"{tool} {stage}"]["loss"] == pytest.approx(one[tool]["loss"], rel=1e-5)
    assert two[0][f"{tool} 1"]["loss"] == two[0][f"{tool} 3"]["loss"]


@pytest.mark.parametrize("tool", ["bitsandbytes", "torchao"])
def test_8_bit_states_are_close_to_one_process_and_the_same_bits_at_both_stages(found, tool):
    two, one = found(tool)
    for rank in two:
        assert rank[f"{tool} 1"]["loss"] == rank[f"{tool} 3"]["loss"] and rank[f"{tool} 3"]["narrow"] > 0
        assert rank[f"{tool} 3"]["loss"] == pytest.approx(one[tool]["loss"], rel=2e-3)


@pytest.mark.whole
@pytest.mark.parametrize("stage", STAGES)
def test_adapters_are_saved_loaded_and_merged_by_peft_itself(found, stage):
    two, one = found("peft")
    for rank in two:
        mine = rank[f"peft {stage}"]
        assert mine["files"] == one["peft"]["files"] and "adapter_model.safetensors" in mine["files"]
        for way in ("plain", "loaded", "put in place"):
            assert mine[way] == pytest.approx(mine["loss"], rel=1e-6), way
        assert mine["merged"] == pytest.approx(mine["loss"], rel=1e-5)
        assert abs(mine["changed"] - mine["loss"]) > 1e-3


def test_tqdm_counts_on_rank_0(found):
    two, one = found("tqdm")
    assert [rank["tqdm 3"]["shown"] for rank in two] == [4, 0] and one["tqdm"]["shown"] == 4


@pytest.mark.parametrize("stage", STAGES)
def test_schedulefree_goes_back_to_the_weights_it_trains(found, stage):
    two, one = found("schedulefree")
    for rank in two:
        assert rank[f"schedulefree {stage}"]["trained"] == pytest.approx(one["schedulefree"]["trained"], rel=2e-6)
    assert one["schedulefree"]["trained"] != one["schedulefree"]["loss"]


def other(name: str, key: str) -> Any:
    return pytest.param(name, key, marks=needs(name).marks)


OTHERS = [other("timm", "averaged"), other("diffusers", "loaded"), other("sentence_transformers", "other"),
          other("torchmetrics", "perplexity")]  # fmt: skip


@pytest.mark.parametrize(("tool", "key"), OTHERS)
def test_what_else_it_computes_is_that_of_one_process(found, tool, key):
    two, one = found(tool)
    for stage in STAGES:
        for rank in two:
            assert rank[f"{tool} {stage}"][key] == pytest.approx(one[tool][key], rel=1e-5)
    assert tool == "diffusers" or one[tool][key] != one[tool]["loss"]


@pytest.mark.parametrize("tool", [needs("tensorboard"), needs("wandb")])
def test_rank_0_writes_the_joint_curves(found, tool):
    two, one = found(tool)
    for stage in STAGES:
        mine, plain = two[0][f"{tool} {stage}"], one[tool]
        for name in ("curve", "norm"):
            assert mine[name] == pytest.approx(plain[name], rel=5e-6) and len(plain[name]) == 4
        assert mine["files"] == 1


@pytest.mark.parametrize("tool", [needs("tensorboard")])
def test_tensorboard_has_whole_weights(found, tool):
    two, one = found(tool)
    for stage in STAGES:
        mine, plain = two[0][f"{tool} {stage}"], one[tool]
        assert mine["histograms"].keys() == plain["histograms"].keys()
        for name, (count, squares) in plain["histograms"].items():
            assert mine["histograms"][name] == pytest.approx([count, squares], rel=1e-4), name
