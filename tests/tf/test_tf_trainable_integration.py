"""`TFTrainable` as Ray Tune drives it, without Tune's own loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysgd.tf import TFTrainable
from tests.tf.models import make_data, make_model

pytestmark = pytest.mark.integration

CONFIG = {
    "model_creator": make_model,
    "data_creator": make_data,
    "num_replicas": 1,
    "use_gpu": False,
    "trainer_config": {"batch_size": 4},
}


def test_a_trial_asks_for_its_workers() -> None:
    request = TFTrainable.default_resource_request({**CONFIG, "num_replicas": 2, "num_cpus_per_worker": 3})
    assert [bundle["CPU"] for bundle in request.bundles] == [3, 3]


def test_it_is_found_where_the_old_library_had_it() -> None:
    from raysgd.tf import tf_trainer

    assert tf_trainer.TFTrainable is TFTrainable
    with pytest.raises(AttributeError, match="no attribute `TFTrainables`"):
        _ = tf_trainer.TFTrainables


def test_a_trial_trains_saves_and_restores(ray_cluster: None, keras: str, tmp_path: Path) -> None:
    trial = TFTrainable(dict(CONFIG))
    try:
        first = trial.step()
        assert sorted(first) == ["train_loss", "train_mae", "validation_loss", "validation_mae"]
        trial.save_checkpoint(str(tmp_path))
        second = trial.step()
        trial.load_checkpoint(str(tmp_path))
        assert trial.step() == pytest.approx(second)
    finally:
        trial.cleanup()
