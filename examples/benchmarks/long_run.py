"""The driver's cost of an epoch late in a long run: with `fit`, loggers, a report and checkpoints.

    python examples/benchmarks/long_run.py [--smoke-test] [--num-workers 1] [--repetitions 1] [--epochs 20000]

The workers take one step of a model of two numbers in each epoch, so that the driver does nearly all the work. It
writes a table, JSON lines, files for TensorBoard and the report, and a checkpoint every 10 epochs. The cost is the
processor time of the driver's process, without children, and the bytes that it writes. A sample is the cost of 10
epochs with one checkpoint; "at 100" means the 20 samples after epoch 100, and so on.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import MIB, OWN, Report, Target, choose_peers, dispatch, estimate, make_parser, ray_cluster, run_job
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import Callback, Checkpointing, CSVLogger, HTMLReport, JSONLogger, Run, TensorBoardLogger

NUM_EPOCHS, SMOKE_NUM_EPOCHS = 20_000, 40
EARLY, SMOKE_EARLY = 100, 10
EVERY = 10
NUM_SAMPLES, SMOKE_NUM_SAMPLES = 20, 2
PLACES = {
    "report.html": ["report.html"],
    "table, JSON lines": ["metrics.csv", "metrics.jsonl"],
    "TensorBoard": ["tensorboard/**/*"],
    "checkpoints": ["checkpoints/*.ckpt"],
    "beside checkpoints": ["checkpoints/*.json"],
}


class Tiny(TrainingOperator):
    """One step of a model of two numbers in each epoch."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Linear(1, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.01), criterion=torch.nn.MSELoss()
        )
        x = torch.rand(8, 1)
        self.register_data(train_loader=DataLoader(TensorDataset(x, x), batch_size=8))


class Meter(Callback):
    """Records, every few epochs, what the driver has used and written so far, and how large the files are."""

    runs_last = True

    def __init__(self) -> None:
        self.used_s: list[float] = []
        self.written: list[int] = []
        self.sizes: dict[int, dict[str, int]] = {}

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        if run.epoch % EVERY == 0:
            self.used_s.append(time.process_time())
            self.written.append(_written_bytes())
        if run.epoch in (SMOKE_EARLY, EARLY, 1_000, 10_000):
            self.sizes[run.epoch] = sizes_in(run.folder)


def _written_bytes() -> int:
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar")]
    return int(line.split()[1])


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the bytes of the files of a run, by kind."""
    return {
        name: sum(path.stat().st_size for pattern in patterns for path in folder.glob(pattern) if path.is_file())
        for name, patterns in PLACES.items()
    }


def run_raysgd(num_workers: int, num_epochs: int) -> dict[str, Any]:
    """Train for this many epochs; return the cost of each 10 epochs."""
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="bench-") as place, ray_cluster(num_workers):
        folder = Path(place) / "run"
        callbacks = [CSVLogger(), JSONLogger(), TensorBoardLogger(), HTMLReport(), Checkpointing(every_n_epochs=EVERY)]
        with TorchTrainer(training_operator_cls=Tiny, num_workers=num_workers) as trainer:
            trainer.fit(num_epochs, callbacks=[*callbacks, meter], folder=folder)
        meter.sizes[num_epochs] = sizes_in(folder)
    return {
        "cpu_ms": [1e3 * (later - before) / EVERY for before, later in itertools.pairwise(meter.used_s)],
        "written_kib": [(later - before) / EVERY / 1024 for before, later in itertools.pairwise(meter.written)],
        "sizes": meter.sizes,
    }


def behind(samples: list[float], epoch: int, count: int) -> list[float]:
    """Return the samples of the epochs after an epoch, or the last samples if too few follow."""
    first = min(epoch // EVERY, len(samples) - count)
    return samples[first : first + count]


def report_costs(report: Report, runs: list[dict[str, Any]], epochs: list[int], count: int) -> dict[int, float]:
    """Record and print the cost of an epoch early and late; return the medians of processor time by epoch."""
    rows, medians = [], {}
    for epoch in epochs:
        cells = []
        for figure in ("cpu_ms", "written_kib"):
            found = estimate([sample for run in runs for sample in behind(run[figure], epoch, count)])
            report.result(OWN, figure, found, epoch=epoch)
            cells.append(found.text())
            if figure == "cpu_ms":
                medians[epoch] = found.median
        rows.append([f"{epoch:,}", *cells])
    report.table("An epoch of the driver", ["at epoch", "CPU, ms", "written, KiB"], rows)
    return medians


def report_sizes(report: Report, sizes: dict[str, dict[str, int]]) -> float:
    """Record and print how large the files are; return the MiB of the report at the end."""
    rows = []
    for epoch, found in sizes.items():
        for name, size in found.items():
            report.result(OWN, "size_mib", size / MIB, epoch=int(epoch), what=name)
        rows.append([f"{int(epoch):,}", *(f"{size / MIB:.3f}" for size in found.values())])
    report.table("Files of the run, MiB", ["after epoch", *PLACES], rows)
    return list(sizes.values())[-1]["report.html"] / MIB


def main() -> None:
    dispatch({OWN: run_raysgd})
    parser = make_parser(__doc__.partition("\n")[0], repetitions=1, peers={})
    parser.set_defaults(num_workers=1)
    parser.add_argument("--epochs", type=int, default=NUM_EPOCHS, help="how long the run is")
    arguments = parser.parse_args()
    is_short = arguments.smoke_test
    num_epochs = SMOKE_NUM_EPOCHS if is_short else arguments.epochs
    early, count = (SMOKE_EARLY, SMOKE_NUM_SAMPLES) if is_short else (EARLY, NUM_SAMPLES)
    report = Report("long_run", arguments, choose_peers(arguments, {}))
    job = functools.partial(run_job, __file__, OWN, num_workers=arguments.num_workers, num_epochs=num_epochs)
    runs = [job() for _ in range(1 if is_short else arguments.repetitions)]

    epochs = [early, *(epoch for epoch in (1_000, 10_000) if epoch < num_epochs), num_epochs]
    medians = report_costs(report, runs, epochs, count)
    report_mib = report_sizes(report, runs[0]["sizes"])
    report.finish(
        [
            Target("CPU of an epoch, at the end / early", 1.2, True, medians[num_epochs] / medians[early]),
            Target("the report at the end, MiB", 2.0, True, report_mib),
        ]
    )


if __name__ == "__main__":
    main()
