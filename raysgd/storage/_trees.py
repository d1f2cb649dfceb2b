"""Trees of files in a folder of this machine, and copies of single files."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from raysgd._files import flush_to_disk

TEMPORARY = ".raysgd-"  # as in `_atomic_file`, which also removes what was left long ago


@dataclass
class FileTree:
    """Relative names, with slashes, of the files in a folder, and of the folders that are empty."""

    files: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> FileTree:
        """Goes through a folder. Symbolic links are followed.

        Raises:
            OSError: There is no such folder; something in it is neither a file nor a folder; a link leads back.
        """
        tree = cls()
        tree._visit(root, "", (os.path.realpath(root),))
        return tree

    def placed(self, places: Mapping[str, str | None] | None) -> dict[str, str]:
        """The names that the files get: their own, or others for some of them. None leaves a file out."""
        named = {**dict(zip(self.files, self.files, strict=True)), **(places or {})}
        return {name: place for name, place in named.items() if place is not None}

    def _visit(self, root: Path, prefix: str, above: tuple[str, ...]) -> None:
        with os.scandir(root / prefix) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        if prefix and not entries:
            self.empty.append(prefix)
        for entry in entries:
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir():
                real = os.path.realpath(entry.path)
                if real in above:
                    raise OSError(f"the link `{entry.path}` leads to a folder that it is in")
                self._visit(root, name, (*above, real))
            elif entry.is_file():
                self.files.append(name)
            else:
                raise OSError(f"`{entry.path}` is neither a file nor a folder")


def copy_tree(source: Path, target: Path, places: Mapping[str, str | None] | None = None) -> None:
    """Copies everything in a folder into another one; each file is whole or not there. Places: `FileTree.placed`."""
    tree = FileTree.of(source)
    target.mkdir(parents=True, exist_ok=True)
    for name in tree.empty:
        (target / name).mkdir(parents=True, exist_ok=True)
    for name, place in tree.placed(places).items():
        copy_file(source / name, target / place)


def copy_file(source: Path, target: Path) -> None:
    """Copies a file, which is whole or not there."""
    with placing(target) as file:
        shutil.copyfile(source, file.name)
        shutil.copymode(source, file.name)


@contextlib.contextmanager
def placing(target: Path) -> Iterator[IO[bytes]]:
    """Opens a file that takes its name when it is complete. It may not be on the disk yet when that happens."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY}{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def sync_tree(root: Path) -> None:
    """Makes sure that everything in a folder is on the disk."""
    for folder, _, names in os.walk(root):
        for name in names:
            flush_to_disk(os.path.join(folder, name))
        flush_to_disk(folder)
