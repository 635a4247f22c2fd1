"""What a rank reads of a checkpoint's tensors, and who takes it: all staged on the host, or verified and read again.

Staging costs host memory as large as this rank's part. Where that is short everything is read and hashed once and
dropped, and, when all ranks agree that nothing is wrong, read again in batches that go straight into place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.manifest import Manifest
from zeor.checkpoint.reading import Folder, Need, read_all
from zeor.optim.pieces import Key, Piece

STAGED_SHARE = 0.6  # of the free host memory: more than that is not staged
BATCH_NBYTES = 256 << 20


class Put(NamedTuple):
    need: Need
    take: Callable[[Tensor], None]  # is given what was read, flat


class Staging:
    def __init__(self, path: Folder, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest
        self._puts: list[Put] = []
        self._read_again = False

    @property
    def needs(self) -> list[Need]:
        return [put.need for put in self._puts]

    @property
    def nbytes(self) -> int:
        return sum(put.need.nbytes for put in self._puts)

    def add(self, need: Need, take: Callable[[Tensor], None]) -> None:
        self._puts.append(Put(need, take))

    def add_piece(self, need: Need, to: list[Piece], name: str, key: Key, begin: int | None) -> None:
        """What is read becomes a piece of an optimizer's state or of an average; without `begin` it is a whole."""
        shape = (need.numel,) if begin is not None else need.stored.shape
        self.add(need, lambda values: to.append(Piece(name, key, begin, values.view(shape))))

    def read(self, drop: bool) -> None:
        """Read and verify everything; `drop`: and keep nothing of it."""
        self._read_again = drop
        for batch in self._batches():
            self._read(batch)
            if drop:
                _drop(batch)

    @torch.no_grad()
    def fill(self, after_batch: Callable[[], None]) -> None:
        """Everything to who takes it."""
        for batch in self._batches():
            if self._read_again:
                self._read_verified(batch)
            for put in batch:
                put.take(put.need.into)
            after_batch()
            _drop(batch)

    def _read(self, batch: list[Put]) -> None:
        read_all(self._path, self._manifest, [put.need for put in batch])

    def _read_verified(self, batch: list[Put]) -> None:
        try:
            self._read(batch)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} It was whole when it was verified: the run is changed in part; load once more."
            ) from error

    def _batches(self) -> Iterator[list[Put]]:
        """One after the other, together no larger than a batch, or alone; those of a staged read are one batch."""
        batch: list[Put] = []
        nbytes = 0
        for put in self._puts:
            if batch and self._read_again and nbytes + put.need.nbytes > BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(put)
            nbytes += put.need.nbytes
        if batch:
            yield batch


def _drop(batch: list[Put]) -> None:
    for put in batch:
        put.need.drop()
