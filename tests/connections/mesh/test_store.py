"""The board as PyTorch sees it: a store."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from raysgd.connections.mesh.board import Board
from raysgd.connections.mesh.store import BoardStore
from tests.connections.mesh.test_board import boards_of


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    found = boards_of(3)
    yield found
    for board in found:
        board.close()


def test_pytorch_finds_a_store_with_all_that_process_groups_ask_of_one(boards: list[Board]) -> None:
    kept = [BoardStore(board) for board in boards]
    stores = [dist.PrefixStore("part", store) for store in kept]  # type: ignore[attr-defined]
    stores[0].set("word", "text")
    assert stores[1].get("word") == b"text"
    assert [store.add("number", 2) for store in stores] == [2, 4, 6]
    stores[2].wait(["word", "number"], datetime.timedelta(seconds=20))
    assert stores[2].check(["word"])
    assert not stores[2].check(["word", "other"])
    assert stores[0].multi_get(["word", "number"]) == [b"text", b"6"]
    assert {store.num_keys() for store in (stores[0], kept[0])} == {2}
    assert stores[0].delete_key("word")


def test_a_store_says_as_pytorch_does_that_nobody_wrote_in_time(boards: list[Board]) -> None:
    store, bounded = BoardStore(boards[0]), BoardStore(boards[0], longest_wait_s=0.1)
    store.set_timeout(datetime.timedelta(seconds=0.1))
    bounded.set_timeout(datetime.timedelta(seconds=1800))
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        store.get("never")
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        store.wait(["never"], datetime.timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match=r"gave up waiting .* after 0\.1 s"):
        bounded.get("never")
