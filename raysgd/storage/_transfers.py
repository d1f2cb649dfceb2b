"""Copies files and folders on this machine, and transfers files to and from stores."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from raysgd.core.files import flush_to_disk
from raysgd.exceptions import OnFailure

# Prefix of temporary files. `raysgd.core.files` uses the same prefix, and removes old local files that have this prefix
# and end with `.tmp`.
TEMPORARY = ".raysgd-"
_PIECE_BYTES = 8 * 2**20
_NUM_THREADS = 8
# Number of pieces of a file between two flushes. Together, these pieces have as many bytes as the eight parts that
# PyArrow uploads at the same time.
_AWAITED_PIECES = 10

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------------- on this machine


def tree_of(root: Path) -> tuple[list[str], list[str]]:
    """Return all files, and all empty folders, in a folder and its subfolders. Symbolic links are followed.

    The results are relative paths with slashes.

    Raises:
        OSError: The folder does not exist, it contains something that is neither a file nor a folder, or a symbolic
            link leads to a folder above it.
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
                    raise OSError(f"the link `{entry.path}` leads to a folder that contains the link")
                visit(name, (*above, real))
            elif entry.is_file():
                files.append(name)
            else:
                raise OSError(f"`{entry.path}` is neither a file nor a folder")

    visit("", (os.path.realpath(root),))
    return files, empty


def copy_tree(source: Path, target: Path, without: Collection[str] = ()) -> None:
    """Copy the content of a folder into another folder. Each file is copied atomically.

    Args:
        source: The folder to copy from.
        target: The folder to copy into. It is created if necessary.
        without: Relative paths of files that are not copied.
    """
    files, empty = tree_of(source)
    target.mkdir(parents=True, exist_ok=True)
    for name in empty:
        (target / name).mkdir(parents=True, exist_ok=True)
    for name in files:
        if name not in without:
            copy_file(source / name, target / name)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file with its permissions. No process can see an incomplete copy."""
    with placing(target) as file:
        shutil.copyfile(source, file.name)
        shutil.copymode(source, file.name)


@contextlib.contextmanager
def placing(target: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing. At the end of the block, it is renamed to `target`.

    If the block raises an exception, the temporary file is deleted, and `target` is unchanged.

    Flushing the file to the disk is left to the operating system.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY}{secrets.token_hex(8)}.tmp"
    with OnFailure(lambda: temporary.unlink(missing_ok=True)):
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, target)


def sync_tree(root: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for folder, _, names in os.walk(root):
        for name in names:
            flush_to_disk(os.path.join(folder, name))
        flush_to_disk(folder)


# ---------------------------------------------------------------------------------------------------- stores


def send(fs: Any, file: IO[bytes], path: str) -> str:
    """Send a local file to a store in which files become visible when they are closed. Return the file's checksum.

    A separate thread, which Ctrl-C does not interrupt, sends the whole file. Otherwise, closing the file after Ctrl-C
    would make an incomplete file visible.

    Args:
        fs: File system of the store.
        file: The local file. It is sent from its beginning.
        path: Path of the file in `fs`.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="raysgd-storage") as pool:
        return pool.submit(_send, fs, file, path).result()


def _send(fs: Any, file: IO[bytes], path: str) -> str:
    checksum = new_checksum()
    file.seek(0)
    with fs.open_output_stream(path, compression=None) as stream:
        for number, piece in enumerate(iter(partial(file.read, _PIECE_BYTES), b""), start=1):
            checksum.update(piece)
            stream.write(piece)
            if number % _AWAITED_PIECES == 0:
                # Wait for the store. If it hangs, the pieces would otherwise pile up in memory and fail one by one.
                stream.flush()
    return str(checksum.hexdigest())


def send_and_rename(fs: Any, file: IO[bytes], path: str) -> str:
    """Send a local file to a store in which unfinished files are visible. Return the file's checksum.

    The file is sent under a temporary name, and then renamed. The arguments are those of `send`.
    """
    folder = path[: path.rfind("/") + 1]
    if folder.strip("/"):
        fs.create_dir(folder.rstrip("/"), recursive=True)
    temporary = f"{folder}{TEMPORARY}{secrets.token_hex(8)}.tmp"

    def delete() -> None:
        with contextlib.suppress(Exception):  # any error here must not hide the error that made the transfer fail
            fs.delete_file(temporary)

    with OnFailure(delete):
        checksum = send(fs, file, temporary)
        fs.move(temporary, path)
    return checksum


def fetch(fs: Any, path: str, target: IO[bytes], checksums: Collection[str] = ()) -> None:
    """Fetch a file from a store.

    Args:
        fs: File system of the store.
        path: Path of the file in `fs`.
        target: Local file to write the content to.
        checksums: Valid checksums, one of which the content must have. Empty to not check the content.

    Raises:
        OSError: The content has another size than the store reports, or a wrong checksum.
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
        raise OSError(f"received {target.tell():,} bytes of a file of {info.size:,}")
    if checksums and checksum.hexdigest() not in checksums:
        raise OSError("its content was altered after it was written: its checksum differs")


def new_checksum() -> Any:
    """Return a new object that computes an XXH128 checksum."""
    import xxhash

    return xxhash.xxh3_128()


def on_threads(work: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
    """Call a function for each name, in parallel threads. Return the results by name.

    If a call fails, calls that have not started yet are canceled once the calls for all earlier names have ended.

    Raises:
        Exception: The error of the failed call whose name comes first in `names`.
    """
    names = list(names)
    if not names:
        return {}
    pool = ThreadPoolExecutor(min(_NUM_THREADS, len(names)), thread_name_prefix="raysgd-storage")
    try:
        return dict(zip(names, pool.map(work, names), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)
