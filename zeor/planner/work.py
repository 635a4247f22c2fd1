"""How much a model computes: products, attention and bytes of element-wise operations, by unit, counted in a trace.

`cost_of` looks at one operation on the meta device and its shapes. `Work` adds costs up; what they take in seconds is a
machine's (machine.py). A product is counted by its operations alone, everything else by the bytes it reads and writes:
that is what bounds them on a GPU for batches that are worth training with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zeor.planner.machine import Machine

aten = torch.ops.aten

# By 8-bit products, for each element they read: the look for the largest, the cast, the copy in the other order. Of 7B
# at batch 4, compiled, on one H200 casts took 80 of 453 ms.
CAST_NBYTES = 4.0


@dataclass
class Work:
    """products: operations of matrix products in 16 bits; products32: in fp32 and wider. attention: of fused attention,
    half of it where it is causal. nbytes: read and written by all else. count: kernels that the host launches.
    operands: elements that products in 16 bits read, which are cast where they are to multiply in 8 bits."""

    products: float = 0.0
    operands: float = 0.0
    products32: float = 0.0
    attention: float = 0.0
    nbytes: float = 0.0
    count: float = 0.0

    def add(self, other: Work, times: float = 1.0) -> None:
        self.products += times * other.products
        self.operands += times * other.operands
        self.products32 += times * other.products32
        self.attention += times * other.attention
        self.nbytes += times * other.nbytes
        self.count += times * other.count

    @property
    def operations(self) -> float:
        return self.products + self.products32 + self.attention

    def seconds(self, machine: Machine, compiled: bool = False, fp8: bool = False) -> float:
        """That one device is busy."""
        narrow = machine.products8 if fp8 and machine.products8 else machine.products
        nbytes = self.nbytes * (machine.fused if compiled else 1.0)
        if fp8 and machine.products8:
            nbytes += CAST_NBYTES * self.operands
        busy = self.products / narrow + self.products32 / machine.products32 + self.attention / machine.attention
        return busy + nbytes / machine.elementwise

    def launched(self, machine: Machine, compiled: bool = False) -> float:
        """That its host takes to launch it."""
        return self.count * machine.launch * (machine.fused if compiled else 1.0)


@dataclass
class Works:
    """Of one forward and backward. `backward` is of all units: what belongs to which follows from their forwards."""

    forward: dict[int, Work] = field(default_factory=dict)
    backward: Work = field(default_factory=Work)

    def of(self, unit: int) -> Work:
        return self.forward.setdefault(unit, Work())

    @property
    def total(self) -> Work:
        whole = Work()
        for each in (*self.forward.values(), self.backward):
            whole.add(each)
        return whole


def cost_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work | None:
    """Of one operation; None where it computes nothing."""
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if not made:
        return None
    packet = func._overloadpacket
    if packet in _PRODUCTS:
        left, right = _PRODUCTS[packet](args)
        operations = 2.0 * left * right
        if made[0].dtype.itemsize > 2:
            return Work(products32=operations, count=1)
        return Work(products=operations, operands=left + float(args[_RIGHT[packet]].numel()), count=1)
    if packet in _ATTENTION:
        return _attention_cost(packet, args)
    if packet in _CONVOLUTIONS:
        return _convolution_cost(packet, args, made)
    if packet in _EMPTY:  # a fused operation's result, see as_on_device.py: it reads about as much as it writes
        return Work(nbytes=2.0 * sum(each.nbytes for each in made), count=1)
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    storages = {each.untyped_storage()._cdata for each in given}
    if not func._schema.is_mutable and all(each.untyped_storage()._cdata in storages for each in made):
        return None  # a view
    return Work(nbytes=float(sum(each.nbytes for each in (*given, *made))), count=1)


def _mm(args: tuple[Any, ...]) -> tuple[float, float]:
    return float(args[0].numel()), float(args[1].shape[-1])


def _addmm(args: tuple[Any, ...]) -> tuple[float, float]:
    return float(args[1].numel()), float(args[2].shape[-1])


_PRODUCTS = {aten.mm: _mm, aten.bmm: _mm, aten.addmm: _addmm, aten.baddbmm: _addmm}
_RIGHT = {aten.mm: 1, aten.bmm: 1, aten.addmm: 2, aten.baddbmm: 2}
_ATTENTION = {
    # (where q is, where is_causal is, products of tokens by tokens)
    aten._scaled_dot_product_flash_attention: (0, 4, 2.0),
    aten._scaled_dot_product_efficient_attention: (0, 6, 2.0),
    aten._scaled_dot_product_flash_attention_backward: (1, 11, 5.0),
    aten._scaled_dot_product_efficient_attention_backward: (1, 11, 5.0),
}
_CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
_EMPTY = (aten.empty_like, aten.empty, aten.new_empty)


def _attention_cost(packet: Any, args: tuple[Any, ...]) -> Work:
    at, causal, products = _ATTENTION[packet]
    query, key = args[at], args[at + 1]
    batch, heads, length, width = query.shape
    half = 0.5 if len(args) > causal and args[causal] else 1.0
    return Work(attention=products * half * 2.0 * batch * heads * length * key.shape[-2] * width, count=1)


def _convolution_cost(packet: Any, args: tuple[Any, ...], made: list[Tensor]) -> Work:
    """Each element of the output is a product over the kernel and the input's channels; backward does so twice."""
    if packet is aten.convolution:
        output, weight, times = made[0], args[1], 1.0
    else:
        output, weight, times = args[0], args[2], 2.0
    operations = times * 2.0 * output.numel() * math.prod(weight.shape[1:])
    narrow = output.dtype.itemsize <= 2
    return Work(products=operations, count=1) if narrow else Work(products32=operations, count=1)
