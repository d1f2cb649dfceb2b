"""Sends objects of the user to other processes: pickles them, knows data that was sent before, explains failures."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.imports import pickle_modules_by_name
from raysgd.exceptions import UnpicklableError


def packed_bytes(what: str, value: Any) -> bytes:
    """Pickle a value that will be sent to a worker.

    Args:
        what: Description of the value, with which the error message starts.
        value: The value to pickle.

    Raises:
        UnpicklableError: `value` cannot be pickled.
    """
    from ray import cloudpickle

    try:
        try:
            packed: bytes = cloudpickle.dumps(value, protocol=5)
        except TypeError:
            pickle_modules_by_name()
            packed = cloudpickle.dumps(value, protocol=5)
    except Exception as error:  # pickling an object of the user may raise anything
        reason = str(error).strip().partition("\n")[0][:300].rstrip(".") or type(error).__name__
        raise UnpicklableError(
            f"{what} cannot be sent to the workers, because something in it cannot be pickled: {reason}. "
            "Omit what belongs to this process (locks, open files, connections, generators, datasets of TensorFlow), "
            "and create it in the worker, for example in `setup` or in the creator function that needs it."
        ) from error
    return packed


@dataclass(frozen=True)
class SentData:
    """Wraps data that a program passes to a detached trainer. Unpickling returns the data without the wrapper.

    Each call unpickles a new copy of the data. The function `identity` returns the same token for all copies, so that
    the trainer recognizes data that it has received before.

    Attributes:
        argument: Name of the argument.
        data: The user's data, such as a dataset.
        token: Identifies the data, however often it is sent.
    """

    argument: str
    data: Any
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.argument, self.data, self.token)


_RECEIVED: dict[str, tuple[Any, str]] = {}  # for each argument name, the last data received and its token


def _received(argument: str, data: Any, token: str) -> Any:
    _RECEIVED[argument] = data, sys.intern(token)
    return data


def identity(data: Any) -> Any:
    """Return an object that identifies the data across calls.

    This is the token if the data is the last `SentData` received for its argument. Otherwise, it is the data itself.
    """
    return next((token for received, token in _RECEIVED.values() if received is data), data)


def is_sendable(value: Any) -> bool:
    """Return True if the value can be pickled and sent to a worker."""
    try:
        packed_bytes("it", value)
    except UnpicklableError:
        return False
    return True


def cannot_import(module: str | None) -> ModuleNotFoundError:
    """Return the error to raise if a worker process cannot import the module of an object that it received."""
    message = (
        f"No module named '{module}' in the worker process: something that was sent there, such as the operator class "
        "or a function, is defined in it. Define it in the script that you run, install the module on every node, or "
        'let Ray ship it: `ray.init(runtime_env={"working_dir": "..."})` or `{"py_modules": [...]}`.'
    )
    return ModuleNotFoundError(message, name=module)
