"""The whole loop at stage 3: bf16 compute, clipping, accumulation, a scheduler, evaluation and saving plain weights.

    python examples/stage3.py
    torchrun --nproc-per-node 2 examples/stage3.py --steps 60

A byte-level GPT on the text that comes with zeor. Everything but the lines with `zeor.` is stock PyTorch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import zeor
from zeor.tools import gpt

TEXT = Path(gpt.__file__).parent / "text" / "moby-dick.txt"


def batch(tokens: torch.Tensor, size: int, context: int, generator: torch.Generator) -> tuple:
    starts = torch.randint(0, len(tokens) - context - 1, (size,), generator=generator)
    rows = torch.stack([tokens[s : s + context + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def main(steps: int = 60, accumulate: int = 2, out: Path | None = None) -> tuple[float, float]:
    torch.manual_seed(0)
    tokens = gpt.encode(TEXT.read_bytes())
    model = gpt.GPT(gpt.GPTConfig(layers=2, width=64, heads=2, context=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer = zeor.shard(model, optimizer, stage=3, precision="bf16")
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)  # each rank its own batches
    first = last = 0.0
    for step in range(steps):
        for _ in range(accumulate):
            x, y = batch(tokens, 16, 64, generator)
            loss = gpt.loss(model(x).float(), y)
            (loss / accumulate).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        first, last = (loss.item() if step == 0 else first), loss.item()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:4d}  loss {last:.3f}  grad norm (before clipping) {norm.item():.3f}")
    with zeor.full_params(model):  # every rank takes part; rank 0 writes
        if rank == 0 and out is not None:
            torch.save(model.state_dict(), out)
    return first, last


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "zeor-stage3.pt")
    options = parser.parse_args()
    first, last = main(options.steps, out=options.out)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"loss {first:.3f} -> {last:.3f}; plain weights in {options.out}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
