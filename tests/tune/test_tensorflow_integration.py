"""A function for several workers with TensorFlow as a trial of Ray Tune."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.tune.tensorflow import DistributedTrainableCreator, distributed_checkpoint_dir, get_num_workers
from tests.helpers.processes import shipped

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("workers_have_tensorflow")]


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    with shipped(request.module):
        yield


def count(config: dict[str, Any], checkpoint_dir: str | None = None) -> None:
    """Counts on from where the checkpoint says, and keeps what rank 0 says; Keras does the counting."""
    os.environ["TF_USE_LEGACY_KERAS"] = config["legacy"]
    import tensorflow as tf

    counter = tf.keras.metrics.Sum()
    start = int(Path(checkpoint_dir, "deep", "step").read_text()) + 1 if checkpoint_dir else 0
    for step in range(start, config["num_steps"]):
        with distributed_checkpoint_dir(step=step) as folder:
            path = Path(folder, "deep", "step")
            path.parent.mkdir()
            path.write_text(str(step + 100 * train.world_rank()))
        counter.update_state(1.0)
        sums = {"counted": start + int(counter.result()), "keras": type(counter).__module__.partition(".")[0]}
        train.report(step=step, rank=train.world_rank(), num_workers=get_num_workers(), **sums)


@pytest.mark.soak  # tests/tf/test_tf_trainer_integration.py has a trial of TensorFlow
@pytest.mark.parametrize(("legacy", "keras"), [("0", "keras"), ("1", "tf_keras")])
def test_a_trial_reports_what_rank_0_does_and_goes_on_from_its_checkpoint(
    ray_cluster: None, tmp_path: Path, legacy: str, keras: str
) -> None:
    trainable_cls = DistributedTrainableCreator(count, 2, 0, 1, None, timeout_s=60)
    assert trainable_cls.default_resource_request({}).bundles == [{"CPU": 1}, {"CPU": 1}]
    trial = trainable_cls({"num_steps": 3, "legacy": legacy})
    try:
        first = [trial.step() for _ in range(2)]
        assert [(result["step"], result["rank"], result["num_workers"]) for result in first] == [(0, 0, 2), (1, 0, 2)]
        assert [(result["counted"], result["keras"]) for result in first] == [(1, keras), (2, keras)]
        trial.save_checkpoint(str(tmp_path))
        trial.load_checkpoint(str(tmp_path))
        assert trial.step()["step"] in (1, 2), "after the newest checkpoint, which may be ahead of the reports"
    finally:
        trial.cleanup()


def test_the_number_of_workers_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert get_num_workers() == 1
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:2", "c:3"]}}')
    assert get_num_workers() == 3
