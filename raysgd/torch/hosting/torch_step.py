"""`TorchParts`: what PyTorch does at the events of a step, and when a training call begins, ends or breaks off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from raysgd.core.arguments import is_integer
from raysgd.core.arrays.division import BatchPlan
from raysgd.core.connections._origins import with_causes
from raysgd.core.connections.mesh.mesh import NotAligned
from raysgd.core.connections.torch import is_connection_error
from raysgd.core.engine.shared.types import StepLacksMemory, World
from raysgd.core.memory import ran_out
from raysgd.core.numbers.timing import UNDO
from raysgd.core.text.tracebacks import defined_at
from raysgd.torch.data.batches import count_samples
from raysgd.torch.data.feed import DividedLoaderSource, LoaderSource, TorchFeed
from raysgd.torch.objects import metric_objects
from raysgd.torch.objects.criteria import refuse_sum
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.strategy import Strategy
from raysgd.torch.parallel.sync import GradientSync
from raysgd.torch.parallel.undo import Mode, Undo, lacks_memory
from raysgd.torch.step.advice import check_norms, comparing_sizes, with_advice
from raysgd.torch.step.gradients import step_with, tells_of_steps
from raysgd.torch.training_operator import TrainingOperator
from raysgd.trainer.messages.comparison import JointWork
from raysgd.trainer.worker.operator import is_stock
from raysgd.trainer.worker.rank_rows import RowExchange
from raysgd.trainer.worker.step_loop import StepLoop, StepParts, StepRules

logger = logging.getLogger(__name__)


# Takes an operator and names of methods. True if `TrainingOperator` itself defines the methods that the operator uses.
is_plain = partial(is_stock, of=TrainingOperator)

# Methods in which user code may call the criterion itself while it trains.
_TRAINING_RUNGS = ("train_epoch", "train_batch", "prepare_batch", "forward", "backward", "optimizer_step")
_STEPPING_RUNGS = ("train_epoch", "train_batch", "backward", "optimizer_step")


class TorchParts(StepParts):
    """PyTorch's part of the steps of one operator. What happens in a step is in the `record` of its `Leg`.

    Before a step is committed, the operator's `global_step` already includes it, but `undo_step` can still undo it.

    Args:
        operator: Operator that trains.
        sync: Averages the gradients of each step over the workers.
        feed: Provides the operator's data.
        undo: Copies the state that batches change, and restores it.
        splits: See the attribute.

    Attributes:
        splits: True to repeat a step in smaller batches if memory runs out.
    """

    _feed: TorchFeed

    def __init__(
        self, operator: TrainingOperator, sync: GradientSync, feed: TorchFeed, undo: Undo, splits: bool = False
    ) -> None:
        super().__init__(feed)
        self._operator, self._sync, self._internals = operator, sync, operator._raysgd
        self.undo = undo
        self._optimizers = operator._raysgd.registered.optimizers
        self._global_step = 0  # the operator's `global_step` at the last commit
        self.has_stock_loop = is_plain(operator, "train_epoch")
        self._may_run_backward = not is_plain(operator, "train_epoch", "train_batch", "backward")
        # What the committed steps of the call have shown: gradients were averaged over the ranks; an optimizer has
        # stepped, with several ranks; a later step uses gradients that only this rank has.
        self._has_averaged = self._has_stepped = self._has_own_gradients = False
        self.splits = splits
        self._num_opened, self._lacked_in_step = 0, False  # samples of the latest batch; memory ran out in a step

    @property
    def leg(self) -> Leg:
        return self._sync.leg

    def check_start(self) -> None:
        """Check that user code has called `rewrap` if it froze or unfroze parameters, or added parameter groups."""
        self._internals.trained.check(self._operator._freezes_in_batches)

    def open(self, plan: BatchPlan, batch: Any) -> None:
        sync, undo, leg = self._sync, self.undo, self._sync.leg
        if plan.total_samples is None and leg.rules.has_several:
            plan = plan._replace(total_samples=count_samples(batch))
        if self.splits:
            self._num_opened = plan.num_samples or 0
            undo.raises_lack = self._num_opened > 1
        if sync.is_told_of_batches:
            sync.open(plan)
        if undo.is_told_of_batches and plan.starts_step:
            undo.begin_step(leg.record, leg.ledger.inside(UNDO))
        leg.begin_batch(plan)

    def remember_metrics(self) -> Callable[[], None]:
        return metric_objects.remember(self._operator, self._internals.registered)

    def _is_lost(self, error: BaseException) -> bool:
        return self._sync.leg.record.error is not None or is_connection_error(error)

    def may_be_parted(self, error: BaseException) -> bool:
        return self._is_lost(error) or any(isinstance(link, NotAligned) for link in with_causes(error))

    def check_memory(self, error: BaseException) -> None:
        # Keep no reference to what is raised: a cycle with this frame would keep the memory that the error refers to.
        if not self.splits or not ran_out(error):
            return
        has_stepped, is_again = bool(self._sync.leg.record.stepped), self._lacked_in_step
        self._lacked_in_step |= has_stepped
        if has_stepped and not is_again:  # smaller batches do not help, but the state of another rank may
            raise StepLacksMemory from error
        if not has_stepped and self._num_opened > 1:
            raise StepLacksMemory(-(-self._num_opened // 2)) from error
        where = "in the step of an optimizer" if has_stepped else "if a batch cannot be divided"
        error.args = (f"{error} Smaller batches do not help {where} (samples at once: {self._num_opened}).",)

    def can_undo_now(self, error: BaseException, is_alone: bool) -> bool:
        return not self._sync.leg.record.has_changed and (is_alone or not self._is_lost(error))

    @property
    def can_be_source(self) -> bool:
        """True if the current state is the result of completed steps only, or can be restored to such a state."""
        # The ranks are apart if each has accumulated its own gradients, or if user code steps without an all-reduce, so
        # that the weights diverge. No new rank may copy such a state: the call is repeated from the snapshot. If the
        # driver then finds that the weights differ, it raises.
        are_apart = self._has_own_gradients or (self._has_stepped and not self._has_averaged)
        return not are_apart and self.undo.can_undo(self._sync.leg.record)

    def commit(self) -> None:
        if self._sync.is_told_of_batches:
            self._sync.check()
        self._lacked_in_step = False
        self.note_committed()

    def note_committed(self) -> None:
        record, undo, self._global_step = self._sync.leg.renew_record(), self.undo, self._operator.global_step
        if record.has_begun:
            undo.forget(record)
            if undo.mode != "never":
                is_averaged = record.num_all_reduces > 0
                self._has_averaged |= is_averaged
                self._has_stepped = self._has_stepped or (bool(record.stepped) and self._sync.num_ranks > 1)
                had_own = self._has_own_gradients or not is_averaged
                self._has_own_gradients = had_own and bool(undo.waiting_parameters())

    def note_loaded(self) -> None:
        self._has_stepped = self._has_own_gradients = False
        self._global_step = self._operator.global_step
        self.undo.note_loaded()
        self._sync.leg.renew_record()

    def undo_step(self) -> None:
        self._operator.global_step = self._global_step
        self.undo.undo_step(self._sync.leg.record)
        self._sync.leg.renew_record()

    def waiting_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that have gradients with which no optimizer has stepped yet."""
        return self.undo.waiting_parameters(self._sync.leg.record)

    def plain(self, value: Any) -> Any:
        """Convert a tensor without dimensions to a number, and move any other tensor to the CPU."""
        if isinstance(value, torch.Tensor):
            return value.item() if value.ndim == 0 else value.detach().cpu()
        return value

    def begin_call(self) -> None:
        self._has_averaged = self._has_stepped = False

    @property
    def joint_work(self) -> JointWork | None:
        return self._sync.leg.flight_recorder.work

    # ---------------------------------------------------------------------------------------- the steps of a call

    @contextmanager
    def training(self, hosted: Any, call: Any, loop: StepLoop) -> Iterator[None]:
        hosted.has_trained = True
        hosted.leave_evaluation()
        internals, source, gather = self._internals, loop.cursor.source, hosted.gather
        is_divided, may_continue = self._feed.is_divided(loop.cursor), hosted.epoch_obstacle is None
        is_distributed = hosted.world.is_distributed
        # Exchange metrics only if the call can continue after a rank is lost. The remaining ranks then report the lost
        # rank's metrics.
        rows = RowExchange(call, gather) if gather is not None and may_continue and is_divided else None
        leg = self.begin_leg(call.progress.epoch_idx, source, ledger=hosted.ledger, rows=rows)
        if leg.rules.weighs and is_plain(self._operator, "train_epoch", "train_batch", "forward", "backward"):
            refuse_sum(internals.criterion)
        internals.loss_calls.makes_all = is_plain(self._operator, *_TRAINING_RUNGS)
        models = internals.registered.wrapped
        # True if global batches are split into shares, which may differ in size.
        is_split = source.is_divided and (is_distributed or leg.rules.num_shards > 0)
        if isinstance(source, DividedLoaderSource):
            is_whole_pass = call.progress.num_requested is None
            source.check_plan = partial(check_norms, models) if is_split and is_whole_pass else None
        try:
            may_repeat = may_continue and (is_distributed or self.splits) and not hosted.group_obstacle
            self.undo.open_call(may_repeat and is_divided)
            with ExitStack() as stack:
                stack.enter_context(leg.flight_recorder.of_call())
                if is_distributed or is_split:
                    stack.enter_context(with_advice(models, leg if is_split else None))
                if is_split and is_distributed and not hosted.parallel.is_sharded:
                    stack.enter_context(comparing_sizes(lambda: leg.plan.weight != 1.0))
                stack.enter_context(internals.loss_calls.on(internals.criterion, leg.note_labels))
                yield
            leg.check_counted()
        finally:
            self._sync.end_leg()

    def begin_leg(self, epoch_idx: int, source: LoaderSource | None = None, **options: Any) -> Leg:
        """Create the `Leg` for a call, or for the rest of a call after the worker group has changed.

        The new `Leg` is also the attribute `leg` of the sync.

        Args:
            epoch_idx: Index of the epoch.
            source: Source of the batches; None for the batch on which a new worker warms up.
            options: Further arguments of `Leg`.

        Raises:
            ValueError: The operator's `accumulate_grad_batches` returned an invalid number. Or a step has several
                batches, or batches are split, although several optimizers are registered. Or a step has several batches
                with `deterministic=True`.
        """
        operator, micro_batches, num_shards = self._operator, 1, 0
        internals, window = operator._raysgd, operator.accumulate_grad_batches(epoch_idx)
        if not is_integer(window) or window < 1:
            raise ValueError(
                f"`{type(operator).__name__}.accumulate_grad_batches` returned {window!r}: return how many "
                f"batches make an optimizer step, at least 1.{defined_at(type(operator), 'accumulate_grad_batches')}"
            )
        is_split = internals.context.settings.batch_options.micro_batch_size is not None
        if len(self._optimizers) > 1 and (window > 1 or is_split):
            option = f"accumulate_grad_batches={window}" if window > 1 else "micro_batch_size"
            raise ValueError(
                f"`{option}` works with one optimizer, and {len(self._optimizers)} are registered: register one with "
                "several parameter groups, or omit the option and accumulate in `train_batch`."
            )
        if source is not None and self._feed.rule is not None:
            num_shards = source.num_shards
            micro_batches = 1 if num_shards else source.most_batches
            if num_shards and window > 1:
                raise ValueError(
                    f"`accumulate_grad_batches={window}` does not work with `deterministic=True`: multiply the global "
                    "batch size by this number, and pass `micro_batch_size`."
                )
        leg = self._sync.begin_leg(
            internals.registered.wrapped,
            self._may_run_backward,
            rules=StepRules(self._sync.averages, window, micro_batches, num_shards),
            may_defer=internals.precision.can_defer,
            **options,
        )
        if internals.precision.is_mixed:
            internals.precision.begin_call()
        return leg

    def finish(self, has_batches: bool) -> None:
        """If accumulated gradients still wait for an optimizer step, take the step with fewer batches than usual.

        Raises:
            ValueError: The trainer's gradient accumulation or clipping had no effect, because user code bypassed it.
        """
        leg, name = self._sync.leg, type(self._operator).__name__
        if leg.accumulation is not None:
            leg.end_batch()  # the optimizer may step although the window is not full
            step_with(self._operator, *self._optimizers)
        if leg.rules.has_several and has_batches and not leg.is_used:
            raise ValueError(
                f"`{leg.rules.option}` had no effect: `{name}` computes its gradients by itself. Call "
                "`self.backward(loss)` and `self.optimizer_step()` in `train_batch`, for every batch (a "
                "`LightningModule` needs automatic optimization), or accumulate yourself and omit the option."
            )
        if has_batches and self._operator._raysgd.gradients.may_miss_clipping and not leg.has_clipped:
            raise ValueError(
                f"Gradient clipping had no effect: `{name}` steps an optimizer that is no "
                "`torch.optim.Optimizer`. Call `self.optimizer_step()` instead of its `step`, or clip the gradients "
                "yourself and leave `clip_grad_norm` and `clip_grad_value` out."
            )


def make_undo(operator: TrainingOperator, parallel: Strategy, undo: bool | None, world: World) -> Undo:
    """Create the object that undoes an operator's interrupted steps.

    Args:
        operator: Operator whose interrupted steps are undone.
        parallel: Strategy, such as DDP, that keeps the workers' models in sync.
        undo: The user's option `Recovery(undo=...)`, or False with `Recovery(in_place=False)`.
        world: Rank of this worker, and the number of workers on its machine.
    """
    internals = operator._raysgd
    registered, precision, callbacks = internals.registered, internals.precision, internals.callbacks
    models, optimizers, own = registered.trained, registered.optimizers, needs_copies(operator)
    unchanging = () if internals.remade is None else internals.remade.ids
    mode: Mode = "all" if undo else own
    if undo is False or not all(map(tells_of_steps, optimizers)):
        mode = "off"
    if parallel.obstacle is not None:
        mode = "never"
    lack = lacks_memory(models, world.local_size, unchanging) if mode in ("learn", "all") else None
    if lack is not None:
        mode = "off"
        if world.local_rank == 0:
            logger.warning(
                "copies of the state that a batch may change would need %s. This is too much, so no copies are made. "
                "If a worker is lost in the middle of a batch, the call restarts from the snapshot. "
                "`Recovery(undo=False)` chooses this without the warning",
                lack,
            )
    return Undo(
        models,
        optimizers,
        [*registered.schedulers, *([precision] if precision.is_mixed else [])],
        lambda: callbacks.changed_by_steps,
        mode=mode,
        keeps_gradients=own != "buffers",
        unchanging=unchanging,
    )


def needs_copies(operator: TrainingOperator) -> Mode:
    """Return what must be copied before each batch: "all", "buffers", or "learn" if this depends on the first batch."""
    own = operator._needs_copies
    if own or len(operator._raysgd.registered.optimizers) > 1:
        return "all"
    return "learn" if own is None or not is_stock(operator, *_STEPPING_RUNGS) else "buffers"
