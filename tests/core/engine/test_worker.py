"""What a worker does in its process, and what processes that it forks keep of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import nullcontext
from typing import Any

import pytest

from raysgd.core.engine.shared.types import Failure, HeldAtStep, Rendezvous, StateHandover, StepLacksMemory, World
from raysgd.core.engine.worker import WorkerProcess
from tests.helpers.fakes import CountingReplica, NullConnection, SteppingReplica, meeting, walk, walk_on

# -------------------------------------------------------------------------------------------- changing the group


class Diary(NullConnection):
    """Notes what is asked of it; `fails_with` is what the next join raises."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.fails_with: Exception | None = None

    def load(self) -> None:
        self.steps.append("load")

    def open_endpoint(self, host: str) -> int:
        self.steps.append(f"open {host}")
        return 7

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        self.steps.append(f"join {rendezvous.address}:{rendezvous.port} as {world.rank} of {world.size}, {even_alone}")
        if self.fails_with is not None:
            raise self.fails_with

    def interrupt(self) -> None:
        self.steps.append("interrupt")

    def leave(self) -> None:
        self.steps.append("leave")


def hosted(world: World | None = None) -> tuple[WorkerProcess, Diary]:
    """A worker in this process, which has joined a group if it is given a place in one."""
    diary = Diary()
    worker = WorkerProcess(diary, num_threads=None, is_remote=False)
    if world is not None:
        worker.build(world, MEETING, SteppingReplica, capture=False)
        diary.steps.clear()
    return worker, diary


MEETING = meeting(7, host="10.0.0.1", on_one_node=False)
SECOND = World(rank=1, size=3)


def test_a_worker_that_gets_ready_to_step_in_does_all_that_a_rank_does_in_a_group_of_its_own() -> None:
    worker, diary = hosted()
    ready = worker.prepare_standby(lambda: diary.steps.append("hook"), SECOND, SteppingReplica)
    assert diary.steps == ["hook", "load", "open 127.0.0.1", "join 127.0.0.1:7 as 0 of 1, True"]
    assert ready.value.pid == os.getpid()
    replica = worker.replica
    assert isinstance(replica, SteppingReplica)
    assert replica.is_primed


def test_a_worker_whose_replica_is_made_in_its_group_only_loads_before() -> None:
    worker, diary = hosted()
    ready = worker.prepare_standby(lambda: diary.steps.append("hook"), SECOND, None)
    assert (diary.steps, ready.value.pid) == (["hook", "load"], os.getpid())
    assert worker.open_endpoint("10.0.0.1") == 7
    assert worker.build(SECOND, MEETING, SteppingReplica, capture=False).value == "rank 1 of 3"


def test_a_replica_is_let_go_with_all_it_holds_before_another_one_is_made_in_its_process() -> None:
    worker, diary = hosted(SECOND)
    replica: Any = worker.replica
    replica.itself = replica  # what holds itself takes a collection
    gone = weakref.ref(replica)
    del replica
    worker.leave_group("10.0.0.1")
    worker.open_endpoint("10.0.0.1")

    def make(world: World) -> SteppingReplica:
        assert gone() is None
        return SteppingReplica(world)

    assert worker.build(World(rank=0, size=2), MEETING, make, capture=False).value == "rank 0 of 2"
    assert diary.steps[-1] == "join 10.0.0.1:7 as 0 of 2, False"


def test_a_hook_that_fails_there_is_told_like_any_other() -> None:
    worker, _ = hosted()

    def hook() -> None:
        raise FileNotFoundError("no data")

    failure: Any = worker.prepare_standby(hook, SECOND, SteppingReplica)
    assert (failure.kind, failure.fault.message) == ("user", "no data")


def test_a_survivor_leaves_its_group_before_it_says_how_far_it_is() -> None:
    worker, diary = hosted(SECOND)
    worker.on_replica(walk, False, None, 4)
    assert worker.leave_group("10.0.0.1") == (worker.replica.replica_progress(), 7)  # type: ignore[attr-defined]
    assert worker.leave_group("10.0.0.1")[0].position == 5
    assert diary.steps == ["leave", "open 10.0.0.1"] * 2, "it listens for the next group at once"


def test_whoever_joins_a_new_group_has_left_its_own_one_and_listens_before() -> None:
    worker, diary = hosted(SECOND)
    assert worker.open_endpoint("10.0.0.1") == 7
    facts = worker.regroup(World(rank=1, size=2), MEETING, StateHandover())
    assert diary.steps == ["leave", "open 10.0.0.1", "join 10.0.0.1:7 as 1 of 2, True"]
    assert facts == "rank 1 of 2"


def test_a_worker_that_was_in_no_group_yet_has_none_to_leave() -> None:
    worker, diary = hosted()
    worker.open_endpoint("127.0.0.1")
    assert diary.steps == ["open 127.0.0.1"]


def test_a_new_group_that_breaks_while_it_is_formed_is_a_lost_connection_and_frees_the_others() -> None:
    worker, diary = hosted(SECOND)
    diary.fails_with = ConnectionError("refused")
    failure = worker.regroup(World(rank=2, size=4), MEETING, StateHandover())
    assert (failure.kind, failure.fault.rank) == ("disconnected", 2)
    assert diary.steps[-1] == "interrupt"


def test_a_rank_that_lacks_memory_says_what_it_can_process_and_frees_the_others_and_what_the_error_refers_to() -> None:
    worker, diary = hosted(SECOND)
    error = MemoryError("full")

    def lack(replica: Any) -> None:
        try:
            raise error
        except MemoryError:
            raise StepLacksMemory(4) from error

    failure: Any = worker.on_replica(lack, False, None)
    assert (failure.kind, failure.largest_batch, failure.fault.type_name) == ("memory", 4, "MemoryError")
    assert diary.steps[-1] == "interrupt"
    assert error.__traceback__ is None


def test_it_answers_with_what_goes_wrong() -> None:
    worker, diary = hosted(SECOND)
    for error, kind in ((ConnectionError("refused"), "disconnected"), (ValueError("odd"), "user")):
        diary.fails_with = error
        found: Any = worker.regroup(World(rank=2, size=4), MEETING, StateHandover())
        assert isinstance(found, Failure)
        assert (found.kind, found.fault.rank, found.fault.message) == (kind, 2, str(error))


def test_a_held_call_is_not_over_and_its_answer_carries_no_state_of_its_own() -> None:
    worker, _ = hosted(SECOND)
    replica = worker.replica
    assert isinstance(replica, SteppingReplica)
    replica.holds_at = 2
    answer = worker.on_replica(walk, True, None, 4)
    assert isinstance(answer.value, HeldAtStep)
    assert answer.capture is None
    replica.holds_at = None
    assert worker.on_replica(walk_on, True, None, 4).capture is not None


def test_a_worker_tells_from_another_thread_where_it_is() -> None:
    worker, _ = hosted()
    assert worker.stack() == "  no call was made yet\n"
    worker, _ = hosted(SECOND)
    is_there, may_go = threading.Event(), threading.Event()

    def stay_a_while(replica: SteppingReplica) -> None:
        is_there.set()
        may_go.wait(60)

    thread = threading.Thread(target=worker.on_replica, args=(stay_a_while, False, None))
    thread.start()
    assert is_there.wait(60)
    while "in stay_a_while\n    may_go.wait(60)" not in (found := worker.stack()):
        time.sleep(0.001)  # it has said that it is there, and goes on to the next line
    may_go.set()
    thread.join()
    assert found.splitlines()[0].endswith("in stay_a_while"), "what is above it is nobody's business but ours"
    assert worker.stack() == "  no call is running\n"


def test_beside_its_work_a_worker_answers_until_it_is_closed() -> None:
    worker, _ = hosted(SECOND)
    assert worker.beside(lambda replica, text: f"{text} {replica.world.rank}", "rank") == "rank 1"
    worker.close()
    assert worker.beside(lambda replica: replica.world.rank) is None


def interrupt(replica: CountingReplica) -> None:
    raise KeyboardInterrupt("from the user's own code")


def test_an_interrupt_is_the_users_code_in_a_process_of_its_own_and_the_user_in_the_driver() -> None:
    for is_remote in (True, False):
        process = WorkerProcess(NullConnection(), num_threads=None, is_remote=is_remote)
        process.build(World(0, 1), meeting(1), CountingReplica, capture=False)
        with nullcontext() if is_remote else pytest.raises(KeyboardInterrupt):
            failure: Any = process.on_replica(interrupt, False, None)
            assert (failure.kind, failure.fault.type_name) == ("user", "KeyboardInterrupt")
            assert "raise KeyboardInterrupt" in failure.fault.location


PROGRAM = """
import os, socket, sys
from raysgd.core.engine.worker import let_go_of_ray

ends = []
for name in ("raylet", "other"):
    place = os.path.join(sys.argv[1], name)
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    client = socket.socket(socket.AF_UNIX)
    client.connect(place)
    ends.append((server.accept()[0], client))
let_go_of_ray()
forked_and_ready, ready = os.pipe()
ends_with_this, open_until_then = os.pipe()
if not os.fork():
    os.close(open_until_then)
    os.write(ready, b"1")
    os.read(ends_with_this, 1)
    os._exit(0)
os.read(forked_and_ready, 1)
for taken, client in ends:
    client.close()
    taken.settimeout(0.2)
    try:
        print("ended" if taken.recv(1) == b"" else "?")
    except TimeoutError:
        print("open")
"""


def test_a_forked_process_keeps_no_connection_to_ray_and_all_others() -> None:
    with tempfile.TemporaryDirectory() as folder:  # names of sockets have to be short
        done = subprocess.run([sys.executable, "-c", PROGRAM, folder], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["ended", "open"], "")
