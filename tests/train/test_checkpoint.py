from __future__ import annotations

import math
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.storage import StorageError, open_folder
from raysgd.train import checkpoint as arrivals
from raysgd.train.checkpoint import (
    CheckpointLostError,
    CheckpointManager,
    CheckpointStrategy,
    checked_score,
    load_checkpoint,
    write_checkpoint,
)
from tests.helpers.s3_server import BUCKET, S3Server

NAN = math.nan


@pytest.mark.parametrize(
    ("num_to_keep", "order", "scores", "kept", "best"),
    [
        (None, "max", [1, 3, 2], [1, 2, 3], 2),
        (0, "max", [1, 3, 2], [], None),
        (2, "min", [NAN, 3, 7, 5], [2, 4], 2),
        (2, "max", [NAN, 3, 7, 5], [3, 4], 3),
        (1, "max", [5, 5, 5], [3], 3),  # of equals the newer one
        (2, "max", [9, 1, 2], [1, 3], 1),
        (1, "min", [NAN, NAN], [2], 2),
        (1, "max", [4, 3, 2], [1], 1),
    ],
)
def test_which_checkpoints_stay(
    tmp_path: Path, num_to_keep: int | None, order: str, scores: list[float], kept: list[int], best: int | None
) -> None:
    made = manager(tmp_path, strategy=CheckpointStrategy(num_to_keep, "loss", order))
    for score in scores:
        made.add(score, lambda score=score: {"loss": score})
    assert str(made.latest_checkpoint) == str({"loss": scores[-1]})  # NaN does not equal itself
    assert made.latest_checkpoint_id == len(scores)  # one that is not written has a number, too
    assert sorted(int(path.name[-6:]) for path in tmp_path.glob("checkpoints/*")) == kept
    assert made.best_checkpoint_path == (tmp_path / f"checkpoints/checkpoint_{best:06d}" if best is not None else None)


@pytest.mark.parametrize("score", [None, "high", [1, 2], object(), 10**400])
def test_a_score_that_cannot_be_compared_is_an_error(score: Any) -> None:
    with pytest.raises(ValueError, match="'loss'"):
        checked_score(CheckpointStrategy(2, "loss"), score)


@pytest.mark.parametrize("score", [1, 1.5, True, NAN, np.float32(2), np.array(3.0)])
def test_a_score_may_be_any_number(score: Any) -> None:
    assert str(checked_score(CheckpointStrategy(2, "loss"), score)) == str(float(score))


def test_nothing_is_judged_where_nothing_is_kept() -> None:
    assert checked_score(CheckpointStrategy(0, "loss"), None) is None


def manager(run_dir: Path | None, **options: Any) -> CheckpointManager:
    made = CheckpointManager()
    made.begin_run(run_dir, **options)
    return made


@pytest.fixture
def made(tmp_path: Path) -> CheckpointManager:
    return manager(tmp_path)


def lost() -> dict[str, Any]:
    raise CheckpointLostError("the worker is gone")


class TestManager:
    def test_numbers_and_writes_what_it_is_given(self, tmp_path: Path, made: CheckpointManager) -> None:
        for epoch in range(2):
            made.add(epoch, lambda epoch=epoch: {"epoch": epoch})
        assert made.latest_checkpoint == {"epoch": 1}
        assert made.latest_checkpoint_id == 2
        assert made.latest_checkpoint_path == tmp_path / "checkpoints" / "checkpoint_000002"
        assert made.best_checkpoint_path == made.latest_checkpoint_path
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
            "checkpoint_000001",
            "checkpoint_000002",
        ]
        assert pickle.loads((tmp_path / "checkpoints" / "checkpoint_000001").read_bytes()) == {"epoch": 0}

    def test_what_could_not_be_written_is_neither_the_best_nor_the_newest(self, tmp_path: Path) -> None:
        made = manager(tmp_path, strategy=CheckpointStrategy(1, "loss"))
        made.add(1, dict)
        made.flush()
        (tmp_path / "checkpoints" / "checkpoint_000002").mkdir()  # in the way
        made.add(2, dict)
        with pytest.raises(OSError, match="checkpoint_000002"):
            made.flush()
        assert made.best_checkpoint_path == tmp_path / "checkpoints" / "checkpoint_000001"
        assert made.latest_checkpoint_path == made.best_checkpoint_path
        assert load_checkpoint(made.best_checkpoint_path) == {}

    def test_goes_on_from_the_one_before_when_one_was_lost(self, made: CheckpointManager) -> None:
        made.add(1, lambda: {"epoch": 1})
        made.add(2, lost)
        assert made.restart_point == {"epoch": 1}
        made.add(3, lambda: {"epoch": 3})
        assert made.latest_checkpoint_path.name == "checkpoint_000003"

    def test_goes_on_from_what_the_run_began_with_until_it_has_one(self, tmp_path: Path) -> None:
        made = manager(tmp_path / "1")
        made.add(1, lambda: {"epoch": 1})
        made.begin_run(tmp_path / "2", {"epoch": 5})
        assert made.restart_point == {"epoch": 5}
        assert made.latest_checkpoint == {"epoch": 1}  # of any run
        assert made.best_checkpoint_path is None  # of this run
        made.add(1, lambda: {"epoch": 6})
        assert made.restart_point == {"epoch": 6}
        made.begin_run(tmp_path / "3")
        assert made.restart_point is None
        assert made.latest_checkpoint_id == 0

    def test_says_so_too_when_one_could_not_be_decoded(self, made: CheckpointManager) -> None:
        made.add(1, lambda: {}["no such module"])
        with pytest.raises(KeyError, match="no such module"):
            made.add(2, dict)

    def test_does_not_bother_the_next_run_with_it(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        made = manager(tmp_path / "1")
        made.add(1, lambda: {}["no such module"])
        made.begin_run(tmp_path / "2")
        assert "KeyError('no such module')" in caplog.text
        made.add(1, lambda: {"epoch": 1})
        assert made.latest_checkpoint == {"epoch": 1}

    def test_waits_for_what_comes_but_not_forever(
        self, made: CheckpointManager, caplog: pytest.LogCaptureFixture
    ) -> None:
        comes = threading.Event()

        def receive() -> dict[str, Any]:
            assert comes.wait(60)
            return {"epoch": 1}

        made.await_arrival(60)
        made.add(1, receive)
        made.await_arrival(0)
        assert "checkpoint 1 did not arrive within 0 s" in caplog.text
        comes.set()
        made.await_arrival(60)
        assert caplog.text.count("did not arrive") == 1
        made.flush()
        made.add(2, lost)
        made.await_arrival(60)
        assert caplog.text.count("did not arrive") == 1

    def test_says_once_that_one_has_landed_also_if_it_is_on_its_way(self, made: CheckpointManager) -> None:
        assert not made.take_landing()
        comes = threading.Event()
        threading.Timer(0.3, comes.set).start()
        made.add(1, lambda: {"came": comes.wait(60)})
        assert made.take_landing()
        assert not made.take_landing()
        made.add(2, lost)
        assert not made.take_landing()

    def test_does_not_wait_for_ever_for_one_that_a_frozen_worker_sends(
        self, made: CheckpointManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arrivals, "_ARRIVAL_S", 0.01)
        comes = threading.Event()
        made.add(1, lambda: {"came": comes.wait(60)})
        assert not made.take_landing()
        comes.set()
        made.flush()
        assert made.take_landing()

    def test_keeps_for_later_what_went_wrong_with_one(self, made: CheckpointManager) -> None:
        made.add(1, lambda: {}["no such module"])
        assert not made.take_landing()
        with pytest.raises(KeyError, match="no such module"):
            made.flush()

    def test_keeps_the_best_in_a_store(self, s3_server: S3Server) -> None:
        folder = open_folder(s3_server.uri("manager"))
        made = manager(folder, strategy=CheckpointStrategy(2, "loss", "min"))
        for epoch, loss in enumerate([3.0, 1.0, 2.0, 9.0]):
            made.add(loss, lambda epoch=epoch: {"epoch": epoch})
        made.flush()
        assert (folder / "checkpoints").names() == ["checkpoint_000002", "checkpoint_000003"]
        assert made.latest_checkpoint_dir == folder / "checkpoints"
        assert load_checkpoint(made.best_checkpoint_path) == {"epoch": 1}
        assert load_checkpoint(made.latest_checkpoint_path) == {"epoch": 2}
        assert made.latest_checkpoint == {"epoch": 3}


class TestFiles:
    def test_come_back(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "file"
        write_checkpoint({"epoch": 3}, path)
        assert load_checkpoint(path) == load_checkpoint(str(path)) == {"epoch": 3}

    def test_are_as_they_were_when_writing_fails(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        write_checkpoint({"epoch": 3}, path)
        with pytest.raises(TypeError):
            write_checkpoint({"lock": threading.Lock()}, path)
        assert load_checkpoint(path) == {"epoch": 3}
        assert list(tmp_path.iterdir()) == [path]

    def test_may_be_in_a_store(self, s3_server: S3Server, tmp_path: Path) -> None:
        uri = s3_server.uri("train/deep/file")
        write_checkpoint({"epoch": 3}, uri)
        assert load_checkpoint(uri) == {"epoch": 3}
        write_checkpoint({"epoch": 4}, s3_server.uri("train/folder/dict_checkpoint.pkl"))
        assert load_checkpoint(s3_server.uri("train/folder")) == {"epoch": 4}
        write_checkpoint({"epoch": 5}, tmp_path / "a b")
        assert load_checkpoint((tmp_path / "a b").as_uri()) == {"epoch": 5}
        with pytest.raises(ValueError, match=r"`checkpoint='s3://\*\*\*@bucket/train/none.*there is no such file"):
            load_checkpoint(s3_server.uri("train/none"))

    def test_that_a_store_does_not_take_are_still_there(
        self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
        made = manager(open_folder(s3_server.uri("x").replace(f"@{BUCKET}/", "@no-such-bucket/")))
        made.add(1, lambda: {"epoch": 1})
        with pytest.raises(StorageError, match="The trainer still has it as `latest_checkpoint`"):
            made.flush()
        assert made.latest_checkpoint == {"epoch": 1}

    def test_may_be_folders_of_a_later_version(self, tmp_path: Path) -> None:
        (tmp_path / "dict_checkpoint.pkl").write_bytes(pickle.dumps({"epoch": 4}))
        assert load_checkpoint(tmp_path) == {"epoch": 4}

    def test_a_dict_is_copied(self) -> None:
        given = {"epoch": 1}
        found = load_checkpoint(given)
        assert found == given
        assert found is not given
