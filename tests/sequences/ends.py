"""Programs that make some calls, perhaps in the background, and then end: Ray first, the trainer first, or neither."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch

from raysgd.exceptions import TrainerShutdownError, WorkersLostError
from raysgd.torch import TorchTrainer
from tests.helpers.stories import ROOT
from tests.sequences.books import Wrong
from tests.sequences.grammar import Grammar, Word
from tests.sequences.subjects import Subject
from tests.torch.operators_for_tests import LinearOperator

ENDS = ("ray", "trainer-ray", "ray-trainer", "plain")
CALLS = {"train": 1, "background": 2, "save": 1, "behind": 2, "load": 4}
BALLAST = 75_000_000
"""Numbers of the model: Ray takes a while to store them."""
_PROGRAM_S = 80.0


class Large(LinearOperator):
    """Has a large state, and steps that take a while."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.model.register_buffer("ballast", torch.zeros(BALLAST))

    def train_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
        time.sleep(0.1)
        return super().train_batch(batch, batch_info)


@dataclass(frozen=True)
class EndGrammar(Grammar):
    """Some calls, and an end."""

    def drawn(self, seed: int) -> list[Word]:
        chance = random.Random(seed)
        return [*(self._call(chance) for _ in range(chance.randint(1, 3))), Word("end", (chance.choice(ENDS),))]


class EndingProgram(Subject):
    """A program for each sequence, in the cluster of this process."""

    grammar: ClassVar[Grammar] = EndGrammar(CALLS, {}, (), {})

    def start_over(self) -> None:
        self._words: list[str] = []

    def pids(self) -> list[int]:
        return []

    def grow(self) -> None: ...

    def call(self, word: Word, is_whole: bool) -> None:
        self._words.append(str(word))

    def check(self) -> None:
        environment = {**os.environ, "RAY_ADDRESS": str(ray.get_runtime_context().gcs_address)}
        command = [sys.executable, "-m", "tests.sequences.ends", *self._words]
        pipes: Any = {"capture_output": True, "text": True}
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=_PROGRAM_S, check=False, **pipes)
        found = done.returncode, done.stdout.split("\n")[-2:], done.stderr.count("Connecting to existing Ray cluster")
        if found != (0, ["done", ""], 1):
            raise Wrong(f"status, last words and connections to Ray are {found}: {done.stderr[-500:]}")

    def events(self) -> list[str]:
        return []

    def close(self) -> None: ...


SUBJECTS = {"ends": EndingProgram}


def main() -> None:
    """Make the calls that the arguments name, and end as the last of them says."""
    *calls, end = sys.argv[1:]
    options: Any = {"num_workers": 1, "num_cpus_per_worker": 0.5, "use_gpu": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer, path, handles = TorchTrainer(training_operator_cls=Large, **options), Path(folder, "file.pt"), []
        for call in calls:
            if call == "train":
                trainer.train(num_steps=1)
            elif call == "background":
                handles.append(trainer.train(blocking=False))
            elif call == "behind":
                trainer.save(Path(folder, "behind.pt"), blocking=False)
            else:
                trainer.save(path)
            if call == "load":
                trainer.load(path)
        for each in end.removeprefix("end:").split("-"):
            if each == "ray":
                ray.shutdown()
            if each == "trainer":
                try:
                    trainer.shutdown()
                except WorkersLostError as error:  # of a file whose state was lost with Ray
                    print(error)
        for handle in handles if "ray" in end else ():
            try:
                handle.result(60)
            except TrainerShutdownError as error:
                print(error)
        assert ray.is_initialized() == ("ray" not in end), "another Ray was started"
        print("done", flush=True)


if __name__ == "__main__":
    main()
