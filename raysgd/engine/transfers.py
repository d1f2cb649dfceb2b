"""Values on their way between the driver and the workers.

Why sending has its own thread: ADR 50.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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
