"""How fast codecs encode, decode and sum on a device: GB/s of all bytes moved beside what memory does, and the bits.

    python -m benchmarks.codecs --out benchmarks/results/codecs_gpu.json --numel 1073741824 --threads 16     # on a GPU
    python -m benchmarks.codecs --device cpu --numel 4194304

The codecs run as they do in training: on a GPU with Triton by fused kernels, elsewhere by plain operations; `--plain`
runs those alone. `memory` is a copy of the same values, which says what the device's memory carries; the share of it
that a codec reaches stands beside it. `sum` is that of MESSAGES messages with this rank's own part among them, as a
reduce sums; where that is not one operation it is not timed. On a GPU everything is compared with what the host makes
of the same values, bit by bit, also of several messages whose length is no whole number of blocks. Without --out the
JSON goes to $OUT/codecs.json where $OUT is set.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import command_line, describe_machine, write_json
from zeor.memory import codecs
from zeor.memory.codecs import BLOCK_FORMATS, Codec
from zeor.memory.noise import Noise

ROUNDS = 7
PER_ROUND = 5  # on a GPU: between two events
MESSAGES, OWN, FACTOR = 8, 3, 0.125
NOISE = Noise(7)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """The median of some rounds after one that is not counted."""
    rounds = [(_seconds_on_gpu if device.type == "cuda" else _seconds)(work) for _ in range(ROUNDS + 1)]
    return median(rounds[1:])


def _seconds(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - began_s


def _seconds_on_gpu(work: Callable[[], Any]) -> float:
    """By events, so that the time a launch takes on the host does not count."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(PER_ROUND):
        work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / PER_ROUND


def measure(codec: Codec, values: Tensor, memory_gb_s: float) -> dict[str, Any]:
    """One codec over these values."""
    device = values.device
    message = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device=device)
    back = torch.empty_like(values)
    moved = {"encode": values.nbytes + message.nbytes, "decode": values.nbytes + message.nbytes}
    seconds = {
        "encode": seconds_of(lambda: codec.encode_into(message, values, NOISE), device),
        "decode": seconds_of(lambda: codec.decode_into(back, message), device),
    }
    part = values[: values.numel() // MESSAGES]
    some = torch.empty(MESSAGES, codec.nbytes(part.numel()), dtype=torch.uint8, device=device)
    codec.encode_each(some, values[: MESSAGES * part.numel()], NOISE)
    into = back[: part.numel()]
    if codec.sum_each(into, some, part, OWN, FACTOR):
        moved["sum"] = 2 * part.nbytes + some.nbytes // MESSAGES * (MESSAGES - 1)
        seconds["sum"] = seconds_of(lambda: codec.sum_each(into, some, part, OWN, FACTOR), device)
    found = {"codec": str(codec), "bytes_per_element": message.numel() / values.numel()}
    for what, took in seconds.items():
        found[f"{what}_moved_gb_s"] = moved[what] / took / 1e9
        found[f"{what}_of_memory"] = moved[what] / took / 1e9 / memory_gb_s
    return found | {
        "encode_gb_s": values.nbytes / seconds["encode"] / 1e9,
        "decode_gb_s": values.nbytes / seconds["decode"] / 1e9,
        "fused": codec._kernels(values) is not None,
    }


def coded(codec: Codec, values: Tensor, messages: int) -> dict[str, Tensor]:
    """Codes, decoded values and the sum of so many messages, by whatever this device takes."""
    numel, device = values.numel() // messages, values.device
    codes = torch.empty(messages, codec.nbytes(numel), dtype=torch.uint8, device=device)
    codec.encode_each(codes, values, NOISE)
    decoded = torch.empty_like(values)
    codec.decode_each(decoded, codes)
    parts, own = decoded.view(messages, -1), min(OWN, messages - 1)
    total, mine = torch.empty(numel, device=device), values.view(messages, -1)[own].clone()
    if not codec.sum_each(total, codes, mine, own, FACTOR):
        total.copy_(mine if own == 0 else parts[0])
        for number in range(1, messages):
            total.add_(mine if number == own else parts[number])
        total.mul_(FACTOR)
    return {"codes": codes, "values": decoded, "sum": total}


def compare(codec: Codec, values: Tensor) -> dict[str, bool]:
    """Whether device and host make the same of these values, as one message and as several of an odd length."""
    odd = (values.numel() // MESSAGES - 37) | 1
    found = {}
    for messages, some in ((1, values), (MESSAGES, values[: MESSAGES * odd])):
        here, there = coded(codec, some, messages), coded(codec, some.cpu(), messages)
        for name, made in here.items():
            same = torch.equal(made.cpu().view(torch.uint8), there[name].view(torch.uint8))
            found[f"{name}_as_on_host"] = same and found.get(f"{name}_as_on_host", True)
    return found


def row(found: dict[str, Any]) -> str:
    shares = [f"{found[f'{what}_of_memory']:6.0%}" if f"{what}_of_memory" in found else "     -" for what in
              ("encode", "decode", "sum")]  # fmt: skip
    agreed = [agrees for name, agrees in found.items() if name.endswith("as_on_host")]
    bits = ("same" if all(agreed) else "DIFFER") if agreed else "-"
    way = "fused" if found["fused"] else "plain"
    return f"{found['codec'][6:-1]:54} {way}  encode, decode, sum of memory's: {' '.join(shares)}  bits: {bits}"


def all_codecs() -> list[Codec]:
    ways = [(chance, turns) for chance in (False, True) for turns in (False, True)]
    return [Codec("bf16"), Codec("bf16", True), *(Codec(name, *way) for name in BLOCK_FORMATS for way in ways)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    here = torch.accelerator.current_accelerator()
    parser.add_argument("--device", default=str(here or "cpu"))
    parser.add_argument("--numel", type=int, default=1 << 28 if here else 1 << 22)
    parser.add_argument("--compare", type=int, default=1 << 22, help="so many values are coded on the host as well")
    parser.add_argument("--threads", type=int, default=1, help="of a host")
    parser.add_argument("--date", help="written into the results as it is")
    out = Path(os.environ["OUT"], "codecs.json") if "OUT" in os.environ else None
    parser.add_argument("--out", type=Path, default=out, help="JSON file")
    parser.add_argument("--plain", action="store_true", help="no fused kernels")
    options = parser.parse_args()
    if options.plain:
        codecs._triton_codecs = lambda device: None
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    values = torch.randn(options.numel, device=device)
    copy_s = seconds_of(lambda: values.clone(), device)
    document: dict[str, Any] = {"kind": "codecs", "machine": describe_machine(options.date), "command": command_line()}
    document |= {"device": str(device), "numel": options.numel, "memory_gb_s": 2 * values.nbytes / copy_s / 1e9}
    print(f"memory {document['memory_gb_s']:.1f} GB/s read and written", flush=True)
    document["runs"] = []
    for codec in all_codecs():
        found = measure(codec, values, document["memory_gb_s"])
        if device.type != "cpu":
            found |= compare(codec, values[: options.compare])
        document["runs"].append(found)
        print(row(found), flush=True)
        if options.out is not None:
            write_json(options.out, document)


if __name__ == "__main__":
    main()
