"""The `raysgd` command: checks the environment, monitors and inspects runs, and rewrites old programs.

No command starts a new run. To train, write a program. The parts that a command needs are imported when it runs.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from raysgd._version import __version__
from raysgd.core.cluster.ray_cluster import init_ray
from raysgd.core.text.log_lines import printable_lines
from raysgd.exceptions import RaySGDError

Command = Callable[..., None]

_LABELS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("problem", "red")}
_PROGRAM = "What to run, such as `train.py:MyOperator`. Nothing from the folder of the run is executed or unpickled."
_CHECKPOINTS = "Folder or URI of the checkpoints, if they are not in the folder of the run."


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


@main.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--write", is_flag=True, help="Replace the files. Without it, nothing is written.")
@click.option("--diff", "shows_diff", is_flag=True, help="Print what changes.")
@click.option("--ray-train", is_flag=True, help="`ray.train`, `ray.air` and `ray.ml` mean Ray 1.x or 2.0 to 2.9.")
def migrate(**arguments: Any) -> None:
    """Rewrite programs written for `ray.util.sgd` to use raysgd.

    PATH is a file, or a folder of Python files. Old imports, names and arguments are replaced with raysgd's. Lines that
    need your decision are printed with the reason. A line that only you can rewrite gets a comment above it, `# raysgd:
    ...`. The exit status is 1 if there is such a line, or a file that cannot be rewritten, which stays unchanged.
    """
    from raysgd.compat.migrate import command

    command.migrate(**arguments)


def _in_cluster(command: Command) -> Command:
    """Decorate a command that needs a Ray cluster.

    The decorated command has the option `--address`, connects to the cluster at that address before it runs, and shows
    errors without a traceback.
    """

    @click.option(
        "--address", default="auto", help="The Ray cluster. Default: RAY_ADDRESS, else the one of this machine."
    )
    @functools.wraps(command)
    def connected(address: str, **arguments: Any) -> None:
        try:
            init_ray(address=address, log_to_driver=False, logging_level=logging.ERROR)
            command(**arguments)
        except (OSError, LookupError, RuntimeError, ValueError) as error:
            of_system = isinstance(error, OSError) and error.errno is not None
            raise click.ClickException(str(error if of_system or not error.args else error.args[0])) from error

    return connected


@main.command("list")
@_in_cluster
def list_trainers() -> None:
    """List the detached trainers."""
    from raysgd.detached import cluster

    trainers = cluster.detached_trainers()
    click.echo("\n".join(map(str, trainers)) if trainers else "There are no detached trainers.")


@main.command()
@click.argument("name")
@_in_cluster
def attach(name: str) -> None:
    """Show the output of detached trainer NAME until its call ends. Ctrl-C leaves the trainer running."""
    from raysgd.detached import cluster

    trainer = cluster.attach(name)
    click.echo(repr(trainer))
    try:
        trainer._follow()
    except KeyboardInterrupt:
        click.echo(f"Detached trainer {name} continues.")
    else:
        click.echo("No call is running.")


@main.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Kill a trainer that is not answering, without waiting or saving.")
@_in_cluster
def stop(name: str, force: bool) -> None:
    """End detached trainer NAME and its call, and free its resources.

    If no call is running and the trainer has a folder, it is saved there first.
    """
    from raysgd.detached import cluster

    words = cluster.stop(name, force=force)
    click.echo(f"Detached trainer {name} has ended{words and f', {words}'}.")


def _with_entries(command: Command) -> Command:
    """Decorate a command. The decorated command has the options `--config` and `--options`.

    It shows errors without a traceback.
    """

    @click.option("--config", type=click.Path(dir_okay=False), help="A JSON file with entries of the config.")
    @click.option(
        "--options",
        type=click.Path(dir_okay=False),
        help="A JSON file with arguments of the trainer that the journal does not hold, such as `compile`.",
    )
    @functools.wraps(command)
    def with_entries(config: str | None, options: str | None, **arguments: Any) -> None:
        try:
            entries = {"config": _object_in("--config", config), "options": _object_in("--options", options)}
            command(**entries, **arguments)
        except (OSError, ValueError, ModuleNotFoundError, RaySGDError) as error:
            raise click.ClickException(printable_lines(str(error))) from error

    return with_entries


def _object_in(name: str, path: str | None) -> dict[str, Any] | None:
    """Return the object in a JSON file that the user names, or None without a file."""
    if path is None:
        return None
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{name} {path}` is no JSON file: {error}.") from error
    if not isinstance(entries, dict):
        raise ValueError(f'`{name} {path}`: need an object, such as `{{"lr": 0.1}}`.')
    return entries


def _show(found: object) -> None:
    click.echo(printable_lines(str(found)))


@main.command()
@click.argument("run_folder")
@click.option("--step", type=int, help="Number of the step, from 1.")
@click.option("--jumps", is_flag=True, help="Show the steps at which the loss left its range.")
@click.option("--recompute", is_flag=True, help="Compute the loss of each sample of the step by itself.")
@click.option("--program", help=_PROGRAM)
@click.option("--checkpoints", help=_CHECKPOINTS)
@_with_entries
def why(run_folder: str, step: int | None, jumps: bool, **arguments: Any) -> None:
    """Show which samples a step trained on, and its loss next to the losses of nearby steps.

    RUN_FOLDER is the folder of a `TorchTrainer.fit` run.
    """
    if (step is None) == (not jumps):
        raise click.UsageError("Pass `--step N`, or `--jumps`.")
    if step is None:
        from raysgd.replay.jumps import find_jumps

        _show(find_jumps(run_folder))
    else:
        from raysgd.replay import questions

        _show(questions.why(run_folder, step, **arguments))


@main.command()
@click.argument("run_folder")
@click.option("--step", type=int, required=True, help="Number of the step, from 1.")
@click.option("--program", required=True, help=_PROGRAM)
@click.option("--workers", type=click.IntRange(1, 1), default=1, help="Number of processes: only 1 is possible.")
@click.option("--pdb", "debug", is_flag=True, help="Stop in the debugger before `train_batch` of the step.")
@click.option("--checkpoints", help=_CHECKPOINTS)
@click.option("--save", type=click.Path(dir_okay=False), help="Write the state after the step to this file.")
@_with_entries
def replay(run_folder: str, step: int, workers: int, save: str | None, **arguments: Any) -> None:
    """Repeat a part of a run in one process: from the last checkpoint before a step until that step.

    RUN_FOLDER is the folder of a `TorchTrainer.fit` run. Exits with status 1 if the replay does not reproduce the run.
    """
    from raysgd.replay import replaying

    replayed = replaying.replay(run_folder, step, **arguments)
    _show(replayed)
    if save is not None:
        import torch

        torch.save(dict(replayed.state), save)
    if not replayed.is_same:
        sys.exit(1)


@main.command()
@click.argument("run_a")
@click.argument("run_b")
@click.option("--program", help=f"{_PROGRAM} Without it, only the files are compared.")
@click.option("--program-b", help="What to run for RUN_B, if it is another program.")
@_with_entries
def bisect(run_a: str, run_b: str, **arguments: Any) -> None:
    """Find the first step at which two runs differ, and what differs there.

    RUN_A and RUN_B are folders of `TorchTrainer.fit` runs.
    """
    from raysgd.replay import bisecting

    _show(bisecting.bisect(run_a, run_b, **arguments))
