"""Loaders over global batches, for training functions that continue after a worker is lost (`elastic=True`).

A global batch has the samples of one step across all ranks. Its samples are divided among the current ranks. If a
worker is lost during a batch, the batch is repeated with the remaining workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from raysgd.core.arrays.division import Division
from raysgd.core.engine.shared.types import World
from raysgd.torch.data.batch_sampler import PassPlan, batches_of_rank
from raysgd.torch.data.sample_order import Indices, SamplerOrder
from raysgd.train._torch.global_steps import GlobalSteps
from raysgd.train._worker.shards import StreamPart


class DrawnSampler(DistributedSampler[Any]):
    """Gives each rank its shard of the indices that the user's sampler draws.

    Args:
        sampler: The user's sampler. With the same seed, it must draw the same indices on all ranks.
        world: This worker's rank and the number of workers.
        exact: True to repeat no samples. The first ranks may then have one more sample than the other ranks.
    """

    def __init__(self, sampler: Any, world: World, exact: bool) -> None:
        super().__init__(sampler, num_replicas=world.size, rank=world.rank)
        self._order = SamplerOrder(sampler)
        self._multiple = 1 if exact else world.size
        self.total_size = self._with_repeats(len(sampler))
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def drawn(self) -> Indices:
        """Return all indices that the user's sampler draws in this epoch."""
        return self._order.indices(self.seed, self.epoch)

    def __iter__(self) -> Iterator[Any]:
        drawn = self.drawn()
        return islice(cycle(drawn), self.rank, self._with_repeats(len(drawn)), self.num_replicas)

    def _with_repeats(self, num_samples: int) -> int:
        return num_samples + -num_samples % self._multiple


class GlobalBatches(Sampler[list[Any]]):
    """A batch sampler that yields one rank's part of each global batch.

    Args:
        sampler: Sampler that determines the order of the samples.
        size: Number of samples in a global batch.
        drop_last: True to omit a smaller last global batch.

    Attributes:
        size: Number of samples in a global batch.
        consumed: Number of samples that were used before a pass. Always 0, because a pass over a dataset starts at its
            beginning. In a `GlobalStream`, a pass may start later.
    """

    consumed = 0

    def __init__(self, sampler: DrawnSampler, size: int, drop_last: bool) -> None:
        self._sampler, self.size, self._drop_last = sampler, size, drop_last
        self._order: Indices = ()
        self._rank = 0

    def __len__(self) -> int:
        return self._plan_of(len(self._sampler), 0, 1).num_steps

    def _plan_of(self, num_samples: int, consumed: int, world_size: int) -> PassPlan:
        # With this cap, single samples are only avoided if no rank then has more samples than in a full global batch.
        division = Division(self.size, world_size, cap=-(-self.size // world_size))
        return PassPlan(num_samples, consumed, division, self._drop_last, pad=True)

    def draw(self) -> None:
        """Choose the samples of the next pass and their order."""
        self._order = self._sampler.drawn()

    def open(self, consumed: int, world: World) -> PassPlan:
        """Return the plan for the rest of the pass. The next iteration yields the batches of the rank in `world`.

        Args:
            consumed: Number of samples of the pass that all ranks together have used.
            world: The rank, and the number of ranks.
        """
        self._rank, self._plan = world.rank, self._plan_of(len(self._order), consumed, world.size)
        return self._plan

    def note_used(self, consumed: int) -> None:
        """Do nothing, because the position in a dataset is not saved."""

    def end_pass(self) -> None:
        """Do nothing, because the training function sets the next epoch itself, with `loader.sampler.set_epoch`."""

    def __iter__(self) -> Iterator[list[Any]]:
        return batches_of_rank(self._order, self._plan, self._rank)


class GlobalStream:
    """This rank's batches of a stream whose rows are counted in advance. It has the methods of `GlobalBatches`.

    It also serves as the loader's sampler, so `loader.sampler.set_epoch` sets the stream's epoch. At its end, a pass
    advances to the next epoch. Other attributes, such as `epoch` and `consumed`, come from the worker's shard.

    Args:
        part: The worker's shard of the stream.

    Attributes:
        size: Number of rows in a global batch.
    """

    def __init__(self, part: StreamPart) -> None:
        self._part = part
        self._num_rows, self.size = part.sizes
        self.sampler = self.batch_sampler = self

    def __len__(self) -> int:
        return len(self._part)

    def draw(self) -> None:
        """Do nothing, because the epoch determines the order of the rows."""

    def open(self, consumed: int, world: World) -> PassPlan:
        """Return the plan for the rest of the epoch. The next iteration yields the batches of the rank in `world`."""
        self._batches = self._part.batches_of(world, consumed)
        return PassPlan(self._num_rows, consumed, Division(self.size, world.size), drop_last=False, pad=True)

    def note_used(self, consumed: int) -> None:
        """Set the stream's position."""
        self._part.consumed = consumed

    def end_pass(self) -> None:
        """Advance the stream to its next epoch."""
        self._part.set_epoch(self._part.epoch + 1)

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_part"], name)


class RepeatingLoader(DataLoader[Any]):
    """Wraps a loader over global batches, and repeats a batch if a worker was lost while the batch was processed.

    After a worker was lost, the loader waits before the next batch until the remaining workers have formed a new group.
    New workers also join between two batches. Other attributes come from the wrapped loader.

    Args:
        loader: The loader to wrap.
        steps: Object that decides whether an optimizer step on one of the loader's batches counts.

    Attributes:
        is_open: True while the function is in the middle of a training pass.
    """

    def __init__(self, loader: DataLoader[Any], steps: GlobalSteps) -> None:
        self.__dict__.update(loader.__dict__)
        self._loader, self._steps = loader, steps
        self._has_trained = self.is_open = False
        self._epoch = self._consumed = 0
        steps.number(self)

    @property
    def _global(self) -> GlobalBatches | GlobalStream:
        return self._loader.batch_sampler  # type: ignore[return-value]

    @property
    def _sampler(self) -> DistributedSampler[Any] | GlobalStream:
        return self._loader.sampler  # type: ignore[return-value]

    @property
    def epoch(self) -> int:
        """Number of passes in which the function has trained. It is equal on all workers.

        A pass counts when it ends, even if the function leaves it early. But if the function leaves a pass over a
        stream before the last batch, the pass does not count, because the next pass continues there.

        New workers can join a running function only if the function counts its epochs by this attribute. You may set
        the attribute, for example to a value from a checkpoint.
        """
        self._steps.admit()
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def position(self) -> dict[str, Any]:
        """Return the loader's position, which is sent to new workers."""
        return {
            "epoch": self._epoch,
            "order": self._sampler.epoch,
            "size": self._global.size,
            "consumed": self._consumed,
            "is_open": self.is_open,
        }

    def take_over(self, position: dict[str, Any]) -> None:
        """Continue at the other workers' position. Called in a new worker.

        Args:
            position: The result of `position` in another worker.
        """
        self._epoch, self._consumed, self._global.size = position["epoch"], position["consumed"], position["size"]
        self._sampler.set_epoch(position["order"])
        self._global.note_used(self._consumed)
        self._has_trained = True

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        joint = self._global
        self._consumed, self.is_open = joint.consumed, torch.is_grad_enabled()
        place, outcomes = self._steps.enter(self.is_open), set[str]()
        joint.draw()
        while (plan := joint.open(self._consumed, place.world)).num_steps:
            batches = zip(self._loader, plan.shares(place.world.rank), strict=True)
            for number, (batch, (_, share)) in enumerate(batches, 1):
                consumed = plan.consumed_after(number)
                joint.note_used(consumed)
                # Under `torch.no_grad()`, the function evaluates: no steps follow, and ranks need not stay together.
                if not torch.is_grad_enabled():
                    if share.num_samples:
                        yield batch
                    self._consumed = consumed
                    continue
                mark = self._steps.open_batch(place, share.weight, self._has_trained, self._consumed)
                try:
                    yield batch
                except GeneratorExit:
                    has_trained = self._steps.leave_batch(mark) or "done" in outcomes
                    self._leave(has_trained, is_last=number == plan.num_steps)
                    raise
                outcome = self._steps.close_batch(mark)
                self._consumed = self._consumed if outcome == "failed" else consumed
                self._note(outcome, outcomes)
                before = place
                if outcome != "seen":
                    place = self._steps.enter()
                if outcome == "failed" or place is not before:
                    break
        joint.end_pass()
        self._epoch += "done" in outcomes
        self.is_open = False

    def _leave(self, has_trained: bool, is_last: bool) -> None:
        """When the function leaves a pass early, count the pass as an epoch if the function has taken a step in it.

        A pass over a stream counts only if the function leaves it during the last batch. Otherwise, the next pass
        continues where this pass stopped.

        Args:
            has_trained: True if the function has taken a step in the pass.
            is_last: True if the function leaves the pass during its last batch.
        """
        self.is_open, self._has_trained = False, self._has_trained or has_trained
        if has_trained and (is_last or isinstance(self._global, GlobalBatches)):
            self._global.end_pass()
            self._epoch += 1

    def _note(self, outcome: str, outcomes: set[str]) -> None:
        """Record the outcome of a batch: "done", "failed", or "seen" if no optimizer step was taken on the batch.

        Args:
            outcome: The outcome of the batch.
            outcomes: The outcomes of all batches in this pass, to which `outcome` is added.
        """
        outcomes.add(outcome)
        self._has_trained = self._has_trained or outcome != "seen"
        if {"seen", "done"} <= outcomes:
            self._steps.note_unstepped()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # not `DataLoader.__setattr__`, which rejects some names
