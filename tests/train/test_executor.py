"""What an executor makes of its arguments and of the environment, before any worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from raysgd.air import ScalingConfig
from raysgd.core.engine.shared.interface import NoConnection
from raysgd.exceptions import InactiveWorkerGroupError
from raysgd.train._workers import WORDS, FunctionWorkers, check_elastic, preemption_of
from raysgd.train.backend import BackendConfig, PlacedConnection
from raysgd.train.checkpoint import CheckpointManager, write_checkpoint
from raysgd.train.executor import BackendExecutor
from raysgd.train.torch import TorchConfig
from raysgd.trainer.configuration import Placement


def workers(config: BackendConfig | None = None, **options: Any) -> FunctionWorkers:
    return BackendExecutor(config or BackendConfig(), **{"num_workers": 2, **options})._workers


def placed(placement: Placement) -> FunctionWorkers:
    """Workers of which the user says more than an executor takes."""
    return FunctionWorkers(BackendConfig(), ScalingConfig(num_workers=2), 2, CheckpointManager(), placement=placement)


def test_groups_are_started_from_what_the_user_asked_for() -> None:
    custom = {"disk": 1}
    made = workers(num_workers=(2, 4), num_cpus_per_worker=0.5, additional_resources_per_worker=custom, heartbeat_s=20)
    spec = made.group_spec(print)
    assert (made._scaling.min_workers, made._scaling.max_workers) == (2, 4)
    assert spec.resources.bundle() == {"CPU": 0.5, "disk": 1}
    assert (spec.heartbeat_s, spec.initialization_hook, spec.captures, spec.words) == (20, print, False, WORDS)


@pytest.mark.parametrize(
    ("spread", "strategy", "packs"),
    [("0", None, True), (None, None, True), ("1", None, False), ("1", "PACK", True), ("0", "SPREAD", False)],
)
def test_an_argument_counts_more_than_the_environment(
    monkeypatch: pytest.MonkeyPatch, spread: str | None, strategy: Literal["PACK", "SPREAD"] | None, packs: bool
) -> None:
    if spread is not None:
        monkeypatch.setenv("TRAIN_ENABLE_WORKER_SPREAD", spread)
    assert placed(Placement(placement_strategy=strategy)).group_spec(None).packs is packs


def test_workers_need_what_both_arguments_say_and_run_in_their_environment() -> None:
    placement = Placement({"disk": 1, "fast": 2}, "A100", runtime_env={"env_vars": {"A": "1"}})
    resources = placed(placement).group_spec(None).resources
    assert resources.bundle() == {"CPU": 1, "disk": 1, "fast": 2, "accelerator_type:A100": 0.001}
    assert resources.runtime_env == {"env_vars": {"A": "1"}}


@pytest.mark.parametrize(("shares", "num_gpus"), [("0", 1), ("1", 1), ("1", 0)])
def test_workers_see_the_gpus_of_others_if_they_are_to(
    monkeypatch: pytest.MonkeyPatch, shares: str, num_gpus: int
) -> None:
    monkeypatch.setenv("TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES", shares)
    alone = workers(num_gpus_per_worker=num_gpus).group_spec(None).connection
    if shares == "1" and num_gpus:
        assert isinstance(alone, PlacedConnection)
        assert alone.shares_gpus
    else:
        assert isinstance(alone, NoConnection)
    of_torch = workers(TorchConfig(), num_gpus_per_worker=num_gpus).group_spec(None).connection
    assert isinstance(of_torch, PlacedConnection)
    assert of_torch.shares_gpus is (shares == "1")


@pytest.mark.parametrize("name", ["num_cpus_per_worker", "num_gpus_per_worker"])
def test_a_number_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}=-1"):
        workers(**{name: -1})


@pytest.mark.parametrize(
    ("num_workers", "config", "num_restarts", "words"),
    [
        ((3, 3), TorchConfig(), 2, r"`num_workers=\(2, 3\)`"),
        ((2, 3), BackendConfig(), 2, 'TorchConfig\\(backend="gloo"\\)'),
        ((2, 3), TorchConfig(backend="nccl"), 2, 'TorchConfig\\(backend="gloo"\\)'),
        ((2, 3), TorchConfig(), 0, "at least 1 in `fit`"),
    ],
)
def test_functions_can_go_on_with_fewer_workers_where_gloo_connects_them(
    num_workers: tuple[int, int], config: BackendConfig, num_restarts: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_elastic(config, ScalingConfig(num_workers=num_workers, elastic=True), num_restarts)
    check_elastic(TorchConfig(), ScalingConfig(num_workers=(2, 3), elastic=True), 1)


# ------------------------------------------------------------------------------------------------- the start of a run


def nothing() -> None: ...


def test_a_checkpoint_is_read_from_its_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    write_checkpoint({"epoch": 3}, path)
    executor = BackendExecutor(BackendConfig())
    monkeypatch.setattr(executor._workers, "check_free", lambda: None)
    start = executor._checked(nothing, None, None, path, None)
    path.unlink()
    with pytest.raises(InactiveWorkerGroupError):
        start(None)
    assert executor.checkpoint_manager.restart_point == {"epoch": 3}


def test_a_preemption_names_the_ranks_and_the_first_deadline() -> None:
    assert preemption_of(["a", "b"], {}) is None
    assert preemption_of(["a", "b"], {"c": 5}) is None
    info = preemption_of(["a", "b", "a", "d"], {"a": 7000, "b": 5000, "c": 1})
    assert info is not None
    assert (info.deadline_ms, info.preempted_node_ids, info.preempted_ranks) == (5000, ["a", "b"], [0, 1, 2])
    without_time = preemption_of(["a"], {"a": 0})
    assert without_time is not None
    assert without_time.deadline_ms is None
