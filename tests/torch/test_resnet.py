from __future__ import annotations

from typing import Any

import pytest
import torch

from raysgd.torch import resnet

# Numbers of parameters, which follow from the widths, strides and block counts.
NUM_PARAMETERS = {
    "ResNet18": 11_173_962,
    "ResNet34": 21_282_122,
    "ResNet50": 23_520_842,
    "ResNet101": 42_512_970,
    "ResNet152": 58_156_618,
}


@pytest.mark.parametrize(("name", "num_parameters"), NUM_PARAMETERS.items())
def test_each_network_has_the_parameters_of_its_depth(name: str, num_parameters: int) -> None:
    with torch.device("meta"):
        model = getattr(resnet, name)({"ignored": True})
    assert isinstance(model, resnet.ResNet)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


@pytest.mark.parametrize("block", [resnet.BasicBlock, resnet.Bottleneck])
def test_images_become_ten_logits(block: Any) -> None:
    model = resnet.ResNet(block, [1, 1, 1, 1])
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_the_number_of_classes_can_be_chosen() -> None:
    model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=7)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)


def test_saved_states_use_the_customary_names() -> None:
    with torch.device("meta"):
        names = set(resnet.ResNet50(None).state_dict())
    assert {
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.conv3.weight",
        "layer1.0.shortcut.0.weight",
        "layer1.0.shortcut.1.bias",
        "layer4.2.bn3.weight",
        "linear.bias",
    } <= names


@pytest.mark.parametrize("num_blocks", [[1, 1, 1], [1, 1, 1, 1, 1]])
def test_another_number_of_stages_is_refused(num_blocks: list[int]) -> None:
    with pytest.raises(ValueError, match=r"`num_blocks=.*need 4 numbers, one for each stage"):
        resnet.ResNet(resnet.BasicBlock, num_blocks)
