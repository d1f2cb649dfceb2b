"""`python -m raysgd.compat [--ray-train] SCRIPT [ARGUMENT ...]`: runs an old program unchanged."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import click

from raysgd.compat.installing import install


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--ray-train", is_flag=True, help="`ray.train` and `ray.air` mean the old library too.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(ray_train: bool, script: Path, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT, whose imports of `ray.util.sgd` lead to raysgd."""
    folder = script.resolve().parent
    sys.argv[:] = [str(script), *arguments]
    sys.path[0] = str(folder)
    install(ray_train, folder)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ImportError as error:
        if not ray_train and (error.name or "").startswith(("ray.train", "ray.air")):
            error.msg += ". If the program was written for Ray 1.x or 2.0 to 2.9, pass `--ray-train`"
        raise


if __name__ == "__main__":
    run(prog_name="python -m raysgd.compat")
