"""The connection of Horovod, as far as one process can tell; `tests/contracts` has what holds for every connection.

What its build was mended for is here, too: a start that fails must not end the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raysgd.core.connections.horovod import (
    HorovodConnection,
    crossings,
    first_of,
    import_horovod,
    tuning,
)
from raysgd.core.connections.mesh.meeting import ConnectFailed
from raysgd.core.engine.shared.types import World
from tests.helpers.fakes import meeting

HERE = "127.0.0.1"

# ------------------------------------------------------------------------------------------------ who is who


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(0, 0)], [(0, 1)]),
        ([(0, 0), (0, 1)], [(0, 1), (0, 1)]),
        ([(0, 0), (1, 0)], [(0, 2), (1, 2)]),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        # The second node has one worker more, which is alone in its row.
        ([(0, 0), (1, 0), (1, 1)], [(0, 2), (1, 2), (0, 1)]),
        # Of three nodes the middle one has only one worker.
        ([(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)], [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]),
    ],
)
def test_ranks_are_counted_across_the_nodes(places: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert crossings(places) == expected


@pytest.mark.parametrize(
    ("timeout_s", "timeout", "check"),
    [(1800.0, "1800", "60"), (100, "100", "25"), (3.2, "4", "1"), (0.1, "1", "1")],
)
def test_horovod_keeps_our_timeout_in_whole_seconds(timeout_s: float, timeout: str, check: str) -> None:
    assert tuning(timeout_s, None, {}) == {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": timeout,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": check,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": timeout,
    }


def test_what_the_user_tuned_is_left_alone() -> None:
    given = {"HOROVOD_GLOO_IFACE": "eth7", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}
    assert sorted(tuning(9, "lo", given)) == ["HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"]
    assert tuning(9, "lo", {})["HOROVOD_GLOO_IFACE"] == "lo"


# ------------------------------------------------------------------------------------------------ joining


def join_alone(connection: HorovodConnection) -> Any:
    connection.join(meeting(connection.open_endpoint(HERE)), World(0, 1))
    return import_horovod()


def test_a_single_rank_has_horovod_too_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "7")  # of somebody else, who started this process
    before = dict(os.environ)
    for _ in range(2):
        connection = HorovodConnection()
        hvd = join_alone(connection)
        assert (hvd.rank(), hvd.size(), hvd.local_size()) == (0, 1, 1)
        connection.leave()
        assert not hvd.is_initialized()
        assert dict(os.environ) == before


def test_a_horovod_of_the_user_is_refused_with_advice_and_left_alone() -> None:
    owner = HorovodConnection()
    hvd = join_alone(owner)
    try:
        connection = HorovodConnection()
        with pytest.raises(RuntimeError, match=r"already.*call `hvd.shutdown\(\)`, or shut the other trainer down"):
            join_alone(connection)
        connection.leave()
        assert hvd.is_initialized()
    finally:
        owner.leave()


@pytest.mark.parametrize("connection", [HorovodConnection(timeout_s=0.3), HorovodConnection(form_timeout_s=0.3)])
def test_a_rank_that_never_comes_ends_the_wait_with_an_error(connection: HorovodConnection) -> None:
    before = dict(os.environ)
    rendezvous = meeting(connection.open_endpoint(HERE), 1)
    with pytest.raises(ConnectFailed, match="another rank failed, or was too slow") as caught:
        connection.join(rendezvous, World(0, 2))
    assert connection.is_connection_error(caught.value)
    connection.leave()
    assert dict(os.environ) == before


def test_an_interruption_ends_the_wait_at_once() -> None:
    connection = HorovodConnection()
    rendezvous = meeting(connection.open_endpoint(HERE), 1)
    connection.interrupt()
    with pytest.raises(ConnectFailed, match="another rank failed, or was too slow") as caught:
        connection.join(rendezvous, World(0, 2))
    assert connection.is_connection_error(caught.value)
    connection.leave()


def test_a_meeting_point_that_is_gone_is_a_broken_connection() -> None:
    first, second = HorovodConnection(), HorovodConnection()
    rendezvous = meeting(*(connection.open_endpoint(HERE) for connection in (first, second)))
    first.leave()
    with pytest.raises(ConnectFailed, match=r"rank 1 could not connect to the others: .*refused"):
        second.join(rendezvous, World(1, 2))
    second.leave()


def test_each_node_takes_the_first_interface_that_it_has() -> None:
    assert first_of(["no-such", "lo"]) == "lo"
    with pytest.raises(ValueError, match=r"none of the network interfaces 'no-such'\. Available: .*'lo'"):
        first_of(["no-such"])


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Horovod has been shut down. This was caused by an exception on one of the ranks or", True),
        ("[/gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:32881", True),
        ("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation to complete", True),
        ("ncclAllReduce failed: unhandled system error", True),
        ("Mismatched allreduce tensor shapes: One rank sent a tensor of shape [2], but another", False),
        ("Mismatched data types: One rank had type float32, but another rank had type int64.", False),
        ("Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor", False),
        ("Process-set rank zero tried to broadcast a rank-zero tensor.", False),
        ("Broadcast is not supported with Join at this time.", False),
    ],
)
def test_a_broken_group_is_told_from_a_mistake_in_a_program(message: str, expected: bool) -> None:
    from horovod.common.exceptions import HorovodInternalError

    connection = HorovodConnection()
    assert connection.is_connection_error(HorovodInternalError(message)) is expected
    assert not connection.is_connection_error(RuntimeError(message))


def test_a_real_mistake_is_none_of_the_connection() -> None:
    import torch

    connection = HorovodConnection()
    hvd = join_alone(connection)
    try:
        for mistake in (
            lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)),
            lambda: hvd.allreduce(torch.ones(2, 2).t()),
            lambda: hvd.broadcast(torch.ones(2), root_rank=3),
        ):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                mistake()
            assert not connection.is_connection_error(caught.value), caught.value
    finally:
        connection.leave()


# ------------------------------------------------------------------------------------------------ without it


@pytest.fixture
def without_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which Horovod has not been imported yet."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)


def test_a_missing_horovod_is_reported_with_the_command(without_horovod: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"`backend=\"horovod\"` needs Horovod, which is not installed"
    ) as caught:
        HorovodConnection().load()
    assert "Run: python -m raysgd.horovod.install\n" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('undefined symbol: _ZN5torch')", r"fails to load \(OSError: undefined symbol: _ZN5torch\)"),
        ("import no_such_dependency", r"fails to load \(ModuleNotFoundError: No module named 'no_such_dependency'\)"),
        ("Average = 1", "was installed without support for PyTorch"),
    ],
)
def test_a_horovod_that_does_not_fit_is_not_called_missing(
    without_horovod: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "torch" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=rf"which {reason}\. Run: python -m raysgd\.horovod\.install"):
        import_horovod()


# ------------------------------------------------------------------------------------------------ a failed start

# Past our own meeting point, which sees to it that nearly always all ranks are there, Horovod looks for a second rank.
FAILED_STARTS = """
import threading

from raysgd.core.connections.horovod import HorovodConnection, import_horovod
from raysgd.core.engine.shared.types import Rendezvous, World


def start(connection, size):
    port = connection.open_endpoint("127.0.0.1")
    connection.join(Rendezvous((("127.0.0.1", port),), True), World(0, size, 0, size))


class Hasty(HorovodConnection):
    def _wait_for_all(self, rendezvous, world, port):
        return port, (0, 1)


class Interrupted(Hasty):
    def _wait_for_all(self, rendezvous, world, port):
        threading.Timer(0.3, self.interrupt).start()
        return super()._wait_for_all(rendezvous, world, port)


def fail(connection):
    try:
        start(connection, 2)
    except ConnectionError as error:
        assert connection.is_connection_error(error), error
        connection.leave()
        print("failed:", error)


fail(Hasty(timeout_s=1))
fail(Interrupted(timeout_s=1000))
last = HorovodConnection()
start(last, 1)
print("size:", import_horovod().size())
last.leave()
"""


@pytest.mark.integration
def test_a_start_that_fails_or_is_interrupted_can_be_tried_again() -> None:
    result = subprocess.run([sys.executable, "-c", FAILED_STARTS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *failures, size = result.stdout.splitlines()
    assert [line.startswith("failed: Horovod could not connect 2 ranks") for line in failures] == [True, True]
    assert size == "size: 1"
