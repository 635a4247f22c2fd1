"""What a rank reads of a checkpoint's tensors, and who takes it: all staged beside the run, or verified and read again.

Staging takes as much memory as this rank's part: an accelerator's own where that has room (values then wait where they
are wanted), else the host's. Where the host is short, its share is read and hashed once and dropped, and, when all
ranks agree that nothing is wrong, read again in batches that go straight into place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import Manifest
from zeor.checkpoint.files.reading import Folder, Need, read_all, verify_all
from zeor.optim.parts.pieces import Key, Piece

STAGED_SHARE = 0.6  # of the free host memory: more than that is not staged
DEVICE_SHARE = 0.8  # of the free memory of a device
BATCH_NBYTES = 256 << 20


class Put(NamedTuple):
    need: Need
    take: Callable[[Tensor], object]  # is given what was read, flat


class Staging:
    """`alone`: no other rank reads the same bytes."""

    def __init__(self, path: Folder, manifest: Manifest, alone: bool) -> None:
        self._path, self._manifest, self._alone = path, manifest, alone
        self._puts: list[Put] = []
        self._staged: Sequence[Put] = self._puts
        self._again: Sequence[Put] = ()  # verified, and read a second time

    @property
    def needs(self) -> list[Need]:
        return [put.need for put in self._puts]

    def add(self, need: Need, take: Callable[[Tensor], object]) -> None:
        self._puts.append(Put(need, take))

    def add_piece(
        self, need: Need, to: list[Piece], name: str, key: Key, begin: int | None, dtype: torch.dtype | None = None
    ) -> None:
        """What is read becomes a piece of an optimizer's state or of an average; without `begin` it is a whole. It is
        converted to `dtype`, if one is given."""
        shape = (need.numel,) if begin is not None else need.stored.shape
        self.add(need, lambda values: to.append(Piece(name, key, begin, values.view(shape).to(dtype or values.dtype))))

    def place(self, free: Callable[[torch.device], int]) -> int:
        """Share out what devices have free; the bytes that are left to the host."""
        room: dict[torch.device, float] = {}
        host_nbytes = 0
        for put in self._puts:
            device, nbytes = put.need.device, put.need.nbytes
            if device.type != "cpu":
                left = room.setdefault(device, DEVICE_SHARE * free(device)) - nbytes
                if left >= 0:
                    room[device] = left
                    continue
                put.need.staged_on_host = True
            host_nbytes += nbytes
        return host_nbytes

    def read(self, host_is_short: bool, also: Sequence[Need] = ()) -> None:
        """Read and verify everything, and what is `also` needed; of what the host would have to stage, keep nothing if
        it is short."""
        if host_is_short:
            self._again = [put for put in self._puts if put.need.on_host]
            self._staged = [put for put in self._puts if not put.need.on_host]
        read_all(self._path, self._manifest, [*also, *(put.need for put in self._staged)], self._alone)
        verify_all(self._path, self._manifest, [put.need for put in self._again])

    @torch.no_grad()
    def fill(self, after_batch: Callable[[], None]) -> None:
        """Everything to who takes it."""
        self._give(self._staged, after_batch)
        for batch in self._batches():
            self._read_verified(batch)
            self._give(batch, after_batch)

    def _give(self, batch: Sequence[Put], after_batch: Callable[[], None]) -> None:
        for put in batch:
            put.take(put.need.into)
        after_batch()
        for put in batch:
            put.need.drop()

    def _read_verified(self, batch: list[Put]) -> None:
        for put in batch:
            put.need.staged_on_host = False
        try:
            read_all(self._path, self._manifest, [put.need for put in batch], self._alone)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} It was whole when it was verified: the run is changed in part; load once more."
            ) from error

    def _batches(self) -> Iterator[list[Put]]:
        """Of what is read again: one after the other, together no larger than a batch, or alone."""
        batch: list[Put] = []
        nbytes = 0
        for put in self._again:
            if batch and nbytes + put.need.nbytes > BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(put)
            nbytes += put.need.nbytes
        if batch:
            yield batch
