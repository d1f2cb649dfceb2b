"""The way in which the replicas of a model are kept equal: one object, asked nowhere else. Here: what all ways share.

The loss of a batch is the mean over its samples, and the transport takes the plain mean of the ranks' gradients. Where
the ranks' batches differ in size the two do not fit together, so a rank's gradient is weighted by its share of the
samples first (`Batch.weight`, 1.0 nearly always): by a hook, on its way out. With gradient accumulation a hook would
see the sum of several batches, so there the library has to run the pass. `raysgd.torch.parallel.amounts` has the
arithmetic.
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

from raysgd.connections.group import Group
from raysgd.connections.torch import exchanges_at_once, summation_beside
from raysgd.torch.objects.blocks import without_checkpointing
from raysgd.torch.objects.loading import load_model, load_optimizer
from raysgd.torch.parallel.exchanges import Exchanges, gather_rows
from raysgd.torch.parallel.global_record import GlobalRecord
from raysgd.torch.parallel.leg import Leg, StepWatcher
from raysgd.torch.parallel.logical_shards import LogicalShards
from raysgd.worker.data.rank_rows import Gather, RowExchange

# Starts to add a tensor of integers up over the ranks, in place, and returns what waits for it.
Summation = Callable[[torch.Tensor], Callable[[], Any]]


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    """A copy; also of a model whose modules keep what they computed last, which PyTorch alone refuses to copy."""
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in kept if not value.is_leaf})


class NoParallel:
    """A single replica, or replicas that the user keeps equal.

    Args:
        has_others: Whether there are other ranks, whose loss would matter.
        tells_rows: Whether ranks tell each other in each step what they have measured.

    Attributes:
        synchronizes: Whether every step involves all ranks.
        has_others: Whether there are other ranks.
        is_sharded: Whether a rank holds a part of each model only, so that its whole state takes all ranks to read.
        leg: The part of a training call that this group runs; between two calls one that no call is in.
        exchanges: What became of the exchanges of that step.
        exchanged: The parameters, by identity, with which exchanges of gradients ended: one for each model.
        record: What was done in the call that all ranks have to do alike; None where nothing is.
        forward_context: The context of forward passes.
        shares_frozen: Whether all ranks take frozen parameters from the first one; else each has made the same.
    """

    synchronizes = False
    is_sharded = False

    def __init__(self, has_others: bool = True, tells_rows: bool = False) -> None:
        self.leg = Leg(is_global=self.synchronizes)
        self._tells_rows = tells_rows
        self._row_exchange: tuple[Gather, RowExchange] | None = None  # of this group, once it was asked for
        self.has_others = has_others
        self.exchanges = Exchanges()
        self.record = GlobalRecord() if self.synchronizes else None
        self.exchanged: set[int] = set()
        self.forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.shares_frozen = True
        self._left_out: list[torch.nn.Module] = []

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        """The model to call in training. `options` are those for `DistributedDataParallel`."""
        return model

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """The optimizer to use in training."""
        return optimizer

    def _leave_out(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make a model equal on all ranks that has nothing to train, and so no gradients to average."""
        take_from_first((*(model.parameters() if self.shares_frozen else ()), *model.buffers()))
        self._left_out.append(model)
        return model

    def _refresh_left_out(self, in_training: bool = False) -> None:
        """Give all ranks rank 0's buffers of models that have nothing to train; wrappers see to those of others."""
        for model in self._left_out:
            if model.training or not in_training:
                repeat_first(model.buffers())

    def rebind_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Make optimizers that were made before `wrap` step what the wrapped models train."""

    def begin_leg(
        self,
        models: Sequence[torch.nn.Module],
        may_run_backward: bool,
        window: int = 1,
        *,
        most_parts: int = 1,
        shards: LogicalShards | None = None,
        watcher: StepWatcher | None = None,
        may_defer: bool = True,
    ) -> Leg:
        """Begin a call of `train`, or go on with it in this group.

        Args:
            models: The wrapped models.
            may_run_backward: Whether user code may run backward passes itself. It may catch what they raise, too, so
                exchanges are looked at before a step counts.
            window: How many batches make an optimizer step; as the next three, it is for the `Leg`.
            most_parts: In how many batches a rank may take a global batch.
            shards: What keeps the gradients of logical shards.
            watcher: Is told of steps and exchanges.
            may_defer: Whether the exchange of gradients may wait for the last batch of a window.
        """
        leg = self.leg = Leg(window, most_parts=most_parts, shards=shards, is_global=self.synchronizes, watcher=watcher)
        leg.defer = self._deferrer(models, may_run_backward) if may_defer else None
        if leg.defer is not None:
            leg.defer(False)
        if self.record is not None:
            self.record = GlobalRecord(self.record.number + 1)
        if self._left_out:
            leg.refresh = partial(self._refresh_left_out, in_training=True)
        leg.check = self.exchanges.check if may_run_backward and self.has_others else None
        return leg

    def end_leg(self) -> None:
        """End it, in whatever way: what user code does between two calls is no step over the data."""
        if self.leg.defer is not None:
            self.leg.defer(False)
        self.leg = Leg(is_global=self.synchronizes)

    def _deferrer(self, models: Sequence[torch.nn.Module], may_run_backward: bool) -> Callable[[bool], None] | None:
        """What is told ahead of a batch whether the exchange of its gradients is put off; None for nothing."""
        return None

    def rewrap(self, models: Sequence[torch.nn.Module], is_agreed: bool = False) -> None:
        """Average gradients of all that the wrapped `models` train by now. All ranks do it at the same time.

        Args:
            models: The models.
            is_agreed: Whether it is known that they train the same on all ranks, so that no rank need ask.

        Raises:
            ValueError: That cannot be done.
        """
        for model in self._left_out:
            if trainable(model) and any(model is each for each in models):
                raise ValueError(
                    f"A model that had nothing to train when it was registered (`{type(model).__name__}`) has "
                    "parameters with `requires_grad=True` now, whose gradients are not averaged over the workers. "
                    "Freeze it after `register` instead of before: a model that is registered with something to train "
                    "may be frozen and unfrozen later."
                )

    def left_out_of(self, model: torch.nn.Module) -> Collection[str] | None:
        """Return the names of the parameters of a model, without its wrapper, that are not kept equal; None for all."""
        return None

    @property
    def obstacle(self) -> str | None:
        """The reason why the models cannot go on in a new group; None when they can."""
        return "the replicas are not kept equal by `DistributedDataParallel`"

    def reform(self) -> None:
        """Connect the models to the new group; they stay the same objects."""
        self.exchanges = self.exchanges.of_next_group()
        if self.record is not None:
            self.record = GlobalRecord()

    def row_exchange(self, name: str, size: int) -> RowExchange | None:
        """Return what moves rows between the ranks; None where they tell nothing.

        Args:
            name: What this rank is known by.
            size: How many ranks there are.
        """
        gather = gather_rows(size) if self._tells_rows else None
        if gather is None:
            return None
        if self._row_exchange is None or self._row_exchange[0] != gather:
            self._row_exchange = gather, RowExchange(name, gather)
        return self._row_exchange[1]

    @property
    def num_ranks(self) -> int:
        """Over how many ranks gradients are averaged."""
        return dist.get_world_size() if self.synchronizes else 1

    def start_total(self, amount: Any) -> Callable[[], Any]:
        """Start to add an amount up over these ranks; return what returns the sum, each time it is asked.

        Args:
            amount: A number, or a tensor of one element on the device of the models.

        Returns:
            What returns a number, or a tensor if the sum is on a GPU, so that nothing waits for it.
        """
        if not self.synchronizes:
            return lambda: amount
        group = exchanges_at_once()
        if group is not None and not isinstance(amount, torch.Tensor):  # mostly, gradients carry it
            return partial(self._total_at_once, group, amount)
        numbers = torch.zeros(1, dtype=torch.float64, device=reachable()) + amount
        with self.exchanges.noting():
            wait = self._start_sum(numbers)
        return cache(partial(self._total, wait, numbers))

    def _start_sum(self, numbers: torch.Tensor) -> Callable[[], Any]:
        """Start a sum in the group of the gradients, right before those of the same backward pass."""
        return dist.all_reduce(numbers, async_op=True).wait

    def _total_at_once(self, group: Group, amount: float) -> float:
        numbers = np.array([amount], np.float64)
        with self.exchanges.noting():
            group.add_up(numbers)
        return float(numbers[0])

    def _total(self, wait: Callable[[], Any], numbers: torch.Tensor) -> Any:
        with self.exchanges.noting():
            wait()
        return numbers.item() if numbers.device.type == "cpu" else numbers[0]

    def note_exchange(self, work: str) -> None:
        """Note that gradients are exchanged."""
        if self.record is not None:
            self.record.note(work)
        if self.leg.watcher is not None:
            self.leg.watcher.note_exchange()

    def exchange(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average gradients over the ranks whose exchange was put off for a batch that never came."""

    def are_cleared(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Tell whether no gradient of earlier batches is left to add to."""
        return all(parameter.grad is None for parameter in parameters)

    @contextmanager
    def further_pass(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside is a backward pass for these parameters that is not the first one of a batch, on a weighted loss."""
        with self.leg.weighting():
            yield

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """The context for evaluation, where ranks may have different numbers of batches."""
        yield

    def state_of(self, part: Any) -> dict[str, Any]:
        """The whole state of a model or an optimizer; where parts are sharded all ranks have to ask, for rank 0."""
        state: dict[str, Any] = part.state_dict()
        return state

    def part_of_state(self, part: Any) -> dict[str, Any]:
        """Return what this rank has of the state; where parts are sharded, with a part of each tensor."""
        state: dict[str, Any] = part.state_dict()
        return state

    def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Room for what this rank has of another tensor with this shape."""
        return torch.empty_like(tensor, dtype=dtype)

    @property
    def group_beside(self) -> Any:
        """A group for what is not training, where parts are sharded; all ranks have to ask."""
        return None

    def load_model(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Take over such a state of a model."""
        load_model(model, state)

    def load_optimizer(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Take over such a state of an optimizer."""
        load_optimizer(optimizer, state)

    def plain_model(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """A copy without anything that the library put around or into it, on the CPU; None on ranks without one."""
        return without_checkpointing(_copied(unwrap(model)).cpu())

    def all_sum(self, tensor: torch.Tensor) -> None:
        """Add a tensor up over all ranks, in place; every one of several ranks has to ask."""
        group = quick_group(tensor)
        if group is not None:
            group.add_up(tensor.numpy())
        else:
            dist.all_reduce(tensor)

    def summation(self) -> Summation:
        """A function that starts a sum of numbers over the ranks, beside the training, and returns how to wait for it.

        All ranks must ask for it at the same time.
        """
        # A separate group: on the default one these calls could overtake those of the backward pass.
        start_sum = summation_beside()
        return lambda numbers: start_sum(numbers).wait


def quick_group(tensor: torch.Tensor) -> Group | None:
    """Return what such a tensor is added up through; None where PyTorch is quicker."""
    group = exchanges_at_once() if tensor.device.type == "cpu" else None
    return group if group is not None and group.is_quick_for(tensor.nbytes) else None


def reachable() -> torch.device | None:
    """Return where numbers have to be that the default group of PyTorch adds up; None for the CPU."""
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else None


def trainable(model: torch.nn.Module) -> tuple[torch.nn.Parameter, ...]:
    """The parameters of a model that are not frozen."""
    return tuple(parameter for parameter in model.parameters() if parameter.requires_grad)


def take_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the numbers that the first one has, whatever their format.

    Raises:
        ValueError: The ranks' tensors differ in number or shape, which all ranks learn.
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
            f"The workers made different models: this one has a model of {len(shapes)} parameters and buffers with "
            f"{sum(each.numel() for each in tensors):,} numbers. Make the same model on every worker."
        )


def repeat_first(tensors: Iterable[torch.Tensor]) -> None:
    """Do the same where it is known that the tensors have one shape on all ranks."""
    # Not over gloo where that can be helped: its broadcast may hang where its connections are ended.
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
    """Return the model without a wrapper of PyTorch that calls it on data in parallel, which ours are, too.

    Any other module that holds one as `module` may compute something else, so it is a model.
    """
    return model.module if isinstance(model, DistributedDataParallel | torch.nn.DataParallel) else model
