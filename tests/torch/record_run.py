"""The record run: thousands of kills in one training, in parts, each held to the same training without any.

    python -m tests.torch.record_run FOLDER --kills 2000 --nodes 50 --every 5 --part 100

Does the next part and prints where the record is, as a line of JSON. A part goes on from the file of the part before,
with as many samples in a joint step whatever the number of workers, so the weights have to be those of one process that
is left in peace: to 1e-5, at the end of each part. `FOLDER/record.json` says how far the record is; a part that breaks
off is done again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from ray.cluster_utils import Cluster

from raysgd.torch import TorchTrainer
from raysgd.utils import BATCH_SIZE
from tests.doors import controller_of
from tests.torch.chaos_run import MANY, NUM_WORKERS, STEP_S, Chaos
from tests.torch.ledger import Ledger, uses
from tests.torch.nodes import cluster_of

NUM_SAMPLES = 600
JOINT_BATCH = 12  # each number of workers up to four divides it
SHARE_OF_PAIRS = 0.1
SEED = 0


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
        largest_difference: Of a weight from that of the undisturbed run, over all parts.
        samples_off: Samples that were not used once in each pass.
        seconds: Time with kills.
        driver_mib: Memory of the driver at the end of each part.
        driver_fds: Open files of the driver at the end of each part.
    """

    kills: int = 0
    kills_of_rank_0: int = 0
    pairs: int = 0
    nodes: int = 0
    passes: int = 0
    parts: int = 0
    largest_difference: float = 0.0
    samples_off: int = 0
    seconds: float = 0.0
    driver_mib: list[float] = field(default_factory=list)
    driver_fds: list[int] = field(default_factory=list)

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


class JointLedger(Ledger):
    """The same with a batch size of all workers together."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({**config, "batch_size": config[BATCH_SIZE]})


class Schedule(Chaos):
    """Kills at fixed times: a random rank, now and then two, and once in a while the node of one."""

    every_s = 5.0
    num_pairs = 0
    num_of_rank_0 = 0

    def run(self) -> None:
        try:
            due = time.monotonic() + self.every_s
            while not self.is_enough:
                time.sleep(max(0.0, due - time.monotonic()))
                due = max(due, time.monotonic()) + self.every_s
                with suppress(RuntimeError, LookupError, ValueError):  # just being replaced, or fewer than just now
                    self._strike()
        except BaseException as error:
            self.failure = repr(error)
            raise

    def _strike(self) -> None:
        pids, before = self._pids(), set(self.killed)
        if self._wants_node and self.trainer.num_workers > 1 and not self._num_nodes_missing:
            self._lose_node()
        elif self._chance.random() < SHARE_OF_PAIRS and self.trainer.num_workers > 2:
            self._kill_two()
            self.num_pairs += len(self.killed - before) == 2
        else:
            self._kill_one()
        self.num_of_rank_0 += bool(pids) and pids[0] in self.killed - before

    @property
    def _wants_node(self) -> bool:
        """Whether it is the turn of a node: spread evenly over the part."""
        return self._nodes_lost * self.num_kills < self.num_nodes * len(self.killed)


def make_trainer(**options: Any) -> TorchTrainer:
    """One that starts like the others, whatever the number of its workers."""
    config = {"num_samples": NUM_SAMPLES, BATCH_SIZE: JOINT_BATCH, **options.pop("config", {})}
    return TorchTrainer(training_operator_cls=JointLedger, config=config, seed=SEED, **options)


def train_disturbed(
    cluster: Cluster, folder: Path, record: Record, num_kills: int, num_nodes: int, every_s: float
) -> int:
    """One part of the record; returns its passes."""
    with make_trainer(
        config={"step_s": STEP_S}, num_workers=NUM_WORKERS, resize_check_s=0.5, snapshot_every_n_steps=10
    ) as trainer:
        if record.parts:
            trainer.load(str(folder / "disturbed.pt"))
        chaos = Schedule(trainer, cluster, num_kills, 0, 0, num_nodes, seed=record.parts)
        chaos.every_s = every_s
        chaos.start()
        num_passes, began = 0, time.monotonic()
        while chaos.is_alive():
            trainer.train(max_retries=MANY)
            chaos.give_back_nodes()
            num_passes += 1
        assert not chaos.failure, chaos.failure
        record.seconds += time.monotonic() - began
        trainer.train(max_retries=MANY)  # in peace: the end of the part is that of a pass
        num_passes += 1
        record.samples_off += uses(trainer) != {record.passes + num_passes}
        trainer.save(str(folder / "disturbed.new.pt"))
        record.kills += len(chaos.killed)
        record.kills_of_rank_0 += chaos.num_of_rank_0
        record.pairs += chaos.num_pairs
        record.nodes += chaos._nodes_lost
        assert controller_of(trainer).history.num_failures > 0
        return num_passes


def train_undisturbed(folder: Path, record: Record, num_passes: int) -> None:
    """The same passes in one process."""
    with make_trainer(use_local=True) as trainer:
        if record.parts:
            trainer.load(str(folder / "undisturbed.pt"))
        for _ in range(num_passes):
            trainer.train()
        trainer.save(str(folder / "undisturbed.new.pt"))


def difference(folder: Path) -> float:
    """The largest one between the weights of both."""
    first, second = (
        torch.load(folder / f"{name}.new.pt", weights_only=False)["models"][0] for name in ("disturbed", "undisturbed")
    )
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def do_part(folder: Path, num_kills: int, num_nodes: int, every_s: float) -> Record:
    """The next part."""
    record = Record.read(folder)
    with cluster_of(NUM_WORKERS) as cluster:
        num_passes = train_disturbed(cluster, folder, record, num_kills, num_nodes, every_s)
        record.driver_mib.append(_resident_mib())
        record.driver_fds.append(len(os.listdir("/proc/self/fd")))
    train_undisturbed(folder, record, num_passes)
    record.largest_difference = max(record.largest_difference, difference(folder))
    for name in ("disturbed", "undisturbed"):
        (folder / f"{name}.new.pt").replace(folder / f"{name}.pt")
    record.passes += num_passes
    record.parts += 1
    record.write(folder)
    return record


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the record is kept")
    parser.add_argument("--kills", type=int, default=2000, help="of the whole record")
    parser.add_argument("--nodes", type=int, default=50, help="of the whole record")
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one kill to the next")
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
