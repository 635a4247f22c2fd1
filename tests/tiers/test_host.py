"""The host tier's memory: zeros that begin at a page, nothing rounded up, pinned and unpinned in the right order."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from pathlib import Path

import pytest
import torch

from zeor.memory import device
from zeor.memory.pages import PAGE_NBYTES
from zeor.tiers import host
from zeor.tiers.host import HostArena, free_host_nbytes, room_nbytes

DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.int8, torch.uint8, torch.float64]


class Driver:
    """Stands in for an accelerator's driver: what is registered, and whether it was still mapped when unregistered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses_after: int = 1 << 30) -> None:
        self.registered: dict[int, int] = {}
        self.left = refuses_after
        monkeypatch.setattr(device, "pin", self.pin)
        monkeypatch.setattr(device, "unpin", self.unpin)

    def pin(self, tensor: torch.Tensor) -> str | None:
        if self.left == 0:
            return "out of memory"
        self.left -= 1
        assert tensor.data_ptr() % PAGE_NBYTES == 0 and tensor.nbytes % PAGE_NBYTES == 0
        assert tensor.data_ptr() not in self.registered
        self.registered[tensor.data_ptr()] = tensor.nbytes
        return None

    def unpin(self, tensor: torch.Tensor) -> None:
        assert is_mapped(tensor.data_ptr(), tensor.nbytes)
        assert self.registered.pop(tensor.data_ptr()) == tensor.nbytes


def is_mapped(address: int, nbytes: int) -> bool:
    """By the system's own list; neighbouring maps may stand there as one or as several."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= address < end:
            nbytes -= end - address
            address = end
    return nbytes <= 0


@pytest.mark.parametrize("is_reserved", [False, True])
def test_tensors_are_zero_begin_at_a_page_and_do_not_overlap(is_reserved: bool) -> None:
    arena = HostArena(pin=False)
    sizes = [1, 5, 4096, 100_003, 3_000_000]
    if is_reserved:
        arena.reserve(sum(room_nbytes(numel, dtype) for numel in sizes for dtype in DTYPES))
    taken = [arena.take(numel, dtype) for numel in sizes for dtype in DTYPES]
    for number, tensor in enumerate(taken):
        assert tensor.data_ptr() % PAGE_NBYTES == 0 and tensor.dim() == 1 and tensor.is_contiguous()
        assert not tensor.any()
        tensor.fill_(number + 1)
    assert [tensor.dtype for tensor in taken] == DTYPES * len(sizes)
    assert [tensor.numel() for tensor in taken] == [numel for numel in sizes for _ in DTYPES]
    for number, tensor in enumerate(taken):
        assert (tensor == number + 1).all()


def test_less_than_a_page_is_lost_per_tensor_at_any_size() -> None:
    arena = HostArena(pin=False)
    tensors = [arena.take(numel, torch.float32) for numel in (1, 1025, 2**20 + 1, 9_000_001)]
    wanted = sum(tensor.nbytes for tensor in tensors)
    assert wanted <= arena.nbytes < wanted + len(tensors) * PAGE_NBYTES
    assert arena.nbytes == sum(room_nbytes(tensor.numel(), tensor.dtype) for tensor in tensors)


def test_what_was_reserved_is_cut_and_more_is_added_where_it_does_not_suffice() -> None:
    arena = HostArena(pin=False)
    arena.reserve(10 * PAGE_NBYTES - 1)
    assert arena.nbytes == 10 * PAGE_NBYTES
    first, second = arena.take(4 * PAGE_NBYTES, torch.uint8), arena.take(6 * PAGE_NBYTES, torch.uint8)
    assert second.data_ptr() == first.data_ptr() + 4 * PAGE_NBYTES and arena.nbytes == 10 * PAGE_NBYTES
    arena.take(1, torch.uint8)
    third = arena.take(1, torch.uint8)
    assert third.numel() == 1 and arena.nbytes == 11 * PAGE_NBYTES


def test_an_empty_tensor_takes_nothing_and_a_negative_size_is_refused() -> None:
    arena = HostArena(pin=False)
    assert arena.take(0, torch.bfloat16).shape == (0,) and arena.nbytes == 0
    with pytest.raises(ValueError, match="-1 elements"):
        arena.take(-1, torch.bfloat16)


def test_memory_comes_back_when_its_last_tensor_is_gone() -> None:
    arena = HostArena(pin=False)
    tensor = arena.take(1 << 20, torch.float32)
    address, view = tensor.data_ptr(), tensor[5:10]
    del tensor
    gc.collect()
    assert arena.nbytes == 4 << 20 and (view == 0).all()
    del view
    gc.collect()
    assert arena.nbytes == 0 and not is_mapped(address, 4 << 20)


def test_tensors_outlive_their_arena() -> None:
    arena = HostArena(pin=False)
    arena.reserve(1 << 16)
    tensor = arena.take(1000, torch.int32)
    del arena
    gc.collect()
    tensor += 7
    assert tensor.sum() == 7000


# ---- pinning


def test_a_reserve_is_pinned_as_one_and_unpinned_by_close_while_still_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, arena = Driver(monkeypatch), HostArena(pin=True)
    arena.reserve(5_000_000)
    tensors = [arena.take(1000, torch.float32) for _ in range(100)]
    assert arena.pinned and list(driver.registered.values()) == [room_nbytes(5_000_000, torch.uint8)]
    big = arena.take(5_000_000, torch.float32)
    assert driver.registered[big.data_ptr()] == room_nbytes(5_000_000, torch.float32)
    arena.close()
    arena.close()
    assert not driver.registered
    tensors[3].fill_(2)
    assert tensors[3].sum() == 2000 and big.sum() == 0
    with pytest.raises(RuntimeError, match="closed"):
        arena.take(1, torch.float32)


def test_memory_that_is_dropped_is_unpinned_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, arena = Driver(monkeypatch), HostArena(pin=True)
    kept, dropped = arena.take(3_000_000, torch.float32), arena.take(10, torch.float32)
    address = dropped.data_ptr()
    del dropped
    gc.collect()
    assert list(driver.registered) == [kept.data_ptr()] and not is_mapped(address, 1)
    del arena  # without close: the tensor keeps what it needs
    gc.collect()
    assert list(driver.registered) == [kept.data_ptr()]
    del kept
    gc.collect()
    assert not driver.registered


def test_a_refused_pin_warns_once_and_plain_memory_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, arena = Driver(monkeypatch, refuses_after=1), HostArena(pin=True)
    with caplog.at_level(logging.WARNING, logger="zeor"):
        tensors = [arena.take(5000, torch.float32) for _ in range(4)]
    assert not arena.pinned and list(driver.registered) == [tensors[0].data_ptr()]
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "zeor: host memory could not be pinned (out of memory, 0.00 GiB)"
    ]
    assert all(tensor.fill_(1).sum() == 5000 for tensor in tensors)
    arena.close()
    assert not driver.registered


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_nothing_is_pinned_and_it_says_why() -> None:
    assert device.pin(torch.zeros(8)) == "there is no accelerator"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_neither_unpins_nor_unmaps_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, arena = Driver(monkeypatch), HostArena(pin=True)
    holder = [arena.take(1 << 20, torch.float32)]
    address = holder[0].data_ptr()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            absent = not is_mapped(address, 4 << 20)
            holder.clear()
            gc.collect()
            arena.close()
            code = 0 if absent and list(driver.registered) == [address] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert holder[0].sum() == 0 and list(driver.registered) == [address]


@pytest.mark.gpu
def test_registered_memory_is_pinned_copies_asynchronously_and_a_second_registration_is_refused() -> None:
    with contextlib.closing(HostArena(pin=True)) as arena:
        tensor = arena.take(3_000_001, torch.float32)
        assert arena.pinned and tensor.is_pinned() and tensor[1_000_000:].is_pinned()
        there = torch.arange(3_000_001, dtype=torch.float32, device="cuda")
        tensor.copy_(there, non_blocking=True)
        torch.accelerator.synchronize()
        assert torch.equal(tensor, there.cpu())
        assert "already" in str(device.pin(tensor))
        assert (torch.ones(4, device="cuda") + 1).sum() == 8  # the refusal is not found by a later launch
    assert not tensor.is_pinned()
    assert torch.equal(tensor, there.cpu())


# ---- how much there is


def system(monkeypatch: pytest.MonkeyPatch, root: Path, files: dict[str, str]) -> None:
    """A machine that has just these files below /proc and /sys/fs/cgroup."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(host, "_PROC", root / "proc")
    monkeypatch.setattr(host, "_CGROUP", root / "cgroup")


MEMINFO = {"proc/meminfo": "MemTotal:  64 kB\nMemFree:  8 kB\nMemAvailable:  40 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 40 << 10),
        ({**MEMINFO, "cgroup/memory.max": "max\n", "cgroup/memory.current": "5\n"}, 40 << 10),
        ({**MEMINFO, "cgroup/memory.max": "9000\n", "cgroup/memory.current": "5000\n"}, 4000),
        (
            {**MEMINFO, "cgroup/memory.max": "9000", "cgroup/memory.current": "5000",
             "cgroup/memory.stat": "anon 3\ninactive_file 700\nactive_file 9\n"}, 4709,
        ),
        ({**MEMINFO, "cgroup/memory.max": "9000", "cgroup/memory.current": "9500"}, 0),
        (
            {**MEMINFO, "proc/self/cgroup": "0::/jobs/7/step\n", "cgroup/jobs/7/memory.max": "3000",
             "cgroup/jobs/7/memory.current": "1000", "cgroup/jobs/memory.max": "max",
             "cgroup/jobs/memory.current": "0"}, 2000,
        ),
        (
            {**MEMINFO, "proc/self/cgroup": "5:cpu,memory:/a\n", "cgroup/memory/a/memory.limit_in_bytes": "600",
             "cgroup/memory/a/memory.usage_in_bytes": "100", "cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
             "cgroup/memory/memory.usage_in_bytes": "50"}, 500,
        ),
    ],
    ids=["nothing known", "no limit", "max", "limit", "cached files", "beyond", "outer group", "version 1"],
)  # fmt: skip
def test_what_is_free_is_the_least_of_system_and_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    system(monkeypatch, tmp_path, files)
    assert free_host_nbytes() == expected


def test_what_is_free_here_is_a_sensible_number() -> None:
    free_nbytes = free_host_nbytes()
    assert free_nbytes is not None
    assert 1 << 20 < free_nbytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_too_much_is_refused_with_the_numbers_and_before_anything_is_taken() -> None:
    arena = HostArena(pin=False)
    sentence = r"4194304\.00 GiB are needed at once, \d+\.\d\d GiB can be had.*host_budget"
    for attempt in (lambda: arena.take(2**50, torch.float32), lambda: arena.reserve(2**52)):
        with pytest.raises(RuntimeError, match=sentence):
            attempt()
    assert arena.nbytes == 0
    assert arena.take(10, torch.float32).sum() == 0


def test_a_map_the_system_refuses_gives_the_same_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system(monkeypatch, tmp_path, {})
    with pytest.raises(RuntimeError, match=r"an unknown amount can be had \(.*\); keep more"):
        HostArena(pin=False).take(2**60, torch.uint8)
