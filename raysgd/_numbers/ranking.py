"""Scores, and the rule which checkpoints of a run stay: decisions only, nothing here reads or writes."""

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
        number: Its number in the run, the higher the newer; or its epoch and its step.
        score: What it is judged by; None for a missing score.
        content: The checkpoint itself, or what its owner finds it by.
    """

    number: Any
    score: float | None
    content: T


@dataclass(frozen=True)
class BestCheckpoints:
    """The rule which checkpoints of a run stay: so many of the best ones, and so many of the newest ones as well.

    NaN and a missing score are worse than any number. Of equals the newer one is better, so that checkpoints without
    a score are in the order of their time.

    >>> losses = [SavedCheckpoint(*each, None) for each in enumerate([math.nan, 3.0, 7.0, 5.0])]
    >>> kept, dropped = BestCheckpoints(num_best=2, order="min").divide(losses)
    >>> [each.score for each in kept], [each.score for each in dropped]
    ([3.0, 5.0], [nan, 7.0])

    Attributes:
        num_best: How many of the best stay; None for all.
        order: Whether "max" or "min" of the score is best.
        num_newest: How many of the newest stay, be they good or not; None for all.
    """

    num_best: int | None
    order: str = MAX
    num_newest: int | None = 0

    def best(self, saved: Iterable[SavedCheckpoint[T]]) -> list[SavedCheckpoint[T]]:
        """Return the best ones, worst first. A checkpoint that only stays for being new is not among them."""
        ranked = sorted(saved, key=self._rank)
        return ranked if self.num_best is None else ranked[max(0, len(ranked) - self.num_best) :]

    def divide(
        self, saved: Iterable[SavedCheckpoint[T]], pending: Iterable[Any] = ()
    ) -> tuple[list[SavedCheckpoint[T]], list[SavedCheckpoint[T]]]:
        """Return the checkpoints that stay, and those to be deleted, each oldest first.

        Args:
            saved: All that there are.
            pending: The numbers of those whose score is not known yet. They stay, and take no other one's place.
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
    """Return a value as a number to compare by; None when it is not one. Tensors of one element count."""
    if isinstance(value, str | bytes | None):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def is_number(value: Any) -> bool:
    """Return whether this is a number, also as a NumPy scalar or a tensor of one element."""
    return as_score(value) is not None


def mode_of(metric: str) -> str | None:
    """Return whether "max" or "min" of a metric is best, as its name says; None if it does not. The last word counts.

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
