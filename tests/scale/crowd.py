"""Thousands of simulated workers under the engine as it is, and counts of what the driver sends to them.

The simulation is that of `tests/simulator`: real driver, virtual time, all of its invariants. Here are the numbers that
it was not made to look at.
"""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass
from typing import Any

from raysgd.core.engine.shared.types import Rendezvous, StateHandover
from tests.simulator.kernel import Kernel
from tests.simulator.network import SimConnection
from tests.simulator.processes import Call, Process
from tests.simulator.replica import SimReplica
from tests.simulator.running import Simulation
from tests.simulator.schedule import Fault, Op, Schedule

NUM_NODES = 4
SPARE_ROOM = 2  # of each node
STALL_S = 5.0
ONE_OF = 50
TICK_S = 0.01  # thousands of answers come in at a few moments, as from a real cluster


@dataclass(frozen=True)
class Sent:
    """What the driver sent during one call of the user's program.

    Attributes:
        messages: How many, by method of the worker.
        num_bytes: Of all arguments, by method.
    """

    messages: Counter[str]
    num_bytes: Counter[str]

    def most_each(self, num_workers: int) -> dict[str, float]:
        """Messages to each worker, by method, without signs of life and the like, whose number depends on the time."""
        return {method: count / num_workers for method, count in self.messages.items() if method not in BESIDE}

    def bytes_each(self, method: str) -> float:
        """Bytes of one message."""
        return self.num_bytes[method] / self.messages[method]


BESIDE = ("beside", "describe", "stack")


class CountedProcess(Process):
    """A process that counts what it is sent, and who is ended while alive."""

    host: Crowd

    def submit(self, method: str, args: tuple[Any, ...]) -> Call:
        self.host.count(method, args)
        return super().submit(method, args)

    def kill(self, reaches_stopped: bool) -> None:
        if not self.is_dead:
            self.host.killed_alive.append(self)
        super().kill(reaches_stopped)


class Crowd(Simulation):
    """A trainer with many workers, of which those die that `faults` say.

    Args:
        num_workers: How many.
        faults: What happens, and when.
        num_stalled: How many of the others stand still for five seconds at the moment of a death.
        options: More of the schedule.

    Attributes:
        killed_alive: Whom the driver ended although they were alive.
    """

    def __init__(self, num_workers: int, faults: tuple[Fault, ...] = (), num_stalled: int = 0, **options: Any) -> None:
        self.killed_alive: list[Process] = []
        self._num_stalled = num_stalled
        self._messages: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._sizes: dict[int, tuple[Any, int]] = {}
        room = -(-num_workers // NUM_NODES) + SPARE_ROOM
        given = {
            "heartbeat_s": 30.0,
            "resize_interval_s": 1.0,
            "tells": False,
            **options,
        }
        super().__init__(
            Schedule(
                seed=1,
                num_workers=num_workers,
                nodes=(room,) * NUM_NODES,
                num_samples=3 * num_workers,
                batch_size=num_workers,
                faults=faults,
                **given,
            )
        )

    def does(self, kind: str, argument: int | None = None) -> Sent:
        """Makes one call of the user's program, which has to succeed; returns what was sent for it."""
        self._messages, self._num_bytes = Counter(), Counter()
        is_done = self.program.perform(Op(kind, argument))
        assert is_done, "\n".join(self.log[-5:])
        assert self.kernel.stopped_by is None, self.kernel.stopped_by
        return Sent(self._messages, self._num_bytes)

    @property
    def events(self) -> list[str]:
        """What happened to the group, by kind."""
        return [event.kind for event in self.controller.history.events]

    def count(self, method: str, args: tuple[Any, ...]) -> None:
        """A message leaves the driver."""
        self._messages[method] += 1
        self._num_bytes[method] += sum(map(self._size_of, args))

    def _size_of(self, arg: Any) -> int:
        """In bytes; the addresses of all ranks, which each of them gets, are only encoded once."""
        if not isinstance(arg, Rendezvous):
            return len(pickle.dumps(arg))
        if id(arg) not in self._sizes:
            self._sizes[id(arg)] = arg, len(pickle.dumps(arg))
        return self._sizes[id(arg)][1]

    def note_death(self) -> None:
        super().note_death()
        for process in self.cluster.live[: self._num_stalled]:
            process.outlives_kill = True
            process.freeze()
            self.kernel.after(STALL_S, process.thaw)

    def check_formed(self, replica: SimReplica, handover: StateHandover) -> None:
        """Checks some, for each is compared with all others."""
        if replica.world.rank % ONE_OF == 0:
            super().check_formed(replica, handover)

    def _make_kernel(self) -> Kernel:
        return Kernel(most_events=10**7, most_waits=10**6, tick_s=TICK_S)

    def _make_process(self, pid: int, node: str, is_driver: bool) -> Process:
        return CountedProcess(self, pid, node, SimConnection(self.network), is_driver)
