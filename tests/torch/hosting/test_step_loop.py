"""Whether a step is half done, told by optimizers and by PyTorch's own count of changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from raysgd.torch.data.feed import TorchFeed
from raysgd.torch.hosting.step_loop import StepLoop
from raysgd.torch.objects.precision import Precision
from raysgd.torch.operator.registrar import RegisteredObjects
from raysgd.torch.parallel.strategy import NoParallel
from raysgd.torch.training_operator import TrainingOperator
from raysgd.worker.worker_callbacks import InstalledCallbacks


class Plain(TrainingOperator):
    """Built by hand: only what the loop looks at."""

    def __init__(self) -> None:
        self.part = torch.nn.Linear(1, 1)
        self.sgd = torch.optim.SGD(self.part.parameters(), lr=0.1)
        self.global_step = 0
        registered = RegisteredObjects(original_models=[self.part], optimizers=[self.sgd])
        internals: Any = SimpleNamespace(registered=registered, precision=Precision(), callbacks=InstalledCallbacks())
        self._raysgd = internals


class OwnBatch(Plain):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {}


def loop_of(operator: Plain) -> StepLoop:
    loop = StepLoop(operator, NoParallel(), TorchFeed(lambda name: None, NoParallel(), 1))
    loop.note_boundary()
    return loop


def change_by_hand(operator: Plain) -> None:
    with torch.no_grad():
        operator.part.weight.add_(1.0)


def test_a_stock_batch_is_half_done_once_its_optimizer_steps() -> None:
    operator = Plain()
    loop = loop_of(operator)
    change_by_hand(operator)
    assert loop.is_whole, "no code of the user's runs there"
    operator.sgd.step()
    assert not loop.is_whole
    loop.note_boundary()
    assert loop.is_whole


def test_a_batch_of_the_users_own_is_half_done_with_the_first_change() -> None:
    operator = OwnBatch()
    loop = loop_of(operator)
    change_by_hand(operator)
    assert not loop.is_whole


def test_batches_since_the_last_boundary_are_not_counted_twice() -> None:
    operator = Plain()
    loop = loop_of(operator)
    operator.global_step = 3
    loop.return_to_boundary()
    assert operator.global_step == 0


def test_the_time_of_a_call_begins_at_zero() -> None:
    loop = loop_of(Plain())
    loop._parallel.step.own_s = 2.0
    assert loop.own_s == 2.0
    loop.begin_call()
    assert loop.own_s is None
