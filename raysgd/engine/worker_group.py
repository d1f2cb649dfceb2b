"""All workers as one: start them, run a function on all or some, stop them.

Faults of remote workers come back as `Outcome`s; they are never raised from here, and nothing is retried here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raysgd.engine import ranks
from raysgd.engine.local_worker import LocalCall, LocalWorker
from raysgd.engine.replica import ReplicaFactory
from raysgd.engine.types import Failure, GroupReport, Outcome, Rendezvous, Resources, WorkerInfo, World
from raysgd.engine.worker import RemoteWorker, WorkerFailed, pack
from raysgd.exceptions import ReservationTimeoutError, WorkerFault

if TYPE_CHECKING:
    from raysgd.backends.base import Backend

logger = logging.getLogger(__name__)

_DEATH_GRACE_S = 0.05  # how long to listen on after a death: other deaths of the same moment follow within this
_CONNECTION_GRACE_S = 5.0  # a lost connection is nearly always the shadow of a death that Ray reports a little later
_USER_GRACE_S = 1.0  # after an exception in user code: ranks that wait for that rank in a collective never answer
_POLL_S = 0.1
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class GroupSpec:
    """What every group of a trainer is started from.

    Attributes:
        backend: Connects the workers.
        make_replica: Builds a worker's replica; shipped to the worker.
        resources: What one worker needs.
        use_local: Whether rank 0 is the driver itself.
        initialization_hook: Run once in each worker process before anything else.
        reservation_timeout_s: How long to wait until the cluster grants the resources.
        captures: Whether workers copy their state after calls that change it (pointless when none can be lost).
    """

    backend: Backend
    make_replica: ReplicaFactory
    resources: Resources = field(default_factory=Resources)
    use_local: bool = False
    initialization_hook: Callable[[], Any] | None = None
    reservation_timeout_s: float = 100.0
    captures: bool = True


class WorkerGroup:
    """A started set of workers, in rank order. Made by `start` only; `stop` is final."""

    def __init__(self, spec: GroupSpec, num_workers: int) -> None:
        self._spec = spec
        self._reservation: Any = None
        self._workers: list[LocalWorker | RemoteWorker] = []
        self.infos: list[WorkerInfo] = []
        self.worlds: list[World] = []
        self.num_workers = num_workers

    def __len__(self) -> int:
        return self.num_workers

    # ---------------------------------------------------------------------------------------------- starting

    def start(self, reservation_timeout_s: float | None = None) -> GroupReport:
        """Reserves, creates, connects and builds. On anything but success nothing is left behind.

        Returns:
            The replicas' set-up answers; or the report of the step that failed.

        Raises:
            ReservationTimeoutError: When the resources were not granted in time.
        """
        try:
            report = self._start(reservation_timeout_s or self._spec.reservation_timeout_s)
        except BaseException:
            self.kill()
            raise
        if not report.ok:
            self.kill()
        return report

    def _start(self, timeout_s: float) -> GroupReport:
        self._create(timeout_s)
        report = self._prepare(timeout_s)
        if not report.ok:
            return report
        self.infos = [prepared.info for prepared in report.values]
        self.worlds = ranks.assign(self.infos)
        rendezvous = Rendezvous.at(report.values[0].port, self.infos)
        capture = self._spec.captures
        return self._gather(
            {
                rank: worker.submit("build", self.worlds[rank], rendezvous, self._spec.make_replica, capture)
                for rank, worker in enumerate(self._workers)
            }
        )

    def _create(self, timeout_s: float) -> None:
        spec = self._spec
        if spec.use_local:
            self._workers.append(LocalWorker(spec.backend))
        if self.num_workers == len(self._workers):
            return
        from raysgd.engine import resources

        resources.ensure_ray()
        # The driver's share is held too.
        self._reservation = resources.Reservation(spec.resources, self.num_workers, has_driver=spec.use_local)
        self._reservation.wait(timeout_s)
        num_threads = max(1, int(spec.resources.num_cpus))
        for rank in range(len(self._workers), self.num_workers):
            self._workers.append(RemoteWorker(self._reservation.actor_options(rank), spec.backend, num_threads))
        if spec.use_local:
            spec.backend.use_gpus(self._reservation.gpus_of_driver())  # after the others were sent theirs

    def _prepare(self, timeout_s: float) -> GroupReport:
        remote = [worker for worker in self._workers if isinstance(worker, RemoteWorker)]
        placed = [worker.submit("describe") for worker in remote]  # first, so that it does not wait for the user's hook
        calls = {
            rank: worker.submit("prepare", self._spec.initialization_hook, rank == 0)
            for rank, worker in enumerate(self._workers)
        }
        if placed and not self._reservation.is_own:
            self._await_placement(placed, timeout_s)
        return self._gather(calls)

    def _await_placement(self, references: list[Any], timeout_s: float) -> None:
        """Inside somebody else's placement group the actors themselves may have to wait for room: not for ever."""
        import ray

        _, waiting = ray.wait(references, num_returns=len(references), timeout=timeout_s)
        if waiting:
            from raysgd.engine import resources

            raise ReservationTimeoutError(
                f"{len(waiting)} of {len(references)} workers were not placed within {timeout_s:g} s.\n"
                + resources.explain(self._spec.resources, len(references), resources.cluster_view())
            )

    # ---------------------------------------------------------------------------------------------- calling

    def on_replica(
        self,
        function: Callable[..., Any],
        args_by_rank: Mapping[int, Sequence[Any]],
        *,
        capture: bool = False,
        landed: int | None = None,
        tick: Callable[[], None] | None = None,
    ) -> GroupReport:
        """Runs `function(replica, *args)` on the ranks named in `args_by_rank` and gathers the answers."""
        packed: dict[int, tuple[Any, ...]] = {}  # by identity of the arguments: most calls say the same to every rank
        calls = {}
        for rank, args in args_by_rank.items():
            worker = self._workers[rank]
            if worker.is_local:
                calls[rank] = worker.submit("on_replica", function, capture, landed, *args)
                continue
            if id(args) not in packed:
                packed[id(args)] = pack(function, capture, landed, args)
            calls[rank] = worker.submit("on_packed", *packed[id(args)])
        return self._gather(calls, tick)

    def beside(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Runs `function(replica, *args)` on a rank that may be busy. Returns a transfer with `result(timeout_s)`."""
        call = self._workers[rank].submit("beside", function, *args)
        return _Done(call.function()) if isinstance(call, LocalCall) else _Reference(call)

    def share(self, value: Any) -> list[Any]:
        """`value` as an argument for each rank: remote ranks share one copy in the object store."""
        if self.is_driver_only:
            return [value]
        import ray

        reference = ray.put(value)
        return [value if worker.is_local else reference for worker in self._workers]

    @property
    def is_driver_only(self) -> bool:
        """Whether the only worker is the driver itself, so that no worker can be lost."""
        return not self._remote_ranks()

    @property
    def local_replica(self) -> Any:
        """The replica in the driver; None when all workers are remote."""
        worker = self._workers[0]
        return worker.replica if isinstance(worker, LocalWorker) else None

    # ---------------------------------------------------------------------------------------------- stopping

    def stop(self, timeout_s: float) -> None:
        """Lets every worker close what it has, then ends the processes and gives the resources back."""
        try:
            self._close_all()
        finally:
            self.kill(timeout_s)

    def _close_all(self) -> None:
        remote = [worker.submit("close") for worker in self._workers if isinstance(worker, RemoteWorker)]
        for worker in self._workers:
            if isinstance(worker, LocalWorker):
                worker.kill()
        if not remote:
            return
        import ray

        if not ray.is_initialized():
            return
        done, waiting = ray.wait(remote, num_returns=len(remote), timeout=_CLOSE_TIMEOUT_S)
        if waiting:
            logger.warning("%s workers did not close within %s s and are killed", len(waiting), _CLOSE_TIMEOUT_S)
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                logger.debug("a worker failed to close: %s", error)

    def kill(self, timeout_s: float = 5.0) -> None:
        """Ends the processes at once and gives the resources back. Safe at any time, also half-started or twice."""
        workers, self._workers = self._workers, []
        reservation, self._reservation = self._reservation, None
        try:
            for worker in sorted(workers, key=lambda w: w.is_local):  # remote first: a local one may wait for them
                worker.kill()
        finally:
            if reservation is not None:
                reservation.release(timeout_s)

    # ---------------------------------------------------------------------------------------------- gathering

    def _remote_ranks(self) -> list[int]:
        return [rank for rank, worker in enumerate(self._workers) if not worker.is_local]

    def _gather(self, calls: Mapping[int, Any], tick: Callable[[], None] | None = None) -> GroupReport:
        """Waits for all answers; after the first failure, only as long as it takes to see what belongs to it."""
        local = {rank: call for rank, call in calls.items() if isinstance(call, LocalCall)}
        remote = {rank: call for rank, call in calls.items() if rank not in local}
        outcomes = self._gather_both(local, remote) if local else _Listener(remote).listen(tick)
        return GroupReport(tuple(_ranked(outcomes[rank]) for rank in sorted(calls)))

    def _gather_both(self, local: Mapping[int, LocalCall], remote: Mapping[int, Any]) -> dict[int, Outcome]:
        """The local call runs here while a thread listens to the remote ones.

        The local rank may be waiting for a remote one that failed. Nothing but the end of the others frees it.
        """
        listener = _Listener(remote)
        heard: dict[int, Outcome] = {}
        is_local_done = threading.Event()

        def listen() -> None:
            heard.update(listener.listen())
            if all(outcome.ok for outcome in heard.values()):
                return
            kinds: set[str] = {outcome.failure.kind for outcome in heard.values() if outcome.failure}
            if not is_local_done.wait(_grace_s(kinds)):
                heard.update(self._kill_remote(heard))

        thread = threading.Thread(target=listen, name="raysgd-listener", daemon=True)
        if remote:
            thread.start()
        outcomes = {}
        try:
            for rank, call in local.items():
                value, failure = call.run()
                outcomes[rank] = Outcome(rank, value, failure)
        finally:
            is_local_done.set()
            if not all(rank in outcomes and outcomes[rank].ok for rank in local):
                listener.abandon()
        if remote:
            thread.join()
        return {**outcomes, **heard}

    def _kill_remote(self, heard: Mapping[int, Outcome]) -> dict[int, Outcome]:
        """Ends the remote processes; whatever they answered before, nobody can count on them any more."""
        for worker in self._workers:
            if isinstance(worker, RemoteWorker):
                worker.kill()
            else:
                worker.interrupt()
        return {rank: replace(outcome, answered=False) for rank, outcome in heard.items()}


class _Listener:
    """Gathers the answers of remote calls, and decides how long to listen on after a failure."""

    def __init__(self, references: Mapping[int, Any]) -> None:
        self._references = references
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """The local rank failed: the others get the usual grace, no more."""
        self._abandoned.set()

    def listen(self, tick: Callable[[], None] | None = None) -> dict[int, Outcome]:
        """The outcomes by rank. Blocks until all have answered or a failure has been understood."""
        if not self._references:
            return {}
        values = self._wait_for_all_or_first_failure(tick)
        if values is not None:
            return {rank: Outcome(rank, value) for rank, value in zip(self._references, values, strict=True)}
        return self._look_closer()

    def _wait_for_all_or_first_failure(self, tick: Callable[[], None] | None) -> list[Any] | None:
        import ray

        pause_s = _POLL_S if tick or self._is_beside_local() else None
        waiting = {reference: rank for rank, reference in self._references.items()}
        values: dict[int, Any] = {}
        while waiting and not self._abandoned.is_set():
            # Not `ray.get` on all of them: it sits out the others when the exception is too large to come inline.
            done, rest = ray.wait(list(waiting), num_returns=1, timeout=pause_s)
            if not done and tick is not None:
                tick()
            if done and rest:  # all that are ready by now, in one go
                done += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
            for reference in done:
                try:
                    values[waiting.pop(reference)] = ray.get(reference)
                except (ray.exceptions.RayError, WorkerFailed):
                    return None
        return None if waiting else [values[rank] for rank in self._references]

    def _is_beside_local(self) -> bool:
        return threading.current_thread() is not threading.main_thread()

    def _look_closer(self) -> dict[int, Outcome]:
        """Listens until the kind of failure is plain: see the grace periods above."""
        began = time.monotonic()
        while True:
            outcomes = {rank: _outcome(rank, reference) for rank, reference in self._references.items()}
            if all(outcome.answered for outcome in outcomes.values()):
                return outcomes
            kinds: set[str] = {outcome.failure.kind for outcome in outcomes.values() if outcome.failure}
            if time.monotonic() - began >= _grace_s(kinds):
                return outcomes
            time.sleep(0.005)


def _grace_s(kinds: set[str]) -> float:
    if "died" in kinds:
        return _DEATH_GRACE_S
    return _CONNECTION_GRACE_S if kinds == {"disconnected"} else _USER_GRACE_S


def _outcome(rank: int, reference: Any) -> Outcome:
    """What is known of one call right now."""
    import ray

    try:
        return Outcome(rank, ray.get(reference, timeout=0))
    except ray.exceptions.GetTimeoutError:
        return Outcome(rank, answered=False)
    except WorkerFailed as carrier:  # Ray raises a class derived from ours
        return Outcome(rank, failure=_carried(carrier))
    except ray.exceptions.RayTaskError as error:  # the worker could not even word its failure, or Ray could not run it
        return Outcome(rank, failure=Failure("user", _fault(rank, error.cause or error, str(error))))
    except ray.exceptions.RaySystemError as error:  # the value arrived, but this process cannot unpickle it
        return Outcome(rank, failure=Failure("user", _fault(rank, error, "")))
    except ray.exceptions.RayError as error:
        return Outcome(rank, failure=Failure("died", _fault(rank, error, "")))


def _ranked(outcome: Outcome) -> Outcome:
    """With the rank filled in where the worker did not know its own yet."""
    failure = outcome.failure
    if failure is None or failure.fault.rank >= 0:
        return outcome
    return replace(outcome, failure=replace(failure, fault=replace(failure.fault, rank=outcome.rank)))


def _carried(carrier: Any) -> Failure:
    cause = getattr(carrier, "cause", carrier)
    failure: Failure = cause.failure
    return failure


def _fault(rank: int, error: BaseException, traceback_text: str) -> WorkerFault:
    first_line = str(error).strip().partition("\n")[0]
    return WorkerFault(rank, "unknown", error, type(error).__name__, first_line, "the worker process", traceback_text)


@dataclass(frozen=True)
class _Done:
    """A transfer that needed no travel."""

    value: Any

    def result(self, timeout_s: float | None) -> Any:
        return self.value


@dataclass(frozen=True)
class _Reference:
    """A transfer through Ray's object store. Holding on to the value keeps it in the store of the driver's node."""

    reference: Any

    def result(self, timeout_s: float | None) -> Any:
        import ray

        try:
            return ray.get(self.reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError("still on its way") from error
