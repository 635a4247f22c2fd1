"""`zeor.mesh`: a DeviceMesh by names and sizes, or one sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

import zeor


def meshes() -> list[tuple[tuple[str, ...], list[list[int]], int, int]]:
    found = []
    for sizes in ({"pp": 2, "dp": 2}, {"pp": 2, "dp": -1}, {"pp": -1, "dp": 4, "tp": 1}):
        mesh = zeor.mesh(device="cpu", **sizes)
        found.append((mesh.mesh_dim_names, list(mesh.mesh.shape), mesh["pp"].get_local_rank(), mesh["dp"].size()))
    for sizes, words in (
        ({"pp": 3, "dp": 2}, "pp=3 x dp=2 does not make the 4 rank"), ({"pp": 3, "dp": -1}, "does not make the 4 rank"),
        ({"pp": -1, "dp": -1}, "at most one is -1"), ({}, "sizes by name"), ({"pp": 0}, "pp=0; give how many ranks"),
        ({"pp": 2.0}, "pp=2.0; give how many"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            zeor.mesh(device="cpu", **sizes)
    assert dist.get_world_size() == 4
    return found


def test_meshes_by_name(ranks: Callable) -> None:
    for rank, found in enumerate(ranks(meshes, 4)):
        assert found == [
            (("pp", "dp"), [2, 2], rank // 2, 2), (("pp", "dp"), [2, 2], rank // 2, 2),
            (("pp", "dp", "tp"), [1, 4, 1], 0, 4),
        ]  # fmt: skip


def test_a_process_alone_is_told_how_to_start() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="start it with torchrun"):
        zeor.mesh(device="cpu", dp=1)
