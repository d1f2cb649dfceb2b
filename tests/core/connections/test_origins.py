"""Telling whose an exception is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from raysgd.core.connections._origins import is_of, with_causes
from tests.helpers.fakes import raise_from_compiled_code


def caught(function: Callable[[], Any]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def plainly() -> NoReturn:
    raise ValueError("mine")


@contextmanager
def nothing_special() -> Iterator[None]:
    yield


def inside_a_context() -> None:
    with nothing_special():
        raise ValueError("mine")


def raised_again() -> None:
    try:
        plainly()
    except ValueError as error:
        raise error


def out_of_a_call() -> None:
    raise_from_compiled_code(ValueError, "theirs")


def out_of_an_operator() -> None:
    _ = b"1" % 2


def out_of_a_loop() -> None:
    for _ in map(int, ["x"]):
        pass


@pytest.mark.parametrize("function", [plainly, inside_a_context, raised_again])
def test_what_code_outside_of_the_library_raises_is_not_the_librarys(function: Callable[[], Any]) -> None:
    assert not is_of(caught(function), "json")


@pytest.mark.parametrize("function", [out_of_a_call, out_of_an_operator, out_of_a_loop])
def test_what_compiled_code_raises_counts_as_the_librarys(function: Callable[[], Any]) -> None:
    assert is_of(caught(function), "json")


def test_what_a_library_raises_in_python_is_its_own() -> None:
    error = caught(lambda: json.loads("{}}"))  # `raise` in `json.decoder`
    assert is_of(error, "json")
    assert is_of(error, "json.decoder")
    for other in ("email", "json.encoder", "no_such_package", "sys"):
        assert not is_of(error, other)


def test_what_a_part_of_it_only_passes_on_is_not() -> None:
    assert not is_of(caught(lambda: json.loads("{}}")), "json", passing_on="json.decoder")


def test_nobody_is_known_to_have_raised_what_was_never_raised() -> None:
    assert not is_of(ValueError("x"), "json")


def test_causes_are_named_however_they_were_given() -> None:
    def given() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    def implied() -> None:
        try:
            given()
        except ValueError:
            raise TypeError("third")  # noqa: B904 - that is what is tested

    def denied() -> None:
        try:
            given()
        except ValueError:
            raise TypeError("third") from None

    assert [str(error) for error in with_causes(caught(given))] == ["second", "'first'"]
    assert [str(error) for error in with_causes(caught(implied))] == ["third", "second", "'first'"]
    assert [str(error) for error in with_causes(caught(denied))] == ["third"]


def test_causes_that_go_in_a_circle_come_to_an_end() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert list(with_causes(first)) == [first, second]
