"""What the planner says of tiers and formats is what the engine holds, to the byte: by role, by tier, by rank.

Windows come and go inside a step; their size is read there and may differ from what was planned by their alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeor
from zeor import api
from zeor.optim.streaming.windows import _ALIGNED, WINDOWS, WindowRing

WIDTH, BLOCKS = 40, 5
ROLES = ("compute", "grad", "master", "moments")
HALF = {"device": 0.5, "host": 0.5}
# Names of cases, and what shard() and predict() are both given.
CASES: dict[str, dict[str, Any]] = {
    "host": {"offload": {}},
    "moments alone": {"offload": {"master": "device"}},
    "gradients too": {"offload": {"grads": "host"}},
    "compute too": {"offload": {"compute": "host"}},
    "half": {"offload": {"moments": HALF, "master": HALF}},
    "small chunks": {"offload": {"chunk": 512}},
    "updated on the host": {"offload": {"update": "host", "chunk": 1024}},
    "disk": {"offload": {"moments": "disk", "master": "disk", "grads": "disk"}},
    "all tiers": {"offload": {"moments": "disk", "master": "host", "grads": HALF, "compute": HALF}},
    "bf16": {"moments": "bf16"},
    "int8": {"moments": "int8"},
    "int8, host": {"moments": "int8", "offload": {"chunk": 256}},
    "delayed": {"delay": 1, "offload": {}},
    "released": {"release": True, "offload": {}},
    "not offloaded": {},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.relu(self.linear(x))) * self.frozen


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def options_of(case: str, folder: str) -> dict[str, Any]:
    options = dict(CASES[case])
    if "offload" in options:
        options["offload"] = {**options["offload"], "folder": folder}
    return options


def on_device(ring: WindowRing) -> int:
    """Bytes of its windows."""
    return sum(0 if window.device is None else window.device.numel() for window in ring._windows)


def held(stage: int, precision: str, case: str, folder: str) -> dict[str, Any]:
    """After two steps, gradients still there: by role, by tier, and the most that windows had."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeor.shard(model, optimizer, stage=stage, precision=precision, units=[Block], **options_of(case, folder))
    state = api._state(model)
    streaming = state.steppers[0].streaming
    windows = [0]
    if streaming is not None:
        run = WindowRing.run
        WindowRing.run = lambda self, *args: (run(self, *args), windows.append(on_device(self)))[0]  # type: ignore[method-assign]
    try:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 7)).float().square().mean().backward()
            optimizer.step()
        state.engine.drain()
    finally:
        if streaming is not None:
            WindowRing.run = run  # type: ignore[method-assign]
    tiers = dict(state.engine.places.store.nbytes)
    host = streaming._host if streaming is not None else None
    found = {"roles": zeor.report(model), "tiers": tiers, "window": max(windows), "slots": host.nbytes if host else 0}
    zeor.unshard(model, optimizer)
    return {**found, "rank": dist.get_rank() if dist.is_initialized() else 0}


def held_in_all(cases: list[tuple[int, str, str]], folder: str) -> dict[tuple[int, str, str], dict[str, Any]]:
    return {each: held(*each, folder) for each in cases}


def predicted(world: int, stage: int, precision: str, case: str, folder: str) -> zeor.planner.Prediction:
    with torch.device("meta"):
        model = Model()
    return zeor.predict(model, world=world, stage=stage, precision=precision, units=[Block], **options_of(case, folder))


def every(world: int) -> list[tuple[int, str, str]]:
    found = [(3, "bf16", case) for case in CASES]
    found += [(stage, "bf16", "host") for stage in (0, 1, 2)] + [(3, "fp32", "host"), (3, "fp16", "host")]
    return found + ([(2, "bf16", "gradients too"), (2, "fp32", "disk")] if world > 1 else [])


@pytest.fixture(scope="module", params=[1, 2, 3])
def measured(request: Any, ranks: Callable[..., list[Any]], tmp_path_factory: Any) -> tuple[int, str, list[dict]]:
    folder = str(tmp_path_factory.mktemp("tiers"))
    return request.param, folder, ranks(held_in_all, request.param, every(request.param), folder)


def test_resident_bytes_by_role_and_tier_are_exact(measured: Any) -> None:
    world, folder, by_rank = measured
    for key in every(world):
        said = predicted(world, *key, folder)
        found = [rank[key] for rank in by_rank]
        for role in ("compute", "master"):
            assert {rank["roles"][role] for rank in found} == {getattr(said, role)}, (key, role)
        assert max(rank["roles"]["moments"] for rank in found) == said.moments, key
        for tier in ("host", "disk"):
            assert max(rank["tiers"][tier] for rank in found) == getattr(said, tier), (key, tier)
        assert said.device + said.host + said.disk == said.resident + said.lagging, key


def test_gradients_on_the_device_are_exact(measured: Any) -> None:
    world, folder, by_rank = measured
    for key in every(world):
        if key[2] not in ("gradients too", "disk", "all tiers"):
            said = predicted(world, *key, folder)
            assert {rank[key]["roles"]["grad"] for rank in by_rank} == {said.grad}, key


def test_windows_are_as_large_as_planned(measured: Any) -> None:
    world, folder, by_rank = measured
    for key in every(world):
        said, slots = predicted(world, *key, folder).window, max(rank[key]["slots"] for rank in by_rank)
        if "disk" in str(CASES[key[2]]):
            continue  # on a host files are read to where they are used
        found = max(rank[key]["window"] for rank in by_rank) + slots
        assert found <= said <= found + 2 * WINDOWS * _ALIGNED, key


def test_where_nothing_is_away_there_is_no_window() -> None:
    assert predicted(1, 3, "bf16", "int8", "").window == 0
    assert predicted(1, 3, "bf16", "not offloaded", "").window == 0


def test_a_chunk_bounds_the_window(tmp_path: Path) -> None:
    """Remainder 2 bytes and two moments of 4 for each of 512 elements, each part whole pages."""
    assert predicted(1, 3, "bf16", "small chunks", str(tmp_path)).window == WINDOWS * (3 * _ALIGNED + _ALIGNED)


def test_delayed_updates_have_a_compute_of_their_own(tmp_path: Path) -> None:
    said = predicted(1, 3, "bf16", "delayed", str(tmp_path))
    trained = sum(p.numel() for p in Model().parameters() if p.requires_grad)
    assert 2 * trained <= said.lagging <= said.compute
    assert predicted(1, 3, "bf16", "host", str(tmp_path)).lagging == 0
