"""`BatchMetrics`: the part of an operator's private state that measures batches.

In a training call, the metrics of a batch wait in `meters` until the optimizer step of the batch is complete. The
default `train_batch` passes its metrics to `report` before the backward pass, because each rank sends its sums to the
other ranks together with the gradients. The dict that `train_batch` returns goes to `end_batch`. At the boundary after
the step, the worker's `TrainingCall` counts the metrics that wait, or drops them if the step was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raysgd.core.numbers.meters import BATCH_WEIGHT, NUM_SAMPLES, AverageMeterCollection, weight_of
from raysgd.core.numbers.results import as_number
from raysgd.core.text.tracebacks import defined_at
from raysgd.torch.data import batches
from raysgd.torch.objects import metric_objects
from raysgd.torch.objects.criteria import LossCall, LossCalls
from raysgd.torch.objects.models import read_tensors
from raysgd.torch.operator.settings import OperatorContext
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.strategy import Strategy
from raysgd.trainer.worker.operator import Internals
from raysgd.utils import IS_PADDING


class BatchMetrics(Internals):
    """Counts the samples of batches, weights their metrics, and holds the metrics back until their step is complete.

    Attributes:
        parallel: Strategy, such as DDP, that keeps the workers' models in sync.
        sync: Averages the gradients of each step. Its `leg` tracks the current batch, also of a validation.
        loss_calls: Notifies listeners of calls to the criterion.
        evaluated: Calls to the criterion in the current validation batch whose results are means over labels.
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
            self.callbacks.note_batch(self._operator, pending, leg.plan.sync_gradients)
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
