"""What a `param_space` may change of a trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from raysgd import tune
from raysgd.train import RunConfig, ScalingConfig
from raysgd.train._tune import check_space, merged_arguments
from raysgd.train.base_trainer import BaseTrainer
from raysgd.train.data_parallel_trainer import DataParallelTrainer, HorovodTrainer
from raysgd.train.tensorflow import TensorflowTrainer
from raysgd.train.torch import TorchTrainer
from tests.helpers.run_if import RunIf


def loop(config: dict[str, Any]) -> None:
    """Trains nothing: no trial begins here."""


class Deep(TorchTrainer):
    """A user's trainer with one argument more."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__(loop, train_loop_config={"depth": depth})


class Open(TorchTrainer):
    """One that takes any name, and keeps some for itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(loop, train_loop_config={"depth": options.pop("depth", 1)}, **options)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"run_config": RunConfig()}, "pass it to the `Tuner` itself"),
    ({"lr": 0.1}, "`param_space` has `lr`, which is not an argument of `TorchTrainer`"),
    ({"train_loop_confg": {"lr": 0.1}}, "Did you mean `train_loop_config`?"),
    ({"scaling_config": {"num_worker": 2}}, "`num_worker` is unknown. Did you mean `num_workers`?"),
    ({"scaling_config": {"num_workers": 0}}, "`num_workers=0`"),
    ({"scaling_config": {"grid_search": [{"num_workers": 1}, {"use_gpus": True}]}}, "Did you mean `use_gpu`?"),
    ({"scaling_config": 2}, "`scaling_config=2`"),
]


@pytest.mark.parametrize(("space", "words"), WRONG, ids=[str(space)[:40] for space, _ in WRONG])
def test_what_no_trial_could_begin_with_is_refused(space: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_space(TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=1)), space)


@pytest.mark.parametrize(
    "trainer_cls",
    [
        DataParallelTrainer,
        TorchTrainer,
        TensorflowTrainer,
        pytest.param(HorovodTrainer, marks=RunIf(modules=["horovod"])),
    ],
)
def test_the_arguments_of_every_trainer_are_known(trainer_cls: type[DataParallelTrainer]) -> None:
    names = ["train_loop_config", "datasets", "metadata", "preprocessor", "dataset_config", "resume_from_checkpoint"]
    check_space(trainer_cls(loop), {name: {"a": 1} for name in names})


def test_so_are_those_of_a_base_trainer() -> None:
    class Countdown(BaseTrainer):
        def training_loop(self) -> None: ...

    check_space(Countdown(), {"datasets": {}})
    with pytest.raises(ValueError, match="`train_loop_config`, which is not an argument of `Countdown`"):
        check_space(Countdown(), {"train_loop_config": {}})


def test_a_class_of_yours_says_itself_what_it_takes() -> None:
    check_space(Deep(), {"depth": 2})
    with pytest.raises(ValueError, match="`scaling_config`, which is not an argument of `Deep`"):
        check_space(Deep(), {"scaling_config": {}})
    check_space(Open(), {"depth": 2, "scaling_config": {"num_workers": 2}})


@RunIf(modules=["ray.tune"])
def test_what_tune_has_to_choose_is_left_to_it() -> None:
    from ray.tune import choice, grid_search

    trainer = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=1, use_gpu=True))
    for scaling in (
        {"num_workers": grid_search([1, 2]), "resources_per_worker": {"GPU": 2}},
        grid_search([ScalingConfig(num_workers=2), {"num_workers": 3}]),
        choice([ScalingConfig(num_workers=2)]),
    ):
        check_space(trainer, {"scaling_config": scaling, "train_loop_config": {"lr": choice([1, 2])}})


@RunIf(modules=["ray.tune"])
def test_the_tuner_asks_before_anything_starts(tmp_path: Path) -> None:
    trainer = TorchTrainer(loop)
    with pytest.raises(ValueError, match="Did you mean `datasets`"):
        tune.Tuner(trainer, param_space={"dataset": {}})
    with pytest.raises(ValueError, match="Did you mean `datasets`"):
        tune.Tuner.restore(tmp_path, trainer, param_space={"dataset": {}})
    with pytest.raises(ValueError, match=r"`path='.*sweep'`: there is no sweep\. Pass the folder"):
        tune.Tuner.restore(tmp_path / "sweep", trainer)


def test_arguments_are_merged_down_to_the_values_of_dicts() -> None:
    scaling = ScalingConfig(num_workers=2)
    given: dict[str, Any] = {"train_loop_config": {"a": 1, "deep": {"b": 2}}, "scaling_config": scaling, "rest": 3}
    config = {"train_loop_config": {"deep": {"c": 4}}, "scaling_config": {"use_gpu": True}}
    merged = merged_arguments(given, config)
    assert merged["train_loop_config"] == {"a": 1, "deep": {"b": 2, "c": 4}}
    assert (merged["scaling_config"].num_workers, merged["scaling_config"].use_gpu, merged["rest"]) == (2, True, 3)
    assert given["train_loop_config"] == {"a": 1, "deep": {"b": 2}}


def test_named_datasets_are_added_to_those_of_the_trainer() -> None:
    given = {"datasets": {"train": "small", "valid": "all"}}
    assert merged_arguments(given, {"datasets": {"train": "large"}})["datasets"] == {"train": "large", "valid": "all"}
