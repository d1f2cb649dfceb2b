"""Whether a step of the operator is half done: what optimizers and models tell about changes."""

from __future__ import annotations

from typing import Any

import torch

from raysgd._numbers.meters import AverageMeterCollection
from raysgd.messages.joint_work import JointWork
from raysgd.torch.data.feed import TorchFeed
from raysgd.torch.parallel.strategy import NoParallel
from raysgd.torch.step.own_steps import tells_of_steps
from raysgd.torch.training_operator import TrainingOperator
from raysgd.worker.data.loop import Loop


class StepLoop(Loop):
    """The loop of an operator; it watches the models.

    It counts steps of optimizers, which may bypass PyTorch's own count of changes. Batches that may change a model
    before their last collective are watched more closely: an optimizer may begin there and have changed nothing yet,
    and PyTorch's count knows of other changes too, such as the first half of a step of sharpness-aware minimization.
    """

    def __init__(self, operator: TrainingOperator, parallel: NoParallel, feed: TorchFeed) -> None:
        super().__init__(feed)
        self._operator = operator
        self._parallel = parallel
        self.step = parallel.step
        self._num_optimizer_steps = 0
        self._watched: list[torch.nn.Parameter] = []
        self._works: dict[int, str] = {}  # by identity of optimizers: what their steps are recorded as
        self._watch_models()
        self._num_changes_at_boundary = 0
        self._global_step_at_boundary = 0

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

    def _num_changes(self) -> int:
        if not self._watched:
            return self._num_optimizer_steps
        return self._num_optimizer_steps + sum(parameter._version for parameter in self._watched)

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        self._num_optimizer_steps += 1
        if self._parallel.synchronizes:
            self._parallel.record.note(self._works[id(optimizer)])

    @property
    def is_whole(self) -> bool:
        return self._num_changes() == self._num_changes_at_boundary and not self._parallel.record.has_parted

    def note_boundary(self) -> None:
        self._num_changes_at_boundary = self._num_changes()
        self._global_step_at_boundary = self._operator.global_step

    def return_to_boundary(self) -> None:
        self._operator.global_step = self._global_step_at_boundary

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
    """Whether a batch may change a model and need the other ranks after that."""
    names = ("train_batch", "forward", "backward", "optimizer_step")
    return len(operator._raysgd.registered.optimizers) > 1 or any(overrides(operator, name) for name in names)


def overrides(operator: TrainingOperator, name: str) -> bool:
    """Whether a method of the operator is not the library's."""
    return getattr(type(operator), name) is not getattr(TrainingOperator, name)
