"""The cost of callbacks in each step: without callbacks, and with a worker callback that does nothing.

    python examples/benchmarks/callback_cost.py [--smoke-test] [--repetitions 5]

One worker in this process takes steps of a tiny model, so that a step is nearly all Python. Epochs take turns: with
the place where callbacks hook into the step taken out (the floor), without callbacks, with a `WorkerCallback` that
does nothing before and after each step, with a `Callback` in the driver that does nothing around each epoch, and with
the journal of each step that `fit(folder=...)` keeps, opening and closing it included. The cost is the median over
epochs of what a step takes longer than in the epoch of the floor beside it, in seconds of the processor. The goodput
ledger is measured in the same way, against epochs without it.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from _common import OWN, Report, Target, choose_peers, dispatch, estimate, make_parser, run_job
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import Callback, Run, WorkerCallback
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.worker_callbacks import InstalledCallbacks

NUM_STEPS, SMOKE_NUM_STEPS = 1000, 20
NUM_EPOCHS, SMOKE_NUM_EPOCHS = 15, 2
FIGURES = {"none": "none_us", "worker": "worker_callback_us", "driver": "driver_callback_us", "journal": "journal_us"}
LEDGER = "ledger_us"


class Tiny(TrainingOperator):
    """A model with two numbers."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Linear(1, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.01), criterion=torch.nn.MSELoss()
        )
        x = torch.rand(config["num_steps"], 1)
        self.register_data(train_loader=DataLoader(TensorDataset(x, x), batch_size=1))


class InWorker(WorkerCallback):
    """Overrides the methods that are called in every step, and does nothing."""

    def on_gradients(self, operator: Any, optimizer: Any) -> None: ...

    def on_step_end(self, operator: Any, step: int, metrics: Mapping[str, Any]) -> None: ...


class InDriver(Callback):
    """Overrides the methods that are called in every epoch, and does nothing."""

    def on_epoch_begin(self, run: Run) -> None: ...

    def on_result(self, run: Run, result: dict[str, Any]) -> None: ...


class NoLedger(Ledger):
    """Records nothing while a training call runs."""

    def enter(self, name: str) -> None: ...

    def commit(self) -> None: ...

    def timing(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches


def _use_ledger(trainer: TorchTrainer, ledger: Ledger) -> None:
    replica = trainer.worker_group.local_replica
    for part in (replica, replica._hosted):
        part._ledger = ledger


def _take_out(operator: Any) -> None:
    operator._raysgd.hooks._callbacks = InstalledCallbacks()


def _put_back(operator: Any) -> None:
    operator._raysgd.hooks._callbacks = operator._raysgd.callbacks


def step_us(num_steps: int, num_epochs: int) -> dict[str, list[float]]:
    """Return the microseconds of a step in each epoch, by contender."""
    found: dict[str, list[float]] = {name: [] for name in ("floor", "no ledger", *FIGURES)}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        TorchTrainer(training_operator_cls=Tiny, config={"num_steps": num_steps}, use_local=True) as trainer,
    ):
        epochs: dict[str, Callable[[], Any]] = {
            "floor": lambda: trainer.fit(1),
            "no ledger": lambda: trainer.fit(1),
            "none": lambda: trainer.fit(1),
            "worker": lambda: trainer.fit(1, callbacks=[InWorker()]),
            "driver": lambda: trainer.fit(1, callbacks=[InDriver()]),
            "journal": lambda: trainer.fit(1, folder=folder),
        }
        for number, (name, fit) in itertools.product(range(num_epochs + 1), epochs.items()):
            trainer.apply_all_operators(_take_out if name == "floor" else _put_back)
            _use_ledger(trainer, NoLedger() if name == "no ledger" else Ledger())
            began = time.process_time()
            fit()
            if number:  # the first round warms up
                found[name].append(1e6 * (time.process_time() - began) / num_steps)
    return found


def main() -> None:
    dispatch({OWN: step_us})
    parser = make_parser(__doc__.partition("\n")[0], repetitions=5, peers={})
    arguments = parser.parse_args()
    arguments.num_workers = 1
    report = Report("callback_cost", arguments, choose_peers(arguments, {}))
    num_steps = SMOKE_NUM_STEPS if arguments.smoke_test else NUM_STEPS
    num_epochs = SMOKE_NUM_EPOCHS if arguments.smoke_test else NUM_EPOCHS
    job = functools.partial(run_job, __file__, OWN, num_steps=num_steps, num_epochs=num_epochs)
    runs = [job() for _ in range(1 if arguments.smoke_test else arguments.repetitions)]

    rows, medians = [], {}
    for name, figure in FIGURES.items():
        added = [ours - floor for run in runs for ours, floor in zip(run[name], run["floor"], strict=True)]
        cost = estimate(added)
        medians[name] = cost.median
        report.result(OWN, figure, cost, num_workers=1)
        rows.append([figure, cost.text()])
    added = [ours - without for run in runs for ours, without in zip(run["none"], run["no ledger"], strict=True)]
    ledger = estimate(added)
    report.result(OWN, LEDGER, ledger, num_workers=1)
    rows.append([LEDGER, ledger.text()])
    floor = estimate([value for run in runs for value in run["floor"]])
    report.result(OWN, "step_us", floor, num_workers=1)
    report.table("Added to a step, microseconds", ["what", "us"], rows)
    print(f"\nA step itself takes {floor.text()} us.", flush=True)
    report.finish(
        [
            Target("no callbacks, us in each step", 5.0, True, medians["none"]),
            Target("the ledger, us in each step", 10.0, True, ledger.median),
            Target("the journal, us in each step", 20.0, True, medians["journal"]),
            Target("a worker callback that does nothing, us in each step", 20.0, True, medians["worker"]),
        ]
    )


if __name__ == "__main__":
    main()
