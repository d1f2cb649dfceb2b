"""What a `param_space` may change of a trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from raysgd import tune
from raysgd.train import RunConfig, ScalingConfig
from raysgd.train._tune import merged_arguments
from raysgd.train.torch import TorchTrainer
from tests.helpers.run_if import RunIf


def loop(config: dict[str, Any]) -> None:
    """Trains nothing: no trial begins here."""


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"run_config": RunConfig()}, "pass it to the `Tuner` itself"),
    ({"lr": 0.1}, "`TorchTrainer` does not know `lr`"),
    ({"train_loop_confg": {"lr": 0.1}}, "Did you mean `train_loop_config`?"),
    ({"scaling_config": {"num_worker": 2}}, "`num_worker` is unknown. Did you mean `num_workers`?"),
    ({"scaling_config": {"num_workers": 0}}, "`num_workers=0`"),
    ({"scaling_config": 2}, "`scaling_config=2`"),
]


@RunIf(modules=["ray.tune"])
@pytest.mark.parametrize(("config", "words"), WRONG, ids=[str(config)[:40] for config, _ in WRONG])
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
