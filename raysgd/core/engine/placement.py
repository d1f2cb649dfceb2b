"""Finds free resources in the Ray cluster and reserves them. A reservation consists of slots, each for one worker.

All queries to Ray for free resources are in this module, and so is the code that creates and removes placement groups.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

from raysgd.core.cluster.keeper import NAMESPACE, keeper
from raysgd.core.cluster.program_end import prepare_to_use_ray
from raysgd.core.cluster.ray_session import RayThreads, session
from raysgd.core.engine.gpus import DriverView, GpuChoice, choose_gpus, largest_share
from raysgd.core.engine.policies import capacity, cpus_that_fit, num_fitting
from raysgd.core.engine.shared.group_spec import NO_WORDS, FrontEndWords
from raysgd.core.engine.shared.types import ClusterView, NodeView, PlacementGroupHolder, Resources, WorkerInfo
from raysgd.core.private_names import find_name
from raysgd.exceptions import OnFailure, ReservationTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.01
_GUARD_POLL_S = 2.0
_LOOK_S = 0.5
_CLOSE_S = 5.0
_SLICE_S = 1.0
_CONNECT_S = 5.0
# Seconds of waiting after which a warning says what is missing; an idle cluster grants a reservation within a second.
_TELL_S = 5.0
_BUNDLE = "bundle_group_"
_CANNOT_GROW = (
    "No node will join: Ray was started for this program alone. To use a cluster, run the program on one of its "
    "machines, or set RAY_ADDRESS."
)
_DIED = re.compile(r"worker died or was killed.*Node ID: (\w+).*Worker PID: (\d+)", re.DOTALL)


def _ray() -> Any:
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
    ray = _ray()
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
    ray = _ray()
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


def note_processes(infos: Iterable[WorkerInfo]) -> None:
    """Record worker processes, so that Ray's messages about their deaths are hidden.

    Instead, raysgd logs its own message about a dead worker.
    """
    _noted.update((info.node_id, str(info.pid)) for info in infos)


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
    ray = _ray()
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
    return bool(_ray().util.client.ray.is_connected())


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


def choose_gpus_of_cluster(
    use_gpu: bool | str,
    num_workers: int,
    driver: DriverView,
    custom: Mapping[str, float] | None = None,
    *,
    uses_ray: bool = True,
    num_gpus_per_worker: float = 1,
    backend: str = "auto",
    has_driver: bool = False,
) -> GpuChoice:
    """Decide by the GPUs of the cluster what `choose_gpus` decides. Log if workers share GPUs because of "auto".

    With "auto", connect to Ray.

    Args:
        use_gpu: See `choose_gpus`, also for the other arguments.
        num_workers: The largest number of workers, spare workers included.
        driver: What this process sees.
        custom: Resources of a worker besides CPUs and GPUs.
        uses_ray: False if this process is the only worker.
        num_gpus_per_worker: The user's number of GPUs for each worker.
        backend: The user's backend.
        has_driver: True if a worker runs in this process.

    Raises:
        ValueError: The workers cannot share the cluster's GPUs.
    """
    of_nodes = None
    if use_gpu == "auto" and driver.num_gpus is not None and uses_ray:
        ensure_ray()
        of_nodes = gpus_of_nodes(custom)
    options: dict[str, Any] = {"backend": backend, "has_driver": has_driver}
    choice = choose_gpus(use_gpu, num_workers, driver, of_nodes, num_gpus_per_worker=num_gpus_per_worker, **options)
    if of_nodes is not None and 0 < choice.num_gpus < num_gpus_per_worker:
        logger.warning(
            '%s workers share %g GPU(s), with %g of a GPU each, because of `use_gpu="auto"`: workers on one GPU take '
            "turns. For a GPU each pass at most `num_workers=%d` (spares count too), for CPUs `use_gpu=False`",
            num_workers,
            sum(of_nodes),
            choice.num_gpus,
            max(1, sum(map(int, of_nodes))),
        )
    return choice


def outer_group() -> Any:
    """Return the placement group in which this process runs, or None.

    Return None as well if Ray does not place this process's child tasks in that group.
    """
    ray = _ray()
    captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    return ray.util.get_current_placement_group() if captures else None


def living_nodes() -> frozenset[str]:
    """Return the IDs of the nodes that Ray believes to be alive. Return an empty set if the head node is gone."""
    return ask_head(_living_nodes, frozenset())


def _living_nodes() -> frozenset[str]:
    return frozenset(node["NodeID"] for node in _ray().nodes() if node["Alive"])


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
    for node in _ray().nodes():
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
    return {next(iter(alive)): _ray().available_resources()} if len(alive) == 1 else {}


def _placement_groups() -> dict[str, Any]:
    """Return Ray's table entries for the placement groups that are not removed, by ID."""
    table = _ray().util.placement_group_table()
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


def explain(need: Resources, num_workers: int, view: ClusterView) -> str:
    """Return a table of resources for error messages.

    The table lists the requested resources, each node's resources, the placement groups that hold resources or wait
    for them, and the CPUs that other tasks and actors use.
    """
    where = f" on nodes with the labels {dict(need.labels)}" if need.labels else ""
    lines = [f"  requested:  {num_workers} x {need.bundle()}{where}"]
    hidden = {"memory"} - need.bundle().keys()  # Ray lists every node's memory, but few programs request memory
    for node in view.nodes:
        free, total = ({name: of[name] for name in of if name not in hidden} for of in (node.available, node.total))
        lines.append(f"  node {node.address}:  free {free} of {total}")
    for holder in view.holders:
        how = "held" if holder.state == "CREATED" else "waited for"
        counts = Counter(str(dict(bundle)) for bundle in holder.bundles)
        bundles = ", ".join(f"{count} x {bundle}" for bundle, count in counts.items())
        lines.append(f"  {how} by placement group {holder.name} ({holder.state}):  {bundles}")
    held = sum(bundle.get("CPU", 0.0) for h in view.holders if h.state == "CREATED" for bundle in h.bundles)
    used = sum(n.total.get("CPU", 0.0) - n.available.get("CPU", 0.0) for n in view.nodes)
    if used - held > 1e-6:
        lines.append(f"  held by other tasks and actors:  {used - held:g} CPU")
    if need.num_gpus and not any(node.total.get("GPU") for node in view.nodes):
        lines.append("No node has a GPU. To train on CPUs pass `use_gpu=False`.")
    return "\n".join(lines)


def impossibility(need: Resources, num_workers: int, view: ClusterView, words: FrontEndWords = NO_WORDS) -> str | None:
    """Return an error message if the workers cannot fit into the cluster, even if all nodes were idle.

    If a smaller request could fit, the message suggests it. If the workers can fit, return None.
    """
    most = capacity(view, need, free_only=False)
    if most >= num_workers:
        return None
    limit = f"{most} worker{'s' if most > 1 else ''} at most"
    fits = f"The nodes have room for {limit}" if most else "No node is large enough for a worker"
    num_cpus = cpus_that_fit(view, need, num_workers)
    ways = [f"for {limit} (spares count too)"] if most else []
    ways += [f"for less per worker: `{words.with_cpus.format(num_cpus)}`"] if num_cpus else []
    ways += _ways_with_fewer_gpus(need, num_workers, view)
    remedy = f"\nAsk {', or '.join(ways)}." if ways else ""
    return f"{fits}, even when nothing else runs:\n{explain(need, num_workers, view)}{remedy}"


def _ways_with_fewer_gpus(need: Resources, num_workers: int, view: ClusterView) -> list[str]:
    """Return what to ask for if the workers would fit with less of a GPU, or without. Empty if no node has a GPU."""
    of_nodes = [node.total.get("GPU", 0.0) for node in view.nodes]
    fits_without = capacity(view, replace(need, num_gpus=0), free_only=False) >= num_workers
    if not (need.num_gpus and any(of_nodes) and fits_without):
        return []
    ways, share = ["for CPUs only: `use_gpu=False`"], largest_share(num_workers, of_nodes)
    if 0 < share < need.num_gpus <= 1:
        ways.insert(0, f'for shared GPUs: `use_gpu="auto"`, or `num_gpus_per_worker={share:g}` of `TorchTrainer`')
    return ways


def _state_of(group: Any) -> str:
    """Return a placement group's state, such as "CREATED".

    Unlike `group.wait(0)`, this function waits until Ray has answered. If the head node is gone, it returns "".
    """
    return str(ask_head(lambda: _ray().util.placement_group_table(group), {"state": ""}).get("state", "REMOVED"))


class Reservation:
    """A reservation of resources for several workers. Ray grants all of these resources together or none of them.

    Normally, a reservation creates a placement group, and `close` removes that group. Inside an existing placement
    group, for example in a Tune trial, the workers use the existing group, and `close` does not remove it. For
    workers that need no resources, no placement group is created.

    Args:
        need: Resources of one worker.
        num_workers: Number of workers.
        has_driver: True if the first worker is this process. The worker's GPUs are then reserved on this node.
        packs: True to place workers on as few nodes as possible. False to spread them over as many as possible.
        within: The existing placement group to use. "default" uses the group that this process runs in, if Ray also
            places this process's child tasks in that group. None uses no existing group.
        words: The front end's wording for error messages.

    Raises:
        ReservationTimeoutError: The cluster's head node is gone.
    """

    def __init__(
        self,
        need: Resources,
        num_workers: int,
        has_driver: bool = False,
        packs: bool = False,
        within: Any = "default",
        words: FrontEndWords = NO_WORDS,
    ) -> None:
        ray = _ray()
        self._need, self._num_workers, self._words = need, num_workers, words
        self._session = session()
        self._holder: Any = None
        self._outer = outer_group() if within == "default" else within
        self._own: Any = None
        self._guard: Any = None
        bundle = need.bundle()
        if self._outer is None and bundle and num_workers:
            name = f"raysgd-{uuid.uuid4().hex[:8]}"  # unique, because several trainers may run
            bundles = [bundle] * num_workers
            if has_driver and need.num_gpus:
                bundles[0] = {**bundle, f"node:{ray.util.get_node_ip_address()}": 0.001}
            self._guard = guard(name)
            labels = {"bundle_label_selector": [dict(need.labels)] * num_workers} if need.labels else {}
            lifetime = None if keeper() is None else "detached"
            strategy = "PACK" if packs else "SPREAD"
            make = partial(ray.util.placement_group, bundles, strategy, name, lifetime, **labels)
            self._own = ask_head(make, None)
            if self._own is None:
                raise ReservationTimeoutError("Ray was stopped: its head node does not answer.")

    def __len__(self) -> int:
        return self._num_workers

    @property
    def is_own(self) -> bool:
        """True if this reservation created a placement group.

        Actors then start as soon as the reservation is granted.
        """
        return self._own is not None

    def is_granted(self) -> bool:
        """Return True if the resources have been granted."""
        group = self._own or self._outer
        return group is None or _state_of(group) == "CREATED"

    def wait(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the resources are granted.

        If this method raises, even because of Ctrl-C, the reservation is closed.

        Args:
            timeout_s: Longest time to wait.
            check: Called regularly during the wait. May raise.

        Raises:
            ReservationTimeoutError: The resources were not granted in time, Ray removed the reservation, or the cluster
                is too small for the workers and cannot grow.
        """
        group = self._own or self._outer
        if group is None:
            return
        with OnFailure(partial(self.close, timeout_s=5.0)):
            self._await(group, timeout_s, check)

    def _await(self, group: Any, timeout_s: float, check: Callable[[], None]) -> None:
        began = time.monotonic()
        words = [(_TELL_S, self._tell_missing), (0.0, self._tell_impossible)]
        waited_s = 0.0
        # Wait at most one second at a time, because Ray's `wait` takes whole seconds and blocks Ctrl-C.
        while not self._is_ready(group, int(timeout_s - waited_s >= _SLICE_S)):
            time.sleep(_POLL_S)
            check()
            waited_s = time.monotonic() - began
            while words and waited_s >= words[-1][0]:
                words.pop()[1](timeout_s)
            if waited_s >= timeout_s:
                if self.is_granted():  # if this process stalled, the grant may have arrived in the meantime
                    return
                view = cluster_view()
                reason = impossibility(self._need, self._num_workers, view, self._words)
                table = reason or explain(self._need, self._num_workers, view)
                message = f"The cluster did not grant {self._num_workers} workers within {timeout_s:g} s.\n{table}"
                raise ReservationTimeoutError(f"{message}\n{self._words.when_not_granted}".rstrip())

    def _is_ready(self, group: Any, timeout_s: int) -> bool:
        try:
            return bool(ask_head(partial(group.wait, timeout_s), False))
        except Exception as error:  # Ray raises nothing more specific
            if _state_of(group) != "REMOVED":
                raise
            raise ReservationTimeoutError(
                f"Ray has removed the reservation of {self._num_workers} workers before it was granted. It does so if "
                "the raylet on the node of this process dies, for example because `/dev/shm` is full: look into "
                "`raylet.err` in the folder of Ray's logs, and start Ray again."
            ) from error

    def _tell_impossible(self, timeout_s: float) -> None:
        view = cluster_view()
        reason = impossibility(self._need, self._num_workers, view, self._words)
        if reason is None:
            return
        if not view.can_grow:
            raise ReservationTimeoutError(f"{reason}\n{_CANNOT_GROW}")
        logger.warning("%s\nWaiting up to %g s for nodes to join.", reason, timeout_s)

    def _tell_missing(self, timeout_s: float) -> None:
        if self._need.labels:  # `capacity` does not know which nodes have the labels
            found = f"on nodes with the labels {dict(self._need.labels)}"
        else:
            num_fitting = min(self._num_workers, capacity(cluster_view(), self._need))
            found = f"resources for {num_fitting} are free now"
        logger.warning(
            "waiting for resources: %s workers with %s each, %s; giving up after %g s",
            self._num_workers,
            self._need.bundle(),
            found,
            timeout_s,
        )

    def actor_options(self, index: int) -> dict[str, Any]:
        """Return the Ray options that place an actor in the bundle with this index.

        In an existing placement group, `index` has no effect, because Ray chooses the bundle.

        The actor's child tasks are not placed in the bundle, because the actor uses all of it. If this reservation
        uses an existing placement group, they are placed like child tasks of this process. In a Tune trial, they are
        placed in the trial's placement group, which may have a bundle for them.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"num_cpus": self._need.num_cpus, "num_gpus": self._need.num_gpus}
        if "memory" in self._need.custom:  # Ray accepts memory only as a separate option
            options["memory"] = self._need.custom["memory"]
        if custom := {name: amount for name, amount in self._need.custom.items() if name != "memory"}:
            options["resources"] = custom
        if self._need.runtime_env:
            options["runtime_env"] = dict(self._need.runtime_env)
        group = self._own or self._outer
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=group,
                placement_group_bundle_index=index if self._own is not None else -1,
                # With None, Ray asks how this process's own child tasks are placed.
                placement_group_capture_child_tasks=False if self._own is not None else None,
            )
        return options

    def nodes(self) -> list[str | None]:
        """Return the node ID of each bundle.

        For a bundle on a lost node, the ID is None until Ray moves the bundle to another node. If this reservation
        created no placement group, the nodes are not known, and the ID of one live node is returned for all bundles.
        """
        own, alive = self._own, living_nodes()
        if own is None:
            return [next(iter(alive), None)] * self._num_workers
        table: Mapping[str, Any] = ask_head(lambda: _ray().util.placement_group_table(own), {})
        holders = table.get("bundles_to_node_id", {})
        return [node if (node := holders.get(index)) in alive else None for index in range(self._num_workers)]

    def gpus_of_driver(self) -> list[str]:
        """Reserve the GPUs of the first worker, which runs in this process. Return their IDs.

        Ray assigns GPUs only to actors and tasks. An idle actor therefore holds these GPUs until `close`. Inside an
        existing placement group, no IDs are returned, because the group's owner decides which GPUs this process may
        use.
        """
        if self._own is None or not self._need.num_gpus:
            return []
        ray = _ray()
        options = {**self.actor_options(0), "num_cpus": 0}
        self._holder = ray.remote(_GPUHolder).options(**options).remote()
        ids: list[str] = ray.get(self._holder.gpu_ids.remote())
        return ids

    def close(self, timeout_s: float) -> None:
        """Release the resources and wait until Ray confirms. After `timeout_s`, stop waiting and log a warning.

        If the cluster's head node is gone, for example after a signal to all processes of a program, do not wait. Ray
        would try to reach the head node for a minute and then kill this process.
        """
        if self._own is None:
            return
        ray = _ray()
        group, self._own = self._own, None
        holder, self._holder = self._holder, None
        if session() != self._session:
            return

        def remove() -> None:
            if holder is not None:
                ray.kill(holder)
            ray.util.remove_placement_group(group)
            if self._guard is not None:
                ray.kill(self._guard)
            self._await_removal(group, timeout_s)

        ask_head(remove, None)

    def _await_removal(self, group: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while _state_of(group) != "REMOVED":
            if time.monotonic() > deadline:
                logger.warning(
                    "the reservation of %s workers was not removed within %s s", self._num_workers, timeout_s
                )
                return
            time.sleep(_POLL_S)


class _GPUHolder:
    """An actor that does nothing but hold GPUs for the driver process."""

    def gpu_ids(self) -> list[str]:
        """Return the IDs of the GPUs that Ray assigned to this actor."""
        return [str(identity) for identity in _ray().get_gpu_ids()]


def guard(name: str) -> Any:
    """Start an actor that removes the placement group `name` when the owner of the group dies.

    The owner is this process. In a detached trainer, the owner is the trainer's Ray actor instead, whose process Ray
    may restart. The placement group survives such a restart.

    Call this function before you create the placement group. The group then never outlives its owner. Kill the actor
    after you have removed the group.

    Returns:
        The actor. None if Ray itself removes the group, or if Ray lacks the query that the actor needs.
    """
    import ray

    context = ray.get_runtime_context()
    maker = (context.get_worker_id(), context.get_node_id()) if keeper() is None else (context.get_actor_id(), None)
    # False if this process is a driver, whose placement groups Ray itself removes, or if Ray lacks the query.
    if not _is_alive(*maker):
        return None
    return (
        ray.remote(ReservationGuard)
        .options(num_cpus=0, lifetime="detached", namespace=NAMESPACE, name=name, max_restarts=-1)
        .remote(name, *maker)
    )


def _is_alive(maker: str, node_id: str | None) -> bool:
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


class ReservationGuard:
    """An actor that waits until the owner of a placement group is dead, removes the group, and then kills itself.

    The owner is a worker process or another actor: see `guard`. The guard is detached, so it outlives the owner. If the
    guard's node is lost, Ray restarts the guard elsewhere.
    """

    def __init__(self, name: str, maker: str, node_id: str | None) -> None:
        threading.Thread(target=self._watch, args=(name, maker, node_id), daemon=True).start()

    def _watch(self, name: str, maker: str, node_id: str | None) -> None:
        import ray

        while _is_alive(maker, node_id):
            time.sleep(_GUARD_POLL_S)
        time.sleep(_GUARD_POLL_S)  # the dead process's request to create the group may still be in transit
        with suppress(ValueError):  # raised if the group does not exist
            ray.util.remove_placement_group(ray.util.get_placement_group(name))
        ray.kill(ray.get_runtime_context().current_actor)


@dataclass(frozen=True)
class Slot:
    """A place for one worker in a reservation: one bundle of the placement group, with the worker's resources."""

    reservation: Reservation
    index: int

    @property
    def options(self) -> dict[str, Any]:
        """Ray options that place a worker's actor in this slot."""
        return self.reservation.actor_options(self.index)


class Slots:
    """The slots of a trainer.

    Holds the trainer's reservations, its free slots, and its pending requests for more slots.

    Args:
        reserve: Creates a reservation. Takes the number of workers, and True if the first worker is this process.
    """

    def __init__(self, reserve: Callable[[int, bool], Reservation]) -> None:
        self._reserve = reserve
        self._reservations: list[Reservation] = []
        self._free: list[Slot] = []
        self._asked: list[Reservation] = []

    def __len__(self) -> int:
        return sum(len(reservation) for reservation in self._reservations)

    @property
    def are_own(self) -> bool:
        """True if every reservation created a placement group. Actors in the slots then start at once."""
        return all(reservation.is_own for reservation in self._reservations)

    def reserve(
        self, count: int, timeout_s: float, *, has_driver: bool = False, check: Callable[[], None] = lambda: None
    ) -> None:
        """Reserve slots for `count` more workers, and wait until all of them are granted.

        Cancel pending requests first.

        Args:
            count: Number of slots.
            timeout_s: Longest time to wait.
            has_driver: True if the first worker is this process.
            check: Called regularly during the wait. May raise.

        Raises:
            ReservationTimeoutError: The resources were not granted in time. No slot is added.
        """
        self._ask_for(0)
        reservation = self._reserve(count, has_driver)
        reservation.wait(timeout_s, check)
        self._add(reservation)

    def ask_up_to(self, max_workers: int, num_workers: int) -> None:
        """Request slots for the workers that are still missing, without waiting.

        An autoscaler may then start nodes for these workers.

        `take_granted` adds the slots of granted requests to the free slots.

        Args:
            max_workers: Number of workers that the trainer should have.
            num_workers: Number of workers that the trainer has.
        """
        self._ask_for(max_workers - max(num_workers, len(self)))  # a trainer may have more slots than workers

    def _ask_for(self, count: int) -> None:
        """Add or cancel pending requests for slots until `count` requests are pending.

        Each request is for one slot, because a single additional worker is useful, too. See ADR 11.
        """
        while len(self._asked) > max(0, count):
            self._asked.pop().close(_CLOSE_S)
        for _ in range(count - len(self._asked)):
            try:
                reservation = self._reserve(1, False)
            except ReservationTimeoutError:  # the cluster's head node is gone
                return
            if not reservation.is_own:  # an existing placement group cannot grow
                return
            self._asked.append(reservation)

    def take_granted(self) -> None:
        """For each pending request that Ray has granted, add its slots to the free slots."""
        for reservation in [each for each in self._asked if each.is_granted()]:
            self._asked.remove(reservation)
            self._add(reservation)

    def await_room(
        self, count: int, timeout_s: float, sleep: Callable[[float], object], *, has_driver: bool = False
    ) -> None:
        """Wait until the resources for `count` workers could be granted, but at most `timeout_s`.

        Nothing stays reserved. The caller then checks the free resources and decides how many workers to start.

        Args:
            count: Number of workers.
            timeout_s: Longest time to wait.
            sleep: Waits for a number of seconds. May raise.
            has_driver: True if the first worker is this process.
        """
        reservation, waited_s = self._reserve(count, has_driver), 0.0
        try:
            while waited_s < timeout_s and not (reservation.is_own and reservation.is_granted()):
                pause_s = min(_LOOK_S, timeout_s - waited_s)
                sleep(pause_s)
                waited_s += pause_s
        finally:
            reservation.close(_CLOSE_S)

    def _add(self, reservation: Reservation) -> None:
        self._reservations.append(reservation)
        self._free += [Slot(reservation, index) for index in range(len(reservation))]

    def take_over(self, slots: Slots, taken: Collection[Slot]) -> None:
        """Adopt the reservations and pending requests of the trainer's previous process.

        Args:
            slots: The slots of the previous process.
            taken: The slots in which workers are running.
        """
        self._asked = slots._asked
        places = {(id(slot.reservation), slot.index) for slot in taken}
        for reservation in slots._reservations:
            self._add(reservation)
        self._free = [slot for slot in self._free if (id(slot.reservation), slot.index) not in places]

    def take_slot(self) -> Slot:
        """Take a free slot for a worker, even if the slot's node is lost. Used while a group starts."""
        return self._free.pop(0)

    def take_usable(self, count: int, avoid: Collection[str] = ()) -> list[Slot]:
        """Take up to `count` free slots for workers, only on live nodes that are not in `avoid`."""
        nodes = {id(reservation): reservation.nodes() for reservation in self._reservations} if self._free else {}
        usable = [each for each in self._free if nodes[id(each.reservation)][each.index] not in (None, *avoid)]
        taken = usable[: max(0, count)]
        self._free = [slot for slot in self._free if slot not in taken]
        return taken

    def num_usable(self, avoid: Collection[str] = ()) -> int:
        """Return how many slots, whether free or in use, are on live nodes that are not in `avoid`."""
        nodes = [node for reservation in self._reservations for node in reservation.nodes()]
        return sum(node not in (None, *avoid) for node in nodes)

    def node_of(self, slot: Slot) -> str | None:
        """Return the ID of the node on which a slot is now, or None if that node is lost."""
        return slot.reservation.nodes()[slot.index]

    def give_back(self, slot: Slot) -> None:
        """Add a slot to the free slots after its worker has ended."""
        self._free.append(slot)

    def close(self, timeout_s: float) -> None:
        """Close all reservations and cancel all pending requests.

        If Ctrl-C interrupts one of these steps, the others are still completed.
        """
        reservations = [*self._reservations, *self._asked]
        self._reservations, self._asked, self._free = [], [], []
        with ExitStack() as closing:
            for reservation in reversed(reservations):
                closing.callback(reservation.close, timeout_s)
