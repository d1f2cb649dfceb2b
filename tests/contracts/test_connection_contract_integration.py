"""What holds for every connection: it connects any number of processes, leaves no trace, and knows a broken group.

Covers `raysgd.core.connections.tensorflow` and `raysgd.core.connections.torch`: all connections keep one contract.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import ray

from raysgd.core.cluster.resources import Resources
from raysgd.core.connections._gloo import OpenSocket, open_sockets, opened_since
from raysgd.core.connections.horovod import HorovodConnection
from raysgd.core.connections.mesh.meeting import ConnectFailed
from raysgd.core.connections.mesh.mesh import Mesh, MeshBroken
from raysgd.core.connections.tensorflow import TensorFlowConnection
from raysgd.core.connections.torch import TorchConnection
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.shared.interface import Connection, GroupSpec
from raysgd.core.engine.shared.types import Rendezvous, World
from raysgd.core.engine.worker import WorkerProcess
from tests.helpers.fakes import CountingReplica, NullConnection, meeting, raise_from_compiled_code
from tests.helpers.processes import wait_until
from tests.helpers.run_if import RunIf

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("workers_have_tensorflow")]

NUM_PROCESSES = 3
IMPATIENCE_S = 4.0


@dataclass(frozen=True)
class Case:
    """A connection, and how its framework adds numbers up over all ranks."""

    connection: Connection
    all_sum: Callable[[float], float]


def torch_sum(number: float) -> float:
    import torch

    tensor = torch.tensor([number])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(tensor)
    return tensor.item()


def horovod_sum(number: float) -> float:
    import horovod.torch as hvd
    import torch

    return hvd.allreduce(torch.tensor([number]), name="sum", op=hvd.Sum).item()


def mesh_sum(number: float) -> float:
    from raysgd.core.connections.tensorflow import group_of

    place = json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": [""]}, "task": {"index": 0}}'))
    numbers = np.array([number])
    group_of(World(place["task"]["index"], len(place["cluster"]["worker"]))).add_up(numbers)
    return float(numbers[0])


CASES = {
    "gloo": Case(TorchConnection("gloo", timeout_s=120), torch_sum),
    "horovod": Case(HorovodConnection(timeout_s=120), horovod_sum),
    "tensorflow": Case(TensorFlowConnection(timeout_s=120), mesh_sum),
}


IS_INSTALLED = RunIf(modules=["horovod"])
WITHOUT_HOROVOD = pytest.mark.parametrize(
    "case", ["gloo", pytest.param("horovod", marks=[pytest.mark.soak, IS_INSTALLED]), "tensorflow"], indirect=True
)
"""`tests/torch/test_horovod_integration.py` shows these of Horovod."""


@pytest.fixture(params=["gloo", pytest.param("horovod", marks=IS_INSTALLED), "tensorflow"])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


class Rig:
    """Three processes in which a connection can be tried by hand."""

    def __init__(self) -> None:
        self.group = WorkerGroup(
            GroupSpec(NullConnection(), CountingReplica, Resources(num_cpus=0.5), captures=False), NUM_PROCESSES
        )
        assert self.group.start().ok

    def on(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Starts `function(replica, *args)` in one process; `ray.get` has the answer."""
        return self.group.submit(rank, WorkerProcess.on_replica, function, False, None, *args)

    def on_each(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        answers = ray.get([self.on(rank, function, *args) for rank in range(num_ranks)])
        return [answer.value for answer in answers]

    def join(self, case: Case, num_ranks: int) -> list[float]:
        """Connects the first processes to each other; the sums show that they are."""
        return self._begin(case, num_ranks, join_and_sum)

    def join_silently(self, case: Case, num_ranks: int) -> None:
        """Connects them, and lets none wait for what another one has to send."""
        self._begin(case, num_ranks, join)

    def _begin(self, case: Case, num_ranks: int, begin: Callable[..., Any]) -> list[Any]:
        self.on_each(num_ranks, load, case.connection)
        place = self.open_endpoints(case, num_ranks)
        worlds = [World(rank, num_ranks, rank, num_ranks) for rank in range(num_ranks)]
        return [
            answer.value for answer in ray.get([self.on(world.rank, begin, case, place, world) for world in worlds])
        ]

    def open_endpoints(self, case: Case, num_ranks: int) -> Rendezvous:
        """Where the first processes listen."""
        calls = [self.on(rank, open_endpoint, case.connection) for rank in range(num_ranks)]
        return meeting(*(answer.value for answer in ray.get(calls)))

    def leave(self, num_ranks: int) -> None:
        self.on_each(num_ranks, leave)


class ImpatientTorch(TorchConnection):
    """Its collectives do not wait long for a peer. To form a group may take long."""

    @property
    def _form_timeout_s(self) -> float:
        return 120.0


class ImpatientTensorFlow(TensorFlowConnection):
    """The same."""

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        super().join(rendezvous, world, even_alone=even_alone)
        for lane in self._parts:
            assert isinstance(lane, Mesh)
            lane.timeout_s = IMPATIENCE_S


def impatient(case: Case) -> Case:
    """One whose collectives do not wait long for a peer."""
    if isinstance(case.connection, TorchConnection):
        return replace(case, connection=ImpatientTorch("gloo", timeout_s=IMPATIENCE_S))
    if isinstance(case.connection, TensorFlowConnection):
        return replace(case, connection=ImpatientTensorFlow(timeout_s=120))
    return replace(case, connection=HorovodConnection(timeout_s=IMPATIENCE_S))


def load(replica: Any, connection: Connection) -> None:
    connection.load()


def open_endpoint(replica: Any, connection: Connection) -> int:
    replica.variables, replica.sockets = dict(os.environ), open_sockets()
    replica.connection = connection
    return connection.open_endpoint("127.0.0.1")


def join(replica: Any, case: Case, rendezvous: Rendezvous, world: World) -> None:
    replica.connection.join(rendezvous, world)


def join_and_sum(replica: Any, case: Case, rendezvous: Rendezvous, world: World) -> float:
    join(replica, case, rendezvous, world)
    return case.all_sum(10.0**world.rank)


def leave(replica: Any) -> None:
    replica.connection.leave()


def where_it_listens(replica: Any) -> list[str]:
    return opened_since(replica.sockets)[1]


def changed_variables(replica: Any) -> list[str]:
    before, after = replica.variables, dict(os.environ)
    return sorted(
        name
        for name in {*before, *after}
        if before.get(name) != after.get(name) and not name.startswith(("RAY_", "TORCHINDUCTOR_", "KMP_"))
    )


def errors_of_a_broken_group(replica: Any, case: Case, num_tries: int) -> list[tuple[bool, str]]:
    """What a survivor sees when it goes on as if nothing had happened."""
    found = []
    for _ in range(1_000_000):
        try:
            case.all_sum(1.0)
        except Exception as error:
            found.append((replica.connection.is_connection_error(error), f"{type(error).__name__}: {error}"))
            if len(found) == num_tries:
                return found
            time.sleep(0.2)  # Horovod locks up for good when it is asked again in the very moment in which it gives up
    raise AssertionError("nothing broke")


def end_process(replica: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def rig(ray_cluster: None) -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.group.kill(10)


def test_processes_form_one_group_after_the_other_in_any_size_and_part_without_a_trace(rig: Rig, case: Case) -> None:
    for num_ranks in (1, 3, 2, 3):
        assert rig.join(case, num_ranks) == [float("1" * num_ranks)] * num_ranks
        listening = rig.on_each(num_ranks, where_it_listens)
        rig.leave(num_ranks)
        assert rig.on_each(num_ranks, changed_variables) == [[]] * num_ranks
        assert {address.partition(":")[0] for addresses in listening for address in addresses} <= {"127.0.0.1"}
    rig.leave(3)  # a second time, which is harmless


def test_leaving_without_having_joined_is_harmless(case: Case) -> None:
    replace(case.connection).leave()  # type: ignore[type-var]


def test_opening_a_meeting_point_that_nobody_comes_to_is_harmless(case: Case) -> None:
    connection: Connection = replace(case.connection)  # type: ignore[type-var]
    assert connection.open_endpoint("127.0.0.1") > 0
    connection.leave()


@WITHOUT_HOROVOD
def test_survivors_know_a_broken_connection_however_often_they_try(case: Case, ray_cluster: None) -> None:
    rig = Rig()
    try:
        rig.join_silently(impatient(case), NUM_PROCESSES)
        survivors = [rig.on(rank, errors_of_a_broken_group, case, 3) for rank in (0, 1)]
        rig.on(2, end_process)
        for answer in ray.get(survivors, timeout=120):
            assert [known for known, _ in answer.value] == [True] * 3, answer.value
        rig.leave(2)
        assert rig.on_each(2, changed_variables) == [[], []]
        assert rig.join(case, 2) == [11.0, 11.0]
    finally:
        rig.group.kill(10)


@WITHOUT_HOROVOD
def test_a_peer_that_never_comes_counts_as_a_broken_connection(rig: Rig, case: Case) -> None:
    case = impatient(case)
    rig.join_silently(case, 2)
    lonely = rig.on(0, errors_of_a_broken_group, case, 1)
    [(known, text)] = ray.get(lonely, timeout=120).value
    rig.leave(2)
    assert known, text


# -------------------------------------------------------------------------------------------- TensorFlow


def test_a_process_is_in_one_group_of_replicas_at_a_time() -> None:
    pair = [TensorFlowConnection(timeout_s=120) for _ in range(2)]
    place = meeting(*(connection.open_endpoint("127.0.0.1") for connection in pair))
    joining = [
        threading.Thread(target=connection.join, args=(place, World(rank, 2))) for rank, connection in enumerate(pair)
    ]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join(120)
    config = json.loads(os.environ["TF_CONFIG"])
    workers, last = config["cluster"]["worker"], config["task"]["index"]
    assert all(0 < int(worker.removeprefix("127.0.0.1:")) < 2**16 for worker in workers), workers
    third = TensorFlowConnection(timeout_s=120)
    with pytest.raises(RuntimeError, match="shut that trainer down first"):
        third.join(meeting(third.open_endpoint("127.0.0.1"), 1), World(0, 2))
    for connection in (third, pair[last], pair[1 - last]):  # each puts back what it found
        connection.leave()
    assert "TF_CONFIG" not in os.environ


# -------------------------------------------------------------------------------------------- torch


@pytest.fixture
def own_group() -> Iterator[None]:
    """A process group of this process that belongs to the user."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def torch_is_connected() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def test_a_process_group_of_the_user_is_refused_with_advice_and_left_alone(own_group: None) -> None:
    connection = TorchConnection()
    port = connection.open_endpoint("127.0.0.1")
    with pytest.raises(RuntimeError, match=r"already.*destroy the other group or shut the other trainer down"):
        connection.join(meeting(port, 1), World(0, 2))
    connection.leave()
    assert torch_is_connected()


def test_a_single_rank_neither_needs_nor_ends_a_process_group(own_group: None) -> None:
    connection = TorchConnection()
    connection.join(meeting(connection.open_endpoint("127.0.0.1")), World(0, 1))
    connection.leave()
    assert torch_is_connected()


def test_a_single_rank_forms_a_group_where_it_is_asked_to() -> None:
    connection = TorchConnection(timeout_s=120)
    for _ in range(2):
        connection.join(meeting(connection.open_endpoint("127.0.0.1")), World(0, 1), even_alone=True)
        assert torch_is_connected()
        connection.leave()
        assert not torch_is_connected()


def test_a_second_group_waits_as_long_as_the_first() -> None:
    import torch

    connection = TorchConnection(timeout_s=77)
    connection.join(meeting(connection.open_endpoint("127.0.0.1")), World(0, 1), even_alone=True)
    gloo = connection.new_group_beside()._get_backend(torch.device("cpu"))
    assert gloo.options._timeout.total_seconds() == 77
    connection.leave()


def test_waiting_for_others_to_join_can_be_interrupted_from_another_thread() -> None:
    connection = TorchConnection("gloo", timeout_s=600)
    place = meeting(connection.open_endpoint("127.0.0.1"), 1)
    errors: list[Exception] = []

    def join() -> None:
        try:
            connection.join(place, World(0, 2))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    connection.interrupt()
    thread.join(60)
    connection.leave()
    assert [connection.is_connection_error(error) for error in errors] == [True]
    assert "to join the group" in str(errors[0])


def test_a_group_that_could_not_be_formed_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    connection = TorchConnection("gloo", timeout_s=0.5)  # nobody else comes
    with pytest.raises(ConnectionError) as caught:
        connection.join(meeting(connection.open_endpoint("127.0.0.1"), 1), World(0, 2))
    assert connection.is_connection_error(caught.value)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == "lo"
    connection.leave()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert not torch_is_connected()


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_variables_that_the_user_set_are_the_users(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_BLOCKING_WAIT": "0"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    connection = TorchConnection(transport)
    connection._choose_interface(meeting(1))
    assert {name: os.environ[name] for name in chosen} == chosen
    connection.leave()
    assert {name: os.environ[name] for name in chosen} == chosen


def test_variables_of_nccl_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_BLOCKING_WAIT", raising=False)
    connection = TorchConnection("nccl")
    connection._choose_interface(meeting(1, host="10.0.0.1", on_one_node=False))
    assert os.environ["NCCL_BLOCKING_WAIT"] == "1"
    connection.leave()
    assert "NCCL_BLOCKING_WAIT" not in os.environ


class SlowAbort:
    """What ends NCCL's kernels, which takes long."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_ended = 0

    def __call__(self) -> None:
        assert self.may_end.wait(60)
        self.num_ended += 1


def test_an_interrupt_does_not_wait_until_nccl_is_aborted_but_leaving_does(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = SlowAbort()
    monkeypatch.setattr("raysgd.core.connections.torch._abort_process_group", abort)
    connection = TorchConnection("nccl")
    connection._has_joined = True
    connection.interrupt()
    connection.interrupt()
    threading.Timer(0.2, abort.may_end.set).start()
    connection.leave()
    assert abort.num_ended == 1


def test_nobody_waits_for_ever_until_nccl_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = SlowAbort()
    monkeypatch.setattr("raysgd.core.connections.torch._abort_process_group", abort)
    monkeypatch.setattr("raysgd.core.connections.torch._ABORT_S", 0.05)
    connection = TorchConnection("nccl")
    connection._has_joined = True
    connection.interrupt()
    with pytest.raises(ConnectFailed, match="NCCL did not end its connections") as raised:
        connection.leave()
    assert connection.is_connection_error(raised.value), "so the worker is replaced"
    abort.may_end.set()
    connection.leave()
    assert abort.num_ended == 1


def real_errors() -> Iterator[Exception]:
    import torch

    weight = torch.ones(1, requires_grad=True)
    loss = (weight * 2).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    mistakes: list[Callable[[], Any]] = [
        lambda: torch.zeros(2, 3) @ torch.zeros(2, 3),
        lambda: loss.backward(),  # type: ignore[no-untyped-call]
        lambda: torch.nn.Linear(2, 2).load_state_dict({}),
        lambda: torch.zeros(2, device="no such device"),
        lambda: weight.add_(1),
        lambda: torch.load("/no/such/file"),
        lambda: os.environ["NO_SUCH_VARIABLE"],
    ]
    for mistake in mistakes:
        try:
            mistake()
        except Exception as error:
            yield error


def test_ordinary_mistakes_are_no_broken_connections() -> None:
    errors = list(real_errors())
    assert len(errors) == 7
    assert [error for error in errors if TorchConnection().is_connection_error(error)] == []


def caught(function: Callable[..., Any], *args: Any) -> Exception:
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:23199."


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (RuntimeError, CLOSED, True),
        (RuntimeError, "Read error [127.0.0.1]:433: Connection reset by peer.", True),
        (RuntimeError, "Timed out waiting 4000ms for recv operation to complete", True),
        (RuntimeError, "writev [10.0.0.1]:1: Broken pipe", True),
        (RuntimeError, "NCCL error: remote process exited or there was a network error", True),
        (RuntimeError, "CUDA out of memory. Tried to allocate 2.00 GiB", False),
        (RuntimeError, "DataLoader worker (pid 7) exited unexpectedly with exit code 1", False),
        (RuntimeError, "mat1 and mat2 shapes cannot be multiplied", False),
        (ValueError, "connection refused by the database", False),
        (KeyError, "gloo/transport", False),
        (TimeoutError, "the download timed out waiting", False),
    ],
)
def test_a_broken_connection_is_known_by_its_words_in_a_runtime_error_of_pytorchs(
    kind: type[Exception], text: str, expected: bool
) -> None:
    assert TorchConnection().is_connection_error(caught(raise_from_compiled_code, kind, text)) is expected


def raise_own(text: str, cause: Exception | None = None) -> None:
    raise RuntimeError(text) from cause


def raise_in_the_end(text: str) -> None:
    try:
        raise_from_compiled_code(RuntimeError, text)
    finally:
        raise RuntimeError(f"while giving up: {text}")


def test_an_error_that_the_users_code_raises_is_no_broken_connection_whatever_it_says() -> None:
    for text in (CLOSED, "database: connection refused", "broken pipe"):
        assert not TorchConnection().is_connection_error(caught(raise_own, text))
    refused = caught(raise_from_compiled_code, ConnectionRefusedError, "connection refused")
    assert not TorchConnection().is_connection_error(caught(raise_own, "database: connection refused", refused))


def test_an_error_that_the_users_code_raises_in_the_process_of_a_loader_is_no_broken_connection() -> None:
    from torch._utils import ExceptionWrapper

    try:
        raise_own("database: connection refused")
    except RuntimeError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    error = caught(wrapped.reraise)  # type: ignore[no-untyped-call]
    assert "connection refused" in str(error)
    assert not TorchConnection().is_connection_error(error)


def test_a_broken_connection_that_the_users_code_puts_into_other_words_is_still_one() -> None:
    broken = caught(raise_from_compiled_code, RuntimeError, CLOSED)
    assert TorchConnection().is_connection_error(caught(raise_own, f"in the epoch: {CLOSED}", broken))
    assert TorchConnection().is_connection_error(caught(raise_in_the_end, CLOSED))
    assert not TorchConnection().is_connection_error(caught(raise_own, "in the epoch", broken))


@pytest.mark.parametrize("name", ["DistBackendError", "DistNetworkError", "DistStoreError"])
def test_errors_of_the_distributed_package_itself_are_broken_connections(name: str) -> None:
    import torch.distributed as dist

    assert TorchConnection().is_connection_error(getattr(dist, name)("whatever it says"))


def found_of_gloo(connection: Any) -> list[OpenSocket]:
    connection._gloo.look()
    assert connection._gloo.found is not None
    return list(connection._gloo.found)


def numbers_found(replica: Any, transport: str) -> tuple[int, int]:
    connection = replica.connection
    before, connection.transport = len(found_of_gloo(connection)), transport
    connection.new_group_beside()
    connection.transport = "gloo"
    return before, len(found_of_gloo(connection))


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_the_connections_of_each_group_are_found_so_that_they_can_be_cut(rig: Rig, transport: str) -> None:
    rig.join_silently(CASES["gloo"], 3)
    assert rig.on_each(3, numbers_found, transport) == [(2, 4)] * 3
    rig.leave(3)


def fail_to_join(replica: Any, rendezvous: Rendezvous, world: World) -> None:
    """Rank 0 loses the others while PyTorch forms the group, rank 1 just before."""
    import torch.distributed as dist

    from raysgd.core.connections.mesh.store import BoardStore

    def lose(*_: Any, **__: Any) -> None:
        raise MeshBroken("rank 2 is gone")

    owner, name = (BoardStore, "set") if world.rank == 0 else (dist, "init_process_group")
    original = getattr(owner, name)
    setattr(owner, name, lose)
    with suppress(Exception):
        replica.connection.join(rendezvous, world)
    setattr(owner, name, original)


def test_ranks_that_failed_to_form_a_group_at_different_moments_form_the_next_one(ray_cluster: None) -> None:
    rig, case = Rig(), replace(CASES["gloo"], connection=TorchConnection("gloo", timeout_s=10))
    try:
        rig.on_each(2, load, case.connection)
        place = rig.open_endpoints(case, 2)
        ray.get([rig.on(rank, fail_to_join, place, World(rank, 2, rank, 2)) for rank in range(2)])
        rig.leave(2)
        assert rig.join(case, 2) == [11.0, 11.0]
    finally:
        rig.group.kill(10)


def knows_of_a_broken_group(replica: Any, dies: bool) -> bool:
    import torch

    connection = replica.connection
    if dies:  # the others know where it listens by then, and wait for it to come to them
        connection._store.get = lambda key: end_process(replica)
    try:
        connection.new_group_beside(form_timeout_s=2.0).allreduce([torch.zeros(1)]).wait()
    except Exception as error:
        return bool(connection.is_connection_error(error))
    return False


def test_a_rank_that_dies_while_a_second_group_forms_does_not_hold_up_the_others(ray_cluster: None) -> None:
    rig = Rig()
    try:
        rig.join_silently(replace(CASES["gloo"], connection=TorchConnection("gloo", timeout_s=600)), NUM_PROCESSES)
        survivors = [rig.on(rank, knows_of_a_broken_group, False) for rank in (0, 1)]
        rig.on(2, knows_of_a_broken_group, True)
        assert [answer.value for answer in ray.get(survivors, timeout=60)] == [True, True]
    finally:
        rig.group.kill(10)


# -------------------------------------------------------------------------------------------- leaving gloo later


def num_open(replica: Any) -> int:
    """How many of the connections that gloo had at first are there still."""
    return sum(each.is_open for each in replica.of_gloo)


def lost_in_mesh() -> BaseException:
    return MeshBroken("rank 1 is gone")


def lost_in_mesh_in_words_of_user_code() -> BaseException:
    error = ValueError("in the epoch")
    error.__cause__ = lost_in_mesh()
    return error


def lost_in_gloo() -> BaseException:
    return RuntimeError(CLOSED)


def give_up_and_leave(replica: Any, lost: Callable[[], BaseException]) -> tuple[int, bool]:
    """How many connections of gloo are left, and whether the process is in a group still, when it may join another."""
    connection, error = replica.connection, lost()
    replica.of_gloo = found_of_gloo(connection)
    connection.give_up(error)
    connection.leave_for_another()
    return num_open(replica), torch_is_connected()


@pytest.mark.parametrize(
    ("lost", "num_left"), [(lost_in_mesh, 2), (lost_in_mesh_in_words_of_user_code, 2), (lost_in_gloo, 0)]
)
def test_a_rank_that_fails_in_the_mesh_leaves_gloo_once_it_is_in_the_next_group(
    rig: Rig, lost: Callable[[], BaseException], num_left: int
) -> None:
    case = CASES["gloo"]
    rig.join_silently(case, 3)
    assert rig.on_each(3, give_up_and_leave, lost) == [(num_left, False)] * 3
    assert rig.join(case, 3) == [111.0] * 3, "one group after the other, while the former is still there"
    wait_until(lambda: rig.on_each(3, num_open) == [0] * 3)
    rig.leave(3)


def test_who_leaves_for_good_leaves_nothing_of_former_groups(rig: Rig) -> None:
    rig.join_silently(CASES["gloo"], 3)
    assert rig.on_each(3, give_up_and_leave, lost_in_mesh) == [(2, False)] * 3
    rig.leave(3)
    assert rig.on_each(3, num_open) == [0] * 3


def wait_for_rank_1(replica: Any) -> str:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.distributed.recv(torch.zeros(1), src=1)
    return "freed" if replica.connection.is_connection_error(caught.value) else str(caught.value)


def test_who_waits_in_gloo_for_a_rank_that_has_failed_in_the_mesh_is_freed_by_an_interrupt(rig: Rig) -> None:
    rig.join_silently(CASES["gloo"], 3)
    waiting = rig.on(0, wait_for_rank_1)
    assert ray.get(rig.on(1, give_up_and_leave, lost_in_mesh)).value == (2, False)
    ray.get(rig.group.submit(0, WorkerProcess.beside, interrupt_connection))
    assert ray.get(waiting, timeout=60).value == "freed"
    rig.leave(3)


def interrupt_connection(replica: Any) -> None:
    replica.connection.interrupt()


# -------------------------------------------------------------------------------------------- horovod


def horovod_place(replica: Any) -> tuple[int, ...]:
    import horovod.torch as hvd

    return hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


@IS_INSTALLED
def test_horovod_knows_which_ranks_share_a_node(rig: Rig) -> None:
    """One rank on the first of two nodes and two on the second, though all are in fact on the same."""
    case = CASES["horovod"]
    worlds = [World(0, 3, 0, 1, 0, 2), World(1, 3, 0, 2, 1, 2), World(2, 3, 1, 2, 1, 2)]
    rig.on_each(3, load, case.connection)
    place = replace(rig.open_endpoints(case, 3), on_one_node=False)
    calls = [rig.on(world.rank, join_and_sum, case, place, world) for world in worlds]
    assert [answer.value for answer in ray.get(calls)] == [111.0] * 3
    assert rig.on_each(3, horovod_place) == [(0, 1, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]
    rig.leave(3)
    assert rig.on_each(3, changed_variables) == [[]] * 3
