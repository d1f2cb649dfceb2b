"""Where Ray puts the workers of a trainer, and in what environment they run. Covers `raysgd.replicas.placement`."""

from __future__ import annotations

import os

import pytest
from ray.util import placement_group_table

from raysgd.exceptions import ReservationTimeoutError
from raysgd.torch import TorchTrainer, constants
from tests.torch.operators_for_tests import LinearOperator

pytestmark = pytest.mark.integration


def test_workers_go_where_and_run_in_what_the_trainer_says(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = {"placement_strategy": "PACK", "runtime_env": {"env_vars": {"RAYSGD_TEST_PLACE": "here"}}}
    with TorchTrainer(training_operator_cls=LinearOperator, num_workers=1, **placed) as trainer:
        held = [entry["strategy"] for entry in placement_group_table().values() if entry["state"] == "CREATED"]
        assert "PACK" in held
        assert trainer.apply_all_workers(lambda: os.environ["RAYSGD_TEST_PLACE"]) == ["here"]
    monkeypatch.setattr(constants, "SGD_PLACEMENT_GROUP_TIMEOUT_S", 0.5)
    needs = {"resources_per_worker": {"fast_disk": 2}, "accelerator_type": "A100"}
    with pytest.raises(ReservationTimeoutError, match=r"'fast_disk': 2.*'accelerator_type:A100': 0\.001"):
        TorchTrainer(training_operator_cls=LinearOperator, num_workers=1, **needs)
