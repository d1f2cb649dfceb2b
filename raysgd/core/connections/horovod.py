"""Connects workers with Horovod over gloo, without `mpirun`.

Horovod's processes find each other through a rendezvous server on rank 0. The ranks start Horovod only once all of them
have met at their endpoints.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.core.connections._compiler import defer_compiler
from raysgd.core.connections.mesh.board import Board, neighbors
from raysgd.core.connections.mesh.meeting import Address, ConnectFailed, ListeningConnection, listen_at
from raysgd.core.connections.mesh.mesh import MeshBroken
from raysgd.core.engine.shared.types import Rendezvous, World
from raysgd.core.memory import keep_freed_memory

INSTALL_COMMAND = "python -m raysgd.horovod.install"

_REQUEST_TIMEOUT_S = 60
# Longest interval, in seconds, at which Horovod checks for stalled collectives. It equals Horovod's default.
_LONGEST_STALL_WARNING_S = 60

# Lower-case phrases in Horovod's error messages for ranks that disagree about a collective. Such an error is a bug in
# the user's program. Any other error in a collective means that the group is broken.
_MISTAKES = ("mismatched ", "with the same name as another tensor", "rank zero tried to ", "not supported with join")


@dataclass
class HorovodConnection(ListeningConnection):
    """Initializes Horovod over all ranks, even for a single rank, so that `hvd.rank()` works in user code.

    The connection sets environment variables that Horovod reads. If the user has set a variable for a timeout or a
    network interface, that variable stays unchanged.

    Attributes:
        timeout_s: How long a collective may wait for other ranks before it raises, rounded up to whole seconds. Horovod
            checks for late ranks at intervals of a quarter of the timeout, but of at least 1 s and at most 60 s. It may
            therefore raise late, by up to three of these intervals.
        form_timeout_s: How long each rank waits until all ranks are ready to initialize Horovod. `timeout_s` is the
            upper limit.
        interfaces: Names of allowed network interfaces. Each node uses the first interface in the list that exists
            there. If empty, each node uses the interface that leads to rank 0.
    """

    interfaces: tuple[str, ...] = ()

    def _forget_group(self) -> None:
        super()._forget_group()
        self._end_server: Callable[[], None] | None = None
        self._has_joined = False

    def load(self) -> None:
        """Import Horovod.

        Raises:
            ImportError: Horovod is missing or incompatible with the installed PyTorch.
        """
        self.load_in_driver()
        defer_compiler()
        keep_freed_memory()

    def load_in_driver(self) -> None:
        import_horovod()

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Initialize Horovod, even for a single rank.

        Raises:
            RuntimeError: Other code in this process has already initialized Horovod.
            ConnectFailed: Another rank failed or was too late, or this rank was interrupted.
            ValueError: This node has none of the allowed interfaces.
        """
        hvd = import_horovod()
        if hvd.is_initialized():
            raise RuntimeError(
                "Horovod is already initialized in this process. A trainer with `use_local=True` needs Horovod in the "
                "driver for itself: call `hvd.shutdown()`, or shut the other trainer down, first."
            )
        port = 0
        if world.rank == 0:
            port, self._end_server = _start_server(rendezvous.address)
        port, crossing = self._wait_for_all(rendezvous, world, port)
        interface = first_of(self.interfaces) if self.interfaces else _interface_towards(rendezvous.address)
        places = place((rendezvous.address, port), world, crossing)
        self._set_variables({**tuning(self.timeout_s, interface, os.environ), **places})
        self._has_joined = True
        try:
            hvd.init()
        except ValueError as error:
            raise ConnectFailed(
                f"Horovod could not connect {world.size} ranks. See Horovod's message above."
            ) from error

    def _wait_for_all(self, rendezvous: Rendezvous, world: World, port: int) -> tuple[int, tuple[int, int]]:
        """Wait until all ranks have reached this point.

        Without this wait, ranks would wait for each other in `hvd.init`, which only rank 0 can interrupt.

        Args:
            rendezvous: The ranks' addresses.
            world: This rank and the size of the group.
            port: Port of Horovod's rendezvous server, if it is on this rank.

        Returns:
            The port of the server on rank 0, and this rank's cross rank and cross size (see `crossings`).
        """
        if not world.is_distributed:
            return port, (0, 1)
        [connections] = self._meet(rendezvous, world, neighbors(world.rank, world.size))
        board = Board(world.rank, world.size, connections)
        self._parts = [board]
        self._check_forming()  # raise if this rank was interrupted before the board existed
        word = json.dumps([port, world.node_rank, world.local_rank]).encode()
        words = [json.loads(each) for each in board.exchange("raysgd/place", word, self._form_timeout_s)]
        return words[0][0], crossings([place for _, *place in words])[world.rank]

    def interrupt(self) -> None:
        super().interrupt()
        self._close_server()  # closing the server makes `hvd.init` fail if it is still waiting for ranks

    def leave(self) -> None:
        if self._has_joined:  # do not shut down Horovod if other code initialized it
            import_horovod().shutdown()
        self._close_server()
        super().leave()

    def _close_server(self) -> None:
        end, self._end_server = self._end_server, None
        if end is not None:
            end()

    def is_connection_error(self, error: BaseException) -> bool:
        return is_connection_error(error)


def is_connection_error(error: BaseException) -> bool:
    """Return True if the exception means that the connections of the group are broken."""
    from horovod.common.exceptions import HorovodInternalError

    if isinstance(error, ConnectFailed | MeshBroken):
        return True
    text = str(error).lower()
    return isinstance(error, HorovodInternalError) and not any(mistake in text for mistake in _MISTAKES)


def import_horovod() -> Any:
    """Import and return Horovod's PyTorch module.

    Raises:
        ModuleNotFoundError: Horovod is missing. The message has the command to install it.
        ImportError: Horovod is incompatible with the installed PyTorch, or was built without support for PyTorch. The
            message has the command to install it.
    """
    try:
        import horovod.torch as hvd
    except Exception as error:  # a Horovod built for another PyTorch version may raise any exception
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "horovod"
        reason = "which is not installed" if is_missing else f"which fails to load ({type(error).__name__}: {error})"
        raise _unusable(reason, ModuleNotFoundError if is_missing else ImportError) from error
    if not hasattr(hvd, "init"):  # the package can be imported even without its library
        raise _unusable("which was installed without support for PyTorch")
    return hvd


def _unusable(reason: str, error_class: type[ImportError] = ImportError) -> ImportError:
    return error_class(
        f'`backend="horovod"` needs Horovod, {reason}. Run: {INSTALL_COMMAND}\nIt builds Horovod for the PyTorch that '
        "is installed. All nodes need it.",
        name="horovod.torch",
    )


def crossings(places: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the cross rank and the cross size of every rank.

    In Horovod's terms, the cross rank is a rank's index among the ranks with the same local rank on all nodes. The
    cross size is the number of these ranks.

    Args:
        places: The node rank and the local rank of every rank.
    """
    answer = []
    for node_rank, local_rank in places:
        nodes = sorted(other_node for other_node, other_local in places if other_local == local_rank)
        answer.append((nodes.index(node_rank), len(nodes)))
    return answer


def place(server: Address, world: World, crossing: tuple[int, int]) -> dict[str, str]:
    """Return the environment variables from which Horovod reads this process's place in the group.

    The variables also contain the address of the rendezvous server, and make Horovod use gloo.
    """
    host, port = server
    return {
        "HOROVOD_HOSTNAME": f"node-{world.node_rank}",
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(crossing[0]),
        "HOROVOD_CROSS_SIZE": str(crossing[1]),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def tuning(timeout_s: float, interface: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that set Horovod's timeouts and network interface.

    Variables that are already in `environment` are left out, so that the user's values stay in effect.
    """
    seconds = max(1, math.ceil(timeout_s))
    wanted = {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(seconds),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, min(seconds // 4, _LONGEST_STALL_WARNING_S))),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(seconds),
    }
    if interface is not None:
        wanted["HOROVOD_GLOO_IFACE"] = interface
    return {name: value for name, value in wanted.items() if name not in environment}


def first_of(interfaces: Sequence[str]) -> str:
    """Return the first of the given network interfaces that this machine has.

    Raises:
        ValueError: The machine has none of the interfaces.
    """
    import psutil

    there = psutil.net_if_addrs()
    for name in interfaces:
        if name in there:
            return name
    wanted, available = (", ".join(map(repr, names)) for names in (interfaces, there))
    raise ValueError(f"This node has none of the network interfaces {wanted}. Available: {available}.")


def _interface_towards(address: str) -> str | None:
    """Return the network interface through which this machine reaches `address`, or None if unknown."""
    import psutil

    # Connecting a UDP socket selects an interface without sending anything.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        own_address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own_address for entry in addresses):
            return str(name)
    return None


def _start_server(host: str) -> tuple[int, Callable[[], None]]:
    """Start Horovod's rendezvous server in a thread. Return the server's port and a function that stops the server.

    The server has no access control: any process that reaches it can read and write its values.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    # By default, a client has 3 s to send its request. On a busy machine, a worker may need longer.
    handler = type("PatientHandler", (RendezvousHandler,), {"timeout": _REQUEST_TIMEOUT_S})

    def bind(server: Any) -> None:
        server.socket.close()
        server.socket = listen_at(host)
        server.server_address = server.socket.getsockname()

    # The `server_bind` of Python's `HTTPServer` would also look up the machine's host name.
    kind = type("RendezvousServer", (RendezvousHTTPServer,), {"server_bind": bind})
    server: Any = kind((host, 0), handler, 0)
    server.daemon_threads = True  # a stuck client must not block shutdown
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_address[1]), end
