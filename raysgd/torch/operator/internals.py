"""`TorchInternals`: the library's private state for a `TrainingOperator`.

It is stored in the operator's attribute `_raysgd`.

In a training call, the metrics of a batch wait in `meters` until the optimizer step of the batch is complete. The
default `train_batch` passes its metrics to `report` before the backward pass, because each rank sends its sums to the
other ranks together with the gradients. The dict that `train_batch` returns goes to `end_batch`. At the boundary after
the step, the worker's `TrainingCall` counts the metrics that wait, or drops them if the step was interrupted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch

from raysgd.core.arrays.user_data import BatchForm
from raysgd.core.numbers.meters import BATCH_WEIGHT, NUM_SAMPLES, AverageMeterCollection, weight_of
from raysgd.core.numbers.results import as_number
from raysgd.core.text.tracebacks import defined_at
from raysgd.torch.constants import SCHEDULER_STEP, USE_FP16
from raysgd.torch.data import batches
from raysgd.torch.objects import hyperparameters, metric_objects
from raysgd.torch.objects.criteria import LossCall, LossCalls, observable
from raysgd.torch.objects.hyperparameters import Hyperparameters
from raysgd.torch.objects.models import read_tensors
from raysgd.torch.objects.precision import warn_of_short_weights
from raysgd.torch.operator.registrar import RegisteredData, RegisteredObjects, register
from raysgd.torch.operator.settings import OperatorContext
from raysgd.torch.operator.trained_parts import Noted, TrainedParts
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.strategy import Strategy
from raysgd.torch.parallel.undo import OpenStep, Undo
from raysgd.torch.step.gradients import Gradients
from raysgd.trainer.messages.prediction import HAS_TARGET
from raysgd.trainer.worker.operator import Internals, required
from raysgd.utils import IS_PADDING

logger = logging.getLogger(__name__)

_FORMER_NAME = "remakes_frozen"  # of `excludes_frozen_from_state`


class TorchInternals(Internals):
    """The library's private state for a `TrainingOperator`.

    It counts the samples of batches, weights their metrics, and holds the metrics back until their step is complete.

    Attributes:
        parallel: Strategy, such as DDP, that keeps the workers' models in sync.
        sync: Averages the gradients of each step. Its `leg` tracks the current batch, also of a validation.
        loss_calls: Notifies listeners of calls to the criterion.
        evaluated: Calls to the criterion in the current validation batch whose results are means over labels.
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

    context: OperatorContext

    def __init__(self, operator: Any, config: dict[str, Any], context: OperatorContext) -> None:
        super().__init__(config, context)
        self._operator = operator
        self.parallel: Strategy = context.parallel
        self.sync = context.parallel.sync
        self.loss_calls = LossCalls()
        self.evaluated: list[LossCall] = []
        self._reported: dict[str, Any] | None = None  # what `report` returned in the current batch
        self._reports_ahead = False
        self.data = RegisteredData()
        self.registered = RegisteredObjects()
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
        return batches.as_batch(arrays, form, self.registered.original_models)

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
        register(self._operator, given)
        self.gradients.watch(self.registered.optimizers)
        return self.registered.returned

    def finish_setup(self, reports_ahead: bool = False) -> None:
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

    def copy_state(self) -> Callable[[], None]:
        """Copy the state that optimizer steps change, on its devices. Return a function that restores the copy.

        Raises:
            ValueError: There is not enough memory, or the state of an object cannot be copied.
        """
        registered, precision = self.registered, [self.precision] if self.precision.is_mixed else []
        others, callbacks = [*registered.schedulers, *precision], self.callbacks
        undo = Undo(registered.trained, registered.optimizers, others, lambda: callbacks.followers, mode="all")
        undo.open_call()
        record = OpenStep()
        undo.begin_step(record, nullcontext())
        if not record.copied_all:
            raise ValueError("`Guard(rewind=...)` cannot copy the training state, as the log says: omit `rewind`.")
        return lambda: undo.undo_step(record)

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

    # ------------------------------------------------------------------------------------ from batch to batch

    @property
    def leg(self) -> Leg:
        return self.sync.leg

    def begin_metrics(self) -> None:
        if self.logged:
            super().begin_metrics()
        if self.sync.leg.batch.items:
            self.sync.leg.batch.forget_items()
        self.evaluated = []

    def info_of_batch(self, batch_idx: int) -> dict[str, Any]:
        """Return the entries that the library adds to the `batch_info` of a training batch."""
        is_padding = self.sync.leg.plan.is_padding
        return {"batch_idx": batch_idx, "global_step": self._operator.global_step, IS_PADDING: is_padding}

    def parts_of_forward(self, returned: Any) -> tuple[Any, torch.Tensor, Any]:
        """Split the return value of `forward` into output, loss and weight. Log the metrics in it, if any."""
        if type(returned) is tuple and len(returned) == 2 and isinstance(returned[1], torch.Tensor):
            return *returned, None  # the default `forward` returns this form
        parts, metrics = batches.without_metrics(returned)
        for name, value in metrics.items():
            self.log(name, value)
        return batches.parts_of_forward(parts, type(self._operator))

    def size_of(self, features: Sequence[Any], target: Any, weight: Any) -> dict[str, Any]:
        """Return a dict with the number of samples of a batch and, if it has one, the batch's weight.

        Args:
            features: Inputs of the batch.
            target: Target of the batch.
            weight: Weight that `forward` returned, or None. If the weight is None and the number of samples is unknown,
                the batch is weighted by its number of labels. This requires that the criterion averages over labels.

        Raises:
            ValueError: The batch has no weight, its number of samples is unknown, and it cannot be weighted by labels,
                because their number is unknown or user code has logged other metrics.
        """
        num_samples, found = self._sizes_of((*features, target))
        if weight is None and found != num_samples:
            if len(self.sync.leg.batch.items) != 1 or self.logged:
                raise _unknown_count(num_samples, found)
            self.sync.leg.expect_weight()  # unless the loss is the criterion's return value
        size = {NUM_SAMPLES: num_samples}
        return size if weight is None else {**size, BATCH_WEIGHT: weight}

    def report(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Complete the metrics of the default `train_batch` before its backward pass, and return them.

        Also add them to the epoch's metrics, as pending, unless the batch is padding. During the backward pass, each
        rank sends the sums of its epoch's metrics to the other ranks together with the gradients. These sums must
        include the current batch. Pending metrics become final once the optimizer step is complete.

        Outside a call, or if the operator overrides `train_epoch` or `train_batch`, return the metrics unchanged. An
        override may change the metrics before `end_batch` adds them.
        """
        if not (self._reports_ahead and self.sync.leg.batch.number):
            return metrics
        self._reported = metrics = self.completed(metrics, None)
        if not self.sync.leg.plan.is_padding:
            values = dict(metrics)
            self.latest_metrics = metrics
            self.meters.add_pending(values, values.pop(NUM_SAMPLES))
        return metrics

    def end_batch(self, metrics: Any, batch: Any) -> None:
        """End a training batch. Add the metrics that `train_batch` returned to the epoch's metrics, as pending.

        If `report` has already added these metrics, they are not added again. The metrics of padding are not added. The
        operator's `global_step` is incremented at once, if the batch is the last part of its global batch. Pending
        metrics become final only once the training loop requests the next batch.
        """
        leg, reported, self._reported = self.sync.leg, self._reported, None
        if leg.batch.waits:  # `train_batch` ran no backward pass
            leg.skip()
        waits = reported is not None and metrics is reported and not self.logged
        if not waits:
            metrics = self.completed(metrics, batch)
        elif leg.batch.is_by_samples:
            self._check_count(metrics[NUM_SAMPLES])
        if not leg.plan.is_padding and not waits:
            if reported is not None:
                self.meters.pending.pop()
            self.meters.add_pending(*self.values_and_weight(metrics, "train_batch"))
        if self.callbacks.noting_batches:
            pending = None if leg.plan.is_padding else self.meters.pending[-1][0]
            self.callbacks.note_batch(self._operator, pending, leg.plan.ends_step)
        self._operator.global_step += leg.plan.ends_global_batch

    def completed(self, metrics: Any, batch: Any) -> Any:
        batch_record = self.sync.leg.batch
        if metrics == {} and not (self.logged or batch_record.is_by_samples):
            return {NUM_SAMPLES: self._sizes_of(batch)[0]}  # `train_batch` skipped the batch and returned no metrics
        if type(metrics) is not dict and not isinstance(metrics, Mapping):  # the second check takes longer
            return metrics
        if self.logged or NUM_SAMPLES not in metrics:  # entries are missing
            metrics = super().completed(metrics, batch)
        amounts = batch_record.items
        if batch_record.is_by_samples:
            self._check_count(metrics[NUM_SAMPLES])
        if not amounts:
            return metrics
        are_samples = len(amounts) == 1 and type(amounts[0]) is int and amounts[0] == metrics[NUM_SAMPLES]
        return metrics if are_samples else self._weighted(metrics)

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples of a batch.

        Raises:
            ValueError: The loader read a different number of samples than the batch contains, so it is unclear which
                of the two numbers is meant.
        """
        num_samples, found = self._sizes_of(batch)
        if found != num_samples:
            raise _unknown_count(num_samples, found)
        return num_samples

    def _sizes_of(self, batch: Any) -> tuple[int, int]:
        """Return how many samples the loader read for a batch, and how many samples the batch contains.

        The two numbers differ if a `collate_fn` adds or omits samples. If the loader's number is unknown, or if the
        batch is padding, both are the number that the batch contains.
        """
        drawn = self.sync.leg.plan.num_samples
        if drawn:
            return drawn, batches.samples_of(batch, drawn)
        found = batches.count_samples(batch)
        return found, found

    def _check_count(self, num_samples: Any) -> None:
        """Raise if `train_batch` returned a `num_samples` that differs from the weight of the batch's gradients."""
        leg = self.sync.leg
        drawn = leg.rules.samples_in_step(leg.plan) if leg.plan.num_samples is None else leg.plan.num_samples
        if leg.rules.weighs and not leg.plan.is_padding and num_samples != drawn is not None:
            raise ValueError(
                f"`{type(self._operator).__name__}.train_batch` returned `num_samples` {num_samples}, and gradients "
                f"count by the {drawn} samples of the batch: call `self.backward(loss, weight=num_samples)` "
                "with what the loss is the mean over, or return as many samples as the batch has."
                f"{defined_at(type(self._operator), 'train_batch')}"
            )

    # ------------------------------------------------------------------------------------ means over labels

    def note_amount(self, comparison: LossCall) -> None:
        """Record a call to the criterion in a validation batch, if the call's result is a mean over labels."""
        if comparison.amount is not None:
            self.sync.leg.batch.items.append(comparison.amount)
            self.evaluated.append(comparison._replace(output=None, target=None))  # do not keep large tensors in memory

    def _weighted(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a batch's metrics, with weights for those losses that are means over labels, not over samples."""
        if BATCH_WEIGHT in metrics:
            return metrics
        if self.evaluated:
            return {**weights_of(metrics, val_loss=self._amount_of(metrics)), **metrics}
        first, *others = self.sync.leg.batch.items
        mean = sum(others, first) / (1 + len(others)) if others else first
        return {**weights_of(metrics, train_loss=mean if "train_loss" in metrics else None), **metrics}

    def _amount_of(self, metrics: Mapping[str, Any]) -> Any:
        """Return the number of labels over which `val_loss` is the mean.

        Return None if `val_loss` does not come from the criterion, so that it is weighted by samples.

        Raises:
            ValueError: `val_loss` does not come from the criterion and has no weight of its own. It cannot be weighted
                by samples either, because the criterion ignores labels or weights them unequally.
        """
        loss = metrics.get("val_loss")
        for call in self.evaluated:
            if call.result is not None and _is_result(loss, call.result):
                return call.amount
        if loss is not None and weight_of("val_loss") not in metrics and any(call.is_uneven for call in self.evaluated):
            raise ValueError(
                "`val_loss` is not what `self.criterion` returned, which leaves labels out or weights them: how much "
                f"the batch counts is unknown. Return `{weight_of('val_loss')!r}: ...` from `validate_batch`, or the "
                "number after the loss from `forward`: what the loss is the mean over. Report means over different "
                "numbers under separate names, each with its weight."
            )
        return None

    # ------------------------------------------------------------------------------------ means of an epoch

    @staticmethod
    def to_floats(tensors: list[torch.Tensor]) -> list[float]:
        return read_tensors(tensors)

    def new_meters(self) -> AverageMeterCollection:
        return AverageMeterCollection(self.to_floats, metric_objects.capture, metric_objects.remember_all)

    def mean_over_workers(self, name: str, *parts: Mapping[str, Any]) -> float | None:
        """Return the weighted mean of a metric over all workers; None if no worker has reported the metric.

        All workers must call this method at the same time.

        Args:
            name: Name of the metric.
            *parts: This worker's metrics: the summary of an epoch, or one dict for each part of a batch. The mean
                weights each dict by its number of samples, unless it contains another weight.
        """
        counted = []
        for metrics in parts:
            weight = float(metrics.get(weight_of(name), metrics.get(BATCH_WEIGHT, metrics.get(NUM_SAMPLES, 1))))
            own = (float(metrics[name]) * weight, weight) if weight and name in metrics else (0.0, 0.0)
            totals = getattr(metrics, "totals", None)
            counted.append(own if totals is None else totals.get(name, own))
            if totals is not None:
                counted += [each.totals.get(name, (0.0, 0.0)) for each in self.lost]
        total, count = self.sum_over_workers(*map(sum, zip(*counted, strict=True)))
        return total / count if count else None

    def sum_over_workers(self, *values: float) -> list[float]:
        """Return, for each value, its sum over all workers. All workers must call this method at the same time."""
        if not self.world.is_distributed:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.context.device)
        self.parallel.all_sum(tensor)
        return tensor.tolist()


def _is_result(value: Any, result: torch.Tensor) -> bool:
    """Return True if a metric's value is the tensor `result` that the criterion returned, or the number in it."""
    if isinstance(value, torch.Tensor) and value.data_ptr() == result.data_ptr():
        return True
    own = result.item()
    return as_number(value) == own or (isinstance(value, float) and math.isnan(value) and math.isnan(own))


def _unknown_count(drawn: int, found: int) -> ValueError:
    return ValueError(
        f"a batch was made of {drawn} samples and has {found}, as by a `collate_fn` that leaves some out, makes "
        "several of one, or joins them; how many count is unknown. Say what the loss is the mean over: return `output, "
        "loss, len(target)` from `forward`; or in your own `train_batch` call `self.backward(loss, "
        "weight=len(target))` and return `num_samples`, as from your own `validate_batch`. Or leave samples out in the "
        "dataset."
    )


def weights_of(size: Mapping[str, Any], **amounts: Any) -> dict[str, Any]:
    """Return the weights of metrics whose weight differs from the weight of their batch.

    The caller adds the returned entries to the batch's metrics.

    Args:
        size: Dict with the batch's number of samples, and with its weight if it has one.
        amounts: Weight of each metric, by the metric's name; None for the batch's weight.
    """
    usual = size.get(BATCH_WEIGHT, size[NUM_SAMPLES])
    are_special = {name: isinstance(each, torch.Tensor) or each not in (None, usual) for name, each in amounts.items()}
    return {weight_of(name): amounts[name] for name, is_special in are_special.items() if is_special}
