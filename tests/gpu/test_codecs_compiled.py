"""What Triton makes of the fused kernels for an H100 or H200: wide accesses, no spills, nothing in shared memory but
scales. It compiles, and launches nothing: no GPU is needed, but Triton is, and not its interpreter.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from zeor.memory.codecs import Codec

pytest.importorskip("triton")
pytestmark = [pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")]
pytestmark += [pytest.mark.gpu] if torch.cuda.is_available() else []  # `make test-gpu` runs it too
CODECS = [
    Codec("bf16"), Codec("bf16", True), Codec("int8"), Codec("int4", True, True), Codec("fp8_e4m3", True, True),
    Codec("fp8_e5m2"),
]  # fmt: skip
EACH = pytest.mark.parametrize("codec", CODECS, ids=str)


def compiled(name: str, codec: Codec, **constants: Any) -> Any:
    from benchmarks import codec_instructions
    from zeor.memory import triton_codecs

    return codec_instructions.compiled(getattr(triton_codecs, name), codec, **constants)


def accesses(ptx: str, what: str) -> list[int]:
    """Bytes of each access to global memory, as often as it stands there."""
    found = re.findall(rf"{what}\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in found]


def assert_lean(kernel: Any) -> None:
    """In shared memory the scales of a tile alone, no spills, and no denormal becomes zero but in a floor, which is
    given none that matters."""
    assert kernel.metadata.shared <= 2 * 16
    ptx = kernel.asm["ptx"]
    assert ".local" not in ptx and ptx.count(".ftz") == ptx.count("cvt.rmi.ftz.f32.f32")


@EACH
def test_encoding_reads_16_bytes_at_a_time_and_writes_each_run_of_codes_at_once(codec: Codec) -> None:
    kernel = compiled("_encode_kernel", codec)
    ptx = kernel.asm["ptx"]
    assert accesses(ptx, "ld").count(16) == (12 if codec.rotates else 4)  # values; the signs, in both branches
    writes = {"bf16": (8, 4), "int4": (4, 2)}.get(codec.format, (4, 4))
    assert accesses(ptx, "st").count(writes[0]) >= writes[1]
    assert_lean(kernel)


@EACH
def test_decoding_writes_16_bytes_at_a_time(codec: Codec) -> None:
    kernel = compiled("_decode_kernel", codec)
    assert accesses(kernel.asm["ptx"], "st").count(16) == 4
    assert_lean(kernel)


@EACH
def test_a_sum_reads_and_writes_16_bytes_at_a_time(codec: Codec) -> None:
    kernel = compiled("_sum_kernel", codec, MESSAGES=8, OWN=3, SCALES=True)
    assert accesses(kernel.asm["ptx"], "ld").count(16) >= 4
    assert accesses(kernel.asm["ptx"], "st").count(16) == 4
    assert_lean(kernel)
