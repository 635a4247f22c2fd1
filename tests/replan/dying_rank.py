"""One rank of two whose plan is changed; rank 1 dies when half of the state has travelled. Run as a script by
test_refused.py, with torchrun's variables."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import zeor
from tests import offloads
from zeor.replan import moving

TIMEOUT_SECONDS = 10.0


def main(folder: str) -> None:
    moving.GROUP_NBYTES = 4096
    model, optimizers = offloads.made(stage=0, timeout=TIMEOUT_SECONDS)
    offloads.one_step(model, optimizers, 0, "plain")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    state = {key: value.clone() for key, value in optimizers[0].state[model.head.weight].items()}
    finish, count = moving._finish, 0

    def dies(*args: object) -> None:
        nonlocal count
        count += 1
        if count == 3:
            Path(folder, "there").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        finish(*args)

    if dist.get_rank() == 1:
        moving._finish = dies
    try:
        zeor.replan(model, optimizers, stage=3, precision="bf16")
    except RuntimeError as error:
        print(f"told: {error}", flush=True)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert all(torch.equal(optimizers[0].state[model.head.weight][key], value) for key, value in state.items())
    assert model(torch.ones(2, offloads.WIDTH)).shape == (2, offloads.OUT)
    print("as it was", flush=True)
    os._exit(0)  # the group would wait for the other


if __name__ == "__main__":
    main(sys.argv[1])
