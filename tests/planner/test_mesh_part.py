"""What a rank of a mesh (pp, dp, tp) holds, before the model is cut: as much as one that was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeor
from tests.parallel.grid import Grid, Run, made
from zeor.planner.mesh_part import parts_of
from zeor.tools.plan import CUT, SIZES, meta_model

ROLES = ("compute", "grad", "master", "moments")
PLAN = {"*.up.*": 0, "*.down.weight": 1, "embed.weight": 0, "head.weight": 0}


def measured(grid: Grid) -> dict[str, int]:
    """When a backward is over: gradients are there, and moments of the step before."""
    run = Run(grid)
    run.train(0)
    run.backward(1)
    return zeor.report(run.model)


@pytest.mark.parametrize("grid", [Grid(2, 1, 2, 3, tied=False), Grid(2, 2, 1, 2, tied=False)], ids=str)
def test_predicted_is_what_the_fullest_stage_reports(ranks: Callable, grid: Grid) -> None:
    """Of the model that is not cut, but for what lanes round up where some gradients are summed apart."""
    found = max(ranks(measured, 4, grid), key=lambda each: each["compute"])
    known = zeor.predict(
        made(False), world=grid.dp, stage=grid.stage, keep_whole=32, pp=grid.pp, tp=grid.tp, cut=PLAN
    )
    for role in ROLES:
        assert abs(getattr(known, role) - found[role]) <= 1024, role
    assert abs(known.held - found["held"]) <= 1024 and abs(known.accumulated - found["partial"]) <= 2048
    assert known.accumulated > 4000 and (known.held > 0) == (grid.stage == 3 and grid.dp > 1)


def numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def test_stages_have_their_blocks_and_the_ends_what_is_around_them() -> None:
    model = meta_model(SIZES["gpt2"])
    parts = parts_of(model, 4, 1, None)
    block = numel(model.blocks[0])
    ends = numel(model.tokens) + numel(model.positions), numel(model.norm) + numel(model.head)
    assert [numel(part) for part in parts] == [3 * block + ends[0], 3 * block, 3 * block, 3 * block + ends[1]]
    assert all(param.is_meta for part in parts for param in part.parameters())
    assert numel(model) == 12 * block + sum(ends), "the model itself stays as it is"


def test_matrices_are_cut_by_the_given_plan_or_the_model_s_own() -> None:
    model = meta_model(SIZES["tiny"])
    [part] = parts_of(model, 1, 4, CUT)
    cut = [name for name, param in part.named_parameters() if param.shape != model.get_parameter(name).shape]
    assert len(cut) == 4 * 6 + 2
    assert all(4 * part.get_parameter(name).numel() == model.get_parameter(name).numel() for name in cut)
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        llama: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=96,
        ))  # fmt: skip
    [part] = parts_of(llama, 1, 2, None)
    layer = part.model.layers[0]
    assert layer.self_attn.q_proj.weight.shape == (32, 64) and layer.self_attn.o_proj.weight.shape == (64, 32)
    assert layer.mlp.down_proj.weight.shape == (64, 64) and layer.input_layernorm.weight.shape == (64,)
    assert part.lm_head.weight.shape == (48, 64)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp": 2}, "tp= needs to know how matrices are cut"),
        ({"tp": 2, "cut": {"*.nowhere": 0}}, "no parameter of the model has such a name"),
        ({"pp": 9}, "pp=9 stages need as many repeated blocks, and the model has 4"),
        ({"pp": 0}, "pp=0; give how many ranks there are"),
        ({"pp": 2, "batch": (1, 8)}, "counts no activations of a model that is still to be cut; leave out batch="),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("(", r"\(").replace("*", r"\*")):
        zeor.predict(made(False), world=2, **options)


def test_one_rank_of_256_on_a_fake_group_holds_what_was_predicted() -> None:
    """pp x dp x tp = 4 x 8 x 8, as benchmarks/parallel_memory.py measures it for 70B, with a small model."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "benchmarks.parallel_memory", "--model", "small", "--step"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == 256 and found["measured"]["compute"] > 0
    for role in (*ROLES, "held", "partial"):
        wanted = found["predicted"][role]
        assert abs(found["measured"][role] - wanted) <= 0.05 * wanted, (role, found)
    cut = found["predicted_cut"]
    assert cut["activations"] > found["predicted"]["activations"] == 0
    assert cut["device_peak"] > cut["resident"] + cut["held"] + cut["accumulated"] + cut["activations"]
