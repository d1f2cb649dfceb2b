"""The commands `raysgd list`, `raysgd attach` and `raysgd stop`.

They are for detached trainers: trainers in a Ray actor, which outlive the program that created them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import click

from raysgd.core.engine.placement import init_ray

Command = Callable[..., None]


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


@click.command("list")
@_in_cluster
def list_trainers() -> None:
    """List the detached trainers."""
    from raysgd.detached import cluster

    trainers = cluster.detached_trainers()
    click.echo("\n".join(map(str, trainers)) if trainers else "There are no detached trainers.")


@click.command()
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


@click.command()
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
