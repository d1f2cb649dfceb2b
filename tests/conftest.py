"""Fixtures for all tests: a clean desk before and after each one, and one small Ray cluster shared by all."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import FOR_TENSORFLOW, Forks, NoForks, forks
from tests.helpers.hygiene import RaySurroundings, Surroundings
from tests.helpers.ray_start import VARIABLES, patient_ray
from tests.helpers.s3_server import S3Server

# Before anything loads a numeric library: many processes share few cores here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
for name, value in VARIABLES.items():
    os.environ.setdefault(name, value)

# Horovod does not build with Python 3.13. Without it, the files about it are left out; `make test` builds it first.
collect_ignore_glob = [] if importlib.util.find_spec("horovod") else ["**/test_horovod*.py"]

TENSORFLOW = "tests/tf/"
NUM_CPUS = 4
OBJECT_STORE_BYTES = 256 * 1024 * 1024


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """When several processes share the tests, begin with the files that take long, so that all end at about once."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if {"integration", "program"} & {mark.name for mark in item.iter_markers()}}
        items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Let Ctrl-C be Ctrl-C: a shell ignores it in its background, and Ray Tune keeps it for itself after a run."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, and all of TensorFlow to one, so that the others need not import it."""
    from xdist.scheduler import LoadFileScheduling

    class FilesAndTensorFlow(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TENSORFLOW if nodeid.startswith(TENSORFLOW) else super()._split_scope(nodeid)

    return FilesAndTensorFlow(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def private_temp_dir() -> Iterator[Path]:
    """Keep temporary files of this run, also of its child processes, apart from those of anyone else."""
    # pytest's own folders stay where they are always found, for a look after a failure.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    before = os.environ.get("TMPDIR")
    path = Path(tempfile.mkdtemp(prefix="t-"))  # short: Ray puts sockets into it, whose paths have a limit
    os.environ["TMPDIR"], tempfile.tempdir = str(path), None
    yield path
    os.environ.pop("TMPDIR")
    if before is not None:
        os.environ["TMPDIR"] = before
    tempfile.tempdir = None
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def worker_forks(private_temp_dir: Path) -> Iterator[Forks | NoForks]:
    """What forks the workers of the cluster that all tests share."""
    with forks() as found:
        yield found


@pytest.fixture(scope="session")
def workers_have_tensorflow(worker_forks: Forks | NoForks) -> None:
    """Workers that start from now on need not import it."""
    worker_forks.preload(FOR_TENSORFLOW)


@pytest.fixture(scope="session")
def ray_cluster(worker_forks: Forks | NoForks) -> Iterator[None]:
    """Connect to a Ray cluster of one node with four CPUs, started when the first test asks for it."""
    import ray

    with worker_forks.starting(), patient_ray():
        ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=OBJECT_STORE_BYTES,
        )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def survivors_wait_for_slow_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a busy machine a worker may take longer to start than survivors of a loss wait for it, who go on without."""
    if "ray_cluster" not in request.fixturenames:
        yield
        return
    from tests.helpers.patience import awaiting_new_workers

    with awaiting_new_workers():
        yield


@pytest.fixture(scope="session")
def s3_server(private_temp_dir: Path) -> Iterator[S3Server]:
    """A server that speaks S3, with an empty bucket, shared by all tests: let each have a folder of its own."""
    server = S3Server.started()
    yield server
    server.kill()


@pytest.fixture
def patient() -> Iterator[None]:
    """However late a rank comes to an exception that another one had, it is waited for, and the group goes on.

    For tests that share a trainer, in which all ranks raise or end without the others.
    """
    from tests.helpers.patience import hearing_all_ranks

    with hearing_all_ranks():
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest, private_temp_dir: Path) -> Iterator[None]:
    """Fail a test that leaves variables, threads, process groups, sessions, files, actors or reservations behind."""
    before = Surroundings.now()
    ray_before = RaySurroundings.now() if "ray_cluster" in request.fixturenames else None
    yield
    leaks = before.leaks() + (ray_before.leaks() if ray_before is not None else [])
    if leaks:
        pytest.fail("the test left behind:\n" + "\n".join(f"- {leak}" for leak in leaks), pytrace=False)
