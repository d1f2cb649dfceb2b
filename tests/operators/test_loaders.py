from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from raysgd.data import IterableStream
from raysgd.operators.loaders import make_loaders

DATA = TensorDataset(torch.arange(10), torch.arange(10))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_train_data_is_shuffled_and_validation_data_is_not() -> None:
    train, validation = make_loaders((DATA, DATA), batch_size=4)
    assert isinstance(train.sampler, RandomSampler)
    assert isinstance(validation.sampler, SequentialSampler)
    assert (len(train), len(validation)) == (3, 3)


@pytest.mark.parametrize("data", [(DATA, None), [DATA, None], DATA])
def test_validation_data_may_be_absent(data: Any) -> None:
    train, validation = make_loaders(data, batch_size=4)
    assert train.dataset is DATA
    assert validation is None


def test_anything_with_a_length_and_an_index_is_a_dataset() -> None:
    train, validation = make_loaders((torch.zeros(6, 2), [1, 2, 3]), batch_size=2)
    assert next(iter(train)).shape == (2, 2)
    assert [batch.tolist() for batch in validation] == [[1, 2], [3]]


def test_an_iterable_dataset_keeps_its_own_order() -> None:
    train, _ = make_loaders((Stream(), None), batch_size=4)
    assert [batch.tolist() for batch in train] == [[0, 1, 2, 3], [4, 5]]


def test_loaders_and_other_iterables_stay_what_they_are() -> None:
    loader = DataLoader(DATA, batch_size=5)
    batches = iter([1, 2])
    assert make_loaders((loader, batches), batch_size=2) == (loader, batches)


def test_a_stream_stays_what_it_is() -> None:
    stream = IterableStream(range(6)).batch(2)
    assert make_loaders((stream, None), batch_size=4) == (stream, None)


def test_a_stream_gets_a_collator_where_it_has_none() -> None:
    bare, own = IterableStream(range(6)).batch(2), IterableStream(range(6)).batch(2, collate=sum)
    train, validation = make_loaders((bare, own), 4, stream_collator=list)
    assert (train.collate, validation.collate, bare.collate) == (list, sum, None)
    assert train.batch_size == 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "returned None"),
        (7, "returned 7"),
        ((DATA,), "a tuple of 1"),
        ([DATA, DATA, DATA], "a list of 3"),
        ((DATA, "validation"), "'validation' as one of its parts"),
        ({"train": DATA}, "returned {'train'"),
    ],
)
def test_everything_else_is_refused_with_what_is_allowed(data: Any, said: str) -> None:
    with pytest.raises(TypeError, match=r"return `\(train, validation\)`") as caught:
        make_loaders(data, batch_size=2)
    assert said in str(caught.value)
