"""Reads and writes checkpoint files. A file is written atomically, and verified when it is read.

The file is an ordinary `torch.save` archive of plain values, so `torch.load(path)` can read it even on a machine
without raysgd. Plain values are tensors, numbers, strings, bytes, and containers of them. PyTorch's reader runs no code
while it loads these, but does not support NumPy arrays. Allowing NumPy's functions would be a security hole: a file
could contain an array of objects with arbitrary pointers. Therefore, an array is written as a marked tensor: a dict
with the single key `raysgd_numpy` and the tensor as its value. Everything else is written as `torch.save` writes it.
raysgd adds two things:

- The key `raysgd_format` of the state contains the version of the file format.
- The comment at the end of the archive contains a checksum, because torch itself loads a file with flipped bits without
  an error. Torch and zip tools skip this comment. The comment is `raysgd:1:xxh128:` and 32 hexadecimal digits. The code
  calls this comment the seal. The digits are the XXH128 hash of all bytes before the comment. The two bytes right
  before the comment contain its length and are hashed as zeros.

docs/checkpoints.md explains how other tools can verify the checksum. docs/adr/0061-xxh128-for-checkpoint-files.md
explains why this checksum was chosen.

Content is first written to a temporary file next to the target. The temporary file is renamed to the target only once
it is complete on disk. If the process is killed before that, the earlier checkpoint stays intact, and a file
`.raysgd-*.tmp` remains. A later write into the folder deletes the leftover file.

The checksum is verified before torch reads the file. This takes about 10 ms for 200 MiB. There are two functions to
read a file. `read` copies the tensors into new memory. `mapped` maps the tensors from the file, and the caller copies
them directly to their destination. For a large state, `mapped` is faster, because `read` spends most of its time on
allocating memory. No program may write to the file while it is mapped. raysgd itself never writes to an existing file
but replaces the file. If another program writes to the file, this is detected afterwards. If another program truncates
the file, this process may crash.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import io
import mmap
import os
import pickle
import re
import threading
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from raysgd.core.state.strict_reading import (
    FORMER_FUNCTIONS,
    DamagedFileError,
    FormerValue,
    NotPlainError,
    check_depth,
    check_format,
    check_stored,
    checked_state,
    corrupted,
    in_short,
    refusals_of,
    require,
)
from raysgd.exceptions import CheckpointCorruptedError as CheckpointCorruptedError
from raysgd.exceptions import UnsafeCheckpointError as UnsafeCheckpointError
from raysgd.trainer.worker.replica_state import RESUME

if TYPE_CHECKING:
    import xxhash

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


FORMAT_VERSION = 1
"""Version of the file format that this version of raysgd writes, and the newest version that it reads."""

FORMAT_KEY = "raysgd_format"
"""Key for the version of the file format. This key is the last one in a file's state."""

REQUIRED_KEYS = ("epoch", "operator", "models", "optimizers")
"""Keys that a training state must have."""

# Keys in `RESUME`, the state's entry about progress within an epoch. Only snapshots contain these keys; files do not.
TRAINED = "trained"  # frozen parameters and optimizers' parameter groups, if they have changed since `setup`
GRADIENTS = "gradients"  # accumulated gradients that no optimizer step has used yet

_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
_PREFIX = "raysgd:1:xxh128:"
_COMMENT = re.compile(rf"{_PREFIX}([0-9a-f]+)\Z".encode())
_MAX_SEAL_BYTES = 128
_LENGTH_BYTES = 2
_PIECE_BYTES = 2**18
_OLD_TORCH_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of files that `torch.save` wrote before it used zip archives: a pickled magic number."""

_IF_TRUSTED = (
    "If you trust the source of the file, pass `weights_only=False`, as in `load(path, weights_only=False)`; never do "
    "so for other files."
)
_UNKNOWN_GLOBAL = re.compile(
    r"(?:GLOBAL |``(?=torch\.distributed))([^\s`]+)"
)  # finds what PyTorch's error message rejects


def as_in_file(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a snapshot in the form that files contain, without the keys that only snapshots have.

    A file that was read is brought into this form, too: these keys would be loaded without a check.
    """
    resume = state.get(RESUME)
    if not isinstance(resume, Mapping):
        return dict(state)
    return {**state, RESUME: {name: value for name, value in resume.items() if name not in (TRAINED, GRADIENTS)}}


def write(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a training state to a checkpoint file, atomically: readers see a complete file, old or new.

    Args:
        path: Path or URI of the file. A missing folder is created, and a symbolic link is followed.
        state: State with at least the keys in `REQUIRED_KEYS`. The caller must convert it with `packed` first.

    Raises:
        ValueError: `state` lacks keys that `read` requires.
        OSError: The file could not be written, for example for lack of space. `path` is unchanged.
    """
    from raysgd.storage import files  # imported lazily, because only the driver writes files

    checked_state(state, "state", REQUIRED_KEYS)
    content = {key: value for key, value in state.items() if key != FORMAT_KEY}
    content[FORMAT_KEY] = FORMAT_VERSION
    with files.saving(path) as file:
        stream = _ChecksummedStream(file)
        stream.save(content)
        file.seek(-_ZIP_END_BYTES, os.SEEK_END)
        assert _is_zip_end(file.read()), "torch.save did not end its archive as zip archives without a comment do"
        seal = seal_of(stream.checksum.hexdigest())
        file.seek(-_LENGTH_BYTES, os.SEEK_END)
        file.write(len(seal).to_bytes(_LENGTH_BYTES, "little") + seal)


def read(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint file, check that it is undamaged, and return its state with tensors on the CPU.

    This function also reads files of the old library (`ray.util.sgd`) and files that `torch.save` wrote directly. Such
    files have no checksum.

    Args:
        path: Path of the checkpoint file.
        weights_only: True to reject everything except tensors, NumPy arrays, plain values and containers of them. With
            False, a file can run arbitrary code: use it only for files from a source that you trust.

    Raises:
        FileNotFoundError: The file does not exist.
        CheckpointCorruptedError: The file is damaged or not a checkpoint. This error is both a `ValueError` and a
            `RuntimeError`.
        UnsafeCheckpointError: The file needs `weights_only=False`. This error is a `ValueError`.
        ValueError: The content is not a training state, or a newer version of raysgd wrote it.
    """
    with mapped(path, weights_only=weights_only, maps=False) as state:
        return state


@contextlib.contextmanager
def mapped(
    path: str | os.PathLike[str], *, weights_only: bool = True, name: str | None = None, maps: bool = True
) -> Iterator[dict[str, Any]]:
    """Read a checkpoint file like `read`, but map the tensors from the file instead of copying them into memory.

    Copy what you need inside the `with` block, and do not use the tensors after the block. Writing to a tensor does not
    change the file. The tensors are copied into memory if the file has no checksum, or if its file system does not
    support memory mapping.

    Args:
        path: Path of the checkpoint file.
        weights_only: True to reject everything except tensors, NumPy arrays, plain values and containers of them.
        name: Name that errors show instead of `path`, for example if `path` is a downloaded copy.
        maps: False to copy the tensors into memory instead of mapping them.

    Yields:
        The state.

    Raises:
        FileNotFoundError: The file does not exist.
        CheckpointCorruptedError: The file is damaged or not a checkpoint. Also raised at the end of the `with` block if
            another process wrote to the file during the block.
        UnsafeCheckpointError: The file needs `weights_only=False`.
        ValueError: The content is not a training state, or a newer version of raysgd wrote it.
    """
    path = os.fspath(path)
    name = name or path
    with open(path, "rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        seal, is_archive = _seal_of(file, before.st_size, name)
        if seal is not None:
            checksum = checksum_of(file, before.st_size - len(seal) - _LENGTH_BYTES)
            checksum.update(bytes(_LENGTH_BYTES))
            if seal_of(checksum.hexdigest()) != seal:
                raise corrupted(name, "its checksum does not match its content")
        maps = maps and seal is not None and _can_be_mapped(file)
        place = _by_descriptor(file, path)
        if weights_only:
            with refusals_of(name, _IF_TRUSTED):
                if is_archive:
                    _check_archive(place, before.st_size)
                loaded = _load_strictly(place, maps, is_former=seal is None)
                loaded = unpacked(loaded, before.st_size)
        else:
            loaded = _load_trusted(place, maps, name, is_sealed=seal is not None)
            with refusals_of(name):
                loaded = unpacked(loaded, before.st_size)
        version = loaded.pop(FORMAT_KEY, FORMAT_VERSION) if isinstance(loaded, dict) else FORMAT_VERSION
        check_format(name, version, FORMAT_VERSION)
        yield as_in_file(checked_state(loaded, name, REQUIRED_KEYS))
        if _identity(os.fstat(file.fileno())) != _identity(before):
            raise corrupted(name, "it was written to while it was read")


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _by_descriptor(file: IO[bytes], path: str) -> str:
    """Return a path that refers to the open file, even if another file replaces `path`. On Windows, return `path`."""
    by_descriptor = f"/dev/fd/{file.fileno()}"
    return by_descriptor if os.path.exists(by_descriptor) else path


def _load_trusted(source: str, maps: bool, name: str, is_sealed: bool) -> Any:
    """Load a file with PyTorch's unrestricted reader, which unpickles any object.

    Args:
        source: Path of the file.
        maps: True to map tensors from the file.
        name: Name of the file for errors.
        is_sealed: True if the checksum has proved that the file is intact.

    Raises:
        CheckpointCorruptedError: The file seems to be damaged.
        Exception: Loading failed for another reason, for example because a class cannot be imported.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=False, mmap=maps)
    except Exception as error:  # damaged files and classes of user code may raise any exception
        if is_sealed or isinstance(error, OSError | AttributeError | ImportError | MemoryError):
            raise
        raise corrupted(name, f"torch cannot read it ({in_short(error)})") from error


def _load_strictly(source: str | IO[bytes], maps: bool = False, is_former: bool = False) -> Any:
    """Load a file with PyTorch's `weights_only` reader.

    Args:
        source: Path of the file, or the open file.
        maps: True to map tensors from the file.
        is_former: True to load NumPy values from files of `ray.util.sgd`. Such files name NumPy functions that would be
            unsafe to call. Safe functions of raysgd are called instead.

    Raises:
        NotPlainError: The file needs a class or function that the reader does not allow.
        Exception: The file is damaged.
    """
    former: list[Any] = [(function, name) for name, function in FORMER_FUNCTIONS.items()]
    try:
        with only_plain([*former, FormerValue] if is_former else []):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=maps)
    except pickle.UnpicklingError as error:
        found = _UNKNOWN_GLOBAL.search(str(error))
        if found is None:  # no class was rejected, so the file is damaged
            finding = str(error).rpartition("WeightsUnpickler error:")[2].strip()
            raise DamagedFileError(finding.partition("\n")[0]) from error
        raise NotPlainError(found[1][:200]) from error


def _check_archive(source: str | IO[bytes], num_bytes: int) -> None:
    with zipfile.ZipFile(source) as archive:
        check_stored(archive, num_bytes)


def _can_be_mapped(file: IO[bytes]) -> bool:
    """Return True if an open file is on a file system that can map files into memory."""
    try:
        mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ).close()
    except OSError:
        return False
    return True


def load_plain(source: str | IO[bytes], num_bytes: int, maps: bool = False) -> Any:
    """Load what `torch.save` wrote, without a checksum. It may come from a stranger.

    Args:
        source: Path of the file, or its content.
        num_bytes: Size of the file.
        maps: True to map tensors from the file.

    Raises:
        NotPlainError: The file needs a class or function that could run code.
        Exception: The file is damaged, or expands to much more than its size.
    """
    _check_archive(source, num_bytes)
    if not isinstance(source, str):
        source.seek(0)
    return unpacked(_load_strictly(source, maps), num_bytes)


def read_tensors(path: str | os.PathLike[str]) -> dict[Any, torch.Tensor]:
    """Read a file in which `torch.save` stored a dict of tensors. Map the tensors into memory if possible.

    Raises:
        Exception: The file contains anything except tensors, or is damaged.
    """
    with open(path, "rb") as file:
        found = load_plain(os.fspath(path), os.fstat(file.fileno()).st_size, _can_be_mapped(file))
    if type(found) is not dict or not all(type(each) is torch.Tensor for each in found.values()):
        raise ValueError("it has values that are not tensors")
    return found


def seal_of(hexdigest: str) -> bytes:
    """Return the archive comment that contains a checksum (the seal)."""
    return f"{_PREFIX}{hexdigest}".encode()


def seal_at_end_of(tail: bytes) -> bytes | None:
    """Return the archive comment with the checksum (the seal) at the end of a file; None if the file has none.

    Args:
        tail: Last bytes of the file.
    """
    found = _COMMENT.search(tail)
    if found is None:
        return None
    length = int.from_bytes(tail[: found.start()][-_LENGTH_BYTES:], "little")
    return found[0] if length == len(found[0]) else None


def checksum_of(file: IO[bytes], num_bytes: int) -> xxhash.xxh3_128:
    """Hash the first `num_bytes` bytes of a file, or the whole file if it is shorter.

    Args:
        file: File that was opened without a buffer.
        num_bytes: Number of bytes to hash.

    Returns:
        The hash object, which the caller can update with more bytes.
    """
    import xxhash

    checksum = xxhash.xxh3_128()
    try:
        with mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ) as content:
            checksum.update(content)
    except (OSError, ValueError):  # the file cannot be mapped, or has too few bytes
        file.seek(0)
        room = memoryview(bytearray(_PIECE_BYTES))
        while num_read := file.readinto(room[:num_bytes]):  # type: ignore[attr-defined]
            checksum.update(room[:num_read])
            num_bytes -= num_read
    return checksum


class _ChecksummedStream:
    """File-like object for `torch.save` that writes to a file and computes the checksum of the written bytes.

    While `torch.save` writes to a file-like object, other threads can run. While it writes to a path, they cannot.
    """

    def __init__(self, file: IO[bytes]) -> None:
        import xxhash

        self._file = file
        self.checksum = xxhash.xxh3_128()
        self._failure: Exception | None = None

    def save(self, content: dict[str, Any]) -> None:
        """Write `content` with `torch.save`. If writing to the file fails, raise the original error.

        `torch.save` itself would raise a `RuntimeError` about an unexpected position instead of the original error.

        Raises:
            OSError: A write failed.
            KeyboardInterrupt: Ctrl-C was pressed. Exceptions raised by other signal handlers pass through as well.
        """
        try:
            torch.save(content, self)  # type: ignore[arg-type]
        except RuntimeError as error:
            cause = self._failure or error.__context__
            if cause is None or (isinstance(cause, Exception) and cause is not self._failure):
                raise
            raise cause from None

    def write(self, content: memoryview | bytes) -> int:
        """Write bytes to the file and add them to the checksum. `torch.save` calls this method."""
        try:
            num_written = self._file.write(content)
        except (OSError, ValueError) as error:
            self._failure = error
            raise
        self.checksum.update(content)
        return num_written

    def flush(self) -> None:
        """Pass buffered bytes to the operating system. `torch.save` calls this method."""
        self._file.flush()


def _is_zip_end(tail: bytes) -> bool:
    """Return True if `tail`, a file's last bytes, is the end of a zip archive without a comment."""
    return tail.startswith(_ZIP_END) and tail.endswith(bytes(_LENGTH_BYTES))


def _seal_of(file: IO[bytes], size: int, name: str) -> tuple[bytes | None, bool]:
    """Inspect the first and last bytes of a file. Raise if they are not those of a checkpoint file.

    Args:
        file: The open file.
        size: Size of the file in bytes.
        name: Name of the file for errors.

    Returns:
        A pair: the archive comment with the checksum (the seal), and whether the file is a zip archive. The seal is
        None for a file that `torch.save` wrote directly. Such a file is not a zip archive if it comes from a version of
        torch before 1.6.

    Raises:
        CheckpointCorruptedError: The first or last bytes are not those of a checkpoint file.
    """
    start = file.read(len(_OLD_TORCH_START))
    file.seek(max(0, size - _MAX_SEAL_BYTES))
    tail = file.read()
    found = seal_at_end_of(tail)
    if found is not None or start == _OLD_TORCH_START:
        return found, found is not None
    if not start.startswith(_ZIP_START):
        raise corrupted(name, "it does not begin like a checkpoint" if start else "it is empty")
    if _is_zip_end(tail[-_ZIP_END_BYTES:]):
        return None, True
    raise corrupted(name, "its end is missing or altered, or a newer version of raysgd wrote it")
