"""Finds Python programs in files and folders, and rewrites each of them in memory."""

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
    """Yield each path that is not a folder, and for each folder, the Python files and notebooks inside it.

    Hidden subfolders, and subfolders such as `build` and `site-packages`, are skipped.

    Raises:
        FileNotFoundError: A path is neither a regular file nor a folder, or a folder contains neither Python files
            nor notebooks.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"`{path}` does not exist: pass a file or a folder of Python files.")
        if not path.is_dir():
            yield path
            continue
        files = sorted(_inside(path))
        if not files:
            raise FileNotFoundError(f"there is no Python file in the folder `{path}`.")
        yield from files


def migrate_file(path: Path, ray_train: bool) -> MigratedProgram:
    """Rewrite one program in memory, without changing its file.

    Symbolic links and special files, such as pipes, are skipped. Notebooks are not rewritten, but are reported if they
    use old names. Files that cannot be read are reported, too.

    Args:
        path: The program's file.
        ray_train: True if the program was written for the former `ray.train` and `ray.air`, not those of current Ray.
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
    """Return the reason to skip a path, or None if it is a regular file or does not exist.

    A symbolic link is skipped because it leads to a file that the user did not name. A special file, such as a pipe, is
    skipped because reading it may never end.
    """
    if path.is_symlink():
        return f"it is a link to `{path.resolve()}`, which you can pass by itself"
    return None if path.is_file() or not path.exists() else "it is not a regular file"


def _inside(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each not in _SKIPPED and not each.startswith(".")]
        yield from (Path(root, name) for name in names if name.endswith((".py", ".ipynb")))
