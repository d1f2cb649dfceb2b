from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raysgd.exceptions import InactiveWorkerGroupError, UnpicklableError
from raysgd.train import Trainer, TrainingIterator
from raysgd.train._function_run import FunctionRun
from raysgd.train.backend import BackendConfig
from raysgd.train.callbacks import JsonLoggerCallback
from raysgd.train.checkpoint import load_checkpoint
from raysgd.train.executor import CallableFlag


def trainer(tmp_path: Path, **options: Any) -> Trainer:
    return Trainer(**{"backend": BackendConfig(), "logdir": tmp_path, **options})


def test_workers_go_and_run_where_the_trainer_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_PLACEMENT_GROUP_TIMEOUT_S", "7")
    environment, resources = {"env_vars": {"A": "1"}}, {"CPU": 2, "GPU": 0.5, "disk": 1}
    placed = {"placement_strategy": "SPREAD", "accelerator_type": "A100", "runtime_env": environment}
    made = trainer(tmp_path, use_gpu=True, resources_per_worker=resources, **placed)
    spec = made._workers.group_spec(None)
    assert (spec.packs, spec.reservation_timeout_s) == (False, 7)
    assert spec.resources.bundle() == {**resources, "accelerator_type:A100": 0.001}
    assert spec.resources.runtime_env == environment
    assert resources == {"CPU": 2, "GPU": 0.5, "disk": 1}
    assert trainer(tmp_path, use_gpu=True)._workers.spec.resources.bundle() == {"CPU": 1, "GPU": 1}


def test_trials_reserve_as_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_ENABLE_WORKER_SPREAD", "1")
    assert trainer(tmp_path)._strategy == "SPREAD"
    assert trainer(tmp_path, placement_strategy="PACK")._strategy == "PACK"


def test_nothing_is_there_before_the_first_run(tmp_path: Path) -> None:
    made = trainer(tmp_path / "deep" / "logs")
    assert made.logdir == tmp_path / "deep" / "logs"
    assert made.logdir.is_dir()
    assert made.latest_run_dir is None
    assert made.latest_checkpoint_dir is None
    assert made.latest_checkpoint is None
    assert made.latest_checkpoint_path is None
    assert made.best_checkpoint_path is None
    assert made.best_checkpoint is None


def test_a_run_without_workers_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    for call in (made.run, made.run_iterator):
        with pytest.raises(InactiveWorkerGroupError, match="call `start`"):
            call(lambda: None)
    assert list(tmp_path.iterdir()) == []
    assert made.latest_run_dir is None


def test_a_function_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(UnpicklableError, match=r"`train_func` cannot be sent to the workers.*create it in the worker"):
        trainer(tmp_path).run(lambda: lock.locked())


def test_trainers_with_one_folder_never_share_that_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run_002").mkdir()  # of an earlier program
    made = [trainer(tmp_path) for _ in range(2)]
    first, second, third = (made[index].create_run_dir() for index in (0, 1, 0))
    assert [first.name, second.name, third.name] == ["run_001", "run_003", "run_004"]
    assert made[0].latest_run_dir == third
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: each.create_run_dir(), [trainer(tmp_path) for _ in range(20)]))
    assert len(set(found)) == 20


def test_a_uri_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="need a path on a local or mounted disk, not a URI"):
        JsonLoggerCallback(logdir="s3://bucket/results")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["nowhere://bucket", Path("nowhere://bucket")])
def test_an_unknown_store_is_refused(path: Any) -> None:
    with pytest.raises(ValueError, match="`checkpoint='nowhere://bucket'`: `nowhere` is unknown"):
        load_checkpoint(path)


def test_a_relative_folder_is_among_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.train.constants.DEFAULT_RESULTS_DIR", tmp_path / "results")
    assert trainer(tmp_path, logdir="mine").logdir == tmp_path / "results" / "mine"
    assert trainer(tmp_path, logdir=None).logdir.name.startswith("train_")


def test_a_setting_of_the_environment_has_to_be_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_PLACEMENT_GROUP_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="`TRAIN_PLACEMENT_GROUP_TIMEOUT_S=soon`: need a whole number"):
        trainer(tmp_path)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (False, False)),
        ({"SGD_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS": "1"}, (True, False)),
        ({"SGD_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "1"}, (False, True)),
        (
            {"SGD_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "1", "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "0"},
            (False, False),
        ),
    ],
)
def test_settings_of_the_environment_have_their_first_names_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[bool, bool]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    workers = trainer(tmp_path)._workers
    assert (workers._is_detailed, workers._shares_gpus) == expected


def test_an_iterator_of_a_run_that_was_ended_from_elsewhere_says_so_once() -> None:
    iterator = TrainingIterator(cast(FunctionRun, SimpleNamespace(is_over=True, returned=None, next_reports=list)))
    with pytest.raises(InactiveWorkerGroupError, match="was shut down, or began another run"):
        next(iterator)
    assert iterator.is_finished()
    assert list(iterator) == []


@pytest.mark.parametrize("value", [True, False])
def test_a_flag_is_a_property_and_a_method(value: bool) -> None:
    flag = CallableFlag(value)
    assert bool(flag) is flag() is value
    assert repr(flag) == repr(value)


def test_a_trial_keeps_the_pace_of_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("raysgd.train._tune.make_trainable", lambda *args: given.extend(args))
    trainer(tmp_path, heartbeat_s=50, resize_interval_s=7).to_tune_trainable(lambda: None)
    workers = given[0](logdir=tmp_path)._workers
    assert (workers.spec.heartbeat_s, workers.resize_interval_s) == (50, 7)


def test_a_missing_tune_is_named_and_of_the_old_class_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(ImportError, match=r'or run: pip install .*"ray\[tune\]') as caught:
        trainer(tmp_path).to_tune_trainable(lambda: None)
    assert isinstance(caught.value, ValueError)


def test_gpus_that_nobody_uses_are_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raysgd.train.trainer.gpus_of_nodes", lambda: (1.0, 2.0))
    for use_gpu in (True, False):
        made = trainer(tmp_path, use_gpu=use_gpu)
        monkeypatch.setattr(made._workers, "start", lambda owner, hook: None)
        with caplog.at_level("INFO", "raysgd.train"):
            made.start()
    assert caplog.text.count("the cluster has 3 GPUs, of which none is used") == 1
