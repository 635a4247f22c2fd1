"""Random numbers by position on a GPU and on a host: uniform ones have the same bits, normal ones all but the last."""

from __future__ import annotations

import pytest
import torch

from tests.access.test_draw import recipe

pytestmark = pytest.mark.gpu

NUMEL = 1 << 22
GPU, HOST = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_uniform_numbers_have_the_same_bits(dtype: torch.dtype) -> None:
    made = recipe(("uniform_", (-1.0, 3.0)), dtype=dtype)
    assert torch.equal(made.make(0, NUMEL, GPU).cpu(), made.make(0, NUMEL, HOST))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normal_numbers_agree_but_for_the_last_bit(dtype: torch.dtype) -> None:
    made = recipe(("normal_", (0.0, 1.0)), dtype=dtype)
    on_gpu, on_host = made.make(0, NUMEL, GPU).cpu(), made.make(0, NUMEL, HOST)
    # Numbers near zero come from a cosine near zero, whose error is that of one near 1.
    near = torch.finfo(dtype).eps * on_host.abs().clamp(min=1.0)
    assert bool(((on_gpu - on_host).abs() <= (4 if dtype == torch.float64 else 1) * near).all())
    if dtype != torch.float64:  # computed in float64, so what is rounded to fewer digits is nearly always the same
        assert float((on_gpu != on_host).double().mean()) < 1e-4
