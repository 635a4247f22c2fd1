"""The random generators of a rank: their states as plain values, checked before they are set again.

They belong to the world they were saved at, and come back where it is the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zeor.checkpoint.files.errors import CheckpointError

_NUMPY_WORDS = 624  # of its generator's state; numpy itself reads at whatever position it is told


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
        torch.Generator().set_state(state["torch"])
        version, keys, gauss = state["python"]
        random.Random().setstate((version, tuple(keys.tolist()), gauss))
        kind, words, position, has_gauss, gauss = state["numpy"]
        if words.shape != (_NUMPY_WORDS,) or type(position) is not int or not 0 <= position <= _NUMPY_WORDS:
            raise ValueError("numpy's position")
        np.random.RandomState().set_state((kind, words.numpy().astype(np.uint32), position, has_gauss, gauss))
        if device.type != "cpu" and "device" in state:
            torch.Generator(device).set_state(state["device"])
    except Exception as error:  # whatever it is, it is not a state that a generator gave
        raise CheckpointError(
            f"{where}: the state of a random generator is malformed ({type(error).__name__}: {str(error)[:80]})."
        ) from error


def set_rng(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
