from __future__ import annotations

import importlib.util
import json
import pickle
import threading
from pathlib import Path

import pytest

from raysgd.engine.types import Failure
from raysgd.engine.worker import WorkerFailed, describe_fault
from raysgd.exceptions import WorkerFault


class NeedsMore(Exception):
    """Its constructor takes what `args` does not have: such a class cannot be pickled by itself."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Locked(Exception):
    """What it holds cannot be pickled at all."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


def described(error: Exception, *, portable: bool = True) -> WorkerFault:
    """What a worker says of an exception that was raised."""
    try:
        raise error
    except Exception as raised:
        return describe_fault(raised, rank=3, portable=portable)


def test_an_exception_is_told_with_its_class_its_words_and_its_line() -> None:
    fault = described(ValueError("x"))
    assert (fault.rank, fault.type_name, fault.message) == (3, "ValueError", "x")
    assert fault.location.endswith("in described: raise error")
    assert __file__ in fault.location
    assert fault.traceback_text.endswith("ValueError: x\n")


def test_the_line_is_the_users_also_when_a_library_raised() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    location = describe_fault(caught.value, 0, portable=True).location
    assert location.endswith('json.loads("{")')
    assert __file__ in location


@pytest.mark.parametrize("folder", ["raysgd", "lib/python_project"])
def test_the_users_files_may_lie_in_a_folder_of_any_name(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text("def forward():\n    raise ValueError('deep')\n")
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError, match="deep") as caught:
        module.forward()
    location = describe_fault(caught.value, 0, portable=True).location
    assert location == f"{path}:2 in forward: raise ValueError('deep')"


def test_an_exception_that_was_never_raised_has_no_line() -> None:
    assert describe_fault(ValueError("x"), 0, portable=True).location == "an unknown place"


def test_an_exception_travels_although_its_class_does_not_pickle() -> None:
    copy = pickle.loads(pickle.dumps(described(NeedsMore(7, "t"))))
    assert isinstance(copy.error, NeedsMore)
    assert copy.error.code == 7


def test_what_cannot_travel_stays_behind_and_its_words_go() -> None:
    fault = described(Locked())
    assert fault.error is None
    assert (fault.type_name, fault.message) == ("Locked", "locked")
    assert isinstance(described(Locked(), portable=False).error, Locked)


def test_the_carrier_of_a_failure_is_brief_and_brings_all_of_it() -> None:
    carrier = WorkerFailed(Failure("user", described(ValueError("long " * 1000))))
    assert str(carrier) == "ValueError on rank 3"
    copy = pickle.loads(pickle.dumps(carrier))
    assert copy.failure.fault.message == "long " * 1000
