"""Creates the exceptions that the driver raises for errors in workers.

Such an exception is also an instance of the class of the error that user code raised in the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from raysgd.core.text.log_lines import named
from raysgd.core.text.secrets import masked
from raysgd.core.text.tracebacks import shows_all_frames, with_code
from raysgd.exceptions import TrainingFailedError, WorkerError, WorkerFault, made_from_parts, slots_of

_MOST_NODES = 8
_MOST_FAULTS = 3


class _Described(Exception):
    """Mixin class of the exceptions that this module creates. Its message replaces that of the user's class.

    Attributes:
        _raysgd_message: The message of the exception.
        _raysgd_made_by: The function that has created the exception, and its arguments. Unpickling calls it again.
    """

    _raysgd_message: str
    _raysgd_made_by: tuple[Callable[..., Exception], tuple[Any, ...]]

    def __str__(self) -> str:
        return self._raysgd_message

    def __repr__(self) -> str:
        return masked(super().__repr__())

    def __reduce__(self) -> tuple[Any, ...]:
        return self._raysgd_made_by


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
    error = _plain(WorkerError, faults[0].message) if original is None else _joined(WorkerError, original)
    error.faults, error.aftermath = tuple(faults), aftermath
    error._raysgd_message = describe_faults(faults, aftermath)
    error._raysgd_made_by = worker_error, (faults, aftermath)
    error.__suppress_context__ = True
    if original is not None:
        error.__cause__, error.__context__ = original.__cause__, original.__context__
        error.__suppress_context__ = original.__suppress_context__ or original.__context__ is None
        error.__traceback__ = original.__traceback__
    return cast("WorkerError", error)


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
    error = _joined(TrainingFailedError, cause, also)
    error.failure, error.advice = failure, advice
    error._raysgd_message = f"{failure}\n\n{advice}"
    error._raysgd_made_by = training_failed_error, (failure, advice, also)
    error.__cause__ = cause
    return cast("TrainingFailedError", error)


def _joined(public: type[Exception], original: BaseException, also: type[Exception] | None = None) -> Any:
    """Return an error of a public class that also has the class, arguments and attributes of the original exception.

    If such an error cannot be created, return a plain one.
    """
    try:
        both = _class_of_both(public, type(original), also)
        return made_from_parts(both, original.args, original.__dict__, tuple(slots_of(original)))
    # The user's class may not allow subclasses or this way of creating objects; the original is still the cause.
    except Exception:
        return _plain(public, str(original))


def _class_of_both(
    public: type[Exception], user_class: type[BaseException], also: type[Exception] | None = None
) -> type[BaseException]:
    is_described = issubclass(user_class, _Described)
    if is_described and issubclass(user_class, public):  # the worker raised it, because it has its own workers
        return user_class
    if not issubclass(user_class, Exception):  # `SystemExit` and similar exceptions must not end the driver
        user_class = RuntimeError
    bases = (public, user_class) if is_described else (public, _Described, user_class)
    if also is not None and not issubclass(user_class, also):
        bases = (*bases, also)
    return type(f"{public.__name__}({user_class.__name__})", bases, {"__module__": public.__module__})


def _plain(public: type[Exception], message: str) -> Any:
    return type(public.__name__, (public, _Described), {"__module__": public.__module__})(message)


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
