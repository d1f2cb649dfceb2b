"""What of Lightning can train on the workers of a run. Real runs are the programs of `tests/compat`."""

from __future__ import annotations

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


def test_one_that_would_start_processes_of_its_own_is_refused() -> None:
    from raysgd.train.lightning import RayDDPStrategy, prepare_trainer

    with pytest.raises(RuntimeError, match=r"`Trainer\(strategy=SingleDeviceStrategy.*need `RayDDPStrategy` or"):
        prepare_trainer(trainer())
    with pytest.raises(RuntimeError, match=r"has `LightningEnvironment` as its environment: pass"):
        prepare_trainer(trainer(strategy=RayDDPStrategy()))
