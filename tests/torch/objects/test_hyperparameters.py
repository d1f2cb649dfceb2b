"""The hyperparameters of optimizers across configs."""

from __future__ import annotations

import pytest
import torch

from raysgd.torch.objects import hyperparameters


def test_a_schedule_in_closed_form_goes_on_from_the_new_learning_rate() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    before = hyperparameters.read([optimizer])
    for group in optimizer.param_groups:
        group.update(lr=0.05, initial_lr=0.1)  # of a state that was loaded, half-way
    hyperparameters.apply(before, [optimizer], [scheduler])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
    assert (scheduler.base_lrs, scheduler.get_last_lr()) == ([2.0], pytest.approx([1.0]))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)  # 2 / (1 + 1)


def test_what_has_no_groups_of_parameters_is_left_alone() -> None:
    own = object()
    assert hyperparameters.read([own]) == [[]]
    hyperparameters.apply([[]], [own], [own])
