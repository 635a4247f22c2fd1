"""The `zeor` command: subcommands, nearest names, the plan's table, and what the terminal is shown."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from zeor.tools import cli, plan, show
from zeor.tools.gpt import GPTConfig


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("zeor ")


def test_mistyped_names_get_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'train'?" in complaint(capsys, "trian")
    assert "did you mean '--stage'?" in complaint(capsys, "train", "--stgae", "2")
    assert "there are train, plan, schedule" in complaint(capsys, "xyzzy")


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_of_each_command(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"zeor {command}" in shown
    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_plan_prints_a_row_per_stage_and_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--stages", "0", "3", "--worlds", "1", "4", "--layers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 layers, width 128" in lines[0]
    rows = [line.split() for line in lines if line[:1].isdigit()][1:]
    assert [row[:2] for row in rows] == [["0", "1"], ["0", "4"], ["3", "1"], ["3", "4"]]
    header = next(line for line in lines if line.startswith("stage")).split()
    assert header == ["stage", "ranks", *plan.COLUMNS, "peak"]
    assert lines[1] == "MiB per rank with AdamW, fp32"
    numel = sum(p.numel() for p in plan.meta_model(GPTConfig(layers=2)).parameters())
    assert rows[0][header.index("compute")] == f"{4 * numel / 2**20:.2f}"


def test_plan_of_a_large_model_allocates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--size", "7b", "--worlds", "64", "--stages", "3"]) == 0
    assert "GiB" in capsys.readouterr().out


def test_plan_by_tier_shows_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--size", "gpt2", "--precision", "bf16", "--stages", "3", "--worlds", "1", "--batch", "2", "512"]
    assert cli.main([*asked, "--offload", "host", "--release"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[3:5]] == [
        ["device", "host"],
        ["stage", "ranks", "device", "host", "disk", "window", "activations", "peak", "peak"],
    ]
    cells = dict(zip(plan.TIERS, lines[6].split()[2:]))
    assert float(cells["host"]) == pytest.approx(10 * 124.4e6 / 2**30, rel=0.6)  # the head is not tied to the tokens
    assert cells["disk"] == "0.00" and float(cells["activations"]) > 0


WAYS = {
    "by role": [],
    "by tier": ["--offload", "host"],
    "released": ["--release"],
    "small moments": ["--moments", "int8"],
}


@pytest.mark.parametrize("way", WAYS)
def test_plan_says_when_activations_are_not_counted(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--size", "gpt2", "--precision", "bf16", "--stages", "3", "--worlds", "2", *WAYS[way]]
    assert cli.main(asked) == 0
    out = capsys.readouterr().out
    assert "Activations are NOT counted" in out and "--batch SEQUENCES TOKENS counts them" in out.replace("\n", " ")
    if way != "by role":
        assert dict(zip(plan.TIERS, out.splitlines()[6].split()[2:]))["activations"] == "-", "unknown, and not zero"
    assert cli.main([*asked, "--batch", "2", "128"]) == 0
    out = capsys.readouterr().out
    assert "NOT counted" not in out
    assert "Activations are counted for 2 x 128 tokens a rank and step, blocks recomputed." in out


@pytest.mark.parametrize("way", WAYS)
def test_plan_fits_a_terminal(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--size", "65b", "--stages", "0", "--worlds", "1", *WAYS[way]]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 79] == []


def test_a_row_that_does_not_fit_a_budget_is_explained_in_short_lines(capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ["--offload", "auto", "--device-budget", "12GiB", "--host-budget", "4GiB"]
    assert cli.main(["plan", "--size", "gpt2-xl", "--precision", "bf16", "--worlds", "1", "8", *budgets]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["0", "1", *"-" * len(plan.TIERS)] in [line.split() for line in lines]
    assert any(line.startswith("stage 0 on 1 rank(s) does not fit: ") for line in lines)
    assert max(map(len, lines)) <= 79


def test_plan_says_what_fits_beside_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--precision", "bf16", "--fits", "24", "80"]
    assert cli.main([*asked, "--release", "--moments", "int8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 79
    assert "Activations of 1 x 1024 tokens are counted" in " ".join(lines[:3])
    rows = {line.split()[0]: line.split()[2:] for line in lines[6:]}
    assert rows["gpt2-xl"] == ["0", "0"]
    assert rows["65b"] == ["-", "-"]
    assert float(rows["7b"][0]) > float(rows["7b"][1]) == 0


def test_plan_of_auto_needs_budgets_and_heeds_them(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--size", "gpt2-xl", "--precision", "bf16", "--stages", "3", "--worlds", "1", "--offload", "auto"]
    with pytest.raises(SystemExit, match="give both budgets"):
        cli.main(asked)
    assert cli.main([*asked, "--device-budget", "16GiB", "--host-budget", "64GiB"]) == 0
    assert "GiB" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is room for"):
        cli.main([*asked, "--device-budget", "8GiB", "--host-budget", "1GiB"])
    with pytest.raises(SystemExit, match="budgets are for --offload auto"):
        cli.main([*asked[:-1], "host", "--device-budget", "8GiB"])


def test_plan_refuses_impossible_sizes() -> None:
    with pytest.raises(SystemExit, match="heads do not divide"):
        cli.main(["plan", "--width", "100", "--heads", "3"])


def test_predicted_bytes_shrink_with_the_stage() -> None:
    config = GPTConfig(layers=2, width=32, heads=1)
    numel = sum(p.numel() for p in plan.meta_model(config).parameters())
    totals = [plan.predict(config, 4, stage)["resident"] for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert plan.predict(config, 4, 0)["compute"] == 4 * numel


def test_a_schedule_that_cannot_be_is_one_sentence() -> None:
    with pytest.raises(SystemExit, match=r"^zeor: .*prefetch"):
        cli.main(["schedule", "--layers", "2", "--prefetch", "-1"])


def test_schedule_prints_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", "--layers", "2", "--stage", "3"]) == 0
    text = capsys.readouterr().out
    assert "gather" in text and "reduce" in text


def test_schedule_shows_what_is_fetched_and_spilled(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", "--layers", "1", "--stage", "2", "--offload", "host"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = [line[2:] for line in lines if line[:2] == ["step", "head"]]
    assert found == [["fetch(head)", "update(head)", "spill(head)"], ["publish(head)"]]


def test_human_bytes() -> None:
    shown = [show.human_bytes(n) for n in (0, 1023, 1536, 3 * 2**30, 5 * 2**40)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]


def test_table_aligns() -> None:
    assert show.table(["a", "bb"], [["x", "1"], ["long", "22"]]) == "a     bb\n----  --\nx      1\nlong  22"
    assert show.table(["a", "b\nc"], [["x", "1"]]) == "   b\na  c\n-  -\nx  1"


def test_what_a_model_writes_cannot_command_the_terminal() -> None:
    shown = show.plain_lines("\x1b[2Jone\ttwo\r\x07\n\n" + "word " * 40)
    assert all(char.isprintable() or char == "\n" for char in shown)
    lines = shown.split("\n")
    assert lines[:2] == ["?[2Jone two??", ""] and max(map(len, lines)) <= 79


def test_one_unit_for_a_table() -> None:
    names = [show.common_unit([5, n])[0] for n in (0, 2**20 - 1, 2**20, 2**30, 2**45)]
    assert names == ["KiB", "KiB", "MiB", "GiB", "GiB"]
    assert show.in_unit(3 * 2**29, 2**30) == "1.50"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_redraws_in_place_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "_REDRAW_EVERY_S", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    screen = Terminal()
    progress = show.Progress(2, stream=screen)
    progress.update(1, "loss " + "9" * 100)
    progress.update(2, "loss 1")
    lines = screen.getvalue().split("\r\x1b[K")
    assert screen.getvalue().count("\n") == 1
    assert all(len(line) <= 40 for line in lines)
    assert lines[-1] == "[" + "#" * 9 + "] step 2/2  loss 1  0:00 left\n"


@pytest.mark.parametrize("columns", range(20, 120))
def test_a_field_is_shown_whole_or_not_at_all(columns: int) -> None:
    fields = ["loss 2.31", "grad_norm 0.52", "1,234,567 tok/s", "lr 4.0e-03"]
    line = show.Progress(100_000)._line(12, list(fields), columns)
    assert len(line) <= columns
    kept = [field for field in fields if field in line]
    assert kept == fields[: len(kept)], "the first matter most"
    bare = line.partition("] ")[2] or line
    if len("step     12/100000  0:00 left") <= columns:
        assert bare.split("  ")[0] == "step" and [*bare.split("  ")[3:-1]] == kept


def test_the_time_left_knows_of_steps_that_an_earlier_run_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: now[0])
    log = io.StringIO()
    progress = show.Progress(600, start=500, stream=log)
    now[0] += 10.0
    progress.update(510, "loss 1")
    assert log.getvalue().endswith("step 510/600  loss 1  1:30 left\n"), "a second a step, for 90 more"


def test_progress_in_a_log_is_a_line_now_and_then() -> None:
    log = io.StringIO()
    progress = show.Progress(100, stream=log)
    for step in range(1, 101):
        progress.update(step, f"loss {step}")
    assert [line.split("step ")[1].split()[0] for line in log.getvalue().splitlines()] == ["1/100", "100/100"]
    assert max(map(len, log.getvalue().splitlines())) <= 79
    silent = io.StringIO()
    show.Progress(1, stream=silent, enabled=False).update(1, "no")
    assert silent.getvalue() == ""


def test_resident_memory_is_known_here() -> None:
    assert show.resident_nbytes() > 1e6


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    """As `zeor schedule | head -1` does: the pipe is closed before everything is written."""
    script = "import sys; from zeor.tools import cli; sys.exit(cli.main(['schedule', '--layers', '400']))"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("forward enter")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_schedule_record_puts_what_was_done_beside_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", "--record", "--layers", "2", "--width", "64", "--stage", "3"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["planned", "recorded", "ms", "took", "bytes"]
    end = rows.index("")  # below it bytes and times by axis and verb
    cells = [row.split() for row in rows[:end]]
    assert [row[1] for row in cells] == [row[0] for row in cells]
    verbs = {row[0].partition("(")[0] for row in cells}
    assert verbs == {"gather", "wait", "free", "reduce", "finish", "update", "publish"}
    assert min(float(row[3]) for row in cells) >= 0
    sizes = {tuple(row[4:]) for row in cells if row[0] == "gather(blocks.0)"}
    assert sizes == {("196.6", "kB")}, "four matrices of 12 * 64 * 64 elements together"
    by_axis = [row.split() for row in rows[end + 1 :]]
    assert by_axis[0] == ["axis", "verb", "sent", "ms", "hidden", "exposed"]
    assert {tuple(row[:2]) for row in by_axis[2:]} == {("ranks", verb) for verb in ("agree", "gather", "reduce")}
    assert all(float(row[-2]) + float(row[-1]) == pytest.approx(float(row[-3]), abs=0.002) for row in by_axis[2:])


def test_schedule_record_refuses_what_cannot_be_trained_here() -> None:
    with pytest.raises(SystemExit, match=r"--record trains the model on this host's CPU, and 6,.* are too many"):
        cli.main(["schedule", "--record", "--size", "7b"])
    with pytest.raises(SystemExit, match="at least one rank"):
        cli.main(["schedule", "--record", "--ranks", "0"])
