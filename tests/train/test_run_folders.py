from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from raysgd.storage import Folder, StorageError, open_folder
from raysgd.train.trainer import check_logdir, fetch_checkpoints, local_run_dir, make_logdir, make_run_dir

_numbers = itertools.count()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """The folder of a run in a store."""
    monkeypatch.setattr("raysgd.train.constants.DEFAULT_RESULTS_DIR", tmp_path)
    return open_folder(f"memory://run-folders/{next(_numbers)}/run_001")


def fail_after_writing(local: Path) -> None:
    (local / "result.json").write_bytes(b"[]")
    raise KeyError


def test_trainers_without_a_folder_that_start_in_the_same_second_have_different_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysgd.train.constants.DEFAULT_RESULTS_DIR", tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "train_2026-01-01_00-00-00")
    assert [make_logdir(None), make_logdir(None)] == [
        tmp_path / "train_2026-01-01_00-00-00",
        tmp_path / "train_2026-01-01_00-00-00_1",
    ]


def test_runs_in_a_store_are_numbered_too() -> None:
    logdir = make_logdir("memory://run-folders/numbered")
    assert isinstance(logdir, Folder)
    (logdir / "run_002").write("of an earlier program", b"")
    assert [make_run_dir(logdir, number) for number in (1, 2)] == [(1, logdir / "run_001"), (3, logdir / "run_003")]
    assert logdir.names() == ["run_001", "run_002", "run_003"]


def test_a_file_uri_is_a_path(tmp_path: Path) -> None:
    assert make_logdir((tmp_path / "a b").as_uri()) == tmp_path / "a b"
    assert (tmp_path / "a b").is_dir()


@pytest.mark.parametrize(
    ("logdir", "kind", "message"),
    [
        ("nowhere://x", ValueError, "`logdir='nowhere://x'`: `nowhere` is unknown"),
        (Path("nowhere://x"), ValueError, "`logdir='nowhere://x'`: `nowhere` is unknown"),
        ("oss://x", ModuleNotFoundError, "`logdir='oss://x'`"),
    ],
)
def test_what_is_no_folder_is_refused(logdir: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        check_logdir(logdir)


def test_what_callbacks_write_goes_to_the_store_when_the_run_ends(run_dir: Folder, tmp_path: Path) -> None:
    (run_dir / "checkpoints").write("checkpoint_000001", b"1")
    with local_run_dir(run_dir) as local:
        (local / "result.json").write_bytes(b"[]")
        fetch_checkpoints(run_dir, local)
        assert (local / "checkpoints" / "checkpoint_000001").read_bytes() == b"1"
        assert not run_dir.has("result.json")
    assert run_dir.read("result.json") == b"[]"
    assert [path.name for path in local.iterdir()] == ["result.json"]
    assert local.parent == tmp_path


def test_a_failed_run_is_written_down_too(run_dir: Folder) -> None:
    with pytest.raises(KeyError), local_run_dir(run_dir) as local:
        fail_after_writing(local)
    assert run_dir.read("result.json") == b"[]"


def test_a_store_that_takes_nothing_leaves_the_files_here(
    run_dir: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
    away = open_folder("http://127.0.0.1:9/run_001")  # cannot be written to
    with (
        pytest.raises(StorageError, match="The files of the callbacks are still in") as caught,
        local_run_dir(away) as local,
    ):
        (local / "result.json").write_bytes(b"[]")
    assert str(local) in str(caught.value)
    assert (local / "result.json").read_bytes() == b"[]"
    with pytest.raises(KeyError), local_run_dir(away) as local:
        fail_after_writing(local)
    assert f"The files of the callbacks are still in `{local}`" in caplog.text


def test_on_a_disk_callbacks_write_to_the_folder_itself(tmp_path: Path) -> None:
    with local_run_dir(tmp_path) as local:
        assert local == tmp_path
        fetch_checkpoints(tmp_path, local)


def test_without_checkpoints_there_is_nothing_to_fetch(run_dir: Folder, tmp_path: Path) -> None:
    fetch_checkpoints(run_dir, tmp_path / "local")
    assert not (tmp_path / "local").exists()
