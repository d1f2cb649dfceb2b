"""Calls of the callbacks of a run with what happens in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling.dispatcher import Dispatcher, name_of
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.exceptions import CallbackError

if TYPE_CHECKING:
    from raysgd._numbers.call_progress import CallProgress
    from raysgd.engine.shared.group_events import GroupEvent


class CallbackCalls(Dispatcher):
    """The callbacks of one run.

    Args:
        callbacks: Called in this order.
        run: What they are shown.
    """

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        super().__init__(callbacks)
        self._run = run
        self._begun: list[Callback] = []
        self._failed_in_progress: CallbackError | None = None

    def worker_callbacks(self) -> list[tuple[str, WorkerCallback]]:
        """Return what callbacks need in each worker, with the name of the callback that brings it.

        Raises:
            TypeError: A callback returned something else.
        """
        found: list[tuple[str, WorkerCallback]] = []
        for callback in self.callbacks:
            brought = self.call(callback, "worker_callback")
            if brought is not None and not isinstance(brought, WorkerCallback):
                raise TypeError(
                    f"`{type(callback).__name__}.worker_callback` returned {brought!r}: need an object of a subclass "
                    "of `raysgd.callbacks.WorkerCallback`, or None."
                )
            if brought is not None:
                found.append((name_of(callback), brought))
        return found

    def check(self) -> None:
        """Refuses a run that a callback cannot be part of; nothing has begun.

        Raises:
            ValueError: There is one.
        """
        for callback in self.callbacks:
            callback._check_run(self._run)

    def begin(self) -> None:
        """The run begins."""
        for callback in self.callbacks:
            self._begun.append(callback)
            self.call(callback, "on_run_begin", self._run)

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self.on("on_epoch_begin", self._run)

    def epoch_trained(self) -> None:
        """An epoch was trained."""
        self.on("on_epoch_trained", self._run)

    @property
    def wants_progress(self) -> bool:
        """True if a callback asks how far a running epoch is."""
        return bool(self._watching)

    @property
    def _watching(self) -> list[Callback]:
        return [each for each in self.callbacks if overrides(each, "on_progress")]

    def progress(self, progress: CallProgress) -> None:
        """There is news of a running epoch. An error is kept until that is over, which `check_progress` raises."""
        if self._failed_in_progress is not None:
            return
        try:
            for callback in self._watching:
                self.call(callback, "on_progress", self._run, progress)
        except CallbackError as error:
            self._failed_in_progress = error

    def check_progress(self) -> None:
        """Raises what a callback raised while an epoch was running."""
        if self._failed_in_progress is not None:
            raise self._failed_in_progress

    def result(self, result: dict[str, Any]) -> None:
        """There is a result."""
        self.on("on_result", self._run, result)

    def checkpoint(self, checkpoint: str) -> None:
        """A checkpoint was saved."""
        self.on("on_checkpoint", self._run, checkpoint)

    def event(self, event: GroupEvent) -> None:
        """Something happened to the workers."""
        self.on("on_event", self._run, event)

    def end(self, error: BaseException | None) -> None:
        """The run has ended. All callbacks whose `on_run_begin` was called are called, also when one fails.

        Raises:
            CallbackError: A callback failed in a run that did not.
        """
        has_failed = error is not None
        self.finish(["on_run_end"], self._run, error, has_failed=has_failed, only=self._begun)

    def states(self) -> list[dict[str, Any]]:
        """Return what the callbacks need to go on in another run: for each its class and its state."""
        return [{"name": name_of(callback), "state": self.call(callback, "state_dict")} for callback in self.callbacks]

    def load_states(self, states: Iterable[Any]) -> None:
        """Gives callbacks back what `states` returned. Each gets the first state of its class that no other has got."""
        left = [dict(entry) for entry in states]
        for callback in self.callbacks:
            found = next((entry for entry in left if entry.get("name") == name_of(callback)), None)
            if found is not None:
                left.remove(found)
                if found.get("state") is not None:
                    self.call(callback, "load_state_dict", found["state"])


def overrides(callback: Callback, method: str) -> bool:
    """Return whether a callback does something in a method."""
    return getattr(type(callback), method, None) is not getattr(Callback, method)
