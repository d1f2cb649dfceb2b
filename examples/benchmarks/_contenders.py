"""The contenders of `goodput`: each trains a number of epochs, with or without kills, and reports the result."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import MIB, ray_cluster
from _counted import (
    BATCH_SIZE,
    NUM_SAMPLES,
    NUM_WORKERS,
    SAVE_EVERY,
    STEPS_OF_PASS,
    Counted,
    CountedOperator,
    HandWritten,
    books,
    loss_of,
    make_data,
    optimizer_of,
)
from _counted import write_state as write
from _kills import Schedule, Trail, kill, killing, nodes, samples_begun, wall_of
from _torchft import ReplicaGroup, run_groups

MANY = 10**6  # retries

Kills = dict[str, Any] | None
"""Arguments of a `Schedule`; None for none."""


# ------------------------------------------------------------------------------------------------------ raysgd


def run_raysgd(
    num_passes: int,
    kills: Kills,
    patience_s: float = 0.0,
    num_nodes: int = 0,
    split_batches: bool = False,
    recovery: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Run a trainer whose workers are killed, or, with `num_nodes`, whose nodes are drained (one worker per node).

    If this takes longer than `patience_s`, return the progress so far.
    """
    from raysgd import Recovery, TorchTrainer

    if patience_s:
        faulthandler.dump_traceback_later(patience_s)
    schedule = _schedule(kills)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        take = _cluster(stack, num_nodes, NUM_WORKERS + options.get("spare_workers", 0))
        trainer = stack.enter_context(
            TorchTrainer(
                training_operator_cls=CountedOperator,
                num_workers=num_nodes or NUM_WORKERS,
                config={"folder": folder, "batch_size": BATCH_SIZE * (NUM_WORKERS if split_batches else 1)},
                split_batches=split_batches,
                recovery=Recovery(snapshot_every_n_steps=SAVE_EVERY, **recovery or {}),
                **options,
            )
        )
        looks = []
        with killing(folder, schedule, take):
            for _ in range(num_passes):
                trainer.train(max_retries=MANY)
                looks.append(look())
            ended = time.monotonic()
        used = trainer.state_dict()["models"][0]["used"]
        return {**_told(folder, schedule, num_passes, ended, used), **growth(looks)}


def _cluster(stack: ExitStack, num_nodes: int, num_cpus: int) -> Callable[[int], None]:
    """Start a cluster; return the function that removes a worker."""
    if num_nodes:
        return stack.enter_context(nodes(num_nodes)).drain
    stack.enter_context(ray_cluster(num_cpus))
    return kill


Look = tuple[float, int, float]
"""Of the driver: its memory in MiB, its open files, and what has been used of its object store, in MiB."""


def look() -> Look:
    """Return the current memory of the driver."""
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return memory / MIB, len(os.listdir("/proc/self/fd")), sum(map(_store_mib, _raylets()))


def growth(looks: list[Look]) -> dict[str, float]:
    """Track the memory of the driver from the end of the first quarter on, because buffers fill up until then."""
    before, after = looks[len(looks) // 4], looks[-1]
    names = ("driver_mib_grown", "driver_fds_grown", "store_mib_grown")
    return {name: float(last - first) for name, first, last in zip(names, before, after, strict=True)}


def _store_mib(raylet: str) -> float:
    """Return the used bytes of the file that an object store lies in."""
    opened = [path for path in Path(f"/proc/{raylet}/fd").iterdir() if "/plasma" in os.readlink(path)]
    return sum(path.stat().st_blocks for path in opened) * 512 / MIB


def _raylets() -> list[str]:
    """Return the children of this process that hold an object store."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in children if Path(f"/proc/{pid}/comm").read_text().startswith("raylet")]


def _schedule(kills: Kills) -> Schedule | None:
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


def run_torchrun(num_passes: int, kills: Kills) -> dict[str, float]:
    """Run elastic `torchrun`: it stops all workers after a death and restarts them from the last file."""
    schedule = _schedule(kills)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, killing(folder, schedule):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_WORKERS}"]
        command += ["--max-restarts=1000", "--monitor-interval=0.1", __file__, folder, str(num_passes)]
        # With a store that outlives a generation of workers, PyTorch 2.13 gives the next generation dead addresses.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return _read_end(folder, schedule, num_passes, done.stderr[-2000:])


def torchrun_worker(folder: str, num_passes: int) -> None:
    """Run one process of `run_torchrun`, of any generation."""
    dist.init_process_group("gloo")
    rank, path = dist.get_rank(), Path(folder) / "last.pt"

    def save(state: Callable[[], Any]) -> None:
        if rank == 0:
            write(path, state())

    training = HandWritten(rank, folder, torch.load(path) if path.exists() else None)
    training.run(num_passes, save)
    _note_end(folder, rank, training.used)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that exits normally


def run_torchft(num_passes: int, kills: Kills, peer: str = "torchft") -> dict[str, float]:
    """Run torchft for a number of steps, with any number of workers; lost samples are not made up for."""
    schedule = _schedule(kills)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, killing(folder, schedule):
        log = run_groups(peer, NUM_WORKERS, [__file__, "torchft", peer, folder, str(num_passes)])
        return _read_end(folder, schedule, num_passes, log)


def torchft_worker(peer: str, folder: str, num_passes: int) -> None:
    """Run one process of `run_torchft`, of any generation."""
    counted = Counted()
    group = ReplicaGroup(peer, counted, optimizer_of(counted), folder, NUM_WORKERS)
    trail = Trail(folder)
    for batch in group.batches(make_data(), BATCH_SIZE):
        trail.begin(len(batch[0]))
        if group.step(lambda: loss_of(counted, batch)):  # noqa: B023 - called at once
            counted.count()
        if group.num_steps >= num_passes * STEPS_OF_PASS:
            _note_end(folder, 0, counted.used)
            os._exit(0)


def run_ray_train(num_passes: int, kills: Kills, num_nodes: int = 0) -> dict[str, float]:
    """Run Ray Train with its own failure handling and checkpoints: every 50 steps, and before a node leaves."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer as RayTrainer

    schedule = _schedule(kills)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        stack.enter_context(killing(folder, schedule, _cluster(stack, num_nodes, NUM_WORKERS + 1)))
        failures = FailureConfig(max_failures=-1)
        RayTrainer(
            _ray_train_loop,
            train_loop_config={"folder": folder, "num_passes": num_passes, "watches": num_nodes > 0},
            scaling_config=ScalingConfig(num_workers=num_nodes or NUM_WORKERS),
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

    has_saved = False

    def is_preempted() -> bool:
        nonlocal has_saved
        before, has_saved = has_saved, ray.train.get_preemption_info() is not None
        return has_saved and not before

    training = HandWritten(rank, config["folder"], before)
    training.run(config["num_passes"], save, is_preempted if config["watches"] else lambda: False)
    _note_end(config["folder"], rank, training.used)


def _note_end(folder: str, rank: int, used: torch.Tensor) -> None:
    if rank == 0:
        write(Path(folder) / "end.pt", {"at": time.monotonic(), "used": used.detach()})


def _read_end(folder: str, schedule: Schedule | None, num_passes: int, log: str) -> dict[str, Any]:
    path = Path(folder) / "end.pt"
    if not path.exists():
        raise RuntimeError(f"the training did not come to its end: {log}")
    end = torch.load(path)
    return _told(folder, schedule, num_passes, end["at"], end["used"])


if __name__ == "__main__":
    if sys.argv[1] == "torchft":
        torchft_worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    torchrun_worker(sys.argv[1], int(sys.argv[2]))
