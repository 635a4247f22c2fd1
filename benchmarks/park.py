"""How fast zeor.park and zeor.unpark move a model and its optimizer, beside what the link to the host gives.

    python -m benchmarks.park --size 7B --out benchmarks/results/park_7b.json
    python -m benchmarks.park --size tiny --device cpu                       # a check without a GPU

The link is measured in the same process: one copy of a pinned block each way. The first park makes and pins its host
memory, which is told apart; the others use it again. A fingerprint of weights and moments, taken where they lie, says
that no bit was lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# So that `python benchmarks/park.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zeor
from benchmarks.decoder import SIZES, Decoder, parameter_numel
from benchmarks.init_gpu import start
from benchmarks.measure import GIB, command_line, describe_machine, write_json
from zeor.access.sharded import state_of
from zeor.tiers.host import HostArena

LINK_NBYTES = 4 << 30
PIECE = 1 << 26  # words that a fingerprint takes at a time


def seconds(do: Callable[[], object], wait: Callable[[], None]) -> float:
    wait()
    begun = time.perf_counter()
    do()
    wait()
    return time.perf_counter() - begun


def link(device: str, nbytes: int, wait: Callable[[], None]) -> dict[str, float]:
    """GB/s of one copy from the device to pinned memory, and back; the better of three each."""
    host = HostArena(pin=device != "cpu").take(nbytes, torch.uint8)
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    out = min(seconds(lambda: host.copy_(there, non_blocking=True), wait) for _ in range(3))
    back = min(seconds(lambda: there.copy_(host, non_blocking=True), wait) for _ in range(3))
    return {"out_gb_s": round(nbytes / out / 1e9, 2), "in_gb_s": round(nbytes / back / 1e9, 2)}


def fingerprint(tensor: torch.Tensor) -> int:
    """A sum over 32-bit words, each times an odd number that depends on its place: any one changed bit shows.

    It is computed where the tensor lies; 84 GB of state would take a minute to hash on the host.
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.int32)
    total = 0
    for begin in range(0, words.numel(), PIECE):
        part = words[begin : begin + PIECE].long()
        places = torch.arange(begin, begin + part.numel(), device=part.device)
        total += int((part * (places * 2654435761 | 1)).sum())
    return total % 2**64


def digest(model: torch.nn.Module) -> list[int]:
    """Fingerprints of this rank's masters and moments, as they are kept."""
    state = state_of(model)
    found = [fingerprint(t) for unit in state.engine.units for lane in unit.lanes for t in lane.on_device()]
    pieces = state.steppers[0].state.pieces()
    return found + [fingerprint(piece.value) for piece in pieces if piece.begin is not None]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = options.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    with zeor.on_meta():
        model = Decoder(SIZES[options.size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    zeor.shard(model, optimizer, precision="bf16", device=options.device, **json.loads(options.zeor))
    zeor.init_parameters(model, seed=0, init=start)
    tokens = torch.randint(0, 100, (1, 65), device=options.device)
    model(tokens[:, :-1]).float().square().mean().backward()  # so that there are moments
    optimizer.step()
    optimizer.zero_grad()
    before, bare = digest(model), link(options.device, options.link, wait)
    park, unpark = lambda: zeor.park(model, optimizer), lambda: zeor.unpark(model, optimizer)
    rows, left = [], 0
    for _ in range(1 + options.repeat):
        out = seconds(park, wait)
        nbytes = zeor.report(model)["parked"]
        left = torch.cuda.memory_allocated() if on_gpu else zeor.report(model)["on_device"]
        back = seconds(unpark, wait)
        rows.append({"park_s": round(out, 3), "unpark_s": round(back, 3)})
    best_out, best_in = (min(row[name] for row in rows[1:]) for name in ("park_s", "unpark_s"))
    speeds = {"out_gb_s": nbytes / max(best_out, 1e-9) / 1e9, "in_gb_s": nbytes / max(best_in, 1e-9) / 1e9}
    return {
        "parameters": parameter_numel(SIZES[options.size]), "parked_gib": round(nbytes / GIB, 2),
        "left_on_device_mib": round(left / 2**20, 1), "first": rows[0], "others": rows[1:], "link": bare,
        **{name: round(value, 2) for name, value in speeds.items()},
        "share_of_link": {name: round(speeds[name] / bare[name], 3) for name in speeds},
        "same_bits": digest(model) == before,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="7B", choices=list(SIZES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--repeat", type=int, default=3, help="after the first")
    parser.add_argument("--link", type=int, default=LINK_NBYTES, help="bytes to measure the link with")
    parser.add_argument("--zeor", default="{}", help="of zeor.shard, as JSON")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    return parser.parse_args()


def main() -> None:
    options = parse()
    document = {"kind": "park", "machine": describe_machine(options.date), "command": command_line()}
    document |= {"size": options.size, "zeor": json.loads(options.zeor), **measure(options)}
    if options.out is not None:
        write_json(options.out, document)
    print(json.dumps({name: value for name, value in document.items() if name != "machine"}), flush=True)


if __name__ == "__main__":
    main()
