"""Plays `srun` and `scontrol` on one machine: each task of a step is a process here, as it is on its node under Slurm.

Run as `python -m tests.examples.slurm srun --nodes=1 ...`. What Slurm would refuse ends with status 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType


def srun(arguments: Sequence[str]) -> int:
    """Runs a command once on each node of a list, and waits for all; ends them when it is ended."""
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--nodelist", required=True)
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    step = parser.parse_args(arguments)
    nodes = step.nodelist.split(",")
    if not len(nodes) == step.nodes == step.ntasks or not set(nodes) <= set(_allocated()):
        parser.error(f"cannot run {step.ntasks} tasks on {step.nodes} nodes out of {step.nodelist}")
    tasks = [subprocess.Popen(step.command, env={**os.environ, "SLURMD_NODENAME": node}) for node in nodes]

    def end(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.terminate()

    signal.signal(signal.SIGTERM, end)
    return max(task.wait() for task in tasks)


def scontrol(arguments: Sequence[str]) -> int:
    """Prints the nodes of a list, one in each line, or says that the job was requeued."""
    if list(arguments) == ["requeue", os.environ["SLURM_JOB_ID"]]:
        print("requeued job", arguments[1], flush=True)
        return 0
    if list(arguments) != ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]:
        print(f"scontrol: error: unknown {arguments}", file=sys.stderr)
        return 2
    print(*_allocated(), sep="\n")
    return 0


def _allocated() -> list[str]:
    return os.environ["SLURM_JOB_NODELIST"].split(",")


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
