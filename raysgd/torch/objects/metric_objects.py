"""Metrics of torchmetrics that are accumulated on every worker and computed once, over everything.

What this module promises: the states of any number of workers, merged, give what one metric fed with all the
data gives (to float tolerance). Averaging the values of the workers does not: an F1 score, an AUROC or a
correlation of the whole is not the mean of those of its parts.

A `MetricState` is detached, on the CPU, and never communicates: it can be pickled, sent to the driver and
merged there.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from raysgd._imports import require
from raysgd._private_names import require_names

if TYPE_CHECKING:
    from torchmetrics import Metric


@dataclass(frozen=True, eq=False)
class MetricState:
    """The state of a metric, apart from the metric itself.

    Merging only collects; the states are reduced when the value is computed. So the result does not depend
    on how the merging was grouped, not even for states that torchmetrics keeps side by side instead of
    reducing them.

    Attributes:
        parts: One captured metric for each capture that went in, in the order they were merged.
    """

    parts: tuple[Metric, ...]

    def value(self) -> Any:
        """Compute the metric over everything in this state.

        Returns:
            A float for a single number, (nested) lists for tensors with dimensions, and for a metric that
            returns a dict, list or tuple a dict or list of these.
        """
        return _plain(_joined(self.parts).compute())

    def merged_with(self, others: Sequence[MetricState], /) -> MetricState:
        """Return the state of one metric that saw what this one saw, then what the others saw, in order."""
        return MetricState(tuple(part for state in (self, *others) for part in state.parts))


def capture(metric: Metric) -> MetricState:
    """Take the state out of a metric and reset the metric, ready for the next pass.

    Args:
        metric: A metric of torchmetrics, on any device. Its own synchronisation across processes is not used.

    Raises:
        TypeError: If it is anything else.
        ImportError: If torchmetrics is not installed.
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
    """Remember what the metrics among the attributes of some objects have seen; return what lets them forget the rest.

    A metric that was reset in between has nothing to forget. Metrics in modules, lists, tuples and dicts are found.
    """
    return remember_all(_held_by_any(holders))


def reset(*holders: Any) -> None:
    """Reset the metrics among the attributes of some objects."""
    for metric in _held_by_any(holders):
        metric.reset()


def remember_all(metrics: Iterable[Metric]) -> Callable[[], None]:
    """Remember what some metrics have seen, and the metrics inside them; return what lets them forget the rest."""
    inner_metrics = {id(inner): inner for metric in metrics for inner in _metrics_in(metric)}
    kept = [(metric, _contents(metric)) for metric in inner_metrics.values()]

    def forget_the_rest() -> None:
        for metric, contents in kept:
            if metric.update_count >= contents["_update_count"]:
                for name, value in contents.items():
                    setattr(metric, name, value)

    return forget_the_rest


def _held_by_any(holders: Sequence[Any]) -> Iterable[Metric]:
    return _held_by([vars(holder) for holder in holders]).values() if "torchmetrics" in sys.modules else ()


def _held_by(value: Any) -> dict[int, Metric]:
    """The metrics in a structure, by identity."""
    if isinstance(value, torch.nn.Module):
        return {id(metric): metric for metric in _metrics_in(value)}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return {key: metric for item in items for key, metric in _held_by(item).items()}


def _contents(metric: Metric) -> dict[str, Any]:
    """Copies of all that updates change; of a list that they append to, a new list of the same tensors."""
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
    """Yield the metric and those inside it: a wrapper keeps nothing itself, its children do."""
    metric_cls = _metric_class()
    return (module for module in metric.modules() if isinstance(module, metric_cls))


def _prepare_for_copying(metric: Metric) -> None:
    """Cut what cannot be copied or must not be: graphs, and values computed before now."""
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
    """Copy a metric to the CPU, without its ties to a process group."""
    # A process group can be neither copied nor pickled. This memo makes the copy hold None instead.
    memo: dict[int, Any] = {id(inner.process_group): None for inner in _metrics_in(metric)}
    clone = copy.deepcopy(metric, memo).cpu()
    for inner in _metrics_in(clone):
        inner.sync_on_compute = inner._to_sync = inner.dist_sync_on_step = False
        inner.process_group = inner.dist_sync_fn = inner.distributed_available_fn = None
    return clone


def _joined(parts: Sequence[Metric]) -> Metric:
    """Return one metric that has seen what the parts have seen; the parts stay as they are."""
    # A part that saw nothing holds only defaults, which some reductions would count as data.
    used = [part for part in parts if _saw_anything(part)]
    joined = copy.deepcopy(used[0] if used else parts[0])
    if len(used) > 1:
        for target, *sources in zip(_metrics_in(joined), *map(_metrics_in, used), strict=True):
            _fill(target, sources)
    return joined


def _saw_anything(metric: Metric) -> bool:
    return any(inner.update_called for inner in _metrics_in(metric))


def _fill(target: Metric, sources: Sequence[Metric]) -> None:
    """Give a metric the global state of metrics like it."""
    sources = [source for source in sources if source.update_called] or sources
    if type(target).merge_state is not _metric_class().merge_state:
        _fill_by_its_own_rule(target, sources)
    else:
        # The stock `merge_state` takes two metrics at a time, refuses those with `full_state_update`, and
        # weighs a "mean" state by the updates of one side only. The reductions have none of these limits.
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
    """Reduce one state of several metrics as between processes, but with means weighted by updates."""
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
    """Turn what a metric returns into numbers, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.ndim else float(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
