"""`TorchInternals`: the library's private state for a `TrainingOperator`.

It is stored in the operator's attribute `_raysgd`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import wraps
from typing import Any

import torch

from raysgd.core.arrays.ray_batches import BatchForm
from raysgd.torch.constants import SCHEDULER_STEP, USE_FP16
from raysgd.torch.data import batches
from raysgd.torch.data.ray_tensors import as_batch
from raysgd.torch.objects import hyperparameters
from raysgd.torch.objects.criteria import LossCall, observable
from raysgd.torch.objects.hyperparameters import Hyperparameters
from raysgd.torch.objects.precision import warn_of_short_weights
from raysgd.torch.operator.batch_metrics import BatchMetrics
from raysgd.torch.operator.registrar import RegisteredData, RegisteredObjects, register
from raysgd.torch.operator.settings import OperatorContext
from raysgd.torch.operator.trained_parts import Noted, TrainedParts
from raysgd.torch.step.gradients import Gradients
from raysgd.trainer.messages.prediction import HAS_TARGET
from raysgd.trainer.worker.operator import required

logger = logging.getLogger(__name__)

_FORMER_NAME = "remakes_frozen"  # of `excludes_frozen_from_state`


class TorchInternals(BatchMetrics):
    """The library's private state for a `TrainingOperator`.

    Attributes:
        registered: Models, optimizers, criterion and schedulers that the operator registered.
        data: Data loaders that the operator registered.
        scheduler_step_freq: When the library steps schedulers: "batch", "epoch", "manual" or None.
        precision: Numeric precision of the training.
        trained: Records frozen parameters and optimizers' parameter groups; None before the end of `setup`.
        remade: Frozen parameters that snapshots and checkpoints omit; None without `excludes_frozen_from_state`.
        gradients: Computes gradients, and steps optimizers. It also clips gradients if user code calls `step` itself.
        chosen: Hyperparameters of the optimizers, such as learning rates, that `setup` chose.
        gpu: The worker's GPU, to which batches are moved; None on a CPU.
        follows_rate: True if the optimizers' learning rates were adjusted when the config's `lr` last changed.
    """

    def __init__(self, operator: Any, config: dict[str, Any], context: OperatorContext) -> None:
        super().__init__(operator, config, context)
        self.data = RegisteredData()
        self._keep(RegisteredObjects())
        self.scheduler_step_freq = context.settings.scheduler_step_freq
        self.precision = context.precision
        self.gpu = context.device if context.use_gpu else None
        self.chosen: list[Hyperparameters] = []
        self.follows_rate = False
        parts = operator, context.precision, self.sync, context.settings.step_options, self.callbacks
        self.gradients = Gradients(*parts, once=self.once)
        self.trained: Any = None
        self.remade: Any = None

    @property
    def use_gpu(self) -> bool:
        return self.context.use_gpu

    def as_batch(self, arrays: Any, form: BatchForm) -> Any:
        """Convert arrays from Ray Data to a batch that the operator's models accept."""
        return as_batch(arrays, form, self.registered.original_models)

    # Before `register` is called, the next three properties return False or None, because no model uses the precision.

    @property
    def fp16(self) -> bool | str:
        """Value of the operator's attribute `use_fp16`: False, True for PyTorch's mixed precision, or "apex"."""
        return self.precision.flag if self.registered.original_models else False

    @property
    def amp(self) -> Any:
        """Value of the operator's attribute `_amp`: a namespace with `autocast`, or Apex's module `amp`."""
        return self.precision.namespace if self.registered.original_models else None

    @property
    def scaler(self) -> Any:
        """Value of the operator's attribute `_amp_scaler`: the gradient scaler of PyTorch's mixed precision."""
        return self.precision.scaler if self.registered.original_models else None

    @property
    def criterion(self) -> Any:
        """The operator's attribute `criterion` or, if it has none, the registered criterion, which may be None."""
        return getattr(self._operator, "criterion", self.registered.criterion)

    def register(self, **given: Any) -> tuple[Any, ...]:
        """Prepare, wrap and record the objects passed to the operator's `register`. Return the wrapped objects."""
        if self._excludes_frozen:
            self.parallel.shares_frozen = False
        register(self._operator, self.context, given, self.registered, self._keep)
        self.gradients.watch(self.registered.optimizers)
        return self.registered.returned

    def _keep(self, registered: RegisteredObjects) -> None:
        self.registered = registered

    def begin_training(self, reports_ahead: bool = False) -> None:
        """Prepare for training at the end of `setup`. From now on, the gradients of frozen parameters are not averaged.

        Args:
            reports_ahead: True to add a batch's metrics to the epoch's metrics before the batch's backward pass. This
                requires that no user code changes the metrics that `train_batch` returns.
        """
        self._reports_ahead = reports_ahead
        criterion = getattr(self._operator, "criterion", None)
        if observable(criterion) is not criterion:  # user code has set another one than `register` returned
            self._operator.criterion = observable(criterion)
        self.trained = TrainedParts(self.registered)
        self.parallel.rewrap(self.registered.wrapped, is_agreed=True)
        if self._excludes_frozen:
            self._leave_out_frozen()
        if self.world.rank == 0:
            warn_of_short_weights(self.registered.optimizers, type(self._operator).__name__)

    def prepare_steps(self) -> None:
        """From now on, call the user's `optimizer_step` only when a step is due, and after its gradients are ready."""
        own = self._operator.optimizer_step

        @wraps(own)
        def optimizer_step(*args: Any, **options: Any) -> Any:
            is_due = self.gradients.are_ready(options.get("optimizer", args[0] if args else None))
            return own(*args, **options) if is_due else None

        self._operator.optimizer_step = optimizer_step

    @property
    def _excludes_frozen(self) -> bool:
        """True if the operator excludes frozen parameters from its state, also under the attribute's former name."""
        return self._operator.excludes_frozen_from_state or getattr(self._operator, _FORMER_NAME, False)

    def _leave_out_frozen(self) -> None:
        """Check that all ranks have the same frozen parameters, then omit them from snapshots and checkpoints.

        Raises:
            ValueError: The ranks' frozen parameters differ, or the models are sharded.
        """
        from raysgd.torch.objects.remade import RemadeParameters

        name = type(self._operator).__name__
        if hasattr(self._operator, _FORMER_NAME) and self.world.rank == 0:
            logger.warning("`%s.%s` has a new name: write `excludes_frozen_from_state = True`", name, _FORMER_NAME)
        if self.parallel.is_sharded:
            raise ValueError(
                f'`{name}.excludes_frozen_from_state = True` cannot work with `strategy="fsdp"`, where each worker has '
                'a part of what is frozen and reads the parts of checkpoints itself. Remove it, or use "ddp".'
            )
        num_models = len(self.registered.original_models)
        self.remade = RemadeParameters(self.registered.trained, type(self._operator), num_models)
        if self.world.is_distributed:
            self.remade.check_ranks(self.sum_over_workers)

    def rewrap(self) -> None:
        """Average the gradients of all parameters that are trainable now. Implements the operator's `rewrap`."""
        self.parallel.rewrap(self.registered.wrapped)
        if self.trained is not None:  # `self.trained` is None until `setup` has returned
            self.trained.note()
        if self.remade is not None:
            self.remade.follow_trained()

    def follow_trained(self, noted: Noted | None) -> None:
        """Freeze and unfreeze parameters and set parameter groups, as recorded in a snapshot that all ranks load.

        Args:
            noted: Frozen parameters and parameter groups from the snapshot; None for those at the end of `setup`.
        """
        if self.trained.take(noted):
            self.parallel.rewrap(self.registered.wrapped, is_agreed=True)

    def follow(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Adjust the optimizers' learning rates if the config's `lr` has changed.

        Args:
            config: The operator's config after the change.
            changed: Previous values of the config entries that have changed.
        """
        if "lr" not in changed:
            return
        new = hyperparameters.follow(self.chosen, config["lr"], changed["lr"])
        self.follows_rate = any(map(any, new))
        self.chosen = hyperparameters.updated(self.chosen, new)
        hyperparameters.apply(new, self.registered.optimizers, self.registered.schedulers)

    def trained_parameters(self) -> Iterator[torch.Tensor]:
        """Return all parameters of the registered models and of a criterion with trainable parameters."""
        return (parameter for part in self.registered.trained for parameter in part.parameters())

    def info_of_call(self, num_steps: int | None, epoch_idx: int) -> dict[str, Any]:
        operator = self._operator
        told = {USE_FP16: bool(self.precision.flag), SCHEDULER_STEP: operator.scheduler_step_freq}
        return {**super().info_of_call(num_steps, epoch_idx), **told}

    def evaluate(self, batch: Any) -> tuple[Any, Any, list[LossCall], dict[str, Any]]:
        """Run `forward` on a validation batch.

        Returns:
            - The predictions.
            - The target.
            - Records of the calls to PyTorch's losses that the criterion made.
            - A dict with `val_loss`, the number of samples, and the batch's weight if `forward` returned one.
        """
        operator = self._operator
        comparisons: list[LossCall] = []
        features, target = operator.prepare_batch(batch)
        noting = self.loss_calls.on(self.criterion, comparisons.append)
        with operator.timers.record("eval_fwd"), self.precision.forward(), noting:
            output, loss, weight = self.parts_of_forward(operator.forward(features, target))
        metrics = {"val_loss": loss.detach(), **self.size_of(features, target, weight)}
        return batches.prediction(output), target, comparisons, metrics

    def predict(self, batch: Any, info: Mapping[str, Any]) -> Any:
        """Call the model on the inputs of a batch and return its predictions. The default `predict_batch` does this."""
        operator, model = self._operator, required(self._operator, "model")
        features = batches.inputs(operator.prepare_batch, batch, info.get(HAS_TARGET, False), model)
        with operator.timers.record("predict_fwd"), self.precision.forward():
            output = batches.call_model(model, features)
        return batches.prediction(output)
