"""RankSampler: every world-th item of another sampler's order, for map-style data.

Every rank computes the same order (a pure function of seed and epoch) and takes its turns in it, so nothing
is communicated; all ranks get equally many items. Knows indices, not samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch.utils.data import Sampler, SequentialSampler

from zeor.data.position import VERSION, History, Position, kept, part_numel, seed_now, seeded, take_state
from zeor.data.seeds import Seed, generator_of

T = TypeVar("T")


class RankSampler(Sampler[T]):
    """Every world-th item, from `rank` on, of what another sampler (or batch sampler) yields.

        epoch order      7 2 9 4 0 5 8 | 7      the tail wraps around (or is cut off, with drop_last)
        rank 0 of 2      7   9   0   8
        rank 1 of 2        2   4   5     7

    The order must be the same on all ranks, so the inner sampler runs to its end at the start of an epoch,
    with every global random generator, and its own if it has one, seeded by seed + epoch for that moment.
    A pass that continues an epoch deals out only what is left of it, on any number of ranks.
    """

    kind = "map-style samples"  # or "whole batches", where a batch sampler's are dealt out

    def __init__(
        self, inner: Any, rank: int, world: int, *, seed: int = 0, drop_last: bool = False,
        history: History | None = None,
    ) -> None:  # fmt: skip
        if not hasattr(inner, "__len__"):
            raise ValueError(
                f"zeor.data.shard needs a sampler with a length, and {type(inner).__name__} has no __len__"
            )
        self.inner = inner
        self.rank = rank
        self.world = world
        self.drop_last = drop_last
        self.position = Position(History(seed) if history is None else history)

    @property
    def seed(self) -> int | None:
        """None: the ranks have not agreed on one yet."""
        seed = self.position.history.seed
        return seed.agreed if isinstance(seed, Seed) else seed

    @property
    def epoch(self) -> int:
        """The one the next iter() will be."""
        return self.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iter() is epoch `epoch`, and later ones count on from there."""
        self.position.set_epoch(epoch)

    def __len__(self) -> int:
        """Of a whole epoch, also where a part of it is done."""
        return part_numel(len(self.inner), self.world, self.drop_last)

    def __iter__(self) -> Iterator[T]:
        # A generator: the pass begins with its first item. A DataLoader with workers calls iter() twice.
        this = self.position.begin()
        order = self._order(this.epoch)
        numel = part_numel(max(0, len(order) - this.start), self.world, self.drop_last)
        first = this.start + self.rank
        for i in range(numel):
            yield order[(first + i * self.world) % len(order)]

    def _order(self, epoch: int) -> Sequence[T]:
        if type(self.inner) is SequentialSampler:
            return range(len(self.inner))  # type: ignore[return-value]  # T is int here
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)
        seed, generator = seed_now(self.position.history) + epoch, generator_of(self.inner)
        with seeded(seed), kept(generator):
            if generator is not None:
                generator.manual_seed(seed)
            return list(self.inner)

    # ---- position

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, and the same on every rank."""
        epoch, consumed = self.position.now()
        numel = len(self.inner)  # padding is not part of the epoch's order
        return {"zeor_data": VERSION, "epoch": epoch, "consumed": min(consumed, numel), **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iter() continues there; it may come from another number of ranks or another batch size."""
        take_state(self.position, state, self._settings())

    def _settings(self) -> dict[str, Any]:
        """What the order depends on; the name of the inner sampler stands for how it draws."""
        return {"kind": self.kind, "order": type(self.inner).__name__, "numel": len(self.inner), "seed": self.seed}
