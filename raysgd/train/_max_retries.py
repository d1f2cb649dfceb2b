"""`max_retries`: how many losses of workers one piece of work may meet, and what is said at the last one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raysgd.engine.policies import RetryBudget
from raysgd.exceptions import WorkersLostError


class MaxRetries:
    """Counts the losses of workers, separately for each piece of work.

    Attributes:
        budget: What the engine takes retries from.

    Args:
        max_retries: The number of the loss that is raised; below 0 for none.
    """

    def __init__(self, max_retries: int) -> None:
        self._max_retries = max_retries
        self.budget = RetryBudget(restarts_allowed(max_retries))

    @property
    def num_losses(self) -> int:
        """The losses of this piece of work so far, with the one that was raised."""
        return self.budget.num_spent + self.budget.num_refused

    def renew(self) -> None:
        """Starts another piece of work."""
        self.budget.renew()

    def pay(self, loss: Exception) -> None:
        """Counts a loss.

        Raises:
            WorkersLostError: It is the last one.
        """
        if self.budget.is_spent:
            self.budget.refuse()
            raise WorkersLostError(f"{loss}. {self._advice}") from loss
        self.budget.pay_for_rebuild()

    @contextmanager
    def named(self) -> Iterator[None]:
        """Where the engine raises the last loss that is allowed, says what allows more."""
        num_refused = self.budget.num_refused
        try:
            yield
        except WorkersLostError as error:
            if self.budget.num_refused == num_refused:
                raise
            raise WorkersLostError(f"{error}\n{self._advice}") from error

    @property
    def _advice(self) -> str:
        return (
            f"With `max_retries={self._max_retries}` nothing is tried after loss number {self.num_losses}: a larger "
            "number allows more of them, -1 any number."
        )


def restarts_allowed(max_retries: int) -> float:
    """The restarts that `max_retries` of the old library means: its last retry is the one that raises.

    >>> [restarts_allowed(number) for number in (0, 1, 3, -1)]
    [0, 0, 2, inf]
    """
    return float("inf") if max_retries < 0 else max(0, max_retries - 1)
