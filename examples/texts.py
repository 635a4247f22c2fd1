"""Shakespeare and the State of the Union as tokens: cut into windows, handed out in whole batches.

The last twentieth of every text is held out. Tokens are kept beside the cached data, so a text is tokenised once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.fetch import cache_folder, fetch
from examples.start import turns

HELD_OUT = 0.05


def gpt2_tokenizer() -> Any:
    """GPT-2's byte-level BPE, 50,257 tokens."""
    from tokenizers import ByteLevelBPETokenizer

    folder = fetch("gpt2-bpe")
    return ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer.json of a model's folder, with neither padding nor truncation."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.no_padding()
    found.no_truncation()
    return found


class Bytes:
    """A tokenizer that needs no file: a text is its bytes."""

    def to_str(self) -> str:
        return "bytes"

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[Any]:
        return [SimpleNamespace(ids=list(text.encode())) for text in texts]


def tokens(names: Sequence[str], tokenizer: Any, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """(train, held out) tokens of some data sets; `limit` takes so many texts of each only."""
    train, held_out = [], []
    for name in names:
        files = sorted(fetch(name).glob("*.txt"))[:limit]
        ids, lengths = _encoded(name, files, tokenizer)
        for text in np.split(ids, np.cumsum(lengths)[:-1]):
            cut = int(len(text) * (1 - HELD_OUT))
            train.append(text[:cut])
            held_out.append(text[cut:])
    return tuple(torch.from_numpy(np.concatenate(part).astype(np.int64)) for part in (train, held_out))


def _encoded(name: str, files: Sequence[Path], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """(all tokens, the number in each text), from the cache where these files were tokenised this way before."""
    vocabulary = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:12]
    kept = cache_folder() / "tokens" / f"{name}-{len(files)}-{vocabulary}.npz"
    if kept.exists():
        with np.load(kept, allow_pickle=False) as found:
            return found["ids"], found["lengths"]
    encoded = tokenizer.encode_batch([path.read_text(encoding="utf-8") for path in files], add_special_tokens=False)
    ids = np.concatenate([np.asarray(each.ids, np.uint16) for each in encoded])
    lengths = np.asarray([len(each.ids) for each in encoded])
    kept.parent.mkdir(exist_ok=True)
    fresh = kept.with_name(f".{os.getpid()}-{kept.name}")
    np.savez(fresh, ids=ids, lengths=lengths)
    fresh.rename(kept)  # other ranks do the same: the last one stays
    return ids, lengths


class Windows(Dataset):
    """Windows of `length` tokens, one after the other, on a device; __getitems__ takes a whole batch at once."""

    def __init__(self, ids: Tensor, length: int, device: torch.device):
        if len(ids) < length:
            raise ValueError(f"These {len(ids)} tokens do not fill one window of {length}: take more text.")
        self.rows = ids[: len(ids) // length * length].view(-1, length).to(device)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        return self.rows[torch.as_tensor(indices, device=self.rows.device)]

    def loader(self, batch_size: int) -> DataLoader:
        """Shuffled batches of full size. zeor.data.shard gives each rank its part of them."""
        return DataLoader(self, batch_size, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)

    def parts(self, rank: int, world: int, batch: int) -> list[Tensor]:
        """This rank's part of all windows for an evaluation: on every rank equally many batches, none empty."""
        return list(self.rows.tensor_split(turns(len(self), world, batch) * world)[rank::world])


def endless(loader: Any) -> Any:
    """Batches of one epoch after the other."""
    while True:
        yield from loader
