"""Helpers for code that makes process groups by itself."""

from __future__ import annotations

import datetime
import os

import pytest
import torch.distributed as dist

from raysgd.torch.utils import setup_process_group
from raysgd.utils import find_free_port

TIMEOUT = datetime.timedelta(seconds=60)


@pytest.fixture
def url() -> str:
    return f"tcp://127.0.0.1:{find_free_port()}"


def test_a_process_group_is_joined_and_gloo_is_the_default(url: str) -> None:
    setup_process_group(url, world_rank=0, world_size=1, timeout=TIMEOUT)
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("set_before", "found"), [(None, "1"), ("0", "0")])
def test_waiting_of_nccl_is_made_to_block_unless_the_user_decided(
    set_before: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **arguments: joined.append((backend, arguments)))
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "restored by monkeypatch")
    if set_before is None:
        monkeypatch.delenv("NCCL_BLOCKING_WAIT")
    else:
        monkeypatch.setenv("NCCL_BLOCKING_WAIT", set_before)
    setup_process_group("tcp://somewhere:1", 1, 2, TIMEOUT, backend="nccl")
    assert os.environ["NCCL_BLOCKING_WAIT"] == found
    assert joined == [("nccl", {"init_method": "tcp://somewhere:1", "rank": 1, "world_size": 2, "timeout": TIMEOUT})]
