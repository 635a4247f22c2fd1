"""The zoo on a GPU: stages 1-3 on two Gloo ranks that share the device, against one process there."""

from __future__ import annotations

import os

import pytest
import torch

from tests.parity.test_zoo import WORLD, Result, compare, plain, stages
from tests.parity.zoo import ZOO

pytestmark = pytest.mark.gpu


def deterministic() -> None:
    """Some kernels of the models themselves (not zeor's) add in any order unless told not to."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def stages_on_gpu(name: str) -> list[Result]:
    deterministic()
    return stages(name, "cuda")


@pytest.mark.parametrize("name", ZOO)
def test_stages_are_the_same_bits_and_equal_one_process_on_a_shared_gpu(ranks, name: str) -> None:
    deterministic()
    compare(ranks(stages_on_gpu, WORLD, name, timeout=240)[0], plain(name, "cuda"))
