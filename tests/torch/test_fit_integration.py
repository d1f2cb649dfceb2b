"""`fit` with callbacks on real workers, of which some are lost on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raysgd import Recovery, testing
from raysgd.callbacks import Callback, Run, WorkerCallback
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.torch import TorchTrainer
from tests.torch.ledger import Ledger, uses
from tests.torch.operators_for_tests import LinearOperator

pytestmark = pytest.mark.integration


class Steps(WorkerCallback):
    """Counts steps, and sums weights after each of them."""

    def on_begin(self, operator: Any) -> None:
        self.count, self.total = 0, 0.0

    def on_step_end(self, operator: Any, step: int, metrics: Mapping[str, Any]) -> None:
        self.count += 1
        self.total += float(next(operator.net.parameters()).detach().sum())

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        metrics["steps"], metrics["total"] = self.count, self.total

    def state_dict(self) -> Any:
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.count, self.total = state["count"], state["total"]


class Watches(Callback):
    """Notes what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_workers: list[int] = []

    def on_event(self, run: Run, event: GroupEvent) -> None:
        self.events.append(event.kind)

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        self.num_workers.append(result["num_workers"])


@pytest.fixture
def trainer(ray_cluster: None) -> Iterator[TorchTrainer]:
    made = TorchTrainer(
        training_operator_cls=Ledger, num_workers=2, recovery=Recovery(wait_for_workers=False, resize_interval_s=0.2)
    )
    yield made
    made.shutdown(force=True)


class OnPlateau(LinearOperator):
    """Goes by `val_loss`, and is never content with it."""

    def register(self, **parts: Any) -> Any:
        plateau = ReduceLROnPlateau(parts["optimizers"], factor=0.5, patience=0, threshold=0.9)
        *others, self.scheduler = super().register(**parts, schedulers=plateau)
        return others


class LoseOne(Callback):
    def on_epoch_begin(self, run: Run) -> None:
        if run.epoch == 1:
            testing.kill_worker(run.trainer, 1, at="step:1")


def test_all_workers_lower_the_rate_by_the_same_validation_also_behind_a_loss(ray_cluster: None) -> None:
    options: dict[str, Any] = {"training_operator_cls": OnPlateau, "scheduler_step_freq": "epoch"}
    with TorchTrainer(
        num_workers=2, recovery=Recovery(wait_for_workers=False, resize_interval_s=0.2), **options
    ) as trainer:
        history = trainer.fit(3, callbacks=[LoseOne()])
        told = trainer.apply_all_operators(lambda operator: operator.scheduler.state_dict())
        rates = trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"])
    plateau = ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=0.05), factor=0.5, patience=0, threshold=0.9)
    for loss in history["val_loss"]:
        plateau.step(loss)
    assert sum(event.is_failure for event in history.events) == 1
    assert told == [plateau.state_dict()] * len(told)
    assert rates == plateau.get_last_lr() * len(told)


def test_the_state_of_callbacks_survives_losses_and_reaches_new_workers(trainer: TorchTrainer) -> None:
    callback = Watches()
    testing.kill_worker(trainer, 1, at="step:3")
    first = trainer.fit(1, callbacks=[callback, Steps()])
    testing.kill_worker(trainer, 0, at="step:3")
    second = trainer.fit(1, callbacks=[callback, Steps()])
    assert "continued" in callback.events
    assert [event.kind for event in (*first.events, *second.events)] == callback.events
    assert uses(trainer) == {2}, "no sample was lost or used twice"
    steps = trainer.get_model()  # keeps the trainer in use while its state is read
    assert steps is not None
    state = trainer.state_dict()["callbacks"]["Steps"]
    per_worker = trainer.apply_all_operators(lambda operator: operator.global_step)
    assert set(per_worker) == {state["count"]}, "each step that counts was counted once, on each worker"
    assert second[-1]["steps"] == state["count"]
    assert second[-1]["total"] == pytest.approx(state["total"])
