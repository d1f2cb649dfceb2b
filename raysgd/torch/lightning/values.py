"""Collects an epoch's metrics from a `LightningModule`: what its steps return, and what it logs with `self.log`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from raysgd.core.numbers.meters import AverageMeterCollection, MetricSummary, weight_of
from raysgd.utils import NUM_SAMPLES

_AGGREGATES = {"min": "MinMetric", "max": "MaxMetric", "sum": "SumMetric"}


class EpochValues:
    """Collects the metrics of one epoch.

    Args:
        loss_name: Name under which the loss is reported, such as "train_loss".
        keeps_outputs: True to store the steps' outputs, because a hook needs them at the end of the epoch.

    Attributes:
        outputs: Outputs of the steps so far; empty without `keeps_outputs`.
        of_batch: Values that the module logged in the current batch.
    """

    def __init__(self, loss_name: str, keeps_outputs: bool) -> None:
        self.loss_name = loss_name
        self.outputs: list[Any] = []
        self.of_batch: dict[str, Any] = {}
        self._of_epoch: dict[str, Any] = {}
        self._keeps_outputs = keeps_outputs
        self._is_in_batch, self._is_counted = False, True
        self._aggregates: dict[str, Any] = {}

    def begin_batch(self, is_counted: bool = True) -> None:
        """Start a new batch: values that are logged from now on belong to it.

        For a padding batch, `is_counted` is False, and its values are discarded.
        """
        self.of_batch = {}
        self._is_in_batch, self._is_counted = True, is_counted

    def begin_values_of_epoch(self) -> None:
        """End the batches: values that are logged from now on belong to the epoch instead of a batch."""
        self._is_in_batch, self._is_counted = False, True

    def metrics_of(self, output: Any) -> dict[str, Any]:
        """Return the metrics of the current batch: numbers in the step's output, and values that the module logged."""
        if self._keeps_outputs and self._is_counted and output is not None:
            self.outputs.append(output)
        return {**numbers_in(output, self.loss_name), **self.of_batch}

    @contextmanager
    def listening_to(self, module: Any) -> Iterator[None]:
        """Receive the values that the module passes to `self.log` and `self.log_dict` during the `with` block."""

        # Assign plain functions. With bound methods of this object, deep-copying the module would copy this object,
        # too.
        def log(
            name: str, value: Any, *_: Any, reduce_fx: Any = "mean", batch_size: int | None = None, **__: Any
        ) -> None:
            self._take(name, value, reduce_fx, batch_size)

        def log_dict(dictionary: Any, *_: Any, **options: Any) -> None:
            for name, value in dictionary.items():
                log(name, value, **options)

        module.log, module.log_dict = log, log_dict
        try:
            yield
        finally:
            del module.log, module.log_dict

    def _take(self, name: str, value: Any, reduce_fx: Any, batch_size: int | None) -> None:
        if not self._is_counted:
            return
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        kind = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
        if kind in _AGGREGATES:
            value = self._aggregated(name, kind, value)
        elif kind not in ("mean", "avg"):
            raise ValueError(f'`self.log({name!r}, reduce_fx={reduce_fx!r})`: allowed are "mean", "min", "max", "sum".')
        if not self._is_in_batch:
            self._of_epoch[name] = value
            return
        self.of_batch[name] = value
        self.of_batch.pop(weight_of(name), None)
        if batch_size is not None:
            self.of_batch[weight_of(name)] = batch_size

    def _aggregated(self, name: str, kind: str, value: Any) -> Any:
        if name not in self._aggregates:
            metric = getattr(import_module("torchmetrics"), _AGGREGATES[kind])()
            self._aggregates[name] = metric.to(value.device) if isinstance(value, torch.Tensor) else metric
        self._aggregates[name].update(value)
        return self._aggregates[name]

    def summary(self, meters: AverageMeterCollection, fresh: AverageMeterCollection) -> MetricSummary:
        """Return the epoch's metrics: averages over its batches, and values that the module logged once for the epoch.

        Args:
            meters: Meters with the metrics of the batches.
            fresh: Empty meters, to which the values that were logged once for the epoch are added.
        """
        batches = meters.summary()
        if not self._of_epoch:
            return batches
        fresh.update(self._of_epoch, n=meters.n or 1)  # weighted by the epoch's number of samples
        once = fresh.summary()
        values = {**batches, **{name: once[name] for name in self._of_epoch}}
        return MetricSummary(values, {**batches.totals, **once.totals}, {**batches.objects, **once.objects})


def result_of_hook(name: str, returned: Any, loss_name: str, num_samples: int | float) -> dict[str, Any]:
    """Convert what an epoch-end hook returned to a dict of metrics.

    Args:
        name: Name of the hook, for errors.
        returned: What the hook returned.
        loss_name: Name of the metric if the hook returned only a tensor.
        num_samples: Weight of this worker's metrics in the average over the workers.

    Raises:
        TypeError: The result is neither a tensor nor a dict.
    """
    if isinstance(returned, torch.Tensor):
        return {NUM_SAMPLES: num_samples, loss_name: returned}
    if isinstance(returned, Mapping):
        return {NUM_SAMPLES: num_samples, **returned}
    raise TypeError(f"`{name}` returned a `{type(returned).__name__}`: return a tensor, a dict of metrics, or nothing.")


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the loss in the result of `training_step`; None if the step skipped the batch.

    Raises:
        RuntimeError: The result is a dict without a loss.
        TypeError: The result is neither a tensor nor a dict.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(output, Mapping) and loss is None:
        raise RuntimeError(f'`training_step` returned a dict with {sorted(output)}: put the loss under "loss".')
    if loss is not None and not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"`training_step` returned a `{type(loss).__name__}`: return a tensor, a dict with one, or None."
        )
    return loss


def detached(output: Any) -> Any:
    """Return the output of a step, detached from the autograd graph."""
    if isinstance(output, Mapping):
        return {name: detached(value) for name, value in output.items()}
    return output.detach() if isinstance(output, torch.Tensor) else output


def numbers_in(output: Any, loss_name: str) -> dict[str, Any]:
    """Return the numeric values in a step's output by name. The loss is also returned under `loss_name`."""
    if isinstance(output, torch.Tensor):
        return {loss_name: output}
    if not isinstance(output, Mapping):
        return {}
    found = {name: value for name, value in output.items() if _is_number(value)}
    return {loss_name: found["loss"], **found} if "loss" in found else found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


_KEY = "raysgd_progress"


class LightningProgress:
    """Counts optimizer steps and the current epoch's batches. A step may need several batches.

    Args:
        counts_batches: True if a scheduler depends on the number of batches since the epoch started. Only then is this
            number saved in states.

    Attributes:
        num_steps: Number of optimizer steps, which Lightning calls the global step.
    """

    def __init__(self, counts_batches: bool) -> None:
        self.num_steps = 0
        self._counts_batches = counts_batches
        self._num_batches = self._ahead = 0
        self._epoch: int | None = None
        self._began_at = 0

    def begin_call(self, epoch: int, num_batches: int) -> None:
        """Start a call to `train`. An epoch may take several calls.

        Args:
            epoch: Index of the epoch.
            num_batches: Number of batches trained before the call, in all epochs.
        """
        if num_batches != self._num_batches:  # the operator's state was replaced, so the counts are outdated
            self._ahead, self._epoch = 0, None
        self.num_steps = num_batches + self._ahead
        if epoch != self._epoch:
            self._epoch, self._began_at = epoch, num_batches

    def count_step(self) -> None:
        """Count an optimizer step."""
        self.num_steps += 1

    def end_batch(self, num_batches: int) -> None:
        """End a batch. `num_batches` is the total number of batches, including this one."""
        self._num_batches, self._ahead = num_batches, self.num_steps - num_batches

    def batches_of_epoch(self, num_batches: int) -> int:
        """Return how many of the `num_batches` batches trained in all epochs belong to the current epoch."""
        return num_batches - self._began_at

    def state_dict(self) -> dict[str, Any]:
        """Return the counts to save. Empty if they can be computed from the total number of batches trained."""
        if not self._ahead and not (self._counts_batches and self._num_batches):
            return {}
        return {_KEY: [self._num_batches, self._ahead, self._epoch, self._began_at]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. An empty state means one step per batch so far."""
        default = (self._num_batches, 0, self._epoch, self._began_at)
        self._num_batches, self._ahead, self._epoch, self._began_at = state.get(_KEY, default)
