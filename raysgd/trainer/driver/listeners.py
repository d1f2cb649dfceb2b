"""`ProgressListeners`: reports the progress of a call to functions in the driver, while the workers run the call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller

from raysgd.core.engine.controller import ElasticController
from raysgd.core.numbers.results import CallProgress, ProgressKind, as_number
from raysgd.exceptions import failure_logged
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest

logger = logging.getLogger(__name__)

Listener = Callable[[CallProgress], None]
StepReader = Callable[[bool], None]
"""Function that fetches the workers' records of their steps.

Its argument is True if a training call has just returned. While a call runs, the function is called about ten times a
second with False.
"""

_INSIDE_A_CALL = (
    "`on_progress` and `on_step_metrics` are called while the workers run a call, and the trainer cannot do anything "
    "else meanwhile. Validate and save in `on_epoch_trained`. To do so every 100 steps, pass "
    "`validate_every_n_steps=100` to `fit`, and `Checkpointing(every_n_steps=100)`."
)


class ProgressListeners:
    """Asks rank 0 for its progress while a call runs, and reports that progress to listeners.

    Without listeners, rank 0 is not asked. The step reader is also called while a call runs, but does not need the
    progress.

    Attributes:
        listeners: Functions that receive the progress about ten times a second, and once after the call has returned.
        step_reader: Function that fetches the workers' records of their steps, or None.
    """

    def __init__(self, controller: ElasticController) -> None:
        self._controller = controller
        self.listeners: list[Listener] = []
        self.step_reader: StepReader | None = None

    @contextmanager
    def listening(self, *listeners: Listener, step_reader: StepReader | None = None) -> Iterator[None]:
        """Report progress to these listeners too, and call this step reader, inside the block."""
        before = self.step_reader
        self.listeners += listeners
        self.step_reader = step_reader or before
        try:
            yield
        finally:
            for listener in listeners:
                self.listeners.remove(listener)
            self.step_reader = before

    @property
    def on_wait(self) -> Callable[[], None] | None:
        """Function that the driver calls repeatedly while it waits for the workers.

        None if there are neither listeners nor a step reader.
        """
        return self._on_wait if self.listeners or self.step_reader else None

    def _on_wait(self) -> None:
        if self.listeners:
            self._tell_of_now()
        self._read_steps(is_done=False)

    def _read_steps(self, is_done: bool) -> None:
        if self.step_reader is not None:
            with self._controller.turns.closed(_INSIDE_A_CALL):
                self.step_reader(is_done)

    def tell_end(self, kind: ProgressKind, options: EpochRequest, answer: EpochAnswer) -> None:
        """Report to the listeners that a call has returned. After a training call, report this to the step reader too.

        Args:
            kind: The type of call.
            options: Options of the call.
            answer: Rank 0's answer.
        """
        if self.listeners:
            numbers = {
                name: number
                for name, value in (answer.metrics or {}).items()
                if (number := as_number(value)) is not None
            }
            loss = numbers.get("last_train_loss" if kind == "train" else "val_loss")
            epochs = answer.epoch_idx, options.info.get("num_epochs")
            self.tell(CallProgress(answer.num_steps, answer.num_steps, *epochs, loss, kind, numbers, is_done=True))
        if kind == "train":
            self._read_steps(is_done=True)

    def _tell_of_now(self) -> None:
        """Report rank 0's current progress to the listeners, if rank 0 responds within a second.

        The workers' heartbeats do not include this progress: reading metrics from a GPU may take long, and heartbeats
        must not wait.
        """
        transfer = self._controller.ensure_group().fetch(0, methodcaller("progress"))
        progress: CallProgress | None = None
        # If the worker is lost, the running call itself reports that.
        with failure_logged(logger.debug, "no news of the running call: %s"):
            progress = transfer.result(1.0)
        if progress is not None:
            self.tell(progress)

    def tell(self, progress: CallProgress) -> None:
        """Call all listeners with this progress. If a listener calls the trainer, the trainer raises an error."""
        with self._controller.turns.closed(_INSIDE_A_CALL):
            for listener in tuple(self.listeners):
                listener(progress)
