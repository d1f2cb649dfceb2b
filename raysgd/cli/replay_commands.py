"""The commands that investigate a past run: `raysgd why`, `raysgd replay` and `raysgd bisect`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from raysgd.core.text.printable import printable_lines
from raysgd.exceptions import RaySGDError

Command = Callable[..., None]

_PROGRAM = "What to run, such as `train.py:MyOperator`. Nothing from the folder of the run is executed or unpickled."
_CHECKPOINTS = "Folder or URI of the checkpoints, if they are not in the folder of the run."


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


@click.command()
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
    from raysgd.replay import questions

    if step is None:
        _show(questions.find_jumps(run_folder))
    else:
        _show(questions.why(run_folder, step, **arguments))


@click.command()
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


@click.command()
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
