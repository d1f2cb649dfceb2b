"""Many workers: the driver's cost of a call, heartbeats and a loss, and the duration of a loss among 32.

    python examples/benchmarks/scale.py [--smoke-test] [--repetitions 5] [--sizes 100,1000]

For the first three, workers do nothing and live in a few processes (`_crowd.py`); the driver and every message are
real, and calls send and receive the messages of `train`. Plain Ray sends the same messages to the same number of
workers and gets the same answers, which is the minimum cost of a call; for heartbeats it polls all of them every two
seconds, like Ray Train's controller. The figures are the processor time of the driver's process, in all of its
threads. The cost of a loss is that of a call with a loss in its middle, minus a call of the same length without a
loss.

The last part is the benchmark of `recovery.py` with more workers, in real processes, and a small model, because all
of them have to fit on one machine. Trainers of raysgd lose a worker several times. With a spare, the time does not
include the start of a new process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _common import (
    OWN,
    Report,
    Target,
    choose_peers,
    dispatch,
    make_parser,
    ray_cluster,
    run_job,
    take_turns,
)
from _crowd import Crowd, crowd

PEERS = {"bare": "ray", "torchrun": "torch"}
CALLS_PER_TURN = 5
LOSS_CALL_S = 2.0
RAY_TRAIN_POLL_S = 2.0
RECOVERY = str(Path(__file__).with_name("recovery.py"))
WORKLOAD = "recovery_tiny"


def driver_cost(
    num_workers: int, repetitions: int, rest_s: float, ways: list[str]
) -> dict[str, dict[str, list[float]]]:
    """Return the driver's cost of many workers: ms per worker and call, share of a core, seconds for a loss."""
    names = ("call_ms", "signs_share", "loss_s")
    found: dict[str, dict[str, list[float]]] = {way: {name: [] for name in names} for way in ways}
    with ray_cluster(2), crowd(num_workers, repetitions) as workers:
        for _ in range(1 + repetitions):
            for way in ways:
                found[way]["call_ms"].append(call_ms(workers, way))
        for way in ways:
            found[way]["call_ms"].pop(0)  # the first call opens connections
            found[way]["signs_share"] = [signs_share(workers, way, rest_s)]
        found[OWN]["loss_s"] = [loss_s(workers) for _ in range(repetitions)]
    return found


def loss_s(workers: Crowd) -> float:
    """Return the driver's seconds for the failure of a worker."""
    whole_s = busy_s(lambda: workers.call(LOSS_CALL_S))
    return busy_s(lambda: workers.call_with_loss(LOSS_CALL_S)) - whole_s


def call_ms(workers: Crowd, way: str) -> float:
    """Return the driver's milliseconds per worker and call."""
    call = workers.call if way == OWN else workers.ask_all
    seconds = busy_s(lambda: [call() for _ in range(CALLS_PER_TURN)])
    return 1000 * seconds / CALLS_PER_TURN / workers.num_workers


def signs_share(workers: Crowd, way: str, rest_s: float) -> float:
    """Return the share of a core that heartbeats take during a long call."""
    if way == OWN:
        return (busy_s(lambda: workers.call(rest_s)) - busy_s(workers.call)) / rest_s
    began = time.monotonic()

    def poll() -> None:
        while time.monotonic() - began < rest_s:
            workers.ask_all()
            time.sleep(RAY_TRAIN_POLL_S)

    return busy_s(poll) / (time.monotonic() - began)


def busy_s(function: Callable[[], Any]) -> float:
    """Return the processor seconds of this process in the meantime."""
    began = time.process_time()
    function()
    return time.process_time() - began


def report_driver(report: Report, sizes: list[int], repetitions: int, rest_s: float, ways: list[str]) -> list[Target]:
    """Measure and print; return the targets."""
    targets = []
    for size in sizes:
        options = {"num_workers": size, "repetitions": repetitions, "rest_s": rest_s, "ways": ways}
        found = run_job(__file__, "driver_cost", **options)
        names = {
            "call_ms": "a worker and call, ms",
            "signs_share": "signs of life, share of a core",
            "loss_s": "a loss, s",
        }
        medians = report.figures(f"The driver with {size} workers", names, {way: [found[way]] for way in ways})
        targets.append(Target(f"{size} workers: a worker and call, ms", 0.4, True, medians[OWN, "call_ms"]))
        targets.append(Target(f"{size} workers: signs of life", 0.05, True, medians[OWN, "signs_share"]))
    return targets


def report_recovery(report: Report, size: int, repetitions: int, num_losses: int, peers: list[str]) -> list[Target]:
    """Measure the kill of one of many real workers."""
    run = functools.partial(run_job, RECOVERY, environment={"BENCH_NUM_WORKERS": str(size)}, workload=WORKLOAD)
    jobs: dict[str, Callable[[], Any]] = {
        f"{OWN}, spare": functools.partial(run, OWN, spare_workers=1, num_losses=num_losses),
        f"{OWN}, new process": functools.partial(
            run, OWN, num_losses=num_losses, recovery={"wait_for_workers": True, "resize_interval_s": None}
        ),
        **{name: functools.partial(run, name) for name in peers},
    }
    runs: Mapping[str, Any] = take_turns(jobs, repetitions, report)
    names = {"recovery_s": "kill -> end of the next step, s", "full_size_s": "-> of all workers again, s"}
    medians = report.figures(f"One of {size} workers is killed", names, runs)
    return [Target(f"{size} workers, spare: next step, s", 0.5, True, medians[f"{OWN}, spare", "recovery_s"])]


def main() -> None:
    """Run all parts and print their results."""
    parser = make_parser("Many workers", repetitions=5, peers=PEERS)
    parser.set_defaults(num_workers=32)
    parser.add_argument("--sizes", default="100,1000", help="how many workers that do nothing")
    parser.add_argument(
        "--rest-s", type=float, default=40.0, help="of the call that signs of life watch: several of their rounds"
    )
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    report = Report("scale", arguments, peers)
    sizes, size, num_losses = [int(each) for each in arguments.sizes.split(",")], arguments.num_workers, 4
    if arguments.smoke_test:
        sizes, size, num_losses, arguments.repetitions, arguments.rest_s = [20], 2, 2, 1, 1.0
    ways = [OWN, *(name for name in peers.selected if name == "bare")]
    others = [name for name in peers.selected if name != "bare"]
    targets = report_driver(report, sizes, arguments.repetitions, arguments.rest_s, ways)
    report.finish([*targets, *report_recovery(report, size, min(3, arguments.repetitions), num_losses, others)])


if __name__ == "__main__":
    dispatch({"driver_cost": driver_cost})
    main()
