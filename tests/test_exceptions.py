from __future__ import annotations

import errno
import pickle
import subprocess
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Any

import cloudpickle
import pytest

from raysgd import exceptions
from raysgd.core.worker_errors import describe_faults, training_failed_error, worker_error
from raysgd.exceptions import OnFailure, TrainingFailedError, WorkerError, WorkerFault
from tests.helpers.fakes import fault


class NeedsMore(Exception):
    """Its constructor takes what `args` does not have: such a class cannot be pickled by itself."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.text = code, text


class Keyworded(Exception):
    def __new__(cls, *, key: str) -> Keyworded:
        return super().__new__(cls)

    def __init__(self, *, key: str) -> None:
        self.key = key


class Slotted(ValueError):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__("slotted")
        self.code = code


class QuotaError(OSError):
    def __init__(self, disk: str) -> None:
        super().__init__(errno.EDQUOT, "quota exceeded", disk)
        self.disk = disk


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Final(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("final")


class Stubborn(Exception):
    def __init_subclass__(cls) -> None:
        raise ValueError("no")


class OwnWords(Exception):
    def __str__(self) -> str:
        return "in its own words"


def attribute_error() -> AttributeError:
    with pytest.raises(AttributeError) as caught:
        _ = Holder().missing  # type: ignore[attr-defined]
    return caught.value


class Holder:
    """Something that cannot be pickled, and that an `AttributeError` holds on to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def syntax_error() -> SyntaxError:
    with pytest.raises(SyntaxError) as caught:
        compile("a b", "user.py", "exec")
    return caught.value


ERRORS: list[tuple[Exception, dict[str, Any]]] = [
    (ValueError("x"), {"args": ("x",)}),
    (KeyError("weight"), {"args": ("weight",)}),
    (ZeroDivisionError(), {"args": ()}),
    (FileNotFoundError(errno.ENOENT, "no", "a.txt"), {"errno": errno.ENOENT, "filename": "a.txt"}),
    (OSError("only text"), {"errno": None, "args": ("only text",)}),
    (QuotaError("sda"), {"errno": errno.EDQUOT, "disk": "sda", "strerror": "quota exceeded"}),
    (
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        {"encoding": "utf-8", "object": b"\xff", "start": 0, "end": 1, "reason": "bad"},
    ),
    (ImportError("no", name="cv2", path="p"), {"name": "cv2", "path": "p", "msg": "no"}),
    (StopIteration(5), {"value": 5}),
    (syntax_error(), {"filename": "user.py", "lineno": 1}),
    (attribute_error(), {"name": "missing"}),
    (JSONDecodeError("bad", "{", 1), {"pos": 1, "doc": "{"}),
    (subprocess.CalledProcessError(3, ["ls"], "out"), {"returncode": 3, "output": "out"}),
    (NeedsMore(3, "t"), {"code": 3, "text": "t", "args": ("3: t",)}),
    (Keyworded(key="k"), {"key": "k"}),
    (Slotted(4), {"code": 4, "args": ("slotted",)}),
    (Frozen(5), {"code": 5}),
    (OwnWords("ignored"), {"args": ("ignored",)}),
]
IDS = [type(error).__name__ for error, _ in ERRORS]


@pytest.mark.parametrize(("original", "attributes"), ERRORS, ids=IDS)
def test_a_worker_error_is_also_what_the_user_raised_with_all_it_holds(
    original: Exception, attributes: dict[str, Any]
) -> None:
    """Also when it has crossed a process boundary."""
    error = worker_error((fault(0, original), fault(1, ValueError("too"))))
    copy = pickle.loads(pickle.dumps(error))
    for each in (error, copy):
        assert isinstance(each, WorkerError)
        assert isinstance(each, type(original))
        assert {name: getattr(each, name) for name in attributes} == attributes
    assert error.faults[0].error is original
    assert str(copy) == str(error)
    sent = pickle.loads(cloudpickle.dumps(fault(2, original))).error
    assert type(copy.faults[0].error) is type(sent) is type(original)
    assert str(copy.faults[0].error) == str(sent) == str(original)
    assert {name: getattr(sent, name) for name in attributes} == attributes
    assert [fault.rank for fault in copy.faults] == [0, 1]


@pytest.mark.parametrize("original", [Final("f"), Stubborn("s")])
def test_of_a_class_that_cannot_be_subclassed_the_error_is_a_plain_worker_error(original: Exception) -> None:
    error = worker_error((fault(0, original),))
    assert type(error).__mro__[1] is WorkerError
    assert error.faults[0].error is original
    assert type(original).__name__ in str(error)
    assert type(pickle.loads(pickle.dumps(error)).faults[0].error) is type(original)


@pytest.mark.parametrize("original", [SystemExit(3), GeneratorExit()])
def test_what_would_end_the_driver_becomes_an_ordinary_error(original: BaseException) -> None:
    error = worker_error((fault(0, original),))
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, type(original))
    assert type(original).__name__ in str(error)


def test_an_exception_that_could_not_travel_is_still_told() -> None:
    error = worker_error((WorkerFault(1, "10.0.0.2", None, "Weird", "its text", "a.py:1 in f", ""),))
    assert type(error).__mro__[1] is WorkerError
    assert str(error) == "Weird: its text\n  raised at a.py:1 in f\n  on rank 1, node 10.0.0.2"


def test_the_original_is_left_as_it_was() -> None:
    original = ValueError("x")
    worker_error((fault(0, original),))
    assert original.args == ("x",)
    assert original.__cause__ is None
    assert vars(original) == {}


def test_notes_are_kept() -> None:
    original = ValueError("x")
    original.__dict__["__notes__"] = ["look at the data"]  # what `add_note` does, from Python 3.11 on
    copy = pickle.loads(pickle.dumps(worker_error((fault(0, original),))))
    assert copy.__notes__ == ["look at the data"]


def test_workers_of_workers_raise_the_innermost_class_once() -> None:
    inner = worker_error((fault(3, KeyError("k")),))
    outer = worker_error((fault(0, inner, type_name="KeyError"),))
    copy = pickle.loads(pickle.dumps(outer))
    for error in (outer, copy):
        assert error.faults[0].rank == 0
        assert isinstance(error, KeyError)
        assert isinstance(error.faults[0].error, KeyError)


# -------------------------------------------------------------------------------------------- words


def test_each_distinct_message_is_said_once_with_its_ranks() -> None:
    text = describe_faults(
        (
            fault(0, ValueError("a"), node="n1"),
            fault(1, ValueError("b"), node="n1"),
            fault(2, ValueError("a"), node="n2"),
            fault(3, TypeError("a"), node="n2"),
        )
    )
    assert text.splitlines()[:9] == [
        "ValueError: a",
        "  raised at model.py:7 in forward: x / 0",
        "  on ranks 0, 2, node n1, n2",
        "ValueError: b",
        "  raised at model.py:7 in forward: x / 0",
        "  on rank 1, node n1",
        "TypeError: a",
        "  raised at model.py:7 in forward: x / 0",
        "  on rank 3, node n2",
    ]


def test_what_a_thousand_ranks_raise_is_told_in_one_line() -> None:
    text = describe_faults(tuple(fault(rank, node=f"n{rank // 8}") for rank in range(1000)))
    assert text.splitlines()[2] == "  on ranks 0-999, node n0, n1, n2, n3, n4, n5, n6, n7 and 117 others"


def test_the_same_message_from_two_places_is_said_twice() -> None:
    text = describe_faults((fault(0, location="a.py:1 in f"), fault(1, location="b.py:2 in g")))
    assert "raised at a.py:1 in f\n  on rank 0," in text
    assert "raised at b.py:2 in g\n  on rank 1," in text


def test_the_users_lines_are_shown_and_the_traceback_of_the_first_rank_if_the_user_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = fault(
        2,
        traceback_text="first\n",
        callers=("train.py:3 in train_batch: forward()",),
        causes=("caused by KeyError: 'x', raised at a.py:1 in f",),
    )
    faults = (first, fault(3, traceback_text="second", message="other", callers=("a.py:4 in g",)))
    brief = describe_faults(faults)
    assert brief.splitlines() == [
        "RuntimeError: broken",
        "  raised at model.py:7 in forward: x / 0",
        "  on rank 2, node 10.0.0.3",
        "  called from train.py:3 in train_batch: forward()",
        "  caused by KeyError: 'x', raised at a.py:1 in f",
        "RuntimeError: other",
        "  raised at model.py:7 in forward: x / 0",
        "  on rank 3, node 10.0.0.4",
    ]
    monkeypatch.setenv("RAYSGD_TRACEBACK", "full")
    assert describe_faults(faults) == f"{brief}\n\nTraceback of rank 2:\nfirst"


def test_of_many_different_errors_the_first_ones_are_told() -> None:
    text = describe_faults(tuple(fault(rank, ValueError(f"sample {rank}")) for rank in range(100)))
    assert text.splitlines()[6:] == [
        "ValueError: sample 2",
        "  raised at model.py:7 in forward: x / 0",
        "  on rank 2, node 10.0.0.3",
        "Other errors on ranks 3-99: see `error.faults`.",
    ]


def test_an_error_without_a_message_is_told_by_its_class() -> None:
    assert describe_faults((fault(0, AssertionError()),)).startswith("AssertionError\n  raised at")


def test_a_worker_error_stands_in_the_place_of_the_original() -> None:
    """With its frames, and with what Python shows before it."""
    try:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise ValueError("second") from first
    except ValueError as raised:
        original = raised
    error = worker_error((fault(0, original),))
    assert isinstance(error.__cause__, KeyError)
    assert error.__traceback__ is original.__traceback__
    alone = worker_error((fault(0, ValueError("alone")),))
    assert alone.__suppress_context__  # raised where another one is handled, it does not show that one
    assert alone.__cause__ is None


def test_the_words_of_the_user_do_not_hide_the_rank() -> None:
    error = worker_error((fault(1, OwnWords()),))
    assert str(error).startswith("OwnWords: in its own words\n")
    assert "on rank 1" in str(error)


# -------------------------------------------------------------------------------------------- all classes


def classes() -> list[type[BaseException]]:
    found = [value for value in vars(exceptions).values() if isinstance(value, type)]
    return [cls for cls in found if issubclass(cls, BaseException) and cls.__module__ == exceptions.__name__]


@pytest.mark.parametrize("cls", classes())
def test_every_exception_pickles_with_its_message(cls: type[BaseException]) -> None:
    if cls is exceptions.Preempted:
        left = pickle.loads(pickle.dumps(exceptions.Preempted(15, "runs/epoch_0001.ckpt")))
        assert (left.code, left.signal, left.checkpoint) == (143, 15, "runs/epoch_0001.ckpt")
        return
    copy = pickle.loads(pickle.dumps(cls("the message")))
    assert type(copy) is cls
    assert str(copy) == "the message"


def test_a_failed_run_is_of_one_more_class_if_programs_catch_it_by_that() -> None:
    class CaughtByPrograms(Exception):
        pass

    for cause in (KeyError("lost"), CaughtByPrograms("lost")):
        error = training_failed_error(cause, "go on", CaughtByPrograms)
        assert isinstance(error, TrainingFailedError)
        assert isinstance(error, type(cause))
        assert isinstance(error, CaughtByPrograms)
    again = pickle.loads(pickle.dumps(training_failed_error(KeyError("lost"), "go on", OSError)))
    assert isinstance(again, OSError)
    assert isinstance(again, KeyError)


@pytest.mark.parametrize(
    ("error", "expected"), [(None, []), (ValueError("a"), ["undone"]), (KeyboardInterrupt(), ["undone"])]
)
def test_what_follows_a_failure_is_done_also_after_ctrl_c_and_only_then(
    error: BaseException | None, expected: list[str]
) -> None:
    done: list[str] = []
    with pytest.raises(type(error)) if error is not None else nullcontext(), OnFailure(lambda: done.append("undone")):
        if error is not None:
            raise error
    assert done == expected
