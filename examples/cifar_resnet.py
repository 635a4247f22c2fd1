"""ResNet-18 from scratch on CIFAR-10 for ten epochs: `zeor.optim.SGD` and a plain loop.

    torchrun --nproc-per-node 2 examples/cifar_resnet.py                    # 3x3 stem: a GPU's work
    torchrun --nproc-per-node 2 examples/cifar_resnet.py --stem imagenet    # a few minutes an epoch on a CPU

The drop-in optimizer keeps half of its momentum on each of two ranks; the model stays a plain module. BatchNorm
normalises by each rank's own batch; its running statistics are averaged over ranks before they are used.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples.pictures import Pictures, accuracy, flip_and_crop
from examples.resnet import ResNet18
from examples.start import Place, parser


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--stem", choices=("3x3", "imagenet"), default="3x3")
    asked.add_argument("--epochs", type=int, default=10)
    asked.add_argument("--batch", type=int, default=128, help="pictures per rank and step")
    asked.add_argument("--lr", type=float, help="the largest of the one-cycle schedule: 0.4, or 0.1 (imagenet stem)")
    asked.add_argument("--weight-decay", type=float, default=5e-4)
    asked.add_argument("--stage", type=int, default=1, choices=(1, 2))
    asked.add_argument("--limit", type=int, help="train and test on so many pictures only")
    options = asked.parse_args()
    options.lr = options.lr or (0.4 if options.stem == "3x3" else 0.1)
    place = Place(options.seed)

    train = Pictures("cifar10", "train", place.device, options.limit)
    test = Pictures("cifar10", "test", place.device, options.limit)
    model = ResNet18(options.stem).to(place.device)
    optimizer = zeor.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=options.weight_decay,
        stage=options.stage,
    )  # fmt: skip
    loader = zeor.data.shard(train.loader(options.batch))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.epochs * len(loader), pct_start=0.2, cycle_momentum=False
    )
    on_gpu = place.device.type == "cuda"

    torch.manual_seed(options.seed + place.rank)  # augmentation differs between ranks
    reached = 0.0
    for epoch in range(options.epochs):
        for images, labels in loader:
            with torch.autocast(place.device.type, torch.bfloat16, enabled=on_gpu):
                loss = nn.functional.cross_entropy(model(flip_and_crop(images)), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        zeor.sync_buffers(model)
        reached = accuracy(model, test, place)
        place.say(f"epoch {epoch + 1:2d}  loss {loss.item():.3f}  test accuracy {reached:.2%}  {place.seconds():.0f} s")
    place.end(options, example="cifar_resnet", accuracy=reached)


if __name__ == "__main__":
    main()
