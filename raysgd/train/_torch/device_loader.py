"""Loaders whose batches arrive on the device, the next one while the last one is worked on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader


class DeviceLoader(DataLoader[Any]):
    """Another loader whose batches come on a device. Everything else is read from that one.

    Args:
        loader: The other one.
        device: Where the batches go.
        ahead: Whether to copy the next batch while the last one is worked on; GPUs only. Not if the other loader has a
            `state_dict`: that position would be one batch ahead, too, and a run that resumes there would omit a batch.

    Attributes:
        epoch: The passes that have come to their end, those without gradients aside.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, ahead: bool) -> None:
        self.__dict__.update(loader.__dict__)
        self._loader, self._device = loader, device
        self.epoch = 0
        runs_ahead = ahead and device.type == "cuda" and not hasattr(loader, "state_dict")
        self._stream = torch.cuda.Stream(device) if runs_ahead else None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches, on the device."""
        batches = iter(self._loader)
        if self._stream is None:
            found: Iterator[Any] = (moved(batch, self._device) for batch in batches)
        else:
            found = self._ahead(batches, self._stream)
        return self._counted(found, torch.is_grad_enabled())

    def _counted(self, batches: Iterator[Any], counts: bool) -> Iterator[Any]:
        yield from batches
        self.epoch += counts

    def _ahead(self, batches: Iterator[Any], stream: torch.cuda.Stream) -> Iterator[Any]:
        """Each batch while the one after it is on its way."""
        coming = self._sent(batches, stream)
        while coming is not None:
            torch.cuda.current_stream(self._device).wait_stream(stream)
            [batch] = coming
            _map_tensors(batch, lambda tensor: tensor.record_stream(torch.cuda.current_stream(self._device)))
            coming = self._sent(batches, stream)
            yield batch

    def _sent(self, batches: Iterator[Any], stream: torch.cuda.Stream) -> list[Any] | None:
        for batch in batches:
            with torch.cuda.stream(stream):
                return [moved(batch, self._device)]
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; dicts, lists and tuples keep their form."""
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _map_tensors(batch: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map_tensors(value, function) for value in batch)
    return batch
