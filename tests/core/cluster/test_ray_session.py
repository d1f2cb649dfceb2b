"""Threads that call Ray: all of them are under one rule, and they never start Ray."""

from __future__ import annotations

import ast
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raysgd.core.cluster import ray_cluster
from raysgd.core.cluster.ray_cluster import RayThreads, in_session, keep_threads_from_starting_ray, prepare_to_use_ray
from raysgd.exceptions import TrainerShutdownError, WorkersLostError

ROOT = Path(__file__).resolve().parents[3]

UNDER_THE_RULE = {
    "raysgd.core.engine.platform": "joined by the call that starts it",
    "raysgd.core.cluster.ray_cluster": "`RayThreads`: background calls, copies for recovery, checkpoints of functions",
    "raysgd.storage.background_writer": "Python waits for it before it ends",
}
"""Modules that make a `RayThread`."""
OTHERS = {
    "raysgd.core.connections._gloo": (1, "in a worker, between sockets"),
    "raysgd.core.connections.horovod": (1, "in a worker, between sockets"),
    "raysgd.core.connections.mesh.board": (1, "in a worker, between sockets"),
    "raysgd.core.connections.torch": (1, "in a worker, which ends with its Ray session"),
    "raysgd.core.engine.placement": (1, "in the actor `ReservationGuard`, which ends with its Ray session"),
    "raysgd.core.writers.sinks": (1, "only files"),
    "raysgd.detached.call_log": (1, "in a detached trainer, which ends with its Ray session"),
    "raysgd.detached.process": (7, "in a detached trainer, which ends with its Ray session"),
    "raysgd.storage.owner": (1, "only files"),
    "raysgd.storage._transfers": (2, "only files"),
    "raysgd.streams.loaders": (2, "in a worker's loader process, which has no Ray"),
    "raysgd.train._worker.messages": (1, "the user's function, in a worker"),
    "raysgd.train.fit.recorder": (1, "only files"),
    "raysgd.trainer.driver.leaving": (1, "only sends a signal"),
    "raysgd.tune.population": (1, "joined by the call that starts it; each of its calls is one of a trainer"),
    "raysgd.util.iter": (1, "the user's function"),
}
"""Modules that start other threads, how many, and why these need not be under the rule."""
STARTS = {"Thread", "Timer", "ThreadPoolExecutor", "to_thread", "run_in_executor", "start_new_thread", "RayThread"}


def starts(tree: ast.AST) -> Counter[str]:
    """Count the calls that start threads, by the name that is called."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls]
    return Counter(name for name in names if name in STARTS)


def test_every_thread_of_the_library_is_under_the_rule_or_says_why_not() -> None:
    ours, others = dict[str, int](), dict[str, int]()
    for path in sorted([*(ROOT / "raysgd").rglob("*.py"), *(ROOT / "operators").rglob("*.py")]):
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        source = path.read_text("utf-8")
        found = starts(ast.parse(source))
        if num := found.pop("RayThread", 0):
            ours[module] = num
        if num := found.total():
            others[module] = num
            if module in OTHERS and OTHERS[module][1] == "only files":
                assert "import ray\n" not in source, f"`{module}` calls Ray: start its threads with `RayThreads`"
    assert ours == dict.fromkeys(UNDER_THE_RULE, 1)
    assert others == {module: num for module, (num, _) in OTHERS.items()}, "start it with `RayThreads`, or say why not"


def test_a_new_thread_would_be_seen() -> None:
    tree = ast.parse("import threading\nthreading.Thread(target=f).start()\nThreadPoolExecutor(1)\nThread = 1\n")
    assert starts(tree) == {"Thread": 1, "ThreadPoolExecutor": 1}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The session of this process, which a test may change."""
    current = SimpleNamespace(name="first")
    monkeypatch.setattr(ray_cluster, "session", lambda: current.name)
    return current


def interrupted(error: BaseException, sessions: Any) -> None:
    with in_session("first"):
        sessions.name = None
        raise error


@pytest.mark.parametrize("error", [SystemExit(0), RuntimeError("not connected")], ids=repr)
def test_what_ray_raises_when_it_is_ended_is_an_error_of_ours(error: BaseException, sessions: Any) -> None:
    with pytest.raises(WorkersLostError, match="by `ray") as caught:
        interrupted(error, sessions)
    assert caught.value.__cause__ is error
    with pytest.raises(WorkersLostError, match="by `ray"), in_session("first"):
        pytest.fail("the session is another one")


@pytest.mark.parametrize("expected", ["first", None])
@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("of the user")], ids=repr)
def test_other_errors_stay(error: BaseException, expected: str | None, sessions: Any) -> None:
    with pytest.raises(type(error)) as caught, in_session(expected):
        raise error
    assert caught.value is error


def test_an_error_of_the_library_says_more(sessions: Any) -> None:
    with pytest.raises(TrainerShutdownError):
        interrupted(TrainerShutdownError("ended"), sessions)


def test_only_threads_of_the_library_cannot_start_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import auto_init_hook

    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    keep_threads_from_starting_ray()
    assert auto_init_hook.enable_auto_connect
    started = list[object]()
    monkeypatch.setattr(ray, "init", lambda **options: started.append(threading.current_thread().name))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    auto_init_hook.auto_init_ray()
    assert started == ["MainThread"]
    RayThreads().start(auto_init_hook.auto_init_ray, "raysgd-test").result(60)
    with pytest.raises(WorkersLostError, match="by `ray"):
        RayThreads().start(prepare_to_use_ray, "raysgd-test").result(60)
    assert started == ["MainThread"]


def test_an_owner_waits_for_its_threads_but_not_for_itself() -> None:
    threads, may_end = RayThreads(), threading.Event()
    waiting = threads.start(may_end.wait, "raysgd-test")
    itself = threads.start(threads.join, "raysgd-test")
    threading.Timer(0.2, may_end.set).start()
    threads.join()
    assert waiting.done()
    assert itself.done()
