"""Residual networks for small images such as CIFAR's. They can be passed as `model_creator`.

They differ from the networks for ImageNet in the first and last layers: the stem is one 3x3 convolution without
pooling, and the average pooling before the classifier is 4x4, for 32x32 images. Layers have the names that are common
in CIFAR implementations, such as `linear` and `shortcut`. Some keys of `state_dict` therefore differ from torchvision's
networks, which use `fc` and `downsample`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

NUM_CLASSES = 10
_STAGE_WIDTHS = (64, 128, 256, 512)
_STAGE_STRIDES = (1, 2, 2, 2)


class BasicBlock(nn.Module):
    """A residual block with two 3x3 convolutions.

    Args:
        in_planes: Number of input channels.
        planes: Number of inner channels. The number of output channels is `expansion` times as large.
        stride: Stride of the block.
    """

    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = _shortcut(in_planes, self.expansion * planes, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the activations of the block: the ReLU of the sum of its convolutions and its shortcut."""
        inner = functional.relu(self.bn1(self.conv1(images)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.shortcut(images))


class Bottleneck(nn.Module):
    """A residual block with a 3x3 convolution between two 1x1 ones. The last one quadruples the number of channels.

    Args:
        in_planes: Number of input channels.
        planes: Number of inner channels. The number of output channels is `expansion` times as large.
        stride: Stride of the block.
    """

    expansion = 4

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, self.expansion * planes, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(self.expansion * planes)
        self.shortcut = _shortcut(in_planes, self.expansion * planes, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the activations of the block: the ReLU of the sum of its convolutions and its shortcut."""
        inner = functional.relu(self.bn1(self.conv1(images)))
        inner = functional.relu(self.bn2(self.conv2(inner)))
        return functional.relu(self.bn3(self.conv3(inner)) + self.shortcut(images))


class ResNet(nn.Module):
    """Four stages of residual blocks over 32x32 images with three channels.

    >>> ResNet(BasicBlock, [1, 1, 1, 1])(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])

    Args:
        block: Class of the blocks.
        num_blocks: Number of blocks in each of the four stages.
        num_classes: Number of classes.

    Raises:
        ValueError: `num_blocks` does not have four numbers.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        num_blocks: Sequence[int],
        num_classes: int = NUM_CLASSES,
    ) -> None:
        super().__init__()
        if len(num_blocks) != len(_STAGE_WIDTHS):
            raise ValueError(f"`num_blocks={list(num_blocks)}`: need {len(_STAGE_WIDTHS)} numbers, one for each stage.")
        self.conv1 = nn.Conv2d(3, _STAGE_WIDTHS[0], kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(_STAGE_WIDTHS[0])
        stages = []
        in_planes = _STAGE_WIDTHS[0]
        for planes, stride, length in zip(_STAGE_WIDTHS, _STAGE_STRIDES, num_blocks, strict=True):
            stages.append(_stage(block, in_planes, planes, stride, length))
            in_planes = block.expansion * planes
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.linear = nn.Linear(in_planes, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one logit for each image and class."""
        features = functional.relu(self.bn1(self.conv1(images)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            features = stage(features)
        pooled = functional.avg_pool2d(features, kernel_size=4).flatten(start_dim=1)
        return self.linear(pooled)


def _shortcut(in_planes: int, out_planes: int, stride: int) -> nn.Sequential:
    """Return a layer that projects the input to the output's shape, or the identity if the shapes are equal."""
    if stride == 1 and in_planes == out_planes:
        return nn.Sequential()
    return nn.Sequential(
        nn.Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False),
        nn.BatchNorm2d(out_planes),
    )


def _stage(
    block: type[BasicBlock | Bottleneck], in_planes: int, planes: int, stride: int, length: int
) -> nn.Sequential:
    """Chain the blocks of one stage. The first block changes the resolution and the number of channels."""
    first = block(in_planes, planes, stride)
    rest = [block(block.expansion * planes, planes) for _ in range(length - 1)]
    return nn.Sequential(first, *rest)


def ResNet18(cfg: Any) -> ResNet:
    """Build the network with 18 layers. `cfg` is ignored and makes the function usable as `model_creator`."""
    return ResNet(BasicBlock, [2, 2, 2, 2])


def ResNet34(cfg: Any) -> ResNet:
    """Build the network with 34 layers. `cfg` is ignored and makes the function usable as `model_creator`."""
    return ResNet(BasicBlock, [3, 4, 6, 3])


def ResNet50(cfg: Any) -> ResNet:
    """Build the network with 50 layers. `cfg` is ignored and makes the function usable as `model_creator`."""
    return ResNet(Bottleneck, [3, 4, 6, 3])


def ResNet101(cfg: Any) -> ResNet:
    """Build the network with 101 layers. `cfg` is ignored and makes the function usable as `model_creator`."""
    return ResNet(Bottleneck, [3, 4, 23, 3])


def ResNet152(cfg: Any) -> ResNet:
    """Build the network with 152 layers. `cfg` is ignored and makes the function usable as `model_creator`."""
    return ResNet(Bottleneck, [3, 8, 36, 3])
