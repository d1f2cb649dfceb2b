"""The progress of a running call, and what its steps measured, for those who listen in the driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from raysgd._numbers.meters import NUM_SAMPLES, MetricSummary
from raysgd._numbers.results import CallProgress, ProgressKind, as_number, merge
from raysgd.callbacks.monitors import summaries_of_steps
from raysgd.engine.controller import ElasticController
from raysgd.history import readable
from raysgd.messages import replica_calls
from raysgd.messages.epochs import EpochAnswer, EpochRequest

logger = logging.getLogger(__name__)

Listener = Callable[[CallProgress], None]

_ASK_FOR_STEPS_S = 1.0


class ProgressListeners:
    """Asks rank 0 how far it is while a call runs, if there is a listener.

    Args:
        controller: Has the workers.

    Attributes:
        listeners: Called some ten times a second, and once when the call has returned.
    """

    def __init__(self, controller: ElasticController) -> None:
        self._controller = controller
        self.listeners: list[Listener] = []

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Listens until the end of the block."""
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)

    @property
    def on_wait(self) -> Callable[[], None] | None:
        """The function that the driver calls while it waits; None where no one listens."""
        return self._tell_of_now if self.listeners else None

    def tell_end(self, kind: ProgressKind, asked: EpochRequest, answer: EpochAnswer) -> None:
        """Tells that a call has returned."""
        numbers = {
            name: number for name, value in (answer.metrics or {}).items() if (number := as_number(value)) is not None
        }
        loss = numbers.get("last_train_loss" if kind == "train" else "val_loss")
        epochs = answer.epoch_idx, asked.info.get("num_epochs")
        self.tell(CallProgress(answer.num_steps, answer.num_steps, *epochs, loss, kind, numbers, is_done=True))

    def _tell_of_now(self) -> None:
        progress = progress_of(self._controller)
        if progress is not None:
            self.tell(progress)

    def tell(self, progress: CallProgress) -> None:
        """Tells all listeners."""
        for listener in tuple(self.listeners):
            listener(progress)


def progress_of(controller: ElasticController) -> CallProgress | None:
    """Return how far rank 0 is in a running call; None if it does not answer at once.

    A heartbeat must not wait for the answer: that reads metrics, which may wait for the device, and that for a rank.
    """
    transfer = controller.ensure_group().fetch(0, replica_calls.progress)
    try:
        progress: CallProgress | None = transfer.result(1.0)
    except Exception as error:  # news are not worth a failure; the call itself reports the loss of the worker
        logger.debug("no news of the running call: %s", error)
        return None
    return progress


class StepListener:
    """A listener that asks all ranks what `StepMetrics` has measured, once a second and at the end of a call.

    Args:
        controller: Has the workers.
        tell: Called with a step that all ranks have reached, and the metrics of the steps since the one before, as
            means over all ranks. No step comes twice.
    """

    def __init__(self, controller: ElasticController, tell: Callable[[int, dict[str, float]], None]) -> None:
        self._controller, self._tell = controller, tell
        self._last_step, self._asked_at = 0, 0.0

    def __call__(self, progress: CallProgress) -> None:
        if progress.kind != "train" or not (progress.is_done or time.monotonic() > self._asked_at + _ASK_FOR_STEPS_S):
            return
        group = self._controller.ensure_group()
        asked = [group.fetch(rank, summaries_of_steps, self._last_step) for rank in range(len(group))]
        try:
            told: list[Mapping[int, MetricSummary]] = [each.result(1.0) for each in asked]
        except Exception as error:  # they are asked again, unless the worker is lost
            logger.debug("no news of the steps: %s", error)
            told = [{}]
        self._asked_at = time.monotonic()
        until = (max if progress.is_done else min)(max(each, default=0) for each in told)
        for step in sorted({step for each in told for step in each if self._last_step < step <= until}):
            self._last_step = step
            rows = [row for each in told if (row := each.get(step)) and row[NUM_SAMPLES]]  # padding has no mean
            self._tell(step, readable.chosen(merge(rows), None))
