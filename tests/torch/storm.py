"""One training at four workers of which one is killed every few seconds, also of those that are just starting.

    python -m tests.torch.storm --seconds 600 --seed 1 --mode deterministic

Prints one line of JSON with what was seen. The books of the samples are kept by the model itself, see `ledger`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray

from raysgd import Recovery
from raysgd.torch import TorchTrainer
from tests.helpers.doors import controller_of
from tests.helpers.hygiene import RaySurroundings
from tests.torch.ledger import BATCH_SIZE_OF_ONE, Ledger, parameters_of, uses

NUM_WORKERS = 4
STEP_S = 0.02
_WORKER = "RaySGDWorker"
_BETWEEN_S = (2.0, 4.0)

MODES: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True},
    "constant": {"split_batches": True},
}


@dataclass
class Storm(threading.Thread):
    """Kills one worker process after the other, whatever it does.

    Attributes:
        seconds: How long.
        seed: Of all chance.
        killed: The processes killed so far.
    """

    seconds: float
    seed: int
    killed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(name="storm", daemon=True)
        self._chance = random.Random(self.seed)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(self._chance.uniform(*_BETWEEN_S))
            processes = _worker_processes()
            if processes:
                chosen = self._chance.choice(processes)
                with suppress(ProcessLookupError):
                    os.kill(chosen, signal.SIGKILL)
                    self.killed.append(chosen)


def _worker_processes() -> list[int]:
    """The workers' processes on the Ray of this program, from the moment on in which they are given their actor."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if _WORKER in " ".join(process.cmdline()):
                found.append(process.pid)
    return sorted(found)


def trainer_of(mode: str, **options: Any) -> TorchTrainer:
    """A trainer whose numbers do not depend on the number of workers."""
    config = {"num_samples": 240, "step_s": STEP_S, "batch_size": BATCH_SIZE_OF_ONE * NUM_WORKERS}
    return TorchTrainer(training_operator_cls=Ledger, config=config, **MODES[mode], **options)


def weights_of(trainer: TorchTrainer) -> list[float]:
    """The weights of the model that rank 0 has."""
    found = trainer.apply_all_operators(parameters_of)[0]
    return [float(value) for tensor in found for value in tensor.flatten()]


def train_in_the_storm(mode: str, seconds: float, seed: int) -> dict[str, Any]:
    """Trains pass after pass as long as it lasts, and one more in peace."""
    storm, done, sizes, metrics = Storm(seconds, seed), [], [], []
    began = time.monotonic()
    with trainer_of(
        mode, num_workers=NUM_WORKERS, recovery=Recovery(wait_for_workers=False, resize_interval_s=1.0)
    ) as trainer:
        storm.start()
        is_over = False
        while not is_over:
            is_over = not storm.is_alive()
            metrics.append(_measured(trainer.train()))
            done.append(time.monotonic() - began)
            sizes.append(trainer.num_workers)
        history = controller_of(trainer).history
        per_minute = [sum(60 * m <= at < 60 * (m + 1) for at in done) for m in range(int(seconds // 60))]
        return {
            "seed": seed,
            "kills": len(storm.killed),
            "passes": len(done),
            "passes a minute": per_minute,
            "books": sorted(uses(trainer)),
            "weights": weights_of(trainer),
            "metrics": metrics,
            "rejoins": history.count("continued"),
            "rebuilds": history.count("restored"),
            "events": [str(event) for event in history.events],
        }


def _measured(result: dict[str, Any]) -> list[float]:
    """How many samples a pass has measured, and their loss."""
    return [result["num_samples"], result["train_loss"]]


def train_in_peace(mode: str, num_passes: int) -> tuple[list[float], list[list[float]]]:
    """The weights after as many passes of as many workers, undisturbed; and what each pass has measured."""
    with trainer_of(mode, num_workers=NUM_WORKERS) as trainer:
        metrics = [_measured(trainer.train()) for _ in range(num_passes)]
        return weights_of(trainer), metrics


def _distance(these: Any, those: Any) -> float:
    """The largest difference, as a part of the numbers themselves where they are larger than 1."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(these, those, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the storm lasts")
    parser.add_argument("--mode", choices=MODES, default="deterministic", help="what makes the numbers the same")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of all chance")
    parser.add_argument("--verbose", action="store_true", help="log what happens")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", file=sys.stderr, flush=True)
    if arguments.verbose:
        logging.basicConfig(format="%(relativeCreated)d %(name)s %(message)s")
        logging.getLogger("raysgd").setLevel(logging.INFO)
    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False)
    before = RaySurroundings.now()
    seen = train_in_the_storm(arguments.mode, arguments.seconds, arguments.seed)
    seen["leaks"] = before.leaks()
    weights, metrics = seen.pop("weights"), seen.pop("metrics")
    undisturbed, metrics_in_peace = train_in_peace(arguments.mode, seen["passes"])
    seen["apart"] = _distance(weights, undisturbed)
    seen["metrics apart"] = max(map(_distance, metrics, metrics_in_peace))
    seen["digest"] = hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:12]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
