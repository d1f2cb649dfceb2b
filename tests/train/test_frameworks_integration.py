"""A function in each framework, on real workers that come and go: it learns what one process learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.train import Trainer, TrainingCallback
from tests.helpers.run_if import RunIf
from tests.train import learners

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]

NUM_EPOCHS, ROOM_AT, DIES_AT = 7, 1, 5


def hold(num_cpus: int) -> Any:
    """Takes CPUs away from everybody else; `ray.kill` gives them back."""
    import ray

    class Holder:
        def is_there(self) -> bool:
            return True

    holder = ray.remote(num_cpus=num_cpus)(Holder).remote()
    assert ray.get(holder.is_there.remote())
    return holder


class Release(TrainingCallback):
    """Gives CPUs back at a step."""

    def __init__(self, holder: Any, at: int) -> None:
        self.holder, self.at = holder, at
        self.sizes: list[int] = []
        self.numbers: list[int] = []

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        self.sizes.append(len(results))
        self.numbers.append(results[0]["number"])
        if results[0]["number"] == self.at and self.holder is not None:
            import ray

            ray.kill(self.holder)
            self.holder = None


@pytest.mark.parametrize(
    ("backend", "learner"),
    [
        ("torch", learners.with_torch),
        pytest.param("horovod", learners.with_horovod, marks=pytest.mark.soak),
        pytest.param("tensorflow", learners.with_tensorflow, marks=pytest.mark.soak),
    ],
)
def test_a_run_grows_loses_a_worker_and_learns_as_if_nothing_had_happened(
    backend: str, learner: Callable[..., Any], tmp_path: Path
) -> None:
    callback = Release(hold(3), at=ROOM_AT)
    config = {"num_epochs": NUM_EPOCHS, "waits_at": ROOM_AT + 1, "dies_at": DIES_AT, "flag": tmp_path / "died"}
    trainer = Trainer(backend, num_workers=(1, 2), logdir=tmp_path, resize_interval_s=0)
    try:
        trainer.start()
        first, second = trainer.run(learner, config, callbacks=[callback])
        kinds = [event.kind for event in trainer.history.events]
    finally:
        trainer.shutdown()
    assert first == second == pytest.approx(learners.learned_alone(NUM_EPOCHS), rel=1e-5)
    assert (tmp_path / "died").exists()
    assert kinds == ["started", "grown", "restored"]
    assert (callback.sizes[0], callback.sizes[-1]) == (1, 2)
    assert sorted(set(callback.numbers)) == list(range(NUM_EPOCHS))
    assert trainer.latest_checkpoint["epoch"] == NUM_EPOCHS - 1


def fit_keras_3() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    x, y = learners.points()
    model.fit(x, y, verbose=0)


@pytest.mark.soak
def test_keras_3_under_a_strategy_of_several_workers_is_refused_with_advice(tmp_path: Path) -> None:
    trainer = Trainer("tensorflow", num_workers=2, logdir=tmp_path)
    try:
        trainer.start()
        with pytest.raises(ValueError, match="TF_USE_LEGACY_KERAS=1"):
            trainer.run(fit_keras_3)
    finally:
        trainer.shutdown()


@pytest.fixture(scope="module")
def with_horovod(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer("horovod", num_workers=2, logdir=tmp_path_factory.mktemp("horovod"))
    trainer.start()
    yield trainer
    trainer.shutdown()


def sum_of_ranks() -> float:
    import horovod.torch as hvd
    import torch

    hvd.init()  # harmless where it is done already
    return float(hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum))


@RunIf(modules=["horovod"])
def test_horovod_is_there_with_the_ranks_of_the_trainer(with_horovod: Trainer) -> None:
    def function() -> Any:
        import horovod.torch as hvd

        assert hvd.is_initialized()
        assert (hvd.local_rank(), hvd.local_size()) == (train.local_rank(), train.world_size())
        return hvd.rank() == train.world_rank(), sum_of_ranks()

    assert with_horovod.run(function) == [(True, 3.0)] * 2


@RunIf(modules=["horovod"])
def test_a_function_may_start_and_end_horovod_itself(with_horovod: Trainer) -> None:
    def function() -> float:
        import horovod.torch as hvd

        total = sum_of_ranks()
        hvd.shutdown()
        return total

    assert [with_horovod.run(function) for _ in range(2)] == [[3.0, 3.0]] * 2
