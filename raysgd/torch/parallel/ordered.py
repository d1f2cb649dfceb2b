"""For `deterministic=True`: adds up gradients in an order that does not depend on the number of ranks.

Floating-point sums depend on the order of the summands. Therefore, each global batch (the batch of all ranks together)
is cut into the same number of logical shards, however many ranks there are. Each rank computes the gradients of some
shards, one after another, and stores each shard's gradient as one row of a matrix. Then the rows of all ranks are added
in the order of the shards. On CPUs, each rank adds up one section of all rows and sends the sum of this section to all
ranks. The result is bit-identical for any number of ranks.

ADR 98 explains why the number of shards is fixed, and what that costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.arrays.division import BatchPlan, even_counts
from raysgd.core.connections.torch import mesh_group
from raysgd.torch.objects import rng
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.sync import DDPSync, GradientSync, Pass


class LogicalShards:
    """Stores the gradients of one rank's logical shards, and adds them up over all ranks.

    Args:
        num_shards: Number of shards in a global batch.
        rank: Rank of this worker.
        world_size: Number of ranks.
        models: Models that training calls, most of them wrapped in `DistributedDataParallel`.

    """

    def __init__(self, num_shards: int, rank: int, world_size: int, models: Iterable[torch.nn.Module] = ()) -> None:
        self._wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        self._num_shards, self._rank, self._world_size = num_shards, rank, world_size
        self._rows = torch.empty(0)
        self._num_kept = 0
        self._is_summed = False
        self._seed_of_step = 0

    def begin_shard(self, is_first: bool, seed: int, seed_of_step: int = 0) -> None:
        """Start a shard. Its random numbers depend on its position in the data and not on the rank.

        Args:
            is_first: True for the first shard of this rank in a step.
            seed: Seed for the random numbers in the shard.
            seed_of_step: Seed for the random numbers after the last shard of the step.
        """
        self._seed_of_step = seed_of_step
        if is_first:
            self._num_kept, self._is_summed = 0, False
        for model in self._wrapped:
            # Synchronize buffers only once per step. Otherwise, a rank with more shards than the other ranks would wait
            # forever in a collective.
            model.require_forward_param_sync = is_first
        rng.seed_alike(seed)

    def keep(self, parameters: Sequence[torch.Tensor]) -> None:
        """Store the parameters' current gradients as the gradient of the current shard."""
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
        """Allocate a row of memory for each of this rank's shards, unless it is already allocated.

        A row has the gradients of all parameters, then one flag per parameter: 1 if the parameter has a gradient.

        Raises:
            ValueError: A parameter is complex.
        """
        num_numbers = sum(each.numel() for each in parameters)
        shape = (max(1, self._shards_by_rank()[self._rank]), num_numbers + len(parameters))
        if self._rows.shape != shape:
            if any(each.is_complex() for each in parameters):
                raise ValueError(
                    "`deterministic=True` does not work with complex parameters: omit it, or store them as real "
                    "parameters (`torch.view_as_real`)."
                )
            dtype = torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
            self._rows = torch.zeros(shape, dtype=dtype, device=parameters[0].device)

    def add_up(self, parameters: Sequence[torch.Tensor]) -> None:
        """Set the gradients of all parameters to their sums over all logical shards of all ranks.

        If a parameter has no gradient in any shard, its gradient is set to None.

        Args:
            parameters: Trained parameters, in the order in which `keep` got them.
        """
        counts = self._shards_by_rank()
        self._make_room(parameters)
        self._rows[self._num_kept :].zero_()  # in a short global batch, a rank may have fewer shards than rows
        sums = self._summed(self._rows[: counts[self._rank]], counts)
        start, flags = 0, sums[-len(parameters) :].tolist()
        for each, has_gradient in zip(parameters, flags, strict=True):
            each.grad = sums[start : start + each.numel()].to(each.dtype).view_as(each) if has_gradient else None
            start += each.numel()
        self._is_summed = True
        rng.seed_alike(self._seed_of_step)  # all ranks continue with the same random numbers

    def check(self) -> None:
        """Check that `add_up` was called in the optimizer step that has ended.

        Raises:
            ValueError: `add_up` was not called, because user code computed the gradients itself. The gradients
                therefore differ between ranks.
        """
        if not self._is_summed:
            raise ValueError(
                "`deterministic=True`: a step computed gradients without `self.backward`, so the library could not "
                "add them up. Call `self.backward(loss)` once for each batch in `train_batch`."
            )

    def _shards_by_rank(self) -> list[int]:
        return even_counts(self._num_shards, self._world_size)

    def _summed(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if self._world_size == 1:
            return _in_order(rows)
        group = mesh_group()
        if group is not None and rows.device.type == "cpu":
            return torch.from_numpy(group.add_rows(rows.numpy(), counts))
        most = max(counts)
        own = torch.zeros((most, self._rows.shape[1]), dtype=self._rows.dtype, device=self._rows.device)
        own[: len(rows)] = rows
        gathered = [torch.empty_like(own) for _ in counts]
        dist.all_gather(gathered, own)
        return _in_order(torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]))


class OrderedSync(GradientSync):
    """Adds up the gradients of logical shards on a single worker, and what `OrderedDDPSync` adds to `DDPSync`."""

    _shards: LogicalShards | None = None

    def begin_leg(self, models: Sequence[torch.nn.Module], may_run_backward: bool, **options: Any) -> Leg:
        rank, shards = dist.get_rank() if self.averages else 0, options["rules"].num_shards
        self._shards = LogicalShards(shards, rank, self.num_ranks, models) if shards else None
        return super().begin_leg(models, may_run_backward, **options)

    def open(self, plan: BatchPlan) -> None:
        super().open(plan)
        if self._shards is not None:
            self._set_sync(False)
            if plan.seeds is not None:
                self._shards.begin_shard(plan.starts_global_batch, *plan.seeds)

    def check(self) -> None:
        if self._shards is not None:
            self._shards.check()
        super().check()

    def backward_pass(self, parameters: Iterable[torch.Tensor], is_second: bool) -> Pass:
        if self._shards is None:
            return super().backward_pass(parameters, is_second)
        return self._pass_of_shard(self._shards, [each for each in parameters if each.requires_grad])

    @contextmanager
    def _pass_of_shard(self, shards: LogicalShards, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Keep the gradients of a shard. After the last shard of the step, add up those of all shards and ranks."""
        yield
        leg = self.leg
        leg.batch.with_gradients.clear()  # each pass starts without gradients
        if not leg.plan.is_padding:
            shards.keep(parameters)
        if leg.plan.sync_gradients:
            leg.note_all_reduce("gradients were exchanged")
            with leg.record.noting_lost_connections():
                leg.send_rows()
                shards.add_up(parameters)
            leg.record.note_averaged()


class OrderedDDPSync(OrderedSync, DDPSync):
    """Adds up the gradients of the logical shards of several workers."""


def _in_order(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
