"""ResNet-50 (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1), for want of torchvision."""

from __future__ import annotations

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


class ResNet50(nn.Module):
    """161 parameters with 25,557,032 elements."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_normed(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
        inside = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(inside, width, stride if block == 0 else 1))
                inside = 4 * width
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))
