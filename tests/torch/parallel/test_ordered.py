"""Gradients of logical shards, kept by themselves and added in their order."""

from __future__ import annotations

import pytest
import torch

from raysgd.torch.parallel.ordered import OrderedSync
from raysgd.trainer.worker.step_loop import StepRules


def parameters_with(*gradients: torch.Tensor | None) -> list[torch.Tensor]:
    parameters = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros(2, 3))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def with_shards(number: int) -> OrderedSync:
    sync = OrderedSync()
    sync.begin_leg([], may_run_backward=False, rules=StepRules(num_shards=number))
    return sync


def test_the_sum_is_that_of_the_shards_in_their_order() -> None:
    gradients = [torch.randn(2, 3) * 10.0**power for power in (0, 6, -3, 2)]
    shards = with_shards(4)
    parameters = parameters_with(None)
    for index, gradient in enumerate(gradients):
        shards.begin_shard(index == 0, seed=index)
        parameters[0].grad = gradient
        shards.keep(parameters)
    shards.add_up(parameters)
    expected = ((gradients[0] + gradients[1]) + gradients[2]) + gradients[3]
    assert parameters[0].grad is not None
    assert torch.equal(parameters[0].grad, expected)


def test_a_parameter_without_a_gradient_in_all_shards_has_none() -> None:
    shards = with_shards(2)
    for index in range(2):
        shards.begin_shard(index == 0, seed=index)
        parameters = parameters_with(torch.ones(2, 3), None, torch.ones(2, 3) if index else None)
        shards.keep(parameters)
    shards.add_up(parameters)
    assert parameters[1].grad is None
    assert [float(each.grad.sum()) for each in (parameters[0], parameters[2]) if each.grad is not None] == [12.0, 6.0]


def test_complex_parameters_are_refused() -> None:
    shards = with_shards(2)
    with pytest.raises(ValueError, match=r"does not work with complex parameters: .*`torch\.view_as_real`"):
        shards.keep([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
