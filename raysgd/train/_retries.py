"""`max_retries`: how many failures of workers one piece of work may meet, what renews them, and what is said last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from raysgd.engine.policies import Decision, Diagnosis, FailurePolicy, RetryBudget
from raysgd.exceptions import WorkersLostError

RETRY_ADVICE = (
    "With `max_retries={allowed}` nothing is tried after loss number {loss}: a larger number allows more, -1 any "
    "number."
)


class LossCounter:
    """Counts the failures of workers, separately for each piece of work.

    Attributes:
        budget: What the engine takes retries from.

    Args:
        max_retries: The number of the loss that is raised; below 0 for none.
        advice: What the last loss says about that number.
    """

    def __init__(self, max_retries: int, advice: str = RETRY_ADVICE) -> None:
        self._max_retries = max_retries
        self._words = advice
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
            raise WorkersLostError(f"{loss}. {self._advice}".rstrip()) from loss
        self.budget.pay_for_restart()

    @contextmanager
    def named(self) -> Iterator[None]:
        """Returns where the engine raises the last loss that is allowed, says what allows more."""
        num_refused = self.budget.num_refused
        try:
            yield
        except WorkersLostError as error:
            if self.budget.num_refused == num_refused or not self._words:
                raise
            raise WorkersLostError(f"{error}\n{self._advice}") from error

    @property
    def _advice(self) -> str:
        return self._words.format(allowed=self._max_retries, loss=self.num_losses)


@dataclass(frozen=True, kw_only=True)
class RenewingPolicy(FailurePolicy):
    """Decides what follows a failure; when a checkpoint has landed since the last one, the earlier ones are forgotten.

    Why, and why not after an exception of the function: ADR 94.

    Attributes:
        take_landing: Says, once, whether a checkpoint has landed since it was asked last.
    """

    take_landing: Callable[[], bool]

    def decide(self, diagnosis: Diagnosis, budget: RetryBudget, can_continue: bool) -> Decision:
        """Return what to do next. Where survivors go on, that does not wait for a checkpoint on its way."""
        is_needed = budget.is_spent or not (self.continues and can_continue)
        if is_needed and self.take_landing():
            budget.renew()
        return super().decide(diagnosis, budget, can_continue)


def restarts_allowed(max_retries: int) -> float:
    """The restarts that `max_retries` of the old library means: its last retry is the one that raises.

    >>> [restarts_allowed(number) for number in (0, 1, 3, -1)]
    [0, 0, 2, inf]
    """
    return float("inf") if max_retries < 0 else max(0, max_retries - 1)
