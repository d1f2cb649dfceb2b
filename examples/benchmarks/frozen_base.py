"""A frozen base under an adapter: bytes copied, sent and written, and how soon a new worker takes a step.

    python examples/benchmarks/frozen_base.py [--smoke-test] [--repetitions 3] [--millions 10,100,300]

Two workers train half a million parameters with Adam on a frozen base, which each `setup` reads from a safetensors
file; once with `excludes_frozen_from_state = True`, and once without. "State" is the content of a snapshot, which a
new worker receives; "file" is what `save` writes. "Step in" is the time of a call of one step after a worker was killed
between two calls, with a spare that has loaded the base, minus the usual time of such a call. "Digest" is the digest of
the whole base, compared with the time in which `setup` loads it.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import MIB, OWN, Report, Target, choose_peers, dispatch, make_parser, ray_cluster, run_job, take_turns
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TrainingOperator

NUM_WORKERS, WIDTH, MILLION = 2, 500, 1_000_000
WAYS = {OWN: True, f"{OWN}, without `excludes_frozen_from_state`": False}
_FIGURES = {
    "state_mib": "state, MiB",
    "file_mib": "file, MiB",
    "save_ms": "save, ms",
    "step_in_s": "step in, s",
    "load_s": "load, s",
    "digest_s": "digest, s",
}
_READY_S = 120.0


class Model(torch.nn.Module):
    """A base with this many million parameters, of which a step uses a small part, and the adapter."""

    def __init__(self, base: dict[str, torch.Tensor]) -> None:
        super().__init__()
        parameters = {name: torch.nn.Parameter(each, requires_grad=False) for name, each in base.items()}
        self.base = torch.nn.ParameterDict(parameters)
        self.adapter = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        frozen: torch.Tensor = self.base["0"]
        return self.adapter(features) + features @ frozen[:WIDTH, :WIDTH]


class Adapted(TrainingOperator):
    """Trains the adapter."""

    def setup(self, config: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        began = time.perf_counter()
        base = {name: each.clone() for name, each in load_file(config["base"]).items()}
        self.load_s = time.perf_counter() - began
        torch.manual_seed(0)
        model = Model(base)
        optimizer = torch.optim.Adam(model.adapter.parameters(), lr=1e-3)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        )
        features = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
        self.register_data(train_loader=DataLoader(TensorDataset(features, features), batch_size=8))


class Remade(Adapted):
    """Declares that each `setup` creates the base."""

    excludes_frozen_from_state = True


def digest_seconds(operator: Any) -> float:
    """Return how long the digest of the base takes."""
    from raysgd.torch.objects.remade import RemadeParameters

    began = time.perf_counter()
    RemadeParameters([operator.model.module], type(operator))
    return time.perf_counter() - began


def num_bytes(state: Any) -> int:
    """Return the bytes of all tensors in a state."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(num_bytes, parts))


def wait_for_spare(trainer: Any) -> None:
    until = time.monotonic() + _READY_S
    while not trainer.status().num_spares and time.monotonic() < until:
        time.sleep(0.2)


def step_seconds(trainer: Any) -> float:
    began = time.perf_counter()
    trainer.train(num_steps=1)
    return time.perf_counter() - began


def measure(millions: int, is_remade: bool, num_kills: int) -> dict[str, list[float]]:
    """Train, save, and kill a worker this many times."""
    from safetensors.torch import save_file

    from raysgd import TorchTrainer
    from raysgd.testing import kill_worker

    found: dict[str, list[float]] = {name: [] for name in _FIGURES}
    object_store_mib = 512 + 24 * millions  # some copies of the state, in which each parameter takes 4 bytes
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ray_cluster(NUM_WORKERS + 1, object_store_mib):
        base = {str(number): torch.randn(1000, 1000) for number in range(millions)}
        save_file(base, Path(folder, "base.safetensors"))
        del base
        trainer = TorchTrainer(
            training_operator_cls=Remade if is_remade else Adapted,
            config={"base": os.path.join(folder, "base.safetensors")},
            num_workers=NUM_WORKERS,
            spare_workers=1,
            use_gpu=False,
        )
        with trainer:
            for _ in range(num_kills):
                trainer.train(num_steps=1)
                wait_for_spare(trainer)
                usual = sorted(step_seconds(trainer) for _ in range(3))[1]
                began = time.perf_counter()
                trainer.save(Path(folder, "last.pt"), blocking=False)
                found["save_ms"].append((time.perf_counter() - began) * 1000)
                trainer.save(Path(folder, "whole.pt"))
                kill_worker(trainer, 1)
                found["step_in_s"].append(step_seconds(trainer) - usual)
            found["state_mib"].append(num_bytes(trainer.state_dict()) / MIB)
            found["file_mib"].append(os.path.getsize(Path(folder, "last.pt")) / MIB)
            found["load_s"] += trainer.apply_all_operators(lambda operator: operator.load_s)
            found["digest_s"] += trainer.apply_all_operators(digest_seconds)
    return found


def main() -> None:
    dispatch({"measure": measure})
    parser = make_parser(__doc__.partition("\n")[0], repetitions=1, peers={})
    parser.add_argument("--millions", default="10,100,300", help="frozen parameters")
    arguments = parser.parse_args()
    sizes, num_kills = [int(each) for each in arguments.millions.split(",")], 3
    if arguments.smoke_test:
        arguments.repetitions, sizes, num_kills = 1, [1], 1
    report = Report("frozen_base", arguments, choose_peers(arguments, {}))
    jobs: dict[str, Callable[[], Any]] = {
        f"{name}, {size}M": functools.partial(
            run_job, __file__, "measure", millions=size, is_remade=is_remade, num_kills=num_kills
        )
        for size in sizes
        for name, is_remade in WAYS.items()
    }
    medians = report.figures("A frozen base", _FIGURES, take_turns(jobs, arguments.repetitions, report))
    ours, others = WAYS
    targets = []
    for size in sizes:
        for figure in ("state_mib", "file_mib"):
            values = [medians.get((f"{name}, {size}M", figure)) for name in (others, ours)]
            ratio = values[0] / values[1] if values[0] and values[1] else None
            targets.append(Target(f"{size}M: {_FIGURES[figure]}, without to with", 50 * size / 100, False, ratio))
        digest, load = (medians.get((f"{ours}, {size}M", figure)) for figure in ("digest_s", "load_s"))
        share = digest / load if digest and load else None
        targets.append(Target(f"{size}M: digest to load", 0.1, True, share))
    report.finish(targets)


if __name__ == "__main__":
    main()
