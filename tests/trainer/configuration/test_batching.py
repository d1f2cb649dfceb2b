"""Dividing a global batch size."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy
import pytest

from raysgd.trainer.configuration import BatchOptions, global_batch_in_words, split_batch_size
from raysgd.utils import BATCH_SIZE


@pytest.mark.parametrize(
    ("requested", "num_workers", "per_worker"),
    [
        (1, 1, 1),
        (21, 1, 21),
        (20, 2, 10),
        (21, 2, 10),  # the documented example
        (20, 3, 6),
        (4, 4, 1),
        (7, 4, 1),
    ],
)
def test_the_largest_multiple_is_divided_evenly(requested: int, num_workers: int, per_worker: int) -> None:
    assert split_batch_size(requested, num_workers) == per_worker


def test_every_split_is_even_and_loses_less_than_one_sample_per_worker() -> None:
    draw = random.Random(0)
    for _ in range(500):
        num_workers = draw.randint(1, 40)
        requested = draw.randint(num_workers, 1000)
        per_worker = split_batch_size(requested, num_workers)
        assert per_worker >= 1
        assert 0 <= requested - per_worker * num_workers < num_workers


def test_fewer_samples_than_workers_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"=3` with `num_workers=4`.*4 or more"):
        split_batch_size(3, 4)


@pytest.mark.parametrize(
    ("num_workers", "words"),
    [
        (4, "4 workers x 8 samples: a global batch of 32"),
        (1, "1 worker x 8 samples: a global batch of 8"),
    ],
)
def test_a_global_batch_is_told(num_workers: int, words: str) -> None:
    assert global_batch_in_words(num_workers, 8) == words


@pytest.mark.parametrize("value", [0, -8, True, False, 8.0, "8", None])
def test_a_batch_size_that_is_no_positive_integer_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"batch_size.*integer of at least 1"):
        split_batch_size(value, 1)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, None])
def test_a_number_of_workers_that_is_no_positive_integer_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"num_workers=.*integer of at least 1"):
        split_batch_size(8, value)


def test_integers_of_numpy_become_plain_ones() -> None:
    per_worker = split_batch_size(numpy.int64(9), 2)  # type: ignore[arg-type]
    assert (per_worker, type(per_worker)) == (4, int)


def test_a_worker_sees_its_part_and_everything_else_untouched() -> None:
    hidden = [64, 64]
    config = {BATCH_SIZE: 21, "batch_size": 5, "hidden": hidden}
    worker_config = BatchOptions().config_for(config, 2)
    assert worker_config == {BATCH_SIZE: 10, "batch_size": 5, "hidden": [64, 64]}
    assert worker_config["hidden"] is hidden
    assert config == {BATCH_SIZE: 21, "batch_size": 5, "hidden": [64, 64]}


@pytest.mark.parametrize("config", [{}, {"batch_size": 3}, MappingProxyType({"lr": 1})])
def test_a_config_without_a_global_batch_size_is_copied(config: Mapping[str, Any]) -> None:
    worker_config = BatchOptions().config_for(config, 8)
    assert worker_config == dict(config)
    assert worker_config is not config
