"""MNIST and CIFAR-10 as tensors that are handed out in whole batches, and an evaluation over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import zeor
from examples.fetch import fetch
from examples.start import Place, turns


class Pictures(Dataset):
    """Normalised pictures and labels on a device. __getitems__ takes a whole batch at once, as DataLoader offers."""

    def __init__(self, name: str, split: str, device: torch.device, limit: int | None = None):
        folder = fetch(name)
        images = torch.from_numpy(np.load(folder / f"{split}_images.npy", mmap_mode="r")[:limit].copy())
        images = images.unsqueeze(-1) if images.dim() == 3 else images
        self.images = images.to(device).permute(0, 3, 1, 2).contiguous()
        self.labels = torch.from_numpy(np.load(folder / f"{split}_labels.npy")[:limit]).to(device).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index].float() / 127.5 - 1, self.labels[index]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, device=self.labels.device)
        return self.images[chosen].float() / 127.5 - 1, self.labels[chosen]

    def loader(self, batch_size: int) -> DataLoader:
        """Shuffled batches of full size. zeor.data.shard gives each rank its part of them."""
        return DataLoader(self, batch_size, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)


def flip_and_crop(images: Tensor, margin: int = 4) -> Tensor:
    """Each picture mirrored or not, then moved by up to `margin` pixels; what comes in from outside is black."""
    count, _, height, width = images.shape
    mirrored = torch.rand(count, 1, 1, 1, device=images.device) < 0.5
    images = torch.where(mirrored, images.flip(3), images)
    images = nn.functional.pad(images, (margin,) * 4, value=-1.0)
    down, right = torch.randint(0, 2 * margin + 1, (2, count, 1, 1), device=images.device)
    rows = down + torch.arange(height, device=images.device)[:, None]
    columns = right + torch.arange(width, device=images.device)
    which = torch.arange(count, device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[which, rows, columns].permute(0, 3, 1, 2)


@torch.no_grad()
def accuracy(model: nn.Module, data: Pictures, place: Place, batch: int = 500) -> float:
    """The exact share of right answers: every picture is seen by one rank, and the counts are added.

    All ranks take equally many turns, since a sharded model is gathered by all of them together.
    """
    was_training = model.training
    model.eval()
    correct = 0
    indices = torch.arange(len(data)).tensor_split(turns(len(data), place.world, batch) * place.world)
    for mine in indices[place.rank :: place.world]:
        images, labels = data.__getitems__(mine)
        correct += int((model(images).argmax(1) == labels).sum())
    model.train(was_training)
    return zeor.total(correct) / len(data)
