"""`join`: ranks with unequal numbers of batches, or that generate texts of unequal lengths, finish together.

Note [Joining]
~~~~~~~~~~~~~~
1. Inside the block every event that leads to collectives (events.py) is announced by one small exchange: each rank
   puts the number of its event into a vector of one entry per rank. While all are there and say the same, that is all.
2. A rank that leaves the block does not go on: it answers each exchange with LEFT, learns what the others do next, and
   plays the same collectives without computing: gathers and drops, zeros in reduces, the same norms. It holds its
   slice of the gradients and takes the same step on it.
3. Where somebody has left, an exchange of text follows the vector: what the others' code did to the gradients since
   the last one (`Edits`), the settings of the groups, the order of a norm.
4. Gradients are averaged over the ranks that were there in that backward.
5. Ranks that announce different events all raise one sentence. A rank whose code raises plays the pass it is in to its
   end, so that nobody waits for it, and answers FAILED: all raise.
6. A backward is opened by one announcement and ended by another, so that those of several models may overlap.
7. Gathers of all models travel on one group. So before one model's event the others' passes under way gather what is
   left of their round; what they need of it later they ask for.
8. When all have left, those that left early take over the settings and gradients' edits of one that left last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from zeor.access import full
from zeor.access.sharded import engine_of
from zeor.comm import verbs
from zeor.comm.agree import exchange
from zeor.features import settings
from zeor.features.settings import Settings
from zeor.memory.view import Held
from zeor.step import events
from zeor.step.engine import Engine
from zeor.step.events import Announcer, OpenJoin
from zeor.step.handle import Handle

OnStep = Callable[[], Any] | Mapping[Optimizer, Callable[[], Any]] | None

NOBODY, LEFT, FAILED, FIRST_EVENT = range(4)


class Join(OpenJoin):
    def __init__(self, engines: Sequence[Engine], on_step: OnStep):
        self._engines, self._on_step = list(engines), on_step
        self._axes = engines[0].axes
        self.announcers = [engine.announcer for engine in engines]
        for engine in engines:
            engine.passes.settling.unsettle()  # on every rank: one that only follows tells other numbers
        self._optimizers = [engine.optimizers for engine in engines]
        self.ranks = dist.get_process_group_ranks(self._axes.everyone.control)
        self.edits = Edits(self._engines)
        self.left: list[int] = []  # ranks that had left at the last announcement
        self.playing = False  # this rank has left and follows
        self._inside = False  # an event that holds others (a step) is under way
        self._over = False  # every rank is raising
        self._before: list[int] = []  # ranks that had left at the announcement before

    @property
    def active(self) -> int:
        """How many ranks still compute."""
        return self._axes.everyone.size - len(self.left)

    # ---- those who compute

    def note_edit(self, held: Held, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.edits.note(held, verb, args, kwargs)

    def announce(self, by: Announcer, event: str, detail: Any = None) -> list[Any]:
        """This rank is about to do something that all must do. `detail`: what a rank that follows must know, or a
        function that says it. Returns what the ranks told, None of one that has left."""
        if self.playing or self._inside or self._over:
            return []
        which = self.announcers.index(by)
        engine = self._engines[which]
        if engine.plain and event not in events.NEEDS_NO_DETAIL:
            engine.heed()
        self._round_off(engine)
        codes = self._vote(FIRST_EVENT + which * len(events.EVENTS) + events.EVENTS.index(event), events.SAID[event])
        self._heed(codes)
        if event == events.TOTAL:
            return exchange(self._axes.everyone, detail, "exchange of zeor.total")
        if event in events.NEEDS_NO_DETAIL:
            return []
        told = []
        if self.left:
            told = self._tell(detail)
            self._compare(told, events.SAID[event])
            if event == events.OTHER:
                self._over = True
                raise _refusal(detail, self.left)
        self.edits.clear()
        return told

    def _round_off(self, engine: Engine) -> None:
        """Step 7 of the Note: gathers of other models' passes that are still to come, now."""
        for other in self._engines:
            if other is engine or not self.left or not other.passes.gathers.frees:
                continue
            if other.forward.walk is not None:
                raise RuntimeError(
                    "One sharded model is used inside the forward of another in zeor.join after a rank had run out of "
                    "data, and a rank that only follows cannot know when; give all ranks equally many batches."
                )
            if other.backward.walk is not None:
                other.backward.walk.pass_by_all()

    def tell_total(self, numbers: list[int | float]) -> list[Any]:
        """See totals.py."""
        if self.playing:
            raise RuntimeError("zeor.total was called by on_step of zeor.join; a rank that has left counts nothing.")
        return self.announce(self._engines[0].announcer, events.TOTAL, numbers)

    @contextmanager
    def event(self, by: Announcer, event: str, detail: Any) -> Iterator[None]:
        """An event that is played as a whole: what is announced inside it is part of it."""
        outermost = not self._inside
        if outermost:
            self.announce(by, event, detail)
        self._inside = True
        try:
            yield
        finally:
            self._inside = not outermost

    def _tell(self, detail: Any) -> list[Any]:
        """What ranks that follow must know; an error in putting it together must reach them too."""
        try:
            mine = {"edits": self.edits.encode(), "detail": detail() if callable(detail) else detail}
        except RuntimeError as error:
            mine = {"error": str(error)}
        return exchange(self._axes.everyone, mine, "exchange inside zeor.join")

    def _compare(self, told: list[Any], event: str) -> None:
        present = {rank: each for rank, each in enumerate(told) if each is not None}
        for each in present.values():
            if "error" in each:
                self._over = True
                raise RuntimeError(each["error"])
        first = next(iter(present))
        for rank, each in present.items():
            if each != present[first]:
                self._over = True
                raise RuntimeError(
                    f"zeor.join: ranks {first} and {rank} come to {event} with different settings or after different "
                    f"changes to the gradients ({_differing(present[first], each)}); do the same on all ranks."
                )

    # ---- the exchange

    def _vote(self, code: int, what: str) -> list[int]:
        codes = torch.full((self._axes.everyone.size,), NOBODY, dtype=torch.int64)
        codes[self._axes.everyone.rank] = code
        return verbs.agree_max(self._axes.everyone, codes, f"agreement inside zeor.join before {what}").tolist()

    def _heed(self, codes: list[int]) -> None:
        """What every rank said: raise, on all of them, where they cannot go on together."""
        if FAILED in codes:
            self._over = True
            texts = exchange(self._axes.everyone, None, "exchange of an error inside zeor.join")
            rank = codes.index(FAILED)
            raise RuntimeError(f"zeor.join: rank {rank} raised {texts[rank]}, so no rank can go on inside the block.")
        self._before, self.left = self.left, [rank for rank, code in enumerate(codes) if code == LEFT]
        said = {code: rank for rank, code in reversed(list(enumerate(codes))) if code != LEFT}
        if len(said) > 1:
            self._over = True
            (a, first), (b, second) = sorted(said.items(), key=lambda item: item[1])[:2]
            raise RuntimeError(
                f"zeor.join: rank {first} comes to {self._said(a)} while rank {second} comes to {self._said(b)}; all "
                "ranks must run the same loop inside the block, each over its own number of batches."
            )

    def _said(self, code: int) -> str:
        which, event = divmod(code - FIRST_EVENT, len(events.EVENTS))
        model = f" of model {which}" if len(self._engines) > 1 else ""
        return events.SAID[events.EVENTS[event]] + model

    # ---- those who have left

    def leave(self) -> None:
        """Follow the others until all have left."""
        if self._over:
            return
        skip = len(self.edits)  # what this rank's own code did since it last told; the others tell it too
        self._set_playing(True)
        try:
            while True:
                codes = self._vote(LEFT, "the end of the block")
                self._heed(codes)
                if len(self.left) == self._axes.everyone.size:
                    break
                code = next(code for code in codes if code != LEFT)
                which, event = divmod(code - FIRST_EVENT, len(events.EVENTS))
                skip = self._follow(self._engines[which], events.EVENTS[event], skip)
            self._settle(skip)
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self._set_playing(False)

    def _set_playing(self, playing: bool) -> None:
        self.playing = playing
        for engine in self._engines:
            engine.feature(Settings).silent = playing

    def _follow(self, engine: Engine, event: str, skip: int) -> int:
        """Take part in one event; how much of what will be told next this rank has done itself."""
        if event in events.NEEDS_NO_DETAIL:
            engine.play(event, None)
            return skip
        if event == events.TOTAL:
            exchange(self._axes.everyone, None, "exchange of zeor.total")
            return skip
        told = exchange(self._axes.everyone, None, "exchange inside zeor.join")
        self._compare(told, events.SAID[event])
        heard = next(each for each in told if each is not None)
        self.edits.replay(heard["edits"], skip)
        self._play(engine, event, heard["detail"])
        return 0

    def _play(self, engine: Engine, event: str, detail: Any) -> None:
        if event == events.STEP:
            self._step(engine.optimizers[detail["optimizer"]], detail)
        elif event == events.FULL:
            full.take_part(engine.units, detail["grads"])
        elif not engine.play(event, detail):
            self._over = True
            raise _refusal(detail, self.left)

    def _step(self, optimizer: Optimizer, detail: dict[str, Any]) -> None:
        settings.take_over(optimizer.param_groups, detail["settings"])
        for name, value in detail["amp"].items():  # GradScaler hands its scale to a fused step this way
            setattr(optimizer, name, torch.tensor(value, device=self._axes.device))
        optimizer.step()
        for name in detail["amp"]:
            delattr(optimizer, name)
        on_step = self._on_step.get(optimizer) if isinstance(self._on_step, Mapping) else self._on_step
        if on_step is not None:
            on_step()

    def _settle(self, skip: int) -> None:
        """All have left. Where some had left before, they take over what the others did since they last told."""
        early = self._before
        if not early:
            return
        mine = None
        if self._axes.everyone.rank not in early:
            found = [[settings.encode(each.param_groups) for each in optimizers] for optimizers in self._optimizers]
            mine = {"edits": self.edits.encode(), "detail": found}
        told = exchange(self._axes.everyone, mine, "exchange at the end of zeor.join")
        if mine is None:
            heard = next(each for each in told if each is not None)
            self.edits.replay(heard["edits"], skip)
            for optimizers, each in zip(self._optimizers, heard["detail"]):
                for optimizer, groups in zip(optimizers, each):
                    settings.take_over(optimizer.param_groups, groups)

    # ---- errors

    def fail(self, error: Exception) -> None:
        """This rank's code raised: say so, once nobody waits for this rank in a pass."""
        if self._over or self._axes.everyone.stuck:
            return
        for engine in self._engines:
            engine.recover()
        # They may have come to a sentence of their own on the way, and so has every other rank.
        if not self._over and not self._axes.everyone.stuck:
            self._over = True
            self._vote(FAILED, "an error is raised")
            text = f"{type(error).__name__}: {str(error)[:500]}"
            exchange(self._axes.everyone, text, "exchange of an error inside zeor.join")


def _refusal(what: str, left: list[int]) -> RuntimeError:
    gone = ", ".join(map(str, left))
    return RuntimeError(
        f"{what} was called inside zeor.join after rank {gone} had run out of data, and a rank that only follows "
        "cannot take part in it; call it after the block."
    )


def _differing(a: dict[str, Any], b: dict[str, Any]) -> str:
    for key in a:
        if a[key] != b.get(key):
            return f"{key}: {str(a[key])[:120]} against {str(b.get(key))[:120]}"
    return "one tells more than the other"


@contextmanager
def join(model: Any, on_step: OnStep = None) -> Iterator[None]:
    """Inside, ranks may have different numbers of batches, or generate texts of different lengths:

        with zeor.join(model, on_step=scheduler.step):
            for x, y in loader:
                ...  # the loop as it is

    A rank that leaves the block keeps taking part in what the others still do, without computing, until all have
    left: it holds its slice of every parameter. Gradients are averaged over the ranks that are still there. All ranks
    must run the same loop inside; where they do not, or where one raises, every rank raises.

    model    a sharded model, a `zeor.optim` optimizer, or a list of them: everything sharded that is used inside.
    on_step  what to call on a rank that has left after each step it takes part in: what the loop does after
             optimizer.step(), such as scheduler.step. A dict {optimizer: function} where there are several.

    Costs one small exchange per forward, backward, norm and step. Inside, sum numbers over ranks with zeor.total: a
    collective of your own would wait for ranks that have left.
    """
    found = list(model) if isinstance(model, (list, tuple)) else [model]
    if not found:
        raise ValueError("zeor.join was given an empty list; name the models that are used inside.")
    engines = [engine_of(each) for each in found]
    axis = engines[0].axes.everyone
    if axis.size == 1 or axis.fake:
        yield  # there is nobody to wait for
        return
    _check(engines)
    block = Join(engines, on_step)
    events.open_joins.append(block)
    for announcer in block.announcers:
        announcer.block = block
    try:
        yield
    except Exception as error:
        block.fail(error)
        raise
    else:
        block.leave()
    finally:
        events.open_joins.remove(block)
        for announcer in block.announcers:
            announcer.block = None


def _check(engines: Sequence[Engine]) -> None:
    if len(set(engines)) < len(engines):
        raise ValueError("zeor.join was given the same model twice.")
    ranks = [dist.get_process_group_ranks(engine.axes.everyone.control) for engine in engines]
    if any(each != ranks[0] for each in ranks):
        raise ValueError("zeor.join was given models that are sharded over different ranks; they cannot end together.")
    if any(engine.axes.experts is not None for engine in engines):
        raise ValueError(
            "zeor.join was given a model with expert parallelism: a rank without batches computes nothing, and the "
            "others would wait for its experts; give all ranks equally many batches."
        )
    for other in events.open_joins:
        if set(other.ranks) & set(ranks[0]):
            raise RuntimeError(
                "zeor.join is open already on these ranks; give all models to one block: zeor.join([model, other])."
            )


# ---- the user's changes to gradients


class Edit(NamedTuple):
    engine: int
    slot: int
    verb: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Edits:
    """What the user did to gradients since ranks last met (scaled, clamped, dropped), to be told to ranks that follow.

    A rank that ran out of data inside `join` holds its slice of every gradient but runs none of the user's code, so it
    must be told what the others' code did to theirs. Numbers can travel; a tensor of many elements cannot, and is
    refused by name when somebody would need it.
    """

    def __init__(self, engines: Sequence[Engine]):
        self._engines = engines
        self._at = {slot.held: (e, s) for e, engine in enumerate(engines) for s, slot in enumerate(engine.slots)}
        self._log: list[Edit] = []

    def __len__(self) -> int:
        return len(self._log)

    def clear(self) -> None:
        self._log.clear()

    def note(self, held: Held, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._log.append(Edit(*self._at[held], verb, args, kwargs))

    def encode(self) -> list[list[Any]]:
        """As JSON; neighbours that differ in the parameter alone become one entry."""
        found: list[list[Any]] = []
        last: Edit | None = None
        for edit in self._log:
            if last is not None and (edit.engine, edit.verb) == (last.engine, last.verb) and _same(edit, last):
                found[-1][2].append(edit.slot)
            else:
                name = self._engines[edit.engine].slots[edit.slot].name
                args = [_encode(arg, edit.verb, name) for arg in edit.args]
                kwargs = {key: _encode(arg, edit.verb, name) for key, arg in edit.kwargs.items()}
                found.append([edit.engine, edit.verb, [edit.slot], args, kwargs])
            last = edit
        return found

    @torch.no_grad()
    def replay(self, entries: Sequence[Sequence[Any]], skip: int) -> None:
        """Do here what another rank's code did; this rank's own code had done the first `skip` of it."""
        for engine_index, verb, slots, encoded, encoded_by_name in entries:
            engine = self._engines[engine_index]
            device = engine.axes.device
            args = [_decode(arg, device) for arg in encoded]
            kwargs = {key: _decode(arg, device) for key, arg in encoded_by_name.items()}
            for slot in (engine.slots[position] for position in slots):
                if skip > 0:
                    skip -= 1
                    continue
                held = slot.held
                assert isinstance(held, Handle)
                if verb == events.SCALE:
                    held.scale_grad(args[0])
                elif verb != events.DROP:
                    getattr(torch.Tensor, verb)(held.local_grad(), *args, **kwargs)
                    held.tell_edit(verb)
                else:
                    held.set_grad(None)
                    if engine.plain:
                        slot.param.grad = None


def _same(a: Edit, b: Edit) -> bool:
    mine, other = (*a.args, *a.kwargs.items()), (*b.args, *b.kwargs.items())
    plain = (int, float, bool, tuple)
    return len(mine) == len(other) and all(x is y or (type(x) in plain and x == y) for x, y in zip(mine, other))


def _encode(value: Any, verb: str, name: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"number": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise RuntimeError(
        f"{verb} on the gradient of {name!r} was given a {type(value).__name__} of many numbers inside zeor.join, "
        "where a rank that is out of data cannot follow; change gradients by single numbers there."
    )


def _decode(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["number"], dtype=getattr(torch, value["dtype"]), device=device)
    return value
