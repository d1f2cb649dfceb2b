"""When a run is left: the time that it has, and signals, whose handlers are put back."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.exceptions import Preempted
from raysgd.trainer.driver.leaving import SIGNALS, Leaving, seconds_of


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ------------------------------------------------------------------------------------------------ time


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        (timedelta(hours=1, minutes=2), 3720.0),
        ("00:00:05", 5.0),
        ("23:30:00", 84600.0),
        ("1-12:00:00", 129600.0),
    ],
)
def test_a_length_of_time_has_several_forms(given: Any, seconds: float) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize(
    "given", ["1:30", "90", "1-12:00", "00:61:00", "", 0, -1, float("nan"), True, [3], timedelta()]
)
def test_what_has_two_meanings_or_none_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="`max_time="):
        Leaving(given)


@pytest.mark.parametrize(
    ("max_time", "saves", "due_after"),
    [
        (600, [], 540),  # 60 s are kept back for the first save
        (80, [], 40),  # but not more than half of the time
        (600, [5.0], 590),
        (600, [5.0, 20.0, 1.0], 560),  # twice the slowest one
        (600, [400.0], 0),
    ],
)
def test_time_for_two_saves_is_kept_back(max_time: int, saves: list[float], due_after: int) -> None:
    clock = Clock()
    found = Leaving(max_time, clock)
    clock.now += 1000  # before the run
    found.begin()
    for seconds in saves:
        found.note_save(seconds)
    if due_after:
        clock.now += due_after - 1
        assert not found.is_due()
        clock.now += 1
    assert found.is_due()
    assert found.reason == f"`max_time` of {max_time} s"


def test_without_a_time_or_a_signal_a_run_is_never_left() -> None:
    assert not Leaving().is_due()
    assert not Leaving().may_come


# ------------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_the_former_handlers_are_put_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    found = Leaving()
    with found.listening():
        assert found.may_come
        signal.raise_signal(number)
        assert found.is_due()
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert found.reason == number.name
    error = found.error("some/file")
    assert isinstance(error, Preempted)
    assert (error.code, error.signal, error.checkpoint) == (128 + number, number, "some/file")


def test_one_that_comes_twice_at_once_is_one_and_a_later_one_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    with Leaving().listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # `timeout` sends it to the process and to its group
        clock.now += 5
        with pytest.raises(Preempted) as raised:
            signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "a third one ends it without Python"
    assert raised.value.checkpoint is None


def test_the_handler_of_the_program_is_called_and_that_of_ray_is_not() -> None:
    calls: list[int] = []

    def of_program(number: int, frame: Any) -> None:
        calls.append(number)

    def of_ray(number: int, frame: Any) -> None:
        raise SystemExit(15)

    of_ray.__module__ = "ray._private.worker"
    for handler, called in ((of_program, [signal.SIGTERM]), (of_ray, [])):
        calls.clear()
        signal.signal(signal.SIGTERM, handler)
        found = Leaving()
        with found.listening():
            signal.raise_signal(signal.SIGTERM)
            assert calls == []
            with pytest.raises(Preempted):
                found.end_program(None)
        assert calls == called
        assert signal.getsignal(signal.SIGTERM) == handler


def test_signals_that_the_program_ignores_stay_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    found = Leaving()
    with found.listening():
        signal.raise_signal(signal.SIGTERM)
        assert not found.is_due()


def test_a_handler_that_the_program_sets_meanwhile_stays() -> None:
    def new(number: int, frame: Any) -> None: ...

    with Leaving().listening():
        signal.signal(signal.SIGTERM, new)
    assert signal.getsignal(signal.SIGTERM) == new


def test_another_thread_does_not_listen() -> None:
    before, found = signal.getsignal(signal.SIGTERM), Leaving()

    def run() -> None:
        with found.listening():
            assert signal.getsignal(signal.SIGTERM) == before

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not found.may_come


def test_in_a_notebook_the_cell_ends_and_not_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    found = Leaving()
    with found.listening():
        signal.raise_signal(signal.SIGTERM)
    assert isinstance(found.error(None), KeyboardInterrupt)
