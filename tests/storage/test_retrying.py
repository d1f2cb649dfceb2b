from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Callable

import pytest

from raysgd.storage._retrying import limit_s, may_pass, retried, storage_error

PASSES = [
    ConnectionResetError("reset"),
    TimeoutError("late"),
    OSError("AWS Error ACCESS_DENIED during HeadObject operation: its words may mean anything"),
    OSError(errno.EIO, "Input/output error"),
    RuntimeError("of a library that has errors of its own"),
]
LASTS = [
    FileNotFoundError("x"),
    PermissionError("x"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("no such option"),
    NotImplementedError("read only"),
    ModuleNotFoundError("gcsfs"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", PASSES, ids=repr)
def test_what_may_pass(error: BaseException) -> None:
    assert may_pass(error)


@pytest.mark.parametrize("error", LASTS, ids=repr)
def test_what_lasts(error: BaseException) -> None:
    assert not may_pass(error)


class Clock:
    """Goes on when someone sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def call(self, attempt: Callable[[], str], total_s: float = 60) -> str:
        return retried(attempt, "read `x`", total_s, clock=lambda: self.now, sleep=self.sleep)


def failing(times: int, error: Exception) -> Callable[[], str]:
    count = itertools.count(1)

    def attempt() -> str:
        if next(count) <= times:
            raise error
        return "done"

    return attempt


def test_what_passes_is_tried_again_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    clock, limits = Clock(), [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
    with caplog.at_level(logging.WARNING):
        assert clock.call(failing(8, ConnectionResetError("gone"))) == "done"
    assert all(0.75 * limit <= pause <= limit for pause, limit in zip(clock.slept, limits, strict=True))
    assert "could not read `x`, trying again in" in caplog.text
    assert "gone" in caplog.text


def test_what_lasts_is_raised_at_once() -> None:
    clock = Clock()
    with pytest.raises(PermissionError):
        clock.call(failing(1, PermissionError("x")))
    assert clock.slept == []


def test_what_does_not_pass_in_time_is_raised() -> None:
    clock = Clock()
    with pytest.raises(ConnectionResetError):
        clock.call(failing(1000, ConnectionResetError("gone")), total_s=10)
    assert 2 < sum(clock.slept) <= 10


def test_without_patience_there_is_one_attempt() -> None:
    clock = Clock()
    with pytest.raises(ConnectionResetError):
        clock.call(failing(1, ConnectionResetError("gone")), total_s=0)
    assert clock.slept == []


def test_the_environment_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYSGD_STORAGE_TIMEOUT_S", raising=False)
    assert limit_s() == 60
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "2.5")
    assert limit_s() == 2.5


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf"])
def test_the_environment_has_to_say_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"`RAYSGD_STORAGE_TIMEOUT_S='{text}'`: need a number of seconds"):
        limit_s()


def test_an_error_says_what_why_and_what_to_do() -> None:
    told = storage_error("write `s3://b/x`", OSError("AWS Error ACCESS_DENIED\nmore"), "Check the credentials.")
    assert str(told) == "could not write `s3://b/x`: AWS Error ACCESS_DENIED. Check the credentials."
    full = storage_error("write `/x`", OSError(errno.ENOSPC, "No space left on device", "/x"), "Check the disk.")
    assert str(full) == "could not write `/x`: No space left on device. Free some space there, or use another place."
    assert full.errno == errno.ENOSPC
