"""Arguments, results and errors between program and detached trainer, and names that handles treat in their own way."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import numpy as np
import pytest

from raysgd import TFTrainer, TorchTrainer
from raysgd.core.text.faults import describe_fault
from raysgd.core.worker_errors import worker_error
from raysgd.detached.handle import DetachedTrainer
from raysgd.detached.protocol import (
    BESIDE,
    MAY_GO_ON,
    STAYS_THERE,
    DetachedTraceback,
    packed_answer,
    packed_arguments,
    unpacked_answer,
    unpacked_arguments,
)
from raysgd.exceptions import CallbackError, UnpicklableError
from raysgd.train import Trainer
from raysgd.train.data_parallel_trainer import DataParallelTrainer


def returned(function: Any) -> BaseException:
    """What a program sees that has called a function of a detached trainer."""
    with pytest.raises(BaseException) as found:  # noqa: PT011 - the caller looks
        unpacked_answer(packed_answer(function)).result()
    return found.value


def test_arguments_arrive_as_copies_that_can_be_written() -> None:
    args, kwargs = unpacked_arguments(packed_arguments("train", (np.zeros(3),), {"info": {"a": 1}}))
    args[0][0] = 1.0
    assert kwargs == {"info": {"a": 1}}


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((1, threading.Lock()), {}, "argument 2"),
        ((), {"info": threading.Lock()}, "`info`"),
        ((), {"callbacks": [1, threading.Lock()]}, r"`callbacks\[1\]`"),
    ],
)
def test_an_argument_that_cannot_travel_is_named(args: Any, kwargs: Any, name: str) -> None:
    with pytest.raises(UnpicklableError, match=f"`fit`: {name} cannot be sent to the trainer"):
        packed_arguments("fit", args, kwargs)


def test_an_error_of_a_worker_is_of_both_classes_and_has_the_original() -> None:
    def fail() -> None:
        raise worker_error((describe_fault(KeyError("a"), 0, "node", portable=True),))

    error = returned(fail)
    assert isinstance(error, KeyError)
    assert type(error.faults[0].error) is KeyError  # type: ignore[attr-defined]


def test_an_error_of_user_code_in_another_process_shows_its_lines() -> None:
    def fail() -> None:
        raise OSError(28, "no space left")

    error = returned(fail)
    assert isinstance(error, OSError)
    assert error.errno == 28
    assert isinstance(error.__cause__, DetachedTraceback)
    assert "in fail" in str(error.__cause__)


def test_an_error_keeps_its_cause() -> None:
    def fail() -> None:
        raise CallbackError("callback") from KeyError("the cause")

    cause = returned(fail).__cause__
    assert type(cause) is KeyError
    assert isinstance(cause.__cause__, DetachedTraceback)


def test_an_error_of_a_class_with_another_constructor_arrives() -> None:
    class Odd(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"{first} and {second}")
            self.lock = threading.Lock()

    def fail() -> None:
        raise Odd(1, 2)

    error = returned(fail)
    assert type(error).__name__ == "Odd"
    assert str(error) == "1 and 2"


def test_a_result_that_cannot_travel_is_an_error_that_says_so() -> None:
    assert isinstance(returned(threading.Lock), UnpicklableError)
    assert "the result cannot be sent" in str(returned(threading.Lock))


TRAINERS = (TorchTrainer, TFTrainer, Trainer, DataParallelTrainer)


def public_names(trainer_cls: type[Any]) -> dict[str, bool]:
    """The names of a trainer, and which of them are methods."""
    names: dict[str, bool] = {}
    for owner in trainer_cls.__mro__:
        for name, value in {**dict.fromkeys(inspect.get_annotations(owner)), **vars(owner)}.items():
            if not name.startswith("_"):
                names.setdefault(name, callable(value) or isinstance(value, classmethod | staticmethod))
    return names


@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_methods_are_told_from_attributes_by_the_class(trainer_cls: type[Any]) -> None:
    names = public_names(trainer_cls)
    assert names == {name: callable(getattr(trainer_cls, name, None)) for name in names}


def test_there_are_no_names_here_that_no_trainer_has() -> None:
    names = {name for trainer_cls in TRAINERS for name in public_names(trainer_cls)}
    assert sorted({*BESIDE, *MAY_GO_ON, *STAYS_THERE} - names) == []


def test_the_handle_itself_has_none_of_these_names() -> None:
    names = {name for trainer_cls in TRAINERS for name in public_names(trainer_cls)} - {"shutdown"}
    assert sorted(names & {*vars(DetachedTrainer)}) == []
