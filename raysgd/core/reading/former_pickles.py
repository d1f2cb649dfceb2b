"""Safely reads NumPy values in the checkpoint files of Ray's former library `ray.util.sgd`.

The pickles in these files call NumPy functions that trust the file: for example, an array of objects would get its
pointers from the file. Safe functions replace these NumPy functions. They create only numeric arrays whose size matches
their bytes exactly.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from raysgd.core.reading.strict_reading import NotPlainError, require

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
