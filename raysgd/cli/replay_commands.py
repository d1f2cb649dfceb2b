"""The commands that investigate a past run: `raysgd why`, `raysgd replay` and `raysgd bisect`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., None]

_PROGRAM = "What to run, such as `train.py:MyOperator`. Nothing from the folder of the run is executed or unpickled."


def _with_config(command: Command) -> Command:
    """Decorate a command. The decorated command has the option `--config`, and shows errors without a traceback."""

    @click.option("--config", type=click.Path(dir_okay=False), help="A JSON file with entries of the config.")
    @functools.wraps(command)
    def configured(config: str | None, **arguments: Any) -> None:
        try:
            entries = None if config is None else json.loads(Path(config).read_text(encoding="utf-8"))
            command(config=entries, **arguments)
        except (OSError, ValueError, ModuleNotFoundError) as error:
            raise click.ClickException(str(error)) from error

    return configured


@click.command()
@click.argument("run_folder")
@click.option("--step", type=int, help="Number of the step, from 1.")
@click.option("--jumps", is_flag=True, help="Show the steps at which the loss left its range.")
@click.option("--recompute", is_flag=True, help="Compute the loss of each sample of the step by itself.")
@click.option("--program", help=_PROGRAM)
@_with_config
def why(run_folder: str, step: int | None, jumps: bool, recompute: bool, program: str | None, config: Any) -> None:
    """Show which samples a step trained on, and its loss next to the losses of nearby steps.

    RUN_FOLDER is the folder of a `TorchTrainer.fit` run.
    """
    if (step is None) == (not jumps):
        raise click.UsageError("Pass `--step N`, or `--jumps`.")
    from raysgd.replay import questions

    if step is None:
        click.echo(str(questions.find_jumps(run_folder)))
    else:
        click.echo(str(questions.why(run_folder, step, program=program, recompute=recompute, config=config)))


@click.command()
@click.argument("run_folder")
@click.option("--step", type=int, required=True, help="Number of the step, from 1.")
@click.option("--program", required=True, help=_PROGRAM)
@click.option("--workers", type=click.IntRange(1, 1), default=1, help="Number of processes: only 1 is possible.")
@click.option("--pdb", "debug", is_flag=True, help="Stop in the debugger before `train_batch` of the step.")
@click.option("--save", type=click.Path(dir_okay=False), help="Write the state after the step to this file.")
@_with_config
def replay(run_folder: str, step: int, program: str, workers: int, debug: bool, save: str | None, config: Any) -> None:
    """Repeat a part of a run in one process: from the last checkpoint before a step until that step.

    RUN_FOLDER is the folder of a `TorchTrainer.fit` run. Exits with status 1 if the replay does not reproduce the run.
    """
    from raysgd.replay import replaying

    replayed = replaying.replay(run_folder, step, program=program, config=config, debug=debug)
    click.echo(str(replayed))
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
@_with_config
def bisect(run_a: str, run_b: str, program: str | None, program_b: str | None, config: Any) -> None:
    """Find the first step at which two runs differ, and what differs there.

    RUN_A and RUN_B are folders of `TorchTrainer.fit` runs.
    """
    from raysgd.replay import bisecting

    click.echo(str(bisecting.bisect(run_a, run_b, program=program, program_b=program_b, config=config)))
