"""What is loaded beside model and optimizers: schedulers, scalers, other modules, the data loader's position, and the
random generators.

They are strangers: only their own `load_state_dict` says whether a state fits. So they are asked before the model
changes, and what had taken its state already is put back where another one, here or on another rank, refuses. A loader
comes last and is not put back: the run is as it was, and whoever loads again sends it to a position again.

A position that is counted over all ranks together, as zeor.data's, fits any number of ranks; one of each rank's own
(torchdata's loader, a stream cut by files) belongs to the world it was saved at. So do a rank's random generators:
their states, plain values, are checked before they are set again.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.files.urls import Place
from zeor.comm.axes import Axis

_NUMPY_WORDS = 624  # of its generator's state; numpy itself reads at whatever position it is told

log = logging.getLogger("zeor")


def position_of(path: Place, saved: Any, axis: Axis, strict: bool) -> Any:
    """The entry of the manifest's `data` that this rank goes on from, encoded; None where none was saved."""
    entries = saved if isinstance(saved, list) else []
    if not any(entry is not None for entry in entries):
        if strict:
            raise CheckpointError(f"{path} holds no position of a data loader; leave out data=, or pass strict=False.")
        return None
    entry = entries[axis.rank % len(entries)]
    anywhere = isinstance(entry, dict) and "zeor_data" in entry and all(each == entry for each in entries)
    if len(entries) != axis.size and not anywhere:
        raise CheckpointError(
            f"{path} holds a position of the data loader for each of {len(entries)} ranks, and there are {axis.size} "
            f"here; load at {len(entries)} ranks, or leave out data= and begin an epoch, or use zeor.data.shard's "
            "loader on data that all ranks share: its position fits any number of ranks."
        )
    return entry


def go_to(loader: Any, position: Any) -> None:
    """Before the generators come back: torchdata's loader goes to its position when it is iterated first, and draws
    random numbers on the way which the saved run did not draw there; so it is sent there now."""
    loader.load_state_dict(position)
    if hasattr(loader, "next_iter_state"):
        loader.state_dict()


class Attached:
    def __init__(self, path: Place, objects: Mapping[str, Any], loader: Any):
        self._path, self._objects, self._loader = path, objects, loader
        self._before: list[tuple[Any, Any]] = []  # object and the state it had

    def check(self) -> None:
        """That what was given can be loaded at all."""
        if self._loader is not None and not hasattr(self._loader, "load_state_dict"):
            raise CheckpointError(
                f"data= is a {type(self._loader).__name__}, which cannot be sent to a position; give what "
                "zeor.data.shard returned, torchdata's StatefulDataLoader, or leave out data=."
            )

    def take(self, states: Mapping[str, Any], position: Any) -> None:
        """States by name for the objects, and the loader's position, last: torchdata's cannot be asked for its own
        without being set going."""
        for name, each in self._objects.items():
            if name in states:
                self._take(f"extra={{{name!r}: ...}}", each, states[name])
        if position is not None:
            try:
                go_to(self._loader, position)
            except Exception as error:
                raise self._misfit("data=", self._loader, error) from error

    def put_back(self) -> None:
        while self._before:
            each, state = self._before.pop()
            try:
                each.load_state_dict(state)
            except Exception as error:  # the one that refused: why the load failed is said already
                log.debug("zeor: a %s does not take its own state back: %s", type(each).__name__, error)

    def _take(self, given: str, each: Any, state: Any) -> None:
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{self._path} holds a {type(state).__name__} for {given}, and a {type(each).__name__} wants a state; "
                "leave it out, and find the value in what load returns."
            )
        before = None  # the state it has now, if it can be had
        with contextlib.suppress(Exception):
            before = copy.deepcopy(each.state_dict())
        state = _as_before(state, before)
        if before is not None:
            self._check_names(given, each, state, before)
            self._before.append((each, before))
        try:
            each.load_state_dict(state)
        except Exception as error:
            raise self._misfit(given, each, error) from error

    def _check_names(self, given: str, each: Any, state: dict[str, Any], before: Any) -> None:
        """Many take a state into their attributes as it is: nothing new may stand where a method does."""
        for name in state:
            if name not in before and isinstance(name, str) and callable(getattr(type(each), name, None)):
                raise CheckpointError(f"{self._path}: {name!r} of {given} is no value of a {type(each).__name__}.")

    def _misfit(self, given: str, each: Any, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: what was saved for {given} does not fit this {type(each).__name__} "
            f"({type(error).__name__}: {str(error)[:300]})."
        )


def _as_before(state: dict[str, Any], before: Any) -> dict[str, Any]:
    """A file knows plain dictionaries only: what was of a more special kind is again."""
    kinds = (collections.Counter, collections.OrderedDict)
    old = before if isinstance(before, dict) else {}
    return {k: type(old[k])(v) if type(v) is dict and type(old.get(k)) in kinds else v for k, v in state.items()}


# ---- random generators


def rng_state(device: torch.device) -> dict[str, Any]:
    version, keys, gauss = random.getstate()
    kind, words, position, has_gauss, other_gauss = np.random.get_state()
    numbers = torch.from_numpy(np.asarray(words).astype(np.int64))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(keys), gauss),
        "numpy": (str(kind), numbers, int(position), int(has_gauss), float(other_gauss)),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def check_rng(where: str, state: Any, device: torch.device) -> None:
    """That generators can take these states, tried on others than those in use."""
    try:
        _set_rng(state, torch.Generator(), random.Random(), np.random.RandomState())
        if device.type != "cpu" and "device" in state:
            torch.Generator(device).set_state(state["device"])
    except Exception as error:  # whatever it is, it is not a state that a generator gave
        raise CheckpointError(
            f"{where}: the state of a random generator is malformed ({type(error).__name__}: {str(error)[:80]})."
        ) from error


def set_rng(state: Mapping[str, Any], device: torch.device) -> None:
    _set_rng(state, torch.default_generator, random, np.random)
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def _set_rng(state: Mapping[str, Any], of_torch: torch.Generator, of_python: Any, of_numpy: Any) -> None:
    of_torch.set_state(state["torch"])
    version, keys, gauss = state["python"]
    of_python.setstate((version, tuple(keys.tolist()), gauss))
    kind, words, position, has_gauss, gauss = state["numpy"]
    if words.shape != (_NUMPY_WORDS,) or type(position) is not int or not 0 <= position <= _NUMPY_WORDS:
        raise ValueError("numpy's position")
    of_numpy.set_state((kind, words.numpy().astype(np.uint32), position, has_gauss, gauss))
