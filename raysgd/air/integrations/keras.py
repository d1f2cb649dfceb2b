"""Callbacks for Keras's `model.fit` that report to the run: `ReportCheckpointCallback`, and the older `Callback` class.

Each rank reports. At the events at which weights are saved, rank 0 adds the model's weights to its report, as a
`TensorflowCheckpoint`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable as Function
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.air.checkpoint import TensorflowCheckpoint
from raysgd.air.session import get_world_rank, report
from raysgd.core.imports import require

__all__ = ["Callback", "ReportCheckpointCallback"]

EVENTS = tuple(
    f"{phase}_{edge}"
    for phase in ("epoch", "train_batch", "test_batch", "predict_batch", "train", "test", "predict")
    for edge in ("begin", "end")
)
Metrics = str | Sequence[str] | Mapping[str, str] | None

_tensorflow = require("tensorflow", extra="tf", purpose="`raysgd.air.integrations.keras`")


class _Reporting(_tensorflow.keras.callbacks.Callback):  # type: ignore[name-defined]
    """Base class of callbacks that report metrics on some Keras events, optionally with the model's weights.

    An object gets methods only for the requested events, such as `on_epoch_end`. If it had methods for batch events,
    Keras would spend time on computing the logs of every batch.

    Args:
        frequency: For each requested event, save the weights with every n-th report; 0 for never.
        metrics: The metrics to report.
    """

    def __init__(self, frequency: Mapping[str, int], metrics: Metrics) -> None:
        super().__init__()
        self._metrics, self._frequency = metrics, frequency
        self._counts: Counter[str] = Counter()
        for event in frequency:
            if event not in EVENTS:
                raise ValueError(f"`{event!r}` is not an event of Keras: allowed are {', '.join(EVENTS)}.")
            setattr(self, f"on_{event}", self._hook(event))

    def _hook(self, event: str) -> Function[..., None]:
        def hook(*args: Any, logs: Mapping[str, Any] | None = None) -> None:
            metrics = logs if logs is not None else next((each for each in args if isinstance(each, Mapping)), {})
            self._counts[event] += 1
            every = self._frequency[event]
            saves = every > 0 and self._counts[event] % every == 0 and get_world_rank() == 0
            checkpoint = TensorflowCheckpoint.from_model(self.model) if saves else None
            report(_chosen(self._metrics, metrics), checkpoint=checkpoint)

        return hook


class ReportCheckpointCallback(_Reporting):
    """Reports metrics and checkpoints while Keras trains. Pass it to `model.fit(callbacks=[...])`.

    Args:
        checkpoint_on: One or more events at which to save the weights, such as "epoch_end" or "train_end". Metrics are
            reported together with the weights.
        report_metrics_on: One or more events at which to report metrics.
        metrics: The metrics to report: Keras names, or a dict that maps your names to Keras names. Default: all.

    Raises:
        ValueError: Keras has no such event.

    Examples:
        >>> def train_loop(config):
        ...     model = make_model()  # under a strategy
        ...     model.fit(data, epochs=3, callbacks=[ReportCheckpointCallback()])
    """

    def __init__(
        self,
        checkpoint_on: str | Sequence[str] = "epoch_end",
        report_metrics_on: str | Sequence[str] = "epoch_end",
        metrics: Metrics = None,
    ) -> None:
        saves_at = _several(checkpoint_on)
        events = dict.fromkeys([*saves_at, *_several(report_metrics_on)])
        super().__init__({event: int(event in saves_at) for event in events}, metrics)


class Callback(_Reporting):
    """Reports metrics and checkpoints while Keras trains, like `ray.air.callbacks.keras.Callback`.

    Args:
        metrics: The metrics to report: Keras names, or a dict that maps your names to Keras names. Default: all.
        on: One or more events at which to report, such as "epoch_end".
        frequency: Save the weights with every `frequency`-th report; 0 for never. Pass one number for all events, or
            one number per event.

    Raises:
        ValueError: Keras has no such event, or `frequency` and `on` differ in length.
    """

    def __init__(
        self, metrics: Metrics = None, on: str | Sequence[str] = "epoch_end", frequency: int | Sequence[int] = 1
    ) -> None:
        events = _several(on)
        numbers = [frequency] * len(events) if isinstance(frequency, int) else list(frequency)
        if len(numbers) != len(events):
            raise ValueError(
                f"`frequency={frequency!r}` has {len(numbers)} numbers, and `on={on!r}` has {len(events)} events: need "
                "one number, or one for each event."
            )
        super().__init__(dict(zip(events, numbers, strict=True)), metrics)


def _several(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _chosen(metrics: Metrics, logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics to report from Keras's `logs`, under the user's names.

    Raises:
        KeyError: Keras has no metric with a requested name.
    """
    if metrics is None:
        return dict(logs)
    names = metrics if isinstance(metrics, Mapping) else {name: name for name in _several(metrics)}
    missing = [name for name in names.values() if name not in logs]
    if missing:
        raise KeyError(f"Keras has no metric {missing[0]!r} at this event. Available: {', '.join(logs) or 'none'}.")
    return {own: logs[name] for own, name in names.items()}
