"""The cost of a step that can be undone after a failure: with copies before each batch, and with the default rule.

    python examples/benchmarks/undo_cost.py [--smoke-test] [--repetitions 10] [--programs "GAN;100M parameters, Adam"]

One process trains each program in turn without copies, by the default rule after the first batch of a call, and with
copies before each batch. "First batch" is the copy before the first batch, which the rule makes for every program
with a custom `train_batch`. Workers copy in parallel, each on its own device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from _common import OWN, Report, Target, choose_peers, dispatch, estimate, make_parser, run_job, scaled
from torch import nn

from raysgd.torch.parallel.undo import OpenStep, Undo

ALONE, RULE, ALWAYS = "no copies", "rule", "always"
MOST_SHARE = 0.01


class Program:
    """Models with their optimizers, and a batch that steps each of them once.

    Args:
        models: The models.
        optimizers: One for each of them.
        features: Input of the first model; each other model gets the output of the previous one.
    """

    def __init__(self, models: list[nn.Module], optimizers: list[Any], features: torch.Tensor) -> None:
        self._models, self._optimizers, self._features = models, optimizers, features
        self.undo: Undo | None = None
        self.record = OpenStep()
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda stepped, *_: self.record.note_step(stepped))

    def open_call(self, copies: bool | None) -> None:
        """Begin a call, whose batches are copied before each batch (True), by the rule (None) or never (False)."""
        self.undo = None if copies is False else Undo(self._models, self._optimizers, mode="all" if copies else "learn")
        if self.undo is not None:
            self.undo.open_call()

    def batch(self) -> tuple[float, float]:
        """Train on a batch; return its seconds, and those of the copy."""
        began = time.perf_counter()
        if self.undo is not None:
            self.undo.begin_step(self.record, nullcontext())
        copied = time.perf_counter()
        features = self._features
        for model, optimizer in zip(self._models, self._optimizers, strict=True):
            optimizer.zero_grad()
            output = model(features)
            output.square().mean().backward()
            if self.undo is not None:
                self.record.num_all_reduces += 1
                self.undo.see_all_reduce(self.record)
            optimizer.step()
            features = output.detach()
        if self.undo is not None:
            self.undo.forget(self.record)
        self.record = OpenStep()
        return time.perf_counter() - began, copied - began


def dense(width: int) -> Callable[[], Program]:
    """Return a network with ten square layers, in a custom `train_batch`."""

    def make() -> Program:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(10)))
        return Program([model], [torch.optim.Adam(model.parameters())], torch.randn(32, width))

    return make


def pair() -> Program:
    """Return the layer sizes of a GAN for images of 28 x 28."""
    models: list[nn.Module] = [
        nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 784)),
        nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 1)),
    ]
    return Program(models, [torch.optim.Adam(each.parameters()) for each in models], torch.randn(32, 64))


def table(num_rows: int) -> Callable[[], Program]:
    """Return a table of rows of 64 numbers, of which a batch uses a thousand rows."""

    def make() -> Program:
        model = nn.Embedding(num_rows, 64, sparse=True)
        rows = torch.randint(0, num_rows, (1024,))
        return Program([model], [torch.optim.SGD(model.parameters(), lr=0.1)], rows)

    return make


PROGRAMS: dict[str, Callable[[], Program]] = {
    "own `train_batch`, 10M parameters, Adam": dense(1000),
    "GAN": pair,
    "100M parameters, Adam": dense(3162),
    "2 GB embedding, sparse gradients, SGD": table(2**23),
}
SMOKE: dict[str, Callable[[], Program]] = {"own `train_batch`": dense(8)}


def measure(name: str, num_rounds: int, num_batches: int) -> dict[str, list[float]]:
    """Return the seconds of a batch in each mode, and of the copy before the first batch of a call."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    program = {**PROGRAMS, **SMOKE}[name]()
    found: dict[str, list[float]] = {mode: [] for mode in (ALONE, RULE, ALWAYS, "first")}
    for number in range(num_rounds + 1):
        for mode, copies in ((ALONE, False), (RULE, None), (ALWAYS, True)):
            program.open_call(copies)
            _, first = program.batch()
            times = [program.batch()[0] for _ in range(num_batches)]
            if number:  # the first round warms up
                found[mode].append(sum(times) / num_batches)
                found["first"] += [first] if mode == RULE else []
    return found


def main() -> None:
    dispatch({"measure": measure})
    parser = make_parser(__doc__.partition("\n")[0], repetitions=10, peers={})
    parser.add_argument("--programs", default=";".join(PROGRAMS), help="some of these")
    arguments = parser.parse_args()
    report = Report("undo_cost", arguments, choose_peers(arguments, {}))
    names = list(SMOKE) if arguments.smoke_test else arguments.programs.split(";")
    num_rounds, num_batches = (1, 2) if arguments.smoke_test else (arguments.repetitions, 3)
    rows, targets = [], []
    for name in names:
        found = run_job(__file__, "measure", name=name, num_rounds=num_rounds, num_batches=num_batches)
        step = estimate(scaled(found[ALONE], 1e3))
        report.result(OWN, "step_ms", step, program=name)
        cells = [step.text()]
        for mode in (RULE, ALWAYS):
            differences = [slow - alone for slow, alone in zip(found[mode], found[ALONE], strict=True)]
            added = estimate(scaled(differences, 1e3))
            report.result(OWN, "added_ms", added, program=name, mode=mode)
            cells.append(added.text())
            if mode == RULE and name.startswith("own"):
                targets.append(Target(f"{name}: the rule adds / step", MOST_SHARE, True, added.median / step.median))
        first = estimate(scaled(found["first"], 1e3))
        report.result(OWN, "first_batch_ms", first, program=name)
        rows.append([name, *cells, first.text()])
    headers = ["program", "step, ms", "the rule adds", "copies before each batch add", "first batch of a call"]
    report.table("Added to an undisturbed step, milliseconds", headers, rows)
    report.finish(targets)


if __name__ == "__main__":
    main()
