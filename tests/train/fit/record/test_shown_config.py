from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from raysgd.train.fit.record.shown_config import shown_config

URI = "s3://id:secret@bucket/a"


@pytest.mark.parametrize(
    "value",
    [0.1, 3, True, None, "adam", [1, [2, 3]], (1, 2), {"lr": {"low": 0.1}}, {}, np.float32(1), {3: "three"}],
    ids=str,
)
def test_a_config_is_shown_as_it_is(value: Any) -> None:
    assert shown_config(value) == value


def test_the_keys_of_stores_are_not_shown() -> None:
    assert shown_config({"a": URI, "b": {"c": ["x", URI, {"d": URI}]}}) == {
        "a": "s3://***@bucket/a",
        "b": {"c": ["x", "s3://***@bucket/a", {"d": "s3://***@bucket/a"}]},
    }


@pytest.mark.parametrize(
    ("value", "note"),
    [
        (np.zeros(1 << 16), r"(ndarray: 524,"),
        ([0.5] * 100_000, "(list: "),
        ("x" * 100_000, "(str: 100,"),
        ({str(number): number for number in range(10_000)}, "(dict: "),
    ],
    ids=["array", "list", "text", "table"],
)
def test_a_large_value_is_shown_by_its_kind_and_size(value: Any, note: str) -> None:
    shown = shown_config({"lr": 0.1, "model": {"large": value, "depth": 3}})
    assert (shown["lr"], shown["model"]["depth"]) == (0.1, 3)
    assert shown["model"]["large"].startswith(note)


def test_many_values_that_are_not_large_are_all_shown() -> None:
    config = {str(number): "x" * 1000 for number in range(100)}
    assert shown_config(config) == config


def test_what_is_inside_of_itself_or_cannot_be_pickled_is_no_problem() -> None:
    lock, config, numbers = threading.Lock(), {"lr": 0.1}, [1]
    config |= {"self": config, "lock": lock, "numbers": numbers}  # type: ignore[dict-item]
    numbers.append(numbers)  # type: ignore[arg-type]
    shown = shown_config(config)
    assert (shown["self"], shown["lock"], shown["numbers"][0]) == ("...", lock, 1)
