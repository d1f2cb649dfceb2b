"""What a sequence of calls has to lead to, by the documentation: weights, epochs, samples, rows.

The model is a table of numbers that begin with 0. Each step adds 1 to those of the samples of its global batch, so a
number says how often its sample was used, and stands in the state itself.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NUM_SAMPLES, NUM_OTHERS, NUM_VALIDATED, BATCH_SIZE = 96, 48, 40, 8
"""Of the registered data, of what single calls bring, which have the numbers after these, and of the validation."""
CLOSE = 1e-3
NAMES = ("epoch", "num_samples", "loss")


class Wrong(AssertionError):
    """Something is not as the documentation says."""


@dataclass
class Uses:
    """How often the samples of some data were used.

    Attributes:
        num_samples: How many there are.
        num_batches: The position in the running pass.
        num_passes: How many passes were completed.
        num_left: How many passes were left in the middle, and their batches.
    """

    num_samples: int
    num_batches: int = 0
    num_passes: int = 0
    num_left: int = 0
    num_batches_left: int = 0

    @property
    def all_batches(self) -> int:
        return self.num_samples // BATCH_SIZE

    def take(self, num_steps: int | None) -> tuple[int, int, float]:
        """Use batches: so many, or the rest of the pass.

        Returns:
            How many batches were used, how many passes were begun, and how often their samples had been used before.
        """
        num_taken = num_steps or self.all_batches - self.num_batches
        num_begun, before = 0, 0
        for _ in range(num_taken):
            num_begun += self.num_batches == 0
            before += self.num_passes
            self.num_batches += 1
            if self.num_batches == self.all_batches:
                self.num_batches, self.num_passes = 0, self.num_passes + 1
        return num_taken, num_begun, before / num_taken

    def leave(self) -> None:
        """End the pass in its middle."""
        self.num_left += self.num_batches > 0
        self.num_batches_left += self.num_batches
        self.num_batches = 0

    def check(self, name: str, numbers: Sequence[float]) -> None:
        """Compare with the numbers that the model has.

        Raises:
            Wrong: Some sample was used too often or not often enough.
        """
        total = self.num_samples * self.num_passes + BATCH_SIZE * (self.num_batches + self.num_batches_left)
        most = self.num_passes + self.num_left + (self.num_batches > 0)
        found = sum(numbers), min(numbers), max(numbers)
        is_right = abs(found[0] - total) < CLOSE and found[1] > self.num_passes - CLOSE and found[2] < most + CLOSE
        if not is_right:
            raise Wrong(
                f"{name} data: used {found[0]:g} times together, each {found[1]:g} to {found[2]:g} times; expected "
                f"{total} together, each {self.num_passes} to {most} times"
            )


@dataclass
class Books:
    """What has to be so by now.

    Attributes:
        registered: The registered data.
        others: The data that calls brought.
        num_epochs: How many epochs were begun.
        rows: For each epoch of the history, what it has to have.
        saved: The state in the file.
    """

    registered: Uses = field(default_factory=lambda: Uses(NUM_SAMPLES))
    others: Uses = field(default_factory=lambda: Uses(NUM_OTHERS))
    num_epochs: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)
    saved: tuple[Any, ...] | None = None

    def train(self, num_steps: int | None = None) -> dict[str, float]:
        """Return what a call has to return that trains on the registered data."""
        num_taken, num_begun, before = self.registered.take(num_steps)
        self.num_epochs += num_begun
        return self._row(num_taken, before)

    def train_on_others(self, num_steps: int | None, is_new: bool) -> dict[str, float]:
        """Return what a call has to return that brings data, the same as the last one or others."""
        if is_new:
            self.others.leave()
        num_taken, _, before = self.others.take(num_steps)
        self.num_epochs += 1
        row = self._row(num_taken, before)
        if self.others.num_left:  # then it depends on their order
            del row["loss"]
        return row

    def _row(self, num_batches: int, before: float) -> dict[str, float]:
        row = {"epoch": self.num_epochs, "num_samples": num_batches * BATCH_SIZE, "loss": -before}
        self.rows.append(row)
        return row

    def validate(self) -> dict[str, float]:
        """Return what a validation has to return."""
        loss = {} if self.registered.num_batches else {"loss": -float(self.registered.num_passes)}
        return {"num_samples": NUM_VALIDATED, **loss}

    def save(self) -> None:
        self.saved = copy.deepcopy((self.registered, self.others, self.num_epochs))

    def load(self) -> None:
        """Go back to what was saved, but for the rows; a call that brings data begins with their first batch."""
        assert self.saved is not None
        self.registered, self.others, self.num_epochs = copy.deepcopy(self.saved)
        self.others.leave()

    def check_weights(self, tables: Sequence[Sequence[float]]) -> None:
        """Compare with the models.

        Raises:
            Wrong: A sample was used too often or not often enough.
        """
        for table in tables:
            self.registered.check("registered", table[:NUM_SAMPLES])
            self.others.check("other", table[NUM_SAMPLES:])

    def check_rows(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str] = NAMES) -> None:
        """Compare with the history.

        Args:
            rows: Of the history.
            names: What is compared of a row.

        Raises:
            Wrong: There is another number of epochs, or one has another number.
        """
        expected, found = [row["epoch"] for row in self.rows], [row["epoch"] for row in rows]
        if len(found) != len(expected) or ("epoch" in names and found != expected):
            raise Wrong(f"the history has the epochs {found}, expected {expected}")


def compare(
    what: str, found: Mapping[str, Any], expected: Mapping[str, float], is_whole: bool, names: Sequence[str] = NAMES
) -> None:
    """Compare a result.

    Args:
        what: The call.
        found: What it returned.
        expected: What that has to be.
        is_whole: Whether the metrics are those of all samples; else some may be missing.
        names: Which entries to compare.

    Raises:
        Wrong: It differs.
    """
    losses = [found[name] for name in ("train_loss", "val_loss", "validation_loss") if name in found]
    for name, value in ((name, expected[name]) for name in names if name in expected):
        seen = losses[0] if name == "loss" and losses else found.get(name)
        if name == "loss" and not is_whole:
            continue
        is_less = name == "num_samples" and not is_whole and seen is not None and 0 <= seen <= value
        if not is_less and (seen is None or abs(seen - value) > CLOSE):
            raise Wrong(f"{what} returned {name} {seen}, expected {value:g}")
