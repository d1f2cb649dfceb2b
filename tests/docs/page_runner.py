"""Runs scripts, each forked from this process, which has imported PyTorch and Ray: that takes longer than a script.

Reads a line of JSON for each: the script, its arguments, its environment, the folder to run in, and the file for its
output. Answers with its exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class PageRunner:
    """The side of the tests.

    Args:
        process: It runs this module.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(
        self,
        script: Path,
        environment: Mapping[str, str],
        output: Path,
        arguments: Sequence[str] = (),
        folder: Path | None = None,
    ) -> int:
        """Runs a script, in its own folder unless there is another one; returns its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {
            "script": str(script),
            "environment": dict(environment),
            "output": str(output),
            "arguments": list(arguments),
            "folder": str(folder or script.parent),
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextmanager
def page_runner(*modules: str) -> Iterator[PageRunner]:
    """A process that runs scripts, until the end of the block. It has imported these modules, beside PyTorch."""
    command = [sys.executable, __file__, *modules]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield PageRunner(process)


def become(script: str, environment: Mapping[str, str], output: str, arguments: Sequence[str], folder: str) -> None:
    """Is from now on what `python SCRIPT ARGUMENTS` would be, where a debugger is told once to go on."""
    typed, keyboard = os.pipe()
    os.write(keyboard, b"continue\n")
    os.close(keyboard)
    os.dup2(typed, 0)
    os.close(typed)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    for module in ("torch._dynamo", "ray", *sys.argv[1:]):  # the first optimizer imports PyTorch's compiler
        importlib.import_module(module)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            become(**json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
