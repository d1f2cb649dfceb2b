"""Merges the states of the workers' torchmetrics metrics, to compute one value over the data of all workers.

Up to rounding, the merged states give the same value as a single metric that has seen all data. The mean of the
workers' values would differ: the F1 score, AUROC or correlation of all data is not the mean of these values over parts
of the data.

The state of a worker's metric is copied to a `MetricState`, which can be pickled, sent to the driver and merged there.
The copy is on the CPU, detached from the autograd graph, and does not communicate with other processes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from raysgd.core.imports import require
from raysgd.core.private_names import require_names

if TYPE_CHECKING:
    from torchmetrics import Metric


@dataclass(frozen=True, eq=False)
class MetricState:
    """A copy of the state of a metric, or the merged states of several workers' metrics.

    Merging only collects the copies. `value` then reduces all copies to one state at once. The value therefore does not
    depend on how the copies were grouped for merging, even for states that torchmetrics does not reduce.

    Attributes:
        parts: Copied metrics, one for each call to `capture`, in the order in which they were merged.
    """

    parts: tuple[Metric, ...]

    def value(self) -> Any:
        """Compute the metric over all data in this state.

        Returns:
            The result of the metric's `compute`, with a float in place of each scalar tensor. All other tensors become
            nested lists, and tuples become lists.
        """
        return _plain(_joined(self.parts).compute())

    def merged_with(self, others: Sequence[MetricState], /) -> MetricState:
        """Return a state with the data of this state, followed by the data of the states in `others`."""
        return MetricState(tuple(part for state in (self, *others) for part in state.parts))


def capture(metric: Metric) -> MetricState:
    """Return a copy of the state of a metric, and reset the metric for the next epoch.

    Args:
        metric: A torchmetrics metric on any device. Its own synchronization between processes is not used.

    Raises:
        TypeError: `metric` is not a `torchmetrics.Metric`.
        ImportError: torchmetrics is not installed.
    """
    metric_cls = _metric_class()
    if not isinstance(metric, metric_cls):
        raise TypeError(
            f"`{type(metric).__name__}` is not a metric object that can be merged across workers: allowed "
            "are instances of `torchmetrics.Metric`. Report the members of a `MetricCollection` one by one."
        )
    _prepare_for_copying(metric)
    state = MetricState((_disconnected_copy(metric),))
    metric.reset()
    return state


def remember(*holders: Any) -> Callable[[], None]:
    """Save the states of the metrics in some objects' attributes. Return a function that restores the metrics.

    Metrics inside modules, lists, tuples and dicts are included. The returned function skips metrics that were reset in
    the meantime. It detects a reset only if the metric now has fewer updates than before.

    Args:
        holders: Objects whose attributes contain the metrics.
    """
    return remember_all(_held_by_any(holders))


def reset(*holders: Any) -> None:
    """Reset the torchmetrics metrics in the attributes of the objects in `holders`."""
    for metric in _held_by_any(holders):
        metric.reset()


@contextmanager
def set_aside(*holders: Any) -> Iterator[None]:
    """Reset the metrics in some objects' attributes for the `with` block, then restore the metrics' states.

    Args:
        holders: Objects whose attributes contain the metrics.
    """
    restore = remember_all(_held_by_any(holders), also_reset=True)
    reset(*holders)
    try:
        yield
    finally:
        restore()


def remember_all(metrics: Iterable[Metric], also_reset: bool = False) -> Callable[[], None]:
    """Save the states of metrics, and of metrics nested in them. Return a function that restores the metrics.

    The returned function skips metrics that were reset in the meantime. It detects a reset only if the metric now has
    fewer updates than before.

    Args:
        metrics: The metrics.
        also_reset: True not to skip metrics that were reset.
    """
    inner_metrics = {id(inner): inner for metric in metrics for inner in _metrics_in(metric)}
    kept = [(metric, _contents(metric)) for metric in inner_metrics.values()]

    def forget_the_rest() -> None:
        for metric, contents in kept:
            if also_reset or metric.update_count >= contents["_update_count"]:
                for name, value in contents.items():
                    setattr(metric, name, value)

    return forget_the_rest


def _held_by_any(holders: Sequence[Any]) -> Iterable[Metric]:
    return _held_by([vars(holder) for holder in holders]).values() if "torchmetrics" in sys.modules else ()


def _held_by(value: Any) -> dict[int, Metric]:
    """Return the metrics in a module or in nested lists, tuples and dicts, by the metric's ID."""
    if isinstance(value, torch.nn.Module):
        return {id(metric): metric for metric in _metrics_in(value)}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return {key: metric for item in items for key, metric in _held_by(item).items()}


def _contents(metric: Metric) -> dict[str, Any]:
    """Return copies of a metric's attributes that the metric's `update` may change, by name.

    Lists are copied shallowly, because `update` only appends to lists.
    """
    kinds = (torch.Tensor, list, int, float, type(None))
    return {name: _copied(value) for name, value in vars(metric).items() if isinstance(value, kinds)}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _metric_class() -> type[Metric]:
    torchmetrics = require("torchmetrics", "metrics", "merging metric objects across workers")
    metric_cls: type[Metric] = torchmetrics.Metric
    return metric_cls


def _metrics_in(metric: torch.nn.Module) -> Iterator[Metric]:
    """Yield the metrics in a module, starting with the module itself if it is a metric.

    Metrics can be nested. For example, a wrapper metric has its state in a nested metric.
    """
    metric_cls = _metric_class()
    return (module for module in metric.modules() if isinstance(module, metric_cls))


def _prepare_for_copying(metric: Metric) -> None:
    """Detach a metric's states from the autograd graph and remove cached values, so that copies stay small."""
    for inner in _metrics_in(metric):
        require_names(inner, "_computed", "_forward_cache", "_to_sync", "_update_count", "_reductions")
        inner._computed = None
        inner._forward_cache = None
        for name, state in inner.metric_state.items():
            setattr(inner, name, _detached(state))


def _detached(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach()
    return [item.detach() if isinstance(item, torch.Tensor) else item for item in state]


def _disconnected_copy(metric: Metric) -> Metric:
    """Copy a metric to the CPU, without its connection to a process group."""
    # A process group can be neither copied nor pickled. This memo makes `deepcopy` use None instead.
    memo: dict[int, Any] = {id(inner.process_group): None for inner in _metrics_in(metric)}
    clone = copy.deepcopy(metric, memo).cpu()
    for inner in _metrics_in(clone):
        inner.sync_on_compute = inner._to_sync = inner.dist_sync_on_step = False
        inner.process_group = inner.dist_sync_fn = inner.distributed_available_fn = None
    return clone


def _joined(parts: Sequence[Metric]) -> Metric:
    """Return a new metric with the data of several metrics of the same type."""
    # Skip metrics without data, because some reductions would count their default values as data.
    used = [part for part in parts if any(inner.update_called for inner in _metrics_in(part))]
    joined = copy.deepcopy(used[0] if used else parts[0])
    if len(used) > 1:
        for target, *sources in zip(_metrics_in(joined), *map(_metrics_in, used), strict=True):
            _fill(target, sources)
    return joined


def _fill(target: Metric, sources: Sequence[Metric]) -> None:
    """Set the state of the metric `target` to the merged state of several metrics of the same type."""
    sources = [source for source in sources if source.update_called] or sources
    if type(target).merge_state is not _metric_class().merge_state:
        _fill_by_its_own_rule(target, sources)
    else:
        # Apply the metric's reductions. The default `merge_state` of torchmetrics merges only two metrics at a time,
        # rejects metrics with `full_state_update`, and weights a "mean" state by the updates of only one metric.
        counts = [source.update_count for source in sources]
        for name, reduction in target._reductions.items():
            setattr(target, name, _reduced([getattr(source, name) for source in sources], reduction, counts))
    target._update_count = sum(source.update_count for source in sources)
    target._computed = None


def _fill_by_its_own_rule(target: Metric, sources: Sequence[Metric]) -> None:
    for name, state in sources[0].metric_state.items():
        setattr(target, name, copy.deepcopy(state))
    for source in sources[1:]:
        target.merge_state(copy.deepcopy(source))


def _reduced(states: list[Any], reduction: Any, counts: list[int]) -> Any:
    """Reduce one state variable of several metrics to one value, as torchmetrics does across processes.

    Unlike in torchmetrics, a mean is weighted by the metrics' numbers of updates.

    Args:
        states: Values of the state variable in each metric.
        reduction: Reduction function of the state variable.
        counts: Number of updates of each metric.
    """
    utilities = require("torchmetrics.utilities.data", "metrics")
    if any(isinstance(state, list) for state in states):
        return [item for state in states for item in (state if isinstance(state, list) else [state])]
    if reduction is utilities.dim_zero_cat:
        return torch.cat([state.reshape(1) if state.ndim == 0 else state for state in states])
    stacked = torch.stack(states)
    num_updates = sum(counts)
    if reduction is utilities.dim_zero_mean and num_updates:
        weights = torch.tensor(counts, dtype=torch.float64).reshape(-1, *[1] * (stacked.ndim - 1))
        dtype = stacked.dtype if stacked.is_floating_point() else torch.get_default_dtype()
        return ((stacked * weights).sum(dim=0) / num_updates).to(dtype)
    return stacked if reduction is None else reduction(stacked)


def _plain(value: Any) -> Any:
    """Convert what a metric's `compute` returned to numbers, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.ndim else float(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
