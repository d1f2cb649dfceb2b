"""Streams: the cost of loading, how soon the middle of an epoch is open, and lost or repeated rows after a failure.

    python examples/benchmarks/streams.py [--smoke-test] [--repetitions 9] [--peers datasets,mosaic,...]

"Epoch": one process trains a small network on Parquet files that two loader processes read; raysgd and a plain loop
over a `DataLoader` of `datasets` take turns in one process. "Opening": from a saved position to its first batch, in a
new process, with a shuffle buffer of 10,000; memory is the growth of the process. "Positions": two ranks read some
batches each, then continue from the saved position, with two ranks and with three. For raysgd, one of two workers is
killed, and a checkpoint is continued by three workers.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _stream_peers
import numpy as np
import torch
from _common import (
    MIB,
    OWN,
    JobError,
    Report,
    Target,
    choose_peers,
    dispatch,
    in_pairs,
    make_parser,
    ray_cluster,
    run_job,
)

from raysgd import TorchTrainer, TrainingOperator
from raysgd.data import HuggingFaceStream, ParquetStream, Shard, Stream

PEERS = {
    "datasets": "datasets",
    "torchdata": "torchdata",
    "mosaic": "streaming",
    "litdata": "litdata",
    "ray_data": "ray.data",
}
BATCH_SIZE, NUM_FEATURES, NUM_LOADERS = 256, 64, 2
POSITIONS = {
    "lost": "lost",
    "repeated": "repeated",
    "lost_resized": "lost, 2 to 3",
    "repeated_resized": "repeated, 2 to 3",
}
_MOST_SLOWER, _MOST_OPEN_S, _MOST_OPEN_MIB = 1.01, 1.0, 64.0


# --------------------------------------------------------------------------------------------------- one epoch


class Network(torch.nn.Sequential):
    """Takes some milliseconds per batch."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(NUM_FEATURES, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
        self.extend([torch.nn.ReLU(), torch.nn.Linear(512, 10)])


class Classifier(TrainingOperator):
    """Trains the network on a stream."""

    def setup(self, config: dict[str, Any]) -> None:
        model = Network()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        source: Stream = ParquetStream(config["folder"])
        if config["with_datasets"]:
            source = HuggingFaceStream(_dataset_of(config["folder"]))
        stream = source.map(lambda row: (row["features"], row["label"]))
        self.register_data(train_loader=stream.batch(BATCH_SIZE, num_workers=NUM_LOADERS))


def run_epochs(num_files: int, rows_per_file: int, num_pairs: int, peer: str | None) -> dict[str, Any]:
    """Measure epochs of raysgd, in turn with a plain loop if there is a peer, on Parquet files or its dataset."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _write_samples(Path(folder), num_files, rows_per_file)
        config = {"folder": folder, "with_datasets": peer == "the same dataset"}
        options = {"use_local": True, "use_gpu": False, "split_batches": True}
        with TorchTrainer(training_operator_cls=Classifier, config=config, **options) as trainer:
            own = functools.partial(_timed, lambda: trainer.train()["num_samples"], num_files * rows_per_file)
            if peer is None:
                return {OWN: {"epoch_s": [own() for _ in range(num_pairs)]}}
            plain = functools.partial(_timed, _plain_epochs(folder), num_files * rows_per_file)
            pairs = in_pairs(own, plain, num_pairs=num_pairs, num_warm_up=1)
    of_own, of_plain = zip(*pairs, strict=True)
    ratios = [one / other for one, other in pairs]
    return {f"{OWN}, {peer}": {"epoch_s": list(of_own), "ratio": ratios}, "datasets": {"epoch_s": list(of_plain)}}


def _write_samples(folder: Path, num_files: int, rows_per_file: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    chance = np.random.default_rng(0)
    for number in range(num_files):
        values = chance.normal(size=rows_per_file * NUM_FEATURES).astype(np.float32)
        features = pa.FixedSizeListArray.from_arrays(pa.array(values), NUM_FEATURES)
        rows = pa.table({"features": features, "label": chance.integers(10, size=rows_per_file)})
        parquet.write_table(rows, folder / f"{number:05}.parquet")


def _dataset_of(folder: str) -> Any:
    from datasets import load_dataset

    files = sorted(str(each) for each in Path(folder).iterdir())
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=f"{folder}-cache")
    return rows.with_format("torch")


def _plain_epochs(folder: str) -> Callable[[], int]:
    from torch.utils.data import DataLoader

    loader = DataLoader(_dataset_of(folder), batch_size=BATCH_SIZE, num_workers=NUM_LOADERS)
    model, criterion = Network(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def epoch() -> int:
        num_rows = 0
        for batch in loader:
            optimizer.zero_grad()
            criterion(model(batch["features"]), batch["label"]).backward()
            optimizer.step()
            num_rows += len(batch["label"])
        return num_rows

    return epoch


def _timed(epoch: Callable[[], int], num_rows: int) -> float:
    began = time.perf_counter()
    assert epoch() == num_rows, "each row once"
    return time.perf_counter() - began


# --------------------------------------------------------------------------------------------- opening the middle


class Numbers(Stream):
    """A stream of computed rows."""

    def __init__(self, num_shards: int, rows_per_shard: int) -> None:
        self._num_shards, self._rows_per_shard = num_shards, rows_per_shard

    def shards(self) -> list[Shard]:
        return [Shard(f"shard-{number}", self._rows_per_shard) for number in range(self._num_shards)]

    def open(self, shard: str, start: int) -> Iterator[Any]:
        return iter(range(start, self._rows_per_shard))


def open_middle(folder: str | None, num_shards: int, rows_per_shard: int) -> dict[str, float]:
    """Measure the time from a position in the middle to its first batch."""
    from raysgd.core.arrays.division import Division
    from raysgd.streams.lanes import NUM_LANES
    from raysgd.streams.source import stream_data
    from raysgd.torch.data.batches import TensorCollate
    from raysgd.torch.data.feed import RankSums
    from raysgd.torch.parallel.strategy import Strategy

    consumed, lanes = num_shards * rows_per_shard // 2, None
    if folder is not None:  # of unknown lengths, so the position has the state of each lane
        import pyarrow.parquet as _  # noqa: F401

        lanes = [[num_shards // NUM_LANES // 2, 0, 0, 0]] * NUM_LANES
    Path("/proc/self/clear_refs").write_text("5")  # the peak memory counts from here
    base = _memory_mib("VmRSS")
    began = time.perf_counter()
    source: Stream = Numbers(num_shards, rows_per_shard) if folder is None else ParquetStream(folder)
    data = stream_data(source.shuffle(10_000).batch(BATCH_SIZE), "train", Division, 1)
    from raysgd.streams.source import StreamSource

    passes = StreamSource(data, RankSums(Strategy()), 0, TensorCollate())
    state = passes.state(consumed, True)
    position = {"pass_index": 0, "consumed": consumed, "is_mid_pass": True, **state, "lanes": lanes}
    passes.load_state(position)
    next(passes.open(0, consumed))
    open_s = time.perf_counter() - began
    return {"open_s": open_s, "open_mib": _memory_mib("VmHWM") - base}


def _memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / MIB


# ------------------------------------------------------------------------------------------------------- positions


class RowCounts(torch.nn.Module):
    """A weight for each row, which counts how often it was used in training."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(num_rows, dtype=torch.float64))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.counts[index]


class CountingRows(TrainingOperator):
    """Counts rows with its weights, which are restored together with a state."""

    def setup(self, config: dict[str, Any]) -> None:
        model = RowCounts(config["num_rows"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=2.0 * _stream_peers.BATCH),
            criterion=lambda counts, target: -counts.mean(),
        )
        stream = ParquetStream(f"{config['folder']}/parquet").map(lambda row: (row["number"], 0.0))
        self.register_data(train_loader=stream.batch(2 * _stream_peers.BATCH))


def own_positions(folder: str, num_rows: int, num_batches: int) -> dict[str, int]:
    """Count rows after a kill, and after three workers continue a checkpoint of two."""
    from raysgd import testing

    def trainer_of(num_workers: int) -> TorchTrainer:
        return TorchTrainer(
            training_operator_cls=CountingRows,
            config={"folder": folder, "num_rows": num_rows},
            num_workers=num_workers,
            num_cpus_per_worker=0.5,
            use_gpu=False,
            split_batches=True,
        )

    with ray_cluster(4):
        with trainer_of(2) as trainer:
            testing.kill_worker(trainer, 1, at=f"step:{num_batches}")
            trainer.train()
            killed = _apart(trainer, "lost", "repeated")
        with trainer_of(2) as trainer:
            trainer.train(num_steps=num_batches)
            trainer.save(f"{folder}/checkpoint")
        with trainer_of(3) as trainer:
            trainer.load(f"{folder}/checkpoint")
            trainer.train()
            return {**killed, **_apart(trainer, "lost_resized", "repeated_resized")}


def _apart(trainer: TorchTrainer, lost: str, repeated: str) -> dict[str, int]:
    counts = trainer.get_model().counts.detach().round().long()
    return {lost: int((counts == 0).sum()), repeated: int((counts - 1).clamp(min=0).sum())}


def peer_positions(script: str, name: str, folder: str, num_rows: int, num_batches: int) -> dict[str, int]:
    """Count rows of a peer that continues from the position that it saved."""

    def read(num_ranks: int, num_batches: int | None, resumes: bool) -> list[int]:
        options: dict[str, Any] = {"folder": folder, "num_batches": num_batches, "timeout_s": 120.0}
        if name == "ray_data":
            return run_job(script, "read_with_ray", num_ranks=num_ranks, **options)
        return run_job(script, "read", processes=num_ranks, name=name, resumes=resumes, **options)

    begun = read(2, num_batches, resumes=False)
    found: dict[str, int] = {}
    for size, suffix in ((2, ""), (3, "_resized")):
        try:
            seen = Counter([*begun, *read(size, None, resumes=True)])
        except JobError as error:
            print(f"\n* {name}: {size} ranks cannot go on from what two have saved\n\n```\n{str(error)[-600:]}\n```")
            continue
        found[f"lost{suffix}"] = sum(1 for number in range(num_rows) if not seen[number])
        found[f"repeated{suffix}"] = sum(count - 1 for count in seen.values())
    return found


# ------------------------------------------------------------------------------------------------------------- main


def read_with_ray(**sizes: Any) -> list[int]:
    """Read with Ray Data, in a separate cluster."""
    with ray_cluster(4):
        return _stream_peers.read_with_ray(**sizes)


def write_for(name: str, folder: str, num_files: int, rows_per_file: int) -> None:
    """Write rows in the format of a peer."""
    _stream_peers.WRITERS[name](Path(folder), num_files, rows_per_file)


def main() -> None:
    roles = {"epochs": run_epochs, "open": open_middle, "own_positions": own_positions, "read": _stream_peers.read}
    dispatch({**roles, "read_with_ray": read_with_ray, "write": write_for})
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=9, peers=PEERS).parse_args()
    peers = choose_peers(arguments, PEERS)
    report = Report("streams", arguments, peers)
    small = arguments.smoke_test
    sizes = {"num_files": 4 if small else 40, "rows_per_file": 300 if small else 500}
    sizes["num_pairs"] = 2 if small else arguments.repetitions
    ratios: dict[str, float] = {}
    for peer in SOURCES if "datasets" in peers.selected else (None,):
        epochs = run_job(__file__, "epochs", **sizes, peer=peer)
        report.figures(
            f"One epoch{'' if peer is None else f', {peer}'}",
            {"epoch_s": "s"},
            {name: [each] for name, each in epochs.items()},
        )
        if peer is not None:
            ratios[peer] = report.pairs("Paired", f"raysgd, {peer} / DataLoader", [epochs[f"{OWN}, {peer}"]]).median
    opened = _opened(report, 200 if small else 10_000, 1000 if small else 100_000, 1 if small else 3)
    _positions(report, peers.selected, 8 if small else 40)
    report.finish(
        [
            *[
                Target(f"an epoch of {peer}, of that of a plain DataLoader", _MOST_SLOWER, True, ratios.get(peer))
                for peer in SOURCES
            ],
            *[Target(f"opening the middle of {what}, s", _MOST_OPEN_S, True, opened[what, "open_s"]) for what in KINDS],
            *[Target(f"the same, MiB, {what}", _MOST_OPEN_MIB, True, opened[what, "open_mib"]) for what in KINDS],
        ]
    )


SOURCES = ("Parquet files", "the same dataset")
KINDS = ("computed rows", "Parquet files")


def _opened(report: Report, num_shards: int, rows_per_shard: int, num_runs: int) -> dict[tuple[str, str], float]:
    with tempfile.TemporaryDirectory() as folder:
        _stream_peers.write(Path(folder), num_shards, 40)
        files = {"folder": f"{folder}/parquet", "num_shards": num_shards, "rows_per_shard": 40}
        computed = {"folder": None, "num_shards": num_shards, "rows_per_shard": rows_per_shard}
        runs = {
            kind: [run_job(__file__, "open", **sizes) for _ in range(num_runs)]
            for kind, sizes in zip(KINDS, (computed, files), strict=True)
        }
    return report.figures("Opening the middle", {"open_s": "s", "open_mib": "MiB more"}, runs)


def _positions(report: Report, peers: tuple[str, ...], num_files: int) -> None:
    rows_per_file, num_batches = 40, 12
    num_rows = num_files * rows_per_file
    with tempfile.TemporaryDirectory() as folder:
        _stream_peers.write(Path(folder), num_files, rows_per_file)
        sizes = {"folder": folder, "num_rows": num_rows, "num_batches": num_batches}
        runs: dict[str, list[Any]] = {OWN: [run_job(__file__, "own_positions", **sizes)]}
        for name in peers:
            try:
                if name in _stream_peers.WRITERS:
                    run_job(
                        __file__, "write", name=name, folder=folder, num_files=num_files, rows_per_file=rows_per_file
                    )
                runs[name] = [peer_positions(__file__, name, **sizes)]
            except JobError as error:
                report.failed(name, error)
        report.figures(f"Rows of {num_rows}, two ranks", POSITIONS, runs)


if __name__ == "__main__":
    main()
