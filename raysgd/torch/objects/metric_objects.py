"""Support for torchmetrics: each worker's metric accumulates data, and one value is computed from all of them.

Up to rounding, the merged states of all workers give the same value as a single metric that has seen all data. The mean
of the workers' values would differ: the F1 score, AUROC or correlation of all data is not the mean of these values over
parts of the data.

A `MetricState` is detached from the graph, on the CPU, and never communicates. It can be pickled, sent to the driver
and merged there.
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
    """A copy of the state of a metric.

    Merging only collects states; they are reduced when the value is computed. So the value does not depend on the
    grouping in which states were merged, even for states that torchmetrics does not reduce.

    Attributes:
        parts: Copied metrics, one for each call to `capture`, in merge order.
    """

    parts: tuple[Metric, ...]

    def value(self) -> Any:
        """Compute the metric over all data in this state.

        Returns:
            A float for a scalar result, (nested) lists for other tensors, and a dict or list of these for a metric that
            returns a dict, list or tuple.
        """
        return _plain(_joined(self.parts).compute())

    def merged_with(self, others: Sequence[MetricState], /) -> MetricState:
        """Return a state with the data of this state, followed by the data of `others`, in order."""
        return MetricState(tuple(part for state in (self, *others) for part in state.parts))


def capture(metric: Metric) -> MetricState:
    """Copy the state of a metric, then reset the metric for the next epoch.

    Args:
        metric: A torchmetrics metric on any device. The metric's built-in synchronization between processes is not
            used.

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
    """Save the states of metrics that are attributes of the given objects. Return a function that restores them.

    Metrics inside modules, lists, tuples and dicts are included. A metric that was reset in the meantime is not
    restored.
    """
    return remember_all(_held_by_any(holders))


def reset(*holders: Any) -> None:
    """Reset the torchmetrics metrics that are attributes of the given objects."""
    for metric in _held_by_any(holders):
        metric.reset()


@contextmanager
def set_aside(*holders: Any) -> Iterator[None]:
    """Reset the metrics in the holders' attributes, and restore their states at the end of the `with` block."""
    metrics = [inner for metric in _held_by_any(holders) for inner in _metrics_in(metric)]
    kept = [(metric, _contents(metric)) for metric in metrics]
    reset(*holders)
    try:
        yield
    finally:
        for metric, contents in kept:
            _put_back(metric, contents)


def remember_all(metrics: Iterable[Metric]) -> Callable[[], None]:
    """Save the states of metrics and the metrics nested in them, and return a function that restores them."""
    inner_metrics = {id(inner): inner for metric in metrics for inner in _metrics_in(metric)}
    kept = [(metric, _contents(metric)) for metric in inner_metrics.values()]

    def forget_the_rest() -> None:
        for metric, contents in kept:
            if metric.update_count >= contents["_update_count"]:
                _put_back(metric, contents)

    return forget_the_rest


def _put_back(metric: Metric, contents: dict[str, Any]) -> None:
    for name, value in contents.items():
        setattr(metric, name, value)


def _held_by_any(holders: Sequence[Any]) -> Iterable[Metric]:
    return _held_by([vars(holder) for holder in holders]).values() if "torchmetrics" in sys.modules else ()


def _held_by(value: Any) -> dict[int, Metric]:
    """Return the metrics in a nested structure, by object ID."""
    if isinstance(value, torch.nn.Module):
        return {id(metric): metric for metric in _metrics_in(value)}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return {key: metric for item in items for key, metric in _held_by(item).items()}


def _contents(metric: Metric) -> dict[str, Any]:
    """Copy a metric's attributes that updates can change. Copy lists shallowly, as updates only append to them."""
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
    """Yield a metric and the metrics nested in it. The state of a wrapper metric is in these nested metrics."""
    metric_cls = _metric_class()
    return (module for module in metric.modules() if isinstance(module, metric_cls))


def _prepare_for_copying(metric: Metric) -> None:
    """Detach a metric's states from their autograd graphs and remove cached values, so that neither is copied."""
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
    """Return a new metric with the data of all parts."""
    # Skip parts without data: they hold default values, which some reductions would count as data.
    used = [part for part in parts if _saw_anything(part)]
    joined = copy.deepcopy(used[0] if used else parts[0])
    if len(used) > 1:
        for target, *sources in zip(_metrics_in(joined), *map(_metrics_in, used), strict=True):
            _fill(target, sources)
    return joined


def _saw_anything(metric: Metric) -> bool:
    return any(inner.update_called for inner in _metrics_in(metric))


def _fill(target: Metric, sources: Sequence[Metric]) -> None:
    """Set the state of a metric to the combined state of metrics of the same type."""
    sources = [source for source in sources if source.update_called] or sources
    if type(target).merge_state is not _metric_class().merge_state:
        _fill_by_its_own_rule(target, sources)
    else:
        # The default `merge_state` merges two metrics at a time, rejects metrics with `full_state_update`, and
        # weights a "mean" state by the updates of one side only. Applying the reductions has none of these limits.
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
    """Reduce one state of several metrics as torchmetrics does across processes, but weight means by update counts."""
    utilities = require("torchmetrics.utilities.data", "metrics")
    if any(isinstance(state, list) for state in states):
        return [item for state in states for item in (state if isinstance(state, list) else [state])]
    if reduction is utilities.dim_zero_cat:
        return torch.cat([state.reshape(1) if state.ndim == 0 else state for state in states])
    stacked = torch.stack(states)
    num_updates = sum(counts)
    if reduction is utilities.dim_zero_mean and num_updates:
        weights = torch.tensor(counts, dtype=torch.float64).reshape(-1, *[1] * (stacked.ndim - 1))
        return ((stacked * weights).sum(dim=0) / num_updates).to(_float_type_of(stacked))
    return stacked if reduction is None else reduction(stacked)


def _float_type_of(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()


def _plain(value: Any) -> Any:
    """Convert the result of a metric to numbers, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.ndim else float(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
