"""Every phase of a training times every victim, told by a program because it needs a Ray cluster of several nodes.

    python -m tests.torch.chaos_table [--all] [PHASE/VICTIM ...]

Prints one line of JSON for each cell of the table, as it goes. The trainer of the last cell of a start-up serves all
others: it is whole again before each of them. In the end, unless cells were named, a node is announced to go away.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from raysgd import testing
from raysgd.testing import faults
from raysgd.torch import TorchTrainer
from tests.helpers.doors import controller_of
from tests.helpers.patience import awaiting_new_workers
from tests.torch.draining import drained
from tests.torch.ledger import BATCH_SIZE_OF_ONE, NUM_SAMPLES, Ledger, parameters_of, uses
from tests.torch.nodes import add_node, cluster_of
from tests.torch.operators_for_tests import equal

NUM_WORKERS = 3
LAST_STEP = -(-NUM_SAMPLES // (NUM_WORKERS * BATCH_SIZE_OF_ONE)) - 1
NODE = "node of rank 0"
VICTIMS = {"rank 0": (0,), "another": (1,), "two at once": (0, 2), "all": (0, 1, 2), NODE: (0,)}
STEPS = {"first step": 0, "mid-epoch": LAST_STEP // 2, "last step": LAST_STEP}
PHASES = ("start-up", "between calls", *STEPS, "validate", "save", "get_model", "state_dict", "continue")

CHOSEN = (
    ("start-up", "another"),
    ("between calls", "all"),
    ("first step", "rank 0"),
    ("mid-epoch", NODE),
    ("last step", "two at once"),
    ("validate", "rank 0"),
    ("save", "rank 0"),
    ("get_model", "another"),
    ("continue", "rank 0"),
)
"""Each victim at least once, and each phase but "state_dict", which goes the way of "save": what there is time for. The
whole table is for `make soak`."""

ALL = tuple((phase, victim) for phase in PHASES for victim in VICTIMS)


@dataclass(frozen=True)
class Beckon:
    """Leaves a file that says that the worker is there, and waits there for its end."""

    path: str

    def __call__(self) -> None:
        Path(self.path).write_text(ray.get_runtime_context().get_node_id())
        time.sleep(600)


@dataclass(frozen=True)
class DiesWithOthers:
    """Ends the process once so many have come to the same place, none of which is ahead of the others then."""

    folder: str
    num_victims: int

    def __call__(self) -> None:
        Path(self.folder, str(os.getpid())).touch()
        while len(os.listdir(self.folder)) < self.num_victims:
            time.sleep(0.01)
        faults.send_itself(signal.SIGKILL)


class EndsInSetup(Ledger):
    """The first time, lets what `config` says happen on the ranks that it names."""

    def setup(self, config: dict[str, Any]) -> None:
        mark = Path(config["folder"]) / f"rank-{self.world_rank}"
        if self.world_rank in config["victims"] and not mark.exists():
            mark.touch()
            config["act"]()
        super().setup(config)


class Table:
    """Fills cells.

    Args:
        cluster: The nodes.
        folder: For files; all nodes see it.
    """

    def __init__(self, cluster: Cluster, folder: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.num_beckoned = 0
        self._trainer: TorchTrainer | None = None

    @property
    def trainer(self) -> TorchTrainer:
        """The last one of those whose start-up was a cell; begun here where none was."""
        if self._trainer is None:
            self._trainer = TorchTrainer(training_operator_cls=Ledger, num_workers=NUM_WORKERS)
        return self._trainer

    def end(self) -> None:
        """Gives its room back."""
        if self._trainer is not None:
            self._trainer.shutdown()
            self._trainer = None

    def fill(self, phase: str, victim: str) -> dict[str, Any]:
        """What came of `victim` being lost in `phase`."""
        if phase == "start-up":
            return self._start(victim)
        history, trainer = controller_of(self.trainer).history, self.trainer
        failures_before, events_before = history.num_failures, len(history.events)
        with self._node_loss() if victim == NODE else _nothing() as beckon:
            seen = self._go_through(phase, victim, beckon)
        trainer.train()
        seen |= self._state_of(trainer)
        seen["failures"] = history.num_failures - failures_before
        seen["events"] = [event.kind for event in history.events[events_before:]]
        while trainer.num_workers < NUM_WORKERS:  # as far as Ray has told of the new node by then
            trainer.train()
        return seen

    def _go_through(self, phase: str, victim: str, beckon: Beckon | None) -> dict[str, Any]:
        trainer, ranks = self.trainer, VICTIMS[victim]
        if phase in ("between calls", "get_model"):
            return self._between_calls(phase, ranks, beckon)
        if phase == "continue":
            return self._continue_in_place(victim, beckon)
        if phase in STEPS:
            self._set("step", ranks, beckon, STEPS[phase])
            trainer.train()
            return {"result": sorted(uses(trainer))}
        if phase == "validate":
            self._set("validate", ranks, beckon)
            return {"result": trainer.validate()["num_samples"]}
        trainer.validate()  # it may have drawn random numbers: the state is to be copied again
        self._set("snapshot", ranks, beckon)
        if phase == "state_dict":
            return {"result": sorted(_uses_in(trainer.state_dict()))}
        path = trainer.save(Path(self.folder) / "last.pt")
        return {"result": sorted(_uses_in(torch.load(path, weights_only=False)))}

    def _set(self, place: str, ranks: tuple[int, ...], beckon: Beckon | None, num_before: int = 0) -> None:
        meeting = tempfile.mkdtemp(dir=self.folder)
        act: Any = DiesWithOthers(meeting, len(ranks)) if beckon is None else beckon
        faults.arm(self.trainer, ranks, faults.Trap(act, place, num_before))

    def _between_calls(self, phase: str, ranks: tuple[int, ...], beckon: Beckon | None) -> dict[str, Any]:
        trainer = self.trainer
        if beckon is not None:
            testing.remove_node(self.cluster, trainer=trainer, rank=0)
            add_node(self.cluster)
        else:
            testing.kill_worker(trainer, ranks, at="now" if phase == "between calls" else "get_model")
        if phase == "get_model":
            return {"result": sorted(set((-trainer.get_model().used).round().int().tolist()))}
        trainer.train()
        return {"result": sorted(uses(trainer))}

    def _continue_in_place(self, victim: str, beckon: Beckon | None) -> dict[str, Any]:
        """Rank 2 is lost first; the victims among the survivors while they form a new group."""
        ranks = {"two at once": (0, 1), "all": (0, 1)}.get(victim, VICTIMS[victim])
        testing.kill_worker(self.trainer, 2, at="step:5")
        self._set("continue", ranks, beckon)
        self.trainer.train()
        return {"result": sorted(uses(self.trainer))}

    def _start(self, victim: str) -> dict[str, Any]:
        self.end()
        folder = tempfile.mkdtemp(dir=self.folder)
        config = {"folder": folder, "victims": VICTIMS[victim], "act": partial(faults.send_itself, 9)}
        if victim == NODE:
            add_node(self.cluster)  # beforehand: a trainer does not start with fewer workers than it was asked for
        with self._node_loss(gives_back=False) if victim == NODE else _nothing() as beckon:
            config["act"] = beckon or config["act"]
            trainer = TorchTrainer(training_operator_cls=EndsInSetup, num_workers=NUM_WORKERS, config=config)
        self._trainer = trainer
        trainer.train()
        return {**self._state_of(trainer), "result": sorted(uses(trainer)), "failures": 0, "events": []}

    def _state_of(self, trainer: TorchTrainer) -> dict[str, Any]:
        states = trainer.apply_all_operators(parameters_of)
        return {
            "books": sorted(uses(trainer)),
            "epoch": trainer.state_dict()["epoch"],
            "equal": all(equal(state, states[0]) for state in states),
            "workers": trainer.num_workers,
        }

    @contextmanager
    def _node_loss(self, gives_back: bool = True) -> Any:
        """Takes the node from which somebody beckons, and gives another one for it in the end."""
        self.num_beckoned += 1
        beckon = Beckon(f"{self.folder}/beckon-{self.num_beckoned}")
        is_over, num_lost = threading.Event(), []

        def wait_and_take() -> None:
            while not is_over.wait(0.02):
                path = Path(beckon.path)
                node_id = path.read_text() if path.exists() else ""
                if node_id:
                    [node] = [node for node in self.cluster.worker_nodes if node.node_id == node_id]
                    testing.remove_node(self.cluster, node)
                    num_lost.append(1)
                    return

        thread = threading.Thread(target=wait_and_take)
        thread.start()
        try:
            yield beckon
        finally:
            is_over.set()
            thread.join()
            for _ in num_lost if gives_back else ():  # in the main thread, where alone Ray can start a node
                add_node(self.cluster)


@contextmanager
def _nothing() -> Any:
    yield None


def _uses_in(state: dict[str, Any]) -> set[int]:
    return set((-state["models"][0]["used"]).round().int().tolist())


def tell(seen: dict[str, Any]) -> None:
    """In one piece: Ray's own thread prints, too, lines in two pieces."""
    sys.stdout.write(f"\n{json.dumps(seen)}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cells", nargs="*", help="as PHASE/VICTIM; default: a choice")
    parser.add_argument("--all", action="store_true", help="the whole table")
    parser.add_argument("--verbose", action="store_true", help="log what happens")
    arguments = parser.parse_args()
    if arguments.verbose:
        logging.basicConfig(format="%(relativeCreated)d %(name)s %(message)s")
        logging.getLogger("raysgd").setLevel(logging.INFO)
    named: tuple[Any, ...] = tuple(tuple(cell.split("/")) for cell in arguments.cells)
    with awaiting_new_workers(), cluster_of(NUM_WORKERS) as cluster, tempfile.TemporaryDirectory() as folder:
        table = Table(cluster, folder)
        for phase, victim in ALL if arguments.all else named or CHOSEN:
            began = time.monotonic()
            seen = table.fill(phase, victim)
            tell({"phase": phase, "victim": victim, **seen, "seconds": round(time.monotonic() - began, 1)})
        table.end()
        if not named:
            tell({"phase": "going away", "victim": "a node", **drained()})


if __name__ == "__main__":
    main()
