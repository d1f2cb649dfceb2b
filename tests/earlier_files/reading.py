"""What tests ask of a trainer that has loaded a file of an earlier version."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tests.earlier_files.writing import FILES, OUTCOMES, Case, Trainer, plain_training, weights

_TOLERANCES = {"torch": 1e-6, "keras3": 1e-4, "keras2": 1e-4}
"""Where processors or frameworks round in other ways than those of then."""


@cache
def outcomes() -> dict[str, Any]:
    """Return what the earlier version saved, and what it came to."""
    found: dict[str, Any] = json.loads((FILES / OUTCOMES).read_text())
    return found


def differences(found: Any, expected: Any, tolerance: float, place: str = "") -> list[str]:
    """Return where two results differ by more than a share of the value."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping) and found.keys() == expected.keys():
        pairs = [(f"{place}/{key}", found[key], expected[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(found, Sequence) and len(found) == len(expected):
        pairs = [(f"{place}/{number}", *pair) for number, pair in enumerate(zip(found, expected, strict=True))]
    elif isinstance(expected, float) and isinstance(found, float):
        is_same = math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
        return [] if is_same else [f"{place}: {found!r} instead of {expected!r}"]
    else:
        return [] if found == expected else [f"{place}: {found!r} instead of {expected!r}"]
    return [each for at, left, right in pairs for each in differences(left, right, tolerance, at)]


@cache
def tolerance_of(framework: str) -> float:
    """Return how exact results must be: to the last bit where the framework alone gives what it gave then."""
    return 0.0 if plain_training(framework) == outcomes()[framework] else _TOLERANCES[framework]


def check_loaded_and_resumed(case: Case, trainer: Trainer, framework: str = "torch") -> None:
    """Load the file into a new trainer, which must go on as the version that wrote it."""
    expected = outcomes()[case.name]
    case.load(trainer, FILES / case.name)
    assert weights(trainer) == expected["saved"]
    assert differences(case.go_on(trainer), expected["went_on"], tolerance_of(framework)) == []
