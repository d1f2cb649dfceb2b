"""Undo: what a batch changed is put back, or it is known that it cannot be.

Covers `raysgd.torch.parallel.undo`, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.callbacks.averages import EMA
from raysgd.core.arrays.division import BETWEEN_BATCHES
from raysgd.core.numbers.timing import START_UP, UNDO
from raysgd.torch.objects.precision import NativeAmp
from raysgd.torch.parallel import undo as undoing
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.undo import Mode, Undo


class Steps:
    """The steps of a leg with this `Undo`."""

    def __init__(self, undo: Undo, optimizers: Sequence[Any]) -> None:
        self.undo, self.leg = undo, Leg()
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self.note_step)
        undo.open_call()

    def begin(self) -> None:
        self.undo.begin_step(self.leg.record, self.leg.ledger.inside(UNDO))
        self.leg.begin_batch(BETWEEN_BATCHES)

    def note_step(self, optimizer: Any, *_: Any) -> None:
        self.leg.record.note_step(optimizer)

    def end(self) -> None:
        self.undo.forget(self.leg.record)
        self.leg.renew_record()

    def undo_step(self) -> None:
        self.undo.undo_step(self.leg.record)
        self.leg.renew_record()

    def can_undo(self, has_broken: bool) -> bool:
        if has_broken:
            self.leg.record.note_lost_connection(OSError("gone"))
        can_undo = self.undo.can_undo(self.leg.record)
        self.leg.record.error = None
        return can_undo


class Program(Steps):
    """A model, its optimizer and what goes with them, as a batch of user code sees them.

    Args:
        make_optimizer: Makes the optimizer for the parameters.
        mode: See `Undo`.
        model: The model, if not a small one with a batch norm.
        keeps_gradients: See `Undo`.
    """

    def __init__(
        self,
        make_optimizer: Callable[[Any], Any] | None = None,
        mode: Mode = "all",
        model: Any = None,
        keeps_gradients: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = model or torch.nn.Sequential(
            torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
        )
        self.model.register_buffer("mask", torch.ones(1))
        make = make_optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=0.1))
        self.optimizer = make([each for each in self.model.parameters() if each.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.followers: list[Any] = []
        parts = [self.model], [self.optimizer], [self.scheduler], lambda: self.followers
        undo = Undo(*parts, mode=mode, keeps_gradients=keeps_gradients)
        super().__init__(undo, [self.optimizer])

    def backward(self) -> None:
        random.random()
        np.random.rand()
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 2)).square().mean().backward()
        self.leg.note_all_reduce()

    def step(self) -> None:
        """As much of a batch as ends with the step of an optimizer."""
        self.backward()
        self.optimizer.step()

    def move(self, by: float = 1.0) -> None:
        """Change weights past everything that PyTorch counts."""
        self.model[0].weight.data.add_(by)

    def run(self, *parts: Callable[[], object]) -> None:
        """A whole batch."""
        self.begin()
        for part in parts:
            part()
        self.end()

    @property
    def is_copied(self) -> bool:
        """Whether the next batch is copied before it."""
        self.begin()
        copied_all = self.copied_all
        self.undo_step()
        return copied_all

    @property
    def copied_all(self) -> bool:
        assert self.leg.record.has_begun
        return self.leg.record.copied_all

    def state(self) -> Any:
        """All that is to be as before, in numbers."""
        parts = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        averages = [each.state_dict() for each in self.followers]
        draws = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1]]
        return _plain([*parts, *averages, *draws])


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


class Nested(torch.optim.SGD):
    """Steps another optimizer, of which no one else knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.Adam(self.param_groups[0]["params"])
        self.slow = {"weights": [each.detach().clone() for each in self.param_groups[0]["params"]]}

    def step(self, closure: Any = None) -> None:
        self.base.step()
        torch._foreach_add_(self.slow["weights"], 1.0)


# ----------------------------------------------------------------------------------------------- what is put back


@pytest.mark.parametrize(
    "make_optimizer",
    [
        None,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True, foreach=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        Nested,
    ],
    ids=["adam", "sgd", "amsgrad", "adagrad", "one inside another"],
)
@pytest.mark.parametrize("num_batches", [0, 2])
def test_a_batch_with_two_steps_leaves_nothing(make_optimizer: Any, num_batches: int) -> None:
    program = Program(make_optimizer)
    for _ in range(num_batches):
        program.run(program.step)
    before = program.state(), _plain(vars(program.optimizer).get("slow"))
    program.begin()
    program.step()
    program.scheduler.step()
    program.step()
    assert program.state() != before[0]
    assert program.can_undo(has_broken=True)
    program.undo_step()
    assert (program.state(), _plain(vars(program.optimizer).get("slow"))) == before


def test_a_batch_in_fp16_that_broke_off_between_two_optimizers_is_repeated() -> None:
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    precision = NativeAmp(torch.float16, torch.device("cpu"))
    precision.prepare(models, optimizers, lambda: None)
    steps = Steps(Undo(models, optimizers, [precision], mode="all"), optimizers)

    def train(*pairs: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
        for model, optimizer in pairs:
            precision.backward(model(torch.ones(2, 4)).square().mean(), optimizer)
            precision.unscale(optimizer)
            precision.step(optimizer)

    pairs = [*zip(models, optimizers, strict=True)]
    steps.begin()
    train(*pairs)
    steps.end()
    before = precision.state_dict()
    steps.begin()
    train(pairs[0])
    steps.undo_step()
    assert precision.state_dict() == before
    steps.begin()
    train(*pairs)


def test_closures_that_step_many_times_leave_nothing() -> None:
    program = Program(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4))
    features = torch.randn(8, 2)

    def closure() -> torch.Tensor:
        program.optimizer.zero_grad()
        loss = program.model(features).square().mean()
        loss.backward()
        return loss

    program.run(lambda: program.optimizer.step(closure))
    before = program.state()
    program.begin()
    program.optimizer.step(closure)
    program.undo_step()
    assert program.state() == before


def test_averages_that_follow_the_steps_leave_nothing() -> None:
    program = Program()
    average = EMA(0.9)
    average.weights = [{name: each.detach().clone() for name, each in program.model.named_parameters()}]
    program.followers = [average]
    before = program.state()
    program.begin()
    program.step()
    average.weights[0]["0.weight"].lerp_(program.model[0].weight.detach(), 0.5)
    assert program.state() != before
    program.undo_step()
    assert program.state() == before


def test_what_is_frozen_in_a_batch_is_trained_again() -> None:
    program = Program()
    program.begin()
    program.model[0].requires_grad_(False)
    program.undo_step()
    assert all(parameter.requires_grad for parameter in program.model.parameters())


def test_weights_and_buffers_that_were_swapped_or_assigned_get_their_memory_back() -> None:
    program = Program()
    weight, mask, count = program.model[0].weight, program.model.mask, program.model[1].num_batches_tracked
    memory = weight.data_ptr()
    before = program.state()
    program.begin()
    weight.data = weight.data + 1
    program.model.mask = mask + 1
    count.data = torch.tensor(7)
    program.undo_step()
    assert program.state() == before
    assert weight.data_ptr() == memory
    assert program.model.mask is mask


@pytest.mark.parametrize("mode", ["learn", "buffers"])
def test_gradients_that_wait_for_more_batches_are_put_back_with_all_else(mode: Mode) -> None:
    program = Program(mode=mode, keeps_gradients=True)
    program.run(program.step)
    program.run(program.backward)
    gradients = [parameter.grad for parameter in program.model.parameters()]
    before, state = _plain(gradients), program.state()
    program.begin()
    program.model(torch.randn(4, 2)).mean().backward()
    program.move()
    assert _plain(gradients) != before
    program.optimizer.zero_grad()
    program.undo_step()
    assert all(parameter.grad is each for parameter, each in zip(program.model.parameters(), gradients, strict=True))
    assert (_plain(gradients), program.state()) == (before, state)


def test_sparse_gradients_that_wait_are_put_back() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    undo = Undo([table], [torch.optim.SGD(table.parameters())], mode="all", keeps_gradients=True)
    steps = Steps(undo, ())
    undo.note_loaded()
    steps.begin()
    table(torch.tensor([1])).sum().backward()
    steps.undo_step()
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.to_dense().tolist() == [[0, 0], [1, 1], [0, 0], [0, 0], [0, 0]]


def test_a_buffer_whose_elements_share_memory_is_left_alone() -> None:
    program = Program()
    program.model.mask = torch.zeros(1).expand(2**60)
    program.undo.open_call()
    program.begin()
    program.undo_step()
    assert program.model.mask.shape == (2**60,)


def test_a_batch_that_was_not_copied_does_not_go_back_to_the_one_that_was() -> None:
    model = torch.nn.Linear(1, 1)
    steps = Steps(Undo([model], [], mode="learn"), ())
    steps.begin()
    steps.leg.note_all_reduce()
    steps.note_step(torch.optim.SGD(model.parameters()))
    model.weight.data.fill_(5.0)
    steps.end()
    steps.begin()
    steps.undo_step()
    assert model.weight.item() == 5.0


@pytest.mark.parametrize("mode", ["all", "learn"])
def test_a_batch_that_may_change_what_cannot_be_copied_is_not_repeated_which_is_said_once(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(mode=mode)
    program.optimizer.numbers = iter(range(9))
    program.begin()
    assert not program.can_undo(has_broken=True)
    program.step()
    program.end()
    program.begin()
    assert program.can_undo(has_broken=True) == (mode == "learn"), "before its step, a later batch changes nothing"
    [said] = [record.getMessage() for record in caplog.records]
    assert "`Adam` contains a `builtins.range_iterator`, whose state cannot be copied" in said


# ---------------------------------------------------------------------------------------------- when it is copied


def test_stock_code_copies_buffers_alone() -> None:
    program = Program(mode="buffers")
    program.run(program.step)
    program.begin()
    before = program.state()
    program.backward()
    after = program.state()
    assert program.can_undo(has_broken=True)
    program.undo_step()
    now = program.state()
    norm = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert {name: now[0][name] for name in norm} == {name: before[0][name] for name in norm}
    assert {name: now[0][name] for name in norm} != {name: after[0][name] for name in norm}
    assert now[3:] == after[3:]
    program.begin()
    program.step()
    assert not program.can_undo(has_broken=False)


SHAPES: dict[str, Callable[[Program], list[Callable[[], object]]]] = {
    "two steps": lambda it: [it.step, it.step],
    "weights moved between two backward passes": lambda it: [it.backward, it.move, it.backward, it.optimizer.step],
    "and back behind them": lambda it: [it.backward, it.move, it.backward, lambda: it.move(-1.0), it.optimizer.step],
    "weights moved before a single one": lambda it: [it.move, it.step],
    "weights stepped by hand": lambda it: [it.backward, it.move],
}
ONCE: dict[str, Callable[[Program], list[Callable[[], object]]]] = {
    "one step": lambda it: [it.step],
    "a scheduler in front": lambda it: [it.scheduler.step, it.step],
    "and a scheduler behind it": lambda it: [it.step, it.scheduler.step],
    "two backward passes for one step": lambda it: [it.backward, it.step],
    "weights moved behind the step": lambda it: [it.step, it.move],
}


@pytest.mark.parametrize("shape", [*SHAPES, *ONCE])
def test_the_first_batch_shows_whether_later_ones_are_copied(shape: str) -> None:
    program = Program(mode="learn")
    assert program.is_copied, "the first one is"
    program.run(*(SHAPES | ONCE)[shape](program))
    assert program.is_copied == (shape in SHAPES)
    program.undo.open_call()
    assert program.is_copied, "so is the first one of each call"


def test_a_first_batch_without_an_exchange_shows_nothing() -> None:
    program = Program(mode="learn")
    program.run()
    assert program.is_copied
    program.run(program.step)
    assert not program.is_copied


@pytest.mark.parametrize(
    "later",
    [
        lambda it: [it.step, it.step],
        lambda it: [it.backward, it.move, it.step],
    ],
    ids=["an exchange behind a step", "one exchange more"],
)
def test_a_later_batch_that_does_more_is_not_repeated_and_turns_the_copies_on(later: Any) -> None:
    program = Program(mode="learn")
    program.run(program.step)
    program.begin()
    for part in later(program)[:-1]:
        part()
    assert not program.can_undo(has_broken=False)
    program.backward()
    assert not program.can_undo(has_broken=True)
    program.end()
    assert program.is_copied


def test_a_batch_like_the_first_one_is_repeated_if_its_exchange_broke_and_not_if_something_later_did() -> None:
    program = Program(mode="learn")
    program.run(program.step)
    program.begin()
    assert program.can_undo(has_broken=False)
    program.backward()
    assert program.can_undo(has_broken=True)
    assert not program.can_undo(has_broken=False)


def test_learning_rates_and_schedules_are_put_back_where_weights_are_not_copied() -> None:
    program = Program(mode="learn")
    program.run(program.step)
    before = program.state()
    program.begin()
    program.scheduler.step()
    program.optimizer.param_groups[0]["lr"] *= 0.5
    program.backward()
    assert not program.copied_all
    assert program.can_undo(has_broken=True)
    program.undo_step()
    assert program.state()[1:3] == before[1:3]


@pytest.mark.parametrize("mode", ["learn", "buffers"])
def test_frozen_weights_that_begin_to_move_later_are_noticed(mode: Mode) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1))
    program = Program(mode=mode, model=model)
    program.run(program.step)
    program.run(program.step, program.move)
    program.begin()
    assert not program.can_undo(has_broken=True)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,), (4,), (3, 8), (0, 4)])
def test_a_digest_tells_numbers_and_rows_apart(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    before = undoing.digest_of(tensor)
    assert torch.equal(before, undoing.digest_of(tensor.clone()))
    if tensor.numel():
        changed = tensor.clone()
        changed.view(-1)[-1] = not changed.view(-1)[-1]
        assert not torch.equal(before, undoing.digest_of(changed))
    if tensor.ndim == 2 and tensor.numel() and dtype is not torch.bool:
        assert not torch.equal(before, undoing.digest_of(tensor.flip(0)))
        assert undoing.digest_of(tensor.T).shape == (8,)


# -------------------------------------------------------------------------------------------------- without copies


@pytest.mark.parametrize("is_used", [True, False])
def test_nothing_is_copied_where_no_batch_would_be_repeated(is_used: bool) -> None:
    program = Program()
    if is_used:
        program.undo.switch_off()
    program.undo.open_call(is_used)
    program.begin()
    assert not program.can_undo(has_broken=True)
    assert not program.leg.ledger.reading().seconds[UNDO]
    program.end()
    assert program.can_undo(has_broken=False), "between two batches"


def test_the_time_of_copies_is_booked() -> None:
    program = Program()
    program.begin()
    assert program.leg.ledger.reading().seconds[UNDO] > 0


def test_without_memory_for_a_copy_training_goes_on_and_nothing_counts_as_copied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Program()
    program.run(program.step)
    weight = program.model[0].weight
    kept, weight.data = weight.data, torch.zeros(1, 1).expand(2**30, 2**30)
    program.begin()
    assert "not enough memory to copy" in caplog.text
    assert program.leg.ledger.enter(START_UP) == START_UP
    assert not program.can_undo(has_broken=True)
    weight.data = kept
    program.step()
    program.end()


@pytest.mark.parametrize(("num_bytes", "lacks"), [(10**9, False), (1000, True)])
def test_copies_take_at_most_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, lacks: bool
) -> None:
    model = torch.nn.Linear(16, 16, bias=False)
    monkeypatch.setattr(undoing, "_free_bytes", lambda device, num_sharing: num_bytes)
    assert (undoing.lacks_memory([model], 1) is not None) == lacks


def test_the_free_memory_of_a_node_is_shared_by_its_workers() -> None:
    alone, shared = (undoing._free_bytes(torch.device("cpu"), number) for number in (1, 4))
    assert alone is None or (shared is not None and shared < alone)
