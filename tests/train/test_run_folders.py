from __future__ import annotations

from pathlib import Path

from raysgd.train._run_folders import RunFolders, make_logdir


def test_there_is_no_folder_before_the_first_run(tmp_path: Path) -> None:
    folders = RunFolders(tmp_path)
    assert (folders.latest, folders.latest_checkpoints) == (None, None)


def test_runs_are_numbered_and_leave_out_numbers_that_are_taken(tmp_path: Path) -> None:
    (tmp_path / "run_002").mkdir()
    folders = RunFolders(tmp_path)
    assert [folders.make_next().name for _ in range(2)] == ["run_001", "run_003"]
    assert folders.latest == tmp_path / "run_003"
    assert folders.latest_checkpoints == tmp_path / "run_003" / "checkpoints"


def test_a_trainer_has_the_folder_that_it_is_given(tmp_path: Path) -> None:
    assert make_logdir(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
