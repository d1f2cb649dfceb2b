"""Whether a step is half done, and the way back to before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysgd.core.arrays.division import BETWEEN_BATCHES
from raysgd.core.engine.shared.types import StepLacksMemory, World
from raysgd.core.text.log_lines import Once
from raysgd.operators import GANOperator
from raysgd.torch.data.feed import TorchFeed
from raysgd.torch.hosting import torch_step
from raysgd.torch.hosting.torch_step import TorchParts, make_undo, needs_copies
from raysgd.torch.objects.precision import Precision
from raysgd.torch.operator.registrar import RegisteredObjects
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.parallel.strategy import Strategy
from raysgd.torch.parallel.sync import GradientSync
from raysgd.torch.step.gradients import Gradients
from raysgd.torch.training_operator import TrainingOperator
from raysgd.trainer.worker.worker_callbacks import InstalledCallbacks

WORLD = World(0, 2)


class Joined(Strategy):
    """Replicas that survivors of a loss would keep equal in another group."""

    obstacle = None


class Plain(TrainingOperator):
    """Built by hand: only what the parts looks at."""

    def __init__(self, num_optimizers: int = 1) -> None:
        self.part = torch.nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(self.part.parameters(), lr=0.1) for _ in range(num_optimizers)]
        self.sgd = optimizers[0]
        self.global_step = 0
        registered = RegisteredObjects(original_models=[self.part], optimizers=optimizers)
        callbacks = InstalledCallbacks()
        internals: Any = SimpleNamespace(registered=registered, precision=Precision(), callbacks=callbacks, remade=None)
        self._raysgd = internals

    def compute(self) -> None:
        self.part(torch.ones(1, 1)).sum().backward()

    @property
    def gradient(self) -> float | None:
        return None if self.part.weight.grad is None else self.part.weight.grad.item()


class OwnBatch(Plain):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {}


class OwnForward(Plain):
    def forward(self, features: Any, target: Any) -> Any:
        return super().forward(features, target)


class SaysSo(Plain):
    _needs_copies = True


def parts_of(operator: Plain, undo: bool | None = None, parallel: Strategy | None = None) -> TorchParts:
    parallel = parallel or Joined()
    made = make_undo(operator, parallel, undo, WORLD)
    parts = TorchParts(operator, parallel.sync, TorchFeed(lambda name: None, parallel, 1), made)
    internals = operator._raysgd
    hooks = Gradients(operator, internals.precision, parallel.sync, StepOptions(), internals.callbacks, Once())
    hooks.watch(internals.registered.optimizers)
    hooks.watch_last()
    parallel.sync.begin_leg((), may_run_backward=True)
    made.open_call()
    parts.note_committed()
    return parts


def test_with_one_worker_a_step_is_half_done_once_an_optimizer_steps_and_nothing_is_copied() -> None:
    operator = OwnBatch()
    parts = parts_of(operator, parallel=Strategy())
    assert parts.undo.mode == "never"
    operator.compute()
    assert parts.can_be_source
    operator.sgd.step()
    assert not parts.can_be_source
    assert not parts.can_undo_now(ValueError(), True)
    parts.note_committed()
    assert parts.can_be_source


@pytest.mark.parametrize(
    ("operator", "needs"),
    [
        (Plain(), "buffers"),
        (OwnForward(), "buffers"),
        (OwnBatch(), "learn"),
        (Plain(num_optimizers=2), "all"),
        (SaysSo(), "all"),
    ],
)
def test_user_code_that_may_step_is_watched_and_several_optimizers_are_always_copied(
    operator: Plain, needs: str
) -> None:
    assert needs_copies(operator) == needs


def test_rungs_of_the_librarys_operators_are_not_the_users() -> None:
    operator: Any = GANOperator.__new__(GANOperator)
    operator._raysgd = Plain()._raysgd
    assert needs_copies(operator) == "buffers", "with one optimizer; it registers two"


@pytest.mark.parametrize(("undo", "is_copied"), [(True, True), (None, False), (False, False)])
def test_an_option_decides_for_stock_code(undo: bool | None, is_copied: bool) -> None:
    operator = Plain()
    parts = parts_of(operator, undo)
    parts.open(BETWEEN_BATCHES, None)
    operator.sgd.step()
    assert parts.can_be_source == parts.can_undo_now(ValueError(), True) == is_copied


def test_without_copies_a_batch_is_not_repeated_after_a_loss_but_after_an_error_before_its_step() -> None:
    parts = parts_of(Plain(), undo=False)
    parts.open(BETWEEN_BATCHES, None)
    assert (parts.can_be_source, parts.can_undo_now(ValueError(), True)) == (False, True)


def test_where_copies_take_too_much_memory_a_warning_says_so_and_none_are_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_step, "lacks_memory", lambda *parts: "8 of 10 MiB that are free")
    parts = parts_of(OwnBatch())
    parts.open(BETWEEN_BATCHES, None)
    assert not parts.can_be_source
    assert "would need 8 of 10 MiB that are free" in caplog.text


def test_gradients_that_wait_for_a_step_are_kept_and_others_cleared() -> None:
    operator = OwnBatch()
    parts = parts_of(operator)
    for waits in (False, True):
        parts.open(BETWEEN_BATCHES, None)
        operator.sgd.zero_grad()
        operator.compute()
        parts.leg.note_all_reduce()
        if not waits:
            operator.sgd.step()
        parts.note_committed()
        assert [each is not None for each in parts.waiting_parameters()] == [waits] * 2 * waits
        parts.open(BETWEEN_BATCHES, None)
        operator.compute()
        assert parts.can_be_source
        parts.undo_step()
        assert operator.gradient == (1.0 if waits else None)


def test_gradients_that_wait_and_are_a_ranks_own_cannot_be_handed_over() -> None:
    operator = OwnBatch()
    parts = parts_of(operator)
    parts.open(BETWEEN_BATCHES, None)
    operator.compute()
    parts.note_committed()
    assert not parts.can_be_source
    parts.open(BETWEEN_BATCHES, None)
    operator.compute()
    parts.leg.note_all_reduce()
    parts.note_committed()
    assert not parts.can_be_source, "those of the batch before are among them"
    parts.open(BETWEEN_BATCHES, None)
    operator.sgd.step()
    parts.note_committed()
    assert parts.can_be_source


def test_what_was_stepped_without_any_exchange_cannot_be_handed_over() -> None:
    class OfTwo(GradientSync):
        num_ranks = 2  # type: ignore[assignment]

    operator = OwnBatch()
    parts = parts_of(operator, parallel=Joined(OfTwo()))
    for exchanges in (False, True):
        parts.open(BETWEEN_BATCHES, None)
        operator.compute()
        if exchanges:
            parts.leg.note_all_reduce()
        operator.sgd.step()
        parts.note_committed()
        assert parts.can_be_source == exchanges


def test_what_waits_after_a_state_was_restored_are_its_gradients() -> None:
    operator = OwnBatch()
    parts = parts_of(operator)
    parts.open(BETWEEN_BATCHES, None)
    operator.compute()
    operator.sgd.step()
    parts.note_loaded()
    assert parts.can_be_source
    assert parts.waiting_parameters() == list(operator.part.parameters())


def size_after(parts: TorchParts, error: BaseException | None = None) -> Any:
    """Return what the ranks can process at once after an error, or "raised" if the error is raised."""
    try:
        parts.check_memory(error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    except StepLacksMemory as lack:
        return lack.largest_batch
    return "raised"


def test_the_last_error_says_how_many_samples_were_too_many() -> None:
    parts, error = parts_of(Plain()), torch.OutOfMemoryError("CUDA out of memory.")
    parts.splits = True
    parts.open(BETWEEN_BATCHES._replace(num_samples=1), None)
    assert size_after(parts, error) == "raised"
    advice = "Smaller batches do not help if a batch cannot be divided (samples at once: 1)."
    assert str(error) == f"CUDA out of memory. {advice}"


@pytest.mark.parametrize(("num_samples", "size"), [(8, 4), (5, 3), (2, 1), (1, "raised"), (0, "raised")])
def test_a_batch_that_lacks_memory_is_halved(num_samples: int, size: Any) -> None:
    parts = parts_of(Plain())
    parts.open(BETWEEN_BATCHES._replace(num_samples=num_samples), None)
    assert size_after(parts) == "raised", "nobody has asked for it"
    parts.splits = True
    parts.open(BETWEEN_BATCHES._replace(num_samples=num_samples), None)
    assert size_after(parts) == size
    assert size_after(parts, ValueError("no lack")) == "raised"
    assert size_after(parts, RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")) == size
    assert size_after(parts, RuntimeError("CUDA error: out of memory")) == size


def test_in_a_step_of_an_optimizer_the_state_of_another_rank_is_tried_once() -> None:
    operator = Plain()
    parts = parts_of(operator)
    parts.splits = True
    for _ in range(2):
        parts.open(BETWEEN_BATCHES._replace(num_samples=8), None)
        operator.compute()
        operator.sgd.step()
        assert size_after(parts) is None
        assert size_after(parts) == "raised"
        parts.commit()


def test_copies_that_lack_memory_are_a_reason_for_smaller_batches() -> None:
    operator = SaysSo()
    parts = parts_of(operator)
    parts.splits = True
    operator.part.weight.data = torch.zeros(1, 1).expand(2**30, 2**30)
    with pytest.raises(RuntimeError, match="memory") as caught:
        parts.open(BETWEEN_BATCHES._replace(num_samples=8), None)
    assert size_after(parts, caught.value) == 4
    assert parts.can_be_source
    parts.open(BETWEEN_BATCHES._replace(num_samples=1), None)
    assert parts.undo.mode == "off"
