"""Tensor parallelism beside ZeRO on a GPU: two Gloo ranks that share it with tp=2, beside one process on the host.

Only models whose tensor parallelism needs sums alone: torch 2.11 crashes (in wait_tensor) where DTensors of a GPU are
gathered or scattered over Gloo, and NCCL refuses two ranks on one GPU. The others run on CPU ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.divided import Divided
from tests.parity.test_tensor import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model", ["mlp", "vocabulary"])
def test_two_ranks_that_share_a_gpu(ranks: Callable, model: str) -> None:
    check(ranks, [Divided(model, (1, 2), stage, "3", "zeor", device="cuda") for stage in (0, 1, 2, 3)])
