"""Processes that load for a worker: the same batches as without them, and what is told when one cannot go on.

Covers `raysgd.streams.loaders`: these processes end with the one that they load for.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysgd.exceptions import StreamError
from raysgd.streams.source import StreamSource, stream_data
from raysgd.streams.stream import Pipeline
from tests.streams.made import MadeStream, division
from tests.streams.test_source import Place, Tuples, data_of, source_of

FORMS: dict[str, Any] = {
    "known": lambda: MadeStream([30] * 10).shuffle(128),
    "filtered": lambda: MadeStream([41] * 5, is_known=False).filter(lambda row: row[1] % 3 != 0).shuffle(128),
    "one shard": lambda: MadeStream([200]),
}


def items_of(stream: Pipeline, consumed: int = 0, state: Any = None) -> list[Any]:
    source = source_of(data_of(stream))
    if state is not None:
        source.load_state({"consumed": consumed, "is_mid_pass": True, **state})
    return list(source.open(0, consumed))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_workers", "prefetch"), [(1, 1), (3, 2), (2, 9)])
def test_they_make_the_batches_that_the_worker_would_make(form: str, num_workers: int, prefetch: int) -> None:
    expected = items_of(FORMS[form]().batch(16))
    source = source_of(data_of(FORMS[form]().batch(16, num_workers=num_workers, prefetch=prefetch)))
    opened = source.open(0, 0)
    begun = [next(opened) for _ in range(4)]
    state = source.state(64, True)
    opened.close()  # type: ignore[attr-defined]
    rest = items_of(FORMS[form]().batch(16, num_workers=num_workers), 64, state)
    assert [*begun, *rest] == expected


def test_an_evaluation_of_unknown_length_is_loaded_by_them_too() -> None:
    rows = [
        row
        for rank in range(2)
        for stream in [FORMS["filtered"]().batch(16, num_workers=2)]
        for item in source_of(data_of(stream, "validation", 2), rank=rank, world_size=2).open(0, 0)
        for row in item.batch
    ]
    assert sorted(rows) == sorted((f"shard-{n}", row) for n in range(5) for row in range(41) if row % 3)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_function_of_the_user_makes_each_batch_of_all_its_rows(num_workers: int) -> None:
    stream = MadeStream([40]).batch(16, collate=lambda rows: sorted(row for _, row in rows), num_workers=num_workers)
    batches = [item.batch for item in items_of(stream)]
    assert [len(batch) for batch in batches] == [16, 16, 8]
    assert sorted(row for batch in batches for row in batch) == list(range(40))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_function_of_the_user_that_makes_no_batch_leaves_out_no_rows(num_workers: int) -> None:
    stream = MadeStream([40]).batch(16, collate=lambda rows: None if len(rows) < 16 else rows, num_workers=num_workers)
    with pytest.raises(TypeError, match=r"`collate` returned None.*use `filter`"):
        items_of(stream)


class Naming(MadeStream):
    """Says which process reads, and refuses one row."""

    def __init__(self, folder: Path, bad_row: int = -1) -> None:
        super().__init__([40] * 64)
        self._folder, self._bad_row = folder, bad_row

    def open(self, shard: str, start: int) -> Iterator[Any]:
        (self._folder / str(os.getpid())).touch()
        for row in super().open(shard, start):
            if row == ("shard-7", self._bad_row):
                raise OSError("disk on fire")
            yield row


def test_what_they_cannot_read_is_an_error_with_shard_and_row(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="shard 'shard-7' cannot be read from row 9 on: OSError: disk on fire"):
        items_of(Naming(tmp_path, bad_row=9).batch(64, num_workers=2))


def test_one_that_is_killed_is_an_error_and_none_is_left_over(tmp_path: Path) -> None:
    opened = source_of(data_of(Naming(tmp_path).batch(64, num_workers=2, prefetch=1))).open(0, 0)
    next(opened)
    pids = [int(each.name) for each in tmp_path.iterdir()]
    assert len(pids) == 2
    assert os.getpid() not in pids
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(StreamError, match="a loader process was killed by signal 9"):
        list(opened)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_cannot_be_sent_is_named() -> None:
    stream = MadeStream([4]).map(lambda row: partial(lambda: row)).batch(2, num_workers=1)
    with pytest.raises(StreamError, match="a loader process cannot send its batch"):
        items_of(stream)


def test_they_load_ahead_while_the_worker_trains(tmp_path: Path) -> None:
    """A shard that stops holds nothing up until all that was loaded ahead is used."""
    gate = tmp_path / "gate"

    class Stopping(MadeStream):
        def open(self, shard: str, start: int) -> Iterator[Any]:
            for row in super().open(shard, start):
                if row == ("shard-3", 4):
                    (tmp_path / "waiting").touch()
                    while not gate.exists():
                        time.sleep(0.01)
                yield row

    opened = iter(source_of(data_of(Stopping([10] * 64).batch(64, num_workers=1, prefetch=4))).open(0, 0))
    next(opened)
    while not (tmp_path / "waiting").exists():  # it comes there without another step
        time.sleep(0.01)
    assert [next(opened).plan.num_samples for _ in range(3)] == [64] * 3
    gate.touch()
    assert sum(item.plan.num_samples for item in opened) == 6 * 64


def test_there_are_no_more_of_them_than_lanes() -> None:
    data = stream_data(MadeStream([200]).batch(64, num_workers=5), "train", division, 40)
    sources = [StreamSource(data, Place(rank, 40), 0, Tuples()) for rank in (0, 1)]
    rows = [row for source in sources for item in source.open(0, 0) for row in item.batch]
    shares = [part for size in (64, 64, 64, 8) for rank in (0, 1) for part in division(64, 40).parts(size, rank)]
    assert len(rows) == sum(share.stop - share.start for share in shares)
