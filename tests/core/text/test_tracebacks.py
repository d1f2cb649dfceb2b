"""What is left of the traceback of an error that leaves the library."""

from __future__ import annotations

import inspect
import json
import os
import pdb
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from io import StringIO
from typing import Any

import pytest

from raysgd.core.arguments import check_num_workers
from raysgd.core.text.faults import describe_fault
from raysgd.core.text.tracebacks import hide_library_frames, hides_library_frames
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import TrainerLostError


def raising(error: BaseException) -> Callable[[], Any]:
    """A function of a library that raises an error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future.result


def of_user() -> None:
    deeper_of_user()


def deeper_of_user() -> None:
    text = "{"
    json.loads(text)


def of_worker() -> BaseException:
    """What a worker in this process has raised, as the engine raises it."""
    try:
        of_user()
    except ValueError as error:
        _, error.__traceback__ = error.__traceback__, error.__traceback__.tb_next  # type: ignore[union-attr]
        return worker_error((describe_fault(error, 0, "node", portable=False),))
    raise AssertionError


def error_of(work: Callable[[], Any]) -> BaseException:
    """What a method of the library raises that does this."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - of many classes
        hides_library_frames(work)()
    return caught.value


def functions_in(error: BaseException) -> list[str]:
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]


@pytest.mark.parametrize(
    ("work", "functions"),
    [
        (raising(TrainerLostError("its words say all")), []),
        (raising(KeyboardInterrupt()), []),
        (partial(check_num_workers, "num_workers", 0, ""), ["check_num_workers"]),
        (partial(json.loads, "{"), ["raw_decode"]),
        (partial(os.environ.__getitem__, "SURELY_NOT_SET"), ["__getitem__"]),  # whole: it may be a bug
        (of_user, ["of_user", "deeper_of_user"]),
        (raising(of_worker()), ["of_user", "deeper_of_user"]),
        (hides_library_frames(of_user), ["of_user", "deeper_of_user"]),
        (hides_library_frames(partial(os.environ.__getitem__, "SURELY_NOT_SET")), ["call", "__getitem__"]),
    ],
)
def test_the_users_frames_are_left(work: Callable[[], Any], functions: list[str]) -> None:
    assert functions_in(error_of(work)) == ["error_of", "call", *functions]


def test_all_frames_are_there_if_the_user_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSGD_TRACEBACK", "full")
    assert functions_in(error_of(of_user))[-3:] == ["loads", "decode", "raw_decode"]


def test_a_debugger_stops_at_the_users_line_in_a_worker_of_this_process() -> None:
    said = StringIO()
    debugger = pdb.Pdb(stdin=StringIO("p text\nquit\n"), stdout=said)
    debugger.reset()
    debugger.interaction(None, error_of(raising(of_worker())).__traceback__)  # as `pdb.post_mortem`
    assert "deeper_of_user()" in said.getvalue()
    assert "'{'" in said.getvalue()


def test_python_shows_few_lines_and_how_to_have_more() -> None:
    try:
        try:
            of_user()
        except ValueError as first:
            raise TrainerLostError("lost") from first
    except TrainerLostError as error:
        raised = error
    lines = traceback.format_exception(error_of(raising(raised)))
    text = "".join(lines)
    assert 'raise without_library_frames(error, unless="RAYSGD_TRACEBACK=full")' in text
    assert "raw_decode" not in text  # of the cause, too
    assert text.index("deeper_of_user") < text.index("direct cause")


@hide_library_frames
class Door(ABC):
    """In the place of a trainer."""

    def __init__(self, size: int = 1) -> None:
        self._size = size

    def train(self, num_steps: int | None = None) -> int:
        """Train."""
        return self._size

    def epochs(self) -> Iterator[int]:
        yield self._size
        json.loads("{")

    @property
    def size(self) -> int:
        return self._size

    @classmethod
    def made(cls) -> int:
        return 3

    @abstractmethod
    def save(self) -> None: ...

    def _hidden(self) -> int:
        return self._size


class Opened(Door):
    def save(self) -> None: ...


def test_a_class_stays_as_it_is_for_its_users() -> None:
    door = Opened(2)
    assert (door.train(), door.size, door.made(), door._size) == (2, 2, 3, 2)
    assert list(inspect.signature(Door.train).parameters) == ["self", "num_steps"]
    assert Door.train.__doc__ == "Train."
    assert Door.__abstractmethods__ == {"save"}
    functions = {name: value for name, value in vars(Door).items() if inspect.isfunction(value)}
    assert [name for name, value in functions.items() if hasattr(value, "__wrapped__")] == [
        "__init__",
        "train",
        "epochs",
    ]


def test_the_error_of_an_iterator_is_cut_too_and_leaving_it_is_none() -> None:
    items = Opened().epochs()
    assert next(items) == 1
    with pytest.raises(ValueError, match="Expecting") as caught:
        next(items)
    assert functions_in(caught.value) == [
        "test_the_error_of_an_iterator_is_cut_too_and_leaving_it_is_none",
        "items",
        "epochs",
    ]
    items = Opened().epochs()
    next(items)
    items.close()  # type: ignore[attr-defined]


def test_neither_form_of_an_error_of_a_worker_shows_a_key() -> None:
    error = worker_error((describe_fault(ValueError("no file at s3://id:hidden@bucket"), 0, "here", portable=True),))
    assert "s3://***@bucket" in str(error)
    assert repr(error) == "WorkerError(ValueError)('no file at s3://***@bucket')"
