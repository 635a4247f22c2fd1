"""One rank of two that trains; rank `who` stops or dies at `place`, or (how="cut") both wait there until their link is
cut. Places "by codes" are inside a collective whose bytes are codes: encoded, under way, and not waited for yet. Run as
a script by test_frozen.py, with torchrun's variables."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeor
from tests import loops
from zeor.comm import wires

TIMEOUT_SECONDS = 4.0
CODED: dict[str, Any] = {"in a gather by codes": wires.Gather, "in a reduce by codes": wires.Reduce}


def main(who: int, place: str, how: str, folder: str) -> None:
    coded: dict[str, Any] = {"wire": "int8", "keep_whole": 0} if place in CODED else {}
    model = loops.net()
    optimizer = torch.optim.AdamW(model.parameters())
    zeor.shard(model, optimizer, stage=3, timeout=TIMEOUT_SECONDS, **coded)
    loops.train(model, optimizer, range(2), loops.own_loss)

    def here(now: str) -> None:
        if now == place and how == "cut":
            Path(folder, f"there{dist.get_rank()}").touch()
            while not Path(folder, "cut").exists():
                time.sleep(0.05)
        elif now == place and dist.get_rank() == who:
            Path(folder, "there").touch()
            os.kill(os.getpid(), getattr(signal, how))

    if place in CODED:
        kind, wait = CODED[place], CODED[place].wait

        def begun(move: Any, *args: Any) -> Any:
            here(place)
            return wait(move, *args)

        kind.wait = begun
    here("between steps")
    loss = loops.own_loss(model, 2)
    here("after forward")
    model.head.weight.register_hook(lambda grad: here("in backward"))
    loss.backward()
    here("after backward")
    zeor.clip_grad_norm_(model, 1.0)
    optimizer.step()
    here("after step")
    if place == "in a background save":
        zeor.save(folder + "/saved", model, optimizer, step=3, asynchronous=True)
        here(place)
    with zeor.full_params(model):
        pass
    loops.train(model, optimizer, range(3, 5), loops.own_loss)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
