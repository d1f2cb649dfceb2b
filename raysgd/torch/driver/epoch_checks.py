"""Checks in the driver that the workers' results from a call to `train` or `validate` are consistent."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raysgd.exceptions import UnevenStepsError
from raysgd.trainer.messages.epochs import EpochAnswer
from raysgd.trainer.messages.joint_work import difference
from raysgd.trainer.messages.weight_sums import REASONS_OF_TORCH, check_equal
from raysgd.utils import BATCH_COUNT

logger = logging.getLogger(__name__)


def check_alike(answers: Sequence[EpochAnswer]) -> None:
    """Check that workers with synchronized models took the same steps in the same order and have equal weights.

    Args:
        answers: The workers' results, in the order of the ranks.

    Raises:
        UnevenStepsError: The workers trained on different numbers of batches, or their sequences of all-reduces and
            optimizer steps differ.
        RanksDifferError: The workers' weights differ.
    """
    counts = [answer.num_steps for answer in answers]
    if len(set(counts)) > 1:
        raise UnevenStepsError(
            f"The workers drew {counts} batches, but replicas that exchange gradients must take the same number of "
            'steps. Let `train_epoch` draw the same number of batches on all ranks, or pass `strategy="none"` and keep '
            "the replicas in sync yourself."
        )
    if words := difference(dict(enumerate(answers))):
        raise UnevenStepsError(words)
    check_equal({rank: answer.weight_sums for rank, answer in enumerate(answers)}, REASONS_OF_TORCH)


def warn_of_nothing(name: str, answers: Sequence[EpochAnswer], num_steps: int | None) -> None:
    """Warn if no worker got a batch, for example because the data is empty.

    Args:
        name: Name of the data in the warning: "train" or "validation".
        answers: The workers' results.
        num_steps: Number of steps that the user requested; None for the whole epoch. With 0, there is no warning.
    """
    counts = {answer.metrics.get(BATCH_COUNT) for answer in answers if answer.metrics is not None}
    if num_steps != 0 and counts == {0}:
        logger.warning(
            "the %s data has no batches: it is empty, or `drop_last` removed its only batch, or it is an iterator "
            "that was already exhausted",
            name,
        )
