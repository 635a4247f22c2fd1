"""A small convolutional network on MNIST at stage 3: parameters, gradients and optimizer state cut over the ranks.

    python examples/mnist_cnn.py
    torchrun --nproc-per-node 2 examples/mnist_cnn.py

The model, the optimizer and the loop are stock PyTorch; the lines with `zeor.` are all that is new.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples.pictures import Pictures, accuracy
from examples.start import Place, parser


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--epochs", type=int, default=4)
    asked.add_argument("--batch", type=int, default=64, help="pictures per rank and step")
    asked.add_argument("--lr", type=float, default=2e-3)
    asked.add_argument("--stage", type=int, default=3)
    asked.add_argument("--limit", type=int, help="train and test on so many pictures only")
    options = asked.parse_args()
    place = Place(options.seed)

    train = Pictures("mnist", "train", place.device, options.limit)
    test = Pictures("mnist", "test", place.device, options.limit)
    model = network().to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    model, optimizer = zeor.shard(model, optimizer, stage=options.stage)
    loader = zeor.data.shard(train.loader(options.batch))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.epochs * len(loader))

    torch.manual_seed(options.seed + place.rank)  # dropout differs between ranks
    reached = 0.0
    for epoch in range(options.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        reached = accuracy(model, test, place)
        place.say(f"epoch {epoch + 1:2d}  loss {loss.item():.3f}  test accuracy {reached:.2%}  {place.seconds():.0f} s")
    place.end(options, example="mnist_cnn", accuracy=reached)


if __name__ == "__main__":
    main()
