"""The smallest change to a script: `zeor.optim.SGD` in place of `torch.optim.SGD`.

    python examples/drop_in.py                                   # one process
    torchrun --nproc-per-node 2 examples/drop_in.py              # two ranks: half of the optimizer's state on each

A small convolutional network learns to tell eight kinds of striped pictures apart (made here: nothing to download).
The loop is stock PyTorch; the data is cut so that each rank sees its own part.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeor


def stripes(count: int, seed: int) -> TensorDataset:
    """Pictures of noisy stripes; the class is their direction."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 8, (count,), generator=generator)
    angle = labels.float()[:, None, None] * (torch.pi / 8)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    phase = torch.rand(count, 1, 1, generator=generator) * 6.28
    pictures = torch.sin((x * torch.cos(angle) + y * torch.sin(angle)) * 1.2 + phase)
    pictures += 0.7 * torch.randn(count, 16, 16, generator=generator)
    return TensorDataset(pictures.unsqueeze(1), labels)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 128), nn.ReLU(), nn.Linear(128, 8),
    )  # fmt: skip


def main(epochs: int = 5, count: int = 2048) -> float:
    torch.manual_seed(0)
    model = network()
    optimizer = zeor.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = zeor.data.shard(DataLoader(stripes(count, seed=1), batch_size=64, shuffle=True))
    for _ in range(epochs):
        for pictures, labels in loader:
            loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    pictures, labels = stripes(1024, seed=2).tensors
    with torch.no_grad():
        accuracy = (model(pictures).argmax(1) == labels).float().mean().item()
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    accuracy = main(parser.parse_args().epochs)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"accuracy on unseen pictures: {accuracy:.1%}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
