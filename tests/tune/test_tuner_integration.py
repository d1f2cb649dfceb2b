"""`Tuner`: a trainer of `fit()` with many configs; and operators in a `Tuner` of Ray.

Covers `raysgd.train._tune`: what a trial does is seen here.
"""

from __future__ import annotations

import csv
import importlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle

from raysgd import TorchTrainer, air, train, tune
from raysgd.callbacks import CSVLogger
from raysgd.train import Checkpoint, CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig, _tune
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.tune.tuner import as_ray_config, chosen
from tests.helpers.run_if import RunIf
from tests.torch.operators_for_tests import LinearOperator

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("ships_what_tests_define"),
    RunIf(modules=["ray.tune", "pandas", "pyarrow"]),
]


def count(config: dict[str, Any]) -> None:
    """Counts on from its checkpoint; fails once where it is told to."""
    checkpoint = train.get_checkpoint()
    first = checkpoint.to_dict()["step"] + 1 if checkpoint is not None else 0
    for step in range(first, config["num_steps"]):
        mark = Path(config.get("fails_once", "/"))
        if step == 1 and not mark.exists():
            mark.touch()
            raise ValueError("told to fail")
        size, context = train.get_context().get_world_size(), train.get_context()
        metrics = {"step": step, "began_at": first, "size": size, "trial": context.get_trial_id()}
        train.report({**metrics, "score": config["factor"] * step}, checkpoint=Checkpoint.from_dict({"step": step}))


def make_trainer(folder: Path, **config: Any) -> DataParallelTrainer:
    return DataParallelTrainer(
        count,
        train_loop_config={"num_steps": 3, "factor": 1, **config},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(folder), name="sweep", verbose=0),
    )


def test_trials_have_the_arguments_of_the_trainer_but_for_those_that_the_space_names(
    ray_cluster: None, tmp_path: Path
) -> None:
    from ray.tune import grid_search

    trainer = DataParallelTrainer(
        count, train_loop_config={"num_steps": 3, "factor": 1}, scaling_config=ScalingConfig(num_workers=1)
    )
    tuner = tune.Tuner(
        trainer,
        param_space={
            "train_loop_config": {"factor": grid_search([1, 2])},
            "scaling_config": ScalingConfig(num_workers=2),
        },
        tune_config=tune.TuneConfig(metric="score", mode="max", max_concurrent_trials=1),
        run_config=RunConfig(storage_path=str(tmp_path), name="sweep", verbose=0, callbacks=[CSVLogger()]),
    )
    results = tuner.fit()
    tables = [Path(result.path or "") / "metrics.csv" for result in results]
    scores = [[float(row["score"]) for row in csv.DictReader(table.open())] for table in tables]
    assert sorted(scores) == [[0, 1, 2], [0, 2, 4]], "each trial has its own copy of the callback"
    assert (len(results), results.num_errors, results.num_terminated) == (2, 0, 2)
    assert all(isinstance(result, Result) for result in results)
    best = results.get_best_result()
    assert (best.metrics["score"], best.metrics["size"], best.metrics["training_iteration"]) == (4, 2, 3)
    assert best.checkpoint.to_dict()["step"] == 2
    assert list(best.metrics_dataframe["step"]) == [0, 1, 2]
    assert sorted(results.get_dataframe()["score"]) == [2, 4]
    assert best.metrics["trial"] == best.metrics["trial_id"]
    assert best.path is not None
    assert Path(best.path).parent == tmp_path / "sweep"
    assert trainer.scaling_config.num_workers == 1, "the trainer is as it was"
    assert len(list((tmp_path / ".raysgd").iterdir())) <= 1, "Tune kills the last trial if it takes 5 s to clear away"


def test_a_trial_can_be_ended_wherever_it_is_and_goes_on_from_what_tune_has(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tune, "_END_S", 200.0)
    trial = make_trainer(tmp_path).as_trainable()({"train_loop_config": {"num_steps": 100}})
    try:
        assert [trial.step()["step"] for _ in range(2)] == [0, 1]
        (tmp_path / "kept").mkdir()
        trial.save_checkpoint(str(tmp_path / "kept"))
        trial.load_checkpoint(str(tmp_path / "kept"))
        after = trial.step()
        assert (after["step"], after["began_at"], after["should_checkpoint"]) == (2, 2, True)
    finally:
        trial.cleanup()
    assert [thread.name for thread in threading.enumerate() if thread.name == "raysgd-fit"] == []
    assert not list((tmp_path / ".raysgd").iterdir()), "what the workers stored went to Tune"


def test_a_scheduler_stops_trials_of_operators_that_are_worse(ray_cluster: None, tmp_path: Path) -> None:
    from ray.tune import RunConfig, TuneConfig, Tuner, grid_search
    from ray.tune.schedulers import ASHAScheduler

    scheduler = ASHAScheduler(max_t=3, grace_period=1, reduction_factor=2)
    chosen = TuneConfig(metric="val_loss", mode="min", scheduler=scheduler, max_concurrent_trials=1, reuse_actors=True)
    results = Tuner(
        TorchTrainer.as_trainable(training_operator_cls=LinearOperator, use_local=True, use_gpu=False),
        param_space={"lr": grid_search([0.05, 1e-6, 1e-7])},
        tune_config=chosen,
        run_config=RunConfig(storage_path=str(tmp_path), stop={"training_iteration": 3}, verbose=0),
    ).fit()
    assert results.num_errors == 0
    epochs = {result.config["lr"]: result.metrics["epoch"] for result in results}
    assert (epochs[0.05], epochs[1e-7]) == (3, 1)
    assert results.get_best_result().config["lr"] == 0.05


def count_for_tune(config: dict[str, Any]) -> None:
    """A function that Ray Tune runs itself, as programs for Ray AIR have them."""
    checkpoint = air.session.get_checkpoint()
    first = checkpoint.to_dict()["step"] + 1 if checkpoint is not None else 0
    for step in range(first, 3):
        if step == 1 and first == 0:
            raise ValueError("told to fail")
        air.session.report(
            {"step": step, "first": first, "own_id": air.session.get_trial_id()},
            checkpoint=Checkpoint.from_dict({"step": step}),
        )


def test_a_function_that_tune_runs_reports_to_its_trial(ray_cluster: None, tmp_path: Path) -> None:
    run_config = RunConfig(storage_path=str(tmp_path), verbose=0, failure_config=FailureConfig(max_failures=1))
    [result] = tune.Tuner(count_for_tune, run_config=run_config).fit()
    assert result.error is None
    assert (result.metrics["step"], result.metrics["first"]) == (2, 1)
    assert result.metrics["own_id"] == result.metrics["trial_id"]
    assert result.checkpoint.to_dict()["step"] == 2


def test_the_tuner_of_ray_says_where_a_trainer_belongs(ray_cluster: None, tmp_path: Path) -> None:
    from ray.tune import Tuner

    with pytest.raises(TypeError, match=r"`ray.tune.Tuner` takes Ray's trainers: .* `raysgd.tune.Tuner`"):
        Tuner(make_trainer(tmp_path))
    with pytest.raises(TypeError, match=r"`raysgd.tune.Tuner`"):
        make_trainer(tmp_path)({})


def test_a_trainer_of_ray_is_named_as_such() -> None:
    of_ray = importlib.import_module("ray.train.torch").TorchTrainer(lambda: None)
    with pytest.raises(TypeError, match=r"is a trainer of Ray, and `raysgd.tune.Tuner` takes trainers of raysgd"):
        tune.Tuner(of_ray)


def test_a_trainer_that_runs_already_is_no_trial() -> None:
    class Running:
        def as_trainable(self) -> None: ...

    with pytest.raises(TypeError, match="running already"):
        tune.Tuner(Running())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"param_space": [1]}, "param_space"),
        ({"run_config": {"name": "a"}}, "run_config"),
        ({"tune_config": 3}, "tune_config"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"`{name}="):
        tune.Tuner(make_trainer(tmp_path), **options)
    assert not list(tmp_path.iterdir())


def test_a_function_of_ray_keeps_at_least_one_checkpoint() -> None:
    with pytest.raises(ValueError, match=r"`CheckpointConfig\(num_to_keep=0\)`: Ray Tune keeps at least one"):
        tune.Tuner(count, run_config=RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=0)))


def test_what_a_trial_asks_for_follows_its_config(tmp_path: Path) -> None:
    trainable_cls = make_trainer(tmp_path).as_trainable()
    assert trainable_cls.__name__ == "DataParallelTrainer"
    assert trainable_cls.default_resource_request({}).bundles == [{"CPU": 1}, {"CPU": 1}]
    config = {"scaling_config": {"num_workers": (1, 2), "resources_per_worker": {"CPU": 3}}}
    assert trainable_cls.default_resource_request(config).bundles == [{"CPU": 1}, {"CPU": 3}, {"CPU": 3}]


def test_the_configs_of_a_run_are_those_of_ray() -> None:
    config = RunConfig(
        name="run",
        storage_path="relative",
        stop={"step": 2},
        failure_config=FailureConfig(max_failures=3),
        checkpoint_config=CheckpointConfig(num_to_keep=0, checkpoint_score_attribute="loss"),
    )
    made = as_ray_config(config)
    assert (made.name, made.storage_path, made.stop) == ("run", str(Path("relative").absolute()), {"step": 2})
    assert made.failure_config.max_failures == 3
    assert (made.checkpoint_config.num_to_keep, made.checkpoint_config.checkpoint_score_attribute) == (None, "loss")


def test_the_run_config_of_the_tuner_counts_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, other = make_trainer(tmp_path), RunConfig(name="other")
    with caplog.at_level("INFO", "raysgd.tune"):
        assert chosen(trainer, other) is other
        assert "the trainer's `run_config` does not" in caplog.text
        assert chosen(trainer, None) is trainer.run_config
        assert len(caplog.records) == 1


def test_a_trial_may_bring_what_the_trainer_lacks() -> None:
    trainable_cls = DataParallelTrainer(count).as_trainable()
    assert trainable_cls.default_resource_request({"scaling_config": {"num_workers": 2}}).bundles == [{"CPU": 1}] * 3


def test_memory_that_workers_do_not_see_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`storage_path='memory://sweeps'`: only this process sees"):
        tune.Tuner(make_trainer(tmp_path), run_config=RunConfig(storage_path="memory://sweeps"))


def test_callbacks_of_the_trainer_need_not_travel_to_its_trials() -> None:
    trainer = DataParallelTrainer(count, run_config=RunConfig(callbacks=[threading.Lock()]))
    ray.cloudpickle.dumps(trainer.as_trainable())


@pytest.mark.soak
def test_a_trial_that_loses_a_worker_is_repeated_from_its_checkpoint(ray_cluster: None, tmp_path: Path) -> None:
    from ray import tune

    def step(trainer: TorchTrainer, info: dict[str, Any]) -> dict[str, Any]:
        import signal

        result = {**trainer.train(), **trainer.validate()}
        mark = tmp_path / "killed"
        if info["iteration"] == 1 and not mark.exists():
            mark.touch()
            pid = trainer.apply_all_workers(os.getpid)[0]
            os.kill(pid, signal.SIGKILL)
            trainer.train(max_retries=0)
        return result

    trainable_cls = TorchTrainer.as_trainable(
        override_tune_step=step, training_operator_cls=LinearOperator, use_gpu=False
    )
    [result] = tune.Tuner(
        trainable_cls,
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "tune"),
            stop={"training_iteration": 3},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            failure_config=tune.FailureConfig(max_failures=1),
            verbose=0,
        ),
    ).fit()
    assert result.error is None
    assert (tmp_path / "killed").exists()
    assert (result.metrics["epoch"], result.metrics["training_iteration"]) == (3, 3)
