from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysgd._numbers.meters import AverageMeter
from raysgd.worker.state.putting_back import StateNotes


class Books:
    """What a user's class may look like."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@contextmanager
def putting_back(owner: Any, apart: Sequence[Any] = ()) -> Iterator[None]:
    notes = StateNotes({id(value) for value in apart}, lambda value: None, lambda kind: False)
    notes.take(owner)
    yield
    for undo in notes.undos:
        undo()


Change = Callable[[Any], Any]
CHANGES: dict[str, tuple[Any, Change]] = {
    "a number": (1, lambda books: setattr(books, "it", 2)),
    "a list": ([1, 2], lambda books: books.it.append(3)),
    "a list in a dict": ({"a": [1]}, lambda books: books.it["a"].append(2)),
    "a dict that loses a key": ({"a": 1, "b": 2}, lambda books: books.it.pop("a")),
    "an order": (OrderedDict(a=1, b=2), lambda books: books.it.move_to_end("a")),
    "a counter": (Counter("aab"), lambda books: books.it.update("c")),
    "a dict with a default": (defaultdict(list, a=[1]), lambda books: books.it["b"].append(1)),
    "a set": ({1}, lambda books: books.it.add(2)),
    "a queue that is full": (deque([1, 2], maxlen=2), lambda books: books.it.append(3)),
    "a list in a tuple": (([1],), lambda books: books.it[0].append(2)),
    "an array": (np.arange(3), lambda books: books.it.fill(7)),
    "an object": (Books(n=1, deep=Books(m=[])), lambda books: books.it.deep.m.append(1)),
    "a helper of the library": (AverageMeter(), lambda books: books.it.update(3.0)),
    "an attribute that is removed": (1, lambda books: delattr(books, "it")),
    "a new attribute": (1, lambda books: setattr(books, "other", 2)),
}


def shown(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(key, shown(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque | set):
        return type(value), [shown(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return shown(vars(value)) if hasattr(value, "__dict__") else value


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_is_put_back_into_the_same_object(what: str) -> None:
    value, change = CHANGES[what]
    books = Books(it=value)
    before = shown(books)
    with putting_back(books):
        change(books)
        assert shown(books) != before
    assert shown(books) == before
    assert books.it is value


def test_what_is_set_apart_keeps_what_became_of_it() -> None:
    apart = [1]
    books = Books(it=apart, also=[apart])
    with putting_back(books, [apart]):
        apart.append(2)
        books.also.clear()
    assert apart == [1, 2]
    assert books.also == [apart]


class Odd:
    def __eq__(self, other: object) -> bool:
        raise TypeError("incomparable")

    __hash__ = None  # type: ignore[assignment]


def test_objects_of_libraries_large_arrays_and_odd_ones_are_left_alone() -> None:
    lock, large, library = threading.Lock(), np.zeros(2**20), SimpleNamespace(n=1)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    books = Books(lock=lock, large=large, library=library, frozen=frozen, odd=Odd(), same=None)
    books.same = books
    with putting_back(books):
        large[0] = 1
        library.n = 2
        books.lock = None
    assert large[0] == 1
    assert library.n == 2
    assert books.lock is lock
