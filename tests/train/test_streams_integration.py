"""Streams in training functions: each row once in each epoch, and positions for any number of workers.

Covers `raysgd.train._worker.shards` and `raysgd.streams.loaders`: functions reach them through
the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raysgd import train
from raysgd.streams.stream import Pipeline
from raysgd.train import Trainer
from raysgd.train.torch import prepare_data_loader
from tests.streams.made import MadeStream

pytestmark = pytest.mark.integration


def stream_of(kind: str) -> Pipeline:
    stream = MadeStream([10] * 30, is_known=kind == "known").shuffle(128)
    numbered = stream.map(lambda row: {"number": np.int64(10 * int(row[0][6:]) + row[1])})
    kept = numbered if kind == "known" else numbered.filter(lambda row: row["number"] % 3 != 0)
    return kept.batch(16, num_workers=1)


ROWS = {"known": list(range(300)), "filtered": [number for number in range(300) if number % 3]}


def numbers_of(loader: Any) -> list[int]:
    return [int(number) for batch in loader for number in batch["number"]]


def read(config: dict[str, Any]) -> tuple[Any, ...]:
    """What a worker sees: of its part by itself, in two epochs of a loader, and up to a position in the third."""
    part = train.get_dataset_shard("plain")
    own = numbers_of(part)
    loader: Any = prepare_data_loader(train.get_dataset_shard("train"))
    if config.get("state") is not None:
        loader.load_state_dict(config["state"])
        return numbers_of(loader), numbers_of(loader)
    epochs = [numbers_of(loader), numbers_of(loader)]
    batches = iter(loader)
    begun = [int(number) for _ in range(3) for number in next(batches)["number"]]
    exact: Any = prepare_data_loader(train.get_dataset_shard("exact"), exact=True)
    return own, epochs, begun, loader.state_dict(), numbers_of(exact)


@pytest.fixture(scope="module")
def trainers(ray_cluster: None) -> Iterator[dict[int, Trainer]]:
    """Started trainers by the number of their workers."""
    made = {size: Trainer("torch", num_workers=size, resources_per_worker={"CPU": 0.25}) for size in (2, 3)}
    for trainer in made.values():
        trainer.start()
    yield made
    for trainer in made.values():
        trainer.shutdown()


def joint(parts: Any) -> list[int]:
    return sorted(number for part in parts for number in part)


@pytest.mark.parametrize("kind", ["known", "filtered"])
def test_a_function_reads_its_part_and_goes_on_with_another_number_of_workers(
    trainers: dict[int, Trainer], kind: str
) -> None:
    datasets = {name: stream_of(kind) for name in ("plain", "train", "exact")}
    own, epochs, begun, states, exact = zip(*trainers[2].run(read, {}, dataset=datasets), strict=True)
    assert joint(own) == joint(exact) == ROWS[kind]
    for epoch in zip(*epochs, strict=True):
        assert joint(epoch) == ROWS[kind]
    assert epochs[0][0] != epochs[0][1]
    assert states[0] == states[1]
    assert states[0]["consumed"] == 48 == len(joint(begun))
    rest, following = zip(*trainers[3].run(read, {"state": states[0]}, dataset=datasets), strict=True)
    assert joint([*begun, *rest]) == joint(following) == ROWS[kind]


def test_a_stream_without_batches_is_refused_before_workers_start() -> None:
    with pytest.raises(ValueError, match="the stream in `dataset` has no batch size"):
        Trainer("torch", num_workers=1).run(read, {}, dataset=MadeStream([3]))
