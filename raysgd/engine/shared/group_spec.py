"""The settings that every group of a trainer is started from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd._text.log_lines import LogRelay
from raysgd.engine.shared.connection import Connection
from raysgd.engine.shared.replica import ReplicaFactory
from raysgd.engine.shared.types import Resources

EverySeconds = float | Literal["auto"] | None
"""The setting of users for snapshots: seconds; "auto"; None for none."""


@dataclass(frozen=True)
class FrontEndWords:
    """The words of a front end behind the facts that the engine raises and logs. Each is a sentence or two.

    Attributes:
        when_shut_down: After a call to a trainer that was shut down.
        when_interrupted: After a shutdown in the middle of a call.
        when_starved: Where too few workers could be had.
        when_spent: After a failure, where no retry is left.
        when_not_granted: Where the resources were not granted in time.
        with_cpus: The argument for the CPUs of a worker, with a place for the number.
        after_end: What is left when there are no workers any more, for the history.
        restart_point: Where new workers go on, for the history.
        name: What the trainer is called in the errors of another one in the same program.
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
    """The settings that every group of a trainer is started from.

    Attributes:
        connection: Connects the workers.
        make_replica: Builds a worker's replica; shipped to the worker.
        resources: What one worker needs.
        use_local: Whether rank 0 is the driver itself.
        initialization_hook: Run once in each worker process before anything else.
        reservation_timeout_s: How long to wait until the cluster grants the resources.
        captures: Whether workers copy their state after calls that change it (pointless when none can be lost).
        snapshot_every_s: After which of these calls; see `is_due` of `snapshots`.
        snapshots_inside: Whether workers copy their state inside calls, too.
        regroups: Whether replicas are `RegroupingReplica`s, so that survivors of a failure can be kept.
        runs_on: Whether replicas run on by themselves over changes of the group, also between calls, and keep their
            ranks. Without `regroups`.
        renews: Whether survivors of a failure that cannot go on keep their processes, which get new replicas.
        num_spares: How many workers wait, ready, to step in.
        packs: Whether workers go to as few nodes as they can, rather than to as many.
        within: Whose placement group to use: "default" for that of this process, a group for that one, None for none.
        heartbeat_s: A worker that gives no sign of life for so long is lost.
        settle_timeout_s: How long a survivor of a failure may take to finish its step.
        relay: Logs what workers logged.
        words: What the front end tells its users behind the engine's facts.
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
        """True if workers copy their state without being asked for that alone."""
        return self.captures and self.snapshot_every_s is not None

    @property
    def loses_state(self) -> bool:
        """True if workers have a state that nothing else has, because no copies are made of it."""
        return self.captures and self.snapshot_every_s is None

    @property
    def keeps_processes(self) -> bool:
        """True if processes are kept when others step in, so that a group can also start with fewer."""
        return self.regroups or self.renews

    @property
    def keeps_survivors(self) -> bool:
        """True if survivors of a failure are kept in any way, also alone, so that they are asked who is left."""
        return self.keeps_processes or self.runs_on

    @property
    def num_threads(self) -> int:
        """Threads of one worker."""
        return max(1, int(self.resources.num_cpus))
