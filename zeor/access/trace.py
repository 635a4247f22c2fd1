"""`zeor.trace`: what a few steps did and when, on every rank, in one file for a trace viewer.

Inside the block the model's observer (comm/observe.py) keeps records; at its end they travel to rank 0, which writes
the file whole or not at all. What the events look like: chrome.py. Whose clock they are on: comm/clocks.py.
"""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from torch.optim import Optimizer

from zeor.access import chrome
from zeor.access.sharded import engine_of, state_of
from zeor.comm import transfers
from zeor.comm.agree import exchange, same_everywhere, together
from zeor.comm.attendance import attend
from zeor.comm.axes import Axis
from zeor.comm.clocks import offset_ns
from zeor.memory.device import describe
from zeor.step.engine import Engine


@contextmanager
def trace(model: Any, path: str | os.PathLike[str], steps: int | None = None) -> Iterator[None]:
    """Write what the block did to one file, which ui.perfetto.dev and chrome://tracing show: every gather, reduce,
    update, publish, fetch, spill and exposed wait of every rank, and bytes by role. `model`: a sharded one, or a
    `zeor.optim` optimizer. `path`: on rank 0's host; with .gz at its end it is compressed. `steps`: stop after so many
    optimizer steps. Every rank enters and leaves; after an exception nothing is written."""
    engine = engine_of(model)
    _check_here(engine, steps)
    file = Path(path).absolute()
    axis, observer = engine.axes.everyone, engine.observer
    base = perf_counter_ns()
    attend(axis, "zeor.trace")
    same_everywhere(axis, "arguments of zeor.trace", [f"path {os.fspath(path)!r}", f"steps {steps}"])
    together(axis, lambda: _check_file(file) if axis.rank == 0 else None, "check of a trace's path", ValueError)
    base, offset = exchange(axis, base, "beginning of a trace")[0], offset_ns(axis)
    with observer.listening(axis.device, steps, _residents(engine, model)) as records:
        yield
        clock = chrome.Clock(base, offset, perf_counter_ns(), observer.clock)
    if clock.device is not None:
        clock.device.finish()
    name = f"rank {axis.rank}, {describe(axis.device)}"
    mine = chrome.encode(chrome.events_of(axis.rank, name, records, observer.counts, clock))
    attend(axis, "the end of zeor.trace")
    parts = _gathered(axis, mine)
    together(axis, lambda: _write(file, parts) if axis.rank == 0 else None, "writing of a trace", OSError)


def _check_here(engine: Engine, steps: int | None) -> None:
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"zeor.trace takes steps of at least 1, or None for the whole block; it was given {steps!r}.")
    if engine.observer.records is not None:
        raise RuntimeError("zeor.trace is open for this model already; leave it before another is entered.")
    if engine.announcer.block is not None:
        raise RuntimeError("zeor.trace was entered inside zeor.join, where a rank may be out of data; enter it around.")


def _check_file(file: Path) -> None:
    if file.is_dir():
        raise ValueError(f"{file} is a folder; give zeor.trace the name of a file in it, such as trace.json.gz.")
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent}, where zeor.trace is to write, is no folder; make it first.")


def _residents(engine: Engine, model: Any) -> Callable[[], dict[str, int]]:
    """Bytes at rest on this rank by role."""
    steppers: list[Any] = [vars(model)["_zeor"]] if isinstance(model, Optimizer) else state_of(model).steppers
    return lambda: {**engine.nbytes(), "moments": sum(stepper.state.moments_nbytes() for stepper in steppers)}


def _gathered(axis: Axis, mine: bytes) -> list[bytes]:
    """Every rank's part on rank 0; this rank's alone elsewhere, and in an imagined world."""
    if axis.size == 1 or axis.fake:
        return [mine]
    label = "gathering of a trace"
    sizes = exchange(axis, len(mine), label)
    found = {0: mine}
    moved = [transfers.Transfer(rank, 0, size) for rank, size in enumerate(sizes) if rank]

    def take(transfer: transfers.Transfer, data: Any) -> None:
        found[transfer.source] = data.numpy().tobytes()

    transfers.move(axis, moved, lambda _: transfers.as_tensor(mine), take, label)
    return [found[rank] for rank in sorted(found)]


def _write(file: Path, parts: list[bytes]) -> None:
    """All of it, or nothing; what stood there stays until then."""
    data = chrome.document(parts)
    beside = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as out:
            out.write(gzip.compress(data, 5) if file.suffix == ".gz" else data)
        os.replace(beside, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(f"zeor.trace could not write {file}: {error.strerror or error}.") from error
