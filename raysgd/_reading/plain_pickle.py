"""Reads pickles of plain data and NumPy arrays from anywhere: nothing in them is run, and none is trusted.

What a pickle may ask for is a table of our own functions, each of which checks its arguments. Nothing is made that
is larger than what the file has for it: no object out of a number that says how large it is to be.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar, cast

import numpy as np

from raysgd._reading.strict_reading import NotPlainError, require

_MAX_DEPTH = 100
"""The deepest nesting of containers: everything that walks through a state does it by recursion."""

_MAX_KEY_PARTS = 1000
_MAX_KEYS_ALIKE = 64
"""The most keys of a container with the same hash: a new one is compared with each of them."""

_MAX_ARRAY_DIMS = 64
_ALIGNED = 0x80  # flag of a structured dtype

_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 BINSTRING SHORT_BINSTRING EMPTY_TUPLE TUPLE TUPLE1 "
    "TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS BINPERSID BINGET "
    "LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD"
)
_ALLOWED = {getattr(pickle, name)[0] for name in _OPCODES.split()}
_Handler = Callable[[Any], None]
_HANDLERS = cast("dict[int, _Handler]", pickle._Unpickler.dispatch)


@dataclass(frozen=True)
class AllowedFunction:
    """A function that a pickle may call."""

    call: Callable[..., Any]


class KeyChecks:
    """Checks the keys of containers, each before it is hashed."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[Any, collections.Counter[int]]] = {}

    def checked(self, key: Any, container: Any) -> Any:
        """The key, if it can be added to a container without taking for ever, or too deep a stack.

        Raises:
            DamagedFileError: It has too many parts, or the hash of too many others.
        """
        _check_parts(key)
        code = hash(key)
        if not _is_only_one(key, code):
            _, counts = self._counts.setdefault(id(container), (container, collections.Counter()))  # so the id is kept
            counts[code] += 1
            require(counts[code] <= _MAX_KEYS_ALIKE, "too many keys have the same hash")
        return key


def _is_only_one(key: Any, code: int) -> bool:
    """Return whether no other key of its kind has this hash, unless by chance: those of texts are random."""
    return type(key) in (str, bytes) or (type(key) is int and key == code)


def _check_parts(key: Any) -> None:
    waiting, num_seen = [(key, 0)], 0
    while waiting:
        part, depth = waiting.pop()
        num_seen += 1
        require(num_seen <= _MAX_KEY_PARTS and depth < _MAX_DEPTH, "a key has too many parts")
        if isinstance(part, tuple):
            require(len(part) <= _MAX_KEY_PARTS, "a key has too many parts")
            waiting.extend((inner, depth + 1) for inner in part)


class UnfinishedObject:
    """An object whose content comes later in the pickle."""

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self._finish = finish
        self._value: Any = None
        self._is_finished = False

    def finish(self, content: Any) -> Any:
        """Makes the object and returns it."""
        self._value = self._finish(content)
        self._is_finished = True
        return self._value

    @property
    def value(self) -> Any:
        """The object, once it is finished."""
        require(self._is_finished, "an object is used before it has its content")
        return self._value


def _refuse_opcode(unpickler: Any) -> None:
    raise NotPlainError("more than tensors, arrays and plain values")


class PlainUnpickler(pickle._Unpickler):  # the one in Python: the other takes the word of a file for how much it reads
    """Reads one pickle.

    Args:
        file: Where it begins.
        num_bytes: Nothing is read past so many bytes of a file on a disk.
        known: What it may name, by its full name, beside plain data and NumPy arrays: functions, and values as they
            are.
        trusted: Classes and functions that the user has allowed, by their full names. They may do anything.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        opcode: handler if opcode in _ALLOWED else _refuse_opcode for opcode, handler in _HANDLERS.items()
    }
    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        file: IO[bytes],
        num_bytes: int,
        known: Mapping[str, Any] | None = None,
        trusted: Mapping[str, Any] | None = None,
    ) -> None:
        is_in_memory = isinstance(file, io.BytesIO)  # which never gives more than it has, and is faster unwrapped
        super().__init__(file if is_in_memory else _BoundedFile(file, num_bytes), encoding="utf-8")
        self._known = {**_KNOWN, **(known or {})}
        self._trusted = trusted or {}
        self._keys = KeyChecks()

    def load(self) -> Any:
        """Return what the pickle holds.

        Raises:
            NotPlainError: It needs something else to be loaded.
            Exception: It is damaged.
        """
        value = super().load()
        check_depth(value)
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        full_name = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full_name in self._known:
            return self._known[full_name]
        if full_name in self._trusted:
            return self._trusted[full_name]
        raise NotPlainError(full_name[:200])

    def _is_trusted(self, value: Any) -> bool:
        return any(value is allowed for allowed in self._trusted.values())

    def load_reduce(self) -> None:
        """Calls a function."""
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not isinstance(function, AllowedFunction) and not self._is_trusted(function):
            raise NotPlainError(f"a call of a `{type(function).__name__}`")
        self.stack[-1] = (function.call if isinstance(function, AllowedFunction) else function)(*arguments)

    def load_newobj(self) -> None:
        """Makes an object of a class that the user has allowed."""
        arguments = self.stack.pop()
        if not self._is_trusted(self.stack[-1]):
            raise NotPlainError(f"an object of a `{type(self.stack[-1]).__name__}`")
        made = self.stack.pop()
        self.append(made.__new__(made, *arguments))

    def load_build(self) -> None:
        """Gives an object its content."""
        target = self.stack[-2]
        if self._is_trusted(type(target)):
            _HANDLERS[pickle.BUILD[0]](self)
            return
        content = self.stack.pop()
        if isinstance(target, UnfinishedObject):
            self.stack[-1] = target.finish(content)
        elif type(target) is collections.OrderedDict:
            set_attributes(target, content)
        else:
            raise NotPlainError(f"the content of a `{type(target).__name__}`")

    def load_binget(self) -> None:
        """Something that was read before."""
        _HANDLERS[pickle.BINGET[0]](self)
        self._finished()

    def load_long_binget(self) -> None:
        """Something that was read before."""
        _HANDLERS[pickle.LONG_BINGET[0]](self)
        self._finished()

    def _finished(self) -> None:
        if isinstance(self.stack[-1], UnfinishedObject):
            self.stack[-1] = self.stack[-1].value

    def load_append(self) -> None:
        """Adds to a list."""
        value = self.stack.pop()
        self._top(list).append(value)

    def load_appends(self) -> None:
        """Adds to a list."""
        values = self.pop_mark()
        self._top(list).extend(values)

    def load_setitem(self) -> None:
        """Adds to a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key], [value])

    def load_setitems(self) -> None:
        """Adds to a dict."""
        values = self.pop_mark()
        self._set_items(values[::2], values[1::2])

    def _set_items(self, keys: list[Any], values: list[Any]) -> None:
        target = self._top(dict, collections.OrderedDict, collections.Counter)
        for key, value in zip(keys, values, strict=True):
            target[self._keys.checked(key, target)] = value

    def load_additems(self) -> None:
        """Adds to a set."""
        values, target = self.pop_mark(), self._top(set)
        target.update(self._keys.checked(value, target) for value in values)

    def _top(self, *kinds: type[Any]) -> Any:
        require(type(self.stack[-1]) in kinds, f"a `{type(self.stack[-1]).__name__}` is not a `{kinds[0].__name__}`")
        return self.stack[-1]

    def load_bytearray8(self) -> None:
        """A `bytearray`, as long as there is something to fill it with."""
        num_bytes = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(num_bytes)))

    for _function in (
        load_reduce, load_newobj, load_build, load_binget, load_long_binget, load_append, load_appends, load_setitem,
        load_setitems, load_additems, load_bytearray8,
    ):  # fmt: skip
        dispatch[getattr(pickle, _function.__name__.removeprefix("load_").upper())[0]] = _function


def set_attributes(target: Any, attributes: Any) -> None:
    """Hangs values on an object, none of them in the place of what its class has."""
    require(type(attributes) is dict, "attributes in another form")
    for name, value in attributes.items():
        require(type(name) is str and not hasattr(type(target), name), "an attribute has the name of a method")
        setattr(target, name, value)


def plain_dtype(code: Any) -> np.dtype[Any]:
    """The dtype of a code such as "f8" or "<U3", if its values are only their bytes.

    Raises:
        NotPlainError: They refer to objects.
        ValueError: There is no such dtype.
    """
    finding = f"no code of plain numbers: {str(code)[:50]}"
    require(isinstance(code, str) and code.strip("<>=|")[:1] in tuple("?biufcSUVmM"), finding)
    bare = code.lstrip("<>=|")
    require(bare == "?" or (bare[1:].isascii() and bare[1:].isdigit() and len(bare) <= 10), finding)
    return np.dtype(code)


def array_of(dtype: Any, shape: Any, content: Any, order: Any = "C") -> np.ndarray[Any, Any]:
    """An array of its bytes, in the native order, if they are exactly as many as it needs.

    Raises:
        ValueError: They are not.
    """
    require(isinstance(dtype, np.dtype) and not dtype.hasobject, "an array of something else than numbers")
    require(type(content) in (bytes, bytearray, memoryview), "an array without its bytes")
    require(type(shape) is tuple and len(shape) <= _MAX_ARRAY_DIMS, "an array without a shape")
    require(all(type(size) is int and 0 <= size < 2**62 for size in shape), "an array without a shape")
    num_values = math.prod(shape)
    require(num_values * dtype.itemsize == len(content), "an array of another size than its bytes")
    require(dtype.itemsize > 0 or not num_values, "an array without bytes")
    require(order in ("C", "F"), "an array without an order")
    if not num_values:
        return np.empty(shape, dtype.newbyteorder("="))
    return np.frombuffer(content, dtype).reshape(shape, order=order).astype(dtype.newbyteorder("="))


def _new_dtype(code: Any, *_: Any) -> UnfinishedObject:
    if isinstance(code, str) and code.startswith("O"):
        raise NotPlainError("arrays of objects")
    return UnfinishedObject(lambda state: _dtype(code, state))


def _dtype(code: Any, state: Any) -> np.dtype[Any]:
    """A dtype out of what `dtype.__reduce__` says of it."""
    _, order, subdtype, names, fields, itemsize, _, flags, *more = state
    require(subdtype is None and order in ("<", ">", "=", "|"), "no plain dtype")
    if names is not None:
        require(all(type(name) is str for name in names), "a field without a name")
        offsets = [fields[name][1] for name in names]
        formats = [fields[name][0] for name in names]
        require(all(isinstance(one, np.dtype) and not one.hasobject for one in formats), "a field of something else")
        layout: Any = {"names": list(names), "formats": formats, "offsets": offsets, "itemsize": itemsize}
        return np.dtype(layout, align=bool(flags & _ALIGNED))
    if more and isinstance(code, str) and code[:1] in ("m", "M"):
        unit, count = more[0][1][:2]
        require(type(count) is int and 0 < count < 2**31, "no unit of time")
        return np.dtype(f"{order}{code}[{count}{unit.decode('ascii')}]")
    return plain_dtype(f"{order}{code}")


def _new_array(kind: Any, *_: Any) -> UnfinishedObject:
    require(kind is np.ndarray, "an array of another kind")
    return UnfinishedObject(_array)


def _array(state: Any) -> np.ndarray[Any, Any]:
    *_, shape, dtype, is_fortran, content = state
    return array_of(dtype, shape, content, "F" if is_fortran else "C")


def _scalar(dtype: Any, content: Any) -> Any:
    return array_of(dtype, (), content)[()]


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    return array_of(dtype, shape, content, order)


def _encoded(text: Any, encoding: Any) -> bytes:
    """Return how protocol 2 writes bytes."""
    require(type(text) is str and encoding == "latin1", "bytes in another form")
    return bytes(text, "latin1")


def _bytes(content: Any = b"") -> bytes:
    require(type(content) is bytes, "bytes in another form")
    return bytes(content)


def _bytearray(content: Any = b"", encoding: Any = "latin-1") -> bytearray:
    require(type(content) in (bytes, str) and encoding == "latin-1", "bytes in another form")
    return bytearray(content, "latin-1") if isinstance(content, str) else bytearray(content)


def _set(items: Any = ()) -> set[Any]:
    require(type(items) in (list, tuple), "a set in another form")
    return set(_checked_keys(items))


def _counter(counts: Any = ()) -> collections.Counter[Any]:
    require(type(counts) is dict or counts == (), "counts in another form")
    return collections.Counter(dict(counts))


def _ordered_dict(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    keys, values = [key for key, _ in items], [value for _, value in items]
    return collections.OrderedDict(zip(_checked_keys(keys), values, strict=True))


def _checked_keys(keys: Sequence[Any]) -> list[Any]:
    checks = KeyChecks()
    return [checks.checked(key, keys) for key in keys]


def _complex(real: Any, imaginary: Any) -> complex:
    require(type(real) is float and type(imaginary) is float, "a number in another form")
    return complex(real, imaginary)


_KNOWN: dict[str, Any] = {
    "builtins.bytes": AllowedFunction(_bytes),
    "builtins.bytearray": AllowedFunction(_bytearray),
    "builtins.set": AllowedFunction(_set),
    "builtins.complex": AllowedFunction(_complex),
    "_codecs.encode": AllowedFunction(_encoded),
    "collections.Counter": AllowedFunction(_counter),
    "collections.OrderedDict": AllowedFunction(_ordered_dict),
    "numpy.dtype": AllowedFunction(_new_dtype),
    "numpy.ndarray": np.ndarray,
    **{
        f"numpy.{core}.{name}": AllowedFunction(function)
        for core in ("core", "_core")  # as NumPy 1 and NumPy 2 call it
        for name, function in (
            ("multiarray._reconstruct", _new_array),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _frombuffer),
        )
    },
}


def check_depth(value: Any, what: str = "it") -> None:
    """Refuses what is nested too deeply, and what holds something that belongs into a pickle only.

    Args:
        value: A structure of containers.
        what: What the message calls it.

    Raises:
        DamagedFileError: It does. A `ValueError`.
    """
    waiting, seen = [(value, 0)], set()
    while waiting:
        item, depth = waiting.pop()
        require(not isinstance(item, AllowedFunction | UnfinishedObject), "something is where a value should be")
        if not isinstance(item, dict | list | tuple) or id(item) in seen:
            continue
        require(depth < _MAX_DEPTH, f"{what} is nested more than {_MAX_DEPTH} levels deep")
        seen.add(id(item))
        inner = [*item.values(), *getattr(item, "__dict__", {}).values()] if isinstance(item, dict) else item
        waiting.extend((part, depth + 1) for part in inner)


class _BoundedFile:
    """A file of which only so much is read, however much the caller requests."""

    def __init__(self, file: IO[bytes], num_bytes: int) -> None:
        self._file, self._num_left = file, num_bytes

    def read(self, num_bytes: int = -1) -> bytes:
        content = self._file.read(min(num_bytes, self._num_left) if num_bytes >= 0 else self._num_left)
        self._num_left -= len(content)
        return content

    def readline(self) -> bytes:
        content = self._file.readline(min(self._num_left, io.DEFAULT_BUFFER_SIZE))
        self._num_left -= len(content)
        return content
