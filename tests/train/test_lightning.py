"""What of Lightning can train on the workers of a run. Real runs are the programs of `tests/compat`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.run_if import RunIf

pytestmark = [RunIf(modules=["lightning"]), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def leaves_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning sets it when it is imported."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def trainer(**options: Any) -> Any:
    from lightning.pytorch import Trainer

    return Trainer(accelerator="cpu", devices="auto", logger=False, enable_progress_bar=False, **options)


def test_a_trainer_for_workers_that_are_there_already_is_taken_as_it_is() -> None:
    from raysgd.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    made = trainer(strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()])
    assert prepare_trainer(made) is made


def test_the_callback_takes_the_options_of_a_report_and_refuses_what_that_refuses() -> None:
    from raysgd.train import CheckpointUploadMode
    from raysgd.train.lightning import RayTrainReportCallback

    RayTrainReportCallback(checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    with pytest.raises(ValueError, match=r"`checkpoint_upload_mode=.*NO_UPLOAD"):
        RayTrainReportCallback(checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    with pytest.raises(ValueError, match="`validation=True`: checkpoints are not validated in tasks"):
        RayTrainReportCallback(validation=True)


@pytest.mark.parametrize("mode", ["SYNC", "ASYNC"])
def test_a_rank_without_files_leaves_no_folder_and_waits_only_for_checkpoints_in_sync_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    from raysgd.train import CheckpointUploadMode, lightning

    asked: list[str] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(lightning.session, "report", lambda metrics, **options: asked.append("report"))
    monkeypatch.setattr(lightning, "barrier", lambda: asked.append("barrier"))
    callback = lightning.RayTrainReportCallback(checkpoint_upload_mode=CheckpointUploadMode[mode])
    of_rank_1 = SimpleNamespace(
        callback_metrics={}, current_epoch=0, global_step=0, save_checkpoint=lambda path, weights_only: None
    )
    callback.on_train_epoch_end(of_rank_1, None)
    assert asked == (["report", "barrier"] if mode == "SYNC" else ["report"])
    assert list(tmp_path.iterdir()) == []


def test_one_that_would_start_processes_of_its_own_is_refused() -> None:
    from raysgd.train.lightning import RayDDPStrategy, prepare_trainer

    with pytest.raises(RuntimeError, match=r"`Trainer\(strategy=SingleDeviceStrategy.*need `RayDDPStrategy` or"):
        prepare_trainer(trainer())
    with pytest.raises(RuntimeError, match=r"has `LightningEnvironment` as its environment: pass"):
        prepare_trainer(trainer(strategy=RayDDPStrategy()))
