"""`Leg`: tracks the current batch and optimizer step in the part of a training call that one worker group runs.

Such a part is called a leg. `GradientSync.begin_leg` creates a `Leg` when a call starts, and another one when the call
continues in a new worker group. The attribute `leg` of the sync is the current `Leg`. User code may also run backward
passes between calls. The sync then has a `Leg` without batches.

A backward pass belongs to the batch that the training code requested last. Therefore, it is an error to request a batch
with a different weight while the previous batch still needs its backward pass. `raysgd.torch.parallel.scale` explains
the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raysgd.core.arrays.batch_plan import BETWEEN_BATCHES, BatchPlan
from raysgd.core.numbers.time_spent import UNDO
from raysgd.torch.parallel.record import BatchRecord, FlightRecorder, StepRecord
from raysgd.torch.parallel.scale import UNSCALED, Accumulation, BatchItems, Scale, scale_of
from raysgd.torch.parallel.undo import Undo
from raysgd.trainer.worker.data.rank_rows import Gather
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.step_loop import StepRules


class Leg:
    """Tracks the current batch and step in a leg, the part of a training call that one worker group runs.

    A step is an optimizer step. With `deterministic=True`, each global batch is divided into logical shards, whose
    number does not depend on the number of ranks.

    Args:
        rules: What holds for all steps of the leg.
        undo: Copies the state that the batches of a step may change, and restores it. None if no batch is undone.
        record: What has happened since the last commit, perhaps between two calls.
        flight_recorder: Records this rank's actions, to compare them with those of other ranks.
        ledger: Measures the time spent in communication and on copies.
        sync: The `GradientSync` whose `open` is called before each batch, and `check` when a step has ended; None if
            there is nothing to do then.
        share: Function that sends this rank's metrics to the other ranks; None if the ranks exchange no metrics.

    Attributes:
        rules: What holds for all steps of the leg.
        plan: How the batch counts that the training code requested last.
        undo: Copies the state that the batches of a step may change, and restores it. None if no batch is undone.
        items: Finds what each batch counts.
        scale: How the running backward pass is weighted, or one that user code runs by itself.
        record: What has happened since the last commit.
        flight_recorder: Records this rank's actions, to compare them with those of other ranks.
        ledger: Measures the time spent in communication and on copies.
        batch: What has happened to the batch that the training code requested last.
        is_used: True if a backward pass was recorded. False if user code computes all gradients without the library's
            methods; gradient accumulation then has no effect.
        items_per_sample: About how many items a sample had in the latest step in which batches were not weighted by
            their samples. A power of two, so that a gradient has the same bits whatever the steps before it were. The
            same on all ranks.
        has_clipped: True if gradients were clipped in this leg.
        accumulation: The losses that are added up for the current step. None before the first one, and if a step has
            one batch.
    """

    def __init__(
        self,
        rules: StepRules = StepRules(),
        *,
        undo: Undo | None = None,
        record: StepRecord | None = None,
        flight_recorder: FlightRecorder | None = None,
        ledger: Ledger | None = None,
        sync: Any = None,
        share: Callable[[Gather | None], None] | None = None,
    ) -> None:
        self.rules, self.plan, self.undo = rules, BETWEEN_BATCHES, undo
        self._sync, self._share = sync, share
        self.items, self.scale = BatchItems(self), UNSCALED
        self.batch = BatchRecord()
        self.record = StepRecord() if record is None else record
        self.flight_recorder, self.ledger = flight_recorder or FlightRecorder(), ledger or Ledger()
        self.is_used = False
        self.items_per_sample = 1.0
        self.has_clipped = False
        self.accumulation: Accumulation | None = None
        self._is_weighing = False  # True in a backward pass by the library with a scale of its own
        self._num_waiting, self._is_by_samples = 0, True

    # ------------------------------------------------------------------------------------ from batch to batch

    def begin_batch(self, plan: BatchPlan) -> None:
        """Start the batch that the training code has requested from the data.

        Everything that happens before a batch happens here, in this order: the method checks that the previous step has
        ended, lets the strategy copy rank 0's buffers and turn the all-reduce of the batch's gradients on or off, lets
        `undo` copy what the step may change, and compares the batch's weight with the previous batch's.

        Args:
            plan: How the batch counts.

        Raises:
            ValueError: With accumulation, the previous batch has another weight and still needs its backward pass. Or
                user code did not step the optimizer after the last batch of the previous step.
            RuntimeError: Without accumulation, the previous batch has another weight and still needs its backward pass.
        """
        before, rules = self.plan, self.rules
        if self.accumulation is not None and before.sync_gradients and self.batch.had_backward:
            raise ValueError(
                f"`{rules.option}`: `self.optimizer_step()` was not called for the last batch of a step. Call it after "
                "`self.backward(loss)` for every batch, or omit the option and accumulate yourself."
            )
        if self._sync is not None:
            self._sync.open(plan)
        if self.undo is not None and plan.starts_step:
            self.record.begin(self.undo.save(self.ledger.inside(UNDO)))
        if self._num_waiting and not self._weighs_like(plan):
            raise self._drawn_too_early(plan)
        waits = rules.has_several or rules.averages
        self._num_waiting += waits
        self.plan, self.batch = plan, BatchRecord(self.batch.number + 1, waits)
        self.scale = scale_of(plan, rules)

    def _weighs_like(self, plan: BatchPlan) -> bool:
        """Return True if a batch has the same weight in its step as the previous batch.

        In addition, both batches or neither must be padding, and both or neither must end the step.
        """
        last, of_step = self.plan, self.rules.samples_in_step
        if (plan.sync_gradients, plan.is_padding) != (last.sync_gradients, last.is_padding):
            return False
        return not self._is_by_samples or (plan.weight, of_step(plan)) == (last.weight, of_step(last))

    def _drawn_too_early(self, plan: BatchPlan) -> Exception:
        if self.rules.has_several:
            return ValueError(
                f"`{self.rules.option}`: `self.backward` was not called for the batch that was drawn before this "
                "one. Call `self.backward(loss)` and `self.optimizer_step()` for each batch, with `0 * loss` to skip "
                "one; to accumulate yourself, omit the option."
            )
        return RuntimeError(
            f"A batch with weight {plan.weight:g} was drawn while a batch with weight "
            f"{self.plan.weight:g} waits for "
            "its backward pass, so the next loss would get the wrong weight. Draw one batch, train on it, then draw "
            "the next. To skip a batch, call `self.skip_batch()`. To draw ahead, pass `drop_last=True` to the loader."
        )

    def end_data(self) -> None:
        """Record that no more batches follow.

        From now on, backward passes belong to no batch. However, if the last batch still needs its backward pass, the
        next backward pass belongs to the last batch.
        """
        if not self._num_waiting:
            self.end_batch()

    def end_batch(self) -> None:
        """Let backward passes and steps from now on belong to no batch."""
        self.plan, self.scale = BETWEEN_BATCHES, UNSCALED
        self.batch.end()

    def commit(self, has_step: bool = False) -> StepRecord:
        """Let a new record begin: the step has ended, or was undone, or another state was loaded.

        Args:
            has_step: True if a step has ended. Raise if it is invalid, for example because a connection broke.

        Returns:
            The record of the step.
        """
        if has_step and self._sync is not None:
            self._sync.check()
        record, self.record = self.record, StepRecord(self.record.error)
        return record

    def note_all_reduce(self, name: str | None = None) -> None:
        """Record that a model's last gradients are about to be averaged.

        Args:
            name: Name of the all-reduce, the same on all ranks. None if the ranks may differ in what is averaged.
        """
        if name is not None:
            self.flight_recorder.note(name)
        self.record.note_all_reduce()
        if self.undo is not None:
            self.undo.see_all_reduce(self.record)

    def use(self, by_samples: bool = True) -> None:
        """Record that a backward pass of the batch is about to run.

        Args:
            by_samples: True if the gradients are weighted by the batch's number of samples.
        """
        self._is_by_samples = by_samples
        self.batch.is_by_samples |= by_samples
        self.end_waiting()

    def end_waiting(self) -> None:
        """Record that the latest batch no longer needs a backward pass, because it had one or user code skips it."""
        self._num_waiting -= self.batch.waits
        self.batch.waits = False

    def skip(self) -> None:
        """Record that user code runs no backward pass for the latest batch. Has no effect if it has already run one.

        Raises:
            ValueError: With accumulation, every batch needs a backward pass.
        """
        if self.batch.waits and self.rules.has_several:
            raise ValueError(
                f"`{self.rules.option}`: a batch was skipped, but `self.backward` was not called for it. Call "
                "`self.backward(loss)` and `self.optimizer_step()` for every batch (a `LightningModule` needs "
                "automatic optimization). To skip a batch, pass `0 * loss`. To compute gradients yourself, omit the "
                "option."
            )
        self.end_waiting()

    # ------------------------------------------------------------------------------------ backward passes and steps

    def note_backward(self, optimizers: Sequence[Any], by_samples: bool = True) -> bool:
        """Record a backward pass of the batch. Return True if the batch already had a backward pass.

        Args:
            optimizers: Optimizers whose gradients were cleared for this backward pass, or to which the pass adds.
            by_samples: True if the gradients are weighted by the batch's number of samples.

        Raises:
            ValueError: With accumulation, `optimizer_step` was already called for this batch.
        """
        if self.rules.weighs:
            self.use(by_samples)
        if self.rules.has_several and self.batch.has_asked_to_step:
            raise ValueError(
                "`self.backward` was called after `self.optimizer_step` for the same batch and optimizer. With "
                f"`{self.rules.option}` every batch belongs to one step: call each method once for a batch, or omit "
                "the option."
            )
        batch, ids = self.batch, {*map(id, optimizers)}
        self.is_used = True
        batch.skipped -= ids
        batch.with_gradients |= ids
        is_further, batch.had_backward = batch.had_backward, True
        return is_further

    def adds_to(self, optimizer: Any) -> bool:
        """Return True if a backward pass of this batch adds to the gradients that the optimizer's parameters have."""
        return self.accumulation is not None if self.rules.has_several else id(optimizer) in self.batch.with_gradients

    def add_up(self, weight: Any, num_ranks: int, *, is_of_criterion: bool = False, is_skipped: bool = False) -> float:
        """Add the batch to those whose gradients are added up for a step. Return the factor of its loss.

        Args:
            weight: Weight of the batch; None to weight it by its number of samples.
            num_ranks: Number of ranks over which gradients are averaged.
            is_of_criterion: True if `weight` comes from the criterion, False if it comes from user code.
            is_skipped: True if user code leaves the batch out, on a single worker.

        Raises:
            ValueError: Some batches of the step are weighted by samples and others are not, or user code passed two
                different weights for a batch.
        """
        batch, plan, weight = self.batch, self.plan, None if weight is None else float(weight)
        total, own = self.rules.samples_in_step(plan) if weight is None else None, weight
        if own is None:
            total = num_ranks if total is None else total  # it is None before the first and after the last batch
            own = total / num_ranks * (plan.weight if self.rules.averages else 1.0)
        if self.accumulation is None:
            usual = self.usual_items(num_ranks) if total is None else total / num_ranks
            self.accumulation = Accumulation(weight is not None, self.rules.num_batches * usual or 1.0)
        added = self.accumulation
        added.is_averaged, added.is_of_criterion = plan.sync_gradients, is_of_criterion
        if added.is_weighted != (weight is not None):
            raise ValueError(
                f"`self.backward` was called with `weight=` for some of the {self.rules.num_batches} batches of an "
                "optimizer step and without it for others: pass it for all of them, or for none."
            )
        if added.last is None or added.last[0] != batch.number or not batch.number:
            added.last = batch.number, weight
            added.num_batches += 1
            added.own += own
            added.add_samples(total or 0.0, is_skipped, plan.ends_global_batch)
        elif added.last[1] != weight:
            raise ValueError(
                f"`self.backward(loss, weight={weight!r})`: another loss of this batch for the same optimizer had "
                f"`weight={added.last[1]!r}`. Pass one weight for a batch, or add the losses up and call `backward` "
                "once."
            )
        return own / added.typical

    def usual_items(self, num_ranks: int) -> float:
        """Return how many items a rank's batch is expected to have. The same on all ranks."""
        return (self.plan.total_samples or num_ranks) / num_ranks * self.items_per_sample

    def learn_items(self, number: float, expected: float) -> None:
        """Remember how many items a rank's batch had in the latest step, unless no item counted.

        Args:
            number: Mean number over the ranks.
            expected: What `usual_items` returned.
        """
        if number:
            self.items_per_sample *= 2.0 ** round(math.log2(number / expected))

    def note_clipped(self) -> None:
        """Record that gradients were clipped."""
        self.has_clipped = True

    def send_rows(self, gather: Gather | None = None) -> bool:
        """Exchange metrics (rows) with the other ranks, once per optimizer step and only in the step's last batch.

        Called when the last gradients of a backward pass are about to be sent.

        Args:
            gather: Function that sends a row and returns the rows of all ranks. Default: gather over the mesh.

        Returns:
            True if this call exchanged rows.
        """
        if self._share is None:
            return False
        is_first, self.batch.has_shared_metrics = not self.batch.has_shared_metrics, True
        is_due = is_first and self.plan.sync_gradients
        if is_due:
            self._share(gather)
        return is_due

    def stepped(self, optimizer: Any) -> None:
        """Record that `optimizer` has stepped, so that the next backward pass clears the old gradients."""
        self.batch.with_gradients.discard(id(optimizer))
        self.accumulation = None

    @contextmanager
    def weighting(self, scale: Scale) -> Iterator[None]:
        """Set how the gradients of the backward pass in the `with` block are weighted before they are sent."""
        usual, self.scale, self._is_weighing = self.scale, scale, True
        try:
            yield
        finally:
            self.scale, self._is_weighing = usual, False

    def see_pass(self) -> None:
        """Record that gradients are about to be sent. If user code runs the backward pass, the batch has it now."""
        if not (self.rules.has_several or self._is_weighing):
            self.use()
