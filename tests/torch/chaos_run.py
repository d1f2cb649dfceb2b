"""One training at four workers on four nodes, in which again and again something is killed at a random moment.

    python -m tests.torch.chaos_run --faults 30 --seed 1

Prints one line of JSON with what was seen. The books of the samples are kept by the model itself, see `ledger`.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray.cluster_utils import Cluster

from raysgd import testing
from raysgd.messages.recovery import Recovery
from raysgd.torch import TorchTrainer
from tests.helpers.doors import controller_of
from tests.helpers.hygiene import RaySurroundings
from tests.helpers.processes import is_alive
from tests.torch.ledger import BATCH_SIZE_OF_ONE, Ledger, parameters_of, uses
from tests.torch.nodes import add_node, cluster_of
from tests.torch.operators_for_tests import equal

NUM_WORKERS = 4
CONFIG = {"num_samples": 600}
STEP_S = 0.02
MANY = 10**6  # retries: how many are spent is not the question here
_PATIENCE_S = 240.0


@dataclass
class Chaos(threading.Thread):
    """Kills, one fault after the other, until enough has happened.

    Attributes:
        trainer: Whose workers.
        cluster: Whose nodes.
        num_kills: How many workers are to be killed at least.
        num_continued: Go on until the trainer has counted so many.
        num_restored: Likewise.
        num_nodes: How many faults are to be the loss of a node.
        seed: Of all chance.
        killed: The processes killed so far.
        failure: Why it gave up, if it did.
    """

    trainer: TorchTrainer
    cluster: Cluster
    num_kills: int
    num_continued: int
    num_restored: int
    num_nodes: int
    seed: int
    killed: set[int] = field(default_factory=set)
    failure: str = ""

    def __post_init__(self) -> None:
        super().__init__(name="chaos", daemon=True)
        self._chance = random.Random(self.seed)
        self._num_faults = 0
        self._nodes_lost = 0
        self._events_before = 0
        self._num_nodes_missing = 0

    __hash__ = threading.Thread.__hash__

    @property
    def is_enough(self) -> bool:
        history = controller_of(self.trainer).history
        return (
            len(self.killed) >= self.num_kills
            and history.count("continued") >= self.num_continued
            and history.count("restored") >= self.num_restored
            and self._nodes_lost >= self.num_nodes
        )

    def run(self) -> None:
        try:
            while not self.is_enough:
                self._await_workers()
                time.sleep(self._chance.uniform(0.0, 0.5))
                with suppress(RuntimeError, LookupError, ValueError):  # just being replaced, or fewer than just now
                    self._choose()()
        except BaseException as error:
            self.failure = repr(error)
            raise

    def _await_workers(self) -> None:
        """Until there are three at least, at work again, as a rule; so that not every fault leaves nobody."""
        deadline = time.monotonic() + _PATIENCE_S
        is_hasty = self._chance.random() < 0.1
        while True:
            controller = controller_of(self.trainer)
            num_events = len(controller.history.events)
            has_recovered = is_hasty or num_events > self._events_before
            if has_recovered and controller.monitor is not None and controller.num_workers >= NUM_WORKERS - 1:
                self._events_before = num_events
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"there were not {NUM_WORKERS - 1} workers at work within {_PATIENCE_S} s")
            time.sleep(0.02)

    def _choose(self) -> Callable[[], None]:
        self._num_faults += 1
        history = controller_of(self.trainer).history
        if self._num_faults % 7 == 0 and history.count("restored") < self.num_restored + self._num_faults // 30:
            return self._kill_all
        if self._num_faults % 5 == 3 and self._nodes_lost < self.num_nodes:
            return self._lose_node
        return self._kill_two if self._chance.random() < 0.15 else self._kill_one

    def give_back_nodes(self) -> None:
        """Puts new nodes in the place of lost ones; in the main thread, where alone Ray can start one."""
        while self._num_nodes_missing:
            add_node(self.cluster)
            self._num_nodes_missing -= 1

    def _kill_one(self) -> None:
        self._kill(self._chance.sample(range(self.trainer.num_workers), 1))

    def _kill_two(self) -> None:
        self._kill(self._chance.sample(range(self.trainer.num_workers), 2))

    def _kill_all(self) -> None:
        self._kill(range(self.trainer.num_workers))

    def _kill(self, ranks: Any) -> None:
        pids = self._pids()
        alive = {pids[rank] for rank in ranks if is_alive(pids[rank])}
        testing.kill_worker(self.trainer, list(ranks))
        self.killed |= {pid for pid in alive if not is_alive(pid)}

    def _pids(self) -> list[int]:
        group = controller_of(self.trainer).group
        return [] if group is None else [info.pid for info in group.infos]

    def _lose_node(self) -> None:
        rank = self._chance.randrange(self.trainer.num_workers)
        pid = self._pids()[rank]
        testing.remove_node(self.cluster, trainer=self.trainer, rank=rank)
        self._nodes_lost += 1
        self.killed.add(pid)
        self._num_nodes_missing += 1


def train_disturbed(cluster: Cluster, faults: int, seed: int, nodes: int) -> dict[str, Any]:
    """Trains pass after pass until enough has happened, and two more in peace."""
    with TorchTrainer(
        training_operator_cls=Ledger,
        num_workers=NUM_WORKERS,
        config={**CONFIG, "step_s": STEP_S},
        recovery=Recovery(wait_for_workers=False, resize_interval_s=0.5, snapshot_every_n_steps=10),
    ) as trainer:
        chaos = Chaos(trainer, cluster, faults, faults * 2 // 3, max(1, faults // 10), nodes, seed)
        chaos.start()
        books, num_peaceful = [], 0
        while num_peaceful < 2:
            num_peaceful += not chaos.is_alive()
            trainer.train(max_retries=MANY)
            books.append(sorted(uses(trainer)))
            chaos.give_back_nodes()
        history = controller_of(trainer).history
        states = trainer.apply_all_operators(parameters_of)
        return {
            "seed": seed,
            "kills": len(chaos.killed),
            "rejoins": history.count("continued"),
            "rebuilds": history.count("restored"),
            "gave up": chaos.failure,
            "books": books,
            "equal": all(equal(state, states[0]) for state in states),
            "loss": trainer.validate()["val_loss"],
            "events": [str(event) for event in history.events],
        }


def train_undisturbed(num_passes: int) -> float:
    """The loss after as many passes of one process with as large batches."""
    config = {**CONFIG, "batch_size": BATCH_SIZE_OF_ONE * NUM_WORKERS}
    with TorchTrainer(training_operator_cls=Ledger, use_local=True, config=config) as trainer:
        for _ in range(num_passes):
            trainer.train()
        return float(trainer.validate()["val_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=30, help="how many workers to kill at least")
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes to lose beside")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of all chance")
    parser.add_argument("--verbose", action="store_true", help="log what happens")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", file=sys.stderr, flush=True)
    if arguments.verbose:
        logging.basicConfig(format="%(relativeCreated)d %(name)s %(message)s")
        logging.getLogger("raysgd").setLevel(logging.INFO)
    with cluster_of(NUM_WORKERS) as cluster:
        before = RaySurroundings.now()
        seen = train_disturbed(cluster, arguments.faults, arguments.seed, arguments.nodes)
        seen["leaks"] = before.leaks()
    seen["undisturbed loss"] = train_undisturbed(len(seen["books"]))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
