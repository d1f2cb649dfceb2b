"""The exception classes that raysgd defines.

* An invalid argument raises a plain ``ValueError`` or ``TypeError`` where one class is enough. The classes here exist
  for errors that callers catch under two built-in classes, and for failures that callers need to distinguish.
* All exceptions can be pickled with their message. A `WorkerError` is pickled with its faults, and thus its cause.

ADR 7 explains why some errors derive from two built-in classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any


class RaySGDError(Exception):
    """Base class of errors that are specific to raysgd."""


class OnFailure:
    """Context manager that runs a cleanup only if its block raises, even on Ctrl-C. The exception then propagates.

    Args:
        undo: Cleanup function without arguments.
        told: Cleanup function that is called with the exception.
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
    """Log an exception raised in the block instead of propagating it, for work whose failure must not stop the caller.

    Args:
        log: The logger's method for the level, such as `logger.warning`.
        words: The log message, with placeholders for `args` and then for the exception.
        args: Values for the placeholders.
    """
    try:
        yield
    except Exception as error:
        log(words, *args, error)


class InvalidCountError(ValueError, AssertionError):
    """A count such as `max_retries` is out of range.

    The old library used ``assert`` here, so existing code catches ``AssertionError``. New code expects ``ValueError``.
    """


class NotRegisteredError(RuntimeError, ValueError):
    """The operator needs an object, such as a loader or a model, that its `setup` did not register."""


class NoDataError(NotRegisteredError):
    """Training or validation data is missing: it was neither registered nor passed to the call."""


class InvalidRegistrationError(TypeError, ValueError, AssertionError):
    """An argument of `register` has the wrong type.

    The old library used ``assert`` here. A wrong type is a ``TypeError``, but many callers catch ``ValueError``.
    """


class UnevenStepsError(RaySGDError, RuntimeError):
    """Workers took different numbers of steps in a synchronous epoch, or performed different operations in a step."""


class RanksDifferError(RaySGDError, RuntimeError):
    """Model weights that must be in sync differ between workers. The call is never retried.

    The message names the models, their parameters and the ranks. The next call starts from the last snapshot.
    """


class IncompatibleModelError(RaySGDError, ValueError):
    """A model, or the way it was compiled, is incompatible with the backend or with the trainer's setup."""


class UnpicklableError(RaySGDError, TypeError):
    """An object cannot be sent to the workers because it cannot be pickled.

    Nothing was sent, and no worker was lost.
    """


class TrainerShutdownError(RaySGDError, RuntimeError):
    """The trainer was shut down, or its Ray session ended, before or during the call."""


class TrainerLostError(RaySGDError, RuntimeError):
    """A detached trainer has ended, its process has died, or it does not respond."""


class UnknownTrainerError(RaySGDError, LookupError):
    """No detached trainer has this name. The message lists the existing detached trainers."""


class ReservationTimeoutError(RaySGDError, TimeoutError):
    """The cluster did not allocate the workers' resources in time.

    The message lists the requested resources and the cluster's resources.
    """


class WorkersLostError(RaySGDError, RuntimeError):
    """Workers died, and no retries or attempts to start new workers are left."""


class CheckpointCorruptedError(ValueError, RuntimeError):
    """A checkpoint file is truncated or altered, or is not a checkpoint."""


class UnsafeCheckpointError(ValueError):
    """A checkpoint contains more than plain data, and the caller did not declare it trustworthy."""


class StorageError(RaySGDError, OSError):
    """A folder or file is unreachable, or could not be read or written. The message names it and the cause.

    `errno` is the cause's `errno`, if it has one.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {**vars(self), "errno": self.errno}


class StreamError(RaySGDError, RuntimeError):
    """A stream's row cannot be read or prepared, or a shard has changed. The message names the shard and the row."""


class InactiveWorkerGroupError(RaySGDError, RuntimeError):
    """The workers of a function-based trainer were used before `start` or after `shutdown`."""


class TrainBackendError(RaySGDError, RuntimeError):
    """A method of a function-based run was called in the wrong order, such as asking for results before starting it."""


class TrainingWorkerError(RaySGDError, RuntimeError):
    """A worker of a function-based trainer died during a call outside a run."""


class CallbackError(RaySGDError, RuntimeError):
    """A callback failed during a run, such as `fit`.

    The message names the callback and its method. `__cause__` is the original exception.
    """


class Preempted(SystemExit):  # a requested exit, so its name does not end with `Error`
    """A signal asked the program to end, so the run stopped at a step, and was saved if possible.

    The exit status is 128 + `signal`.

    Attributes:
        signal: The number of the signal.
        checkpoint: Location of the saved state. None if no callback or function saves the state, or if saving failed.
    """

    def __init__(self, signal: int, checkpoint: str | None = None) -> None:
        super().__init__(128 + signal)
        self.signal, self.checkpoint = signal, checkpoint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signal, self.checkpoint)


class StepMismatchError(RaySGDError, RuntimeError):
    """Training functions on different workers reported, saved or called collectives at different steps."""


class MissingTuneError(ImportError, ValueError, RuntimeError):
    """A function cannot run as a trial because Ray Tune cannot be imported. The old library raised ``ValueError``."""


class MissingFrameworkError(ModuleNotFoundError, ValueError):
    """The framework that a `raysgd.v2` config selects is not installed. The old library raised ``ValueError``."""


class SessionMisuseError(RaySGDError, RuntimeError):
    """A session function was called in a type of run that does not support it, for example Ray's `report` in `fit`."""


class TrainingFailedError(RaySGDError, RuntimeError):
    """A run that `fit` started has failed, and no retries are left.

    The raised exception is an instance of this class *and* of its cause's class. The cause is the exception of the
    user's function or an exception from this module, and is available as `__cause__`. The message says how to continue.
    """

    failure: Exception | None = None
    advice: str = ""


@dataclass(frozen=True)
class WorkerFault:
    """One worker's exception in a form that can be sent to another process.

    Attributes:
        rank: World rank of the worker, or -1 before ranks are assigned.
        node: Address of the worker's node.
        error: The exception object, or None if it could not be pickled.
        type_name: Name of the exception's class.
        message: The exception's message, without quoted frames of libraries.
        location: The innermost line of user code, as ``file:line in function``.
        traceback_text: The traceback, starting at the first line of user code; empty if `error` has its live frames.
        callers: The lines of user code that led to `location`, innermost first; empty if `error` has its live frames.
        causes: Descriptions of the exceptions that Python would show before this exception, latest first.
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
    """An exception as picklable parts: class, `args`, attributes and slots.

    Many exceptions cannot be pickled directly, because their constructor needs arguments that `args` does not hold.
    """

    user_class: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    slots: tuple[tuple[type, str, Any], ...]

    @staticmethod
    def of(error: BaseException | None) -> _Packed | BaseException | None:
        if error is None or _pickles_in_its_own_way(type(error)):
            return error
        # `obj`, the object that lacks an attribute, may be large
        slots = tuple(slot for slot in slots_of(error) if slot[1] != "obj")
        return _Packed(type(error), error.args, dict(error.__dict__), slots)

    def unpacked(self) -> BaseException:
        return made_from_parts(self.user_class, self.args, self.attributes, self.slots)

    def portable(self, is_portable: Callable[[Any], bool], in_words: Callable[[Any], str]) -> _Packed:
        """Return a copy in which `in_words(value)` replaces each value that is not portable."""

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
    """Return a copy of an exception in which strings replace values that are not portable, such as locks.

    Args:
        error: The exception.
        is_portable: Returns True for values that can be sent to another process.
        in_words: Returns the string that replaces a value.
    """
    packed = _Packed.of(error)
    return packed.portable(is_portable, in_words).unpacked() if isinstance(packed, _Packed) else error


def _pickles_in_its_own_way(user_class: type[BaseException]) -> bool:
    methods = ("__reduce__", "__reduce_ex__")
    owners = [owner for owner in user_class.__mro__ if any(name in vars(owner) for name in methods)]
    return owners[0].__module__ != "builtins"


def slots_of(error: BaseException) -> Iterator[tuple[type, str, Any]]:
    """Yield the values that an exception stores outside its `__dict__`: `args`, `errno`, and values in `__slots__`.

    Each item is the class that defines the slot, the slot's name, and its value.
    """
    for owner in type(error).__mro__:
        for name, descriptor in vars(owner).items():
            if name.startswith("__") or not isinstance(descriptor, MemberDescriptorType | GetSetDescriptorType):
                continue
            try:
                value = descriptor.__get__(error)
            except AttributeError:  # the slot is empty
                continue
            if value is not None or owner.__module__ != "builtins":  # an `OSError` stores None for missing arguments
                yield owner, name, value


def made_from_parts(
    user_class: type[BaseException],
    args: tuple[Any, ...],
    attributes: dict[str, Any],
    slots: tuple[tuple[type, str, Any], ...],
) -> BaseException:
    """Create an exception from its parts, without calling the constructor of the user's class."""
    error: BaseException = _builtin_base(user_class).__new__(user_class, *args)
    error.__dict__.update(attributes)
    for owner, name, value in slots:
        try:
            vars(owner)[name].__set__(error, value)
        except (AttributeError, TypeError):  # the slot is read-only, and `__new__` has already set it
            continue
    return error


def _builtin_base(user_class: type[BaseException]) -> type[BaseException]:
    """Return the built-in base class with the memory layout of `user_class`. Its `__new__` must create instances."""
    base = user_class
    while base.__module__ != "builtins":
        base = base.__base__  # type: ignore[assignment]  # never None for an exception
    return base


class WorkerError(RaySGDError):
    """User code failed in a worker.

    The raised exception is an instance of this class *and* of the class that the user code raised, so that ``except
    ValueError`` works as if the code had run in the driver. `faults` contains the faults of all ranks, earliest first.
    `aftermath` says what happened to the workers and their state afterward, for example that workers were replaced.
    """

    faults: tuple[WorkerFault, ...] = ()
    aftermath: str = ""
