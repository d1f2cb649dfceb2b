"""Notes of half-done steps: what optimizers and models tell about changes, and the way back to before it."""

from __future__ import annotations

from typing import Any

import torch

from raysgd._numbers.meters import AverageMeterCollection
from raysgd.connections.torch import is_connection_error
from raysgd.messages.joint_work import JointWork
from raysgd.messages.recovery import Undo
from raysgd.torch.data.feed import TorchFeed
from raysgd.torch.parallel.strategy import NoParallel
from raysgd.torch.step.own_steps import tells_of_steps
from raysgd.torch.step.undo_log import UndoLog
from raysgd.torch.training_operator import TrainingOperator
from raysgd.worker.data.loop import Loop
from raysgd.worker.ledger import Ledger


class StepLoop(Loop):
    """The loop of an operator; it watches the models.

    It counts steps of optimizers, which may bypass PyTorch's own count of changes. Batches that may change a model
    before their last collective are watched more closely: an optimizer may begin there and have changed nothing yet,
    and PyTorch's count knows of other changes too, such as the first half of a step of sharpness-aware minimization.
    """

    def __init__(
        self,
        operator: TrainingOperator,
        parallel: NoParallel,
        feed: TorchFeed,
        ledger: Ledger | None = None,
        undo: Undo = "auto",
    ) -> None:
        super().__init__(feed)
        self._operator = operator
        self._parallel = parallel
        self.step = parallel.step
        self._num_optimizer_steps = 0
        self._stepped: set[int] = set()  # by identity: the optimizers that stepped in this batch
        self._waiting: list[Any] = []  # those with gradients of batches before that they did not step with yet
        self._is_in_batch = False
        self._watched: list[torch.nn.Parameter] = []
        self._works: dict[int, str] = {}  # by identity of optimizers: what their steps are recorded as
        self._num_changes_at_boundary = 0
        self._global_step_at_boundary = 0
        internals = operator._raysgd
        registered, precision, callbacks = internals.registered, internals.precision, internals.callbacks
        self.undo_log = UndoLog(
            registered.trained,
            registered.optimizers,
            [*registered.schedulers, *([precision] if precision.is_mixed else [])],
            lambda: callbacks.changed_by_steps,
            undo,
            _may_change_models_early(operator),
            lambda: not self._is_unchanged,
            ledger,
        )
        self.step.opens, self.step.exchanges = self._begin_step, self.undo_log.note_exchange
        self._watch_models()

    def _watch_models(self) -> None:
        operator = self._operator
        registered = operator._raysgd.registered
        optimizers = registered.optimizers
        is_close = _may_change_models_early(operator) or not all(map(tells_of_steps, optimizers))
        if is_close:
            self._watched = [parameter for part in registered.trained for parameter in part.parameters()]
        for number, optimizer in enumerate(filter(tells_of_steps, optimizers), start=1):
            self._works[id(optimizer)] = f"optimizer {number} stepped"
            register = optimizer.register_step_post_hook if is_close else optimizer.register_step_pre_hook
            register(self._note_step)
            if is_close:
                optimizer.register_step_pre_hook(self.undo_log.before_step)

    def is_lost(self, error: BaseException) -> bool:
        return is_connection_error(error)

    def _num_changes(self) -> int:
        if not self._watched:
            return self._num_optimizer_steps
        return self._num_optimizer_steps + sum(parameter._version for parameter in self._watched)

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        self._num_optimizer_steps += 1
        self._stepped.add(id(optimizer))
        if self._parallel.synchronizes:
            self._parallel.record.note(self._works[id(optimizer)])

    @property
    def _is_unchanged(self) -> bool:
        return self._num_changes() == self._num_changes_at_boundary

    @property
    def is_whole(self) -> bool:
        """True if the state is that of a completed step, or can be made that one."""
        return (self._is_unchanged or self.undo_log.can_undo) and not self._parallel.record.has_parted

    def _begin_step(self) -> None:
        self._is_in_batch = True
        self._stepped.clear()
        self.undo_log.begin(self._waiting)

    def note_boundary(self) -> None:
        if self._is_in_batch:
            optimizers = self._operator._raysgd.registered.optimizers
            self._waiting = [each for each in optimizers if id(each) not in self._stepped]
            self._is_in_batch = False
        self.undo_log.end()
        self._num_changes_at_boundary = self._num_changes()
        self._global_step_at_boundary = self._operator.global_step

    def return_to_boundary(self) -> None:
        self._operator.global_step = self._global_step_at_boundary
        if not self._is_in_batch:
            return
        self._is_in_batch = False
        waiting = set(map(id, self._waiting))
        for optimizer in self._operator._raysgd.registered.optimizers:
            if id(optimizer) not in waiting:
                _clear(optimizer)
        if self.undo_log.undo():
            self._num_changes_at_boundary = self._num_changes()

    @property
    def completes_metrics(self) -> bool:
        return getattr(self._operator.train_epoch, "__func__", None) is TrainingOperator.train_epoch

    @property
    def own_s(self) -> float | None:
        return self._parallel.step.own_s or None

    def new_meters(self) -> AverageMeterCollection:
        return self._operator._raysgd.new_meters()

    def plain(self, value: Any) -> Any:
        """Tensors as numbers where they have one element, and on the CPU in any case."""
        if isinstance(value, torch.Tensor):
            return value.item() if value.ndim == 0 else value.detach().cpu()
        return value

    def begin_call(self) -> None:
        self._parallel.step.own_s = 0.0

    @property
    def joint_work(self) -> JointWork | None:
        return self._parallel.record.work


def _may_change_models_early(operator: TrainingOperator) -> bool:
    """Tells whether a batch may change a model and need the other ranks after that."""
    names = ("train_epoch", "train_batch", "forward", "backward", "optimizer_step")
    return len(operator._raysgd.registered.optimizers) > 1 or any(overrides(operator, name) for name in names)


def _clear(optimizer: Any) -> None:
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        parameter.grad = None


def overrides(operator: TrainingOperator, name: str) -> bool:
    """Tells whether a method of the operator is not the library's."""
    return getattr(type(operator), name) is not getattr(TrainingOperator, name)
