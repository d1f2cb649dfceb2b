"""Our trial has no attribute that Ray's has not, and has all that Ray's own callbacks touch."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from raysgd.air.trial import FitTrialView
from tests.train.fit.notes import CONFIG, make_folder

OURS = {"count_failure", "update_last_result"}
CALLBACKS_OF_RAY = (
    "ray.tune.logger.csv",
    "ray.tune.logger.json",
    "ray.tune.logger.tensorboardx",
    "ray.tune.logger.aim",
    "ray.tune.logger.logger",
    "ray.air.integrations.mlflow",
    "ray.air.integrations.wandb",
    "ray.air.integrations.comet",
)


@pytest.fixture
def trial(tmp_path: Path) -> FitTrialView:
    folder = make_folder(tmp_path)
    folder.make()
    return FitTrialView(folder, CONFIG)


def public(value: Any) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


def touched_in(module: str) -> set[str]:
    """The attributes of a trial that a module of Ray reads."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trial"
    }


def test_every_attribute_is_one_of_ray(trial: FitTrialView) -> None:
    from ray.tune.experiment import Trial as RayTrial

    theirs = public(RayTrial("x", stub=True))  # reads no property: some of them need a storage
    assert public(trial) - theirs - OURS == set()
    for name in ("PENDING", "RUNNING", "PAUSED", "TERMINATED", "ERROR"):
        assert getattr(trial, name) == getattr(RayTrial, name)


def test_its_storage_has_attributes_of_ray_only(trial: FitTrialView) -> None:
    spec = importlib.util.find_spec("ray.train._internal.storage")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for name in public(trial.storage):
        assert f"def {name}(" in source or f"self.{name} = " in source or f"self.{name}: " in source, name


@pytest.mark.parametrize("module", CALLBACKS_OF_RAY)
def test_it_has_what_callbacks_of_ray_touch(trial: FitTrialView, module: str) -> None:
    assert touched_in(module) - public(trial) == set()


def test_the_search_for_touched_attributes_finds_some() -> None:
    assert {"config", "local_path"} <= touched_in("ray.tune.logger.json")


def test_it_has_the_names_and_places_of_the_run(trial: FitTrialView, tmp_path: Path) -> None:
    assert str(trial) == f"TorchTrainer_{trial.trial_id}" == repr(trial)
    assert Path(trial.local_path) == tmp_path / "run" / trial.relative_logdir
    assert trial.logdir == trial.local_path == trial.path == trial.storage.trial_fs_path
    assert trial.local_dir == trial.local_experiment_path == str(tmp_path / "run")
    assert (trial.experiment_dir_name, trial.experiment_tag, trial.trainable_name) == ("run", "0", "TorchTrainer")
    assert trial.config == CONFIG


def test_it_knows_how_it_is(trial: FitTrialView) -> None:
    assert (trial.status, trial.is_finished(), trial.has_checkpoint()) == ("PENDING", False, False)
    assert trial.last_result == {"trial_id": trial.trial_id}
    assert not trial.has_reported_at_least_once
    trial.update_last_result({"training_iteration": 1, "node_ip": "10.0.0.1", "pid": 7})
    assert trial.has_reported_at_least_once
    assert (trial.node_ip, trial.get_ray_actor_ip(), str(trial.temporary_state.location)) == (
        "10.0.0.1",
        "10.0.0.1",
        "10.0.0.1:7",
    )
    trial.set_status(FitTrialView.ERROR)
    assert trial.is_finished()


def test_it_knows_what_went_wrong(trial: FitTrialView) -> None:
    assert (trial.error_file, trial.get_error()) == (None, None)
    Path(trial.local_path, "error.txt").write_text("it broke")
    trial.count_failure()
    assert (trial.num_failures, trial.get_error()) == (1, "it broke")
