"""What encoding and decoding take, of one lane's moves in a step: elements of its legs, over a machine's speeds.

On the machine that is here codecs are measured, once per process (memory/coding_speed.py). Elsewhere: a CPU by what one
core did in benchmarks/codecs.py; a GPU by the bytes of one pass for formats with a fused kernel, and by several passes
for the others. No GPU's codecs were measured yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeor.memory import device as devices
from zeor.memory.codecs import Codec
from zeor.memory.coding_speed import Speed, speed_of
from zeor.planner.machine import Machine
from zeor.spec.travel import Leg

# Elements a second of one core of a server (AVX-512, fp32), int8 to nearest; and how many times as long others take.
_CORE = Speed(0.0, 0.0)
_NIBBLES, _CHANCE, _ROTATES = 1.0, 2.0, 2.0
_FUSED = ("int8", "int4")
_PASSES = 10.0  # over the values, of formats that have no fused kernel, by plain operations


def coding_seconds(legs: Sequence[Leg], machine: Machine, share: float) -> tuple[float, float]:
    """(encode, decode); `share`: of the machine's cores that this rank has."""
    encode = decode = 0.0
    for leg in legs:
        if leg.codec is not None:
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
    work = (_CHANCE if codec.chance else 1.0) * (_ROTATES if codec.rotates else 1.0)
    return Speed(_CORE.encode / work, _CORE.decode / (_ROTATES if codec.rotates else 1.0))
