"""The two ends of a line, in one process. Calls of workers by lines: `test_call_lines_integration.py`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator

import pytest

from raysgd.core.cluster.call_lines import LARGEST, Line, LineEnd


@pytest.fixture
def line() -> Iterator[Line]:
    found = Line(lambda name: name)
    yield found
    found.hang_up()


@pytest.fixture
def end(line: Line) -> Iterator[LineEnd]:
    found = LineEnd(line.attending)
    yield found
    found.hang_up()


def test_calls_go_one_way_and_answers_the_other(line: Line, end: LineEnd) -> None:
    assert not line.has_answer
    assert end.answer({"loss": 0.5})
    assert line.has_answer
    assert line.answer() == {"loss": 0.5}
    assert line.send(b"the next call")
    assert not line.has_answer
    assert end.next() == b"the next call"
    assert end.answer(2)
    assert line.has_answer
    assert line.answer() == 2


def test_the_worker_sees_that_the_driver_has_hung_up(line: Line, end: LineEnd) -> None:
    assert end.answer(1)
    assert line.has_answer
    copy = os.dup(line.fileno())  # as a process that was forked has one
    line.hang_up()
    assert end.next() is None
    assert not end.answer(1)
    os.close(copy)


def test_the_driver_sees_that_the_worker_has_hung_up(line: Line, end: LineEnd) -> None:
    copy = os.dup(end._socket.fileno())
    end.hang_up()
    assert not line.has_answer
    assert (line.was_joined, line.is_ended, line.send(b"")) == (True, True, False)
    os.close(copy)


def test_a_process_that_is_forked_keeps_no_end(line: Line, end: LineEnd) -> None:
    child = os.fork()
    if child == 0:
        os._exit(end.answer("from the child"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert end.answer("from the parent")
    assert line.has_answer


@pytest.mark.parametrize("size", [1000, LARGEST - 100, LARGEST, 10 * LARGEST])
def test_what_is_large_does_not_go_by_it(line: Line, end: LineEnd, size: int) -> None:
    answer = b"x" * size
    is_small = len(pickle.dumps(answer, protocol=5)) <= LARGEST
    assert (end.answer(answer), line.has_answer) == (is_small, is_small)
    assert not is_small or line.answer() == answer


def test_what_plain_pickle_refuses_does_not_go_by_it(line: Line, end: LineEnd) -> None:
    assert not end.answer(lambda: 1)
    assert not line.has_answer


def test_a_worker_on_another_node_finds_no_line(line: Line) -> None:
    lost = LineEnd("raysgd-not-here")
    assert not lost.answer(1)
    assert lost.next() is None
    assert (line.has_answer, line.was_joined) == (False, False)


def test_nobody_else_gets_a_line(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = LineEnd(line.attending)
    assert stranger.answer("an answer")
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert not line.has_answer
    monkeypatch.undo()
    end = LineEnd(line.attending)
    assert end.answer("the true answer")
    assert line.has_answer
    assert line.answer() == "the true answer"
    end.hang_up()
    stranger.hang_up()


def test_a_worker_answers_nobody_else(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert not LineEnd(line.attending).answer("an answer")
