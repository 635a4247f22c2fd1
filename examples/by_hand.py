"""ZeRO by hand, on one page: partition, gather, compute, aggregate_gradients, update_parameters, and a plain loop.

    python examples/by_hand.py                                # starts two ranks of its own
    torchrun --nproc-per-node 4 examples/by_hand.py

Data-parallel training keeps everything on every rank: parameters, gradients, optimizer state. ZeRO keeps one part
on each rank and moves it when it is needed, so a rank holds less the more ranks there are; nothing is approximated.

    stage   what rests in slices, one on each rank                        what moves in a step of one batch
      1     optimizer state                                               gradients in, parameters out
      2     optimizer state, gradients                                    the same
      3     optimizer state, gradients, parameters                        and parameters once more, before use

This is the whole algorithm without what makes it fast: zeor cuts the model into units and gathers the next one while
it computes this one, gathers again for backward so that not even one whole model is ever there, overlaps the
reduction of gradients with backward, and so on. The results are the same, bit for bit: the end of this script checks.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from zeor.comm import verbs
from zeor.comm.axes import Axis, make_axis
from zeor.comm.launch.world import ensure_process_group
from zeor.layout import LaneLayout, lay_out

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def partition(model: nn.Module, axis: Axis) -> tuple[LaneLayout, Tensor]:
    """All parameters side by side in one flat buffer, cut into one slice for each rank. Keep mine.

        |<------ slice of rank 0 ------>|<------ slice of rank 1 ------>|
        | embedding.weight ... | block.0.weight ...... | head.weight | 0 |
    """
    layout = lay_out([param.shape for param in model.parameters()], axis.size)
    full = torch.zeros(layout.numel, dtype=next(model.parameters()).dtype)
    for part, param in zip(parts(layout, full), model.parameters()):
        part.copy_(param.detach())
    verbs.broadcast(axis, full, "rank 0's parameters")
    return layout, full.view(axis.size, layout.slice_numel)[axis.rank].clone()


def parts(layout: LaneLayout, flat: Tensor) -> list[Tensor]:
    """A flat buffer as the parameters that lie in it: views, no copies."""
    places = zip(layout.offsets, layout.numels, layout.shapes)
    return [flat[offset : offset + numel].view(shape) for offset, numel, shape in places]


def gather(axis: Axis, layout: LaneLayout, mine: Tensor) -> Tensor:
    """Everybody's slice to everybody: the full parameters."""
    return verbs.gather(axis, mine.new_empty(layout.numel), mine, "parameters").wait()


def compute(model: nn.Module, layout: LaneLayout, full: Tensor, loss: Loss, batch: Batch, grad: Tensor) -> Tensor:
    """Forward and backward over my batch, with the full parameters where they lie; my gradient goes into `grad`."""
    for part, param in zip(parts(layout, full), model.parameters()):
        param.data, param.grad = part, None
    value = loss(model, batch)
    value.backward()
    for part, param in zip(parts(layout, grad), model.parameters()):
        part.copy_(param.grad)
        param.grad = None
    return value.detach()


def aggregate_gradients(axis: Axis, grad: Tensor) -> Tensor:
    """Of every rank's gradient my slice, averaged in rank order: nobody else needs it."""
    received = grad.new_empty(verbs.reduce_receives(axis, grad.numel()))
    return verbs.reduce(axis, grad, received, 1.0 / axis.size, "gradients").wait().clone()


def clip_gradients(axis: Axis, layout: LaneLayout, grad: Tensor, max_norm: float) -> Tensor:
    """The norm of the whole gradient from the squares of every slice's parts; then each rank scales its own."""
    squares = grad.new_zeros(len(layout.shapes))
    for segment in layout.segments(axis.rank):
        squares[segment.param] = grad[segment.offset : segment.offset + segment.numel].norm().square()
    norms = verbs.gather_vector(axis, squares, "squares of norms").sum(0).sqrt()
    grad *= torch.clamp(max_norm / (norms.norm() + 1e-6), max=1.0)
    return norms.norm()


def update_parameters(optimizer: torch.optim.Optimizer, layout: LaneLayout, axis: Axis, grad: Tensor) -> None:
    """The stock optimizer, on my slice only: its state is as small as my slice."""
    segments = layout.segments(axis.rank)
    for param, segment in zip(optimizer.param_groups[0]["params"], segments):
        param.grad = grad[segment.offset : segment.offset + segment.numel]
    optimizer.step()
    optimizer.zero_grad()


class Trained(NamedTuple):
    params: list[Tensor]
    losses: list[float]
    kept_nbytes: dict[str, int]  # on this rank between two steps


def train(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss: Loss,
    steps: Sequence[Sequence[Batch]],  # a step's batches, one after the other: their gradients add up
    stage: int,
    max_norm: float | None = None,
) -> Trained:
    """The loop. Look for `stage`: the stages differ in what they let go of, and in nothing else."""
    ensure_process_group(torch.device("cpu"), timeout=600)
    axis = make_axis(None, torch.device("cpu"), deterministic=True, timeout=600)
    layout, mine = partition(model, axis)
    segments = [mine[s.offset : s.offset + s.numel] for s in layout.segments(axis.rank)]
    optimizer = make_optimizer([nn.Parameter(segment) for segment in segments])  # views: they update `mine`
    full = gather(axis, layout, mine) if stage < 3 else None
    grad = mine.new_zeros(layout.numel) if stage < 2 else None
    losses = []
    for batches in steps:
        total = None
        for batch in batches:
            if stage == 3:
                full = gather(axis, layout, mine)
            if stage >= 2:
                grad = mine.new_zeros(layout.numel)
            losses.append(compute(model, layout, full, loss, batch, grad).item())
            new = aggregate_gradients(axis, grad)
            total = new if total is None else total.add_(new)
            if stage >= 2:
                grad = None  # its slice is in `total`
            if stage == 3:
                full = free(model)  # its slice is in `mine`
        if max_norm is not None:
            clip_gradients(axis, layout, total, max_norm)
        update_parameters(optimizer, layout, axis, total)
        if stage < 3:
            full = gather(axis, layout, mine)
    kept = {
        "parameters": nbytes(mine if full is None else full),
        "gradients": nbytes(total if grad is None else grad),
        "optimizer state": nbytes(*(v for state in optimizer.state.values() for v in state.values())),
    }
    return Trained(parts(layout, gather(axis, layout, mine)), losses, kept)


def free(model: nn.Module) -> None:
    """Nobody holds the full parameters any more."""
    for param in model.parameters():
        param.data = param.data.new_empty(0)


def nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim() > 0)


def by_zeor(model: nn.Module, make_optimizer: Callable, loss: Loss, steps: Sequence, stage: int) -> list[Tensor]:
    """The same, as a user of zeor writes it."""
    model, optimizer = zeor.shard(model, make_optimizer(list(model.parameters())), stage=stage)
    for batches in steps:
        for batch in batches:
            loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zeor.full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def main() -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3)

    logging.getLogger("zeor").setLevel(logging.WARNING)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    generator = torch.Generator().manual_seed(rank)  # each rank its own data
    inputs = torch.randn(25, 2, 32, 64, generator=generator)
    steps = [[(x, x.square().mean(-1, keepdim=True)) for x in step] for step in inputs]  # two batches a step
    for stage in (1, 2, 3):
        hand = train(network(), adamw, loss, steps, stage)
        same = all(map(torch.equal, hand.params, by_zeor(network(), adamw, loss, steps, stage)))
        assert same, f"stage {stage}: these are other parameters than zeor.shard's"
        if rank == 0:
            kept = ", ".join(f"{what} {count / 1024:.0f} KiB" for what, count in hand.kept_nbytes.items())
            print(f"stage {stage} on {world} ranks: loss {hand.losses[0]:.3f} -> {hand.losses[-1]:.3f}; kept: {kept}")
    if rank == 0:
        print("every stage gave the same bits as zeor.shard", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        zeor.launch(main, ranks=2)
