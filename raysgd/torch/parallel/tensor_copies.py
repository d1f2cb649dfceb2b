"""Copies the tensors that a batch may change, restores their values, and detects whether tensors have changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


class TensorCopies:
    """Copies tensors, on the tensors' devices, and restores their values. Each batch reuses the copies' memory."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._data: list[torch.Tensor] = []  # original `.data` of each tensor; user code may replace it
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def take_copies(self, tensors: list[torch.Tensor]) -> None:
        """Copy the tensors over the previous copies, and free the memory that is no longer needed."""
        for index, tensor in enumerate(tensors):
            kinds = [(each.shape, each.dtype, each.device) for each in (tensor, *self._copies[index : index + 1])]
            if len({*kinds}) > 1 or len(kinds) == 1:
                self._copies[index : index + 1] = [torch.empty_like(tensor, requires_grad=False)]
        del self._copies[len(tensors) :]
        _copy(self._copies, tensors)
        self._tensors, self._data = tensors, [each.data for each in tensors]

    def differ(self, first: Sequence[torch.Tensor]) -> bool:
        """Return True if any tensor in `first` has changed since the last `take_copies`.

        Args:
            first: The first elements of the list that was passed to `take_copies`.
        """
        pairs = zip(first, self._copies, strict=False)
        return not all(torch.equal(each, copy) for each, copy in pairs)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values of the copied tensors. If user code replaced a tensor's `data`, first undo this."""
        for tensor, data in zip(self._tensors, self._data, strict=True):
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
        _copy(self._tensors, self._copies)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy the values of `sources` to `targets`. On a GPU, tensors of the same dtype are copied together."""
    kinds: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kinds.setdefault((target.device, None if target.is_cpu else target.dtype), []).append((target, source))
    for pairs in kinds.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def kept(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor object to restore later: the tensor itself, or a copy if it is sparse."""
    return tensor.clone() if tensor is not None and tensor.layout != torch.strided else tensor


def is_writable(tensor: torch.Tensor) -> bool:
    """Return True if values can be written into a tensor, False if it is sparse or expanded."""
    if tensor.layout != torch.strided:
        return False
    return all(stride > 0 or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def digests_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a digest of each tensor, to detect changes later."""
    return [*map(digest_of, tensors)]


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of a tensor's rows, with its bits read as integers.

    Nearly any change of the tensor also changes one of the sums.
    """
    bits = tensor.detach()
    if bits.is_complex():
        bits = torch.view_as_real(bits).flatten(-2 if bits.ndim else 0)
    size, kinds = bits.element_size(), {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    has_words = bits.ndim > 0 and bits.is_contiguous() and not bits.storage_offset() * size % 8
    kind = torch.int64 if has_words and not bits.shape[-1] * size % 8 else kinds[size]  # summing 8-byte words is faster
    return bits.view(kind).sum(-1, dtype=torch.int64)


def lacks_memory(models: Sequence[torch.nn.Module], num_sharing: int, unchanging: Collection[int] = ()) -> str | None:
    """Return None if there is enough memory to copy all state; otherwise a description of the needed and free memory.

    There is enough if the copies need at most half of the free memory, or if the free memory is unknown.

    Args:
        models: Modules that are trained. Their optimizers are assumed to have as much state as Adam.
        num_sharing: Number of workers that share the node's memory.
        unchanging: IDs of parameters that are not copied.
    """
    of_models = (each for model in models for each in (*model.parameters(), *model.buffers()))
    tensors = [each for each in of_models if id(each) not in unchanging]
    num_bytes = sum(each.nbytes * (3 if each.requires_grad else 1) for each in tensors)
    free = _free_bytes(next((each.device for each in tensors), torch.device("cpu")), num_sharing)
    if free is None or num_bytes <= free // 2:
        return None
    return f"{num_bytes / 2**20:.0f} of {free / 2**20:.0f} MiB that are free"


def _free_bytes(device: torch.device, num_sharing: int) -> int | None:
    """Return the free bytes of a GPU or, for a CPU, this worker's part of the free host memory; None if unknown.

    In a container with a memory limit, the free host memory is at most what the limit leaves.

    Args:
        device: The GPU or CPU.
        num_sharing: Number of workers that share the node's memory.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        words = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")[2].split(maxsplit=1)
        free = int(words[0]) * 1024
    except (OSError, IndexError):  # only Linux has this file
        return None
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    with suppress(OSError, ValueError):  # raised if the process is not in a container with a memory limit
        free = min(free, int(limit.read_text(encoding="ascii")) - int(used.read_text(encoding="ascii")))
    return free // num_sharing
