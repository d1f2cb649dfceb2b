"""Limits on the contents of checkpoint files that may come from strangers, and errors for files that violate them.

The pickles in checkpoint files of Ray's former library `ray.util.sgd` call NumPy functions that trust the file: for
example, an array of objects would get its pointers from the file. Safe functions replace these NumPy functions. They
create only numeric arrays whose size matches their bytes exactly.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from raysgd.exceptions import CheckpointCorruptedError, UnsafeCheckpointError

_MAX_DEPTH = 100
"""Maximum nesting depth of containers."""


class DamagedFileError(ValueError):
    """The contents of a file are inconsistent, or larger or more deeply nested than a training state may be."""


class NotPlainError(Exception):
    """A file contains more than plain data. Loading it could run code.

    Attributes:
        needed: The class or function, or the type of array, that loading the file would need.
    """

    def __init__(self, needed: str) -> None:
        super().__init__(needed)
        self.needed = needed


def require(holds: bool, finding: str) -> None:
    """Raise an error about the file that is being read, unless a condition holds.

    Args:
        holds: The condition.
        finding: What is wrong with the file if the condition does not hold.

    Raises:
        DamagedFileError: `holds` is False. The message is `finding`.
    """
    if not holds:
        raise DamagedFileError(finding)


def check_depth(value: Any, what: str = "it") -> None:
    """Raise an error for a value that is nested too deeply for the recursive functions that process training states.

    Args:
        value: Nested dicts, lists and tuples. A container may contain itself.
        what: How the error message refers to the value.

    Raises:
        DamagedFileError: The value is nested too deeply. A subclass of `ValueError`.
    """
    heights: dict[int, int] = {}  # height of each container, by the container's `id`

    def height(item: Any, depth: int) -> int:
        if not isinstance(item, dict | list | tuple):
            return 0
        is_shallow = depth + heights.get(id(item), 1) <= _MAX_DEPTH
        require(is_shallow, f"{what} is nested more than {_MAX_DEPTH} levels deep")
        if id(item) not in heights:
            heights[id(item)] = 0  # this ends the recursion if an item contains itself
            parts = [*item.values(), *getattr(item, "__dict__", {}).values()] if isinstance(item, dict) else item
            heights[id(item)] = 1 + max((height(part, depth + 1) for part in parts), default=0)
        return heights[id(item)]

    height(value, 0)


def check_stored(archive: zipfile.ZipFile, num_bytes: int) -> None:
    """Raise an error for an archive that could expand to more bytes than the file has.

    Args:
        archive: The archive.
        num_bytes: Size of the file.

    Raises:
        DamagedFileError: A member is compressed or starts before the archive, or the members together are larger than
            the file, because they overlap.
    """
    for member in archive.infolist():
        is_plain = member.compress_type == zipfile.ZIP_STORED and member.file_size == member.compress_size
        require(is_plain, "it has members that are compressed")
        require(member.header_offset >= 0, "it has members that begin ahead of it")
        num_bytes -= member.file_size
    require(num_bytes >= 0, "its members overlap")


@contextlib.contextmanager
def refusals_of(name: str, advice: str = "") -> Iterator[None]:
    """Convert errors raised in the `with` block, while a file is read, into checkpoint errors with advice.

    An `OSError` stays unchanged.

    Args:
        name: The file's name in error messages.
        advice: What the user can do if the file contains more than plain data.

    Raises:
        UnsafeCheckpointError: The file contains more than plain data.
        CheckpointCorruptedError: The file is damaged.
    """
    try:
        yield
    except OSError:
        raise
    except NotPlainError as error:
        text = f"`{name}` needs `{error.needed}` to be loaded, which can run code."
        raise UnsafeCheckpointError(f"{text} {advice}".rstrip()) from error
    except Exception as error:  # damaged bytes may cause any error
        raise corrupted(name, f"it cannot be read ({in_short(error)})") from error


def corrupted(name: str, finding: str) -> CheckpointCorruptedError:
    """Return an error about a checkpoint file that was damaged after it had been written.

    Args:
        name: The file's name.
        finding: What is wrong with the file.
    """
    return CheckpointCorruptedError(
        f"`{name}` is not an intact checkpoint: {finding}. The file was damaged or only partly copied. Copy it again "
        "from its source, or load an earlier checkpoint."
    )


def in_short(error: Exception) -> str:
    """Return the first line of an error's message, cut to 200 characters.

    Return the error's class name if the message is empty.
    """
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def check_format(name: str, number: Any, newest: int) -> None:
    """Raise an error for a checkpoint file that was written by a later version of raysgd.

    Args:
        name: The file's name in error messages.
        number: The format number in the file.
        newest: The newest format number that this version of raysgd can read.

    Raises:
        ValueError: `number` is greater than `newest`, or not an integer.
    """
    if not isinstance(number, int) or number > newest:
        raise ValueError(
            f"`{name}` is in checkpoint format {str(number)[:20]}; this version of raysgd supports formats up to "
            f"{newest}. Upgrade raysgd to read it."
        )


def checked_state(loaded: Any, name: str, keys: Collection[str]) -> dict[str, Any]:
    """Return the content of a checkpoint file. Raise an error if it is not a training state.

    Args:
        loaded: The content of the file.
        name: The file's name in error messages.
        keys: Keys that every training state has.

    Raises:
        ValueError: The content is not a dict, or lacks one of the keys.
    """
    hint = f"a training state, as a trainer's `state_dict()` returns it, has {list(keys)}."
    if not isinstance(loaded, dict):
        raise ValueError(f"`{name}` holds a `{type(loaded).__name__}`, not a training state; {hint}")
    missing = [key for key in keys if key not in loaded]
    if missing:
        raise ValueError(f"`{name}` holds no training state: it lacks {missing}; {hint}")
    return loaded


_DTYPE = re.compile(r"[?biufc]\d{0,2}")


class FormerValue:
    """A placeholder for a NumPy dtype or array in a pickle. A pickle first creates such an object, then sets its state.

    Args:
        code: Type code of a dtype, such as "f4". None for an array.
    """

    def __init__(self, code: Any = None) -> None:
        if code is not None and not (isinstance(code, str) and _DTYPE.fullmatch(code)):
            raise NotPlainError(f"arrays of `numpy.dtype({str(code)[:20]!r})`")
        self._code = code
        self._state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self._state = state

    @property
    def value(self) -> Any:
        """The NumPy dtype or array that this placeholder stands for."""
        if self._code is None:
            _, shape, dtype, is_fortran, content = self._state
            return _array(dtype, content).reshape(shape, order="F" if is_fortran else "C")
        _, order, *_ = self._state
        require(order in ("<", ">", "=", "|"), "a dtype without an order")
        return np.dtype(order + self._code)


def _dtype(code: Any, *_: Any) -> FormerValue:
    return FormerValue(str(code))


def _array(dtype: Any, content: Any) -> np.ndarray[Any, Any]:
    require(isinstance(dtype, FormerValue) and type(content) is bytes, "an array without its bytes")
    kind = dtype.value
    require(isinstance(kind, np.dtype), "an array without its kind")
    return np.frombuffer(content, kind).astype(kind.newbyteorder("="))


def _new_array(*_: Any) -> FormerValue:
    return FormerValue()


def _scalar(dtype: Any, content: Any) -> Any:
    return _array(dtype, content).reshape(())[()]


def _no_bytes() -> bytes:
    return b""


def _array_class() -> None:
    """Stand in for `numpy.ndarray` in a pickle. A pickle refers to that class but never calls it."""


FORMER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "builtins.bytes": _no_bytes,  # pickle protocol 2 calls `bytes` to create empty bytes
    "numpy.dtype": _dtype,
    "numpy.ndarray": _array_class,
    **{
        f"numpy.{core}.multiarray.{name}": function
        for core in ("core", "_core")  # names of the same package in NumPy 1 and NumPy 2
        for name, function in (("_reconstruct", _new_array), ("scalar", _scalar))
    },
}
"""Replacements for the functions that a pickle may call, by the name in the pickle."""


class _FormerUnpickler(pickle.Unpickler):
    """Reads a pickle of plain values and NumPy arrays. Raises `NotPlainError` for a pickle with other contents."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the safe replacement for the function `module.name`, which the pickle names.

        Raises:
            NotPlainError: There is no safe replacement for this function.
        """
        full_name = f"{module}.{name}"
        if full_name not in FORMER_FUNCTIONS:
            raise NotPlainError(full_name[:200])
        return FORMER_FUNCTIONS[full_name]


def read_pickle(content: bytes) -> Any:
    """Return the content of a pickle, with a `FormerValue` in place of each NumPy array or dtype.

    Raises:
        NotPlainError: The pickle contains objects other than plain values and NumPy arrays.
        Exception: The pickle is damaged, which may raise any error.
    """
    for opcode, argument, _ in pickletools.genops(content):  # this raises an error if bytes are missing
        if opcode.name in ("PUT", "LONG_BINPUT"):
            require(argument is not None and argument < len(content), "it numbers more values than it has")
    return _FormerUnpickler(io.BytesIO(content)).load()
