"""The connections between simulated workers: groups, collectives, and what a loss does to those who wait."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.engine.shared.interface import Connection
from raysgd.core.engine.shared.types import Rendezvous, World
from tests.simulator.kernel import Future, Kernel, Task

FORM_TIMEOUT_S = 20.0
COLLECTIVE_TIMEOUT_S = 60.0


class LostConnectionError(RuntimeError):
    """A rank cannot be reached any more."""


@dataclass(eq=False)
class Collective:
    """One exchange among all ranks of a group."""

    given: dict[int, Any] = field(default_factory=dict)
    taken: dict[int, Future] = field(default_factory=dict)


class Group:
    """Ranks that know each other by a secret.

    Args:
        size: How many there are.
        tells: Whether ranks that wait are told when another one is gone; else only a cut connection frees them.
    """

    def __init__(self, kernel: Kernel, random_s: Callable[[], float], size: int, tells: bool) -> None:
        self._kernel, self._random_s = kernel, random_s
        self.size, self._tells = size, tells
        self.members: dict[int, SimConnection] = {}
        self.is_complete = Future()
        self.gone: set[int] = set()
        self._collectives: dict[Any, Collective] = {}
        self._waiting: dict[int, dict[Future, None]] = {}  # no sets: their order would not be the same in each process
        self._limits: deque[tuple[float, Future]] = deque()  # in their order, because all have the same time

    def add(self, rank: int, connection: SimConnection) -> None:
        self.members[rank] = connection
        if len(self.members) == self.size and not self.gone:
            self.is_complete.set()

    def lose(self, rank: int) -> None:
        """This rank left, died, or cut its connections; those that wait hear of it, if the network is that kind."""
        self.gone.add(rank)
        for future in self._waiting.pop(rank, {}):
            future.set(error=LostConnectionError("the connection was cut"))
        if not self._tells:
            return
        for other, futures in list(self._waiting.items()):
            for future in list(futures):
                self._kernel.after(self._random_s(), lambda f=future, r=other: self._tell(f, rank))

    def _tell(self, future: Future, rank: int) -> None:
        future.set(error=LostConnectionError(f"Connection closed by peer {rank}"))

    def wait(self, rank: int, future: Future) -> Future:
        """`future`, which fails as soon as this rank hears of a loss; at once if it has by now."""
        if rank in self.gone or (self.gone and self._tells):
            future.set(error=LostConnectionError("Connection closed by peer"))
        self._waiting.setdefault(rank, {})[future] = None
        self._limits.append((self._kernel.now + COLLECTIVE_TIMEOUT_S, future))
        if len(self._limits) == 1:
            self._end_late()
        return future

    def _end_late(self) -> None:
        """Ends what is waited for too long. One event for many waits: most of them are over by then."""
        limits, now = self._limits, self._kernel.now
        while limits and (limits[0][1].is_done or limits[0][0] <= now):
            limits.popleft()[1].set(error=LostConnectionError("Timed out in a collective"))
        if limits:
            self._kernel.after(limits[0][0] - now, self._end_late)

    def exchange(self, rank: int, name: Any, given: Any, merge: Callable[[Mapping[int, Any]], Any]) -> Task:
        """Gives something to all, and returns what `merge` makes of what all gave; they hear it one by one."""
        collective = self._collectives.setdefault(name, Collective())
        future = self.wait(rank, Future())
        if not future.is_done:  # what a rank gives after its connection was cut does not arrive
            collective.given[rank], collective.taken[rank] = given, future
        if len(collective.given) == self.size:
            merged = merge(collective.given)
            for taken in collective.taken.values():
                self._kernel.after(self._random_s(), lambda f=taken: f.set(merged))
        try:
            value = yield future
        finally:
            self._waiting.get(rank, {}).pop(future, None)
        return value

    def send(self, name: Any, value: Any) -> None:
        mail = self._collectives.setdefault(name, Collective())
        mail.given[0] = value
        for future in mail.taken.values():
            self._kernel.after(self._random_s(), lambda f=future: f.set(value))

    def receive(self, rank: int, name: Any) -> Task:
        mail = self._collectives.setdefault(name, Collective())
        future = self.wait(rank, Future())
        mail.taken[rank] = future
        if mail.given:
            self._kernel.after(self._random_s(), lambda: future.set(mail.given[0]))
        try:
            value = yield future
        finally:
            self._waiting.get(rank, {}).pop(future, None)
        return value


class Network:
    """All groups."""

    def __init__(self, kernel: Kernel, rng: random.Random, tells: bool) -> None:
        self.kernel, self.rng, self._tells = kernel, rng, tells
        self._groups: dict[bytes, Group] = {}
        self._next_port = 20_000

    def port(self) -> int:
        self._next_port += 1
        return self._next_port

    def random_s(self) -> float:
        return self.rng.uniform(0.0, 0.02)

    def group(self, rendezvous: Rendezvous) -> Group:
        found = self._groups.get(rendezvous.secret)
        if found is None:
            found = Group(self.kernel, self.random_s, len(rendezvous.addresses), self._tells)
            self._groups[rendezvous.secret] = found
        return found


class SimConnection(Connection):
    """What joins one simulated worker to the others. Its `join` is a task, `joining`."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._port: int | None = None
        self.group: Group | None = None
        self._world: World | None = None

    def load(self) -> None: ...

    def open_endpoint(self, host: str) -> int:
        self.leave()
        self._port = self._network.port()
        return self._port

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        raise AssertionError("a simulated worker joins by a task")

    def joining(self, rendezvous: Rendezvous, world: World, even_alone: bool = False) -> Task:
        """Returns when all ranks have joined."""
        if world.size == 1 and not even_alone:
            return
        if rendezvous.addresses[world.rank][1] != self._port:
            raise LostConnectionError("another process listens at this rank's address")
        group = self._network.group(rendezvous)
        self.group, self._world = group, world
        group.add(world.rank, self)
        future = group.wait(world.rank, Future())
        timeout = LostConnectionError("the ranks did not form a group in time")
        self._network.kernel.after(FORM_TIMEOUT_S, lambda: future.set(error=timeout))
        group.is_complete.then(lambda: self._network.kernel.after(self._network.random_s(), future.set))
        yield future

    def interrupt(self) -> None:
        if self.group is not None and self._world is not None:
            self.group.lose(self._world.rank)

    def leave(self) -> None:
        self.interrupt()
        self.group = self._world = None

    def is_connection_error(self, error: BaseException) -> bool:
        return isinstance(error, LostConnectionError)

    @property
    def is_alone(self) -> bool:
        return self.group is None or self.group.size == 1

    def exchange(self, name: Any, given: Any, merge: Callable[[Mapping[int, Any]], Any]) -> Task:
        if self.group is None or self._world is None:
            return merge({0: given})
        return (yield from self.group.exchange(self._world.rank, name, given, merge))

    def send(self, name: Any, value: Any) -> None:
        assert self.group is not None
        self.group.send(name, value)

    def receive(self, name: Any) -> Task:
        assert self.group is not None
        assert self._world is not None
        return (yield from self.group.receive(self._world.rank, name))
