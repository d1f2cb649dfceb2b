"""`Leg`: tracks the current batch and optimizer step in the part of a training call that one worker group runs.

Such a part is called a leg. `StepLoop.begin_leg` creates a `Leg` when a call starts, and another one when the call
continues in a new worker group. The strategy's attribute `leg` is the current `Leg`. User code may also run backward
passes between calls. The strategy then has a `Leg` without batches.

A backward pass belongs to the batch that the training code requested last. Therefore, it is an error to request a batch
with a different weight while the previous batch still needs its backward pass. `raysgd.torch.parallel.batch_weight`
explains the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raysgd.torch.parallel.batch import Batch
from raysgd.torch.parallel.batch_weight import BatchWeights, Counted, Omitted, Window
from raysgd.torch.parallel.logical_shards import LogicalShards
from raysgd.torch.parallel.step_rows import StepRows
from raysgd.torch.parallel.undo import Undo


class Leg:
    """Tracks the current batch and step in a leg, the part of a training call that one worker group runs.

    A step is an optimizer step. A window is the set of batches whose gradients are accumulated for one step. A global
    batch is the batch of all ranks together. Each rank may split its share of the global batch into several batches.
    With `deterministic=True`, each global batch is divided into logical shards, whose number does not depend on the
    number of ranks. The class implements the protocol `CurrentLeg`.

    Args:
        window: Largest number of batches of a rank in a step. A step has fewer batches if the rank splits its shares
            into fewer than `most_parts` batches, or if the epoch or the call ends.
        most_parts: Largest number of batches into which a rank may split its share of a global batch.
        shards: Adds up the gradients of logical shards; None without logical shards.
        is_global: True if gradients are averaged over the ranks. A batch is then weighted relative to the batches of
            the other ranks.
        undo: Copies the state that the batches of a step may change, and restores it. None if no batch is undone.

    Attributes:
        window: Largest number of batches of a rank in a step.
        most_parts: Largest number of batches into which a rank may split its share of a global batch.
        shards: Adds up the gradients of logical shards; None without logical shards.
        is_global: True if gradients are averaged over the ranks.
        undo: Copies the state that the batches of a step may change, and restores it. None if no batch is undone.
        has_several_batches: True if a step has several batches, on this rank or on several ranks, so that the weights
            of batches matter.
        defer: Function that is called before each batch if the step accumulates gradients or has logical shards. It
            gets True if the all-reduce of the batch's gradients can wait for a later batch. None if the strategy cannot
            let it wait.
        check: Function that is called when a step has ended, and raises if the step is invalid, for example after a
            lost connection. None for no check.
        refresh: Function that copies rank 0's buffers of unwrapped models to all ranks. It is called before the first
            part of each global batch. None if there are no such models.
        weights: Finds the weight of each batch.
        rows: Exchanges metrics between the ranks in each step; None if the ranks exchange no metrics.
        batch: The batch that the training code requested last.
        began_at: Time at which this rank began to draw the batch; 0 once the batch's first backward pass has started.
        own_s: Seconds from `began_at` to the backward pass, summed over all batches. In this time, the rank does not
            wait for other ranks.
        is_used: True if a backward pass was recorded. False if user code computes all gradients without the library's
            methods; gradient accumulation then has no effect.
        counted: Weight of the batch in the running backward pass, such as its number of labels. None if the batch is
            weighted by its number of samples, or if its loss is already multiplied by its weight.
        usual: Mean weight of a rank's batch in the latest step in which batches were not weighted by their samples. The
            same on all ranks.
        has_clipped: True if gradients were clipped in this leg.
        accumulated: With accumulation, the weights of those batches of the current step that had a backward pass. None
            before the first such batch, and without accumulation.
        omitted: Counts the samples that user code skips in the step; None until `note_omitted` is called in the step.
    """

    def __init__(
        self,
        window: int = 1,
        *,
        most_parts: int = 1,
        shards: LogicalShards | None = None,
        is_global: bool = False,
        undo: Undo | None = None,
    ) -> None:
        self.window, self.most_parts, self.shards = window, most_parts, shards
        self.is_global, self.undo = is_global, undo
        self.has_several_batches = window > 1 or is_global or shards is not None
        self.defer: Callable[[bool], None] | None = None
        self.check: Callable[[], None] | None = None
        self.refresh: Callable[[], None] | None = None
        self.weights = BatchWeights(self.has_several_batches, shards is not None)
        self.rows: StepRows | None = None
        self.batch = Batch()
        self.began_at = self.own_s = 0.0
        self.is_used = False
        self.counted: Counted | None = None
        self.usual = 1.0
        self.has_clipped = False
        self.accumulated: Window | None = None
        self.omitted: Omitted | None = None
        self._is_weighted = False  # True in a backward pass whose loss was already multiplied by its weight
        self._num_waiting, self._is_by_samples = 0, True

    # ------------------------------------------------------------------------------------ from batch to batch

    def begin_batch(
        self,
        weight: float,
        num_samples: int | None,
        total: int | None = None,
        *,
        is_last: bool = True,
        is_first_part: bool = True,
        is_last_part: bool = True,
        seeds: tuple[int, int] | None = None,
    ) -> None:
        """Start the batch that the training code has requested from the data.

        Everything that happens before a batch happens here, in this order: the method checks that the previous step has
        ended, copies rank 0's buffers, lets `undo` copy what the step may change, creates the `Batch` and compares its
        weight with the previous batch's, turns the all-reduce of its gradients on or off, and starts the logical shard.

        Args:
            weight: Weight of this rank's gradient in the mean over the ranks.
            num_samples: Number of this rank's samples in the batch; 0 for padding, None if unknown.
            total: Number of samples in the batches on which all ranks train at the same time; None if unknown. With
                logical shards, the number of samples in the entire global batch.
            is_last: True if the epoch or the call ends with this batch.
            is_first_part: True if the global batch starts with this batch.
            is_last_part: True if the global batch ends with this batch.
            seeds: With logical shards, the seeds for the random numbers in the batch and after the step.

        Raises:
            ValueError: With accumulation, the previous batch has another weight and still needs its backward pass. Or
                user code did not step the optimizer after the last batch of the previous step.
            RuntimeError: Without accumulation, the previous batch has another weight and still needs its backward pass.
        """
        before, shards = self.batch, self.shards
        if self.accumulated is not None and before.is_boundary and before.had_backward:
            raise ValueError(
                f"`{self.option}`: `self.optimizer_step()` was not called for the last batch of a step. Call it after "
                "`self.backward(loss)` for every batch, or omit the option and accumulate yourself."
            )
        if self.refresh is not None and before.is_last_part:
            self.refresh()
        if self.undo is not None and before.is_boundary:
            self.undo.begin_step()

        index, is_boundary, of_step = 0, shards is None or is_last_part, None
        if self.window > 1:
            assert total is not None
            index = (0 if before.is_boundary else before.index) + is_last_part
            is_boundary = is_last_part and (is_last or index * self.most_parts >= self.window)
            of_step = total if self.is_global or num_samples is None else num_samples
        batch = Batch(
            weight,
            num_samples,
            of_step,
            number=before.number + 1,
            index=index,
            is_last_part=is_last_part,
            is_boundary=is_boundary,
        )
        if self._num_waiting and not self._weighs_like(batch):
            raise self._drawn_too_early(weight)
        self.batch = batch
        if self.window > 1 or self.is_global:
            self._num_waiting += 1
            batch.needs_backward = True

        if self.defer is not None and (shards is not None or self.window > 1):
            self.defer(shards is not None or not is_boundary)
        if shards is not None and seeds is not None:
            shards.begin_shard(is_first_part, seeds[0], (num_samples or 0) / total if total else 0.0, seeds[1])

    def _weighs_like(self, batch: Batch) -> bool:
        """Return True if a batch has the same weight in its step as the previous batch.

        In addition, both batches or neither must be padding, and both or neither must end the step.
        """
        last = self.batch
        if (batch.is_boundary, batch.is_padding) != (last.is_boundary, last.is_padding):
            return False
        return not self._is_by_samples or (batch.weight, batch.total) == (last.weight, last.total)

    def _drawn_too_early(self, weight: float) -> Exception:
        if self.window > 1:
            return ValueError(
                f"`{self.option}`: `self.backward` was not called for the batch that was drawn before this one. Call "
                "`self.backward(loss)` and `self.optimizer_step()` for each batch, with `0 * loss` to skip one; "
                "to accumulate yourself, omit the option."
            )
        return RuntimeError(
            f"A batch with weight {weight:g} was drawn while a batch with weight {self.batch.weight:g} waits for "
            "its backward pass, so the next loss would get the wrong weight. Draw one batch, train on it, then draw "
            "the next. To skip a batch, call `self.skip_batch()`. To draw ahead, pass `drop_last=True` to the loader."
        )

    def end_stream(self) -> None:
        """Record that no more batches follow.

        From now on, backward passes belong to no batch. However, if the last batch still needs its backward pass, the
        next backward pass belongs to the last batch.
        """
        self.began_at = 0.0
        if not self._num_waiting:
            self.batch = self.batch.end()

    def end_forward(self) -> None:
        """Stop measuring the time that this rank spends on the batch without waiting for other ranks (`own_s`).

        Called before each backward pass, in which ranks wait for each other. Only the first call for a batch has an
        effect.
        """
        if self.began_at:
            self.own_s += time.perf_counter() - self.began_at
            self.began_at = 0.0

    def confirm(self) -> None:
        """Raise if the step that has ended is invalid, for example because a connection broke during the step."""
        if self.shards is not None:
            self.shards.check()
        if self.check is not None:
            self.check()

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
        if self.batch.needs_backward:
            self._num_waiting -= 1
            self.batch.needs_backward = False

    def skip(self) -> None:
        """Record that user code runs no backward pass for the latest batch. Has no effect if it has already run one.

        Raises:
            ValueError: With accumulation, every batch needs a backward pass.
        """
        if self.batch.needs_backward and self.window > 1:
            raise ValueError(
                f"`{self.option}`: a batch was skipped, but `self.backward` was not called for it. Call "
                "`self.backward(loss)` and `self.optimizer_step()` for every batch (a `LightningModule` needs "
                "automatic optimization). To skip a batch, pass `0 * loss`. To compute gradients yourself, omit the "
                "option."
            )
        self.end_waiting()

    # ------------------------------------------------------------------------------------ backward passes and steps

    def note_backward(self, optimizers: Sequence[Any], weight: Any = None) -> bool:
        """Record a backward pass of the batch. Return True if the batch already had a backward pass.

        Args:
            optimizers: Optimizers whose gradients were cleared for this backward pass, or to which the pass adds.
            weight: Weight from user code, or the batch's number of labels; None if the batch is weighted by its number
                of samples.

        Raises:
            ValueError: With accumulation, `optimizer_step` was already called for this batch.
        """
        if self.is_global or self.window > 1:
            self.use(by_samples=weight is None)
        if self.window > 1 and self.batch.was_asked_to_step:
            raise ValueError(
                "`self.backward` was called after `self.optimizer_step` for the same batch and optimizer. With "
                f"`{self.option}` every batch belongs to one step: call each method once for a batch, or omit the "
                "option."
            )
        batch, ids = self.batch, {*map(id, optimizers)}
        self.is_used = True
        batch.left_out -= ids
        batch.computed |= ids
        if isinstance(weight, float):
            batch.weights.append(weight)
        is_further, batch.had_backward = batch.had_backward, True
        return is_further

    def adds_to(self, optimizer: Any) -> bool:
        """Return True if a backward pass of this batch adds to the gradients that the optimizer's parameters have."""
        return self.accumulated is not None if self.window > 1 else id(optimizer) in self.batch.computed

    @property
    def option(self) -> str:
        """Name of the trainer's option that combines several batches into one step, for error messages."""
        return f"accumulate_grad_batches={self.window}" if self.most_parts == 1 else "micro_batch_size"

    def share(self, weight: Any, num_ranks: int, *, is_of_criterion: bool = False) -> float:
        """Add the batch to those accumulated for a step (the window). Return the factor by which to multiply its loss.

        Args:
            weight: Weight of the batch; None to weight it by its number of samples.
            num_ranks: Number of ranks over which gradients are averaged.
            is_of_criterion: True if `weight` comes from the criterion, False if it comes from user code.

        Raises:
            ValueError: Some batches of the window are weighted by samples and others are not, or user code passed two
                different weights for a batch.
        """
        batch, weight = self.batch, None if weight is None else float(weight)
        total, amount = batch.total if weight is None else None, weight
        if amount is None:
            total = num_ranks if total is None else total  # it is None before the first and after the last batch
            amount = total / num_ranks * (batch.weight if self.is_global else 1.0)
        if self.accumulated is None:
            usual = self.usual if total is None else total / num_ranks
            self.accumulated = Window(weight is not None, self.window * usual or 1.0)
        window = self.accumulated
        window.is_exchanged, window.is_of_criterion = batch.is_boundary, is_of_criterion
        if window.is_weighted != (weight is not None):
            raise ValueError(
                f"`self.backward` was called with `weight=` for some of the {self.window} batches of an optimizer step "
                "and without it for others: pass it for all of them, or for none."
            )
        if window.last is None or window.last[0] != batch.number or not batch.number:
            window.last = batch.number, weight
            window.num_batches += 1
            window.own += amount
            window.total += total or 0.0
        elif window.last[1] != weight:
            raise ValueError(
                f"`self.backward(loss, weight={weight!r})`: another loss of this batch for the same optimizer had "
                f"`weight={window.last[1]!r}`. Pass one weight for a batch, or add the losses up and call `backward` "
                "once."
            )
        return amount / window.reference

    def note_omitted(self, is_omitted: bool, num_ranks: int) -> None:
        """Record whether user code skips the batch on this rank. Called for each batch if user code may skip batches.

        Args:
            is_omitted: True if this rank skips the batch.
            num_ranks: Number of ranks over which gradients are averaged.
        """
        batch = self.batch
        if self.window == 1 or self.omitted is None:
            self.omitted = Omitted(self.window)
        drawn = float(batch.total or num_ranks)
        own = drawn / num_ranks * batch.weight if self.is_global else drawn
        self.omitted.note(max(0, batch.index - batch.is_last_part), drawn, own if is_omitted else 0.0)

    def stepped(self, optimizer: Any) -> None:
        """Record that `optimizer` has stepped, so that the next backward pass clears the old gradients."""
        self.batch.computed.discard(id(optimizer))
        self.accumulated = self.omitted = None

    @contextmanager
    def weighting(self, counted: Counted | None = None) -> Iterator[None]:
        """Set how the gradients of the backward pass in the `with` block are weighted before they are sent.

        Args:
            counted: Weight of the batch, such as its number of labels. None if the loss is already multiplied by its
                weight.
        """
        self.counted, self._is_weighted = counted, counted is None
        try:
            yield
        finally:
            self.counted, self._is_weighted = None, False

    def outgoing(self, is_told: bool = False) -> tuple[Any, Counted | Omitted | None]:
        """Return the factor by which to multiply gradients before they are sent, and the amounts to send with them.

        The factor is a number or a one-element tensor. The amounts are a `Counted` or an `Omitted`; None if the other
        ranks need no amounts. The caller must divide the sum of the ranks' gradients by the `divisor` of the amounts.

        Args:
            is_told: True if the caller can send amounts along with the gradients.
        """
        if self.window > 1 or self._is_weighted:
            weight = 1.0
        elif self.counted is None:
            self.use()
            weight = self.batch.weight
        elif is_told and not self.counted.is_known:
            return self.counted.amount / self.counted.reference, self.counted
        else:
            weight = self.counted.factor()
        return weight, self.omitted if is_told and self.omitted is not None and not self.omitted.is_known else None
