"""Links: rates as people write them, and rates measured along the axes of real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import zeor
from zeor.comm.links import LATENCY, Link, Links
from zeor.planner.shape import Shape


@pytest.mark.parametrize(
    "text, rate, latency",
    [
        ("100Mbit/s", 12.5e6, LATENCY),
        ("400 Gbit/s 14us", 50e9, 14e-6),
        ("50GB/s", 50e9, LATENCY),
        ("1GiB/s, 2ms", 2.0**30, 2e-3),
        ("10Gbps", 1.25e9, LATENCY),
        ("10GBps", 10e9, LATENCY),
        (3e9, 3e9, LATENCY),
        (Link(7.0, 1.0), 7.0, 1.0),
    ],
)
def test_rates_as_people_write_them(text: Any, rate: float, latency: float) -> None:
    found = Link.parse(text)
    assert (found.bandwidth, found.latency, found.small) == (rate, latency, latency)


def test_axes_are_found_by_name_in_any_order() -> None:
    slow, fast = Link(1e9), Link(9e9)
    for link in ({"gpu": fast, "node": slow}, {"node": slow, "gpu": fast}, {"across": slow, "inside": fast}):
        assert Links.parse(link).links == (fast, slow)
    assert Links.parse({"pod": slow, "box": fast}, ("pod", "box")).links == (fast, slow)
    assert Links.parse({"pod": slow, "box": fast}, ("box", "pod")).links == (slow, fast)
    assert Links.parse("1GB/s").links == (slow,)
    assert Links.parse(None).links == ()


def test_mistakes_get_one_sentence() -> None:
    with pytest.raises(ValueError, match="link='fast' is not a rate; write such as '100Mbit/s'"):
        Link.parse("fast")
    with pytest.raises(ValueError, match=r"link='1\.\.2Gbit/s' is not a rate"):
        Link.parse("1..2Gbit/s")
    with pytest.raises(ValueError, match=r"names the axes \['rack'\]; use one rate, or 'node' and 'gpu'\."):
        Links.parse({"rack": "1GB/s"})
    with pytest.raises(ValueError, match=r"names the axes \['a', 'b'\]; use one rate, or one for each of \['x', 'y'\]"):
        Links.parse({"a": 1e9, "b": 1e9}, ("x", "y"))
    with pytest.raises(ValueError, match="give numbers above zero"):
        Link(0.0)
    with pytest.raises(ValueError, match="There is one rank alone, so there are no links to measure"):
        zeor.measure_links()


def measured(how: str) -> Links:
    if how == "mesh":
        return zeor.measure_links(init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "core")))
    return zeor.measure_links(hierarchy=2) if how == "hierarchy" else zeor.measure_links()


@pytest.mark.parametrize(
    "how, names, sizes",
    [("all", ("ranks",), (4,)), ("mesh", ("core", "host"), (2, 2)), ("hierarchy", ("gpu", "node"), (2, 2))],
)
def test_every_rank_measures_the_same_along_each_axis(
    ranks: Callable[..., list[Any]], how: str, names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    found = ranks(measured, 4, how)
    assert found == [found[0]] * 4
    assert (found[0].names, found[0].sizes) == (names, sizes)
    for link in found[0].links:  # between a modem and memory: nobody times a test
        assert 1e5 < link.bandwidth < 1e13 and 0 <= link.latency < 10 and 0 < link.small < 10
    assert str(found[0]).startswith(f"{names[0]} ({sizes[0]}): ")


def test_what_was_measured_is_what_the_planner_goes_by(ranks: Callable[..., list[Any]]) -> None:
    links = ranks(measured, 4, "hierarchy")[0]
    machine = zeor.Machine.parse("CPU")
    shape = Shape.parse(4, 2)
    axes = machine.links(shape.sizes, shape.mesh_dim_names, links)
    assert [(name, size) for name, size, _ in axes] == [("gpu", 2), ("node", 2)]
    assert tuple(link for _, _, link in axes) == links.links
