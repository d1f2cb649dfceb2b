"""What a trainer is told about global batches."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.exceptions import InvalidCountError
from raysgd.trainer.configuration import BatchOptions
from raysgd.utils import BATCH_SIZE

CONSTANT = {"split_batches": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_batches": "constant"}, "`split_batches='constant'`: allowed are True and False"),
        ({"split_batches": None}, "`split_batches=None`: allowed are True and False"),
        ({"micro_batch_size": 4}, "splits only a constant global batch"),
        ({"micro_batch_size": "auto"}, "divides the batches of `split_batches=True` without `deterministic=True`"),
        ({"micro_batch_size": "auto", "deterministic": True}, "whose shards are fixed: pass only the first"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchOptions(**options)


@pytest.mark.parametrize("cap", [0, -3, float("nan"), 2.5, "8", "big", True])
def test_a_cap_that_holds_no_sample_is_refused(cap: Any) -> None:
    with pytest.raises(InvalidCountError, match=r'`micro_batch_size=.*need an integer .*; "auto" finds it'):
        BatchOptions(**CONSTANT, micro_batch_size=cap)


def test_a_constant_global_batch_reaches_every_operator_undivided() -> None:
    config = {BATCH_SIZE: 21, "lr": 0.1}
    assert BatchOptions().config_for(config, 2) == {BATCH_SIZE: 10, "lr": 0.1}
    assert BatchOptions(True).config_for(config, 2) == config
    assert BatchOptions(True).config_for(config, 40) == config, "also with more workers than samples"


@pytest.mark.parametrize("size", [0, -1, 2.5, float("nan"), True])
def test_a_global_batch_that_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="need an integer of at least 1"):
        BatchOptions(True).config_for({BATCH_SIZE: size}, 2)


def test_predictions_take_what_a_worker_takes() -> None:
    assert BatchOptions().of_worker(18, 4) == 18
    assert BatchOptions(True).of_worker(18, 4) == 5
    assert BatchOptions(True, 3).of_worker(18, 4) == 3
    assert BatchOptions(True, "auto").of_worker(18, 4) == 5
