"""Direct reads: bytes land where they are wanted, whatever lies across pages and blocks, and are verified."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import safetensors.torch
import torch

from zeor.checkpoint.files import blocks
from zeor.checkpoint.files.blocks import BlockReader
from zeor.checkpoint.files.disk import Disk
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.manifest import BLOCK_NBYTES, FileInfo, digest
from zeor.checkpoint.files.pages import Scratch, address_of, empty_at, fits
from zeor.checkpoint.files.writer import Source, write_file
from zeor.memory.pages import PAGE_NBYTES

BLOCK = 16 * PAGE_NBYTES


def written(path: Path, nbytes: int) -> tuple[bytes, FileInfo]:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # out of the page cache, so that reads are direct
    os.close(fd)
    return data, FileInfo(path.name, nbytes, [digest(data[i : i + BLOCK]) for i in range(0, nbytes, BLOCK)])


def memory_at(nbytes: int, residue: int) -> torch.Tensor:
    room = torch.zeros(nbytes + PAGE_NBYTES, dtype=torch.uint8)
    begin = (residue - room.data_ptr()) % PAGE_NBYTES
    return room[begin : begin + nbytes]


@pytest.mark.parametrize("nbytes", [9 * BLOCK, 5 * BLOCK + 1, 3 * BLOCK - 100, PAGE_NBYTES - 1])
@pytest.mark.parametrize("alone", [True, False])
def test_random_ranges_are_filled_wherever_their_memory_lies(tmp_path: Path, nbytes: int, alone: bool) -> None:
    data, info = written(tmp_path / "file", nbytes)
    source = random.Random(nbytes)
    for _ in range(20):
        cuts = sorted(source.sample(range(nbytes), 6)) if source.random() < 0.7 else [0, nbytes]
        wants = []
        for begin, end in itertools.pairwise(cuts):
            residue = begin if source.random() < 0.7 else source.randrange(PAGE_NBYTES)  # most lie as in the file
            wants.append((begin, end, memory_at(end - begin, residue)))
        source.shuffle(wants)
        with BlockReader(tmp_path / "file", info, BLOCK, alone) as reader:
            reader.fill(wants)
            touched = reader.touched((begin, end) for begin, end, _ in wants)
            assert reader.read_nbytes == sum(len(data[i * BLOCK : (i + 1) * BLOCK]) for i in touched)
        for begin, end, into in wants:
            assert into.numpy().tobytes() == data[begin:end]


def test_pages_that_lie_as_in_the_file_are_not_copied() -> None:
    through = np.zeros(BLOCK, dtype=np.uint8)
    one, other = memory_at(5 * PAGE_NBYTES + 100, 0).numpy(), memory_at(BLOCK - 5 * PAGE_NBYTES - 100, 100).numpy()
    parts, copies = blocks._parts(BLOCK, [(5 * PAGE_NBYTES + 100, other), (0, one)], through)
    assert sum(len(part) for part in parts) == BLOCK
    assert sum(len(into) for _, into in copies) == PAGE_NBYTES, "the page that both have a part of"
    assert fits([part for part in parts if not np.shares_memory(part, through)], 0)
    unlike = memory_at(BLOCK, 8).numpy()
    parts, copies = blocks._parts(BLOCK, [(0, unlike)], through)
    assert [len(part) for part in parts] == [BLOCK] and np.shares_memory(parts[0], through)
    assert len(copies) == 1 and copies[0][1] is unlike


def test_a_disk_that_refuses_direct_reads_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, info = written(tmp_path / "file", 4 * BLOCK)
    plain, refused = os.preadv, []

    def preadv(fd: int, parts: Any, position: int, flags: int = 0) -> int:
        if blocks.os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "file") and fd in direct and not flags:
            refused.append(position)
            raise OSError(22, "Invalid argument")
        return plain(fd, [part[: len(part) // 2 or 1] for part in parts[:1]], position, flags)  # and short reads

    with BlockReader(tmp_path / "file", info, BLOCK, alone=True) as reader:
        assert isinstance(reader._file, blocks._LocalFile)
        direct = {reader._file._direct}
        monkeypatch.setattr(os, "preadv", preadv)
        assert reader.bytes(0, len(data)) == data
        assert sum(reader.verify()) == len(data)
    assert bool(refused) == (direct != {-1})  # a filesystem may have said no when it was opened


def test_a_changed_byte_is_found_in_every_part(tmp_path: Path) -> None:
    data, info = written(tmp_path / "file", 2 * BLOCK + 50)
    for at in (0, BLOCK - 1, BLOCK + 100, 2 * BLOCK + 49):
        changed = bytearray(data)
        changed[at] ^= 4
        (tmp_path / "file").write_bytes(changed)
        words = f"bytes {at // BLOCK * BLOCK} to .* do not match their hash"
        wants = [(0, 100, memory_at(100, 8)), (100, len(data), memory_at(len(data) - 100, 100))]
        with BlockReader(tmp_path / "file", info, BLOCK, alone=True) as reader:
            with pytest.raises(CheckpointError, match=words):
                reader.fill(wants)


@pytest.mark.parametrize("residue", [0, 64, 4095])
@pytest.mark.parametrize("nbytes", [0, 100, (4 << 20) + 5, 9 << 20])
def test_memory_lies_as_asked_and_is_no_larger(nbytes: int, residue: int) -> None:
    memory = empty_at(nbytes, residue)
    assert memory.dtype == torch.uint8 and memory.numel() == memory.untyped_storage().nbytes() == nbytes
    if nbytes >= 4 << 20:
        assert address_of(memory.numpy()) % PAGE_NBYTES == residue
    memory.fill_(7)
    assert int(memory.sum()) == 7 * nbytes


def test_scratch_lies_at_a_page() -> None:
    for nbytes in (PAGE_NBYTES, 4 << 20):
        assert address_of(Scratch(nbytes, pinned=False).bytes.numpy()) % PAGE_NBYTES == 0


class Counting(Disk):
    """Writes past the page cache are counted, and refused where asked."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.direct, self.count = refuses, -1, 0

    def open_direct(self, path: Any) -> int:
        self.direct = super().open_direct(path)
        return self.direct

    def write(self, fd: int, parts: Any, position: int) -> None:
        if fd == self.direct:
            self.count += 1
            if self.refuses:
                raise OSError(errno.EINVAL, "Invalid argument")
        super().write(fd, parts, position)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_file_written_past_the_page_cache_is_the_same(tmp_path: Path, refuses: bool) -> None:
    values = {"odd": torch.arange(3_000_001, dtype=torch.float32), "small": torch.arange(5), "b": torch.ones(777)}
    sources = [Source(k, v.dtype, tuple(v.shape), lambda v=v: v) for k, v in values.items()]
    disk = Counting(refuses)
    info = write_file(disk, tmp_path / "f.safetensors", sources)
    data = (tmp_path / "f.safetensors").read_bytes()
    assert info.nbytes == len(data) and len(info.blocks) == 3
    assert info.blocks == [digest(data[i : i + BLOCK_NBYTES]) for i in range(0, len(data), BLOCK_NBYTES)]
    assert disk.count == (2 if disk.direct >= 0 else 0)
    read = safetensors.torch.load_file(tmp_path / "f.safetensors")
    assert read.keys() == values.keys() and all(torch.equal(value, read[key]) for key, value in values.items())


class Elsewhere:
    """Stands in for a tensor of a device: what is copied to it arrives when its stream is waited for."""

    def __init__(self, host: torch.Tensor, pending: list[Any]):
        self.host, self.device, self._pending = host, torch.device("meta"), pending

    def __getitem__(self, part: slice) -> Elsewhere:
        return Elsewhere(self.host[part], self._pending)

    def __len__(self) -> int:
        return self.host.numel()

    numel = __len__

    def is_inference(self) -> bool:
        return False

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self._pending.append((self.host, source))


def test_blocks_for_a_device_arrive_before_their_scratch_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[Any] = []
    lock = threading.Lock()

    def arrive() -> None:
        with lock:
            while pending:
                into, source = pending.pop()
                into.copy_(source)

    stream = MagicMock()
    stream.synchronize = arrive
    event = MagicMock()
    event.synchronize = arrive
    monkeypatch.setattr(torch, "Stream", lambda device: stream)
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: MagicMock())
    monkeypatch.setattr(blocks, "Scratch", lambda nbytes, pinned: Scratch(nbytes, pinned=False))
    data, info = written(tmp_path / "file", 60 * BLOCK + 77)
    cuts = [5, BLOCK * 20 + 1, BLOCK * 41, len(data)]
    hosts = [torch.zeros(end - begin, dtype=torch.uint8) for begin, end in itertools.pairwise(cuts)]
    wants: list[Any] = []
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        wants.append((begin, end, hosts[number] if number == 1 else Elsewhere(hosts[number], pending)))
    with BlockReader(tmp_path / "file", info, BLOCK, alone=True) as reader:
        reader.fill(wants)
    assert not pending and event.record.call_count >= 40
    assert b"".join(host.numpy().tobytes() for host in hosts) == data[5:]
