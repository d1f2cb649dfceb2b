"""Batch norms and shares of a global batch: what is refused, and when."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
from torch import nn

from raysgd.arrays.division import Division
from raysgd.messages.batch_options import BatchOptions
from raysgd.torch.data.batch_sampler import PassPlan
from raysgd.torch.step.advice import check_norms
from tests.torch.lab import Experiment, run_alone
from tests.torch.operators_for_tests import BatchNormOperator


def plan(num_samples: int) -> PassPlan:
    """Global batches of 16 on two ranks."""
    return PassPlan(num_samples, 0, Division(16, 2), False, True)


@pytest.mark.parametrize(
    ("model", "num_samples", "words"),
    [
        (nn.BatchNorm1d(4), 33, "cannot train on a single sample.*`drop_last=True`"),
        (nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3)), 33, "a single sample"),
        (nn.SyncBatchNorm(4), 33, "`sync_batchnorm=True` needs a sample on each worker"),
        (nn.SyncBatchNorm(4), 35, "`drop_last=True`"),  # shares of 3 and 0
        (nn.BatchNorm1d(4), 35, None),
        (nn.BatchNorm2d(4), 33, None),  # an image has many values
        (nn.BatchNorm1d(4).eval(), 33, None),
        (nn.SyncBatchNorm(4).eval(), 33, None),
        (nn.SyncBatchNorm(4), 36, None),
        (nn.LayerNorm(4), 33, None),
    ],
)
def test_a_pass_with_a_share_that_a_norm_cannot_train_on_is_refused(
    model: nn.Module, num_samples: int, words: str | None
) -> None:
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        check_norms([model], plan(num_samples))


class Counts(BatchNormOperator):
    sizes: ClassVar[list[int]] = []

    def forward(self, features: Any, target: Any) -> Any:
        self.sizes.append(len(target))
        return super().forward(features, target)


@pytest.mark.parametrize(("num_steps", "sizes"), [(None, []), (1, [8, 8])])
def test_logical_shards_are_refused_with_the_ways_out(
    num_steps: int | None, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counts, "sizes", [])
    options = {"batch_options": BatchOptions(True, deterministic=True, num_shards=2)}
    experiment = Experiment(Counts, {"num_samples": 33, "batch_size": 16}, [("train", num_steps)], options)
    if num_steps is None:
        with pytest.raises(ValueError, match=r"cannot train on a single sample(.|\n)*`drop_last=True`"):
            run_alone(experiment)
    else:
        run_alone(experiment)
    assert Counts.sizes == sizes


def test_without_shares_pytorch_says_it() -> None:
    with pytest.raises(ValueError, match=r"^Expected more than 1 value per channel"):
        run_alone(Experiment(BatchNormOperator, {"num_samples": 5, "batch_size": 4}))
