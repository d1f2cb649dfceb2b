"""Converts a training state to a plain state, which PyTorch's `weights_only` reader can load from a file, and back.

A plain state consists of tensors, numbers, strings, bytes, and containers of them. PyTorch's reader runs no code while
it loads these, but does not support NumPy arrays. Allowing NumPy's functions would be a security hole: a file could
contain an array of objects with arbitrary pointers. Therefore, an array is written as a marked tensor: a dict with the
single key `raysgd_numpy` and the tensor as its value. Everything else is written as `torch.save` writes it.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from raysgd.core.state.strict_reading import FormerValue, check_depth, require

NUMPY_KEY = "raysgd_numpy"
"""The only key of a dict that represents a NumPy array in a plain state. Its value is a tensor."""

_PLAIN_TYPES = frozenset({type(None), bool, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device})
_MAX_INT_BITS = 2000
"""Largest size, in bits, of an integer that counts as plain.

PyTorch's reader does not support the pickle opcode for larger integers.
"""

_MAX_EXPANSION = 16
"""Largest allowed ratio of a state's size in memory to the size of its file.

The ratio of a valid file may exceed 1, because tensors in a file may share memory.
"""

_changing_allowed = threading.RLock()


@contextlib.contextmanager
def only_plain(more: list[Any]) -> Iterator[None]:
    """During the `with` block, change which classes and functions PyTorch's `weights_only` reader may call.

    PyTorch itself adds the classes of `torch.distributed`, as soon as they are imported. A file could call them, for
    example to create a process group, which opens a port. What users added stays allowed.

    Args:
        more: Functions and classes to allow as well, as for `torch.serialization.add_safe_globals`.
    """
    with _changing_allowed:
        distributed = torch.serialization.safe_globals(
            [
                each
                for each in torch.serialization.get_safe_globals()
                if str(getattr(each, "__module__", "")).startswith("torch.distributed.")
            ]
        )
        distributed.__exit__(None, None, None)  # the public function to remove some classes
        try:
            with torch.serialization.safe_globals(more):
                yield
        finally:
            distributed.__enter__()


def packed(state: Any, *, allow_pickle: bool = False) -> Any:
    """Return a plain state with the content of `state`. Containers are copied, tensors are not.

    NumPy scalars become Python numbers, and NumPy arrays become dicts with the key `raysgd_numpy` and a tensor. A value
    whose type may not be plain is saved and loaded once, to test whether PyTorch's reader accepts it. The reader also
    accepts classes that your program passed to `torch.serialization.add_safe_globals`.

    Args:
        state: State to write.
        allow_pickle: True to accept any object that can be pickled. Reading the file may then need
            `weights_only=False`.

    Raises:
        ValueError: A value in the state cannot be loaded with `weights_only=True`, or is a dict with the key
            `raysgd_numpy`. The message gives the value's path. Also raised if the state is nested too deeply. With
            `allow_pickle`, none of this is checked.
    """
    if not allow_pickle:
        check_depth(state, "`state`")
    return _Packing(allow_pickle).of(state, "state")


class _Packing:
    """Implements `packed`: copies the containers of one state, and checks that each value in them can be loaded."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._copies: dict[int, Any] = {}

    def of(self, value: Any, path: str) -> Any:
        """Return a value in the form in which it is written.

        Args:
            value: Any value in the state, or the state itself.
            path: Path of the value in the state, for errors.
        """
        kind = type(value)
        if kind in _PLAIN_TYPES or (kind is int and value.bit_length() <= _MAX_INT_BITS):
            return value
        if kind is bytes:
            return value or _NoBytes()
        if kind in (dict, collections.OrderedDict, list, np.ndarray):
            if id(value) not in self._copies:  # copy the value only once, even if it occurs several times
                self._copies[id(value)] = kind() if kind is not np.ndarray else self._array(value, path)
                self._fill(self._copies[id(value)], value, path)
            return self._copies[id(value)]
        if kind is tuple:
            return tuple(self.of(item, f"{path}[{i}]") for i, item in enumerate(value))
        if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, complex, str, bytes):
            return self.of(value.item(), path)
        if kind not in (torch.Tensor, torch.nn.Parameter) or value.is_quantized or value.is_nested:
            self._try(value, value, path)
        elif vars(value):
            self._try(vars(value), value, f"vars({path})")
        return value

    def _fill(self, copy: Any, value: Any, path: str) -> None:
        """Fill an empty container with the converted content of another container.

        Args:
            copy: Container to fill.
            value: Container with the content. It may contain itself.
            path: Path of the container in the state, for errors.
        """
        if isinstance(value, list):
            copy.extend(self.of(item, f"{path}[{i}]") for i, item in enumerate(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                item_path = f"{path}[{_quoted(key)}]"
                if key == NUMPY_KEY and not self._allow_pickle:
                    raise ValueError(f"`{item_path}`: this key marks NumPy arrays in checkpoints. Use another one.")
                copy[self.of(key, f"key of {item_path}")] = self.of(item, item_path)
            if isinstance(value, collections.OrderedDict):  # a model's state dict has the attribute `_metadata`
                vars(copy).update(self.of(vars(value), f"vars({path})"))

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Any:
        """Return a NumPy array as a marked tensor, a dict with the key `raysgd_numpy` and the tensor.

        If PyTorch lacks the array's dtype and pickles are allowed, return the array unchanged.

        Raises:
            ValueError: PyTorch lacks the dtype, and pickles are not allowed.
        """
        try:
            native = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
            return {NUMPY_KEY: torch.from_numpy(native)}
        except TypeError as error:  # PyTorch has no dtype for this array
            if self._allow_pickle:
                return array
            raise ValueError(
                f"`{path}` is an array of `{array.dtype}`, which no tensor can hold. Convert it in `state_dict()`, to "
                "numbers or a list."
            ) from error

    def _try(self, sample: Any, value: Any, path: str) -> None:
        """Check that a value can be loaded with `weights_only=True`, by saving and loading it.

        With `allow_pickle`, do nothing.

        Args:
            sample: What is saved and loaded: `value`, or its attributes.
            value: The value.
            path: Path of the value in the state, for errors.

        Raises:
            ValueError: The value cannot be loaded.
        """
        if self._allow_pickle:
            return
        try:
            stream = io.BytesIO()
            torch.save(sample, stream)
            stream.seek(0)
            with only_plain([]):
                unpacked(torch.load(stream, weights_only=True), stream.getbuffer().nbytes)
        except Exception as error:  # pickling a user's object may raise any exception
            raise ValueError(
                f"`{path}` is a `{type(value).__module__}.{type(value).__qualname__}`, which a checkpoint "
                "cannot restore without running code. Allowed are tensors, arrays of numbers, numbers, strings, "
                "bytes, None, and dicts, lists and tuples of these. Convert it in `state_dict()`, or opt in: "
                "`save(path, weights_only=False)`, and `load(path, weights_only=False)` for files you trust."
            ) from error


class _NoBytes:
    """Replaces empty bytes in a state. Pickle writes empty bytes in a form that PyTorch's reader does not support."""

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


def _quoted(key: Any) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)


def unpacked(loaded: Any, num_bytes: int) -> Any:
    """Undo `packed`: return a loaded state with NumPy arrays in place of the marked tensors.

    Args:
        loaded: Loaded state. Its dicts and lists are changed in place.
        num_bytes: Size of the file.

    Raises:
        DamagedFileError: The state is nested too deeply, would take more than 16 times the file's size in memory, or
            has a malformed value.
        RuntimeError: A sparse tensor has values outside of its shape.
    """
    check_depth(loaded)
    return _Unpacking(num_bytes * _MAX_EXPANSION).of(loaded)


class _Unpacking:
    """Implements `unpacked`: converts marked tensors in one state to NumPy arrays, and limits the state's total size.

    Args:
        num_bytes_left: Largest total size of the state.
    """

    def __init__(self, num_bytes_left: int) -> None:
        self._num_bytes_left = num_bytes_left
        self._places: set[Any] = set()
        self._done: dict[int, tuple[Any, Any]] = {}  # by the ID of a container: the container and its replacement

    def of(self, value: Any) -> Any:
        """Return a value in which all marked tensors, at any depth, are replaced with NumPy arrays.

        The placeholders for NumPy values in files of `ray.util.sgd` (`FormerValue`) are replaced, too.
        """
        if isinstance(value, bytes | bytearray):
            self._count(id(value), len(value))
        elif isinstance(value, FormerValue | torch.Tensor | dict | list | tuple | set | frozenset):
            if id(value) not in self._done:
                self._done[id(value)] = value, value  # record the value first, because it may contain itself
                self._done[id(value)] = value, self._part(value)
            return self._done[id(value)][1]
        return value

    def _part(self, value: Any) -> Any:
        if isinstance(value, FormerValue):
            array = value.value
            self._count(id(value), getattr(array, "nbytes", 0))
            return array
        for attribute in _checked_attributes(value).values():
            self.of(attribute)
        if isinstance(value, torch.Tensor):
            self._count_tensor(value)
            return value
        if type(value) in (dict, collections.OrderedDict, list, tuple):
            return self._container(value)
        for item in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            self.of(item)
        return value

    def _container(self, value: Any) -> Any:
        if type(value) is dict and value.keys() == {NUMPY_KEY}:
            tensor = value[NUMPY_KEY]
            require(type(tensor) is torch.Tensor, "an array is not a tensor")
            self._count_tensor(tensor)
            self._count(id(value), tensor.nbytes)
            return tensor.numpy().copy()
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            is_changed = any(one is not other for one, other in zip(items, value, strict=True))
            return tuple(items) if is_changed else value
        if isinstance(value, list):
            value[:] = [self.of(item) for item in value]
            return value
        for key, item in value.items():
            require(self.of(key) is key, "an array is a key")
            value[key] = self.of(item)
        return value

    def _count_tensor(self, tensor: torch.Tensor) -> None:
        require(not tensor.is_nested, "a tensor is nested")
        parts = _dense_parts(tensor)
        for part in parts:
            if not part.is_meta:
                place = (part.data_ptr(), part.dtype, tuple(part.shape), tuple(part.stride()))
                self._count(place, part.numel() * part.element_size())
        _check_sparse(tensor, parts)

    def _count(self, place: Any, num_bytes: int) -> None:
        if place not in self._places:
            self._places.add(place)
            self._num_bytes_left -= num_bytes
            require(self._num_bytes_left >= 0, "what it holds is many times as large as the file")


def _checked_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object from a file.

    Raises:
        DamagedFileError: An attribute has the name of one of the object's methods, and would replace it.
    """
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    require(not any(hasattr(type(value), name) for name in attributes), "an attribute has the name of a method")
    return attributes


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors in which a sparse tensor holds its indices and values. Return a dense tensor itself."""
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _check_sparse(tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Check that the values of a sparse tensor lie inside its shape, which PyTorch's reader does not do by default.

    Raises:
        RuntimeError: A value lies outside, so that functions of PyTorch would write to other memory.
    """
    size, layout = tensor.shape, tensor.layout
    if layout == torch.sparse_coo:
        indices, values = parts
        torch.sparse_coo_tensor(indices, values, size, check_invariants=True, is_coalesced=tensor.is_coalesced())
    elif layout != torch.strided:
        compressed, plain, values = parts
        torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=True)
