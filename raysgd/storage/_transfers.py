"""Sends files to stores and fetches them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

from raysgd.storage._trees import TEMPORARY

_PIECE_BYTES = 8 * 2**20
_NUM_THREADS = 8
_AWAITED_PIECES = 10  # eight parts of S3, which PyArrow sends at the same time

T = TypeVar("T")

Pieces = Callable[[], Iterator[Any]]
"""The content of a file; called again for each attempt."""


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """A file, piece by piece."""
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        yield piece


def send(fs: Any, content: Pieces, path: str) -> None:
    """Sends a file to a store that shows files when they are closed.

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
    """Sends a file to a store that shows files as they grow."""
    folder = path[: path.rfind("/") + 1]
    if folder.strip("/"):
        fs.create_dir(folder.rstrip("/"), recursive=True)
    temporary = f"{folder}{TEMPORARY}{secrets.token_hex(8)}.tmp"
    try:
        send(fs, content, temporary)
        fs.move(temporary, path)
    except BaseException:
        with contextlib.suppress(Exception):
            fs.delete_file(temporary)
        raise


def fetch(fs: Any, path: str, target: IO[bytes], checksums: Collection[str] = ()) -> None:
    """Gets a file out of a store.

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
    """Does the work for all names, several at once; returns what came of each. After a failure no more is begun.

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
