"""Recovery: from the SIGKILL of one of two workers to the end of the next training step, and repeated batches.

    python examples/benchmarks/recovery.py [--smoke-test] [--repetitions 5] [--peers torchrun,torchft,ray_train]

Every repetition is a separate program, and the contenders take turns. Each worker records when each of its steps
began and ended, on the machine's monotonic clock, and with how many workers; the victim records when it dies. All
contenders that save their state do so after each epoch of 30 batches, and lose a worker 15 batches into the third
epoch. The results are the first step that began after the death, and the first step with the original number of
workers. torchft discards the step in which a worker dies, and continues with the next batches: those of the discarded
step, and of the step in which a new worker gets its state, are counted as lost. A spare that validates does so during
the whole epoch, on batches as large as the training batches, and leaves after its current batch.

The last part measures the steps of epochs with `snapshot_every_n_steps`. The cost of a snapshot is how much longer
the steps in the first half of the time to the next snapshot take than those in the second half: both halves see the
same noise of the machine.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import (
    OWN,
    RAY_TRAIN_FAST_POLL,
    Report,
    Target,
    choose_peers,
    dispatch,
    estimate,
    make_parser,
    ray_cluster,
    run_job,
    scaled,
    take_turns,
)
from _torchft import PYTHON as TORCHFT
from _torchft import ReplicaGroup, run_groups
from _workloads import STATES, HandWritten, StockOperator, config_of, sgd
from torch.utils.data import ConcatDataset, DataLoader

from raysgd import Recovery

PEERS = {
    "bare": "ray",
    "torchrun": "torch",
    "torchft": str(TORCHFT),
    "torchft_tuned": str(TORCHFT),
    "ray_train": "ray.train",
    "ray_train_fast_poll": "ray.train",
}
NUM_WORKERS = int(os.environ.get("BENCH_NUM_WORKERS", "2"))  # `scale.py` has more
VICTIM = 1
EPOCH = 30  # batches; contenders that save do so after each epoch
ROUND = NUM_BATCHES = 3 * EPOCH
KILLED_AFTER = 75
LONG_EPOCH = 300  # batches: enough time to grow back inside the epoch

OWN_WAYS: dict[str, dict[str, Any]] = {
    f"{OWN}, spare": {"spare_workers": 1},
    f"{OWN}, spare that validates": {"spare_workers": 1, "validates": True},
    f"{OWN}, going on": {"split_batches": True},
    f"{OWN}, new process": {"recovery": {"wait_for_workers": True, "resize_interval_s": None}},
    f"{OWN}, restart": {"recovery": {"in_place": False}},
}
_FIGURES = {
    "recovery_s": "kill -> end of the next step, s",
    "full_size_s": "-> of all workers again, s",
    "batches_again": "batches done again",
    "batches_lost": "batches of a worker lost",
}


# ------------------------------------------------------------------------------------------------------ stamps


class Stamps:
    """A worker's records of its steps, in a file that outlives it.

    Args:
        folder: Folder with the files of all workers.
        num_losses: Number of deaths of a worker, each `ROUND` batches after the previous death.
    """

    def __init__(self, folder: str, num_losses: int = 1) -> None:
        self._folder = Path(folder)
        self._fatal = range(KILLED_AFTER, KILLED_AFTER + num_losses * ROUND, ROUND)
        self._file = open(self._folder / f"steps-{os.getpid()}", "a")  # noqa: SIM115 - as long as the process lives
        self._began = 0.0

    def begin(self, batch: int, rank: int) -> None:
        """Record that batch number `batch` begins. The victim dies here the first time that a death is planned."""
        killed = self._folder / f"killed-{batch}"
        if rank == VICTIM and batch in self._fatal and not killed.exists():
            killed.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        self._began = time.monotonic()

    def end(self, batch: int, num_workers: int = NUM_WORKERS) -> None:
        """Record that its optimizer step, of this many workers, has ended."""
        self._note(batch, num_workers)

    def lose(self, batch: int) -> None:
        """Record that this worker's part of the batch is in no weights and is not repeated."""
        self._note(batch, 0)

    def _note(self, batch: int, num_workers: int) -> None:
        self._file.write(json.dumps([batch, self._began, time.monotonic(), num_workers]) + "\n")
        self._file.flush()


def read_stamps(folder: str, num_losses: int = 1) -> dict[str, list[float]]:
    """Return the figures, with a sample for each loss.

    Raises:
        RuntimeError: No worker died, no worker continued, or fewer workers than before continued.
    """
    lines = [line for path in Path(folder).glob("steps-*") for line in path.read_text().splitlines()]
    steps = [json.loads(line) for line in lines]
    figures: dict[str, list[float]] = {name: [] for name in _FIGURES}
    for last in range(KILLED_AFTER, KILLED_AFTER + num_losses * ROUND, ROUND):
        killed = Path(folder) / f"killed-{last}"
        if not killed.exists():
            raise RuntimeError(f"no worker came to batch {last}; {len(steps)} steps were noted")
        at = float(killed.read_text())
        later = [  # includes a step in which the others wait until they detect the death
            (ended, batch, num_workers)
            for batch, began, ended, num_workers in steps
            if num_workers and (began > at or (ended > at and num_workers < NUM_WORKERS))
        ]
        if not later:
            raise RuntimeError(f"no step began after the kill; {len(steps)} steps were noted before")
        full = [ended for ended, _, num_workers in later if num_workers == NUM_WORKERS]
        if not full:
            raise RuntimeError(f"none of the {len(later)} steps after the kill was one of {NUM_WORKERS} workers")
        ended, batch, _ = min(later)
        num_lost = sum(ended > at for _, _, ended, num_workers in steps if not num_workers)
        for name, value in zip(_FIGURES, (ended - at, min(full) - at, last - batch, num_lost), strict=True):
            figures[name].append(value)
    return figures


# ------------------------------------------------------------------------------------------------------ raysgd


class NotingOperator(StockOperator):
    """The stock loop; overrides the highest and the lowest method."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.stamps = Stamps(config["stamps"], config["num_losses"])

    def prepare_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        if self.model.training:
            self.stamps.begin(self.global_step, self.world_rank)
        return super().prepare_batch(batch)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.global_step:  # a new process takes a warm-up step by itself, before it joins
            self.stamps.end(self.global_step, self.world_size)


def run_raysgd(
    workload: str,
    num_losses: int = 1,
    validates: bool = False,
    recovery: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, list[float]]:
    """Run a trainer that loses workers inside its epochs. Spares, if there are any, are ready by then, or validate."""
    from raysgd import TorchTrainer

    num_spares = options.get("spare_workers", 0)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ray_cluster(NUM_WORKERS + num_spares):
        config = config_of(STATES[workload], NUM_WORKERS, stamps=folder, num_losses=num_losses)
        with TorchTrainer(
            training_operator_cls=NotingOperator,
            config=config,
            num_workers=NUM_WORKERS,
            recovery=Recovery(**recovery or {}),
            **options,
        ) as trainer:
            for _ in range(num_losses):
                trainer.train(num_steps=EPOCH)
                _await_spares(trainer, num_spares)
                trainer.train(num_steps=EPOCH)
                handle = trainer.validate(dataset=_validation_data, blocking=False) if validates else None
                trainer.train(num_steps=LONG_EPOCH if "split_batches" in options else EPOCH)
                if handle is not None and handle.done():
                    raise RuntimeError("the validation was over before the failure, or failed")
        return read_stamps(folder, num_losses)


def _validation_data(config: dict[str, Any], batch_size: int) -> DataLoader[Any]:
    workload = STATES[config["workload"]]
    return DataLoader(ConcatDataset([workload.dataset(1)] * 1000), workload.batch_size)


def _await_spares(trainer: Any, num_spares: int) -> None:
    deadline = time.monotonic() + 120
    while trainer.worker_group.standby.num_ready < num_spares:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{num_spares} spare workers were not ready within 120 s")
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------------ by hand


class Training:
    """The loop of all other contenders, from a state that may have been saved.

    Args:
        workload: Workload to train.
        rank: Rank of this process.
        folder: Folder for stamps.
        state: A value that `state` returned, in any process; None for the beginning.
    """

    def __init__(self, workload: str, rank: int, folder: str, state: Any = None) -> None:
        self._rank = rank
        self._hand = HandWritten(STATES[workload], rank, NUM_WORKERS)
        self._stamps = Stamps(folder)
        self.batch = 0
        if state is not None:
            self._hand.model.load_state_dict(state["model"])
            self._hand.optimizer.load_state_dict(state["optimizer"])
            self.batch = state["batch"]

    def run(self, last: int, after: Callable[[int], None] = lambda batch: None) -> None:
        """Train up to batch number `last`; call `after` after each batch with the number of batches."""
        hand = self._hand
        hand.sampler.set_epoch(0)
        for number, (features, target) in enumerate(hand.loader):
            if number < self.batch:
                continue
            if number >= last:
                return
            self._stamps.begin(number, self._rank)
            loss = hand.criterion(hand.model(features), target)
            hand.optimizer.zero_grad()
            loss.backward()
            hand.optimizer.step()
            self._stamps.end(number)
            self.batch = number + 1
            after(self.batch)

    def state(self) -> dict[str, Any]:
        """Return a copy of the state that is needed to continue."""
        return {
            "model": self._hand.model.state_dict(),
            "optimizer": self._hand.optimizer.state_dict(),
            "batch": self.batch,
        }


def _save(path: Path, state: Any) -> None:
    partial = path.with_suffix(".part")
    torch.save(state, partial)
    partial.replace(path)


def run_torchrun(workload: str) -> dict[str, list[float]]:
    """Run elastic `torchrun`: it stops all workers after a death and restarts them."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_WORKERS}"]
        command += ["--max-restarts=3", __file__, "--torchrun-worker", workload, folder]
        # With a store that outlives a generation of workers, PyTorch 2.13 gives the next generation dead addresses.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        try:
            return read_stamps(folder)
        except RuntimeError as error:
            raise RuntimeError(done.stderr[-2000:]) from error


def torchrun_worker(workload: str, folder: str) -> None:
    """Run one process of `run_torchrun`, of any generation."""
    dist.init_process_group("gloo")
    rank, path = dist.get_rank(), Path(folder) / "last.pt"
    training = Training(workload, rank, folder, torch.load(path, weights_only=False) if path.exists() else None)

    def after(batch: int) -> None:
        if batch % EPOCH == 0 and rank == 0:
            _save(path, training.state())

    training.run(NUM_BATCHES, after)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that exits normally


def run_torchft(workload: str, peer: str = "torchft") -> dict[str, list[float]]:
    """Run torchft: survivors discard a step and continue; the dead worker is started again at once."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        log = run_groups(peer, NUM_WORKERS, [__file__, "--torchft-worker", peer, workload, folder])
        try:
            return read_stamps(folder)
        except RuntimeError as error:
            raise RuntimeError(log) from error


def torchft_worker(peer: str, workload: str, folder: str) -> None:
    """Run one process of `run_torchft`, of any generation."""
    model, data = STATES[workload].model(), STATES[workload].dataset(NUM_WORKERS)
    group = ReplicaGroup(peer, model, sgd(model), folder, NUM_WORKERS)
    criterion, stamps = torch.nn.CrossEntropyLoss(), Stamps(folder)
    for features, target in group.batches(data, STATES[workload].batch_size):
        stamps.begin(group.num_steps, group.rank)
        is_in_weights = group.step(lambda: criterion(model(features), target))  # noqa: B023 - called at once
        if is_in_weights:
            stamps.end(group.num_steps - 1, group.num_participants)
        if not (is_in_weights and group.took_part):
            stamps.lose(group.num_steps)
        if group.num_steps >= KILLED_AFTER + LONG_EPOCH // 2:
            os._exit(0)


def run_bare(workload: str) -> dict[str, list[float]]:
    """Run plain actors: the driver has a copy of the state, kills both after a death and starts two new actors."""
    import ray

    class Worker:
        def open(self) -> int:
            self.store = dist.TCPStore("127.0.0.1", 0, NUM_WORKERS, is_master=True, wait_for_workers=False)
            return int(self.store.port)

        def join(self, rank: int, port: int, folder: str, state: Any) -> None:
            if rank:
                self.store = dist.TCPStore("127.0.0.1", port, NUM_WORKERS, is_master=False)
            dist.init_process_group("gloo", store=self.store, rank=rank, world_size=NUM_WORKERS)
            self.training = Training(workload, rank, folder, state)

        def run(self, last: int) -> Any:
            self.training.run(last)
            return self.training.state()

    def start(folder: str, state: Any) -> list[Any]:
        workers = [ray.remote(num_cpus=1)(Worker).remote() for _ in range(NUM_WORKERS)]
        port = ray.get(workers[0].open.remote())
        ray.get([worker.join.remote(rank, port, folder, state) for rank, worker in enumerate(workers)])
        return workers

    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ray_cluster(NUM_WORKERS):
        workers = start(folder, None)
        state: Any = None
        for last in range(EPOCH, NUM_BATCHES + 1, EPOCH):
            try:
                states = ray.get([worker.run.remote(last) for worker in workers])
            except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError):  # dead, or cut off from the dead one
                for worker in workers:
                    ray.kill(worker)
                workers = start(folder, state)
                states = ray.get([worker.run.remote(last) for worker in workers])
            state = states[0]
        return read_stamps(folder)


def run_ray_train(workload: str) -> dict[str, list[float]]:
    """Run Ray Train with its own failure handling and checkpoints."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer as RayTrainer

    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ray_cluster(NUM_WORKERS + 1):
        RayTrainer(
            _ray_train_loop,
            train_loop_config={"workload": workload, "folder": folder},
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
            run_config=RunConfig(
                storage_path=f"{folder}/runs", name="recovery", failure_config=FailureConfig(max_failures=3)
            ),
        ).fit()
        return read_stamps(folder)


def _ray_train_loop(config: dict[str, Any]) -> None:
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    checkpoint, state = ray.train.get_checkpoint(), None
    if checkpoint is not None:
        with checkpoint.as_directory() as place:
            state = torch.load(Path(place) / "last.pt", weights_only=False)
    training = Training(config["workload"], rank, config["folder"], state)

    def after(batch: int) -> None:
        if batch % EPOCH:
            return
        with tempfile.TemporaryDirectory() as place:
            if rank == 0:
                _save(Path(place) / "last.pt", training.state())
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(place) if rank == 0 else None)

    training.run(NUM_BATCHES, after)


# ------------------------------------------------------------------------------------------------------ snapshots


@dataclass(frozen=True)
class SnapshotCase:
    """A state, and how often to copy it.

    Attributes:
        workload: Workload that has the state.
        mib: Its size.
        period_s: Seconds between two snapshots, for which there is a bar.
        interval_s: Seconds between two snapshots here: long enough that a snapshot is complete in the first half.
        num_snapshots: Number of snapshots to measure.
    """

    workload: str
    mib: int
    period_s: float
    interval_s: float
    num_snapshots: int


SNAPSHOT_CASES = (SnapshotCase("medium_state", 10, 1.0, 1.0, 120), SnapshotCase("large_state", 200, 10.0, 4.0, 60))


class StampedOperator(StockOperator):
    """Records when each step ended."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.ends: list[float] = []

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.ends.append(time.perf_counter())


def run_snapshots(workload: str, interval_s: float, num_snapshots: int) -> list[float]:
    """Return the cost of each snapshot, in seconds."""
    from raysgd import TorchTrainer

    make = functools.partial(
        TorchTrainer,
        training_operator_cls=StampedOperator,
        config=config_of(STATES[workload], NUM_WORKERS),
        num_workers=NUM_WORKERS,
    )
    with ray_cluster(NUM_WORKERS, object_store_mib=2048):
        with make() as probe:
            probe.train()
            ends = probe.apply_all_operators(_ends_of)[0]
            every = 2 * max(1, round(interval_s / statistics.median(_gaps(ends)) / 2))
        with make(recovery=Recovery(snapshot_every_n_steps=every)) as trainer:
            trainer.train(num_steps=every * (num_snapshots + 1))
            gaps = _gaps(trainer.apply_all_operators(_ends_of)[0])
    costs = []
    for taken in range(every - 1, every * num_snapshots, every):  # the gap that contains the snapshot
        half = taken + every // 2
        costs.append(sum(gaps[taken:half]) - sum(gaps[half : taken + every]))
    return costs


def _ends_of(operator: Any) -> list[float]:
    ends: list[float] = operator.ends
    return ends


def _gaps(ends: Sequence[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(ends)]


# ------------------------------------------------------------------------------------------------------ report


ROLES = {
    OWN: run_raysgd,
    "bare": run_bare,
    "torchrun": run_torchrun,
    "torchft": run_torchft,
    "torchft_tuned": functools.partial(run_torchft, peer="torchft_tuned"),
    "ray_train": run_ray_train,
    "ray_train_fast_poll": run_ray_train,
    "snapshots": run_snapshots,
}
_ENVIRONMENTS = {"ray_train_fast_poll": RAY_TRAIN_FAST_POLL}


def main() -> None:
    if sys.argv[1:2] == ["--torchrun-worker"]:
        torchrun_worker(sys.argv[2], sys.argv[3])
    if sys.argv[1:2] == ["--torchft-worker"]:
        torchft_worker(*sys.argv[2:])
    dispatch(ROLES)
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=5, peers=PEERS).parse_args()
    peers = choose_peers(arguments, PEERS)
    ways, workload, cases = OWN_WAYS, "recovery", SNAPSHOT_CASES
    if arguments.smoke_test:
        arguments.repetitions, workload = 1, "recovery_tiny"
        ways = {name: options for name, options in OWN_WAYS.items() if "new process" in name}
        cases = (SnapshotCase("small_state", 0, 0.02, 0.02, 2),)
    report = Report("recovery", arguments, peers)

    jobs: dict[str, Callable[[], Any]] = {
        name: functools.partial(run_job, __file__, OWN, workload=workload, **options) for name, options in ways.items()
    }
    for name in peers.selected:
        environment = _ENVIRONMENTS.get(name)
        jobs[name] = functools.partial(run_job, __file__, name, environment=environment, workload=workload)
    runs = take_turns(jobs, arguments.repetitions, report)
    medians = report.figures(f"One of {NUM_WORKERS} workers is killed", _FIGURES, runs)
    costs = _report_snapshots(report, cases)
    report.finish([*_recovery_targets(medians), *_snapshot_targets(costs)])


def _report_snapshots(report: Report, cases: Sequence[SnapshotCase]) -> dict[int, float]:
    rows, shares = [], {}
    for case in cases:
        settings = {"workload": case.workload, "interval_s": case.interval_s, "num_snapshots": case.num_snapshots}
        costs = run_job(__file__, "snapshots", **settings)
        cost, share = estimate(costs), estimate(scaled(costs, 1 / case.period_s))
        report.result(OWN, "snapshot_cost_s", cost, state_mib=case.mib)
        rows.append([f"{case.mib}", f"{case.num_snapshots}", cost.text(), f"{case.period_s:g}", share.text()])
        shares[case.mib] = share.median
    headers = ["state, MiB", "snapshots", "cost of one, s", "one in so many seconds", "is so much of the time"]
    report.table("Snapshots inside an epoch", headers, rows)
    return shares


def _recovery_targets(medians: dict[tuple[str, str], float]) -> list[Target]:
    def figure(name: str, which: str = "recovery_s") -> float | None:
        return medians.get((f"{OWN}, {name}", which))

    def ratio(name: str, peer: str) -> float | None:
        own, other = figure(name), medians.get((peer, "recovery_s"))
        return None if own is None or other is None else own / other

    targets = []
    for name in ("spare", "going on"):
        targets.append(Target(f"{OWN}, {name}: recovery, s", 0.25, True, figure(name)))
        targets.append(Target(f"{OWN}, {name} / Ray Train", 0.05, True, ratio(name, "ray_train")))
    targets.append(Target(f"{OWN}, new process / Ray Train", 0.40, True, ratio("new process", "ray_train")))
    targets.append(Target(f"{OWN}, new process / torchrun", 0.70, True, ratio("new process", "torchrun")))
    targets.append(Target(f"{OWN}, restart / Ray Train", 1.0, True, ratio("restart", "ray_train")))
    for name in ("spare", "going on", "new process"):
        targets.append(Target(f"{OWN}, {name}: batches again", 0, True, figure(name, "batches_again")))
    return targets


def _snapshot_targets(shares: dict[int, float]) -> list[Target]:
    return [
        Target(f"a snapshot of {case.mib} MiB each {case.period_s:g} s: share", 0.01, True, shares.get(case.mib))
        for case in SNAPSHOT_CASES
    ]


if __name__ == "__main__":
    main()
