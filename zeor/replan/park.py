"""park and unpark: a sharded model and its optimizers leave the device while something else needs it, and come back.

    park      ranks agree that nothing is under way -> values to host memory -> the device's memory is given back
    unpark    memory again, on every rank or on none -> values

What moves is what rests on the device: compute, masters, moments, averages (zeor.ema), and the buffers that gradients
arrive in, whose values mean nothing between steps. What rests on the host or on disk stays there. While a model is
parked its parameters are hidden, and an `Announcer` that knows of it refuses whoever comes with one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from zeor.access.sharded import Sharded, state_of
from zeor.comm.agree import everywhere
from zeor.comm.attendance import attend
from zeor.memory import device as devices
from zeor.replan.moment import check_moment, check_optimizers, optimizers_of
from zeor.step.engine import Engine
from zeor.tiers.parking import Parking


def park(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
    """Move a sharded model and its optimizers off the device, to pinned host memory; zeor.unpark brings them back with
    the same bits. For an inference engine that needs the device between updates.

        zeor.push(model, send)                # the engine has the weights of this moment
        zeor.park(model, optimizer)
        texts = engine.generate(prompts)
        zeor.unpark(model, optimizer)

    Every rank calls it, between optimizer.zero_grad() and the next forward, inside zeor.no_sync too, with all
    optimizers of the model. Until zeor.unpark whatever needs the model (a forward, step(), zeor.save, reading a
    parameter) is refused; zeor.report says how much is where. Objects stay the same: parameters, optimizer, schedulers,
    loaders.

    It takes as much host memory as zeor.report says is on the device, which is kept for the next time; at stage 3 that
    is a slice, at stages 0 to 2 each rank parks all of compute. Buffers of the model stay. Where something fails, on
    any rank, all raise and the model is where it was. A tensor of the optimizer's state that you kept is not to be read
    while parked: its memory is somebody else's."""
    state = state_of(model)
    if state.pipeline is not None:
        raise ValueError("zeor.park was given a stage of a pipeline, whose schedule drives it; it stays on the device.")
    engine, axis = state.engine, state.engine.axes.whole
    attend(axis, "zeor.park")

    def ready() -> None:
        check_moment(state, "zeor.park")
        if engine.announcer.block is not None:
            raise RuntimeError("zeor.park was called inside zeor.join; call it outside.")
        check_optimizers(state, optimizers_of(optimizer), "zeor.park")

    everywhere(axis, ready, "check of zeor.park", RuntimeError)
    parking: Parking = everywhere(axis, lambda: _copied(state), "parking of a model", RuntimeError)
    _hide(engine)
    state.held_before = state.nbytes()
    parking.free()
    engine.announcer.parked, state.parking, state.host = True, parking, None
    devices.DeviceMemory(engine.axes.device).give_back()


def unpark(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
    """Bring a parked model and its optimizers back to the device, with the bits they had; every rank calls it. Where
    there is not enough memory on any rank all raise, and the model stays parked: free some, and call it again."""
    state = state_of(model, parked=True)
    engine, parking = state.engine, state.parking
    attend(engine.axes.whole, "zeor.unpark")

    def ready() -> None:
        if parking is None:
            raise RuntimeError(
                "zeor.unpark was given a model that is not parked; call zeor.park(model, optimizer) first."
            )
        check_optimizers(state, optimizers_of(optimizer), "zeor.unpark")
        parking.allocate()

    try:
        everywhere(engine.axes.whole, ready, "memory for a parked model", RuntimeError)
    except BaseException:
        if parking is not None and parking.here:
            parking.free()
        raise
    parking.copy_in()
    state.host, state.parking, state.held_before = parking.take_host(), None, None
    engine.announcer.parked = False
    for unit in engine.units:
        unit.wait()  # shows its parameters, where they are here


def _copied(state: Sharded) -> Parking:
    """What is to go, and its values on the host. Nothing that a later forward would not bring again is changed."""
    engine = state.engine
    engine.drain()
    for unit in engine.units:
        if unit.frees:
            unit.free()
    engine.passes.forget_gathered()
    engine.ledger.sweep()
    for unit in engine.units:
        if any(lane.is_watched for lane in unit.lanes):
            raise RuntimeError(
                f"zeor.park: something still holds a tensor over parameters of unit {unit.name!r} (a loss or an output "
                "with its graph, param.data, a view, an array); let go of it first."
            )
    engine.ledger.forget_idle()
    parking = Parking(engine.axes.device, _tensors(state), _voids(engine))
    parking.copy_out(state.host)
    return parking


def _tensors(state: Sharded) -> Iterator[Tensor]:
    for unit in state.engine.units:
        for lane in unit.lanes:
            yield from lane.on_device()
    for stepper in state.steppers:
        yield from stepper.state.on_device()
    for average in state.averages:
        yield from average.on_device()


def _voids(engine: Engine) -> Iterator[Tensor]:
    for unit in engine.units:
        for lane in unit.lanes:
            if lane.grads is not None and lane.grads.kept_buffer is not None:
                yield lane.grads.kept_buffer


def _hide(engine: Engine) -> None:
    for unit in engine.units:
        for lane in unit.lanes:
            lane.keep_writes()
            lane.hide()
