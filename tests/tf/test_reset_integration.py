"""Workers with TensorFlow that serve another config, another class, or the state of another trainer."""

from __future__ import annotations

import os
from typing import Any

import pytest

from raysgd import testing
from raysgd.tf import TFTrainer
from tests.tf.lab import largest_difference
from tests.tf.models import Line, make_data, make_model

pytestmark = pytest.mark.integration


@pytest.mark.soak
def test_a_trainer_that_is_reset_is_as_a_new_one(ray_cluster: None, keras: str) -> None:
    options = {"num_replicas": 2, "seed": 3}
    with TFTrainer(make_model, make_data, {"batch_size": 4, "lr": 0.1}, **options) as used:
        before = used.apply_all_workers(os.getpid)
        used.train()
        used.reset_config({"batch_size": 8, "lr": 0.05})
        assert used.apply_all_workers(os.getpid) == before
        found = [used.train(), used.validate()]
    with TFTrainer(make_model, make_data, {"batch_size": 8, "lr": 0.05}, **options) as new:
        expected = [new.train(), new.validate()]
    for mine, other in zip(found, expected, strict=True):
        assert mine == pytest.approx(other)


class Counted(Line):
    """An edited class."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "edition": 2}


class FailsOnOne(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if self.world_rank == 1:
            raise ZeroDivisionError("while it was edited")


@pytest.mark.soak
def test_live_workers_go_on_with_another_class_and_with_the_state_of_others(ray_cluster: None, keras: str) -> None:
    options: dict[str, Any] = {"config": {"lr": 0.05}, "seed": 3, "num_cpus_per_worker": 0.5}
    with (
        TFTrainer(training_operator_cls=Line, num_workers=2, **options) as first,
        TFTrainer(training_operator_cls=Counted, num_workers=1, **options) as second,
    ):
        first.train()
        before = first.state_dict()
        with pytest.raises(ZeroDivisionError, match="while it was edited"):
            first.reload(FailsOnOne)
        assert not largest_difference(first.state_dict(), before)
        processes = first.apply_all_workers(os.getpid)
        first.reload(Counted)
        assert first.train()["edition"] == 2
        assert first.apply_all_workers(os.getpid) == processes

        second.take_state_of(first)
        assert not largest_difference(second.state_dict(), first.state_dict())
        assert second.train()["epoch"] == 3
        testing.kill_worker(first, 1)
        result = first.train()
        assert (result["edition"], result["epoch"]) == (2, 3)
