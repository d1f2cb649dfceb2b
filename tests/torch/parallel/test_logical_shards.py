"""Gradients of logical shards, kept by themselves and added in their order."""

from __future__ import annotations

import pytest
import torch

from raysgd.torch.parallel.logical_shards import LogicalShards


def parameters_with(*gradients: torch.Tensor | None) -> list[torch.Tensor]:
    parameters = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros(2, 3))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def test_the_sum_is_that_of_the_shards_in_their_order() -> None:
    gradients = [torch.randn(2, 3) * 10.0**power for power in (0, 6, -3, 2)]
    shards = LogicalShards(4, rank=0, world_size=1)
    parameters = parameters_with(None)
    for index, gradient in enumerate(gradients):
        shards.begin_batch(index == 0, seed=index)
        parameters[0].grad = gradient
        shards.keep(parameters)
    shards.add_up(parameters, seed=0)
    expected = ((gradients[0] + gradients[1]) + gradients[2]) + gradients[3]
    assert parameters[0].grad is not None
    assert torch.equal(parameters[0].grad, expected)


def test_a_parameter_without_a_gradient_in_all_shards_has_none() -> None:
    shards = LogicalShards(2, rank=0, world_size=1)
    for index in range(2):
        shards.begin_batch(index == 0, seed=index)
        parameters = parameters_with(torch.ones(2, 3), None, torch.ones(2, 3) if index else None)
        shards.keep(parameters)
    shards.add_up(parameters, seed=0)
    assert parameters[1].grad is None
    assert [float(each.grad.sum()) for each in (parameters[0], parameters[2]) if each.grad is not None] == [12.0, 6.0]


def test_complex_parameters_are_refused() -> None:
    shards = LogicalShards(2, rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"does not work with complex parameters: .*`torch\.view_as_real`"):
        shards.keep([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


def test_shards_of_a_short_global_batch_count_as_nothing() -> None:
    shards = LogicalShards(3, rank=0, world_size=1)
    parameters = parameters_with(torch.ones(2, 3))
    for _ in range(3):
        shards.begin_batch(_ == 0, seed=1)
        shards.keep(parameters)
    shards.add_up(parameters, seed=0)
    parameters = parameters_with(torch.ones(2, 3))
    shards.begin_batch(True, seed=1)
    shards.keep(parameters)
    shards.add_up(parameters, seed=0)
    assert parameters[0].grad is not None
    assert float(parameters[0].grad.sum()) == 6.0


def test_random_numbers_belong_to_the_shard() -> None:
    shards = LogicalShards(2, rank=0, world_size=1)
    shards.begin_batch(True, seed=5)
    first = torch.rand(3)
    torch.rand(10)
    shards.begin_batch(False, seed=6)
    second = torch.rand(3)
    shards.begin_batch(True, seed=5)
    assert torch.equal(torch.rand(3), first)
    assert not torch.equal(first, second)


def test_a_step_whose_gradients_came_from_elsewhere_is_refused() -> None:
    shards = LogicalShards(1, rank=0, world_size=1)
    shards.begin_batch(True, seed=1)
    with pytest.raises(ValueError, match=r"computed its gradients without the library.*self.backward\(loss\)"):
        shards.check()
