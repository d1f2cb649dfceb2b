"""Entry point of `python -m raysgd`, which runs the command `raysgd`."""

from __future__ import annotations


def run() -> None:
    """Run the command."""
    from raysgd.cli.main import main

    main(prog_name="raysgd")


if __name__ == "__main__":
    run()
