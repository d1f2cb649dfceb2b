"""Which optimizers a call is for."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from raysgd.torch.operator.internals import OptimizerChoice
from tests.torch.operators_for_tests import an_optimizer


def choice_of(*registered: Any) -> OptimizerChoice:
    return OptimizerChoice(lambda: "the default", registered)


def test_an_argument_says_it() -> None:
    first, second = an_optimizer(), an_optimizer()
    choice = choice_of(first, second)
    assert choice.chosen("backward", second) == [second]
    assert choice.chosen("backward", (first, second)) == [first, second]
    with choice.acting_on(first):
        assert choice.chosen("backward", second) == [second]


def test_what_stock_code_acts_on_says_it_until_it_is_done() -> None:
    choice = choice_of("a", "b")
    with choice.acting_on("a"):
        assert choice.chosen("backward", None) == ["a"]
        with suppress(KeyError), choice.acting_on("b"):
            assert choice.chosen("backward", None) == ["b"]
            raise KeyError
        assert choice.chosen("backward", None) == ["a"]
    with pytest.raises(ValueError, match="2 optimizers are registered"):
        choice.chosen("optimizer_step", None)


@pytest.mark.parametrize("registered", [(), ("one",)])
def test_one_alone_need_not_be_named(registered: tuple[str, ...]) -> None:
    assert choice_of(*registered).chosen("backward", None) == ["the default"]


@pytest.mark.parametrize(
    ("given", "registered", "bystanders"),
    [(None, ("a",), []), (None, ("a", "b", "c"), ["b", "c"]), ("a", ("a", "b"), []), (None, (), [])],
)
def test_bystanders_are_those_that_stock_code_leaves_alone(
    given: Any, registered: tuple[str, ...], bystanders: list[str]
) -> None:
    assert choice_of(*registered).bystanders(given, ["a"]) == bystanders
