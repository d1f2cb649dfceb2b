"""The pipeline of a stream's rows: steps, order, end and size of the joint batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd._arguments.checks import check_count, check_num_workers, check_seed, refuse_text
from raysgd.streams.row_steps import DROPPED, RowStep, RowSteps
from raysgd.streams.stream import Shard, Stream, total


@dataclass(frozen=True)
class Pipeline(Stream):
    """A stream with what becomes of its rows. The methods of `Stream` make it.

    Attributes:
        source: Where rows come from.
        steps: Functions and filters.
        buffer: How many rows are mixed, by all workers together; 1 for the order of the source.
        seed: Decides the order; None for the seed of the training.
        limit: How many rows a pass has at most; None for all.
        batch_size: Rows in a joint batch; None until that was said.
        drop_last: Whether a last joint batch that is not full is left out.
        collate: Makes a batch of a list of rows; None for what the framework uses.
        num_workers: How many processes make the batches of a worker; 0 for none.
        prefetch: How many joint batches they make ahead.
        skips: Whether rows are left out that cannot be read, or that a step fails for.
    """

    source: Stream
    steps: tuple[RowStep, ...] = ()
    buffer: int = 1
    seed: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    prefetch: int = 2
    skips: bool = False

    def shards(self) -> Sequence[Shard]:
        return self.source.shards()

    def open(self, shard: str, start: int) -> Iterator[Any]:
        """Return what becomes of the rows of a shard, from the row `start` of the source on, in its order."""
        steps = RowSteps(self.steps, seed=f"{self.seed or 0}/0")
        for number, row in enumerate(self.source.open(shard, start), start):
            prepared = steps(row, shard, number)
            if prepared is not DROPPED:
                yield prepared

    @property
    def num_to_count(self) -> int:
        """The number of steps that decide which rows there are: all up to the last filter, or all that may fail."""
        return (
            len(self.steps)
            if self.skips
            else max((number for number, step in enumerate(self.steps, 1) if step.is_filter), default=0)
        )

    @property
    def keeps_rows(self) -> bool:
        """True if no row is left out."""
        return not self.skips and not self.num_to_count

    def num_rows(self, shards: Sequence[Shard]) -> int | None:
        """Return the rows of a pass over these shards; None if that is not known."""
        of_shards = total(shards) if self.keeps_rows else None
        return of_shards if of_shards is None or self.limit is None else min(of_shards, self.limit)

    def __len__(self) -> int:
        num_rows = self.num_rows(self.shards())
        if num_rows is None:
            raise TypeError("a stream with a filter, or with shards of unknown lengths, has no length.")
        if self.batch_size is None:
            return num_rows
        full, rest = divmod(num_rows, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def with_step(self, function: Callable[..., Any], *, is_filter: bool, is_seeded: bool) -> Pipeline:
        """See `Stream.map` and `Stream.filter`."""
        name = "filter" if is_filter else "map"
        if not callable(function):
            raise TypeError(f"`{name}({function!r})`: need a function of a row.")
        refuse_text(seeded=is_seeded)
        self._check_rows(name)
        if is_filter and self.limit is not None:
            raise ValueError("`filter` after `take`: filter first, then take.")
        return replace(self, steps=(*self.steps, RowStep(function, is_filter, is_seeded)))

    def shuffled(self, buffer: int, seed: int | None) -> Pipeline:
        """See `Stream.shuffle`."""
        check_count("buffer", buffer, "It is the number of rows to mix.")
        if seed is not None:
            check_seed(seed)
        self._check_rows("shuffle")
        if self.buffer > 1 or self.limit is not None:
            raise ValueError("`shuffle` after another `shuffle` or after `take`: a stream is shuffled once, before.")
        return replace(self, buffer=buffer, seed=seed)

    def cut_off(self, num_rows: int) -> Pipeline:
        """Return the stream of the first rows; see `Stream.take`."""
        check_count("num_rows", num_rows, "It is the number of rows in a pass.")
        self._check_rows("take")
        return replace(self, limit=min(num_rows, self.limit or num_rows))

    def batched(self, size: int, on_error: str, **options: Any) -> Pipeline:
        """See `Stream.batch`; the other options are attributes of this class."""
        check_count("size", size, "It is the number of rows of all workers together in a step.")
        collate = options["collate"]
        refuse_text(drop_last=options["drop_last"])
        if on_error not in ("raise", "skip"):
            raise ValueError(f'`on_error={on_error!r}`: allowed are "raise" and "skip".')
        if collate is not None and not callable(collate):
            raise TypeError(f"`collate={collate!r}`: need a function of a list of rows, or None.")
        check_num_workers("num_workers", options["num_workers"], "It is the number of loader processes.", least=0)
        check_count("prefetch", options["prefetch"], "It is the number of joint batches to load ahead.")
        self._check_rows("batch")
        return replace(self, batch_size=size, skips=on_error == "skip", **options)

    def _check_rows(self, name: str) -> None:
        if self.batch_size is not None:
            raise ValueError(f"`{name}` after `batch`: it is about rows, so it has to come first.")
