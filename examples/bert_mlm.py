"""BERT-style masked-language pretraining on Shakespeare and the State of the Union at stage 3.

    python examples/bert_mlm.py --steps 200
    torchrun --nproc-per-node 2 examples/bert_mlm.py

15% of the tokens are chosen; of these 80% are hidden, 10% replaced, 10% left (as in the paper). How many are chosen
differs from batch to batch and from rank to rank: `zeor.mean_loss` makes the gradient that of the mean over all chosen
tokens of all ranks and of all accumulated batches. Prints loss and accuracy on held-out text before and after.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples.fetch import fetch
from examples.start import Place, parser
from examples.texts import Windows, endless, tokenizer_of, tokens

VOCABULARY, MASK, FIRST_WORD, LEFT_OUT = 30522, 103, 999, -100


class Masked(NamedTuple):
    """What the model sees, and the right tokens at the chosen places (LEFT_OUT elsewhere)."""

    seen: Tensor
    right: Tensor


def mask(rows: Tensor, generator: torch.Generator) -> Masked:
    """Choose 15% of the places; what is put there: the mask, another token, or the same."""
    draw = torch.rand(rows.shape, generator=generator).to(rows.device)
    chosen = draw < 0.15
    other = torch.randint(FIRST_WORD, VOCABULARY, rows.shape, generator=generator).to(rows.device)
    seen = torch.where(draw < 0.15 * 0.8, MASK, torch.where(draw < 0.15 * 0.9, other, rows))
    return Masked(torch.where(chosen, seen, rows), torch.where(chosen, rows, LEFT_OUT))


def loss_sum(logits: Tensor, right: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), right.flatten(), ignore_index=LEFT_OUT, reduction="sum"
    )


@torch.no_grad()
def evaluate(model: nn.Module, data: Windows, place: Place, batch: int) -> tuple[float, float]:
    """(loss per chosen token, share guessed right) over all of the data, with the same masks at every call."""
    model.eval()
    generator = torch.Generator().manual_seed(1000 + place.rank)
    summed, correct, count = 0.0, 0, 0
    for rows in data.parts(place.rank, place.world, batch):
        masked = mask(rows, generator)
        logits = model(input_ids=masked.seen).logits
        summed += loss_sum(logits, masked.right).item()
        correct += int((logits.argmax(-1) == masked.right).sum())
        count += int((masked.right != LEFT_OUT).sum())
    model.train()
    summed, correct, count = zeor.total(summed, correct, count)
    return summed / count, correct / count


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--steps", type=int, default=2000)
    asked.add_argument("--batch", type=int, default=32, help="windows per rank and micro-batch")
    asked.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    asked.add_argument("--context", type=int, default=128)
    asked.add_argument("--layers", type=int, default=4)
    asked.add_argument("--width", type=int, default=256)
    asked.add_argument("--lr", type=float, default=1e-3)
    asked.add_argument("--stage", type=int, default=3)
    asked.add_argument("--precision", help="bf16 on a GPU unless said otherwise")
    asked.add_argument("--limit", type=int, help="take so many texts of each source only")
    options = asked.parse_args()
    place = Place(options.seed)

    train, held_out = tokens(["shakespeare", "sotu"], tokenizer_of(fetch("minilm")), options.limit)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=options.width, num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.width // 64), intermediate_size=4 * options.width,
        max_position_embeddings=options.context,
    )  # fmt: skip
    model = BertForMaskedLM(config).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps, pct_start=0.1)
    precision = options.precision or ("bf16" if place.device.type == "cuda" else "fp32")
    model, optimizer = zeor.shard(model, optimizer, stage=options.stage, precision=precision)
    batches = endless(zeor.data.shard(Windows(train, options.context, place.device).loader(options.batch)))
    unseen = Windows(held_out, options.context, place.device)

    torch.manual_seed(options.seed + place.rank)  # dropout and masks differ between ranks
    generator = torch.Generator().manual_seed(options.seed + place.rank)
    before, guessed_before = evaluate(model, unseen, place, options.batch)
    for step in range(1, options.steps + 1):
        for _ in range(options.accumulate):
            masked = mask(next(batches), generator)
            logits = model(input_ids=masked.seen).logits
            loss = zeor.mean_loss(model, loss_sum(logits, masked.right), (masked.right != LEFT_OUT).sum())
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        place.progress(step, options.steps, loss, norm)
    after, guessed = evaluate(model, unseen, place, options.batch)
    place.say(f"held-out loss {before:.3f} -> {after:.3f}, hidden words guessed {guessed_before:.2%} -> {guessed:.2%}")
    place.end(options, example="bert_mlm", loss_before=before, loss=after, accuracy=guessed)


if __name__ == "__main__":
    main()
