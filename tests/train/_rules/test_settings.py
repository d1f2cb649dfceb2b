from __future__ import annotations

from typing import Any, Literal

import pytest

from raysgd.engine.shared.connection import NoConnection
from raysgd.messages.placement import Placement
from raysgd.train._rules.settings import WORDS, ExecutorRules, WorkerSettings, check_elastic
from raysgd.train.backend import Backend, BackendConfig, PlacedConnection
from raysgd.train.torch import TorchConfig


def settings(**options: Any) -> WorkerSettings:
    given = {"num_workers": 2, "num_cpus": 1, "num_gpus": 0, "custom": None, "heartbeat_s": 60.0}
    given |= {"placement": Placement(), **options}
    return WorkerSettings(Backend(), *given.values())


def test_groups_are_started_from_what_the_user_asked_for() -> None:
    made = settings(num_workers=(2, 4), num_cpus=0.5, custom={"disk": 1}, heartbeat_s=20)
    spec = made.group_spec(BackendConfig(), print)
    assert (made.scaling.min_workers, made.scaling.max_workers) == (2, 4)
    assert spec.resources.bundle() == {"CPU": 0.5, "disk": 1}
    assert (spec.heartbeat_s, spec.initialization_hook, spec.captures, spec.words) == (20, print, False, WORDS)


@pytest.mark.parametrize(
    ("spread", "strategy", "packs"),
    [("0", None, True), ("1", None, False), ("1", "PACK", True), ("0", "SPREAD", False)],
)
def test_an_argument_counts_more_than_the_environment(
    monkeypatch: pytest.MonkeyPatch, spread: str, strategy: Literal["PACK", "SPREAD"] | None, packs: bool
) -> None:
    monkeypatch.setenv("TRAIN_ENABLE_WORKER_SPREAD", spread)
    made = settings(placement=Placement(placement_strategy=strategy))
    assert made.group_spec(BackendConfig(), None).packs is packs


def test_workers_need_what_both_arguments_say_and_run_in_their_environment() -> None:
    placement = Placement({"fast": 2}, "A100", runtime_env={"env_vars": {"A": "1"}})
    resources = settings(custom={"disk": 1}, placement=placement).group_spec(BackendConfig(), None).resources
    assert resources.bundle() == {"CPU": 1, "disk": 1, "fast": 2, "accelerator_type:A100": 0.001}
    assert resources.runtime_env == {"env_vars": {"A": "1"}}


@pytest.mark.parametrize(("shares", "num_gpus"), [("0", 1), ("1", 1), ("1", 0)])
def test_workers_see_the_gpus_of_others_if_they_are_to(
    monkeypatch: pytest.MonkeyPatch, shares: str, num_gpus: int
) -> None:
    monkeypatch.setenv("TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES", shares)
    made = settings(num_gpus=num_gpus)
    alone = made.group_spec(BackendConfig(), None).connection
    if shares == "1" and num_gpus:
        assert isinstance(alone, PlacedConnection)
        assert alone.shares_gpus
    else:
        assert isinstance(alone, NoConnection)
    of_torch = made.group_spec(TorchConfig(), None).connection
    assert isinstance(of_torch, PlacedConnection)
    assert of_torch.shares_gpus is (shares == "1")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_workers": 0}, "num_workers"),
        ({"num_cpus": -1}, "num_cpus_per_worker"),
        ({"num_gpus": -1}, "num_gpus_per_worker"),
        ({"heartbeat_s": 0}, "heartbeat_s"),
    ],
)
def test_a_number_that_cannot_be_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}="):
        settings(**options)


@pytest.mark.parametrize(
    ("given", "of_rules", "expected"), [("9", None, 9), ("9", 64, 64), ("9", 0, 0), ("-1", None, 0)]
)
def test_how_far_functions_run_ahead_is_up_to_the_front_end_or_else_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: str, of_rules: int | None, expected: int
) -> None:
    assert settings().num_ahead_by(ExecutorRules()) == 0
    monkeypatch.setenv("TRAIN_REPORTS_AHEAD", given)
    assert settings().num_ahead_by(ExecutorRules(num_ahead=of_rules)) == expected


@pytest.mark.parametrize(
    ("num_workers", "config", "max_retries", "words"),
    [
        ((3, 3), TorchConfig(), 3, r"`num_workers=\(2, 3\)`"),
        ((2, 3), BackendConfig(), 3, 'TorchConfig\\(backend="gloo"\\)'),
        ((2, 3), TorchConfig(backend="nccl"), 3, 'TorchConfig\\(backend="gloo"\\)'),
        ((2, 3), TorchConfig(), 1, "at least 1 in `fit`"),
    ],
)
def test_functions_can_go_on_with_fewer_workers_where_gloo_connects_them(
    num_workers: tuple[int, int], config: BackendConfig, max_retries: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_elastic(config, num_workers, 0, max_retries)
    check_elastic(TorchConfig(), (2, 3), 0, 2)
