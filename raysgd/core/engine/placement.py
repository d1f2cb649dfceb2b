"""Reserves resources in the Ray cluster. A reservation consists of slots, each for one worker.

No other module creates or removes placement groups.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from raysgd.core.cluster.keeper import NAMESPACE, keeper
from raysgd.core.cluster.ray_cluster import (
    ask_head,
    cluster_view,
    is_alive,
    living_nodes,
    outer_group,
    session,
    untyped_ray,
)
from raysgd.core.cluster.resources import Resources, capacity, explain, impossibility
from raysgd.core.engine.shared.interface import NO_WORDS, FrontEndWords
from raysgd.exceptions import OnFailure, ReservationTimeoutError

logger = logging.getLogger(__name__)


_POLL_S = 0.01
_GUARD_POLL_S = 2.0
_LOOK_S = 0.5
_CLOSE_S = 5.0
_SLICE_S = 1.0
# Seconds of waiting after which a warning says what is missing; an idle cluster grants a reservation within a second.
_TELL_S = 5.0
_CANNOT_GROW = (
    "No node will join: Ray was started for this program alone. To use a cluster, run the program on one of its "
    "machines, or set RAY_ADDRESS."
)


def _state_of(group: Any) -> str:
    """Return a placement group's state, such as "CREATED".

    Unlike `group.wait(0)`, this function waits until Ray has answered. If the head node is gone, it returns "".
    """
    return str(ask_head(lambda: untyped_ray().util.placement_group_table(group), {"state": ""}).get("state", "REMOVED"))


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

    Attributes:
        is_own: True if this reservation created a placement group. Actors then start as soon as the reservation is
            granted.

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
        ray = untyped_ray()
        self._need, self._num_workers, self._words = need, num_workers, words
        self._session = session()
        self._holder: Any = None
        self._group: Any = outer_group() if within == "default" else within
        self._guard: Any = None
        bundle = need.bundle()
        self.is_own = bool(self._group is None and bundle and num_workers)
        if self.is_own:
            name = f"raysgd-{uuid.uuid4().hex[:8]}"  # unique, because several trainers may run
            bundles = [bundle] * num_workers
            if has_driver and need.num_gpus:
                bundles[0] = {**bundle, f"node:{ray.util.get_node_ip_address()}": 0.001}
            self._guard = guard(name)
            labels = {"bundle_label_selector": [dict(need.labels)] * num_workers} if need.labels else {}
            lifetime = None if keeper() is None else "detached"
            strategy = "PACK" if packs else "SPREAD"
            make = partial(ray.util.placement_group, bundles, strategy, name, lifetime, **labels)
            self._group = ask_head(make, None)
            if self._group is None:
                raise ReservationTimeoutError("Ray was stopped: its head node does not answer.")

    def __len__(self) -> int:
        return self._num_workers

    def is_granted(self) -> bool:
        """Return True if the resources have been granted."""
        return self._group is None or _state_of(self._group) == "CREATED"

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
        if self._group is None:
            return
        began, waited_s = time.monotonic(), 0.0
        with OnFailure(partial(self.close, timeout_s=5.0)):
            # Wait at most one second at a time, because Ray's `wait` takes whole seconds and blocks Ctrl-C.
            while not self._is_ready(int(timeout_s - waited_s >= _SLICE_S)):
                time.sleep(_POLL_S)
                check()
                before_s, waited_s = waited_s, time.monotonic() - began
                if not before_s:
                    self._tell_impossible(timeout_s)
                if before_s < _TELL_S <= waited_s:
                    self._tell_missing(timeout_s)
                if waited_s >= timeout_s:
                    if self.is_granted():  # if this process stalled, the grant may have arrived in the meantime
                        return
                    view = cluster_view()
                    reason = impossibility(self._need, self._num_workers, view, self._words.with_cpus)
                    table = reason or explain(self._need, self._num_workers, view)
                    message = f"The cluster did not grant {self._num_workers} workers within {timeout_s:g} s.\n{table}"
                    raise ReservationTimeoutError(f"{message}\n{self._words.when_not_granted}".rstrip())

    def _is_ready(self, timeout_s: int) -> bool:
        try:
            return bool(ask_head(partial(self._group.wait, timeout_s), False))
        except Exception as error:  # Ray raises nothing more specific
            if _state_of(self._group) != "REMOVED":
                raise
            raise ReservationTimeoutError(
                f"Ray has removed the reservation of {self._num_workers} workers before it was granted. It does so if "
                "the raylet on the node of this process dies, for example because `/dev/shm` is full: look into "
                "`raylet.err` in the folder of Ray's logs, and start Ray again."
            ) from error

    def _tell_impossible(self, timeout_s: float) -> None:
        view = cluster_view()
        reason = impossibility(self._need, self._num_workers, view, self._words.with_cpus)
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
        if self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group,
                placement_group_bundle_index=index if self.is_own else -1,
                # With None, Ray asks how this process's own child tasks are placed.
                placement_group_capture_child_tasks=False if self.is_own else None,
            )
        return options

    def nodes(self) -> list[str | None]:
        """Return the node ID of each bundle.

        For a bundle on a lost node, the ID is None until Ray moves the bundle to another node. If this reservation
        created no placement group, the nodes are not known, and the ID of one live node is returned for all bundles.
        """
        group, alive = self._group, living_nodes()
        if not self.is_own:
            return [next(iter(alive), None)] * self._num_workers
        table: Mapping[str, Any] = ask_head(lambda: untyped_ray().util.placement_group_table(group), {})
        holders = table.get("bundles_to_node_id", {})
        return [node if (node := holders.get(index)) in alive else None for index in range(self._num_workers)]

    def gpus_of_driver(self) -> list[str]:
        """Reserve the GPUs of the first worker, which runs in this process. Return their IDs.

        Ray assigns GPUs only to actors and tasks. An idle actor therefore holds these GPUs until `close`. Inside an
        existing placement group, no IDs are returned, because the group's owner decides which GPUs this process may
        use.
        """
        if not (self.is_own and self._need.num_gpus):
            return []
        ray = untyped_ray()
        options = {**self.actor_options(0), "num_cpus": 0}
        self._holder = ray.remote(_GPUHolder).options(**options).remote()
        ids: list[str] = ray.get(self._holder.gpu_ids.remote())
        return ids

    def close(self, timeout_s: float) -> None:
        """Release the resources and wait until Ray confirms. After `timeout_s`, stop waiting and log a warning.

        If the cluster's head node is gone, for example after a signal to all processes of a program, do not wait. Ray
        would try to reach the head node for a minute and then kill this process.
        """
        if not self.is_own:
            return
        ray, group, holder = untyped_ray(), self._group, self._holder
        self.is_own, self._group, self._holder = False, None, None
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
        return [str(identity) for identity in untyped_ray().get_gpu_ids()]


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
    if not is_alive(*maker):
        return None
    return (
        ray.remote(ReservationGuard)
        .options(num_cpus=0, lifetime="detached", namespace=NAMESPACE, name=name, max_restarts=-1)
        .remote(name, *maker)
    )


class ReservationGuard:
    """An actor that waits until the owner of a placement group is dead, removes the group, and then kills itself.

    The owner is a worker process or another actor: see `guard`. The guard is detached, so it outlives the owner. If the
    guard's node is lost, Ray restarts the guard elsewhere.
    """

    def __init__(self, name: str, maker: str, node_id: str | None) -> None:
        threading.Thread(target=self._watch, args=(name, maker, node_id), daemon=True).start()

    def _watch(self, name: str, maker: str, node_id: str | None) -> None:
        import ray

        while is_alive(maker, node_id):
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
        for reservation in slots._reservations:
            self._add(reservation)
        self._free = [slot for slot in self._free if slot not in taken]

    def take_slot(self) -> Slot:
        """Take a free slot for a worker, even if the slot's node is lost. Used while a group starts."""
        return self._free.pop(0)

    def take_usable(self, count: int, avoid: Collection[str] = ()) -> list[Slot]:
        """Take up to `count` free slots for workers, only on live nodes that are not in `avoid`."""
        nodes = {reservation: reservation.nodes() for reservation in self._reservations} if self._free else {}
        usable = [each for each in self._free if nodes[each.reservation][each.index] not in (None, *avoid)]
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
