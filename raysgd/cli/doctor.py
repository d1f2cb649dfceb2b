"""Implements `raysgd doctor`: checks that this machine and its cluster can train, and reports how to fix problems.

Each check returns one or more `CheckResult`s and changes nothing. The self test starts two workers, trains two steps,
and ends the workers.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from raysgd.core.cluster.ray_cluster import init_ray
from raysgd.core.imports import install_command
from raysgd.core.private_names import missing_names, private_names, versions_tested

Level = Literal["ok", "note", "problem"]

OLDEST = {
    # Older versions of Ray discard a thread's state after each call, and PyTorch then ends a worker process in a group.
    "ray": "2.44",
    # In older versions, a file can make `torch.load(weights_only=True)` run code (CVE-2026-24747).
    "torch": "2.10",
    "tensorflow": "2.19",
    "keras": "3.5",
    "lightning": "2.5.2",
    "transformers": "4.51",
}
"""Packages to check, with the oldest supported versions from `pyproject.toml`."""
STOLEN = {"lightning": {"2.6.2": "GHSA-w37p-236h-pfx3", "2.6.3": "GHSA-w37p-236h-pfx3"}}
"""Versions that strangers have published. They steal credentials when they are imported."""
NEEDED = ("ray",)
FRAMEWORKS = ("torch", "tensorflow")
PYTHONS = ((3, 10), (3, 13))
"""Oldest and newest Python versions with which raysgd is tested."""
NEWEST_PYTHON = (3, 14)
"""Newest Python version for which Ray and PyTorch have releases."""
_SMALLEST_SHARED_MEMORY = 256 * 2**20
_NUM_TEST_WORKERS = 2
_CONNECT_S = 5.0


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of `raysgd doctor`.

    Attributes:
        level: "ok", "note" if something may not work, or "problem" if training would fail.
        text: What the check has found.
        advice: What the user can do about a note or a problem.
    """

    level: Level
    text: str
    advice: str = ""


def examine(address: str | None = None, *, self_test: bool = True) -> Iterator[CheckResult]:
    """Run all checks, one after the other, and yield their results.

    Args:
        address: Address of a running Ray cluster. Default: the environment variable RAY_ADDRESS. Without either, a
            cluster is started on this machine, and ended after the checks.
        self_test: Whether to also train two steps on two workers.
    """
    versions = installed_versions()
    yield check_python(sys.version_info[:2])
    packages = list(check_packages(versions))
    yield from packages
    yield check_gpus()
    yield check_ports()
    yield from check_private_names()
    yield check_shared_memory()
    if "ray" not in versions:
        return
    with connected(address) as finding:
        yield finding
        if finding.level != "problem":
            yield check_cluster()
            if self_test:
                yield run_self_test(versions, packages)


# ------------------------------------------------------------------------------------------------- this machine


def installed_versions() -> dict[str, str]:
    """Return the versions of those packages in `OLDEST` that are installed."""
    versions = {}
    for package in OLDEST:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def check_python(version: tuple[int, int]) -> CheckResult:
    """Check that a Python version is supported.

    >>> check_python((3, 11)).level, check_python((3, 7)).level
    ('ok', 'problem')
    """
    text = f"Python {version[0]}.{version[1]} on {platform.system()} {platform.machine()}"
    first, last = (f"{major}.{minor}" for major, minor in PYTHONS)
    if version < PYTHONS[0] or version > NEWEST_PYTHON:
        return CheckResult(
            "problem", text, f"raysgd supports Python {first} to {last}: create an environment with one of these."
        )
    if version > PYTHONS[1]:
        return CheckResult("note", f"{text}; raysgd is tested with Python {first} to {last}")
    return CheckResult("ok", text)


def check_packages(versions: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check that Ray and a framework are installed, and that all installed packages in `OLDEST` are recent enough.

    Args:
        versions: Versions of the installed packages.
    """
    for package, version in versions.items():
        if advisory := STOLEN.get(package, {}).get(version):
            excluded = ",".join(f"!={each}" for each in STOLEN[package])
            yield CheckResult(
                "problem",
                f"{package} {version} was published by a stranger, and steals credentials on import ({advisory})",
                f'Run: pip install --upgrade "{package}>={OLDEST[package]},{excluded}". If it was imported, replace '
                "all keys and passwords that this machine could read.",
            )
        elif _numbers(version) < _numbers(OLDEST[package]):
            wanted = f"{package}>={OLDEST[package]}"
            yield CheckResult("problem", f"{package} {version} is too old", f'Run: pip install --upgrade "{wanted}"')
        else:
            yield CheckResult("ok", f"{package} {version}")
    for package in NEEDED:
        if package not in versions:
            yield CheckResult("problem", f"{package} is not installed", f"Run: pip install {package}")
    if not any(framework in versions for framework in FRAMEWORKS):
        advice = f"Run: {install_command('torch')} or {install_command('tf')}"
        yield CheckResult("problem", "neither PyTorch nor TensorFlow is installed", advice)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version as a tuple. Comparing two such tuples compares the versions.

    A pre-release counts as equal to its release.

    >>> _numbers("2.13.0+cpu"), _numbers("2.6.0rc1"), _numbers("2.6.0") < _numbers("2.16")
    ((2, 13, 0), (2, 6, 0), True)
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def check_gpus() -> CheckResult:
    """Check that PyTorch can be imported and can use the GPUs of this machine."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        return CheckResult("note", "GPUs: not checked, because PyTorch is not installed")
    except Exception as error:  # a broken installation may raise anything
        return CheckResult("problem", f"importing PyTorch fails: {_words(error)}", "Install PyTorch again: pytorch.org")
    return _finding_on_gpus(torch, has_driver=shutil.which("nvidia-smi") is not None)


def _finding_on_gpus(torch: Any, has_driver: bool) -> CheckResult:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return CheckResult("ok", f"GPUs: {len(names)} ({', '.join(sorted(set(names)))}), CUDA {torch.version.cuda}")
    if not has_driver:
        return CheckResult("note", "GPUs: none on this machine; training runs on CPUs")
    if torch.version.cuda is None:
        text = f"GPUs: an NVIDIA driver is installed, but PyTorch {torch.__version__} was built without CUDA"
        return CheckResult("note", text, "To train on GPUs, install a build of PyTorch with CUDA: pytorch.org")
    text = f"GPUs: PyTorch, built for CUDA {torch.version.cuda}, sees none, although an NVIDIA driver is installed"
    return CheckResult("note", text, "Look at `nvidia-smi`, and at the environment variable CUDA_VISIBLE_DEVICES.")


def check_ports() -> CheckResult:
    """Check that processes on this machine can connect to each other, at the address that workers use."""
    try:
        address = _own_address()
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection((address, port), timeout=_CONNECT_S):
                return CheckResult("ok", f"ports: processes reach each other at {address}, for example on port {port}")
    except OSError as error:
        text = f"ports: a process cannot connect to another one on this machine: {_words(error)}"
        return CheckResult(
            "problem", text, "Allow TCP on all ports between the machines of the cluster in the firewall."
        )


def _own_address() -> str:
    """Return the IP address that Ray uses for this machine, or 127.0.0.1 if Ray is not installed."""
    try:
        import ray
    except ImportError:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())


def check_private_names() -> Iterator[CheckResult]:
    """Check that installed packages still have the private functions and attributes that raysgd uses.

    A package is skipped if its version is not newer than the version with which raysgd was tested.
    """
    for name in ("torch", "ray"):  # import both packages, because names in compiled modules are not in the source code
        with suppress(Exception):
            importlib.import_module(name)
    newer = [row for row in private_names() if _is_newer(row.package)]
    lacking = [(row, missing) for row in newer if (missing := missing_names(row))]
    for row, missing in lacking:
        names = ", ".join(f"`{name}`" for name in missing)
        text = f"private names: {row.package} has no {names} in `{row.owner}`: {row.without}"
        tested = versions_tested().get(row.package)
        yield CheckResult("note", text, f'Run: pip install "{row.package}<={tested}"' if tested else "")
    if not lacking:
        yield CheckResult("ok", "private names: no package is too new for raysgd")


def _is_newer(package: str) -> bool:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:  # a module of Python itself, or a package under another name
        return True
    tested = versions_tested().get(package)
    return tested is None or _numbers(version) > _numbers(tested)


def check_shared_memory(path: str = "/dev/shm") -> CheckResult:
    """Check that there is enough shared memory for Ray's object store and for the processes of data loaders."""
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return CheckResult("note", f"shared memory: {path} cannot be checked: {_words(error)}")
    text = f"shared memory: {free / 2**20:.0f} MiB are free in {path}"
    if free < _SMALLEST_SHARED_MEMORY:
        return CheckResult("note", text, "Ray is slow with so little. In a container, use `docker run --shm-size=2g`.")
    return CheckResult("ok", text)


# ------------------------------------------------------------------------------------------------- the cluster


@contextmanager
def connected(address: str | None) -> Iterator[CheckResult]:
    """Connect to a Ray cluster for the duration of the block. Yield the result of the connection check.

    If this process was already connected, the connection stays open after the block.

    Args:
        address: Address of the cluster. Default: the environment variable RAY_ADDRESS, otherwise start a cluster on
            this machine.
    """
    import ray

    if ray.is_initialized():
        yield CheckResult("ok", "cluster: this process is connected already")
        return
    began = time.monotonic()
    address = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        num_cpus = max(_NUM_TEST_WORKERS, os.cpu_count() or 1)
        options.update(address="local", num_cpus=num_cpus, include_dashboard=False)
    try:
        init_ray(**options)
    except Exception as error:  # Ray may raise anything
        yield CheckResult("problem", f"cluster: {_words(error)}", _advice_on_connection(address))
        return
    what = f"connected to {address}" if address else "started one on this machine for this check"
    try:
        yield CheckResult("ok", f"cluster: {what} in {time.monotonic() - began:.1f} s")
    finally:
        ray.shutdown()


def _advice_on_connection(address: str | None) -> str:
    if address:
        return (
            "Look at `ray status` on the head node. Both machines need the same versions of Ray and Python, and the "
            "same token: if the head node has a file `~/.ray/auth_token`, copy it here and run `export "
            "RAY_AUTH_MODE=token`. This machine must reach all ports of the head node."
        )
    return "Stop processes of earlier clusters with `ray stop`, and look at the logs in /tmp/ray/session_latest/logs."


def check_cluster() -> CheckResult:
    """Report the total and the free resources of the cluster, and check that its CPUs are enough for two workers."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return finding_on_resources(len(nodes), ray.cluster_resources(), ray.available_resources())


def finding_on_resources(num_nodes: int, total: Mapping[str, float], free: Mapping[str, float]) -> CheckResult:
    """Report the resources of a cluster, and check that enough CPUs are free for two workers.

    Args:
        num_nodes: Number of nodes in the cluster.
        total: All resources of the cluster by name, as Ray reports them.
        free: The free resources of the cluster.
    """
    text = (
        f"resources: {num_nodes} node(s), {free.get('CPU', 0):g} of {total.get('CPU', 0):g} CPUs and "
        f"{free.get('GPU', 0):g} of {total.get('GPU', 0):g} GPUs are free"
    )
    if total.get("CPU", 0) < _NUM_TEST_WORKERS:
        return CheckResult("problem", text, "Two workers need two CPUs: add nodes, or start Ray with `--num-cpus=2`.")
    if free.get("CPU", 0) < _NUM_TEST_WORKERS:
        return CheckResult(
            "problem", text, "Other programs hold the CPUs: wait for them, or look at `ray list actors`."
        )
    return CheckResult("ok", text)


# ------------------------------------------------------------------------------------------------- the self test


def run_self_test(versions: Mapping[str, str], packages: Iterable[CheckResult]) -> CheckResult:
    """Train two steps on two workers, and compare the weights with those of the same training in a single process.

    Skip the test if packages are missing or too old, or if PyTorch is not installed.

    Args:
        versions: Versions of the installed packages.
        packages: Results of `check_packages`.
    """
    if any(finding.level == "problem" for finding in packages):
        return CheckResult("note", "self test: not run, because packages are too old or missing")
    if "torch" not in versions:
        return CheckResult("note", "self test: not run, because it needs PyTorch", f"Run: {install_command('torch')}")
    try:
        seconds, is_equal = _train_on_two_workers()
    except Exception as error:  # report any error as the result of the self test
        text = f"self test: training on two workers fails: {_words(error)}"
        return CheckResult(
            "problem", text, "The logs of the workers are in /tmp/ray/session_latest/logs, on their machines."
        )
    parts = ", ".join(f"{what} {value:.2f} s" for what, value in seconds.items())
    if not is_equal:
        text = f"self test: two workers do not train the same weights as one process ({parts})"
        return CheckResult("problem", text, "Versions of PyTorch may differ between the nodes: install the same one.")
    return CheckResult("ok", f"self test: two workers trained the same weights as one process: {parts}")


def _train_on_two_workers() -> tuple[dict[str, float], bool]:
    """Train on two workers and in a single process.

    Return a pair: the seconds that each part of the training on two workers took, and whether the weights are equal.
    """
    from raysgd.cli.self_test import trained_weights

    together, seconds = trained_weights(num_workers=_NUM_TEST_WORKERS)
    alone, _ = trained_weights(num_workers=1, use_local=True)
    return seconds, all(abs(one - other) < 1e-5 for one, other in zip(together, alone, strict=True))


def _words(error: BaseException) -> str:
    """Return the class name of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
