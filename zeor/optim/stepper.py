"""step(): one event for the user, unit by unit inside.

The user's optimizer object stays theirs; some of its methods are replaced on the instance. step() runs
the step hooks once, the closure once, then for each unit: gradients to segments, the stock update or
the one-pass kernel, compute from master, publish. A published unit travels while the next is updated.
Parameters of groups that need whole matrices follow, round by round, computed by their owners (owners/).
"""

from __future__ import annotations

import functools
import types
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from zeor.comm import verbs
from zeor.comm.agree import same_everywhere
from zeor.comm.observe import Observer, Record
from zeor.features import settings
from zeor.features.freezing import Freezing
from zeor.features.nonfinite import NonFinite
from zeor.features.release import Release
from zeor.memory.device import trim_host_memory
from zeor.optim.calls import Calls
from zeor.optim.kernels.run import OnePass
from zeor.optim.owners import exchange
from zeor.optim.owners.exchange import Journey, Visit
from zeor.optim.owners.owners import Owned, Owners
from zeor.optim.parts.checks import check_kind, check_parameters, check_separable, driven, watch_steps
from zeor.optim.parts.methods import REPLACED, Unwritten, find_writers, own_methods
from zeor.optim.parts.probe import Kind
from zeor.optim.parts.segments import Segments
from zeor.optim.state import KeptState
from zeor.optim.streaming.auto import Auto
from zeor.optim.streaming.streaming import Streaming
from zeor.step import events
from zeor.step.engine import Engine
from zeor.step.grads import State
from zeor.step.lane import Lane
from zeor.step.unit import Slot, Unit


class Stepper:
    """Drives one optimizer over the segments of one engine."""

    def __init__(self, engine: Engine, optimizer: Optimizer):
        self.optimizer = optimizer
        self.running = False  # step() is under way
        self.enrol: Callable[[list[dict[str, Any]]], None] = lambda groups: None  # a drop-in's: new parameters in these
        self._drive(engine)
        driven.add(optimizer)
        watch_steps()
        self._instance_step = self._patch()

    def _drive(self, engine: Engine) -> None:
        """Make what drives the optimizer over the segments of this engine."""
        self.engine, optimizer = engine, self.optimizer
        plan, axes, units, drain = engine.plan, engine.axes, engine.units, engine.drain
        self.axes, self._plan, self._table, self._plain = axes, plan, engine.table, engine.plain
        self._units, self._slots, self._peers, self._ledger = units, engine.slots, engine.optimizers, engine.ledger
        self._observer = engine.observer
        self.kinds = self._check()
        self.owners = Owners(axes, self._table, units)
        self._give_owners(range(len(self.kinds)))
        self.segments = Segments(optimizer, self._slots, self.owners, axes)
        self.calls = Calls(self.segments, self.kinds, axes.device)
        self.one_pass = OnePass(self.segments, axes.device, plan.kernel)
        self.streaming: Streaming | None = None
        self._auto: Auto | None = None
        if plan.streams:
            self.streaming = Streaming(plan, axes.device, units, self.segments, self.one_pass, self._observer)
            if plan.offload is not None and plan.offload.auto:
                self._auto = Auto(self.streaming, plan, axes, units, engine.places, drain)
            engine.add_extension(self.streaming)
            if plan.offload is not None and plan.offload.ahead is not None and not engine.plain:
                engine.add_extension(self.streaming.look_ahead(engine.backward, engine.ledger))
        self.state = KeptState(self.segments, self.one_pass, self.streaming, drain)
        self._first = True
        self._releases = engine.find(Release)
        if self._releases is not None:
            self._releases.updates.append(self._release)
            self._releases.waits.append(self._has_owners)
        engine.feature(Freezing).watch(self)
        self._peers.append(optimizer)

    def move(self, engine: Engine) -> Callable[[bool], None]:
        """Drive the optimizer over another engine from here on. Its state is empty there; entries that are no part of
        what it stepped on here stay. What is returned is called once: with False it undoes the move, else it gives back
        what the engine of before used. The optimizer's replaced methods know this object and stay."""
        before, state, streaming = dict(vars(self)), self.optimizer.state, self.streaming
        own = {id(part) for part in self.segments.all()}

        def end(moved: bool) -> None:
            if moved:
                if streaming is not None:
                    streaming.close()
                return
            if self.streaming is not None and self.streaming is not streaming:
                self.streaming.close()
            vars(self).clear()
            vars(self).update(before)
            self.optimizer.state = state

        self.optimizer.state = defaultdict(dict, {key: value for key, value in state.items() if id(key) not in own})
        try:
            self._drive(engine)
        except BaseException:
            end(moved=False)
            raise
        return end

    def _check(self) -> list[Kind]:
        """What kind its groups are; ValueError where they cannot be driven."""
        check_parameters(self.optimizer, self._slots)
        kinds = self.check_kind()
        check_separable(self.optimizer, kinds, self._plan)
        return kinds

    def check_kind(self) -> list[Kind]:
        return check_kind(self.optimizer, self._slots, self.axes, self._table)

    def _give_owners(self, groups: Iterable[int]) -> None:
        found = [self.optimizer.param_groups[n]["params"] for n in groups if not self.kinds[n].elementwise]
        self.owners.add(param for params in found for param in params)

    def thawed(self, slots: Sequence[Slot]) -> None:
        """These parameters begin to train: see features/freezing.py. Groups may hold them already, or never."""
        found = {id(slot.param) for slot in slots}
        for kind, group in zip(self.kinds, self.optimizer.param_groups):
            params = [param for param in group["params"] if id(param) in found]
            if not kind.elementwise:
                self.owners.add(params)
            for param in params:
                self.segments.make(param)

    # ---- the optimizer's own methods

    def _patch(self) -> Callable[..., Any] | None:
        """The optimizer object stays the user's: some of its methods are replaced on the instance. Returns the step
        that stood there before, a scheduler's, say."""
        optimizer, before = self.optimizer, self.optimizer.__dict__.get("step")

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if before is not None:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
            return self.step(closure)

        if before is not None and hasattr(before, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # and for this on functions
        methods: dict[str, Callable[..., Any]] = {
            "step": step,
            "state_dict": lambda _: self.state.state_dict(),
            "load_state_dict": lambda _, state_dict: self.state.load_state_dict(state_dict),
            "add_param_group": lambda _, group: self.add_param_group(group),
        }
        writers = find_writers(optimizer, self.axes.device)
        for name, method in own_methods(type(optimizer)).items():
            methods[name] = self._beside(f"{type(optimizer).__name__}.{name}()", method, name in writers)
        for name, method in methods.items():
            optimizer.__dict__[name] = types.MethodType(method, optimizer)
        return before

    def unpatch(self) -> None:
        """The optimizer is the user's alone again."""
        if self._releases is not None:
            self._releases.updates.remove(self._release)
            self._releases.waits.remove(self._has_owners)
        if self.streaming is not None:
            for extension in filter(None, (self.streaming, self.streaming.ahead)):
                self.engine.remove_extension(extension)
            self.streaming.close()
        self._peers.remove(self.optimizer)
        driven.discard(self.optimizer)
        for name in (*REPLACED, *own_methods(type(self.optimizer))):
            self.optimizer.__dict__.pop(name, None)
        if self._instance_step is not None:
            self.optimizer.__dict__["step"] = self._instance_step

    def _beside(self, what: str, method: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        """What stands for a method beside step(): see parts/methods.py. What the optimizer calls by itself while it
        steps is passed through."""

        def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(method, optimizer, *args, **kwargs)
            if self.calls.running:
                return run()
            if writes:
                return self._run_over_masters(what, run)
            weights = [lane.full.flat for unit in self._units for lane in unit.lanes]
            with Unwritten(what, [*weights, *self.segments.all()]):
                return run()

        return call

    @torch.no_grad()
    def _run_over_masters(self, what: str, method: Callable[[], Any]) -> Any:
        """A method that writes parameters runs over what this rank steps on, as step() does, and the new values are
        published: every rank must call it."""
        self.engine.check_weights(f"{what} was called")
        if self.owners.rounds and self.owners.cut:
            raise RuntimeError(
                f"{what} writes parameters that are updated whole, by one rank each, as this optimizer looks at "
                "matrices; zeor cannot do that beside a step; use zeor.shard(..., stage=0), where every rank updates "
                "everything."
            )
        self.engine.announce(events.OTHER, what)
        self.state.heed_new_state()
        self.state.drain()
        slots = [slot for slot in self._in_groups() if id(slot.param) not in self.owners.owned]
        lanes = list(dict.fromkeys(slot.lane for slot in slots if slot.lane.grads is not None))
        visits = [Visit(self.owners.axis, self._ledger, members, what) for members in self.owners.rounds]
        for visit in visits:
            visit.start()
            visit.arrive()
        for lane in lanes:
            lane.wait()
            lane.master.fetch()  # type: ignore[union-attr]  # it trains, so it has one
        try:
            with self.state.shown(), self.calls.in_groups(self.calls.everything()):
                return method()
        finally:
            for lane in lanes:
                lane.master.spill()  # type: ignore[union-attr]  # it trains, so it has one
                lane.catch_up()
            for visit in visits:
                visit.send_back()
                visit.finish()
            self.engine.forget_gathered()
            self._publish([unit for unit in self._units if any(lane.grads is not None for lane in unit.lanes)])
            self.engine.publish_codes()
            if self._plain:
                self.state.drain()

    # ---- step

    def step(self, closure: Callable[[], Any] | None) -> Any:
        self.running = True
        try:
            return self._step(closure)
        finally:
            self.running = False

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        self.state.heed_new_state()
        self.engine.check_weights("step() was called")
        self._run_hooks("pre")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lanes = {slot.lane for slot in self.segments.slots.values()}
        profiled = torch.profiler.record_function(f"Optimizer.step#{type(self.optimizer).__name__}.step")
        with self.engine.stepping(lanes, self._describe_step, self._after_step) as order, profiled:
            if not self._forbidden():
                self._update_all(order)
        if self._first:
            self._first = False
            trim_host_memory()
        if self._plain:
            self.state.drain()  # nothing waits for a publish in a forward without hooks
        self._run_hooks("post")
        return loss

    def _after_step(self) -> None:
        if self.streaming is not None:
            self.streaming.step_queued()
        if self._auto is not None:
            self._auto.after_step()

    def _describe_step(self) -> dict[str, Any]:
        """What a rank that is out of data must know to take the same step: see features/join.py."""
        found = {name: getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf")}
        return {
            "optimizer": [each is self.optimizer for each in self._peers].index(True),
            "settings": settings.encode(self.optimizer.param_groups),
            "amp": {name: float(value) for name, value in found.items() if value is not None},
        }

    def _forbidden(self) -> bool:
        """Gradients are not finite and such steps are to be skipped."""
        if getattr(self.optimizer, "found_inf", None) is not None:
            if self._releases is not None and self._releases.done:
                raise RuntimeError(
                    "GradScaler scales gradients that release=True has used up inside backward; leave release= out, or "
                    "train in bf16, which needs no scaler."
                )
            return False  # GradScaler has looked, and the optimizer heeds it
        return self.engine.feature(NonFinite).forbids(_with_gradient(self._in_groups()))

    def _in_groups(self) -> list[Slot]:
        """Of the parameters that its groups hold."""
        return [self.segments.slots[id(param)] for group in self.optimizer.param_groups for param in group["params"]]

    @torch.no_grad()
    def _release(self, unit: Unit) -> None:
        """A unit's gradients are there, inside backward: see Note [Release]."""
        self._update([unit], bounded=True)

    def _has_owners(self, unit: Unit) -> bool:
        """Some of it is computed whole, by rounds that take all of its gradients together: in step()."""
        return any(id(slot.param) in self.owners.owned for slot in unit.slots)

    def _run_hooks(self, when: str) -> None:
        """The user's step hooks, once per step, with the user's own parameters in the groups."""
        everyone = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks")
        own = getattr(self.optimizer, f"_optimizer_step_{when}_hooks")
        for hook in (*everyone.values(), *own.values()):
            hook(self.optimizer, (), {})

    def _update_all(self, order: list[Unit]) -> None:
        lanes = dict.fromkeys((slot.unit, slot.lane) for slot in self._in_groups())
        caught = {unit for unit, lane in lanes if lane.catch_up()}  # with delay=1: forward sees their last update now
        journeys = self._journeys()
        if not self.calls.separable:
            self._update_together(order, journeys)
            return
        # A unit of both sorts is published once, by its last round.
        last = {member.slot.unit: journey for journey in journeys for member in journey.members}
        released: set[Unit] = set() if self._releases is None else self._releases.done
        changed: list[Unit] = []
        for unit in order:
            if (self._update([unit]) or unit in released or unit in caught) and unit not in last:
                changed.append(unit)
            if self.streaming is None:  # else publishing one would wait for its update, and the next not be queued
                self._publish(changed)
        self._publish(changed)

        def done(journey: Journey) -> None:
            members = dict.fromkeys(member.slot.unit for member in journey.members)
            self._publish([unit for unit in members if last[unit] is journey])

        for some in [journeys] if self._plan.overlap else [[journey] for journey in journeys]:  # the same bits
            exchange.run(some, lambda journey: self.calls.call(self._by_group(journey.mine)), done)
        self.calls.count()

    def _publish(self, units: list[Unit]) -> None:
        for unit in units:
            self.engine.publish(unit)
        units.clear()

    def _update_together(self, units: list[Unit], journeys: list[Journey]) -> None:
        """An optimizer with counters of its own is called once: over segments and wholes alike."""
        for journey in journeys:
            journey.start()
        for journey in journeys:
            journey.arrive()
        wholes = self._by_group([member for journey in journeys for member in journey.mine]) if journeys else None
        changed = self._update(units, wholes)
        for journey in journeys:
            journey.send_back()
        for journey in journeys:
            journey.finish()
            changed |= {member.slot.unit for member in journey.members}
        self._publish([unit for unit in units if unit in changed])

    # ---- segments

    def _update(
        self, units: list[Unit], wholes: list[list[nn.Parameter]] | None = None, bounded: bool = False
    ) -> set[Unit]:
        """Gradients in, master out, for the segments of these units, and wholes that go with them (by group, of which
        this rank may have none); the units whose master has changed."""
        members = {id(slot.param): slot for unit in units for slot in _with_gradient(unit.slots)}
        work: list[list[Tensor]] = []
        for group in self.optimizer.param_groups:
            work.append([p for p in group["params"] if id(p) in members and id(p) not in self.owners.owned])
        lanes = list(dict.fromkeys(members[id(p)].lane for params in work for p in params))
        if not lanes and wholes is None and (self.calls.separable or not self.calls.counts):
            return set()
        for lane in lanes:
            lane.wait()  # an earlier publish nobody waited for (its reader) -> this update (the writer)
        changed = {unit for unit in units if any(lane in lanes for lane in unit.lanes)}
        if self.streaming is not None:
            if self._auto is not None:
                self._auto.before_update()
            streamed = [lane for lane in lanes if self.streaming.takes(lane)]
            self.streaming.update(work, streamed, bounded)
            lanes = [lane for lane in lanes if lane not in streamed]
            work = [[p for p in params if members[id(p)].lane in lanes] for params in work]
        records = _begin_updates(self._observer, lanes) if self._observer.on else ()
        if self.one_pass.kernel is not None and self.one_pass.takes(lanes):
            self.one_pass.update(work, lanes)
        elif lanes or wholes is not None or not self.calls.separable:
            self._stock_update(work, lanes, wholes)
        for record in reversed(records):
            self._observer.end(record)
        return changed

    def _stock_update(
        self, work: list[list[Tensor]], lanes: list[Lane], wholes: list[list[nn.Parameter]] | None
    ) -> None:
        """The optimizer's own step over segments, with the groups showing only these."""
        widened, widened_nbytes = {lane for lane in lanes if not _settle_scales(lane)}, 0
        for lane in lanes:
            lane.master.fetch()  # type: ignore[union-attr]  # it trains, so it has one
        given: list[list[nn.Parameter]] = [list(params) for params in wholes] if wholes else [[] for _ in work]
        for mine, params in zip(given, work):
            for param in params:
                segment = self.segments.parts.get(id(param))
                if segment is not None:
                    slot = self.segments.slots[id(param)]
                    segment.grad = _master_gradient(slot, segment)
                    widened_nbytes += segment.grad.nbytes if slot.lane in widened else 0
                    mine.append(segment)
        self._ledger.add("update", widened_nbytes)
        try:
            self.calls.call(given)
        finally:
            for lane in lanes:
                lane.master.spill()  # type: ignore[union-attr]  # it trains, so it has one
            self._ledger.drop("update", widened_nbytes)

    # ---- owners

    def _journeys(self) -> list[Journey]:
        """This step's rounds: of each, what has a gradient. All ranks must agree, or they would exchange parts of
        different lengths."""
        if not self.owners.rounds:
            return []
        usable = {slot for each in self.owners.rounds for slot in _with_gradient([owned.slot for owned in each])}
        found = [[owned for owned in each if owned.slot in usable] for each in self.owners.rounds]
        self._compare_gradients([owned.slot.name for each in found for owned in each])
        for lane in dict.fromkeys(owned.slot.lane for each in found for owned in each):
            _settle_scales(lane)
        axis, ledger, name = self.owners.axis, self._ledger, type(self.optimizer).__name__
        return [
            Journey(axis, ledger, members, f"{name}: journey of {members[0].slot.name!r} and {len(members) - 1} more")
            for members in found
            if members
        ]

    def _compare_gradients(self, names: list[str]) -> None:
        number = zlib.crc32("\n".join(names).encode())
        label = "agreement on which parameters have a gradient"
        highest, lowest = verbs.agree_max(self.owners.axis, torch.tensor([number, -number]), label).tolist()
        if highest != -lowest:
            same_everywhere(self.owners.axis, "parameters with a gradient", names)

    def _by_group(self, members: Iterable[Owned]) -> list[list[nn.Parameter]]:
        """The wholes computed here, by the group of their parameters and in its order."""
        wholes = {id(member.slot.param): member.whole for member in members}
        groups = self.optimizer.param_groups
        return [[w for p in group["params"] if (w := wholes.get(id(p))) is not None] for group in groups]

    # ---- state

    def add_param_group(self, group: dict[str, Any]) -> None:
        """A new group of the model's own parameters; a drop-in takes new ones. A refused one leaves no trace."""
        groups = self.optimizer.param_groups
        count = len(groups)
        type(self.optimizer).add_param_group(self.optimizer, group)
        try:
            self.enrol(groups[count:])
            kinds = self._check()
        except BaseException:
            del groups[count:]
            raise
        self.kinds = self.calls.kinds = kinds
        self._give_owners(range(count, len(kinds)))
        for param in groups[-1]["params"]:
            self.segments.make(param)
        self.one_pass.check()

    def unshard(self, whole: dict[Tensor, dict[str, Any]]) -> None:
        """The optimizer is the user's alone again, with this state."""
        self.optimizer.state = defaultdict(dict, whole)
        self.unpatch()


def _with_gradient(slots: Sequence[Slot]) -> list[Slot]:
    """Those of which a step can use the gradient."""
    lanes = {slot.lane for slot in slots}
    usable = {lane: lane.grads for lane in lanes if lane.grads is not None and lane.grads.state is not State.RELEASED}
    return [slot for slot in slots if slot.lane in usable and usable[slot.lane].has[slot.index]]


def _begin_updates(observer: Observer, lanes: Sequence[Lane]) -> list[Record]:
    masters = [(lane.place, lane.master) for lane in lanes if lane.master is not None]
    return [observer.begin("update", place, master.numel * master.dtype.itemsize) for place, master in masters]


def _settle_scales(lane: Lane) -> bool:
    """Remembered factors are multiplied into the sum where it is as wide as the master, so that the user sees
    what was used; else into the wide copy that is made of each part. Whether it was."""
    grads = lane.grads
    assert grads is not None and lane.master is not None
    as_wide = grads.dtype == lane.master.dtype
    if as_wide:
        grads.apply_scales()
    return as_wide


def _master_gradient(slot: Slot, segment: nn.Parameter) -> Tensor:
    """One segment's gradient in the master's dtype and the segment's shape."""
    grads = slot.lane.grads
    assert grads is not None
    part, factor = grads.local(slot.index), grads.scales[slot.index]
    if part.dtype != segment.dtype:
        part = part.to(segment.dtype)
        if factor is not None:
            part.mul_(factor)
    return part.view(segment.shape)
