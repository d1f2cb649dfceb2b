"""What trainers of `fit` are given.

Covers `raysgd.train.base_trainer` and `raysgd.train.data_parallel_trainer`, as far as they check: the rest is run in
`test_fit_integration`.
"""

from __future__ import annotations

import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysgd import tune
from raysgd.air import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.air.constants import MAX_REPR_LENGTH
from raysgd.train._tune import merged_arguments
from raysgd.train.backend import BackendConfig
from raysgd.train.base_trainer import BaseTrainer
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.fit.run import num_restarts
from raysgd.train.torch import TorchTrainer
from tests.helpers.run_if import RunIf


def loop(config: dict[str, Any]) -> None:
    """A function of one argument."""


def of_two(config: dict[str, Any], more: int) -> None:
    """One argument too many."""


WRONG = [
    ({"scaling_config": {"num_worker": 2}}, ValueError, "Available: .*num_workers"),
    ({"scaling_config": {"num_workers": 0}}, ValueError, "num_workers"),
    ({"datasets": {"train": "path"}}, ValueError, r"`datasets\['train'\]"),
    ({"datasets": {"val": 5}}, ValueError, r"`datasets\['val'\]=5`: need a dataset"),
    ({"dataset_config": 3}, ValueError, "`dataset_config=3`"),
    ({"resume_from_checkpoint": {"epoch": 1}}, ValueError, "`resume_from_checkpoint=.*from_dict"),
    ({"metadata": [1]}, TypeError, "`metadata="),
    ({"metadata": {"a": object()}}, ValueError, "`metadata=.*JSON"),
    ({"backend_config": BackendConfig}, ValueError, "`backend_config="),
]


@pytest.mark.parametrize(("options", "error", "words"), WRONG, ids=[next(iter(each[0])) for each in WRONG])
def test_what_is_wrong_is_said_when_the_trainer_is_made(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        DataParallelTrainer(loop, **options)


def test_configs_and_checkpoints_of_ray_are_refused_in_words_that_name_both() -> None:
    theirs = pytest.importorskip("ray.train")
    for name in ("scaling_config", "run_config"):
        config = {"scaling_config": theirs.ScalingConfig, "run_config": theirs.RunConfig}[name]()
        with pytest.raises(ValueError, match=f"`{name}=.*Those of Ray have the same names.*from `raysgd.train`"):
            DataParallelTrainer(loop, **{name: config})
    for name in ("failure_config", "checkpoint_config"):
        config = {"failure_config": theirs.FailureConfig, "checkpoint_config": theirs.CheckpointConfig}[name]()
        with pytest.raises(ValueError, match=f"`{name}=.*Those of Ray have the same names.*from `raysgd.train`"):
            RunConfig(**{name: config})
    with pytest.raises(ValueError, match=r"`resume_from_checkpoint=.*Those of Ray have the same names"):
        DataParallelTrainer(loop, resume_from_checkpoint=theirs.Checkpoint("/tmp"))


def test_a_loop_takes_one_argument_at_most() -> None:
    with pytest.raises(ValueError, match="`train_loop_per_worker` takes 2 parameters"):
        DataParallelTrainer(of_two)  # type: ignore[arg-type]
    DataParallelTrainer(partial(of_two, more=1))
    with pytest.raises(TypeError, match="`train_loop_per_worker=3`"):
        DataParallelTrainer(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        (
            "checkpoint_config",
            CheckpointConfig(checkpoint_frequency=2),
            "checkpoint_frequency=2.*your function",
        ),
        ("checkpoint_config", CheckpointConfig(checkpoint_at_end=True), "checkpoint_at_end=True"),
        ("storage_path", "memory://x", "only this process sees"),
    ],
)
def test_what_only_fit_needs_is_said_by_fit(name: str, config: Any, words: str) -> None:
    trainer = DataParallelTrainer(
        loop, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(**{name: config})
    )
    with pytest.raises(ValueError, match=words):
        trainer.fit()


def test_functions_that_go_on_need_workers_that_can() -> None:
    trainer = DataParallelTrainer(loop, scaling_config=ScalingConfig(num_workers=(1, 2), elastic=True))
    with pytest.raises(ValueError, match="only workers that `TorchConfig` connects"):
        trainer.fit()


def test_a_trainer_refuses_what_it_has_no_use_for() -> None:
    class Own(BaseTrainer):
        def training_loop(self) -> None:
            pass

    with pytest.raises(ValueError, match="sets `num_workers`, which `Own` does not"):
        Own(scaling_config=ScalingConfig(num_workers=2)).fit()


def test_metadata_is_what_json_makes_of_it() -> None:
    assert DataParallelTrainer(loop, metadata={"sizes": (1, 2)}).metadata == {"sizes": [1, 2]}


def test_a_trainer_shows_what_it_was_given_and_notes_it() -> None:
    trainer = DataParallelTrainer(loop, train_loop_config={"lr": 1}, scaling_config=ScalingConfig(num_workers=2))
    assert repr(trainer).startswith("DataParallelTrainer(train_loop_per_worker=loop, train_loop_config={'lr': 1}, ")
    assert "datasets" not in repr(trainer)
    assert len(repr(trainer)) < MAX_REPR_LENGTH
    assert set(trainer._arguments) == {"train_loop_per_worker", "train_loop_config", "scaling_config"}
    assert pickle.loads(pickle.dumps(trainer))._arguments["train_loop_config"] == {"lr": 1}


def test_the_text_of_a_trainer_with_long_arguments_is_short() -> None:
    run_config = RunConfig(name="x" * 50, failure_config=FailureConfig(max_failures=3))
    trainer = DataParallelTrainer(loop, train_loop_config={"a": "b" * 50}, run_config=run_config)
    assert len(repr(trainer)) < MAX_REPR_LENGTH
    assert re.fullmatch(
        r"DataParallelTrainer\(train_loop_per_worker=loop, train_loop_config={'a.*run_config=.*\)", repr(trainer)
    )


class Table:
    """Draws itself, as the datasets of Ray Data do."""

    def __repr__(self) -> str:
        return "+--+\n|  |\n+--+"


def test_the_text_of_a_trainer_is_one_line_whatever_its_datasets_draw() -> None:
    trainer = DataParallelTrainer(loop, scaling_config=ScalingConfig())
    trainer._arguments["datasets"] = {"train": Table()}
    assert "datasets={'train': <Table>}" in repr(trainer)
    assert trainer.scaling_config.num_workers == 1, "as in Ray"


class Predefined(DataParallelTrainer):
    """A trainer with a loop of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(loop, *args, **kwargs)


def test_a_loop_may_be_predefined_by_a_subclass() -> None:
    trainer = Predefined(scaling_config=ScalingConfig(num_workers=2), train_loop_config={"lr": 1})
    assert trainer.scaling_config.num_workers == 2
    assert set(trainer._arguments) == {"scaling_config", "train_loop_config"}


def test_only_the_train_dataset_is_divided_unless_somebody_says_otherwise() -> None:
    trainer = DataParallelTrainer(loop, datasets={"train": [1], "val": [2]})
    config = trainer.get_dataset_config()
    assert (config["train"].split, config["*"].split) == (True, False)
    config["train"] = None
    assert trainer.get_dataset_config()["train"] is not None


@pytest.mark.parametrize(("max_failures", "restarts"), [(0, 0), (3, 3), (-1, float("inf"))])
def test_each_failure_that_is_allowed_is_one_restart(max_failures: int, restarts: float) -> None:
    assert num_restarts(RunConfig(failure_config=FailureConfig(max_failures=max_failures))) == restarts


class TestFrameworks:
    def test_take_the_config_by_both_of_its_names(self) -> None:
        pytest.importorskip("torch")
        from raysgd.train.torch import TorchConfig

        config = TorchConfig(backend="gloo")
        for options in ({"torch_config": config}, {"torch_backend": config}):
            assert TorchTrainer(loop, **options)._backend_config is config
        assert isinstance(TorchTrainer(loop)._backend_config, TorchConfig)
        with pytest.raises(ValueError, match="two names of one option"):
            TorchTrainer(loop, torch_config=config, torch_backend=config)
        with pytest.raises(ValueError, match=r"`torch_config=.*need a `TorchConfig`"):
            TorchTrainer(loop, torch_config=BackendConfig())

    def test_of_tensorflow_take_it_too(self) -> None:
        pytest.importorskip("tensorflow")
        from raysgd.train.tensorflow import TensorflowConfig, TensorflowTrainer

        config = TensorflowConfig()
        assert TensorflowTrainer(loop, tensorflow_backend=config)._backend_config is config


# -------------------------------------------------------------------- what a `param_space` may change of a trainer


OF_SPACES: list[tuple[dict[str, Any], str]] = [
    ({"run_config": RunConfig()}, "pass it to the `Tuner` itself"),
    ({"lr": 0.1}, "`TorchTrainer` does not know `lr`"),
    ({"train_loop_confg": {"lr": 0.1}}, "Did you mean `train_loop_config`?"),
    ({"scaling_config": {"num_worker": 2}}, "`num_worker` is unknown. Did you mean `num_workers`?"),
    ({"scaling_config": {"num_workers": 0}}, "`num_workers=0`"),
    ({"scaling_config": 2}, "`scaling_config=2`"),
]


@RunIf(modules=["ray.tune"])
@pytest.mark.parametrize(("config", "words"), OF_SPACES, ids=[str(config)[:40] for config, _ in OF_SPACES])
def test_what_no_trial_can_begin_with_is_refused_when_tune_asks_what_it_needs(
    config: dict[str, Any], words: str
) -> None:
    trainable_cls = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=1)).as_trainable()
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        trainable_cls.default_resource_request(config)


@RunIf(modules=["ray.tune"])
def test_the_tuner_refuses_the_config_of_a_run_and_a_folder_without_a_sweep(tmp_path: Path) -> None:
    trainer = TorchTrainer(loop)
    with pytest.raises(ValueError, match="pass it to the `Tuner` itself"):
        tune.Tuner(trainer, param_space={"run_config": RunConfig()})
    with pytest.raises(ValueError, match=r"`path='.*sweep'`: there is no sweep\. Pass the folder"):
        tune.Tuner.restore(tmp_path / "sweep", trainer)


def test_arguments_are_merged_down_to_the_values_of_dicts() -> None:
    given: dict[str, Any] = {
        "train_loop_config": {"a": 1, "deep": {"b": 2}},
        "scaling_config": ScalingConfig(num_workers=2),
        "datasets": {"train": "small", "valid": "all"},
        "rest": 3,
    }
    config = {
        "train_loop_config": {"deep": {"c": 4}},
        "scaling_config": {"use_gpu": True},
        "datasets": {"train": "large"},
    }
    merged = merged_arguments(given, config)
    assert merged["train_loop_config"] == {"a": 1, "deep": {"b": 2, "c": 4}}
    assert merged["datasets"] == {"train": "large", "valid": "all"}
    assert (merged["scaling_config"].num_workers, merged["scaling_config"].use_gpu, merged["rest"]) == (2, True, 3)
    assert given["train_loop_config"] == {"a": 1, "deep": {"b": 2}}
