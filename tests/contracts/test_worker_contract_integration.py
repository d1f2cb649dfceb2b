"""What holds for every worker, whether it is a process of its own, the driver itself, or some of both."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from raysgd.core.cluster.resources import Resources
from raysgd.core.engine import group as engine_group
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.shared.interface import Capture, GroupSpec
from raysgd.core.engine.shared.types import GroupReport, World
from raysgd.core.engine.worker import WorkerProcess
from raysgd.core.worker_errors import worker_error
from tests.helpers.fakes import CountingReplica, NullConnection, add, read

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("patient")]

STEPS: list[str] = []  # what happened in this process, in order


@dataclass
class NotingConnection(NullConnection):
    """Notes what is asked of it in the list of its process."""

    def limit_threads(self, num_threads: int) -> None:
        super().limit_threads(num_threads)
        STEPS.append(f"threads {num_threads}")

    def load(self) -> None:
        STEPS.append("load")

    def open_endpoint(self, host: str) -> int:
        STEPS.append(f"open {host}")
        return 12345

    def join(self, rendezvous: Any, world: World, *, even_alone: bool = False) -> None:
        STEPS.append(f"join {rendezvous.address}:{rendezvous.port} as {world.rank} of {world.size}")

    def leave(self) -> None:
        STEPS.append("leave")


class NotingReplica(CountingReplica):
    """Notes its life in the list of its process."""

    def setup(self) -> str:
        STEPS.append("setup")
        return super().setup()

    def shutdown(self) -> None:
        super().shutdown()
        STEPS.append("shutdown")


def hook() -> None:
    STEPS.append("hook")


def spec(**options: Any) -> GroupSpec:
    values: dict[str, Any] = {
        "connection": NotingConnection(),
        "make_replica": NotingReplica,
        "initialization_hook": hook,
        "resources": Resources(num_cpus=0.5),  # several groups live side by side here
        **options,
    }
    return GroupSpec(**values)


@dataclass(frozen=True)
class Kind:
    """A way to make a group."""

    num_workers: int
    use_local: bool
    by_line: bool = False

    @property
    def ranks(self) -> list[int]:
        return list(range(self.num_workers))

    @property
    def remote_ranks(self) -> list[int]:
        return self.ranks[int(self.use_local) :]


KINDS = {
    "remote": Kind(2, False),
    "remote, by lines": Kind(2, False, by_line=True),
    "local": Kind(1, True),
    "mixed": Kind(2, True, by_line=True),
}


@dataclass(frozen=True)
class Started:
    """A group of a kind, and what its start reported."""

    kind: Kind
    group: WorkerGroup
    report: GroupReport

    def call(self, function: Any, *args: Any, **options: Any) -> GroupReport:
        asked = {rank: args for rank in self.kind.ranks}
        return self.group.on_replica(function, asked, by_line=self.kind.by_line, **options)


@pytest.fixture(scope="module", params=KINDS)
def started(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[Started]:
    kind = KINDS[request.param]
    STEPS.clear()
    group = WorkerGroup(spec(use_local=kind.use_local), kind.num_workers)
    yield Started(kind, group, group.start())
    group.stop(10)


def where(replica: CountingReplica) -> tuple[int, int]:
    return replica.world.rank, os.getpid()


def steps(replica: CountingReplica) -> list[str]:
    return list(STEPS)


def raise_value_error(replica: CountingReplica, ranks: Sequence[int]) -> None:
    if replica.world.rank in ranks:
        raise ValueError("the user's words")


def exit_process(replica: CountingReplica) -> None:
    raise SystemExit(3)


def variables(replica: CountingReplica) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def visible_gpus(replica: CountingReplica) -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def thread_names(replica: CountingReplica) -> str:
    return threading.current_thread().name


# -------------------------------------------------------------------------------------------- starting


def test_the_set_up_answers_come_in_rank_order(started: Started) -> None:
    answers = started.report.values
    assert answers == [f"rank {rank} of {started.kind.num_workers}" for rank in started.kind.ranks]


def test_every_worker_says_where_it_lives(started: Started) -> None:
    found = started.call(where).values
    assert [rank for rank, _ in found] == started.kind.ranks
    assert [pid for _, pid in found] == [info.pid for info in started.group.infos]
    assert len({info.pid for info in started.group.infos}) == started.kind.num_workers
    is_driver = [info.pid == os.getpid() for info in started.group.infos]
    assert is_driver == [rank not in started.kind.remote_ranks for rank in started.kind.ranks]


def test_all_on_one_node_have_the_local_ranks_of_one_node(started: Started) -> None:
    worlds = started.group.worlds
    assert [world.local_rank for world in worlds] == started.kind.ranks
    assert {(world.num_nodes, world.local_size) for world in worlds} == {(1, started.kind.num_workers)}


def test_the_hook_runs_before_the_framework_is_loaded_and_the_group_forms_before_the_set_up(
    started: Started,
) -> None:
    for rank, answer in enumerate(started.call(steps).values):
        threads = ["threads 1"] if rank in started.kind.remote_ranks else []
        is_alone = started.kind.use_local and started.kind.num_workers == 1  # needs no port
        opened = [] if is_alone else ["open 127.0.0.1"]
        join = f"join 127.0.0.1:{0 if is_alone else 12345} as {rank} of {started.kind.num_workers}"
        assert answer == [*threads, "hook", "load", *opened, join, "setup"]


def test_workers_listen_as_the_ranks_that_they_turn_out_to_be(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is which rank is known only when all of them are there."""
    monkeypatch.setattr(engine_group, "rank_order", lambda infos, first_stays: [1, 0])
    group = WorkerGroup(spec(), 2)
    try:
        assert group.start().ok
        answers = group.on_replica(steps, {0: (), 1: ()}).values
        assert ["open 127.0.0.1" in found for found in answers] == [True, True]
        placed = group.on_replica(where, {0: (), 1: ()}).values
        assert placed == [(rank, info.pid) for rank, info in enumerate(group.infos)]
    finally:
        group.kill(10)


def test_remote_workers_are_told_their_number_of_threads_and_the_driver_is_left_alone(
    started: Started,
) -> None:
    own = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    for rank, answer in enumerate(started.call(variables).values):
        limited = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        assert answer == (limited if rank in started.kind.remote_ranks else own)


def test_remote_workers_without_gpus_see_none_and_the_driver_is_left_alone(started: Started) -> None:
    for rank, answer in enumerate(started.call(visible_gpus).values):
        assert answer == ("" if rank in started.kind.remote_ranks else os.environ.get("CUDA_VISIBLE_DEVICES"))


# -------------------------------------------------------------------------------------------- calling


def test_each_rank_gets_its_own_arguments(started: Started) -> None:
    before = [answer[0] for answer in started.call(read).values]
    args = {rank: (10.0**rank,) for rank in started.kind.ranks}
    values = started.group.on_replica(add, args).values
    assert values == [before[rank] + 10**rank for rank in started.kind.ranks]


def test_a_single_rank_can_be_called(started: Started) -> None:
    last = started.kind.num_workers - 1
    [outcome] = started.group.on_replica(where, {last: ()}).outcomes
    assert outcome.rank == last
    assert outcome.value[0] == last


def test_a_call_runs_in_the_main_thread_of_its_process(started: Started) -> None:
    for rank, answer in enumerate(started.call(thread_names).values):
        if rank not in started.kind.remote_ranks:
            assert answer == threading.main_thread().name


def test_without_capture_an_answer_carries_no_state(started: Started) -> None:
    assert started.call(read).captures == []


def test_a_small_state_comes_with_the_answer_of_rank_0_and_every_rank_adds_its_own(started: Started) -> None:
    captures = started.call(add, 1.0, capture=True).captures
    total, own = started.call(read).values[0]
    assert len(captures) == started.kind.num_workers
    assert captures[0] == Capture(own, shared_state=total, seconds=captures[0].seconds)
    assert all(capture.shared_state is None for capture in captures[1:])
    assert all(isinstance(capture.rank_state, int) for capture in captures)


def test_a_shared_value_reaches_every_rank(started: Started) -> None:
    shared = started.group.share({"key": list(range(1000))})
    args = {rank: (shared[rank],) for rank in started.kind.ranks}
    lengths = started.group.on_replica(length_of, args).values
    assert lengths == [1000] * started.kind.num_workers


def length_of(replica: CountingReplica, value: dict[str, list[int]]) -> int:
    return len(value["key"])


# -------------------------------------------------------------------------------------------- failing


def test_an_exception_comes_back_as_data_with_rank_node_and_the_users_line(started: Started) -> None:
    report = started.call(raise_value_error, started.kind.ranks)
    assert not report.ok
    assert report.all_answered
    for rank, outcome in enumerate(report.outcomes):
        found = outcome.failure.fault
        assert (outcome.failure.kind, found.rank, found.type_name) == ("user", rank, "ValueError")
        assert found.message == "the user's words"
        assert re.search(r"test_worker_contract.*py:\d+ in raise_value_error: raise ValueError", found.location)
        assert found.node == started.group.infos[rank].node_ip
        is_live = found.error.__traceback__ is not None  # in this process, where Python shows the frames by itself
        assert is_live == (rank not in started.kind.remote_ranks)
        assert ("raise ValueError" in found.traceback_text) != is_live
        assert type(found.error) is ValueError


def test_the_other_ranks_answer_as_usual(started: Started) -> None:
    last = started.kind.num_workers - 1
    report = started.call(raise_value_error, [last])
    assert [outcome.ok for outcome in report.outcomes] == [rank != last for rank in started.kind.ranks]
    assert report.all_answered
    assert started.call(read).ok


def test_leaving_the_process_by_exception_is_an_exception_like_others(started: Started) -> None:
    report = started.call(exit_process)
    assert [outcome.failure.kind for outcome in report.outcomes if outcome.failure] == ["user"] * len(
        started.kind.ranks
    )
    assert started.call(read).ok


def test_the_words_name_every_rank_once(started: Started) -> None:
    report = started.call(raise_value_error, started.kind.ranks)
    error = worker_error(tuple(outcome.failure.fault for outcome in report.outcomes if outcome.failure))
    which = "rank 0" if started.kind.num_workers == 1 else "ranks 0, 1"
    assert f"on {which}, node" in str(error)
    assert isinstance(error, ValueError)


class Locked(Exception):
    """What it holds cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Unknown(Exception):
    """It says itself how it is pickled, and that fails."""

    def __reduce__(self) -> Any:
        return threading.Lock, ()


def raise_locked(replica: CountingReplica) -> None:
    raise Locked


def raise_unknown(replica: CountingReplica) -> None:
    raise Unknown("unknown")


def test_of_an_exception_travels_what_can(started: Started) -> None:
    for rank, outcome in enumerate(started.call(raise_locked).outcomes):
        error = outcome.failure.fault.error
        assert isinstance(error, Locked)
        assert str(error) == "locked"
        assert isinstance(error.lock, str) == (rank in started.kind.remote_ranks)


def test_an_exception_that_cannot_travel_is_told_in_words(started: Started) -> None:
    report = started.call(raise_unknown)
    for rank, outcome in enumerate(report.outcomes):
        assert outcome.failure.fault.type_name == "Unknown"
        assert outcome.failure.fault.message == "unknown"
        assert (outcome.failure.fault.error is None) == (rank in started.kind.remote_ranks)


def fail_to_connect(replica: CountingReplica) -> None:
    raise ConnectionResetError("lost a peer")


def test_a_lost_connection_is_told_from_the_users_own_errors_by_whoever_has_peers(started: Started) -> None:
    kinds = {outcome.failure.kind for outcome in started.call(fail_to_connect).outcomes if outcome.failure}
    assert kinds == {"disconnected" if started.kind.num_workers > 1 else "user"}


# -------------------------------------------------------------------------------------------- beside


def wait_for(replica: CountingReplica, path: Path) -> str:
    """Keeps the worker busy until a file is there."""
    while not path.exists():
        time.sleep(0.01)
    return "waited"


def fetch(replica: CountingReplica, token: int) -> float:
    return replica.fetch(token)


@pytest.fixture(scope="module", params=["remote", "local", "mixed"])
def large(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[Started]:
    kind = KINDS[request.param]
    large_replica = partial(CountingReplica, is_large=True)
    group = WorkerGroup(
        spec(make_replica=large_replica, use_local=kind.use_local, initialization_hook=None), kind.num_workers
    )
    yield Started(kind, group, group.start())
    group.kill(10)


def test_a_large_state_waits_under_a_token_and_is_fetched_while_its_worker_is_busy(
    large: Started, tmp_path: Path
) -> None:
    captures = large.call(add, 2.0, capture=True).captures
    assert captures[0].shared_state is None
    assert all(capture.token is None for capture in captures[1:])
    busy: Any = None  # with a local worker: its call runs when it is gathered
    if not large.kind.use_local:
        busy = large.group.submit(0, WorkerProcess.on_replica, wait_for, False, None, tmp_path / "done")
    assert large.group.fetch(0, fetch, captures[0].token).result(120.0) == 2.0
    (tmp_path / "done").touch()
    if busy is not None:
        assert ray.get(busy).value == "waited"


def part(replica: CountingReplica, token: int) -> Any:
    return np.full(200_000, token)  # too large to travel with an answer


def test_parts_come_to_the_node_of_the_driver_if_there_is_no_other(large: Started) -> None:
    tokens = [7 + rank for rank in large.kind.ranks]
    parts = large.group.fetch_parts(part, tokens).result(120.0)
    assert [int(value[0]) for value in parts.values] == tokens


def test_a_part_goes_to_a_partner_on_another_node_instead_of_the_driver(
    large: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, tokens = large.group, [7 + rank for rank in large.kind.ranks]
    nodes = [group.infos[0].node_id if large.kind.use_local else "first", "second"][: len(group)]
    infos = [replace(info, node_id=node) for info, node in zip(group.infos, nodes, strict=True)]
    monkeypatch.setattr(group, "infos", infos)
    parts = group.fetch_parts(part, tokens).result(120.0)
    assert [int(parts[rank][0]) for rank in large.kind.ranks] == tokens
    assert [value is None for value in parts.values] == [not large.kind.use_local] * len(group)
    if not large.kind.use_local:
        assert [[place.node_id for place in places] for places in parts.places] == [nodes, nodes[::-1]]
        copies = [parts.best_on({nodes[1 - rank]})[rank] for rank in large.kind.ranks]
        assert [int(copy[0]) for copy in copies] == tokens


def test_a_transfer_that_is_not_there_in_time_says_so_and_can_be_asked_again(large: Started, tmp_path: Path) -> None:
    if large.kind.use_local:  # there it never travels
        (tmp_path / "done").touch()
    transfer = large.group.beside(0, wait_for, tmp_path / "done")
    if not large.kind.use_local:
        with pytest.raises(TimeoutError):
            transfer.result(0.0)
    (tmp_path / "done").touch()
    assert transfer.result(None) == "waited"


def test_signs_of_life_and_interrupts_do_not_wait_for_what_a_worker_does_beside_its_work(
    large: Started, tmp_path: Path
) -> None:
    if large.kind.use_local:  # there it is done at once
        (tmp_path / "go").touch()
    transfer = large.group.beside(0, wait_for, tmp_path / "go")
    assert set(large.group.ask_workers(WorkerProcess.describe, ranks=[0], timeout_s=120)) == {0}
    assert set(large.group.ask_workers(WorkerProcess.interrupt, ranks=[0], timeout_s=120)) == {0}
    (tmp_path / "go").touch()
    transfer.result(120.0)


def test_a_released_state_cannot_be_fetched_any_more(large: Started) -> None:
    token = large.call(add, 1.0, capture=True).captures[0].token
    large.call(read, capture=True, landed=token)
    with pytest.raises(KeyError):
        large.group.fetch(0, fetch, token).result(None)


def test_a_worker_that_sends_its_state_for_long_gives_signs_of_life_and_can_be_interrupted(
    large: Started, tmp_path: Path
) -> None:
    if large.kind.use_local:  # there it never travels
        (tmp_path / "done").touch()
    sending = large.group.fetch(0, wait_for, tmp_path / "done")
    assert 0 in large.group.ask_beside(read, ranks=[0], timeout_s=120.0)
    methods: tuple[Any, ...] = (WorkerProcess.describe, WorkerProcess.stack, WorkerProcess.interrupt)
    for method in methods:
        assert 0 in large.group.ask_workers(method, ranks=[0], timeout_s=120.0)
    (tmp_path / "done").touch()
    assert sending.result(None) == "waited"


# -------------------------------------------------------------------------------------------- the end


@dataclass
class FilingConnection(NullConnection):
    """Notes in a file when it leaves."""

    path: Path

    def leave(self) -> None:
        note(self.path, "leave")


class FilingReplica(CountingReplica):
    """Notes in a file when it is shut down, and may fail to."""

    def __init__(self, path: Path, fails: bool, world: World) -> None:
        super().__init__(world)
        self.path, self.fails = path, fails

    def shutdown(self) -> None:
        note(self.path, "shutdown")
        if self.fails:
            raise OSError("the disk is full")


def note(path: Path, what: str) -> None:
    with path.open("a") as file:
        file.write(f"{os.getpid()} {what}\n")


@pytest.mark.parametrize("fails", [False, True])
def test_at_the_end_each_replica_shuts_down_and_then_leaves_the_group(
    fails: bool, ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["mixed"]
    monkeypatch.setattr(engine_group, "_CLOSE_TIMEOUT_S", 120.0)
    diary = tmp_path / "diary"
    make_replica = partial(FilingReplica, diary, fails)
    group = WorkerGroup(
        spec(connection=FilingConnection(diary), make_replica=make_replica, use_local=kind.use_local),
        kind.num_workers,
    )
    assert group.start().ok
    pids = [info.pid for info in group.infos]
    group.stop(10)
    group.stop(10)
    lines = diary.read_text().splitlines()
    for pid in pids:
        noted = [line.partition(" ")[2] for line in lines if line.startswith(f"{pid} ")]
        assert noted[:2] == ["shutdown", "leave"]
        assert "shutdown" not in noted[1:]
