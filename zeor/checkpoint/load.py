"""load(): a checkpoint of any world, stage and precision into this run; each rank reads what it keeps.

1. Rank 0 finds the checkpoint; every rank reads the manifest, and all agree that it is the same and that it fits
   (opening.py). What only other hosts have is fetched from them (fetch.py).
2. Every rank reads and verifies what it needs into memory of its own, the device's or the host's; where both are short,
   it verifies only, and reads again in step 4, a little at a time.
3. Schedulers, scalers and loaders take their states, or all are put back (extras.py). All ranks agree that nothing
   was wrong. Until here nothing of the run has changed.
4. The values go where they belong: through masters, to optimizers, generators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.checkpoint import contents as parts
from zeor.checkpoint import staging
from zeor.checkpoint import state_checks as checks
from zeor.checkpoint.extras import Attached, check_rng, position_of, set_rng
from zeor.checkpoint.files import plain
from zeor.checkpoint.files.errors import CheckpointError, lost_peers
from zeor.checkpoint.files.fetch import Files
from zeor.checkpoint.files.manifest import BUFFER, EXTRA, PARAM, RESIDUAL, RNG, Stored, role_of
from zeor.checkpoint.files.names import listed
from zeor.checkpoint.files.opening import Opened, open_checkpoint, with_newest
from zeor.checkpoint.files.reading import Need
from zeor.checkpoint.files.urls import Place
from zeor.checkpoint.room import device_free_nbytes, is_short
from zeor.checkpoint.run import TrainingRun
from zeor.checkpoint.staging import Staging
from zeor.checkpoint.state_checks import States, UnreadTensor, check_count, is_counter
from zeor.checkpoint.weights.matching import kind_of
from zeor.comm.agree import together
from zeor.layout import Segment
from zeor.optim.ema import EMA
from zeor.optim.parts.pieces import Key, Piece
from zeor.plan import Wire
from zeor.step.grads import GradLane
from zeor.step.unit import Slot

IMPORTED = "imported"  # stands for whatever class it was, in the manifests of tools/importers/foreign.py
ALIKE = {"Adam", "AdamW"}  # the same state
_MALFORMED = (
    LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, MemoryError, AssertionError,
)  # fmt: skip


class Loaded(NamedTuple):
    """step and extra as they were saved; names that did not match, with strict=False; where it was loaded from."""

    step: int
    extra: dict[str, Any]
    path: Place
    world: int
    missing: list[str]
    unexpected: list[str]


class What(NamedTuple):
    """`weights_only`: parameters and buffers, of a run whose optimizers are left out."""

    strict: bool
    weights_only: bool = False


class Load:
    """One load into one run."""

    def __init__(self, run: TrainingRun, opened: Opened, files: Files, what: What):
        self.run, self.strict, self._files = run, what.strict, files
        self._weights_only = what.weights_only
        self.path, self.manifest = opened.path, opened.manifest
        self._stored = self.manifest.by_key()
        for name in run.buffers:  # a state dict of others does not say what is a buffer
            if (PARAM, name) in self._stored and (BUFFER, name) not in self._stored:
                self._stored[BUFFER, name] = self._stored.pop((PARAM, name))
        self._needs: dict[tuple[str, str], Need] = {}  # whole tensors of plain values
        shared = bool(run.divided or run.stages) or any(slot.lane.fine != slot.lane.updated for slot in run.slots)
        alone = run.everyone.size == 1 or not shared
        self.staging = Staging(files, self.manifest, alone)
        self._pieces: dict[int, list[Piece]] = {}  # by optimizer, on their way to it
        self._settings: list[list[dict[str, Any]]] = []  # of each optimizer's groups
        self._counters: list[tuple[str, Key, Need]] = []  # that lie in files, by parameter
        self._averages: list[tuple[int, EMA, list[Piece]]] = []  # with how many updates
        self._wire: Wire | None = None  # that wire="auto" chose
        self._run_steps = 0  # that its run had made
        self._residual: list[GradLane] = []  # that get some, on whatever rank
        self._elsewhere = run.naming.known
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    # ---- step 1: what is needed

    def plan(self, averages: Mapping[str, EMA], extra: Iterable[str], data: bool) -> None:
        """`extra`: the names whose objects want to be loaded; `data`: whether a loader does."""
        self._plan_parameters()
        self._plan_buffers()
        self._check_names()
        if self._weights_only:
            return
        self._wire = self.run.wire_of(self.manifest.state)
        self._run_steps = self.manifest.state.get("run_steps", self.manifest.step)
        if type(self._run_steps) is not int or self._run_steps < 0:
            raise CheckpointError(f"{self.path} does not say how many steps its run has made.")
        self._plan_optimizers()
        for key, average in averages.items():
            self._plan_average(key, average)
        saved = self.extra()
        lacking = [key for key in extra if key not in saved]
        if self.strict and lacking:
            raise CheckpointError(f"{self.path} lacks {_listed('extra', lacking)}; leave it out, or pass strict=False.")
        if data:
            self.position()
        rng, world = self.manifest.state.get("rng"), self.manifest.world
        if not self._is_imported and not (isinstance(rng, list) and len(rng) == world):
            raise CheckpointError(f"{self.path}: it does not hold the random generators of its {world} rank(s).")
        if self._same_world:
            self._rng()

    @property
    def _same_world(self) -> bool:
        rng = self.manifest.state.get("rng")
        world = self.manifest.world
        if self._weights_only:
            return False  # random generators stay
        state, run = self.manifest.state, self.run
        there = [world, state.get("divided", []), state.get("stages", [])]
        same = there == [run.everyone.size, run.divided, run.stages]
        return same and isinstance(rng, list) and len(rng) == world

    @property
    def _is_imported(self) -> bool:
        return IMPORTED in self._software

    @property
    def _software(self) -> dict[str, Any]:
        found = self.manifest.state.get("software")
        return found if isinstance(found, dict) else {}

    def _want_whole(self, name: str) -> Tensor:
        """A stored tensor of a plain value; read with everything else, so that what stands here now is empty."""
        for role in (EXTRA, RNG):
            stored = self._stored.get((role, name))
            if stored is not None:
                if (role, name) not in self._needs:
                    self._needs[role, name] = Need(stored, 0, torch.Size(stored.shape).numel())
                return self._needs[role, name].into.view(stored.shape)
        raise CheckpointError(f"{self.path}: the manifest speaks of {str(name)[:80]!r}, a tensor it does not hold.")

    def _plan_parameters(self) -> None:
        aliases, known = self.manifest.state.get("aliases", {}), set()
        if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
            raise CheckpointError(f"{self.path}: its names of tied parameters are malformed.")
        others: dict[str, list[str]] = {}
        for other, name in self.run.aliases.items():
            others.setdefault(name, []).append(other)
        for slot in self.run.slots:
            name = self.run.names[id(slot.param)]
            names = [name, *others.get(name, ()), *(aliases[n] for n in [name, *others.get(name, ())] if n in aliases)]
            found = next((n for n in names if (PARAM, n) in self._stored), None)
            if found is None:
                self.missing.append(name)
                continue
            known.update(names)
            stored = self._stored[PARAM, found]
            self._check_fit(found, stored, slot.whole_shape, slot.dtype)
            for segment in slot.lane.segments:
                if segment.param == slot.index:
                    take = functools.partial(self._put_parameter, slot, segment)
                    each = _need(stored, slot, segment.start, segment.numel, self.run.everyone.device)
                    self.staging.add(each, take)
            if not self._weights_only and (RESIDUAL, found) in self._stored:
                self._plan_residual(slot, self._stored[RESIDUAL, found])
        for name, param in self.run.plain_params.items():
            known.add(name)
            self._plan_whole(PARAM, name, param)
        self.unexpected += [n for role, n in self._stored if role == PARAM and not self._is_known(n, known)]

    def _plan_residual(self, slot: Slot, stored: Stored) -> None:
        """What was left out of gradients is added to the next, by whatever wire that travels. The sum over ranks was to
        be divided by how many there were, and will be by how many there are; or by how many items (zeor.mean_loss)."""
        self._check_fit(f"the residual of {slot.name}", stored, slot.whole_shape, slot.dtype)
        before = self.manifest.state.get("averaged_over")
        if type(before) is not int or before < 1:
            raise CheckpointError(f"{self.path} does not say over how many ranks its residuals are to be averaged.")
        lane, factor = slot.lane, self.run.averaged_over / before
        if self.manifest.state.get("counted"):
            factor = 1.0
        if lane.grads is None:
            return
        if lane.grads not in self._residual:
            self._residual.append(lane.grads)
        for segment in lane.layout.segments_in(lane.fine):
            if segment.param == slot.index:
                take = functools.partial(self._put_residual, slot, segment, factor)
                each = _need(stored, slot, segment.start, segment.numel, self.run.everyone.device)
                self.staging.add(each, take)

    def _plan_buffers(self) -> None:
        buffers = self.run.buffers
        for name, buffer in buffers.items():
            self._plan_whole(BUFFER, name, buffer)
        self.unexpected += [n for role, n in self._stored if role == BUFFER and not self._is_known(n, buffers)]

    def _is_known(self, name: str, here: Container[str]) -> bool:
        """To this rank's part of the model, or to another stage's."""
        return name in here or name in self._elsewhere

    def _plan_whole(self, role: str, name: str, tensor: Tensor) -> None:
        """A plain tensor of the model, the same on every rank."""
        stored = self._stored.get((role, name))
        if stored is None:
            self.missing.append(name)
        else:
            self._check_fit(name, stored, tuple(tensor.shape), tensor.dtype)
            take = lambda values: tensor.copy_(values.view(tensor.shape))
            self.staging.add(Need(stored, 0, tensor.numel(), tensor.device), take)

    def _check_fit(self, name: str, stored: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if stored.shape != shape:
            raise CheckpointError(f"{self.path} holds {name!r} in shape {stored.shape}; the model has {shape}.")
        if kind_of(plain.DTYPES[stored.dtype]) != kind_of(dtype):
            raise CheckpointError(f"{self.path} holds {name!r} as {stored.dtype}; the model has {dtype}.")

    def _check_names(self) -> None:
        if self.strict and (self.missing or self.unexpected):
            raise CheckpointError(
                f"{self.path} does not fit this model: {_listed('missing in it', self.missing)}"
                f"{'; ' if self.missing and self.unexpected else ''}{_listed('not in the model', self.unexpected)}. "
                "Pass strict=False to load what fits."
            )

    def _plan_optimizers(self) -> None:
        saved = self.manifest.state.get("optimizers", [])
        if not isinstance(saved, list):
            raise CheckpointError(f"{self.path}: its optimizers are a {type(saved).__name__}.")
        given = len(self.run.steppers)
        if len(saved) < given or (self.strict and len(saved) != given):
            raise CheckpointError(
                f"{self.path} holds the state of {len(saved)} optimizer(s), and {given} were given; give those it was "
                "saved with, or none and strict=False."
            )
        for number, stepper in enumerate(self.run.steppers):
            self._pieces[number] = []
            self._settings.append([])
            checks.check_entry(str(self.path), number, saved[number])
            if self._is_alike(number, stepper, saved[number]):
                matched = self._matched_groups(number, stepper, saved[number])
                self._settings[number] = self._new_settings(stepper.optimizer, saved[number], matched)
                self._plan_optimizer(number, stepper, saved[number])

    def _new_settings(
        self, optimizer: Any, saved: dict[str, Any], matched: list[dict[str, Any] | None]
    ) -> list[dict[str, Any]]:
        """Of each group; nothing of one that none was saved for."""
        where, defaults = str(self.path), getattr(optimizer, "defaults", {})
        same_software = self._software.get("torch") == torch.__version__ and saved["class"] == type(optimizer).__name__
        complete = self.strict and same_software and not self._is_imported
        found: list[dict[str, Any]] = []
        for group, old in zip(optimizer.param_groups, matched):
            if old is None:
                found.append({})
                continue
            settings = plain.decode(old["settings"], checks.no_stored(where))
            found.append(checks.checked_settings(where, group, defaults, settings, complete))
        return found

    def _is_alike(self, number: int, stepper: Any, saved: dict[str, Any]) -> bool:
        """Whether the state is of such an optimizer; with strict=False another's is left, and that is reported."""
        given, theirs = type(stepper.optimizer), str(saved["class"])
        names = {each.__name__ for each in given.mro()}
        if theirs == IMPORTED or theirs in names or (theirs in ALIKE and names & ALIKE):
            return True
        if self.strict:
            raise CheckpointError(
                f"{self.path} holds the state of a {theirs[:80]} as optimizer {number}, and a {given.__name__} was "
                "given; give such a one, or pass strict=False to begin its state anew."
            )
        self.missing.append(f"optimizer {number} ({given.__name__})")
        self.unexpected.append(f"optimizer {number} ({theirs[:80]})")
        return False

    def _matched_groups(self, number: int, stepper: Any, saved: dict[str, Any]) -> list[dict[str, Any] | None]:
        """For each group the saved one with most of its parameters."""
        theirs = [set(group["params"]) for group in saved["groups"]]
        ours = [{self.run.names[id(p)] for p in group["params"]} for group in stepper.optimizer.param_groups]
        if theirs == ours:
            return list(saved["groups"])
        if self.run.stages and (matched := self._groups_of_stages(saved["groups"], ours)) is not None:
            return matched
        if self.strict:
            raise CheckpointError(
                f"{self.path}: the groups of optimizer {number} ({saved['class']}) hold other parameters than those of "
                f"the {type(stepper.optimizer).__name__} given; make it with the same groups, or pass strict=False."
            )
        return [
            max((old for old in saved["groups"] if names & set(old["params"])), default=None,
                key=lambda old: len(names & set(old["params"])))
            for names in ours
        ]  # fmt: skip

    def _groups_of_stages(self, saved: list[Any], ours: list[set[str]]) -> list[dict[str, Any] | None] | None:
        """A stage has a part of the whole model's groups. None where these are others."""
        here = {self.run.names[id(slot.param)] for slot in self.run.slots}
        theirs = [(group, set(group["params"]) & here) for group in saved]
        matched: list[dict[str, Any] | None] = []
        left = [(group, names) for group, names in theirs if names]
        for place, names in enumerate(ours):
            if not names:
                matched.append(saved[place] if len(saved) == len(ours) else None)
            elif left and left[0][1] == names:
                matched.append(left.pop(0)[0])
            else:
                return None
        return None if left else matched

    def _plan_optimizer(self, number: int, stepper: Any, saved: dict[str, Any]) -> None:
        """This rank's pieces of an optimizer's state, each with what must be read for it."""
        checks.check_members(str(self.path), number, self._stored, saved)
        states = States(str(self.path), stepper.optimizer, self._settings[number], self.run.everyone.device)
        for group, members in enumerate(stepper.optimizer.param_groups):
            for param in members["params"]:
                if stepper.segments.of(param) is not None:
                    self._plan_state(number, stepper, saved, param, functools.partial(states.check, group))

    def _plan_state(self, number: int, stepper: Any, saved: dict[str, Any], param: Tensor, check: Any) -> None:
        """This rank's state of one parameter."""
        pieces, slot = self._pieces[number], stepper.segments.slots[id(param)]
        name, mine, where = self.run.names[id(slot.param)], stepper.segments.of(param), stepper.segments.at(param)
        stored = self._state_tensors(number, saved["keys"], name)
        state: dict[Key, Any] = {key: UnreadTensor(t.shape, plain.DTYPES[t.dtype]) for key, t in stored.items()}
        paths = checks.Paths(str(self.path))
        for key in stored:
            paths.take(list(key))
        for key, value in saved["scalars"].get(name, ()):
            decoded = plain.decode(value, checks.no_stored(str(self.path)))
            if isinstance(decoded, (dict, list, tuple)) and decoded:  # only numbers, words, small tensors, empty lists
                raise CheckpointError(f"{self.path}: {str(decoded)[:80]} is no value of an optimizer's state.")
            state[paths.take(key)] = decoded
        if not state:
            self._check_begins_anew(name, saved)
        for path, value in check(name, slot.whole_shape, mine, state).items():
            if not isinstance(value, UnreadTensor):
                pieces.append(Piece(slot.name, path, None, value))
                continue
            each, begin = Need(stored[path], 0, torch.Size(value.shape).numel()), None
            if is_counter(path, value):
                self._counters.append((name, path, each))
            elif value.shape == slot.whole_shape:
                each, begin = _need(stored[path], slot, where.start, where.numel, mine.device), where.start
            self.staging.add_piece(each, pieces, slot.name, path, begin, value.dtype)

    def _state_tensors(self, number: int, keys: dict[str, Any], name: str) -> dict[Key, Stored]:
        """The tensors of an optimizer's state of one parameter, by their place in it."""
        found: dict[Key, Stored] = {}
        for role, key in keys.items():
            stored = self._stored.get((role, name))
            if stored is not None:
                path = checks.Paths(str(self.path)).take(key)
                if role != role_of(number, path):
                    raise CheckpointError(f"{self.path}: {role!r} is not where {key} of an optimizer lies.")
                found[path] = stored
        return found

    def _check_begins_anew(self, name: str, saved: dict[str, Any]) -> None:
        """There is no state of a parameter: then it had none when it was saved, or was not trained."""
        trained = self.manifest.params.get(name, {}).get("trains") is True
        was_there = any(name in group["params"] for group in saved["groups"])
        if saved.get(parts.COMPLETE) is True and trained and was_there and name not in saved["scalars"]:
            raise CheckpointError(f"{self.path} lacks the optimizer's state of {name!r}.")

    def _plan_average(self, key: str, average: EMA) -> None:
        slots = {slot.name: slot for slot in self.run.slots}
        names = {mine.name: self.run.names[id(slots[mine.name].param)] for mine in average.pieces()}
        lacking = [name for name in names.values() if (f"ema.{key}", name) not in self._stored]
        if lacking and self.strict:
            raise CheckpointError(
                f"{self.path} has no average {key!r} of {lacking[0]!r}; leave it out of extra=, or pass strict=False."
            )
        if lacking:  # it stays as it is
            self.missing += [f"{name} of the average {key!r}" for name in lacking]
            return
        pieces: list[Piece] = []
        for mine in average.pieces():
            assert mine.begin is not None  # averages are made of parameters' elements
            slot = slots[mine.name]
            self._check_fit(
                names[mine.name], self._stored[f"ema.{key}", names[mine.name]], slot.whole_shape, slot.dtype
            )
            average_of = self._stored[f"ema.{key}", names[mine.name]]
            each = _need(average_of, slot, mine.begin, mine.value.numel(), mine.value.device)
            self.staging.add_piece(each, pieces, mine.name, mine.key, mine.begin)
        about = self.extra().get(key)
        updates = about.get("updates") if isinstance(about, dict) else None
        if type(updates) is not int or updates < 0:
            raise CheckpointError(f"{self.path} does not say how often the average {key!r} was updated.")
        self._averages.append((updates, average, pieces))

    @property
    def needs(self) -> list[Need]:
        """All that will be read."""
        return [*self._needs.values(), *self.staging.needs]

    # ---- step 2

    def read(self, host_is_short: bool) -> None:
        counters = [each for *_, each in self._counters]
        self.staging.read(host_is_short, [*self._needs.values(), *counters])
        for name, key, each in self._counters:
            if key[-1] == "step":
                check_count(str(self.path), name, float(each.into))
        if self._same_world:
            check_rng(str(self.path), self._rng(), self.run.everyone.device)

    # ---- step 4

    def fill(self) -> None:
        """This rank's part of everything; no rank waits for another in here."""
        self.run.drain()
        self.run.forget_residuals()
        for grads in self._residual:  # the same on every rank, or a later save would miss parts of some
            grads.put_flushed(0, torch.empty(0))
        for stepper in self.run.steppers:
            stepper.optimizer.state.clear()
        self.staging.fill(after_batch=self._put_pieces)
        self._put_pieces()

    def _put_parameter(self, slot: Slot, segment: Segment, values: Tensor) -> None:
        slot.lane.store_part(segment.offset, values)
        self.run.unfilled.fill(slot)

    def _put_residual(self, slot: Slot, segment: Segment, factor: float, values: Tensor) -> None:
        if slot.lane.grads is not None:
            slot.lane.grads.put_flushed(segment.offset, values if factor == 1 else values * factor)

    def _put_pieces(self) -> None:
        for number, pieces in self._pieces.items():
            if pieces:
                self.run.steppers[number].state.put(pieces, adopt=True)  # just read, and nobody else's
            pieces.clear()
        for updates, average, pieces in self._averages:
            average.put(pieces, updates)
            pieces.clear()

    @torch.no_grad()
    def publish(self) -> None:
        """What was filled in, to the other ranks where they read it; then the optimizers' settings."""
        for unit in self.run.units:
            for lane in unit.lanes:
                self.run.publish(unit, lane)
                lane.changed()  # a graph made before is stale
        for stepper, settings in zip(self.run.steppers, self._settings):
            self._set_groups(stepper, settings)

    def _set_groups(self, stepper: Any, settings: list[dict[str, Any]]) -> None:
        for group, old in zip(stepper.optimizer.param_groups, settings):
            for key, value in old.items():
                if isinstance(group.get(key), Tensor) and isinstance(value, (Tensor, float, int)):
                    # Whoever holds it, a scheduler say, sees the new value.
                    group[key].copy_(torch.as_tensor(value).view(group[key].shape))
                else:
                    group[key] = value

    def extra(self) -> dict[str, Any]:
        """What was saved beside model and optimizers, by name."""
        found = plain.decode(self.manifest.state.get("extra"), self._want_whole)
        if found is not None and not isinstance(found, dict):
            raise CheckpointError(f"{self.path}: its extra values are a {type(found).__name__}.")
        return {} if found is None else found

    def position(self) -> Any:
        """Of this rank's loader."""
        saved = position_of(self.path, self.manifest.state.get("data"), self.run.shards, self.strict)
        return plain.decode(saved, self._want_whole)

    def _rng(self) -> Any:
        return plain.decode(self.manifest.state["rng"][self.run.everyone.rank], self._want_whole)

    def take_wire(self) -> None:
        """Every rank has read the same."""
        if self._wire is not None:
            self.run.take_wire(self._wire)

    def go_on_counting(self) -> None:
        """A run that is given weights alone is another one."""
        if not self._weights_only:
            self.run.everyone.standing.run_steps = self._run_steps

    def restore_rng(self) -> None:
        if self._same_world:
            set_rng(self._rng(), self.run.everyone.device)


def _need(stored: Stored, slot: Slot, start: int, numel: int, device: torch.device) -> Need:
    """Elements of what a parameter's lane has, flattened, of a stored tensor of the whole parameter."""
    boxes = None if slot.placed is None else slot.boxes(start, start + numel)
    return Need(stored, start, numel, device, boxes=boxes)


def load(run: TrainingRun, folder: Place, extra: Mapping[str, Any] | None, data: Any, what: What) -> Loaded:
    """The steps at the top of this file."""

    def once() -> Loaded:
        opened = open_checkpoint(run.everyone, folder)
        with Files(run.everyone, opened) as files:
            loaded = _load(Load(run, opened, files, what), files, extra, data)
        run.lineage.loaded(opened.path, opened.manifest)
        return loaded

    return with_newest(run.everyone, folder, once)


def _load(this: Load, files: Files, extra: Mapping[str, Any] | None, data: Any) -> Loaded:
    axis, path, manifest = this.run.everyone, this.path, this.manifest
    averages = {key: value for key, value in (extra or {}).items() if isinstance(value, EMA)}
    others = {k: v for k, v in (extra or {}).items() if k not in averages and hasattr(v, "load_state_dict")}
    attached = Attached(path, others, data)

    def agreed(do: Callable[[], None], label: str) -> None:
        together(axis, lambda: _guarded(do, path), label, CheckpointError)

    def plan() -> None:
        attached.check()
        this.plan(averages, others, data is not None)

    agreed(plan, "exchange about whether a checkpoint fits")
    files.fetch(this.needs)
    short = is_short(axis, this.staging.place(device_free_nbytes), staging.STAGED_SHARE)
    agreed(functools.partial(this.read, short), "exchange about the reading of a checkpoint")
    found = _guarded(this.extra, path)
    position = this.position() if data is not None else None
    try:
        agreed(functools.partial(attached.take, found, position), "exchange about schedulers and loaders")
    except BaseException:
        attached.put_back()
        raise
    with lost_peers(axis, f"Loading {path}", "The run is changed in part; load once more."):
        agreed(this.fill, "exchange about the filling in of a checkpoint")
        this.publish()
        this.take_wire()
    this.run.everyone.standing.seed_noise(manifest.step)
    this.go_on_counting()
    this.restore_rng()
    return Loaded(manifest.step, found, path, manifest.world, this.missing, this.unexpected)


def _guarded(do: Callable[[], Any], path: Place) -> Any:
    """A manifest that is consistent in itself may still say nonsense of optimizers: that is its fault, not ours."""
    try:
        return do()
    except _MALFORMED as error:
        if isinstance(error, CheckpointError) and str(path) in str(error):
            raise
        if isinstance(error, CheckpointError):
            raise CheckpointError(f"{path}: {error}") from error
        raise CheckpointError(f"{path} holds malformed values ({type(error).__name__}: {error}).") from error


def _listed(what: str, names: list[str]) -> str:
    return f"{what}: {listed([repr(name) for name in names])}" if names else ""
