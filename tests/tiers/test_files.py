"""Arrays on disk: values by every way in and out, space taken at once, folders that jobs share, and disks that fail.

Most run twice, with direct reads and writes as the filesystem gives them, and without.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeor.memory.pages import PAGE_NBYTES
from zeor.plan import default_folder
from zeor.tiers import files
from zeor.tiers.files import DiskArray, DiskFolder
from zeor.tiers.folders import free_disk_nbytes
from zeor.tiers.host import HostArena
from zeor.tiers.rest import Rest

NUMEL = 3 * 4096 + 777


@pytest.fixture(params=["direct", "cached"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskFolder]:
    with DiskFolder(tmp_path) as opened:
        if request.param == "cached":
            opened._direct.refused("a test")
        yield opened


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a filesystem of a kind; gone after the test."""
    paths: list[Path] = []

    def mount(kind: str, options: str) -> Path:
        path = tmp_path / f"mount{len(paths)}"
        path.mkdir()
        subprocess.run(["mount", "-t", kind, "-o", options, "none", path], check=True)
        paths.append(path)
        return path

    yield mount
    for path in paths:
        subprocess.run(["umount", path], check=True)


def may_mount() -> bool:
    """By the capability itself (CAP_SYS_ADMIN); root has it not everywhere."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 21 & 1)
    return False


needs_mount = pytest.mark.skipif(not may_mount(), reason="may not mount filesystems here")


def aligned(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return HostArena(pin=False).take(numel, dtype)


def fail(monkeypatch: pytest.MonkeyPatch, call: str, number: int, when: Callable[..., bool] = lambda *_: True) -> None:
    """Let a system call fail where `when(*arguments)` says so."""
    real = getattr(os, call)

    def failing(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **named)

    monkeypatch.setattr(os, call, failing)


def watch_opens(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time an array is opened to be read or written: directly or not."""
    real, seen = os.open, []

    def opening(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        seen.append(bool(flags & os.O_DIRECT))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opening)
    return seen


# ---- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.int8, torch.float64])
def test_an_array_begins_as_zeros_and_returns_what_was_written(folder: DiskFolder, dtype: torch.dtype) -> None:
    array = folder.array("master", NUMEL, dtype)
    assert array.path.stat().st_size == array.nbytes == NUMEL * dtype.itemsize
    into = aligned(NUMEL, dtype)
    into.fill_(1)
    array.read(0, NUMEL, into)
    assert not into.any() and not array.tensor.any()
    values = torch.arange(NUMEL).to(dtype)
    array.write(0, NUMEL, values)
    array.read(0, NUMEL, into)
    assert torch.equal(into, values) and torch.equal(array.tensor, values)
    assert array.tensor.dtype == dtype and array.tensor.shape == (NUMEL,)


def test_space_is_taken_when_an_array_is_made(folder: DiskFolder) -> None:
    array = folder.array("moments", 1 << 20, torch.float32)
    assert array.path.stat().st_blocks * 512 >= 4 << 20


def test_empty_arrays_and_empty_ranges(folder: DiskFolder) -> None:
    empty = folder.array("nothing", 0, torch.float32)
    empty.read(0, 0, torch.empty(0))
    assert empty.write_async(0, 0, torch.empty(0)).result() is None and empty.tensor.shape == (0,)
    array = folder.array("something", 10, torch.float32)
    array.write(10, 10, torch.empty(0))
    assert array.tensor.sum() == 0


def test_names_may_repeat_and_hold_anything(folder: DiskFolder) -> None:
    names = ["layers.0/weight", "layers.0/weight", "../up", "x" * 500, "", "ü n\n"]
    arrays = [folder.array(name, 5, torch.float32) for name in names]
    for number, array in enumerate(arrays):
        array.write(0, 5, torch.full((5,), float(number)))
    assert [array.tensor[4].item() for array in arrays] == [0, 1, 2, 3, 4, 5]
    assert {array.path.parent for array in arrays} == {folder.path}


def test_many_arrays_hold_no_descriptors(folder: DiskFolder) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arrays = [folder.array("a", 100, torch.float32) for _ in range(50)]
    maps = [array.tensor for array in arrays]
    for array in arrays:
        array.write(0, 100, torch.ones(100))
    assert sum(map(torch.sum, maps)) == 5000
    assert len(os.listdir("/proc/self/fd")) <= before


def test_what_does_not_fit_is_refused_by_name(folder: DiskFolder) -> None:
    array = folder.array("master", 100, torch.float32)
    for begin, end in [(-1, 5), (5, 4), (0, 101)]:
        with pytest.raises(ValueError, match=rf"0-master\.array has 100 elements; the range {begin}:{end}"):
            array.read(begin, end, torch.empty(max(0, end - begin)))
    wrong = [torch.empty(9), torch.empty(10).bfloat16(), torch.empty(20)[::2], torch.empty(10, device="meta")]
    for tensor in wrong:
        with pytest.raises(ValueError, match=r"range 0:10 of 0-master\.array needs a contiguous 10 x torch\.float32"):
            array.write(0, 10, tensor)


def test_a_parameter_that_wants_a_gradient_and_a_matrix_are_taken_as_they_are(folder: DiskFolder) -> None:
    array = folder.array("master", 12, torch.float32)
    array.write(0, 12, torch.nn.Parameter(torch.arange(12.0).reshape(3, 4)))
    into = torch.empty(3, 4)
    with torch.inference_mode():
        array.read(0, 12, into)
    assert torch.equal(into, torch.arange(12.0).reshape(3, 4))


# ---- ranges: any, at any offset in memory, by every way


step = st.tuples(
    st.sampled_from(["read", "write", "read_async", "write_async", "tensor"]),
    st.integers(0, NUMEL), st.integers(0, NUMEL), st.sampled_from([0, 1, 7, 1024]), st.booleans(),
)  # fmt: skip


@pytest.mark.long
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(step, min_size=1, max_size=12), in_step=st.booleans())
def test_any_sequence_of_ranges_is_as_on_a_plain_tensor(
    folder: DiskFolder, steps: list[tuple[str, int, int, int, bool]], in_step: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE_NBYTES", 2 * PAGE_NBYTES)  # several pieces to a request
        plain, array = torch.zeros(NUMEL), folder.array("x", NUMEL, torch.float32)
        for number, (way, a, b, offset, on_page) in enumerate(steps):
            begin, end = sorted((a // 1024 * 1024, b) if on_page else (a, b))
            # Memory as the file lies, so that the middle goes directly, or anywhere.
            first = begin % 1024 if in_step else offset
            memory = aligned(NUMEL + 2048)[first : first + end - begin]
            memory.copy_(torch.arange(end - begin) + 10_000.0 * (number + 1))
            if way == "tensor":
                array.tensor[begin:end] = memory
            elif way.startswith("write"):
                done = getattr(array, way)(begin, end, memory)
                assert done is None or done.result() is None
            if way.startswith("read"):
                done = getattr(array, way)(begin, end, memory)
                assert done is None or done.result() is None
                assert torch.equal(memory, plain[begin:end])
            else:
                plain[begin:end] = memory
        assert torch.equal(array.tensor, plain)
        into = aligned(NUMEL)
        array.read(0, NUMEL, into)
        assert torch.equal(into, plain)
        array.path.unlink()


def test_whole_pages_go_directly_and_edges_by_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskFolder(tmp_path) as folder:
        assert folder._direct.works, "the tests want a temporary folder on a disk"
        array, memory = folder.array("x", 8 * 1024, torch.float32), aligned(8 * 1024)
        opens = watch_opens(monkeypatch)
        array.write(1024, 4096, memory[1024:4096])
        assert opens == [True]
        opens.clear()
        array.write(1000, 4100, memory[1000:4100])
        assert opens == [False, True, False]
        opens.clear()
        array.read(1000, 4100, memory[:3100])  # memory and file out of step
        array.read(1030, 1040, memory[1030:1040])
        array.read(1024, 1030, memory[1024:1030])
        assert opens == [False, False, False]
        opens.clear()
        monkeypatch.setattr(files, "PIECE_NBYTES", 2 * PAGE_NBYTES)  # pieces meet at pages of the file
        array.read(1000, 8000, memory[1000:8000])
        assert sorted(opens) == [False] * 2 + [True] * 4


def test_the_map_and_direct_requests_see_each_other(tmp_path: Path) -> None:
    with DiskFolder(tmp_path) as folder:
        assert folder._direct.works
        array, memory = folder.array("x", 1 << 20, torch.float32), aligned(1 << 20)
        shared, second = array.tensor, array.tensor
        for value in range(1, 6):
            shared.fill_(value)  # in the cache only
            array.read(0, 1 << 20, memory)
            assert (memory == value).all()
            memory.fill_(-value)
            array.write(0, 1 << 20, memory)  # past the cache, which holds the old values
            assert (shared == -value).all() and (second == -value).all()


def test_a_short_transfer_goes_on_where_it_stopped(folder: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    array, memory = folder.array("x", NUMEL, torch.float32), aligned(NUMEL)
    memory.copy_(torch.arange(NUMEL))
    preadv, pwritev = os.preadv, os.pwritev
    short = [100, 4096, 5000, 1, 8192]

    def cut(part: memoryview) -> memoryview:
        short.append(short.pop(0))
        # A direct transfer that stops early does so at a block of the disk.
        return part[: short[-1] if len(part) % PAGE_NBYTES else -(-short[-1] // 512) * 512]

    monkeypatch.setattr(os, "pwritev", lambda descriptor, parts, at: pwritev(descriptor, [cut(parts[0])], at))
    array.write(0, NUMEL, memory)
    monkeypatch.setattr(os, "preadv", lambda descriptor, parts, at: preadv(descriptor, [cut(parts[0])], at))
    into = aligned(NUMEL)
    array.read(0, NUMEL, into)
    assert torch.equal(into, memory) and torch.equal(array.tensor, memory)


def test_threads_use_disjoint_ranges_of_one_array(folder: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_NBYTES", 8 * PAGE_NBYTES)
    numel, parts = 1_000_003, 23  # edges of neighbours share pages
    array = folder.array("x", numel, torch.float32)
    memory = aligned(numel)
    memory.copy_(torch.arange(numel))
    cuts = [numel * part // parts for part in range(parts + 1)]
    into = aligned(numel)

    def there_and_back(part: int) -> None:
        begin, end = cuts[part], cuts[part + 1]
        for _ in range(3):
            array.write(begin, end, memory[begin:end])
            into[begin:end] = 0
            array.read_async(begin, end, into[begin:end]).result()
            assert torch.equal(into[begin:end], memory[begin:end])

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(there_and_back, range(parts)))
    assert torch.equal(array.tensor, memory)


def test_a_request_may_wait_for_another_inside_the_pool(folder: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker waits for a request of its own, and none for a free worker."""
    monkeypatch.setattr(files, "PIECE_NBYTES", PAGE_NBYTES)
    array = folder.array("x", NUMEL, torch.float32)
    array.tensor.copy_(torch.arange(NUMEL))
    into = [aligned(NUMEL) for _ in range(4 * files.WORKERS)]
    futures = [folder.workers.submit(array.read, 0, NUMEL, memory) for memory in into]
    for future, memory in zip(futures, into, strict=True):
        future.result(timeout=60)
        assert torch.equal(memory, array.tensor)


# ---- refusals and failures


@pytest.mark.parametrize("where", ["open", "preadv"])
def test_a_filesystem_that_refuses_direct_requests_is_served_by_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    if where == "open":
        fail(monkeypatch, "open", errno.EINVAL, lambda path, flags, *_: bool(flags & os.O_DIRECT))
    with caplog.at_level(logging.INFO, logger="zeor"), DiskFolder(tmp_path) as folder:
        if where == "preadv":  # accepted at first, and refused while in use
            assert folder._direct.works
            real = os.preadv

            def refusing(descriptor: int, parts: list[memoryview], position: int) -> int:
                if is_direct(descriptor):
                    raise OSError(errno.EINVAL, "Invalid argument")
                return real(descriptor, parts, position)

            monkeypatch.setattr(os, "preadv", refusing)
        for number in range(3):
            array, into = folder.array("x", NUMEL, torch.float32), aligned(NUMEL)
            array.write(0, NUMEL, torch.full((NUMEL,), float(number)))
            array.read(0, NUMEL, into)
            assert (into == number).all() and not folder._direct.works
    assert [record.getMessage() for record in caplog.records] == [
        f"zeor: no direct reads and writes in {tmp_path} (Invalid argument); the page cache serves."
    ]


def is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def test_a_filesystem_whose_cache_is_not_in_step_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def stale(descriptor: int, parts: list[memoryview], position: int) -> int:
        moved = real(descriptor, parts, position)
        if is_direct(descriptor):
            parts[0][:1] = b"\xff"
        return moved

    monkeypatch.setattr(os, "preadv", stale)
    with DiskFolder(tmp_path) as folder:
        assert not folder._direct.works
        assert os.listdir(folder.path) == ["lock"]


@needs_mount
@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_filesystems_in_memory_serve(mounted: Callable[..., Path], kind: str) -> None:
    with DiskFolder(mounted(kind, "size=8m")) as folder:
        array, memory = folder.array("x", NUMEL, torch.float32), aligned(NUMEL)
        memory.copy_(torch.arange(NUMEL))
        array.write(0, NUMEL, memory)
        assert torch.equal(array.tensor, memory)
        array.read(0, NUMEL, memory.zero_())
        assert torch.equal(array.tensor, memory) and memory[-1] == NUMEL - 1


@needs_mount
def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(mounted: Callable[..., Path]) -> None:
    path = mounted("tmpfs", "size=8m")
    with DiskFolder(path) as folder:
        kept = folder.array("kept", 1 << 20, torch.float32)
        kept.write(0, 1 << 20, torch.ones(1 << 20))
        free_nbytes = free_disk_nbytes(path)
        assert 3 << 20 < free_nbytes <= 4 << 20
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                folder.array("moments", 8 << 20, torch.float32)
            assert str(path) in str(caught.value) and "moments" in str(caught.value)
            assert f"{32 << 20:,} bytes are needed, {free_nbytes:,} bytes are free;" in str(caught.value)
        assert sorted(os.listdir(folder.path)) == ["0-kept.array", "lock"]
        assert kept.tensor.sum() == 1 << 20
    assert os.listdir(path) == []
    (path / "fill").write_bytes(bytes(free_disk_nbytes(path)))
    with pytest.raises(RuntimeError, match="bytes are needed, 0 bytes are free"):
        DiskFolder(path)
    assert os.listdir(path) == ["fill"]


LIMITED = """
import resource, sys, torch
from zeor.tiers.files import DiskFolder
with DiskFolder(sys.argv[1]) as folder:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    folder.array("small", 1 << 10, torch.float32)
    try:
        folder.array("large", 1 << 20, torch.float32)
    except RuntimeError as error:
        print(error)
    print(sorted(path.name for path in folder.path.iterdir()))
"""


@pytest.mark.long
def test_a_limit_on_the_size_of_files_is_met_before_training(tmp_path: Path) -> None:
    output = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert f"No space for 1-large.array in the offload folder {tmp_path} (File too large)" in output
    assert output.splitlines()[-1] == "['0-small.array', 'lock']"
    assert os.listdir(tmp_path) == []


def test_where_space_cannot_be_taken_it_is_at_least_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "posix_fallocate", errno.EOPNOTSUPP)
    with DiskFolder(tmp_path) as folder:
        array = folder.array("x", NUMEL, torch.float32)
        array.write(5, 10, torch.ones(5))
        assert array.tensor.sum() == 5 and array.path.stat().st_size == 4 * NUMEL
        with pytest.raises(RuntimeError, match=r"No space left on device\): 4,503,599,627,370,496 bytes are needed"):
            folder.array("too large", 1 << 50, torch.float32)
        assert sorted(os.listdir(folder.path)) == ["0-x.array", "lock"]


@pytest.mark.parametrize(
    ("number", "call", "sentence"),
    [
        (errno.EIO, "preadv", r"could not be read at byte 0 \(Input/output error\): the disk has failed.*checkpoint"),
        (errno.EIO, "pwritev", r"could not be written at byte 0 \(Input/output error\): the disk has failed"),
        (errno.ENOSPC, "pwritev", r"could not be written at byte 0 \(No space left.*[\d,]+ bytes are free; free some"),
        (errno.EDQUOT, "pwritev", r"could not be written at byte 0 \(Disk quota exceeded\).*another folder="),
        (errno.EMFILE, "open", r"\(Too many open files\): .*ulimit -n"),
        (errno.EACCES, "open", r"\(Permission denied\): see that the folder is still there"),
    ],
)
def test_errors_name_the_file_and_what_to_do(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch, number: int, call: str, sentence: str
) -> None:
    array, memory = folder.array("moments", NUMEL, torch.float32), aligned(NUMEL)
    fail(monkeypatch, call, number)
    operation = array.read if call == "preadv" else array.write
    with pytest.raises(RuntimeError, match=r"0-moments\.array " + sentence if call != "open" else sentence):
        operation(0, NUMEL, memory)
    with pytest.raises(RuntimeError, match="checkpoint"):
        getattr(array, f"{operation.__name__}_async")(0, NUMEL, memory).result(timeout=60)
    monkeypatch.undo()
    array.write(0, NUMEL, memory + 1)  # a failure is of that request only
    assert array.tensor.sum() == NUMEL


def test_a_failed_request_is_done_only_when_nothing_touches_its_memory(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE_NBYTES", PAGE_NBYTES)
    array, memory = folder.array("x", 64 * 1024, torch.float32), aligned(64 * 1024)
    array.tensor.fill_(1)
    fail(monkeypatch, "preadv", errno.EIO, lambda _, __, position: position == 3 * PAGE_NBYTES)
    for _ in range(20):
        error = array.read_async(0, 64 * 1024, memory).exception(timeout=60)
        assert isinstance(error, RuntimeError) and f"at byte {3 * PAGE_NBYTES}" in str(error)
        memory.fill_(7)
        assert (memory == 7).all()


def test_a_file_that_something_shortened_is_named(folder: DiskFolder) -> None:
    array, memory = folder.array("x", NUMEL, torch.float32), aligned(NUMEL)
    os.truncate(array.path, PAGE_NBYTES)
    with pytest.raises(RuntimeError, match=rf"0-x\.array ends before byte {PAGE_NBYTES + 1}.*shortened"):
        array.read(0, NUMEL, memory)


# ---- folders


def test_a_missing_parent_and_a_file_in_its_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=rf"{tmp_path}/a/b cannot be made because {tmp_path}/a does not exist"):
        DiskFolder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RuntimeError, match=rf"{path} cannot be used \(.*\); choose folder="):
            DiskFolder(path)
    with DiskFolder(tmp_path / "new", job="rank 0/8") as folder:
        assert folder.path.parent == tmp_path / "new" and folder.path.name.startswith("zeor-offload-rank_0_8-")
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(tmp_path)) == ["file", "new"] and os.listdir(tmp_path / "new") == []


def test_a_folder_in_which_none_can_ever_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/proc/self").exists():
        with pytest.raises(
            RuntimeError, match=r"^The offload folder /proc cannot be used \(No such file or directory\)"
        ):
            DiskFolder("/proc")
    tried: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, "mkdir", errno.ENOENT, lambda path, *_: "zeor-offload" in str(path) and not tried.append(str(path)))
        with pytest.raises(RuntimeError, match=rf"^The offload folder {tmp_path} cannot be used \(No such file"):
            DiskFolder(tmp_path)
    assert len(set(tried)) == len(tried) == 100
    monkeypatch.setattr("fcntl.flock", busy)  # every one of them is taken for a leftover by somebody
    with pytest.raises(RuntimeError, match=rf"^The offload folder {tmp_path} cannot be used \(Resource temporarily"):
        DiskFolder(tmp_path)


def busy(*_: Any) -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


@needs_mount
def test_a_read_only_disk_is_refused(mounted: Callable[..., Path]) -> None:
    path = mounted("tmpfs", "ro")
    with pytest.raises(RuntimeError, match=rf"{path} cannot be used \(Read-only file system\)"):
        DiskFolder(path)


def test_a_folder_this_user_may_not_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # whom no mode stops
        fail(monkeypatch, "mkdir", errno.EACCES, lambda path, *_: "zeor-offload" in str(path))
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(RuntimeError, match=rf"{tmp_path} cannot be used \(Permission denied\)"):
        DiskFolder(tmp_path)


def test_closing_deletes_once_and_refuses_from_then_on(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path)
    array = folder.array("x", NUMEL, torch.float32)
    shared = array.tensor.fill_(3)
    folder.close()
    folder.close()
    assert os.listdir(tmp_path) == [] and shared.sum() == 3 * NUMEL
    uses: list[Callable[[], Any]] = [
        lambda: array.tensor,
        lambda: array.read(0, 1, torch.empty(1)),
        lambda: array.write_async(0, 1, torch.empty(1)),
        lambda: folder.array("y", 1, torch.float32),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_folder_goes_with_its_last_array(tmp_path: Path) -> None:
    folder: DiskFolder | None = DiskFolder(tmp_path)
    array: DiskArray | None = folder.array("x", NUMEL, torch.float32)
    folder = None
    gc.collect()
    array.write(0, NUMEL, torch.ones(NUMEL))
    assert array.tensor.sum() == NUMEL
    array = None
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_two_jobs_share_a_folder(tmp_path: Path) -> None:
    first = DiskFolder(tmp_path, job="a")
    one = first.array("x", NUMEL, torch.float32)
    one.tensor.fill_(1)
    with DiskFolder(tmp_path, job="a") as second:
        two = second.array("x", NUMEL, torch.float32)
        two.tensor.fill_(2)
        assert second.path != first.path and one.tensor.sum() == NUMEL and two.tensor.sum() == 2 * NUMEL
    assert one.tensor.sum() == NUMEL and os.listdir(tmp_path) == [first.path.name]
    first.close()
    assert os.listdir(tmp_path) == []


@pytest.fixture
def current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, without a word about folders from the environment."""
    monkeypatch.delenv("ZEOR_OFFLOAD_FOLDER", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_default_folder_goes_with_the_last_that_is_in_it(current: Path) -> None:
    first, second = DiskFolder("zeor-offload"), DiskFolder(current / "zeor-offload")
    first.close()
    assert os.listdir("zeor-offload") == [second.path.name]
    second.close()
    assert os.listdir(current) == []
    with DiskFolder("zeor-offload"):
        (current / "zeor-offload" / "notes").write_text("keep")
    assert os.listdir("zeor-offload") == ["notes"]


def test_a_folder_that_was_named_stays(current: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (current / "a", current / "b" / "zeor-offload"):
        path.parent.mkdir(exist_ok=True)
        DiskFolder(path).close()
        assert path.is_dir()
    monkeypatch.setenv("ZEOR_OFFLOAD_FOLDER", "c")
    DiskFolder(default_folder()).close()
    assert (current / "c").is_dir()


def test_a_folder_that_was_named_needs_no_current_directory(current: Path, tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    os.chdir(gone)
    gone.rmdir()
    with DiskFolder(tmp_path / "a") as folder:
        assert folder.array("x", 5, torch.float32).tensor.sum() == 0
    assert os.listdir(tmp_path / "a") == []


def test_the_default_folder_is_made_again_when_another_job_takes_it_away(
    current: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = os.mkdir, []

    def making(path: Any, *rest: Any, **named: Any) -> None:
        if "zeor-offload--" in str(path) and not taken:
            taken.append(path)
            os.rmdir(current / "zeor-offload")  # it was the last there
        real(path, *rest, **named)

    monkeypatch.setattr(os, "mkdir", making)
    with DiskFolder("zeor-offload") as folder:
        assert taken and os.listdir(current / "zeor-offload") == [folder.path.name] != [Path(taken[0]).name]


def test_a_folder_that_zeor_chose_is_told_once(
    current: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="zeor"):
        with DiskFolder(default_folder()) as folder:
            assert folder.folder == current / "zeor-offload"
            wanted = [f"offload=disk: state rests in {folder.path} until the run ends."]
        monkeypatch.setenv("ZEOR_OFFLOAD_FOLDER", str(current / "named"))
        with DiskFolder(default_folder()) as folder:
            wanted.append(f"offload=disk: state rests in {folder.path} until the run ends.")
        DiskFolder(current / "by hand").close()
    assert [record.getMessage() for record in caplog.records if "rests in" in record.getMessage()] == wanted


# ---- whose folder it is, and links


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To another user, or, for who may not do that, become another."""
    if os.geteuid() == 0:
        os.chown(path, 54321, -1, follow_symlinks=False)
    else:
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)


def test_a_default_folder_of_another_user_is_refused(current: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (current / "zeor-offload").mkdir()
    give_away(current / "zeor-offload", monkeypatch)
    with pytest.raises(RuntimeError, match=r"zeor-offload belongs to user \d+, not to this one .*choose folder="):
        DiskFolder(default_folder())
    assert os.listdir(current / "zeor-offload") == []


@pytest.mark.parametrize("leads", ["to a folder", "nowhere"])
def test_a_default_folder_that_is_a_link_is_refused(current: Path, leads: str) -> None:
    target = current / "elsewhere"
    if leads == "to a folder":
        target.mkdir()
        (target / "lock").write_text("private")
    (current / "zeor-offload").symlink_to(target)
    with pytest.raises(RuntimeError, match=r"zeor-offload is a link to .*elsewhere, which zeor does not follow"):
        DiskFolder(default_folder())
    assert os.path.islink("zeor-offload")
    assert sorted(target.glob("*")) == ([target / "lock"] if leads == "to a folder" else [])


def test_a_default_folder_is_for_this_user_alone(current: Path) -> None:
    with DiskFolder(default_folder()) as folder:
        modes = [path.stat().st_mode & 0o777 for path in (folder.folder, folder.path)]
        assert modes == [0o700, 0o700]


def test_a_folder_that_was_named_may_be_a_link_of_ones_own(current: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (current / "disk").mkdir()
    (current / "named").symlink_to(current / "disk")
    with DiskFolder(current / "named") as folder:
        folder.array("x", 5, torch.float32).tensor.fill_(2)
        assert os.listdir(current / "disk") == [folder.path.name]
    assert os.listdir(current / "disk") == []
    give_away(current / "named", monkeypatch)
    if os.geteuid() != 0 or os.lstat(current / "named").st_uid != 0:
        with pytest.raises(RuntimeError, match=r"named is a link that user \d+ has made, not this one"):
            DiskFolder(current / "named")
    assert os.listdir(current / "disk") == []


def test_a_folder_that_was_named_may_be_another_users(current: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scratch disk that all users share."""
    (current / "scratch").mkdir()
    give_away(current / "scratch", monkeypatch)
    with DiskFolder(current / "scratch") as folder:
        assert folder.array("x", 5, torch.float32).tensor.sum() == 0


def test_a_link_in_the_place_of_an_array_is_not_followed(folder: DiskFolder, tmp_path: Path) -> None:
    array = folder.array("x", NUMEL, torch.float32)
    private = tmp_path / "private"
    private.write_bytes(b"keep" * NUMEL)
    array.path.unlink()
    array.path.symlink_to(private)
    uses: list[Callable[[], Any]] = [
        lambda: array.write(0, NUMEL, aligned(NUMEL)),
        lambda: array.read(0, NUMEL, aligned(NUMEL)),
        lambda: array.tensor,
    ]
    for use in uses:
        with pytest.raises((RuntimeError, OSError), match="symbolic links"):
            use()
    assert private.read_bytes() == b"keep" * NUMEL


def test_links_in_the_place_of_the_sub_folder_lead_nowhere(folder: DiskFolder, tmp_path: Path) -> None:
    """Whoever owns the folder renames what is in it, and puts links to another's files there."""
    array = folder.array("x", NUMEL, torch.float32)
    private = tmp_path / "private"
    private.write_bytes(b"keep" * NUMEL)
    moved = tmp_path / "moved"
    folder.path.rename(moved)
    folder.path.mkdir()
    array.path.symlink_to(private)
    (folder.path / "1-y.array").symlink_to(private)
    array.write(0, NUMEL, torch.ones(NUMEL))
    array.tensor[0] = 5.0
    folder.array("y", NUMEL, torch.float32).tensor.fill_(7)
    assert array.tensor.sum() == NUMEL + 4 and sorted(os.listdir(moved)) == ["0-x.array", "1-y.array", "lock"]
    folder.close()
    assert private.read_bytes() == b"keep" * NUMEL and os.listdir(moved) == []
    assert sorted(os.listdir(folder.path)) == ["0-x.array", "1-y.array"]


def test_leftovers_of_another_user_and_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, linked = tmp_path / ("zeor-offload-a-" + "0" * 16), tmp_path / ("zeor-offload-a-" + "1" * 16)
    private = tmp_path / "private"
    for path in (theirs, private):
        path.mkdir()
        for file in ("lock", "0-x.array"):
            (path / file).write_text("1")
    linked.symlink_to(private)
    if os.geteuid() == 0:
        os.chown(theirs, 54321, -1)
    DiskFolder(tmp_path).close()
    assert sorted(os.listdir(private)) == ["0-x.array", "lock"] and linked.is_symlink()
    assert theirs.exists() == (os.geteuid() == 0)


# ---- a file that something else has shortened


def test_a_shortened_file_is_one_sentence(folder: DiskFolder) -> None:
    array = folder.array("x", NUMEL, torch.float32)
    rest = Rest(array.tensor, "disk", array)
    assert rest.tensor.sum() == 0 and torch.equal(rest.read(3, 9), torch.zeros(6))
    os.truncate(array.path, 4096)
    uses: list[Callable[[], Any]] = [
        lambda: array.tensor,
        array.check,
        lambda: rest.tensor,
        lambda: rest.read(0, NUMEL),
        lambda: array.read(0, NUMEL, aligned(NUMEL)),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"0-x\.array ends before byte 4097: something else has shortened it"):
            use()
    assert array.path.stat().st_size == 4096  # and nobody makes it longer, with zeros
    array.path.unlink()
    with pytest.raises(RuntimeError, match=r"0-x\.array could not be read .*No such file"):
        array.check()


JOB = """
import sys, torch
from zeor.tiers.files import DiskFolder
folder = DiskFolder(sys.argv[1])
folder.array("x", 1 << 16, torch.float32).tensor.fill_(1)
print(folder.path, flush=True)
if sys.argv[2] == "waits":
    sys.stdin.read()
"""


def start_job(folder: Path, how: str) -> tuple[subprocess.Popen[str], Path]:
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, folder, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    return job, Path(job.stdout.readline().strip())


def end_job(job: subprocess.Popen[str]) -> int:
    assert job.stdin is not None and job.stdout is not None
    job.stdin.close()
    job.stdout.close()
    return job.wait(timeout=60)


@pytest.mark.long
def test_a_killed_jobs_leftovers_go_with_the_next_and_a_living_ones_stay(tmp_path: Path) -> None:
    killed, left = start_job(tmp_path, "waits")
    living, used = start_job(tmp_path, "waits")
    killed.send_signal(signal.SIGKILL)
    assert end_job(killed) == -signal.SIGKILL
    assert sorted(os.listdir(left)) == ["0-x.array", "lock"]
    with DiskFolder(tmp_path) as folder:
        assert sorted(os.listdir(tmp_path)) == sorted([used.name, folder.path.name])
        assert sorted(os.listdir(used)) == ["0-x.array", "lock"]
    assert end_job(living) == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_a_job_that_ends_by_itself_leaves_nothing(tmp_path: Path) -> None:
    job, _ = start_job(tmp_path, "ends")
    assert end_job(job) == 0 and os.listdir(tmp_path) == []


def test_a_forked_child_that_ends_leaves_its_parents_folder(tmp_path: Path) -> None:
    with DiskFolder(tmp_path) as folder:
        array = folder.array("x", NUMEL, torch.float32)
        child = os.fork()
        if child == 0:
            folder.close()
            os._exit(0)
        os.waitpid(child, 0)
        array.write(0, NUMEL, torch.ones(NUMEL))
        with DiskFolder(tmp_path):  # and it is still held
            assert array.tensor.sum() == NUMEL


def test_only_what_is_ours_is_cleaned(tmp_path: Path) -> None:
    dead, foreign = "zeor-offload-a-" + "0" * 16, "zeor-offload-b-" + "1" * 16
    half = "zeor-offload--" + "2" * 16  # killed before it had a lock
    others = ["zeor-offload", "zeor-offload-notes", "zeor-offload-a-xyz", "data", "zeor-offload-a-" + "0" * 17]
    for name in [dead, foreign, *others]:
        (tmp_path / name).mkdir()
        for file in ("lock", "0-x.array"):
            (tmp_path / name / file).write_text("1")
    (tmp_path / foreign / "precious.txt").write_text("keep")
    (tmp_path / half).mkdir()
    outside = tmp_path / "data"
    (tmp_path / ("zeor-offload-a-" + "3" * 16)).symlink_to(outside)
    DiskFolder(tmp_path).close()
    assert not (tmp_path / dead).exists() and not (tmp_path / half).exists()
    assert (tmp_path / foreign / "precious.txt").read_text() == "keep"
    for name in others:
        assert sorted(os.listdir(tmp_path / name)) == ["0-x.array", "lock"]


def test_a_filesystem_without_locks_serves_and_nothing_is_cleaned_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ("zeor-offload-a-" + "0" * 16)
    left.mkdir()
    (left / "lock").write_text("")

    def refusing(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refusing)
    with DiskFolder(tmp_path) as folder:
        assert folder.array("x", 5, torch.float32).tensor.sum() == 0
    assert os.listdir(tmp_path) == [left.name]


def test_a_folder_taken_for_a_leftover_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job cleans between two steps of the making, after each of them once."""
    real_open, real_flock = os.open, fcntl.flock
    cleaned: list[str] = []

    def opening(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path) == "lock" and flags & os.O_CREAT and "mkdir" not in cleaned:
            cleaned.append("mkdir")
            os.rmdir(os.readlink(f"/proc/self/fd/{named['dir_fd']}"))
        return real_open(path, flags, *rest, **named)

    def locking(descriptor: int, how: int) -> None:
        real_flock(descriptor, how)
        if "lock" not in cleaned:
            cleaned.append("lock")
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            path.unlink()
            path.parent.rmdir()

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr("fcntl.flock", locking)
    with DiskFolder(tmp_path) as folder:
        assert cleaned == ["mkdir", "lock"]
        assert os.listdir(tmp_path) == [folder.path.name] and os.listdir(folder.path) == ["lock"]


def test_what_is_free_is_told_for_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    there = os.statvfs(tmp_path)
    for path in (tmp_path, tmp_path / "a" / "b"):
        assert abs(free_disk_nbytes(path) - there.f_bavail * there.f_frsize) < 1 << 30
