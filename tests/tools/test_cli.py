"""The `zeor` command: subcommands, nearest names, the plan's table, and what the terminal is shown."""

from __future__ import annotations

import io

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
def test_help_of_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert f"zeor {command}" in capsys.readouterr().out


def test_plan_prints_a_row_per_stage_and_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--stages", "0", "3", "--worlds", "1", "4", "--layers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 layers, width 128" in lines[0]
    assert [line.split()[:2] for line in lines[-4:]] == [["0", "1"], ["0", "4"], ["3", "1"], ["3", "4"]]


def test_plan_of_a_large_model_allocates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--size", "7b", "--worlds", "64", "--stages", "3"]) == 0
    assert "GiB" in capsys.readouterr().out


def test_plan_by_tier_shows_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--size", "gpt2", "--precision", "bf16", "--stages", "3", "--worlds", "1", "--batch", "2", "512"]
    assert cli.main([*asked, "--offload", "host", "--release"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].split() == ["stage", "ranks", *plan.TIERS]
    cells = dict(zip(plan.TIERS, lines[-1].split()[2::2]))
    assert float(cells["host"]) == pytest.approx(10 * 124.4e6 / 2**30, rel=0.6)  # the head is not tied to the tokens
    assert cells["disk"] == "0" and float(cells["activations"]) > 0


def test_plan_says_what_fits_beside_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--precision", "bf16", "--fits", "24", "80"]
    assert cli.main([*asked, "--release", "--moments", "int8"]) == 0
    rows = {line.split()[0]: line.split()[2:] for line in capsys.readouterr().out.splitlines()[5:]}
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


def test_schedule_prints_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", "--layers", "2", "--stage", "3"]) == 0
    text = capsys.readouterr().out
    assert "gather" in text and "reduce" in text


def test_human_bytes() -> None:
    shown = [show.human_bytes(n) for n in (0, 1023, 1536, 3 * 2**30, 5 * 2**40)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]


def test_table_aligns() -> None:
    assert show.table(["a", "bb"], [["x", "1"], ["long", "22"]]) == "a     bb\n----  --\nx      1\nlong  22"


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
    assert lines[-1] == "[" + "#" * 20 + "] 2/2 loss 1 0:00\n"


def test_progress_in_a_log_is_a_line_now_and_then() -> None:
    log = io.StringIO()
    progress = show.Progress(100, stream=log)
    for step in range(1, 101):
        progress.update(step, f"step {step}")
    assert [line.split("step ")[1].split()[0] for line in log.getvalue().splitlines()] == ["1", "100"]
    silent = io.StringIO()
    show.Progress(1, stream=silent, enabled=False).update(1, "no")
    assert silent.getvalue() == ""


def test_resident_memory_is_known_here() -> None:
    assert show.resident_nbytes() > 1e6
