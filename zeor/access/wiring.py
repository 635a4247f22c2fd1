"""Another wire during a run: what `zeor.set_wire` does to each lane.

Gradients may travel by any wire from the next backward on. Weights may where lanes have the memory for it: at stage 3,
and at lower stages where the run began with a wire for weights (Note [Parted] in step/lane.py). What gradients have
left unsent is added to the next ones exactly. Nothing changes before all ranks know that all of it can be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeor.comm.agree import everywhere, same_everywhere
from zeor.plan import Plan, Wire
from zeor.spec.lane_spec import LaneSpec
from zeor.spec.wires import check_wire, lane_wires
from zeor.step.engine import Engine
from zeor.step.lane import Lane


def set_wire(engine: Engine, wire: Wire) -> None:
    """Every rank calls it, outside forward and backward."""
    everyone = engine.axes.everyone
    same_everywhere(everyone, "wires", [str(wire)])
    lanes = [lane for unit in engine.units for lane in unit.lanes]
    plan, specs = everywhere(everyone, lambda: _checked(engine, lanes, wire), "check of another wire", RuntimeError)
    engine.drain()
    engine.flush_residuals("before another wire")
    engine.plan = plan
    for lane, spec in zip(lanes, specs):
        lane.follow(spec)
    engine.forget_gathered()


def _checked(engine: Engine, lanes: Sequence[Lane], wire: Wire) -> tuple[Plan, list[LaneSpec]]:
    """The plan with this wire, and what it makes of each lane."""
    plan = replace(engine.plan, wire=wire)
    check_wire(plan, engine.axes.sizes)
    if engine.forward.walk is not None or engine.backward.running:
        raise RuntimeError("zeor.set_wire was called inside a forward or backward of the model; call it outside.")
    specs = [replace(lane.spec, wires=lane_wires(lane.key, wire, lane.layout, lane.spec.grid)) for lane in lanes]
    if any(spec.parted and not lane.parted for lane, spec in zip(lanes, specs)):
        raise ValueError(
            f"zeor.set_wire: weights cannot begin to travel as {wire.gather!r} (across: {wire.axes[1].gather!r}), as "
            "what is updated is a part of what forward reads; give zeor.shard wire='auto', or a wire whose gathers are "
            "not exact, which may be changed later, or use stage 3."
        )
    return plan, specs
