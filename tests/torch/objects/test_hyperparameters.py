"""The hyperparameters of optimizers across configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from raysgd.torch.objects import hyperparameters

Make = Callable[[torch.optim.Optimizer], Any]


class Halved(lr_scheduler.LRScheduler):
    def get_lr(self) -> list[Any]:
        return [rate * 0.5**self.last_epoch for rate in self.base_lrs]


def halve(step: int) -> float:
    return 0.5**step


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)


FOLLOWING: dict[str, Make] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, halve),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 1 / step),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9, power=2.0),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, optimizer.param_groups[0]["lr"], total_steps=9, cycle_momentum=False
    ),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [warm_up(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)], [3]
    ),
    "sequence in a chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.SequentialLR(optimizer, [warm_up(optimizer), lr_scheduler.LambdaLR(optimizer, halve)], [3]),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


def made(make: Make, rate: float) -> tuple[torch.optim.Optimizer, Any]:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=rate)
    return optimizer, make(optimizer)


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("name", FOLLOWING)
class TestANewRateMultipliesTheSchedule:
    def check(self, optimizer: Any, scheduler: Any, name: str, num_steps: int) -> None:
        reference, whole = made(FOLLOWING[name], 0.2)
        for step in range(8):
            if step >= num_steps:
                assert rate_of(optimizer) == pytest.approx(rate_of(reference), rel=1e-9), f"after {step} steps"
                assert scheduler.get_last_lr() == pytest.approx([rate_of(optimizer)])
                optimizer.step()
                scheduler.step()
            reference.step()
            whole.step()

    def test_where_the_config_changes(self, name: str, num_steps: int) -> None:
        optimizer, scheduler = made(FOLLOWING[name], 0.1)
        chosen = hyperparameters.read([optimizer])
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step()
        hyperparameters.apply(hyperparameters.follow(chosen, 0.2, 0.1), [optimizer], [scheduler])
        self.check(optimizer, scheduler, name, num_steps)

    def test_where_the_state_of_another_rate_was_loaded(self, name: str, num_steps: int) -> None:
        source, of_source = made(FOLLOWING[name], 0.1)
        for _ in range(num_steps):
            source.step()
            of_source.step()
        optimizer, scheduler = made(FOLLOWING[name], 0.2)
        chosen = hyperparameters.read([optimizer])
        optimizer.load_state_dict(source.state_dict())
        scheduler.load_state_dict(of_source.state_dict())
        hyperparameters.apply(chosen, [optimizer], [scheduler])
        self.check(optimizer, scheduler, name, num_steps)


def test_cuts_of_a_plateau_stay() -> None:
    optimizer, scheduler = made(lambda each: lr_scheduler.ReduceLROnPlateau(each, factor=0.5, patience=0), 0.1)
    hyperparameters.note_first_rates([scheduler])
    chosen = hyperparameters.read([optimizer])
    for loss in (1.0, 2.0, 2.0):
        scheduler.step(loss)
    assert rate_of(optimizer) == pytest.approx(0.025)
    hyperparameters.apply(hyperparameters.follow(chosen, 0.4, 0.1), [optimizer], [scheduler])
    assert rate_of(optimizer) == pytest.approx(0.1)
    assert scheduler.get_last_lr() == pytest.approx([0.1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.4), r"`CyclicLR` .* \(`max_lrs`\)"),
        (lambda optimizer: SWALR(optimizer, 0.05), "`SWALR` may have rates of its own that do not follow"),
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4, eta_min=0.01), r"\(`eta_min`\).*a `LambdaLR`"),
        (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=0.01), r"\(`min_lrs`\)"),
        (Halved, "`Halved` .*override `config_changed"),
        (
            lambda optimizer: lr_scheduler.SequentialLR(optimizer, [warm_up(optimizer), Halved(optimizer)], [3]),
            "`Halved`",
        ),
    ],
)
def test_schedulers_with_rates_of_their_own_are_refused(make: Make, message: str) -> None:
    optimizer, scheduler = made(make, 0.1)
    hyperparameters.note_first_rates([scheduler])
    chosen = hyperparameters.read([optimizer])
    with pytest.raises(ValueError, match=message):
        hyperparameters.apply(hyperparameters.follow(chosen, 0.2, 0.1), [optimizer], [scheduler])
    assert hyperparameters.read([optimizer]) == chosen
    hyperparameters.apply(chosen, [optimizer], [scheduler])


def test_a_scheduler_of_another_optimizer_may_have_rates_of_its_own() -> None:
    optimizer, scheduler = made(FOLLOWING["step"], 0.1)
    other, cyclic = made(lambda each: lr_scheduler.CyclicLR(each, 0.3, 0.4), 0.3)
    new = hyperparameters.follow(hyperparameters.read([optimizer, other]), 0.2, 0.1)
    hyperparameters.apply(new, [optimizer, other], [scheduler, cyclic])
    assert (rate_of(optimizer), rate_of(other), scheduler.base_lrs, cyclic.base_lrs) == (0.2, 0.3, [0.2], [0.3])


def test_a_scheduler_that_is_not_registered_is_refused() -> None:
    optimizer, _ = made(FOLLOWING["lambda"], 0.1)
    with pytest.raises(ValueError, match=r"not registered.*`register\(schedulers=\.\.\.\)`"):
        hyperparameters.apply(hyperparameters.follow(hyperparameters.read([optimizer]), 0.2, 0.1), [optimizer], [])


def test_a_schedule_that_began_at_zero_is_refused() -> None:
    optimizer, scheduler = made(FOLLOWING["cosine"], 0.0)
    with pytest.raises(
        ValueError,
        match=r"`lr=0\.2`: the initial learning rate of the schedule is 0\.0, so the position .* is not known",
    ):
        hyperparameters.apply(
            hyperparameters.follow(hyperparameters.read([optimizer]), 0.2, 0.0), [optimizer], [scheduler]
        )


def test_a_momentum_that_a_schedule_moves_stays() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    chosen = hyperparameters.read([optimizer])
    optimizer.step()
    scheduler.step()
    before = hyperparameters.read([optimizer])
    hyperparameters.apply(chosen, [optimizer], [scheduler])
    assert hyperparameters.read([optimizer]) == before


def test_what_has_no_groups_of_parameters_is_left_alone() -> None:
    own = object()
    assert hyperparameters.read([own]) == [[]]
    hyperparameters.note_first_rates([own])
    hyperparameters.apply([[]], [own], [own])
