"""Tensor parallelism beside ZeRO on a GPU: two Gloo ranks that share it with tp=2, beside one process on the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.divided import TRANSFORMERS, Divided
from tests.parity.test_tensor import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model", ["mlp", "sequence", "vocabulary", *TRANSFORMERS])
def test_two_ranks_that_share_a_gpu(ranks: Callable, model: str) -> None:
    check(ranks, [Divided(model, (1, 2), stage, "3", "zeor", device="cuda") for stage in (0, 1, 2, 3)])
