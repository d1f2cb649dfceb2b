"""Arguments, results and errors on their way between a program and a host: bytes, which neither process owns.

An object in Ray's store is lost with the process that put it there. Bytes in a message are copied, so what a program
sends outlives it, and an answer can wait in the host for any program.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.engine.shared.faults import describe_fault, has_user_code
from raysgd.engine.worker import cannot_import, is_sendable, node_here, packed_bytes
from raysgd.exceptions import UnpicklableError, WorkerFault

_NO_RANK = -1


@dataclass(frozen=True)
class RemoteIterator:
    """Stands for an iterator that stays in the host: the program draws from it call by call."""

    token: str


class HostTraceback(Exception):
    """Shows where in the host an exception was raised: its cause in the program."""

    def __str__(self) -> str:
        return f"raised in the host of the trainer\n\n{self.args[0]}"


@dataclass(frozen=True)
class _RaisedError:
    """An exception and its cause, described where they were raised."""

    fault: WorkerFault
    cause: WorkerFault | None
    shows_user_code: bool

    def error(self) -> BaseException:
        error = _error_of(self.fault)
        if error.__cause__ is None and self.cause is not None:
            error.__cause__ = _error_of(self.cause)
            error.__cause__.__cause__ = HostTraceback(self.cause.traceback_text)
        elif error.__cause__ is None and self.shows_user_code:
            error.__cause__ = HostTraceback(self.fault.traceback_text)
        return error


def _error_of(fault: WorkerFault) -> BaseException:
    return fault.error if fault.error is not None else RuntimeError(f"{fault.type_name}: {fault.message}")


def packed_arguments(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return the arguments of a call as they travel to the host.

    Raises:
        UnpicklableError: One of them cannot be pickled. The message names it. Nothing was sent.
    """
    try:
        return packed_bytes("it", (tuple(args), dict(kwargs)))
    except UnpicklableError as error:
        name = next((name for name, value in _named(args, kwargs) if not is_sendable(value)), "an argument")
        words = str(error).replace("it cannot be sent to the workers", f"{name} cannot be sent to the host", 1)
        raise UnpicklableError(f"`{function}`: {words}") from error.__cause__


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"argument {index}", value) for index, value in enumerate(args, start=1))
    for name, value in kwargs.items():
        several = name == "callbacks" and isinstance(value, list | tuple)
        yield from ((f"`{name}[{i}]`", each) for i, each in enumerate(value)) if several else [(f"`{name}`", value)]


def unpacked_arguments(packed: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, in the host.

    Raises:
        ModuleNotFoundError: They need a module that the host does not find.
    """
    try:
        args, kwargs = pickle.loads(packed)
    except ModuleNotFoundError as error:
        raise cannot_import(error.name) from error
    return args, kwargs


@dataclass(frozen=True)
class CallOutcome:
    """A call's outcome: its result, or what it has raised."""

    value: Any = None
    raised: _RaisedError | None = None

    def result(self) -> Any:
        """Return the result; raise what the call has raised."""
        if self.raised is not None:
            raise self.raised.error()
        return self.value


def packed_answer(body: Callable[[], Any]) -> bytes:
    """Run a call; return its answer as it travels to a program."""
    try:
        return packed_bytes("the result", CallOutcome(body()))
    except BaseException as error:  # also Ctrl-C, which the program has passed on
        return packed_bytes("the error", CallOutcome(raised=_described(error)))


def _described(error: BaseException) -> _RaisedError:
    cause = error.__cause__
    fault = describe_fault(error, _NO_RANK, node_here()[1], portable=True)
    described = None if cause is None else describe_fault(cause, _NO_RANK, node_here()[1], portable=True)
    return _RaisedError(fault, described, has_user_code(error))


def unpacked_answer(packed: bytes) -> CallOutcome:
    """Return the answer of a call, in the program."""
    answer: CallOutcome = pickle.loads(packed)
    return answer
