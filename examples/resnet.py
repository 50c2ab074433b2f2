"""ResNets of bottlenecks (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016), for want of torchvision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def _normed(inside: int, outside: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, size, stride, size // 2, bias=False), nn.BatchNorm2d(outside))


class Bottleneck(nn.Module):
    """Three convolutions around which the input goes unchanged, or through a projection."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_normed(inside, width, 1), nn.ReLU(True), _normed(width, width, 3, stride), nn.ReLU(True),
                                  _normed(width, 4 * width, 1))
        straight = inside == 4 * width and stride == 1
        self.way_around = nn.Identity() if straight else _normed(inside, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.way_around(x))


class ResNet(nn.Module):
    """Images of shape (n, 3, height, width) to logits (n, classes).

    Args:
        blocks: the number of bottlenecks of each of the four stages (table 1 of the paper).
    """

    def __init__(self, blocks: Sequence[int], classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_normed(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
        inside = 64
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(Bottleneck(inside, 64 << stage, 2 if stage > 0 and block == 0 else 1))
                inside = 256 << stage
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def resnet50() -> ResNet:
    """Return a ResNet-50: 161 parameters with 25,557,032 elements."""
    return ResNet((3, 4, 6, 3))


def resnet14() -> ResNet:
    """Return the same with one bottleneck a stage, for trying things out; 10.1 million elements."""
    return ResNet((1, 1, 1, 1))
