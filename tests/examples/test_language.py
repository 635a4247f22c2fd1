"""Pretraining and fine-tuning lower the loss on held-out text, on two ranks."""

from __future__ import annotations

import pytest
import torch

from examples import bert_mlm
from examples.texts import Windows
from tests.examples.run_example import run

# `make test` runs one program, in its richest setting; the others are whole.
SMALL = ["--limit", "2", "--batch", "4", "--context", "64", "--layers", "2", "--width", "64", "--lr", "5e-3"]


LEAN = ["--offload", "host", "--moments", "int8", "--release", "--precision", "bf16"]
LEAN += ["--chunked-loss", "--recompute", "offload"]


@pytest.mark.long
@pytest.mark.parametrize("more", [pytest.param([], id="plain", marks=pytest.mark.whole), pytest.param(LEAN, id="lean")])
def test_gpt_pretraining_lowers_the_held_out_loss(tmp_path, more):
    result = run(tmp_path, "gpt_pretrain", "--steps", "15", *SMALL, *more)
    assert 10.5 < result["loss_before"] < 11.2  # log(50257) = 10.8: it knows nothing
    assert result["loss"] < result["loss_before"] - 1.5


@pytest.mark.whole
def test_masked_language_pretraining_lowers_the_held_out_loss(tmp_path):
    result = run(tmp_path, "bert_mlm", "--steps", "12", "--accumulate", "2", *SMALL)
    assert 10.0 < result["loss_before"] < 10.7  # log(30522) = 10.3
    assert result["loss"] < result["loss_before"] - 1.5


@pytest.mark.whole
@pytest.mark.parametrize("way", ["full", "lora"])
def test_fine_tuning_a_pretrained_llama_lowers_the_held_out_loss(tmp_path, way):
    options = ["--limit", "1", "--steps", "3", "--batch", "2", "--context", "32", "--windows", "8", "--tokens", "2"]
    result = run(tmp_path, "finetune_smollm2", *options, *(["--lora"] if way == "lora" else []))
    assert 4.5 < result["loss_before"] < 5.5  # the pretrained values are there: random ones give 10.8
    assert result["loss"] < result["loss_before"] - 0.03
    assert result["sample"].startswith("Enter HAMLET") and len(result["sample"]) > len("Enter HAMLET, alone.")


def test_masks_are_the_paper_s_shares_and_hide_nothing_else():
    rows = torch.full((200, 100), 5000)
    masked = bert_mlm.mask(rows, torch.Generator().manual_seed(0))
    chosen = masked.right != bert_mlm.LEFT_OUT
    assert abs(chosen.float().mean().item() - 0.15) < 0.01
    assert torch.equal(masked.right[chosen], rows[chosen]) and torch.equal(masked.seen[~chosen], rows[~chosen])
    hidden, kept = (masked.seen == bert_mlm.MASK).sum() / chosen.sum(), (masked.seen == rows)[chosen].float().mean()
    assert abs(hidden.item() - 0.8) < 0.03 and abs(kept.item() - 0.1) < 0.03


@pytest.mark.parametrize("count, world, batch", [(100, 2, 8), (7, 3, 2), (3, 3, 4), (65, 4, 16)])
def test_an_evaluation_sees_every_window_once_in_equally_many_batches(count, world, batch):
    windows = Windows(torch.arange(count * 2), 2, torch.device("cpu"))
    parts = [windows.parts(rank, world, batch) for rank in range(world)]
    assert len({len(mine) for mine in parts}) == 1
    assert all(0 < len(rows) <= batch for mine in parts for rows in mine)
    seen = torch.cat([rows[:, 0] for mine in parts for rows in mine])
    assert sorted(seen.tolist()) == list(range(0, count * 2, 2))


@pytest.mark.long
def test_a_llama_cut_by_tensor_parallelism_goes_on_at_another_mesh(tmp_path):
    small = [*SMALL, "--checkpoints", str(tmp_path / "checkpoints"), "--limit", "1"]
    (tmp_path / "first").mkdir()
    first = run(tmp_path / "first", "tensor_parallel", "--steps", "10", "--tensor", "2", *small, ranks=2)
    assert 10.5 < first["loss_before"] < 11.2 and first["loss"] < first["loss_before"] - 1.0
    (tmp_path / "then").mkdir()
    then = run(tmp_path / "then", "tensor_parallel", "--steps", "3", "--tensor", "1", *small, ranks=2)
    assert then["begun_at"] == 10 and abs(then["loss_before"] - first["loss"]) < 1e-4


@pytest.mark.whole
def test_a_llama_on_two_times_two_ranks(tmp_path):
    result = run(tmp_path, "tensor_parallel", "--steps", "10", "--tensor", "2", *SMALL, ranks=4)
    assert result["loss"] < result["loss_before"] - 1.0
