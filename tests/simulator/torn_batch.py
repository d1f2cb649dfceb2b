"""A batch that steps two optimizers, with an exchange between them: real tensors, and the real loop that undoes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from raysgd.core.arrays.division import BETWEEN_BATCHES
from raysgd.core.engine.shared.types import World
from raysgd.core.text.log_lines import Once
from raysgd.torch.data.feed import TorchFeed
from raysgd.torch.hosting.torch_step import TorchParts, make_undo
from raysgd.torch.objects.precision import Precision
from raysgd.torch.operator.registrar import RegisteredObjects
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.parallel.strategy import Strategy
from raysgd.torch.step.gradients import Gradients
from raysgd.torch.training_operator import TrainingOperator
from raysgd.trainer.worker.worker_callbacks import InstalledCallbacks


class _Pair(TrainingOperator):
    """Two optimizers, each with a weight; only what the loop looks at."""

    def __init__(self) -> None:
        self.weights = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])
        for weight in self.weights:
            weight.grad = torch.ones(1)
        first, second = self.weights
        self.global_step = 0
        registered = RegisteredObjects(
            original_models=[self.weights],
            optimizers=[torch.optim.Adagrad([first]), torch.optim.SGD([second], lr=1.0, maximize=True)],
        )
        internals: Any = SimpleNamespace(
            registered=registered, precision=Precision(), callbacks=InstalledCallbacks(), remade=None
        )
        self._raysgd = internals


class _Joined(Strategy):
    """Replicas that survivors of a loss would keep equal in another group."""

    obstacle = None


class TornBatch:
    """What the batches of a replica change. What counts steps is in the state of one optimizer, and in a weight.

    Args:
        undo: See `make_undo`.
    """

    def __init__(self, undo: bool | None) -> None:
        self._operator, parallel = _Pair(), _Joined()
        self._optimizers = self._operator._raysgd.registered.optimizers
        self._undo = make_undo(self._operator, parallel, undo, World(0, 2))
        hooks = Gradients(self._operator, Precision(), parallel.sync, StepOptions(), InstalledCallbacks(), Once())
        hooks.watch(self._optimizers)
        self._parts = TorchParts(self._operator, parallel.sync, TorchFeed(lambda name: None, parallel, 1), self._undo)
        hooks.watch_last()
        self._sync = parallel.sync
        self.open_call()

    def open_call(self) -> None:
        self._sync.begin_leg((), may_run_backward=True)
        self._undo.open_call()
        self._parts.note_committed()

    def begin(self) -> None:
        """A batch begins."""
        self._parts.open(BETWEEN_BATCHES, None)

    def step(self, number: int) -> None:
        """The gradients of an optimizer were exchanged; it steps."""
        self._parts.leg.note_all_reduce()
        [weight] = self._optimizers[number].param_groups[0]["params"]
        weight.grad = torch.ones(1)
        self._optimizers[number].step()

    def end(self) -> None:
        self._parts.commit()

    @property
    def is_whole(self) -> bool:
        return self._parts.can_be_source

    def leave_group(self) -> None:
        if self._parts.can_be_source:
            self._parts.undo_step()

    def break_off(self, num_steps: int) -> None:
        """The user's code raised on the only rank: a batch is undone, or stays as it is if it cannot be."""
        if self._parts.can_undo_now(ValueError(), True):
            self._parts.undo_step()
        else:
            self.restore(num_steps)

    @property
    def num_steps(self) -> tuple[float, float]:
        """How many steps each optimizer has taken."""
        first, second = self._operator.weights
        return self._optimizers[0].state[first]["step"].item(), second.item()

    def restore(self, num_steps: int) -> None:
        """Takes over the state after so many steps."""
        first, second = self._operator.weights
        with torch.no_grad():
            second.fill_(num_steps)
        self._optimizers[0].state[first]["step"].fill_(num_steps)
        self._parts.note_loaded()
