"""offload="auto": the device is filled first, then the host, then the disk; what cannot work is refused; and lanes move
once where more is used than was expected. None of it changes a bit."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zeor
from zeor.access.sharded import state_of
from zeor.optim.streaming import auto as automatic
from zeor.optim.streaming.auto import Room, choose
from zeor.spec import places
from zeor.tiers import host

CHUNK = 256


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40)) for _ in range(6)])


def train(offload=None, steps=4, **options):
    """(parameters, tiers of the lanes' moments) after some steps."""
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    made, optimizer = zeor.shard(made, optimizer, precision="bf16", offload=offload, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        made(torch.randn(4, 40, generator=generator)).square().mean().backward()
        if not options.get("release"):
            torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with zeor.full_params(made):
        values = [param.detach().clone() for param in made.parameters()]
    lanes = [lane for unit in state_of(made).engine.units for lane in unit.lanes]
    return values, [lane.rest.tiers.moments for lane in lanes]


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@given(
    needs=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    shares=st.tuples(*[st.floats(0, 1)] * 3),
    spread=st.booleans(),
)
def test_a_choice_fits_its_room_and_prefers_the_device(needs, shares, spread):
    total, largest = sum(needs), max(needs)
    room = Room(int(shares[0] * total), int(shares[1] * total), total)
    tiers = choose(needs, room, spread)
    held = {tier: sum(n for n, t in zip(needs, tiers) if t == tier) for tier in Room._fields}
    assert all(held[tier] <= nbytes for tier, nbytes in room._asdict().items())
    assert held["device"] == total or held["device"] > room.device - largest
    assert not held["disk"] or held["host"] > room.host - largest


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"takes 3.0 GiB on this rank, but there is room for 1.0 GiB on the device"):
        choose([1 << 30] * 3, Room(1 << 30, 1 << 30, 0), spread=False)


def test_what_travels_is_last_in_forward_or_spread_over_backward():
    room = Room(4, 2, 4)
    assert choose([1] * 9, room, spread=False) == ["device"] * 4 + ["host"] * 2 + ["disk"] * 3
    assert choose([1] * 8, Room(4, 4, 0), spread=True) == ["device", "host"] * 4


def test_without_a_budget_a_cpu_keeps_everything(monkeypatch):
    values, tiers = train("auto")
    assert set(tiers) == {"device"}
    assert same(values, train()[0])


@pytest.mark.parametrize("release", [False, True])
def test_the_device_is_filled_first_then_the_host_then_the_disk(release, tmp_path):
    reference = train(release=release)[0]
    params = sum(p.numel() for p in model().parameters())
    fixed = params * (2 if release else 4)  # compute, and gradients that wait for the step
    window = 3 * CHUNK * 10
    half = fixed + window + 5 * params  # and half of the state, of 10 bytes for each parameter
    values, tiers = train(zeor.Offload(auto=True, device_budget=half, chunk=CHUNK), release=release)
    assert tiers.count("device") == tiers.count("host") == 3
    spread = tiers[0] != tiers[1] or tiers[1] != tiers[2]
    assert spread == release  # else those that forward comes to last are away
    assert same(values, reference)
    spare = zeor.Offload(auto=True, device_budget=half, host_budget=2 * params, folder=str(tmp_path), chunk=CHUNK)
    values, tiers = train(spare, release=release)
    assert (tiers.count("device"), tiers.count("host"), tiers.count("disk")) == (3, 1, 2)
    assert same(values, reference)


def test_a_budget_that_cannot_work_is_refused_before_anything_is_allocated():
    params = sum(p.numel() for p in model().parameters())
    with pytest.raises(ValueError, match="Compute and gradients alone take"):
        train(zeor.Offload(auto=True, device_budget=3 * params, chunk=CHUNK))
    with pytest.raises(ValueError, match="The optimizer's state takes"):
        train(zeor.Offload(auto=True, device_budget=5 * params, host_budget=1000, chunk=CHUNK))


def test_what_turns_out_not_to_fit_goes_to_the_host(monkeypatch):
    params = sum(p.numel() for p in model().parameters())

    class Memory(automatic.DeviceMemory):
        def total_nbytes(self):
            return 40 * params

        def room_for(self, sizes):
            return [number % 3 != 1 for number, _ in enumerate(sizes)]

    monkeypatch.setattr(automatic, "DeviceMemory", Memory)
    values, tiers = train(zeor.Offload(auto=True, chunk=CHUNK))
    assert tiers == ["device", "host", "device"] * 2
    assert same(values, train()[0])


def test_remainders_that_began_on_the_host_do_not_count_twice(monkeypatch):
    """Where the device is too crowded for a first step they rest there already, and that memory is no longer free."""
    params = sum(p.numel() for p in model().parameters())

    class Memory(automatic.DeviceMemory):
        def total_nbytes(self):
            return 8 * params

        def room_for(self, sizes):
            return [True for _ in sizes]

    monkeypatch.setattr(automatic, "DeviceMemory", Memory)
    monkeypatch.setattr(places, "DeviceMemory", Memory)
    monkeypatch.setattr(automatic, "free_host_nbytes", lambda: 5 * params)  # 10 of state, 3.5 of room on the device
    values, tiers = train(zeor.Offload(auto=True, chunk=CHUNK))
    assert set(tiers) == {"device", "host"}
    assert same(values, train()[0])
    with pytest.raises(ValueError, match="The optimizer's state takes"):
        train(zeor.Offload(auto=True, chunk=CHUNK, host_budget=5 * params))  # of which the remainders are two


def test_what_leaves_the_device_does_so_before_the_rest_is_tried(monkeypatch):
    """Else remainders on their way to the host would count against what stays."""
    params = sum(p.numel() for p in model().parameters())
    seen = []

    class Memory(automatic.DeviceMemory):
        def total_nbytes(self):
            return 10 * params

        def room_for(self, sizes):
            seen.extend(lane.master.remainder.tier for lane in deciding[0]._lanes)
            return [True for _ in sizes]

    deciding = []
    decide = automatic.Auto._decide
    monkeypatch.setattr(automatic.Auto, "_decide", lambda self: (deciding.append(self), decide(self))[1])
    monkeypatch.setattr(automatic, "DeviceMemory", Memory)
    values, tiers = train(zeor.Offload(auto=True, chunk=CHUNK))
    assert seen == tiers and set(tiers) == {"device", "host"}
    assert same(values, train()[0])


def test_what_fits_nowhere_after_all_is_said(monkeypatch):
    params = sum(p.numel() for p in model().parameters())

    class Memory(automatic.DeviceMemory):
        def total_nbytes(self):
            return 40 * params

        def room_for(self, sizes):
            return [False for _ in sizes]

    monkeypatch.setattr(automatic, "DeviceMemory", Memory)
    with pytest.raises(ValueError, match="state that should have fitted there, and the host and the disk are full"):
        train(zeor.Offload(auto=True, host_budget=5 * params, chunk=CHUNK))


@pytest.mark.parametrize("what", ["peak", "failure"])
def test_lanes_move_once_where_more_is_used_than_was_expected(what, monkeypatch):
    """The device's memory is a stand-in: on this host nobody knows what is used."""
    params = sum(p.numel() for p in model().parameters())
    budget = 40 * params

    class Memory(automatic.DeviceMemory):
        step = 0

        def total_nbytes(self):
            return budget

        def limit(self, nbytes):
            pass

        def peak_nbytes(self):
            return budget + 2 * params if what == "peak" and Memory.step >= 2 else 5 * params

        def failures(self):
            return int(what == "failure" and Memory.step >= 2)

    after_step = automatic.Auto.after_step

    def counted(self):
        Memory.step += 1
        after_step(self)

    monkeypatch.setattr(automatic, "DeviceMemory", Memory)
    monkeypatch.setattr(automatic.Auto, "after_step", counted)
    values, tiers = train(zeor.Offload(auto=True, device_budget=budget, chunk=CHUNK), steps=5)
    assert 1 <= tiers.count("host") < 6
    assert same(values, train(steps=5)[0])


def test_ranks_of_one_host_share_its_memory_and_refuse_together(ranks):
    def job(free: list[int], message: str) -> list[str]:
        automatic.free_host_nbytes = lambda: free[dist.get_rank()]
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        try:
            _, tiers = train(zeor.Offload(auto=True, device_budget=75_000, chunk=CHUNK), steps=2)
        except ValueError as error:
            assert message in str(error)
            return []
        finally:
            automatic.free_host_nbytes = host.free_host_nbytes
        return tiers

    params = sum(p.numel() for p in model().parameters())
    need = 10 * params  # of state, both ranks together
    message = "The optimizer's state takes"
    assert all("host" in tiers for tiers in ranks(job, 2, [int(1.2 * need)] * 2, ""))
    assert ranks(job, 2, [int(0.7 * need)] * 2, message) == [[], []]  # each alone would have had room
    assert ranks(job, 2, [int(1.2 * need), 100], message) == [[], []]  # and nobody waits for the other


def test_a_folder_that_is_still_to_be_made(tmp_path):
    params = sum(p.numel() for p in model().parameters())
    spare = zeor.Offload(auto=True, device_budget=8 * params, host_budget=1, folder=str(tmp_path / "new"), chunk=CHUNK)
    values, tiers = train(spare)
    assert "disk" in tiers and same(values, train()[0])


def test_windows_are_no_larger_than_what_passes_through():
    assert "device" in train(zeor.Offload(auto=True, device_budget="100MiB"))[1]


def test_a_master_that_is_kept_whole_stays_and_counts():
    made = model()
    params = sum(p.numel() for p in made.parameters())
    budget = 14 * params + 3 * CHUNK * 10  # compute, gradients, master: 8 or 10, of 8 more some
    offload = zeor.Offload(auto=True, device_budget=budget, chunk=CHUNK)
    made, optimizer = zeor.shard(made, torch.optim.AdamW(made.parameters()), precision="fp16", offload=offload)
    made(torch.ones(2, 40)).square().mean().backward()
    optimizer.step()
    lanes = [lane for unit in state_of(made).engine.units for lane in unit.lanes]
    assert {lane.rest.tiers.master for lane in lanes} == {"device"} == {lane.master.own.tier for lane in lanes}
    assert {lane.rest.tiers.moments for lane in lanes} == {"device", "host"}
    few = zeor.Offload(auto=True, device_budget=8 * params, chunk=CHUNK)
    other = model()
    with pytest.raises(ValueError, match="Compute and gradients alone take"):
        zeor.shard(other, torch.optim.AdamW(other.parameters()), precision="fp16", offload=few)
