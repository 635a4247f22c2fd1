"""How fast codecs encode and decode on a device: GB/s of the fp32 values, and of all bytes moved beside what memory
does.

    python -m benchmarks.codecs --out benchmarks/results/codecs.json          # on a GPU where there is one
    python -m benchmarks.codecs --device cpu --numel 4194304

The codecs run as they do in training: on a GPU with Triton int8 and int4 by fused kernels, everything else by plain
operations; `--plain` runs those alone. `memory` is a copy of the same values, which says what the device's memory
carries; the share of it that a codec reaches stands beside its speed. On a GPU every format's codes are compared with
those that the host makes of the same values, bit by bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measure import command_line, describe_machine, write_json
from zeor.memory import codecs
from zeor.memory.codecs import BLOCK_FORMATS, Codec
from zeor.memory.noise import Noise

ROUNDS = 7


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """The median of some rounds after one that is not counted."""
    found = []
    for _ in range(ROUNDS + 1):
        if device.type != "cpu":
            torch.accelerator.synchronize()
        began_s = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - began_s)
    return median(found[1:])


def measure(codec: Codec, values: torch.Tensor, memory_gb_s: float, compared: int) -> dict[str, Any]:
    """One codec over these values; the first `compared` of them on the host too."""
    device, noise = values.device, Noise(7)
    message = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device=device)
    back = torch.empty_like(values)
    encode_s = seconds_of(lambda: codec.encode_into(message, values, noise), device)
    decode_s = seconds_of(lambda: codec.decode_into(back, message), device)
    moved = values.nbytes + message.nbytes
    found = {
        "codec": str(codec),
        "bytes_per_element": message.numel() / values.numel(),
        "encode_gb_s": values.nbytes / encode_s / 1e9,
        "decode_gb_s": values.nbytes / decode_s / 1e9,
        "encode_moved_gb_s": moved / encode_s / 1e9,
        "decode_moved_gb_s": moved / decode_s / 1e9,
        "encode_of_memory": moved / encode_s / 1e9 / memory_gb_s,
        "decode_of_memory": moved / decode_s / 1e9 / memory_gb_s,
        "fused": codec._kernels(values) is not None,
    }
    if device.type != "cpu":
        few = values[:compared]
        message, back = message[: codec.nbytes(few.numel())], back[:compared]
        codec.encode_into(message, few, noise)
        codec.decode_into(back, message)
        on_host, decoded = torch.empty(message.numel(), dtype=torch.uint8), torch.empty(few.numel())
        codec.encode_into(on_host, few.cpu(), noise)
        codec.decode_into(decoded, on_host)
        found["codes_as_on_host"] = torch.equal(on_host, message.cpu())
        found["values_as_on_host"] = torch.equal(decoded, back.cpu())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    here = torch.accelerator.current_accelerator()
    parser.add_argument("--device", default=str(here or "cpu"))
    parser.add_argument("--numel", type=int, default=1 << 28 if here else 1 << 22)
    parser.add_argument("--compare", type=int, default=1 << 23, help="so many values are coded on the host as well")
    parser.add_argument("--threads", type=int, default=1, help="of a host")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, help="JSON file")
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
    all_of = [Codec("bf16"), Codec("bf16", True)]
    ways = [(chance, turns) for chance in (False, True) for turns in (False, True)]
    all_of += [Codec(name, *way) for name in BLOCK_FORMATS for way in ways]
    for codec in all_of:
        found = measure(codec, values, document["memory_gb_s"], options.compare)
        document["runs"].append(found)
        same = "" if device.type == "cpu" else f"  bits of the host: {found['codes_as_on_host']}"
        speeds = f"encode {found['encode_gb_s']:7.1f} decode {found['decode_gb_s']:7.1f} GB/s"
        speeds += f" ({found['encode_of_memory']:.0%}, {found['decode_of_memory']:.0%} of memory's)"
        print(f"{found['codec']:60} {speeds}{same}", flush=True)
    if options.out is not None:
        write_json(options.out, document)


if __name__ == "__main__":
    main()
