"""The engine's interface to the rest of the library.

A front end, such as `TorchTrainer`, supplies a `Replica` and a `Connection` for the workers, starts groups with the
settings of a `GroupSpec`, and makes `Call`s. The engine records what happens to the groups in a `GroupHistory`.

A worker imports the module of each function that it receives. This module therefore imports no module that only the
driver needs.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar

from raysgd.core.cluster.resources import Resources
from raysgd.core.engine.shared.types import Heartbeat, Rendezvous, ReplicaProgress, StateHandover, World
from raysgd.core.text import log_lines
from raysgd.core.text.log_lines import LogRelay

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Capture:
    """One rank's part of a snapshot.

    Attributes:
        rank_state: This rank's own state, such as the state of its random generators. It is small.
        shared_state: State that all ranks share, such as model and optimizer. Set only by rank 0, and only if the state
            is small enough to be sent with the answer to the call.
        progress: This rank's progress in the running call, for a mid-call snapshot. It is small.
        token: Identifies the copy of the shared state that the worker stores until the driver fetches the copy. None if
            the worker stores no copy.
        is_part: True if the shared state is sharded. Each rank's token then identifies the rank's shard.
        seconds: How long the worker took to copy the state.
    """

    rank_state: Any = None
    shared_state: Any = None
    progress: Any = None
    token: int | None = None
    is_part: bool = False
    seconds: float = 0.0


class Replica(Protocol):
    """The object that holds and trains the model in a worker process.

    PyTorch and TensorFlow have separate replica classes.

    Of these methods, only `fetch` may be called while another method is running.
    """

    def setup(self) -> Any:
        """Build the user's objects, such as the model. Called after the worker has joined its group.

        Returns:
            Facts about these objects, such as the number of models. The front end needs these facts.
        """

    def capture(self, landed_token: int | None) -> Capture:
        """Copy the training state. Return the copy, or a token with which the driver can fetch the copy.

        Args:
            landed_token: Token of the newest copy that has arrived in the driver. The worker can discard that copy.
        """

    def fetch(self, token: int) -> Any:
        """Return the copied state that `token` identifies.

        May be called from another thread, possibly during training.
        """

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Restore the training state from a snapshot.

        Args:
            shared_state: State that all ranks share, such as the model.
            own_state: This rank's own state, such as its random generators. None if the snapshot has none for this
                rank.
        """

    def shutdown(self) -> None:
        """Release resources that would outlive the process or disturb the next replica in the same process."""


class RegroupingReplica(Replica, Protocol):
    """A replica that can survive the loss of other replicas: it keeps its process and continues in a new group.

    `heartbeat`, `propose_hold`, `resolve_hold`, `last_hold`, `part_of_snapshot`, `hold` and `leave_call` are called
    from a second thread while a call runs.
    """

    def replica_progress(self) -> ReplicaProgress:
        """Return how far this replica is in its last call, and whether it can continue in a new group.

        Called between two calls, after a failed call, or after the worker has left its old group.
        """

    def warm_up(self) -> None:
        """Run operations that are slow the first time, such as compilation. Called before the worker joins a group.

        It does not matter if these operations change the replica's state, because joining the group overwrites that
        state with the group's state.
        """

    def regroup(self, world: World, handover: StateHandover) -> Any:
        """Continue as a rank of a new group that all ranks have joined. Return the same facts as `setup`.

        Args:
            world: This worker's rank in the new group, group size and so on.
            handover: Which rank sends the training state, and which ranks receive it.
        """

    def heartbeat(self) -> Heartbeat:
        """Return the replica's current progress as a `Heartbeat`."""

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        """Propose that this rank stops the running call at a step.

        If the rank accepts, it waits at that step until `resolve_hold` delivers the decision.

        Args:
            number: Number of the proposal. Numbers increase, and a proposal that arrives twice or late is ignored.
            margin: Number of steps from now after which to stop. Used if `at` is None.
            at: Number of completed steps at which another rank has agreed to stop.

        Returns:
            Number of completed steps at which this rank will stop, or None if it cannot stop there.
        """

    def resolve_hold(self, number: int, is_agreed: bool) -> None:
        """Deliver the decision on the proposal with this number to this rank.

        If all ranks have agreed, this rank stops the call at the proposed step. Otherwise, it continues the call.
        """

    def last_hold(self) -> tuple[int, bool]:
        """Return the number of the last proposal to stop, and True if `resolve_hold` confirmed that proposal."""

    def restore_inside(
        self, shared_state: Any, own_state: Any, first: Any, parts: Sequence[Any], everyones: Sequence[Any]
    ) -> None:
        """Restore a snapshot that was taken inside a call, so that the call can resume there.

        Args:
            shared_state: State that all ranks share, such as the model.
            own_state: This rank's own state. None if the snapshot has none for this rank.
            first: Progress of rank 0 in the call.
            parts: Progress of the old ranks whose metrics this rank takes over. See `taken_over`.
            everyones: Progress of every old rank, as `for_others` returns it.
        """

    def capture_here(self) -> Capture:
        """Copy the training state after the last completed step.

        If a call was interrupted and can resume, also copy the progress in that call.
        """

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of the mid-call snapshot with this number, or None if it is no longer stored."""

    def hold(self) -> None:
        """Interrupt the running call, so that workers can join a group in which a user's function keeps running.

        The call only waits for messages from the user's function. The function itself is not interrupted. Called only
        with `runs_on` of the group spec.
        """

    def leave_call(self, number: int) -> None:
        """Stop the call that this replica runs outside the group, on a spare worker. It stops between two batches.

        Args:
            number: Number of the loan for which the spare worker runs that call. Calls of earlier loans are stopped,
                too.
        """


ReplicaFactory = Callable[[World], Replica]


def method_of(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a function that can be sent to a worker, and calls the method of the replica that it receives there.

    Args:
        method: The method as a protocol declares it, for example `Replica.fetch`.
    """
    return partial(_call_method, method.__name__)


def _call_method(name: str, replica: Any, *args: Any) -> Any:
    return getattr(replica, name)(*args)


def nothing(replica: Replica) -> None:
    """Do nothing. Workers run this function if the only purpose of a call is that they copy their state afterwards."""


def taken_over(parts: Sequence[T], rank: int, num_ranks: int) -> Sequence[T]:
    """Return the parts of the old ranks, such as their metrics, that one rank of a new group takes over.

    In a group of n ranks, these are the parts of every n-th old rank, starting with the old rank of its own number.
    """
    return parts[rank::num_ranks]


def heartbeat(replica: Any) -> Heartbeat | None:
    """Return the replica's heartbeat, with the log lines of the worker process. Return None if it has no heartbeats.

    The lines are those since the process's last heartbeat or answer. The answer to the running call repeats them,
    because the call may end before the driver reads the heartbeat.
    """
    heartbeat = sign_of_life(replica)
    return None if heartbeat is None else replace(heartbeat, notes=log_lines.glance())


def sign_of_life(replica: Any) -> Heartbeat | None:
    """Return a heartbeat without log lines. Return None if the replica has no heartbeats."""
    heartbeat: Heartbeat | None = replica.heartbeat() if hasattr(replica, "heartbeat") else None
    return heartbeat


def last_hold(replica: Any) -> tuple[int, bool]:
    """Return the number of the last proposal to stop, and True if `resolve_hold` confirmed that proposal."""
    last_hold: tuple[int, bool] = replica.last_hold() if hasattr(replica, "last_hold") else (0, False)
    return last_hold


FORM_TIMEOUT_S = 120.0
"""Default timeout for started ranks to form a group, in seconds."""


class Connection(ABC):
    """Connects one worker with the other workers of its group, for example in a PyTorch process group.

    All methods run in the worker's process.
    """

    def limit_threads(self, num_threads: int) -> None:
        """Limit the number of threads of numerical libraries. This works best before the libraries are imported."""
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(num_threads)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(num_threads)

    @abstractmethod
    def load(self) -> None:
        """Import the framework in a remote worker's process. The workers of a new group do this at the same time."""

    def load_in_driver(self) -> None:
        """Import the framework in the driver. Called if the driver itself is a worker (`use_local=True`)."""
        self.load()

    def use_gpus(self, gpu_ids: Sequence[str]) -> None:  # noqa: B027 - only GPU frameworks have to do something
        """If the driver itself is a worker, restrict it to the GPUs that are reserved for it.

        Remote workers do not need this, because Ray shows each of them only its assigned GPUs.

        Args:
            gpu_ids: IDs of the reserved GPUs.
        """

    @abstractmethod
    def open_endpoint(self, host: str) -> int:
        """Start listening for the other ranks of the next group, and return the endpoint's number.

        The number contains the port, and may have further bits: see `PORT_BITS`. The worker may not have a rank yet.

        Args:
            host: Address of this machine to listen on. Only ranks that can reach this address can connect.
        """

    @abstractmethod
    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Connect to the other ranks of the group. Return when all ranks are connected.

        Args:
            rendezvous: The addresses of all ranks. This rank's address is the endpoint that it opened.
            world: This worker's rank, group size and so on.
            even_alone: True to form a group even for a single rank. A model wrapped for data parallelism requires this.
        """

    def interrupt(self) -> None:  # noqa: B027 - most connections have nothing to interrupt
        """Abort `join` and all collectives of this rank. Afterwards, the group is unusable.

        May be called from any thread. If a connection class does not override this method, ranks that wait for a lost
        rank can only be restarted.
        """

    def give_up(self, error: BaseException) -> None:
        """Abort this rank's communication after a connection error, so that no other rank waits for this rank.

        Args:
            error: The exception that the call raised.
        """
        self.interrupt()

    @abstractmethod
    def leave(self) -> None:
        """Leave the group, and let ranks that still wait for this rank notice that it has left.

        This method may be called even if the worker has not joined a group or the group is broken.
        """

    def leave_for_another(self) -> None:
        """Leave the group in order to join another group. Unlike `leave`, this method may postpone cleanup."""
        self.leave()

    @abstractmethod
    def is_connection_error(self, error: BaseException) -> bool:
        """Return True if an exception raised in this process means that the connections of the group are broken.

        The exception must still have its traceback. Return False for errors of user code, such as a lost database
        connection: a call is retried if the group is broken, but an error of user code must be raised.
        """


class NoConnection(Connection):
    """A connection for workers that run independently of each other and never communicate."""

    def load(self) -> None:
        """Do nothing: there is no framework to import."""

    def open_endpoint(self, host: str) -> int:
        return 0

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Do nothing: there is no group to join."""

    def leave(self) -> None:
        """Do nothing: there is no group to leave."""

    def is_connection_error(self, error: BaseException) -> bool:
        return False


@dataclass(frozen=True)
class Call:
    """A function to run on the workers of a group, and how to recover from failures while it runs.

    Attributes:
        function: Runs on the worker as `function(replica, *args)`.
        args_for: Takes the `World` of each rank and returns the arguments of each rank. Called for every attempt,
            because the number of ranks may change.
        changes_state: True if the call changes the replicas' training state. A restart must then restore a snapshot
            taken after the call or repeat the call.
        keeps_alike: True if replicas that were in sync before the call are in sync after it. If such a call fails on
            only some ranks, the replicas may be out of sync.
        captures: True to copy the replicas' state after the call even if no snapshot is due.
        rank: The only rank that runs the call. None for all ranks.
        on_wait: Called about ten times a second while the driver waits for the call. Not called if the driver is the
            only worker.
        resume: Function that resumes the call in a newly formed group, with the same arguments as `function`. None if
            the call can only start over. That is enough for a call that does not change the state.
        leaves_as_new: True if new workers are built with the state that this call produces. A restart then need not
            repeat the call.
        check: Called with the values of all ranks before the call counts as completed. If it raises, the group is
            killed, because its replicas are out of sync.
        divergence: Checks whether ranks ran different steps, so that some would wait for other ranks forever. Returns a
            description of the difference, or "". Takes one object per rank: while the call runs, the rank's heartbeat;
            after the call has failed, the rank's value or failure.
        may_continue: False if survivors of a failure must not continue the call in a new group.
        is_short: True if the call may be so short that the time to send it matters.
        is_repeatable: True if repeating the call later gives the same result. False for a function that reads the
            user's objects, because the user may change them before the call is repeated.
        split: Called if memory ran out, with the number of samples that each worker that reports it can process at
            once. The next attempt's arguments must let all ranks process smaller batches.
        leaves: Called regularly while the call runs. Once it returns True, the call ends early: all ranks stop at an
            upcoming step, and the call ends as `Left`. Only for calls that can be resumed. See ADR 140.
    """

    function: Callable[..., Any]
    args_for: Callable[[Sequence[World]], Sequence[Sequence[Any]]] = lambda worlds: [()] * len(worlds)
    changes_state: bool = False
    keeps_alike: bool = False
    captures: bool = False
    rank: int | None = None
    on_wait: Callable[[], None] | None = None
    resume: Callable[..., Any] | None = None
    leaves_as_new: bool = False
    check: Callable[[Sequence[Any]], None] = lambda values: None
    divergence: Callable[[Mapping[int, Any]], str] = lambda told: ""
    may_continue: bool = True
    is_short: bool = False
    is_repeatable: bool = True
    leaves: Callable[[], bool] | None = None
    split: Callable[[Mapping[Any, int]], None] | None = None

    @property
    def can_continue(self) -> bool:
        """True if survivors of a failure can continue the call in a new group."""
        return self.may_continue and (self.resume is not None or not self.changes_state)

    @property
    def is_kept(self) -> bool:
        """True if a restart must not lose the call's effect.

        The restart must then restore a snapshot taken after the call, or repeat the call.
        """
        return self.changes_state and not self.leaves_as_new

    def on_its_ranks(self, args: Sequence[Sequence[Any]]) -> dict[int, Sequence[Any]]:
        """Return the arguments, by rank, of the ranks that run the call.

        Args:
            args: The arguments of every rank of the group, by rank.
        """
        return dict(enumerate(args)) if self.rank is None else {self.rank: args[self.rank]}


@dataclass(frozen=True)
class Completed:
    """The end of a call that every rank completed.

    Attributes:
        values: The values that the ranks returned, in rank order.
    """

    values: list[Any]


@dataclass(frozen=True)
class Left:
    """The early end of a call, with all ranks after the same step.

    Attributes:
        parts: Each rank's part of the snapshot after that step, in rank order. The driver has the snapshot.
    """

    parts: list[Capture]


class CallHandle(ABC, Generic[T]):
    """A handle to a trainer's call that runs in the background."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if the call has finished, whether with a result or an error."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return its result.

        Args:
            timeout: Seconds to wait. None waits until the call finishes.

        Raises:
            TimeoutError: The call is still running. It is not interrupted.
            Exception: The error that the call raised.
        """


EventKind = Literal["started", "continued", "restored", "restarted", "grown", "left", "hung", "lost", "ended"]

# Logging levels of events. All other events are logged as warnings, which users see without configuring logging.
_LEVELS = {"started": logging.DEBUG, "restarted": logging.INFO}
_RECOVERED = {"continued": "resumed", "restored": "restarted all workers and resumed"}


@dataclass(frozen=True)
class GroupEvent:
    """One event of a trainer's worker group.

    Attributes:
        kind: One of these:

            * "started": The first group was started.
            * "continued": Survivors of a failure kept their processes and continued in a new group.
            * "restored": After a failure, all workers started again from the last snapshot or checkpoint, if any.
            * "restarted": New workers started from the last snapshot or checkpoint, if any, because the old workers
              had been stopped, for example with the event "lost" or "ended".
            * "grown": More workers joined.
            * "left": Workers left a node that is being removed.
            * "hung": Workers were killed because they did not respond. A later event records the outcome.
            * "lost": A failure ended the call with an error.
            * "ended": All workers were stopped. That happens after Ctrl-C, after an exception that left workers stuck
              or out of sync, and if another trainer of the program needs the resources.
        old_size: Number of workers before the event.
        new_size: Number of workers after the event.
        seconds: Duration of the event.
        cause: Reason for the event.
        detail: A description, for users, of the effect on the training: for example, where it continues.
        at: When the event was over, in Unix time.
        num_kept: Number of workers that kept their process while all workers restored a snapshot.
    """

    kind: EventKind
    old_size: int
    new_size: int
    seconds: float
    cause: str
    detail: str = ""
    at: float = 0.0
    num_kept: int = 0

    @property
    def began_at(self) -> float:
        """Time when the event began, in Unix time. A failure begins when the driver detects it."""
        return self.at - self.seconds

    @property
    def is_failure(self) -> bool:
        """True if the event is a failure of workers, whether or not the trainer recovered."""
        return self.kind in ("continued", "restored", "lost")

    def __str__(self) -> str:
        detail = f"; {self.detail}" if self.detail else ""
        if self.kind in _RECOVERED:
            size = (
                f"{self.new_size}" if self.new_size == self.old_size else f"{self.new_size} instead of {self.old_size}"
            )
            return f"{self.cause}; {self._recovered} with {size} workers after {self.seconds:.2f} s{detail}"
        return f"{self.kind}: {self.old_size} -> {self.new_size} workers in {self.seconds:.2f} s: {self.cause}{detail}"

    @property
    def _recovered(self) -> str:
        if not self.num_kept:
            return _RECOVERED[self.kind]
        return f"kept {self.num_kept} {'process' if self.num_kept == 1 else 'processes'} and resumed"


class GroupHistory:
    """The events of a trainer's worker groups, oldest first.

    Args:
        now: Clock, in Unix time.

    Attributes:
        events: The events so far.
        last_resize: When workers last joined, left or restarted, on the engine's monotonic clock. Minus infinity before
            the first such event.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.events: list[GroupEvent] = []
        self.last_resize = float("-inf")

    def record(self, event: GroupEvent) -> None:
        """Record and log an event that is over now."""
        self.events.append(replace(event, at=self._now()))
        logger.log(_LEVELS.get(event.kind, logging.WARNING), "%s", event)

    @property
    def num_failures(self) -> int:
        """Number of worker failures from which the trainer recovered."""
        return self.count("continued") + self.count("restored")

    def count(self, kind: EventKind) -> int:
        """Return the number of events of this kind."""
        return sum(event.kind == kind for event in self.events)


EverySeconds = float | Literal["auto"] | None
"""Type of the user's option `snapshot_every_s`: seconds, "auto", or None for no snapshots."""


@dataclass(frozen=True)
class FrontEndWords:
    """The wording of a front end, such as `TorchTrainer`, for parts of the engine's errors and log messages.

    Attributes:
        when_shut_down: Added to the error raised by calls to a trainer that was shut down.
        when_interrupted: Added to the error raised by a call if the trainer is shut down while the call runs.
        when_starved: Added to the error if too few workers can be started.
        when_spent: Added to the error if a worker fails when no retry is left.
        when_not_granted: Added to the error if Ray does not grant the resources in time.
        with_cpus: Format string for the user's argument that sets a worker's CPUs, with a placeholder for the number.
        after_end: Phrase for the history about the state that remains after all workers have ended.
        restart_point: Phrase for the history about the state that new workers start from.
        name: How the logs and errors of other trainers in the program refer to this trainer.
    """

    when_shut_down: str = ""
    when_interrupted: str = ""
    when_starved: str = ""
    when_spent: str = ""
    when_not_granted: str = ""
    with_cpus: str = "num_cpus_per_worker={:g}"
    after_end: str = ""
    restart_point: str = "from the last snapshot"
    name: str = "a trainer"


NO_WORDS = FrontEndWords()


@dataclass(frozen=True)
class GroupSpec:
    """The settings with which a trainer starts its worker groups.

    Attributes:
        connection: Connects each worker with the other workers of its group.
        make_replica: Builds a worker's replica. It is pickled and sent to the worker.
        resources: Resources of one worker.
        use_local: True if rank 0 runs in the driver process.
        initialization_hook: Runs once in each worker process, before everything else.
        reservation_timeout_s: How long to wait until the cluster grants the resources.
        captures: True if restarts need copies of the training state, which workers make after calls. Not needed if no
            worker can be lost, or if user code saves its own checkpoints.
        snapshot_every_s: How often workers copy their state. See `is_due` in `snapshots`.
        snapshots_inside: True if workers also copy their state during calls.
        regroups: True if replicas are `RegroupingReplica`s. Survivors of a failure can then continue in place: they
            keep their processes and form a new group.
        runs_on: True if replicas run a user's function that keeps running while workers leave or join, and even between
            calls. Each replica then keeps its rank if the next group has this rank. Cannot be combined with
            `regroups`.
        renews: True if survivors that cannot continue in place keep their processes and rebuild their replicas.
        num_spares: Number of spare workers to keep ready as replacements for lost workers.
        packs: True to place workers on as few nodes as possible. False to spread them over as many as possible.
        within: The existing placement group to use. "default" uses the group that this process runs in, if Ray also
            places this process's child tasks in that group. None uses no existing group.
        heartbeat_s: A worker without a heartbeat for this many seconds counts as lost.
        settle_timeout_s: How many seconds a survivor of a failure may take to finish its step.
        relay: Logs the workers' log lines in the driver.
        words: The front end's wording for errors and log messages.
    """

    connection: Connection
    make_replica: ReplicaFactory
    resources: Resources = field(default_factory=Resources)
    use_local: bool = False
    initialization_hook: Callable[[], Any] | None = None
    reservation_timeout_s: float = 100.0
    captures: bool = True
    snapshot_every_s: EverySeconds = 0.0
    snapshots_inside: bool = False
    regroups: bool = False
    runs_on: bool = False
    renews: bool = False
    num_spares: int = 0
    packs: bool = False
    within: Any = "default"
    heartbeat_s: float = 30.0
    settle_timeout_s: float = 120.0
    relay: LogRelay = field(default_factory=LogRelay, repr=False, compare=False)
    words: FrontEndWords = field(default_factory=FrontEndWords, repr=False)

    @property
    def captures_after_calls(self) -> bool:
        """True if workers copy their training state after calls, even after calls that do not request this."""
        return self.captures and self.snapshot_every_s is not None

    @property
    def loses_state(self) -> bool:
        """True if the user disabled snapshots. The training state is then lost together with the workers."""
        return self.captures and self.snapshot_every_s is None

    @property
    def keeps_processes(self) -> bool:
        """True if workers keep their processes when other workers join.

        A group may then start with fewer workers than wanted.
        """
        return self.regroups or self.renews

    @property
    def keeps_survivors(self) -> bool:
        """True if survivors of a failure can be reused. The engine must then find out which workers survived."""
        return self.keeps_processes or self.runs_on

    @property
    def num_threads(self) -> int:
        """Number of threads that a worker's numerical libraries may use."""
        return max(1, int(self.resources.num_cpus))
