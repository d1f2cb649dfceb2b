"""What the tests of the old library asserted of `TFTrainer`, retold, where no other test does: two in `make soak`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.tf import TFTrainer
from tests.helpers.lazily import imported

example = imported("raysgd.tf.examples.tensorflow_train_example")
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_file_brings_the_model_into_a_trainer_that_was_made_behind_the_end_of_the_first(
    num_replicas: int, tmp_path: Path
) -> None:
    def make() -> TFTrainer:
        options: dict[str, Any] = {"num_replicas": num_replicas, "use_local": num_replicas == 1}
        return TFTrainer(example.simple_model, example.simple_dataset, config=example.create_config(128), **options)

    path = str(tmp_path / "checkpoint")
    with make() as first:
        first.train()
        first.save(path)
        model = first.get_model()
    with make() as second:
        second.restore(path)
        copy = second.get_model()
    assert [layer.get("class_name") for layer in copy.get_config()["layers"]] == [
        layer.get("class_name") for layer in model.get_config()["layers"]
    ]
    for ours, theirs in zip(copy.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(copy.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy()) > 0
