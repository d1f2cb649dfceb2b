"""The checkpoint file: written whole or not at all, and read only if it is what was written.

The file is an ordinary `torch.save` archive, so a plain `torch.load(path)` reads it, also on a machine
without raysgd. (One that holds numpy arrays needs `weights_only=False` there.) Two things are added. The
state carries its format's version under `raysgd_format`; and the comment at the end of the archive, which
torch and zip tools skip, holds a checksum of all before it, because torch itself loads a file with flipped
bits without complaint.

A write goes to a temporary file beside the target, which takes the target's name only when all of it is on
the disk. A process killed in the middle leaves the earlier checkpoint intact, and a file `.raysgd-*.tmp` that a
later write into the folder deletes.

The checksum is compared before torch sees the file; 200 MiB take about 10 ms. There are two ways to read it.
`read` copies it into new memory. `mapped` gives out tensors that lie in the file, for as long as it
takes to copy them to where they belong: fresh memory for a large state costs more than all the rest. Other processes
of the machine can be told which file it is, and map the same one, which they know is intact. All this relies on
no one writing into the file meanwhile. raysgd itself never does: it replaces files. A write by another program is
detected afterwards; a program that cuts the file short may crash this process.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import torch

from raysgd._background_writer import BackgroundWriter
from raysgd._plain_pickle import NotPlainError
from raysgd.exceptions import CheckpointCorruptedError as CheckpointCorruptedError
from raysgd.exceptions import UnsafeCheckpointError as UnsafeCheckpointError
from raysgd.torch import _seal
from raysgd.torch._loadable import check_loadable as check_loadable
from raysgd.torch._seal import Seal
from raysgd.torch._tensor_file import read_archive, read_old

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""The newest format that this version of raysgd reads, and the one that it writes."""

FORMAT_KEY = "raysgd_format"
"""Where a file's state says in which format it is: its last key."""

REQUIRED_KEYS = ("epoch", "operator", "models", "optimizers")
"""What makes a dict a training state."""

_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
_COMMENT_LENGTH_BYTES = 2
_OLD_TORCH_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How `torch.save` began its files before it wrote zip archives: a pickled magic number."""

_PIECE_BYTES = 2**20


def write(path: str | os.PathLike[str], state: dict[str, Any], *, format_version: int = FORMAT_VERSION) -> None:
    """Write `state` to `path`. At any moment `path` is either the whole old file or the whole new one.

    Args:
        path: Where to write: a path, whose folder must exist (a symbolic link is followed), or a URI.
        state: The state, with at least the keys in `REQUIRED_KEYS`. Pass it through `check_loadable` first.
        format_version: Stored in the file's state under its last key, `raysgd_format`.

    Raises:
        ValueError: `state` lacks keys that `read` insists on.
        OSError: The file could not be written, for instance for lack of space. `path` is as it was before.
    """
    from raysgd.storage import files  # here, because workers only read

    missing = _missing_keys(state)
    if missing:
        raise ValueError(f"`write({os.fspath(path)!r}, state)`: `state` lacks {missing}; {_REQUIRED_KEYS_HINT}")
    content = {key: value for key, value in state.items() if key != FORMAT_KEY}
    content[FORMAT_KEY] = format_version
    with files.saving(path) as file:
        stream = _ChecksummedStream(file)
        stream.save(content)
        file.seek(-_ZIP_END_BYTES, os.SEEK_END)
        assert _is_zip_end(file.read()), "torch.save did not end its archive as zip archives without a comment do"
        Seal(stream.hexdigest()).append_to(file)


def read(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint, make sure that it is undamaged, and return the state that was written, on the CPU.

    Files of the former library, and those that `torch.save` itself wrote, are read too; they have no
    checksum.

    Args:
        path: The file.
        weights_only: Refuse everything but tensors, numpy arrays, plain values and containers of them. With
            False a file can run any code: only for files from a source that you trust.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointCorruptedError: The file is damaged or no checkpoint. Both a `ValueError` and a
            `RuntimeError`.
        UnsafeCheckpointError: The file needs `weights_only=False`. A `ValueError`.
        ValueError: The content is not a training state, or in the format of a newer version of raysgd.
    """
    with _opened(os.fspath(path), weights_only, maps=False) as opened:
        return opened.state


@contextlib.contextmanager
def mapped(path: str | os.PathLike[str], *, weights_only: bool = True, name: str | None = None) -> Iterator[OpenedFile]:
    """Do what `read` does, but leave the tensors where they are: in the file, mapped into memory.

    Inside the `with` block they may be copied elsewhere. Keep none of them. Writing to one changes it in memory
    only. Files without a checksum, and those of file systems that cannot map, are read as by `read`.

    Args:
        path: The file.
        weights_only: As in `read`.
        name: What errors call it, where it is a copy of something else.

    Raises:
        CheckpointCorruptedError: Also at the end of the block, if the file was written to meanwhile.
        FileNotFoundError, UnsafeCheckpointError, ValueError: As in `read`.
    """
    with _opened(os.fspath(path), weights_only, maps=True, name=name) as opened:
        yield opened


@contextlib.contextmanager
def mapped_again(identity: FileIdentity, *, weights_only: bool = True) -> Iterator[dict[str, Any]]:
    """Map a file that another process of this machine has open, checked, and keeps an eye on. Keep no tensor of it.

    Raises:
        OtherFileError: By its name this process finds another file, or none.
    """
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(open(identity.path, "rb", buffering=0))
        except OSError as error:
            raise OtherFileError(f"`{identity.path}` cannot be opened here: {error}") from error
        if FileIdentity.of(file, identity.path) != identity:
            raise OtherFileError(f"`{identity.path}` is another file here, or was replaced since it was checked.")
        kind = _recognise(file, identity.num_bytes, identity.path)
        loaded = _load(_by_descriptor(file, identity.path), identity.num_bytes, kind, weights_only, is_mapped=True)
        yield _training_state(loaded, identity.path)


class OtherFileError(OSError):
    """A file is not the one that was meant."""


@dataclass(frozen=True)
class FileIdentity:
    """Which file is meant, and in which condition, whatever takes its name."""

    path: str
    device: int
    inode: int
    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, file: IO[bytes], path: str) -> FileIdentity:
        """That of an open file."""
        facts = os.fstat(file.fileno())
        return cls(path, facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


@dataclass(frozen=True)
class OpenedFile:
    """A checkpoint that is being read.

    Attributes:
        state: What it holds.
        identity: Which file it is.
        is_mapped: Whether the tensors of `state` lie in it.
    """

    state: dict[str, Any]
    identity: FileIdentity
    is_mapped: bool
    file: IO[bytes]

    def check_unchanged(self) -> None:
        """Makes sure that no one has written to it since it was opened.

        Raises:
            CheckpointCorruptedError: It was written to.
        """
        if FileIdentity.of(self.file, self.identity.path) != self.identity:
            raise _corrupted(self.identity.path, "it was written to while it was read")


@contextlib.contextmanager
def _opened(path: str, weights_only: bool, *, maps: bool, name: str | None = None) -> Iterator[OpenedFile]:
    """Check the file, and give out its state."""
    name = name or path
    with open(path, "rb", buffering=0) as file:
        identity = FileIdentity.of(file, os.path.realpath(path))
        kind = _recognise(file, identity.num_bytes, name)
        is_mapped = kind.seal is not None and _check(file, identity.num_bytes, kind.seal, name, maps)
        try:
            loaded = _load(_by_descriptor(file, path), identity.num_bytes, kind, weights_only, is_mapped)
        except Exception as error:
            raise _explained(error, name, kind, weights_only) from error
        opened = OpenedFile(_training_state(loaded, name), identity, is_mapped, file)
        yield opened
        opened.check_unchanged()


def _by_descriptor(file: IO[bytes], name: str) -> str:
    """A name that stays that of the open file: another file may take its own at any moment."""
    by_descriptor = f"/dev/fd/{file.fileno()}"
    return by_descriptor if os.path.exists(by_descriptor) else name


class AsyncWriter(BackgroundWriter):
    """Writes checkpoint files in the background.

    Example:
        >>> import os, tempfile
        >>> state = {"epoch": 1, "operator": None, "models": [], "optimizers": []}
        >>> with tempfile.TemporaryDirectory() as folder, AsyncWriter() as writer:
        ...     path = os.path.join(folder, "last.pt")
        ...     writer.submit(path, lambda: state)
        ...     writer.wait()
        ...     read(path) == state
        True
    """

    def __init__(self) -> None:
        from raysgd.storage import files

        super().__init__(write, files.shown)


@dataclass(frozen=True)
class _FileKind:
    """What kind of file a checkpoint is.

    Attributes:
        seal: Its checksum; None if `torch.save` itself wrote it.
        is_archive: Whether it is a zip archive, as since torch 1.6.
    """

    seal: Seal | None
    is_archive: bool


class _ChecksummedStream:
    """The file as `torch.save` sees it: writes through, and computes the checksum on the way.

    Given a stream instead of a path, torch lets other threads run while it writes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._checksum = _seal.new_checksum()
        self._failure: BaseException | None = None

    def save(self, content: dict[str, Any]) -> None:
        """Write the archive.

        Raises:
            OSError: A write failed. torch alone would report an unexpected position instead.
        """
        try:
            torch.save(content, self)  # type: ignore[arg-type]
        except Exception:
            if self._failure is None:
                raise
            raise self._failure from None

    def write(self, content: memoryview | bytes) -> int:
        """Write bytes; called by torch."""
        try:
            num_written = self._file.write(content)
        except BaseException as error:
            self._failure = error
            raise
        self._checksum.update(content)
        return num_written

    def flush(self) -> None:
        """Hand what is buffered to the operating system; called by torch."""
        self._file.flush()

    def hexdigest(self) -> str:
        """Return the checksum of all that was written."""
        return self._checksum.hexdigest()


def _is_zip_end(tail: bytes) -> bool:
    """Whether these last bytes of a file end a zip archive that has no comment."""
    return tail.startswith(_ZIP_END) and tail.endswith(bytes(_COMMENT_LENGTH_BYTES))


def _recognise(file: IO[bytes], size: int, name: str) -> _FileKind:
    """Tell what kind of file this is by its first and last bytes.

    Raises:
        CheckpointCorruptedError: It is of no known kind, or its end is missing.
    """
    start = file.read(len(_OLD_TORCH_START))
    file.seek(max(0, size - _seal.MAX_BYTES))
    tail = file.read()
    seal = Seal.at_end_of(tail)
    if seal is not None or start == _OLD_TORCH_START:
        return _FileKind(seal, is_archive=seal is not None)
    if not start.startswith(_ZIP_START):
        raise _corrupted(name, "it does not begin like a checkpoint" if start else "it is empty")
    if _is_zip_end(tail[-_ZIP_END_BYTES:]):
        return _FileKind(None, is_archive=True)
    raise _corrupted(name, "its end is missing or altered, or a newer version of raysgd wrote it")


def _check(file: IO[bytes], size: int, seal: Seal, name: str, maps: bool) -> bool:
    """Compare the checksum of a file with the one in its seal; return whether the file could be mapped.

    Raises:
        CheckpointCorruptedError: They differ.
    """
    num_bytes = seal.num_sealed_bytes(size)
    content = _map(file, size) if maps else None
    if content is None:
        fits = seal.fits(_pieces_in_file(file, num_bytes))
    else:
        with content, memoryview(content) as whole, whole[:num_bytes] as body:
            fits = seal.fits([body])
    if not fits:
        raise _corrupted(name, "its checksum does not match its content")
    return content is not None


def _map(file: IO[bytes], size: int) -> mmap.mmap | None:
    """Map the file into memory, or return None where that cannot be done."""
    try:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        logger.debug("reading a file that cannot be mapped: %s", error)
        return None


def _pieces_in_file(file: IO[bytes], num_bytes: int) -> Iterator[memoryview]:
    file.seek(0)
    buffer = memoryview(bytearray(min(_PIECE_BYTES, num_bytes)))
    while num_bytes:
        num_read = file.readinto(buffer[:num_bytes])  # type: ignore[attr-defined]
        if not num_read:
            return
        num_bytes -= num_read
        yield buffer[:num_read]


def _load(source: str, num_bytes: int, kind: _FileKind, weights_only: bool, is_mapped: bool) -> Any:
    if not weights_only:
        return torch.load(source, map_location="cpu", weights_only=False, mmap=is_mapped)
    with open(source, "rb") as file:
        if not kind.is_archive:
            return read_old(file, num_bytes)
        num_comment_bytes = 0 if kind.seal is None else len(kind.seal.comment)
        return read_archive(file, num_bytes, num_comment_bytes, source if is_mapped else None)


def _explained(error: Exception, name: str, kind: _FileKind, weights_only: bool) -> Exception:
    """Tell a refusal from damage. Errors of a file that was declared trustworthy, if it is intact, stay as they are."""
    if isinstance(error, OSError):
        return error
    if not weights_only:
        may_come_of_user_code = isinstance(error, (AttributeError, ImportError, MemoryError))
        is_as_it_is = kind.seal is not None or may_come_of_user_code
        return error if is_as_it_is else _corrupted(name, f"torch cannot read it ({_first_line(error)})")
    if isinstance(error, NotPlainError):
        return UnsafeCheckpointError(_refusal_message(name, error.needed))
    return _corrupted(name, _first_line(error))


def _refusal_message(name: str, needed: str) -> str:
    return (
        f"`{name}` needs `{needed}` to be loaded, which can run code. If you trust the source of the file, "
        "pass `weights_only=False`, as in `load(path, weights_only=False)`; never do so for other files."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _corrupted(name: str, finding: str) -> CheckpointCorruptedError:
    return CheckpointCorruptedError(
        f"`{name}` is no intact checkpoint: {finding}. It was damaged, or not copied to its end. Copy it "
        "again from where it came from, or load an earlier checkpoint."
    )


def _training_state(loaded: Any, name: str) -> dict[str, Any]:
    """Return the state without its version, having made sure that it is one."""
    if not isinstance(loaded, dict):
        raise ValueError(f"`{name}` holds a `{type(loaded).__name__}`, no training state; {_REQUIRED_KEYS_HINT}")
    version = loaded.pop(FORMAT_KEY, FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"`{name}` is in checkpoint format {version!r}; this version of raysgd knows formats up to "
            f"{FORMAT_VERSION}. Upgrade raysgd to read it."
        )
    missing = _missing_keys(loaded)
    if missing:
        raise ValueError(f"`{name}` holds no training state: it lacks {missing}; {_REQUIRED_KEYS_HINT}")
    return loaded


_REQUIRED_KEYS_HINT = f"a training state, as a trainer's `state_dict()` returns it, has {list(REQUIRED_KEYS)}."


def _missing_keys(state: dict[str, Any]) -> list[str]:
    return [key for key in REQUIRED_KEYS if key not in state]
