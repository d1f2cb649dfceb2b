"""The place of a replica: in which joint batch, and where that is among the batches of one optimizer step.

A batch counts by an *amount*: its samples, or the weight that user code gave to its backward pass. The gradient of a
step is to be the mean over the amounts of all its batches, on all ranks:

    gradient = sum of (amount of this rank * gradient of this rank) / amounts of all ranks, over the batches

How much there will be in a step is not known when it begins: with gradient accumulation it takes a *window* of batches,
the last of which may be shorter, and the weights of other ranks are unknown before they have sent them. So each
loss is divided by what is *expected*, and the gradients are corrected once at the end, if there was less or more. Equal
batches need no correction.

All this belongs to the batch that was handed out last. To draw one that counts otherwise, while another waits for its
backward pass, is an error.

Why gradients are weighted by samples: ADR 3; over several batches: ADR 20; by weights of users: ADR 44.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from raysgd.worker.data.drawn_ahead import DrawnAhead


def accept() -> None:
    """Does nothing, where any step counts or nothing is to do at a place."""


def never_defer(is_deferred: bool) -> None:
    """Puts nothing off, as an answer to `BatchStep.defer`."""


def by_itself() -> int:
    """Returns how many ranks a replica by itself averages over, as an answer to `BatchStep.count_ranks`."""
    return 1


def no_sum(number: float) -> Callable[[], float]:
    """The sum over all ranks of a replica by itself, as an answer to `BatchStep.start_sum`."""
    return lambda: number


class _Terms(NamedTuple):
    """The weight of a batch, and what is to be done on it."""

    weight: float = 1.0
    num_samples: int | None = None
    total: int | None = None
    is_boundary: bool = True

    def are_alike(self, other: _Terms, by_samples: bool) -> bool:
        """Tells whether it makes no difference which of two batches a loss comes from."""
        kinds = [(terms.is_boundary, terms.num_samples == 0) for terms in (self, other)]
        amounts = [(terms.weight, terms.total) for terms in (self, other)]
        return kinds[0] == kinds[1] and (not by_samples or amounts[0] == amounts[1])


@dataclass
class _Tally:
    """The divisor of the waiting gradients of an optimizer, and what is known about the right one.

    Attributes:
        is_weighted: Whether user code says how much each batch counts.
        expected: What the losses are divided by; None before anything counts.
        seen: What has come together on all ranks.
        own: What this rank has and the others do not know yet.
        sums: What waits for sums that are under way.
        num_batches: How many batches are in it.
        last: The batch that was counted last, and its weight.
        is_unexchanged: Whether the gradients are this rank's own, because their exchange was put off.
        used_in: The batch of the last backward pass.
    """

    is_weighted: bool
    expected: float | None = None
    seen: float = 0.0
    own: float = 0.0
    sums: list[Callable[[], float]] = field(default_factory=list)
    num_batches: int = 0
    num_untold: int = 0
    last: tuple[int, float | None] | None = None
    is_unexchanged: bool = False
    used_in: int = 0


class ShardGradients(Protocol):
    """The interface of whatever keeps the gradients of logical shards."""

    def begin_batch(self, is_first: bool, seed: int) -> None:
        """Begins a shard."""

    def keep(self, parameters: Sequence[Any]) -> None:
        """Keeps the gradients that a backward pass has just made."""

    def add_up(self, parameters: Sequence[Any], seed: int) -> None:
        """Puts the sums over all shards where optimizers look for gradients."""

    def check(self) -> None:
        """Refuses a step whose gradients came from elsewhere."""


class BatchStep:
    """The step that a replica is in; written by the stream right before it hands a batch out.

    Attributes:
        weight: Factor for this rank's gradient in the mean over the ranks, for this batch by itself.
        num_samples: This rank's samples in the batch, 0 when it is only there to take part in the collectives; None
            when unknown.
        window: How many batches make an optimizer step, fewer where the pass or the call ends first.
        shards: What keeps the gradients of logical shards; None where gradients are averaged as they come.
        most_parts: In how many batches, one after the other, a rank may take a joint batch.
        is_last_part: Whether the joint batch ends with this one.
        is_boundary: Whether the optimizer steps on this batch. Without accumulation it always does.
        is_joint: Whether gradients are averaged over the ranks, so that all ranks' samples count.
        count_ranks: Says over how many ranks they are averaged.
        defer: Told before each batch, with accumulation, whether the exchange of gradients can wait for a later one.
        check: Called before a step counts as done; raises if it cannot.
        refresh: Called before the first batch of each joint batch of a call, on all ranks.
        opens: Called before the first batch of each step of the optimizers.
        exchanges: Called when gradients of a model are exchanged.
        start_sum: Starts to add a number up over those ranks, and returns what waits for the sum.
        began_at: When this rank asked for the batch; 0 once its first backward pass follows.
        own_s: Seconds from there to that pass, summed up: time that this rank spent without the others.
        is_used: Whether a backward pass of this call was noted. Code that computes gradients past the library's
            methods cannot accumulate.
        weights: What the backward passes of this batch count by, if not by samples.
        amounts: What the criterion's means in this batch are over, if not samples.
        has_compared: Whether a loss of PyTorch that may leave labels out was called in this batch.
        is_padding: Whether the batch is only there to take part in the collectives.
        drawn: The batches that were drawn and not trained on yet, where it matters.
        left_out: The optimizers, by identity, in whose gradients nothing counts, so that they are not to step.
    """

    def __init__(self) -> None:
        self.is_joint = False
        self.count_ranks: Callable[[], int] = by_itself
        self.defer: Callable[[bool], None] = never_defer
        self.check: Callable[[], None] = accept
        self.opens: Callable[[], None] = accept
        self.exchanges: Callable[[], None] = accept
        self.start_sum: Callable[[float], Callable[[], float]] = no_sum
        self._is_confirmed = False
        self.began_at = 0.0
        self.own_s = 0.0
        self.most_parts = 1
        self.shards: ShardGradients | None = None
        self.open_call(1)

    def open_call(self, window: int) -> None:
        """Begins a call: no batch and no gradient of an earlier one is used any more."""
        self.window = window
        self.is_used = False
        self.refresh: Callable[[], None] = accept
        self._is_weighting = False
        self._tallies: dict[int, _Tally] = {}  # by identity of the optimizer whose gradients wait
        self._usual: dict[int, float] = {}  # by optimizer too: how much a batch of all ranks weighed last
        self.left_out: set[int] = set()
        self._ended_in: dict[int, int] = {}  # the batch that an optimizer was last asked to step for, by identity
        self._used_in: int | None = None  # the batch of the last backward pass
        self._exchanged_in: int | None = None  # that of the last exchange
        self._index = self._num_batches = 0
        self.is_last_part, self.fraction, self.seed_of_step = True, 1.0, 0
        self.drawn, self._is_by_samples = DrawnAhead(), True
        self._take(_Terms())
        self.defer(False)

    def close_call(self) -> None:
        """Ends a call, in whatever way: what user code does between two calls is no step over the data."""
        self.shards = None
        self.open_call(1)

    def begin(
        self,
        weight: float,
        num_samples: int | None,
        total: int | None = None,
        is_last: bool = True,
        is_last_part: bool = True,
    ) -> None:
        """Begins a batch."""
        if self.is_last_part and self.refresh is not accept:  # the batch before was
            self.refresh()
        if self.is_boundary:  # the batch before was
            self.opens()
        is_boundary = True
        if self.window > 1:
            assert total is not None
            self._index = (0 if self.is_boundary else self._index) + is_last_part
            is_boundary = is_last_part and (is_last or self._index * self.most_parts >= self.window)
            total = total if self.is_joint or num_samples is None else num_samples
        self._num_batches += 1
        if self.shards is not None:
            is_boundary = is_last_part
            self.defer(True)
        self._is_confirmed = False
        self.is_last_part = is_last_part
        self.left_out.clear()
        terms = _Terms(weight, num_samples, total if self.window > 1 else None, is_boundary)
        if self.drawn and not terms.are_alike(self._terms, self._is_by_samples):
            raise self._drawn_too_early(terms)
        self._take(terms)
        if self.window > 1 or self.is_joint:
            self.drawn.draw()
        if self.window > 1:
            self.defer(not is_boundary)

    def begin_shard(self, is_first: bool, fraction: float, seed: int, seed_of_step: int) -> None:
        """Begins a logical shard.

        Args:
            is_first: Whether it is the first one of this rank in a step.
            fraction: Its samples, as a part of those of the joint batch.
            seed: Where its random numbers come from.
            seed_of_step: Where those come from that follow the last one.
        """
        self.fraction, self.seed_of_step = fraction, seed_of_step
        if self.shards is not None:
            self.shards.begin_batch(is_first, seed)

    def begin_exchange(self) -> bool:
        """Says that gradients are exchanged; returns whether it is the first time in this batch, the last of a step."""
        is_first, self._exchanged_in = self._exchanged_in != self._num_batches, self._num_batches
        return is_first and self.is_boundary

    def end_forward(self) -> None:
        """Says that a backward pass follows, in which ranks wait for each other. The first one of a batch counts."""
        if self.began_at:
            self.own_s += time.perf_counter() - self.began_at
            self.began_at = 0.0

    def end_stream(self) -> None:
        """Says that no batch follows; what user code does from here on is by itself, if it has used all of them."""
        if not self.drawn:
            self._take(_Terms())

    def _take(self, terms: _Terms) -> None:
        self._terms = terms
        self.weight, self.num_samples, self.is_boundary = terms.weight, terms.num_samples, terms.is_boundary
        self.is_padding, self.has_compared = terms.num_samples == 0, False
        self.weights: list[float] = []
        self.amounts: list[Any] = []

    def confirm(self) -> None:
        """Sees to it that the step may count as done; whatever `check` raises says that it may not."""
        if not self._is_confirmed:
            if self.shards is not None:
                self.shards.check()
            if self.check is not accept:
                self.check()
            self._is_confirmed = True

    @property
    def samples(self) -> int | None:
        """This rank's samples in the batch, also if no one divided them; None when unknown."""
        return self._terms.total if self.num_samples is None else self.num_samples

    def use(self, by_samples: bool = True) -> None:
        """Says that a backward pass follows."""
        self._is_by_samples = by_samples
        self.drawn.use()

    def skip(self) -> None:
        """Says that no backward pass follows for this batch."""
        self.drawn.use()

    def _drawn_too_early(self, terms: _Terms) -> Exception:
        if self.window > 1:
            return ValueError(
                f"`{self.option}`: `self.backward` was not called for the batch that was drawn before this one. Call "
                "`self.backward(loss)` and `self.optimizer_step()` for each batch, or `self.skip_batch()`; to "
                "accumulate yourself, omit the option."
            )
        return RuntimeError(
            f"A batch with weight {terms.weight:g} was drawn while one with weight {self._terms.weight:g} waits for "
            "its backward pass, and would count as that one. Draw one batch, train on it, then draw the next; to "
            "leave one out, call `self.skip_batch()`; to draw ahead, pass `drop_last=True` to the loader."
        )

    @property
    def is_pending(self) -> bool:
        """True if gradients of earlier batches wait for their optimizer step.

        While they do, a training cannot resume from this position in the data, only from the last one without them.
        """
        return self.window > 1 and bool(self._tallies)

    def note_backward(self, optimizers: Sequence[Any], weight: float | None = None) -> bool:
        """Notes a backward pass for optimizers; returns whether this batch had one before, for any optimizer.

        Raises:
            ValueError: The gradients that wait were weighted in another way, or belong to a step that has ended.
        """
        self.left_out.difference_update(map(id, optimizers))
        if weight is not None:
            self.weights.append(weight)
        if self.is_joint or self.window > 1:
            self.use(by_samples=weight is None)
        self.is_used = True
        first = optimizers[0]
        is_unknown = weight is None and self._terms.total is None  # what all the batches of the step will hold
        tally = self.waiting(first) or _Tally(weight is not None, None if is_unknown else self._guess(first, weight))
        if tally.is_weighted != (weight is not None):
            raise ValueError(_weighted_in_part(self.window))
        if self.window > 1 and self._ended_in.get(id(first)) == self._num_batches:
            raise ValueError(
                "`self.backward` was called after `self.optimizer_step` for the same batch and optimizer. With "
                f"`{self.option}` a batch is a part of one step: call each once for a batch, or omit the option."
            )
        for optimizer in optimizers:
            self._tallies[id(optimizer)] = tally
        is_further, self._used_in = self._used_in == self._num_batches, self._num_batches
        tally.used_in, tally.is_unexchanged = self._num_batches, not self.is_boundary
        return is_further

    def waiting(self, optimizer: Any) -> _Tally | None:
        """Returns what gradients wait for a step of `optimizer`, so that a backward pass adds to them.

        Without accumulation these are only those that this batch has computed.
        """
        tally = self._tallies.get(id(optimizer))
        return None if tally is None or (self.window == 1 and tally.used_in != self._num_batches) else tally

    @property
    def option(self) -> str:
        """The option of the trainer that makes several batches one step."""
        return f"accumulate_grad_batches={self.window}" if self.most_parts == 1 else "max_batch_per_worker"

    def end_batch(self, optimizer: Any) -> None:
        """Says that `optimizer` was asked to step, whether it will or not."""
        self._ended_in[id(optimizer)] = self._num_batches

    def protects(self, optimizer: Any) -> bool:
        """Tells whether the gradients of `optimizer` are not user code's to clear: earlier batches made them."""
        tally, now = self._tallies.get(id(optimizer)), self._num_batches
        return (
            self.window > 1 and tally is not None and (tally.used_in != now or self._ended_in.get(id(optimizer)) == now)
        )

    def _guess(self, optimizer: Any, weight: float | None) -> float | None:
        """Returns what a window will hold that begins with this batch; None where there is nothing to go by."""
        amount = self._terms.total if weight is None else self._usual.get(id(optimizer))
        return self.window * amount if amount else None

    def factor_of(self, optimizer: Any, weight: float | None = None) -> float:
        """Returns the factor of this batch's loss, after `note_backward`. With a weight all ranks have to ask."""
        tally = self._tallies.get(id(optimizer))
        if weight is not None:
            assert tally is not None
            self._count_weight(tally, weight)
            amount = weight * self.count_ranks()
        elif self._terms.total is None:
            return self.weight
        else:
            amount = self.weight * self._terms.total if self.is_joint else self._terms.total
            tally = tally or _Tally(False, self._guess(optimizer, None))  # of a batch for no optimizer
            self._count_samples(tally, self._terms.total)
        return amount / tally.expected if tally.expected else 0.0

    def _count_samples(self, tally: _Tally, total: int) -> None:
        if self._is_new_to(tally, None):
            tally.seen += total
            tally.expected = tally.expected or self.window * total or None

    def _count_weight(self, tally: _Tally, weight: float) -> None:
        """Counts a weight, of which the other ranks hear with the last batch of a step.

        With the first one, too: the loss would overflow in a short format if it were divided by anything else.
        """
        if not self._is_new_to(tally, weight):
            return
        tally.own += weight
        tally.num_untold += 1
        if tally.expected is None:
            self._tell(tally)
            tally.expected = self.window * self._hear(tally) or None
        elif self.is_boundary:
            self._tell(tally)

    def _is_new_to(self, tally: _Tally, weight: float | None) -> bool:
        batch = (self._num_batches, weight)
        if tally.last is not None and tally.last[0] == batch[0] and self._num_batches:
            if tally.last != batch:
                raise ValueError(
                    f"`self.backward(loss, weight={weight!r})`: another loss of this batch for the same optimizer had "
                    f"`weight={tally.last[1]!r}`. Pass one weight for a batch, or add the losses up and call "
                    "`backward` once."
                )
            return False
        tally.last = batch
        tally.num_batches += 1
        return True

    def _tell(self, tally: _Tally) -> None:
        own, tally.own, tally.num_untold = tally.own, 0.0, 0
        tally.sums.append(self.start_sum(own))

    def _hear(self, tally: _Tally) -> float:
        """Returns what has come together so far."""
        sums, tally.sums = tally.sums, []
        tally.seen += sum(wait() for wait in sums)
        return tally.seen

    def waits_for(self, optimizer: Any) -> bool:
        """Tells whether gradients wait for a step of `optimizer`."""
        return self.waiting(optimizer) is not None

    def is_unexchanged(self, optimizer: Any) -> bool:
        """Tells whether gradients that wait for `optimizer` are this rank's own, because their exchange was put off."""
        tally = self._tallies.get(id(optimizer))
        return tally is not None and tally.is_unexchanged

    def correction(self, optimizer: Any) -> float:
        """Returns what to multiply the complete gradients of a step with: 0 where nothing in them counts."""
        tally = self._tallies.get(id(optimizer))
        if tally is None or not tally.num_batches:
            return 1.0
        if tally.num_untold:
            self._tell(tally)
        seen = self._hear(tally)
        if tally.is_weighted and seen:
            self._usual[id(optimizer)] = seen / tally.num_batches
        return tally.expected / seen if tally.expected and seen else 0.0

    def settle(self, optimizer: Any) -> None:
        """Says that the gradients were corrected; what this batch adds to them needs no correction."""
        self._tallies[id(optimizer)].expected = self._tallies[id(optimizer)].seen

    def leave_out(self, optimizer: Any) -> None:
        """Says that nothing counts in the gradients of `optimizer`."""
        self.left_out.add(id(optimizer))

    def stepped(self, optimizer: Any) -> None:
        """Notes that `optimizer` has stepped: the next backward pass begins with no gradients."""
        self._tallies.pop(id(optimizer), None)

    @contextmanager
    def weighting(self) -> Iterator[None]:
        """Says that the loss is weighted already."""
        self._is_weighting = True
        try:
            yield
        finally:
            self._is_weighting = False

    def outgoing_weight(self) -> float:
        """Returns what to multiply gradients with on their way to the other ranks, where the loss was not weighted."""
        if self.window > 1 or self._is_weighting:
            return 1.0
        self.use()
        return self.weight


def _weighted_in_part(window: int) -> str:
    losses = f"of the {window} batches of an optimizer step" if window > 1 else "losses of a batch"
    return (
        f"`self.backward` was called with `weight=` for some {losses} and without it for others: pass it for all of "
        "them, or for none."
    )
