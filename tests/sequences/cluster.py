"""A Ray cluster in a process of its own: detached trainers are refused in one that their program has started."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from tests.helpers.forked import Forks, NoForks, forks, to_lend
from tests.helpers.ray_start import patient_ray


def start(found: Forks | NoForks) -> str:
    """Start Ray here, with workers that fork. Return its address."""
    with found.starting(), patient_ray():
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    return str(ray.get_runtime_context().gcs_address)


@contextmanager
def of_this_process(found: Forks | NoForks) -> Iterator[None]:
    """Have a cluster."""
    start(found)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def of_another_process() -> Iterator[None]:
    """Connect to a cluster of another process, whose trainers keep their files in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAYSGD_CACHE"] = folder
        command, environment = [sys.executable, "-m", "tests.sequences.cluster"], {**os.environ, **to_lend()}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
            assert process.stdout is not None
            address = next(line for line in process.stdout if line.startswith("address ")).split()[1]
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
            try:
                yield
            finally:
                ray.shutdown()
                process.communicate()  # its input ends, and so it does


if __name__ == "__main__":
    with forks() as lent:
        print("address", start(lent), flush=True)
        sys.stdin.read()
        ray.shutdown()
