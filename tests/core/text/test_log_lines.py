"""What is done once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from raysgd.core.text import log_lines
from raysgd.core.text.log_lines import DefaultHandler, LogBuffer, LogRelay, Once, WorkerLogLine, listed


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, as a user would."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


SPEAK = """
import logging
import raysgd
{set_up}
logging.getLogger("raysgd.torch.data.feed").info("an aside")
logging.getLogger("raysgd.torch.data.feed").warning("numbers change")
logging.getLogger("other").warning("not ours")
"""


@pytest.mark.parametrize(
    ("set_up", "level", "expected"),
    [
        ("", "", ["raysgd WARNING: numbers change", "not ours"]),
        ("", "INFO", ["raysgd INFO: an aside", "raysgd WARNING: numbers change", "not ours"]),
        ("", "error", ["not ours"]),
        ("logging.basicConfig(format='mine: %(message)s')", "", ["mine: numbers change", "mine: not ours"]),
        ("logging.getLogger('raysgd').addHandler(logging.NullHandler())", "", ["not ours"]),
        ("logging.getLogger('raysgd').setLevel('ERROR')", "", ["not ours"]),
    ],
)
def test_warnings_are_shown_unless_the_user_set_up_something_else(set_up: str, level: str, expected: list[str]) -> None:
    shown = run(SPEAK.format(set_up=set_up), RAYSGD_LOG_LEVEL=level).stderr.splitlines()
    assert len(shown) == len(expected)
    assert all(line.endswith(end) for line, end in zip(shown, expected, strict=True))


def test_control_codes_are_escaped_and_line_breaks_stay() -> None:
    shown = run("import logging, raysgd; logging.getLogger('raysgd').warning('two\\nlines %s', '\\x1b[2J\\r')").stderr
    assert shown.endswith("two\nlines \\x1b[2J\\r\n")


def test_an_unknown_level_is_named_with_those_there_are() -> None:
    shown = run("import raysgd", RAYSGD_LOG_LEVEL="loud").stderr
    assert "`RAYSGD_LOG_LEVEL=loud` has no effect: use one of DEBUG, INFO, WARNING, ERROR." in shown


@pytest.fixture
def in_a_worker() -> Iterator[None]:
    """What a worker process does, undone afterwards."""
    logger = logging.getLogger("raysgd")
    handlers, level, notebook = list(logger.handlers), logger.level, log_lines._notebook
    log_lines.collect(logging.INFO)
    yield
    logger.handlers = handlers
    logger.setLevel(level)
    log_lines._notebook = notebook


@pytest.mark.usefixtures("in_a_worker")
def test_a_worker_keeps_its_lines_until_they_are_taken() -> None:
    logger = logging.getLogger("raysgd.torch")
    assert not any(isinstance(handler, DefaultHandler) for handler in logging.getLogger("raysgd").handlers)
    logger.debug("too fine")
    logger.info("%s of %s", 1, 2)
    logger.warning("uneven")
    assert log_lines.drain() == (
        WorkerLogLine("raysgd.torch", 20, "1 of 2"),
        WorkerLogLine("raysgd.torch", 30, "uneven"),
    )
    assert log_lines.drain() == ()


@pytest.mark.usefixtures("in_a_worker")
def test_lines_that_went_with_a_sign_of_life_go_with_the_answer_too() -> None:
    """The call may end before the driver reads the sign of life."""
    logger = logging.getLogger("raysgd")
    texts: list[list[str]] = []
    for line, takes in (("one", log_lines.glance), ("two", log_lines.glance), ("three", log_lines.drain)):
        logger.warning(line)
        texts.append([note.text for note in takes()])
    assert texts == [["one"], ["two"], ["one", "two", "three"]]
    assert log_lines.drain() == ()


@pytest.mark.usefixtures("in_a_worker")
def test_of_very_many_lines_the_last_ones_are_kept() -> None:
    for index in range(2500):
        logging.getLogger("raysgd").warning("line %s", index)
    notes = log_lines.drain()
    assert len(notes) == 1000
    assert notes[-1].text == "line 2499"


def test_a_forked_process_speaks_for_itself(capfd: pytest.CaptureFixture[str]) -> None:
    notebook = LogBuffer()
    notebook._pid += 1  # as seen from a loader's process
    notebook.handle(logging.LogRecord("raysgd", logging.WARNING, "", 0, "from the loader\x1b[2J", None, None))
    assert notebook.drain() == ()
    assert capfd.readouterr().err == "from the loader\\x1b[2J\n"


def test_a_driver_has_nothing_to_hand_over() -> None:
    logging.getLogger("raysgd").warning("shown here")
    assert log_lines.drain() == ()


UNEVEN, EMPTY = (
    WorkerLogLine("raysgd.torch.data.feed", 30, "uneven"),
    WorkerLogLine("raysgd.torch.data.feed", 30, "empty"),
)


def told(relay: LogRelay, notes: dict[str, list[WorkerLogLine]], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    relay.tell(notes)
    return [record.getMessage() for record in caplog.records]


def test_a_line_is_told_once_with_all_who_said_it(caplog: pytest.LogCaptureFixture) -> None:
    relay = LogRelay()
    first = told(relay, {"0": [UNEVEN, UNEVEN], "1": [], "2": [EMPTY, UNEVEN]}, caplog)
    assert first == ["ranks 0, 2: uneven", "rank 2: empty"]
    assert caplog.records[0].name == "raysgd.torch.data.feed"
    assert told(relay, {"1": [UNEVEN, EMPTY]}, caplog) == []
    assert told(LogRelay(), {"1": [UNEVEN]}, caplog) == ["rank 1: uneven"]
    assert told(LogRelay(), {str(rank): [UNEVEN] for rank in range(1000)}, caplog) == ["ranks 0-999: uneven"]


def test_a_worker_without_a_rank_is_named_in_words(caplog: pytest.LogCaptureFixture) -> None:
    assert told(LogRelay(), {"new worker": [UNEVEN]}, caplog) == ["new worker: uneven"]


def test_memory_for_what_was_told_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    relay = LogRelay()
    for index in range(10_001):
        relay.tell({"0": [WorkerLogLine("raysgd", 10, f"line {index}")]})
    assert len(relay._told) == 1


def test_of_several_threads_one_is_the_first() -> None:
    once = Once()
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: once.is_first("a"), range(1000))) == 1


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((), ""),
        ((2, 0, 1), "0, 1, 2"),
        ((3, 0, 1, 2), "0-3"),
        ({9, 4, 5, 6, 7, 8, 1}, "1, 4-9"),
        (range(1000), "0-999"),
    ],
)
def test_many_ranks_in_a_row_are_a_range(ranks: Collection[int], expected: str) -> None:
    assert listed(ranks) == expected
