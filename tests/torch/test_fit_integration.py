"""`fit` with callbacks on real workers, of which some are lost on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from raysgd import testing
from raysgd.callbacks import Callback, Run, WorkerCallback
from raysgd.engine.history import Event
from raysgd.torch import TorchTrainer
from tests.torch.ledger import Ledger, uses

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
    """Brings `Steps`, and notes what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_workers: list[int] = []

    def worker_callback(self) -> WorkerCallback:
        return Steps()

    def on_event(self, run: Run, event: Event) -> None:
        self.events.append(event.kind)

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        self.num_workers.append(result["num_workers"])


@pytest.fixture
def trainer(ray_cluster: None) -> Iterator[TorchTrainer]:
    made = TorchTrainer(training_operator_cls=Ledger, num_workers=2, resize_check_s=0.2)
    yield made
    made.shutdown(force=True)


def test_the_state_of_callbacks_survives_losses_and_reaches_new_workers(trainer: TorchTrainer) -> None:
    callback = Watches()
    testing.kill_worker(trainer, 1, at="step:3")
    first = trainer.fit(1, callbacks=[callback])
    testing.kill_worker(trainer, 0, at="step:3")
    second = trainer.fit(1, callbacks=[callback])
    assert "rejoined" in callback.events
    assert [event.kind for event in (*first.events, *second.events)] == callback.events
    assert uses(trainer) == {2}, "no sample was lost or used twice"
    steps = trainer.get_model()  # keeps the trainer in use while its state is read
    assert steps is not None
    [state] = trainer.state_dict()["callbacks"]
    assert state["name"] == "Steps"
    per_worker = trainer.apply_all_operators(lambda operator: operator.global_step)
    assert set(per_worker) == {state["state"]["count"]}, "each step that counts was counted once, on each worker"
    assert second[-1]["steps"] == state["state"]["count"]
    assert second[-1]["total"] == pytest.approx(state["state"]["total"])
