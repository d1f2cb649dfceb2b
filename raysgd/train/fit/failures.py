"""How often a run of `fit` may fail: each new checkpoint that is stored starts the count again.

Why it does, and why not after an exception of the function: ADR 94.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raysgd.engine.failures import Diagnosis
from raysgd.engine.policies import FailurePolicy, Raise, Rebuild, Rejoin, RetryBudget


def _no_landing() -> bool:
    """There are no checkpoints."""
    return False


@dataclass(frozen=True)
class FitFailurePolicy(FailurePolicy):
    """Decides what follows a failure; when a checkpoint has landed since the last one, the earlier ones are forgotten.

    Attributes:
        take_landing: Says, once, whether a checkpoint has landed since it was asked last.
    """

    take_landing: Callable[[], bool] = _no_landing

    def decide(self, diagnosis: Diagnosis, budget: RetryBudget, can_rejoin: bool) -> Rejoin | Rebuild | Raise:
        """What to do next."""
        if self.take_landing():
            budget.renew()
        return super().decide(diagnosis, budget, can_rejoin)
