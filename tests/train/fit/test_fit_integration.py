"""`fit` on real workers, with checkpoints that are kept and runs that fail.

Covers `raysgd.train.base_trainer`, `raysgd.train.data_parallel_trainer` and
`raysgd.train.fit.run`: they are short pieces of one way, which only a run goes through whole.
"""

from __future__ import annotations

import importlib
import json
import pickle
import time
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from raysgd.air import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.exceptions import TrainingFailedError
from raysgd.train.base_trainer import BaseTrainer
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from tests.train.fit import loops

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


def trainer(
    place: Path,
    loop: Any = loops.count_epochs,
    trainer_class: type[DataParallelTrainer] = DataParallelTrainer,
    resume: Checkpoint | None = None,
    **config: Any,
) -> DataParallelTrainer:
    """A trainer with two workers. `config` is for the loop; what `RunConfig` takes is for that."""
    options = {name: config.pop(name) for name in ("stop", "failure_config", "checkpoint_config") if name in config}
    return trainer_class(
        loop,
        train_loop_config={"num_epochs": 3, "flag": place / "flag", **config} if signature(loop).parameters else None,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(place), **options),
        resume_from_checkpoint=resume,
    )


def checkpoints_in(result: Any) -> list[str]:
    return sorted(path.name for path in Path(result.path).iterdir() if path.name.startswith("checkpoint_"))


def numbers_in(place: Path) -> list[int]:
    """What was written down, in order."""
    [file] = place.glob("run/*/result.json")
    return [json.loads(line)["number"] for line in file.read_text().splitlines()]


class TestARun:
    @pytest.mark.promise("`fit()`")
    def test_returns_metrics_checkpoints_and_its_folder(self, tmp_path: Path) -> None:
        result = trainer(tmp_path).fit()
        assert result.error is None
        assert (result.metrics["epoch"], result.metrics["rank"], result.metrics["size"]) == (2, 0, 2)
        assert (result.metrics["training_iteration"], result.metrics["iterations_since_restore"]) == (3, 3)
        assert checkpoints_in(result) == ["checkpoint_000000", "checkpoint_000001", "checkpoint_000002"]
        assert result.checkpoint.to_dict()["epoch"] == 2
        saved = pickle.loads(Path(result.path, "checkpoint_000002", "dict_checkpoint.pkl").read_bytes())
        assert saved["_current_checkpoint_id"] == 2
        assert Path(result.path).parent == tmp_path / "run"

    def test_answers_what_the_function_asks_and_returns_what_that_returns(self, tmp_path: Path) -> None:
        import ray

        left = ray.cluster_resources()["CPU"] - 3
        result = DataParallelTrainer(
            loops.ask_everything,
            train_loop_config={"free": left},
            scaling_config=ScalingConfig(
                num_workers=2,
                trainer_resources={"CPU": 1},
                label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
            ),
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()
        found = result.return_value
        assert found["told"] == [0, 7]
        kept = [(metrics["epoch"], checkpoint.to_dict()["epoch"]) for checkpoint, metrics in result.best_checkpoints]
        assert kept == [(0, 0), (1, 1), (2, 2)]
        assert found["free"] == left, "the trial has its own CPU"
        assert (found["preemption"], found["devices"], len(found["threads"])) == (None, ["cpu"], 1)

    def test_puts_together_what_all_ranks_have_in_folders(self, tmp_path: Path) -> None:
        result = trainer(tmp_path, kind="folder", num_epochs=2, same_name=True).fit()
        assert checkpoints_in(result) == ["checkpoint_000000", "checkpoint_000001"]
        found = Path(result.checkpoint.path)
        assert {path.name for path in found.iterdir()} == {"epoch", "rank_0", "rank_1", "state"}
        assert (found / "state").read_text() == "of rank 0"

    def test_writes_no_checkpoint_with_none_to_keep_but_has_the_newest(self, tmp_path: Path) -> None:
        result = trainer(tmp_path, kind="folder", checkpoint_config=CheckpointConfig(num_to_keep=0)).fit()
        assert checkpoints_in(result) == []
        with result.checkpoint.as_directory() as folder:
            assert any(Path(folder).iterdir())

    def test_fetches_a_large_dict_and_starts_from_what_it_is_given(self, tmp_path: Path) -> None:
        resume = Checkpoint.from_dict({"epoch": 0, "_current_checkpoint_id": 4})
        result = trainer(tmp_path, num_bytes=3 << 20, resume=resume).fit()
        assert [result.metrics["training_iteration"], result.metrics["epoch"]] == [2, 2]
        assert checkpoints_in(result) == ["checkpoint_000004", "checkpoint_000005"], "its number is used once more"
        assert len(result.checkpoint.to_dict()["payload"]) == 3 << 20

    @pytest.mark.parametrize(
        ("module", "name", "loop", "total"),
        [
            ("torch", "TorchTrainer", loops.average_with_torch, 3),
            pytest.param("tensorflow", "TensorflowTrainer", loops.count_with_tensorflow, 2, marks=pytest.mark.soak),
            pytest.param("horovod", "HorovodTrainer", loops.count_with_horovod, 2, marks=pytest.mark.soak),
        ],
    )
    def test_connects_the_workers(self, module: str, name: str, loop: Any, total: int, tmp_path: Path) -> None:
        trainer_class = getattr(importlib.import_module(f"raysgd.train.{module}"), name)
        assert trainer(tmp_path, loop, trainer_class=trainer_class).fit().metrics["total"] == total

    def test_of_a_loop_of_ones_own_needs_one_worker_and_sees_the_folder_that_it_is_given(self, tmp_path: Path) -> None:
        class Countdown(BaseTrainer):
            def setup(self) -> None:
                self.left = 3

            def training_loop(self) -> None:
                from raysgd import train

                paths = [train.get_checkpoint().path, self.resume_from_checkpoint.path]
                for left in range(self.left, 0, -1):
                    train.report({"left": left, "paths": paths}, checkpoint=Checkpoint.from_dict({"left": left}))

        (tmp_path / "given").mkdir()
        given = Checkpoint.from_directory(tmp_path / "given")
        result = Countdown(run_config=RunConfig(storage_path=str(tmp_path)), resume_from_checkpoint=given).fit()
        assert (result.metrics["left"], result.metrics["paths"]) == (1, [given.path, given.path])
        assert result.checkpoint.to_dict()["left"] == 1


class TestReportsAhead:
    def test_are_made_while_the_driver_is_busy_with_the_first(self, tmp_path: Path) -> None:
        found: list[int] = []

        def stop(trial_id: str, metrics: dict[str, Any]) -> bool:
            deadline = time.monotonic() + 120
            while not found and not (tmp_path / "flag-0-19").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            found.append(len(list(tmp_path.glob("flag-0-*"))))
            return False

        trainer(tmp_path, loops.report_and_note, num_reports=20, stop=stop).fit()
        assert found == [20] * 20

    def test_are_seen_one_by_one_by_a_stop_condition_and_none_behind_it(self, tmp_path: Path) -> None:
        seen: list[int] = []

        def stop(trial_id: str, metrics: dict[str, Any]) -> bool:
            seen.append(metrics["number"])
            return bool(metrics["number"] == 99)

        result = trainer(tmp_path, loops.report_flat_out, num_reports=1000, stop=stop).fit()
        assert seen == numbers_in(tmp_path) == list(range(100))
        assert (result.metrics["number"], result.metrics["training_iteration"]) == (99, 100)


class TestFailures:
    def test_are_raised_as_one_error_of_both_classes_that_says_how_to_go_on(self, tmp_path: Path) -> None:
        failing = trainer(tmp_path, fails_at=1)
        with pytest.raises(TrainingFailedError, match=r"restore\('.*run'\)(.|\n)*FailureConfig") as caught:
            failing.fit()
        assert isinstance(caught.value, KeyError)
        assert isinstance(caught.value.__cause__, KeyError)
        assert "bad sample in epoch 1" in str(caught.value)
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, KeyError)
        assert isinstance(again, TrainingFailedError)
        [trial] = [path for path in (tmp_path / "run").iterdir() if path.is_dir()]
        assert "bad sample in epoch 1" in (trial / "error.txt").read_text()

    def test_in_the_middle_of_a_checkpoint_leave_nothing_that_looks_like_one(self, tmp_path: Path) -> None:
        result = trainer(
            tmp_path, kind="folder", dies_while_saving=1, failure_config=FailureConfig(max_failures=1)
        ).fit()
        assert checkpoints_in(result) == [f"checkpoint_{number:06d}" for number in range(3)]
        assert [Path(result.path, name, "epoch").read_text() for name in checkpoints_in(result)] == ["0", "1", "2"]
        assert result.metrics["training_iteration"] == 3
        parts = [path for path in Path(result.path, "checkpoint_000001").iterdir() if path.name.startswith("part_")]
        assert parts == []

    def test_behind_many_reports_come_behind_each_of_them(self, tmp_path: Path) -> None:
        with pytest.raises(TrainingFailedError, match="behind all reports"):
            trainer(tmp_path, loops.report_flat_out, num_reports=300, raises=True).fit()
        assert numbers_in(tmp_path) == list(range(300))
