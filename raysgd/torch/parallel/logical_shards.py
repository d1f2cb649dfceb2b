"""The gradients of logical shards: each kept by itself, added in one order whatever rank computed it, to the same bits.

A global batch is cut into a fixed number of shards. A rank computes some of them, one after the other, and keeps the
gradient of each as a row. Then each rank is sent a part of every row, adds the parts up in the order of the shards, and
sends the sum to all. Floating-point sums depend on their order, and this order does not depend on the ranks.

Why shards are fixed, and what that costs: ADR 98.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd.arrays.division import even_counts
from raysgd.connections.torch import exchanges_at_once
from raysgd.torch.objects import rng


class LogicalShards:
    """A rank's part of a global batch's gradients, and the sum over all ranks.

    Args:
        num_shards: How many there are in a global batch.
        rank: The place among the ranks.
        world_size: How many ranks there are.
        models: As training calls them.

    Attributes:
        fraction, seed_of_step: Those of the shard that was begun last; see `begin_batch`.
    """

    def __init__(self, num_shards: int, rank: int, world_size: int, models: Iterable[torch.nn.Module] = ()) -> None:
        self._wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        self._num_shards, self._rank, self._world_size = num_shards, rank, world_size
        self._rows = torch.empty(0)
        self._num_kept = 0
        self._is_summed = False
        self.fraction, self.seed_of_step = 1.0, 0

    def begin_batch(self, is_first: bool, seed: int, fraction: float = 1.0, seed_of_step: int = 0) -> None:
        """Begin a shard: what is random in it comes from its place in the data.

        Args:
            is_first: Whether it is the first one of this rank in a step.
            seed: Where its random numbers come from.
            fraction: Its samples, as a part of those of the global batch.
            seed_of_step: Where those come from that follow the last one.
        """
        self.fraction, self.seed_of_step = fraction, seed_of_step
        if is_first:
            self._num_kept, self._is_summed = 0, False
        for model in self._wrapped:
            model.require_forward_param_sync = is_first  # that of buffers, once in a step as all ranks do it
        rng.seed_alike(seed)

    def keep(self, parameters: Sequence[torch.Tensor]) -> None:
        """Keep the gradients that a backward pass has just made."""
        self._make_room(parameters)
        row = self._rows[self._num_kept]
        start = 0
        for each in parameters:
            target = row[start : start + each.numel()]
            start += each.numel()
            if each.grad is None:
                target.zero_()
            else:
                target.copy_(each.grad.reshape(-1))
        row[start:] = torch.tensor([each.grad is not None for each in parameters], dtype=row.dtype)
        self._num_kept += 1

    def _make_room(self, parameters: Sequence[torch.Tensor]) -> None:
        """A row for each shard of this rank: its numbers, and behind them which parameters have a gradient at all."""
        num_numbers = sum(each.numel() for each in parameters)
        shape = (max(1, self._counts()[self._rank]), num_numbers + len(parameters))
        if self._rows.shape != shape:
            if any(each.is_complex() for each in parameters):
                raise ValueError(
                    "`deterministic=True` does not work with complex parameters: omit it, or make real ones of their "
                    "parts (`torch.view_as_real`)."
                )
            self._rows = torch.zeros(shape, dtype=_dtype_of(parameters), device=parameters[0].device)

    def add_up(self, parameters: Sequence[torch.Tensor], seed: int) -> None:
        """Put the sums over all shards where optimizers look for gradients."""
        counts = self._counts()
        self._make_room(parameters)
        self._rows[self._num_kept :].zero_()  # shards of a short global batch that have no sample
        sums = self._summed(self._rows[: counts[self._rank]], counts)
        start, flags = 0, sums[-len(parameters) :].tolist()
        for each, has_gradient in zip(parameters, flags, strict=True):
            each.grad = sums[start : start + each.numel()].to(each.dtype).view_as(each) if has_gradient else None
            start += each.numel()
        self._is_summed = True
        rng.seed_alike(seed)  # what follows is done by all ranks alike

    def check(self) -> None:
        """Refuse a step whose gradients came from elsewhere.

        Raises:
            ValueError: They did, so each rank has its own.
        """
        if not self._is_summed:
            raise ValueError(
                "`deterministic=True`: a step computed its gradients without the library, which therefore could not "
                "add them up. Call `self.backward(loss)` once for each batch in `train_batch`."
            )

    def _counts(self) -> list[int]:
        return even_counts(self._num_shards, self._world_size)

    def _summed(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if self._world_size == 1:
            return _in_order(rows)
        group = exchanges_at_once()
        if group is not None and rows.device.type == "cpu":
            return torch.from_numpy(group.add_rows(rows.numpy(), counts))
        most = max(counts)
        own = torch.zeros((most, self._rows.shape[1]), dtype=self._rows.dtype, device=self._rows.device)
        own[: len(rows)] = rows
        gathered = [torch.empty_like(own) for _ in counts]
        dist.all_gather(gathered, own)
        return _in_order(torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]))


def _in_order(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _dtype_of(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    return torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
