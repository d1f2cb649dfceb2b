"""`TorchInternals`: the library's private state for a `TrainingOperator`.

It is stored in the operator's attribute `_raysgd`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from raysgd.core.arrays.ray_batches import BatchForm
from raysgd.core.numbers.meters import BATCH_WEIGHT, NUM_SAMPLES, AverageMeterCollection, weight_of
from raysgd.core.numbers.results import as_number
from raysgd.core.text.frames import defined_at
from raysgd.torch.constants import SCHEDULER_STEP, USE_FP16
from raysgd.torch.data import batches
from raysgd.torch.data.ray_tensors import as_batch
from raysgd.torch.objects import hyperparameters, metric_objects
from raysgd.torch.objects.criteria import LossCall, LossCalls
from raysgd.torch.objects.hyperparameters import Hyperparameters
from raysgd.torch.objects.moving import read_tensors
from raysgd.torch.objects.precision import warn_of_short_weights
from raysgd.torch.operator.registrar import RegisteredData, RegisteredObjects, register
from raysgd.torch.operator.settings import OperatorContext
from raysgd.torch.operator.trained_parts import Noted, TrainedParts
from raysgd.torch.step.gradients import Gradients
from raysgd.torch.step.optimizer_hooks import OptimizerHooks
from raysgd.trainer.messages.prediction import HAS_TARGET
from raysgd.trainer.worker.data.around_batch import note, set_apart
from raysgd.trainer.worker.operator import Internals, required
from raysgd.utils import IS_PADDING

_NOTHING = nullcontext()


class OptimizerChoice:
    """Determines which optimizers the operator's `backward` or `optimizer_step` acts on.

    If user code passes the argument `optimizer`, the method acts on these optimizers. Otherwise, if one of the
    library's methods has called it, such as the default `train_batch`, it acts on the optimizer that the library's
    method has chosen. Otherwise, it acts on `self.optimizer`, provided that only one optimizer is registered.

    Args:
        default: Function that returns the operator's `self.optimizer`, and raises if the operator has none.

    Attributes:
        registered: All registered optimizers.
    """

    def __init__(self, default: Callable[[], Any], registered: Sequence[Any] = ()) -> None:
        self.registered = registered
        self._default = default
        self._acting: Any = None

    def acting_on_usual(self) -> AbstractContextManager[None]:
        """Let `backward` and `optimizer_step` act on `self.optimizer` in the `with` block.

        If user code passes the argument `optimizer`, this argument takes precedence.
        """
        return self.acting_on(self._default()) if len(self.registered) > 1 else _NOTHING

    @contextmanager
    def acting_on(self, optimizer: Any) -> Iterator[None]:
        """Let `backward` and `optimizer_step` act on an optimizer in the `with` block.

        If user code passes the argument `optimizer`, this argument takes precedence. A user's override of one of these
        methods may lack the parameter `optimizer`. It thus also acts on the right optimizer.
        """
        before, self._acting = self._acting, optimizer
        try:
            yield
        finally:
            self._acting = before

    def chosen(self, method: str, given: Any) -> list[Any]:
        """Return the optimizers that a method acts on.

        Args:
            method: Name of the method, for errors.
            given: Value of the method's argument `optimizer`: an optimizer, a list of optimizers, or None.

        Raises:
            ValueError: It is unclear which optimizers the method should act on.
        """
        if given is not None:
            chosen = list(given) if isinstance(given, list | tuple) else [given]
            if not chosen or not all(hasattr(each, "zero_grad") and hasattr(each, "step") for each in chosen):
                raise ValueError(
                    f"`optimizer={given!r}`: pass an optimizer that `register` returned, or a list of them."
                )
            return chosen
        if self._acting is not None:
            return [self._acting]
        num_registered = len(self.registered)
        if num_registered > 1:
            arguments = "loss, " if method == "backward" else ""
            raise ValueError(
                f"`self.{method}` was called without `optimizer`, and {num_registered} optimizers are registered: pass "
                f"the one that it is for, as in `self.{method}({arguments}optimizer=self.optimizer)`, or a list of "
                "them. The gradients of the others would add up."
            )
        return [self._default()]

    def bystanders(self, given: Any, chosen: list[Any]) -> list[Any]:
        """Return the optimizers, apart from the chosen one, whose gradients `backward` must also clear.

        If user code passed no optimizer to `backward`, its loss is the only loss of the batch, and may have gradients
        for parameters of all registered optimizers.

        Args:
            given: Argument `optimizer` of `backward`. If it is not None, the result is an empty list.
            chosen: Optimizers that `backward` acts on.
        """
        registered = () if given is not None else self.registered
        return [each for each in registered if each is not chosen[0]] if len(registered) > 1 else []


class TorchInternals(Internals):
    """The library's private state for a `TrainingOperator`.

    Attributes:
        registered: Models, optimizers, criterion and schedulers that the operator registered.
        data: Data loaders that the operator registered.
        scheduler_step_freq: When the library steps schedulers: "batch", "epoch", "manual" or None.
        precision: Numeric precision of the training.
        parallel: Strategy, such as DDP, that keeps the workers' models in sync. Its attribute `leg` tracks the part of
            the running call that this worker group runs. While batches are trained, the attribute `place` of this
            object refers to the same `Leg`.
        choice: Determines which optimizers `backward` and `optimizer_step` act on.
        trained: Records frozen parameters and optimizers' parameter groups; None before the end of `setup`.
        remade: Frozen parameters that snapshots and checkpoints omit; None unless the operator sets `remakes_frozen`.
        loss_calls: Notifies listeners of calls to the criterion.
        hooks: Clips gradients before optimizers step, even if user code calls an optimizer's `step`.
        gradients: Computes gradients and steps optimizers.
        chosen: Hyperparameters of the optimizers, such as learning rates, that `setup` chose.
        follows_rate: True if the optimizers' learning rates were adjusted when the config last changed.
        evaluated: Calls to the criterion in the current validation batch whose results are means over labels.
    """

    context: OperatorContext

    def __init__(self, operator: Any, config: dict[str, Any], context: OperatorContext) -> None:
        super().__init__(config, context)
        self._operator = operator
        self.data = RegisteredData()
        self.choice = OptimizerChoice(partial(required, operator, "optimizer"))
        self._keep(RegisteredObjects())
        self.scheduler_step_freq = context.settings.scheduler_step_freq
        self.precision, self.parallel = context.precision, context.parallel
        options = context.settings.step_options
        self.hooks = OptimizerHooks(context.precision, options, operator, context.parallel, self.callbacks)
        self.chosen: list[Hyperparameters] = []
        self.follows_rate = False
        self._reported: dict[str, Any] | None = None  # what `report` returned in the current batch
        self._counts_ahead = False
        self.evaluated: list[LossCall] = []
        self.loss_calls = LossCalls()
        self.gradients = Gradients(context.precision, context.parallel, self.hooks, self.once)
        self.hooks.check_labels = self.gradients.check_labels
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
        if self._operator.remakes_frozen:
            self.parallel.shares_frozen = False
        register(self._operator, self.context, given, self.registered, self._keep)
        self.hooks.watch(self.registered.optimizers)
        return self.registered.returned

    def _keep(self, registered: RegisteredObjects) -> None:
        self.registered, self.choice.registered = registered, registered.optimizers

    def begin_training(self, counts_ahead: bool = False) -> None:
        """Prepare for training at the end of `setup`. From now on, the gradients of frozen parameters are not averaged.

        Args:
            counts_ahead: True to add a batch's metrics to the epoch's metrics before the batch's backward pass. This
                requires that no user code changes the metrics that `train_batch` returns.
        """
        self._counts_ahead = counts_ahead
        self.trained = TrainedParts(self.registered)
        self.parallel.rewrap(self.registered.wrapped, is_agreed=True)
        if self._operator.remakes_frozen:
            self._leave_out_frozen()
        if self.world.rank == 0:
            warn_of_short_weights(self.registered.optimizers, type(self._operator).__name__)

    def _leave_out_frozen(self) -> None:
        """Check that all ranks have the same frozen parameters, then omit them from snapshots and checkpoints.

        Raises:
            ValueError: The ranks' frozen parameters differ, or the models are sharded.
        """
        from raysgd.torch.objects.remade import RemadeParameters

        name = type(self._operator).__name__
        if self.parallel.is_sharded:
            raise ValueError(
                f'`{name}.remakes_frozen = True` cannot work with `strategy="fsdp"`, where each worker has a part of '
                'what is frozen and reads the parts of checkpoints itself. Remove it, or use "ddp".'
            )
        self.remade = RemadeParameters(self.registered.trained, type(self._operator))
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

    def parts_of_forward(self, returned: Any) -> tuple[Any, torch.Tensor, Any]:
        """Split the return value of `forward` into output, loss and weight. Log the metrics in it, if any."""
        if type(returned) is tuple and len(returned) == 2 and isinstance(returned[1], torch.Tensor):
            return *returned, None  # the default `forward` returns this form
        parts, metrics = batches.without_metrics(returned)
        for name, value in metrics.items():
            note(self.logged, name, value)
        return batches.parts_of_forward(parts, type(self._operator))

    def info_of_call(self, num_steps: int | None, epoch_idx: int) -> dict[str, Any]:
        operator = self._operator
        told = {USE_FP16: bool(self.fp16), SCHEDULER_STEP: operator.scheduler_step_freq}
        return {**super().info_of_call(num_steps, epoch_idx), **told}

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples of a batch.

        Raises:
            ValueError: The number is unclear, because the loader read a different number of samples for the batch.
        """
        num_samples, found = self._sizes_of(batch)
        if found != num_samples:
            raise _unknown_count(num_samples, found)
        return num_samples

    def counts_of(self, features: Sequence[Any], target: Any, weight: Any) -> dict[str, Any]:
        """Return a dict with the number of samples of a batch and, if it has one, the batch's weight.

        Args:
            features: Inputs of the batch.
            target: Target of the batch.
            weight: Weight that `forward` returned, or None. Without a weight, if the number of samples is unknown as
                well, the batch is weighted by its number of labels, provided that the criterion averages over labels.

        Raises:
            ValueError: The batch has no weight, and its numbers of samples and labels are unknown.
        """
        num_samples, found = self._sizes_of((*features, target))
        if weight is None and found != num_samples:
            if len(self.place.batch.amounts) != 1 or self.logged:
                raise _unknown_count(num_samples, found)
            self.place.batch.has_uncounted = True  # set to False later if the loss is the criterion's return value
        counts = {NUM_SAMPLES: num_samples}
        return counts if weight is None else {**counts, BATCH_WEIGHT: weight}

    def _sizes_of(self, batch: Any) -> tuple[int, int]:
        """Return how many samples the loader read for a batch, and how many samples the batch contains.

        The two numbers differ if a `collate_fn` adds or omits samples. For a padding batch, and if it is unknown how
        many samples the loader read, both numbers are how many the batch contains.
        """
        drawn = self.place.batch.num_samples if self.place is not None else None
        if drawn:
            return drawn, batches.samples_of(batch, drawn)
        found = batches.count_samples(batch)
        return found, found

    def evaluate(self, batch: Any) -> tuple[Any, Any, list[LossCall], dict[str, Any]]:
        """Run `forward` on a validation batch.

        Returns:
            - The predictions.
            - The target.
            - Records of the calls to PyTorch's losses that the criterion made.
            - A dict with `val_loss`, the number of samples, and the batch's weight if `forward` returned one.
        """
        operator, comparisons = self._operator, list[LossCall]()
        features, target = operator.prepare_batch(batch)
        noting = self.loss_calls.on(self.criterion, comparisons.append)
        with operator.timers.record("eval_fwd"), self.precision.forward(), noting:
            output, loss, weight = self.parts_of_forward(operator.forward(features, target))
        metrics = {"val_loss": loss.detach(), **self.counts_of(features, target, weight)}
        return batches.prediction(output), target, comparisons, metrics

    def begin_batch(self) -> None:
        if self.logged:
            set_apart(self)
        if self.place is not None and self.place.batch.amounts:
            self.place.batch.amounts = []
        self.loss_calls.forget_copy()
        self.evaluated = []

    def report(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Complete the metrics of the default `train_batch` before its backward pass.

        In the default training loop, also add the metrics to the epoch's metrics, as pending. During the backward pass,
        each rank sends the sums of its epoch's metrics to the other ranks together with the gradients, and these sums
        must include the current batch. Pending metrics become final once the optimizer step is complete.
        """
        if not self._counts_ahead or self.place is None:
            return metrics
        self._reported = metrics = self.completed(metrics, None)
        if not self.place.batch.is_padding:
            values = dict(metrics)
            self.latest_metrics = metrics
            self.meters.hold(values, values.pop(NUM_SAMPLES))
        return metrics

    def end_batch(self, metrics: Any, batch: Any) -> None:
        """End a training batch. Add the metrics that `train_batch` returned to the epoch's metrics, as pending.

        If `report` has already added these metrics, they are not added again. The batch counts in the operator's
        `global_step` at once, but pending metrics become final only once the training loop requests the next batch.
        """
        leg, reported, self._reported = self.parallel.leg, self._reported, None
        if leg.batch.is_waiting:  # `train_batch` ran no backward pass
            leg.skip()
        waits = reported is not None and metrics is reported and not self.logged
        if not waits:
            metrics = self.completed(metrics, batch)
        elif leg.batch.is_by_samples:
            self._check_count(metrics[NUM_SAMPLES])
        if not leg.batch.is_padding:
            if not waits:
                if reported is not None:
                    self.meters.held.pop()
                self.meters.hold(*self.values_and_weight(metrics, "train_batch"))
            if BATCH_WEIGHT in metrics:
                self.gradients.compare_weight(metrics, type(self._operator).__name__)
        if self.callbacks.noting_batches:
            self.callbacks.note_batch(self._operator, None if leg.batch.is_padding else metrics, leg.batch.is_boundary)
        self._operator.global_step += leg.batch.is_last_part

    def note_amount(self, comparison: LossCall) -> None:
        """Record a call to the criterion in a validation batch, if the call's result is a mean over labels."""
        if comparison.amount is not None:
            self.place.batch.amounts.append(comparison.amount)
            self.evaluated.append(comparison._replace(output=None, target=None))  # do not keep large tensors in memory

    def completed(self, metrics: Any, batch: Any) -> Any:
        if self.place is not None and metrics == {} and not (self.logged or self.place.batch.is_by_samples):
            return {NUM_SAMPLES: self._sizes_of(batch)[0]}  # `train_batch` skipped the batch and returned no metrics
        if self.logged or not isinstance(metrics, Mapping) or NUM_SAMPLES not in metrics:  # entries are missing
            metrics = super().completed(metrics, batch)
        if self.place is None or not isinstance(metrics, Mapping):
            return metrics
        amounts = self.place.batch.amounts
        if self.place.batch.is_by_samples:
            self._check_count(metrics[NUM_SAMPLES])
        if not amounts:
            return metrics
        counts_alike = len(amounts) == 1 and type(amounts[0]) is int and amounts[0] == metrics[NUM_SAMPLES]
        return metrics if counts_alike else self._weighted(metrics)

    def _check_count(self, num_samples: Any) -> None:
        """Raise if `train_batch` returned a `num_samples` that is not the weight used for the gradients."""
        batch = self.place.batch
        counts = self.place.has_several_batches and not batch.is_padding
        if counts and num_samples != batch.samples is not None:
            raise ValueError(
                f"`{type(self._operator).__name__}.train_batch` returned `num_samples` {num_samples}, and gradients "
                f"count by the {batch.samples} samples of the batch: call `self.backward(loss, weight=num_samples)` "
                "with what the loss is the mean over, or return as many samples as the batch has."
                f"{defined_at(type(self._operator), 'train_batch')}"
            )

    def _weighted(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the weights of losses that are means over labels instead of samples to a batch's metrics."""
        if BATCH_WEIGHT in metrics:
            return metrics
        if self.evaluated:
            return {**weights_of(metrics, val_loss=self._amount_of(metrics)), **metrics}
        first, *others = self.place.batch.amounts
        mean = sum(others, first) / (1 + len(others)) if others else first
        return {**weights_of(metrics, train_loss=mean if "train_loss" in metrics else None), **metrics}

    def _amount_of(self, metrics: Mapping[str, Any]) -> Any:
        """Return the number of labels over which `val_loss` is the mean; None if the criterion did not compute it.

        Raises:
            ValueError: The criterion did not compute `val_loss`, and it weights or ignores labels.
        """
        loss = metrics.get("val_loss")
        for call in self.evaluated:
            if _is_result(loss, call.result):
                return call.amount
        if loss is not None and weight_of("val_loss") not in metrics and any(call.is_uneven for call in self.evaluated):
            raise ValueError(
                "`val_loss` is not what `self.criterion` returned, which leaves labels out or weights them: how much "
                f"the batch counts is unknown. Return `{weight_of('val_loss')!r}: ...` from `validate_batch`, or the "
                "number after the loss from `forward`: what the loss is the mean over. Report means over different "
                "numbers under separate names, each with its weight."
            )
        return None

    def info_of_batch(self, batch_idx: int) -> dict[str, Any]:
        """Return the entries that the library adds to the `batch_info` of a training batch."""
        is_padding = self.parallel.leg.batch.is_padding
        return {"batch_idx": batch_idx, "global_step": self._operator.global_step, IS_PADDING: is_padding}

    @staticmethod
    def to_floats(tensors: list[torch.Tensor]) -> list[float]:
        return read_tensors(tensors)

    def new_meters(self) -> AverageMeterCollection:
        return AverageMeterCollection(self.to_floats, metric_objects.capture, metric_objects.remember_all)

    def predict(self, batch: Any, info: Mapping[str, Any]) -> Any:
        """Call the model on the inputs of a batch and return its predictions. The default `predict_batch` does this."""
        operator, model = self._operator, required(self._operator, "model")
        features = batches.inputs(operator.prepare_batch, batch, info.get(HAS_TARGET, False), model)
        with operator.timers.record("predict_fwd"), self.precision.forward():
            output = batches.call_model(model, features)
        return batches.prediction(output)

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
        sums: list[float] = tensor.tolist()
        return sums


def _is_result(value: Any, result: torch.Tensor) -> bool:
    """Return True if a metric's value is the tensor `result` that the criterion returned, or equals its number."""
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


def weights_of(counts: Mapping[str, Any], **amounts: Any) -> dict[str, Any]:
    """Return the weights of metrics whose weight differs from the weight of their batch.

    The caller adds the returned entries to the batch's metrics.

    Args:
        counts: Dict with the batch's number of samples, and with its weight if it has one.
        amounts: Weight of each metric, by the metric's name; None for the batch's weight.
    """
    usual = counts.get(BATCH_WEIGHT, counts[NUM_SAMPLES])
    are_special = {name: isinstance(each, torch.Tensor) or each not in (None, usual) for name, each in amounts.items()}
    return {weight_of(name): amounts[name] for name, is_special in are_special.items() if is_special}
