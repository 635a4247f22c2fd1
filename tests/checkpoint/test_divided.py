"""Checkpoints of models that tensor parallelism has cut: any (dp, tp, stage) loads at any other, and at none."""

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
from tests.parity.divided import Divided, adamw, cut, made, new_mesh, one_step, sharded, whole

STEP = 7


def bits(values: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: value.contiguous().numpy().tobytes() for name, value in values.items()}


def saved(folder: str, setting: Divided) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    """A run of two steps is saved; what it holds then, in bits, and after another step."""
    model, optimizer, mesh = sharded(setting)
    rank = mesh.get_local_rank("dp")
    for step in range(2):
        one_step(model, optimizer, step, rank, setting)
    average = zeor.ema(model, 0.5)
    average.update()
    zeor.save(folder, model, optimizer, step=STEP, extra={"average": average})
    there = bits(whole(model))
    one_step(model, optimizer, 2, rank, setting)
    return there, whole(model)


def resumed(folder: str, setting: Divided, seed: int = 1) -> tuple[dict[str, bytes], dict[str, Tensor], Any]:
    model, optimizer, mesh = sharded(setting)
    rank = mesh.get_local_rank("dp")
    one_step(model, optimizer, 9, rank, setting)  # other weights and state than those that are loaded
    average = zeor.ema(model, 0.5)
    loaded = zeor.load(folder, model, optimizer, extra={"average": average})
    there = bits(whole(model))
    with average.applied():
        averages = bits(whole(model))
    one_step(model, optimizer, 2, rank, setting)
    return there, whole(model), (loaded.step, averages)


# Of one model: the mesh that saves, and meshes that load.
FROM = Divided("sequence", (2, 2), 3, clip="zeor")
TO = [
    Divided("sequence", (2, 2), 3, clip="zeor"),
    Divided("sequence", (1, 2), 2, clip="zeor"),
    Divided("sequence", (2, 1), 3, clip="zeor"),
    Divided("sequence", (1, 1), 1, clip="zeor"),
    Divided("sequence", (2, 1), 0, clip="zeor", plain=True),
]


@pytest.mark.parametrize("at", TO, ids=str)
def test_a_checkpoint_loads_at_any_other_mesh(ranks: Callable, tmp_path: Path, at: Divided) -> None:
    there, _ = ranks(saved, 4, str(tmp_path), FROM)[0]
    for found, after, (step, averages) in ranks(resumed, at.shape[0] * at.shape[1], str(tmp_path), at):
        assert step == STEP and found == there
        assert averages == there, "an average of one update is the values themselves"
        assert all(torch.isfinite(value).all() for value in after.values())


def through(folder: str, first: Divided, then: Divided) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The step after a checkpoint in the run that saved it, and in one that loads it on as many data-parallel ranks."""
    _, wanted = saved(folder, first)
    _, found, _ = resumed(folder, then)
    return wanted, found


@pytest.mark.parametrize("stages", [(3, 3), (1, 2), (0, 3)])
@pytest.mark.parametrize("model", ["sequence", "vocabulary"])
def test_a_resumed_run_goes_on_in_the_same_bits(
    ranks: Callable, tmp_path: Path, model: str, stages: tuple[int, int]
) -> None:
    first, then = (Divided(model, (2, 2), stage, clip="zeor") for stage in stages)
    for wanted, found in ranks(through, 4, str(tmp_path), first, then):
        assert bits(found) == bits(wanted)


@pytest.mark.parametrize(("before", "after"), [((1, 2), (1, 1)), ((1, 1), (1, 2)), ((2, 2), (2, 1)), ((2, 1), (2, 2))])
def test_the_optimizer_goes_on_at_another_mesh(
    ranks: Callable, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    first = Divided("sequence", before, 2, clip="zeor")
    then = Divided("sequence", after, 3, clip="zeor", plain=after[1] == 1)
    _, wanted = ranks(saved, before[0] * before[1], str(tmp_path), first)[0]
    for _, found, _ in ranks(resumed, after[0] * after[1], str(tmp_path), then):
        assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-12


# ---- values whole


def seen(folder: str, setting: Divided) -> dict[str, Any]:
    model, _, _ = sharded(setting)
    streamed = dict(zeor.iter_full(model))
    zeor.export(model, folder)
    with zeor.full_params(model) as full:
        kinds = {name: (type(param) is DTensor, tuple(param.shape)) for name, param in full.named_parameters()}
    with zeor.full_params(model, write=True):
        for param in model.parameters():
            param.data.mul_(2.0)
    doubled = whole(model)
    dict_shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    zeor.unshard(model)
    plain = {name: (param.full_tensor() if isinstance(param, DTensor) else param).detach() for name, param in
             model.named_parameters()}  # fmt: skip
    return {"streamed": streamed, "kinds": kinds, "doubled": doubled, "shapes": dict_shapes, "plain": plain}


@pytest.mark.parametrize("stage", [0, 3])
def test_values_are_global(ranks: Callable, tmp_path: Path, stage: int) -> None:
    wanted = {name: param.detach() for name, param in made("sequence").named_parameters()}
    folder = tmp_path / "weights"
    for found in ranks(seen, 4, str(folder), Divided("sequence", (2, 2), stage)):
        assert bits(found["streamed"]) == bits(wanted)
        assert {name: shape for name, (_, shape) in found["kinds"].items()} == found["shapes"]
        assert found["shapes"] == {name: tuple(value.shape) for name, value in wanted.items()}
        assert found["kinds"]["blocks.0.up.weight"][0] and found["kinds"]["embed.weight"][0]
        twice = {name: value * 2 for name, value in wanted.items()}
        assert bits(found["doubled"]) == bits(twice) == bits(found["plain"])
    assert bits(load_file(folder / "model.safetensors")) == bits(wanted)


def from_files(folder: str, setting: Divided) -> dict[str, bytes]:
    mesh = new_mesh(*setting.shape)
    with zeor.on_meta():
        model = made(setting.model)
    cut(setting.model, model, mesh["tp"])
    zeor.shard(model, mesh=mesh["dp"], stage=setting.stage)
    zeor.load_pretrained(model, folder)
    optimizer = adamw(model)
    zeor.shard(model, optimizer)
    return bits(whole(model))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_folder_of_weights_into_a_model_on_meta(ranks: Callable, tmp_path: Path, stage: int) -> None:
    ranks(seen, 4, str(tmp_path / "weights"), Divided("sequence", (2, 2), 3))
    wanted = bits({name: param.detach() for name, param in made("sequence").named_parameters()})
    for found in ranks(from_files, 4, str(tmp_path / "weights"), Divided("sequence", (2, 2), stage)):
        assert found == wanted
