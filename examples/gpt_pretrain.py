"""GPT-style pretraining on Shakespeare and the State of the Union at stage 3, with GPT-2's vocabulary.

    python examples/gpt_pretrain.py --steps 200
    torchrun --nproc-per-node 2 examples/gpt_pretrain.py
    python examples/gpt_pretrain.py --offload auto --moments int8 --release  # less state, where there is room

The model is transformers' GPT2LMHeadModel from a configuration; its embedding and its head are one parameter. Prints
the loss per token and the perplexity on held-out text before and after.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples.start import Place, parser
from examples.texts import Windows, endless, gpt2_tokenizer, tokens


class Chunked(GPT2LMHeadModel):
    """Returns the loss itself, made of a few rows of logits at a time: all of them would be the largest tensor here."""

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.transformer(input_ids=rows[:, :-1]).last_hidden_state
        return zeor.chunked_cross_entropy(hidden, self.lm_head, rows[:, 1:], reduction="sum")


def loss_sum(model: nn.Module, rows: Tensor) -> Tensor:
    """The cross entropy of every next token, added up."""
    if isinstance(model, Chunked):
        return model(rows)
    logits = model(input_ids=rows[:, :-1]).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


@torch.no_grad()
def evaluate(model: nn.Module, data: Windows, place: Place, batch: int) -> float:
    """The loss per token over all of the data, each window seen by one rank."""
    model.eval()
    parts = data.parts(place.rank, place.world, batch)
    summed = sum(loss_sum(model, rows).item() for rows in parts)
    count = sum(rows[:, 1:].numel() for rows in parts)
    model.train()
    summed, count = zeor.total(summed, count)
    return summed / count


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--steps", type=int, default=1000)
    asked.add_argument("--batch", type=int, default=16, help="windows per rank and step")
    asked.add_argument("--context", type=int, default=256)
    asked.add_argument("--layers", type=int, default=6)
    asked.add_argument("--width", type=int, default=384)
    asked.add_argument("--lr", type=float, default=1e-3)
    asked.add_argument("--stage", type=int, default=3)
    asked.add_argument("--precision", help="bf16 on a GPU unless said otherwise")
    asked.add_argument("--chunked-loss", action="store_true", help="never hold all logits")
    asked.add_argument("--recompute", choices=["True", "offload"], help="keep only the blocks' inputs for backward")
    asked.add_argument("--offload", choices=["host", "disk", "auto"], help="where the state rests; auto: as it fits")
    asked.add_argument("--moments", choices=["exact", "bf16", "int8"], default="exact", help="how moments are kept")
    asked.add_argument("--release", action="store_true", help="use and free gradients inside backward; no clipping")
    asked.add_argument("--limit", type=int, help="take so many texts of each source only")
    options = asked.parse_args()
    place = Place(options.seed)

    train, held_out = tokens(["shakespeare", "sotu"], gpt2_tokenizer(), options.limit)
    config = GPT2Config(
        n_positions=options.context, n_embd=options.width, n_layer=options.layers, n_head=max(1, options.width // 64)
    )
    model = (Chunked if options.chunked_loss else GPT2LMHeadModel)(config).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps, pct_start=0.1)
    precision = options.precision or ("bf16" if place.device.type == "cuda" else "fp32")
    recompute = "offload" if options.recompute == "offload" else options.recompute is not None
    model, optimizer = zeor.shard(
        model, optimizer, stage=options.stage, precision=precision, recompute=recompute,
        offload=options.offload, moments=options.moments, release=options.release,
    )  # fmt: skip
    windows = Windows(train, options.context + 1, place.device)
    unseen = Windows(held_out, options.context + 1, place.device)
    batches = endless(zeor.data.shard(windows.loader(options.batch)))

    torch.manual_seed(options.seed + place.rank)  # dropout differs between ranks
    before = evaluate(model, unseen, place, options.batch)
    for step in range(1, options.steps + 1):
        rows = next(batches)
        loss = loss_sum(model, rows) / rows[:, 1:].numel()
        loss.backward()
        norm = None if options.release else torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        place.progress(step, options.steps, loss, norm)
    after = evaluate(model, unseen, place, options.batch)
    place.say(
        f"held-out loss {before:.3f} -> {after:.3f}, perplexity {math.exp(before):.0f} -> {math.exp(after):.1f}; "
        f"{len(train):,} tokens of text, {sum(p.numel() for p in model.parameters()):,} parameters"
    )
    place.end(options, example="gpt_pretrain", loss_before=before, loss=after, perplexity=math.exp(after))


if __name__ == "__main__":
    main()
