"""The two-tower example: ranks that use different towers train as one process does, and the program learns.

The data is made here, in the files' own form: users of one taste like films of one genre, whose titles say so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples import two_tower
from examples.two_tower import Data, TwoTower

ROOT = Path(__file__).resolve().parents[2]
GENRES = ["Comedy", "Horror", "Western", "Musical", "War"]


def write(folder: Path, users: int = 60, films: int = 150) -> Path:
    """Film i has genre i % 5; a user likes twelve films of their genre and dislikes one of another."""
    generator = torch.Generator().manual_seed(0)
    rows = ["film\ttitle\tyear\tgenres"]
    rows += [f"f{i}\tThe {GENRES[i % 5]} Number {i}\t{1950 + i % 40}\t{GENRES[i % 5]}" for i in range(films)]
    (folder / "films.tsv").write_text("\n".join(rows) + "\n")
    rows, when = ["user\tfilm\tstars\ttime"], 0
    for user in range(users):
        mine = torch.randperm(films // 5, generator=generator)[:12] * 5 + user % 5
        for film, stars in [*((int(film), 5) for film in mine), (int(mine[0]) // 5 * 5 + (user + 1) % 5, 1)]:
            rows.append(f"u{user}\tf{film}\t{stars}\t{(when := when + 1)}")
    (folder / "ratings.tsv").write_text("\n".join(rows) + "\n")
    return folder


def test_what_is_tested_is_not_trained_on(tmp_path: Path) -> None:
    data = two_tower.read(write(tmp_path))
    assert data.counts[:2] == (60, 150) and data.text.shape == (150, two_tower.WORDS)
    assert int(data.new.sum()) == 15
    assert len(data.likes) + len(data.last) + len(data.new_likes) == 60 * 12, "one star is no like"
    pairs = [set(map(tuple, part.tolist())) for part in (data.likes, data.last, data.new_likes)]
    assert not pairs[0] & pairs[1] and not pairs[0] & pairs[2]
    assert data.last[:, 0].tolist() == list(range(60)) and data.new[data.new_likes[:, 1]].all()
    assert not data.new[data.likes[:, 1]].any() and not data.new[data.last[:, 1]].any()


# ---- different towers on different ranks, sparse gradients


def small() -> TwoTower:
    torch.manual_seed(1)
    return TwoTower((9, 14, 20), width=6).double()


def turn(step: int, rank: int) -> tuple[str, Tensor, Tensor, Tensor]:
    """What a rank learns from in a step: likes on even ranks, the catalogue on odd ones."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    films = torch.randint(14, (5,), generator=generator)
    chance = torch.full((14,), 1 / 14, dtype=torch.float64)
    if rank % 2:
        return "catalogue", torch.randint(20, (5, two_tower.WORDS), generator=generator), films, chance
    return "likes", torch.randint(9, (5,), generator=generator), films, chance


def on_ranks(stage: int) -> dict[str, Tensor]:
    import zeor

    model = small()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    model, optimizer = zeor.shard(model, optimizer, stage=stage)
    for step in range(4):
        model(*turn(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zeor.full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # plain PyTorch's own, about its own sparse step
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_different_towers_train_as_one_process(ranks: Any, world: int) -> None:
    model = small()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step in range(4):
        torch.stack([model(*turn(step, rank)) for rank in range(world)]).mean().backward()
        assert model.user.table.weight.grad.is_sparse and model.text.table.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: param.detach() for name, param in model.named_parameters()}
    assert all(not torch.equal(wanted[name], param) for name, param in small().named_parameters())
    first = None
    for stage in (0, 1, 2, 3):
        for found in ranks(on_ranks, world, stage):
            first = first or found
            for name, param in wanted.items():
                torch.testing.assert_close(found[name], param, rtol=1e-10, atol=1e-12)
                assert torch.equal(found[name], first[name]), f"stage {stage} gives other bits of {name}"


def test_sparse_adam_is_refused_with_a_way_out() -> None:
    import zeor

    model = small()
    with pytest.raises(ValueError, match=r"SparseAdam.*dense gradients, such as AdamW"):
        zeor.shard(model, torch.optim.SparseAdam(model.parameters()))


# ---- the program


@pytest.mark.whole
def test_the_program_beats_popularity_on_two_ranks(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    small_setting = ["--steps", "120", "--batch", "64", "--width", "16", "--data", str(write(tmp_path))]
    done = subprocess.run(
        [sys.executable, *launcher, "examples/two_tower.py", *small_setting],
        capture_output=True, text=True, timeout=240, env=env, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"recall@10: ([\d.]+)% .*: ([\d.]+)%\); ([\d.]+)% .*chance: ([\d.]+)%", done.stdout)
    assert found, done.stdout
    known, popular, new, chance = map(float, found.groups())
    assert known > popular + 10, "of 27 films of a user's genre, ten come first"
    assert new > chance + 20, "a new film's genre is known from its text"


def test_recall_counts_the_films_that_come_first() -> None:
    """A model that puts each user at the place of their own last film finds all; one that does not, none."""
    films = 30
    likes = torch.tensor([[user, user] for user in range(3)])
    last = torch.tensor([[user, user + 10] for user in range(3)])
    new = torch.arange(films) >= 25
    data = Data(likes, last, torch.tensor([[0, 29]]), torch.zeros(films, two_tower.WORDS, dtype=torch.long), new)

    class Perfect:
        film = staticmethod(lambda ids: torch.eye(films)[ids])
        user = staticmethod(lambda ids: torch.eye(films)[ids + 10] + 2 * torch.eye(films)[ids])

    assert two_tower.recall(Perfect(), data, last, by_text=False) == 1.0  # type: ignore[arg-type]
    assert two_tower.recall(Perfect(), data, likes, by_text=False) == 0.0  # type: ignore[arg-type]
