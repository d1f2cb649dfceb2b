"""Every exception that raysgd raises on purpose. This module imports nothing from raysgd.

* Wrong arguments are plain ``ValueError`` or ``TypeError`` wherever one class is enough; the classes here exist where a
  caller may rightly expect two classes at once, or needs to tell one kind of failure from another.
* All of them pickle, with their message and their cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class RaySGDError(Exception):
    """Base class of the errors that only raysgd raises."""


class InvalidCountError(ValueError, AssertionError):
    """A count such as `max_retries` is out of range.

    The old library asserted such counts, so code in the wild catches ``AssertionError``; new code expects
    ``ValueError``.
    """


class NotRegisteredError(RuntimeError, ValueError):
    """The operator was asked for something (a loader, a model) that its `setup` never registered."""


class InvalidRegistrationError(TypeError, ValueError, AssertionError):
    """`register` was given something of the wrong kind.

    The old library asserted this; a wrong kind is a ``TypeError`` and, to many callers, a ``ValueError``.
    """


class UnevenStepsError(RaySGDError, RuntimeError):
    """The ranks of a synchronous epoch took different numbers of steps."""


class TrainerShutdownError(RaySGDError, RuntimeError):
    """A trainer was used after `shutdown`."""


class ReservationTimeoutError(RaySGDError, TimeoutError):
    """The cluster did not grant the workers' resources in time. The message lists what was asked and what there is."""


class WorkersLostError(RaySGDError, RuntimeError):
    """Workers died, and the retries or the attempts to get new ones are spent."""


@dataclass(frozen=True)
class WorkerFault:
    """What one worker's exception looked like, in a form that crosses process boundaries.

    Attributes:
        rank: World rank of the worker, or -1 while ranks are not assigned yet.
        node: Address of the node it ran on.
        error: The exception itself, or None when it could not be pickled.
        type_name: Name of the exception's class.
        message: The exception's own text.
        location: The innermost line of user code, as ``file:line in function``.
        traceback_text: The whole traceback as the worker saw it.
    """

    rank: int
    node: str
    error: BaseException | None
    type_name: str
    message: str
    location: str
    traceback_text: str


class WorkerError(RaySGDError):
    """User code failed in a worker.

    What reaches the caller is an instance of this class *and* of the class that the user code raised, so that
    ``except ValueError`` works as if the code had run in the driver. `faults` holds every rank's fault, the earliest
    first.
    """

    faults: tuple[WorkerFault, ...] = ()

    def __str__(self) -> str:
        return describe_faults(self.faults) if self.faults else super().__str__()

    def __reduce__(self) -> tuple[Any, ...]:
        return (worker_error, (self.faults,))


def worker_error(faults: tuple[WorkerFault, ...]) -> WorkerError:
    """Builds the exception for `faults`: a `WorkerError` that is also of the first fault's own class."""
    original = faults[0].error
    error = _as_both(original) if original is not None else WorkerError(faults[0].message)
    error.faults = tuple(faults)
    error.__cause__ = original
    return error


def _as_both(original: BaseException) -> WorkerError:
    """An exception of both classes, with the original's arguments and attributes; a plain one where that cannot be."""
    user_class = type(original)
    if isinstance(original, WorkerError):
        return original
    if not isinstance(original, Exception):  # SystemExit and the like must not end the driver
        user_class = RuntimeError
    try:
        both = type(f"WorkerError({user_class.__name__})", (WorkerError, user_class), {"__module__": __name__})
        error: WorkerError = both.__new__(both, *original.args)
        error.__dict__.update(original.__dict__)
        error.args = original.args
    except TypeError:  # a class that refuses to be subclassed or built this way
        return WorkerError(str(original))
    return error


def describe_faults(faults: tuple[WorkerFault, ...]) -> str:
    """Words the faults of one call: each distinct one once with its ranks, the user's own line first."""
    groups: dict[tuple[str, str, str], list[WorkerFault]] = {}
    for fault in faults:
        groups.setdefault((fault.type_name, fault.message, fault.location), []).append(fault)
    parts = []
    for (type_name, message, location), members in groups.items():
        ranks = ", ".join(str(fault.rank) for fault in members)
        nodes = ", ".join(dict.fromkeys(fault.node for fault in members))
        who = f"rank {ranks}" if len(members) == 1 else f"ranks {ranks}"
        parts.append(f"{type_name}: {message}\n  raised at {location}\n  on {who}, node {nodes}")
    trace = faults[0].traceback_text.rstrip()
    return "\n".join(parts) + (f"\n\nTraceback of rank {faults[0].rank}:\n{trace}" if trace else "")
