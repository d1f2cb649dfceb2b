"""`max_retries`: how many failures of workers one piece of work may meet, and what renews them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raysgd.engine.policies import Decision, Diagnosis, FailurePolicy, RetryBudget


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
