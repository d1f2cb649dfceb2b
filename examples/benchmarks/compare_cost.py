"""The cost of comparing the weights of the workers: of one comparison, and as a share of the whole time.

    python examples/benchmarks/compare_cost.py [--smoke-test] [--num-steps 10]

Two workers train models of different sizes with Adam on batches of 32, in calls of some steps. Each worker records
how long it took to compute its checksums; the share is the time of all comparisons divided by the time of all calls.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from _common import OWN, Report, Target, choose_peers, dispatch, estimate, make_parser, ray_cluster, run_job
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.trainer.messages.comparison import ComparisonPace

MODELS = {"100 parameters": (1, 9), "1M parameters": (1, 1000), "10M parameters": (10, 1000)}
NUM_CALLS, SMOKE_NUM_CALLS = 40, 3
MOST_SHARE = 0.01


class Layers(TrainingOperator):
    """Square layers."""

    def setup(self, config: dict[str, Any]) -> None:
        depth, width = config["layers"]
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.Adam(model.parameters()), criterion=nn.MSELoss()
        )
        x = torch.randn(2048, width)
        self.register_data(train_loader=DataLoader(TensorDataset(x, x), batch_size=32))


def compare(model: str, num_calls: int, num_steps: int, num_workers: int) -> dict[str, list[float]]:
    """Return the milliseconds of each comparison and of a step in each call, and the share of all comparisons."""
    calls: list[tuple[float, float]] = []
    note_call = ComparisonPace.note_call

    def noted(pace: ComparisonPace, seconds: float, costs_s: Sequence[float]) -> None:
        calls.append((seconds, max(costs_s, default=0.0)))
        note_call(pace, seconds, costs_s)

    ComparisonPace.note_call = noted  # type: ignore[method-assign]
    with ray_cluster(num_cpus=num_workers * 2):
        config = {"layers": MODELS[model]}
        with TorchTrainer(training_operator_cls=Layers, num_workers=num_workers, config=config) as trainer:
            trainer.train(num_steps=num_steps)  # the first call warms up
            calls.clear()
            for _ in range(num_calls):
                trainer.train(num_steps=num_steps)
    total_s, costs_s = sum(seconds for seconds, _ in calls), [cost_s for _, cost_s in calls if cost_s]
    return {
        "compare_ms": [1e3 * cost_s for cost_s in costs_s],
        "step_ms": [1e3 * seconds / num_steps for seconds, _ in calls],
        "share": [sum(costs_s) / total_s],
    }


def main() -> None:
    dispatch({OWN: compare})
    parser = make_parser(__doc__.partition("\n")[0], repetitions=NUM_CALLS, peers={})
    parser.add_argument("--num-steps", type=int, default=10, help="steps of a call")
    arguments = parser.parse_args()
    report = Report("compare_cost", arguments, choose_peers(arguments, {}))
    num_calls = SMOKE_NUM_CALLS if arguments.smoke_test else arguments.repetitions
    rows, targets = [], []
    for model in MODELS:
        job = functools.partial(run_job, __file__, OWN, model=model, num_calls=num_calls)
        found = job(num_steps=arguments.num_steps, num_workers=arguments.num_workers)
        cells = [model]
        for figure, values in found.items():
            each = estimate(values or [0.0])
            report.result(OWN, figure, each, model=model)
            cells.append(each.text())
        rows.append([*cells, str(len(found["compare_ms"]))])
        targets.append(Target(f"{model}: share of the time", MOST_SHARE, True, found["share"][0]))
    report.table(f"Comparisons in {num_calls} calls", ["model", "one, ms", "step, ms", "share", "number"], rows)
    report.finish(targets)


if __name__ == "__main__":
    main()
