"""A two-tower recommender whose ranks hold different kinds of data, so that no rank uses every tower.

    python examples/two_tower.py                              # one process: both kinds in every step
    torchrun --nproc-per-node 2 examples/two_tower.py         # rank 0 has the clicks, rank 1 the catalogue

MovieLens 100K. Even ranks know who liked which film (ids only): user tower and film tower, each user's film against
the other films of the batch. Odd ranks know the catalogue: they teach the text tower to find a film's place from its
title, year and genres, so that a film nobody has seen can be recommended too. At stage 3 a rank that skips a tower
still plays its part in gathering and reducing it: no flag, no dummy pass, and the gradient is one process's own.

The tables have sparse gradients (`sparse=True`: what autograd keeps is one row per id of the batch); zeor makes them
dense when it takes them, so dense optimizers work: Adagrad leaves rows without a gradient alone, as a sparse optimizer
would. torch.optim.SparseAdam is refused, since it wants the sparse gradients themselves.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples.fetch import fetch
from examples.start import Place, parser

LIKED = 4.0  # stars from which a rating counts as a like
NEW = 10  # one film in so many is new: its likes are kept for the test
WORDS = 12  # at most so many of a film's words
TOP = 10


# ---- data


class Data(NamedTuple):
    likes: Tensor  # (n, 2): user and film, for training
    last: Tensor  # (users, 2): each user's last like of a known film
    new_likes: Tensor  # (n, 2): likes of new films
    text: Tensor  # (films, WORDS): the films' words; 0 is no word
    new: Tensor  # (films,): whether nobody's like of it is in training

    @property
    def counts(self) -> tuple[int, int, int]:
        """Users, films, words."""
        return len(self.last), len(self.text), int(self.text.max()) + 1


def read(folder: Path) -> Data:
    """Ratings and films from two files of tab-separated lines, each with a heading."""
    films, words = {}, {"": 0}
    text = []
    for film, title, year, genres in lines(folder / "films.tsv"):
        films[film] = len(films)
        found = [*genres.split(), f"{year[:3]}0s", *re.findall(r"[a-z']+", title.lower())][:WORDS]
        text.append([words.setdefault(word, len(words)) for word in found + [""] * (WORDS - len(found))])
    users: dict[str, int] = {}
    rated = []
    for user, film, stars, when in lines(folder / "ratings.tsv"):
        if float(stars) >= LIKED:
            rated.append((float(when), users.setdefault(user, len(users)), films[film]))
    likes = torch.tensor([(user, film) for _, user, film in sorted(rated)])
    new = torch.zeros(len(films), dtype=torch.bool)
    new[torch.randperm(len(films), generator=torch.Generator().manual_seed(0))[: len(films) // NEW]] = True
    is_new = new[likes[:, 1]]
    known = likes[~is_new]
    last = torch.zeros(len(users), dtype=torch.long).index_put((known[:, 0],), torch.arange(len(known)))
    held = torch.zeros(len(known), dtype=torch.bool).index_fill(0, last, True)
    return Data(known[~held], known[last], likes[is_new], torch.tensor(text), new)


def lines(path: Path) -> Iterator[list[str]]:
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        yield line.split("\t")


# ---- model


class Tower(nn.Module):
    """A table and what makes a place in the common space of its rows."""

    def __init__(self, table: nn.Embedding | nn.EmbeddingBag, width: int):
        super().__init__()
        self.table = table
        nn.init.normal_(table.weight, std=0.1)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        return normalize(rows + self.mix(rows), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, counts: tuple[int, int, int], width: int):
        super().__init__()
        users, films, words = counts
        self.user = Tower(nn.Embedding(users, width, sparse=True), width)
        self.film = Tower(nn.Embedding(films, width, sparse=True), width)
        self.text = Tower(nn.EmbeddingBag(words, width, sparse=True, padding_idx=0), width)
        self.sharpness = nn.Parameter(torch.tensor(10.0))

    def forward(self, kind: str, given: Tensor, films: Tensor, chance: Tensor) -> Tensor:
        """The loss of finding each row's film among the films of the batch. Popular films are in it more often;
        the logarithm of their chance makes up for that."""
        place = self.user(given) if kind == "likes" else self.text(given)
        scores = self.sharpness * place @ self.film(films).T - chance[films].log()
        same = films[:, None] == films[None, :]  # the same film twice in a batch is no wrong answer
        scores = scores.masked_fill(same & ~torch.eye(len(films), dtype=torch.bool, device=same.device), -torch.inf)
        return cross_entropy(scores, torch.arange(len(films), device=scores.device))


@torch.no_grad()
def recall(model: TwoTower, data: Data, pairs: Tensor, by_text: bool) -> float:
    """How often a user's film is among their first TOP; of the new films by text, of the known ones by id."""
    films = model.text(data.text) if by_text else model.film(torch.arange(len(data.text)))
    scores = model.user(torch.arange(len(data.last))) @ films.T
    scores[:, data.new != by_text] = -torch.inf
    scores[data.likes[:, 0], data.likes[:, 1]] = -torch.inf  # not what they have seen
    first = scores.topk(TOP).indices
    return (first[pairs[:, 0]] == pairs[:, 1:]).any(1).double().mean().item()


def popular(data: Data) -> float:
    """The same for the films most liked by all: what a recommender must beat."""
    likes = data.likes[:, 1].bincount(minlength=len(data.text)).double()
    scores = likes.repeat(len(data.last), 1)
    scores[data.likes[:, 0], data.likes[:, 1]] = -1.0
    return (scores.topk(TOP).indices[data.last[:, 0]] == data.last[:, 1:]).any(1).double().mean().item()


# ---- training


def batches(data: Data, kind: str, size: int, group: dist.ProcessGroup | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of one kind, dealt out to the ranks that hold this kind."""
    known = torch.nonzero(~data.new).flatten()
    likes = TensorDataset(data.likes[:, 0], data.likes[:, 1])
    made = likes if kind == "likes" else TensorDataset(data.text[known], known)
    loader = DataLoader(made, batch_size=min(size, len(made)), shuffle=True, drop_last=True)
    loader = zeor.data.shard(loader, mesh=group)
    while True:
        yield from loader


def kinds_of(place: Place) -> tuple[list[str], dist.ProcessGroup | None]:
    """The kinds of data this rank has, and the group of ranks that have the same."""
    if place.world == 1:
        return ["likes", "catalogue"], None
    groups = [dist.new_group(list(range(first, place.world, 2))) for first in (0, 1)]
    return [("likes", "catalogue")[place.rank % 2]], groups[place.rank % 2]


def train(data: Data, place: Place, stage: int, steps: int, size: int = 512, width: int = 64) -> TwoTower:
    torch.manual_seed(0)
    model = TwoTower(data.counts, width)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    model, optimizer = zeor.shard(model, optimizer, stage=stage)
    kinds, group = kinds_of(place)
    sources = {kind: batches(data, kind, size, group) for kind in kinds}
    liked = data.likes[:, 1].bincount(minlength=len(data.text)) + 1.0
    chance = {"likes": liked / liked.sum(), "catalogue": torch.ones(len(data.text)) / len(data.text)}
    for step in range(steps):
        total = 0.0
        for kind in kinds:
            loss = model(kind, *next(sources[kind]), chance[kind]) / len(kinds)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 10) == 0:
            place.say(f"step {step:4d}  loss {total:.3f} of {' and '.join(kinds)} on rank 0  {place.seconds():.0f} s")
    return model


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--steps", type=int, default=600)
    asked.add_argument("--batch", type=int, default=512, help="pairs per rank and step")
    asked.add_argument("--width", type=int, default=64)
    asked.add_argument("--stage", type=int, default=3)
    asked.add_argument("--data", help="a folder with ratings.tsv and films.tsv; else MovieLens")
    options = asked.parse_args()
    place = Place(options.seed)
    data = read(Path(options.data or fetch("movielens")))
    model = train(data, place, options.stage, options.steps, options.batch, options.width)
    with zeor.full_params(model):
        known = recall(model, data, data.last, by_text=False)
        new = recall(model, data, data.new_likes, by_text=True)
    place.say(
        f"recall@{TOP}: {known:.1%} of users' last films (the most popular ones: {popular(data):.1%}); "
        f"{new:.1%} of likes of new films, by text (by chance: {TOP / int(data.new.sum()):.1%})"
    )
    place.end(options, recall=known, popular=popular(data), recall_new=new)


if __name__ == "__main__":
    main()
