"""`Strategy`: base class of the strategies, such as DDP, that keep the workers' models in sync.

The loss of a batch is the mean over its samples, and an all-reduce takes the unweighted mean of the ranks' gradients.
If the ranks' batches differ in size, that mean is not the mean over all samples. Therefore, a communication hook first
multiplies each rank's gradient by a weight proportional to the rank's number of samples (`Batch.weight`, nearly always
1.0). With gradient accumulation, a hook would get the sum of several batches' gradients. In this case, the library
weights the losses instead. This requires that the library, not user code, runs the backward pass. See
`raysgd.torch.parallel.scale`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from raysgd.core.connections.group import Group
from raysgd.core.connections.torch import is_connection_error, mesh_group, summation_beside
from raysgd.torch.objects.blocks import without_checkpointing
from raysgd.torch.objects.loading import load_model, load_optimizer
from raysgd.torch.parallel.leg import Leg, Share
from raysgd.torch.parallel.record import FlightRecorder
from raysgd.torch.parallel.scale import Items, Scale
from raysgd.trainer.worker.data.epoch_run import METRICS, EpochRun
from raysgd.trainer.worker.data.rank_rows import Gather, RowExchange
from raysgd.trainer.worker.step_loop import BatchPlan, StepRules

# A function that starts to sum a tensor of integers over the ranks, in place. It returns a function that waits for the
# sum.
Summation = Callable[[torch.Tensor], Callable[[], Any]]
Pass = AbstractContextManager[Any]  # wraps a backward pass


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy of a model.

    Modules may have attributes that are tensors in an autograd graph. `copy.deepcopy` alone would reject these.
    """
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in kept if not value.is_leaf})


class Strategy:
    """Base class of all strategies.

    It is also the strategy for `strategy="none"`, and for a single worker that no other workers can join.

    Args:
        has_others: True if there are other ranks, or if other ranks may join.
        tells_rows: True to send each rank's metrics (its row) to the other ranks in each step.

    Attributes:
        tells_rows: True to send each rank's metrics (its row) to the other ranks in each step.
        synchronizes: True if every optimizer step involves all ranks.
        has_others: True if there are other ranks, or if other ranks may join.
        is_sharded: True if each rank holds only a shard of each model, so that all ranks must take part to assemble a
            full state.
        leg: Tracks the current batch and step in the part of a training call that this worker group runs. Between
            calls, it is a `Leg` without batches.
        is_lost: Function that returns True if an exception means that a connection to another rank was lost.
        check_step: Function that raises if a step that has ended is invalid; None for no check.
        forward_context: Function that returns the context manager, such as autocast, for forward passes.
        shares_frozen: True if the other ranks copy rank 0's frozen parameters. False if each rank creates the same
            frozen parameters itself.
    """

    synchronizes = False
    is_sharded = False
    is_lost = staticmethod(is_connection_error)
    check_step: Callable[[], None] | None = None
    _defers = _defers_any = False  # whether gradients can wait for the last batch of a step; also those of user code

    def __init__(self, has_others: bool = True, tells_rows: bool = False) -> None:
        self.leg = Leg(StepRules(self.synchronizes), recorder=FlightRecorder() if self.synchronizes else None)
        self.tells_rows = tells_rows
        self._row_exchange: tuple[Gather, RowExchange] | None = None  # for the current worker group; None until needed
        self.has_others = has_others
        self.forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.shares_frozen = True
        self._left_out: list[torch.nn.Module] = []
        self._models: Sequence[torch.nn.Module] = ()

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        """Wrap a model if this strategy requires it. Return the model to call in training.

        Args:
            model: Model on this rank's device.
            device_ids: Argument of `DistributedDataParallel`.
            options: Further arguments of `DistributedDataParallel`.
        """
        return model

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Wrap an optimizer if this strategy requires it. Return the optimizer to use in training."""
        return optimizer

    def _leave_out(self, model: torch.nn.Module) -> torch.nn.Module:
        """Copy rank 0's values into a model without trainable parameters, and return the model without a wrapper."""
        take_from_first((*(model.parameters() if self.shares_frozen else ()), *model.buffers()))
        self._left_out.append(model)
        return model

    def _repeat_buffers(self, wrapped: Iterable[torch.nn.Module] = (), in_training: bool = False) -> None:
        """Copy rank 0's buffers of models to all ranks. In training, wrappers do this for wrapped models.

        Args:
            wrapped: Wrapped models whose buffers are copied in addition to those of unwrapped models.
            in_training: True to copy only the buffers of models that are in training mode.
        """
        for model in (*wrapped, *self._left_out):
            if model.training or not in_training:
                repeat_first(model.buffers())

    def rebind_optimizers(self, optimizers: Sequence[Any]) -> None:
        """If wrapping has replaced the models' parameters, replace them in the optimizers, too."""

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Install what averages gradients, on models that are wrapped by this strategy or by user code.

        Called after `setup`.
        """

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
        before, rules, self._models = self.leg, rules or StepRules(self.synchronizes), models
        self._set_sync(True)
        self.leg = Leg(
            rules,
            record=before.record,
            recorder=None if before.recorder is None else FlightRecorder(before.recorder.number + 1),
            checks_losses=may_run_backward and self.has_others,
            check=self.check_step,
            begin=self._opener(rules, may_run_backward) if may_defer else None,
            refresh=partial(self._repeat_buffers, in_training=True) if self._left_out else None,
            **options,
        )
        return self.leg

    def end_leg(self) -> None:
        """Replace `leg` with a `Leg` without batches, for user code that runs between two calls.

        Called at the end of each call, even if the call fails.
        """
        leg = self.leg
        self._set_sync(True)
        self.leg = Leg(StepRules(self.synchronizes), record=leg.record, recorder=leg.recorder, ledger=leg.ledger)

    def _opener(self, rules: StepRules, may_run_backward: bool) -> Callable[[BatchPlan], None] | None:
        """Return a function to call before each batch of a leg; None if there is nothing to do.

        In a step of several batches, the all-reduce waits for the last batch, if this strategy can let it wait.
        """
        defers = rules.has_several and (self._defers_any if may_run_backward else self._defers)
        return (lambda plan: self._set_sync(plan.sync_gradients)) if defers else None

    def _set_sync(self, is_now: bool) -> None:
        """Average gradients in backward passes from now on, or in a later one."""

    def rewrap(self, models: Sequence[torch.nn.Module], is_agreed: bool = False) -> None:
        """Start averaging the gradients of all parameters that are trainable now.

        All ranks must call this method together.

        Args:
            models: Wrapped models.
            is_agreed: True if all ranks are known to have the same weights and trainable parameters, so that nothing
                needs to be copied from rank 0.

        Raises:
            ValueError: A model now has trainable parameters but had none when it was registered, so it has no wrapper
                that could average its gradients.
        """
        for model in self._left_out:
            if trainable(model) and any(model is each for each in models):
                raise ValueError(
                    f"A model without trainable parameters when it was registered (`{type(model).__name__}`) now has "
                    "parameters with `requires_grad=True`, but their gradients are not averaged over the workers. "
                    "Freeze the model after `register` instead of before. A model that is registered with trainable "
                    "parameters may be frozen and unfrozen later."
                )

    def left_out_of(self, model: torch.nn.Module) -> Collection[str] | None:
        """Return the names of those parameters of a model that may differ between ranks; None if all may differ.

        Args:
            model: Model without its wrapper.
        """
        return None

    @property
    def obstacle(self) -> str | None:
        """Reason why training cannot continue in a new worker group after a failure, so that it must restart.

        None if training can continue.
        """
        return "the replicas are not kept in sync by `DistributedDataParallel`"

    def reform(self) -> None:
        """Adapt the models to the worker group that this process has joined. The model objects stay the same."""
        record, recorder = self.leg.record.in_next_group(), FlightRecorder() if self.synchronizes else None
        self.leg = Leg(StepRules(self.synchronizes), record=record, recorder=recorder)

    def sharing(self, run: EpochRun, size: int) -> Share | None:
        """Return the function that sends this rank's metrics to the other ranks in each step of a call.

        The metrics of a rank, called its row, are the sums as they will be after the step. Therefore, the metrics of
        the step's batches are added to the sums even before the backward pass, as pending values.

        Return None if there is no mesh to send them over. Called only if `tells_rows` is True.

        Args:
            run: State of the call. It has this rank's metrics, and stores the rows of all ranks.
            size: Number of ranks.
        """
        group = mesh_group()
        if group is None and size > 1:
            return None
        gather = _to_itself if group is None or size == 1 else group.gather
        name, latest = run.rows.name, self._row_exchange
        if latest is None or latest[0] != gather or latest[1].name != name:
            self._row_exchange = latest = gather, RowExchange(name, gather)
        exchange = latest[1].exchange
        return lambda gather: run.rows.note(run.num_completed, exchange({METRICS: run.meters.tally()}, gather))

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return dist.get_world_size() if self.synchronizes else 1

    def start_total(self, amount: Any) -> Callable[[], Any]:
        """Start to sum an amount, such as a number of labels, over the ranks whose gradients are averaged.

        Args:
            amount: This rank's amount: a number, or a one-element tensor on the device of the models.

        Returns:
            A function that waits for the sum and returns the sum. With NCCL, it returns a tensor, because reading the
            number would wait for the GPU.
        """
        if not self.synchronizes:
            return lambda: amount
        group, device = mesh_group(), reachable()
        if device is None:  # without NCCL, numbers are summed in host memory, whether an amount is on a GPU or not
            amount = float(amount)
        if group is not None:
            # Do not start a sum now, because the amount is usually sent together with the gradients. The returned
            # function sums the amounts if that has not happened.
            return partial(self._total_at_once, group, amount)
        numbers = torch.zeros(1, dtype=torch.float64, device=device) + amount
        record = self.leg.record
        with record.noting_losses(self.is_lost):
            wait = self._start_sum(numbers)

        @cache
        def total() -> Any:
            with record.noting_losses(self.is_lost):
                wait()
            return numbers.item() if numbers.device.type == "cpu" else numbers[0]

        return total

    def _start_sum(self, numbers: torch.Tensor) -> Callable[[], Any]:
        """Start to sum a tensor in the process group that all-reduces gradients. Return a function to wait for it."""
        work: Any = dist.all_reduce(numbers, async_op=True)
        # With `NCCL_BLOCKING_WAIT`, `Work.wait` would make the host wait for the GPU. A future's `wait` does not.
        return work.wait if numbers.is_cpu else work.get_future().wait

    def _total_at_once(self, group: Group, amount: float) -> float:
        numbers = np.array([amount], np.float64)
        with self.leg.record.noting_losses():
            group.add_up(numbers)
        return float(numbers[0])

    def multiply_by_weight(self, gradients: torch.Tensor, is_told: bool = False) -> Items | None:
        """Multiply this rank's gradients by their weight, in place, before they are sent to the other ranks.

        Args:
            gradients: Gradients of the running backward pass.
            is_told: True if the caller can send items along with the gradients.

        Returns:
            The items to send along with the gradients; None if the other ranks need none. The caller must divide the
            sum of the ranks' gradients by their `divisor`.
        """
        self.leg.see_pass()
        _, weight, items = self.leg.scale
        told = None if items is None or not is_told or items.is_known else items
        factor = weight if items is None else items.factor() if told is None else told.sent
        if isinstance(factor, torch.Tensor) or factor not in (0.0, 1.0):
            gradients.mul_(factor)
        elif not factor:
            gradients.zero_()  # the gradients of a batch that does not count may be NaN, which times 0 is NaN
        return told

    def average_deferred(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average gradients whose all-reduce was deferred to a later batch, if no later batch has followed."""

    def are_cleared(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return True if no parameter has a gradient from earlier batches to which the current batch can add."""
        return all(parameter.grad is None for parameter in parameters)

    def backward_pass(self, scale: Scale, parameters: Iterable[torch.Tensor], is_second: bool) -> Pass:
        """Return a context manager for a backward pass by the library.

        Args:
            scale: How the pass is weighted.
            parameters: Parameters that get gradients.
            is_second: True if the batch already had a backward pass.
        """
        is_own = self.synchronizes and (is_second or scale.items is not None)
        return self.leg.weighting(scale) if is_own else nullcontext()

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Prepare the models for evaluation in the `with` block. Ranks may have different numbers of batches."""
        yield

    def state_of(self, part: Any) -> dict[str, Any]:
        """Return the full state dict of a model or optimizer.

        If models are sharded, all ranks must call this method together, and only rank 0 gets the full state.
        """
        state: dict[str, Any] = part.state_dict()
        return state

    def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor that is sharded like `tensor`, with another dtype."""
        return torch.empty_like(tensor, dtype=dtype)

    @property
    def group_beside(self) -> Any:
        """Separate process group for collectives outside of training; None if models are not sharded.

        The first read is a collective operation, in which all ranks must take part.
        """
        return None

    def load_model(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Load a full state dict into a model."""
        load_model(model, state)

    def load_optimizer(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Load a full state dict into an optimizer."""
        load_optimizer(optimizer, state)

    def plain_model(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """Return a CPU copy of a model without the library's wrappers and hooks; None on ranks that get no copy."""
        return without_checkpointing(_copied(unwrap(model)).cpu())

    def all_sum(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place. All ranks must call this method together."""
        group = quick_group(tensor)
        if group is not None:
            group.add_up(tensor.numpy())
        else:
            dist.all_reduce(tensor)

    def summation(self) -> Summation:
        """Return a function that starts to sum a tensor over the ranks, in the background.

        The returned function itself returns a function that waits for the sum. All ranks must call this method
        together.
        """
        # Use a separate process group, because different ranks may start a sum and a gradient all-reduce in different
        # orders. In the default group, the wrong operations would then be matched.
        start_sum = summation_beside()
        return lambda numbers: start_sum(numbers).wait


def _to_itself(row: Any) -> list[Any]:
    return [row]  # a rank alone keeps its row, because others may join later


def quick_group(tensor: torch.Tensor) -> Group | None:
    """Return the mesh if it sums the tensor faster than PyTorch; otherwise None.

    The mesh consists of direct connections between the ranks.
    """
    group = mesh_group() if tensor.device.type == "cpu" else None
    return group if group is not None and group.is_quick_for(tensor.nbytes) else None


def reachable() -> torch.device | None:
    """Return the device of tensors that PyTorch's default process group can sum: the GPU, or None for the CPU."""
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else None


def trainable(model: torch.nn.Module) -> tuple[torch.nn.Parameter, ...]:
    """Return the parameters of a model that are not frozen."""
    return tuple(parameter for parameter in model.parameters() if parameter.requires_grad)


def take_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Check that the ranks' tensors have the same shapes, then copy rank 0's tensors to every rank.

    Raises:
        ValueError: The ranks' tensors differ in number or shape. Raised on all ranks.
    """
    present = list(_with_numbers(tensors))
    _check_shapes(present)
    repeat_first(present)


def _check_shapes(tensors: Sequence[torch.Tensor]) -> None:
    shapes = [tuple(each.shape) for each in tensors]
    digest = int.from_bytes(hashlib.sha256(repr(shapes).encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], device=tensors[0].device if tensors else reachable())
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if extremes.sum():
        raise ValueError(
            f"The workers created different models. On this worker, a model has {len(shapes)} parameters and buffers "
            f"with {sum(each.numel() for each in tensors):,} elements. Create the same model on every worker."
        )


def repeat_first(tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's tensors to every rank. The shapes must be the same on all ranks."""
    # Prefer the mesh, because a broadcast of gloo may hang when connections are closed.
    for tensor in _with_numbers(tensors):
        flat = tensor.contiguous().reshape(-1)
        at_once = quick_group(flat)
        if at_once is not None:
            at_once.from_first(flat.view(torch.uint8).numpy())
        else:
            dist.broadcast(flat.view(torch.uint8), 0)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.reshape(tensor.shape))


def _with_numbers(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (each.detach() for each in tensors if each.numel() and not each.is_meta and not is_lazy(each))


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model in a `DistributedDataParallel` or `DataParallel` wrapper, or the model itself.

    Other classes with an attribute `module` are not unwrapped, because they may do more than call the module.
    """
    return model.module if isinstance(model, DistributedDataParallel | torch.nn.DataParallel) else model
