"""The start of a group: reserve, create, connect and build."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from raysgd.engine.decisions import ranks
from raysgd.engine.decisions.failures import classify, words
from raysgd.engine.group.group_calls import GroupCalls
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.group.loans import StandbyWorker
from raysgd.engine.group.members import Members
from raysgd.engine.group.standby import StandbyWorkers, StartupCheck
from raysgd.engine.placement import Slots, cluster_view, explain
from raysgd.engine.platform import Platform
from raysgd.engine.shared.types import GroupReport, Outcome, Rendezvous
from raysgd.engine.worker import packed_bytes
from raysgd.exceptions import ReservationTimeoutError, TrainerShutdownError

logger = logging.getLogger(__name__)


class Startup:
    """Starts the workers of a group, once."""

    def __init__(
        self,
        spec: GroupSpec,
        slots: Slots,
        members: Members,
        calls: GroupCalls,
        standby: StandbyWorkers,
        platform: Platform,
    ) -> None:
        self._spec, self._slots, self._members, self._calls = spec, slots, members, calls
        self._standby, self._platform = standby, platform
        self._startup = StartupCheck(platform, spec.heartbeat_s)
        self._is_cancelled = False

    def prepare(self, num_workers: int, num_spares: int, timeout_s: float, min_workers: int) -> GroupReport:
        """Makes so many workers ready to be connected, and holds room for so many spares.

        Workers that die over it are left out, as long as `min_workers` are ready. Others start in their place, as far
        as that is allowed; they are waited for only where fewer are ready, and else step in later.

        Returns:
            Where the workers live; or the report of what failed.

        Raises:
            ReservationTimeoutError: The resources were not granted in time.
            TrainerShutdownError: After `cancel`.
        """
        self._create(num_workers, num_spares, timeout_s)
        report = self._make_ready(timeout_s, min_workers)
        if report.ok:
            # Now that all are there, it is known where they are, and so which rank each gets.
            order = ranks.in_order(report.values, first_stays=self._spec.use_local)
            workers = self._members.workers
            self._members.give_ranks([workers[index] for index in order], [report.values[index] for index in order])
        return report

    def connect(self) -> GroupReport:
        """Connects the workers that are ready, and makes their replicas. Returns the replicas' set-up answers."""
        build = partial(self.build, captures=self._spec.captures_after_calls)
        return self._calls.connect(build, self.look_after)

    def add(self, joining: Sequence[StandbyWorker]) -> None:
        """Looks after these from now on, too."""
        for each in joining:
            self._startup.add(each.worker)

    def look_after(self) -> None:
        """Kills workers that freeze meanwhile. To be called now and then while they start."""
        self._startup.poll()

    def cancel(self) -> None:
        """From another thread: the start raises as soon as it can."""
        self._is_cancelled = True

    def check_wanted(self) -> None:
        """Raises `TrainerShutdownError` after `cancel`."""
        if self._is_cancelled:
            raise TrainerShutdownError("The trainer was shut down while its workers were started.")

    def _create(self, num_workers: int, num_spares: int, timeout_s: float) -> None:
        spec, workers = self._spec, self._members.workers
        if spec.use_local:
            workers.append(self._platform.new_local_worker(spec.connection))
        if num_workers == len(workers):
            return
        packed_bytes("What a worker is made of", (spec.make_replica, spec.initialization_hook))
        self._platform.ensure_running()
        # The driver's share is held too.
        self._slots.reserve(num_workers + num_spares, timeout_s, has_driver=spec.use_local, check=self.check_wanted)
        slot_of_driver = self._slots.take() if spec.use_local else None
        for _ in range(len(workers), num_workers):
            worker = self._platform.new_worker(self._slots.take(), spec.connection, spec.num_threads)
            workers.append(worker)
            self._startup.add(worker)
        self.check_wanted()
        if slot_of_driver is not None:
            spec.connection.use_gpus(slot_of_driver.reservation.gpus_of_driver())  # after the others were sent theirs

    def _make_ready(self, timeout_s: float, min_workers: int) -> GroupReport:
        num_workers = len(self._members)
        placed = self._members.submit("describe", ranks=self._members.remote_ranks)  # answered beside the user's hook
        calls = self._members.submit("prepare", self._spec.initialization_hook)
        if placed and not self._slots.are_own:
            self._await_placement(list(placed.values()), timeout_s)
        report = self._calls.gather(calls, self.look_after)
        while not report.ok:
            dead = {found.rank for found in report.outcomes if found.failure is not None}
            if classify(report).kind == "user":
                return report
            logger.warning("%s; continuing with the others", words(classify(report)))
            self._leave_out(dead)
            calls = {rank: call for rank, call in calls.items() if rank not in dead}
            if len(calls) + self._standby.num_coming + self._standby.num_ready < min_workers:
                return report
            failed, report = report, self._calls.gather(calls, self.look_after)
        joining = self._standby.take_needed(min_workers - len(calls), num_workers - len(calls), self.look_after)
        if joining is None:
            self.check_wanted()
            return failed
        self.add(joining)
        self._members.workers = [self._members.workers[rank] for rank in calls] + [each.worker for each in joining]
        return GroupReport((*report.outcomes, *(Outcome(-1, each.info) for each in joining)))

    def _leave_out(self, dead: Collection[int]) -> None:
        for rank in dead:
            worker = self._members.remote(rank)
            self._startup.remove(worker)
            worker.kill()
            self._slots.give_back(worker.slot)
        self._standby.replace(len(dead), len(self._members))

    def _await_placement(self, references: list[Any], timeout_s: float) -> None:
        """Inside another placement group the actors themselves may have to wait for room: not forever."""
        import ray

        _, waiting = ray.wait(references, num_returns=len(references), timeout=timeout_s)
        if waiting:
            raise ReservationTimeoutError(
                f"{len(waiting)} of {len(references)} workers were not placed within {timeout_s:g} s.\n"
                + explain(self._spec.resources, len(references), cluster_view())
            )

    def build(self, rendezvous: Rendezvous, *, captures: bool) -> Mapping[int, Any]:
        """Lets all members join and make their replicas; returns the calls. With `captures` they copy the state."""
        make_replica = self._spec.make_replica
        return {
            rank: worker.submit("build", self._members.worlds[rank], rendezvous, make_replica, captures)
            for rank, worker in enumerate(self._members.workers)
        }
