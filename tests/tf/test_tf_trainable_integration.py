"""`TFTrainable` as Ray Tune drives it, without Tune's own loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raysgd.tf import TFTrainable
from tests.tf.models import NUM_FEATURES, make_data, make_model

pytestmark = pytest.mark.integration

CONFIG = {
    "model_creator": make_model,
    "data_creator": make_data,
    "num_replicas": 1,
    "use_gpu": False,
    "trainer_config": {"batch_size": 4},
}


def make_smaller_model(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Input([NUM_FEATURES]), tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model


def test_a_trial_asks_for_its_workers() -> None:
    request = TFTrainable.default_resource_request({**CONFIG, "num_replicas": 2, "num_cpus_per_worker": 3})
    assert [bundle["CPU"] for bundle in request.bundles] == [3, 3]


def test_it_is_found_where_the_old_library_had_it() -> None:
    from raysgd.tf import tf_trainer

    assert tf_trainer.TFTrainable is TFTrainable
    with pytest.raises(AttributeError, match="no attribute `TFTrainables`"):
        _ = tf_trainer.TFTrainables


@pytest.mark.keras_in_turns("keras3")
def test_a_trial_trains_saves_restores_and_serves_another_config(ray_cluster: None, keras: str, tmp_path: Path) -> None:
    trial = TFTrainable(dict(CONFIG))
    try:
        first = trial.step()
        assert sorted(first) == ["loss", "mae", "train_loss", "train_mae", "validation_loss", "validation_mae"]
        trial.save_checkpoint(str(tmp_path))
        second = trial.step()
        trial.load_checkpoint(str(tmp_path))
        assert trial.step() == pytest.approx(second)
        processes = trial.trainer.apply_all_workers(os.getpid)
        assert trial.reset_config({**CONFIG, "model_creator": make_smaller_model})
        assert len(trial.trainer.get_model().layers) == 1
        assert trial.reset_config(dict(CONFIG))
        assert trial.step() == pytest.approx(first), "it begins again, with the first creators"
        assert trial.trainer.apply_all_workers(os.getpid) == processes
    finally:
        trial.cleanup()
