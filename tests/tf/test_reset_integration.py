"""Workers with TensorFlow that serve another config: as a new trainer would."""

from __future__ import annotations

import os

import pytest

from raysgd.tf import TFTrainer
from tests.tf.models import make_data, make_model

pytestmark = pytest.mark.integration


@pytest.mark.soak
def test_a_trainer_that_is_reset_is_as_a_new_one(ray_cluster: None, keras: str) -> None:
    options = {"num_replicas": 2, "seed": 3}
    with TFTrainer(make_model, make_data, {"batch_size": 4, "lr": 0.1}, **options) as used:
        before = used.apply_all_workers(os.getpid)
        used.train()
        used.reset_config({"batch_size": 8, "lr": 0.05})
        assert used.apply_all_workers(os.getpid) == before
        found = [used.train(), used.validate()]
    with TFTrainer(make_model, make_data, {"batch_size": 8, "lr": 0.05}, **options) as new:
        expected = [new.train(), new.validate()]
    for mine, other in zip(found, expected, strict=True):
        assert mine == pytest.approx(other)
