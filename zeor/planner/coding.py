"""What encoding and decoding take, of one lane's moves in a step: elements of its legs, over a machine's speeds.

On the machine that is here codecs are measured, once per process (memory/coding_speed.py). Elsewhere: a CPU by what one
core took for the formats here; a GPU by the bytes of one pass for formats with a fused kernel, and by several passes
for the others. No GPU's codecs were measured yet. Methods that leave most unsent (top-k, low rank) are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeor.memory import device as devices
from zeor.memory.codecs import Codec
from zeor.memory.coding_speed import Speed, speed_of
from zeor.planner.machine import Machine
from zeor.spec.travel import Leg

# Nanoseconds for an element, by one core's processor time (an EPYC with AVX-512; a million normal numbers in fp32).
_ENCODE = {"bf16": 0.46, "int8": 1.2, "int4": 1.4, "int2": 1.6, "fp8_e4m3": 1.6, "fp8_e5m2": 1.7}
_DECODE = {"bf16": 0.07, "int8": 0.26, "int4": 0.45, "int2": 1.0, "fp8_e4m3": 3.0, "fp8_e5m2": 0.56}
_CHANCE, _TURN = 1.7, 4.0  # more: of rounding by chance, and of a rotation, each way
_FUSED = ("int8", "int4")
_PASSES = 10.0  # over the values, of formats that have no fused kernel, by plain operations


def coding_seconds(legs: Sequence[Leg], machine: Machine, share: float) -> tuple[float, float]:
    """(encode, decode); `share`: of the machine's cores that this rank has."""
    encode = decode = 0.0
    for leg in legs:
        if isinstance(leg.codec, Codec):
            speed = _speed(leg.codec, machine, share)
            encode += leg.encoded / speed.encode
            decode += leg.decoded / speed.decode
    return encode, decode


def _speed(codec: Codec, machine: Machine, share: float) -> Speed:
    if machine.present:
        return speed_of(codec, devices.default_device())
    if machine.native:
        nbytes = 4 + codec.nbytes(1 << 20) / (1 << 20)
        rate = machine.hbm / nbytes if codec.format in _FUSED else machine.elementwise / (_PASSES * nbytes)
        return Speed(rate, rate)
    turn = _TURN if codec.rotates else 0.0
    encode_ns = _ENCODE[codec.format] + turn + (_CHANCE if codec.chance else 0.0)
    cores = max(1.0, machine.cores * share)
    return Speed(cores * 1e9 / encode_ns, cores * 1e9 / (_DECODE[codec.format] + turn))
