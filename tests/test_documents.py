"""What README and docs/ show is true: the first program runs as printed; figures, names and links are right."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import zeor
from zeor.tools import cli
from zeor.tools.plan import ROLES, SIZES, meta_model

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS}


def program(name: str) -> str:
    """The whole program of a page: its first Python block."""
    found = re.search(r"^```python\n(# train\.py\n.*?)^```$", TEXTS[name], flags=re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found.group(1)


# ---- the first program


def train(folder: Path, ranks: int) -> list[str]:
    """Run train.py as the README says; returns what it printed itself."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *torchrun, "train.py"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_the_readmes_program_trains_saves_and_resumes_in_every_bit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program("README.md"))
    checkpoints = tmp_path / "checkpoints"
    first = train(tmp_path, ranks=2)
    assert [line.split()[:4] for line in first] == [["epoch", str(n), "step", str(64 * (n + 1))] for n in range(4)]
    losses = [float(line.split()[-1]) for line in first]
    assert losses[-1] < 0.2 < losses[0], losses
    saved = sorted(checkpoints.glob("step-*"))
    assert [int(path.name.partition("-")[2]) for path in saved] == [128, 192, 256]
    for later in saved[1:]:  # as if it had been stopped in its third epoch
        shutil.rmtree(later)
    assert train(tmp_path, ranks=2) == first[2:]
    assert train(tmp_path, ranks=1) == [], "all epochs are done, whoever asks"
    assert len(list(checkpoints.glob("step-*"))) == 3


@pytest.mark.long
def test_it_goes_on_with_another_number_of_ranks_from_the_middle_of_an_epoch(tmp_path: Path) -> None:
    block = re.search(r"^```python\n( {8}if step % 20.*?)^```$", TEXTS["docs/getting-started.md"], re.M | re.S)
    assert block is not None
    whole = program("README.md")
    line = "        step += 1\n"
    assert whole.count(line) == 1
    (tmp_path / "train.py").write_text(
        whole.replace(line, line + block.group(1)).replace("EPOCHS, FOLDER = 4", "EPOCHS, FOLDER = 1")
    )
    assert [each.split()[3] for each in train(tmp_path, ranks=1)] == ["128"]
    steps = {int(path.name.partition("-")[2]): path for path in (tmp_path / "checkpoints").glob("step-*")}
    assert sorted(steps) == [100, 120, 128]
    for step in (120, 128):
        shutil.rmtree(steps[step])
    shown = train(tmp_path, ranks=2)
    assert [each.split()[3] for each in shown] == ["114"], "28 batches were left, which two ranks share"


def test_both_pages_show_the_same_program() -> None:
    assert program("README.md") == program("docs/getting-started.md")


# ---- the picture


def test_the_picture_shows_what_the_planner_says() -> None:
    drawing = ElementTree.parse(ROOT / "docs" / "stages.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    bars = [
        (each.get("class"), float(each.get("width", ""))) for each in drawing.iter(f"{space}rect") if each.get("class")
    ]
    totals = [each.text for each in drawing.iter(f"{space}text") if each.get("font-weight") == "bold"]
    model = meta_model(SIZES["7b"])
    said = [zeor.predict(model, world=8, stage=stage, precision="bf16") for stage in range(4)]
    expected = [(role, getattr(each, role) / 2**30 * 6) for each in said for role in ROLES]
    assert [role for role, _ in bars] == [role for role, _ in expected]
    assert [width for _, width in bars] == pytest.approx([width for _, width in expected], abs=0.06)
    assert totals == [f"{each.resident / 2**30:.1f}" for each in said]
    assert ", ".join(totals) in TEXTS["README.md"], "the words for who does not see it"


# ---- names, commands, links


@pytest.mark.parametrize("name", TEXTS)
def test_every_name_of_zeor_exists(name: str) -> None:
    for word in set(re.findall(r"(?<![/\w.])zeor\.([A-Za-z_]\w*)", TEXTS[name])):
        is_package = (ROOT / "zeor" / word).is_dir()  # one that its user imports by itself
        assert hasattr(zeor, word) or is_package, f"{name} speaks of zeor.{word}"


COMMANDS = sorted(
    {
        (name, line.strip().partition("  #")[0].strip())
        for name, text in TEXTS.items()
        for line in re.findall(r"^ {4}(zeor (?:%s)\b.*)$" % "|".join(cli.COMMANDS), text, flags=re.MULTILINE)  # noqa: UP031
    }
)


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[command for _, command in COMMANDS])
def test_every_command_is_understood(name: str, command: str) -> None:
    options = cli._parsers()[0].parse_args(shlex.split(command)[1:])
    assert options.command in cli.COMMANDS, name


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if "://" in target:
            continue
        path, _, part = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name} links to {target}"
        if part:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            assert part in map(anchor, headings), f"{name} links to {target}"
