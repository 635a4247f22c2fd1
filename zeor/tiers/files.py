"""Arrays on disk for the disk tier, one file each, read and written in ranges by a few threads.

Note [Coherence]: whole pages are read and written by O_DIRECT, past the page cache; the edges of a range, and
`DiskArray.tensor`, a shared map of the file, go through the cache. The kernel keeps the two in step for whoever does
not use the same bytes at the same time: a direct read first writes back what the cache has changed there, a direct
write drops what the cache holds. A folder is tried before use; where that does not hold, all goes through the cache.

No descriptor stays open between requests: a model has more arrays than a process may have files. Nothing is synced:
these files are worth nothing without the process. Whose folder it is, and who deletes it: folders.py.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from zeor.memory.pages import PAGE_NBYTES
from zeor.tiers.folders import OwnFolder, array_name, free_disk_nbytes, unusable

PIECE_NBYTES = 8 << 20  # of a request, moved by one thread
WORKERS = 8
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger("zeor")


class DiskFolder(OwnFolder):
    """A sub-folder of `folder` for one job (`job` becomes part of its name), and the threads its arrays share. Jobs may
    share `folder`. Close it when no request is under way."""

    def __init__(self, folder: str | os.PathLike[str], job: str | None = None) -> None:
        super().__init__(folder, job)
        self._count = 0
        self._lock = threading.Lock()
        self._direct = _Direct(self.folder)  # whether whole pages go past the page cache here
        self.workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="zeor-disk")
        try:
            self._direct.try_out(_File(self, array_name("try"), self._direct))
        except BaseException:
            self.close()
            raise

    def array(self, name: str, numel: int, dtype: torch.dtype) -> DiskArray:
        """An array of zeros whose space is taken now. Two may have the same name."""
        if not self.is_open:
            raise RuntimeError(f"The offload folder {self.path} is closed and makes no more arrays; open a new one.")
        with self._lock:
            number, self._count = self._count, self._count + 1
        file = _File(self, array_name(f"{number}-{name}"), self._direct)
        _take_space(file, numel * dtype.itemsize, self.folder)
        return DiskArray(self, file, numel, dtype)


class DiskArray:
    """A flat array in a file. Ranges are of elements; tensors are contiguous, on the CPU and of the same dtype, best
    beginning at a page as the range does. Any thread may call; ranges in use at the same time must not overlap unless
    all are read. A future is done when nothing touches its tensor any more, also where it has failed."""

    def __init__(self, folder: DiskFolder, file: _File, numel: int, dtype: torch.dtype) -> None:
        self.path, self.numel, self.dtype = file.path, numel, dtype
        self._folder, self._file = folder, file

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def tensor(self) -> Tensor:
        """All of it, as a map of the file, for whoever is not in a hurry: see Note [Coherence] and `check`."""
        self._check_open()
        with torch.inference_mode(False):
            if not self.numel:
                return torch.empty(0, dtype=self.dtype)
            descriptor = self._file.open()
            try:
                self._check_nbytes(os.fstat(descriptor).st_size)  # torch would make it longer
                # By the descriptor, not by the path, which others may lead elsewhere.
                return torch.from_file(f"/dev/fd/{descriptor}", shared=True, size=self.numel, dtype=self.dtype)
            finally:
                os.close(descriptor)

    def check(self) -> None:
        """That the file is as long as the array: the kernel ends a process (SIGBUS) that touches a map beyond its end.
        Nothing where the folder is closed: a map that is left then holds a file that has no name any more."""
        if self.numel and self._folder.is_open:
            self._check_nbytes(self._file.nbytes())

    def _check_nbytes(self, nbytes: int) -> None:
        if nbytes < self.nbytes:
            raise _shortened(self.path, nbytes)

    def read(self, begin: int, end: int, into: Tensor) -> None:
        self._request(begin, end, into, is_read=True).finish()

    def write(self, begin: int, end: int, source: Tensor) -> None:
        self._request(begin, end, source, is_read=False).finish()

    def read_async(self, begin: int, end: int, into: Tensor) -> Future[None]:
        return self._request(begin, end, into, is_read=True).start()

    def write_async(self, begin: int, end: int, source: Tensor) -> Future[None]:
        return self._request(begin, end, source, is_read=False).start()

    def _request(self, begin: int, end: int, memory: Tensor, is_read: bool) -> _Request:
        self._check_open()
        if not 0 <= begin <= end <= self.numel:
            raise ValueError(f"{self.path.name} has {self.numel} elements; the range {begin}:{end} is not inside.")
        fits = memory.device.type == "cpu" and memory.dtype == self.dtype and memory.is_contiguous()
        if not fits or memory.numel() != end - begin:
            raise ValueError(
                f"The range {begin}:{end} of {self.path.name} needs a contiguous {end - begin} x {self.dtype} "
                f"on the CPU; here is {memory.numel()} x {memory.dtype} on {memory.device}, strides {memory.stride()}."
            )
        return _Request(self._file, memory, begin * self.dtype.itemsize, is_read, self._folder.workers)

    def _check_open(self) -> None:
        if not self._folder.is_open:
            raise RuntimeError(f"{self.path} is gone: its offload folder is closed; nothing may use it any more.")


class _Request:
    """Bytes between a tensor and a file, cut at pages of the file. Whoever has time moves the next piece: workers of
    the pool and, in `finish`, the caller, who therefore never waits for a worker to become free."""

    def __init__(self, file: _File, memory: Tensor, position: int, is_read: bool, workers: ThreadPoolExecutor):
        flat = memory.detach().reshape(-1)
        self._bytes = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
        self._position = position
        self._in_step = (flat.data_ptr() - position) % PAGE_NBYTES == 0
        self._file, self._is_read, self._workers = file, is_read, workers
        self._pieces = deque(_pieces(position, position + len(self._bytes)))
        self._left = len(self._pieces)
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._future: Future[None] = Future()
        self._future.set_running_or_notify_cancel()  # what has begun is not taken back
        if not self._left:
            self._future.set_result(None)

    def start(self) -> Future[None]:
        if not self._call_workers(self._left):
            self._work()
        return self._future

    def finish(self) -> None:
        self._call_workers(self._left - 1)
        self._work()
        self._future.result()

    def _call_workers(self, most: int) -> int:
        """How many were called; none while the interpreter ends."""
        for number in range(min(most, WORKERS)):
            try:
                self._workers.submit(self._work)
            except RuntimeError:
                return number
        return max(0, min(most, WORKERS))

    def _work(self) -> None:
        while True:
            try:
                begin, end = self._pieces.popleft()
            except IndexError:
                return
            try:
                if self._error is None:
                    self._move(begin, end)
            except BaseException as error:
                self._error = self._error or error
            with self._lock:
                self._left -= 1
                is_last = not self._left
            if is_last and self._error is not None:
                self._future.set_exception(self._error)
            elif is_last:
                self._future.set_result(None)

    def _move(self, position: int, end: int) -> None:
        while position < end:
            stop, direct = self._way(position, end)
            part = self._bytes[position - self._position : stop - self._position]
            position += self._file.move(part, position, self._is_read, direct)

    def _way(self, position: int, end: int) -> tuple[int, bool]:
        """How far one way leads, and which: directly for whole pages, where memory and file are in step."""
        if not (self._in_step and self._file.direct.works):
            return end, False
        if position % PAGE_NBYTES:
            return min(end, (position // PAGE_NBYTES + 1) * PAGE_NBYTES), False
        last = end // PAGE_NBYTES * PAGE_NBYTES
        return (last, True) if last > position else (end, False)


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    while begin < end:
        stop = min(end, (begin // PIECE_NBYTES + 1) * PIECE_NBYTES)
        yield begin, stop
        begin = stop


class _Direct:
    """Whether O_DIRECT works in a folder. The first refusal is for good, and logged once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.works = folder, hasattr(os, "O_DIRECT")

    def refused(self, why: object) -> None:
        if self.works:
            self.works = False
            log.info("zeor: no direct reads and writes in %s (%s); the page cache serves.", self._folder, why)

    def try_out(self, file: _File) -> None:
        """See that Note [Coherence] holds, on a file of two pages."""
        nbytes = 2 * PAGE_NBYTES
        _take_space(file, nbytes, self._folder)
        try:
            if self.works:
                with open(file.open(), "r+b", buffering=0) as opened:
                    opened.write(bytes(nbytes))  # a map of what has no space yet would end the process on a full disk
                    with mmap.mmap(opened.fileno(), nbytes) as shared, mmap.mmap(-1, nbytes) as memory:
                        self._compare(file, shared, memory)
        except (OSError, ValueError, RuntimeError) as error:
            self.refused(error)
        finally:
            file.unlink()

    def _compare(self, file: _File, shared: mmap.mmap, memory: mmap.mmap) -> None:
        for value in (1, 2):
            shared[:] = bytes([value]) * len(shared)
            with memoryview(memory) as view:
                read = file.move(view, 0, True, True)
                is_same = memory[:read] == shared[:read]
                memory[:] = bytes([value + 2]) * len(memory)
                written = file.move(view, 0, False, True)
            if not is_same or memory[:written] != shared[:written]:
                self.refused("what is read differs from what was written")


class _File:
    """Reads and writes parts of a file in a folder of one's own, which it reaches by the folder's handle and its name,
    never through a link. `direct` is shared by the files of a folder."""

    def __init__(self, folder: OwnFolder, name: str, direct: _Direct) -> None:
        self.path, self.direct = folder.path / name, direct
        self._handle, self._name = folder.handle, name

    def open(self, flags: int = 0) -> int:
        return os.open(self._name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600, dir_fd=self._handle)

    def unlink(self) -> None:
        os.unlink(self._name, dir_fd=self._handle)

    def nbytes(self) -> int:
        """As it is now."""
        try:
            return os.stat(self._name, dir_fd=self._handle, follow_symlinks=False).st_size
        except OSError as error:
            raise self._sentence(error, True, 0) from error

    def move(self, part: memoryview, position: int, is_read: bool, direct: bool) -> int:
        """Read or write some of these bytes, at least one; how many."""
        try:
            descriptor = self.open(os.O_DIRECT if direct else 0)
            try:  # both let other threads run, and go on by themselves after a signal
                moved = (os.preadv if is_read else os.pwritev)(descriptor, [part], position)
            finally:
                os.close(descriptor)
        except OSError as error:
            if direct and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                self.direct.refused(error.strerror)
                return self.move(part, position, is_read, False)
            raise self._sentence(error, is_read, position) from error
        if not moved:
            raise _shortened(self.path, position)
        return moved

    def _sentence(self, error: OSError, is_read: bool, position: int) -> RuntimeError:
        if error.errno in _FULL:
            todo = f"{_free(self.path.parent)}; free some space or choose another folder="
        elif error.errno == errno.EIO:
            todo = "the disk has failed there, see the system's log; choose a folder= on another disk"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            todo = "too many files are open; raise the limit (ulimit -n)"
        else:
            todo = "see that the folder is still there and may be written to"
        what = f"could not be {'read' if is_read else 'written'} at byte {position} ({error.strerror})"
        return RuntimeError(f"{self.path} {what}: {todo}, and restart from the last checkpoint.")


def _shortened(path: Path, nbytes: int) -> RuntimeError:
    return RuntimeError(
        f"{path} ends before byte {nbytes + 1}: something else has shortened it. Let nothing else write in the offload "
        "folder, and restart from the last checkpoint."
    )


def _take_space(file: _File, nbytes: int, folder: Path) -> None:
    """Make a file of zeros, with its space on the disk; or nothing, and say why."""
    try:
        descriptor = file.open(os.O_CREAT | os.O_EXCL)
    except OSError as error:
        raise unusable(folder, error) from error
    try:
        if nbytes:
            _allocate(descriptor, nbytes, folder)
    except BaseException as error:
        file.unlink()
        os.close(descriptor)  # and with it what was taken, before the free bytes are counted
        if not isinstance(error, OSError):
            raise
        raise RuntimeError(
            f"No space for {file.path.name} in the offload folder {folder} ({error.strerror}): {nbytes:,} bytes are "
            f"needed, {_free(folder)}; free some space, choose another folder=, or keep more on the host."
        ) from error
    os.close(descriptor)


def _allocate(descriptor: int, nbytes: int, folder: Path) -> None:
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        # Not known here: the disk may then still become full while training.
        if free_disk_nbytes(folder) < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        os.ftruncate(descriptor, nbytes)


def _free(folder: Path) -> str:
    try:
        return f"{free_disk_nbytes(folder):,} bytes are free"
    except OSError as error:
        return f"an unknown amount is free ({error.strerror})"
