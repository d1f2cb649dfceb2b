"""What a worker says of an exception in user code."""

from __future__ import annotations

import bdb
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from raysgd.air import CheckpointConfig
from raysgd.core.text.faults import describe_fault, has_user_code
from raysgd.core.worker_errors import training_failed_error, worker_error
from raysgd.exceptions import WorkerFault
from raysgd.torch.data.batches import call_model


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
        return describe_fault(raised, rank=3, node="10.0.0.5", portable=portable)


def test_an_exception_is_told_with_its_class_its_words_and_its_line() -> None:
    fault = described(ValueError("x"))
    assert (fault.rank, fault.type_name, fault.message) == (3, "ValueError", "x")
    assert fault.location.endswith("in described: raise error")
    assert __file__ in fault.location
    assert fault.traceback_text.endswith("ValueError: x\n")


def test_no_part_of_a_fault_shows_a_secret() -> None:
    def connect(**_: str) -> None:
        raise ValueError("no user with token=Hidden1") from KeyError("s3://id:Hidden2@bucket")

    try:
        connect(password="Hidden3")
    except ValueError as error:
        fault = describe_fault(error, rank=3, node="10.0.0.5", portable=True)
    assert "connect(password=***)" in fault.callers[0].replace("'***'", "***").replace('"***"', "***")
    failed = training_failed_error(worker_error((fault,)))
    for text in (repr(fault), str(worker_error((fault,))), repr(worker_error((fault,))), str(failed), repr(failed)):
        assert "Hidden" not in text
    assert str(fault.error) == "no user with token=Hidden1"


def test_a_brief_traceback_says_where_and_leaves_out_the_lines() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    fault = describe_fault(caught.value, 0, "", portable=True, brief=True)
    head, own, *_, last = fault.traceback_text.splitlines()
    assert (head, last) == ("Traceback (most recent call last):", f"JSONDecodeError: {fault.message}")
    assert __file__ in own
    assert "loads(" not in fault.traceback_text
    assert fault.location.endswith('json.loads("{")')


def test_the_line_is_the_users_also_when_a_library_raised() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    location = describe_fault(caught.value, 0, "", portable=True).location
    assert location.endswith('json.loads("{")')
    assert __file__ in location


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        raise IndexError("bad row")


def test_where_no_line_of_the_users_was_running_the_function_of_the_library_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(4, 1)(torch.zeros(2, 5))
    of_torch = caught.value.with_traceback(caught.tb.tb_next)
    fault = describe_fault(of_torch, 0, "", portable=True)
    assert re.fullmatch(r"torch/nn/modules/linear\.py:\d+ in forward \(in no method of yours\)", fault.location)
    assert fault.callers == ()


def test_the_line_is_the_users_also_in_a_process_of_a_loader() -> None:
    with pytest.raises(IndexError) as caught:
        next(iter(DataLoader(Rows(), num_workers=1)))
    of_torch = caught.value.with_traceback(caught.tb.tb_next)
    fault = describe_fault(of_torch, 0, "", portable=True)
    assert fault.location.endswith('in __getitem__: raise IndexError("bad row")')
    assert fault.location.startswith(__file__)
    assert fault.message == "Caught IndexError in DataLoader worker process 0.\nIndexError: bad row"


def test_the_line_is_in_the_users_function_where_tensorflow_has_made_code_of_it() -> None:
    text = f"""in user code:

    File "{__file__}", line 11, in scale  *
        raise ValueError("bad row")
    File "{torch.__file__}", line 7, in deeper  **
        fail()

    ValueError: bad row
"""
    fault = described(ValueError(text))
    assert fault.message == "bad row"
    assert fault.location == f'{__file__}:11 in scale: raise ValueError("bad row")'
    assert fault.callers[0].endswith("in described: raise error")


@dataclass
class Settings:
    size: int = 1

    def __post_init__(self) -> None:
        os.environ["SURELY_NOT_SET"]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (lambda: os.environ["SURELY_NOT_SET"], 'os.environ["SURELY_NOT_SET"]'),
        (lambda: CheckpointConfig(num_to_keep=-1), "CheckpointConfig(num_to_keep=-1)"),  # our own dataclass
        (Settings, 'os.environ["SURELY_NOT_SET"]'),
        (lambda: importlib.import_module("surely_not_there"), 'importlib.import_module("surely_not_there")'),
    ],
)
def test_the_line_is_in_a_file_of_the_user_also_where_python_or_a_library_made_the_code_below(
    code: Callable[[], object], line: str
) -> None:
    with pytest.raises((ValueError, LookupError, ImportError)) as caught:
        code()
    fault = describe_fault(caught.value, 0, "", portable=True)
    assert fault.location.startswith(__file__)
    assert line in fault.location
    below = caught.value.with_traceback(caught.tb.tb_next.tb_next)  # type: ignore[union-attr]
    assert has_user_code(below) == (code is Settings)


@pytest.mark.parametrize("how", ["-c", "-"])
def test_the_line_may_be_of_a_program_without_a_file(how: str) -> None:
    program = (
        "from raysgd.core.text.faults import describe_fault\n"
        "def forward():\n"
        "    int('x')\n"
        "try:\n"
        "    forward()\n"
        "except ValueError as error:\n"
        "    print(describe_fault(error, 0, '', portable=True).location)\n"
    )
    command = [sys.executable, how, *[program] * (how == "-c")]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.rstrip().endswith(":3 in forward")


@pytest.mark.parametrize("folder", ["raysgd", "lib/python_project"])
def test_the_users_files_may_lie_in_a_folder_of_any_name(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text("def forward():\n    raise ValueError('deep')\n")
    spec = importlib.util.spec_from_file_location("model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError, match="deep") as caught:
        module.forward()
    location = describe_fault(caught.value, 0, "", portable=True).location
    assert location == f"{path}:2 in forward: raise ValueError('deep')"


def descend(depth: int) -> None:
    if depth:
        descend(depth - 1)
    json.loads("{")


@pytest.mark.parametrize(("depth", "num_callers"), [(0, 1), (4, 5), (5, 5), (100, 5)])
def test_the_users_lines_that_led_there_are_told_the_nearest_first(depth: int, num_callers: int) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        descend(depth)
    fault = describe_fault(caught.value, 0, "", portable=True)
    assert fault.location.endswith('in descend: json.loads("{")')
    assert len(fault.callers) == num_callers
    assert fault.callers[-1].endswith(": descend(depth)")
    if depth:
        assert fault.callers[0].endswith("in descend: descend(depth - 1)")
    assert (f"{depth + 1 - 4} other lines of your code" in fault.callers) == (depth > 4)


def look_up(table: dict[str, int], *, chained: bool) -> None:
    try:
        table["x"]
    except KeyError as error:
        if chained:
            raise ValueError("no such row") from error
        raise ValueError("no such row")  # noqa: B904 - as users write it


@pytest.mark.parametrize(("chained", "words"), [(True, "caused by"), (False, "raised while handling")])
def test_what_led_to_an_exception_is_told_with_its_line(chained: bool, words: str) -> None:
    with pytest.raises(ValueError, match="no such row") as caught:
        look_up({}, chained=chained)
    [cause] = describe_fault(caught.value, 0, "", portable=True).causes
    assert cause.startswith(f"{words} KeyError: 'x', raised at {__file__}:")
    assert cause.endswith('in look_up: table["x"]')


def test_a_debugger_in_a_worker_is_answered_with_what_to_do() -> None:
    fault = described(bdb.BdbQuit())
    assert "`use_local=True`" in fault.message
    assert described(bdb.BdbQuit(), portable=False).message == ""  # there the user has left it


def test_an_exception_that_was_never_raised_has_no_line() -> None:
    assert describe_fault(ValueError("x"), 0, "", portable=True).location == "an unknown place"


def test_an_exception_travels_although_its_class_does_not_pickle() -> None:
    copy = pickle.loads(pickle.dumps(described(NeedsMore(7, "t"))))
    assert isinstance(copy.error, NeedsMore)
    assert copy.error.code == 7


class OwnWay(Exception):
    """It says itself how it is pickled, and that fails."""

    def __reduce__(self) -> Any:
        return threading.Lock, ()


def test_what_cannot_travel_stays_behind_and_the_rest_goes() -> None:
    fault = described(Locked())
    copy = pickle.loads(pickle.dumps(fault)).error
    assert isinstance(copy, Locked)
    assert str(copy) == "locked"
    assert "lock object" in copy.lock  # type: ignore[operator]
    assert not isinstance(described(Locked(), portable=False).error.lock, str)  # type: ignore[union-attr]


def test_an_exception_that_cannot_travel_at_all_sends_its_words() -> None:
    fault = described(OwnWay("stuck"))
    assert fault.error is None
    assert (fault.type_name, fault.message) == ("OwnWay", "stuck")


def test_the_traceback_begins_at_the_users_first_line() -> None:
    """`call` is ours, and here it stands for all that the library calls before user code."""

    def train_epoch(iterator: Any) -> None:
        raise ValueError("deep")

    with pytest.raises(ValueError, match="deep") as caught:
        call_model(train_epoch, [[]])
    in_user_code = _called_by_the_library(caught.value)
    fault = describe_fault(in_user_code, 0, "", portable=True)
    first = fault.traceback_text.splitlines()[1]
    assert __file__ in first
    assert "in train_epoch" in first


def _called_by_the_library(error: BaseException) -> BaseException:
    """`error` as it looks in a worker, where nothing but the library is below the user's code."""
    link = error.__traceback__
    while link is not None and "raysgd" + os.sep + "torch" not in link.tb_frame.f_code.co_filename:
        link = link.tb_next
    assert link is not None
    return error.with_traceback(link)


def test_where_the_exception_stays_python_shows_its_frames() -> None:
    fault = described(ValueError("x"), portable=False)
    assert fault.traceback_text == ""
    assert fault.error.__traceback__ is not None


@pytest.mark.parametrize("error", [ValueError("x" * 10**7), NeedsMore(7, "y" * 10**7)])
def test_of_a_huge_exception_the_beginning_travels(error: Exception) -> None:
    fault = described(error)
    assert len(pickle.dumps(fault)) < 200_000
    assert fault.message.endswith("... (cut; 10,000,000 characters in all)")
    assert type(fault.error) is type(error)
    assert fault.location.endswith("in described: raise error")


def test_huge_values_of_an_exception_stay_behind() -> None:
    error = ValueError("too large")
    error.batch = bytearray(10**7)  # type: ignore[attr-defined]
    fault = described(error)
    assert len(pickle.dumps(fault)) < 200_000
    assert str(fault.error) == "too large"
