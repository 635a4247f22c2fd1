"""Knowledge distillation: a frozen, sharded teacher and a sharded student in one loss.

    torchrun --nproc-per-node 2 examples/distill.py                     # MNIST; also fine on a CPU
    torchrun --nproc-per-node 2 examples/distill.py --data cifar10      # a ResNet-18 teaches; a GPU's work

The teacher learns from all pictures, is frozen and sharded again (it then has neither gradients nor optimizer state).
Students of a few thousand parameters see a part of the pictures only, once with labels alone and once with the
teacher's opinion beside them: the same first values, batches and number of steps. Prints both accuracies.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples import mnist_cnn
from examples.pictures import Pictures, accuracy, flip_and_crop
from examples.resnet import ResNet18
from examples.start import Place, parser
from examples.texts import endless


def small_network(channels: int) -> nn.Module:
    width = 16 if channels == 1 else 32
    return nn.Sequential(
        nn.Conv2d(channels, width // 2, 3, 2, 1), nn.ReLU(), nn.Conv2d(width // 2, width, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 16, 10),
    )  # fmt: skip


def distilled(student: Tensor, teacher: Tensor, labels: Tensor, temperature: float = 4.0) -> Tensor:
    """Mostly the teacher's softened opinion, a little the labels (Hinton, Vinyals, Dean 2015)."""
    soft = nn.functional.kl_div(
        torch.log_softmax(student / temperature, 1), torch.softmax(teacher / temperature, 1), reduction="batchmean"
    )
    return 0.9 * temperature**2 * soft + 0.1 * nn.functional.cross_entropy(student, labels)


def learn(model: nn.Module, data: Pictures, steps: int, options, teacher: nn.Module | None = None) -> nn.Module:
    """Shard a model at stage 3 and train it, with a teacher or without."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    model, optimizer = zeor.shard(model, optimizer, stage=3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps)
    batches = endless(zeor.data.shard(data.loader(options.batch), seed=options.seed))
    for _ in range(steps):
        images, labels = next(batches)
        images = flip_and_crop(images) if options.data == "cifar10" else images
        if teacher is None:
            loss = nn.functional.cross_entropy(model(images), labels)
        else:
            with torch.no_grad():
                opinion = teacher(images)
            loss = distilled(model(images), opinion, labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model, _ = zeor.unshard(model, optimizer)
    return model


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--data", choices=("mnist", "cifar10"), default="mnist")
    asked.add_argument("--teacher-steps", type=int, default=1000)
    asked.add_argument("--student-steps", type=int, default=1000)
    asked.add_argument("--pictures", type=int, default=1000, help="how many of them the students see")
    asked.add_argument("--batch", type=int, default=64, help="pictures per rank and step")
    asked.add_argument("--lr", type=float, default=5e-3)
    asked.add_argument("--seeds", type=int, default=3, help="students of each kind")
    options = asked.parse_args()
    place = Place(options.seed)

    everything = Pictures(options.data, "train", place.device)
    part = Pictures(options.data, "train", place.device, options.pictures)
    test = Pictures(options.data, "test", place.device)
    teacher = (mnist_cnn.network() if options.data == "mnist" else ResNet18()).to(place.device)
    teacher = learn(teacher, everything, options.teacher_steps, options)
    teacher.requires_grad_(False).eval()
    teacher = zeor.shard(teacher, stage=3)
    teachers = accuracy(teacher, test, place)
    place.say(f"teacher {teachers:.2%} after {options.teacher_steps} steps, {place.seconds():.0f} s")

    reached: dict[str, list[float]] = {"alone": [], "taught": []}
    for seed in range(options.seed, options.seed + options.seeds):
        options.seed = seed
        for kind in reached:
            torch.manual_seed(seed)
            student = small_network(1 if options.data == "mnist" else 3).to(place.device)
            torch.manual_seed(1000 * seed + place.rank)  # augmentation differs between ranks, not between kinds
            student = learn(student, part, options.student_steps, options, teacher if kind == "taught" else None)
            reached[kind].append(accuracy(zeor.shard(student), test, place))
        place.say(f"seed {seed}: alone {reached['alone'][-1]:.2%}, taught {reached['taught'][-1]:.2%}")
    alone, taught = (statistics.fmean(values) for values in reached.values())
    size = sum(param.numel() for param in student.parameters())
    place.say(f"students of {size:,} parameters: alone {alone:.2%}, taught {taught:.2%}; {place.seconds():.0f} s")
    place.end(options, example="distill", teacher=teachers, alone=reached["alone"], taught=reached["taught"])


if __name__ == "__main__":
    main()
