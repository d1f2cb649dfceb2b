"""Checkpoints that are validated in tasks of Ray while the training goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from raysgd.air import CheckpointConfig, RunConfig, ScalingConfig
from raysgd.air.result import Result
from raysgd.exceptions import TrainingFailedError
from raysgd.train import ValidationConfig, ValidationTaskConfig
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from tests.train.fit import loops

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]

LOSSES = [1.0, 3.0, 2.0]


def trainer(place: Path, *validations: Any, keep: CheckpointConfig | None = None, **config: Any) -> DataParallelTrainer:
    return DataParallelTrainer(
        loops.validate_beside,
        train_loop_config={"validations": validations, "flag": str(place / "flag"), **config},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(place), checkpoint_config=keep),
        validation_config=ValidationConfig(
            loops.validated, ValidationTaskConfig({"losses": LOSSES}), {"num_cpus": 0, "max_retries": 0}
        ),
    )


def losses_in(result: Result) -> list[Any]:
    return [metrics.get("val_loss") for _, metrics in result.best_checkpoints]


def test_the_training_goes_on_meanwhile_and_the_best_checkpoint_is_the_best_validated_one(tmp_path: Path) -> None:
    waiting = ValidationTaskConfig({"flag": str(tmp_path / "flag")})
    keep = CheckpointConfig(1, checkpoint_score_attribute="val_loss", checkpoint_score_order="min")
    result = trainer(tmp_path, waiting, True, True, keep=keep).fit()
    assert result.return_value == [["PENDING_VALIDATION"] * 3, ["PENDING_VALIDATION"] * 3, ["VALIDATED"] * 2]
    assert losses_in(result) == [1.0]
    assert (result.metrics["epoch"], result.metrics["val_loss"]) == (2, 2.0)
    names = sorted(path.name for path in Path(str(result.path)).glob("checkpoint_*"))
    assert names == ["checkpoint_000000", "checkpoint_000002"], "the best one and the newest one"
    read = Result.from_path(str(result.path))
    assert losses_in(read) == [1.0, 2.0]
    assert list(read.metrics_dataframe["val_loss"]) == LOSSES
    assert read.metrics_dataframe["pid_of_validation"].nunique() <= 2


def test_one_that_fails_or_takes_too_long_is_told_of_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = ValidationTaskConfig({"flag": str(tmp_path / "never")}, timeout_s=0.5)
    failing = (ValidationTaskConfig({"error": "no such data"}), ValidationTaskConfig({"is_none": True}))
    with caplog.at_level(logging.WARNING):
        result = trainer(tmp_path, *failing, late, False).fit()
    assert result.return_value[-1] == ["VALIDATION_FAILED", "VALIDATION_FAILED", "VALIDATION_TIMEOUT", "COMMITTED"]
    assert losses_in(result) == [None] * 4
    for said in ("no such data", "returned None: need a dict", "took longer than `timeout_s=0.5`"):
        assert said in caplog.text


def test_a_run_that_fails_ends_its_validations(tmp_path: Path) -> None:
    never = ValidationTaskConfig({"flag": str(tmp_path / "never")})
    with pytest.raises(TrainingFailedError, match="in the function"):
        trainer(tmp_path, never, never, fails_at=1).fit()


def test_options_that_ray_does_not_know_are_refused_before_anything_starts(tmp_path: Path) -> None:
    wrong = trainer(tmp_path, True)
    wrong.validation_config = ValidationConfig(loops.validated, ray_remote_kwargs={"num_cpu": 0})
    with pytest.raises(TrainingFailedError, match="num_cpu"):
        wrong.fit()
    assert not list(tmp_path.glob("*/*/checkpoint_*"))


def test_a_trial_of_ray_tune_has_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Ray Tune keeps the checkpoints"):
        trainer(tmp_path, True).as_trainable()
