"""The log of calls: turns, answers, Ctrl-C, programs that are gone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from raysgd.detached import call_log
from raysgd.detached.call_log import CallLog, Journal, LoggedCall, journal_path
from raysgd.detached.protocol import unpacked_answer


def logged(token: str, program: str = "first") -> LoggedCall:
    return LoggedCall(token, "train", program, "a program")


def result_of(call: LoggedCall) -> object:
    return unpacked_answer(call.answer.result(10)).result()


def test_calls_take_turns_in_their_order() -> None:
    log, order, gate = CallLog(), [], threading.Event()
    first = log.enqueue(logged("1"), lambda: (gate.wait(10), order.append(1)))
    second = log.enqueue(logged("2"), lambda: order.append(2))
    assert log.running() is first
    gate.set()
    result_of(second)
    assert order == [1, 2]


def test_a_call_that_comes_twice_happens_once() -> None:
    log, times = CallLog(), []
    first = log.enqueue(logged("1"), lambda: times.append(1))
    assert log.enqueue(logged("1"), lambda: times.append(1)) is first
    result_of(first)
    log.await_all(10)
    assert times == [1]


def test_an_answer_stays_until_it_is_confirmed() -> None:
    log = CallLog()
    call = log.enqueue(logged("1"), lambda: 5)
    assert result_of(call) == 5
    assert log.find("1") is call
    log.confirm("1")
    assert log.find("1") is None


def test_ctrl_c_is_raised_in_the_call_that_runs_and_in_no_other() -> None:
    log, began = CallLog(), threading.Event()

    def forever() -> None:
        began.set()
        while True:
            time.sleep(0.001)

    running, waiting = log.enqueue(logged("1"), forever), log.enqueue(logged("2"), lambda: 2)
    last = log.enqueue(logged("3"), lambda: 3)
    began.wait(10)
    log.interrupt("2")
    log.interrupt("1")
    for call in (running, waiting):
        with pytest.raises(KeyboardInterrupt):
            result_of(call)
    assert result_of(last) == 3
    log.interrupt("3")  # it has ended
    assert result_of(log.enqueue(logged("4"), lambda: 4)) == 4


def test_ctrl_c_is_raised_in_a_call_that_has_yet_to_arrive() -> None:
    log = CallLog()
    log.interrupt("1")
    with pytest.raises(KeyboardInterrupt):
        result_of(log.enqueue(logged("1"), lambda: 1))
    log.confirm("1")
    assert not log.is_interrupted("1")


def test_calls_of_a_program_that_is_gone_go_to_one_other_program() -> None:
    log, gate = CallLog(), threading.Event()
    call = log.enqueue(logged("1", "gone"), lambda: gate.wait(10))
    log.enqueue(logged("2", "here"), lambda: None)
    assert log.take_over("next") is None
    assert log.has_others("next")
    log.leave("gone")
    assert log.take_over("next") is call
    assert log.take_over("next", assigned=["1"]) is None
    assert log.take_over("next") is call  # its answer to that question was lost
    assert log.take_over("another") is None
    log.leave("next")
    assert log.take_over("another") is call
    gate.set()


def test_what_a_program_that_is_gone_draws_from_an_iterator_goes_to_no_other() -> None:
    log, gate = CallLog(), threading.Event()
    running = log.enqueue(LoggedCall("1", "draw", "gone", "a program"), lambda: gate.wait(10))
    log.leave("gone")
    assert log.running() is running
    assert log.take_over("next") is None
    assert not log.has_others("next"), "nobody waits for this answer"
    gate.set()
    result_of(log.enqueue(logged("2"), lambda: None))
    assert log.find("1") is None


def test_answers_to_programs_that_are_gone_are_not_kept_for_ever() -> None:
    log = CallLog()
    for number in range(40):
        result_of(log.enqueue(logged(str(number), f"program {number}"), lambda: None))
        log.leave(f"program {number}")
    given: list[str] = []
    while (call := log.take_over("next", given)) is not None:
        given.append(call.token)
    assert given == [str(number) for number in range(24, 40)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "detached" / "run"


def test_the_newest_of_each_name_is_read_by_the_next_process(path: Path) -> None:
    written = Journal(path)
    written.put({"a": b"1", "b": b"2"})
    written.put({"a": b"3", "c": b"4", "b": None})
    assert Journal(path).read() == {"a": b"3", "c": b"4"}
    assert Journal(path).read() == {"a": b"3", "c": b"4"}


def test_what_was_not_written_to_its_end_does_not_count_and_is_followed_by_what_does(path: Path) -> None:
    Journal(path).put({"a": b"1"})
    whole = path.stat().st_size
    Journal(path).put({"a": b"2", "b": b"2"})
    for length in range(whole, path.stat().st_size):
        half = path.with_name(f"half-{length}")
        half.write_bytes(path.read_bytes()[:length])
        following = Journal(half)
        assert following.read() == {"a": b"1"}
        following.put({"c": b"3"})
        assert Journal(half).read() == {"a": b"1", "c": b"3"}


def test_the_file_does_not_grow_without_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_log, "_MOST_WASTE", 10_000)
    written = Journal(path)
    for number in range(1000):
        written.put({"a": b"%d" % number, f"call:{number}": b"x" * 100, f"call:{number - 1}": None})
    assert path.stat().st_size < 11_000
    assert Journal(path).read() == {"a": b"999", "call:999": b"x" * 100}


def test_only_the_user_can_read_it_and_nothing_is_left_of_it(path: Path) -> None:
    written = Journal(path)
    written.put({"a": b"1"})
    assert path.stat().st_mode & 0o77 == 0
    assert path.parent.stat().st_mode & 0o77 == 0
    assert written.read() == {"a": b"1"}
    assert path.stat().st_mode & 0o77 == 0
    written.discard()
    written.put({"a": b"2"})
    assert list(path.parent.iterdir()) == []
    assert written.read() == {}


@pytest.mark.parametrize("name", [".", "run"])
def test_what_another_user_could_have_written_is_not_unpickled(
    path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    Journal(path).put({"a": b"1"})
    (path.parent / name).chmod(0o777)
    following = Journal(path)
    assert following.read() == {}
    following.put({"a": b"2"})
    assert [record.message.partition(" (mode")[0] for record in caplog.records] == [
        "the detached trainer keeps no journal, so it ends if its process dies: "
        f"`{path.parent / name}` is writable for other users"
    ]
    (path.parent / name).chmod(0o700)
    assert Journal(path).read() == {"a": b"1"}


def test_journals_are_among_the_caches_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSGD_CACHE", "/somewhere")
    assert journal_path("run-7", "0123") == Path("/somewhere/detached/run-7-0123")
    monkeypatch.delenv("RAYSGD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert journal_path("run-7", "0123") == Path("/caches/raysgd/detached/run-7-0123")
