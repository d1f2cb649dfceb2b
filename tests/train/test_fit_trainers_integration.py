"""The trainers of `fit` for each framework connect their workers; and what else only a worker shows.

Covers `raysgd.train.data_parallel_trainer`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd.exceptions import SessionMisuseError, TrainingFailedError
from raysgd.train import RunConfig, ScalingConfig
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from tests.train.fit import loops

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


def fit(trainer_class: Callable[..., Any], loop: Any, place: Path, **options: Any) -> Any:
    scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=str(place))
    return trainer_class(loop, scaling_config=scaling, run_config=run, **options).fit()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("module", "name", "loop"),
    [
        ("tensorflow", "TensorflowTrainer", loops.count_with_tensorflow),
        ("horovod", "HorovodTrainer", loops.count_with_horovod),
    ],
)
def test_a_trainer_connects_its_workers(module: str, name: str, loop: Any, tmp_path: Path) -> None:
    trainer_class = getattr(importlib.import_module(f"raysgd.train.{module}"), name)
    assert fit(trainer_class, loop, tmp_path).metrics["replicas"] == 2


def test_a_report_to_ray_train_says_what_to_import(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match=r"Import `raysgd\.train` instead of `ray\.train`") as caught:
        fit(DataParallelTrainer, loops.call_ray_train, tmp_path)
    assert isinstance(caught.value, SessionMisuseError)
