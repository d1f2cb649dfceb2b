"""Finds the programs in files and folders, and rewrites them in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raysgd.compat.migrate.names import Finding
from raysgd.compat.migrate.source import MigratedProgram, migrate

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_OLD = (b"ray.util.sgd", b"ray.experimental.sgd")
_TWICE = (b"ray.train", b"ray.air", b"ray.ml")
_NOTEBOOK = (
    "a notebook is not rewritten: run `jupytext --to py:percent {path}`, migrate `{code}`, and run `jupytext --update "
    "--to ipynb {code}`, which keeps the outputs"
)


def files_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the given files, and the files in the given folders, in order.

    Raises:
        FileNotFoundError: A path does not exist, or a folder contains no Python file.
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


def migrate_file(path: Path, ray_train: bool) -> MigratedProgram:
    """Rewrite one file in memory. Symbolic links and special files are skipped.

    Args:
        path: The program's file.
        ray_train: True if `ray.train` and `ray.air` in the program mean their former versions, not current Ray.
    """
    reason = _obstacle(path)
    if reason is not None:
        return MigratedProgram(b"", b"", [Finding(1, f"left alone: {reason}", is_error=False)], path)
    try:
        before = path.read_bytes()
    except OSError as error:
        return MigratedProgram(b"", b"", [Finding(1, f"it cannot be read: {error}", is_error=True)], path)
    if path.suffix == ".ipynb":
        is_old = any(name in before for name in (*_OLD, *_TWICE * ray_train))
        text = _NOTEBOOK.format(path=path, code=path.with_suffix(".py"))
        return MigratedProgram(before, before, [Finding(1, text, is_error=True)] * is_old, path)
    return replace(migrate(before, ray_train), path=path)


def _obstacle(path: Path) -> str | None:
    """Return why a path is skipped, or None if it is a regular file.

    Reading a pipe may never end, and a symbolic link leads to a file that the user did not name.
    """
    if path.is_symlink():
        return f"it is a link to `{path.resolve()}`, which you can pass by itself"
    return None if path.is_file() or not path.exists() else "it is not a regular file"


def _inside(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each not in _SKIPPED and not each.startswith(".")]
        yield from (Path(root, name) for name in names if name.endswith((".py", ".ipynb")))
