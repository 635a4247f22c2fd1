"""ResNet-18 in one page, with the ImageNet stem of its paper or the 3x3 stem that suits pictures of 32x32."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = convolution(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet18(nn.Module):
    """11.2M parameters. stem "imagenet": 7x7 convolution and pooling, 32x32 -> 8x8; stem "3x3": nothing is lost."""

    def __init__(self, stem: str = "3x3", classes: int = 10):
        super().__init__()
        if stem == "imagenet":
            first = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        else:
            first = [convolution(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()]
        self.stem = nn.Sequential(*first)
        blocks = []
        for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
            blocks += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Block):
                nn.init.zeros_(module.bn2.weight)  # every block begins as its shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))
