"""Every exception that raysgd raises on purpose.

* Wrong arguments raise a plain ``ValueError`` or ``TypeError`` if one class is enough. The classes here exist where a
  caller may expect two classes at once, or needs to distinguish kinds of failures.
* All of them can be pickled with their message; a `WorkerError` also with its faults, and thus with its cause.

ADR 7 explains why some errors have two classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any


class RaySGDError(Exception):
    """Base class of errors that only raysgd raises."""


class OnFailure:
    """A block with a cleanup that runs only if the block fails, even by Ctrl-C. The failure is raised again afterwards.

    Args:
        undo: The cleanup.
        told: A cleanup that takes the exception.
    """

    def __init__(
        self, undo: Callable[[], Any] | None = None, *, told: Callable[[BaseException], Any] | None = None
    ) -> None:
        self._undo, self._told = undo, told

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if kind is not None and self._undo is not None:
            self._undo()
        if kind is not None and self._told is not None:
            self._told(error)


@contextmanager
def failure_logged(log: Callable[..., None], words: str, *args: Any) -> Iterator[None]:
    """A block whose exception is only logged, because what surrounds the block matters more.

    Args:
        log: The method of a logger for the right level.
        words: The log message, with placeholders for `args` and then for the exception.
        args: Values for the placeholders.
    """
    try:
        yield
    except Exception as error:
        log(words, *args, error)


class InvalidCountError(ValueError, AssertionError):
    """A count such as `max_retries` is out of range.

    The old library asserted such counts, so existing code catches ``AssertionError``. New code expects ``ValueError``.
    """


class NotRegisteredError(RuntimeError, ValueError):
    """The operator needs something (a loader, a model) that its `setup` did not register."""


class NoDataError(NotRegisteredError):
    """There is no data for training or validation. It was neither registered nor passed to the call."""


class InvalidRegistrationError(TypeError, ValueError, AssertionError):
    """`register` got something of the wrong kind.

    The old library asserted this. A wrong kind is a ``TypeError`` and, for many callers, a ``ValueError``.
    """


class UnevenStepsError(RaySGDError, RuntimeError):
    """The ranks of a synchronous epoch took different numbers of steps, or did different things in them."""


class RanksDifferError(RaySGDError, RuntimeError):
    """The weights of models differ between workers, although the library keeps them equal. Never retried.

    The message names the models, their parameters and the ranks. The next call starts from the last snapshot.
    """


class IncompatibleModelError(RaySGDError, ValueError):
    """A model, or the way it was compiled, does not work with the backend, or where it would be trained."""


class UnpicklableError(RaySGDError, TypeError):
    """Something cannot be sent to the workers because it cannot be pickled.

    Nothing was sent, and no worker was lost.
    """


class TrainerShutdownError(RaySGDError, RuntimeError):
    """A trainer was used after `shutdown` or after the end of its Ray session, or one of these ended a running call."""


class TrainerLostError(RaySGDError, RuntimeError):
    """A detached trainer has ended, its process has died, or it is not answering."""


class UnknownTrainerError(RaySGDError, LookupError):
    """There is no detached trainer with this name. The message lists the existing ones."""


class ReservationTimeoutError(RaySGDError, TimeoutError):
    """The cluster did not grant the workers' resources in time.

    The message lists the requested and existing resources.
    """


class WorkersLostError(RaySGDError, RuntimeError):
    """Workers died, and the retries, or the attempts to start new ones, are used up."""


class CheckpointCorruptedError(ValueError, RuntimeError):
    """The file differs from what was written: it is cut short, altered, or not a checkpoint at all."""


class UnsafeCheckpointError(ValueError):
    """The file contains more than plain data, and was not declared trustworthy."""


class StorageError(RaySGDError, OSError):
    """A folder or file could not be reached, read or written. The message names it and the cause.

    `errno` is that of the cause, if it has one.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {**vars(self), "errno": self.errno}


class StreamError(RaySGDError, RuntimeError):
    """A row of a stream cannot be read or prepared, or a shard has changed. The message names the shard and the row."""


class InactiveWorkerGroupError(RaySGDError, RuntimeError):
    """The workers of a function-based trainer were used before `start` or after `shutdown`."""


class TrainBackendError(RaySGDError, RuntimeError):
    """A function-based run was used out of turn, for example asked for results before a function was started."""


class TrainingWorkerError(RaySGDError, RuntimeError):
    """A worker of a function-based trainer died in a call outside of a run."""


class CallbackError(RaySGDError, RuntimeError):
    """A callback of a run of `fit()` failed.

    The message names the callback and the hook; the cause is its exception.
    """


class Preempted(SystemExit):  # it is no error
    """A signal has told the program to end: the run has ended at a step, which is saved. The status is 128 + signal.

    Attributes:
        signal: The number of the signal.
        checkpoint: Where the state is saved; None where no callback or function saves, or where that has failed.
    """

    def __init__(self, signal: int, checkpoint: str | None = None) -> None:
        super().__init__(128 + signal)
        self.signal, self.checkpoint = signal, checkpoint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signal, self.checkpoint)


class StepMismatchError(RaySGDError, RuntimeError):
    """The functions on different workers did not report or save at the same steps."""


class MissingTuneError(ImportError, ValueError, RuntimeError):
    """A function cannot become a trial, because Ray Tune cannot be imported. The old library raised ``ValueError``."""


class MissingFrameworkError(ModuleNotFoundError, ValueError):
    """The framework of a config of `raysgd.v2` is not installed. The old library raised ``ValueError``."""


class SessionMisuseError(RaySGDError, RuntimeError):
    """A session function was called in the wrong kind of run, for example one of Ray in `fit`."""


class TrainingFailedError(RaySGDError, RuntimeError):
    """A run that `fit` started has failed, and no retry is left.

    The caller gets an instance of this class *and* of the class of the cause: the exception of the user's function, or
    one of the classes here. That exception is its `__cause__`. The message says how to continue.
    """

    failure: Exception | None = None
    advice: str = ""


@dataclass(frozen=True)
class WorkerFault:
    """One worker's exception in a form that can be sent to another process.

    Attributes:
        rank: World rank of the worker, or -1 before ranks are assigned.
        node: Address of its node.
        error: The exception itself, or None if it could not be pickled.
        type_name: Name of the exception's class.
        message: Text of the exception, without quoted frames of libraries.
        location: The innermost line of user code, as ``file:line in function``.
        traceback_text: The traceback from the first line of user code on; empty if `error` has its live frames.
        callers: The lines of user code that led to it, innermost first; empty if `error` has its live frames.
        causes: The exceptions that Python would show before this one, latest first, in words.
    """

    rank: int
    node: str
    error: BaseException | None
    type_name: str
    message: str
    location: str
    traceback_text: str
    callers: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "error": _Packed.of(self.error)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        error = state["error"]
        self.__dict__.update({**state, "error": error.unpacked() if isinstance(error, _Packed) else error})


@dataclass(frozen=True)
class _Packed:
    """An exception in parts.

    Many classes cannot be pickled otherwise, because `args` lacks what the constructor needs.
    """

    user_class: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    slots: tuple[tuple[type, str, Any], ...]

    @staticmethod
    def of(error: BaseException | None) -> _Packed | BaseException | None:
        if error is None or _pickles_in_its_own_way(type(error)):
            return error
        slots = tuple(slot for slot in slots_of(error) if slot[1] != "obj")  # it may be large
        return _Packed(type(error), error.args, dict(error.__dict__), slots)

    def unpacked(self) -> BaseException:
        return made_from_parts(self.user_class, self.args, self.attributes, self.slots)

    def portable(self, is_portable: Callable[[Any], bool], in_words: Callable[[Any], str]) -> _Packed:
        """Replace each value that is not portable by `in_words(value)`."""

        def shown(value: Any) -> Any:
            return value if is_portable(value) else in_words(value)

        return _Packed(
            self.user_class,
            tuple(map(shown, self.args)),
            {name: shown(value) for name, value in self.attributes.items()},
            tuple((owner, name, shown(value)) for owner, name, value in self.slots if name != "args"),
        )


def portable_copy(
    error: BaseException, is_portable: Callable[[Any], bool], in_words: Callable[[Any], str] = repr
) -> BaseException:
    """Return a copy of an exception in which values such as locks and open files are replaced by words."""
    packed = _Packed.of(error)
    return packed.portable(is_portable, in_words).unpacked() if isinstance(packed, _Packed) else error


def _pickles_in_its_own_way(user_class: type[BaseException]) -> bool:
    methods = ("__reduce__", "__reduce_ex__")
    owners = [owner for owner in user_class.__mro__ if any(name in vars(owner) for name in methods)]
    return owners[0].__module__ != "builtins"


def slots_of(error: BaseException) -> Iterator[tuple[type, str, Any]]:
    """Yield what an exception keeps outside of its `__dict__`: `args`, `errno`, and what a class has in `__slots__`."""
    for owner in type(error).__mro__:
        for name, descriptor in vars(owner).items():
            if name.startswith("__") or not isinstance(descriptor, MemberDescriptorType | GetSetDescriptorType):
                continue
            try:
                value = descriptor.__get__(error)
            except AttributeError:  # the slot is empty
                continue
            if value is not None or owner.__module__ != "builtins":  # an `OSError` stores None for arguments it lacks
                yield owner, name, value


def made_from_parts(
    user_class: type[BaseException],
    args: tuple[Any, ...],
    attributes: dict[str, Any],
    slots: tuple[tuple[type, str, Any], ...],
) -> BaseException:
    """Make an exception from its parts, without the constructor of the user's class."""
    error: BaseException = _builtin_base(user_class).__new__(user_class, *args)
    error.__dict__.update(attributes)
    for owner, name, value in slots:
        try:
            vars(owner)[name].__set__(error, value)
        except (AttributeError, TypeError):  # read-only, and set by `__new__`
            continue
    return error


def _builtin_base(user_class: type[BaseException]) -> type[BaseException]:
    """Return the built-in base class with the memory layout of `user_class`. Only its `__new__` can make instances."""
    base = user_class
    while base.__module__ != "builtins":
        base = base.__base__  # type: ignore[assignment]  # an exception has one
    return base


class WorkerError(RaySGDError):
    """User code failed in a worker.

    The caller gets an instance of this class *and* of the class that the user code raised, so that ``except
    ValueError`` works as if the code had run in the driver. `faults` contains the faults of all ranks, earliest first.
    `aftermath` says what happened to the workers and their state, if they are not as the exception left them.
    """

    faults: tuple[WorkerFault, ...] = ()
    aftermath: str = ""
