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
from zeor.checkpoint import save as saving
from zeor.checkpoint.files.errors import all_there, lost_peers
from zeor.checkpoint.files.urls import Place, place_of, shown
from zeor.checkpoint.load import Loaded, What
from zeor.checkpoint.run import TrainingRun, run_of
from zeor.checkpoint.save import Destination, SaveRequest
from zeor.checkpoint.saver import Saving, saver_of
from zeor.comm.agree import same_everywhere

log = logging.getLogger("zeor")


@overload
def save(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None, *,
    step: int, extra: Mapping[str, Any] | None = None, data: Any = None, keep: int | None = 3,
    asynchronous: Literal[False] = False, busy: str = "wait",
) -> Place: ...  # fmt: skip


@overload
def save(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None, *,
    step: int, extra: Mapping[str, Any] | None = None, data: Any = None, keep: int | None = 3,
    asynchronous: Literal[True], busy: str = "wait",
) -> Saving: ...  # fmt: skip


def save(  # noqa: PLR0913 (public: each option is a keyword)
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
    request = _request(folder, step, extra, data, keep)
    if busy not in ("wait", "raise"):
        request = request._replace(error=ValueError(f"zeor.save(busy={busy!r}): give 'wait' or 'raise'."))
    run.announce_if_joining("zeor.save")
    with lost_peers(run.everyone, *request.to.lost_words):
        all_there(run.everyone, "zeor.save")
        _as_one(run, folder)
        saver = saver_of(run)
        request = saver.after_last(request, refuse=busy == "raise")
        return saver.start(run, request) if asynchronous else saving.save(run, request)


def _as_one(run: TrainingRun, folder: Any) -> None:
    """Stages of a pipeline are saved and loaded as one model: ValueError, on every rank, where they are none."""
    if not run.stages:
        return
    kinds = [f"optimizer {number}: {type(each.optimizer).__name__}" for number, each in enumerate(run.steppers)]
    same_everywhere(run.everyone, "folders and optimizers, which are one for all stages,", [shown(str(folder)), *kinds])
    run.learn_names()


def _request(folder: Any, step: Any, extra: Any, data: Any, keep: Any) -> SaveRequest:
    """What is wrong with it is raised when the other ranks have heard it: they wait for this one."""
    try:
        check_step("zeor.save", step)
        return SaveRequest(Destination(checked("zeor.save", folder, extra, data, keep), step, keep), extra, data)
    except Exception as error:
        return SaveRequest(Destination(folder, step, keep), extra, data, error)


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
        name = shown(str(os.fspath(folder)))
        raise ValueError(f"{who}(folder={name!r}): no folder can have that name; give another.")
    return place_of(folder)


def check_extra(who: str, extra: Any) -> None:
    if extra is not None and not isinstance(extra, Mapping):
        raise ValueError(f"{who}(extra=...): {type(extra).__name__} has no names; give a dict of what to save by name.")


def load(  # noqa: PLR0913 (public: each option is a keyword)
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    data: Any = None,
    strict: bool = True,
    only: str | None = None,
) -> Loaded:
    """Load the latest checkpoint of `folder`, or the one it is, into a sharded run of any world, stage and precision.

    Parameters, masters, optimizer state, groups and buffers come back in every bit; random generators too where the
    world is the same. `extra` and `data`: objects to load what was saved under the same names into. Everything is
    verified before anything changes; what is wrong raises zeor.CheckpointError on every rank. strict=False loads what
    fits and lists the rest. only="weights": parameters and buffers alone; optimizers, whichever the model has and
    whichever the checkpoint holds, and random generators stay as they are.
    """
    if only not in (None, "weights"):
        raise ValueError(f"zeor.load(only={only!r}): give 'weights', or leave it out for the whole run.")
    if only is not None and not (optimizer is None and extra is None and data is None):
        raise ValueError("zeor.load(only='weights') loads no optimizer=, extra= or data=; leave them out.")
    run = run_of(model, optimizer)
    if only is not None:
        run.steppers = []
    run.announce_if_joining("zeor.load")
    with lost_peers(run.everyone, f"Loading {shown(str(folder))}", "Nothing of the run has changed."):
        all_there(run.everyone, "zeor.load")
        _as_one(run, folder)
        saver_of(run).settle()  # what is being written may be the latest
        loaded = loading.load(run, place_of(folder), extra, data, What(strict, only is not None))
    if run.everyone.rank == 0:
        log.info("loaded step %d from %s, written by %d rank(s)", loaded.step, shown(str(loaded.path)), loaded.world)
    return loaded
