"""Kills programs and trainers at random moments, and prints what was lost.

Run it by `python -m tests.detached.storm [KILLS] [SEED] [KINDS]`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.detached.programs import OPERATOR, Program
from tests.helpers.forked import forks
from tests.helpers.ray_start import VARIABLES, patient_ray

NUM_SAMPLES = 120
STEP_S = 0.03
CALLS = {
    "train": "trainer.train()['epoch']",
    "validate": "trainer.validate()['num_samples']",
    "predict": "len(trainer.predict(torch.zeros(2000, 1), batch_size=4))",
    "save": "trainer.save({file!r}, blocking=False); trainer.train()['epoch']",
    "fit": "len(trainer.fit(1))",
    "none": "None",
    "replaced": "trainer.train()['epoch']",
    "undisturbed": "trainer.train()['epoch']",
    "process": "trainer.train()['epoch']",
    "process and worker": "trainer.train()['epoch']",
    "process between calls": "None",
}
TRAINER_PID = "ray.get(trainer._actor.describe.remote())['pid']"
EXPECTED = {"validate": NUM_SAMPLES, "predict": 2000}
EPOCHS_OF = {"train": 1, "save": 1, "fit": 1, "replaced": 1, "undisturbed": 1, "process": 1, "process and worker": 1}


class Storm:
    """A detached trainer, and programs that come and go."""

    def __init__(self, address: str, folder: Path, seed: int) -> None:
        self._address, self._folder, self._random = address, folder, random.Random(seed)
        self.log = folder / "log"
        self.num_epochs = 0
        self.faults: list[str] = []
        self._kinds: list[tuple[float, str]] = []
        self._program = self._new()
        config = f"{{'step_s': {STEP_S}, 'num_samples': {NUM_SAMPLES}, 'large': torch.zeros(50_000_000)}}"  # 200 MB
        self._pids = self._program.run(f"trainer = make({str(self.log)!r}, config={config}); pids(trainer)")
        self._trainer_pid = self._program.run(TRAINER_PID)

    def _new(self) -> Program:
        program = Program(self._address)
        program.run(f"{OPERATOR}\nimport ray; ray.init(log_to_driver=False); None")
        return program

    def kill_in(self, kind: str) -> None:
        """Begin a call, kill the program at some moment, and go on in another one."""
        following = self._program if kind.startswith("process") else self._new()
        before = self._size()
        self._kinds.append((time.time(), kind))
        self._program.begin(CALLS[kind].format(file=str(self._folder / "saved.pt")))
        while kind not in ("none", "process between calls") and kind != "predict" and self._size() == before:
            time.sleep(0.005)
        time.sleep(self._random.uniform(0, 1.0))
        if kind == "replaced":
            os.kill(self._random.choice(self._pids), signal.SIGKILL)
            time.sleep(self._random.uniform(0, 1.0))
        if kind.startswith("process"):
            self._kill_trainer(kind)
            return
        if kind == "undisturbed":  # to compare with: the call ends before its program does
            self._program.found()
            self.num_epochs += 1
            following.kill()
            return
        self._program.kill()
        self._program = following
        following.run("trainer = raysgd.attach('run')")
        self._check(kind)

    def _kill_trainer(self, kind: str) -> None:
        if kind == "process and worker":
            os.kill(self._random.choice(self._pids), signal.SIGKILL)
        os.kill(self._trainer_pid, signal.SIGKILL)
        self._program.found()
        self._check(kind)
        self._trainer_pid = self._program.run(TRAINER_PID)

    def _size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def _check(self, kind: str) -> None:
        self.num_epochs += EPOCHS_OF.get(kind, 0)
        program = self._program
        found = program.run("call = trainer.pending(); None if call is None else call.method")
        if found is not None:
            answer = program.run("call.result() if call.method != 'predict' else {'num_samples': len(call.result())}")
            if kind in EXPECTED and answer["num_samples"] != EXPECTED[kind]:
                self.faults.append(f"{kind}: answer {answer}")
        if program.run("trainer.pending()") is not None:
            self.faults.append(f"{kind}: an answer came twice")
        epochs = program.run("len(trainer.history)")
        if epochs != self.num_epochs:
            self.faults.append(f"{kind}: {epochs} epochs instead of {self.num_epochs}")
            self.num_epochs = epochs
        pids = program.run("pids(trainer)")
        if len({*pids} & {*self._pids}) != len(self._pids) - (kind in ("replaced", "process and worker")):
            self.faults.append(f"{kind}: workers {self._pids} -> {pids}")
        self._pids = pids

    def report(self) -> dict[str, Any]:
        """End the trainer; return the figures."""
        self._program.run("trainer.shutdown()")
        left = self._program.run("len(raysgd.detached_trainers())")
        self._program.kill()
        counts: dict[str, Counter[int]] = defaultdict(Counter)
        times: dict[Any, list[float]] = defaultdict(list)
        for line in self.log.read_text().splitlines():
            kind, pid, moment, size, batch = line.split(" ", 4)
            if kind.startswith("train") and size == "2":  # not a new worker, which warms up alone
                counts[kind].update(json.loads(batch))
                times[self._kind_at(float(moment)), kind, pid].append(float(moment))
        apart = [kind for kind, count in counts.items() if count != dict.fromkeys(range(NUM_SAMPLES), 1)]
        gaps = {key: [b - a for a, b in pairwise(moments)] for key, moments in times.items()}
        found = {"faults": self.faults, "left": left, "not_once": apart, "epochs": len(counts)}
        return {**found, **figures(gaps)}

    def _kind_at(self, moment: float) -> str:
        return [kind for began, kind in self._kinds if began <= moment][-1]


def figures(gaps: dict[Any, list[float]]) -> dict[str, Any]:
    """The gaps between steps, by what happened meanwhile."""
    largest: dict[str, list[float]] = defaultdict(list)
    for (happened, _, _), each in gaps.items():
        largest[happened] += [round(1000 * max(each), 1)] if each else []
    return {
        "median_gap_ms": round(1000 * statistics.median(gap for each in gaps.values() for gap in each), 1),
        "largest_gaps_ms": {happened: sorted(each, reverse=True) for happened, each in largest.items()},
    }


def main() -> None:
    """Run a storm."""
    import ray

    num_kills, seed = int(sys.argv[1]) if sys.argv[1:] else 30, int(sys.argv[2]) if sys.argv[2:] else 1
    chosen = sys.argv[3].split(",") if sys.argv[3:] else [*CALLS]
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ["TMPDIR"], tempfile.tempdir = tempfile.mkdtemp(prefix="t-"), None
    with forks() as found:
        with found.starting(), patient_ray():
            ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        storm = Storm(str(ray.get_runtime_context().gcs_address), Path(tempfile.mkdtemp()), seed)
        kinds = chosen * (num_kills // len(chosen) + 1)
        for number, kind in enumerate(kinds[:num_kills]):
            storm.kill_in(kind)
            print(number, kind, flush=True)
        report = storm.report()
        report["actors"] = [each for each in ray.util.list_named_actors(all_namespaces=True)]
        report["reservations"] = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
        print(json.dumps(report))
        ray.shutdown()


if __name__ == "__main__":
    main()
