"""A saved state is looked at before a worker is asked to load it."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.worker.state.state_checks import check_parts

STATE = {"epoch": 1, "operator": None, "models": [1, 2], "optimizers": []}


def test_a_state_with_all_its_parts_is_accepted() -> None:
    check_parts(STATE, {"models": 2, "optimizers": 0}, "operator")


@pytest.mark.parametrize("missing", ["epoch", "operator", "models"])
def test_a_missing_part_is_named_with_those_that_are_there(missing: str) -> None:
    state = {key: value for key, value in STATE.items() if key != missing}
    with pytest.raises(KeyError, match=f"no '{missing}'; it has .*optimizers"):
        check_parts(state, {"models": 2, "optimizers": 0}, "operator")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "'models' is a `dict` instead of a list"),
        ([1], "holds 1 models, but the operator registered 2. Nothing was loaded"),
    ],
)
def test_a_wrong_number_of_parts_is_refused(models: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_parts({**STATE, "models": models}, {"models": 2})
