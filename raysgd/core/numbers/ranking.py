"""Scores of checkpoints, and the rule that decides which checkpoints of a run to keep.

This module reads and writes no files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

MAX = "max"
MIN = "min"

_HIGH_IS_BEST = (
    *("acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "f1score", "iou", "kappa", "map", "mcc", "mrr", "ndcg"),
    *("precision", "psnr", "r2", "r2score", "recall", "reward", "rouge", "ssim"),
)
_LOW_IS_BEST = (
    *("cer", "divergence", "entropy", "err", "error", "fid", "loss", "mae", "mape", "mse", "msle", "nll"),
    *("perplexity", "ppl", "wer"),
)

T = TypeVar("T")


@dataclass(frozen=True)
class SavedCheckpoint(Generic[T]):
    """One checkpoint of a run.

    Attributes:
        number: The checkpoint's number in the run, or its epoch and step. Newer checkpoints have higher numbers.
        score: The value that ranks the checkpoint. None if it has no score.
        content: The checkpoint itself, or its path or key.
    """

    number: Any
    score: float | None
    content: T


@dataclass(frozen=True)
class BestCheckpoints:
    """The rule that decides which checkpoints of a run to keep: the best checkpoints, plus the newest.

    NaN and a missing score rank below any number. Of two equal scores, the newer checkpoint ranks higher. Checkpoints
    without a score are therefore ordered by age.

    >>> losses = [SavedCheckpoint(*each, None) for each in enumerate([math.nan, 3.0, 7.0, 5.0])]
    >>> kept, dropped = BestCheckpoints(num_best=2, order="min").divide(losses)
    >>> [each.score for each in kept], [each.score for each in dropped]
    ([3.0, 5.0], [nan, 7.0])

    Attributes:
        num_best: Number of best checkpoints to keep. None keeps all.
        order: "max" if a high score is best, "min" if a low score is best.
        num_newest: Number of newest checkpoints to keep, whatever their scores. None keeps all.
    """

    num_best: int | None
    order: str = MAX
    num_newest: int | None = 0

    def best(self, saved: Iterable[SavedCheckpoint[T]]) -> list[SavedCheckpoint[T]]:
        """Return the `num_best` best checkpoints, worst first. Unlike `divide`, this ignores `num_newest`."""
        ranked = sorted(saved, key=self._rank)
        return ranked if self.num_best is None else ranked[max(0, len(ranked) - self.num_best) :]

    def divide(
        self, saved: Iterable[SavedCheckpoint[T]], pending: Iterable[Any] = ()
    ) -> tuple[list[SavedCheckpoint[T]], list[SavedCheckpoint[T]]]:
        """Return the checkpoints to keep and the checkpoints to delete, both oldest first.

        Args:
            saved: All checkpoints.
            pending: Numbers of checkpoints whose score is not known yet. They are kept, and do not count toward
                `num_best`.
        """
        by_age = sorted(saved, key=attrgetter("number"))
        newest = by_age if self.num_newest is None else by_age[max(0, len(by_age) - self.num_newest) :]
        unknown = set(pending)
        best = self.best(each for each in by_age if each.number not in unknown)
        stay = unknown.union(each.number for each in (*newest, *best))
        kept = [each for each in by_age if each.number in stay]
        return kept, [each for each in by_age if each.number not in stay]

    def _rank(self, each: SavedCheckpoint[T]) -> tuple[bool, float, Any]:
        if each.score is None or math.isnan(each.score):
            return False, 0.0, each.number
        return True, each.score if self.order == MAX else -each.score, each.number


def as_score(value: Any) -> float | None:
    """Return a metric as a float for comparisons, or None if it is not a number.

    A tensor with one element counts as a number.
    """
    if isinstance(value, str | bytes | None):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def is_number(value: Any) -> bool:
    """Return True if the value is a number. NumPy scalars and tensors with one element count as numbers."""
    return as_score(value) is not None


def mode_of(metric: str) -> str | None:
    """Guess from a metric's name whether a high value ("max") or a low value ("min") is best. Return None if unknown.

    The last word in the name that ends with a known word, such as `acc` or `loss`, decides.

    >>> [mode_of(name) for name in ("val_accuracy", "val/top_5_acc", "MulticlassF1Score", "mIoU", "mAP50")]
    ['max', 'max', 'max', 'max', 'max']
    >>> [mode_of(name) for name in ("val_loss", "rmse", "accuracy_loss", "word_errors", "val_score", "seconds")]
    ['min', 'min', 'min', 'min', None, None]
    """
    for word in reversed(re.split(r"[^a-z0-9]+", metric.lower())):
        forms = word, word.rstrip("s0123456789")
        for mode, endings in ((MAX, _HIGH_IS_BEST), (MIN, _LOW_IS_BEST)):
            if any(form.endswith(endings) for form in forms):
                return mode
    return None
