"""The part of a training call that one group runs: how many batches make a step, and the batch that it is in.

A leg is made when a call begins, and again when it goes on in another group; between two calls there is one, too, for
what user code does there. All that is said here about a batch belongs to the one that was handed out last. To draw one
that counts otherwise, while another waits for its backward pass, is an error. `raysgd.torch.parallel.amounts` has the
arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from raysgd.torch.objects.criteria import NO_CALL
from raysgd.torch.parallel.amounts import Counted, Omitted, Window
from raysgd.torch.parallel.batch import Batch
from raysgd.torch.parallel.exchanges import StepRows
from raysgd.torch.parallel.logical_shards import LogicalShards


class StepWatcher(Protocol):
    """Is told where steps of the optimizers begin, and of exchanges in them."""

    def begin_step(self) -> None:
        """Called before the first batch of each step of the optimizers."""

    def note_exchange(self) -> None:
        """Called when gradients of a model are exchanged."""


class Leg:
    """The part of a training call that one group runs.

    Args:
        window: How many batches make an optimizer step, fewer where the pass or the call ends first.
        most_parts: In how many batches, one after the other, a rank may take a global batch.
        shards: What keeps the gradients of logical shards; None where gradients are averaged as they come.
        is_global: Whether gradients are averaged over the ranks, so that all ranks' samples count.
        watcher: Is told of steps and exchanges, if someone is.

    Attributes:
        window, most_parts, shards, is_global, watcher: The same.
        has_several_batches: Whether a step has several batches, here or on other ranks, so that it matters how much
            each counts.
        defer: Told before each batch, with accumulation, whether the exchange of gradients can wait for a later one.
            As with the next two, None is for nothing.
        check: Called before a step counts as done; raises if it cannot.
        refresh: Called before the first batch of each global batch, on all ranks.
        rows: What the ranks tell each other in each step; None where they tell nothing.
        batch: The one that was handed out last.
        began_at: When this rank asked for it; 0 once its first backward pass follows.
        own_s: Seconds from there to that pass, summed up: time that this rank spent without the others.
        is_used: Whether a backward pass was noted. Code that computes gradients past the library's methods cannot
            accumulate.
        counted: How much the batch of the running backward pass counts, if not by its samples.
        usual: How much a batch of a rank counted last, on the average, if not by its samples; alike on all ranks.
        labels: The last loss over labels, as the criterion was called.
        uncounted: Whether a batch counted by its samples, and should not have.
        has_clipped: Whether gradients were clipped.
        waiting: The batches before this one in its step, once one of them had a backward pass; None without.
        omitted: The samples that are left out of the step, where code may do so on any rank; else None.
    """

    def __init__(
        self,
        window: int = 1,
        *,
        most_parts: int = 1,
        shards: LogicalShards | None = None,
        is_global: bool = False,
        watcher: StepWatcher | None = None,
    ) -> None:
        self.window, self.most_parts, self.shards = window, most_parts, shards
        self.is_global, self.watcher = is_global, watcher
        self.has_several_batches = window > 1 or is_global or shards is not None
        self.defer: Callable[[bool], None] | None = None
        self.check: Callable[[], None] | None = None
        self.refresh: Callable[[], None] | None = None
        self.rows: StepRows | None = None
        self.batch = Batch()
        self.began_at = self.own_s = 0.0
        self.is_used = False
        self.counted: Counted | None = None
        self.usual = 1.0
        self.labels = NO_CALL
        self.uncounted: Any = False
        self.has_clipped = False
        self.waiting: Window | None = None
        self.omitted: Omitted | None = None
        self._is_weighted = False  # whether the loss of the running backward pass was multiplied before
        self._num_waiting, self._is_by_samples = 0, True

    # ------------------------------------------------------------------------------------ from batch to batch

    def begin_batch(
        self,
        weight: float,
        num_samples: int | None,
        total: int | None = None,
        is_last: bool = True,
        is_last_part: bool = True,
    ) -> None:
        """Begin a batch; `is_last` says that the pass or the call ends with it."""
        before, index, is_boundary = self.batch, 0, True
        if self.waiting is not None and before.is_boundary and before.had_backward:
            raise ValueError(
                f"`{self.option}`: `self.optimizer_step()` was not called for the last batch of a step. Call it after "
                "`self.backward(loss)` for every batch, or omit the option and accumulate yourself."
            )
        if self.refresh is not None and before.is_last_part:
            self.refresh()
        if self.watcher is not None and before.is_boundary:
            self.watcher.begin_step()
        if self.window > 1:
            assert total is not None
            index = (0 if before.is_boundary else before.index) + is_last_part
            is_boundary = is_last_part and (is_last or index * self.most_parts >= self.window)
            total = total if self.is_global or num_samples is None else num_samples
        else:
            total = None
        if self.shards is not None:
            is_boundary = is_last_part
            if self.defer is not None:
                self.defer(True)
        if self._num_waiting and not self._counts_like(weight, num_samples, total, is_boundary):
            raise self._drawn_too_early(weight)
        self.batch = Batch(
            weight,
            num_samples,
            total,
            number=before.number + 1,
            index=index,
            is_last_part=is_last_part,
            is_boundary=is_boundary,
        )
        if self.window > 1 or self.is_global:
            self._num_waiting += 1
            self.batch.is_waiting = True
        if self.window > 1 and self.defer is not None:
            self.defer(not is_boundary)

    def _counts_like(self, weight: float, num_samples: int | None, total: int | None, is_boundary: bool) -> bool:
        """Return whether it makes no difference if a loss comes from a batch like this or from the last one."""
        last = self.batch
        if (is_boundary, num_samples == 0) != (last.is_boundary, last.is_padding):
            return False
        return not self._is_by_samples or (weight, total) == (last.weight, last.total)

    def _drawn_too_early(self, weight: float) -> Exception:
        if self.window > 1:
            return ValueError(
                f"`{self.option}`: `self.backward` was not called for the batch that was drawn before this one. Call "
                "`self.backward(loss)` and `self.optimizer_step()` for each batch, with `0 * loss` to leave one out; "
                "to accumulate yourself, omit the option."
            )
        return RuntimeError(
            f"A batch with weight {weight:g} was drawn while one with weight {self.batch.weight:g} waits for "
            "its backward pass, and would count as that one. Draw one batch, train on it, then draw the next; to "
            "leave one out, call `self.skip_batch()`; to draw ahead, pass `drop_last=True` to the loader."
        )

    def end_stream(self) -> None:
        """Say that no batch follows; what user code does from here on is by itself, if it has used all of them."""
        self.began_at = 0.0
        if not self._num_waiting:
            self.batch = self.batch.end()

    def end_forward(self) -> None:
        """Say that a backward pass follows, in which ranks wait for each other. The first one of a batch counts."""
        if self.began_at:
            self.own_s += time.perf_counter() - self.began_at
            self.began_at = 0.0

    def confirm(self) -> None:
        """See to it that the step may count as done; whatever `check` raises says that it may not."""
        if self.shards is not None:
            self.shards.check()
        if self.check is not None:
            self.check()

    def use(self, by_samples: bool = True) -> None:
        """Say that a backward pass follows."""
        self._is_by_samples = by_samples
        self.batch.is_by_samples |= by_samples
        self.end_waiting()

    def end_waiting(self) -> None:
        """Say that the last batch waits for no backward pass any more: it had one, or is left out."""
        if self.batch.is_waiting:
            self._num_waiting -= 1
            self.batch.is_waiting = False

    def skip(self) -> None:
        """Say that no backward pass follows for the last batch, if it had none.

        Raises:
            ValueError: Others of its step have one, or will have.
        """
        if self.batch.is_waiting and self.window > 1:
            raise ValueError(
                f"`{self.option}`: a batch is left out, for which `self.backward` was not called. Call "
                "`self.backward(loss)` and `self.optimizer_step()` for every batch (a `LightningModule` needs "
                "automatic optimization); to leave one out, pass `0 * loss`. To compute gradients yourself, omit the "
                "option."
            )
        self.end_waiting()

    # ------------------------------------------------------------------------------------ backward passes and steps

    def note_backward(self, optimizers: Sequence[Any], weight: Any = None) -> bool:
        """Note a backward pass for optimizers; return whether this batch had one before, for any optimizer.

        Raises:
            ValueError: The batch belongs to a step that has ended.
        """
        if self.is_global or self.window > 1:
            self.use(by_samples=weight is None)
        if self.window > 1 and self.batch.was_asked_to_step:
            raise ValueError(
                "`self.backward` was called after `self.optimizer_step` for the same batch and optimizer. With "
                f"`{self.option}` a batch is a part of one step: call each once for a batch, or omit the option."
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
        """Tell whether there are gradients for `optimizer` that a backward pass of this batch adds to."""
        return self.waiting is not None if self.window > 1 else id(optimizer) in self.batch.computed

    @property
    def option(self) -> str:
        """The option of the trainer that makes several batches one step."""
        return f"accumulate_grad_batches={self.window}" if self.most_parts == 1 else "micro_batch_size"

    def share(self, weight: float | None, num_ranks: int, *, is_of_criterion: bool = False) -> float:
        """Count this batch in its window; return what to multiply its loss with.

        Args:
            weight: How much the batch counts; None for its samples.
            num_ranks: Over how many ranks gradients are averaged.
            is_of_criterion: Whether the criterion says how much it counts, and not user code.

        Raises:
            ValueError: Others of the window count by something else.
        """
        batch = self.batch
        total, amount = batch.total if weight is None else None, weight
        if amount is None:
            total = num_ranks if total is None else total  # of a batch that is not of the data
            amount = total / num_ranks * (batch.weight if self.is_global else 1.0)
        if self.waiting is None:
            usual = self.usual if total is None else total / num_ranks
            self.waiting = Window(weight is not None, self.window * usual or 1.0)
        window = self.waiting
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
        """Say whether this rank leaves the batch out, where any rank may do so."""
        batch = self.batch
        if self.window == 1 or self.omitted is None:
            self.omitted = Omitted(self.window)
        drawn = float(batch.total or num_ranks)
        own = drawn / num_ranks * batch.weight if self.is_global else drawn
        self.omitted.note(max(0, batch.index - batch.is_last_part), drawn, own if is_omitted else 0.0)

    def stepped(self, optimizer: Any) -> None:
        """Note that `optimizer` has stepped: the next backward pass begins with no gradients."""
        self.batch.computed.discard(id(optimizer))
        self.waiting = self.omitted = None

    def end_window(self) -> None:
        """Let the optimizer step on the batches that there are: the loop ended before the window did."""
        self.batch = self.batch.end()

    @contextmanager
    def weighting(self, counted: Counted | None = None) -> Iterator[None]:
        """Inside is a backward pass of a batch that counts by this; with None, of a loss that was multiplied before."""
        self.counted, self._is_weighted = counted, counted is None
        try:
            yield
        finally:
            self.counted, self._is_weighted = None, False

    def outgoing_weight(self) -> Any:
        """Return what to multiply gradients with on their way to the other ranks: a number or a tensor."""
        if self.window > 1 or self._is_weighted:
            return 1.0
        if self.counted is not None:
            return self.counted.factor()
        self.use()
        return self.batch.weight
