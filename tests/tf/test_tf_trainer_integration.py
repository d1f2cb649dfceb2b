"""`TFTrainer` on real workers: results, state, models, losses of workers, and errors in user code."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.exceptions import IncompatibleModelError, WorkerError
from raysgd.tf import TFTrainer
from tests.tf import models
from tests.tf.lab import largest_difference
from tests.tf.models import Line, make_data, make_model

pytestmark = pytest.mark.integration


class DiesOnce:
    """A callback that kills its process in the middle of an epoch, the first time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def made(self) -> Any:
        import tensorflow as tf

        folder = self.folder

        class Callback(tf.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == 2 and (folder / "armed").exists():
                    (folder / "armed").unlink()
                    os.kill(os.getpid(), signal.SIGKILL)

        return Callback()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tf")


def make_model_that_dies(config: dict[str, Any]) -> Any:
    model = make_model(config)
    if "folder" in config:
        fit = model.fit

        def fit_and_die(*args: Any, callbacks: Any = None, **options: Any) -> Any:
            return fit(*args, callbacks=[*(callbacks or []), DiesOnce(Path(config["folder"])).made()], **options)

        object.__setattr__(model, "fit", fit_and_die)
    return model


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, folder: Path) -> Iterator[TFTrainer]:
    config = {"fit_config": {"epochs": 2}, "batch_size": 4, "optimizer": "adam", "folder": str(folder)}
    with TFTrainer(make_model_that_dies, make_data, config=config, num_replicas=2, seed=1, timeout_s=60) as made:
        yield made


def process_id() -> int:
    return os.getpid()


def test_results_have_the_keys_of_the_old_library(trainer: TFTrainer) -> None:
    trained = trainer.train()
    assert sorted(trained) == ["train_loss", "train_mae"]
    assert sorted(trainer.validate()) == ["validation_loss", "validation_mae"]
    assert trainer.train()["train_loss"] < trained["train_loss"]


def test_every_worker_reports_the_same(trainer: TFTrainer) -> None:
    first, second = trainer.validate(reduce_results=False)
    assert first == second


def test_a_profile_is_added(trainer: TFTrainer) -> None:
    assert set(trainer.train(profile=True)["profile"]) == {"mean_train_epoch_s"}


def test_a_saved_state_is_restored_in_place(trainer: TFTrainer, tmp_path: Path) -> None:
    path = trainer.save(tmp_path / "state.npz")
    saved = trainer.state_dict()
    pids = trainer.apply_all_workers(process_id)
    expected = trainer.train()
    trainer.restore(path)
    assert largest_difference(trainer.state_dict(), saved) == 0
    assert largest_difference(trainer.state_dict(), saved, "optimizers") == 0
    assert trainer.train() == expected
    assert trainer.apply_all_workers(process_id) == pids


def test_the_workers_stay_equal_after_a_restore(trainer: TFTrainer) -> None:
    trainer.load_state_dict(trainer.state_dict())
    trainer.train()
    first, second = trainer.apply_all_operators(lambda operator: operator.model.get_weights())
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_model_comes_compiled_with_its_weights_and_its_optimizer(trainer: TFTrainer) -> None:
    model = trainer.get_model()
    weights = trainer.apply_all_operators(lambda operator: operator.model.get_weights())[0]
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), weights, strict=True))
    steps = trainer.apply_all_operators(lambda operator: int(operator.model.optimizer.iterations.numpy()))[0]
    assert int(model.optimizer.iterations.numpy()) == steps > 0
    results = model.evaluate(make_data({})[1], verbose=0, return_dict=True)
    assert results["loss"] == pytest.approx(trainer.validate()["validation_loss"], rel=1e-5)


def test_a_killed_worker_costs_one_call_at_most(trainer: TFTrainer, folder: Path, tmp_path: Path) -> None:
    path = trainer.save(tmp_path / "before.npz")
    expected = trainer.train()
    trainer.load(path)
    pids = trainer.apply_all_workers(process_id)
    (folder / "armed").touch()
    assert trainer.train() == pytest.approx(expected, rel=1e-5)
    assert not set(pids) & set(trainer.apply_all_workers(process_id))
    assert trainer._num_failures == 1


def test_a_worker_that_dies_between_two_calls_is_replaced(trainer: TFTrainer) -> None:
    before = trainer.state_dict()
    os.kill(trainer.apply_all_workers(process_id)[1], signal.SIGKILL)
    assert largest_difference(trainer.state_dict(), before) == 0
    trainer.validate()
    assert trainer.num_workers == 2


def test_what_the_user_does_wrong_is_raised_with_rank_and_class(trainer: TFTrainer) -> None:
    def fail(operator: Any) -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        trainer.apply_all_operators(fail)
    assert isinstance(caught.value, WorkerError)
    assert {fault.rank for fault in caught.value.faults} == {0, 1}


def not_compiled(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    return tf.keras.Sequential(models.make_layers(config))


def with_xla(config: dict[str, Any]) -> Any:
    return make_model({**config, "compile": {"jit_compile": True}})


def one_dataset(config: dict[str, Any]) -> Any:
    return make_data(config)[0]


def three_datasets(config: dict[str, Any]) -> Any:
    return (*make_data(config), None)


def not_a_dataset(config: dict[str, Any]) -> Any:
    return models.samples(8), None


def not_batched(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(4), None


@pytest.mark.parametrize(
    ("model_creator", "data_creator", "error", "message"),
    [
        (not_compiled, make_data, IncompatibleModelError, "`model_creator` returned a model that was not compiled"),
        (make_model, one_dataset, ValueError, "return two datasets"),
        (make_model, three_datasets, ValueError, "returned 3 things"),
        (make_model, not_a_dataset, TypeError, "is a `tuple`: need a `tf.data.Dataset`"),
        (make_model, not_batched, ValueError, "is no batch: call `.batch"),
    ],
)
def test_creators_that_return_something_wrong_are_told_so(
    trainer: TFTrainer, model_creator: Any, data_creator: Any, error: type[Exception], message: str
) -> None:
    """In the workers of the trainer, to spare a start for every case."""

    def try_out() -> None:
        from raysgd.engine.types import World
        from raysgd.tf.creator_operator import make_operator
        from raysgd.tf.tf_runner import RunnerSpec, TFRunner

        TFRunner(RunnerSpec(make_operator(model_creator, data_creator), {}, 0), World(0, 1)).setup()

    with pytest.raises(error, match=message):
        trainer.apply_all_workers(try_out)


def test_xla_is_refused_with_advice(trainer: TFTrainer) -> None:
    def compile_anew(operator: Any) -> None:
        operator.model.compile(optimizer="sgd", loss="mse", jit_compile=True)

    state = trainer.state_dict()
    trainer.apply_all_operators(compile_anew)
    with pytest.raises(IncompatibleModelError, match='`jit_compile=True` does not work with `backend="gloo"`'):
        trainer.train(max_retries=0)
    trainer.apply_all_operators(lambda operator: operator.model.compile(optimizer="adam", loss="mse"))
    assert state["epoch"] > 0


def test_an_operator_is_trained_saved_and_handed_out(ray_cluster: None, tmp_path: Path) -> None:
    with TFTrainer(training_operator_cls=Line, config={"batch_size": 2}, num_workers=2, seed=1) as trainer:
        first = trainer.train(num_steps=3, info={"note": 1})
        assert list(first)[:3] == ["num_samples", "epoch", "batch_count"]
        assert first["num_samples"] == 12
        path = trainer.save(tmp_path / "middle.npz")
        rest = trainer.train()
        assert (rest["num_samples"], rest["epoch"]) == (9, 1)
        trainer.load(path)
        again = trainer.train()
        assert again == rest
        model = trainer.get_model()
        assert all(
            np.array_equal(a, b) for a, b in zip(model.get_weights(), trainer.state_dict()["models"][0], strict=True)
        )
    with pytest.raises(RuntimeError, match="not active any more"):
        trainer.train()
