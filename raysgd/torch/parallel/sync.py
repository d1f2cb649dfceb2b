"""`GradientSync` averages the gradients of optimizer steps over the ranks.

A leg is the part of a training call that one worker group runs. `GradientSync.begin_leg` creates a `Leg` when a call
starts, and another one when the call continues in a new worker group. The attribute `leg` of the sync is the current
`Leg`. User code may also run backward passes between calls. The sync then has a `Leg` without batches.

The loss of a batch is the mean over its samples, and an all-reduce takes the unweighted mean of the ranks' gradients.
If the ranks' batches differ in size, `raysgd.torch.parallel.leg` makes it the mean over all samples.

`DDPSync` averages in a communication hook on each model in `DistributedDataParallel` (DDP).
DDP passes gradients to the hook in buckets. The hook multiplies the gradients by this rank's weight, all-reduces them,
and records whether that succeeded. Once per optimizer step, with the last bucket of a backward pass, the hook also
sends this rank's metrics. PyTorch allows one hook per model. If the user has a hook, raysgd's hook calls it.

Some gradients are sent over the mesh instead of gloo. The mesh is raysgd's own set of direct connections between the
ranks. For small tensors, it is faster than gloo.
"""

# This module has no `from __future__ import annotations`, because PyTorch checks the annotations of a communication
# hook and does not accept strings.

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.arrays.division import BatchPlan
from raysgd.core.connections.group import Array, Group
from raysgd.core.connections.mesh.mesh import MeshBroken
from raysgd.core.connections.torch import is_connection_error, mesh_group
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.tensors import all_sum, reachable, repeat_first
from raysgd.torch.parallel.undo import FlightRecorder
from raysgd.trainer.worker.step_loop import StepRules

Pass = AbstractContextManager[Any]  # wraps a backward pass

_NOTHING = nullcontext()


class GradientSync:
    """Averages the gradients of an operator's steps over the ranks. This base class leaves gradients as they are.

    The base class is for a single worker, and for `strategy="none"`.

    Args:
        has_others: See the attribute.
        shares_metrics: See the attribute.

    Attributes:
        averages: True if gradients are averaged over the ranks, so that every optimizer step involves all ranks.
        has_others: True if there are other ranks, or if other ranks may join.
        shares_metrics: True if each rank sends its metrics to the other ranks in each step, along with the gradients.
        left_out: Models without trainable parameters, whose buffers are copied from rank 0 to the other ranks.
        defers: True if the gradients of all batches of a step are all-reduced together, in the last batch.
        waits: True if a step must wait for the sums of its gradients, as with NCCL (ADR 175).
        is_told_of_batches: True if `open` must be called before each batch, and `check` after each step.
        leg: Tracks the current batch and step in the part of a training call that this worker group runs. Between
            calls, it is a `Leg` without batches.
        is_lost: Function that returns True if an exception means that a connection to another rank was lost.
    """

    averages = False
    is_lost = staticmethod(is_connection_error)
    _defers = _defers_any = False  # whether gradients can wait for the last batch of a step; also those of user code

    def __init__(self, has_others: bool = True, shares_metrics: bool = False) -> None:
        self.has_others, self.shares_metrics = has_others, shares_metrics
        self.left_out: list[torch.nn.Module] = []
        self.models: Sequence[torch.nn.Module] = ()
        self.defers = self._checks_connections = self.is_told_of_batches = False
        self.join_group()

    def join_group(self) -> None:
        """Forget the former worker group and its last step, because this process has joined another one."""
        self._set_leg()

    def _set_leg(self, rules: StepRules | None = None, **options: Any) -> Leg:
        self.waits = self.averages and reachable() is not None
        self.leg = Leg(rules or StepRules(self.averages), **options)
        return self.leg

    def begin_leg(
        self,
        models: Sequence[torch.nn.Module],
        may_run_backward: bool,
        *,
        rules: StepRules | None = None,
        may_defer: bool = True,
        **options: Any,
    ) -> Leg:
        """Create the `Leg` for a call to `train`, or for the rest of a call that continues in a new worker group.

        Args:
            models: Wrapped models.
            may_run_backward: True if user code may run backward passes. User code may catch exceptions that a backward
                pass raises. Therefore, each step then checks whether its gradient communication succeeded.
            rules: What holds for all steps. Default: a step has one batch of each rank.
            may_defer: True if the gradients of all batches of a step may be all-reduced together, in the last batch.
            options: Further arguments of `Leg`.
        """
        self.models, rules = models, rules or StepRules(self.averages)
        self.defers = may_defer and rules.has_several and (self._defers_any if may_run_backward else self._defers)
        self._checks_connections = may_run_backward and self.has_others
        self._set_sync(True)
        self.is_told_of_batches = self.has_others or rules.num_shards > 0
        flight_recorder = FlightRecorder(self.leg.flight_recorder.number + self.averages)
        return self._set_leg(rules, record=self.leg.record, flight_recorder=flight_recorder, **options)

    def end_leg(self, rules: StepRules | None = None) -> Leg:
        """End the leg, and return the next: one that undoes nothing, for a validation, or user code between two calls.

        Called at the end of each call, even if the call fails.

        Args:
            rules: What holds for all steps. Default: a step has one batch of each rank.
        """
        self._set_sync(True)
        former = self.leg
        return self._set_leg(rules, record=former.record, flight_recorder=former.flight_recorder, ledger=former.ledger)

    def open(self, plan: BatchPlan) -> None:
        """Prepare a batch. In a step of several batches, let the all-reduce wait for the last batch, if possible."""
        if plan.starts_global_batch:
            for model in self.left_out:
                if model.training:
                    repeat_first(model.buffers())
        if self.defers:
            self._set_sync(plan.ends_step)

    def check(self) -> None:
        """Raise if the step that has ended is invalid, for example because a connection broke during the step."""
        if self._checks_connections:
            self.leg.record.check()

    def _set_sync(self, is_now: bool) -> None:
        """Average gradients in backward passes from now on, or in a later one."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return dist.get_world_size() if self.averages else 1

    def start_total(self, amount: Any) -> Callable[[], Any]:
        """Start to sum an amount, such as a number of labels, over the ranks whose gradients are averaged.

        Args:
            amount: This rank's amount: a number, or a one-element tensor on the device of the models.

        Returns:
            A function that waits for the sum and returns it. Call the function once. With NCCL, it returns a tensor,
            because reading the number would wait for the GPU.
        """
        if not self.averages:
            return lambda: amount
        group, device = mesh_group(), reachable()
        if device is None:  # without NCCL, numbers are summed in host memory, whether an amount is on a GPU or not
            amount = float(amount)
        numbers, record = torch.zeros(1, dtype=torch.float64, device=device) + amount, self.leg.record
        if group is not None:
            # Do not start a sum now, because the amount is usually sent together with the gradients. The returned
            # function sums the amounts if that has not happened.
            wait: Callable[[], Any] = partial(group.add_up, numbers.numpy())
        else:
            with record.noting_lost_connections(self.is_lost):
                wait = self.start_sum(numbers)

        def total() -> Any:
            with record.noting_lost_connections(self.is_lost):
                wait()
            return numbers.item() if numbers.device.type == "cpu" else numbers[0]

        return total

    def start_sum(self, numbers: torch.Tensor) -> Callable[[], Any]:
        """Start to sum a tensor in the process group that all-reduces gradients. Return a function to wait for it."""
        work: Any = dist.all_reduce(numbers, async_op=True)
        # With `NCCL_BLOCKING_WAIT`, `Work.wait` would make the host wait for the GPU. A future's `wait` does not.
        return work.wait if numbers.is_cpu else work.get_future().wait

    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average gradients whose all-reduce was deferred to a later batch, if no later batch has followed."""

    def are_cleared(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return True if no parameter has a gradient from earlier batches to which the current batch can add."""
        return all(parameter.grad is None for parameter in parameters)

    def backward_pass(self, parameters: Iterable[torch.Tensor], is_second: bool) -> Pass:
        """Return a context manager for a backward pass by the library.

        Args:
            parameters: Parameters that get gradients.
            is_second: True if the batch already had a backward pass.
        """
        return _NOTHING


COMM_HOOK = "comm_hook"  # key of `ddp_args` for the user's hook; not an argument of DistributedDataParallel

_NO_ROW: Array = np.empty(0, np.uint8)
_FIRST_BUCKET_BYTES = 2**20  # this and the next constant are defaults of `DistributedDataParallel`
_USUAL_BUCKET_MB = 25
_DTYPES = (torch.float32, torch.float64)


class DDPSync(GradientSync):
    """Averages the gradients of models in `DistributedDataParallel` wrappers.

    Attributes:
        uncovered: Parameters whose gradients no wrapper averages.
    """

    averages = _defers = _defers_any = True

    def __init__(self, shares_metrics: bool = False) -> None:
        super().__init__(shares_metrics=shares_metrics)
        self._numbers: dict[int, int] = {}  # by the ID of a wrapper with raysgd's hook: its number in messages
        # For each model whose gradients have been all-reduced completely since a second backward pass began, the ID of
        # one of its parameters.
        self._averaged: set[int] = set()
        self.uncovered: Sequence[torch.nn.Parameter] = ()

    # ------------------------------------------------------------------------------------ hooks on models

    def is_hooked(self, model: DistributedDataParallel) -> bool:
        """Return True if a wrapper has had raysgd's hook."""
        return id(model) in self._numbers

    def register(self, model: DistributedDataParallel, options: dict[str, Any], hook: Any = None) -> None:
        """Install raysgd's hook, which calls the user's hook if there is one.

        Args:
            model: Wrapper on which to install the hook.
            options: Options of the wrapper.
            hook: The user's hook, or None.

        Raises:
            ValueError: The user registered a hook on the model, and PyTorch allows only one. Or the user passed a hook
                that is not callable, or see `check_group`.
        """
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        check_group(model, options)
        number = self._numbers.setdefault(id(model), len(self._numbers) + 1)
        state, function = _hook_of_user(allreduce_hook if hook is None else hook)
        is_small = hook is None and _is_small(model, options)
        given = _Hook(self, f"model {number} exchanged gradients", is_small, partial(function, state))
        try:
            model.register_comm_hook(given, _exchange)
        except RuntimeError as error:
            raise ValueError(
                "a model has a communication hook that you registered with `register_comm_hook`, so its "
                "gradients cannot be weighted by samples. Pass the hook to `register`, as in "
                '`ddp_args={"comm_hook": (state, hook)}`.'
            ) from error

    def _set_sync(self, is_now: bool) -> None:
        for model in wrappers(self.models):  # as `DistributedDataParallel.no_sync` does
            model.require_backward_grad_sync = is_now

    def check(self) -> None:
        super().check()
        if any(parameter.requires_grad for parameter in self.uncovered):
            raise ValueError(
                "Parameters were unfrozen (`requires_grad=True`) since `setup` or the last `self.rewrap()`, and their "
                "gradients were not averaged over the workers. Call `self.rewrap()` after you unfreeze parameters, "
                "before the next batch is drawn."
            )

    # ------------------------------------------------------------------------------------ in a backward pass

    def average_bucket(self, hook: "_Hook", bucket: Any) -> Any:
        """Scale the gradients of a bucket, then average them with the user's hook, over the mesh, or with PyTorch.

        Returns:
            A future of the average.
        """
        leg, gradients, is_last = self.leg, bucket.buffer(), bucket.is_last()
        if is_last:
            self._averaged.add(id(bucket.parameters()[0]))
            leg.note_all_reduce(hook.work)
        group = mesh_group() if hook.is_small else None
        if group is not None and group.is_quick_for(gradients.nbytes):
            return self._average_at_once(group, gradients, is_last)
        leg.multiply(gradients)
        with leg.record.noting_lost_connections():
            future = _tracked(hook.all_reduce(bucket), leg, is_last)
            if is_last:
                try:
                    leg.send_rows()
                except MeshBroken as error:
                    # After a `MeshBroken`, the library shuts down the mesh but not gloo's connections. Other ranks may
                    # be waiting on gloo's connections, so raise an error after which both are shut down.
                    raise DistNetworkError(str(error)) from None
        return future

    def _average_at_once(self, group: Group, gradients: torch.Tensor, is_last: bool) -> Any:
        """Average the gradients of a bucket over the mesh, and return them in a completed future.

        With the first bucket, this rank also sends the batch's items, if it counts by items. With the last bucket, it
        also sends its metrics, once per optimizer step.
        """
        leg, numbers = self.leg, gradients.numpy()
        items = leg.multiply(gradients, may_send=True)
        own = np.array([] if items is None else [items.own], np.float64).view(np.uint8)
        rows = leg.due_rows() if is_last else None
        with leg.record.noting_lost_connections(), leg.ledger.exchanging(group):
            if items is None and rows is None:
                group.add_up(numbers)
            else:
                row = _NO_ROW if rows is None else rows.row_to_send()
                received = group.add_up_with(numbers, np.concatenate((own, row)))
                if items is not None:
                    items.learn(each[: len(own)].view(np.float64).item() for each in received)
                if rows is not None:
                    rows.take_rows([each[len(own) :] for each in received])
        if is_last:
            leg.record.note_outcome()
        return completed(gradients.div_(float(group.size) if items is None else items.divisor()))

    # ------------------------------------------------------------------------------------ after a backward pass

    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return
        self.leg.note_all_reduce()
        counts = torch.tensor([each.grad is not None for each in trained], dtype=torch.float64, device=reachable())
        with self.leg.record.noting_lost_connections():
            all_sum(counts)
            used = [parameter for parameter, count in zip(trained, counts.tolist(), strict=True) if count]
            for parameter in used:
                if parameter.grad is None:  # another rank has a gradient, so this rank contributes zeros
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(self.num_ranks)
        if self.waits:
            self.leg.record.wait()

    def backward_pass(self, parameters: Iterable[torch.Tensor], is_second: bool) -> Pass:
        return self._second_pass(parameters) if is_second else _NOTHING

    @contextmanager
    def _second_pass(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Run a second backward pass of the same batch in the `with` block, then average the gradients over the ranks.

        `DistributedDataParallel` averages gradients only once after each forward pass, so it does not always average
        the gradients of a second backward pass. If it did not, this method averages the sums of old and new gradients.
        The old gradients are already the same on all ranks, so averaging does not change their part of the sum. With
        gradient accumulation, gradients are averaged only in the last batch of a step.
        """
        self._averaged.clear()
        yield
        if self.leg.plan.ends_step:
            models = [{*map(id, each.parameters())} for each in wrappers(self.models)]
            done = set().union(*(ids for ids in models if ids & self._averaged))
            self.average([parameter for parameter in parameters if id(parameter) not in done])


@dataclass(frozen=True, eq=False)
class _Hook:
    """The state of raysgd's communication hook for one model.

    PyTorch stores this object in the model's wrapper. A deep copy of the wrapper shares the object, and a pickle of the
    wrapper contains an empty `_Hook` instead. Neither matters, because copies are not trained.

    Attributes:
        sync: Averages the gradients.
        work: Name under which the `FlightRecorder` records the all-reduce of this model's gradients.
        is_small: True to send gradients over the mesh instead of gloo if possible.
        all_reduce: All-reduces a bucket: the user's hook, or PyTorch's all-reduce.
    """

    sync: Any = None
    work: str = ""
    is_small: bool = False
    all_reduce: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def _exchange(state: _Hook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average the gradients of a bucket. PyTorch calls this hook for each bucket, and waits for the returned future."""
    return state.sync.average_bucket(state, bucket)


def wrappers(models: Iterable[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Return those models that are `DistributedDataParallel` wrappers."""
    return [model for model in models if isinstance(model, DistributedDataParallel)]


def check_group(model: DistributedDataParallel, options: dict[str, Any]) -> None:
    """Raise a `ValueError` if the user wrapped a model with a `process_group`."""
    # A process group that the user created would be invalid after a failure, because all ranks then join a new group.
    if options.get("process_group") is not None or model.process_group is not dist.group.WORLD:
        raise ValueError(
            "A model is wrapped with a `process_group`, but gradients are averaged over all workers: omit it. To "
            'average over other groups, pass `TorchTrainer(strategy="none")` and wrap the model yourself.'
        )


def _tracked(future: Any, leg: Leg, is_last: bool) -> Any:
    """Record how a running all-reduce ends. Return a future that completes or fails when the all-reduce does.

    An all-reduce may end after its group has. It is therefore recorded for its own step.

    Args:
        future: Future of the all-reduce.
        leg: Tracks the current step.
        is_last: True if this is the last all-reduce in the backward pass of a model.
    """
    record, ledger = leg.record, leg.ledger
    if is_last:
        record.note_outcome()
    # The last all-reduce starts when the backward pass has computed all gradients. From then on, this rank only waits,
    # so this time is measured as communication.
    is_awaited = is_last and ledger.begin_exchange()

    def received(future: Any) -> Any:
        with record.noting_lost_connections():
            gradients = future.value()
        if is_awaited:
            ledger.end_exchange()
        return gradients

    return future.then(received)  # the backward pass waits for the returned future, and thus for the callback


def completed(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future for gradients that are already averaged. A communication hook must return a future."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def _is_small(model: DistributedDataParallel, options: dict[str, Any]) -> bool:
    """Return True if a model's gradients can be sent over the mesh, and gloo would have no advantage.

    The advantage of gloo is that its threads send a bucket while the backward pass computes the next bucket. This saves
    little time if all gradients fit into two buckets.
    """
    most = _FIRST_BUCKET_BYTES + (options.get("bucket_cap_mb") or _USUAL_BUCKET_MB) * 2**20
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (
        not any(getattr(module, "sparse", False) for module in model.modules())
        and all(each.device.type == "cpu" and each.dtype in _DTYPES for each in parameters)
        and sum(each.nbytes for each in parameters) <= most
    )


def _hook_of_user(hook: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the state and the function of a communication hook that the user passed to `register`.

    Args:
        hook: A function, whose state is None, or a tuple `(state, function)`.

    Raises:
        ValueError: The function is not callable.
    """
    state, function = hook if isinstance(hook, tuple) else (None, hook)
    if not callable(function):
        raise ValueError(
            f"`ddp_args={{'{COMM_HOOK}': {hook!r}}}`: need a communication hook of PyTorch, or a tuple of the state "
            "that it is called with and the hook."
        )
    return state, function


def has_state(hook: Any) -> bool:
    """Return True if a user's hook may store state between calls, such as a process group or a counter."""
    if hook is None:
        return False
    state, function = _hook_of_user(hook)
    return state is not None or not isinstance(function, FunctionType)
