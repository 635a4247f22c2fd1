"""From mesh=, hierarchy= and a stage by axis to axes: what is found, and one sentence on every rank for what is not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeor
from tests import loops
from zeor.comm.axes import Axes
from zeor.comm.meshes import make_axes

NAMES = ("node", "gpu")


def axes_of(mesh: Any = None, hierarchy: Any = None) -> Axes:
    return make_axes(mesh, torch.device("cpu"), False, 60.0, hierarchy)


def refused(**settings: Any) -> str:
    """The sentence of shard(), which every rank must get."""
    try:
        zeor.shard(loops.net(), **settings)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


# ---- what is found


def check_mesh() -> tuple[Any, ...]:
    axes = axes_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES))
    assert (axes.inside.name, axes.across.name) == ("gpu", "node")
    assert axes.members == ((0, 0), (1, 0), (0, 1), (1, 1))
    return axes.coords, tuple(axes.inside.known_as), tuple(axes.across.known_as)


def test_the_last_dimension_of_a_mesh_is_inside(ranks: Callable) -> None:
    found = ranks(check_mesh, 4)
    assert found == [
        ((0, 0), (0, 1), (0, 2)),
        ((1, 0), (0, 1), (1, 3)),
        ((0, 1), (2, 3), (0, 2)),
        ((1, 1), (2, 3), (1, 3)),
    ]


def check_hierarchy(nodes: list[str]) -> tuple[int, ...]:
    """As on hosts of these names; asking for a host's name is what tells hosts apart."""
    here, socket.gethostname = socket.gethostname, lambda: nodes[dist.get_rank()]
    try:
        return (*axes_of(hierarchy="auto").sizes,)
    finally:
        socket.gethostname = here


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [("aabb", (2, 2)), ("abab", (2, 2)), ("aaaa", (4, 1)), ("abcd", (4, 1)), ("bbaa", (2, 2))],
)
def test_auto_goes_by_host_names(ranks: Callable, nodes: str, sizes: tuple[int, int]) -> None:
    """On one host, and with one rank on each, there is one axis."""
    assert ranks(check_hierarchy, 4, list(nodes)) == [sizes] * 4


def check_number(number: int) -> tuple[int, ...]:
    return (*axes_of(hierarchy=number).sizes,)


@pytest.mark.parametrize(("number", "sizes"), [(2, (2, 2)), (4, (4, 1)), (1, (4, 1))])
def test_a_number_says_how_many_ranks_a_node_has(ranks: Callable, number: int, sizes: tuple[int, int]) -> None:
    assert ranks(check_number, 4, number) == [sizes] * 4


def check_stages(settings: dict[str, Any]) -> tuple[int, int]:
    model = loops.net()
    zeor.shard(model, **settings)
    return tuple(zeor.access.sharded.state_of(model).engine.plan.stages)


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ({"stage": 3, "hierarchy": 2}, (3, 1)),
        ({"stage": 2, "hierarchy": 2}, (2, 2)),
        ({"stage": {"gpu": 3, "node": 0}, "hierarchy": 2}, (3, 0)),
        ({"stage": {"node": 2, "gpu": 3}, "hierarchy": "auto"}, (3, 2)),
    ],
)
def test_stages_by_axis(ranks: Callable, settings: dict[str, Any], stages: tuple[int, int]) -> None:
    """Plain stage 3 with a hierarchy keeps parameters inside a node."""
    assert ranks(check_stages, 4, settings) == [stages] * 4


# ---- what is refused


def check_refused(settings: dict[str, Any]) -> str:
    return refused(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stage": {"gpu": 3, "host": 1}, "hierarchy": 2}, "there is no axis 'host'; the axes are ['node', 'gpu']."),
        ({"stage": {"gpus": 3, "node": 1}, "hierarchy": 2}, "there is no axis 'gpus' (did you mean 'gpu'?)"),
        ({"stage": {"gpu": 3}, "hierarchy": 2}, "says nothing of axis 'node'; give one for each of ['node', 'gpu']."),
        ({"stage": {"gpu": 3, "node": 1}}, "names axes, but the ranks have none; give mesh=, a DeviceMesh with"),
        ({"stage": {"gpu": 1, "node": 3}, "hierarchy": 2}, "3 across"),
        ({"stage": 3, "hierarchy": 3}, "hierarchy=3 ranks per node do not divide the 4 ranks there are"),
        ({"stage": 3, "hierarchy": 0}, "hierarchy=0; give 'auto', or how many ranks a node has."),
        ({"stage": 3, "hierarchy": "host"}, "hierarchy='host'; give 'auto', or how many ranks a node has."),
    ],
)
def test_one_sentence_on_every_rank(ranks: Callable, settings: dict[str, Any], sentence: str) -> None:
    for found in ranks(check_refused, 4, settings):
        assert found.startswith("ValueError: ") and sentence in found


def check_unequal(nodes: list[str]) -> str:
    here, socket.gethostname = socket.gethostname, lambda: nodes[dist.get_rank()]
    try:
        return refused(hierarchy="auto")
    finally:
        socket.gethostname = here


def test_hosts_with_unequal_numbers_of_ranks(ranks: Callable) -> None:
    wanted = "ValueError: hierarchy='auto' needs equally many ranks on every host, and there are: big 3, small 1; "
    assert [found[: len(wanted)] for found in ranks(check_unequal, 4, ["big", "big", "big", "small"])] == [wanted] * 4


def check_both() -> str:
    return refused(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES), hierarchy=2)


def test_a_mesh_and_a_hierarchy(ranks: Callable) -> None:
    for found in ranks(check_both, 4):
        assert found == "ValueError: mesh= says already which ranks stand on which axis; leave out hierarchy=."


def check_disagree() -> str:
    """Ranks 0 and 1 think of 2 x 2, the others of another table; no group is made before they compare."""
    table = [[0, 1], [2, 3]] if dist.get_rank() < 2 else [[0, 2], [1, 3]]
    return refused(mesh=DeviceMesh("cpu", table, mesh_dim_names=NAMES, _init_backend=False))


def test_ranks_that_disagree_about_the_mesh(ranks: Callable) -> None:
    for found in ranks(check_disagree, 4):
        assert "[[0, 1], [2, 3]]" in found and "[[0, 2], [1, 3]]" in found and "nothing" not in found


def check_hierarchies_differ(others: Any) -> str:
    return refused(hierarchy=2 if dist.get_rank() else others, timeout=10)


@pytest.mark.parametrize("others", [4, "auto", None, 3])
def test_ranks_that_disagree_about_the_hierarchy(ranks: Callable, others: Any) -> None:
    """Nobody is asked for its host, or refused alone, before that."""
    for found in ranks(check_hierarchies_differ, 4, others):
        assert "hierarchy=2" in found and f"hierarchy={others}" in found


def check_descends() -> str:
    mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=NAMES, _init_backend=False)
    return refused(mesh=mesh)


def test_a_mesh_whose_ranks_do_not_ascend(ranks: Callable) -> None:
    for found in ranks(check_descends, 4):
        assert "[[1, 0], [3, 2]], do not ascend along both dimensions" in found
