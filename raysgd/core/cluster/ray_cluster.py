"""This process and its Ray cluster: the session, the threads that call Ray, the end of the program, and queries.

The library calls Ray in the background only in a `RayThread`. Such a thread belongs to the session in which its work
began: it never starts Ray, its owner waits for it when the owner ends, and if the user ends Ray first, its work raises
an error. ADR 172 explains why.

All queries to Ray for free resources are in this module.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any, TypeVar
from weakref import finalize

from raysgd.core.cluster.resources import (
    ClusterView,
    NodeView,
    PlacementGroupHolder,
    Resources,
    num_fitting,
)
from raysgd.core.private_names import find_name
from raysgd.exceptions import RaySGDError, WorkersLostError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SLICE_S = 1.0
_CONNECT_S = 5.0
_BUNDLE = "bundle_group_"
_DIED = re.compile(r"worker died or was killed.*Node ID: (\w+).*Worker PID: (\d+)", re.DOTALL)
_END_S = 10.0

# ----------------------------------------------------------------------------------------- the session and its threads


def session() -> Any:
    """Return an object that identifies this process's Ray session, or None if the process is not connected to Ray.

    This function never starts Ray.
    """
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    if ray.util.client.ray.is_connected():
        return ray.util.client.ray.get_context().client_worker
    try:
        context = ray.get_runtime_context()
        return context.worker.node.session_name, context.get_job_id()
    except Exception:  # another thread has just ended Ray
        return None


@contextmanager
def in_session(expected: Any) -> Iterator[None]:
    """Run a `with` block that needs the Ray session `expected`, the result of an earlier call to `session`.

    Raises:
        WorkersLostError: The session ended before or during the block. Ray itself would raise `SystemExit(0)`.
    """
    cause: BaseException | None = None
    if expected is None or session() == expected:
        try:
            yield
            return
        except (Exception, SystemExit) as error:
            if expected is None or isinstance(error, RaySGDError) or session() == expected:
                raise
            cause = error
    raise session_ended() from cause


def session_ended() -> WorkersLostError:
    """Return the error to raise if the Ray session of a background call has ended."""
    return WorkersLostError("The Ray session of this call has ended, for instance by `ray.shutdown()`.")


@contextmanager
def delaying_shutdown() -> Iterator[None]:
    """Run a `with` block that `ray.shutdown()` in another thread waits for.

    If Ray is shut down while another thread writes to the object store or reads from it, Ray ends the process.
    """
    with find_name("ray._private.worker:_connect_or_shutdown_lock") or nullcontext():
        yield


class RayThread(threading.Thread):
    """A thread in which the library calls Ray. It never starts Ray."""


def is_ray_thread() -> bool:
    """Return True if this code runs in a `RayThread`."""
    return isinstance(threading.current_thread(), RayThread)


class _MayStartRay:
    """A value of Ray's switch `enable_auto_connect`: false in a `RayThread`, and unchanged in other threads."""

    def __init__(self, elsewhere: object) -> None:
        self._elsewhere = elsewhere

    def __bool__(self) -> bool:
        return bool(self._elsewhere) and not is_ray_thread()


def keep_threads_from_starting_ray() -> None:
    """Let calls to Ray in a `RayThread` raise an error where Ray is not running, instead of starting it.

    Call this function after Ray is imported.
    """
    auto_init = find_name("ray._private:auto_init_hook")
    if hasattr(auto_init, "enable_auto_connect"):
        auto_init.enable_auto_connect = _MayStartRay(auto_init.enable_auto_connect)


class RayThreads:
    """Starts the threads of an owner, such as a trainer, and waits for them when the owner ends."""

    def __init__(self) -> None:
        self._threads: list[RayThread] = []

    def start(self, work: Callable[[], T], name: str) -> Future[T]:
        """Run `work` in a new thread, in the current Ray session. Return a future with its result or error.

        Args:
            work: The function to run.
            name: Name of the thread, with the prefix "raysgd-".
        """
        started_in, future = session(), Future[T]()

        def run() -> T:
            with in_session(started_in):
                return work()

        thread = RayThread(target=run_into, args=(future, run), name=name, daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        return future

    def join(self) -> None:
        """Wait for the threads to finish, at most 10 s for all of them together. Skip the current thread.

        First interrupt or stop what they do.
        """
        until = time.monotonic() + _END_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


def run_into(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work` and store its result or exception in `future`. Threads use this function as their target."""
    try:
        result = work()
    except BaseException as error:  # even KeyboardInterrupt, which the caller of `future.result` should get
        future.set_exception(error)
    else:
        future.set_result(result)


# ------------------------------------------------------------------------------------------- the end of the program


class ProgramEnd:
    """Runs finalizers, such as stopping a trainer's workers, when the user's program exits.

    Attributes:
        has_begun: True if the program is exiting.
        finalizers: Finalizers that have not run yet, oldest first.
    """

    def __init__(self) -> None:
        self.has_begun = self._is_before_ray = False
        self.finalizers: list[finalize[..., Any]] = []

    def come_before_ray(self) -> None:
        """Register `run` as an exit hook that runs before Ray's exit hook.

        Python runs the newest exit hook first, and Ray registers its hook when it is imported. Call this method again
        after Ray has been imported. Hooks that the user's program registers later run first, while trainers still work.
        """
        if not self._is_before_ray:
            atexit.unregister(self.run)
            atexit.register(self.run)
            self._is_before_ray = "ray" in sys.modules
            if self._is_before_ray:
                keep_threads_from_starting_ray()

    def run(self) -> None:
        """Run the remaining finalizers, newest first, even if a finalizer fails."""
        self.has_begun = True
        for each in reversed(self.finalizers):
            try:
                each()
            except Exception:
                sys.excepthook(*sys.exc_info())


_PROGRAM_END = ProgramEnd()


def end_with(owner: Any, end: Callable[..., Any], *args: Any, **kwargs: Any) -> finalize[..., Any]:
    """Call `end(*args, **kwargs)` when `owner` is garbage collected, or when the program exits, before Ray shuts down.

    A plain `weakref.finalize` may run after Ray's exit hook. Python runs the newest exit hook first, and registers the
    exit hook of all finalizers when the first finalizer in the process is created, possibly before Ray is imported.

    Returns:
        The `weakref.finalize` object.
    """
    finalizer = finalize(owner, end, *args, **kwargs)
    finalizer.atexit = False
    _PROGRAM_END.finalizers = [*(each for each in _PROGRAM_END.finalizers if each.alive), finalizer]
    _PROGRAM_END.come_before_ray()
    return finalizer


def prepare_to_use_ray() -> None:
    """Register the cleanup at program exit. Call this function after Ray is imported and before Ray is started.

    Raises:
        RaySGDError: The program is exiting.
        WorkersLostError: This is a background thread, and the program has ended its Ray session.
    """
    if _PROGRAM_END.has_begun:
        raise RaySGDError("The program is ending, so no workers are started.")
    if is_ray_thread() and session() is None:
        raise session_ended()
    _PROGRAM_END.come_before_ray()


# ---------------------------------------------------------------------------------------------------- the cluster


def untyped_ray() -> Any:
    """Return the `ray` module, typed as `Any` because the module's annotations are incomplete."""
    import ray

    return ray


def ensure_ray() -> None:
    """Connect to the Ray cluster at RAY_ADDRESS. Without RAY_ADDRESS, use a cluster on this machine or start one.

    If this process is already connected to Ray, keep that connection.

    Raises:
        ConnectionError: No Ray cluster answers at RAY_ADDRESS.
        PermissionError: The Ray cluster rejects the token of this program.
        RaySGDError: The program is exiting.
    """
    ray = untyped_ray()
    prepare_to_use_ray()
    if not ray.is_initialized():
        logger.info("Ray is not initialized: using the cluster of RAY_ADDRESS or of this machine, or starting one")
        init_ray(include_dashboard=False)
        # If this process runs the head node, `init_ray` has just started the cluster.
        if not is_ray_client() and ray.get_runtime_context().worker.node.is_head():
            _started.add(session())
    _quiet_ray()


def init_ray(**options: Any) -> None:
    """Call `ray.init`. If this user has a token file for Ray's authentication, use the token.

    Unless `RAY_AUTH_MODE` is set, Ray itself reads the token file `~/.ray/auth_token` only when it starts a cluster.

    Raises:
        ConnectionError: No Ray cluster answers at the address in `options`, or without one, at RAY_ADDRESS. Ray itself
            would keep trying for minutes.
        PermissionError: The Ray cluster rejects the token of this program.
        RaySGDError: The program is exiting.
    """
    ray = untyped_ray()
    prepare_to_use_ray()
    _check_address(options.get("address") or os.environ.get("RAY_ADDRESS", ""))
    _use_token()
    try:
        ray.init(**options)
    except ConnectionError as error:
        # Ray's error does not name the cause, and its own cause contains the error of the connection only as text.
        if "AuthenticationError" not in str(error.__cause__):
            raise
        raise PermissionError(
            f"{error}: the cluster rejects the token of this program, or the program has none. Copy the file "
            "`~/.ray/auth_token` of the head node to this machine, with mode 600, or set `RAY_AUTH_TOKEN`; then unset "
            "`RAY_AUTH_MODE`, or set `RAY_AUTH_MODE=token`."
        ) from error


def _check_address(address: str) -> None:
    error = _connection_error(address.removeprefix("ray://"), _CONNECT_S)
    if error is not None:
        raise ConnectionError(
            f"No Ray cluster answers at `{address}`: {error}. The address is that of `ray.init` or of the environment "
            'variable RAY_ADDRESS: correct it, or start a cluster there with `ray start --head`. `RAY_ADDRESS="local"` '
            "starts Ray on this machine."
        )


def _connection_error(address: str, timeout_s: float) -> OSError | None:
    """Try to connect to the address `host:port` and return the error.

    Return None if the connection works, or if the address is not of this form, such as "auto".
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        return error
    return None


def _use_token() -> None:
    setup = "ray._private.authentication.authentication_token_setup"
    enable = find_name(f"{setup}:maybe_enable_token_auth_if_token_available")
    with suppress(TypeError):  # in older versions of Ray, the function is missing or takes other arguments
        enable(warn_if_disabled=False)


_started: set[Any] = set()
"""Ray sessions that `ensure_ray` started. They run on this machine only, so no node can join."""


_noted: set[tuple[str, str]] = set()


def note_processes(processes: Iterable[Any]) -> None:
    """Record worker processes, so that Ray's messages about their deaths are hidden.

    Instead, raysgd logs its own message about a dead worker.

    Args:
        processes: The `WorkerInfo` of each worker.
    """
    _noted.update((info.node_id, str(info.pid)) for info in processes)


def _quiet_ray() -> None:
    """Hide the message of 1,200 characters that Ray prints for each dead worker of raysgd.

    Ray prints this message even with `log_to_driver=False`. Ray's function that prints it is private. If that function
    is missing, nothing is hidden.
    """
    show = find_name("ray._private.worker:print_to_stdstream")
    if show is None or hasattr(show, "__wrapped__"):
        return

    @wraps(show)
    def show_others(data: Any, *args: Any, **options: Any) -> None:
        died = _DIED.search("".join(data["lines"])) if data.get("pid") == "raylet" else None
        if died is None or died.groups() not in _noted:
            show(data, *args, **options)

    worker: Any = sys.modules["ray._private.worker"]
    worker.print_to_stdstream = show_others


def is_head_gone() -> bool:
    """Return True if the head node of this process's cluster refuses connections, which means that Ray has stopped."""
    return _is_gone(_head_address())


def _head_address() -> str:
    """Return the address of the head node of this process's cluster, or "" if it is unknown."""
    ray = untyped_ray()
    if not ray.is_initialized():  # `get_runtime_context` would start Ray
        return ""
    return str(getattr(ray.get_runtime_context(), "gcs_address", ""))


def _is_gone(address: str) -> bool:
    """Return True if the cluster's head node at this address refuses connections.

    A head node that is just busy still accepts connections.
    """
    return isinstance(_connection_error(address, _SLICE_S), ConnectionRefusedError)


def ask_head(ask: Callable[[], T], otherwise: T) -> T:
    """Return the result of `ask`, a query to the cluster's head node. If the head node is gone, return `otherwise`.

    Without its head node, Ray tries to reach it for a minute and then kills this process. Until then, this thread must
    be free to save the newest snapshot after a signal. So the query runs in another thread.
    """
    head, answer = _head_address(), RayThreads().start(ask, "raysgd-ask")
    while not wait([answer], _SLICE_S).done:
        if _is_gone(head):
            return otherwise
    return answer.result()


def is_ray_client() -> bool:
    """Return True if this process is connected through Ray Client."""
    return bool(untyped_ray().util.client.ray.is_connected())


def gpus_of_nodes(custom: Mapping[str, float] | None = None) -> tuple[float, ...]:
    """Return the number of GPUs of each node of `cluster_view`, whether free or not. Empty if Ray is not initialized.

    If this process runs in a placement group, return the number of GPUs of each of the group's bundles.

    Args:
        custom: Other resources that a node must have to be counted.
    """
    ray: Any = sys.modules.get("ray")
    if not (ray and ray.is_initialized()):
        return ()
    need = Resources(num_cpus=0, custom=custom or {})
    return tuple(node.total.get("GPU", 0.0) for node in cluster_view().nodes if num_fitting(node.total, need))


def gpus_of_cluster(custom: Mapping[str, float] | None = None) -> tuple[float, ...]:
    """Connect to Ray, and return what `gpus_of_nodes` returns."""
    ensure_ray()
    return gpus_of_nodes(custom)


def outer_group() -> Any:
    """Return the placement group in which this process runs, or None.

    Return None as well if Ray does not place this process's child tasks in that group.
    """
    ray = untyped_ray()
    captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    return ray.util.get_current_placement_group() if captures else None


def living_nodes() -> frozenset[str]:
    """Return the IDs of the nodes that Ray believes to be alive. Return an empty set if the head node is gone."""
    return ask_head(_living_nodes, frozenset())


def _living_nodes() -> frozenset[str]:
    return frozenset(node["NodeID"] for node in untyped_ray().nodes() if node["Alive"])


def cluster_view() -> ClusterView:
    """Return the cluster's live nodes with their total and free resources, and its placement groups.

    Nodes that Ray is draining are left out. If the head node is gone, the view is empty.

    If this process runs in a placement group, as in a Tune trial, return only that group's bundles. Each bundle is
    returned as a node whose resources are all free.
    """
    outer = outer_group()
    if outer is not None:
        bundles = enumerate(outer.bundle_specs)
        return ClusterView(
            tuple(NodeView(f"bundle {index}", "this reservation", bundle, bundle) for index, bundle in bundles),
            can_grow=False,
        )
    return ask_head(_whole_view, ClusterView((), is_head_gone=True))


def _whole_view() -> ClusterView:
    # These queries must be made in this order: see `_is_settling`.
    free, leaving, groups = _free_by_node(), _drain_deadlines(), _placement_groups()
    nodes = []
    for node in untyped_ray().nodes():
        name = node["NodeID"]
        if node["Alive"] and name not in leaving:
            total, left = _plain(node["Resources"]), free.get(name, {})
            nodes.append(NodeView(name, node["NodeManagerAddress"], total, _plain(left), _is_settling(left, groups)))
    holders = [
        PlacementGroupHolder(entry.get("name") or identity, entry["state"], tuple(entry["bundles"].values()))
        for identity, entry in groups.items()
    ]
    return ClusterView(tuple(nodes), tuple(holders), can_grow=session() not in _started)


def _is_settling(free: Mapping[str, float], groups: Collection[str]) -> bool:
    """Return True if a removed placement group still holds resources of a node.

    Ray lists a group as removed as soon as its removal is requested. The group's resources become free later. On a busy
    machine, this can take several seconds. Only then do the group's bundles disappear from the node's resources.

    Args:
        free: The node's free resources, including Ray's entries for bundles.
        groups: IDs of the placement groups that are not removed. Query them after `free`.
    """
    return any(name.startswith(_BUNDLE) and name.rpartition("_")[2] not in groups for name in free)


def _free_by_node() -> Mapping[str, Mapping[str, float]]:
    """Return each node's free resources, by node ID.

    This function uses a private function of Ray. If Ray lacks it, the result is empty for a cluster of several
    nodes, because Ray's public function returns only the sum over all nodes.
    """
    by_node = find_name("ray._private.state:available_resources_per_node")
    if by_node is not None:
        return dict(by_node())
    alive = _living_nodes()
    return {next(iter(alive)): untyped_ray().available_resources()} if len(alive) == 1 else {}


def _placement_groups() -> dict[str, Any]:
    """Return Ray's table entries for the placement groups that are not removed, by ID."""
    table = untyped_ray().util.placement_group_table()
    return {identity: entry for identity, entry in table.items() if entry["state"] != "REMOVED"}


def _plain(amounts: Mapping[str, float]) -> dict[str, float]:
    """Return the amounts of resources without the entries that Ray uses internally."""
    hidden = ("node:", "object_store_memory")
    return {name: amount for name, amount in amounts.items() if not name.startswith(hidden) and "_group_" not in name}


def draining_nodes() -> frozenset[str]:
    """Return the IDs of the nodes that Ray is draining."""
    return frozenset(drain_deadlines())


def drain_deadlines() -> dict[str, int]:
    """Return when Ray will remove the nodes that it is draining.

    This function uses a private function of Ray. If Ray lacks it, or if the head node is gone, the result is empty.

    Returns:
        The deadlines by node ID, in milliseconds of Unix time. 0 for an unknown deadline.
    """
    return ask_head(_drain_deadlines, {})


def _drain_deadlines() -> dict[str, int]:
    draining = find_name("ray._private.state:state.get_draining_nodes")
    return {} if draining is None else dict(draining())


def is_alive(maker: str, node_id: str | None) -> bool:
    """Return True if a worker process or an actor is alive.

    This function uses private queries of Ray. If they are missing, it returns False.

    Args:
        maker: With `node_id`, the ID of a worker process. Without it, the ID of an actor; an actor that Ray will
            restart counts as alive.
        node_id: Node of the worker process.
    """
    actors, workers = find_name("ray._private.state:actors"), find_name("ray._private.state:workers")
    if actors is None or workers is None:
        return False
    if node_id is None:
        return bool(actors(maker).get("State", "DEAD") != "DEAD")
    return maker in workers() and node_id in _living_nodes()
