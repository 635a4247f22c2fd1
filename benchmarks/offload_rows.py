"""The table of an offload_suite's results: header and rows. Standard library only.

Beside what was measured: the ratio to the peer where there is one, what was predicted over what was seen, and
whether a run ended in the same bits as the one without offload.
"""

from __future__ import annotations

from typing import Any

GIB = 2**30
# tokens/s of DeepSpeed stage 2 with CPU offload on the same workload and machine, batch 8 (stage 3: 7,631).
PEER = {"3B": 7_559.0, "1.3B": 15_802.0}
HEADER = [
    "what", "size", "batch", "clip", "tokens/s", "TFLOP/s", "step ms", "forward / backward / clip / step ms", "GPU GiB",
    "reserved", "host GiB", "host B/param", "predicted / seen GPU, host", "x DeepSpeed", "x no offload",
    "loss, first / last",
]  # fmt: skip


def words(run: dict[str, Any]) -> str:
    """What a run was: its label, or zeor's arguments where it has none."""
    found = run.get("label") or (run["zeor"] if run["zeor"] != "{}" else "no offload")
    return f"{found} (stage {run['stage']})" if run["stage"] != 3 else found


def rows(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows; columns that no run fills are left out, a disk's or a checksum's come where there are any."""
    runs = document["runs"]
    header = list(HEADER)
    disk = any(run.get("disk_read_gb_per_s", 0) + run.get("disk_written_gb_per_s", 0) > 0.05 for run in runs)
    checked = any(run.get("checksum") for run in runs if not run.get("error"))
    evaluated = any(run.get("held_out_loss") is not None for run in runs)
    header += ["disk GB/s read, written, x disk"] * disk + ["same bits"] * checked + ["held-out loss"] * evaluated
    made = [_row(run, document, (disk, checked, evaluated)) for run in runs]
    full = [row + [""] * (len(header) - len(row)) for row in made]
    kept = [n for n in range(len(header)) if n == 0 or any(row[n] for row in full)]
    return [header[n] for n in kept], [[row[n] for n in kept] for row in full]


def _row(run: dict[str, Any], document: dict[str, Any], more: tuple[bool, bool, bool]) -> list[str]:
    cut = run.get("timed_steps", run["steps"]) < run["steps"]
    name = words(run) + (f" ({run['timed_steps']} steps)" if cut else "")
    start = [name, run["size"], str(run["batch"]), f"{run['clip']:g}"]
    if run.get("error"):
        return [*start, "failed: " + run["error"].replace("|", "/").replace("\n", " ")[:110]]
    base = _without_offload(run, document["runs"])
    peer = PEER.get(run["size"]) if run["batch"] == 8 and run["device"] == "cuda" and "offload" in run["zeor"] else None
    row = [
        *start,
        f"{run['tokens_per_s']:,.0f}",
        f"{run['tflops_per_s']:,.0f}",
        f"{run['median_step_ms']:,.0f}",
        " / ".join(f"{ms:,.0f}" for ms in run["profile"].values()),
        f"{run['gpu_allocated_gib']:.2f}",
        f"{run['gpu_reserved_gib']:.1f}",
        f"{run['host_peak_gib']:.1f}",
        f"{run['host_bytes_per_parameter']:.1f}" if run["parameters"] > 1e8 else "",
        _predicted(run),
        f"{run['tokens_per_s'] / peer:.2f}" if peer else "",
        f"{run['tokens_per_s'] / base['tokens_per_s']:.3f}" if base is not None and base is not run else "",
        f"{run['losses'][0]:.3f} / {run['losses'][-1]:.3f}",
    ]
    disk, checked, evaluated = more
    return row + [_disk(run, document)] * disk + [_same(run, base)] * checked + [_held_out(run)] * evaluated


def _without_offload(run: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The run that differs in nothing but zeor's arguments, and has none; clipping may differ where none is alike."""
    alike = [
        other
        for other in runs
        if other["zeor"] == "{}" and not other.get("error")
        and all(other[name] == run[name] for name in ("size", "batch", "tokens", "steps", "warmup", "device"))
        and other.get("micro", 1) == run.get("micro", 1)
    ]  # fmt: skip
    same_clip = [other for other in alike if other["clip"] == run["clip"]]
    return (same_clip or alike or [None])[0]


def predicted_peaks(run: dict[str, Any]) -> tuple[float | None, float | None]:
    """(GPU, host) GiB that zeor.predict expected at the peak, where it speaks of peaks."""
    found = run.get("predicted") or {}
    device, host = found.get("device_peak"), found.get("host_peak")
    return (None if device is None else device / GIB), (None if host is None else host / GIB)


def _predicted(run: dict[str, Any]) -> str:
    device, host = predicted_peaks(run)
    parts = []
    if device is not None and run["gpu_allocated_gib"]:
        parts.append(f"{device / run['gpu_allocated_gib']:.3f}")
    grown = run.get("host_grown_gib")  # what is predicted: without the process as it was before
    if host is not None and grown:
        parts.append(f"{host / grown:.3f}")
    return ", ".join(parts)


def _disk(run: dict[str, Any], document: dict[str, Any]) -> str:
    read, written = run["disk_read_gb_per_s"], run["disk_written_gb_per_s"]
    if read + written < 0.05:
        return ""
    both = (document.get("disk") or {}).get("both_gb_per_s")
    return f"{read:.2f}, {written:.2f}" + (f", {(read + written) / both:.2f}" if both else "")


def _same(run: dict[str, Any], base: dict[str, Any] | None) -> str:
    if base is None or base is run or not run.get("checksum") or base["clip"] != run["clip"]:
        return ""
    if len(run["losses"]) != len(base["losses"]):
        return ""  # one of them was cut off
    return "yes" if run["checksum"] == base["checksum"] else "no"


def _held_out(run: dict[str, Any]) -> str:
    return "" if run.get("held_out_loss") is None else f"{run['held_out_loss']:.4f}"
