"""The time that a GPU computes between two exchanges of gradients: `balance="speed"` divides the data by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class StreamClock:
    """Takes the time that a rank computes on a GPU without waiting for other ranks.

    A program only starts kernels, so its own clock shows how long it waits for results, and these may wait for all
    ranks. Here the time is taken in the stream: from the end of an exchange until the gradients of the next one are
    complete. Time in which the stream is idle counts, for instance when it waits for data.

    Args:
        make_event: Makes an event that knows its time.
    """

    def __init__(self, make_event: Callable[[], Any] = _timed_event) -> None:
        self._make_event = make_event
        self._seconds = 0.0
        self._intervals: list[tuple[Any, Any]] = []
        self.forget()

    def forget(self) -> None:
        """The exchange that was to end the present interval does not come."""
        self._began: Any = None

    def begin(self) -> None:
        """An exchange is over: called where the present stream has waited for it."""
        self._began = self._recorded()

    def end(self) -> None:
        """All gradients of an exchange are complete."""
        if self._began is not None:
            self._intervals.append((self._began, self._recorded()))
            self._began = None

    def seconds(self) -> float:
        """The sum of all intervals so far; waits for the stream to pass the last one."""
        for began, ended in self._intervals:
            ended.synchronize()
            self._seconds += began.elapsed_time(ended) / 1000
        self._intervals.clear()
        return self._seconds

    def _recorded(self) -> Any:
        event = self._make_event()
        event.record()
        return event
