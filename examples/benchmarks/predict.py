"""Predictions: the time of a batch with `trainer.predict`, compared with a plain loop in one process.

    python examples/benchmarks/predict.py [--smoke-test] [--num-workers 2] [--repetitions 3]

The same rows go through the same model in batches of the same size: in a hand-written loop, without gradients, and on
live workers, whose results come back to the driver in the order of the rows. A batch of `mlp_tiny` takes almost no
time, so its row shows the cost of splitting, moving and joining; `cnn_large` takes milliseconds per batch, like real
models. All workers run on this machine, with one thread each, like the loop.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, ray_cluster, run_job, take_turns
from _workloads import WORKLOADS, StockOperator, config_of

LOOP = "loop"
FIGURES = {"batch_ms": "one batch, ms", "paired_share": "of the loop's time"}
NUM_BATCHES = {"mlp_tiny": 1000, "cnn_large": 100}
SMOKE_NUM_BATCHES = {"mlp_tiny": 10}
_MOST_OF_THE_LOOP = 0.65


def rows_of(workload: str, num_batches: int) -> Any:
    """Return the rows, the same in every process."""
    chosen = WORKLOADS[workload]
    shape = (num_batches * chosen.batch_size, *chosen.input_shape)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def predict_by_hand(model: torch.nn.Module, rows: Any, batch_size: int) -> Any:
    with torch.no_grad():
        batches = [model(torch.from_numpy(rows[at : at + batch_size])) for at in range(0, len(rows), batch_size)]
    return torch.cat(batches).numpy()


def run(workload: str, num_batches: int, num_workers: int, num_passes: int) -> dict[str, list[float]]:
    """Run over all rows, in turn by hand in this process and by workers, of which one may be this process."""
    chosen, rows = WORKLOADS[workload], rows_of(workload, num_batches)
    torch.set_num_threads(1)
    by_hand = functools.partial(predict_by_hand, chosen.model().eval(), rows, chosen.batch_size)
    with ray_cluster(num_workers), _trainer(workload, num_workers) as trainer:
        on_workers = functools.partial(trainer.predict, rows, batch_size=chosen.batch_size)
        assert np.allclose(on_workers(), by_hand(), atol=1e-5), "the model is the same, and so are the results"
        pairs = [(_seconds(by_hand), _seconds(on_workers)) for _ in range(num_passes)]
    return {
        "loop_ms": [1e3 * loop / num_batches for loop, _ in pairs],
        "batch_ms": [1e3 * own / num_batches for _, own in pairs],
        "paired_share": [own / loop for loop, own in pairs],
    }


def _trainer(workload: str, num_workers: int) -> Any:
    from raysgd import TorchTrainer

    config = config_of(WORKLOADS[workload].with_steps(1), num_workers)
    return TorchTrainer(training_operator_cls=StockOperator, config=config, num_workers=num_workers, use_gpu=False)


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    dispatch({OWN: run})
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=3, peers={}).parse_args()
    peers = choose_peers(arguments, {})
    num_batches, num_passes = (SMOKE_NUM_BATCHES, 1) if arguments.smoke_test else (NUM_BATCHES, 5)
    counts = [1] if arguments.smoke_test else sorted({1, arguments.num_workers})
    report = Report("predict", arguments, peers)
    shares = dict[str, float]()
    for workload in num_batches:
        jobs: dict[str, Callable[[], Any]] = {
            f"{OWN}, {count} worker{'s' if count > 1 else ''}": functools.partial(
                run_job,
                __file__,
                OWN,
                workload=workload,
                num_batches=num_batches[workload],
                num_workers=count,
                num_passes=num_passes,
            )
            for count in counts
        }
        runs = take_turns(jobs, 1 if arguments.smoke_test else arguments.repetitions, report)
        loops = {LOOP: [{"batch_ms": each["loop_ms"]} for found in runs.values() for each in found]}
        medians = report.figures(f"Predictions of {workload}", FIGURES, {**loops, **runs})
        shares[workload] = medians[list(runs)[-1], "paired_share"]
    name = f"cnn_large: time of {counts[-1]} workers, of that of the loop"
    report.finish([Target(name, _MOST_OF_THE_LOOP, True, shares.get("cnn_large"))])


if __name__ == "__main__":
    main()
