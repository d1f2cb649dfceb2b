from __future__ import annotations

import re
from pathlib import Path

import pytest

from raysgd.air.config import RunConfig
from raysgd.air.layout import TrialFolder, checkpoint_index, checkpoint_name, new_trial_folder
from raysgd.storage import open_folder
from tests.train.fit.notes import make_folder, save


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
    folder.close()
    assert not path.exists()
