"""The record run: thousands of kills in one training, in parts, each held to the same training without any.

Those who are just starting are killed, too.

    python -m tests.torch.record_run FOLDER --kills 2000 --nodes 50 --every 2 --part 100

Does the next part and prints where the record is, as a line of JSON. A part goes on from the file of the part before,
with as many samples in a global step whatever the number of workers, so the weights have to be those of one process
that is left in peace: to 1e-5, at the end of each part. `FOLDER/record.json` says how far the record is. A part that is
broken off, by Ctrl-C or by SIGKILL, is done again: the files of the part before stay until the record knows of the next
one. Where they are missing, as on another machine to which only `record.json` came, the part begins a new training. A
part of 100 kills takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from ray.cluster_utils import Cluster

from raysgd import testing
from raysgd.torch import TorchTrainer
from raysgd.trainer.configuration import Recovery
from raysgd.utils import BATCH_SIZE
from tests.helpers.doors import controller_of
from tests.helpers.processes import is_alive
from tests.torch.ledger import Ledger, uses
from tests.torch.nodes import add_node, cluster_of

NUM_SAMPLES = 600
JOINT_BATCH = 12  # each number of workers up to four divides it
SHARE_OF_PAIRS, SHARE_OF_ANY = 0.1, 0.2
WORKER = "RaySGDWorker"
NUM_WORKERS = 4
STEP_S = 0.02
MANY = 10**6  # retries: how many are spent is not the question here
SEED = 0
RUNS = ("disturbed", "undisturbed")


@dataclass
class Record:
    """How far the record is.

    Attributes:
        kills: Processes killed, those of lost nodes included.
        kills_of_rank_0: Of these.
        pairs: How often two were killed at once.
        nodes: Nodes lost.
        passes: Passes over the data.
        parts: Parts done.
        trainings: How many there were, one behind the other.
        passes_of_training: Passes of the one that goes on.
        largest_difference: Of a weight from that of the undisturbed run, over all parts.
        samples_off: Samples that were not used once in each pass.
        seconds: Time with kills.
        mib_grown: By how much the driver's memory grew in each part, from the end of its first quarter on, in MiB.
        fds_grown: Its open files.
        store_mib_grown: What was used of the object store beside it, in MiB.
    """

    kills: int = 0
    kills_of_rank_0: int = 0
    pairs: int = 0
    nodes: int = 0
    passes: int = 0
    parts: int = 0
    trainings: int = 0
    passes_of_training: int = 0
    largest_difference: float = 0.0
    samples_off: int = 0
    seconds: float = 0.0
    mib_grown: list[float] = field(default_factory=list)
    fds_grown: list[int] = field(default_factory=list)
    store_mib_grown: list[float] = field(default_factory=list)

    def note_growth(self, looks: list[tuple[float, int, float]]) -> None:
        """Notes what the driver grew by, from how it looked after each pass."""
        before, after = looks[len(looks) // 4], looks[-1]
        self.mib_grown.append(after[0] - before[0])
        self.fds_grown.append(after[1] - before[1])
        self.store_mib_grown.append(after[2] - before[2])

    def file(self, folder: Path, run: str) -> Path:
        """The state at the end of the last part, of one of `RUNS`."""
        return folder / f"{run}-{self.parts}.pt"

    def next_file(self, folder: Path, run: str) -> Path:
        """The same at the end of the part that is being done."""
        return folder / f"{run}-{self.parts + 1}.pt"

    def goes_on(self, folder: Path) -> bool:
        """Whether both states at the end of the last part are there."""
        return all(self.file(folder, run).exists() for run in RUNS)

    def begin_training(self) -> None:
        """Lets the next part begin a new one."""
        self.trainings += 1
        self.passes_of_training = 0

    @classmethod
    def read(cls, folder: Path) -> Record:
        """The one in a folder, or a new one."""
        path = folder / "record.json"
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, folder: Path) -> None:
        """Whole, or not at all."""
        partial = folder / "record.part"
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(folder / "record.json")


class GlobalLedger(Ledger):
    """The same with a batch size of all workers together."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({**config, "batch_size": config[BATCH_SIZE]})


@dataclass
class Schedule(threading.Thread):
    """Kills at fixed times: a random rank, now and then two, and once in a while the node of one.

    Attributes:
        trainer: Whose workers.
        cluster: Whose nodes.
        num_kills: How many workers are to be killed at least.
        num_nodes: How many nodes are to be lost.
        every_s: From one kill to the next.
        seed: Of all chance.
        killed: The processes killed so far.
        failure: Why it gave up, if it did.
    """

    trainer: TorchTrainer
    cluster: Cluster
    num_kills: int
    num_nodes: int
    every_s: float
    seed: int
    num_pairs: int = 0
    num_of_rank_0: int = 0
    num_nodes_lost: int = 0
    killed: set[int] = field(default_factory=set)
    failure: str = ""

    def __post_init__(self) -> None:
        super().__init__(name="schedule", daemon=True)
        self._chance = random.Random(self.seed)
        self._num_nodes_missing = 0

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        try:
            due = time.monotonic() + self.every_s
            while len(self.killed) < self.num_kills or self.num_nodes_lost < self.num_nodes:
                time.sleep(max(0.0, due - time.monotonic()))
                due = max(due, time.monotonic()) + self.every_s
                with suppress(RuntimeError, LookupError, ValueError, psutil.Error):  # just being replaced
                    self._strike()
        except BaseException as error:
            self.failure = repr(error)
            raise

    def give_back_nodes(self) -> None:
        """Puts new nodes in the place of lost ones; in the main thread, where alone Ray can start one."""
        while self._num_nodes_missing:
            add_node(self.cluster)
            self._num_nodes_missing -= 1

    def _strike(self) -> None:
        pids, before = self._pids(), set(self.killed)
        if self._wants_node and self.trainer.num_workers > 1 and not self._num_nodes_missing:
            self._lose_node()
        elif self._chance.random() < SHARE_OF_ANY:
            self._kill_any()
        elif self._chance.random() < SHARE_OF_PAIRS and self.trainer.num_workers > 2:
            self._kill(2)
            self.num_pairs += len(self.killed - before) == 2
        else:
            self._kill(1)
        self.num_of_rank_0 += bool(pids) and pids[0] in self.killed - before

    @property
    def _wants_node(self) -> bool:
        """Whether it is the turn of a node: spread evenly over the part."""
        return self.num_nodes_lost * self.num_kills < self.num_nodes * len(self.killed)

    def _kill(self, num_ranks: int) -> None:
        ranks, pids = self._chance.sample(range(self.trainer.num_workers), num_ranks), self._pids()
        alive = {pids[rank] for rank in ranks if is_alive(pids[rank])}
        testing.kill_worker(self.trainer, ranks)
        self.killed |= {pid for pid in alive if not is_alive(pid)}

    def _kill_any(self) -> None:
        """Kills a worker from the moment on in which its process is given its actor."""
        found = [each for each in psutil.Process().children(recursive=True) if WORKER in " ".join(each.cmdline())]
        chosen = self._chance.choice(found)
        chosen.kill()
        self.killed.add(chosen.pid)

    def _lose_node(self) -> None:
        rank = self._chance.randrange(self.trainer.num_workers)
        pid = self._pids()[rank]
        testing.remove_node(self.cluster, trainer=self.trainer, rank=rank)
        self.num_nodes_lost += 1
        self.killed.add(pid)
        self._num_nodes_missing += 1

    def _pids(self) -> list[int]:
        group = controller_of(self.trainer).group
        return [] if group is None else [info.pid for info in group.infos]


def make_trainer(**options: Any) -> TorchTrainer:
    """One that starts like the others, whatever the number of its workers."""
    config = {"num_samples": NUM_SAMPLES, BATCH_SIZE: JOINT_BATCH, **options.pop("config", {})}
    return TorchTrainer(training_operator_cls=GlobalLedger, config=config, seed=SEED, **options)


def train_disturbed(
    cluster: Cluster, folder: Path, record: Record, num_kills: int, num_nodes: int, every_s: float
) -> int:
    """One part of the record; returns its passes."""
    with make_trainer(
        config={"step_s": STEP_S},
        num_workers=NUM_WORKERS,
        recovery=Recovery(wait_for_workers=False, resize_interval_s=0.5, snapshot_every_n_steps=10),
    ) as trainer:
        if record.passes_of_training:
            trainer.load(str(record.file(folder, "disturbed")))
        schedule = Schedule(trainer, cluster, num_kills, num_nodes, every_s, seed=record.parts)
        schedule.start()
        num_passes, began, looks = 0, time.monotonic(), []
        while schedule.is_alive():
            trainer.train(max_retries=MANY)
            schedule.give_back_nodes()
            num_passes += 1
            looks.append(look(cluster))
        assert not schedule.failure, schedule.failure
        record.seconds += time.monotonic() - began
        trainer.train(max_retries=MANY)  # in peace: the end of the part is that of a pass
        num_passes += 1
        record.note_growth([*looks, look(cluster)])
        record.samples_off += uses(trainer) != {record.passes_of_training + num_passes}
        trainer.save(str(record.next_file(folder, "disturbed")))
        record.kills += len(schedule.killed)
        record.kills_of_rank_0 += schedule.num_of_rank_0
        record.pairs += schedule.num_pairs
        record.nodes += schedule.num_nodes_lost
        assert controller_of(trainer).history.num_failures > 0
        return num_passes


def train_undisturbed(folder: Path, record: Record, num_passes: int) -> None:
    """The same passes in one process."""
    with make_trainer(use_local=True) as trainer:
        if record.passes_of_training:
            trainer.load(str(record.file(folder, "undisturbed")))
        for _ in range(num_passes):
            trainer.train()
        trainer.save(str(record.next_file(folder, "undisturbed")))


def difference(folder: Path, record: Record) -> float:
    """The largest one between the weights of both, at the end of the part that is being done."""
    first, second = (torch.load(record.next_file(folder, name), weights_only=False)["models"][0] for name in RUNS)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def do_part(folder: Path, num_kills: int, num_nodes: int, every_s: float) -> Record:
    """The next part."""
    record = Record.read(folder)
    end_left_over(folder)
    if not record.goes_on(folder):
        record.begin_training()
    with cluster_of(NUM_WORKERS) as cluster:
        note_processes(folder)
        num_passes = train_disturbed(cluster, folder, record, num_kills, num_nodes, every_s)
    train_undisturbed(folder, record, num_passes)
    record.largest_difference = max(record.largest_difference, difference(folder, record))
    before = [record.file(folder, name) for name in RUNS]
    record.passes += num_passes
    record.passes_of_training += num_passes
    record.parts += 1
    record.write(folder)
    for path in before:
        path.unlink(missing_ok=True)
    return record


def look(cluster: Cluster) -> tuple[float, int, float]:
    """Memory and open files of the driver, and what was used of the object store beside it; in MiB."""
    driver, raylet = psutil.Process(), cluster.head_node.all_processes["raylet"][0].process.pid
    store_mib = sum(map(_blocks_of_store, Path(f"/proc/{raylet}/fd").iterdir())) * 512 / 2**20
    return driver.memory_info().rss / 2**20, driver.num_fds(), store_mib


def _blocks_of_store(path: Path) -> int:
    """What an open file takes, if it belongs to the object store and was not closed just now."""
    try:
        return path.stat().st_blocks if "/plasma" in os.readlink(path) else 0
    except FileNotFoundError:
        return 0


def note_processes(folder: Path) -> None:
    """Notes the processes of the cluster: where this one is killed, they stay."""
    started = {each.pid: each.create_time() for each in psutil.Process().children(recursive=True)}
    (folder / "processes.json").write_text(json.dumps(started))


def end_left_over(folder: Path) -> None:
    """Ends the processes of a part that was killed, as far as they are still the same ones."""
    path = folder / "processes.json"
    for pid, started in json.loads(path.read_text()).items() if path.exists() else ():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if process.create_time() == started:
                process.kill()
    path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the record is kept")
    parser.add_argument("--kills", type=int, default=2000, help="of the whole record")
    parser.add_argument("--nodes", type=int, default=50, help="of the whole record")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one kill to the next")
    parser.add_argument("--part", type=int, default=100, help="kills of a part")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    record = Record.read(arguments.folder)
    num_kills = min(arguments.part, arguments.kills - record.kills)
    if num_kills > 0:
        num_left = arguments.nodes - record.nodes
        num_nodes = round(num_left * num_kills / (arguments.kills - record.kills))
        record = do_part(arguments.folder, num_kills, num_nodes, arguments.every)
    print(json.dumps(asdict(record)))


if __name__ == "__main__":
    random.seed(SEED)
    main()
