"""Reads and writes checkpoint files. A file is written atomically, and verified when it is read.

The file is an ordinary `torch.save` archive of plain values, so `torch.load(path)` can read it even on a machine
without raysgd. `plain_state` defines which values are plain. raysgd adds two things:

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

import contextlib
import mmap
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import torch

from raysgd.core.state.strict_reading import (
    FORMER_FUNCTIONS,
    DamagedFileError,
    FormerValue,
    NotPlainError,
    check_format,
    check_stored,
    checked_state,
    corrupted,
    in_short,
    refusals_of,
)
from raysgd.exceptions import CheckpointCorruptedError as CheckpointCorruptedError
from raysgd.exceptions import UnsafeCheckpointError as UnsafeCheckpointError
from raysgd.torch.checkpoints.plain_state import only_plain, unpacked
from raysgd.torch.checkpoints.plain_state import packed as packed
from raysgd.trainer.worker.replica_state import RESUME

if TYPE_CHECKING:
    import xxhash

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
    with mapped(path, weights_only=weights_only, maps=False) as (state, _):
        return state


@dataclass(frozen=True)
class StateInFile:
    """Reference to a verified checkpoint file. The driver sends it, instead of the state, to ranks on its own node.

    Each rank maps the file itself, and checks that it is the file whose checksum the driver has verified.

    Attributes:
        path: Absolute path of the file.
        identity: Device, inode, size and modification time of the verified file.
    """

    path: str
    identity: tuple[int, int, int, int]


@contextlib.contextmanager
def mapped(
    path: str | os.PathLike[str], *, weights_only: bool = True, name: str | None = None, maps: bool = True
) -> Iterator[tuple[dict[str, Any], StateInFile | None]]:
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
        The state, and a reference to the file for ranks on this node. The reference is None if the tensors are not
        mapped from the file, or if the file may contain arbitrary objects.

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
        can_be_mapped_again = maps and weights_only
        reference = StateInFile(os.path.abspath(path), _identity(before)) if can_be_mapped_again else None
        yield as_in_file(checked_state(loaded, name, REQUIRED_KEYS)), reference
        if _identity(os.fstat(file.fileno())) != _identity(before):
            raise corrupted(name, "it was written to while it was read")


@contextlib.contextmanager
def mapped_again(reference: StateInFile) -> Iterator[tuple[dict[str, Any] | None, Callable[[], bool]]]:
    """Map a file whose checksum the driver on this node has verified.

    Yields:
        A pair: the state, or None if this process does not see the same file; and a function that returns True if no
        process has written to the file after the driver verified it. Call the function when you are done with the
        state.
    """
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(open(reference.path, "rb", buffering=0))
        except OSError:
            yield None, lambda: False
            return
        if not _is_as_verified(file, reference):
            yield None, lambda: False
            return
        loaded = unpacked(_load_strictly(_by_descriptor(file, reference.path), maps=True), reference.identity[2])
        del loaded[FORMAT_KEY]
        yield as_in_file(loaded), lambda: _is_as_verified(file, reference)


def _is_as_verified(file: IO[bytes], reference: StateInFile) -> bool:
    return _identity(os.fstat(file.fileno())) == reference.identity


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
