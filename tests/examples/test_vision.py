"""MNIST, CIFAR-10 and distillation learn on two ranks: real pictures, few of them."""

from __future__ import annotations

import pytest
import torch

from examples.pictures import flip_and_crop
from tests.examples.run_example import run

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "ranks_count", [pytest.param(1, id="python", marks=pytest.mark.whole), pytest.param(2, id="torchrun")]
)
def test_the_mnist_network_learns_at_stage_3(tmp_path, ranks_count):
    batch = str(64 // ranks_count)
    result = run(tmp_path, "mnist_cnn", "--limit", "2000", "--epochs", "1", "--batch", batch, ranks=ranks_count)
    assert result["stage"] == 3 and result["accuracy"] > 0.7


@pytest.mark.whole
def test_resnet18_learns_cifar10_with_the_drop_in_optimizer(tmp_path):
    options = ["--stem", "imagenet", "--limit", "1000", "--epochs", "2", "--batch", "16", "--lr", "0.02"]
    assert run(tmp_path, "cifar_resnet", *options)["accuracy"] > 0.16  # by chance 0.10; one deviation is 0.01


@pytest.mark.whole
def test_a_student_learns_from_a_frozen_sharded_teacher(tmp_path):
    options = ["--teacher-steps", "60", "--student-steps", "60", "--pictures", "1000", "--seeds", "1", "--batch", "32"]
    result = run(tmp_path, "distill", *options)
    assert result["teacher"] > 0.8
    assert len(result["alone"]) == len(result["taught"]) == 1
    assert result["alone"][0] > 0.3 and result["taught"][0] > 0.3  # by chance 0.1


def test_flip_and_crop_moves_and_mirrors_and_invents_nothing():
    torch.manual_seed(0)
    picture = torch.arange(16.0).view(1, 1, 4, 4)
    for image in flip_and_crop(picture.expand(64, 1, 4, 4), margin=1):
        inside = image[0, 1:3, 1:3]  # never reached by the border
        straight = [picture[0, 0, r : r + 2, c : c + 2] for r in range(3) for c in range(3)]
        assert any(torch.equal(inside, each) or torch.equal(inside, each.flip(1)) for each in straight)
        assert set(image.flatten().tolist()) <= {*range(16), -1.0}
