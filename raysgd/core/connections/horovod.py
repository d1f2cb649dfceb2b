"""Connects workers with Horovod over gloo, without `mpirun`.

The workers find each other through a rendezvous server on rank 0.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.connections._compiler import defer_compiler
from raysgd.core.connections.mesh.meeting import listen_at
from raysgd.core.engine.shared.connection import Connection
from raysgd.core.engine.shared.types import Rendezvous, World
from raysgd.core.memory import keep_freed_memory

INSTALL_COMMAND = "python -m raysgd.horovod.install"

_POLL_S = 0.01
_REQUEST_TIMEOUT_S = 60
_SCOPE = "raysgd"  # namespace for raysgd's keys on Horovod's rendezvous server
# Longest interval, in seconds, at which Horovod checks for stalled collectives. It equals Horovod's default.
_LONGEST_STALL_WARNING_S = 60

# Lower-case phrases in Horovod's error messages for ranks that disagree about a collective. Such an error is a bug in
# the user's program. Any other error in a collective means that the group is broken.
_MISTAKES = ("mismatched ", "with the same name as another tensor", "rank zero tried to ", "not supported with join")


class RendezvousFailed(RuntimeError):
    """The ranks could not connect to each other. Only `join` raises this error."""


@dataclass
class HorovodConnection(Connection):
    """Initializes Horovod over all ranks, even for a single rank, so that `hvd.rank()` works in user code.

    The connection sets environment variables that Horovod reads. If the user has set a variable for a timeout or a
    network interface, that variable stays unchanged.

    Attributes:
        timeout_s: How long a collective may wait for other ranks before it raises, rounded up to whole seconds. Horovod
            checks for late ranks at intervals of a quarter of the timeout, but of at least 1 s and at most 60 s. It may
            therefore raise late, by up to three of these intervals.
        start_timeout_s: How long each rank waits until all ranks are ready to initialize Horovod. Default: `timeout_s`.
        interfaces: Names of allowed network interfaces. Each node uses the first interface in the list that exists
            there. If empty, each node uses the interface that leads to rank 0.
    """

    timeout_s: float = 1800.0
    start_timeout_s: float | None = None
    interfaces: tuple[str, ...] = ()
    _end_server: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    _is_interrupted: bool = field(default=False, repr=False, compare=False)
    _has_joined: bool = field(default=False, repr=False, compare=False)
    _variables_before: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the settings. The driver's copy may still hold the state of an earlier group."""
        return type(self), (self.timeout_s, self.start_timeout_s, self.interfaces)

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

    @property
    def listens_alone(self) -> bool:
        return True

    def open_endpoint(self, host: str, rank: int) -> int:
        """Start Horovod's rendezvous server on rank 0, and return its port. Other ranks return 0."""
        self._is_interrupted = False
        if rank:
            return 0
        port, self._end_server = _start_server(host)
        return port

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Initialize Horovod, even for a single rank.

        Raises:
            RuntimeError: Other code in this process has already initialized Horovod.
            RendezvousFailed: Another rank failed or was too late, or this rank was interrupted.
            ValueError: This node has none of the allowed interfaces.
        """
        hvd = import_horovod()
        if hvd.is_initialized():
            raise RuntimeError(
                "Horovod is already initialized in this process. A trainer with `use_local=True` needs Horovod in the "
                "driver for itself: call `hvd.shutdown()`, or shut the other trainer down, first."
            )
        crossing = self._wait_for_all(rendezvous, world)
        self._set_variables(rendezvous, world, crossing)
        self._has_joined = True
        try:
            hvd.init()
        except ValueError as error:
            raise RendezvousFailed(
                f"Horovod could not connect {world.size} ranks. See Horovod's message above."
            ) from error

    def _wait_for_all(self, rendezvous: Rendezvous, world: World) -> tuple[int, int]:
        """Wait until all ranks have reached this point. Return this rank's cross rank and cross size (see `crossings`).

        Without this wait, ranks would wait for each other in `hvd.init`, which only rank 0 can interrupt.
        """
        deadline = time.monotonic() + (self.timeout_s if self.start_timeout_s is None else self.start_timeout_s)
        _put(rendezvous, f"place-{world.rank}", [world.node_rank, world.local_rank])
        if world.rank == 0:
            places = [self._wait_for(rendezvous, f"place-{rank}", deadline) for rank in range(world.size)]
            _put(rendezvous, "crossings", crossings(places))
        rank, size = self._wait_for(rendezvous, "crossings", deadline)[world.rank]
        return rank, size

    def _wait_for(self, rendezvous: Rendezvous, key: str, deadline: float) -> Any:
        while (value := _get(rendezvous, key)) is None:
            if self._is_interrupted or time.monotonic() > deadline:
                raise RendezvousFailed("another rank failed, or was too slow to join the group")
            time.sleep(_POLL_S)
        return value

    def _set_variables(self, rendezvous: Rendezvous, world: World, crossing: tuple[int, int]) -> None:
        interface = first_of(self.interfaces) if self.interfaces else _interface_towards(rendezvous.address)
        variables = {**tuning(self.timeout_s, interface, os.environ), **place(rendezvous, world, crossing)}
        for name, value in variables.items():
            self._variables_before.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def interrupt(self) -> None:
        self._is_interrupted = True
        self._close_server()  # closing the server makes `hvd.init` fail if it is still waiting for ranks

    def leave(self) -> None:
        if self._has_joined:  # do not shut down Horovod if other code initialized it
            import_horovod().shutdown()
        self._has_joined = False
        self._close_server()
        while self._variables_before:
            name, value = self._variables_before.popitem()
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _close_server(self) -> None:
        end, self._end_server = self._end_server, None
        if end is not None:
            end()

    def is_connection_error(self, error: BaseException) -> bool:
        return is_connection_error(error)


def is_connection_error(error: BaseException) -> bool:
    """Return True if the exception means that the connections of the group are broken."""
    from horovod.common.exceptions import HorovodInternalError

    if isinstance(error, RendezvousFailed):
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


def place(rendezvous: Rendezvous, world: World, crossing: tuple[int, int]) -> dict[str, str]:
    """Return the environment variables from which Horovod reads this process's place in the group.

    The variables also contain the rendezvous server's address, and make Horovod use gloo.
    """
    return {
        "HOROVOD_HOSTNAME": f"node-{world.node_rank}",
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(crossing[0]),
        "HOROVOD_CROSS_SIZE": str(crossing[1]),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous.port),
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


def _put(rendezvous: Rendezvous, key: str, value: Any) -> None:
    """Store a value on the rendezvous server, under a key in raysgd's namespace."""
    _request(rendezvous, "PUT", key, json.dumps(value))


def _get(rendezvous: Rendezvous, key: str) -> Any:
    """Return the value of a key in raysgd's namespace on the rendezvous server, or None if the key is not set yet."""
    status, body = _request(rendezvous, "GET", key)
    return json.loads(body) if status == http.HTTPStatus.OK else None


def _request(rendezvous: Rendezvous, method: str, key: str, body: str | None = None) -> tuple[int, bytes]:
    host, port = rendezvous.address, rendezvous.port
    try:
        with closing(http.client.HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_S)) as connection:
            connection.request(method, f"/{_SCOPE}/{key}", body)
            response = connection.getresponse()
            return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise RendezvousFailed(f"no answer from rank 0 at {host}:{port}: {error}") from error
