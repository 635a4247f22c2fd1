"""How many instructions an element costs in the fused kernels of codecs, for an H200 that need not be here.

    python -m benchmarks.codec_instructions          # a table in Markdown; with Triton, but not its interpreter

Triton compiles a full tile for sm_90, its own cuobjdump prints the machine code, and the instructions of a thread are
counted up to the first exit (behind it stands what a division seldom needs) and divided by a thread's 16 elements.
Counts are beside what the units of the chip start in the time in which its memory moves an element, so they say what
bounds a kernel. What is predicted is UNIT_SHARE of a unit's rate and at most MEMORY_SHARE of the memory's: nothing here
is measured. See docs/notes/codecs.md.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zeor.memory.codecs import BLOCK_FORMATS, Codec
from zeor.memory.triton_codecs import ROWS, WARPS, _decode_tile, _encode_tile, _place

MEMORY_GB_S = 4230.0  # a copy on an H200, read and written (benchmarks/results/codecs_gpu.json)
CLOCKS_GHZ = 132 * 1.98  # multiprocessors times their clock under load
PER_CLOCK = {"issue": 128, "ALU": 64, "shuffles": 32, "conversions": 16}  # threads' instructions of a multiprocessor
UNIT_SHARE, MEMORY_SHARE = 0.85, 0.95
ELEMENTS = 16  # of a thread
_INTEGERS = "LOP3 SHF IADD3 VIADD VIMNMX VIMNMX3 VIADDMNMX PRMT LEA IABS SGXT P2R R2P PLOP3"
ALU = {*_INTEGERS.split(), "ISETP", "SEL", "FSETP", "FSEL", "FMNMX", "I2FP", "F2FP"}
CONVERSIONS = {"FRND", "F2I", "I2F", "MUFU"}


@triton.jit
def _encode(
    values_ptr, codes_ptr, scales_ptr, signs_ptr, n, messages, values_apart, codes_apart, scales_apart, first,
    LARGEST: tl.constexpr, INVERSE_LARGEST: tl.constexpr, CHANCE: tl.constexpr, ROTATES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    message, block, left = _place(n, messages, ROWS)
    first = (message * n + block * 128).to(tl.int32).to(tl.uint32, bitcast=True) * 3 + first.to(tl.uint32, bitcast=True)
    values_ptr += message * values_apart + block * 128
    codes_ptr += message * codes_apart + block * (64 if LARGEST == 7.0 else 128)
    scales_ptr += message * scales_apart + block
    _encode_tile(values_ptr, codes_ptr, scales_ptr, signs_ptr, left, first,
                 LARGEST, INVERSE_LARGEST, CHANCE, ROTATES, False, ROWS)  # fmt: skip


@triton.jit
def _decode(
    values_ptr, codes_ptr, scales_ptr, signs_ptr, n, messages, values_apart, codes_apart, scales_apart,
    LARGEST: tl.constexpr, ROTATES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    message, block, left = _place(n, messages, ROWS)
    values_ptr += message * values_apart + block * 128
    codes_ptr += message * codes_apart + block * (64 if LARGEST == 7.0 else 128)
    scales_ptr += message * scales_apart + block
    _decode_tile(values_ptr, codes_ptr, scales_ptr, signs_ptr, left, LARGEST, ROTATES, False, ROWS)


def compiled(kernel: Any, codec: Codec, **constants: Any) -> Any:
    """A kernel of codecs for fp32 values, with pointers and distances that are multiples of 16."""
    types = dict.fromkeys(("values_ptr", "into_ptr", "own_ptr", "signs_ptr"), "*fp32") | {"scales_ptr": "*i16"}
    types |= dict.fromkeys(("n", "messages", "values_apart", "codes_apart", "scales_apart", "base", "first"), "i32")
    types |= {"codes_ptr": "*i16" if codec.format == "bf16" else "*u8", "factor": "fp32"}
    constants |= {"LARGEST": BLOCK_FORMATS.get(codec.format, 0.0), "ROTATES": codec.rotates, "ROWS": ROWS}
    if "CHANCE" in kernel.arg_names:
        constants |= {"INVERSE_LARGEST": 1 / (constants["LARGEST"] or 1), "CHANCE": codec.chance}
    if not codec.rotates:
        constants["signs_ptr"] = None
    names = kernel.arg_names
    given = [name for name in names if name not in constants]
    source = ASTSource(
        fn=kernel, signature={name: types[name] if name in given else "constexpr" for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in given
               if name.endswith(("_ptr", "values_apart", "codes_apart"))},
    )  # fmt: skip
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS, "enable_fp_fusion": False}
    )


class Counts(NamedTuple):
    """An element's, by what starts them."""

    issue: float
    ALU: float
    shuffles: float
    conversions: float


def counts_of(kernel: Any) -> Counts:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-sass", file.name], capture_output=True, text=True, check=True).stdout
    names = []
    for condition, name in re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+((?:@!?U?P\w+ )?)([A-Z0-9_.]+)", text, re.MULTILINE):
        if name == "EXIT" and not condition:
            break
        names.append(name.split(".")[0])
    kinds = [[name != "NOP" for name in names], [name in ALU for name in names]]
    kinds += [[name == "SHFL" for name in names], [name in CONVERSIONS for name in names]]
    return Counts(*(sum(kind) / ELEMENTS for kind in kinds))


def row(what: str, codec: Codec, counts: Counts) -> str:
    nbytes = 4 + codec.nbytes(1 << 20) / (1 << 20)
    memory = MEMORY_GB_S / nbytes
    bounds = {
        unit: CLOCKS_GHZ * PER_CLOCK[unit] / count if (count := getattr(counts, unit)) else math.inf
        for unit in PER_CLOCK
    }
    unit = min(bounds, key=lambda each: bounds[each])
    predicted = min(MEMORY_SHARE, UNIT_SHARE * bounds[unit] / memory)
    name = codec.format + (" rotated" if codec.rotates else "")
    numbers = f"{counts.issue:.1f} | {counts.ALU:.1f} | {counts.shuffles:.1f} | {counts.conversions:.1f}"
    bound = f"{bounds[unit] / memory:.1f} ({unit})"
    return f"| {name}, {what} | {nbytes:.2f} | {2**30 / memory / 1e6:.2f} | {numbers} | {bound} | {predicted:.0%} |"


def main() -> None:
    print("| kernel | bytes | floor, ms | instructions | ALU | shuffles | conversions | bound / memory | predicted |")
    print("|---|---|---|---|---|---|---|---|---|")
    for format in ("int4", "int8", "fp8_e4m3", "fp8_e5m2", "bf16"):
        for rotates in (False, True) if format in BLOCK_FORMATS else (False,):
            for chance in (False, True):
                codec = Codec(format, chance, rotates)
                what = "encode by chance" if chance else "encode"
                print(row(what, codec, counts_of(compiled(_encode, codec))), flush=True)
            print(row("decode", codec, counts_of(compiled(_decode, codec))), flush=True)


if __name__ == "__main__":
    main()
