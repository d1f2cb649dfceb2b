"""Explains mistakes for which PyTorch raises unclear errors, and detects mistakes that would crash or hang a process.

Advice is added to the message of known PyTorch exceptions. A global batch, the batch of all ranks together, may be
split into shares of different sizes. With gloo, an all-gather of such shares in user code would crash a rank's process;
with NCCL, it would wait forever. Therefore, all-gathers compare the sizes of the ranks' tensors first, and raise if the
sizes differ. If a share in an epoch is too small for a batch norm to train on, the epoch is rejected when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import BatchNorm1d, Module, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.private_names import require_names
from raysgd.torch.data.sampling import PassPlan
from raysgd.torch.parallel.leg import Leg

_UNUSED = "Expected to have finished reduction in the prior iteration"
_DTYPES = re.compile("dtype|scalar type|Input type", re.IGNORECASE)
_SINGLE = "Expected more than 1 value per channel when training"
_MOST_NAMES = 5
_WORDS = re.compile(r"[a-z]+")
_FLOAT64 = (
    "Double is float64, the default of NumPy, but models use Float, which is float32. Convert the data: "
    '`array.astype("float32")`, or `tensor.float()`.'
)


@contextmanager
def with_advice(models: Iterable[torch.nn.Module], divided: Leg | None = None) -> Iterator[None]:
    """Add advice to the message if the `with` block raises a known PyTorch exception, then raise the same exception.

    Args:
        models: Models that are trained.
        divided: The `Leg`, which tracks the current batch. None if batches are not shares of global batches.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if _UNUSED in str(error):
            error.args = (f"{_of_unused_parameters(models)}\n\nPyTorch says: {error}",)
        elif _SINGLE in str(error) and divided is not None and divided.plan.num_samples in (0, 1):
            error.args = (f"{SINGLE_SAMPLE}\n\nPyTorch says: {error}",)
        elif _DTYPES.search(str(error)) and {"double", "float"} <= {*_WORDS.findall(str(error).lower())}:
            error.args = (f"{error}. {_FLOAT64}",)
        raise
    except AttributeError as error:
        name = error.name or ""
        if isinstance(error.obj, DistributedDataParallel) and hasattr(error.obj.module, name):
            error.args = (_of_a_wrapper(type(error.obj.module).__name__, name),)
        raise


def _of_a_wrapper(kind: str, name: str) -> str:
    return (
        f"`{name}` belongs to your `{kind}`, but `register` returned its wrapper, `DistributedDataParallel`, because "
        f"`{kind}` has parameters and there are several workers. Keep the object itself before `register`, `self.own = "
        f"{kind}(...)`, and write `self.own.{name}`."
    )


def _of_unused_parameters(models: Iterable[torch.nn.Module]) -> str:
    names = [
        name.removeprefix("module.")
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    which = f" ({', '.join(f'`{name}`' for name in names[:_MOST_NAMES])}{more})" if names else ""
    return (
        f"Some parameters{which} took no part in the loss of a batch, so the workers wait for their gradients. If they "
        "take part in other batches, pass `register(ddp_args={'find_unused_parameters': True})`. If they are never "
        "trained, call `parameter.requires_grad_(False)` on them before `register`."
    )


SINGLE_SAMPLE = (
    "A batch norm cannot train on a single sample, but a worker would get only one: the global batch has one sample, "
    "or the batches of a worker have two at most. Pass `drop_last=True` to the train loader, choose another batch size "
    "or `micro_batch_size` (at least 3), pass `sync_batchnorm=True` on GPUs, or use a norm that looks at each sample "
    "by itself, such as `GroupNorm`."
)

_NO_SAMPLE = (
    "`sync_batchnorm=True` needs a sample on each worker, but a worker would get none. Pass `drop_last=True` to "
    "the train loader, or choose a batch size of at least two samples for each worker."
)


def check_norms(models: Iterable[Module], plan: PassPlan) -> None:
    """Check that batch norms can train on every rank's share of each batch in the rest of an epoch.

    Only `BatchNorm1d` and `SyncBatchNorm` are checked. `BatchNorm2d` and `BatchNorm3d` can train on a single image,
    because it has many values for each channel.

    Args:
        models: Models that are trained.
        plan: Sizes of the remaining batches of the epoch.

    Raises:
        ValueError: With `BatchNorm1d`, a rank's share of a batch has a single sample. Or, with `SyncBatchNorm`, a
            rank's share has no sample.
    """
    in_training = [module for model in models for module in model.modules() if module.training]
    if any(isinstance(module, BatchNorm1d) for module in in_training) and plan.has_single_samples:
        raise ValueError(SINGLE_SAMPLE)
    if any(isinstance(module, SyncBatchNorm) for module in in_training) and plan.has_empty_shares:
        raise ValueError(_NO_SAMPLE)


_NAMES = ("allgather", "_allgather_base", "all_gather_single")


@contextmanager
def comparing_sizes(differ: Callable[[], bool]) -> Iterator[None]:
    """Make all-gathers in the `with` block compare the sizes of the ranks' tensors, and raise if the sizes differ.

    Args:
        differ: Function that returns True if the ranks' shares of the current batch differ in size. Tensors are
            compared only in this case. The function must return the same value on all ranks.
    """
    kept = {name: value for name, value in vars(dist.ProcessGroup).items() if name in _NAMES}
    if not kept:
        require_names(dist.ProcessGroup, *_NAMES)
    for name in kept:
        setattr(dist.ProcessGroup, name, partialmethod(_gather, getattr(dist.ProcessGroup, name), differ))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(dist.ProcessGroup, name, value)


def _gather(
    group: Any, method: Any, differ: Callable[[], bool], output: Any, given: Any, *more: Any, **options: Any
) -> Any:
    if differ():
        _compare(group, given[0] if isinstance(given, list) else given)
    return method(group, output, given, *more, **options)


def _compare(group: Any, own: torch.Tensor) -> None:
    sizes = torch.tensor([own.numel(), -own.numel()], device=own.device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=group)
    most, least = sizes.tolist()
    if most != -least:
        raise ValueError(
            f"The workers gather tensors of different sizes, from {-least} to {most} elements, because "
            "their shares of this global batch differ. PyTorch gathers only tensors of equal size. Pass "
            "`drop_last=True` to the train loader and a batch size that is a multiple of the number of workers, or pad "
            "the tensors to one size."
        )
