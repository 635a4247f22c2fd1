"""The parts of benchmarks/ that compute something: presets that zeor understands, text, tables, what fits where."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import torch

from benchmarks import offload, offload_fits, offload_plot, offload_rows, table, text
from benchmarks.decoder import SIZES, Decoder, parameter_numel
from benchmarks.offload_presets import PRESETS
from benchmarks.offload_suite import merged, numbers
from zeor.plan import Plan

LINES = [line for preset in PRESETS.values() for line in preset]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_zeor_takes_every_run_of_the_presets(line: str) -> None:
    options = offload.parse(shlex.split(line))
    plan = Plan.parse({"stage": options.stage, "precision": "bf16", **options.extra})
    assert options.clip == 0 or not plan.release
    assert plan.offload is None or not plan.offload.uses_disk or plan.offload.folder


def test_windows_meet_and_are_the_same_for_every_batch_size() -> None:
    windows = text.Windows(torch.arange(1_001), tokens=10)
    inputs, targets = windows.batch(0, 4)
    assert torch.equal(inputs + 1, targets) and inputs.shape == (4, 10)
    single = torch.cat([windows.batch(number, 1)[0] for number in range(4)])
    assert torch.equal(single, inputs)
    assert sorted(windows.order + windows.held_out) == list(range(100)) and len(windows.held_out) == 5
    again = windows.batch(len(windows.order), 1)[0]
    assert torch.equal(again, windows.batch(0, 1)[0])


def test_a_small_vocabulary_trains_on_bytes(tmp_path: Any) -> None:
    found = text.read(256, tmp_path / "absent.npy")
    assert int(found.ids.max()) < 256 and len(found.ids) > 100_000
    with pytest.raises(ValueError, match="holds no bytes"):
        text.read(100, tmp_path / "absent.npy")


def test_host_memory_is_what_the_gpu_does_not_hold() -> None:
    way = offload_fits.WAYS[0]
    assert way.total == 14
    assert offload_fits.host_nbytes(100, way, gpu_nbytes=2_000, taken_nbytes=100) == 0
    assert offload_fits.host_nbytes(100, way, gpu_nbytes=1_000, taken_nbytes=100) == 500
    assert offload_fits.host_nbytes(100, way, gpu_nbytes=250, taken_nbytes=100) is None
    assert [round(way.total, 3) for way in offload_fits.WAYS[1:]] == [12, 8.031, 6.031]


def test_hidden_and_head_are_the_forward() -> None:
    torch.manual_seed(0)
    model = Decoder(SIZES["tiny"])
    tokens = torch.randint(256, (2, 8))
    assert torch.equal(model(tokens), model.head(model.hidden(tokens)))
    assert parameter_numel(SIZES["tiny"]) == sum(p.numel() for p in model.parameters())


def run_of(label: str, **more: Any) -> dict[str, Any]:
    run = {
        "label": label, "size": "3B", "batch": 8, "stage": 3, "zeor": '{"offload": "host"}', "clip": 1.0,
        "tokens": 2048, "steps": 2, "warmup": 0, "timed_steps": 2, "device": "cuda", "parameters": 3_000_000_000,
        "tokens_per_s": 15_118.0,
        "tflops_per_s": 300.0, "median_step_ms": 1000.0, "profile": {"forward": 1.0, "step": 2.0}, "losses": [9.0, 8.0],
        "gpu_allocated_gib": 10.0, "gpu_reserved_gib": 11.0, "host_peak_gib": 21.0, "host_grown_gib": 20.0,
        "host_bytes_per_parameter": 10.0,
        "disk_read_gb_per_s": 0.0, "disk_written_gb_per_s": 0.0, "checksum": "a",
        "predicted": {"device_peak": 10.2 * 2**30, "host_peak": 21 * 2**30},
    }  # fmt: skip
    return {**run, **more}


def test_the_table_compares_with_the_peer_and_with_the_run_without_offload() -> None:
    plain = run_of("no offload", zeor="{}", tokens_per_s=20_000.0)
    other = run_of("other bits", checksum="b", clip=0.0)
    runs = [plain, run_of("host"), run_of("bad", error="boom | bang"), other, run_of("off", checksum="c")]
    header, rows = offload_rows.rows({"runs": runs})
    cells = {row[0]: dict(zip(header, row)) for row in rows}
    assert cells["host"]["x DeepSpeed"] == "2.00" and cells["host"]["x no offload"] == "0.756"
    assert cells["host"]["predicted / seen GPU, host"] == "1.020, 1.050"
    assert cells["no offload"]["x DeepSpeed"] == ""
    assert [cells[name]["same bits"] for name in ("host", "off", "other bits")] == ["yes", "no", ""]
    assert cells["bad"]["tokens/s"] == "failed: boom / bang"
    assert table.offload_table({"runs": runs}).count("\n") == len(runs) + 1


def test_the_plot_shows_what_there_are_results_for() -> None:
    long = run_of("exact", size="1.3B", zeor="{}", losses=[10 - n / 100 for n in range(300)])
    small = {**long, "label": "int8 <moments>", "zeor": '{"moments": "int8"}', "losses": [10.0] * 300}
    made = offload_plot.panels([run_of("host"), run_of("bad", error="x"), long, small])
    assert len(made) == 3
    drawn = offload_plot.svg(made)
    assert "int8 &lt;moments&gt;: 10.0000" in drawn and "bad" not in drawn and drawn.endswith("</svg>\n")


def test_results_of_several_calls_become_one_document() -> None:
    one: dict[str, Any] = {"kind": "offload_suite", "machine": {"gpu": "x"}, "command": "a", "presets": ["13b"]}
    one["runs"] = [run_of("one")]
    two = {**one, "command": "b", "presets": ["20b"], "runs": [run_of("two")], "disk": {"both_gb_per_s": 2.0}}
    found = merged([one, two])
    assert [run["label"] for run in found["runs"]] == ["one", "two"] and found["command"] == "a; b"
    assert found["presets"] == ["13b", "20b"] and found["disk"] == two["disk"]
    with pytest.raises(ValueError, match="different machines"):
        merged([one, {**two, "machine": {"gpu": "y"}}])


def test_numbers_of_runs() -> None:
    assert numbers("0,2,5-7") == [0, 2, 5, 6, 7]
