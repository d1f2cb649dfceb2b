"""Runs scripts, each in a process forked from this one, which has imported PyTorch: that takes longer than a script.

Reads a line of JSON for each: the script, its environment, and the file for its output. Answers with its exit status.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class PageRunner:
    """The side of the tests.

    Args:
        process: It runs this module.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(self, script: Path, environment: Mapping[str, str], output: Path) -> int:
        """Runs a script in its folder; returns its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"script": str(script), "environment": dict(environment), "output": str(output)}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextmanager
def page_runner() -> Iterator[PageRunner]:
    """A process that runs scripts, until the end of the block."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield PageRunner(process)


def become(script: str, environment: Mapping[str, str], output: str) -> None:
    """Is from now on what `python SCRIPT` would be."""
    with open(os.devnull) as nothing, open(output, "w") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    folder = os.path.dirname(script)
    os.chdir(folder)
    sys.argv[:] = [script]
    sys.path[0] = folder
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    import torch._dynamo  # noqa: F401, because the first optimizer does

    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            become(**json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
