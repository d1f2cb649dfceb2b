"""Creates the exceptions that the driver raises for errors in workers.

Such an exception is also an instance of the class of the error that user code raised in the worker.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from raysgd.core.text.log_lines import named
from raysgd.core.text.secrets import masked
from raysgd.core.text.tracebacks import shows_all_frames, with_code
from raysgd.exceptions import TrainingFailedError, WorkerError, WorkerFault, made_from_parts, slots_of

_ErrorT = TypeVar("_ErrorT", bound=Exception)
_MOST_NODES = 8
_MOST_FAULTS = 3
_PUBLIC_MODULE = WorkerError.__module__


class _DescribedError(WorkerError):
    """The class of the errors that `worker_error` returns. The message describes the errors of all ranks."""

    def __str__(self) -> str:
        return describe_faults(self.faults, self.aftermath)

    def __repr__(self) -> str:
        return masked(super().__repr__())

    def __reduce__(self) -> tuple[Any, ...]:
        return worker_error, (self.faults, self.aftermath)


class _DescribedFailure(TrainingFailedError):
    """The class of the errors that `training_failed_error` returns.

    The message consists of the message of the exception that ended the run, and advice.
    """

    also: type[Exception] | None = None

    def __str__(self) -> str:
        return f"{self.failure}\n\n{self.advice}"

    def __repr__(self) -> str:
        return masked(super().__repr__())

    def __reduce__(self) -> tuple[Any, ...]:
        return training_failed_error, (self.failure, self.advice, self.also)


for _described, _public in ((_DescribedError, WorkerError), (_DescribedFailure, TrainingFailedError)):
    # Show users the name of the public class instead.
    _described.__name__, _described.__qualname__, _described.__module__ = (
        _public.__name__,
        _public.__qualname__,
        _PUBLIC_MODULE,
    )


def worker_error(faults: tuple[WorkerFault, ...], aftermath: str = "") -> WorkerError:
    """Return the exception for errors in workers: a `WorkerError` that is also an instance of the first error's class.

    If the first error could not be sent to the driver, return a plain `WorkerError`.

    The returned exception has the same cause as the first error. If the worker is this process, the exception has the
    first error's live frames instead of the traceback's text.

    Args:
        faults: The errors of one call, by rank.
        aftermath: Sentences for the end of the message, about what happens to the trainer's workers.
    """
    original = faults[0].error
    error = _joined(_DescribedError, original) if original is not None else _DescribedError(faults[0].message)
    error.faults, error.aftermath = tuple(faults), aftermath
    error.__suppress_context__ = True
    if original is not None:
        error.__cause__, error.__context__ = original.__cause__, original.__context__
        error.__suppress_context__ = original.__suppress_context__ or original.__context__ is None
        error.__traceback__ = original.__traceback__
    return error


def _joined(own: type[_ErrorT], original: BaseException, also: type[Exception] | None = None) -> _ErrorT:
    """Return an error of the class `own` that also has the class, arguments and attributes of the original exception.

    If such an error cannot be created, return a plain one.
    """
    try:
        both = _class_of_both(own, type(original), also)
        return cast("_ErrorT", made_from_parts(both, original.args, original.__dict__, tuple(slots_of(original))))
    # The user's class may not allow subclasses or this way of creating objects; the original is still the cause.
    except Exception:
        return own(str(original))


def _class_of_both(
    own: type[Exception], user_class: type[BaseException], also: type[Exception] | None = None
) -> type[BaseException]:
    if issubclass(user_class, own):  # the worker has raised such an error itself, because it has its own workers
        return user_class
    if not issubclass(user_class, Exception):  # `SystemExit` and similar exceptions must not end the driver
        user_class = RuntimeError
    bases = (own, user_class) if also is None or issubclass(user_class, also) else (own, user_class, also)
    return type(f"{own.__name__}({user_class.__name__})", bases, {"__module__": _PUBLIC_MODULE})


def training_failed_error(
    failure: Exception, advice: str = "", also: type[Exception] | None = None
) -> TrainingFailedError:
    """Return the exception for a failed run: a `TrainingFailedError` that is also an instance of its cause's class.

    Args:
        failure: The exception that ended the run. If it is a `WorkerError`, the user's exception becomes the cause.
        advice: How to continue the run, for the end of the message.
        also: Another base class for the exception, so that programs can catch it as this class.
    """
    original = failure.faults[0].error if isinstance(failure, WorkerError) and failure.faults else None
    cause = failure if original is None else original
    error = _joined(_DescribedFailure, cause, also)
    error.failure, error.advice, error.also = failure, advice, also
    error.__cause__ = cause
    return error


def describe_faults(faults: tuple[WorkerFault, ...], aftermath: str = "") -> str:
    """Return a message about the errors of one call.

    The message describes the first three distinct errors, each once, with its line of code and ranks. For further
    errors, it lists only the ranks.

    Args:
        faults: The errors, by rank.
        aftermath: Sentences for the end of the message.
    """
    groups: dict[tuple[str, str, str], list[WorkerFault]] = {}
    for fault in faults:
        groups.setdefault((fault.type_name, fault.message, fault.location), []).append(fault)
    lines: list[str] = []
    for first, *others in [*groups.values()][:_MOST_FAULTS]:
        who, where = _who_and_where([first, *others])
        more: list[str] = []
        if first is faults[0]:
            more = [*(f"called from {with_code(caller)}" for caller in first.callers), *first.causes]
        lines.append(": ".join(filter(None, (first.type_name, first.message.rstrip()))))
        lines += [f"  {line}" for line in (f"raised at {with_code(first.location)}", f"on {who}, node {where}", *more)]
    untold = [fault for members in [*groups.values()][_MOST_FAULTS:] for fault in members]
    if untold:
        who, _ = _who_and_where(untold)
        lines.append(f"Other errors on {who}: see `error.faults`.")
    if aftermath:
        lines.append(aftermath)
    if shows_all_frames() and faults[0].traceback_text:
        lines += ["", f"Traceback of rank {faults[0].rank}:", faults[0].traceback_text.rstrip()]
    return "\n".join(lines)


def _who_and_where(faults: list[WorkerFault]) -> tuple[str, str]:
    return named([fault.rank for fault in faults]), _nodes([fault.node for fault in faults])


def _nodes(nodes: list[str]) -> str:
    distinct = list(dict.fromkeys(nodes))
    shown = ", ".join(distinct[:_MOST_NODES])
    return shown if len(distinct) <= _MOST_NODES else f"{shown} and {len(distinct) - _MOST_NODES} others"
