"""State that is fetched while the last backward goes on: the bits of a run without offload whatever happens between
that backward and the step, what was begun when, and never more memory than a step has used before.

On a host a fetch is a copy that is made at once, so a copy that is used though it is stale shows in the bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zeor
from tests import offloads
from tests.offloads import CHUNK, adamw, left, loss_of, made, same
from zeor import Offload
from zeor.access.sharded import state_of
from zeor.comm.observe import ACTION
from zeor.optim.streaming import spare_room
from zeor.optim.streaming.ahead import Ahead
from zeor.optim.streaming.spare_room import SLACK_NBYTES, SpareRoom

ALL = "1GiB"


def ahead_of(model: nn.Module) -> Ahead:
    return state_of(model).steppers[0].streaming.ahead


def spares(model: nn.Module) -> int:
    """Windows beside the three."""
    return ahead_of(model)._windows.spares


def hosted(ahead: Any = ALL, **more: Any) -> Offload:
    return Offload(chunk=CHUNK, ahead=ahead, **more)


def backwards(model: nn.Module, step: int, count: int, how: str = "plain") -> None:
    """The micro-batches of a step."""
    first = {"no_sync": zeor.no_sync, "accumulate": zeor.accumulate}.get(how)
    for part in range(count):
        waits = first is not None and part + 1 < count
        with first(model) if waits else contextlib.nullcontext():
            loss_of(model, 100 * part + step).backward()


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


# ---- bits


def trained(offload: Offload | None, how: str, **options: Any) -> tuple[dict[str, Any], list[int]]:
    """What a run leaves, and how many windows were filled when each step's last backward was over."""
    model, (optimizer,) = made(offload=offload, **options)
    seen = []
    for step in range(4):
        backwards(model, step, 2, how)
        seen.append(0 if offload is None else spares(model))
        clipped_step(model, optimizer)
    return left(model), seen


ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 3, "precision": "bf16"}, {}),
    ({"stage": 2, "precision": "bf16", "moments": "int8"}, {"grads": "host"}),
    ({"stage": 3, "precision": None}, {"compute": "host"}),
    ({"stage": 1, "precision": "fp16"}, {}),
]


def check_bits(rows: int) -> list[list[int]]:
    found = []
    for number, (options, places) in enumerate(ROWS[:rows]):
        for how in ("plain", "no_sync", "accumulate") if number == 0 else ("plain",):
            got, seen = trained(hosted(**places), how, **options)
            same(got, trained(None, how, **options)[0], (options, how))
            found.append(seen)
    return found


@pytest.mark.parametrize(("world", "rows"), [(1, 1), (2, 4)])
def test_state_that_is_fetched_ahead_changes_no_bit(ranks, world, rows):
    for found in ranks(check_bits, world, rows):
        assert len(found) == rows + 2
        for seen in found:  # two steps have shown how many backwards there are, what updates read, and windows' size
            assert seen[:2] == [0, 0] and seen[2] == seen[3] > 2


# ---- whatever comes between the last backward and the step


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    pass


def writes_into_state(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    """By tensors that a state dict of an earlier step has given: they are the memory that state rests in."""
    for entry in kept["state"].values():
        entry["exp_avg"].mul_(0.5)


def loads_state(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    found = optimizer.state_dict()
    for entry in found["state"].values():
        entry["exp_avg_sq"] = entry["exp_avg_sq"] * 2
    optimizer.load_state_dict(found)


def reads_everything(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    left(model)


def writes_weights(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    with zeor.full_params(model, write=True), torch.no_grad():
        model.head.weight.mul_(1.5)


def drops_a_gradient(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    for param in model.blocks[1].parameters():
        param.grad = None
    model.head.weight.grad = None


def drops_all(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    optimizer.zero_grad()


def evaluates(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    with torch.no_grad():
        loss_of(model, 77)


def goes_on(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    """The guess was wrong."""
    backwards(model, 55, 1)


def is_not_finite(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    """The step is skipped."""
    (loss_of(model, 66) * float("inf")).backward()


def changes_groups(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.state.clear()


def fails(model: nn.Module, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    """A backward that raises takes all gradients with it."""
    loss = loss_of(model, 88)

    def hook(grad: torch.Tensor) -> None:
        raise KeyError("on purpose")

    model_input = model.blocks[0].register_full_backward_hook(lambda *_: hook(loss))
    with pytest.raises(KeyError):
        loss_of(model, 89).backward()
    model_input.remove()
    with pytest.warns(UserWarning, match="all gradients were set to None"):
        backwards(model, 90, 1)


BETWEEN = (
    nothing, writes_into_state, loads_state, reads_everything, writes_weights, drops_a_gradient, drops_all, evaluates,
    goes_on, is_not_finite, changes_groups, fails,
)  # fmt: skip


def interrupted(between: Callable[..., None], offload: Offload | None) -> tuple[dict[str, Any], list[int]]:
    """Steps of two backwards, with something before the third one's step(); windows that are filled before it and that
    are in use after it."""
    model, (optimizer,) = made(stage=3, precision="bf16", nonfinite="skip", offload=offload)
    kept: dict[str, Any] = {}
    seen = []
    for step in range(4):
        backwards(model, step, 2)
        if step == 2:
            seen.append(0 if offload is None else spares(model))
            between(model, optimizer, kept)
        clipped_step(model, optimizer)
        if step == 1:
            kept = optimizer.state_dict()
        if step == 2:
            seen.append(0 if offload is None else spares(model))
    return left(model), seen


def check_between() -> list[list[int]]:
    found = []
    for between in BETWEEN:
        got, seen = interrupted(between, hosted())
        same(got, interrupted(between, None)[0], between.__name__)
        found.append(seen)
    return found


def test_what_comes_before_step_finds_state_as_it_is(ranks):
    for found in ranks(check_between, 2):
        assert all(filled > 2 for filled, _ in found)
        go_round = {nothing, writes_into_state, writes_weights, drops_a_gradient, drops_all}  # else all is given back
        assert [used > 0 for _, used in found] == [between in go_round for between in BETWEEN]


# ---- what is begun when


def moved(records: list[Any]) -> list[tuple[str, str, int]]:
    found = [each for each in records if each.kind == ACTION and each.verb in ("fetch", "update", "spill")]
    return [(each.verb, each.unit, each.nbytes) for each in found]


def observed(ahead: Any, **places: Any) -> dict[str, Any]:
    """The third step: what moves before step() and in it; how many windows were filled, and how many of them used; the
    windows that are left, and the bytes of them that the ledger has, after step() and after the next backward."""
    model, (optimizer,) = made(stage=3, precision="bf16", offload=hosted(ahead, **places))
    for step in range(2):
        backwards(model, step, 2)
        clipped_step(model, optimizer)
    engine, windows = state_of(model).engine, state_of(model).steppers[0].streaming._windows
    choose, used = windows._window_for, []

    def chosen(chunk: Any) -> Any:
        window = choose(chunk)
        used.append(window.arrived is not None)
        return window

    windows._window_for = chosen
    with engine.observer.listening(torch.device("cpu")) as records:
        backwards(model, 2, 2)
        before = moved(records)
        filled = 0 if ahead is None else spares(model)
        assert not used
        clipped_step(model, optimizer)
        after = moved(records)[len(before) :]
    left_over = []
    for part in range(2):
        if part:
            loss_of(model, 3).backward()
        left_over.append((0 if ahead is None else spares(model), engine.ledger.live.get("ahead", 0)))
    return {"before": before, "used": sum(used), "filled": filled, "after": after, "left": left_over}


def test_fetches_begin_in_the_last_backward_and_windows_leave_after_the_next(ranks):
    [plain], [some], [whole] = (ranks(observed, 1, ahead) for ahead in (None, "60KiB", ALL))
    assert plain["before"] == [] and plain["left"] == [(0, 0)] * 2
    order = list(dict.fromkeys(unit for verb, unit, _ in plain["after"] if verb == "update"))
    window = 3 * 4096 + 4096  # the remainder and two moments of a chunk, in whole pages, and a page to begin at
    for found in (some, whole):
        assert {verb for verb, *_ in found["before"]} == {"fetch"}
        units = list(dict.fromkeys(unit for _, unit, _ in found["before"]))
        assert units == order[: len(units)], "in the order of forward"
        assert len(found["before"]) == found["filled"] == found["used"]
        for verb in ("update", "spill"):
            assert [each for each in found["after"] if each[0] == verb] == [
                each for each in plain["after"] if each[0] == verb
            ]
        fetched = [sum(n for verb, _, n in each if verb == "fetch") for each in (found["before"], found["after"])]
        assert sum(fetched) == sum(n for verb, _, n in plain["after"] if verb == "fetch")
        assert found["left"] == [(found["filled"], found["filled"] * window), (0, 0)]
    assert some["filled"] == (60 << 10) // window < whole["filled"]
    [beside] = ranks(functools.partial(observed, grads="host"), 1, ALL)  # gradients are written beside state meanwhile
    assert beside["filled"] == beside["used"] == whole["filled"]


def check_guesses() -> list[int]:
    """Windows that are filled after each backward, of steps that have 2, 2, 2, 3, 1, 1 and 2 backwards."""
    model, (optimizer,) = made(stage=3, precision="bf16", offload=hosted())
    seen = []
    for step, count in enumerate((2, 2, 2, 3, 1, 1, 2)):
        for part in range(count):
            loss_of(model, 100 * part + step).backward()
            seen.append(int(ahead_of(model)._windows.waits_for_update))
        clipped_step(model, optimizer)
    return seen


def test_the_last_backward_is_the_one_with_the_number_of_the_last_step(ranks):
    assert ranks(check_guesses, 1) == [[0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0]]


def check_shrinking(what: str) -> list[int]:
    """Windows after the last backward and after step(), and how often room was asked for, in a step in which there is
    room at two moments and none then, or memory runs out at the third window."""
    model, (optimizer,) = made(stage=3, precision="bf16", offload=hosted())
    for step in range(2):
        backwards(model, step, 2)
        clipped_step(model, optimizer)
    ahead, asked, seen = ahead_of(model), [], []
    fetch, windows = ahead._windows.fetch_ahead, ahead._windows

    def moment(fixed: int) -> int:
        asked.append(fixed)
        return 3 * windows.window_nbytes if len(asked) < 3 or what == "no block" else 0

    def fails(chunk: Any) -> None:
        if windows.spares == 2:
            raise torch.OutOfMemoryError("on purpose")
        fetch(chunk)

    ahead._room.moment = moment
    if what == "no block":
        windows.fetch_ahead = fails
    backwards(model, 2, 2)
    seen.append(windows.spares)
    clipped_step(model, optimizer)
    wanted, (other,) = made(stage=3, precision="bf16")
    for step in range(3):
        backwards(wanted, step, 2)
        clipped_step(wanted, other)
    seen.append(windows.spares)
    same(left(model), left(wanted))
    return [*seen, len(asked)]


def test_where_there_is_no_room_after_all_windows_go_or_stay_few(ranks):
    assert ranks(check_shrinking, 1, "room goes") == [[0, 0, 3]], "and nobody asks again"
    [(filled, after, asked)] = ranks(check_shrinking, 1, "no block")
    assert filled == after == 2 and asked > 3


# ---- how much


class Memory(spare_room.DeviceMemory):
    """Of a device with 1,000 units of SLACK_NBYTES; what is in use, and peaks to come, are the test's."""

    used = 0
    most = 900
    peaks: tuple[int, ...] = ()
    ooms = 0

    def total_nbytes(self) -> int:
        return 1000 * SLACK_NBYTES

    def used_nbytes(self) -> int:
        return Memory.used * SLACK_NBYTES

    def peak_nbytes(self) -> int:
        return Memory.most * SLACK_NBYTES

    def reset_peak(self) -> int:
        first, Memory.peaks = (*Memory.peaks, 0)[0], Memory.peaks[1:]
        return first * SLACK_NBYTES

    def failures(self) -> int:
        return Memory.ooms


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SpareRoom]]:
    monkeypatch.setattr(spare_room, "DeviceMemory", Memory)
    monkeypatch.setattr(spare_room, "SETTLES", 0)
    monkeypatch.setattr(SpareRoom, "_all", set())
    Memory.used, Memory.most, Memory.peaks, Memory.ooms = 0, 900, (), 0
    yield lambda most=None, budget=None: SpareRoom(torch.device("cpu"), most, budget)


def backward_of(room: SpareRoom, used: tuple[int, ...] = (800, 700, 600), fixed: int = 0) -> list[int]:
    """What may be taken from each moment on, in units."""
    found = []
    for each in used:
        Memory.used = each
        found.append(room.moment(fixed * SLACK_NBYTES) // SLACK_NBYTES)
    return found


def measured(room: SpareRoom, numel: int = 8) -> SpareRoom:
    """Peaks of 880, 820 and 720 before its three moments, and 650 from there to the end."""
    Memory.peaks = (0, 880, 820, 720, 650)
    room.begin(2)
    assert backward_of(room) == [0, 0, 0], "nothing is known yet"
    assert not room.saw(numel)
    room.end(whole=True)
    return room


def test_from_each_moment_what_the_peaks_that_follow_leave(room):
    found = measured(room())
    found.begin(2)
    assert backward_of(found) == [900 - 820, 900 - 720, 900 - 650], "the run's own peak is not raised"
    assert found.moment(0) == 0, "of a moment that was not measured nobody knows"
    found.begin(2)
    assert backward_of(found, fixed=100) == [0, 80, 150]
    found.taken_nbytes = 50 * SLACK_NBYTES
    other = measured(room())
    other.begin(2)
    assert backward_of(other) == [30, 130, 200], "what another optimizer has taken counts"
    Memory.most = 5000  # before it was sharded, say
    for budget, limit in ((None, 980), (950 * SLACK_NBYTES, 931)):
        small = measured(room(budget=budget))
        SpareRoom._all = {small}
        small.begin(2)
        assert backward_of(small) == [limit - 820, limit - 720, limit - 650]


def test_it_is_measured_when_recomputation_has_settled(room, monkeypatch):
    monkeypatch.setattr(spare_room, "SETTLES", 2)
    found = room()
    for _ in range(2):
        found.begin(2)
        assert backward_of(found) == [0, 0, 0]
        found.end(whole=True)
    measured(found).begin(2)
    assert backward_of(found) == [80, 180, 250]


def test_the_plan_may_allow_less(room):
    found = measured(room(most=100 * SLACK_NBYTES))
    found.begin(2)
    assert backward_of(found) == [80, 100, 100]


@pytest.mark.parametrize("what", ["more in use", "larger inputs", "out of memory", "cut short", "one backward"])
def test_where_a_step_is_another_nothing_is_taken_until_it_is_measured_anew(room, what):
    found = room() if what in ("cut short", "one backward") else measured(room())
    if what == "more in use":
        found.begin(2)
        assert backward_of(found, (800, 702, 600)) == [80, 0, 0]
    elif what == "larger inputs":
        found.begin(2)
        assert backward_of(found)[2] == 250 and not found.saw(8) and found.saw(9)
    elif what == "out of memory":
        Memory.ooms = 1
    elif what == "cut short":  # somebody reads the state before the backward that ends the measured time
        Memory.peaks = (0, 880, 820, 720)
        found.begin(2)
        backward_of(found)
        found.end(whole=False)
    else:
        found.begin(1)
        assert backward_of(found) == [0, 0, 0]
        found.end(whole=True)
    Memory.peaks = (0, 880, 820, 720, 650)
    found.begin(2)
    assert backward_of(found) == [0, 0, 0]
    found.end(whole=True)
    found.begin(2)
    assert backward_of(found) == [80, 180, 250]


def test_on_a_host_only_what_the_plan_names_in_bytes():
    assert SpareRoom(torch.device("cpu"), None, None).moment(0) == 0
    assert SpareRoom(torch.device("cpu"), 123, None).moment(0) == 123


# ---- refusals


@pytest.mark.parametrize(
    ("offload", "options", "text"),
    [
        ({"ahead": "much"}, {}, "Offload.ahead='much'; give bytes"),
        ({"ahead": "auto", "update": "host"}, {}, "here it is updated on the host or rests on disk"),
        ({"ahead": "auto", "moments": "disk", "folder": "."}, {}, "here it is updated on the host or rests on disk"),
        ({"ahead": "auto"}, {"release": True}, "with release=True or delay=1 they go on beside"),
        ({"ahead": "1GiB"}, {"delay": 1}, "with release=True or delay=1 they go on beside"),
    ],
)
def test_what_does_not_go_together_is_refused(offload, options, text):
    model = offloads.net()
    with pytest.raises(ValueError, match=text):
        zeor.shard(model, adamw(model), offload=offload, **options)
