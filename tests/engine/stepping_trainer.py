"""A front end over a fake cluster whose replicas can go on in another group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from raysgd.engine.controller import ElasticController
from raysgd.engine.lifecycle import ElasticRules
from raysgd.engine.policies import FailurePolicy, ScalingPolicy
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.group_spec import GroupSpec
from tests.helpers.fakes import (
    WORDS,
    Event,
    FakeClock,
    FakeCluster,
    FakeGroup,
    NullConnection,
    SteppingReplica,
    walk,
    walk_on,
)


class Trainer:
    """A front end without words: a controller over a fake cluster whose replicas can go on in another group."""

    def __init__(
        self,
        *,
        num_slots: int = 3,
        max_workers: int = 3,
        min_workers: int = 1,
        num_spares: int = 0,
        continues: bool = True,
        renews: bool = False,
        snapshot_every_s: float | None = 0.0,
        use_local: bool = False,
        is_large: bool = False,
        nodes: Sequence[str] = (),
        heartbeat_s: float = 30.0,
        snapshots_inside: bool = False,
        **rules: Any,
    ) -> None:
        self.cluster = FakeCluster(num_slots, nodes=nodes)
        self.clock = FakeClock()
        self.leaving: set[str] = set()
        self.controller = ElasticController(
            GroupSpec(
                NullConnection(),
                partial(SteppingReplica, is_large=is_large),
                use_local=use_local,
                regroups=not renews,
                renews=renews,
                snapshot_every_s=snapshot_every_s,
                num_spares=num_spares,
                heartbeat_s=heartbeat_s,
                snapshots_inside=snapshots_inside,
                words=WORDS,
            ),
            ScalingPolicy(max_workers, min_workers, num_local=int(use_local)),
            FailurePolicy(continues and not renews),
            make_group=self.cluster.make_group,
            view=self.cluster.view,
            clock=self.clock.as_clock(),
            rules=ElasticRules(leaving_nodes=lambda: frozenset(self.leaving), **rules),
        )
        self.controller.start()

    def walk(self, num_steps: int, *events: Event, max_retries: int = 3) -> list[float]:
        """A call of so many steps, to which these events happen, one in each attempt."""
        self.cluster.calls = deque(events)
        return self.controller.run(self.call(num_steps), max_retries=max_retries)

    def call(self, num_steps: int) -> Call:
        args = [(num_steps,)]
        return Call(walk, lambda worlds: args * len(worlds), changes_state=True, keeps_alike=True, resume=walk_on)

    def during_calls(self, seconds: int, happens: Callable[[int], None] = lambda second: None) -> None:
        """Lets each call last so many seconds; `happens` is called with the number of each."""

        def wait(on_wait: Callable[[], None]) -> None:
            for second in range(1, seconds + 1):
                self.clock.now_s += 1.0
                happens(second)
                on_wait()

        self.cluster.while_waiting = wait

    @property
    def group(self) -> FakeGroup:
        """The group that was made last."""
        return self.cluster.groups[-1]

    @property
    def kinds(self) -> list[str]:
        """What happened after the start."""
        return [event.kind for event in self.controller.history.events if event.kind != "started"]

    @property
    def totals(self) -> list[float]:
        return [replica.total for replica in self.group.replicas]
