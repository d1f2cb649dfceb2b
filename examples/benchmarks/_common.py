"""Shared by all benchmarks: arguments, isolated processes, statistics, and the report.

Every contender runs in its own processes, which are started for one measurement and then stopped. The contenders take
turns, so that a slow minute of the machine affects all of them. For this, a script starts itself again: `--job`
names, as JSON, the function to call and its arguments, and the result comes back through a file.

Figures are medians with the 95 % interval from bootstrapping. The last line of the output is the whole result as
JSON, for programs; everything before it is Markdown, for people.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

Measured = TypeVar("Measured")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # otherwise only Ray's workers have a lower priority than other processes
    "PYTHONDONTWRITEBYTECODE": "",  # otherwise each new process compiles raysgd again, unlike installed packages
}
"""Set for every contender, so that all have the same threads, network, priority and compiled modules."""

RAY_TRAIN_FAST_POLL = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"}
"""Lets Ray Train's controller look at its workers ten times a second instead of every two seconds."""

OWN = "raysgd"
MIB = 2**20
_JOB_TIMEOUT_S = 900.0
_END_TIMEOUT_S = 15.0
_BUSY_LOAD = 0.3  # per core
_PACKAGES = ("torch", "ray", "lightning", "accelerate", "tensorflow", "keras", "tf_keras")


# ------------------------------------------------------------------------------------------------------ arguments


@dataclass(frozen=True)
class Peers:
    """The contenders that take part besides raysgd, by name.

    Attributes:
        selected: Peers to run.
        absent: Requested peers that are not installed, with the package to install.
        left_out: Peers that were not requested.
    """

    selected: tuple[str, ...]
    absent: Mapping[str, str]
    left_out: tuple[str, ...]

    def status(self) -> dict[str, str]:
        """Describe the state of each peer in words."""
        return {
            **dict.fromkeys(self.selected, "run"),
            **{name: f"not installed (needs `{package}`)" for name, package in self.absent.items()},
            **dict.fromkeys(self.left_out, "not selected"),
        }


def make_parser(description: str, *, repetitions: int, peers: Mapping[str, str]) -> argparse.ArgumentParser:
    """Parse the arguments that every benchmark takes.

    Args:
        description: What is measured.
        repetitions: Default of `--repetitions`.
        peers: Name of each other contender, and the package that it needs, or the Python of its own environment.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--smoke-test", action="store_true", help="tiny sizes, no peers: only whether it runs")
    parser.add_argument("--num-workers", type=_positive, default=2, help="worker processes")
    parser.add_argument("--repetitions", type=_positive, default=repetitions, help="measurements of each figure")
    parser.add_argument(
        "--peers",
        type=lambda text: _peer_names(text, peers),
        default=None,
        help=f'"all", "none", or some of {",".join(peers)}; default: all, or none with --smoke-test',
    )
    return parser


def choose_peers(arguments: argparse.Namespace, known: Mapping[str, str]) -> Peers:
    """Return the requested peers, sorted by whether they can run here."""
    asked = arguments.peers
    if asked is None:
        asked = () if arguments.smoke_test else tuple(known)
    absent = {name: known[name] for name in asked if not _is_installed(known[name])}
    return Peers(
        selected=tuple(name for name in asked if name not in absent),
        absent=absent,
        left_out=tuple(name for name in known if name not in asked),
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"`{text}`: need 1 or more")
    return value


def _peer_names(text: str, known: Mapping[str, str]) -> tuple[str, ...]:
    if text in ("all", "none"):
        return tuple(known) if text == "all" else ()
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"`{','.join(unknown)}`: known are {', '.join(known)}, all, none")
    return names


def _is_installed(package: str) -> bool:
    if os.sep in package:
        return Path(package).exists()
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package before the dot is missing
        return False


# ------------------------------------------------------------------------------------------------------ isolation


class JobError(RuntimeError):
    """A measurement in another process failed; the message has the end of its output."""


def run_job(
    script: str,
    role: str,
    *,
    processes: int | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = _JOB_TIMEOUT_S,
    **parameters: Any,
) -> Any:
    """Call the function that `script` has for `role` in a new process, and return its value.

    Args:
        script: Path of the benchmark.
        role: Name of the function in the script's `dispatch`.
        processes: Start this many processes under torchrun, which sets the rank of each; the value of rank 0 is
            returned.
        environment: Variables in addition to `ENVIRONMENT`.
        timeout_s: Seconds after which the processes are killed.
        parameters: Arguments of the function; they must be valid in JSON.

    Raises:
        JobError: A process failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        output = Path(folder) / "result.json"
        job = {"role": role, "output": str(output), "processes": processes, "began": time.monotonic()}
        launcher = [sys.executable]
        if processes is not None:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [*launcher, script, "--job", json.dumps({**job, "parameters": parameters})]
        log = _run(command, {**os.environ, **ENVIRONMENT, **(environment or {})}, timeout_s)
        if not output.exists():
            raise JobError(f"`{role}` gave no result. It wrote:\n{log}")
        return json.loads(output.read_text())


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
    """Run a command and return the end of its output; no process of it is left running."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=dict(environment), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.write(f"\n[ended after {timeout_s:g} s]")
        finally:
            _end(process)
        log.seek(0)
        return log.read()[-4000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children; torchrun is asked to end, because its workers are in their own process groups."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def dispatch(roles: Mapping[str, Callable[..., Any]]) -> None:
    """In a process that `run_job` started, call the function and end the program. Otherwise do nothing."""
    if "--job" not in sys.argv:
        return
    job = json.loads(sys.argv[sys.argv.index("--job") + 1])
    value = roles[job["role"]](**job["parameters"])
    if int(os.environ.get("RANK", "0")) == 0:
        partial = Path(job["output"]).with_suffix(".part")
        partial.write_text(json.dumps(value))
        partial.replace(job["output"])
    sys.stdout.flush()
    sys.stderr.flush()
    if job["processes"] is not None:
        os._exit(0)  # gloo's threads may abort an interpreter that exits normally
    sys.exit(0)


def job_began() -> float:
    """Return when `run_job` started this process, on the machine's monotonic clock."""
    return float(json.loads(sys.argv[sys.argv.index("--job") + 1])["began"])


@contextlib.contextmanager
def ray_cluster(num_cpus: int, object_store_mib: int = 256) -> Iterator[None]:
    """Start a Ray cluster for this process alone."""
    os.environ.update(ENVIRONMENT)
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=object_store_mib * MIB,
    )
    try:
        yield
    finally:
        ray.shutdown()


def take_turns(
    contenders: Mapping[str, Callable[[], Any]], num_repetitions: int, report: Report
) -> dict[str, list[Any]]:
    """Run every contender, then every contender again, and so on; return the values of all runs.

    A peer that fails is noted in the report and skipped from then on.

    Raises:
        JobError: raysgd itself failed.
    """
    found: dict[str, list[Any]] = {name: [] for name in contenders}
    for _ in range(num_repetitions):
        for name in list(found):
            try:
                found[name].append(contenders[name]())
            except JobError as error:
                if name.startswith(OWN):
                    raise
                report.failed(name, error)
                del found[name]
    return found


def by_contender(found: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return the results of `take_turns` by contender, if each run of raysgd measured several contenders."""
    of_each = {name: [run[name] for run in found[OWN]] for name in found[OWN][0]}
    return {**of_each, **{name: list(runs) for name, runs in found.items() if name != OWN}}


def in_pairs(
    first: Callable[[], Measured], second: Callable[[], Measured], *, num_pairs: int, num_warm_up: int
) -> list[tuple[Measured, Measured]]:
    """Return the measurements of two functions in turn; which one goes first alternates.

    Args:
        first: One function.
        second: The other function.
        num_pairs: Number of pairs to return.
        num_warm_up: Number of pairs to measure before them.
    """
    pairs = []
    for index in range(num_warm_up + num_pairs):
        if index % 2:
            of_second, of_first = second(), first()
        else:
            of_first, of_second = first(), second()
        pairs.append((of_first, of_second))
    return pairs[num_warm_up:]


# ------------------------------------------------------------------------------------------------------ statistics


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % confidence interval, from bootstrapping.

    Attributes:
        median: Median of the samples.
        low: Lower end of the interval.
        high: Upper end of the interval.
        count: Number of samples.
        samples: The samples, in the order in which they were measured.
    """

    median: float
    low: float
    high: float
    count: int
    samples: tuple[float, ...] = ()

    def text(self, digits: int = 3) -> str:
        """Return `median [low..high]`, with this number of significant digits."""
        return f"{significant(self.median, digits)} [{significant(self.low, digits)}..{significant(self.high, digits)}]"


def estimate(samples: Sequence[float], num_resamples: int = 2000) -> Estimate:
    """Return the median of `samples` with its interval.

    Raises:
        ValueError: There are no samples.
    """
    if not samples:
        raise ValueError("`samples=[]`: need at least one measurement.")
    draw = random.Random(0).choices
    medians = sorted(statistics.median(draw(samples, k=len(samples))) for _ in range(num_resamples))
    cut = int(0.025 * num_resamples)
    return Estimate(statistics.median(samples), medians[cut], medians[-1 - cut], len(samples), tuple(samples))


def scaled(samples: Sequence[float], factor: float) -> list[float]:
    """Multiply each sample by `factor`, to convert its unit."""
    return [sample * factor for sample in samples]


def significant(value: float, digits: int = 3) -> str:
    """Format `value` with this number of significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


# ------------------------------------------------------------------------------------------------------ report


@dataclass(frozen=True)
class Target:
    """A figure to reach.

    Attributes:
        name: What is compared, and the unit.
        bound: The limit, inclusive.
        is_upper: True if the figure may not be larger than the bound, False if it may not be smaller.
        measured: The figure; None if nothing was measured.
    """

    name: str
    bound: float
    is_upper: bool
    measured: float | None

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.bound if self.is_upper else self.measured >= self.bound

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of the JSON line."""
        return {**asdict(self), "met": self.met}


class Report:
    """Prints results as they arrive, and ends with all of them in one line of JSON.

    Args:
        benchmark: Name of the benchmark.
        arguments: Arguments of the user.
        peers: The other contenders.
    """

    def __init__(self, benchmark: str, arguments: argparse.Namespace, peers: Peers) -> None:
        self._facts: dict[str, Any] = {
            "benchmark": benchmark,
            "smoke_test": arguments.smoke_test,
            "num_workers": arguments.num_workers,
            "repetitions": arguments.repetitions,
            "machine": machine(),
            "peers": peers.status(),
            "results": [],
            "targets": [],
        }
        print(f"# {benchmark}\n\n{_machine_line(self._facts['machine'])}\n", flush=True)
        for name, status in self._facts["peers"].items():
            if status != "run":
                print(f"* {name}: {status}", flush=True)

    def failed(self, peer: str, error: JobError) -> None:
        """Note that a peer could not be measured."""
        self._facts["peers"][peer] = "failed"
        print(f"\n* {peer}: failed\n\n```\n{error}\n```", flush=True)

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table."""
        print(f"\n## {title}\n\n{markdown_table(headers, rows)}", flush=True)

    def result(self, contender: str, figure: str, value: Estimate | float, **labels: Any) -> None:
        """Add a figure to the JSON line; the figure's name ends in its unit."""
        amount = asdict(value) if isinstance(value, Estimate) else value
        self._facts["results"].append({"contender": contender, "figure": figure, **labels, "value": amount})

    def figures(
        self, title: str, names: Mapping[str, str], runs: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[tuple[str, str], float]:
        """Print a table of figures and add them to the results; return their medians, by contender and figure.

        Args:
            title: Title of the table.
            names: The figures, and the names of their columns.
            runs: The values that each contender measured in each run: for a figure one sample, a list of samples, or
                none.
        """
        rows, medians = [], {}
        for contender, found in runs.items():
            cells = []
            for figure in names:
                samples = [sample for run in found if figure in run for sample in _samples(run[figure])]
                if not samples:
                    cells.append("-")
                    continue
                value = estimate(samples)
                self.result(contender, figure, value)
                medians[contender, figure] = value.median
                cells.append(value.text())
            rows.append([contender, *cells])
        self.table(title, ["contender", *names.values()], rows)
        return medians

    def pairs(self, title: str, name: str, runs: Sequence[Mapping[str, Any]]) -> Estimate:
        """Print the ratio of values that were measured in pairs, add it to the results, and return it.

        Args:
            title: Title of the table.
            name: The two values of the ratio.
            runs: Runs of raysgd; `ratio` has the ratio of each pair.
        """
        ratio = estimate([each for run in runs for each in run["ratio"]])
        self.result(OWN, "paired_ratio", ratio)
        self.table(title, [name, "pairs"], [[ratio.text(4), str(ratio.count)]])
        return ratio

    def finish(self, targets: Sequence[Target]) -> None:
        """Print the targets and the JSON line. A smoke test is not compared with targets."""
        if self._facts["smoke_test"]:
            targets = [replace(target, measured=None) for target in targets]
        rows = [
            [
                target.name,
                f"{'<=' if target.is_upper else '>='} {target.bound:g}",
                "-" if target.measured is None else significant(target.measured),
                {None: "not measured", True: "yes", False: "no"}[target.met],
            ]
            for target in targets
        ]
        self.table("Targets", ["figure", "target", "measured", "met"], rows)
        self._facts["targets"] = [target.as_dict() for target in targets]
        self._facts["machine"]["load_after"] = os.getloadavg()[0]
        print("\n" + json.dumps(self._facts), flush=True)


def _samples(measured: Any) -> Sequence[float]:
    return measured if isinstance(measured, list) else [measured]


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table whose columns are as wide as their contents."""
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def machine() -> dict[str, Any]:
    """Describe the machine, and how busy it was before the benchmark."""
    return {
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "versions": {
            name: _version(name) for name in ("torch", "ray", "lightning", "accelerate", "tensorflow", "keras")
        },
        "load_before": os.getloadavg()[0],
    }


def _machine_line(facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    hardware = f"{facts['num_cores']} cores of {facts['cpu']}, {facts['memory_gib']} GiB"
    busy = facts["load_before"] > _BUSY_LOAD * facts["num_cores"]
    return (
        f"{hardware}; Python {facts['python']}, {versions}; one thread for each process, gloo over loopback; "
        f"load {facts['load_before']:.2f}"
        + (" - **other programs are running: do not trust these figures**" if busy else "")
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
