"""Where the workers of a training function go, and in what environment they run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ray.util import placement_group_table

from raysgd import train
from raysgd.exceptions import ReservationTimeoutError
from raysgd.train import RunConfig, ScalingConfig, Trainer
from raysgd.train.data_parallel_trainer import DataParallelTrainer

pytestmark = pytest.mark.integration

ENVIRONMENT = {"env_vars": {"RAYSGD_TEST_PLACE": "here"}}


def strategies() -> set[str]:
    """Of all reservations that are held."""
    return {entry["strategy"] for entry in placement_group_table().values() if entry["state"] == "CREATED"}


def place() -> str:
    return os.environ["RAYSGD_TEST_PLACE"]


def test_a_trainer_says_where_workers_go_and_what_they_run_in(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer("torch", logdir=tmp_path, placement_strategy="SPREAD", runtime_env=ENVIRONMENT)
    trainer.start()
    try:
        assert "SPREAD" in strategies()
        assert trainer.run(place) == ["here"]
    finally:
        trainer.shutdown()
    monkeypatch.setenv("TRAIN_PLACEMENT_GROUP_TIMEOUT_S", "1")
    needs = {"resources_per_worker": {"fast_disk": 2}, "accelerator_type": "A100"}
    with pytest.raises(ReservationTimeoutError, match=r"'fast_disk': 2.*'accelerator_type:A100': 0\.001"):
        Trainer("torch", logdir=tmp_path, **needs).start()


def test_fit_has_it_in_its_configs(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop() -> None:
        train.report({"place": place()})

    run_config = RunConfig(storage_path=tmp_path, worker_runtime_env=ENVIRONMENT)
    found = DataParallelTrainer(loop, scaling_config=ScalingConfig(num_workers=1), run_config=run_config).fit()
    assert found.metrics["place"] == "here"
    monkeypatch.setenv("TRAIN_PLACEMENT_GROUP_TIMEOUT_S", "1")
    scaling = ScalingConfig(num_workers=1, accelerator_type="A100")
    with pytest.raises(Exception, match=r"'accelerator_type:A100': 0\.001"):
        DataParallelTrainer(loop, scaling_config=scaling, run_config=run_config).fit()
