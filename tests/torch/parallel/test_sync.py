"""Sums over the ranks: an amount on a GPU takes the way that the other ranks' numbers take."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from raysgd.torch.parallel import sync
from raysgd.torch.parallel.sync import DDPSync
from tests.core.connections.ranks import groups_of, on_all


class OnDevice(torch.Tensor):
    """A tensor on a device that is not here. As on a GPU, it mixes with a tensor of the CPU only if it is a number."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        wrapper: OnDevice = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device="meta")
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        if any(type(each) is torch.Tensor and each.ndim for each in given):
            raise RuntimeError("Expected all tensors to be on the same device")
        args, kwargs = tree_map(lambda each: each.inner if isinstance(each, cls) else each, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return cls(result) if isinstance(result, torch.Tensor) else result


def test_the_double_of_a_device_refuses_what_a_gpu_refuses() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(1) + OnDevice(torch.tensor(2.0))
    assert float(OnDevice(torch.tensor(2.0)) * 2) == 4.0


@pytest.mark.usefixtures("process_group")
def test_an_amount_on_a_gpu_is_summed_over_gloo() -> None:
    assert DDPSync().start_total(OnDevice(torch.tensor(3.0, dtype=torch.float64)))() == 3.0


def test_a_rank_with_labels_on_a_gpu_meets_a_rank_that_only_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = threading.local()
    monkeypatch.setattr(sync, "mesh_group", lambda: groups.own)
    amounts = [OnDevice(torch.tensor(3.0, dtype=torch.float64)), 0.0]

    def total(rank: int, group: Any) -> float:
        groups.own = group
        found: float = DDPSync().start_total(amounts[rank])()
        return found

    with groups_of(2) as ranks:
        assert [each.result() for each in on_all(ranks, total)] == [3.0, 3.0]


def test_the_host_does_not_wait_for_a_sum_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Work.wait` would, with the setting that the workers have for NCCL."""
    queued: torch.futures.Future[None] = torch.futures.Future()
    queued.set_result(None)
    work = SimpleNamespace(get_future=lambda: queued, wait=lambda: pytest.fail("the host waits for the GPU"))
    monkeypatch.setattr(sync, "reachable", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: work)
    assert DDPSync().start_total(3.0)().device.type == "meta"
