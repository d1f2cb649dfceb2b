"""Defines the exceptions that raysgd raises.

* Most invalid arguments raise a plain ``ValueError`` or ``TypeError``. The classes in this module are for two other
  cases: errors that some programs catch as one built-in class and other programs as another, and failures that a
  program may want to handle separately.
* All exceptions in this module can be pickled with their messages. A pickled `WorkerError` includes the exceptions
  that the user's code raised.

ADR 7 (docs/adr) explains why a `WorkerError` is also an instance of the user's exception class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any


class RaySGDError(Exception):
    """Base class of errors that are specific to raysgd."""


class OnFailure:
    """Context manager that calls a cleanup function only if the ``with`` block raises an exception.

    This includes the ``KeyboardInterrupt`` of Ctrl-C. After the cleanup, the exception propagates.

    Args:
        undo: Cleanup function that is called without arguments.
        with_error: Cleanup function that is called with the exception, after `undo`.
    """

    def __init__(
        self, undo: Callable[[], Any] | None = None, *, with_error: Callable[[BaseException], Any] | None = None
    ) -> None:
        self._undo, self._with_error = undo, with_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if kind is not None and self._undo is not None:
            self._undo()
        if kind is not None and self._with_error is not None:
            self._with_error(error)


@contextmanager
def failure_logged(log: Callable[..., None], words: str, *args: Any) -> Iterator[None]:
    """Log an exception that the ``with`` block raises, and suppress it.

    Use this for work, such as writing a log file, that may fail without stopping the caller.

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
    """A count such as `max_retries` is missing, out of range or not an integer.

    Programs written for `ray.util.sgd`, which checked counts with ``assert``, catch ``AssertionError``. New programs
    catch ``ValueError``.
    """


class RemovedNameError(DeprecationWarning, ValueError):
    """An argument, a method or a class of an older version was used. The message names its successor.

    The last versions of `ray.util.sgd` raised `DeprecationWarning` itself. A program that catches wrong arguments
    catches ``ValueError``.
    """


class NotRegisteredError(RuntimeError, ValueError):
    """The training operator needs an object, such as a model or a data loader, that its `setup` did not register."""


class NoDataError(NotRegisteredError):
    """`train` or `validate` has no data: the operator's `setup` registered none, and the caller passed none."""


class InvalidRegistrationError(TypeError, ValueError, AssertionError):
    """An object that the training operator registers, or should register, has the wrong type or cannot be used.

    For example, an optimizer has parameters that belong to no registered model.

    Python's usual class for a wrong type is ``TypeError``. Many programs catch ``ValueError`` instead. Programs written
    for `ray.util.sgd`, which checked these arguments with ``assert``, catch ``AssertionError``.
    """


class UnevenStepsError(RaySGDError, RuntimeError):
    """Workers that exchange gradients took different numbers of steps, or ran different collectives within a step."""


class RanksDifferError(RaySGDError, RuntimeError):
    """The workers' model weights differ although the workers train in sync.

    The message names the models, the parameters and the ranks. The call that detected the difference, such as `train`,
    is not retried. The next call starts from the last snapshot of the training state. In a training function, the
    error counts as an exception of the function.
    """


class IncompatibleModelError(RaySGDError, ValueError):
    """A Keras model, its loss or its training step cannot be trained correctly, for example an uncompiled model.

    One worker can train many of these models. Several workers, however, would compute other results than one process.
    """


class UnpicklableError(RaySGDError, TypeError):
    """An object cannot be sent to another process, such as a worker, because it cannot be pickled.

    If the object was an argument of a call, nothing was sent to any worker, and all workers are still running. If the
    object was the result of a detached trainer's call, the call has run.
    """


class TrainerShutdownError(RaySGDError, RuntimeError):
    """The trainer was shut down, or its Ray session ended, before or during a call of one of its methods."""


class TrainerLostError(RaySGDError, RuntimeError):
    """A detached trainer (one in its own Ray actor) has ended, its process has died, or it does not respond."""


class UnknownTrainerError(RaySGDError, LookupError):
    """No detached trainer has the requested name. The message lists the existing detached trainers."""


class ReservationTimeoutError(RaySGDError, TimeoutError):
    """The Ray cluster did not reserve the CPUs, GPUs and other resources for the workers in time, or cannot do so.

    If resources are lacking, the message lists the requested resources and the resources that the cluster has.
    """


class WorkersLostError(RaySGDError, RuntimeError):
    """Workers were lost, and the trainer cannot continue the call.

    For example, no retries are left, too few new workers could be started, or the training state was lost.
    """


class CheckpointCorruptedError(ValueError, RuntimeError):
    """A checkpoint file or folder is incomplete or altered, or is not a checkpoint."""


class UnsafeCheckpointError(ValueError):
    """A checkpoint contains objects other than tensors and plain data, so loading it could run arbitrary code.

    The message says how to load the checkpoint if you trust its source.
    """


class StorageError(RaySGDError, OSError):
    """A local or remote folder or file is unreachable, or could not be read or written.

    The message names the folder or file and the cause. The attribute `errno` is the error number of the cause, or None
    if the cause has no error number.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {**vars(self), "errno": self.errno}


class StreamError(RaySGDError, RuntimeError):
    """A row of a data stream cannot be read, transformed or batched, or a shard no longer has as many rows as before.

    If the error concerns a row or a shard, the message names it.
    """


class InactiveWorkerGroupError(RaySGDError, RuntimeError):
    """The workers of a function-based trainer (`raysgd.train`) were used before `start` or after `shutdown`.

    Also raised if the workers that a handle or an iterator uses were replaced, or have begun another run.
    """


class TrainBackendError(RaySGDError, RuntimeError):
    """Methods of a function-based trainer (`raysgd.train`) were called in the wrong order, or on the wrong object.

    For example, a program requested a function's results before it started the function.
    """


class TrainingWorkerError(RaySGDError, RuntimeError):
    """A worker of `raysgd.train` died during a function call that the program sent to the workers directly.

    After a call through `BackendExecutor`, new workers have started. A call through `WorkerGroup` starts no new
    workers. A worker that dies while a training function runs under `Trainer.run` or `fit` does not raise this error.
    """


class CallbackError(RaySGDError, RuntimeError):
    """A callback raised an exception in `fit`, or in another call that runs callbacks.

    The message names the callback and the method that failed. `__cause__` is the original exception.
    """


class Preempted(SystemExit):  # a requested exit, so its name does not end with `Error`
    """The run stopped because a signal, SIGTERM or SIGUSR1, asked the program to end.

    The run of a training operator stops after a completed step, and its state is saved if a callback saves it. The run
    of a training function stops at the function's next checkpoint, or 30 s after the signal. A second signal ends the
    program at once. The exit status of the program is 128 plus the number of the signal.

    In a notebook, the run raises ``KeyboardInterrupt`` instead.

    Attributes:
        signal: The number of the signal.
        checkpoint: Path or URI of the newest checkpoint. None if the run has no checkpoint, or if a second signal ended
            the program.
    """

    def __init__(self, signal: int, checkpoint: str | None = None) -> None:
        super().__init__(128 + signal)
        self.signal, self.checkpoint = signal, checkpoint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signal, self.checkpoint)


class StepMismatchError(RaySGDError, RuntimeError):
    """Training functions on different workers called `report`, `save_checkpoint` or collectives in different orders.

    This includes functions that make the same calls a different number of times.
    """


class MissingTuneError(ImportError, ValueError, RuntimeError):
    """A trainer or function cannot run as a trial of Ray Tune, because Ray Tune cannot be imported.

    Programs written for `ray.util.sgd` catch ``ValueError``.
    """


class MissingFrameworkError(ModuleNotFoundError, ValueError):
    """The framework of a `raysgd.v2` config, such as `TorchConfig`, is not installed.

    Programs written for `ray.util.sgd.v2` catch ``ValueError``.
    """


class SessionMisuseError(RaySGDError, RuntimeError):
    """A training function called a session function, such as `save_checkpoint`, that its type of run does not support.

    For example, a function that `fit` runs called Ray's own `ray.train.report` instead of `raysgd.train.report`.
    """


class TrainingFailedError(RaySGDError, RuntimeError):
    """A run that `fit` of a function-based trainer (`raysgd.train`) started has failed, and is not retried.

    The raised exception is an instance of this class *and* of the class of the exception that ended the run: the class
    that the user's function raised, or a class in this module such as `WorkersLostError`. The message ends with advice
    on how to continue the run.

    Attributes:
        failure: The exception that ended the run. It is a `WorkerError` if the user's function raised an exception.
        advice: Sentences that say how to continue the run.
    """

    failure: Exception | None = None
    advice: str = ""


@dataclass(frozen=True)
class WorkerFault:
    """One worker's exception in a form that can be sent to another process.

    If the worker runs in the driver's process, nothing is sent. The exception then keeps its stack frames, and
    `traceback_text`, `callers` and `causes` stay empty.

    Attributes:
        rank: World rank of the worker, or -1 before ranks are assigned.
        node: Address of the worker's node.
        error: The exception object, or None if it could not be pickled.
        type_name: Name of the exception's class.
        message: The exception's message, without the stack frames that PyTorch or TensorFlow quoted in it.
        location: The innermost line of user code, as ``file:line in function``.
        traceback_text: The traceback, starting at the first line of user code.
        callers: The lines of user code that led to `location`, innermost first.
        causes: Descriptions of the exceptions that led to this exception (`__cause__` or `__context__`), latest first.
    """

    rank: int
    node: str
    error: BaseException | None = field(repr=False)  # its arguments may hold secrets, which the message masks
    type_name: str
    message: str
    location: str
    traceback_text: str
    callers: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "error": _packed(self.error)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        error = state["error"]
        self.__dict__.update({**state, "error": error() if isinstance(error, partial) else error})


def portable_copy(error: BaseException, shown: Callable[[Any], Any]) -> BaseException:
    """Copy an exception, replacing values that cannot be sent to another process, such as locks, with strings.

    An exception whose class defines `__reduce__` or `__reduce_ex__` is returned as it is.

    Args:
        error: The exception.
        shown: Function that returns a value that can be sent to another process, or a string to put in its place.
    """
    packed = _packed(error)
    if not isinstance(packed, partial):
        return error
    user_class, args, attributes, slots = packed.args
    return made_from_parts(
        user_class,
        tuple(map(shown, args)),
        {name: shown(value) for name, value in attributes.items()},
        tuple((owner, name, shown(value)) for owner, name, value in slots if name != "args"),
    )


def _packed(error: BaseException | None) -> partial[BaseException] | BaseException | None:
    """Return a function that makes the exception again, which can be pickled even where the exception cannot.

    Unpickling an exception calls its class with `args`. This fails for many classes, because their constructors need
    other arguments. An exception of a class that defines its own pickling is returned as it is.
    """
    if error is None or _pickles_in_its_own_way(type(error)):
        return error
    # Leave out `AttributeError.obj`, the object that lacks the attribute, because it may be large.
    slots = tuple(slot for slot in slots_of(error) if slot[1] != "obj")
    return partial(made_from_parts, type(error), error.args, dict(error.__dict__), slots)


def _pickles_in_its_own_way(user_class: type[BaseException]) -> bool:
    methods = ("__reduce__", "__reduce_ex__")
    owners = [owner for owner in user_class.__mro__ if any(name in vars(owner) for name in methods)]
    return owners[0].__module__ != "builtins"


def slots_of(error: BaseException) -> Iterator[tuple[type, str, Any]]:
    """Yield the values that an exception stores outside its `__dict__`, such as `args`, `errno` and `__slots__` values.

    Each item is a tuple: the class that defines the slot, the name of the slot, and its value.
    """
    for owner in type(error).__mro__:
        for name, descriptor in vars(owner).items():
            if name.startswith("__") or not isinstance(descriptor, MemberDescriptorType | GetSetDescriptorType):
                continue
            try:
                value = descriptor.__get__(error)
            except AttributeError:  # the slot is empty
                continue
            # A built-in exception such as `OSError` stores None for each argument that it was not given: skip these.
            if value is not None or owner.__module__ != "builtins":
                yield owner, name, value


def made_from_parts(
    user_class: type[BaseException],
    args: tuple[Any, ...],
    attributes: dict[str, Any],
    slots: tuple[tuple[type, str, Any], ...],
) -> BaseException:
    """Create an exception from its parts, without calling the constructor of the user's class.

    Args:
        user_class: The class of the exception.
        args: The exception's `args`.
        attributes: The values in its `__dict__`.
        slots: The values outside its `__dict__`, as `slots_of` yields them.
    """
    error: BaseException = _builtin_base(user_class).__new__(user_class, *args)
    error.__dict__.update(attributes)
    for owner, name, value in slots:
        try:
            vars(owner)[name].__set__(error, value)
        except (AttributeError, TypeError):  # the slot is read-only, and `__new__` has already set it
            continue
    return error


def _builtin_base(user_class: type[BaseException]) -> type[BaseException]:
    """Return the nearest built-in base class of `user_class`, whose `__new__` creates instances of `user_class`."""
    base = user_class
    while base.__module__ != "builtins":
        base = base.__base__  # type: ignore[assignment]  # never None for an exception
    return base


class WorkerError(RaySGDError):
    """User code raised an exception in a worker.

    The raised exception is an instance of this class *and* of the class that the user code raised. ``except
    ValueError``, for example, works as if the code had run in the driver.

    Attributes:
        faults: The exceptions of all ranks that failed, in rank order.
        aftermath: Sentences that say what happens to the workers after the error.
    """

    faults: tuple[WorkerFault, ...] = ()
    aftermath: str = ""
