"""The `raysgd` command: checks the environment, monitors and inspects runs, and rewrites old programs.

No command starts a new run. To train, write a program.
"""

from __future__ import annotations

import sys

import click

from raysgd._version import __version__
from raysgd.cli import detached_commands, replay_commands
from raysgd.compat.migrate.command import migrate
from raysgd.core.text.printable import printable_lines

_LABELS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("problem", "red")}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="raysgd")
def main() -> None:
    """Check this machine, monitor and inspect runs, and rewrite old programs."""


@main.command()
@click.option("--address", help="A running Ray cluster, for example `auto`. Default: RAY_ADDRESS, else start one.")
@click.option("--self-test/--no-self-test", default=True, help="Whether to train two steps on two workers.")
def doctor(address: str | None, self_test: bool) -> None:
    """Check that this machine can train.

    Checks versions, GPUs, ports and the cluster, and trains two steps on two workers. If something is wrong, explains
    how to fix it and exits with status 1.
    """
    from raysgd.cli import doctor

    num_problems = 0
    click.echo(f"raysgd {__version__}")
    for finding in doctor.examine(address, self_test=self_test):
        word, color = _LABELS[finding.level]
        click.echo(f"  {click.style(f'{word:<8}', fg=color)} {finding.text}")
        if finding.advice:
            click.echo(f"{'':<11}{finding.advice}")
        num_problems += finding.level == "problem"
    click.echo(f"Problems: {num_problems}." if num_problems else "No problems found.")
    if num_problems:
        sys.exit(1)


@main.command()
@click.argument("run_folder", required=False)
def status(run_folder: str | None) -> None:
    """Show the state of the run in a folder.

    RUN_FOLDER is a path or a URI such as s3://bucket/results/run.
    """
    from raysgd.cli import run_status

    if run_folder is None:
        raise click.UsageError(run_status.without_folder())
    try:
        click.echo(run_status.read_status(run_folder))
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise click.ClickException(printable_lines(str(error))) from error


for command in (
    migrate,
    detached_commands.list_trainers,
    detached_commands.attach,
    detached_commands.stop,
    replay_commands.why,
    replay_commands.replay,
    replay_commands.bisect,
):
    main.add_command(command)
