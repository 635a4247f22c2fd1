"""`zeor.save` and `zeor.load`: a training run, as one folder that any number of ranks can load.

Thin: they find out what belongs to the run and hand over to save.py and load.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from torch import nn
from torch.optim import Optimizer

from zeor.checkpoint import load as loading
from zeor.checkpoint.files.errors import all_there, lost_peers
from zeor.checkpoint.files.urls import Place, place_of, shown
from zeor.checkpoint.load import Loaded
from zeor.checkpoint.save import Run
from zeor.checkpoint.saver import Content, Saving, Target, saver_of
from zeor.runtime import events
from zeor.runtime.sharded import ATTRIBUTE

log = logging.getLogger("zeor")


@overload
def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    data: Any = None,
    keep: int | None = 3,
    asynchronous: Literal[False] = False,
    busy: str = "wait",
) -> Place: ...


@overload
def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    data: Any = None,
    keep: int | None = 3,
    asynchronous: Literal[True],
    busy: str = "wait",
) -> Saving: ...


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    data: Any = None,
    keep: int | None = 3,
    asynchronous: bool = False,
    busy: str = "wait",
) -> Place | Saving:
    """Write a checkpoint of a sharded run into `folder`; every rank calls it. Returns where it is.

    It appears as `folder/step-...` at once and whole, or not at all. A full disk or a lost mount leaves what was there
    before, and raises zeor.CheckpointError on every rank: training may go on. Where only some ranks call it, they raise
    it after a minute, naming the others (a warning does after 5 s). Where a rank dies nothing is lost either: the
    others raise it too, naming the rank where that is known. No pickle is written.

    folder  a path that ranks share or, where they do not, that each host has: it then keeps the files of its own ranks.
            Or a URL that fsspec knows ("s3://bucket/run"; ranks share it).
    step    of the run. The latest checkpoint of a folder is the one that was saved last.
    extra   numbers, strings, lists, dicts, tensors, or objects with a state_dict() (schedulers, scalers, zeor.ema):
            rank 0's.
    data    a loader with a state_dict(): each rank's position.
    keep    how many checkpoints stay in the folder, those that this run came from before others; None: all.

    asynchronous=True returns a zeor.Saving (`.wait()` gives the path, `.done`) as soon as this rank's part is copied to
    the host; the values are those at the call, and a thread writes them while training goes on. An error is raised by
    wait() or the next save, and logged at exit, where the last save is waited for (wait() before you destroy the
    process group). busy: what a save does while the one before is under way, "wait" for it or "raise". Where host
    memory is too short for the copy, the checkpoint is written at once, with a warning.
    """
    run = run_of(model, optimizer)
    content = _content(folder, step, extra, data, keep)
    if busy not in ("wait", "raise"):
        content = content._replace(error=ValueError(f"zeor.save(busy={busy!r}): give 'wait' or 'raise'."))
    _refuse_where_ranks_have_left(run, "zeor.save")
    with lost_peers(run.mesh, *content.target.lost_words):
        all_there(run.mesh, "zeor.save")
        return saver_of(run).save(run, content, later=asynchronous, refuse=busy == "raise")


def _content(folder: Any, step: Any, extra: Any, data: Any, keep: Any) -> Content:
    """What is wrong with it is told to the other ranks first, then raised: they wait to hear of it."""
    try:
        check_step("zeor.save", step)
        return Content(Target(checked("zeor.save", folder, extra, data, keep), step, keep), extra, data, None)
    except Exception as error:
        return Content(Target(folder, step, keep), extra, data, error)


def check_step(who: str, step: Any) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"{who}(step={step!r}): give the number of steps taken, 0 or more.")


def checked(who: str, folder: Any, extra: Any, data: Any, keep: Any) -> Place:
    """Where the folder is; ValueError where no checkpoint could be made of these. `who` was given them."""
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"{who}(keep={keep!r}): give how many checkpoints stay, at least 1, or None for all.")
    check_extra(who, extra)
    if data is not None and not hasattr(data, "state_dict") and not isinstance(data, Mapping):
        raise ValueError(f"{who}(data=...): {type(data).__name__} has no state_dict(); give a loader that has one.")
    if not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"{who}(folder={folder!r}): give a path or a URL.")
    try:
        named = b"\0" not in os.fsencode(folder)
    except UnicodeError:  # a lone surrogate
        named = False
    if not named:
        told = shown(str(os.fspath(folder)))
        raise ValueError(f"{who}(folder={told!r}): no folder can have that name; give another.")
    return place_of(folder)


def check_extra(who: str, extra: Any) -> None:
    if extra is not None and not isinstance(extra, Mapping):
        raise ValueError(f"{who}(extra=...): {type(extra).__name__} has no names; give a dict of what to save by name.")


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    data: Any = None,
    strict: bool = True,
) -> Loaded:
    """Load the latest checkpoint of `folder`, or the one it is, into a sharded run of any world, stage and precision.

    Parameters, masters, optimizer state, groups and buffers come back in every bit; random generators too where the
    world is the same. `extra` and `data`: objects to load what was saved under the same names into. Everything is
    verified before anything changes; what is wrong raises zeor.CheckpointError on every rank. strict=False loads what
    fits and lists the rest.
    """
    run = run_of(model, optimizer)
    _refuse_where_ranks_have_left(run, "zeor.load")
    with lost_peers(run.mesh, f"Loading {shown(str(folder))}", "Nothing of the run has changed."):
        all_there(run.mesh, "zeor.load")
        saver_of(run).settle()  # what is being written may be the latest
        loaded = loading.load(run, place_of(folder), extra, data, strict)
    if run.mesh.rank == 0:
        log.info("loaded step %d from %s, written by %d rank(s)", loaded.step, shown(str(loaded.path)), loaded.world)
    return loaded


def _refuse_where_ranks_have_left(run: Run, what: str) -> None:
    """Inside zeor.join a rank that is out of data cannot come: all are told at once, before any waits for it."""
    if run.engine.joining is not None:
        run.engine.announce(events.OTHER, what)


def run_of(model: nn.Module, optimizer: Any) -> Run:
    """The run a model and its optimizers are: sharded together, or a plain model with a drop-in optimizer."""
    state = vars(model).get(ATTRIBUTE)
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer is not None else []
    if state is not None:
        if state.shown:
            raise RuntimeError("zeor.save and zeor.load cannot run inside zeor.full_params; close that first.")
        known = {id(stepper.optimizer): stepper for stepper in state.steppers}
        for each in given:
            if id(each) not in known:
                raise ValueError(f"This {type(each).__name__} was not sharded with the model; zeor.shard both first.")
        return Run(model, state.engine, [known[id(each)] for each in given] if given else state.steppers)
    steppers = [getattr(each, "_zeor", None) for each in given]
    if len(steppers) != 1 or steppers[0] is None:
        raise ValueError(
            "This model is not sharded; call zeor.shard(model, optimizer) first, or give the one zeor.optim optimizer "
            "that trains it."
        )
    return Run(model, steppers[0].engine, steppers)
