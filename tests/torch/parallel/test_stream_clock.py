"""The time that a GPU computes between exchanges, with events of a stream that the test moves on."""

from __future__ import annotations

from typing import Any

import torch

from raysgd.torch.parallel.exchanges import Exchanges, StreamClock


class Stream:
    """A stream whose time passes in the test; the program runs ahead of it."""

    def __init__(self) -> None:
        self.now_ms, self.num_waits = 0.0, 0
        self.clock = StreamClock(lambda: Event(self))


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def record(self) -> None:
        self.at_ms = self._stream.now_ms

    def synchronize(self) -> None:
        self._stream.num_waits += 1

    def elapsed_time(self, end_event: Any) -> float:
        return float(end_event.at_ms - self.at_ms)


def test_time_counts_from_the_end_of_an_exchange_to_the_last_gradient_of_the_next() -> None:
    stream = Stream()
    exchanges = Exchanges()
    exchanges.clock = stream.clock
    stream.clock.begin()
    for computing_ms, exchanging_ms in ((30, 500), (50, 700)):
        stream.now_ms += computing_ms
        futures = [torch.futures.Future() for _ in range(2)]
        for is_last, future in enumerate(futures):
            exchanges.track(future, is_last=bool(is_last))
        stream.now_ms += exchanging_ms
        for future in futures:
            future.set_result(torch.ones(1))
    assert exchanges.own_s() == 0.08
    assert stream.num_waits == 2
    assert exchanges.own_s() == 0.08
    assert stream.num_waits == 2, "what was read is known"


def test_what_lies_between_two_calls_does_not_count() -> None:
    stream = Stream()
    for _ in range(2):
        stream.clock.begin()
        stream.now_ms += 10
        stream.clock.end()
        stream.clock.begin()
        stream.now_ms += 1000  # the driver does something else
    assert stream.clock.seconds() == 0.02


def test_an_exchange_in_another_group_does_not_end_what_was_begun() -> None:
    stream = Stream()
    exchanges = Exchanges()
    exchanges.clock = stream.clock
    stream.clock.begin()
    stream.now_ms += 10
    exchanges.forget()
    stream.clock.end()
    assert exchanges.own_s() == 0.0
