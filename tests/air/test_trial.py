"""Our trial has no attribute that Ray's has not, and has all that Ray's own callbacks touch."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from raysgd.air.config import RunConfig
from raysgd.air.trial import FitTrialView, TrialFolder, checkpoint_index, checkpoint_name, new_trial_folder
from raysgd.storage import open_folder
from tests.train.fit.notes import CONFIG, make_folder, save

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
    assert public(trial) - theirs == set()
    for name in ("PENDING", "RUNNING", "TERMINATED", "ERROR"):
        assert getattr(trial, name) == getattr(RayTrial, name)


def test_its_storage_has_attributes_of_ray_only(trial: FitTrialView) -> None:
    spec = importlib.util.find_spec("ray.train._internal.storage")
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
    assert Path(trial.local_path).parent == tmp_path / "run"
    assert trial.logdir == trial.local_path == trial.path == trial.storage.trial_fs_path
    assert trial.local_dir == trial.local_experiment_path == str(tmp_path / "run")
    assert (trial.experiment_dir_name, trial.experiment_tag, trial.trainable_name) == ("run", "0", "TorchTrainer")
    assert trial.config == CONFIG


def test_it_knows_how_it_is(trial: FitTrialView) -> None:
    assert (trial.status, trial.has_checkpoint()) == ("PENDING", False)
    assert trial.last_result == {"trial_id": trial.trial_id}
    assert not trial.has_reported_at_least_once
    trial.last_result = {"training_iteration": 1, "node_ip": "10.0.0.1"}
    assert (trial.has_reported_at_least_once, trial.get_ray_actor_ip()) == (True, "10.0.0.1")
    assert trial.error_file is None
    trial.num_failures = 1
    assert trial.error_file == str(Path(trial.local_path, "error.txt"))


def test_the_folders_have_the_names_of_the_old_library(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "my_run")
    assert Path(folder.experiment.path) == tmp_path / "my_run"
    assert re.fullmatch(
        r"TorchTrainer_[0-9a-f]{5}_00000_0_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", Path(folder.trial.path).name
    )
    assert re.fullmatch(r"[0-9a-f]{5}_00000", folder.id)
    assert (folder.name, folder.experiment_name) == (f"TorchTrainer_{folder.id}", "my_run")
    assert checkpoint_name(3) == "checkpoint_000003"


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    folder.make()
    assert folder.local_path.is_dir()


def test_without_a_name_it_is_the_trainer_and_the_time(tmp_path: Path) -> None:
    names = {new_trial_folder(RunConfig(storage_path=tmp_path), "Mine").experiment_name for _ in range(3)}
    assert len(names) == 3
    assert all(re.match(r"Mine_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", name) for name in names)


def test_without_a_place_it_is_below_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = new_trial_folder(RunConfig(name="run"), "Mine")
    assert Path(folder.experiment.path) == tmp_path / "ray_results" / "run"


def test_a_trial_is_found_again_by_the_name_of_its_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    found = TrialFolder(folder.experiment, folder.dir_name)
    assert (found.id, found.trainer_name, found.name) == (folder.id, "TorchTrainer", folder.name)


@pytest.mark.parametrize("name", ["checkpoint_000000", "TorchTrainer", "../x_00000_00000_0_2024-01-01_00-00-00", ""])
def test_other_folders_are_not_trials(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        TrialFolder(open_folder(tmp_path), name)


def test_numbers_go_on_after_the_last_checkpoint(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    folder.make()
    assert folder.next_index == 0
    for index in (0, 2, 1000000):
        save(folder, index)
    (folder.trial.local_path / "rank_0").mkdir()
    found = TrialFolder(folder.experiment, folder.dir_name)
    assert found.checkpoint_names() == ["checkpoint_000000", "checkpoint_000002", "checkpoint_1000000"]
    assert found.next_index == 1000001


@pytest.mark.parametrize("name", ["checkpoint_1", "checkpoint_00000a", "checkpoint", "x_checkpoint_000001"])
def test_only_checkpoints_have_a_number(name: str) -> None:
    assert checkpoint_index(name) is None


def test_in_a_store_this_process_writes_to_a_temporary_folder() -> None:
    folder = new_trial_folder(RunConfig(name="run", storage_path="memory://layout"), "Mine")
    assert not folder.is_local
    path = folder.local_path
    assert path == folder.local_path
    assert path.parts[-2:] == ("run", folder.dir_name)
    folder.make()
    assert path.is_dir()
    folder.remove_staging()
    assert not path.exists()
