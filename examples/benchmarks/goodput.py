"""Goodput: the share of the time that goes into steps that count, while workers are killed again and again.

    python examples/benchmarks/goodput.py [--smoke-test] [--seconds 300] [--every 15,60] [--peers torchrun,ray_train]

All contenders train the same model on the same samples with two workers, and lose a random one of them every so many
seconds, from the first step on. The seed is the same for all. A step also sleeps for 20 ms: that stands for a device
that computes, so that two cores are enough for the workers and for a spare.

Goodput is what the steps that count take in a run without kills, divided by what they take in the one with kills, both
from the beginning of the first step to the end of the last one. The model itself keeps the books of the samples, see
`_counted`. Samples done again are those of steps that a kill broke off, and of steps that were rolled back.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, ray_cluster, run_job, take_turns
from _counted import NUM_SAMPLES, NUM_WORKERS, SAVE_EVERY, STEPS_OF_PASS, CountedOperator, HandWritten, books
from _counted import write_state as write
from _kills import Schedule, killing, samples_begun, wall_of

from raysgd import TorchTrainer

PEERS = {"torchrun": "torch", "ray_train": "ray.train"}
GUESSED_STEP_S = 0.025
PATIENCE = 5  # times the useful seconds; a contender that takes longer has come to no end
MANY = 10**6  # retries

OWN_WAYS: dict[str, dict[str, Any]] = {
    f"{OWN}, spare": {"spare_workers": 1},
    f"{OWN}, going on": {"resize_check_s": 0.5},
    f"{OWN}, new process": {},
}
BARS = {
    (f"{OWN}, spare", 15): 0.93,
    (f"{OWN}, spare", 60): 0.97,
    (f"{OWN}, new process", 15): 0.84,
    (f"{OWN}, new process", 60): 0.95,
}
FIGURES = {
    "goodput": "goodput",
    "kills": "kills",
    "samples_lost": "samples lost",
    "samples_twice": "samples used twice",
    "again": "samples done again, of 100",
    "driver_mib_grown": "driver grew by, MiB",
    "driver_fds_grown": "by open files",
}


# ------------------------------------------------------------------------------------------------------ raysgd


def run_raysgd(num_passes: int, kills: dict[str, Any] | None, **options: Any) -> dict[str, float]:
    """A trainer whose workers are killed."""
    schedule = _schedule(kills)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        stack.enter_context(ray_cluster(NUM_WORKERS + options.get("spare_workers", 0)))
        trainer = stack.enter_context(
            TorchTrainer(
                training_operator_cls=CountedOperator,
                num_workers=NUM_WORKERS,
                config={"folder": folder},
                snapshot_every_n_steps=SAVE_EVERY,
                **options,
            )
        )
        looks = []
        with killing(folder, schedule):
            for _ in range(num_passes):
                trainer.train(max_retries=MANY)
                looks.append((_resident_mib(), len(os.listdir("/proc/self/fd"))))
            ended = time.monotonic()
        used = trainer.state_dict()["models"][0]["used"]
        return {**_told(folder, schedule, num_passes, ended, used), **growth(looks)}


def growth(looks: list[tuple[float, int]]) -> dict[str, float]:
    """Of the driver, from the end of the first quarter on: until then it fills its buffers."""
    before, after = looks[len(looks) // 4], looks[-1]
    return {"driver_mib_grown": after[0] - before[0], "driver_fds_grown": float(after[1] - before[1])}


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _schedule(kills: dict[str, Any] | None) -> Schedule | None:
    return None if kills is None else Schedule(**kills)


def _told(folder: str, schedule: Schedule | None, num_passes: int, ended: float, used: torch.Tensor) -> dict[str, Any]:
    useful = num_passes * NUM_SAMPLES
    return {
        "wall_s": wall_of(folder, ended),
        "kills": 0 if schedule is None else schedule.num_kills,
        "again": 100 * (samples_begun(folder) - useful) / useful,
        **books(used, num_passes),
    }


# ------------------------------------------------------------------------------------------------------ peers


def run_torchrun(num_passes: int, kills: dict[str, Any] | None) -> dict[str, float]:
    """Elastic `torchrun`: ends all workers after a death and starts them again from the last file."""
    schedule = _schedule(kills)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, killing(folder, schedule):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_WORKERS}"]
        command += ["--max-restarts=1000", "--monitor-interval=0.1", __file__, "--torchrun-worker", folder]
        # With a store that outlives a generation of workers, PyTorch 2.13 leads the next one to dead addresses.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run([*command, str(num_passes)], env=environment, capture_output=True, text=True, check=False)
        return _read_end(folder, schedule, num_passes, done.stderr[-2000:])


def torchrun_worker(folder: str, num_passes: int) -> None:
    """One process of `run_torchrun`, of whatever generation."""
    dist.init_process_group("gloo")
    rank, path = dist.get_rank(), Path(folder) / "last.pt"

    def save(state: Callable[[], Any]) -> None:
        if rank == 0:
            write(path, state())

    training = HandWritten(rank, folder, torch.load(path) if path.exists() else None)
    training.run(num_passes, save)
    _note_end(folder, rank, training)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the usual way


def run_ray_train(num_passes: int, kills: dict[str, Any] | None) -> dict[str, float]:
    """Ray Train with its own failure handling and checkpoints."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer as RayTrainer

    schedule = _schedule(kills)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        ray_cluster(NUM_WORKERS + 1),
        killing(folder, schedule),
    ):
        failures = FailureConfig(max_failures=-1)
        RayTrainer(
            _ray_train_loop,
            train_loop_config={"folder": folder, "num_passes": num_passes},
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
            run_config=RunConfig(storage_path=f"{folder}/runs", name="goodput", failure_config=failures),
        ).fit()
        return _read_end(folder, schedule, num_passes, "")


def _ray_train_loop(config: dict[str, Any]) -> None:
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    checkpoint, before = ray.train.get_checkpoint(), None
    if checkpoint is not None:
        with checkpoint.as_directory() as place:
            before = torch.load(Path(place) / "last.pt")

    def save(state: Callable[[], Any]) -> None:
        with tempfile.TemporaryDirectory() as place:
            if rank == 0:
                write(Path(place) / "last.pt", state())
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(place) if rank == 0 else None)

    training = HandWritten(rank, config["folder"], before)
    training.run(config["num_passes"], save)
    _note_end(config["folder"], rank, training)


def _note_end(folder: str, rank: int, training: HandWritten) -> None:
    if rank == 0:
        write(Path(folder) / "end.pt", {"at": time.monotonic(), "used": training.state()["model"]["used"]})


def _read_end(folder: str, schedule: Schedule | None, num_passes: int, log: str) -> dict[str, Any]:
    path = Path(folder) / "end.pt"
    if not path.exists():
        raise RuntimeError(f"the training did not come to its end: {log}")
    end = torch.load(path)
    return _told(folder, schedule, num_passes, end["at"], end["used"])


# ------------------------------------------------------------------------------------------------------ report


ROLES = {OWN: run_raysgd, "torchrun": run_torchrun, "ray_train": run_ray_train}


def measure(
    role: str, seconds: float, all_kills: list[dict[str, Any]], options: dict[str, Any]
) -> dict[float, dict[str, Any]]:
    """What one contender comes to with each schedule of kills, beside a shorter run in peace, without spares."""
    num_passes = max(1, round(seconds / (GUESSED_STEP_S * STEPS_OF_PASS)))
    num_calm = max(1, round(num_passes / 4))
    calm = run_job(__file__, role, num_passes=num_calm, kills=None)
    told = {}
    for kills in all_kills:
        patience_s = 120 + PATIENCE * seconds
        run = run_job(__file__, role, timeout_s=patience_s, num_passes=num_passes, kills=kills, **options)
        run["goodput"] = calm["wall_s"] / num_calm * num_passes / run["wall_s"]
        told[kills["every_s"]] = run
        print(json.dumps({"role": role, **options, **kills, **run, "load": os.getloadavg()[0]}), flush=True)
    return told


def main() -> None:
    if sys.argv[1:2] == ["--torchrun-worker"]:
        torchrun_worker(sys.argv[2], int(sys.argv[3]))
    dispatch(ROLES)
    parser = make_parser(__doc__.partition("\n")[0], repetitions=1, peers=PEERS)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long the steps take without kills")
    parser.add_argument("--every", default="15,60", help="seconds from one kill to the next, one run for each")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of victims")
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    report = Report("goodput", arguments, peers)
    all_kills = [{"every_s": float(text), "seed": arguments.seed} for text in arguments.every.split(",")]
    if arguments.smoke_test:
        arguments.seconds, all_kills = 5.0, [{"every_s": 2.0, "seed": arguments.seed, "max_kills": 1}]

    def job(role: str, options: dict[str, Any]) -> Callable[..., Any]:
        return functools.partial(measure, role, arguments.seconds, all_kills, options)

    jobs = {name: job(OWN, options) for name, options in OWN_WAYS.items()}
    jobs.update({name: job(name, {}) for name in peers.selected})
    found = take_turns(jobs, arguments.repetitions, report)
    medians: dict[tuple[str, float], float] = {}
    for every_s in (kills["every_s"] for kills in all_kills):
        runs = {name: [run[every_s] for run in measured] for name, measured in found.items()}
        told = report.figures(f"One of {NUM_WORKERS} workers is killed every {every_s:g} s", FIGURES, runs)
        medians.update({(name, every_s): value for (name, figure), value in told.items() if figure == "goodput"})
        _check(told)
    report.finish(
        [
            Target(f"{name}, one kill each {every_s} s", bar, False, medians.get((name, every_s)))
            for (name, every_s), bar in BARS.items()
        ]
    )


def _check(told: dict[tuple[str, str], float]) -> None:
    """raysgd may lose no sample, and use none twice."""
    for name in OWN_WAYS:
        lost, twice = told[name, "samples_lost"], told[name, "samples_twice"]
        if lost or twice:
            raise SystemExit(f"{name}: {lost:g} samples were lost and {twice:g} used twice")


if __name__ == "__main__":
    main()
