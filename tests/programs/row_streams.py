"""Programs about streams: rows in shards, in batches that are trained on as in `counts`.

- `source`: what is read: a list, a function, an own format that knows its lengths or not, JSON lines or Parquet.
- `shards`: how many shards or files there are.
- `shuffle`, `filter`, `take`, `bad`: what becomes of the rows; with `bad=skip` some cannot be read.
- `processes`: how many processes load for a worker.
- `second`: whether a call in the middle brings another stream.

In what order one process reads the rows is for the library to say, which is asked for it. That each row comes once in
a pass, and none that was left out, is compared with the plain rows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from raysgd.data import IterableStream, JSONLinesStream, ParquetStream, Shard, Stream
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.programs.counts import WITH_LABELS, Collate, OwnBatch, Rows, Weighing, trained_plainly
from tests.programs.grammar import Choices, Value, Words
from tests.programs.outcomes import Outcome
from tests.programs.parts import OPTIMIZERS, Kind, arm, chunks, flat, network, steps_of

BUFFER = 130
FIRST_OF_OTHERS = 40
"""Rows of the stream that a call brings have the numbers from here on."""


class Unreadable(ValueError):
    """What a row that cannot be read raises."""


class Sharded(Stream):
    """An own format: the numbers of the rows, a part of them in each shard. The lengths may be unknown."""

    def __init__(self, first: int, num_rows: int, num_shards: int, knows: bool) -> None:
        self.parts, self.knows = parts_of(first, num_rows, num_shards), knows

    def shards(self) -> Sequence[Shard]:
        return [Shard(str(at), len(part) if self.knows else None) for at, part in enumerate(self.parts)]

    def open(self, shard: str, start: int) -> Iterator[int]:
        return iter(self.parts[int(shard)][start:])


def parts_of(first: int, num_rows: int, num_shards: int) -> list[list[int]]:
    """Return the numbers in each shard; the first one has one more than its share."""
    numbers = list(range(first, first + num_rows))
    return [part for part in chunks(numbers, num_rows // num_shards + 1) if part]


class Numbers:
    """The numbers as a function that returns an iterable."""

    def __init__(self, first: int, num_rows: int) -> None:
        self.first, self.num_rows = first, num_rows

    def __call__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.num_rows))


class NumberOf:
    """The number in a row of a file."""

    def __call__(self, row: Any) -> int:
        number: int = row["number"]
        return int(number)


class RowOf:
    """The row with a number; some cannot be read."""

    def __init__(self, words: Words) -> None:
        self.rows, self.is_bad = Rows(words), words["bad"] == "skip"

    def __call__(self, number: int) -> Any:
        if self.is_bad and number % 5 == 2:
            raise Unreadable(f"row {number}")
        return (*self.rows[number], number) if len(self.rows[number]) == 2 else self.rows[number]


class IsKept:
    def __call__(self, number: int) -> bool:
        return number % 3 != 0


class WithoutNumber:
    """The loader's own way to make a batch, of rows that have a number."""

    def __call__(self, rows: Sequence[Any]) -> Any:
        return torch.utils.data.default_collate([row[:2] for row in rows])


class OnlyNumbers:
    def __call__(self, rows: Sequence[Any]) -> Any:
        return (torch.tensor([row[-1] for row in rows]),)


def stream_of(words: Words, folder: str, first: int = 0, size: int | None = None, collate: Any = None) -> Any:
    """Return the stream of a program."""
    num_rows, num_shards = int(words["rows"]), int(words["shards"])
    sources: dict[str, Any] = {
        "list": lambda: IterableStream(list(range(first, first + num_rows))),
        "function": lambda: IterableStream(Numbers(first, num_rows)),
        "own": lambda: Sharded(first, num_rows, num_shards, knows=True),
        "unknown": lambda: Sharded(first, num_rows, num_shards, knows=False),
        "lines": lambda: JSONLinesStream(f"{folder}/{first}/*.jsonl").map(NumberOf()),
        "parquet": lambda: ParquetStream(f"{folder}/{first}/*.parquet").map(NumberOf()),
    }
    stream = sources[str(words["source"])]()
    if words["filter"] == "yes":
        stream = stream.filter(IsKept())
    stream = stream.map(RowOf(words))
    if words["shuffle"] == "yes":
        stream = stream.shuffle(BUFFER, seed=4)
    if words["take"] != "no":
        stream = stream.take(int(words["take"]))
    own = WithoutNumber() if words["collate"] == "loader" else Collate(words)
    return stream.batch(
        size or int(words["batch"]),
        drop_last=words["last"] == "drop",
        collate=collate or own,
        num_workers=int(words["processes"]),
        on_error="skip" if words["bad"] == "skip" else "raise",
    )


def write(words: Words, folder: str) -> None:
    """Write the files that a program reads."""
    for first in (0, FIRST_OF_OTHERS):
        target = Path(folder, str(first))
        target.mkdir()
        for at, part in enumerate(parts_of(first, int(words["rows"]), int(words["shards"]))):
            if words["source"] == "lines":
                lines = [json.dumps({"number": number}) for number in part]
                (target / f"{at}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            elif words["source"] == "parquet":
                import pyarrow as pa
                from pyarrow import parquet

                parquet.write_table(pa.table({"number": part}), target / f"{at}.parquet", row_group_size=4)


class Streamed:
    """Trains on a stream. Config: `words`, `folder`."""

    words: Words
    config: dict[str, Any]
    rows: Any

    def loader(self, rows: Rows, size: int) -> Any:
        words = self.words if rows is self.rows else {**self.words, "last": "keep"}
        return stream_of(words, self.config["folder"], size=size)


class StreamedStock(Streamed, Weighing):
    pass


class StreamedOwn(Streamed, OwnBatch):
    pass


class Noting(TrainingOperator):
    """Notes which rows one process reads. Config: `words`, `folder`, `first`."""

    def setup(self, config: dict[str, Any]) -> None:
        model = network(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        self.batches: list[list[int]] = []
        stream = stream_of(config["words"], config["folder"], config["first"], collate=OnlyNumbers())
        self.register_data(train_loader=stream)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.batches.append(batch[0].tolist())
        self.backward(sum(parameter.sum() for parameter in self.model.parameters()))
        self.optimizer_step()
        return {"num_samples": len(batch[0])}


@lru_cache(maxsize=4)
def passes_of(written: tuple[tuple[str, Value], ...], first: int, num_passes: int) -> list[list[list[int]]]:
    """Return for each pass the batches in which one process reads the rows."""
    words = dict(written)
    with tempfile.TemporaryDirectory() as folder:
        write(words, folder)
        config = {"words": words, "folder": folder, "first": first}
        options = {"split_batches": True, "use_local": True, "use_gpu": False, "seed": 3}
        with TorchTrainer(training_operator_cls=Noting, config=config, **options) as trainer:
            found = []
            for _ in range(num_passes):
                trainer.train()
                operator = trainer.get_local_operator()
                found.append(operator.batches)
                operator.batches = []
    for batches in found:
        check_rows(words, first, batches)
    return found


def check_rows(words: Words, first: int, batches: list[list[int]]) -> None:
    """Compare the rows of a pass with those of the plain data."""
    expected, found = rows_of(words, first), flat(batches)
    num_rows = len(expected) if words["take"] == "no" else min(int(words["take"]), len(expected))
    num_rows -= num_rows % int(words["batch"]) if words["last"] == "drop" else 0
    assert {*found} <= {*expected}, "a row came that was left out"
    assert len(found) == len({*found}) == num_rows, f"{len(found)} rows came for {num_rows}, {found}"


def rows_of(words: Words, first: int) -> list[int]:
    """Return the numbers of the rows that can be read and are not left out."""
    numbers = range(first, first + int(words["rows"]))
    kept = [number for number in numbers if words["filter"] == "no" or IsKept()(number)]
    return [number for number in kept if words["bad"] == "no" or number % 5 != 2]


class Streams(Kind):
    """See the module."""

    name = "streams"
    core = ("source", "shards", "shuffle", "collate", "processes")
    choices: ClassVar[Choices] = {
        "source": ("function", "list", "own", "unknown", "lines", "parquet"),
        "shards": (1, 3, 7),
        "rows": (24, 22, 17, 31),
        "batch": (6, 4, 5, 9),
        "calls": ("all,all", "1,all,all", "all,1,all"),
        "shuffle": ("no", "yes"),
        "filter": ("no", "no", "yes"),
        "take": ("no", "no", 15),
        "bad": ("no", "no", "skip"),
        "last": ("keep", "keep", "drop"),
        "processes": (0, 0, 1, 2),
        "task": ("mse", "labels", "ignored", "own"),
        "collate": ("loader", "drop", "triple", "texts", "dict", "graphs"),
        "say": ("nothing", *["weight"] * 5),
        "step": ("stock", "own", "plain"),
        "second": ("no", "no", "yes"),
        "optimizer": tuple(OPTIMIZERS),
        "micro": ("no", "no", 1, 2),
        "accumulate": (1, 1, 2),
        "clip": ("no", 1),
        "nan": ("no",),
        "leave": ("no",),
        "loader": ("divided",),
    }

    def settled(self, words: Words) -> dict[str, Value]:
        new = dict(words)
        if new["collate"] == "texts":
            new["task"] = "texts"
        if new["collate"] == "drop" and new["task"] in WITH_LABELS:
            new["task"] = "mse"
        says = new["say"] == "weight" or new["task"] in ("ignored", "texts")
        if says or new["micro"] != "no" or new["accumulate"] != 1:
            new["step"] = "own" if new["step"] == "plain" else new["step"]
        if new["source"] in ("function", "list"):
            new["shards"] = 1
        if new["second"] == "yes":
            new["shuffle"] = "no"  # the order of other data depends on when they come
        if new["shuffle"] == "yes" or new["bad"] == "skip" or new["last"] == "drop":
            new["take"] = "no"  # else it is unknown which rows are evaluated
        return new

    def operator(self, words: Words) -> type[Any]:
        return StreamedStock if words["step"] == "stock" else StreamedOwn

    def options(self, words: Words) -> dict[str, Any]:
        folder = tempfile.mkdtemp()  # in that of the run
        write(words, folder)
        return {
            "config": {"words": dict(words), "folder": folder},
            "split_batches": True,
            "micro_batch_size": None if words["micro"] == "no" else words["micro"],
            "accumulate_grad_batches": words["accumulate"],
            "clip_grad_norm": None if words["clip"] == "no" else 0.5,
            "seed": 3,
        }

    def run(self, trainer: Any, words: Words) -> Outcome:
        outcome = Outcome()
        for call, num_steps in enumerate(steps_of(words)):
            if call == 1 and words["second"] == "yes":
                other = stream_of(words, trainer.config["folder"], FIRST_OF_OTHERS)
                outcome.rows += [dict(trainer.train(dataset=other)), dict(trainer.validate())]
            arm(trainer, words, call)
            outcome.rows += [dict(trainer.train(num_steps=num_steps)), dict(trainer.validate())]
        return outcome.keep(trainer.get_model())

    def plain(self, words: Words) -> Outcome:
        written = tuple((name, value) for name, value in words.items() if name not in ("workers", "kill", "step"))
        num_passes = len(steps_of(words))
        passes = passes_of(written, 0, num_passes)
        others = passes_of(written, FIRST_OF_OTHERS, 1)[0] if words["second"] == "yes" else None
        validated = rows_of(words, 0) if words["take"] == "no" else flat(passes[0])
        return trained_plainly(words, lambda index: passes[index], validated, others)


KIND = Streams()
