"""Ray Data: the cost of a batch that two workers read from one dataset, by the number of batches per block.

    python examples/benchmarks/ray_data.py [--smoke-test] [--repetitions 3]

Two workers train a model of one number on a Ray Data dataset, so that nearly all time is reading. A row of the table
is a value of `RayBatches(batches_per_block=...)`: with 1, steps are those of one process; larger values cost Ray less
per row. "Bare" is the same dataset read by two actors without a library, in equal shards by Ray's own split, which
does not keep the order of batches and drops rows. The first epoch warms up.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, ray_cluster, run_job, take_turns

from raysgd import TrainingOperator

BARE = "bare"
BATCH_SIZE, NUM_WORKERS = 32, 2
BLOCKS, SMOKE_BLOCKS = (1, 4, 16), (1, 4)
FIGURES = {"batch_ms": "one batch of each worker, ms"}
_MOST_OF_SINGLE = 0.5


class Line(TrainingOperator):
    """A model of one number."""

    def setup(self, config: dict[str, Any]) -> None:
        from raysgd.data import RayBatches

        model = torch.nn.Linear(1, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.01), criterion=torch.nn.MSELoss()
        )
        batches = RayBatches(
            config["dataset"],
            batch_size=BATCH_SIZE,
            feature_columns=["id"],
            label_column=["id"],
            transform=_as_floats,
            batches_per_block=config["batches_per_block"],
        )
        self.register_data(train_loader=batches)


def _as_floats(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(part.float() / 1e6 for part in batch)


def run_own(num_batches: int, num_passes: int, batches_per_block: int) -> dict[str, list[float]]:
    """Return the times of a trainer's epochs."""
    from raysgd import TorchTrainer

    with ray_cluster(NUM_WORKERS + 2):
        config = {"dataset": _dataset(num_batches), "batches_per_block": batches_per_block}
        with TorchTrainer(training_operator_cls=Line, config=config, num_workers=NUM_WORKERS, use_gpu=False) as trainer:
            return _timed(lambda: trainer.train()["num_samples"], num_batches, num_passes)


def run_bare(num_batches: int, num_passes: int) -> dict[str, list[float]]:
    """Return the times of two actors' epochs."""
    with ray_cluster(NUM_WORKERS + 2):
        import ray

        @ray.remote(num_cpus=1)
        class Reader:
            def __init__(self, iterator: Any) -> None:
                self._iterator = iterator

            def read(self) -> int:
                batches = self._iterator.iter_torch_batches(batch_size=BATCH_SIZE)
                return sum(len(batch["id"]) for batch in batches)

        readers = [Reader.remote(each) for each in _dataset(num_batches).streaming_split(NUM_WORKERS, equal=True)]
        return _timed(lambda: sum(ray.get([reader.read.remote() for reader in readers])), num_batches, num_passes)


def _dataset(num_batches: int) -> Any:
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.range(num_batches * BATCH_SIZE * NUM_WORKERS, override_num_blocks=8)


def _timed(read: Callable[[], int], num_batches: int, num_passes: int) -> dict[str, list[float]]:
    assert read() == num_batches * BATCH_SIZE * NUM_WORKERS, "each row once"
    found = []
    for _ in range(num_passes):
        began = time.perf_counter()
        read()
        found.append(1e3 * (time.perf_counter() - began) / num_batches)
    return {"batch_ms": found}


def main() -> None:
    dispatch({OWN: run_own, BARE: run_bare})
    parser = make_parser(__doc__.partition("\n")[0], repetitions=3, peers={BARE: "ray"})
    arguments = parser.parse_args()
    arguments.num_workers = NUM_WORKERS
    peers = choose_peers(arguments, {BARE: "ray"})
    report = Report("ray_data", arguments, peers)
    blocks, num_batches, num_passes = (SMOKE_BLOCKS, 4, 1) if arguments.smoke_test else (BLOCKS, 200, 3)
    sizes = {"num_batches": num_batches, "num_passes": num_passes}
    jobs: dict[str, Callable[[], Any]] = {
        _name(count): functools.partial(run_job, __file__, OWN, **sizes, batches_per_block=count) for count in blocks
    }
    jobs |= {name: functools.partial(run_job, __file__, name, **sizes) for name in peers.selected}
    runs = take_turns(jobs, 1 if arguments.smoke_test else arguments.repetitions, report)
    medians = report.figures("Reading from Ray Data", FIGURES, runs)
    share = medians[_name(blocks[-1]), "batch_ms"] / medians[_name(1), "batch_ms"]
    report.finish([Target(f"{blocks[-1]} batches at a time, of the time of 1", _MOST_OF_SINGLE, True, share)])


def _name(batches_per_block: int) -> str:
    return f"{OWN}, {batches_per_block} per block"


if __name__ == "__main__":
    main()
