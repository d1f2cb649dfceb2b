"""Snapshots in parts, put together or taken apart again without workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raysgd.core.engine.transfers import DividedValue
from raysgd.core.state.state_codec import StateEncoder
from raysgd.torch.checkpoints import divided
from raysgd.torch.checkpoints.divided import overlaps
from tests.torch.operators_for_tests import equal


def state() -> dict[str, Any]:
    slots = {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(5, 2)}}
    return {
        "epoch": 3,
        "operator": {"seen": torch.arange(3)},
        "models": [{"weight": torch.randn(5, 2), "mean": torch.randn(4)}],
        "optimizers": [{"state": slots, "param_groups": [{"lr": 0.1, "params": [0]}]}],
    }


def parts_of(content: dict[str, Any], num_ranks: int) -> DividedValue:
    """As ranks keep them that divide what has five rows."""
    kept = []
    for rank in range(num_ranks):
        own = divided.content_of(content, rank=0)
        index = {path: (dtype, size, size[0] == 5) for path, (dtype, size, _) in own["index"].items()}
        tensors = {
            path: chunk(tensor, num_ranks, rank) if index[path][2] else tensor
            for path, tensor in own["tensors"].items()
            if not rank or index[path][2]
        }
        of_first = {"rest": own["rest"], "index": index} if not rank else {"rest": None, "index": None}
        kept.append(StateEncoder().encode({**of_first, "tensors": tensors}))
    return DividedValue(tuple(kept), ((),) * num_ranks)


def chunk(tensor: torch.Tensor, num_ranks: int, rank: int) -> torch.Tensor:
    chunks = torch.chunk(tensor, num_ranks)
    return chunks[rank] if rank < len(chunks) else tensor[:0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_the_parts_of_all_ranks_are_the_whole_state(num_ranks: int) -> None:
    content = state()
    parts = parts_of(content, num_ranks)
    assert equal(divided.whole(parts, copy=True), content)
    [model] = divided.outline(parts)["models"]
    assert model["weight"].shape == (5, 2)
    assert model["weight"].untyped_storage().nbytes() == 4


def test_a_whole_state_stays_what_it_is() -> None:
    content = state()
    encoded = StateEncoder().encode(content)
    assert equal(divided.whole(encoded, copy=True), content)
    assert equal(divided.outline(encoded), content)


def test_other_ranks_than_the_first_keep_only_what_is_divided() -> None:
    first, second = (divided.content_of(state(), rank) for rank in (0, 1))
    assert set(first["tensors"]) == {
        ("models", 0, "weight"),
        ("models", 0, "mean"),
        ("optimizers", 0, "state", 0, "exp_avg"),
    }
    assert first["rest"]["optimizers"][0]["state"][0]["step"] == 3.0
    assert (second["tensors"], second["rest"], second["index"]) == ({}, None, None)


@pytest.mark.parametrize("total", [1, 5, 12])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("num_before", [1, 2, 5])
def test_a_rank_of_another_group_finds_all_of_its_rows(total: int, num_ranks: int, num_before: int) -> None:
    rows = torch.arange(total)
    for rank in range(num_ranks):
        wanted = chunk(rows, num_ranks, rank)
        begin = int(wanted[0]) if len(wanted) else total
        found = overlaps(total, num_before, begin, begin + len(wanted))
        assert [each for _, first, last in found for each in range(first, last)] == wanted.tolist()
        for source, first, last in found:
            assert set(range(first, last)) <= set(chunk(rows, num_before, source).tolist())
