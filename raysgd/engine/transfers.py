"""Values on their way between the driver and the workers.

Why sending has its own thread: ADR 50.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from raysgd.engine.local_worker import LocalCall
from raysgd.engine.snapshots import Transfer


@dataclass(frozen=True)
class Stored:
    """A value for all ranks.

    Attributes:
        value: The value; where there are remote ranks, as it lies in the object store of the driver's node.
        reference: Ray's reference to it.
    """

    value: Any
    reference: Any


def store(value: Any) -> Stored:
    """Puts a value into Ray's object store, once for all ranks, whatever the group will look like then."""
    import ray

    reference = ray.put(value)
    return Stored(ray.get(reference), reference)


def transfer(call: Any) -> Transfer:
    """What a call will return, on its way."""
    return _Done(call.function()) if isinstance(call, LocalCall) else _OnItsWay(call)


class Storing:
    """A value that a thread of the driver puts into the store, beside whatever comes next; a `Transfer`.

    Args:
        store: Puts a value into the store; `WorkerGroup.store`.
        make: Makes the value, in that thread.
    """

    def __init__(self, store: Callable[[Any], Stored], make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._put, self._make = store, make
        self._stored: Future[Any] = Future()
        threading.Thread(target=self._store, name="raysgd-storing", daemon=True).start()

    def result(self, timeout_s: float | None) -> Any:
        """The value as it lies in the store.

        Raises:
            TimeoutError: It is not there yet.
        """
        try:
            return self._stored.result(timeout_s)
        except FutureTimeoutError:  # in Python 3.10 not the class that everyone else means
            raise TimeoutError from None

    def _store(self) -> None:
        try:
            with self._make() as value:
                stored = self._put(value)
        except BaseException as error:
            self._stored.set_exception(error)
        else:
            self._stored.set_result(stored.value)


@dataclass(frozen=True)
class Parts:
    """A value that the ranks divide: the part of each, as it lies in the object store.

    The driver holds on to the parts and does not read them. To another process they travel as references, so that it
    reads those that it needs.

    Attributes:
        values: The parts that are in this process.
        references: Ray's references to those that came through the object store.
    """

    values: tuple[Any, ...]
    references: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        own = [value if ref is None else None for value, ref in zip(self.values, self.references, strict=True)]
        return Parts, (tuple(own), self.references)

    def __len__(self) -> int:
        return len(self.references)

    def __getitem__(self, index: int) -> Any:
        import ray

        reference = self.references[index]
        if reference is None or self.values[index] is not None:
            return self.values[index]
        return ray.get(reference)


class FetchedParts:
    """The parts of all ranks, on their way."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers

    def result(self, timeout_s: float | None) -> Parts:
        """All parts.

        Raises:
            TimeoutError: One is not there yet.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        values = []
        for each in self._transfers:
            values.append(each.result(None if deadline is None else max(0.0, deadline - time.monotonic())))
        return Parts(tuple(values), tuple(getattr(each, "reference", None) for each in self._transfers))


@dataclass(frozen=True)
class _Done:
    """A transfer that needed no travel."""

    value: Any

    def result(self, timeout_s: float | None) -> Any:
        return self.value


@dataclass(frozen=True)
class _OnItsWay:
    """A transfer through Ray's object store. Holding on to the value keeps it in the store of the driver's node."""

    reference: Any

    def result(self, timeout_s: float | None) -> Any:
        import ray

        try:
            return ray.get(self.reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError("still on its way") from error
