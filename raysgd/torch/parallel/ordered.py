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

import torch
import torch.distributed as dist

from raysgd.core.arrays.division import BatchPlan, even_counts
from raysgd.core.connections.torch import mesh_group
from raysgd.torch.objects import rng
from raysgd.torch.parallel.sync import DDPSync, GradientSync, Pass, wrappers


class OrderedSync(GradientSync):
    """Adds up the gradients of logical shards: on a single worker, and with `OrderedDDPSync` on several.

    It stores the gradients of this rank's shards, one row for each shard.
    """

    _rows = torch.empty(0)
    _num_kept = _seed_of_step = 0
    _is_summed = False

    @property
    def _num_shards(self) -> int:
        """Number of shards in a global batch; 0 between calls."""
        return self.leg.rules.num_shards

    def open(self, plan: BatchPlan) -> None:
        super().open(plan)
        if self._num_shards:
            self._set_sync(False)
            if plan.seeds is not None:
                self.begin_shard(plan.starts_global_batch, *plan.seeds)

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
        for model in wrappers(self.models):
            # Synchronize buffers only once per step. Otherwise, a rank with more shards than the other ranks would wait
            # forever in a collective.
            model.require_forward_param_sync = is_first
        rng.seed_alike(seed)

    def check(self) -> None:
        """Check that `add_up` was called in the optimizer step that has ended.

        Raises:
            ValueError: `add_up` was not called, because user code computed the gradients itself. The gradients
                therefore differ between ranks.
        """
        if self._num_shards and not self._is_summed:
            raise ValueError(
                "`deterministic=True`: a step computed gradients without `self.backward`, so the library could not "
                "add them up. Call `self.backward(loss)` once for each batch in `train_batch`."
            )
        super().check()

    def backward_pass(self, parameters: Iterable[torch.Tensor], is_second: bool) -> Pass:
        if not self._num_shards:
            return super().backward_pass(parameters, is_second)
        return self._pass_of_shard([each for each in parameters if each.requires_grad])

    @contextmanager
    def _pass_of_shard(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Keep the gradients of a shard. After the last shard of the step, add up those of all shards and ranks."""
        yield
        leg = self.leg
        leg.batch.with_gradients.clear()  # each pass starts without gradients
        if not leg.plan.is_padding:
            self.keep(parameters)
        if leg.plan.ends_step:
            leg.note_all_reduce("gradients were exchanged")
            with leg.record.noting_lost_connections():
                leg.send_rows()
                self.add_up(parameters)
            leg.record.note_outcome()

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
        shape = (max(1, self._shards_by_rank()[self._own]), num_numbers + len(parameters))
        dtype = torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
        if (self._rows.shape, self._rows.dtype) != (shape, dtype):
            if any(each.is_complex() for each in parameters):
                raise ValueError(
                    "`deterministic=True` does not work with complex parameters: omit it, or store them as real "
                    "parameters (`torch.view_as_real`)."
                )
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
        sums = self._summed(self._rows[: counts[self._own]], counts)
        start, flags = 0, sums[-len(parameters) :].tolist()
        for each, has_gradient in zip(parameters, flags, strict=True):
            each.grad = sums[start : start + each.numel()].to(each.dtype).view_as(each) if has_gradient else None
            start += each.numel()
        self._is_summed = True
        rng.seed_alike(self._seed_of_step)  # all ranks continue with the same random numbers

    @property
    def _own(self) -> int:
        """This rank."""
        return dist.get_rank() if self.averages else 0

    def _shards_by_rank(self) -> list[int]:
        return even_counts(self._num_shards, self.num_ranks)

    def _summed(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if self.num_ranks == 1:
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


class OrderedDDPSync(OrderedSync, DDPSync):
    """Adds up the gradients of the logical shards of several workers."""


def _in_order(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
