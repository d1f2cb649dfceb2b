"""The settings with which a trainer starts its worker groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd.core.cluster.resources import Resources
from raysgd.core.engine.shared.connection import Connection
from raysgd.core.engine.shared.replica import ReplicaFactory
from raysgd.core.text.log_lines import LogRelay

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
