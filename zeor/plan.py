"""The plan: everything a user can choose about a sharded run, in frozen dataclasses.

No JSON, no batch sizes, no environment variables but for the folder of offload="disk". A plan is the same on every
rank; `shard()` compares the ranks' plans and says which rank differs. This module knows no tensor and no group.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

STAGES = (0, 1, 2, 3)
KEEP_WHOLE = 1024  # elements
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Stages(NamedTuple):
    """A stage for each axis."""

    inside: int
    across: int

    def __str__(self) -> str:
        return str(self.inside) if self.inside == self.across else f"{self.inside} inside, {self.across} across"


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@dataclass(frozen=True, repr=False)
class Float8:
    """How linears multiply in 8 bits, by torchao's float8 training.

    recipe: "tensorwise" (one scale for a tensor; the fastest), "rowwise" (one for a row), or "rowwise_with_gw_hp" (the
    same, with weights' gradients in bf16; the most accurate). filter: `filter(linear, name)` says which nn.Linear
    modules; None: those inside repeated blocks whose two sides are multiples of 16, less routers and adapters.
    codes: tensorwise weights rest and travel as 8-bit codes, cast once per step; None: where there are several ranks.
    pad=True: batches whose rows are no multiple of 16 are padded with zeros, at the price of a copy.
    """

    recipe: str = "tensorwise"
    filter: Callable[[Any, str], bool] | None = None
    codes: bool | None = None
    pad: bool = False

    def __post_init__(self) -> None:
        _one_of("Float8.recipe", self.recipe, RECIPES)
        if self.filter is not None and not callable(self.filter):
            raise ValueError(f"Float8.filter is {self.filter!r}; give a function of a linear and its name, or None.")
        if self.codes not in (None, True, False):
            raise ValueError(f"Float8.codes={self.codes!r}; give True, False or None.")
        if not isinstance(self.pad, bool):
            raise ValueError(f"Float8.pad={self.pad!r}; give True or False.")
        if self.codes and self.recipe != "tensorwise":
            raise ValueError(
                f"Float8.codes=True with the recipe {self.recipe!r}: its scales differ between forward and backward, "
                "so weights cannot rest as codes; use 'tensorwise', or leave codes= out."
            )

    def __repr__(self) -> str:  # ranks compare it: a function by its name, not by its address
        name = None if self.filter is None else getattr(self.filter, "__qualname__", type(self.filter).__name__)
        return f"Float8(recipe={self.recipe!r}, filter={name}, codes={self.codes}, pad={self.pad})"


@dataclass(frozen=True)
class Precision:
    """Dtypes by role. None means "as the parameter is".

    compute: what forward and backward read. reduce: how gradients travel and rest until the step
    (None: as compute). master: what the optimizer updates; never narrower than fp32. fp8: a zeor.Float8, or the name of
    its recipe: linears multiply in 8 bits; all else computes in bf16.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    fp8: Float8 | str | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "master"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"Precision.{name} is {dtype!r}; give a floating torch.dtype or None.")
        self._settle_fp8()
        if self.master is not None and self.master not in (torch.float32, torch.float64):
            raise ValueError(
                f"Precision.master is {self.master}; the master copy is torch.float32 or torch.float64, "
                "so that small updates are not rounded away."
            )

    def _settle_fp8(self) -> None:
        if self.fp8 is None:
            return
        if isinstance(self.fp8, str):
            object.__setattr__(self, "fp8", Float8(self.fp8))
        if not isinstance(self.fp8, Float8):
            raise ValueError(f"Precision.fp8 is {self.fp8!r}; give a zeor.Float8 or one of {list(RECIPES)}.")
        if self.compute not in (None, torch.bfloat16):
            raise ValueError(
                f"Precision.fp8 goes with bf16 for all that does not multiply in 8 bits, and compute is {self.compute}"
                "; leave compute= out."
            )
        object.__setattr__(self, "compute", torch.bfloat16)

    @property
    def float8(self) -> Float8 | None:
        """`fp8` as it is after parsing."""
        assert not isinstance(self.fp8, str)
        return self.fp8

    @staticmethod
    def parse(value: Precision | torch.dtype | str | None) -> Precision:
        if isinstance(value, Precision):
            return value
        if value == "fp8":
            return Precision(fp8=Float8())
        if value is None:
            return Precision()
        if isinstance(value, torch.dtype) and value in _DTYPES.values():
            return Precision(compute=value)
        if isinstance(value, str) and value in _DTYPES:
            return Precision(compute=_DTYPES[value])
        known = [*_DTYPES, "fp8"]
        raise ValueError(
            f"precision={value!r} is not known{nearest(str(value), known)}; use one of {known} or a zeor.Precision."
        )


TIERS = ("device", "host", "disk")
OFFLOADED = ("moments", "master", "grads", "compute")
Share = tuple[tuple[str, float], ...]  # (tier, fraction of a role's bytes), in the order of TIERS
FOLDER_VARIABLE, DEFAULT_FOLDER = "ZEOR_OFFLOAD_FOLDER", "zeor-offload"


def default_folder() -> str:
    """Of offload="disk". Not the system's folder for temporary files, which is often in memory."""
    return str(Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser().absolute())


@dataclass(frozen=True)
class Offload:
    """Where each role rests: on the "device", in pinned "host" memory or on "disk".

    A role's place is one tier, or a mapping of fractions such as {"device": 0.5, "host": 0.5}, kept by whole lanes.
    moments: the optimizer's state. master: what beside compute makes the exact weights. grads: between backward and
    step (stages 2 and 3). compute: what forward reads (stage 3). auto: moments and master are placed by what is free,
    the device filled first.

    update: where offloaded state is updated. "device" streams it through the accelerator, chunk by chunk, with the
    bits of a run without offload; "host" runs the stock optimizer on the CPU, and sends gradients down and weights up.
    folder: of the disk tier. device_budget, host_budget, of auto: bytes, or text such as "40GiB"; None: what is free.
    chunk: elements streamed at a time; None: 16 million, or twice that for large models.
    threads: of an update on the host; None shares the cores among its ranks.
    pin=False: plain host memory, where too little can be pinned; copies then take several times as long.
    ahead: state on the host is fetched while the last backward before step() goes on, into memory that activations have
    left: "auto" as much as a measured step leaves free, or at most so many bytes; None: nothing. For loops that
    accumulate. It has never run on a GPU.
    """

    moments: Any = "host"
    master: Any = "host"
    grads: Any = "device"
    compute: Any = "device"
    update: str = "device"
    folder: str | None = None
    device_budget: int | str | None = None
    host_budget: int | str | None = None
    chunk: int | None = None
    threads: int | None = None
    pin: bool = True
    auto: bool = False
    ahead: int | str | None = None

    def __post_init__(self) -> None:
        for name in ("pin", "auto"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Offload.{name}={getattr(self, name)!r}; give True or False.")
        for role in OFFLOADED:
            given = getattr(self, role)
            object.__setattr__(self, role, _share(f"Offload.{role}", given))
            if self.auto and role in ("moments", "master") and getattr(self, role) != _share(role, "host"):
                raise ValueError(
                    f"Offload.{role}={given!r} names a place, but auto=True places moments and master by what is free; "
                    "leave one of them out."
                )
        _one_of("Offload.update", self.update, ("device", "host"))
        for name in ("device_budget", "host_budget"):
            object.__setattr__(self, name, _nbytes(f"Offload.{name}", getattr(self, name)))
        if self.ahead != "auto":
            object.__setattr__(self, "ahead", _nbytes("Offload.ahead", self.ahead))
        self._check_auto()
        if self.ahead is not None and (self.update == "host" or self.uses_disk):
            raise ValueError(
                f"Offload.ahead={self.ahead!r} fetches state from host memory to the device, but here it is updated on "
                "the host or rests on disk; leave ahead= out, or update='host' and the disk."
            )
        if self.folder is not None:
            object.__setattr__(self, "folder", str(self.folder))
        if self.folder is None and self.uses_disk:
            raise ValueError(
                "Offload to disk needs a folder on the disk that is to hold it: zeor.Offload(folder=...); only "
                f"offload='disk' has one by itself, {FOLDER_VARIABLE} or {DEFAULT_FOLDER} in the current directory."
            )
        self._check_counts()

    def _check_counts(self) -> None:
        for name in ("chunk", "threads"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"Offload.{name}={value!r}; give a whole number of at least 1.")
        if self.chunk is not None and self.chunk % BLOCK_NUMEL:
            raise ValueError(f"Offload.chunk={self.chunk}; give a multiple of {BLOCK_NUMEL} elements.")

    def _check_auto(self) -> None:
        if self.auto and self.update == "host":
            raise ValueError(
                "Offload.auto streams state through the device, which update='host' does not; leave one of them out, "
                "and with update='host' name the places: moments='host', master='host'."
            )
        for name in ("device_budget", "host_budget"):
            if not self.auto and getattr(self, name) is not None:
                raise ValueError(
                    f"Offload.{name} is kept by auto=True alone, and here the places are fixed; give auto=True, or "
                    "leave the budget out."
                )

    @staticmethod
    def parse(value: Any) -> Offload | None:
        if value is None or isinstance(value, Offload):
            return value
        if isinstance(value, Mapping):
            known = [field.name for field in dataclasses.fields(Offload)]
            for name in value:
                if name not in known:
                    raise TypeError(f"zeor.Offload has no field {name!r}{nearest(str(name), known)}.")
            return Offload(**value)
        if value == "host":
            return Offload()
        if value == "auto":
            return Offload(auto=True)
        if value == "disk":
            return Offload("disk", "disk", folder=default_folder())
        meant = "host" if value == "cpu" else str(value)  # as FSDP and DeepSpeed call it
        raise ValueError(
            f"offload={value!r} is not known{nearest(meant, ['host', 'disk', 'auto'])}; use 'host', 'disk', "
            "'auto', a zeor.Offload, or None."
        )

    @property
    def away(self) -> bool:
        """Whether anything may rest elsewhere than on the device."""
        return self.auto or any(tier != "device" for role in OFFLOADED for tier, _ in getattr(self, role))

    @property
    def uses_disk(self) -> bool:
        return any(tier == "disk" for role in OFFLOADED for tier, _ in getattr(self, role))


WIRES = ("exact", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
OF_WEIGHTS = (*WIRES, "int2")
DIFFERENCES = ("int4", "int2")  # how weights travel so: see Note [Differences] in comm/wires.py


@dataclass(frozen=True)
class TopK:
    """Of gradients only the largest travel, by magnitude, with their places: this fraction of each 65,536 elements of a
    slice, 4 bytes for one. The rest waits in a residual. warmup: how many steps of the run travel exactly first."""

    fraction: float = 0.01
    warmup: int = 0

    def __post_init__(self) -> None:
        _part("TopK.fraction", self.fraction)
        _count("TopK.warmup", self.warmup, 0)


@dataclass(frozen=True)
class RandomK:
    """Of gradients one of every so many neighbours travels, the same on all ranks and by chance, so that no places do:
    2 bytes for one. The rest waits in a residual. warmup: how many steps of the run travel exactly first."""

    fraction: float = 0.1
    warmup: int = 0

    def __post_init__(self) -> None:
        _part("RandomK.fraction", self.fraction)
        _count("RandomK.warmup", self.warmup, 0)


@dataclass(frozen=True)
class Sign:
    """Of gradients the signs travel, one bit for each element, and the mean magnitude of each 256. The rest waits in a
    residual. warmup: how many steps of the run travel exactly first."""

    warmup: int = 100

    def __post_init__(self) -> None:
        _count("Sign.warmup", self.warmup, 0)


@dataclass(frozen=True)
class PowerSGD:
    """Of the gradient of each matrix two factors of this rank travel, found by one step of a power iteration that goes
    on from the last one. The rest waits in a residual. Vectors, and matrices that factors would not make at least half
    as long, travel exactly. warmup: how many steps of the run travel exactly first."""

    rank: int = 4
    warmup: int = 10

    def __post_init__(self) -> None:
        _count("PowerSGD.rank", self.rank, 1)
        _count("PowerSGD.warmup", self.warmup, 0)


Method = TopK | RandomK | Sign | PowerSGD
METHODS: dict[str, type[Method]] = {"topk": TopK, "randomk": RandomK, "sign": Sign, "powersgd": PowerSGD}


def _part(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 0.5:
        raise ValueError(f"{name}={value!r}; give a number above 0 and up to 0.5.")


def _count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}; give a whole number of at least {least}.")


@dataclass(frozen=True)
class Wire:
    """In which format tensors travel between ranks: "exact", "bf16", "fp8" (e4m3), "fp8_e5m2", "int8" or "int4".

    gather: of weights (stage 3 before each use, stages 1 and 2 after each step); at stage 0, where every rank updates
    all weights, of the summed gradients. reduce: of gradients that are to be summed; sums themselves are in fp32.
    across: the format, or a zeor.Wire, of what crosses the outer axis of a mesh of two; None: the same as inside.

    reduce may be a method instead: zeor.TopK, zeor.RandomK, zeor.Sign or zeor.PowerSGD (or its name), which keeps what
    was not sent in a residual and adds it to the next gradient. feedback=True does that for the formats too. A residual
    takes 4 bytes for each element a rank sends: of all gradients, or where it is for `across` alone of a node's slice.

    Of gradients: rounding="stochastic" rounds up or down by chance, so that the mean is right; rotate=True multiplies
    blocks by a Hadamard matrix first, so that one large number costs the others less (formats with blocks only).
    Masters are never rounded. Small parameters (keep_whole) travel exactly. "int4" of weights sends differences to what
    the others hold, so it needs a stage below 3 along that axis. So does "int2", which is for weights alone.

    auto=True (wire="auto"): it begins as the rest says, and zeor chooses formats when it has seen some steps.
    """

    gather: str = "exact"
    reduce: str | Method = "exact"
    across: Wire | Method | str | None = None
    rounding: str = "nearest"
    rotate: bool = False
    auto: bool = False
    feedback: bool = False

    def __post_init__(self) -> None:
        for name in ("gather", "reduce"):
            given = getattr(self, name)
            object.__setattr__(self, name, {"fp8": "fp8_e4m3", "fp32": "exact"}.get(str(given), given))
        self._settle_formats()
        _one_of("Wire.rounding", self.rounding, ("nearest", "stochastic"))
        for name in ("rotate", "auto"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Wire.{name}={getattr(self, name)!r}; give True or False.")
        if self.across is not None:
            if not isinstance(self.across, Wire):
                object.__setattr__(self, "across", dataclasses.replace(Wire.parse(self.across), **self._of_gradients()))
            assert isinstance(self.across, Wire)
            if self.across.auto:
                raise ValueError("Wire.across is 'auto', but both axes are chosen together; pass wire='auto' alone.")
            if self.across.across is not None:
                raise ValueError("Wire.across has an across= of its own, and there are two axes at most; leave it out.")
        if self.rotate and not any(name in _IN_BLOCKS for each in self.axes for name in (each.gather, each.reduce)):
            raise ValueError(
                f"Wire.rotate=True is for formats in blocks, and gradients travel as {self.reduce!r}; use one of "
                f"{list(_IN_BLOCKS)}, or leave it out."
            )
        self._check_feedback()

    def _settle_formats(self) -> None:
        if isinstance(self.gather, Method) or (isinstance(self.gather, str) and self.gather in METHODS):
            raise ValueError(
                f"Wire.gather={self.gather!r} is a method for sums of gradients, which keeps what it does not send; "
                f"for weights use one of {list(OF_WEIGHTS)}."
            )
        _one_of("Wire.gather", self.gather, OF_WEIGHTS)
        if isinstance(self.reduce, str) and self.reduce in METHODS:
            object.__setattr__(self, "reduce", METHODS[self.reduce]())
        if self.reduce == "int2":
            raise ValueError(
                "Wire.reduce='int2' is too coarse for gradients: 'int2' is for weights, of which differences travel; "
                "use zeor.Wire(gather='int2', reduce='int4'), or a method that keeps what it does not send, such as "
                "zeor.Sign()."
            )
        if not isinstance(self.reduce, Method):
            _one_of("Wire.reduce", self.reduce, (*WIRES, *METHODS))

    def _check_feedback(self) -> None:
        if not isinstance(self.feedback, bool):
            raise ValueError(f"Wire.feedback={self.feedback!r}; give True or False.")
        if self.feedback and all(each.reduce == "exact" for each in self.axes):
            raise ValueError(
                "Wire.feedback=True keeps what gradients lose on their way, and they travel exactly; give reduce= a "
                "format, or leave it out."
            )

    def _of_gradients(self) -> dict[str, Any]:
        known = isinstance(self.across, str) and self.across in (*_IN_BLOCKS, "fp8")
        lossy = known or self.across == "bf16"
        return {"rounding": self.rounding, "rotate": self.rotate and known, "feedback": self.feedback and lossy}

    @property
    def keeps(self) -> bool:
        """Whether what is not sent of gradients is kept for the next."""
        return self.reduce != "exact" and (self.feedback or isinstance(self.reduce, Method))

    @property
    def warmup(self) -> int:
        return self.reduce.warmup if isinstance(self.reduce, Method) else 0

    @property
    def is_exact(self) -> bool:
        """Nothing is rounded, now or later."""
        return not self.auto and all(each.gather == each.reduce == "exact" for each in self.axes)

    @property
    def axes(self) -> tuple[Wire, Wire]:
        """(inside, across)."""
        return self, self if self.across is None else Wire.parse(self.across)

    @staticmethod
    def parse(value: Any) -> Wire:
        if value is None:
            return Wire()
        if isinstance(value, Wire):
            return value
        if isinstance(value, Mapping):
            known = [field.name for field in dataclasses.fields(Wire)]
            for name in value:
                if name not in known:
                    raise TypeError(f"zeor.Wire has no field {name!r}{nearest(str(name), known)}.")
            return Wire(**value)
        if value == "auto":
            return Wire(auto=True)
        if isinstance(value, Method):
            return Wire(reduce=value)
        if isinstance(value, str) and value in (*OF_WEIGHTS, "fp8", "fp32"):
            return Wire(value, value)
        if isinstance(value, str) and value in METHODS:
            return Wire(reduce=value)
        known = [*WIRES, *METHODS, "auto"]
        raise ValueError(
            f"wire={value!r} is not known{nearest(str(value), known)}; use a zeor.Wire, a zeor.TopK, "
            f"RandomK, Sign or PowerSGD, or one of {known}; a format is then both ways."
        )


_IN_BLOCKS = tuple(name for name in WIRES if name not in ("exact", "bf16"))


BLOCK_NUMEL = 256  # elements that share a scale in the format int8; chunks are cut between them


def _share(name: str, value: Any) -> Share:
    kept = isinstance(value, tuple) and all(isinstance(each, tuple) and len(each) == 2 for each in value)
    tiers = [tier for tier, _ in value] if kept else value if isinstance(value, Mapping) else [value]
    for tier in tiers:
        if not isinstance(tier, str) or tier not in TIERS:
            raise ValueError(
                f"{name}={value!r}: {tier!r} is not a tier{nearest(str(tier), list(TIERS))}; use one of {list(TIERS)}."
            )
    given = dict(value) if kept or isinstance(value, Mapping) else {value: 1.0}
    for part in given.values():
        if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 <= part <= 1:
            raise ValueError(f"{name}={value!r}: {part!r} is not a fraction; give numbers from 0 to 1.")
    if abs(sum(given.values()) - 1) > 1e-6:
        raise ValueError(f"{name}={value!r}: the fractions add up to {sum(given.values()):g}; let them add up to 1.")
    return tuple((tier, float(given[tier])) for tier in TIERS if given.get(tier))


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):  # GB as on a disk's label; GiB, and G, as memory is counted
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power, _letter: 1024**_power}


def _nbytes(name: str, value: Any) -> int | None:
    """Bytes from a number or text such as "40GiB"."""
    if value is None:
        return None
    text = str(value).strip().upper()
    digits = text.rstrip("BKMGTI ").strip()
    unit = text[len(digits) :].strip()
    try:
        found = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        found = 0.0
    if isinstance(value, bool) or not 1 <= found < math.inf:
        raise ValueError(f"{name}={value!r}; give bytes, as a number or as text such as '40GiB'.")
    return int(found)


@dataclass(frozen=True)
class Plan:
    """What `shard()` was asked for. See `zeor.shard` for the meaning of each field."""

    stage: int = 3  # along the innermost axis of ranks
    precision: Precision = Precision()
    reduction: str = "mean"
    overlap: bool = True
    prefetch: int = 1
    kernel: str = "auto"
    deterministic: bool = False
    buffers: str = "mean"
    nonfinite: str = "warn"
    timeout: float = 600.0
    methods: tuple[str, ...] = ()
    offload: Offload | None = None
    moments: str = "exact"
    release: bool = False
    delay: int = 0
    recompute: Any = False  # or True, "auto", "products", "offload"; or classes and modules, with one of the last two
    compile: Any = False  # or options of torch.compile; parse() makes {} of True
    paths: str = "auto"
    keep_whole: int = 0  # parse() gives it KEEP_WHOLE; a drop-in knows no modules and keeps what the user has
    across: int | None = None  # the stage along the outer axis, where the mesh has two; None: the same
    wire: Wire | None = None  # None: exact, and set_wire() may change only how gradients travel

    def __post_init__(self) -> None:
        if self.stage not in STAGES or isinstance(self.stage, bool):
            raise ValueError(f"stage={self.stage!r} is not a ZeRO stage; use 0, 1, 2 or 3.")
        self._check_across()
        _one_of("reduction", self.reduction, ("mean", "sum"))
        _one_of("kernel", self.kernel, ("auto", "stock"))
        _one_of("buffers", self.buffers, ("mean", "rank0", "local"))
        _one_of("paths", self.paths, ("auto", "static", "dynamic"))
        _one_of("nonfinite", self.nonfinite, ("warn", "raise", "skip", "ignore"))
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch!r}; give how many units to gather ahead: 0, 1, 2, ...")
        if not isinstance(self.keep_whole, int) or isinstance(self.keep_whole, bool) or self.keep_whole < 0:
            raise ValueError(
                f"keep_whole={self.keep_whole!r}; parameters of at most so many elements stay whole on every rank: "
                "give 0, 1, 2, ..."
            )
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r}; give the seconds a collective may take, more than 0.")
        self._check_recompute()
        if isinstance(self.compile, dict) and self.compile.get("backend") == "eager" and self.recompute is not False:
            raise ValueError(
                "compile={'backend': 'eager'} does not repeat random numbers where a unit is computed again; use "
                "'aot_eager', or leave recompute= out."
            )
        if self.compile is not False and not isinstance(self.compile, dict):
            raise ValueError(
                f"compile={self.compile!r} is not known; use False, True, or options of torch.compile such as "
                "{'mode': 'max-autotune-no-cudagraphs'}."
            )
        self._check_update()
        self._check_wire()

    def _check_across(self) -> None:
        if self.across is None:
            return
        if self.across not in STAGES or isinstance(self.across, bool):
            raise ValueError(f"The stage across is {self.across!r}, which is not a ZeRO stage; use 0, 1, 2 or 3.")
        if self.across == 3 and self.stage != 3:
            raise ValueError(
                f"Stage 3 across cuts what forward reads, so it needs stage 3 inside too, not {self.stage}; use 0, 1 "
                "or 2 across, or 3 for both."
            )

    def _check_wire(self) -> None:
        if self.wire is None:
            return
        for stage, wire, name in zip(self.stages, self.wire.axes, ("gather", "across")):
            if stage == 3 and wire.gather in DIFFERENCES:
                raise ValueError(
                    f"Wire.{name}={wire.gather!r} sends weights as differences to what the other ranks hold, and at "
                    "stage 3 they hold nothing; use 'int8' (or 'fp8', 'bf16') for gathers, or stage 1 or 2."
                )
            if stage == 0 and wire.gather == "int2":
                raise ValueError(
                    f"Wire.{name}='int2' is for weights, and at stage 0 summed gradients travel in their place; use "
                    "'int4' there, or stage 1 or 2."
                )

    def _check_recompute(self) -> None:
        wanted = self.recompute
        if isinstance(wanted, tuple):  # modules and classes can be called; this file knows no more of them
            fits = bool(wanted) and all(each in ("offload", "products") or callable(each) for each in wanted)
        else:
            fits = wanted is True or wanted is False or wanted in ("auto", "offload", "products")
        if not fits:
            raise ValueError(
                f"recompute={wanted!r} is not known; use False, True, 'auto', 'products', 'offload', or a list of "
                "modules or module classes, which may hold 'products' or 'offload' too."
            )
        if isinstance(wanted, tuple) and "offload" in wanted and "products" in wanted:
            raise ValueError(
                "recompute= names both 'offload', for inputs that leave the device, and 'products', for more that "
                "stays on it; leave one of them out."
            )

    def _check_update(self) -> None:
        """What is said about the update fits together."""
        _one_of("moments", self.moments, ("exact", "bf16", "int8"))
        if self.release not in (True, False):
            raise ValueError(f"release={self.release!r}; give True or False.")
        if isinstance(self.delay, bool) or self.delay not in (0, 1):
            raise ValueError(f"delay={self.delay!r}; an update is applied at once (0) or one step late (1).")
        if self.release and self.delay:
            raise ValueError("release=True updates inside backward, so it cannot be delayed; leave one of them out.")
        if self.release and self.nonfinite in ("raise", "skip"):
            raise ValueError(
                f"release=True updates before all gradients are known, so nonfinite={self.nonfinite!r} cannot keep a "
                "step from being taken; leave one of them out."
            )
        if self.offload is not None:
            self._check_offload(self.offload)

    def _check_offload(self, offload: Offload) -> None:
        """What rests away fits the stage and the update."""
        grads_are_away = any(tier != "device" for tier, _ in offload.grads)
        if self.delay and grads_are_away:
            raise ValueError("With delay=1 gradients stay on the device; leave Offload.grads there.")
        if offload.ahead is not None and (self.release or self.delay):
            raise ValueError(
                f"Offload.ahead={offload.ahead!r} fetches state for updates in step(), but with release=True or "
                "delay=1 they go on beside the computation; leave one of them out."
            )
        if self.stage < 2 and grads_are_away:
            raise ValueError(f"Offload.grads is away, but at stage {self.stage} gradients are whole; use stage=2 or 3.")
        if self.across in (1, 2) and self.compute_is_away:
            raise ValueError(
                f"Offload.compute is away, but at stage {self.across} across a step brings new values into what the "
                "ranks of a node keep; leave compute on the device, or use stage 0 or 3 across."
            )
        if self.stage < 3 and self.compute_is_away:
            raise ValueError(f"Offload.compute is away, but at stage {self.stage} compute is whole; use stage=3.")
        if offload.update == "host" and (self.delay or offload.uses_disk or self.compute_is_away):
            raise ValueError(
                "Offload.update='host' goes with moments and master on the host and compute on the device, and "
                "without delay; leave the other out, or Offload.update."
            )
        if offload.update == "host" and self.moments != "exact":
            raise ValueError(f"moments={self.moments!r} are updated on the device; leave out update='host'.")

    @property
    def stages(self) -> Stages:
        """By axis."""
        return Stages(self.stage, self.stage if self.across is None else self.across)

    @property
    def compute_is_away(self) -> bool:
        return self.offload is not None and any(tier != "device" for tier, _ in self.offload.compute)

    @property
    def streams(self) -> bool:
        """Whether updates go chunk by chunk beside the computation: see optim/streaming/streaming.py."""
        return (self.offload is not None and self.offload.away) or self.moments != "exact" or self.delay > 0

    @staticmethod
    def parse(options: dict[str, Any]) -> Plan:
        """A plan from keyword arguments; an unknown one is refused with the nearest known name."""
        known = [field.name for field in dataclasses.fields(Plan)]
        for name in options:
            if name not in known:
                beside = ["units", "mesh", "hierarchy", "device"]
                raise TypeError(f"zeor has no option {name!r}{nearest(name, [*known, *beside])}.")
        options = dict(options)
        options["precision"] = Precision.parse(options.get("precision"))
        options["offload"] = Offload.parse(options.get("offload"))
        if options.get("wire") is not None:
            options["wire"] = Wire.parse(options["wire"])
        if isinstance(options.get("recompute"), (list, tuple)):
            options["recompute"] = tuple(options["recompute"])
        if options.get("compile") is True:
            options["compile"] = {}
        if options.get("keep_whole") is None:
            options["keep_whole"] = KEEP_WHOLE
        methods = options.get("methods") or ()
        options["methods"] = (methods,) if isinstance(methods, str) else tuple(methods)
        if options.get("timeout") is None:
            options.pop("timeout", None)
        return Plan(**options)

    def describe(self) -> dict[str, str]:
        """Field by field as text: what ranks compare. Each may offload to a disk of its own."""
        found = {field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)}
        if isinstance(self.recompute, tuple):  # modules have long names
            found["recompute"] = str([getattr(each, "__name__", type(each).__name__) for each in self.recompute])
        if self.offload is not None and self.offload.folder is not None:
            found["offload"] = str(dataclasses.replace(self.offload, folder="each rank's own"))
        return found


def nearest(name: str, known: list[str]) -> str:
    """ " (did you mean 'x'?)" or nothing; the same letters in another case come first."""
    by_small = {word.lower(): word for word in known}
    close = difflib.get_close_matches(name.lower(), by_small, n=1)
    return f" (did you mean {by_small[close[0]]!r}?)" if close else ""


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known{nearest(str(value), list(known))}; use one of {list(known)}.")
