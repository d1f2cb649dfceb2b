"""A function for several workers, with PyTorch or with TensorFlow, as a trial of Ray Tune."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.tune import tensorflow as of_tensorflow
from raysgd.tune.torch import DistributedTrainableCreator, distributed_checkpoint_dir, is_distributed_trainable
from tests.helpers.run_if import RunIf

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("ray_cluster", "ships_what_tests_define"),
    RunIf(modules=["ray.tune", "pandas", "pyarrow"]),
]


def add_up(config: dict[str, Any], checkpoint_dir: str | None = None) -> None:
    """Adds up the ranks over all workers, on from where the checkpoint says."""
    import torch
    import torch.distributed as dist

    start = int(Path(checkpoint_dir, "step").read_text()) + 1 if checkpoint_dir else 0
    for step in range(start, config["num_steps"]):
        total = torch.tensor(dist.get_rank() + 1)
        dist.all_reduce(total)
        with distributed_checkpoint_dir(step=step) as folder:
            Path(folder, "step").write_text(str(step + 100 * dist.get_rank()))
        facts = {"backend": dist.get_backend(), "is_distributed": is_distributed_trainable()}
        train.report(step=step, rank=dist.get_rank(), total=int(total), began_at=start, **facts)


def test_it_goes_on_from_its_checkpoint_and_ends_once(tmp_path: Path) -> None:
    trial = DistributedTrainableCreator(add_up, num_workers=2, timeout_s=240)({"num_steps": 2})
    try:
        first = trial.step()
        expected = {"step": 0, "rank": 0, "total": 3, "began_at": 0, "backend": "gloo", "is_distributed": True}
        assert {name: first[name] for name in expected} == expected
        assert trial.step()["step"] == 1
        assert not is_distributed_trainable()
        trial.save_checkpoint(str(tmp_path))
        trial.load_checkpoint(str(tmp_path))
        assert trial.step()["done"], "there is nothing left to do"
        with pytest.raises(RuntimeError, match="no further step"):
            trial.step()
    finally:
        trial.cleanup()


@pytest.mark.soak
def test_tune_runs_it_with_all_workers_of_a_node_in_one_bundle(tmp_path: Path) -> None:
    from ray import tune

    trainable_cls = DistributedTrainableCreator(add_up, num_workers=2, num_workers_per_host=2, timeout_s=60)
    tuner = tune.Tuner(
        trainable_cls,
        param_space={"num_steps": 3},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    [result] = tuner.fit()
    assert result.error is None
    assert (result.metrics["step"], result.metrics["total"]) == (2, 3)
    trial = trainable_cls({"num_steps": 4})
    try:
        with result.checkpoint.as_directory() as folder:
            trial.load_checkpoint(folder)
        assert trial.step()["began_at"] == 3
    finally:
        trial.cleanup()


# -------------------------------------------------------------------------------------------------- TensorFlow


def count(config: dict[str, Any], checkpoint_dir: str | None = None) -> None:
    """Counts on from where the checkpoint says, and keeps what rank 0 says; Keras does the counting."""
    os.environ["TF_USE_LEGACY_KERAS"] = config["legacy"]
    import tensorflow as tf

    counter = tf.keras.metrics.Sum()
    start = int(Path(checkpoint_dir, "deep", "step").read_text()) + 1 if checkpoint_dir else 0
    for step in range(start, config["num_steps"]):
        with of_tensorflow.distributed_checkpoint_dir(step=step) as folder:
            path = Path(folder, "deep", "step")
            path.parent.mkdir()
            path.write_text(str(step + 100 * train.world_rank()))
        counter.update_state(1.0)
        sums = {"counted": start + int(counter.result()), "keras": type(counter).__module__.partition(".")[0]}
        train.report(step=step, rank=train.world_rank(), num_workers=of_tensorflow.get_num_workers(), **sums)


@pytest.mark.soak  # tests/tf/test_tf_trainable_integration.py has a trial of TensorFlow
@pytest.mark.parametrize(("legacy", "keras"), [("0", "keras"), ("1", "tf_keras")])
@pytest.mark.usefixtures("workers_have_tensorflow")
def test_a_trial_reports_what_rank_0_does_and_goes_on_from_its_checkpoint(
    tmp_path: Path, legacy: str, keras: str
) -> None:
    trainable_cls = of_tensorflow.DistributedTrainableCreator(count, 2, 0, 1, None, timeout_s=60)
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
    assert of_tensorflow.get_num_workers() == 1
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:2", "c:3"]}}')
    assert of_tensorflow.get_num_workers() == 3
