"""`Leg`: the batch and the step that run, and by how much their losses and gradients are multiplied.

A leg is the part of a training call that one worker group runs.

A step's gradient is the mean over all its samples or other items. What a batch counts is the first of these that exists
(`Leg.items_of`):

1. the weight that user code passed to its backward pass, or returned from `forward`
2. the number of labels over which a PyTorch loss averages, or the sum of their weights
3. its number of samples

The first two are called items. Padding counts 0. A step's gradient is the mean over all batches and ranks:

    gradient = sum of (items * gradient) over all batches and ranks / sum of the items

An all-reduce takes the plain mean over the ranks. So the library weights losses and gradients as follows:

    a step has                  counts by  the loss is times            gradients are times, before they are sent
    one batch on a rank         samples    1                            num_samples * num_ranks / total
    one batch on a rank         items      1                            items / typical, or items * num_ranks / total
    a second backward pass      either     the number in column 4       1
    several batches on a rank   either     items / typical              1; before the step: typical * num_ranks / total
    logical shards              samples    num_samples / total          nothing is sent; rows are added in order

The second row depends on the way of the gradients. Over the mesh, the items travel with the gradients, and afterwards
the sum of gradients is divided by `total / typical`. Elsewhere, the hook waits for the total. Weighting gradients by
samples works even if user code runs the backward pass. In a step of several batches, a hook would see only the sum of
their gradients, so the library weights their losses, and user code must call `self.backward`.

`Gradients.backward` multiplies the loss. In each backward pass, `Leg.multiply` gets the gradients before they are sent.
`Gradients.complete` makes a sum over several batches the mean.

ADR 3 explains why a gradient is weighted by its samples, its labels, or a weight that user code passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from raysgd.core.arrays.division import BETWEEN_BATCHES, BatchPlan
from raysgd.core.numbers.meters import as_weight
from raysgd.torch.objects.criteria import NO_CALL, LossCall
from raysgd.torch.parallel.undo import FlightRecorder, OpenStep
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.rank_rows import RowExchange
from raysgd.trainer.worker.step_loop import StepRules


class BatchRecord:
    """A record of what user code and the library have done with the latest batch.

    Args:
        number: Number of batches that the training code has requested in this worker group's part of the call.
        waits: True if the batch still needs a backward pass, and its weight matters.

    Attributes:
        number: See the argument; 0 before the first batch.
        waits: See the argument.
        had_backward: True if a backward pass was recorded.
        with_gradients: IDs of the optimizers that have gradients of this batch but have not stepped with them yet.
        skipped: IDs of the optimizers that must not step, because nothing counts in their gradients, or because a
            callback leaves the step out.
        items: For each call of the criterion, over how many labels or other items it averaged.
        uncounted: True if a loss ignored labels or weighted them unequally, and user code passed no weight. A tensor if
            the value is on a GPU.
        is_by_samples: True if a backward pass was weighted by the batch's number of samples.
        has_shared_metrics: True if the batch's last gradients were sent to the other ranks, and metrics with them.
        has_asked_to_step: With accumulation, True if `optimizer_step` was called for this batch.
    """

    def __init__(self, number: int = 0, waits: bool = False) -> None:
        self.number, self.waits = number, waits
        self.had_backward = self.is_by_samples = self.has_shared_metrics = self.has_asked_to_step = False
        self.with_gradients: set[int] = set()
        self.skipped: set[int] = set()
        self.items: list[Any] = []
        self.uncounted: Any = False

    def ask_to_step(self) -> None:
        """Record that user code has called `optimizer_step`."""
        self.has_asked_to_step = True

    def forget_items(self) -> None:
        """Let the criterion's calls from now on count for the next metrics of the batch."""
        self.items = []


@dataclass
class Accumulation:
    """The losses whose gradients are added up for an optimizer step.

    Attributes:
        is_weighted: True if the batches count by items, False if they count by samples.
        typical: Typical sum of what one rank's batches count in a step, the same on all ranks. What each batch counts
            is divided by this number before it multiplies a loss. The sum of a step's losses thus has roughly the scale
            of a single batch's loss.
        own: Sum of what this rank's batches count.
        num_batches: Number of batches so far.
        last: Sequence number and weight of the latest batch.
        ends_step: True if the latest batch ends the step. Its backward pass then averages the gradients over the
            ranks. False if their all-reduce may still be deferred.
        is_of_criterion: True if the items come from the criterion, False if they come from user code.
        is_complete: True if the summed gradients were made the step's mean.
        seen: Identities and versions of the gradients after the latest backward pass; None if they are not compared.
    """

    is_weighted: bool
    typical: float
    own: float = 0.0
    num_batches: int = 0
    last: tuple[int, float | None] | None = None
    ends_step: bool = True
    is_of_criterion: bool = False
    is_complete: bool = False
    seen: list[tuple[int, int]] | None = None
    _done: float = 0.0
    _kept: float = 0.0  # samples of the latest global batch, as the next attribute
    _skipped: float = 0.0
    _has_kept: bool = False

    def add_samples(self, number: float, is_skipped: bool, ends_global_batch: bool) -> None:
        """Count the samples of a batch of all ranks.

        Samples that user code skips do not count. But a global batch of which it skips all samples counts as a gradient
        of 0, as with Lightning.
        """
        self._has_kept |= not is_skipped
        if is_skipped:
            self._skipped += number
        else:
            self._kept += number
        if ends_global_batch:
            self._done += self._kept or self._skipped
            self._kept = self._skipped = 0.0

    def note_gradients(self, versions: list[tuple[int, int]]) -> None:
        """Remember accumulated gradients after a backward pass, to find out whether user code changes them."""
        self.seen = versions

    def complete(self) -> None:
        """Record that the summed gradients are made the step's mean."""
        self.is_complete = True

    @property
    def num_samples(self) -> float:
        """Number of samples of all ranks' batches; 0 if user code skips all of them, or if items count."""
        return self._done + (self._kept or self._skipped) if self._has_kept else 0.0


class Items:
    """Over how many items the loss of a batch is the mean, and the sum of the items of all ranks.

    Args:
        own: Items of this rank's batch, such as its number of labels; 0 for padding.
        typical: Typical number of items, the same on all ranks, by which items are divided. If all ranks have this
            number, all gradients are multiplied by exactly 1, so there is no rounding error.
        num_ranks: Number of ranks.
        wait: Function that waits for the sum of all ranks' items and returns the sum. Called if the items were not sent
            together with the gradients.

    Attributes:
        own: See the argument.
        typical: See the argument.
        known: Items of all ranks; None if they are not known yet.
    """

    def __init__(self, own: Any, typical: float, num_ranks: int, wait: Callable[[], Any]) -> None:
        self.own, self.typical, self._num_ranks, self._wait = own, typical, num_ranks, wait
        self.known: Any = None

    def learn(self, of_ranks: Iterable[float]) -> None:
        """Add up the items that the ranks sent along with their gradients."""
        self.known = sum(of_ranks)

    def total(self) -> Any:
        """Return the items of all ranks. Unless they are known, all ranks must call this together."""
        if self.known is None:
            self.known = self._wait()
        return self.known

    def divisor(self) -> Any:
        """Return the divisor of the sum of the ranks' gradients, each times `own / typical`. 1 if no rank has items."""
        return self.total() / self.typical or 1.0

    def factor(self) -> Any:
        """Return the factor by which to multiply this rank's gradients before they are averaged over the ranks.

        The factor is 0 if no rank has items.
        """
        share, total = self.own * self._num_ranks, self.total()
        if isinstance(total, torch.Tensor):
            return torch.nan_to_num(share / total)
        return share / total if total else 0.0


class Leg:
    """Tracks the current batch and step in a leg, and weights its losses and gradients.

    A step's gradient is the mean over its samples or other items. A backward pass belongs to the batch that the
    training code requested last. Therefore, it is an error to request a batch with a different weight while the
    previous batch still needs its backward pass.

    Args:
        rules: What holds for all steps of the leg.
        record: What has happened since the last commit, perhaps between two calls.
        flight_recorder: Records this rank's actions, to compare them with those of other ranks.
        ledger: Measures the time spent in communication and on copies.
        rows: Encodes this rank's metrics for the other ranks; None if the ranks exchange no metrics.

    Attributes:
        rules: What holds for all steps of the leg.
        plan: How the batch counts that the training code requested last.
        record: What has happened since the last commit.
        flight_recorder: Records this rank's actions, to compare them with those of other ranks.
        ledger: Measures the time spent in communication and on copies.
        rows: Encodes this rank's metrics for the other ranks, and decodes theirs. None if the ranks exchange none.
        batch: What has happened to the batch that the training code requested last.
        is_used: True if a backward pass was recorded. False if user code computes all gradients without the library's
            methods; gradient accumulation then has no effect.
        has_clipped: True if gradients were clipped in this leg.
        factor: Factor of this rank's gradients in the running backward pass, or one that user code runs by itself,
            before they are sent to the other ranks. `Items` if it follows from the items of all ranks.
        items_per_sample: About how many items a sample had in the latest step in which batches were not weighted by
            their samples. A power of two, so that a gradient has the same bits whatever the steps before it were. The
            same on all ranks.
        accumulation: The losses that are added up for the current step. None before the first one, and if a step has
            one batch.
        num_waiting: Number of batches that still need a backward pass.
    """

    def __init__(
        self,
        rules: StepRules = StepRules(),
        *,
        record: OpenStep | None = None,
        flight_recorder: FlightRecorder | None = None,
        ledger: Ledger | None = None,
        rows: RowExchange | None = None,
    ) -> None:
        self.rules, self.plan = rules, BETWEEN_BATCHES
        self.batch, self.rows = BatchRecord(), rows
        self.record = record or OpenStep()
        self.flight_recorder, self.ledger = flight_recorder or FlightRecorder(), ledger or Ledger()
        self.is_used = self.has_clipped = False
        self.factor: float | Items = 1.0
        self.items_per_sample, self._is_weighing = 1.0, False  # the latter is True in a pass by the library
        self.accumulation: Accumulation | None = None
        self.num_waiting, self._is_by_samples = 0, True
        self._labels = NO_CALL  # the latest call to a criterion that averages over labels
        # True if a batch was weighted by samples although its loss ignores labels or weights them unequally. A tensor
        # if the value is on a GPU.
        self._uncounted: Any = False
        self._of_calls: list[Any] = []  # the numbers of labels in the loss of the latest such batch

    # ------------------------------------------------------------------------------------ from batch to batch

    def begin_batch(self, plan: BatchPlan) -> None:
        """Start the batch that the training code has requested from the data.

        Args:
            plan: How the batch counts.

        Raises:
            ValueError: With accumulation, the previous batch has another weight and still needs its backward pass. Or
                user code did not step the optimizer after the last batch of the previous step.
            RuntimeError: Without accumulation, the previous batch has another weight and still needs its backward pass.
        """
        before, rules = self.plan, self.rules
        if self.accumulation is not None and before.ends_step and self.batch.had_backward:
            raise ValueError(
                f"`{rules.option}`: `self.optimizer_step()` was not called for the last batch of a step. Call it after "
                "`self.backward(loss)` for every batch, or omit the option and accumulate yourself."
            )
        if self.num_waiting and not self._weighs_like(plan):
            raise self._drawn_too_early(plan)
        batch = BatchRecord(self.batch.number + 1, rules.has_several or rules.averages)
        self.num_waiting += batch.waits
        self.plan, self.batch = plan, batch
        self.factor = 1.0 if rules.has_several or rules.num_shards else plan.weight

    def end_data(self) -> None:
        """Record that no more batches follow.

        From now on, backward passes belong to no batch. However, if the last batch still needs its backward pass, the
        next backward pass belongs to the last batch.
        """
        if not self.num_waiting:
            self.end_batch()

    def end_batch(self) -> None:
        """Let backward passes and steps from now on belong to no batch."""
        self.plan, self.factor = BETWEEN_BATCHES, 1.0
        self.batch.waits = self.batch.is_by_samples = self.batch.uncounted = False
        self.batch.forget_items()

    def renew_record(self) -> OpenStep:
        """Let a new record begin: the step was committed or undone, or another state was loaded. Return the former."""
        record, self.record = self.record, OpenStep()
        return record

    def note_all_reduce(self, name: str | None = None) -> None:
        """Record that a model's last gradients are about to be averaged.

        Args:
            name: Name of the all-reduce, the same on all ranks. None if the ranks may differ in what is averaged.
        """
        if name is not None:
            self.flight_recorder.note(name)
        self.record.note_all_reduce()

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

    def note_backward(self, optimizers: Sequence[Any]) -> bool:
        """Record a backward pass of the batch. Return True if the batch already had a backward pass.

        Args:
            optimizers: Optimizers whose gradients were cleared for this backward pass, or to which the pass adds.

        Raises:
            ValueError: With accumulation, `optimizer_step` was already called for this batch.
        """
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
        added = self.accumulation
        return added is not None if self.rules.has_several else id(optimizer) in self.batch.with_gradients

    def note_clipped(self) -> None:
        """Record that gradients were clipped."""
        self.has_clipped = True

    def due_rows(self) -> RowExchange | None:
        """Return what encodes this rank's metrics (its row), which are due once per optimizer step, in its last batch.

        Called when the last gradients of a backward pass are about to be sent. Return None if no row is due.
        """
        is_first, self.batch.has_shared_metrics = not self.batch.has_shared_metrics, True
        return self.rows if is_first and self.plan.ends_step else None

    def send_rows(self) -> None:
        """If rows are due, exchange them with the other ranks, in a message of their own."""
        if (rows := self.due_rows()) is not None:
            rows.take_rows(rows.gather(rows.row_to_send()))

    def stepped(self, optimizer: Any) -> None:
        """Record that `optimizer` has stepped, so that the next backward pass clears the old gradients."""
        self.batch.with_gradients.discard(id(optimizer))
        self.accumulation = None

    # ------------------------------------------------------------------------------------ what a batch counts

    def _weighs_like(self, plan: BatchPlan) -> bool:
        """Return True if a batch has the same weight in its step as the previous batch.

        In addition, both batches or neither must be padding, and both or neither must end the step.
        """
        last, of_step = self.plan, self.rules.samples_in_step
        if (plan.ends_step, plan.is_padding) != (last.ends_step, last.is_padding):
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
        self.num_waiting -= self.batch.waits
        self.batch.waits = False

    def note_labels(self, call: LossCall) -> None:
        """Record a call to a loss that averages over labels, so that the batch can be weighted by its labels."""
        if call.amount is None or not torch.is_grad_enabled():
            return
        batch, plan = self.batch, self.plan
        if not plan.is_padding:
            batch.items.append(call.amount)
        if self.rules.weighs:
            self._labels = call._replace(output=None, target=None)  # do not keep the batch's large tensors in memory
            batch.uncounted = batch.uncounted | (not plan.is_padding and call.is_uneven)

    def items_of(self, loss: torch.Tensor, given: Any) -> Any:
        """Return over how many items a loss is the mean, or None to weight it by the batch's number of samples.

        Args:
            loss: Loss of the batch. If it is the result of the latest recorded criterion call, labels are the weight.
            given: Weight from user code, or None.

        Raises:
            ValueError: The weight is invalid, does not work with `deterministic=True`, or is unknown because the loss
                ignores labels or weights them unequally.
        """
        labels = self._labels
        if given is None and labels.result is not loss:
            self.check_labels()
            return None
        weight = labels.amount if given is None else as_weight("weight", given)
        if not self.rules.num_shards:
            self.batch.uncounted = False
            return 0.0 if self.plan.is_padding else weight if isinstance(weight, torch.Tensor) else float(weight)
        if given is None and labels.is_uneven is not True:  # labels on a GPU are checked when the call ends
            self.check_labels()
            return None
        by_labels = "a loss that ignores labels, or counts them by the weights of their classes,"
        what = by_labels if given is None else "`weight=` of `self.backward`, or from `forward`,"
        raise ValueError(
            f"{what} does not work with `deterministic=True`, where batches count by their samples: omit "
            "`deterministic=True`, or use a loss that is the mean over the samples."
        )

    def expect_weight(self) -> None:
        """Raise in the backward pass unless user code passes a weight, or the loss is the criterion's result."""
        self.batch.uncounted = True

    def check_labels(self) -> None:
        """Raise if the batch's loss ignores labels or weights them unequally, and user code passed no weight.

        Labels on a GPU are checked when the call ends, because checking them here would wait for the GPU.
        """
        batch = self.batch
        if batch.uncounted is not False and self.rules.weighs:
            self._uncounted, batch.uncounted = self._uncounted | batch.uncounted, False
            self._of_calls = batch.items
            if not isinstance(self._uncounted, torch.Tensor):
                self.check_counted()

    def check_counted(self) -> None:
        """Check that no batch was weighted by its samples although its loss ignores labels or weights them unequally.

        Raises:
            ValueError: A batch was weighted by its samples, so the gradients differ from those of a single process.
        """
        uncounted, self._uncounted = self._uncounted, False
        if uncounted:
            raise ValueError(
                "some labels are ignored by the loss, or count more than others, and batches counted by their samples, "
                f"so gradients are not those of one process. {self._remedy()}"
            )

    def _remedy(self) -> str:
        """Return what to write if a loss ignores labels or weights them, and it is unknown how much a batch counts."""
        latest = self._labels
        if len({*map(float, self._of_calls)}) > 1:
            return (
                "The loss has several means over different labels, so no single weight is right. Make it one mean: add "
                "up losses with `reduction='sum'`, divide them by one number, and return that number from `forward` "
                "after the loss, or pass it, as in `self.backward(loss, weight=number)`."
            )
        if latest.result is None:
            return (
                "The loss has its own `forward` or is decorated, so say what it is the mean over: return that number "
                "from `forward` after the loss, or pass it, as in `self.backward(loss, weight=number)`."
            )
        is_counted = f"target != {latest.ignored}"
        number, hint = f"({is_counted}).sum()", ""
        if latest.num_labels is None:
            number, hint = f"class_weights[target[{is_counted}]].sum()", ", with the class weights of the loss"
        return (
            f"Say how much a batch counts{hint}: pass it, as in `self.backward(loss, weight={number})`, or return it "
            "from `forward` after the loss."
        )

    # ------------------------------------------------------------------------------------ backward passes

    @contextmanager
    def weighing(self, factor: float | Items) -> Iterator[None]:
        """Let the library run a backward pass in the `with` block, whose gradients are multiplied by a factor."""
        usual, self.factor, self._is_weighing = self.factor, factor, True
        try:
            yield
        finally:
            self.factor, self._is_weighing = usual, False

    def multiply(self, gradients: torch.Tensor, may_send: bool = False) -> Items | None:
        """Multiply this rank's gradients by their weight, in place, before they are sent to the other ranks.

        If user code runs the backward pass, the batch has it now.

        Args:
            gradients: Gradients of the running backward pass.
            may_send: True if the caller can send items along with the gradients.

        Returns:
            The items to send along with the gradients; None if the other ranks need none. The caller must divide the
            sum of the ranks' gradients by their `divisor()`.
        """
        if not (self.rules.has_several or self._is_weighing):
            self.use()
        items = self.factor
        if not isinstance(items, Items):
            multiply(gradients, items)
            return None
        is_sent = may_send and items.known is None
        multiply(gradients, items.own / items.typical if is_sent else items.factor())
        return items if is_sent else None

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
        added.ends_step, added.is_of_criterion = plan.ends_step, is_of_criterion
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


def multiply(gradients: torch.Tensor, factor: Any) -> None:
    """Multiply gradients by a factor, in place. With the factor 0, also set NaNs to 0."""
    if isinstance(factor, torch.Tensor) or factor not in (0.0, 1.0):
        gradients.mul_(factor)
    elif not factor:
        gradients.zero_()  # the gradients of a batch that does not count may be NaN, which times 0 is NaN
