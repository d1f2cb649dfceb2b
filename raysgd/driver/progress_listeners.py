"""The progress of a running call, for those who listen in the driver: workers only count."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raysgd._numbers.results import CallProgress, ProgressKind, as_number
from raysgd.engine.controller import ElasticController
from raysgd.messages import replica_calls
from raysgd.messages.epochs import EpochAnswer, EpochRequest

logger = logging.getLogger(__name__)

Listener = Callable[[CallProgress], None]


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
