"""A function for several workers with PyTorch as a trial of Ray Tune."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.tune.torch import DistributedTrainableCreator, distributed_checkpoint_dir, is_distributed_trainable
from tests.helpers.processes import shipped
from tests.helpers.run_if import RunIf

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("ray_cluster"),
    RunIf(modules=["ray.tune", "pandas", "pyarrow"]),
]


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    with shipped(request.module):
        yield


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
