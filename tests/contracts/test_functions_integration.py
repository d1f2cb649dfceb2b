"""What the tests of Ray Train 1.x and Ray AIR 2.0 asserted of functions on workers, retold, where no other test does.

The numbers of retries, retention, hand-off, sessions, datasets and callbacks are asserted in `tests/train`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysgd import train
from raysgd.air import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig, session
from raysgd.train import Trainer, TrainingCallback
from raysgd.train.backend import BackendConfig
from raysgd.train.base_trainer import BaseTrainer
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.torch import TorchCheckpoint, TorchPredictor, TorchTrainer
from tests.helpers.processes import wait_until
from tests.train.lab import claim

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]

Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes trainers of two workers, and ends them."""
    made: list[Trainer] = []

    def new(backend: Any = None, cpus: float = 0.5, max_retries: int = 3) -> Trainer:
        options: dict[str, Any] = {"resources_per_worker": {"CPU": cpus}, "max_retries": max_retries}
        made.append(Trainer(backend or BackendConfig(), num_workers=2, logdir=tmp_path, **options))
        return made[-1]

    yield new
    for trainer in made:
        trainer.shutdown()


class Recorder(TrainingCallback):
    """Keeps what all workers reported, and kills the first of them at a step."""

    def __init__(self, kills_at: int | None = None) -> None:
        self.results: list[list[dict[str, Any]]] = []
        self._kills_at = kills_at

    def handle_result(self, results: list[dict[str, Any]]) -> None:  # type: ignore[override]
        self.results.append(results)
        if len(self.results) - 1 == self._kills_at:
            os.kill(results[0]["pid"], signal.SIGKILL)


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0.0))


def all_cpus() -> float:
    import ray

    return float(ray.cluster_resources()["CPU"])


@pytest.mark.parametrize("cpus", [0.5, pytest.param(1, marks=pytest.mark.soak), 2])
def test_workers_hold_what_they_need_from_the_start_to_the_shutdown(make: Make, cpus: float) -> None:
    before = all_cpus()
    wait_until(lambda: free_cpus() == before)  # a test before this one may have ended a moment ago
    trainer = make(cpus=cpus)
    assert free_cpus() == before
    trainer.start()
    wait_until(lambda: free_cpus() == before - 2 * cpus)
    trainer.shutdown()
    wait_until(lambda: free_cpus() == before)


def save_epochs(config: dict[str, Any]) -> int:
    """Saves epochs from where it was left."""
    checkpoint = train.load_checkpoint()
    first = checkpoint["epoch"] if checkpoint else 0
    for epoch in range(first, config["num_epochs"]):
        train.save_checkpoint(epoch=epoch, loss=config.get("losses", [1.0] * 9)[epoch])
    return int(first)


def test_the_newest_checkpoint_is_the_best_unless_a_strategy_or_a_config_of_ray_2_judges_by_a_value(make: Make) -> None:
    trainer = make()
    trainer.start()
    assert trainer.run(save_epochs, {"num_epochs": 3}) == [0, 0]
    assert trainer.latest_checkpoint["epoch"] == 2
    assert trainer.best_checkpoint == trainer.latest_checkpoint
    assert trainer.run(save_epochs, {"num_epochs": 5}, checkpoint=trainer.latest_checkpoint) == [2, 2]
    assert trainer.latest_checkpoint["epoch"] == 4
    assert trainer.best_checkpoint == trainer.latest_checkpoint

    losses = [float("nan"), 3.0, 7.0, 5.0]
    keep = CheckpointConfig(2, "loss", "min")
    trainer.run(save_epochs, {"num_epochs": 4, "losses": losses}, checkpoint_strategy=keep)
    assert trainer.latest_checkpoint["loss"] == 5
    assert trainer.best_checkpoint["loss"] == 3
    assert trainer.best_checkpoint_path == trainer.latest_checkpoint_dir / "checkpoint_000002"
    assert Trainer.load_checkpoint_from_path(trainer.best_checkpoint_path) == trainer.best_checkpoint
    with pytest.raises(ValueError, match="other"):
        trainer.run(save_epochs, {"num_epochs": 1}, checkpoint_strategy=CheckpointConfig(1, "other"))


def test_a_death_in_the_hook_is_a_failed_start_which_is_repeated_as_often_as_retries_allow(
    make: Make, tmp_path: Path
) -> None:
    def dies_once() -> None:
        if claim(tmp_path / "died"):
            os._exit(1)

    trainer = make()
    trainer.start(dies_once)
    assert trainer.run(train.world_size) == [2, 2]
    with pytest.raises(RuntimeError, match="died"):
        make(max_retries=1).start(lambda: os._exit(1))


def test_workers_that_come_for_those_that_left_have_local_ranks_too(make: Make, tmp_path: Path) -> None:
    def function() -> int:
        if train.world_rank() == 0 and claim(tmp_path / "left"):
            sys.exit(0)
        return train.local_rank()

    trainer = make()
    trainer.start()
    assert trainer.run(function) == [0, 1]


@pytest.mark.parametrize("step", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_after_a_kill_between_two_steps_the_function_begins_again_and_the_trainer_stays_usable(
    make: Make, step: int
) -> None:
    def function() -> None:
        for number in range(2):
            train.report(number=number, pid=os.getpid())

    trainer = make("torch")
    trainer.start()
    recorder = Recorder(kills_at=step)
    trainer.run(function, callbacks=[recorder])
    numbers = [[each["number"] for each in results] for results in recorder.results]
    assert numbers[: step + 1] == [[number] * 2 for number in range(step + 1)]
    assert numbers[-1] == [1, 1]
    assert trainer.run(train.world_size) == [2, 2]


class Stateful(torch.nn.Linear):
    """Says itself what is pickled of it."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


def test_a_prepared_model_leaves_its_workers_without_a_wrapper_however_it_leaves(make: Make) -> None:
    def function() -> Any:
        from raysgd.train.torch import accelerate, prepare_model

        accelerate(amp=True)
        model = prepare_model(Stateful(1, 1))
        train.save_checkpoint(model=model)
        train.report(model=model)
        return model.module

    trainer, recorder = make("torch"), Recorder()
    trainer.start()
    returned = trainer.run(function, callbacks=[recorder])
    reported = [each["model"] for each in recorder.results[0]]
    models = [*returned, *reported, trainer.latest_checkpoint["model"]]
    assert [type(model).__name__ for model in models] == ["Stateful"] * 5
    assert all(torch.equal(model.weight, models[0].weight) for model in models)


class Adding:
    """A preprocessor: adds one, and counts how often it was fit."""

    def __init__(self) -> None:
        self.times_fit = 0

    def fit(self, dataset: list[int]) -> Adding:
        self.times_fit += 1
        return self

    def transform(self, dataset: list[int]) -> list[int]:
        return [value + 1 for value in dataset]

    def transform_batch(self, batch: Any) -> Any:
        return batch + 1


class Own(BaseTrainer):
    """Reports what it was made ready with."""

    def setup(self) -> None:
        self.is_set_up = True

    def training_loop(self) -> None:
        session.report({**self.datasets, "times_fit": self.preprocessor.times_fit, "is_set_up": self.is_set_up})


@pytest.mark.parametrize("make_dataset", [lambda: [1, 2], lambda: lambda: [1, 2]], ids=["given", "made"])
def test_datasets_are_made_and_transformed_before_the_loop_of_a_trainer(make_dataset: Any, tmp_path: Path) -> None:
    datasets = {"train": make_dataset(), "other": make_dataset()}
    trainer = Own(datasets=datasets, preprocessor=Adding(), run_config=RunConfig(storage_path=str(tmp_path)))
    found = trainer.fit().metrics
    assert [found[name] for name in ("train", "other", "times_fit", "is_set_up")] == [[2, 3], [2, 3], 1, True]


def test_the_loop_of_a_trainer_may_report_to_ray_tune(tmp_path: Path) -> None:
    tune = pytest.importorskip("ray.tune")

    class OwnForTune(BaseTrainer):
        def training_loop(self) -> None:
            tune.report({"my_metric": 1})

    assert OwnForTune(run_config=RunConfig(storage_path=str(tmp_path))).fit().metrics["my_metric"] == 1


def report_models(config: dict[str, Any]) -> Any:
    """Reports a model, and a state, and a folder."""
    from raysgd.train.torch import prepare_model

    model = torch.nn.Linear(3, 1)
    model = prepare_model(model) if config["prepares"] else model
    session.report({}, checkpoint=TorchCheckpoint.from_model(model))
    session.report({}, checkpoint=TorchCheckpoint.from_state_dict(model.state_dict()))
    folder = Path(config["place"], str(session.get_world_rank()))
    folder.mkdir()
    torch.save(getattr(model, "module", model).state_dict(), folder / "model")
    session.report({}, checkpoint=TorchCheckpoint.from_directory(str(folder)))


@pytest.mark.parametrize("prepares", [pytest.param(False, marks=pytest.mark.soak), True])
def test_each_kind_of_checkpoint_of_a_model_predicts_behind_the_preprocessor_of_the_run(
    prepares: bool, tmp_path: Path
) -> None:
    result = TorchTrainer(
        report_models,
        train_loop_config={"prepares": prepares, "place": tmp_path},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(tmp_path)),
        preprocessor=Adding(),
    ).fit()
    whole, state, folder = (checkpoint for checkpoint, _ in result.best_checkpoints)
    assert [type(each.get_preprocessor()).__name__ for each in (whole, state, folder)] == ["Adding"] * 3
    model = TorchCheckpoint.from_checkpoint(whole).get_model()
    assert type(model) is torch.nn.Linear
    with pytest.raises(ValueError, match="`model=None`"):
        TorchPredictor.from_checkpoint(state)
    rows = np.ones((4, 3), np.float32)
    expected = model(torch.full((4, 3), 2.0)).detach().numpy()
    for predictor in (
        TorchPredictor.from_checkpoint(whole),
        TorchPredictor.from_checkpoint(state, torch.nn.Linear(3, 1)),
    ):
        np.testing.assert_allclose(predictor.predict(rows), expected, rtol=1e-6)
    with folder.as_directory() as place:
        assert torch.load(Path(place, "model")).keys() == {"weight", "bias"}


def test_a_run_hands_on_the_checkpoint_that_it_was_given(tmp_path: Path) -> None:
    def function() -> None:
        checkpoint = session.get_checkpoint()
        session.report(checkpoint.to_dict(), checkpoint=checkpoint)

    given = Checkpoint.from_dict({"_current_checkpoint_id": 1, "value": 3})
    result = DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
        resume_from_checkpoint=given,
    ).fit()
    assert (result.metrics["value"], result.checkpoint.to_dict()["value"]) == (3, 3)
