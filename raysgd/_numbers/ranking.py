"""Orders things by a score and says which ones stay: decisions only, nothing here reads or writes."""

from __future__ import annotations

import math
import re
from typing import Any

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

_Rank = tuple[bool, float, int]


class Ranking:
    """Orders checkpoints by their score and says which ones are deleted.

    NaN and a missing score are worse than any number. Of equals the newer one is better, so that checkpoints without
    a score are in the order of their time.

    >>> ranking = Ranking(num_to_keep=2, order="min")
    >>> [ranking.admit(number, loss) for number, loss in enumerate([math.nan, 3.0, 7.0, 5.0])]
    [(), (), (0,), (2,)]
    >>> ranking.kept
    [3, 1]

    Args:
        num_to_keep: How many stay; None for all.
        order: Whether "max" or "min" of the score is best.
        spares_newest: Whether the newest one stays although there are `num_to_keep` better ones, until there is a
            newer one.
    """

    def __init__(self, num_to_keep: int | None, order: str = MAX, *, spares_newest: bool = False) -> None:
        self._num_to_keep = num_to_keep
        self._sign = 1.0 if order == MAX else -1.0
        self._spares_newest = spares_newest
        self._present: dict[int, _Rank] = {}

    def admit(self, identity: int, score: float | None = None) -> tuple[int, ...]:
        """Takes a new checkpoint in.

        Args:
            identity: Its number, the higher the newer.
            score: What it is judged by; None for a missing score.

        Returns:
            The numbers of those that are to be deleted, worst first. The new one can be among them.
        """
        self._present[identity] = self._rank(identity, score)
        spared = max(self._present) if self._spares_newest else None
        dropped = tuple(each for each in self._ordered()[: self._num_surplus] if each != spared)
        for each in dropped:
            del self._present[each]
        return dropped

    @property
    def kept(self) -> list[int]:
        """The numbers of those that stay, worst first. The newest is left out when it is only spared."""
        return self._ordered()[self._num_surplus :]

    @property
    def best(self) -> int | None:
        """The number of the best one that stays; None when none does."""
        return self.kept[-1] if self.kept else None

    @property
    def _num_surplus(self) -> int:
        return 0 if self._num_to_keep is None else max(0, len(self._present) - self._num_to_keep)

    def _ordered(self) -> list[int]:
        return sorted(self._present, key=self._present.__getitem__)

    def _rank(self, identity: int, score: float | None) -> _Rank:
        if score is None or math.isnan(score):
            return False, 0.0, identity
        return True, self._sign * score, identity


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
