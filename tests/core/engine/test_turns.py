"""The line of calls: who comes first, who waits, and what ends a call from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from raysgd.core.cluster.ray_cluster import RayThreads
from raysgd.core.engine.controller import PlaceInLine, Turns
from raysgd.core.engine.platform import Platform
from raysgd.exceptions import TrainerShutdownError
from raysgd.trainer.driver.life import begin_in_background


class Lifecycle:
    """As much of it as turns need."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.interrupted: int | None = None
        self.num_killed = 0
        self.platform = Platform()

    def check_active(self, during: Exception | None = None) -> None:
        if self.interrupted == threading.get_ident():
            raise KeyboardInterrupt
        if self.stopped.is_set():
            raise TrainerShutdownError("shut down")

    def interrupt_thread(self, thread: int) -> None:
        self.interrupted = thread

    def end_interrupt(self) -> None:
        self.num_killed += 1
        self.interrupted = None


class Line:
    """Calls in threads, each of which waits for a word before it ends."""

    def __init__(self) -> None:
        self.lifecycle = Lifecycle()
        self.turns = Turns(self.lifecycle)  # type: ignore[arg-type]
        self.threads = RayThreads()
        self.ended: list[str] = []
        self.pool = ThreadPoolExecutor(8)

    def call(self, name: str, place: PlaceInLine | None, body: Callable[[], Any] = lambda: None) -> Future[None]:
        def run() -> None:
            with self.turns.take_turn(place):
                body()
            self.ended.append(name)

        return self.pool.submit(run)


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.pool.shutdown()


def test_places_come_in_the_order_in_which_they_were_reserved(line: Line) -> None:
    first, second = line.turns.reserve(), line.turns.reserve()
    behind = line.call("behind", None)
    later = line.call("second", second)
    assert line.ended == []
    line.call("first", first).result(30)
    later.result(30)
    behind.result(30)
    assert line.ended == ["first", "second", "behind"]


def test_a_thread_inside_a_call_does_not_wait_for_itself(line: Line) -> None:
    def nested() -> None:
        line.turns.reserve()  # somebody waits behind it
        with line.turns.take_turn():
            pass

    line.call("outer", line.turns.reserve(), nested).result(30)
    assert line.ended == ["outer"]


def test_a_call_that_runs_is_interrupted_and_the_next_one_follows(line: Line) -> None:
    place, next_place = line.turns.reserve(), line.turns.reserve()
    is_inside, goes_on = threading.Event(), threading.Event()

    def body() -> None:
        is_inside.set()
        assert goes_on.wait(30)
        line.lifecycle.check_active()

    running = line.call("running", place, body)
    assert is_inside.wait(30)
    line.turns.interrupt(place)
    goes_on.set()
    assert isinstance(running.exception(30), KeyboardInterrupt)
    line.call("next", next_place).result(30)
    assert (line.ended, line.lifecycle.num_killed) == (["next"], 1)


@pytest.mark.parametrize("way", ["its place", "what runs"])
def test_an_interrupt_at_the_end_of_a_call_is_not_left_for_the_next_one(line: Line, way: str) -> None:
    place, is_inside, goes_on = line.turns.reserve(), threading.Event(), threading.Event()

    def body() -> None:
        is_inside.set()
        assert goes_on.wait(30)

    def interrupt_slowly(thread: int) -> None:
        goes_on.set()
        wait([running], 0.3)  # it may end in between
        line.lifecycle.interrupted = thread

    line.lifecycle.interrupt_thread = interrupt_slowly  # type: ignore[method-assign]
    running = line.call("running", place, body)
    assert is_inside.wait(30)
    if way == "its place":
        line.turns.interrupt(place)
    else:
        line.turns.interrupt()
    running.result(30)
    assert line.lifecycle.interrupted is None


def test_what_fails_because_of_an_interrupt_counts_as_one(line: Line) -> None:
    place, is_inside, goes_on = line.turns.reserve(), threading.Event(), threading.Event()

    def body() -> None:
        is_inside.set()
        assert goes_on.wait(30)
        raise ConnectionError("the workers were killed")

    running = line.call("running", place, body)
    assert is_inside.wait(30)
    line.turns.interrupt(place)
    goes_on.set()
    assert isinstance(running.exception(30), KeyboardInterrupt)


def test_a_call_that_waits_is_interrupted_without_harm_to_the_one_that_runs(line: Line) -> None:
    first, second = line.turns.reserve(), line.turns.reserve()
    waiting = line.call("second", second)
    line.turns.interrupt(second)
    assert isinstance(waiting.exception(30), KeyboardInterrupt)
    line.call("first", first).result(30)
    assert (line.ended, line.lifecycle.num_killed) == (["first"], 0)


def test_no_place_is_to_be_had_after_the_end(line: Line) -> None:
    line.lifecycle.stopped.set()
    with pytest.raises(TrainerShutdownError):
        line.turns.reserve()


def test_who_finds_the_line_empty_comes_before_those_who_come_later(line: Line) -> None:
    with line.turns.take_if_free() as is_free:
        assert is_free
        later = line.call("later", line.turns.reserve())
        with line.turns.take_if_free() as is_free_inside:
            assert not is_free_inside
        assert line.ended == []
    later.result(30)


def test_who_finds_somebody_in_the_line_does_not_wait(line: Line) -> None:
    place = line.turns.reserve()
    with line.turns.take_if_free() as is_free:
        assert not is_free
    line.call("reserved", place).result(30)


def test_a_call_whose_thread_cannot_start_holds_up_no_other(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        begin_in_background(line, False, lambda: None)  # type: ignore[arg-type]
    assert line.turns._line == []


def test_a_thread_that_may_call_again_is_not_closed_by_another_that_came_in_between(line: Line) -> None:
    """The driver's own worker and the thread that waits for the others both call callbacks."""
    is_inside, may_go = threading.Event(), threading.Event()

    def close() -> None:
        with line.turns.closed("in a callback"):
            is_inside.set()
            assert may_go.wait(60.0)

    with line.turns.closed("in a callback"):
        other = line.pool.submit(close)
        assert is_inside.wait(60.0)
        with pytest.raises(ValueError, match="in a callback"):
            line.turns.reserve()
    may_go.set()
    other.result(60.0)
    line.turns.give_up(line.turns.reserve())
