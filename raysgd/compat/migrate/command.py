"""The work of the command `raysgd migrate`, which rewrites old programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raysgd.core.imports import require_installed

if TYPE_CHECKING:
    from raysgd.compat.migrate.source import MigratedProgram


def migrate(paths: Sequence[Path], write: bool, shows_diff: bool, ray_train: bool) -> None:
    """Rewrite programs written for `ray.util.sgd`, and exit with the status that `raysgd migrate --help` explains."""
    try:
        require_installed("libcst", extra="migrate", purpose="`raysgd migrate`")
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from None
    from raysgd.compat.migrate.source import files_of, migrate_file

    try:
        files = [migrate_file(path, ray_train) for path in files_of(paths)]
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from None
    has_failed, num_left = False, 0
    for file in files:
        _tell(file, shows_diff)
        is_left = write and file.has_changed and not _wrote(file)
        num_left += is_left
        has_failed |= file.has_failed or is_left
    click.echo(_summary(files, write, num_left), err=True)
    if not ray_train and any(name in file.text for file in files for name in (b"ray.train", b"ray.air", b"ray.ml")):
        click.echo(
            "If `ray.train` or `ray.air` is that of Ray 1.x or 2.0 to 2.9, or there is `ray.ml`, pass --ray-train.",
            err=True,
        )
    sys.exit(int(has_failed))


def _tell(file: MigratedProgram, shows_diff: bool) -> None:
    if shows_diff and file.has_changed:
        click.echo(file.diff(), nl=False)
    for finding in file.findings:
        kind = "error" if finding.is_error else "look"
        click.echo(f"{file.path}:{finding.line}: {kind}: {finding.text}", err=True)


def _wrote(file: MigratedProgram) -> bool:
    try:
        file.replace_file()
    except OSError as error:
        click.echo(f"{file.path}:1: error: it cannot be written: {error}", err=True)
        return False
    return True


def _summary(files: Sequence[MigratedProgram], write: bool, num_left: int) -> str:
    changed = sum(file.has_changed for file in files) - num_left
    unread = sum(file.has_failed and not file.has_changed for file in files)
    by_hand = sum(finding.is_error for file in files if file.has_changed for finding in file.findings)
    to_look_at = sum(not finding.is_error for file in files for finding in file.findings)
    done = "rewritten" if write else "would change (nothing is written without --write)"
    parts = [f"{changed} of {len(files)} files {done}"]
    parts += [f"{unread} could not be migrated and are unchanged"] if unread else []
    parts += [f"{num_left} could not be written"] if num_left else []
    parts += [f"{by_hand} lines are left for you, below `# raysgd:`"] if by_hand else []
    parts += [f"{to_look_at} lines to look at"] if to_look_at else []
    return "; ".join(parts) + "."
