"""The journal of a host: what its next process needs to go on, in a file to which is only appended."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from raysgd._files.atomic_file import replacing

_MOST_WASTE = 64 * 2**20  # then what is valid is written to a new file


def journal_path(host: str, actor_id: str) -> Path:
    """Return where the journal of a host is: among the caches of the user, which other users cannot write to."""
    cache = os.environ.get("RAYSGD_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/raysgd"
    return Path(cache) / "hosts" / f"{host}-{actor_id}"


class Journal:
    """Keeps bytes by name, for the next process. For any thread.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._waste = 0
        self._is_ended = False

    def put(self, entries: Mapping[str, bytes | None]) -> None:
        """Keep these instead of what has their names, all of them or none; None takes an entry out."""
        record = pickle.dumps(dict(entries))
        with self._lock:
            if self._is_ended:
                return
            self._append(record)
            self._waste += len(record)
            if self._waste > _MOST_WASTE:
                self._write_again()

    def read(self) -> dict[str, bytes]:
        """Return what there is. A record that was not written to its end does not count, and is cut off."""
        with self._lock:
            if not self._path.exists():
                return {}
            found, end = self._found()
            os.truncate(self._path, end)
            return found

    def end(self) -> None:
        """Remove the file; from now on nothing is kept."""
        with self._lock:
            self._is_ended = True
            self._path.unlink(missing_ok=True)

    def _append(self, record: bytes) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(record)

    def _found(self) -> tuple[dict[str, bytes], int]:
        """Return what is valid, and where the last whole record ends."""
        found: dict[str, bytes | None] = {}
        end = 0
        with self._path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
            while True:
                found |= pickle.load(file)
                end = file.tell()
        return {name: value for name, value in found.items() if value is not None}, end

    def _write_again(self) -> None:
        """Write a new file with what is valid."""
        found, _ = self._found()
        with replacing(str(self._path)) as new:
            pickle.dump(found, new)
        self._waste = 0
