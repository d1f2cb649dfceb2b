"""Finding the blocks of a model, and computing them twice."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from raysgd.torch.objects.models import blocks_of, checkpoint_activations, without_checkpointing


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = self.first(features)
        for block in self.blocks:
            features = block(features)
        return self.head(features)


def a_block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5))


def test_elements_of_lists_are_blocks_and_the_outermost_count() -> None:
    model = Stack(a_block(), nn.Linear(4, 4), nn.Tanh())
    assert blocks_of(model) == [model.blocks[0], model.blocks[1]]
    assert blocks_of(nn.Sequential(model, nn.ReLU())) == [model]
    assert blocks_of(nn.Linear(4, 4)) == []


def test_a_list_in_a_list_is_opened() -> None:
    inner = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    assert blocks_of(Stack(inner)) == list(inner)  # type: ignore[arg-type]


def test_small_blocks_can_be_left_out() -> None:
    model = Stack(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    assert blocks_of(model, min_parameters=17) == [model.blocks[0]]


def test_a_block_that_shares_parameters_with_others_is_no_unit() -> None:
    model = Stack(nn.Linear(4, 4), nn.Linear(4, 4))
    model.blocks[1].weight = model.first.weight
    assert blocks_of(model) == [model.blocks[0]]
    twice = nn.Linear(4, 4)
    assert blocks_of(Stack(twice, twice)) == []


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.linspace(-1, 1, 8).reshape(2, 4)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_recomputed_blocks_have_the_same_gradients_and_names_with_dropout_too() -> None:
    torch.manual_seed(0)
    model = Stack(a_block(), a_block())
    names, expected = list(model.state_dict()), gradients(model)
    assert checkpoint_activations(model) == 2
    assert list(model.state_dict()) == names
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(copy.deepcopy(model)), expected, rtol=0, atol=0)


def test_recomputed_blocks_really_are() -> None:
    calls = []

    class Counts(nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            return super().forward(features)

    model = Stack(Counts(4, 4))
    checkpoint_activations(model)
    gradients(model)
    assert calls == [True, True]
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert calls == [True, True, False]


def test_a_copy_of_a_recomputing_model_is_a_model_of_its_own() -> None:
    model = Stack(nn.Linear(4, 4))
    checkpoint_activations(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[0].weight.zero_()
    assert not torch.equal(model(torch.ones(1, 4)), other(torch.ones(1, 4)))


def test_blocks_can_be_put_back() -> None:
    model = Stack(a_block())
    checkpoint_activations(model)
    assert without_checkpointing(model) is model
    assert not any("forward" in vars(part) for part in model.modules())


def test_batch_norms_are_left_alone_and_a_switch_without_effect_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with caplog.at_level(logging.WARNING):
        assert checkpoint_activations(model) == 0
    assert "`Sequential` in `Stack` is free of batch norm" in caplog.text
