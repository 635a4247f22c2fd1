"""What ranks say to each other to agree, per step: messages in a row and bytes, at 2, 8, 64 and 1,024 ranks.

    python -m benchmarks.agreements --out benchmarks/results/agreements.json

The exchanges of one step are recorded on two real CPU ranks (their number and length do not depend on the world), in a
step before paths are settled and in one after. For other worlds the messages of each are counted: zeor's own take
ceil(log2 N) messages in a row and as many times their length per rank; Gloo's all-reduce, which was used before, is a
ring of 2 (N - 1) messages in a row and 2 (N - 1) / N times the length. The time of an exchange is not measured here.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
from pathlib import Path
from typing import Any

# So that `python benchmarks/agreements.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.nn import functional as F

import zeor
from benchmarks.decoder import SIZES, Decoder
from benchmarks.measure import command_line, describe_machine, write_json
from zeor.access.sharded import state_of
from zeor.comm import small

WORLDS = (2, 8, 64, 1024)
SIZE = "36.7M"


class Exchanges:
    """Those of one step: (bytes, whether the host waited)."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def __enter__(self) -> Exchanges:
        self._largest = small.largest

        def largest(axis: Any, values: torch.Tensor, kind: int = small.AGREE) -> torch.Tensor:
            self.seen.append((values.nbytes, threading.current_thread() is threading.main_thread()))
            return self._largest(axis, values, kind)

        small.largest = largest
        return self

    def __exit__(self, *exception: Any) -> None:
        small.largest = self._largest


def record(stage: int, meets: bool) -> dict[str, list[tuple[int, bool]]]:
    """On one rank: an early step, and one whose paths are settled. `meets`: as over Gloo; else as over NCCL."""
    model: nn.Module = Decoder(SIZES[SIZE])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    zeor.shard(model, optimizer, stage=stage)
    state_of(model).engine.axes.everyone.meets = meets
    found = {}
    for step in range(9):
        tokens = torch.randint(0, SIZES[SIZE].vocabulary, (1, 16))
        with Exchanges() as exchanges:
            logits = model(tokens)
            F.cross_entropy(logits.view(-1, logits.shape[-1]), tokens.view(-1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step in (3, 8):
            found["before they settle" if step == 3 else "settled"] = exchanges.seen
    return found


def count(exchanges: list[tuple[int, bool]], world: int) -> dict[str, int]:
    rounds = math.ceil(math.log2(world))
    nbytes = sum(each for each, _ in exchanges)
    return {
        "messages": rounds * len(exchanges),
        "bytes": rounds * nbytes,
        "messages the host waits for": rounds * sum(waited for _, waited in exchanges),
        "messages in a ring": 2 * (world - 1) * len(exchanges),
        "bytes in a ring": round(2 * (world - 1) / world * nbytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for meets in (True, False):
        for stage in (1, 3):
            for paths, exchanges in zeor.launch(record, stage, meets, ranks=2)[0].items():
                for world in WORLDS:
                    how = {"backend": "gloo" if meets else "as nccl", "stage": stage, "paths": paths, "world": world}
                    rows.append({**how, "exchanges": exchanges, **count(exchanges, world)})
    print("| backend | stage | paths | ranks | messages in a row, of them waited for | bytes | in a ring | bytes |")
    print("|" + "---|" * 8)
    for row in rows:
        cells = [row["backend"], row["stage"], row["paths"], row["world"]]
        cells += [f"{row['messages']}, {row['messages the host waits for']}", row["bytes"]]
        print("| " + " | ".join(map(str, [*cells, row["messages in a ring"], row["bytes in a ring"]])) + " |")
    if options.out is not None:
        document = {"kind": "agreements", "machine": describe_machine(options.date), "command": command_line()}
        write_json(options.out, {**document, "size": SIZE, "rows": rows})


if __name__ == "__main__":
    main()
