"""The hyperparameters of optimizers across configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raysgd.torch.objects import hyperparameters


def make(lr: float, momentum: float = 0.9, gamma: float | None = 0.5) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma) if gamma is not None else None
    return optimizer, scheduler


def train(optimizer: Any, scheduler: Any, num_steps: int = 2) -> None:
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def moved(gamma: float | None, lr: float = 1.0) -> tuple[Any, Any]:
    """An optimizer for another config that loaded the state of one that had trained for two epochs."""
    trained, trained_scheduler = make(0.1, gamma=gamma)
    train(trained, trained_scheduler)
    optimizer, scheduler = make(lr, 0.5, gamma=gamma)
    before = hyperparameters.read([optimizer])
    optimizer.load_state_dict(trained.state_dict())
    if scheduler is not None:
        scheduler.load_state_dict(trained_scheduler.state_dict())
    hyperparameters.apply(before, [optimizer], [scheduler] if scheduler is not None else [])
    return optimizer, scheduler


def test_numbers_are_those_of_the_new_config_and_momenta_those_of_the_state() -> None:
    optimizer, _ = moved(gamma=None)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (1.0, 0.5)
    [state] = optimizer.state.values()
    assert torch.equal(state["momentum_buffer"], torch.full((2,), 1.9))


def test_a_schedule_goes_on_at_its_place_from_the_new_learning_rate() -> None:
    optimizer, scheduler = moved(gamma=0.5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0 * 0.5**2)
    assert scheduler.get_last_lr() == pytest.approx([0.25])
    train(optimizer, scheduler, 1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.125)
    assert scheduler.base_lrs == [1.0]


def test_a_schedule_in_closed_form_goes_on_from_the_new_learning_rate() -> None:
    optimizer, _ = make(2.0, gamma=None)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    before = hyperparameters.read([optimizer])
    for group in optimizer.param_groups:
        group.update(lr=0.05, initial_lr=0.1)  # of a state that was loaded, half-way
    hyperparameters.apply(before, [optimizer], [scheduler])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
    train(optimizer, scheduler, 1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)  # 2 / (1 + 1)


def test_what_has_no_groups_of_parameters_is_left_alone() -> None:
    own = object()
    assert hyperparameters.read([own]) == [[]]
    hyperparameters.apply([[]], [own], [own])
