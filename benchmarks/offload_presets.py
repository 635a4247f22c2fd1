"""The lists of runs that `offload_suite` knows by name: what each of the document's figures was measured with.

A run is a line of arguments of `offload`; `line` writes one from zeor's arguments as keywords.
"""

from __future__ import annotations

import json
import shlex
from typing import Any


def line(rest: str, label: str, **zeor: Any) -> str:
    """Arguments of one run: `rest`, a label, and zeor.shard's own as JSON."""
    words = [*shlex.split(rest), "--label", label]
    if zeor:
        words += ["--zeor", json.dumps(zeor)]
    return shlex.join(words)


def place(tier: str = "host", **more: Any) -> dict[str, Any]:
    """Moments and master on one tier, other fields of zeor.Offload beside."""
    return {"moments": tier, "master": tier, **more}


def auto(**more: Any) -> dict[str, Any]:
    return {"auto": True, **more}


def half(tier: str = "host", on_device: float = 0.5) -> dict[str, float]:
    return {"device": on_device, tier: round(1 - on_device, 6)}


SMALL = "--size 36.7M --batch 2 --tokens 256 --warmup 1 --steps 4 --deterministic --checksum"
ZEOR_RECOMPUTES = "--no-recompute"

# Every option once. Runs whose update is the same arithmetic end in the same bits as the first of their clip.
SMOKE = [
    line(SMALL, "no offload"),
    line(f"{SMALL} --clip 0", "no offload, no clip"),
    line(SMALL, "host", offload="host"),
    line(f"{SMALL} --clip 0", "host, no clip", offload="host"),
    line(SMALL, "release", release=True),
    line(SMALL, "host, release", offload="host", release=True),
    line(SMALL, "host, grads too", offload=place(grads="host")),
    line(SMALL, "host, compute too", offload=place(compute="host")),
    line(SMALL, "half of it", offload={"moments": half(), "master": half()}),
    line(SMALL, "moments only, small chunks", offload={"moments": "host", "master": "device", "chunk": 1 << 16}),
    line(f"{SMALL} --stage 1", "host, stage 1", offload="host"),
    line(f"{SMALL} --stage 2", "host, stage 2", offload="host"),
    line(SMALL, "updated on the host", offload=place(update="host")),
    line(f"{SMALL} --clip 0", "updated on the host, no clip", offload=place(update="host")),
    line(SMALL, "updated on the host, release", offload=place(update="host"), release=True),
    line(SMALL, "disk", offload=place("disk")),
    line(SMALL, "moments on disk, release", offload={"moments": "disk", "master": "host"}, release=True),
    line(SMALL, "auto", offload="auto"),
    line(SMALL, "auto, 1 GiB", offload=auto(device_budget="1GiB")),
    line(SMALL, "bf16 moments", moments="bf16"),
    line(SMALL, "int8 moments", moments="int8"),
    line(SMALL, "int8 moments, host", moments="int8", offload="host"),
    line(SMALL, "int8 moments, host, release", moments="int8", offload="host", release=True),
    line(SMALL, "int8 moments, disk", moments="int8", offload=place("disk")),
    line(SMALL, "delay=1", offload="host", delay=1),
    line(f"{SMALL} {ZEOR_RECOMPUTES}", "recompute=True", recompute=True),
    line(f"{SMALL} {ZEOR_RECOMPUTES}", "recompute='offload'", recompute="offload"),
    line(f"{SMALL} --chunked-loss", "chunked loss", offload="host"),
    line(f"{SMALL} --micro 3", "3 micro-batches"),
    line(f"{SMALL} --micro 3", "3 micro-batches, host, ahead", offload=place(ahead="auto")),
]

# Long enough that what is deferred past the last step, which counts once, counts little.
B3 = "--size 3B --batch 8 --warmup 3 --steps 20 --lr 1e-5 --rise 3"
THREE = [
    line(B3, "no offload"),
    line(B3, "host, release", offload="host", release=True),
    line(B3, "host", offload="host"),
    line(B3, "host, grads too", offload=place(grads="host")),
    line(B3, "updated on the host", offload=place(update="host")),
    line(B3, "updated on the host, release", offload=place(update="host"), release=True),
    line(f"{B3} --expandable", "auto, 40 GiB", offload=auto(device_budget="40GiB")),
    line("--size 3B --batch 8 --warmup 1 --steps 2", "disk", offload=place("disk")),
]
THREE_MORE = [
    line(B3, "no offload"),
    line(B3, "host, delay=1", offload="host", delay=1),
    line(B3, "host, int8 moments", offload="host", moments="int8"),
    line(B3, "host, compute too", offload=place(compute="host")),
    line(B3, "moments half", offload={"moments": half(), "master": "device"}),
    line(f"{B3} --chunked-loss", "host, chunked loss", offload="host"),
    line(f"{B3} {ZEOR_RECOMPUTES}", "host, inputs too", offload="host", recompute="offload"),
]

# The largest: 20 steps in all, so that the loss is seen to fall.
LONG = "--warmup 3 --steps 17 --expandable --lr 6e-6 --rise 3"
THIRTEEN = [
    line(f"--size 13B --batch 8 {LONG}", "auto", offload="auto"),
    line(f"--size 13B --batch 8 {LONG}", "auto, release", offload="auto", release=True),
    line(f"--size 13B --batch 8 {LONG}", "moments half", offload={"moments": half(), "master": "device"}),
    line(f"--size 13B --batch 16 {LONG} {ZEOR_RECOMPUTES} --chunked-loss", "auto, inputs offloaded", offload="auto",
         recompute="offload"),
]  # fmt: skip
# 65,536 tokens a step, nothing computed again: what of the update hides, and what `ahead` adds.
SUMMED = f"--size 13B --batch 2 --micro 16 {ZEOR_RECOMPUTES} --warmup 5 --steps 8 --expandable --lr 6e-6 --rise 3"
THIRTEEN_SUMMED = [
    line(SUMMED, "auto, 2 x 16", offload="auto", compile=True),
    line(SUMMED, "auto, 2 x 16, ahead", offload=auto(ahead="auto"), compile=True),
    line(SUMMED, "auto, int8, 2 x 16", offload="auto", moments="int8", compile=True),
    line(SUMMED, "auto, int8, 2 x 16, ahead", offload=auto(ahead="auto"), moments="int8", compile=True),
    line(SUMMED.replace("--batch 2 --micro 16", "--batch 32") + " --chunked-loss", "auto, 32 x 1, computed again",
         offload="auto", recompute=True, compile=True),
]  # fmt: skip
TWENTY = [
    line(f"--size 20B --batch 6 {LONG} --chunked-loss", "auto, release", offload="auto", release=True),
    line(f"--size 20B --batch 4 {LONG}", "auto, release", offload="auto", release=True),
    line(f"--size 18B --batch 8 {LONG} --chunked-loss", "auto, clip", offload="auto"),
    line(f"--size 16B --batch 8 {LONG} --chunked-loss", "auto, clip", offload="auto"),
]
THIRTY = [
    line(f"--size 32B --batch 4 {LONG} --chunked-loss", "auto, int8, release", offload="auto", moments="int8",
         release=True),
    line(f"--size 32B --batch 2 {LONG} --chunked-loss", "auto, int8, clip", offload="auto", moments="int8"),
]  # fmt: skip

# One text, four ways to keep the moments; text that no run has seen is evaluated at the end.
CURVE = "--size 1.3B --batch 1 --warmup 5 --steps 495 --evaluate 20 --rise 100 --lr 1e-4"
CURVES = [
    line(CURVE, "exact"),
    line(CURVE, "bf16 moments", moments="bf16"),
    line(CURVE, "int8 moments", moments="int8"),
    line(CURVE, "delay=1", offload="host", delay=1),
]

ON_DISK = "--size 1.3B --batch 8 --warmup 2 --steps 4"  # files are read from disk once they were written
DISK = [
    line(ON_DISK, "moments and master on disk", offload=place("disk")),
    line(ON_DISK, "the same, release", offload=place("disk"), release=True),
    line(ON_DISK, "moments on disk", offload={"moments": "disk", "master": "device"}),
    line(ON_DISK, "int8 moments on disk", offload={"moments": "disk", "master": "device"}, moments="int8"),
]

PRESETS: dict[str, list[str]] = {
    "smoke": SMOKE,
    "3b": THREE,
    "3b-more": THREE_MORE,
    "13b": THIRTEEN,
    "13b-accumulated": THIRTEEN_SUMMED,
    "20b": TWENTY,
    "32b": THIRTY,
    "curves": CURVES,
    "disk": DISK,
}
JOBS = {"smoke": 6}  # runs side by side; all others are timed, and so alone
PROBED = ("disk",)  # the disk itself is measured first
TIMEOUTS = {  # seconds of one run
    "smoke": 60.0, "13b": 240.0, "13b-accumulated": 300.0, "20b": 300.0, "32b": 400.0, "curves": 240.0,
}  # fmt: skip
