"""Collects the metrics of an epoch: values that a `LightningModule` returns from its steps or logs with `self.log`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from raysgd.core.arguments import is_integer
from raysgd.core.arrays import trees
from raysgd.core.numbers.meters import AverageMeterCollection, MetricSummary, weight_of
from raysgd.trainer.worker.replica_state import check_count, require
from raysgd.utils import NUM_SAMPLES

_AGGREGATES = {"min": "MinMetric", "max": "MaxMetric", "sum": "SumMetric"}


class EpochValues:
    """Collects the metrics that a `LightningModule` reports in one epoch.

    Args:
        loss_name: Name under which the loss is reported, such as "train_loss".
        keeps_outputs: True to store what `training_step` or `validation_step` returns for each batch, because a hook
            of the module needs all these outputs at the end of the epoch.

    Attributes:
        outputs: What the module's step returned for each batch so far, without padding batches and without None. Empty
            if `keeps_outputs` is False.
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
        """Start a new batch. Values that the module logs from now on belong to this batch.

        Args:
            is_counted: False for a padding batch, which repeats samples. Its values are discarded.
        """
        self.of_batch = {}
        self._is_in_batch, self._is_counted = True, is_counted

    def begin_values_of_epoch(self) -> None:
        """Declare that all batches are done. Values that the module logs from now on belong to the epoch."""
        self._is_in_batch, self._is_counted = False, True

    def metrics_of(self, output: Any) -> dict[str, Any]:
        """Return the metrics of the current batch: numbers in the step's `output`, and values that the module logged.

        With `keeps_outputs`, also store the output.
        """
        if self._keeps_outputs and self._is_counted and output is not None:
            self.outputs.append(output)
        return {**numbers_in(output, self.loss_name), **self.of_batch}

    @contextmanager
    def listening_to(self, module: Any) -> Iterator[None]:
        """Receive the values that the module passes to `self.log` and `self.log_dict` during the `with` block."""

        # Assign plain functions. A deep copy of the module would also copy this object if these were bound methods.
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
        """Return the metrics of the epoch: averages over batches, and values that the module logged outside of batches.

        Args:
            meters: Meters with the metrics of the batches.
            fresh: Empty meters, to which this method adds the values that the module logged outside of batches.
        """
        batches = meters.summary()
        if not self._of_epoch:
            return batches
        fresh.update(self._of_epoch, n=meters.n or 1)  # weight these values by the number of samples in the epoch
        once = fresh.summary()
        values = {**batches, **{name: once[name] for name in self._of_epoch}}
        return MetricSummary(values, {**batches.totals, **once.totals}, {**batches.objects, **once.objects})


def result_of_hook(name: str, returned: Any, loss_name: str, num_samples: int | float) -> dict[str, Any]:
    """Convert the return value of an epoch-end hook to a dict of metrics.

    Args:
        name: Name of the hook, for errors.
        returned: Return value of the hook.
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
    """Return the loss in what `training_step` returned. Return None if `training_step` returned None to skip the batch.

    Raises:
        RuntimeError: `training_step` returned a dict without a loss.
        TypeError: `training_step` returned neither a tensor, a dict, nor None.
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
    """Return the output of a `training_step` with its tensors detached from the autograd graph.

    Tensors in nested dicts, lists and tuples are included.
    """
    return trees.mapped(output, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, in_lists=True)


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
    """Counts optimizer steps, as Lightning does, and the batches of the current epoch.

    With gradient accumulation or manual optimization, the number of optimizer steps differs from the number of batches.

    Args:
        counts_batches: True if a scheduler depends on the number of batches since the epoch started. Otherwise,
            `state_dict` may omit this number.

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
        """Increment the number of optimizer steps."""
        self.num_steps += 1

    def end_batch(self, num_batches: int) -> None:
        """Record the end of a batch. `num_batches` is the number of batches trained so far in all epochs."""
        self._num_batches, self._ahead = num_batches, self.num_steps - num_batches

    def batches_of_epoch(self, num_batches: int) -> int:
        """Return how many of the `num_batches` batches trained in all epochs belong to the current epoch."""
        return num_batches - self._began_at

    def state_dict(self) -> dict[str, Any]:
        """Return the counts to save. The dict is empty if they follow from the number of batches trained."""
        if not self._ahead and not (self._counts_batches and self._num_batches):
            return {}
        return {_KEY: [self._num_batches, self._ahead, self._epoch, self._began_at]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the counts that `state_dict` returned. An empty dict means one optimizer step per batch so far."""
        default = (self._num_batches, 0, self._epoch, self._began_at)
        self._num_batches, self._ahead, self._epoch, self._began_at = state.get(_KEY, default)

    @staticmethod
    def check_state(state: Any) -> None:
        """Check that `load_state_dict` can load a state.

        Raises:
            ValueError: The state is not a mapping, or the counts in it are damaged.
        """
        require(
            isinstance(state, Mapping), f"the state of `LightningOperator` is a `{type(state).__name__}`, not a dict"
        )
        counts = state.get(_KEY, (0, 0, 0, 0))
        require(isinstance(counts, list | tuple) and len(counts) == 4, f"`{_KEY}` is not a list of four counts")
        num_batches, ahead, epoch, began_at = counts
        require(is_integer(ahead), f"`{_KEY}` has a `{type(ahead).__name__}`, not a count of steps")
        for count in (num_batches, 0 if epoch is None else epoch, began_at, num_batches + ahead):
            check_count(_KEY, count)
