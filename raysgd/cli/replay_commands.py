"""The commands that ask a run: `raysgd why`, `raysgd replay`, `raysgd bisect`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., None]

_PROGRAM = "What to run, such as `train.py:MyOperator`. Nothing in the folder of the run is run or unpickled."


def _asking(command: Command) -> Command:
    """Add `--config` to a command, and show errors without their traceback."""

    @click.option("--config", type=click.Path(dir_okay=False), help="A JSON file with entries of the config.")
    @functools.wraps(command)
    def asked(config: str | None, **arguments: Any) -> None:
        try:
            entries = None if config is None else json.loads(Path(config).read_text(encoding="utf-8"))
            command(config=entries, **arguments)
        except (OSError, ValueError, ModuleNotFoundError) as error:
            raise click.ClickException(str(error)) from error

    return asked


@click.command()
@click.argument("run_folder")
@click.option("--step", type=int, help="Number of the step, from 1.")
@click.option("--jumps", is_flag=True, help="Show the steps at which the loss left its range.")
@click.option("--recompute", is_flag=True, help="Compute the loss of each sample of the step by itself.")
@click.option("--program", help=_PROGRAM)
@_asking
def why(run_folder: str, step: int | None, jumps: bool, recompute: bool, program: str | None, config: Any) -> None:
    """Show which samples a step had, and its loss beside those around it.

    RUN_FOLDER is the folder of a run of `TorchTrainer.fit`.
    """
    if (step is None) == (not jumps):
        raise click.UsageError("Pass `--step N`, or `--jumps`.")
    from raysgd.replay import questions

    if step is None:
        click.echo(str(questions.find_jumps(run_folder)))
    else:
        click.echo(str(questions.why(run_folder, step, program=program, recompute=recompute, config=config)))
