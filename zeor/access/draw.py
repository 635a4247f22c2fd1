"""Random numbers by position: each parameter has a stream of its own, of which any range can be drawn by itself.

The number at a place is a function of the key (of the seed, the parameter's name and which draw of it this is) and of
the place alone, so every rank draws just its part, on the device that holds it, and the values are the same at any
world size and stage. Uniform numbers have the same bits on every device; normal ones, and what functions such as
erfinv_ make of numbers, may differ in the last bit.

Note [Streams by position]
~~~~~~~~~~~~~~~~~~~~~~~~~~
SplitMix64 (Steele, Lea and Flood, 2014): the 64 bits at place i are a mix of key + i * GOLDEN, by two multiplications
and three shifts. Integers of torch wrap, which is what it needs; they have no unsigned shift, so a mask cuts the sign
off. A uniform number takes as many of the upper bits as its dtype has digits, a normal one all of them: Box and
Muller's formula of two halves, computed in float64 so that devices agree. On a host, code for whole vectors and code
for what is left of them may round differently: so chunks are small enough for one thread and filled up to whole
vectors, and a value does not depend on where a range begins or ends.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
CHUNK_NUMEL = {"cpu": 1 << 15, "other": 1 << 24}  # what one thread works on; what bounds an accelerator's temporaries
VECTOR_NUMEL = 64  # a multiple of what any host's vector holds
DIGITS = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}  # of a uniform number; others: 24

# In place, element by element, with numbers as arguments: what a recipe may hold beside draws.
ELEMENTWISE = frozenset(
    ("abs_", "add_", "clamp_", "clamp_max_", "clamp_min_", "div_", "erf_", "erfinv_", "exp_", "fill_", "log_", "mul_",
     "neg_", "pow_", "reciprocal_", "sigmoid_", "sqrt_", "square_", "sub_", "tanh_", "zero_")
)  # fmt: skip
OVERWRITES = frozenset(("fill_", "zero_", "normal_", "uniform_"))


class Deed(NamedTuple):
    """One operation of an initialiser on a whole parameter."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: int = 0  # of a draw


class Recipe:
    """What initialisers did to one parameter, so that any range of its values can be made: by position, elementwise.
    It knows of every draw; what was done to values that exist is not in it."""

    def __init__(self, seed: int, name: str, dtype: torch.dtype):
        self._seed, self._name, self._dtype = seed, name, dtype
        self.deeds: list[Deed] = []
        self._draws = 0

    def takes(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a method of tensors can be part of it."""
        if not self._dtype.is_floating_point:
            return False
        if name in DRAWS:
            return kwargs.get("generator") is None and _are_numbers(args)
        return name in ELEMENTWISE and _are_numbers((*args, *kwargs.values()))

    def forget(self) -> None:
        """The values exist from here on, and are not made of this any more."""
        self.deeds.clear()

    def add(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = 0
        if name in DRAWS:
            kwargs = {word: value for word, value in kwargs.items() if value is not None}
            key = _key(self._seed, self._name, self._draws)
            self._draws += 1
        if name in OVERWRITES:
            self.deeds.clear()  # what was there before is gone
        self.deeds.append(Deed(name, args, kwargs, key))

    @property
    def is_whole(self) -> bool:
        """Every value is determined."""
        return bool(self.deeds) and self.deeds[0].name in OVERWRITES

    def describe(self) -> str:
        return "; ".join(f"{deed.name}{deed.args}{sorted(deed.kwargs.items())}{deed.key}" for deed in self.deeds)

    def make(self, begin: int, end: int, device: torch.device) -> Tensor:
        """The values at these places, flat; nan where nothing determined them."""
        values = torch.empty(end - begin, dtype=self._dtype, device=device)
        size = CHUNK_NUMEL.get(device.type, CHUNK_NUMEL["other"])
        for first in range(0, end - begin, size):
            into = values[first : first + size]
            numel = -(-into.numel() // VECTOR_NUMEL) * VECTOR_NUMEL
            part = torch.full((numel,), math.nan, dtype=self._dtype, device=device)
            for deed in self.deeds:
                if deed.name in DRAWS:
                    DRAWS[deed.name](part, deed.key, begin + first, *deed.args, **deed.kwargs)
                else:
                    getattr(part, deed.name)(*deed.args, **deed.kwargs)
            into.copy_(part[: into.numel()])
        return values


def _are_numbers(values: Any) -> bool:
    return all(value is None or isinstance(value, (int, float)) for value in values)


def _key(seed: int, name: str, draw: int) -> int:
    digest = hashlib.sha256(f"{seed} {draw} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def bits(key: int, begin: int, end: int, device: torch.device) -> Tensor:
    """64 random bits for each place, as integers: see Note [Streams by position]."""
    mixed = torch.arange(begin, end, dtype=torch.int64, device=device).mul_(_signed(GOLDEN)).add_(key)
    mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_signed(FIRST))
    mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_signed(SECOND))
    return mixed.bitwise_xor_(_shifted(mixed, 31))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(values: Tensor, count: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (values >> count).bitwise_and_((1 << (64 - count)) - 1)


def _fill_uniform(into: Tensor, key: int, begin: int, low: float = 0.0, high: float = 1.0, **named: float) -> None:
    low, high = named.get("from", low), named.get("to", high)
    digits = DIGITS.get(into.dtype, 24)
    drawn = _shifted(bits(key, begin, begin + into.numel(), into.device), 64 - digits)
    # In float64: exact, so that every device rounds once, to the tensor's own dtype.
    values = drawn.to(torch.float64).mul_(2.0**-digits).mul_(high - low).add_(low)
    into.copy_(values)
    if low < high:
        into.masked_fill_(into >= high, low)  # rounding must not reach what is excluded


def _fill_normal(into: Tensor, key: int, begin: int, mean: float = 0.0, std: float = 1.0) -> None:
    drawn = bits(key, begin, begin + into.numel(), into.device)
    above = _shifted(drawn, 32).to(torch.float64).add_(0.5).mul_(2.0**-32)  # in (0, 1): its logarithm is finite
    angle = drawn.bitwise_and_(0xFFFFFFFF).to(torch.float64).mul_(2.0 * math.pi * 2.0**-32)
    into.copy_(above.log_().mul_(-2.0).sqrt_().mul_(angle.cos_()).mul_(std).add_(mean))


DRAWS: dict[str, Callable[..., None]] = {"normal_": _fill_normal, "uniform_": _fill_uniform}
