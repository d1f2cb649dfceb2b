"""Goes through files and folders, and writes what was rewritten: each file whole, or not at all."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raysgd._files import replacing
from raysgd.compat.migrate.names import Finding
from raysgd.compat.migrate.source import MigratedProgram, migrate

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_WRITABLE = 0o222
_NOTEBOOK = (
    "a notebook is not rewritten: run `jupytext --to py:percent {path}`, migrate `{code}`, and run `jupytext --update "
    "--to ipynb {code}`, which keeps the outputs"
)


@dataclass(frozen=True)
class MigratedFile:
    """A file of a program, and what became of it."""

    path: Path
    before: bytes
    after: MigratedProgram

    @property
    def has_changed(self) -> bool:
        """True if there is something to write."""
        return self.before != self.after.text

    def diff(self) -> str:
        """The change, as `git apply` takes it."""
        texts, name = (_lines(self.before), _lines(self.after.text)), str(self.path).lstrip("/")
        return "".join(difflib.unified_diff(*texts, f"a/{name}", f"b/{name}"))

    def replace(self) -> None:
        """Replaces the file; its permissions stay.

        Raises:
            OSError: It could not be written; it is as it was.
        """
        if not self.path.stat().st_mode & _WRITABLE:
            raise PermissionError(f"`{self.path}` is read-only")
        with replacing(str(self.path.resolve())) as file:
            file.write(self.after.text)


def files_of(paths: Sequence[Path]) -> Iterator[Path]:
    """The files to look at: those that are named, and those in folders that are named, in order.

    Raises:
        FileNotFoundError: There is no such path, or a folder has no Python in it.
    """
    for path in paths:
        if path.is_file():
            yield path
            continue
        if not path.is_dir():
            raise FileNotFoundError(f"`{path}` does not exist: pass a file or a folder of Python files.")
        found = sorted(_inside(path))
        if not found:
            raise FileNotFoundError(f"there is no Python file in the folder `{path}`.")
        yield from found


def migrate_file(path: Path, ray_train: bool) -> MigratedFile:
    """Rewrites one file, in memory. What is no file of its folder is left alone.

    Args:
        path: The file.
        ray_train: Whether `ray.train` and `ray.air` mean the old library.
    """
    reason = _obstacle(path)
    if reason is not None:
        return MigratedFile(path, b"", MigratedProgram(b"", [Finding(1, f"left alone: {reason}", is_error=False)]))
    try:
        before = path.read_bytes()
    except OSError as error:
        return MigratedFile(path, b"", MigratedProgram(b"", [Finding(1, f"it cannot be read: {error}", is_error=True)]))
    if path.suffix == ".ipynb":
        is_old = any(name in before for name in (b"ray.util.sgd", *[b"ray.train", b"ray.air"] * ray_train))
        text = _NOTEBOOK.format(path=path, code=path.with_suffix(".py"))
        return MigratedFile(path, before, MigratedProgram(before, [Finding(1, text, is_error=True)] * is_old))
    return MigratedFile(path, before, migrate(before, ray_train))


def _obstacle(path: Path) -> str | None:
    """Returns why a path is not rewritten: a pipe may never end, and a link leads to a file that was not named."""
    if path.is_symlink():
        return f"it is a link to `{path.resolve()}`, which you can pass by itself"
    return None if path.is_file() or not path.exists() else "it is not a regular file"


def _inside(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each not in _SKIPPED and not each.startswith(".")]
        yield from (Path(root, name) for name in names if name.endswith((".py", ".ipynb")))


def _lines(text: bytes) -> list[str]:
    return text.decode("utf-8", errors="replace").splitlines(keepends=True)
