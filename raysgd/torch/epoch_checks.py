"""What the driver makes sure of when all workers have answered a call of `train` or `validate`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raysgd.exceptions import UnevenStepsError
from raysgd.replicas.epochs import EpochAnswer
from raysgd.utils import BATCH_COUNT

logger = logging.getLogger(__name__)


def check_even_steps(answers: Sequence[EpochAnswer], is_synchronous: bool) -> None:
    """An epoch of replicas that step together counts only when all took the same steps."""
    counts = [answer.num_steps for answer in answers]
    if is_synchronous and len(set(counts)) > 1:
        raise UnevenStepsError(
            f"The workers drew {counts} batches: replicas that exchange gradients must take the same number of "
            'steps. Let `train_epoch` draw the same number on all ranks, or pass `parallel="none"` and keep '
            "them equal yourself."
        )


def warn_of_nothing(name: str, answers: Sequence[EpochAnswer], num_steps: int | None) -> None:
    """Tells of a loop that had no batch on any worker, though it was to have some."""
    counts = [answer.metrics.values.get(BATCH_COUNT) for answer in answers if answer.metrics is not None]
    if num_steps != 0 and counts and all(count == 0 for count in counts):
        logger.warning(
            "the %s data has no batches: it is empty, or `drop_last` removed its only batch, or it is an iterator "
            "that was used up already",
            name,
        )
