"""The place of a replica: in which global batch, and where that is among the batches of one optimizer step.

A batch counts by an *amount*: its samples, or the weight that user code gave to its backward pass, or the labels that a
loss of PyTorch counts. The gradient of a step is the mean over the amounts of all its batches, on all ranks:

    gradient = sum of (amount of this rank * gradient of this rank) / amounts of all ranks, over the batches

Where a step has one batch, a hook multiplies gradients on their way to the other ranks (`outgoing_weight`), also where
user code runs the backward pass. Where it has several (a *window*), each loss is multiplied by its amount, and the sum
is divided by all amounts once, at the step: a hook would see the sum of several batches.

All this belongs to the batch that was handed out last. To draw one that counts otherwise, while another waits for its
backward pass, is an error.

Why gradients are weighted by samples, over several batches, and by weights of users: ADR 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from raysgd.torch.parallel.logical_shards import LogicalShards


@dataclass
class Window:
    """The batches whose gradients wait for a step of the optimizer, and what they count by.

    Attributes:
        is_weighted: Whether something else than samples says how much each batch counts.
        reference: What each amount is divided by, alike on all ranks, so that losses keep about their size.
        own: The amounts of this rank's batches.
        total: Those of all ranks' batches, where samples count and so all ranks know them.
        num_batches: How many batches are in it.
        last: The batch that was counted last, and its weight.
        is_exchanged: Whether the gradients are the mean over the ranks, because no exchange was put off.
        is_of_criterion: Whether the criterion counts, and not user code.
    """

    is_weighted: bool
    reference: float
    own: float = 0.0
    total: float = 0.0
    num_batches: int = 0
    last: tuple[int, float | None] | None = None
    is_exchanged: bool = True
    is_of_criterion: bool = False

    def correction(self, seen: float, num_ranks: int) -> float:
        """Return what to multiply the gradients with, of batches of all ranks with these amounts; 0 for no amount."""
        return self.reference * num_ranks / seen if seen else 0.0


class Counted:
    """The amount that a batch of this rank counts by if not by its samples, and that of all ranks.

    Args:
        amount: That of this rank; 0 for padding.
        reference: What amounts are divided by on their way, alike on all ranks, so that equal ones change no bit.
        num_ranks: How many ranks there are.
        wait: Returns the sum of all ranks' amounts, where nothing else has brought it.

    Attributes:
        amount, reference: The same.
    """

    def __init__(self, amount: Any, reference: float, num_ranks: int, wait: Callable[[], Any]) -> None:
        self.amount, self.reference, self._num_ranks, self._wait = amount, reference, num_ranks, wait
        self._total: Any = None

    @property
    def is_known(self) -> bool:
        """True if the sum of all ranks' amounts is known."""
        return self._total is not None

    @property
    def total(self) -> Any:
        """The sum of all ranks' amounts. The first time, all ranks have to ask."""
        if self._total is None:
            self._total = self._wait()
        return self._total

    @property
    def own(self) -> list[float]:
        """What this rank tells the others."""
        return [self.amount]

    def learn(self, told: Sequence[Sequence[float]]) -> None:
        """Take notice of all ranks' amounts, which have travelled beside gradients."""
        self._total = sum(float(each) for (each,) in told)

    def factor(self) -> Any:
        """Return what to multiply this rank's gradients with in the mean over all ranks; 0 where nothing counts."""
        share = self.amount * self._num_ranks
        if isinstance(self.total, torch.Tensor):
            return torch.nan_to_num(share / self.total)
        return share / self.total if self.total else 0.0


class Omitted:
    """The samples that ranks leave out of a step. Its gradients are the mean over all samples, with 0 for these.

    Args:
        size: How many global batches the step may have.

    Attributes:
        own: How many this rank leaves out of each global batch.
        is_known: Whether all ranks' are known.
    """

    def __init__(self, size: int) -> None:
        self.own, self._drawn = [0.0] * size, [0.0] * size
        self.learn([self.own])

    def note(self, index: int, num_drawn: float, num_omitted: float) -> None:
        """Note a batch of so many samples on all ranks, and how many of them this rank leaves out."""
        self._drawn[index] += num_drawn
        self.own[index] += num_omitted
        self.is_known = False

    def learn(self, told: Sequence[Sequence[float]]) -> None:
        """Take notice of what each rank leaves out, which has travelled beside gradients."""
        self._of_all, self.is_known = [sum(map(float, each)) for each in zip(*told, strict=True)], True

    @property
    def correction(self) -> float:
        """What to multiply the gradients with; 0 where nothing counts.

        Where other batches of the step count, one without any sample that does counts as 0, as with Lightning.
        """
        drawn = self._drawn
        kept = [all_of_it - left for all_of_it, left in zip(drawn, self._of_all, strict=True)]
        counted = [each if each > 1e-9 * drawn[index] else 0.0 for index, each in enumerate(kept)]
        return sum(drawn) / sum(each or drawn[index] for index, each in enumerate(counted)) if any(counted) else 0.0


class BatchStep:
    """The step that a replica is in; written by the stream right before it hands a batch out.

    Attributes:
        weight: Factor for this rank's gradient in the mean over the ranks, for this batch by itself.
        num_samples: This rank's samples in the batch, 0 when it is only there to take part in the collectives; None
            when unknown.
        window: How many batches make an optimizer step, fewer where the pass or the call ends first.
        shards: What keeps the gradients of logical shards; None where gradients are averaged as they come.
        has_several_batches: Whether a step has several batches in this call, here or on other ranks, so that it matters
            how much each counts.
        most_parts: In how many batches, one after the other, a rank may take a global batch.
        is_last_part: Whether the global batch ends with this one.
        is_boundary: Whether the optimizer steps on this batch. Without accumulation it always does.
        is_global: Whether gradients are averaged over the ranks, so that all ranks' samples count.
        defer: Told before each batch, with accumulation, whether the exchange of gradients can wait for a later one.
            As with the next four, None is for nothing.
        check: Called before a step counts as done; raises if it cannot.
        refresh: Called before the first batch of each global batch of a call, on all ranks.
        opens: Called before the first batch of each step of the optimizers.
        exchanges: Called when gradients of a model are exchanged.
        began_at: When this rank asked for the batch; 0 once its first backward pass follows.
        own_s: Seconds from there to that pass, summed up: time that this rank spent without the others.
        is_used: Whether a backward pass of this call was noted. Code that computes gradients past the library's
            methods cannot accumulate.
        counted: How much the batch of the running backward pass counts, if not by its samples.
        waiting: The batches before this one in its step, once one of them had a backward pass; None without.
        weights: What the backward passes of this batch count by, if not by samples.
        amounts: What the criterion's means in this batch are over, if not samples.
        has_uncounted: Whether a loss left labels out, or counted some more than others, and no one has said so; a
            tensor where that is not known without waiting for a device.
        is_by_samples: Whether the batch counts by its samples in a backward pass, beside others.
        is_padding: Whether the batch is only there to take part in the collectives.
        is_last_waiting: Whether the batch that was drawn last is not trained on yet, where that matters: it is the one
            that counts.
        is_confirmed: Whether nothing is to be checked any more before the step counts as done.
        left_out: The optimizers, by identity, in whose gradients nothing counts, so that they are not to step.
        omitted: The samples that are left out of the step, where code may do so on any rank; else None.
    """

    def __init__(self) -> None:
        self.is_global = False
        self.defer: Callable[[bool], None] | None = None
        self.check: Callable[[], None] | None = None
        self.opens: Callable[[], None] | None = None
        self.exchanges: Callable[[], None] | None = None
        self.is_confirmed = False
        self.began_at = 0.0
        self.own_s = 0.0
        self.most_parts = 1
        self.shards: LogicalShards | None = None
        self.open_call(1)  # and again where it turns out to be joint

    def open_call(self, window: int) -> None:
        """Begin a call: no batch and no gradient of an earlier one is used any more."""
        self.window = window
        self.has_several_batches = window > 1 or self.is_global or self.shards is not None
        self.is_used = False
        self.refresh: Callable[[], None] | None = None
        self._is_weighted = False
        self.counted: Counted | None = None
        self.waiting: Window | None = None
        self.omitted: Omitted | None = None
        self._computed: set[int] = set()  # by identity: the optimizers with gradients of this batch
        self.left_out: set[int] = set()
        self._ended_in = -1  # the batch that the optimizer of a window was last asked to step for
        self._used_in: int | None = None  # the batch of the last backward pass
        self._exchanged_in: int | None = None  # that of the last exchange
        self._index = self._num_batches = 0
        self.is_last_part = True
        self._num_waiting, self.is_last_waiting, self._is_by_samples = 0, False, True
        self._forget_batch()
        if self.defer is not None:
            self.defer(False)

    def _forget_batch(self) -> None:
        """Forget the batch: what follows is none of the data."""
        self.weight = 1.0
        self.num_samples: int | None = None
        self._total: int | None = None
        self.is_boundary, self.is_padding, self.is_by_samples = True, False, False
        self.weights: list[float] = []
        self.amounts: list[Any] = []
        self.has_uncounted: Any = False

    def close_call(self) -> None:
        """End a call, in whatever way: what user code does between two calls is no step over the data."""
        self.shards = None
        self.open_call(1)

    def begin_batch(
        self,
        weight: float,
        num_samples: int | None,
        total: int | None = None,
        is_last: bool = True,
        is_last_part: bool = True,
    ) -> None:
        """Begin a batch."""
        if self.waiting is not None and self.is_boundary and self._used_in == self._num_batches:  # the batch before was
            raise ValueError(
                f"`{self.option}`: `self.optimizer_step()` was not called for the last batch of a step. Call it after "
                "`self.backward(loss)` for every batch, or omit the option and accumulate yourself."
            )
        if self.refresh is not None and self.is_last_part:
            self.refresh()
        if self.opens is not None and self.is_boundary:  # the batch before was
            self.opens()
        is_boundary = True
        if self.window > 1:
            assert total is not None
            self._index = (0 if self.is_boundary else self._index) + is_last_part
            is_boundary = is_last_part and (is_last or self._index * self.most_parts >= self.window)
            total = total if self.is_global or num_samples is None else num_samples
        else:
            total = None
        self._num_batches += 1
        if self.shards is not None:
            is_boundary = is_last_part
            if self.defer is not None:
                self.defer(True)
        self.is_confirmed = self.check is None and self.shards is None
        self.is_last_part = is_last_part
        self.left_out.clear()
        self._computed.clear()
        if self._num_waiting and not self._counts_like(weight, num_samples, total, is_boundary):
            raise self._drawn_too_early(weight)
        self.weight, self.num_samples, self._total = weight, num_samples, total
        self.is_boundary, self.is_padding, self.is_by_samples = is_boundary, num_samples == 0, False
        self.weights, self.amounts, self.has_uncounted = [], [], False
        if self.window > 1 or self.is_global:
            self._num_waiting += 1
            self.is_last_waiting = True
        if self.window > 1 and self.defer is not None:
            self.defer(not is_boundary)

    def _counts_like(self, weight: float, num_samples: int | None, total: int | None, is_boundary: bool) -> bool:
        """Return whether it makes no difference if a loss comes from a batch like this or from the last one."""
        if (is_boundary, num_samples == 0) != (self.is_boundary, self.num_samples == 0):
            return False
        return not self._is_by_samples or (weight, total) == (self.weight, self._total)

    def begin_exchange(self) -> bool:
        """Say that gradients are exchanged; return whether it is the first time in this batch, the last of a step."""
        is_first, self._exchanged_in = self._exchanged_in != self._num_batches, self._num_batches
        return is_first and self.is_boundary

    def end_forward(self) -> None:
        """Say that a backward pass follows, in which ranks wait for each other. The first one of a batch counts."""
        if self.began_at:
            self.own_s += time.perf_counter() - self.began_at
            self.began_at = 0.0

    def end_stream(self) -> None:
        """Say that no batch follows; what user code does from here on is by itself, if it has used all of them."""
        if not self._num_waiting:
            self._forget_batch()

    def confirm(self) -> None:
        """See to it that the step may count as done; whatever `check` raises says that it may not."""
        if not self.is_confirmed:
            if self.shards is not None:
                self.shards.check()
            if self.check is not None:
                self.check()
            self.is_confirmed = True

    @property
    def samples(self) -> int | None:
        """This rank's samples in the batch, also if no one divided them; None when unknown."""
        return self._total if self.num_samples is None else self.num_samples

    def use(self, by_samples: bool = True) -> None:
        """Say that a backward pass follows."""
        self._is_by_samples = by_samples
        self.is_by_samples |= by_samples
        self.end_waiting()

    def end_waiting(self) -> None:
        """Say that the last batch waits for no backward pass any more: it had one, or is left out."""
        if self.is_last_waiting:
            self._num_waiting -= 1
            self.is_last_waiting = False

    def skip(self) -> None:
        """Say that no backward pass follows for the last batch, if it had none.

        Raises:
            ValueError: Others of its step have one, or will have.
        """
        if self.is_last_waiting and self.window > 1:
            raise ValueError(
                f"`{self.option}`: a batch is left out, for which `self.backward` was not called. Call "
                "`self.backward(loss)` and `self.optimizer_step()` for every batch (a `LightningModule` needs "
                "automatic optimization); to leave one out, pass `0 * loss`. To compute gradients yourself, omit the "
                "option."
            )
        self.end_waiting()

    def _drawn_too_early(self, weight: float) -> Exception:
        if self.window > 1:
            return ValueError(
                f"`{self.option}`: `self.backward` was not called for the batch that was drawn before this one. Call "
                "`self.backward(loss)` and `self.optimizer_step()` for each batch, with `0 * loss` to leave one out; "
                "to accumulate yourself, omit the option."
            )
        return RuntimeError(
            f"A batch with weight {weight:g} was drawn while one with weight {self.weight:g} waits for "
            "its backward pass, and would count as that one. Draw one batch, train on it, then draw the next; to "
            "leave one out, call `self.skip_batch()`; to draw ahead, pass `drop_last=True` to the loader."
        )

    def note_backward(self, optimizers: Sequence[Any], weight: Any = None) -> bool:
        """Note a backward pass for optimizers; return whether this batch had one before, for any optimizer.

        Raises:
            ValueError: The batch belongs to a step that has ended.
        """
        ids = {*map(id, optimizers)}
        self.left_out -= ids
        if isinstance(weight, float):
            self.weights.append(weight)
        if self.is_global or self.window > 1:
            self.use(by_samples=weight is None)
        if self.window > 1 and self._ended_in == self._num_batches:
            raise ValueError(
                "`self.backward` was called after `self.optimizer_step` for the same batch and optimizer. With "
                f"`{self.option}` a batch is a part of one step: call each once for a batch, or omit the option."
            )
        self.is_used = True
        self._computed |= ids
        is_further, self._used_in = self._used_in == self._num_batches, self._num_batches
        return is_further

    def adds_to(self, optimizer: Any) -> bool:
        """Tell whether there are gradients for `optimizer` that a backward pass of this batch adds to."""
        return self.waiting is not None if self.window > 1 else id(optimizer) in self._computed

    @property
    def option(self) -> str:
        """The option of the trainer that makes several batches one step."""
        return f"accumulate_grad_batches={self.window}" if self.most_parts == 1 else "micro_batch_size"

    def share(self, weight: float | None, num_ranks: int, usual: float, *, is_of_criterion: bool = False) -> float:
        """Count this batch in its window; return what to multiply its loss with.

        Args:
            weight: How much the batch counts; None for its samples.
            num_ranks: Over how many ranks gradients are averaged.
            usual: How much a batch of a rank counted last, alike on all ranks, if not by its samples.
            is_of_criterion: Whether the criterion says how much it counts, and not user code.

        Raises:
            ValueError: Others of the window count by something else.
        """
        total = self._total if weight is None else None
        amount = weight
        if amount is None:
            total = num_ranks if total is None else total  # of a batch that is not of the data
            amount = total / num_ranks * (self.weight if self.is_global else 1.0)
        if self.waiting is None:
            usual = usual if total is None else total / num_ranks
            self.waiting = Window(weight is not None, self.window * usual or 1.0)
        window, batch = self.waiting, (self._num_batches, weight)
        window.is_exchanged, window.is_of_criterion = self.is_boundary, is_of_criterion
        if window.is_weighted != (weight is not None):
            raise ValueError(
                f"`self.backward` was called with `weight=` for some of the {self.window} batches of an optimizer step "
                "and without it for others: pass it for all of them, or for none."
            )
        if window.last is None or window.last[0] != batch[0] or not self._num_batches:
            window.last = batch
            window.num_batches += 1
            window.own += amount
            window.total += total or 0.0
        elif window.last != batch:
            raise ValueError(
                f"`self.backward(loss, weight={weight!r})`: another loss of this batch for the same optimizer had "
                f"`weight={window.last[1]!r}`. Pass one weight for a batch, or add the losses up and call `backward` "
                "once."
            )
        return amount / window.reference

    def note_omitted(self, is_omitted: bool, num_ranks: int) -> None:
        """Say whether this rank leaves the batch out, where any rank may do so."""
        if self.window == 1 or self.omitted is None:
            self.omitted = Omitted(self.window)
        drawn = float(self._total or num_ranks)
        own = drawn / num_ranks * self.weight if self.is_global else drawn
        self.omitted.note(max(0, self._index - self.is_last_part), drawn, own if is_omitted else 0.0)

    def end_batch(self) -> None:
        """Say that the optimizer of a window was asked to step, whether it will or not."""
        self._ended_in = self._num_batches

    def leave_out(self, optimizer: Any) -> None:
        """Say that nothing counts in the gradients of `optimizer`."""
        self.left_out.add(id(optimizer))

    def stepped(self, optimizer: Any) -> None:
        """Note that `optimizer` has stepped: the next backward pass begins with no gradients."""
        self._computed.discard(id(optimizer))
        self.waiting = self.omitted = None

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
        return self.weight
