"""`python -m raysgd.compat SCRIPT [ARGUMENT ...]` runs a program written for `ray.util.sgd` without changes to it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import click

from raysgd.compat.aliases import install


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: Path, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with its imports of `ray.util.sgd` redirected to raysgd."""
    sys.argv[:] = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    install()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ImportError as error:
        if (error.name or "").startswith(("ray.train", "ray.air", "ray.ml")):
            advice = "If the program was written for Ray 1.x or 2.0 to 2.9, rewrite it"
            error.msg += f". {advice}: `raysgd migrate --ray-train --write`"
        raise


if __name__ == "__main__":
    run(prog_name="python -m raysgd.compat")
