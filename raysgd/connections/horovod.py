"""Horovod with Gloo: the workers connect through Horovod's rendezvous server, which rank 0 opens, without `mpirun`."""

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

from raysgd.connections._compiler import defer_compiler
from raysgd.connections.mesh.meeting import listen_at
from raysgd.engine.shared.connection import Connection
from raysgd.engine.shared.types import Rendezvous, World

INSTALL_COMMAND = "python -m raysgd.horovod.install"

_POLL_S = 0.01
_REQUEST_TIMEOUT_S = 60
_SCOPE = "raysgd"  # our corner of the rendezvous server, beside those that Horovod uses itself
_LONGEST_STALL_WARNING_S = 60  # Horovod's own

# What Horovod says when the ranks are connected but ask for different things, which is a mistake in a program. Matched
# in lower case; all else that it raises from a collective means that the group is broken.
_MISTAKES = ("mismatched ", "with the same name as another tensor", "rank zero tried to ", "not supported with join")


class RendezvousFailed(RuntimeError):
    """The ranks did not find each other; raised by `join` only."""


@dataclass
class HorovodConnection(Connection):
    """Horovod, initialized over all ranks; also for a single one, so that `hvd.rank()` works in user code.

    What it sets up are environment variables that Horovod reads, and its own they stay: whatever else the user set to
    tune Horovod is left alone.

    Attributes:
        timeout_s: How long a collective may wait for the other ranks before it raises. Horovod counts whole seconds,
            and looks four times in this time, or each minute, so it may take half as long again.
        start_timeout_s: How long ranks that are there wait for those that are to come; None for as long as that.
        interfaces: The network interfaces that may be used: each node takes the first that it has. Empty for the one
            through which rank 0 is reached.
    """

    timeout_s: float = 1800.0
    start_timeout_s: float | None = None
    interfaces: tuple[str, ...] = ()
    _end_server: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    _is_interrupted: bool = field(default=False, repr=False, compare=False)
    _has_joined: bool = field(default=False, repr=False, compare=False)
    _variables_before: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as its settings. The one of the driver may have been interrupted in a group that is no more."""
        return type(self), (self.timeout_s, self.start_timeout_s, self.interfaces)

    def load(self) -> None:
        """Import Horovod.

        Raises:
            ImportError: It is missing, or does not fit the PyTorch that is here.
        """
        self.load_in_driver()
        defer_compiler()

    def load_in_driver(self) -> None:
        import_horovod()

    @property
    def listens_alone(self) -> bool:
        return True

    def open_endpoint(self, host: str, rank: int) -> int:
        """Open Horovod's rendezvous server on rank 0; no other rank listens before `hvd.init`."""
        self._is_interrupted = False
        if rank:
            return 0
        port, self._end_server = _start_server(host)
        return port

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Initialize Horovod, also for a single rank.

        Raises:
            RuntimeError: If this process has initialized Horovod already, which then belongs to someone else.
            ValueError: If this node has none of the interfaces.
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
            raise RendezvousFailed(f"Horovod could not connect {world.size} ranks: see its message above.") from error

    def _wait_for_all(self, rendezvous: Rendezvous, world: World) -> tuple[int, int]:
        """Wait until all ranks are here: what follows cannot be interrupted. Return this rank's crossing."""
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
        self._close_server()  # an `hvd.init` that is still looking for ranks gives up when the server is gone

    def leave(self) -> None:
        if self._has_joined:  # Horovod that other code initialized is not ours to end
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
    """Return whether an exception means that the group is broken."""
    from horovod.common.exceptions import HorovodInternalError

    if isinstance(error, RendezvousFailed):
        return True
    text = str(error).lower()
    return isinstance(error, HorovodInternalError) and not any(mistake in text for mistake in _MISTAKES)


def import_horovod() -> Any:
    """Horovod for PyTorch.

    Raises:
        ImportError: It is missing, then of the class `ModuleNotFoundError`, or does not fit the PyTorch that is here;
            the message has the command that helps.
    """
    try:
        import horovod.torch as hvd
    except Exception as error:  # one that was built for another PyTorch fails in its own way
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "horovod"
        reason = "which is not installed" if is_missing else f"which fails to load ({type(error).__name__}: {error})"
        raise _unusable(reason, ModuleNotFoundError if is_missing else ImportError) from error
    if not hasattr(hvd, "init"):  # without its library the package imports all the same
        raise _unusable("which was installed without its PyTorch part")
    return hvd


def _unusable(reason: str, error_class: type[ImportError] = ImportError) -> ImportError:
    return error_class(
        f'`backend="horovod"` needs Horovod, {reason}. Run: {INSTALL_COMMAND}\nIt builds Horovod for the PyTorch that '
        "is installed. All nodes need it.",
        name="horovod.torch",
    )


def crossings(places: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Give each rank its number, and their count, among the ranks that are the same one on their nodes."""
    answer = []
    for node_rank, local_rank in places:
        nodes = sorted(other_node for other_node, other_local in places if other_local == local_rank)
        answer.append((nodes.index(node_rank), len(nodes)))
    return answer


def place(rendezvous: Rendezvous, world: World, crossing: tuple[int, int]) -> dict[str, str]:
    """The variables that tell Horovod who this rank is and where the others are to be found."""
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
    """The variables with which Horovod keeps our timeout and interface, but for those that the user set."""
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
    """The first of these network interfaces that this machine has.

    Raises:
        ValueError: It has none of them.
    """
    import psutil

    there = psutil.net_if_addrs()
    for name in interfaces:
        if name in there:
            return name
    wanted, found = (", ".join(map(repr, names)) for names in (interfaces, there))
    raise ValueError(f"This node has none of the network interfaces {wanted}; it has {found}.")


def _interface_towards(address: str) -> str | None:
    """The network interface through which this machine reaches `address`; None if it cannot be told."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
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
    """Start Horovod's rendezvous server in a thread; return its port, and what ends it.

    Who reaches it may read and write what ranks tell there.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    # Horovod gives a client 3 s to send its request, which is not enough for a worker on a machine that is busy.
    handler = type("PatientHandler", (RendezvousHandler,), {"timeout": _REQUEST_TIMEOUT_S})

    def bind(server: Any) -> None:
        server.socket.close()
        server.socket = listen_at(host)
        server.server_address = server.socket.getsockname()

    # Its own way to bind also looks the name of the machine up.
    kind = type("RendezvousServer", (RendezvousHTTPServer,), {"server_bind": bind})
    server: Any = kind((host, 0), handler, 0)
    server.daemon_threads = True  # a stuck client holds nothing up
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_address[1]), end


def _put(rendezvous: Rendezvous, key: str, value: Any) -> None:
    """Write a value in our corner of the rendezvous server."""
    _request(rendezvous, "PUT", key, json.dumps(value))


def _get(rendezvous: Rendezvous, key: str) -> Any:
    """Return a value from there; None if there is none yet."""
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
