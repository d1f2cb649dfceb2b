"""Streams as train data: each row once, in one order, whatever happens to the workers.

Covers `raysgd.streams.source` and `raysgd.streams.data`: what they promise is seen from a trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import testing
from raysgd.exceptions import InvalidRegistrationError
from raysgd.messages.batch_options import BatchOptions
from raysgd.torch import TorchTrainer
from tests.doors import controller_of
from tests.torch.lab import Experiment, run_alone
from tests.torch.streamed import StreamOperator

pytestmark = pytest.mark.integration

KINDS = ["plain", "shuffled", "filtered"]
CONSTANT = {"batch_options": BatchOptions("constant")}
NUM_ROWS = {"plain": 600, "shuffled": 600, "filtered": 480}


def trainer_of(kind: str, num_workers: int = 1, **options: Any) -> TorchTrainer:
    many = {"num_workers": num_workers, "num_cpus_per_worker": 0.25} if num_workers > 1 else {"use_local": True}
    return TorchTrainer(
        training_operator_cls=StreamOperator,
        config={"kind": kind},
        joint_batch="constant",
        seed=3,
        use_gpu=False,
        **many,
        **options,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_replica_sees_each_row_once_in_each_pass_and_in_each_evaluation(kind: str) -> None:
    calls = (("train", None), ("train", 7), ("train", None), ("validate", None))
    alone = run_alone(Experiment(StreamOperator, {"kind": kind}, calls, CONSTANT))
    [seen] = alone.seen
    num_rows = NUM_ROWS[kind]
    assert len(seen) == 3 * num_rows
    passes = [seen[start : start + num_rows] for start in range(0, len(seen), num_rows)]
    assert len({tuple(sorted(each)) for each in passes}) == 1
    assert (passes[0] == passes[1]) == (kind == "plain")
    counted = [result["num_samples"] for result in alone.results]
    assert counted == [num_rows, 7 * 25, num_rows - 7 * 25, num_rows]


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_is_the_same_whatever_dies_and_with_any_number_of_workers(
    ray_cluster: None, kind: str, tmp_path: Path
) -> None:
    with trainer_of(kind) as trainer:
        for _ in range(2):
            trainer.train()
        alone = trainer.state_dict()
    with trainer_of(kind, 3, resize_check_s=600.0) as trainer:
        testing.kill_worker(trainer, 1, at="step:5")
        testing.kill_worker(trainer, 0, at="step:14")
        trainer.train()
        data = trainer.status().data
        assert data is not None
        assert (data.due, data.used) == (NUM_ROWS[kind], NUM_ROWS[kind])
        losses = [event.new_size for event in controller_of(trainer).history.events if event.is_loss]
        assert len(losses) == 2
        trainer.train(num_steps=3)
        trainer.save(tmp_path / "checkpoint")
        assert trainer.validate()["num_samples"] == NUM_ROWS[kind]
    with trainer_of(kind, 2) as trainer:
        trainer.load(tmp_path / "checkpoint")
        trainer.train()
        several = trainer.state_dict()
    torch.testing.assert_close(several["models"], alone["models"], rtol=1e-9, atol=1e-9)


def test_options_that_do_not_go_with_a_stream_are_refused() -> None:
    for options, words in (
        ({}, 'pass `joint_batch="constant"`'),
        ({"batch_options": BatchOptions("constant", balance="speed")}, "neither `balance`"),
        ({**CONSTANT, "add_dist_sampler": False}, "nor `add_dist_sampler=False`"),
    ):
        with pytest.raises(InvalidRegistrationError, match=words):
            run_alone(Experiment(StreamOperator, {"kind": "plain"}, (), options))
