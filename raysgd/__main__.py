"""Entry point of `python -m raysgd`, which does the same as the shell command `raysgd`."""

from __future__ import annotations


def run() -> None:
    """Run the command-line program `raysgd` with the arguments in `sys.argv`."""
    from raysgd.cli.main import main

    main(prog_name="raysgd")


if __name__ == "__main__":
    run()
