from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raysgd.air import ScalingConfig
from raysgd.core.cluster.resources import Resources
from raysgd.core.engine.group import WorkerGroup as EngineGroup
from raysgd.core.engine.shared.types import Answered, Failed, Failure, GroupReport
from raysgd.exceptions import WorkerFault
from raysgd.train import _workers
from raysgd.train._workers import FunctionWorkers
from raysgd.train.backend import Backend, BackendConfig
from raysgd.train.worker_group import LostDuringCallError
from raysgd.trainer.configuration import Placement

FAULT = WorkerFault(1, "node", RuntimeError(), "ActorDiedError", "gone", "", "")
LOST = GroupReport((Answered(0, None), Failed(1, Failure("died", FAULT))))


class NotedWorkers:
    """Stands for the workers of a group, as a plug-in sees them."""

    num_workers: int

    @classmethod
    def over(cls, group: Any, resources: Resources) -> NotedWorkers:
        workers = cls()
        workers.num_workers = len(group.infos)
        return workers


class NotingBackend(Backend):
    """Notes what it is told, and raises if it is to."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.raises: BaseException | None = None

    def note(self, what: str) -> None:
        self.told.append(what)
        if self.raises is not None:
            raise self.raises

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        self.note("start")

    def on_training_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        self.note("training start")

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        self.note("shutdown")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> NotingBackend:
    made = NotingBackend()
    monkeypatch.setattr(_workers, "WorkerGroup", NotedWorkers)
    monkeypatch.setattr(_workers, "make_objects", lambda make, group: made.told.append(f"{make} on {group.infos}"))
    return made


def hooks(backend: Any, waits: list[float] | None = None, make_object: Any = None) -> FunctionWorkers:
    checkpoints: Any = SimpleNamespace(await_arrival=[].append if waits is None else waits.append)
    config: Any = SimpleNamespace(backend_cls=lambda: backend)
    made = FunctionWorkers(config, ScalingConfig(num_workers=2), 0, checkpoints, placement=Placement())
    made._make_object = make_object
    return made


@dataclass(eq=False)
class Group:
    """Stands for a group of the engine."""

    infos: list[Any]

    def __len__(self) -> int:
        return len(self.infos)


def group(*infos: Any) -> EngineGroup:
    return cast(EngineGroup, Group(list(infos)))


def test_a_plug_in_hears_of_each_moment_and_objects_are_made_last(backend: NotingBackend) -> None:
    made, running = hooks(backend, make_object="int"), group("a")
    assert made.on_start(running) is None
    made.on_training_start()
    made.on_stop(running)
    assert backend.told == ["start", "int on ['a']", "training start", "shutdown"]
    assert made.group is running


def test_ranks_of_those_that_are_left_are_followed(backend: NotingBackend) -> None:
    made, running = hooks(backend), group("a", "b", "c")
    made.on_start(running)
    for infos in (["b", "c"], ["c"]):
        running.infos[:] = infos  # type: ignore[arg-type]
        made.on_change(running)
    assert (made.workers.num_workers, made.joined) == (1, {"c": 0})
    running.infos.append("d")  # type: ignore[arg-type]
    made.on_change(running)
    assert (made.workers.num_workers, made.joined) == (2, {"c": 0, "d": 3})
    assert made.num_started == 1
    made.on_start(running)
    assert made.num_started == 2


def test_a_death_over_the_start_is_a_failed_start_and_an_exception_is_raised(backend: NotingBackend) -> None:
    made = hooks(backend)
    backend.raises = LostDuringCallError(LOST)
    assert made.on_start(group()) is LOST
    backend.raises = KeyError("a mistake of the plug-in")
    with pytest.raises(KeyError):
        made.on_start(group())


def test_a_death_in_on_training_start_is_left_to_the_call_that_follows(
    backend: NotingBackend, caplog: pytest.LogCaptureFixture
) -> None:
    made = hooks(backend)
    made.on_start(group())
    backend.raises = LostDuringCallError(LOST)
    made.on_training_start()
    assert "worker 1 died while a function was run on it, in `on_training_start`" in caplog.text


def test_a_plug_in_that_fails_to_say_goodbye_holds_nothing_up(
    backend: NotingBackend, caplog: pytest.LogCaptureFixture
) -> None:
    made, running = hooks(backend), group()
    made.on_start(running)
    backend.raises = ConnectionError("gone")
    with caplog.at_level(logging.WARNING):
        made.on_stop(running)
    assert "`on_shutdown` failed; stopping the workers anyway: gone" in caplog.text


def test_a_plug_in_says_no_goodbye_to_workers_that_it_never_connected(backend: NotingBackend) -> None:
    hooks(backend).on_stop(group())
    assert backend.told == []


def test_a_group_waits_once_for_a_checkpoint_and_less_after_ctrl_c(backend: NotingBackend) -> None:
    waits: list[float] = []
    made = hooks(backend, waits)
    for error in (KeyError(), KeyboardInterrupt()):
        running = group()
        made.on_start(running)
        try:
            raise error
        except BaseException:
            made.on_end(running)
            made.on_end(running)
    assert len(waits) == 2
    assert waits[1] < waits[0]


def test_a_plug_in_need_not_derive_from_our_class(backend: NotingBackend) -> None:
    class Bare:
        def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None: ...

        on_shutdown = encode_data = decode_data = on_start
        share_cuda_visible_devices = False

    made = hooks(Bare())
    made.on_start(group())
    made.on_training_start()
