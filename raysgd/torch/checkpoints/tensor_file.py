"""Reads files of `torch.save` that may come from anyone.

PyTorch's own reader believes what a file says: how large a tensor's memory is, where in it the tensor lies, how many
bytes an array needs. This one compares that with what the file has, before it makes anything of it. It reads what that
of PyTorch does with `weights_only=True`, except kinds of tensors that no training's state has, and NumPy arrays too.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from raysgd._reading.plain_pickle import AllowedFunction, PlainUnpickler, set_attributes
from raysgd._reading.stored_archive import ArchiveMember, members
from raysgd._reading.strict_reading import NotPlainError, fill, require

_ALIGNMENT = 16
"""The alignment of the memory of a tensor. What lies elsewhere is copied."""

_MAX_EXPANSION = 16
"""The most by which all its tensors together may exceed the file: several may lie in the same memory."""

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_torch: Any = torch  # whose annotations lack some ways to call its functions
_MAX_DIMS = 64
_MAX_SIZE = 2**62
_BIG_ENDIAN = b"big"


def read_archive(archive: memoryview) -> Any:
    """Return what a zip archive of `torch.save` holds; tensors lie in it, on the CPU.

    Args:
        archive: The archive, in memory that can be written to.

    Raises:
        NotPlainError: It holds more than plain data.
        Exception: It is damaged.
    """
    storages = _ArchivedStorages(archive, _without_folder(members(archive)))
    pickled = storages.member("data.pkl")
    return _unpickler(io.BytesIO(pickled.of(archive)), pickled.num_bytes, storages, len(archive)).load()


def read_old(file: IO[bytes], num_bytes: int) -> Any:
    """Return what a file holds that `torch.save` wrote before it wrote archives.

    Raises:
        NotPlainError, Exception: As in `read_archive`.
    """
    file.seek(0)
    storages = _OldStorages(num_bytes)

    def load() -> Any:
        return _unpickler(file, num_bytes - file.tell(), storages, num_bytes).load()

    magic_number, _, _ = load(), load(), load()  # a version that never changed, and facts on the machine
    require(magic_number == _MAGIC_NUMBER, "it does not begin as such a file does")
    state = load()
    storages.fill(file, load())
    return state


def _without_folder(found: Mapping[str, ArchiveMember]) -> dict[str, ArchiveMember]:
    """The members by their names inside the one folder that an archive has."""
    parted = [name.partition("/") for name in found]
    require(len({folder for folder, _, _ in parted}) == 1, "it has several folders")
    return {rest: found[folder + slash + rest] for folder, slash, rest in parted}


@dataclass(frozen=True)
class _TensorStorage:
    """The memory of tensors."""

    memory: torch.UntypedStorage
    dtype: torch.dtype


class _ArchivedStorages:
    """Those that are members of an archive."""

    def __init__(self, archive: memoryview, found: Mapping[str, ArchiveMember]) -> None:
        self._archive = archive
        self._members = found
        order = found["byteorder"].of(archive) if "byteorder" in found else b"little"
        self._is_swapped = (order == _BIG_ENDIAN) != (sys.byteorder == "big")
        self._found: dict[str, _TensorStorage] = {}

    def member(self, name: str) -> ArchiveMember:
        """Return where a member lies."""
        require(name in self._members, f"it has no `{name[:50]}`")
        return self._members[name]

    def load(self, identity: Any) -> _TensorStorage:
        """The memory that a pickle means."""
        dtype, key, num_values = _checked_identity(identity)
        if key not in self._found:
            member = self.member(f"data/{key}")
            require(num_values * dtype.itemsize == member.num_bytes, "a tensor's memory has another size than it says")
            self._found[key] = _TensorStorage(self._memory(member, dtype), dtype)
        require(self._found[key].dtype == dtype, "a tensor's memory is of two kinds")
        return self._found[key]

    def _memory(self, member: ArchiveMember, dtype: torch.dtype) -> torch.UntypedStorage:
        if not member.num_bytes:
            return torch.UntypedStorage(0)
        content = torch.frombuffer(self._archive, dtype=torch.uint8, count=member.num_bytes, offset=member.start)
        memory = (content.clone() if content.data_ptr() % _ALIGNMENT else content).untyped_storage()
        if self._is_swapped:
            memory.byteswap(dtype)
        return memory


class _OldStorages:
    """Those that follow behind the pickle."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes_left = num_bytes
        self._found: dict[str, _TensorStorage] = {}

    def load(self, identity: Any) -> _TensorStorage:
        """The memory that a pickle means. It is filled later."""
        *identity, view = identity
        dtype, key, num_values = _checked_identity(identity)
        if key not in self._found:
            self._num_bytes_left -= num_values * dtype.itemsize
            require(self._num_bytes_left >= 0, "its tensors are larger than the file")
            self._found[key] = _TensorStorage(torch.UntypedStorage(num_values * dtype.itemsize), dtype)
        require(self._found[key].dtype == dtype, "a tensor's memory is of two kinds")
        return self._found[key] if view is None else _part(self._found[key], *view[1:])

    def fill(self, file: IO[bytes], keys: Any) -> None:
        """Reads what is in them."""
        require(type(keys) is list and sorted(keys) == sorted(self._found), "it has other tensors than it says")
        for key in keys:
            memory, dtype = self._found[key].memory, self._found[key].dtype
            num_values = int.from_bytes(file.read(8), "little")
            require(num_values * dtype.itemsize == memory.nbytes(), "a tensor's memory has another size than it says")
            if num_values:
                values: Any = torch.empty(0, dtype=torch.uint8).set_(memory).numpy()
                fill(memoryview(values), file)


def _checked_identity(identity: Any) -> tuple[torch.dtype, str, int]:
    """Kind, name and number of values of a memory, as a pickle has them."""
    require(type(identity) in (tuple, list) and len(identity) == 5, "a tensor without its memory")
    mark, kind, key, _, num_values = identity
    require(mark == "storage" and isinstance(kind, torch.dtype), "a tensor without its memory")
    require(type(key) is str and type(num_values) is int and 0 <= num_values < _MAX_SIZE, "a tensor without its memory")
    return kind, key, num_values


def _part(storage: _TensorStorage, start: Any, num_values: Any) -> _TensorStorage:
    size = storage.dtype.itemsize
    require(type(start) is int and type(num_values) is int and start >= 0 and num_values >= 0, "no part of a memory")
    require((start + num_values) * size <= storage.memory.nbytes(), "a part of a memory lies outside of it")
    memory = storage.memory[start * size : (start + num_values) * size]
    assert isinstance(memory, torch.UntypedStorage)
    return _TensorStorage(memory, storage.dtype)


class _Tensors:
    """Makes tensors of what a pickle says of them."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes_left = num_bytes * _MAX_EXPANSION
        self._seen: set[Any] = set()

    @property
    def functions(self) -> dict[str, AllowedFunction]:
        """The functions that a pickle may call for that, by their names in PyTorch."""
        return {
            "torch._utils._rebuild_tensor": AllowedFunction(self._tensor),
            "torch._utils._rebuild_tensor_v2": AllowedFunction(self._tensor),
            "torch._utils._rebuild_tensor_v3": AllowedFunction(self._tensor_of_bytes),
            "torch._utils._rebuild_sparse_tensor": AllowedFunction(_sparse),
            "torch._utils._rebuild_meta_tensor_no_storage": AllowedFunction(_meta),
            "torch._utils._rebuild_parameter": AllowedFunction(_parameter),
            "torch._utils._rebuild_parameter_with_state": AllowedFunction(_parameter_with_attributes),
            "torch._tensor._rebuild_from_type_v2": AllowedFunction(_with_attributes),
        }

    def _tensor(
        self,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        requires_grad: Any = False,
        hooks: Any = None,
        metadata: Any = None,
    ) -> torch.Tensor:
        """A tensor in its memory, if it lies in there with all its values."""
        require(isinstance(storage, _TensorStorage), "a tensor without its memory")
        _check_numbers(offset, *_checked_shape(size, stride))
        memory, dtype = storage.memory, storage.dtype
        num_values = math.prod(size)
        reach = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if num_values else 0
        num_there = memory.nbytes() // dtype.itemsize
        require(reach <= num_there, "a tensor lies outside of its memory")
        require(num_values <= num_there, "a tensor is larger than its memory")
        self._count((memory.data_ptr(), offset, tuple(size), tuple(stride), dtype), num_values * dtype.itemsize)
        tensor = torch.empty(0, dtype=dtype).set_(memory, offset, tuple(size), tuple(stride))
        if metadata:
            require(type(metadata) is dict and metadata.keys() <= {"conj", "neg"}, "a tensor with more than its values")
            torch._utils.set_tensor_metadata(tensor, metadata)
        return tensor.requires_grad_(requires_grad is True)

    def _tensor_of_bytes(
        self, storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, *more: Any
    ) -> torch.Tensor:
        """A tensor whose memory does not say of which kind it is."""
        require(isinstance(storage, _TensorStorage) and isinstance(dtype, torch.dtype), "a tensor of no kind")
        return self._tensor(_TensorStorage(storage.memory, dtype), offset, size, stride, requires_grad, hooks, *more)

    def _count(self, place: Any, num_bytes: int) -> None:
        if place not in self._seen:
            self._seen.add(place)
            self._num_bytes_left -= num_bytes
            require(self._num_bytes_left >= 0, "its tensors are many times as large as the file")


def _sparse(layout: Any, parts: Any) -> torch.Tensor:
    tensors: list[Any] = [part for part in parts if isinstance(part, torch.Tensor)]
    size, *more = parts[len(tensors) :]
    _check_numbers(*size)
    if layout is not torch.sparse_coo:
        compressed: torch.Tensor = _torch.sparse_compressed_tensor(*tensors, size, layout=layout, check_invariants=True)
        return compressed
    tensor: torch.Tensor = _torch.sparse_coo_tensor(*tensors, size, check_invariants=True)
    return tensor.coalesce() if more and more[0] else tensor


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
    _check_numbers(*_checked_shape(size, stride))
    return torch.empty_strided(size, stride, dtype=dtype, device="meta").requires_grad_(requires_grad is True)


def _parameter(values: Any, requires_grad: Any, hooks: Any = None) -> torch.nn.Parameter:
    require(type(values) is torch.Tensor, "a parameter without values")
    return torch.nn.Parameter(values, requires_grad is True)


def _parameter_with_attributes(values: Any, requires_grad: Any, hooks: Any, attributes: Any) -> torch.nn.Parameter:
    return _hung(_parameter(values, requires_grad), attributes)


def _with_attributes(function: Any, kind: Any, arguments: Any, attributes: Any) -> torch.Tensor:
    if kind is not torch.Tensor or not isinstance(function, AllowedFunction):
        raise NotPlainError("a tensor of a subclass")
    return _hung(function.call(*arguments), attributes)


def _hung(tensor: Any, attributes: Any) -> Any:
    """The tensor, with the attributes that a user had hung on it."""
    own, slots = attributes if isinstance(attributes, tuple) else (attributes, None)
    require(not slots, "a tensor with more than its values")
    set_attributes(tensor, own or {})
    return tensor


def _checked_shape(size: Any, stride: Any) -> list[Any]:
    require(isinstance(size, tuple | list) and isinstance(stride, tuple | list), "a tensor without a shape")
    require(len(size) == len(stride) <= _MAX_DIMS, "a tensor without a shape")
    return [*size, *stride]


def _check_numbers(*numbers: Any) -> None:
    require(all(type(n) is int and 0 <= n < _MAX_SIZE for n in numbers), "a tensor without a shape")


def _unpickler(file: IO[bytes], num_bytes: int, storages: Any, num_bytes_of_file: int) -> PlainUnpickler:
    known = {**_VALUES, **_Tensors(num_bytes_of_file).functions}
    unpickler = PlainUnpickler(file, num_bytes, known, _allowed_by_user())
    unpickler.persistent_load = storages.load  # type: ignore[method-assign]
    return unpickler


def _allowed_by_user() -> dict[str, Any]:
    """Return what was passed to `torch.serialization.add_safe_globals`."""
    return {
        entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}": (
            entry[0] if isinstance(entry, tuple) else entry
        )
        for entry in torch.serialization.get_safe_globals()
    }


def _layout(name: Any) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    require(isinstance(found, torch.layout), "a tensor of no layout")
    assert isinstance(found, torch.layout)
    return found


def _dtypes() -> dict[str, torch.dtype]:
    return {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


_VALUES: dict[str, Any] = {
    **_dtypes(),
    # What memory is called, which has a class for each of the older dtypes.
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.Size": AllowedFunction(torch.Size),
    "torch.device": AllowedFunction(torch.device),
    "torch.serialization._get_layout": AllowedFunction(_layout),
}
