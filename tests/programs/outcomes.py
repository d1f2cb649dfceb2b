"""What came of a program: what its calls returned, and the weights at the end."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

TOLERANCE = 1e-6
"""Of numbers in float64, in proportion to them."""

Row = dict[str, Any]


@dataclass
class Outcome:
    """What came of a program.

    Attributes:
        rows: For each call what it returned, as far as that is compared.
        weights: For each model its numbers.
    """

    rows: list[Row] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)

    def keep(self, *models: torch.nn.Module) -> Outcome:
        """Keep the weights of models."""
        self.weights = [
            torch.cat([value.detach().double().flatten() for value in model.state_dict().values()]) for model in models
        ]
        return self

    @property
    def exact(self) -> str:
        """All of it to the last bit, in a line, to compare with that of another version of the library."""
        rows = "; ".join(" ".join(_exact_items(row)) for row in self.rows)
        weights = (hashlib.sha256(each.numpy().tobytes()).hexdigest()[:16] for each in self.weights)
        return f"{rows} | {' '.join(weights)}"


def _exact_items(row: Mapping[str, Any]) -> Iterator[str]:
    return (f"{name}={_exact(value)}" for name, value in row.items() if not name.endswith("seconds"))


def _exact(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{' '.join(map(_exact, value))}]"
    return value.hex() if isinstance(value, float) else str(value)


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """Return what differs, each in a line: what is expected has to be there; there may be more."""
    lines = [] if len(expected.rows) == len(found.rows) else [f"{len(found.rows)} rows for {len(expected.rows)}"]
    for number, (row, other) in enumerate(zip(expected.rows, found.rows, strict=False)):
        lines += [f"row {number}: {line}" for line in _differences_of_row(row, other)]
    for number, (weights, others) in enumerate(zip(expected.weights, found.weights, strict=True)):
        lines += _differences_of_weights(number, weights, others)
    return lines


def _differences_of_row(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {found.get(name)!r} for {value!r}"
        for name, value in expected.items()
        if name not in found or not are_close(value, found[name])
    ]


def _differences_of_weights(number: int, expected: torch.Tensor, found: torch.Tensor) -> list[str]:
    if expected.shape != found.shape:
        return [f"model {number} has {len(found)} numbers for {len(expected)}"]
    distances = (expected - found).abs() / expected.abs().clamp(min=1.0)
    if bool(torch.isnan(distances).any()):
        return [f"model {number} has NaN"]
    worst = int(distances.argmax())
    if distances[worst] <= TOLERANCE:
        return []
    return [
        f"model {number} is {float(distances[worst]):.2g} apart: {float(found[worst])} for {float(expected[worst])}"
    ]


def are_close(expected: Any, found: Any) -> bool:
    """Compare numbers, or sequences of numbers, or anything else for being equal."""
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return len(expected) == len(found) and all(map(are_close, expected, found))
    try:
        one, other = float(expected), float(found)
    except (TypeError, ValueError):
        return bool(expected == found)
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
