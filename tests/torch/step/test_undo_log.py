"""The undo log: what a batch changed is put back, or it is known that it cannot be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raysgd.callbacks.averages import EMAInWorker
from raysgd.engine.shared.time_spent import START_UP, UNDO
from raysgd.messages.recovery import Undo
from raysgd.torch.step.undo_log import UndoLog
from raysgd.worker.ledger import Ledger


class Program:
    """A model, its optimizer and what goes with them, as a batch of user code sees them.

    Args:
        make_optimizer: Makes the optimizer for the parameters.
        undo: See `Recovery`.
        may_tear: Whether a batch may be torn.
    """

    def __init__(
        self, make_optimizer: Callable[[Any], Any] | None = None, undo: Undo = True, may_tear: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        self.model.register_buffer("mask", torch.ones(1))
        make = make_optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=0.1))
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.followers: list[Any] = []
        self.ledger = Ledger()
        self.log = UndoLog(
            [self.model],
            [self.optimizer],
            [self.scheduler],
            lambda: self.followers,
            undo,
            may_tear,
            lambda: self.versions() != self.at_boundary,
            self.ledger,
        )
        self.optimizer.register_step_pre_hook(lambda optimizer, *_: self.log.before_step(optimizer))
        self.at_boundary = self.versions()
        self.log.open_call(is_of_use=True)

    def versions(self) -> int:
        return sum(each._version for each in self.model.parameters())

    def begin(self) -> None:
        self.at_boundary = self.versions()
        self.log.begin([])

    def step(self) -> None:
        """As much of a batch as ends with the step of an optimizer."""
        random.random()
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 2)).square().mean().backward()
        self.log.note_exchange()
        self.optimizer.step()

    def state(self) -> Any:
        """All that is to be as before, in numbers."""
        parts = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        averages = [each.state_dict() for each in self.followers]
        return _plain([*parts, *averages, torch.get_rng_state(), random.getstate()])


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


class Nested(torch.optim.SGD):
    """Steps another optimizer, of which nobody else knows."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.Adam(parameters)

    def second_step(self) -> None:
        self.base.step()


@pytest.mark.parametrize(
    "make_optimizer",
    [
        None,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True, foreach=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    ],
    ids=["adam", "sgd", "amsgrad", "adagrad"],
)
@pytest.mark.parametrize("num_batches", [0, 2])
def test_a_batch_with_two_steps_leaves_nothing(make_optimizer: Any, num_batches: int) -> None:
    program = Program(make_optimizer)
    for _ in range(num_batches):
        program.begin()
        program.step()
        program.log.end()
    before = program.state()
    program.begin()
    program.step()
    program.scheduler.step()
    program.step()
    assert program.state() != before
    assert program.log.can_undo
    assert program.log.undo()
    assert program.state() == before


def test_closures_that_step_many_times_leave_nothing() -> None:
    program = Program(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4))
    features = torch.randn(8, 2)

    def closure() -> torch.Tensor:
        program.optimizer.zero_grad()
        loss = program.model(features).square().mean()
        loss.backward()
        program.log.note_exchange()
        return loss

    program.begin()
    program.optimizer.step(closure)
    program.log.end()
    before = program.state()
    program.begin()
    program.optimizer.step(closure)
    assert program.log.undo()
    assert program.state() == before


def test_steps_of_an_optimizer_inside_another_one_leave_nothing() -> None:
    program = Program(Nested)
    program.begin()
    program.model(torch.randn(4, 2)).mean().backward()
    program.optimizer.second_step()
    program.log.end()
    before = _plain(program.optimizer.base.state_dict())
    program.begin()
    program.optimizer.second_step()
    assert program.log.undo()
    assert _plain(program.optimizer.base.state_dict()) == before


def test_averages_that_follow_the_steps_leave_nothing() -> None:
    program = Program()
    average = EMAInWorker(0.9, warmup=True)
    average.weights = [{name: each.detach().clone() for name, each in program.model.named_parameters()}]
    average._num_updates = [3]
    program.followers = [average]
    program.begin()
    before = program.state()
    program.step()
    average.weights[0]["0.weight"].lerp_(program.model[0].weight.detach(), 0.5)
    average._num_updates[0] += 1
    assert program.state() != before
    program.log.undo()
    assert program.state() == before


def test_what_is_frozen_in_a_batch_is_trained_again() -> None:
    program = Program()
    program.begin()
    program.model[0].requires_grad_(False)
    program.log.undo()
    assert all(parameter.requires_grad for parameter in program.model.parameters())


def test_gradients_that_wait_for_more_batches_are_put_back() -> None:
    program = Program()
    program.model(torch.randn(4, 2)).mean().backward()
    gradients = [parameter.grad for parameter in program.model.parameters()]
    before = _plain(gradients)
    program.log.begin([program.optimizer])
    program.model(torch.randn(4, 2)).mean().backward()
    assert _plain(gradients) != before
    program.optimizer.zero_grad()
    program.log.undo()
    assert all(parameter.grad is each for parameter, each in zip(program.model.parameters(), gradients, strict=True))
    assert _plain(gradients) == before


def test_without_a_second_exchange_only_statistics_are_copied() -> None:
    program = Program(undo="auto")
    program.log._budget.has_some = lambda: True  # type: ignore[method-assign]
    for _ in range(2):
        program.begin()
        program.step()
        program.log.end()
    program.begin()
    before = program.state()
    program.step()
    after = program.state()
    assert not program.log.can_undo, "nothing of the kind was seen"
    assert not program.log.undo()
    now = program.state()
    norm = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert {name: now[0][name] for name in norm} == {name: before[0][name] for name in norm}
    assert {name: now[0][name] for name in norm} != {name: after[0][name] for name in norm}
    assert now[1] == after[1]


def test_that_a_batch_may_be_torn_is_learned_and_the_last_step_costs_nothing() -> None:
    program = Program(undo="auto")
    program.log._budget.has_some = lambda: True  # type: ignore[method-assign]
    for _ in range(2):
        program.begin()
        program.step()
        program.step()
        program.log.end()
    program.begin()
    program.step()
    assert program.log.can_undo
    program.log.note_exchange()
    program.optimizer.step()
    assert not program.log.can_undo, "no exchange follows that could fail"
    program.log.end()
    program.begin()
    before = program.state()
    program.step()
    assert program.log.undo()
    assert program.state() == before


def test_a_change_that_was_not_copied_is_noticed() -> None:
    program = Program()
    program.begin()
    program.model.mask.add_(1)
    assert not program.log.can_undo
    program.log.end()
    program.begin()
    program.model.mask.add_(1)
    assert program.log.can_undo


@pytest.mark.parametrize("undo", [False, "auto"])
def test_nothing_is_copied_where_no_batch_would_be_repeated(undo: Undo) -> None:
    program = Program(undo=undo)
    program.log.open_call(is_of_use=undo is False)
    program.begin()
    program.step()
    assert not program.log.can_undo
    assert not program.log.undo()
    assert not program.ledger.reading().seconds[UNDO]


def test_the_time_of_copies_is_booked() -> None:
    program = Program()
    program.begin()
    assert program.ledger.reading().seconds[UNDO] > 0


def test_where_there_is_no_memory_for_a_copy_no_more_time_is_booked_and_nothing_counts_as_copied() -> None:
    program, small = Program(), torch.zeros(1)
    program.model.mask = small.expand(2**60)
    program.log.open_call(is_of_use=True)
    program.begin()
    program.log.end()
    small.add_(1)
    with pytest.raises(RuntimeError, match="memory"):
        program.begin()
    assert program.ledger.enter(START_UP) == START_UP
    assert not program.log.can_undo

    program.model.mask = torch.ones(1)
    program.log.open_call(is_of_use=True)
    program.begin()
    program.step()
    first = next(iter(program.optimizer.state.values()))
    first["exp_avg"], kept = torch.zeros(1).expand(2**60), first["exp_avg"]
    program.log.end()
    program.begin()
    with pytest.raises(RuntimeError, match="memory"):
        program.step()
    assert program.ledger.enter(START_UP) == START_UP
    assert not program.log.can_undo
    first["exp_avg"] = kept
    program.optimizer.step()
    assert not program.log.can_undo, "the weights may have changed before"
