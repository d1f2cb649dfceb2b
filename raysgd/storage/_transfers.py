"""Copies files: trees of them on this machine, single ones, and to stores and from them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from raysgd._files import flush_to_disk
from raysgd.exceptions import OnFailure

TEMPORARY = ".raysgd-"  # as in `raysgd._files`, which also removes what was left long ago
_PIECE_BYTES = 8 * 2**20
_NUM_THREADS = 8
_AWAITED_PIECES = 10  # eight parts of S3, which PyArrow sends at the same time

T = TypeVar("T")

Pieces = Callable[[], Iterator[Any]]
"""The content of a file; called again for each attempt."""

# ---------------------------------------------------------------------------------------------------- on this machine


def tree_of(root: Path) -> tuple[list[str], list[str]]:
    """Relative names, with slashes, of the files in a folder, and of the folders that are empty.

    Symbolic links are followed.

    Raises:
        OSError: There is no such folder; something in it is neither a file nor a folder; a link leads back.
    """
    files: list[str] = []
    empty: list[str] = []

    def visit(prefix: str, above: tuple[str, ...]) -> None:
        with os.scandir(root / prefix) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        if prefix and not entries:
            empty.append(prefix)
        for entry in entries:
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir():
                real = os.path.realpath(entry.path)
                if real in above:
                    raise OSError(f"the link `{entry.path}` leads to a folder that it is in")
                visit(name, (*above, real))
            elif entry.is_file():
                files.append(name)
            else:
                raise OSError(f"`{entry.path}` is neither a file nor a folder")

    visit("", (os.path.realpath(root),))
    return files, empty


def copy_tree(source: Path, target: Path, without: Collection[str] = ()) -> None:
    """Copy everything in a folder, but for some files, into another one; each file is whole or not there."""
    files, empty = tree_of(source)
    target.mkdir(parents=True, exist_ok=True)
    for name in empty:
        (target / name).mkdir(parents=True, exist_ok=True)
    for name in files:
        if name not in without:
            copy_file(source / name, target / name)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, which is whole or not there."""
    with placing(target) as file:
        shutil.copyfile(source, file.name)
        shutil.copymode(source, file.name)


@contextlib.contextmanager
def placing(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes its name when it is complete. It may not be on the disk yet when that happens."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY}{secrets.token_hex(8)}.tmp"
    with OnFailure(lambda: temporary.unlink(missing_ok=True)):
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, target)


def sync_tree(root: Path) -> None:
    """Make sure that everything in a folder is on the disk."""
    for folder, _, names in os.walk(root):
        for name in names:
            flush_to_disk(os.path.join(folder, name))
        flush_to_disk(folder)


# ---------------------------------------------------------------------------------------------------- stores


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """A file, piece by piece."""
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        yield piece


def send(fs: Any, content: Pieces, path: str) -> None:
    """Send a file to a store that shows files when they are closed.

    Closing a stream makes a file of what was sent so far, also after Ctrl-C: so another thread sends, to the end.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="raysgd-storage") as pool:
        pool.submit(_send, fs, content, path).result()


def _send(fs: Any, content: Pieces, path: str) -> None:
    with fs.open_output_stream(path, compression=None) as stream:
        for number, piece in enumerate(content(), start=1):
            stream.write(piece)
            if number % _AWAITED_PIECES == 0:
                stream.flush()  # else a store that froze is waited for with each part, and all of them are in memory


def send_and_rename(fs: Any, content: Pieces, path: str) -> None:
    """Send a file to a store that shows files as they grow."""
    folder = path[: path.rfind("/") + 1]
    if folder.strip("/"):
        fs.create_dir(folder.rstrip("/"), recursive=True)
    temporary = f"{folder}{TEMPORARY}{secrets.token_hex(8)}.tmp"

    def delete() -> None:
        with contextlib.suppress(Exception):  # whatever a store may answer: what failed before matters more
            fs.delete_file(temporary)

    with OnFailure(delete):
        send(fs, content, temporary)
        fs.move(temporary, path)


def fetch(fs: Any, path: str, target: IO[bytes], checksums: Collection[str] = ()) -> None:
    """Get a file out of a store.

    Args:
        fs: The file system.
        path: The file.
        target: Gets what is in it.
        checksums: Those that it may have; none if they are unknown.

    Raises:
        OSError: There was less or more of it than the store says, or it was altered.
    """
    target.seek(0)
    target.truncate()
    checksum = new_checksum()
    [info] = fs.get_file_info([path])
    with fs.open_input_stream(path, compression=None) as stream:
        while piece := stream.read(_PIECE_BYTES):
            checksum.update(piece)
            target.write(piece)
    if info.size is not None and target.tell() != info.size:
        raise OSError(f"{target.tell():,} bytes came of a file of {info.size:,}")
    if checksums and checksum.hexdigest() not in checksums:
        raise OSError("its content was altered: it has another checksum than when it was written")


def new_checksum() -> Any:
    """Return an XXH128 of nothing, to be updated."""
    import xxhash

    return xxhash.xxh3_128()


def on_threads(work: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
    """Do the work for all names, several at once; return what came of each. After a failure no more is begun.

    Raises:
        Exception: What the first one raised that failed.
    """
    names = list(names)
    if not names:
        return {}
    pool = ThreadPoolExecutor(min(_NUM_THREADS, len(names)), thread_name_prefix="raysgd-storage")
    try:
        return dict(zip(names, pool.map(work, names), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)
