"""What follows the loss of a worker over gloo: the others keep their processes and go on, and the group grows back."""

from __future__ import annotations

import collections
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd import testing
from raysgd.core.engine.shared.types import SamplesUsed
from raysgd.tf import TFTrainer, TrainingOperator
from raysgd.trainer.configuration import Recovery
from raysgd.utils import BATCH_SIZE
from tests.tf.lab import largest_difference
from tests.tf.loss_models import (
    Tokens,
    Weighted,
)
from tests.tf.models import Line, make_data, make_model

pytestmark = pytest.mark.integration

NUM_SAMPLES = 48


def process_id() -> int:
    return os.getpid()


def kinds(trainer: TFTrainer) -> list[str]:
    return [event.kind for event in trainer.status().events if event.kind != "started"]


@pytest.fixture
def trainers() -> Iterator[list[TFTrainer]]:
    made: list[TFTrainer] = []
    yield made
    for trainer in made:
        trainer.shutdown(force=True)


def assert_equal_on_all_ranks(trainer: TFTrainer) -> None:
    first, *others = trainer.apply_all_operators(lambda operator: operator.model.get_weights())
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# ---------------------------------------------------------------------------------------------- operators


class Ledger(Line):
    """Writes down which samples it took completed steps on: features are their own numbers, in another order each pass.

    A step that broke off is not in it. Neither are the zeros that a worker practises on before it steps in.
    """

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        super().setup(config)
        numbers = tf.data.Dataset.range(1, NUM_SAMPLES + 1)

        def sample(number: Any) -> Any:
            value = tf.cast(number, tf.float32) / NUM_SAMPLES
            return tf.fill([4], value), tf.reshape(value, [1])

        dataset = numbers.shuffle(NUM_SAMPLES).map(sample).batch(config.get(BATCH_SIZE, 2))
        self.register_data(train_dataset=dataset)
        self.file = Path(config["folder"]) / f"{os.getpid()}.txt"

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        if self._raysgd.num_samples(batch):
            numbers = np.rint(batch[1].numpy()[:, 0] * NUM_SAMPLES).astype(int).tolist()
            with self.file.open("a") as file:
                file.write("".join(f"{batch_info['epoch_idx']} {number}\n" for number in numbers if number))
        return result


def uses(folder: Path) -> dict[str, collections.Counter[int]]:
    """How often each sample was used, by pass."""
    found: dict[str, collections.Counter[int]] = {}
    for file in folder.glob("*.txt"):
        for line in file.read_text().splitlines():
            index, number = line.split()
            found.setdefault(index, collections.Counter())[int(number)] += 1
    return found


@pytest.mark.keras_in_turns("keras2")
def test_survivors_go_on_and_each_sample_of_a_shuffled_pass_is_used_once(
    ray_cluster: None, keras: str, trainers: list[TFTrainer], tmp_path: Path
) -> None:
    config = {"folder": str(tmp_path), BATCH_SIZE: 6, "optimizer": "adam"}
    trainer = TFTrainer(
        training_operator_cls=Ledger,
        config=config,
        num_workers=3,
        seed=1,
        recovery=Recovery(wait_for_workers=True, resize_interval_s=None),
    )
    trainers.append(trainer)
    trainer.train()
    pids = trainer.apply_all_workers(process_id)
    testing.kill_worker(trainer, 1, at="step:3")
    result = trainer.train()
    assert kinds(trainer) == ["continued"]
    after = trainer.apply_all_workers(process_id)
    assert [after[0], after[1]] == [pids[0], pids[2]], "the survivors kept their processes"
    assert trainer.num_workers == 3
    assert after[2] not in pids
    assert np.isfinite(result["train_loss"])
    status = trainer.status()
    assert status.failures == (
        "no sample lost, 6 in flight are repeated (epoch 2: 12 of 48 samples used)",
    ) or status.failures == ("no sample lost, 6 in flight are repeated (epoch 2: 18 of 48 samples used)",), (
        "rank 1 dies before its fourth step, and the others may have finished the third or not"
    )
    assert status.data == SamplesUsed(1, due=NUM_SAMPLES, used=NUM_SAMPLES)
    assert status.samples_per_s is not None
    assert all(worker.own_s is not None for worker in status.workers)
    trainer.train()
    steps = trainer.apply_all_operators(lambda operator: int(operator.optimizer.iterations.numpy()))
    assert steps == [3 * NUM_SAMPLES // 6] * 3, "the batch size of all workers stayed, and so did the steps"
    assert_equal_on_all_ranks(trainer)
    used = uses(tmp_path)
    assert {index: set(counter.values()) for index, counter in used.items()} == {"0": {1}, "1": {1}, "2": {1}}
    assert all(len(counter) == NUM_SAMPLES for counter in used.values())


# ---------------------------------------------------------------------------------------------- creators, with `fit`


def make_shuffled(config: dict[str, Any]) -> tuple[Any, Any]:
    train, test = (dataset.unbatch().shuffle(64).batch(config["batch_size"]) for dataset in make_data(config))
    return train, test


def patience(keras: Any, num_epochs: int) -> Any:
    """A callback that ends the training after so many epochs that it has seen."""

    class Deadline(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, logs: Any = None) -> None:
            self.num_seen = 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.num_seen += 1
            self.model.stop_training = self.num_seen >= num_epochs

    return Deadline()


@pytest.mark.promise("TensorFlow survives, too")
@pytest.mark.keras_in_turns("keras3")
def test_fit_goes_on_in_the_epoch_in_which_a_worker_died(
    ray_cluster: None, keras_here: Any, trainers: list[TFTrainer], tmp_path: Path
) -> None:
    """As on two workers whom nobody harmed: the same samples in the same steps, hence the same weights.

    A callback ends the training after three epochs. That of the new worker has seen two by then.
    """
    config = {
        "fit_config": {"epochs": 5, "callbacks": [patience(keras_here, 3)]},
        "batch_size": 4,
        "num_samples": NUM_SAMPLES,
        "optimizer": "adam",
    }
    trainer = TFTrainer(make_model, make_shuffled, config=config, num_replicas=2, seed=1)
    trainers.append(trainer)
    path = trainer.save(tmp_path / "before.npz")
    expected, validated = trainer.train(), trainer.validate()
    steps = trainer.apply_all_operators(lambda operator: int(operator.model.optimizer.iterations.numpy()))
    assert steps == [3 * NUM_SAMPLES // 4] * 2
    weights, other = trainer.state_dict(), trainer.train()
    trainer.load(path)
    pids = trainer.apply_all_workers(process_id)
    testing.kill_worker(trainer, 1, at="step:17")
    found = trainer.train()
    assert kinds(trainer) == ["continued"]
    # Rank 1 dies before its sixth step, and the other one may have finished the fifth or not.
    assert re.search("epoch 1 of `fit`, [45] steps taken", str(trainer.status()))
    assert trainer.status().samples_per_s is not None
    after = trainer.apply_all_workers(process_id)
    assert after[0] == pids[0], "the survivor kept its process"
    assert trainer.num_workers == 2
    assert after[1] != pids[1]
    assert largest_difference(trainer.state_dict(), weights) < 1e-5
    assert largest_difference(trainer.state_dict(), weights, "optimizers") < 1e-5
    assert found == pytest.approx(expected, rel=1e-4)
    assert trainer.validate() == pytest.approx(validated, rel=1e-4), "the new worker divides the same shuffled data"
    assert trainer.train() == pytest.approx(other, rel=1e-4), "the next call takes up the order where it would be"
    assert_equal_on_all_ranks(trainer)


@pytest.mark.keras_in_turns("keras3")
def test_the_rank_that_follows_the_first_one_goes_on_with_its_files(
    ray_cluster: None, keras_here: Any, trainers: list[TFTrainer], tmp_path: Path
) -> None:
    log, best = tmp_path / "log.csv", tmp_path / "best.keras"
    keeps = keras_here.callbacks.ModelCheckpoint(str(best), monitor="loss", mode="min", save_best_only=True)
    callbacks = [keras_here.callbacks.CSVLogger(str(log)), keeps]
    config = {"fit_config": {"epochs": 6, "callbacks": callbacks}, "batch_size": 4, "num_samples": NUM_SAMPLES}
    trainer = TFTrainer(make_model, make_shuffled, config=config, num_replicas=2, seed=1)
    trainers.append(trainer)
    testing.kill_worker(trainer, 0, at="step:29")  # in the third of six epochs, of 12 steps
    trainer.train()
    assert kinds(trainer)[0] == "continued"  # and perhaps a worker stepped in
    rows = log.read_text("utf-8").splitlines()
    assert [row.partition(",")[0] for row in rows] == ["epoch", *map(str, range(6))]
    losses = [float(row.split(",")[1]) for row in rows[1:]]
    found, *_ = trainer.apply_all_operators(lambda operator: operator._keepers()[0].best)
    assert found == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.soak
@pytest.mark.keras_in_turns("keras3", "keras2")
@pytest.mark.parametrize(
    ("operator_cls", "config"), [(Weighted, {"loss": "sum"}), (Weighted, {"loss": "weights"}), (Tokens, {})]
)
def test_a_constant_global_batch_is_that_of_one_worker_on_three_and_across_losses(
    ray_cluster: None, keras: str, trainers: list[TFTrainer], operator_cls: type[TrainingOperator], config: Any
) -> None:
    """Each loss is no mean over samples: a sum, a mean by weights, a mean over the steps of sequences."""
    options: dict[str, Any] = {
        "training_operator_cls": operator_cls,
        "config": {**config, BATCH_SIZE: 5, "batch_size": 5},
        "split_batches": True,
        "seed": 1,
        "recovery": Recovery(wait_for_workers=False, resize_interval_s=600.0),
    }
    trainers += [TFTrainer(**options, num_workers=number) for number in (3, 1)]
    together, alone = trainers
    of_passes: list[list[tuple[int, str]]] = [[], [(1, "step:2")], [], [(2, "step:1"), (0, "step:3")]]
    for index, losses in enumerate(of_passes):
        for rank, moment in losses:
            testing.kill_worker(together, rank, at=moment)
        found, expected = together.train(), alone.train()
        if not losses:  # else what the lost worker measured is lost with it
            assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
            assert found["num_samples"] == expected["num_samples"] == 21
        assert (together.num_workers < 3, together.config[BATCH_SIZE]) == (bool(losses), 5)
        assert together.status().data == SamplesUsed(index, due=21, used=21)
        assert largest_difference(together.state_dict(), alone.state_dict()) < 1e-6
        assert_equal_on_all_ranks(together)


def make_model_that_waits(config: dict[str, Any]) -> Any:
    """Takes its time over each batch: so much always, so much as long as there is one worker."""
    import tensorflow as tf

    class Waits(tf.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(config["pause_s"] if "TF_CONFIG" in os.environ else config["alone_s"])

    model = make_model(config)
    fit = model.fit

    def patient_fit(*args: Any, callbacks: Any = None, **options: Any) -> Any:
        return fit(*args, callbacks=[*(callbacks or []), Waits()], **options)

    object.__setattr__(model, "fit", patient_fit)
    return model


@pytest.mark.soak
def test_a_snapshot_inside_fit_is_where_a_restart_goes_on(
    ray_cluster: None, keras: str, trainers: list[TFTrainer], tmp_path: Path
) -> None:
    config = {"fit_config": {"epochs": 40}, "batch_size": 4, "num_samples": NUM_SAMPLES, "pause_s": 0.02}
    options: dict[str, Any] = {"recovery": Recovery(in_place=False, snapshot_every_n_steps=10, heartbeat_s=1.0)}
    trainer = TFTrainer(make_model_that_waits, make_shuffled, config=config, num_replicas=2, seed=1, **options)
    trainers.append(trainer)
    path = trainer.save(tmp_path / "before.npz")
    testing.kill_worker(trainer, 1, at="step:473")
    assert np.isfinite(trainer.train()["train_loss"])
    [rebuilt] = [event for event in trainer.status().events if event.kind == "restored"]
    assert rebuilt.detail.startswith("from a snapshot inside the call, after ")
    weights = trainer.state_dict()
    trainer.load(path)
    trainer.train()
    assert largest_difference(trainer.state_dict(), weights) < 1e-5


@pytest.mark.soak
def test_fit_that_shrank_grows_back_in_the_same_epoch(
    ray_cluster: None, keras: str, trainers: list[TFTrainer], tmp_path: Path
) -> None:
    config = {"batch_size": 2, "num_samples": 400, "pause_s": 0.0, "alone_s": 0.3}
    options: dict[str, Any] = {"config": config, "num_replicas": 2, "seed": 1}
    trainer = TFTrainer(
        make_model_that_waits,
        make_shuffled,
        recovery=Recovery(wait_for_workers=False, resize_interval_s=0.2),
        **options,
    )
    trainers.append(trainer)
    path = trainer.save(tmp_path / "before.npz")
    expected = trainer.train()
    weights = trainer.state_dict()
    trainer.load(path)
    [pid, _] = trainer.apply_all_workers(process_id)
    testing.kill_worker(trainer, 1, at="step:5")
    found = trainer.train()
    assert kinds(trainer) == ["continued", "grown"]
    assert trainer.apply_all_workers(process_id)[0] == pid
    assert found.keys() == expected.keys(), "without what the lost worker measured"
    assert trainer.num_workers == 2
    assert_equal_on_all_ranks(trainer)
    steps = trainer.apply_all_operators(lambda operator: int(operator.model.optimizer.iterations.numpy()))
    assert steps == [200, 200]
    assert largest_difference(trainer.state_dict(), weights) < 1e-4
