"""`BatchPlan`: what is decided about a batch before user code sees it, by one pure generator (`planned`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar


class BatchPlan(NamedTuple):
    """How one batch of this rank counts, and whether the optimizer steps after it.

    A global batch is the batch of all ranks together. A rank trains on its share as one batch, or splits the share into
    several micro-batches. A step of the optimizer has one global batch, or several whose gradients are accumulated.

    Attributes:
        num_samples: Number of this rank's samples; 0 for padding, None if unknown.
        total_samples: Number of samples in the batches on which all ranks train at the same time; None if unknown. With
            logical shards (`deterministic=True`), the number of samples in the entire global batch.
        sample_weight: Factor for this rank's gradient in the mean over the ranks, if the batch is alone in its step.
        starts_global_batch, ends_global_batch: True if the global batch starts or ends with this batch.
        starts_step: True if a step of the optimizer starts with this batch.
        sync_gradients: True if a step of the optimizer ends with this batch.
        seeds: With logical shards, the seeds for the random numbers in the batch and after the step.
        is_padding: True if no sample counts: the rank trains on the batch only to take part in the others' collectives.
    """

    num_samples: int | None = None
    total_samples: int | None = None
    sample_weight: float = 1.0
    starts_global_batch: bool = True
    ends_global_batch: bool = True
    starts_step: bool = True
    sync_gradients: bool = True
    seeds: tuple[int, int] | None = None
    is_padding: bool = False


BETWEEN_BATCHES = BatchPlan()
"""For backward passes and steps that belong to no batch, such as those between two calls."""


@dataclass(frozen=True)
class StepRules:
    """The rules for all steps of a call in one group of workers.

    Attributes:
        averages: True if gradients are averaged over the ranks.
        accumulate: Number of global batches in a step of the optimizer. The last step of a pass or a call may have
            fewer.
        micro_batches: Largest number of batches into which a rank splits its share of a global batch.
        num_shards: Number of logical shards of a global batch (`deterministic=True`); 0 without them.
        num_batches: Largest number of batches of one rank in a step.
        has_several: True if a step may have several batches of one rank.
        weighs: True if a step has several batches, of this rank or of several ranks, so that their weights matter.
    """

    averages: bool = False
    accumulate: int = 1
    micro_batches: int = 1
    num_shards: int = 0
    num_batches: int = field(init=False)
    has_several: bool = field(init=False)
    weighs: bool = field(init=False)

    def __post_init__(self) -> None:  # attributes, because each batch reads them several times
        object.__setattr__(self, "num_batches", self.accumulate * self.micro_batches)
        object.__setattr__(self, "has_several", self.num_batches > 1)
        object.__setattr__(self, "weighs", self.averages or self.has_several or self.num_shards > 0)

    @property
    def option(self) -> str:
        """The trainer's option that combines several batches into one step, for error messages."""
        return f"accumulate_grad_batches={self.accumulate}" if self.micro_batches == 1 else "micro_batch_size"

    def samples_in_step(self, plan: BatchPlan) -> int | None:
        """Return by how many samples a batch counts in a step of several batches. None if its step has no others."""
        if not self.has_several:
            return None
        return plan.total_samples if self.averages or plan.num_samples is None else plan.num_samples


class CurrentStep(Protocol):
    """Where user code, through the operator, and hooks find the running step: PyTorch's `Leg`, or Keras's `TFStep`."""

    @property
    def rules(self) -> StepRules:
        """What holds for all steps of the call."""

    @property
    def plan(self) -> BatchPlan:
        """How the current batch counts."""

    def skip(self) -> None:
        """Leave the most recent batch out of training."""

    def end_stream(self) -> None:
        """Called when a training or validation call has no more batches."""


class PlannedItem(Protocol):
    """A batch of a source, and its place in the pass."""

    @property
    def batch(self) -> Any:
        """The batch, or `NO_BATCH`."""

    @property
    def is_first(self) -> bool:
        """True if a global batch starts with this item."""

    @property
    def is_last_part(self) -> bool:
        """True if a global batch ends with this item."""

    @property
    def is_last_of_pass(self) -> bool | None:
        """True if the pass ends with this item. None if that is unknown before the next item is drawn."""

    def plan(self, starts_step: bool, sync_gradients: bool) -> BatchPlan:
        """Return how the item counts. The arguments become attributes of the plan."""


ItemT = TypeVar("ItemT", bound=PlannedItem)


def planned(
    drawn: Iterator[tuple[ItemT, bool]], accumulate: int, num_steps: int | None
) -> Iterator[tuple[ItemT, BatchPlan]]:
    """Yield each drawn item with its plan. A step ends after `accumulate` global batches, a pass, or the call.

    Args:
        drawn: Each item, and whether the pass ends with it.
        accumulate: Number of global batches in a step of the optimizer.
        num_steps: Number of global batches of the call; None to go on as long as items come.
    """
    num_started, num_complete, starts_step = 0, 0, True
    for item, ends_pass in drawn:
        num_started += item.is_first
        num_complete += item.is_last_part
        ends_call = num_started == num_steps and item.is_last_part
        sync = item.is_last_part and (ends_pass or ends_call or num_complete >= accumulate)
        yield item, item.plan(starts_step, sync)
        starts_step, num_complete = sync, 0 if sync else num_complete
        if ends_call:
            return
