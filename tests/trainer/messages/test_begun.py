"""How far an epoch was that a run has left, as data beside its checkpoint."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.core.engine.shared.interface import taken_over
from raysgd.core.numbers.meters import MetricSummary
from raysgd.trainer.messages.epochs import BegunEpoch, open_steps_from_data


def summary(loss: float, num_samples: int) -> MetricSummary:
    values = {"num_samples": num_samples, "train_loss": loss / num_samples, "last_train_loss": math.nan}
    return MetricSummary(values, {"train_loss": (loss, float(num_samples))})


def state(rank: int, metrics: MetricSummary, **more: Any) -> Any:
    return SimpleNamespace(
        num_steps=7, epoch_idx=2, metrics=metrics, lost={"gone": summary(0.3, 4)}, is_exhausted=False, **more
    )


BEGUN = BegunEpoch.of([state(rank, summary(0.1 * (rank + 1), 3)) for rank in range(3)], seconds=1.5, global_step=27)


def test_it_is_read_back_to_the_last_bit_also_what_is_no_number() -> None:
    found = BegunEpoch.from_data(json.loads(json.dumps(BEGUN.as_data(), allow_nan=False)))
    assert (found.num_steps, found.epoch_idx, found.global_step, found.seconds) == (7, 2, 27, 1.5)
    for read, written in zip((*found.by_rank, *found.lost), (*BEGUN.by_rank, *BEGUN.lost), strict=True):
        assert repr(dict(read)) == repr(dict(written))
        assert read.totals == written.totals


@pytest.mark.parametrize(("num_ranks", "shares"), [(1, [3]), (2, [2, 1]), (3, [1, 1, 1]), (5, [1, 1, 1, 0, 0])])
def test_a_group_of_any_size_counts_each_rank_once(num_ranks: int, shares: list[int]) -> None:
    parts = [taken_over(BEGUN.by_rank, rank, num_ranks) for rank in range(num_ranks)]
    assert [len(part) for part in parts] == shares
    assert sum(each.totals["train_loss"][0] for part in parts for each in part) == pytest.approx(0.6)


def test_metric_objects_are_left_out_and_their_names_are_kept() -> None:
    metrics = MetricSummary({"f1": 0.5, "num_samples": 3}, {}, {"f1": object()})
    begun = BegunEpoch.of([state(0, metrics)], global_step=1)
    assert dict(begun.by_rank[0]) == {"num_samples": 3}
    assert BegunEpoch.from_data(json.loads(json.dumps(begun.as_data()))).objects == ("f1",)


@pytest.mark.parametrize(
    "data",
    [{}, *({**BEGUN.as_data(), **damage} for damage in (
        {"by_rank": None}, {"lost": [{}]},
        {"num_steps": -1}, {"num_steps": 1.5}, {"epoch_idx": -1}, {"global_step": -2},
    ))],
)  # fmt: skip
def test_damage_is_said(data: Any) -> None:
    with pytest.raises(ValueError, match="is damaged"):
        BegunEpoch.from_data(data)


@pytest.mark.parametrize("number", [10**400, [1], None, True, "0x1p9999"], ids=["huge", "list", "none", "bool", "hex"])
def test_what_no_meter_can_add_is_damage(number: Any) -> None:
    steps = [4, {"values": {"train_loss": 1.0}, "totals": {"train_loss": [number, 1]}}]
    with pytest.raises(ValueError, match="are damaged"):
        open_steps_from_data(steps)
