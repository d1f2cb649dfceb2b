"""Streams as train data: each row once, in one order, whatever happens to the workers.

Covers `raysgd.streams.source` and `raysgd.streams.source`: what they promise is seen from a trainer.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysgd import Recovery, testing
from raysgd.exceptions import InvalidRegistrationError
from raysgd.torch import TorchTrainer
from raysgd.trainer.configuration import BatchOptions
from tests.helpers.doors import controller_of
from tests.streams.made import MadeStream
from tests.torch.lab import Experiment, run_alone
from tests.torch.streamed import CountingOperator, LoaderOperator, StreamOperator, stream_of, write_files

pytestmark = pytest.mark.integration

KINDS = ["plain", "shuffled", "filtered"]
CONSTANT = {"batch_options": BatchOptions(True)}
NUM_ROWS = {"plain": 600, "shuffled": 600, "filtered": 480}


def trainer_of(kind: str, num_workers: int = 1, **options: Any) -> TorchTrainer:
    many = {"num_workers": num_workers, "num_cpus_per_worker": 0.25} if num_workers > 1 else {"use_local": True}
    return TorchTrainer(
        training_operator_cls=StreamOperator,
        config={"kind": kind, "num_loaders": 2 if num_workers > 1 else 0},
        split_batches=True,
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


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("plain", marks=pytest.mark.soak),
        pytest.param("shuffled", marks=pytest.mark.soak),
        pytest.param("filtered", marks=pytest.mark.promise("Streams")),
    ],
)
def test_the_training_is_the_same_whatever_dies_and_with_any_number_of_workers(
    ray_cluster: None, kind: str, tmp_path: Path
) -> None:
    """Also where processes load ahead: what they have made and no one has trained on is made again."""
    with trainer_of(kind) as trainer:
        for _ in range(2):
            trainer.train()
        alone = trainer.state_dict()
    with trainer_of(kind, 3, recovery=Recovery(wait_for_workers=False, resize_interval_s=600.0)) as trainer:
        testing.kill_worker(trainer, 1, at="step:5")
        testing.kill_worker(trainer, 0, at="step:14")
        trainer.train()
        data = trainer.status().data
        assert data is not None
        assert (data.due, data.used) == (NUM_ROWS[kind], NUM_ROWS[kind])
        losses = [event.new_size for event in controller_of(trainer).history.events if event.is_failure]
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
        ({}, "pass `split_batches=True`"),
        ({**CONSTANT, "add_dist_sampler": False}, "and not `add_dist_sampler=False`"),
    ):
        with pytest.raises(InvalidRegistrationError, match=words):
            run_alone(Experiment(StreamOperator, {"kind": "plain"}, (), options))


def rows_of(stream: Any, trainer: TorchTrainer, num_steps: int | None = None) -> list[int]:
    """The marks of the rows that a call of `train` with a stream trains on."""
    operator: Any = trainer.get_local_operator()
    operator.seen.clear()
    trainer.train(dataset=stream, num_steps=num_steps)
    return list(operator.seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_brings_a_stream_along_and_the_next_one_goes_on_in_it(kind: str) -> None:
    with trainer_of(kind) as trainer:
        stream = stream_of(kind, num_loaders=1)
        begun = rows_of(stream, trainer, 7)
        rest = rows_of(stream, trainer)
        assert (len(begun), len({*begun, *rest})) == (7 * 25, NUM_ROWS[kind])
        assert len(rest) == NUM_ROWS[kind] - 7 * 25
        assert trainer.validate(dataset=stream_of(kind))["num_samples"] == NUM_ROWS[kind]


def test_a_file_saved_inside_an_epoch_over_another_stream_is_not_loaded(tmp_path: Path) -> None:
    with trainer_of("plain") as trainer:
        trainer.train(num_steps=3)
        trainer.save(tmp_path / "inside.pt")
        trainer.train()
        trainer.save(tmp_path / "between.pt")
    with trainer_of("shuffled") as trainer:
        with pytest.raises(ValueError, match=r"seed of `shuffle` \[1, None\], now \[128, None\]"):
            trainer.load(tmp_path / "inside.pt")
        assert trainer.train()["num_samples"] == NUM_ROWS["shuffled"]
        for name, parts in (("inside.pt", ["models", "optimizers"]), ("between.pt", None)):  # as the error says
            trainer.load(tmp_path / name, parts=parts)
            assert trainer.train()["num_samples"] == NUM_ROWS["shuffled"]


def test_predictions_are_in_the_order_of_the_shards(ray_cluster: None) -> None:
    stream = MadeStream([15] * 40).map(lambda row: np.full(5, 15 * int(row[0][6:]) + row[1], np.float64))
    with trainer_of("plain", 2) as trainer:
        outputs = trainer.predict(stream.filter(lambda row: row[0] % 7 != 0).take(500), batch_size=32)
        weight, bias = (trainer.get_model().state_dict()[name].double() for name in ("weight", "bias"))
        rows = torch.tensor([[float(number)] * 5 for number in range(600) if number % 7][:500], dtype=torch.float64)
        torch.testing.assert_close(outputs, rows @ weight.T + bias)
        with pytest.raises(ValueError, match="`predict` got a shuffled stream"):
            trainer.predict(stream.shuffle(100))


def test_what_a_call_cannot_use_of_a_stream_is_refused() -> None:
    with trainer_of("plain") as trainer, pytest.raises(ValueError, match=r"the stream in `dataset=` has no batch size"):
        trainer.train(dataset=MadeStream([3]))
    options: dict[str, Any] = {"use_local": True, "use_gpu": False}
    with (
        TorchTrainer(training_operator_cls=LoaderOperator, **options) as trainer,
        pytest.raises(ValueError, match="`dataset=` got a stream, whose"),
    ):
        trainer.train(dataset=stream_of("plain"))


NUM_KILLS = int(os.environ.get("STREAM_KILLS", "100"))
SIZES = (2, 3, 1, 7)
STEPS_BETWEEN = 7


def counting_trainer(folder: Path, kind: str, **options: Any) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=CountingOperator,
        config={"folder": str(folder), "kind": kind},
        split_batches=True,
        seed=3,
        use_gpu=False,
        recovery=Recovery(wait_for_workers=True),
        **options,
    )


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["parquet", "tar", "datasets"])
def test_each_row_comes_once_in_each_pass_however_many_workers_die(
    ray_cluster: None, kind: str, tmp_path: Path
) -> None:
    """And the order of the global batches is the undisturbed one. Each number of workers goes on from a checkpoint."""
    if kind == "datasets":
        pytest.importorskip("datasets")
    folder, chance = tmp_path / "rows", random.Random(0)
    folder.mkdir()
    write_files(folder, kind)
    kills_of_size = -(-NUM_KILLS // len(SIZES))
    for size in SIZES:
        with counting_trainer(folder, kind, num_workers=size, num_cpus_per_worker=0.1) as trainer:
            if size != SIZES[0]:
                trainer.load(tmp_path / "checkpoint")
                trainer.train()
            for _ in range(kills_of_size):
                step = chance.randrange(1, 40)
                testing.kill_worker(trainer, chance.randrange(trainer.num_workers), at=f"step:{step}")
                trainer.train()
            assert sum(event.is_failure for event in controller_of(trainer).history.events) == kills_of_size
            trainer.train(num_steps=STEPS_BETWEEN)
            trainer.save(tmp_path / "checkpoint")
    with counting_trainer(folder, kind, use_local=True) as trainer:
        for _ in range(kills_of_size * len(SIZES) + len(SIZES) - 1):
            trainer.train()
        trainer.train(num_steps=STEPS_BETWEEN)
        undisturbed = trainer.get_model()
        trainer.load(tmp_path / "checkpoint")
        torch.testing.assert_close(trainer.get_model().digest, undisturbed.digest, rtol=1e-9, atol=1e-9)
        trainer.train()
        counts = trainer.get_model().counts.detach()
    torch.testing.assert_close(counts, torch.full_like(counts, len(SIZES) * (kills_of_size + 1)), rtol=0, atol=1e-6)
