"""Fixtures for all tests: a clean desk before and after each one, and one small Ray cluster shared by all."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import re
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
from tests.helpers.seconds import file_of, longest_first, seconds_of_files, write

# Before anything loads a numeric library: many processes share few cores here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
for name, value in VARIABLES.items():
    os.environ.setdefault(name, value)

# Horovod does not build with Python 3.13. Without it, the files about it are left out; `make test` builds it first.
collect_ignore_glob = [] if importlib.util.find_spec("horovod") else ["**/test_horovod*.py"]

PROGRAMS = {"tests/docs/test_pages.py", "tests/examples/test_examples.py", "tests/examples/test_proofs.py"}
"""Files whose tests are whole programs, one by one."""
NUM_CPUS = 4
OBJECT_STORE_BYTES = 256 * 1024 * 1024


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-seconds", action="store_true", help="write tests/seconds.json")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files none of whose tests can be chosen by `-m`, by the marks that stand in them."""
    if not collection_path.match("test_*.py") or not config.option.markexpr:
        return None
    words = set(re.findall(r"\w+", config.option.markexpr)) - {"and", "or", "not"}
    text = collection_path.read_text(encoding="utf-8")
    always = {"integration"} & words if collection_path.stem.endswith("_integration") else set()
    sometimes = sorted({word for word in words if f"mark.{word}" in text} - always)
    for chosen in itertools.product((False, True), repeat=len(sometimes)):
        marks = dict.fromkeys(words, False) | dict.fromkeys(always, True) | dict(zip(sometimes, chosen, strict=True))
        if eval(config.option.markexpr, {"__builtins__": {}}, marks):
            return None
    return True


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark integration tests by the names of their files. Several processes begin with the files that take long."""
    for item in items:
        if item.path.stem.endswith("_integration"):
            item.add_marker(pytest.mark.integration)
    if hasattr(config, "workerinput"):
        longest_first(items, seconds_of_files())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the table of seconds if asked to."""
    if config.getoption("write_seconds"):
        stats = terminalreporter.stats
        write(report for name in ("", "passed", "failed", "skipped", "error") for report in stats.get(name, []))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Let Ctrl-C be Ctrl-C: a shell ignores it in its background, and Ray Tune keeps it for itself after a run."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, whose tests share what takes long to start; but programs share nothing."""
    from xdist.scheduler import LoadFileScheduling

    class FilesAndPrograms(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if file_of(nodeid) in PROGRAMS else super()._split_scope(nodeid)

    return FilesAndPrograms(config, log) if config.getoption("dist") == "loadfile" else None


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
    if "ray_cluster" not in request.fixturenames or os.environ.get("RAYSGD_AS_SHIPPED") == "1":
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
