"""Checkpoints of models with expert parallelism: any (dp, ep, stage) loads at any other, and where there is no ep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import zeor
from examples.experts import divide
from tests.checkpoint.test_divided import bits
from tests.parity.divided import adamw, whole
from tests.parity.mixtures import Mixed, made, mesh_of, one_step, sharded

STEP = 7


def saved(folder: str, setting: Mixed) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    """A run of two steps is saved; what it holds then, in bits, and after another step."""
    model, optimizer, rank = sharded(setting)
    for step in range(2):
        one_step(model, optimizer, step, rank, setting)
    average = zeor.ema(model, 0.5)
    average.update()
    zeor.save(folder, model, optimizer, step=STEP, extra={"average": average})
    there = bits(whole(model))
    one_step(model, optimizer, 2, rank, setting)
    return there, whole(model)


def resumed(folder: str, setting: Mixed) -> tuple[dict[str, bytes], dict[str, Tensor], int, dict[str, bytes]]:
    model, optimizer, rank = sharded(setting)
    one_step(model, optimizer, 9, rank, setting)  # other weights and state than those that are loaded
    average = zeor.ema(model, 0.5)
    loaded = zeor.load(folder, model, optimizer, extra={"average": average})
    there = bits(whole(model))
    with average.applied():
        averages = bits(whole(model))
    one_step(model, optimizer, 2, rank, setting)
    return there, whole(model), loaded.step, averages


def through(folder: str, first: Mixed, then: list[Mixed]) -> Any:
    return saved(folder, first), [resumed(folder, each) for each in then]


FROM = Mixed((2, 2), 3, clip="zeor")
TO = [
    Mixed((2, 2), 1, clip="zeor"),
    Mixed((1, 4), 2, clip="zeor"),
    Mixed((4, 1), 3, clip="zeor", plain=True),
    Mixed((2, 2), 3, clip="zeor", over="crossed"),
]
SMALLER = [Mixed((1, 2), 3, clip="zeor"), Mixed((1, 1), 1, clip="zeor", plain=True)]


def test_a_checkpoint_loads_at_other_meshes_of_as_many_ranks(ranks: Callable, tmp_path: Path) -> None:
    """And on the same ranks the run goes on in the same bits; elsewhere sums have another order."""
    for (there, after), found in ranks(through, 4, str(tmp_path), FROM, TO, timeout=240):
        for setting, (values, then, step, averages) in zip(TO, found, strict=True):
            assert step == STEP and values == averages == there, setting
            assert max(float((then[name] - after[name]).abs().max()) for name in after) < 1e-12, setting
        assert bits(found[0][1]) == bits(after)


@pytest.mark.parametrize("at", SMALLER, ids=str)
def test_a_checkpoint_loads_on_fewer_ranks(ranks: Callable, tmp_path: Path, at: Mixed) -> None:
    there, _ = ranks(saved, 4, str(tmp_path), FROM)[0]
    for values, after, step, averages in ranks(resumed, at.world, str(tmp_path), at):
        assert step == STEP and values == averages == there
        assert all(torch.isfinite(value).all() for value in after.values())


def test_a_checkpoint_without_experts_loads_with_them(ranks: Callable, tmp_path: Path) -> None:
    there, _ = ranks(saved, 2, str(tmp_path), Mixed((2, 1), 2, plain=True))[0]
    for values, _, _, _ in ranks(resumed, 4, str(tmp_path), Mixed((2, 2), 3)):
        assert values == there


# ---- values whole


def seen(folder: str, setting: Mixed) -> dict[str, Any]:
    model, optimizer, rank = sharded(setting)
    streamed = dict(zeor.iter_full(model))
    zeor.export(model, folder)
    with zeor.full_params(model) as full:
        kinds = {name: type(param) is DTensor for name, param in full.named_parameters()}
    one_step(model, optimizer, 0, rank, setting)
    model.load_state_dict({name: value + 1 for name, value in made().state_dict().items()})
    loaded = whole(model)
    with zeor.full_params(model, write=True):
        for param in model.parameters():
            param.data.mul_(2.0)
    doubled = whole(model)
    zeor.unshard(model, optimizer)
    plain = {name: (param.full_tensor() if isinstance(param, DTensor) else param).detach() for name, param in
             model.named_parameters()}  # fmt: skip
    return {"streamed": streamed, "kinds": kinds, "loaded": loaded, "doubled": doubled, "plain": plain}


@pytest.mark.parametrize("stage", [0, 3])
def test_values_are_global(ranks: Callable, tmp_path: Path, stage: int) -> None:
    wanted = {name: param.detach() for name, param in made().named_parameters()}
    folder = tmp_path / "weights"
    for found in ranks(seen, 4, str(folder), Mixed((2, 2), stage)):
        assert bits(found["streamed"]) == bits(wanted)
        assert {name for name, is_dtensor in found["kinds"].items() if is_dtensor} == {
            f"blocks.{block}.mixture.experts.{weight}" for block in (0, 1) for weight in ("gate", "up", "down")
        }  # fmt: skip
        assert bits(found["loaded"]) == bits({name: value + 1 for name, value in wanted.items()})
        assert bits(found["doubled"]) == bits({name: (value + 1) * 2 for name, value in wanted.items()})
        assert bits(found["plain"]) == bits(found["doubled"])
    exported = load_file(folder / "model.safetensors")
    assert bits({name: exported[name] for name in wanted}) == bits(wanted)


def from_files(folder: str, setting: Mixed) -> dict[str, bytes]:
    mesh = mesh_of(setting)
    with zeor.on_meta():
        model = made()
    divide(model, mesh["ep"])
    zeor.shard(model, experts=mesh["ep"], stage=setting.stage)
    zeor.load_pretrained(model, folder)
    optimizer = adamw(model)
    zeor.shard(model, optimizer)
    return bits(whole(model))


def test_a_folder_of_weights_into_experts_on_meta(ranks: Callable, tmp_path: Path) -> None:
    ranks(seen, 4, str(tmp_path / "weights"), Mixed((2, 2), 3))
    wanted = bits({name: param.detach() for name, param in made().named_parameters()})
    for found in ranks(from_files, 4, str(tmp_path / "weights"), Mixed((2, 2), 3)):
        assert found == wanted
