"""What a disk can do: plain reads, plain writes, and both at once, past the page cache.

    python -m benchmarks.disk_rates /mnt/scratch --gib 4

Large page-aligned requests by a few threads over one file, as a program without zeor would issue them: the measure
that a disk tier is held against. A filesystem without O_DIRECT is measured through the page cache, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 2**20
REQUEST_NBYTES = 16 * MIB
THREADS = 4


def measure(folder: str | None = None, gib: float = 4.0) -> dict[str, Any]:
    """GB/s of reading, of writing, and of the sum of both under way together (half of the file each)."""
    where = Path(folder or tempfile.gettempdir())
    where.mkdir(parents=True, exist_ok=True)
    count = max(8, int(gib * 2**30) // REQUEST_NBYTES)
    path = where / f"zeor-disk-rates-{os.getpid()}"
    try:
        with _opened(path) as (descriptor, direct), ThreadPoolExecutor(2 * THREADS) as pool:
            write, read = _requests(descriptor)
            write_s = _timed(pool, [(write, n) for n in range(count)], descriptor)
            read_s = _timed(pool, [(read, n) for n in range(count)], descriptor)
            half = count // 2
            mixed = [job for n in range(half) for job in ((read, n), (write, half + n))]
            both_s = _timed(pool, mixed, descriptor)
    finally:
        path.unlink(missing_ok=True)
    rate = lambda requests, seconds: round(requests * REQUEST_NBYTES / seconds / 1e9, 3)
    return {
        "write_gb_per_s": rate(count, write_s),
        "read_gb_per_s": rate(count, read_s),
        "both_gb_per_s": rate(2 * half, both_s),
        "gib": round(count * REQUEST_NBYTES / 2**30, 2),
        "threads": THREADS,
        "request_mib": REQUEST_NBYTES // MIB,
        "direct": direct,
    }


@contextlib.contextmanager
def _opened(path: Path) -> Any:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    try:
        descriptor, direct = os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:
        descriptor, direct = os.open(path, flags, 0o600), False
    try:
        yield descriptor, direct
    finally:
        os.close(descriptor)


def _requests(descriptor: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """A function that writes request `n` and one that reads it, each with memory of its own, page-aligned."""

    def buffer() -> mmap.mmap:
        found = mmap.mmap(-1, REQUEST_NBYTES)
        found.write(os.urandom(4096) * (REQUEST_NBYTES // 4096))  # nothing that a disk could leave out
        return found

    free = [buffer() for _ in range(2 * THREADS)]

    def move(call: Callable[..., int], n: int) -> None:
        mine = free.pop()
        view = memoryview(mine)
        done = 0
        while done < REQUEST_NBYTES:
            moved = call(descriptor, [view[done:]], n * REQUEST_NBYTES + done)
            if moved <= 0:
                raise OSError(f"a request of the disk measurement ended after {done} bytes")
            done += moved
        view.release()
        free.append(mine)

    return (lambda n: move(os.pwritev, n)), (lambda n: move(os.preadv, n))


def _timed(pool: ThreadPoolExecutor, jobs: list[tuple[Callable[[int], None], int]], descriptor: int) -> float:
    start = time.perf_counter()
    for future in [pool.submit(call, n) for call, n in jobs]:
        future.result()
    os.fsync(descriptor)
    return time.perf_counter() - start


def line_of(found: dict[str, Any]) -> str:
    how = "O_DIRECT" if found["direct"] else "through the page cache"
    return (
        f"disk: write {found['write_gb_per_s']:.2f}, read {found['read_gb_per_s']:.2f}, both together "
        f"{found['both_gb_per_s']:.2f} GB/s ({how}, {found['threads']} threads, {found['gib']} GiB)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--gib", type=float, default=4.0)
    options = parser.parse_args()
    found = measure(options.folder, options.gib)
    print(json.dumps(found))
    print(line_of(found))


if __name__ == "__main__":
    main()
