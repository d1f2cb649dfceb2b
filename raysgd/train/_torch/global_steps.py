"""All-or-nothing optimizer steps for training functions with `elastic=True`: all ranks take a step, or no rank does.

The models, optimizers and loaders that the function has prepared use this module. If an all-reduce of gradients fails
because a worker was lost, user code sees no exception. The batch counts as failed, its optimizer does not step, and the
loader yields the same samples again. A worker "steps in" if it joins a group in which the function is already running,
usually to replace a lost worker.

ADR 121 gives the reasons, and defines what makes a step count.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from raysgd.air.session import RunningSession, current_session
from raysgd.core.arrays.division import BatchPlan
from raysgd.core.connections.torch import is_connection_error, mesh_group
from raysgd.torch.parallel import handover
from raysgd.torch.parallel.copies import digest_of
from raysgd.torch.parallel.leg import Leg, multiply
from raysgd.torch.parallel.strategy import DDP
from raysgd.torch.parallel.sync import COMM_HOOK, completed
from raysgd.torch.parallel.tensors import repeat_first, sums_of
from raysgd.torch.parallel.undo import Mode, Undo
from raysgd.train._worker.membership import BatchStart, GroupPlace, Membership
from raysgd.trainer.messages.comparison import REASONS_OF_TORCH, ComparisonPace, check_equal

_DTYPES = (torch.float32, torch.float64)
_JOINT = "_is_global"
_CPU = torch.device("cpu")
# Exceptions that a failed collective may raise: from PyTorch, from a socket, or because its group no longer exists.
_OF_EXCHANGES = (RuntimeError, OSError, ValueError)
_NUMBERS_DIFFER = "the number of steps differs from batch to batch"
_RATES_DIFFER = "the learning rates of the workers differ: give schedulers to `prepare_state`"
_SAME = 1e-6  # relative tolerance for comparing sums, because sums of equal values may differ by rounding


class GlobalSteps:
    """Ensures that an optimizer step is taken on all ranks or on no rank, even if a worker is lost (`elastic=True`).

    This object holds the models, optimizers and loaders that a training function has prepared.

    Args:
        session: The function's session. The session's `Membership` follows the changing worker group, and decides which
            steps count.
    """

    def __init__(self, session: RunningSession) -> None:
        self._session = session
        self._membership: Membership = session.membership
        self._met = self._membership.place
        self._shared: list[Any] = []
        self._loaders: list[Any] = []
        self._parallel = DDP()
        self._models: list[DistributedDataParallel] = []
        self._with_buffers: list[DistributedDataParallel] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._formed = self._met
        self._undo, self._num_parts, self._leg = Undo([], [], mode="learn"), (0, 0), Leg()
        # Hashes of the weights after the first batch's last optimizer step. They show whether user code changes the
        # weights afterwards.
        self._digests: list[torch.Tensor] | None = None
        self._num_steps = 0  # number of optimizer steps in the current batch
        self._num_usual = 0  # number of optimizer steps in the first batch; 0 during the first batch
        self._weight = 1.0
        self._at = 0  # number of the current batch in its pass; must be equal on all ranks
        self._open: BatchStart | None = None  # start of the current batch; None between two batches
        self._has_batch = self._has_exchanged = self._is_checked = self._is_left = False
        self._comparisons = ComparisonPace()
        self._is_comparing = False
        self._agreed_at = time.perf_counter()

    # ------------------------------------------------------------------------------------------------------------ parts

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: Mapping[str, Any]) -> torch.nn.Module:
        """Wrap a model in `DistributedDataParallel`, which averages gradients over the ranks.

        In a batch that has failed, the gradients are not averaged.

        Raises:
            ValueError: An option does not work with `elastic=True`.
        """
        for name in ("process_group", COMM_HOOK):
            if name in options:
                raise ValueError(f"`{name}` of `prepare_model` does not work with `elastic=True`: leave it out.")
        self._shared.append(model)
        options = {**options, COMM_HOOK: (self, GlobalSteps.average)}
        wrapped = self._parallel.wrap(model, device_ids, options, init_sync=not self._membership.is_new)
        if isinstance(wrapped, DistributedDataParallel):
            self._models.append(wrapped)
            if wrapped.broadcast_buffers:
                self._with_buffers.append(wrapped)
            wrapped.broadcast_buffers = False
        return wrapped

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Change an optimizer so that its `step` does nothing if the step does not count on all ranks.

        A step with a closure is always taken. Afterwards, the function can no longer continue in another group.
        """
        if hasattr(optimizer.step, _JOINT):
            return
        self._shared.append(optimizer)
        self._optimizers.append(optimizer)
        step_only_where(optimizer, partial(self._counts, optimizer))
        optimizer.register_step_post_hook(self._note_stepped)
        setattr(optimizer.step.__func__, _JOINT, True)  # type: ignore[attr-defined]

    def _note_stepped(self, *_: Any) -> None:
        if not self._num_usual and self._undo.mode != "all":
            self._digests = [*map(digest_of, self._parameters())]

    def _counts(self, optimizer: torch.optim.Optimizer, closure: Any) -> bool:
        if closure is None:
            return self._may_step(optimizer)
        self._membership.flaw = "the optimizer steps with a closure"
        return True

    def share(self, *parts: Any) -> None:
        """Register further objects, such as schedulers, whose state is sent to workers that step in."""
        self._shared += parts

    def admit(self) -> None:
        """Allow new workers to step in while the function runs.

        Called when the function reads a loader's `epoch`. If a function counts its epochs in this way, a new worker
        gets the right epoch.
        """
        self._membership.admits = True

    def number(self, loader: Any) -> None:
        """Register a loader. A worker that steps in continues at the other workers' position in the loader."""
        self._loaders.append(loader)

    def _check_prepared(self) -> None:
        """Check that the function has prepared its models and loaders.

        Called before each all-reduce of gradients and before each optimizer step. After a successful check, further
        calls do nothing.

        Raises:
            ValueError: A model or a loader is not prepared.
        """
        if self._is_checked:
            return
        if not self._models:
            raise ValueError(
                "`elastic=True`: no model is prepared for several workers. Call `prepare_model(model)`, which puts it "
                "into `DistributedDataParallel`."
            )
        if not self._has_batch:
            raise ValueError(
                "`elastic=True`: this batch does not come from a prepared loader that shards global batches, so it "
                "could not be repeated. Call `prepare_data_loader(loader, exact=True)`. For Ray Data, omit `elastic`."
            )
        # The hook is global to the process. A strong reference in it would keep this object alive after the run.
        steps = weakref.ref(self)
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: _refuse_unprepared(steps(), optimizer))
        weakref.finalize(self, hook.remove)
        self._is_checked = True

    def refuse_unprepared(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer of a prepared model is prepared itself, or is part of a prepared optimizer.

        Raises:
            ValueError: The optimizer is not prepared.
        """
        parts = (part for each in self._optimizers for part in (each, *vars(each).values()))
        if any(part is optimizer for part in parts):
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            if stepped & {id(parameter) for parameter in model.parameters()}:
                raise ValueError(
                    f"`elastic=True`: the optimizer of `{type(model.module).__name__}` is not prepared, so it would "
                    "also apply gradients of failed batches. Call `prepare_optimizer(optimizer)` before the first "
                    "batch."
                )

    # ---------------------------------------------------------------------------------------------------------- a batch

    def enter(self, takes_steps: bool = True) -> GroupPlace:
        """Wait until this worker is in a working group, and let the models use the group. Return the `GroupPlace`.

        Args:
            takes_steps: True if the function is about to train. A worker that steps in then receives the other workers'
                state here. False if the function is about to evaluate. A worker that steps in then does not wait.
        """
        while True:
            if self._membership.is_new and not takes_steps:
                return self._membership.place
            place = self._membership.enter()
            if place is not self._formed:
                self._parallel.reform()
                for model in self._models:
                    model.broadcast_buffers = False
            if self._membership.is_new and self._membership.meet(place, self._meet):
                place = self._met = self._membership.place
            self._formed = place
            if not self._membership.is_new:
                return place

    def _meet(self) -> Exception | None:
        """Send the state of a running worker to all workers that step in, before the group's first batch.

        All ranks call this method before the same batch. It returns when all ranks have the state.

        Returns:
            None, or the error with which the group broke. Also an error if a new worker cannot load the state, for
            example because it has prepared other objects.
        """
        membership, world = self._membership, self._membership.place.world
        try:
            are_new = torch.zeros(world.size)
            are_new[world.rank] = membership.is_new
            self._parallel.all_sum(are_new)
            takers = [rank for rank, is_new in enumerate(are_new.tolist()) if is_new]
            if not takers:
                return None
            source, flaw, state = min(set(range(world.size)) - set(takers), default=0), None, dict[str, Any]()
            if membership.is_new:
                state = handover.receive(source, takers, _CPU)
                flaw = self._unfit(state)
            elif world.rank == source:
                handover.send(self._state(), takers, _CPU)
            flaws = torch.tensor([float(flaw is not None)])
            self._parallel.all_sum(flaws)
            if membership.is_new and not flaws.item():
                self._take_over(state)
            membership.flaw = membership.flaw or flaw
            return _lost("a worker that steps in does not fit the others") if flaws.item() else None
        except _OF_EXCHANGES as error:
            return self._as_lost(error)

    def _state(self) -> dict[str, Any]:
        """Return the state that this rank sends to workers that step in: models, optimizers and progress."""
        return {
            "number": self._membership.place.number,
            "num_done": self._membership.num_done,
            "num_usual": self._num_usual,
            "iteration": self._session.iteration,
            "loaders": [loader.position() for loader in self._loaders],
            "kinds": [type(part).__name__ for part in self._shared],
            "parts": [part.state_dict() for part in self._shared],
        }

    def _unfit(self, state: Mapping[str, Any]) -> str | None:
        """Return the reason why this rank cannot load another rank's state, or None if it can."""
        kinds, others = [type(part).__name__ for part in self._shared], state["kinds"]
        if kinds != others:
            return f"a worker that steps in has prepared {', '.join(kinds)}, and the others {', '.join(others)}"
        for part, saved in zip(self._shared, state["parts"], strict=True):
            if isinstance(part, torch.nn.Module):
                own = {name: tuple(tensor.shape) for name, tensor in _tensors(part.state_dict())}
                theirs = {name: tuple(tensor.shape) for name, tensor in _tensors(saved)}
                wrong = sorted(name for name in {*own, *theirs} if own.get(name) != theirs.get(name))
                if wrong:
                    return f"`{wrong[0]}` of `{type(part).__name__}` has another shape in a worker that steps in"
        places = [index for index, position in enumerate(state["loaders"]) if position["is_open"]]
        if len(state["loaders"]) != len(self._loaders) or not all(self._loaders[index].is_open for index in places):
            return "a worker that steps in has come to another loader than the others"
        return None

    def _take_over(self, state: Mapping[str, Any]) -> None:
        for part, saved in zip(self._shared, state["parts"], strict=True):
            part.load_state_dict(saved)
        for loader, position in zip(self._loaders, state["loaders"], strict=True):
            loader.take_over(position)
        self._session.iteration = state["iteration"]
        self._learn(state["num_usual"])
        self._membership.step_in(state["number"], state["num_done"])

    def open_batch(self, place: GroupPlace, weight: float, has_trained: bool, at: int) -> BatchStart:
        """Record that the function starts to train on a batch of a prepared loader.

        Args:
            place: The group whose ranks share the samples of the global batch, and the rank in it.
            weight: Weight of this rank's gradients: its fraction of the global batch, times the number of ranks.
            has_trained: True if steps were taken on earlier batches of the same loader.
            at: Number of the batch in its pass. It must be equal on all ranks.

        Raises:
            ValueError: No optimizer step was taken on the previous batch.
            DistNetworkError: The function called `step` on a batch that failed, and then left the pass.
        """
        if self._open is not None:
            if not (self._is_left or self._num_steps):
                raise ValueError(
                    "`elastic=True`: a second batch was drawn before the step on the first one, and a step can count "
                    "only one batch. Use one loader for both: over `StackDataset(first, second)`, say, or a "
                    "`ConcatDataset`."
                )
            if self.close_batch(self._open) == "failed" and self._num_steps:
                raise _lost(
                    "the function left a pass in a batch that failed. Call `step_committed()` before leaving a pass"
                )
        mark = self._open = self._membership.open_batch(place, has_trained)
        self._at, self._is_left = at, False
        if not self._membership.has_failed and place is not self._met:
            self._met = place
            if not self._membership.meet(place, self._meet):
                self._membership.fail()
        self._weight, self._has_batch, self._has_exchanged, self._num_steps = weight, True, False, 0
        for model in self._models:
            model.require_backward_grad_sync = not self._membership.has_failed
        self._begin_undo()
        return mark

    def _begin_undo(self) -> None:
        """Copy the state that the next batch may change, such as weights. If the batch fails, the state is restored."""
        num_parts = len(self._models), len(self._optimizers)
        if self._num_parts != num_parts:
            mode: Mode = "all" if self._undo.mode == "all" or len(self._optimizers) > 1 else "learn"
            models = [model.module for model in self._models]
            self._undo, self._num_parts = Undo(models, self._optimizers, mode=mode), num_parts
            self._undo.open_call()
        self._digests = None
        self._leg = Leg()  # a new one, because a connection that broke in the last batch is gone
        self._undo.begin_step(self._leg.record, nullcontext())
        self._leg.begin_batch(BatchPlan(weight=self._weight))

    def close_batch(self, mark: BatchStart) -> str:
        """End the batch that started at `mark`, and return its outcome.

        The outcome is "failed", "done" (a step counted) or "seen" (no step was taken).

        Raises:
            DistNetworkError: The batch failed after one of its steps had counted, or its changes cannot be undone.
            ValueError: This rank's part of the batch is a sample of another rank, with weight 0, and the function has
                not taken a step on it.
        """
        if mark is not self._open:  # the function has started a batch of another loader, which ended this batch
            return "done"
        membership, self._open = self._membership, None
        self._undo.see_return(self._leg.record)
        # True if the function has taken a step in this batch, but the ranks have not agreed yet that the step counts.
        has_unsaid = self._num_steps > 0 and membership.num_done == mark.num_done
        if has_unsaid and not membership.has_repeated(mark):
            membership.flaw = _NUMBERS_DIFFER if self._num_usual else membership.flaw
            membership.count_step(self._agree)
        is_done = membership.num_done != mark.num_done
        if membership.has_repeated(mark):
            lost = _lost("a worker was lost in the middle of a batch whose steps cannot be undone")
            self._leg.record.note_lost_connection(lost)
            if is_done or not self._undo.can_undo(self._leg.record):
                raise lost
            # Also clear the gradients, because user code that clears them after `step` might not do so in this batch.
            self._undo.undo_step(self._leg.record)
            return "failed"
        self._undo.forget(self._leg.record)
        if self._digests is not None and not all(map(torch.equal, self._digests, map(digest_of, self._parameters()))):
            # User code changes weights outside of optimizer steps. From now on, copy all weights before each batch.
            self._undo.copy_all()
        if self._has_exchanged and not is_done:
            membership.flaw = "gradients are added up over several batches"
            # Other ranks may take a step in this batch. They first compare their steps in an all-reduce, and would wait
            # for this rank if it did not take part.
            if membership.begin_exchange():
                membership.end_exchange(self._compared(math.nan))
        if not (self._weight or self._has_exchanged or is_done or self._is_left):
            raise ValueError(
                "`elastic=True`: a worker without a sample in the last batch got one of another worker, but no step "
                "followed. Evaluate under `torch.no_grad()`, where each sample comes once."
            )
        if is_done and not self._num_usual:
            self._learn(self._num_steps)
        return "done" if is_done else "seen"

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for model in self._models for parameter in model.parameters())

    def leave_batch(self, mark: BatchStart) -> bool:
        """Record that the function leaves its loop over a loader during this batch, for example with `break`.

        Return True if the function has taken an optimizer step on the batch, or has already started a batch of another
        loader.
        """
        self._is_left = self._is_left or mark is self._open
        return mark is not self._open or self._num_steps > 0

    def _learn(self, num_steps: int) -> None:
        """Record how many optimizer steps the function takes per batch, as counted in the first batch."""
        self._num_usual = num_steps
        if num_steps > 1:
            self._undo.copy_all()

    def note_unstepped(self) -> None:
        """Record that the function takes no step on some batches. Such a function cannot continue in another group."""
        self._membership.flaw = "the optimizer does not step for each batch"

    # -------------------------------------------------------------------------------------------------------- exchanges

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of gradients over the ranks. This is the communication hook of `DistributedDataParallel`.

        Leave the gradients unchanged if the batch has failed.
        """
        self._check_prepared()
        gradients, membership = bucket.buffer(), self._membership
        if not membership.begin_exchange():
            return completed(gradients)
        self._has_exchanged = True
        if bucket.is_last():
            self._leg.note_all_reduce()
        multiply(gradients, self._weight)
        try:
            group = mesh_group() if gradients.device.type == "cpu" and gradients.dtype in _DTYPES else None
            if group is None or not group.is_quick_for(gradients.nbytes):
                future = allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
                return future.then(partial(self._received, gradients))
            group.add_up(gradients.numpy())
            gradients.div_(group.size)
        except _OF_EXCHANGES as error:
            self._end_broken(error)
        else:
            membership.end_exchange()
        return completed(gradients)

    def _received(self, gradients: torch.Tensor, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        try:
            averaged = future.value()
        except _OF_EXCHANGES as error:
            self._end_broken(error)
            return gradients
        self._membership.end_exchange()
        return averaged

    def _end_broken(self, error: Exception) -> None:
        broken: Exception | None = None
        try:
            broken = self._as_lost(error)
        finally:
            self._membership.end_exchange(broken)

    def _may_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if an optimizer may step. Before the last step of a batch, all ranks agree on the answer.

        In the first batch, the number of steps per batch is still unknown, so the ranks agree when that batch ends.
        """
        self._check_prepared()
        self._num_steps += 1
        if not self._num_usual or self._num_steps < self._num_usual:
            if self._membership.has_failed:
                return False
            self._leg.record.note_step(optimizer)
            return True
        if self._num_steps > self._num_usual:
            self._membership.flaw = _NUMBERS_DIFFER
        return self._membership.count_step(self._agree)

    def _agree(self) -> Exception | None:
        """Confirm with all ranks that the step counts: every rank has the averaged gradients.

        Also run the other collectives of a step here, such as the broadcast of buffers.

        Returns:
            None if the step counts, or the error with which the group broke.
        """
        groups = [group for each in self._optimizers for group in each.param_groups]
        broken = self._compared(float(sum(group.get("lr", 0.0) for group in groups)))
        if broken is not None:
            return broken
        try:
            self._compare_weights()
            for model in self._models:
                # The next forward pass would otherwise do this, and if it failed there, user code would see the error.
                _rebuild_buckets(model)
            # For the same reason, broadcast buffers here and not in the forward pass.
            for model in self._with_buffers:
                repeat_first(model.module.buffers())
        except _OF_EXCHANGES as error:
            return self._as_lost(error)
        return None

    def _compared(self, rates: float) -> Exception | None:
        """Check that all ranks have the same batch, number of steps and learning rates. All ranks must take part.

        Args:
            rates: Sum of this rank's learning rates; NaN if this rank does not step.

        Returns:
            An error if the ranks differ or the all-reduce failed, else None. A rank that does not step gets an error
            only if the all-reduce failed.
        """
        membership, is_due = self._membership, self._comparisons.is_due
        own = torch.tensor([rates, self._num_steps, self._at, is_due], dtype=torch.float64)
        means = own.clone()
        try:
            self._parallel.all_sum(means)
        except _OF_EXCHANGES as error:
            return self._as_lost(error)
        means /= membership.place.world.size
        # All ranks have the same means. If a comparison of weights is due on one rank, all ranks do it.
        self._is_comparing = bool(means[3])
        is_alone = bool(means[0].isnan()) or not torch.equal(means[1:3], own[1:3])
        if math.isnan(rates) or (not is_alone and math.isclose(means[0], rates, rel_tol=_SAME)):
            return None
        membership.flaw = "not all workers take this step" if is_alone else _RATES_DIFFER
        return _lost(membership.flaw)

    def _compare_weights(self) -> None:
        """Compare the weights of all ranks before a step, if such a comparison is due.

        Raises:
            RanksDifferError: The weights differ.
        """
        now, world, costs_s = time.perf_counter(), self._membership.place.world, list[float]()
        models = [model.module for model in self._models]
        own = sums_of(models, True, self._parallel.left_out_of, is_exact=False) if self._is_comparing else None
        if own is not None:
            numbers = torch.zeros(world.size, len(own.names), 2, dtype=torch.float64)
            numbers[world.rank] = torch.from_numpy(own.numbers)
            self._parallel.all_sum(numbers)
            by_rank = {rank: replace(own, numbers=rows) for rank, rows in enumerate(numbers.numpy())}
            check_equal(by_rank, REASONS_OF_TORCH, "If your workers are to differ, leave `elastic` out.")
            costs_s = [time.perf_counter() - now]
        self._comparisons.note_call(now - self._agreed_at, costs_s)
        self._agreed_at = now

    def _as_lost(self, error: Exception) -> Exception:
        """Return the error that reports a broken group to the driver.

        Raises:
            Exception: `error` itself, if the group is not broken.
        """
        if is_connection_error(error) or not self._membership.is_usable:
            return _lost(str(error))
        raise error


def step_only_where(optimizer: Any, counts: Callable[[Any], bool]) -> None:
    """Replace an optimizer's `step` with a method that calls the original `step` only if `counts` returns True.

    Args:
        optimizer: Optimizer, or another object with a `step` method.
        counts: Function that gets the closure passed to `step`, or None, and returns True if the optimizer should step.
    """
    own: Any = optimizer.step  # may be a replacement that a scheduler or a gradient scaler has set

    @functools.wraps(getattr(own, "__func__", own))
    def step(_: Any, closure: Any = None) -> Any:
        if not counts(closure):
            return None
        return own() if closure is None else own(closure)

    optimizer.step = MethodType(step, optimizer)  # a bound method, because schedulers cannot wrap a plain function


def _tensors(state: Mapping[str, Any]) -> Sequence[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)]


def _refuse_unprepared(steps: GlobalSteps | None, optimizer: torch.optim.Optimizer) -> None:
    if steps is not None:
        steps.refuse_unprepared(optimizer)


def _lost(words: str) -> Exception:
    return dist.DistNetworkError(words)


def step_committed() -> bool:
    """Return True if the current batch counts. If False, a worker was lost and the batch is repeated.

    In that case the optimizer did not step, and the function's reports are discarded. Call this after
    `optimizer.step()`, before you count the batch or step a scheduler. Always True without `elastic=True`.
    """
    session: Any = current_session()
    return session is None or not session.is_repeating


def _rebuild_buckets(model: DistributedDataParallel) -> None:
    reducer: Any = getattr(model, "reducer", None)
    if hasattr(reducer, "_rebuild_buckets"):
        reducer._rebuild_buckets()
