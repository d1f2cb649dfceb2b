"""Batches that are copied to a device: what can be seen of it without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.train._torch.loaders import DeviceLoader


class LoaderWithPosition(DataLoader[Any]):
    """Its position is that of the batch which was drawn last."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_loader_with_a_position_is_not_drawn_from_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", streams.append)
    data, device = TensorDataset(torch.zeros(4)), torch.device("cuda", 0)
    DeviceLoader(LoaderWithPosition(data), device, ahead=True)
    DeviceLoader(DataLoader(data), device, ahead=False)
    assert streams == []
    DeviceLoader(DataLoader(data), device, ahead=True)
    assert streams == [device]
