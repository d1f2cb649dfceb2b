"""Undoes a batch that a failure interrupted: copies the state that a batch may change, and restores it afterwards.

A lost worker breaks the other ranks' gradient all-reduce in the middle of their batch. By then, the default training
code has changed only the models' buffers, because its only all-reduce comes before its only optimizer step. Custom
training code may have changed any state. For custom code, all state is copied before the first batch of each call, and
what happens in this batch is observed. If weights change or an optimizer steps before an all-reduce, all state is also
copied before each later batch. A batch that may have changed state without a copy is never repeated. Instead, the call
restarts from the snapshot, the last state that the driver has.
"""

from __future__ import annotations

import enum
import logging
import math
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from raysgd.core.memory import ran_out
from raysgd.core.private_names import require_names
from raysgd.torch.objects import rng
from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.record import Saved, StepRecord
from raysgd.torch.parallel.tensors import BITS

logger = logging.getLogger(__name__)
Mode = Literal["never", "off", "buffers", "learn", "all"]


class _Watched:
    """Observations about the batches of a call, or about the batches since the worker group last changed.

    Args:
        models: Modules that are trained.
        watches_frozen: True to detect changes to frozen parameters. For example, user code may keep moving averages of
            weights in frozen parameters.
        unchanging: IDs of parameters that are known not to change.

    Attributes:
        parameters: Parameters of the models.
        buffers: For each buffer of the models: the dict that contains the buffer, and the buffer's name.
        frozen: Frozen parameters to check for changes.
        digests: Digest of each parameter in `frozen`, computed before the first batch, and again after it.
        moving: Frozen parameters that changed in the first batch, by ID.
        copied: Parameters that were copied before the latest batch.
        num_usual: Number of gradient all-reduces in the first batch; infinite until the first batch is complete.
        is_first: True until the first batch is complete.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], watches_frozen: bool, unchanging: Collection[int] = ()
    ) -> None:
        require_names(torch.nn.Module(), "_buffers")
        require_names(torch, "_foreach_copy_")
        self.parameters = [each for model in models for each in model.parameters()]
        modules = [module for model in models for module in model.modules()]
        self.buffers = [(module._buffers, name) for module in modules for name in module._buffers]
        frozen = [each for each in self.parameters if not each.requires_grad] if watches_frozen else []
        self.frozen = [each for each in frozen if id(each) not in unchanging]
        self.digests = digests_of(self.frozen)
        self.moving: dict[int, torch.nn.Parameter] = {}
        self.copied: Sequence[torch.nn.Parameter] = ()
        self.num_usual = math.inf
        self.is_first = True

    def end_first(self) -> None:
        """Record which frozen parameters the first batch has changed. Called at the end of the first batch."""
        before, self.digests = self.digests, digests_of(self.frozen)
        for each, *digests in zip(self.frozen, before, self.digests, strict=True):
            if not torch.equal(*digests):
                self.moving[id(each)] = each

    def are_unchanged(self) -> bool:
        """Return True if no frozen parameter has changed, except those that changed in the first batch."""
        pairs = zip(self.frozen, self.digests, strict=True)
        return all(id(each) in self.moving or torch.equal(digest_of(each), digest) for each, digest in pairs)


class Undo:
    """Copies the state that a batch on this rank may change, and restores it if a failure interrupts the batch.

    With gradient accumulation, a batch here consists of all batches of an optimizer step. A boundary is a point in time
    between two optimizer steps. What happens in a step is in a `StepRecord`, which the caller keeps.

    Args:
        models: Modules that are trained, without wrappers.
        optimizers: Optimizers of the modules. Their steps must be in the `StepRecord`.
        others: Other objects that a batch may change, such as schedulers.
        followers: Function that returns the callbacks' objects, such as averaged weights, that change when an optimizer
            steps.
        mode: See the attribute.
        keeps_gradients: True if a later step may use a batch's gradients.
        unchanging: IDs of parameters that no batch changes. They are not copied. The caller may remove IDs later.

    Attributes:
        mode: What is copied before each batch. "all": all state. "buffers": only buffers, and frozen parameters that
            batches change, which is enough for the default training code. "learn": all state before the first batch of
            a call; what happens in that batch decides what is copied before later batches. "off": nothing, so that a
            failure in a batch restarts the call. "never": nothing, because no batch is ever repeated in place.
        is_told_of_batches: True if `save` must be called before each batch. False if no batch is repeated and no
            gradients are kept.
        raises_lack: True if `save` raises if memory lacks, because smaller batches leave more of it.
    """

    raises_lack = False

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Any],
        others: Sequence[Any] = (),
        followers: Callable[[], Iterable[Any]] = tuple,
        *,
        mode: Mode,
        keeps_gradients: bool = False,
        unchanging: Collection[int] = (),
    ) -> None:
        self._unchanging = unchanging
        self._models, self._optimizers, self._others, self._followers = models, optimizers, others, followers
        self.mode = mode
        self._copies = TensorCopies()
        self._watched: _Watched | None = None  # None if a failure restarts the call instead of repeating the batch
        self._has_warned = False
        self._not_stepped: list[Any] = []  # optimizers whose `step` was not called in the last completed step
        self._keeps_gradients = keeps_gradients
        self.is_told_of_batches = keeps_gradients or mode != "never"

    def waiting_parameters(self, record: StepRecord | None = None) -> list[torch.Tensor]:
        """Return the parameters that have gradients with which no optimizer has stepped yet.

        The list is empty if no later step uses a batch's gradients.

        Args:
            record: The running step; None at a boundary.
        """
        if not self._keeps_gradients:
            return []
        optimizers = self._not_stepped if record is None or record.saved is None else self._without_step(record)
        return [each for each in parameters_of(optimizers) if each.grad is not None]

    def _without_step(self, record: StepRecord) -> list[Any]:
        """Return the optimizers that have not stepped since the last boundary."""
        return [each for each in self._optimizers if id(each) not in record.stepped]

    def note_restored(self) -> None:
        """Record that another state was loaded. No optimizer has stepped with the gradients that exist."""
        self._not_stepped = list(self._optimizers)

    @property
    def is_learning(self) -> bool:
        """True if what happens in a batch decides what is copied before later batches."""
        return self._watched is not None and self.mode == "learn"

    def switch_off(self) -> None:
        """Stop copying state. From now on, a failure in the middle of a batch restarts the call from the snapshot."""
        self.mode, self._watched = "off", None

    def copy_all(self) -> None:
        """Copy all state before each later batch, because a batch may change weights at any time."""
        if self.mode == "learn":
            self.mode = "all"

    def open_call(self, is_used: bool = True) -> None:
        """Prepare for the batches of a call, or for the remaining batches of a call after a failure.

        Args:
            is_used: False if batches of this call are not repeated after a failure, so that nothing is copied.
        """
        is_on = is_used and self.mode not in ("never", "off")
        self._watched = _Watched(self._models, self.mode != "all", self._unchanging) if is_on else None

    # ---------------------------------------------------------------------------------------------------- in a batch

    def save(self, copying: AbstractContextManager[None]) -> Saved:
        """Copy the state that the batch may change, before the batch begins.

        If there is not enough memory, log a warning and call `switch_off`, unless `raises_lack` is True.

        Args:
            copying: Context in which to copy, such as one that measures the time. Not used if nothing is copied.
        """
        waiting, watched = self.waiting_parameters(), self._watched
        saved = Saved(waiting)
        if watched is None:
            return saved
        learns = self.mode == "learn"
        copies_all = self.mode == "all" or (learns and watched.is_first) or bool(waiting)
        if not (copies_all or learns or watched.buffers or watched.moving):
            self._copies = TensorCopies()
            return saved
        try:
            with copying:
                self._take(saved, watched, copies_all)
        except (MemoryError, RuntimeError) as error:  # PyTorch raises `RuntimeError` if it cannot allocate memory
            if self.raises_lack and ran_out(error):
                self._copies = TensorCopies()
                raise
            logger.warning(
                "not enough memory to copy the state that a batch may change, so this worker stops copying. If a "
                "worker is lost in the middle of a batch, the call restarts from the snapshot. The error was: %s",
                error,
            )
            self._copies, saved = TensorCopies(), Saved(waiting)
            self.switch_off()
        return saved

    def _take(self, saved: Saved, watched: _Watched, copies_all: bool) -> None:
        buffers = [(owner, name, kept(owner.get(name))) for owner, name in watched.buffers]
        tensors = [each for _, _, each in buffers if each is not None]
        seen, contents, gradients = {*map(id, watched.parameters)}, list[tuple[Any, Any]](), list[tuple[Any, Any]]()
        if copies_all:
            gradients = [(parameter, kept(parameter.grad)) for parameter in saved.waiting]
            tensors += [each for _, each in gradients if each is not None]
            contents = [(each, vars(each)) for each in (*self._optimizers, *self._others, *self._followers())]
        elif self.mode == "learn":
            # Always copy the optimizers' hyperparameters, such as learning rates, and the schedulers' states. They are
            # small, and user code may change them before the first all-reduce of a batch.
            seen |= {id(vars(each)) for each in self._optimizers}
            contents = [(each, each.param_groups) for each in self._optimizers]
            contents += [(each, vars(each)) for each in self._others]
        objects = ObjectCopies(seen)
        saved.restore.append(objects.restore)
        for owner, content in contents:
            objects.copy(content)
            if objects.unknown is not None:
                self._note_unknown(saved, owner, objects.unknown)
                if self.mode == "all":
                    self.switch_off()
                    return
                break
        tensors += objects.tensors
        parameters = watched.parameters if copies_all else [*watched.moving.values()]
        if self._unchanging:
            parameters = [each for each in parameters if id(each) not in self._unchanging]
        watched.copied = parameters
        self._copies.take_copies([*parameters, *filter(is_writable, tensors)])
        saved.is_whole = copies_all and not saved.has_unknown
        saved.restore += [partial(owner.__setitem__, name, value) for owner, name, value in buffers]
        saved.restore += [partial(setattr, parameter, "grad", gradient) for parameter, gradient in gradients]
        if saved.is_whole:
            saved.restore += [partial(each.requires_grad_, each.requires_grad) for each in watched.parameters]
            saved.restore.append(partial(rng.restore, rng.capture()))
        saved.restore.append(self._copies.restore)

    def _note_unknown(self, saved: Saved, owner: Any, unknown: type) -> None:
        saved.has_unknown = True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "`%s` contains a `%s.%s`, whose state cannot be copied before a batch. If a worker is lost in the "
                "middle of a batch that may change it, the call restarts from the snapshot. A batch is repeated if "
                "such state is in containers, arrays, tensors, dataclasses or attributes. `Recovery(undo=False)` "
                "chooses this without the warning",
                type(owner).__name__,
                unknown.__module__,
                unknown.__qualname__,
            )

    def see_all_reduce(self, record: StepRecord) -> None:
        """Look at the step when a model's gradients are about to be all-reduced.

        If it learns, all state is copied before each later batch if this batch may have changed state before the
        all-reduce.
        """
        watched = self._watched
        if record.saved is None or watched is None or not self.is_learning:
            return
        is_more = not watched.is_first and record.num_all_reduces > watched.num_usual
        if record.stepped or is_more or (watched.is_first and self._copies.differ(watched.copied)):
            self.copy_all()

    def see_return(self, record: StepRecord) -> None:
        """When user code has finished a batch, check whether the code started collectives after an optimizer step.

        If it did, all state is copied before each later batch. Collectives after `see_return` come from the library.
        """
        if record.end_user_code():
            self.copy_all()

    def forget(self, record: StepRecord) -> None:
        """Record that a step is complete and can no longer be undone."""
        self._not_stepped = self._without_step(record)
        self.see_return(record)
        watched, learns = self._watched, self.mode == "learn"
        if watched is None or not watched.is_first or self.mode == "all":
            return
        if learns and not record.num_all_reduces:
            # A batch without an all-reduce does not show what user code does before one. Observe the next batch, too.
            return
        if learns and not record.stepped and self._copies.differ(watched.copied):
            # Parameters changed outside an optimizer step, so the code that changes them is unknown. It may run at any
            # time in a batch, also before an all-reduce that fails. Therefore, copy all parameters from now on.
            self.copy_all()
        watched.is_first, watched.num_usual = False, record.num_all_reduces
        watched.end_first()
        if self.mode in ("learn", "buffers"):
            self._copies = TensorCopies()  # free the memory of the copies

    # ------------------------------------------------------------------------------------------------- after a failure

    def can_restore(self, record: StepRecord) -> bool:
        """Return True if the state from before the step is unchanged, or if `restore` can restore it.

        If batches are not repeated, or if no batch has begun since the last boundary, only the optimizers matter. The
        method then returns True if none has stepped.
        """
        saved, watched = record.saved, self._watched
        if saved is None or self.mode == "never":
            return not record.stepped
        if saved.is_whole:
            return True
        if watched is None or saved.has_unknown or record.stepped:
            return False
        if self.mode != "buffers" and record.num_all_reduces - (record.error is not None) >= watched.num_usual:
            return False  # as many all-reduces as usual have succeeded, so user code may have changed weights
        return watched.are_unchanged()

    def restore(self, record: StepRecord) -> None:
        """Restore the state from before the step. Call this only if `can_restore` returns True.

        Gradients that the step has computed are discarded. Gradients from before the step are restored, if no optimizer
        had stepped with them.
        """
        saved = record.saved
        if saved is None and self.is_told_of_batches:
            return
        waiting = {*map(id, () if saved is None else saved.waiting)}
        for parameter in parameters_of(self._optimizers):
            if id(parameter) not in waiting:
                parameter.grad = None
        for restore in () if saved is None else saved.restore:
            restore()


def parameters_of(optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Return the parameters in the parameter groups of optimizers."""
    groups = (group for each in optimizers for group in getattr(each, "param_groups", ()))
    return (parameter for group in groups for parameter in group["params"])


class TensorCopies:
    """Copies tensors, on the tensors' devices, and restores their values. Each batch reuses the copies' memory."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._data: list[torch.Tensor] = []  # original `.data` of each tensor; user code may replace it
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def take_copies(self, tensors: list[torch.Tensor]) -> None:
        """Copy the tensors over the previous copies, and free the memory that is no longer needed."""
        for index, tensor in enumerate(tensors):
            kinds = [(each.shape, each.dtype, each.device) for each in (tensor, *self._copies[index : index + 1])]
            if len({*kinds}) > 1 or len(kinds) == 1:
                self._copies[index : index + 1] = [torch.empty_like(tensor, requires_grad=False)]
        del self._copies[len(tensors) :]
        _copy(self._copies, tensors)
        self._tensors, self._data = tensors, [each.data for each in tensors]

    def differ(self, first: Sequence[torch.Tensor]) -> bool:
        """Return True if any tensor in `first` has changed since the last `take_copies`.

        Args:
            first: The first elements of the list that was passed to `take_copies`.
        """
        pairs = zip(first, self._copies, strict=False)
        return not all(torch.equal(each, copy) for each, copy in pairs)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values of the copied tensors. If user code replaced a tensor's `data`, first undo this."""
        for tensor, data in zip(self._tensors, self._data, strict=True):
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
        _copy(self._tensors, self._copies)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy the values of `sources` to `targets`. On a GPU, tensors of the same dtype are copied together."""
    kinds: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kinds.setdefault((target.device, None if target.is_cpu else target.dtype), []).append((target, source))
    for pairs in kinds.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def kept(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor object to restore later: the tensor itself, or a copy if it is sparse."""
    return tensor.clone() if tensor is not None and tensor.layout != torch.strided else tensor


def is_writable(tensor: torch.Tensor) -> bool:
    """Return True if values can be written into a tensor, False if it is sparse or expanded."""
    if tensor.layout != torch.strided:
        return False
    return all(stride > 0 or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def digests_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a digest of each tensor, to detect changes later."""
    return [*map(digest_of, tensors)]


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of a tensor's rows, with its bits read as integers.

    Nearly any change of the tensor also changes one of the sums.
    """
    bits = tensor.detach()
    if bits.is_complex():
        bits = torch.view_as_real(bits).flatten(-2 if bits.ndim else 0)
    size = bits.element_size()
    has_words = bits.ndim > 0 and bits.is_contiguous() and not bits.storage_offset() * size % 8
    kind = torch.int64 if has_words and not bits.shape[-1] * size % 8 else BITS[size]  # summing 8-byte words is faster
    return bits.view(kind).sum(-1, dtype=torch.int64)


def lacks_memory(models: Sequence[torch.nn.Module], num_sharing: int, unchanging: Collection[int] = ()) -> str | None:
    """Return None if there is enough memory to copy all state; otherwise a description of the needed and free memory.

    There is enough if the copies need at most half of the free memory, or if the free memory is unknown.

    Args:
        models: Modules that are trained. Their optimizers are assumed to have as much state as Adam.
        num_sharing: Number of workers that share the node's memory.
        unchanging: IDs of parameters that are not copied.
    """
    of_models = (each for model in models for each in (*model.parameters(), *model.buffers()))
    tensors = [each for each in of_models if id(each) not in unchanging]
    num_bytes = sum(each.nbytes * (3 if each.requires_grad else 1) for each in tensors)
    free = _free_bytes(next((each.device for each in tensors), torch.device("cpu")), num_sharing)
    if free is None or num_bytes <= free // 2:
        return None
    return f"{num_bytes / 2**20:.0f} of {free / 2**20:.0f} MiB that are free"


def _free_bytes(device: torch.device, num_sharing: int) -> int | None:
    """Return the free bytes of a GPU or, for a CPU, this worker's part of the free host memory; None if unknown.

    In a container with a memory limit, the free host memory is at most what the limit leaves.

    Args:
        device: The GPU or CPU.
        num_sharing: Number of workers that share the node's memory.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        words = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")[2].split(maxsplit=1)
        free = int(words[0]) * 1024
    except (OSError, IndexError):  # only Linux has this file
        return None
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    with suppress(OSError, ValueError):  # raised if the process is not in a container with a memory limit
        free = min(free, int(limit.read_text(encoding="ascii")) - int(used.read_text(encoding="ascii")))
    return free // num_sharing


_OPEN = (torch.optim.Optimizer, LRScheduler, Precision, torch.amp.GradScaler, types.SimpleNamespace)
"""Classes whose state is in their attributes, although they say how they are pickled."""
_CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, range, frozenset, enum.Enum, np.generic, np.dtype, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, logging.Logger, weakref.ref),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)
"""Types of objects that do not change, or whose changes do not matter to training."""


class ObjectCopies:
    """Copies objects in optimizers, schedulers and callbacks, and collects the tensors in them.

    Copied are containers, NumPy arrays, random number generators, and objects whose whole state is in their attributes.

    Args:
        seen: IDs of objects to leave out.

    Attributes:
        tensors: The tensors in the objects. Their values are not copied here.
        unknown: Class of an object whose state cannot be copied, such as an open file or a lock. None if there is none.
    """

    def __init__(self, seen: set[int]) -> None:
        self._seen = seen
        self._restore: list[Callable[[], object]] = []
        self.tensors: list[torch.Tensor] = []
        self.unknown: type | None = None

    def copy(self, value: Any) -> None:
        """Copy a nested value."""
        if isinstance(value, _CONSTANT) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.nn.Module):
            self._copy_each([*value.parameters(), *value.buffers()])
        elif isinstance(value, _OPEN):
            self.copy(vars(value))
        elif isinstance(value, dict | list | set | deque):
            self._restore.append(partial(_refill, value, value.copy()))
            self._copy_each(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple):
            self._copy_each(value)
        elif isinstance(value, partial):
            self._copy_each([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            if value.flags.writeable:
                self._restore.append(partial(np.copyto, value, value.copy()))
        elif (restore := _restore_of_generator(value)) is not None:
            self._restore.append(restore)
        elif (attributes := _attributes_of(value)) is not None:
            self.copy(attributes)
        else:
            self.unknown = type(value)

    def _copy_each(self, values: Any) -> None:
        for each in values:
            self.copy(each)

    def restore(self) -> None:
        """Restore everything that was copied."""
        for restore in self._restore:
            restore()


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    elif isinstance(container, dict):
        for name, value in content.items():  # without clearing the dict first: another thread may be reading it
            container[name] = value
        for name in container.keys() - content.keys():
            del container[name]
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(content)


def _restore_of_generator(value: Any) -> Callable[[], object] | None:
    """Return a function that restores the present state of a random number generator; None for other objects."""
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object if they are its whole state. Return None for other objects.

    Objects of other kinds say how they are pickled, have slots, or are written in C, so that Python does not pickle
    them.
    """
    kind, methods = type(value), ("__reduce_ex__", "__reduce__", "__getstate__")
    if any(getattr(kind, name, None) is not getattr(object, name, None) for name in methods):
        return None
    if any(vars(each).get("__slots__") for each in kind.__mro__):
        return None
    try:
        value.__reduce_ex__(4)
    except TypeError:
        return None
    return getattr(value, "__dict__", {})
