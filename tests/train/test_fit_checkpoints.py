"""What becomes of the checkpoints of `fit`.

Covers `raysgd.train.checkpoint`; those of `Trainer.run` are in `test_checkpoint`.
"""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from raysgd.air.checkpoint import Checkpoint
from raysgd.exceptions import StorageError
from raysgd.storage import Folder, open_folder
from raysgd.train.checkpoint import CheckpointLostError, FitCheckpoints
from raysgd.train.constants import METADATA_KEY
from tests.helpers.s3_server import S3Server
from tests.helpers.store_damage import alter


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return open_folder(tmp_path / "trial")


def stored(folder: Folder, index: int, **files: bytes) -> None:
    """Does what a worker does."""
    for name, data in files.items():
        folder.staged(f"checkpoint_{index:06d}").write(name, data)


def lost() -> dict[str, Any]:
    raise CheckpointLostError("the worker is gone")


def test_a_dict_becomes_a_folder_with_its_number_and_what_the_guide_shows(folder: Folder) -> None:
    taken = FitCheckpoints(folder)
    taken.add(None, lambda: {"epoch": 1, "_timestamp": 5})
    taken.flush()
    assert taken.landing.done()
    content = pickle.loads((folder / "checkpoint_000000").read("dict_checkpoint.pkl"))
    assert content == {"epoch": 1, "_timestamp": 5, "_preprocessor": None, "_current_checkpoint_id": 0}
    assert taken.landing.result().to_dict() == content
    assert taken.restart_point == content
    assert folder.committed() == ["checkpoint_000000"]


def test_what_the_workers_have_stored_is_committed_as_one(folder: Folder) -> None:
    taken = FitCheckpoints(folder, next_index=4)
    stored(folder, 4, rank_0=b"a", rank_1=b"b")
    assert folder.committed() == []
    taken.add(None, None)
    assert folder.committed() == ["checkpoint_000004"]
    assert (folder / "checkpoint_000004").names() == ["rank_0", "rank_1"]
    assert taken.restart_point == folder / "checkpoint_000004"
    assert taken.next_index == 5


def test_a_folder_gets_the_preprocessor_unless_it_has_one(folder: Folder) -> None:
    taken = FitCheckpoints(folder, preprocessor="scaler")
    for index, files in enumerate([{"model": b"a"}, {"_preprocessor": pickle.dumps("own")}]):
        stored(folder, index, **files)
        taken.add(None, None)
    found = [Checkpoint.from_uri((folder / name).uri).get_preprocessor() for name in folder.committed()]
    assert found == ["scaler", "own"]


def test_a_dict_beside_folders_becomes_part_of_them(folder: Folder) -> None:
    taken = FitCheckpoints(folder)
    stored(folder, 0, rank_1=b"b")
    taken.add(None, lambda: {"epoch": 1})
    taken.flush()
    assert (folder / "checkpoint_000000").names() == ["dict_checkpoint.pkl", "rank_1"]


def test_what_was_stored_where_the_driver_cannot_see_it_is_an_error_that_says_what_to_do(folder: Folder) -> None:
    with pytest.raises(StorageError, match=r"checkpoint_000000.*all nodes share"):
        FitCheckpoints(folder).add(None, None)


def test_what_an_attempt_left_half_stored_is_never_seen(folder: Folder) -> None:
    attempts: list[int] = []
    taken = FitCheckpoints(folder, on_attempt=lambda: attempts.append(1))
    stored(folder, 0, half=b"a")
    taken.begin_attempt()
    stored(folder, 0, whole=b"a")
    taken.add(None, None)
    assert (folder / "checkpoint_000000").names() == ["whole"]
    assert attempts == [1]


def test_a_lost_dict_leaves_the_one_before_and_a_gap(folder: Folder) -> None:
    taken = FitCheckpoints(folder)
    taken.add(None, lambda: {"epoch": 1})
    taken.add(None, lost)
    taken.flush()
    assert (taken.landing.done(), taken.landing.result()) == (True, None)
    assert taken.restart_point["epoch"] == 1
    taken.add(None, lambda: {"epoch": 3})
    taken.flush()
    assert folder.committed() == ["checkpoint_000000", "checkpoint_000002"]


def test_no_one_waits_for_a_dict_on_its_way(folder: Folder) -> None:
    arrives = threading.Event()

    def receive() -> dict[str, Any]:
        assert arrives.wait(60)
        return {"epoch": 1}

    taken = FitCheckpoints(folder)
    taken.add(None, receive)
    assert not taken.landing.done()
    arrives.set()
    assert taken.restart_point["epoch"] == 1


def test_the_newest_is_there_in_memory_where_none_is_kept_on_disk() -> None:
    taken = FitCheckpoints(None, metadata={"run": 7})
    taken.add(None, lambda: {"epoch": 1, METADATA_KEY: {"own": 1}})
    taken.flush()
    assert taken.landing.result().to_dict()["epoch"] == 1
    assert taken.landing.result().get_metadata() == {"run": 7, "own": 1}
    assert taken.restart_point["epoch"] == 1


def test_a_run_begins_from_what_it_was_given_until_it_has_its_own(folder: Folder) -> None:
    given = Checkpoint.from_dict({"epoch": 9})
    taken = FitCheckpoints(folder, begin_from=given)
    assert taken.restart_point is given
    taken.add(None, lambda: {"epoch": 10})
    assert taken.restart_point["epoch"] == 10


@pytest.mark.parametrize("is_dict", [True, False])
def test_metadata_of_the_trainer_is_added_to_what_a_checkpoint_says_of_itself(folder: Folder, is_dict: bool) -> None:
    taken = FitCheckpoints(folder, metadata={"run": 7, "own": 0})
    if is_dict:
        taken.add(None, lambda: {"epoch": 1, METADATA_KEY: {"own": 1}})
    else:
        stored(folder, 0, **{".metadata.json": b'{"own": 1}'})
        taken.add(None, None)
    taken.flush()
    assert taken.landing.result().get_metadata() == {"run": 7, "own": 1}
    assert METADATA_KEY not in taken.landing.result().to_dict()


def test_a_dict_that_was_a_folder_becomes_that_folder_again(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "weights").write_bytes(b"123")
    content = Checkpoint.from_directory(tmp_path / "own").to_dict()
    taken = FitCheckpoints(folder)
    taken.add(None, lambda: dict(content))
    taken.flush()
    assert (folder / "checkpoint_000000").read("weights") == b"123"


def test_an_altered_checkpoint_in_a_store_is_not_handed_out(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
    folder = open_folder(s3_server.uri("altered/trial"))
    taken = FitCheckpoints(folder, metadata={"run": 7})
    taken.add(None, lambda: {"epoch": 1})
    taken.flush()
    (tmp_path / "weights").write_bytes(b"123")
    (tmp_path / ".metadata.json").write_bytes(b'{"own": 1}')
    folder.staged("checkpoint_000001").upload(tmp_path)
    taken.add(None, None)
    of_dict, of_folder = (Checkpoint(folder / name) for name in folder.committed())
    of_folder.update_metadata({"later": 2})
    assert of_folder.get_metadata() == {"run": 7, "own": 1, "later": 2}
    assert of_dict.to_dict()["epoch"] == 1
    with of_folder.as_directory() as path:
        assert Path(path, "weights").read_bytes() == b"123"
    for checkpoint, name in ((of_dict, "dict_checkpoint.pkl"), (of_folder, "weights")):
        alter(checkpoint._folder, name, at=1)
        with pytest.raises(StorageError, match=f"{name}.*altered"):
            checkpoint.to_dict()
