"""The settings from which every group of a trainer is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd.core.engine.shared.connection import Connection
from raysgd.core.engine.shared.replica import ReplicaFactory
from raysgd.core.engine.shared.types import Resources
from raysgd.core.text.log_lines import LogRelay

EverySeconds = float | Literal["auto"] | None
"""The `snapshot_every_s` of users: seconds, "auto", or None for no snapshots."""


@dataclass(frozen=True)
class FrontEndWords:
    """Sentences of a front end, which the engine adds to its errors and log lines.

    Attributes:
        when_shut_down: For a call to a trainer that was shut down.
        when_interrupted: For a shutdown in the middle of a call.
        when_starved: If too few workers could be started.
        when_spent: After a failure, if no retry is left.
        when_not_granted: If Ray did not grant the resources in time.
        with_cpus: The argument for the CPUs of a worker, with a placeholder for the number.
        after_end: What remains when all workers have ended, for the history.
        restart_point: Where new workers continue, for the history.
        name: What errors of another trainer in the same program call this one.
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
    """The settings from which every group of a trainer is started.

    Attributes:
        connection: Connects the workers.
        make_replica: Builds a worker's replica. It is sent to the worker.
        resources: Resources of one worker.
        use_local: True if rank 0 is the driver itself.
        initialization_hook: Runs once in each worker process before anything else.
        reservation_timeout_s: How long to wait until the cluster grants the resources.
        captures: True if workers copy their state after calls that change it. Pointless if no worker can be lost.
        snapshot_every_s: How often to do so; see `is_due` in `snapshots`.
        snapshots_inside: True if workers also copy their state inside calls.
        regroups: True if replicas are `RegroupingReplica`s, so that survivors of a failure can continue in place.
        runs_on: True if replicas keep running when the group changes, also between calls, and keep their ranks.
            Excludes `regroups`.
        renews: True if survivors that cannot continue in place keep their processes and get new replicas.
        num_spares: Number of spare workers that wait to step in.
        packs: True to place workers on as few nodes as possible; False for as many as possible.
        within: The placement group to use: "default" for that of this process, a placement group, or None for none.
        heartbeat_s: A worker that sends no heartbeat for so long counts as lost.
        settle_timeout_s: How long a survivor of a failure may take to finish its step.
        relay: Logs the lines that workers logged.
        words: Sentences that the front end adds to errors and log lines.
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
        """True if workers copy their state after calls even if no call asks for it."""
        return self.captures and self.snapshot_every_s is not None

    @property
    def loses_state(self) -> bool:
        """True if the state of the workers is never copied, so that it is lost with them."""
        return self.captures and self.snapshot_every_s is None

    @property
    def keeps_processes(self) -> bool:
        """True if workers keep their processes when others step in. A group can then also start with fewer."""
        return self.regroups or self.renews

    @property
    def keeps_survivors(self) -> bool:
        """True if survivors of a failure can be kept in some way, so that it matters who is left."""
        return self.keeps_processes or self.runs_on

    @property
    def num_threads(self) -> int:
        """Number of threads of one worker."""
        return max(1, int(self.resources.num_cpus))
