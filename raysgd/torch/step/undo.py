"""Undo: what a batch may change is copied before the batch, and put back where the batch has to be repeated.

A worker that is lost breaks the exchange that the others are in, in the middle of their batch. Stock code has changed
buffers by then, and nothing else: its only exchange comes before its only step. User code may have done anything. So
the first batch of each call is copied whole and watched: where weights change, or an optimizer steps, before an
exchange, all later batches are copied, too. What was not copied and may have changed is never repeated; the call then
restarts from the snapshot.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from raysgd._private_names import require_names
from raysgd.engine.shared.time_spent import UNDO
from raysgd.torch.objects import rng
from raysgd.torch.objects.precision import Precision
from raysgd.worker.ledger import Ledger

logger = logging.getLogger(__name__)

_OPEN = (torch.optim.Optimizer, LRScheduler, Precision, torch.amp.GradScaler)


class Undo:
    """Copies what the batches of one rank may change, and puts it back.

    Args:
        models: The trained modules, without wrappers.
        optimizers: Their optimizers, which report their steps to `note_step`.
        others: Other objects that a batch may change, such as schedulers.
        followers: Returns the objects that change when an optimizer steps.
        copies: When everything is copied. True: before each batch. False: never, as in stock code; buffers are. None:
            before the first batch of a call, and from then on before each one if that batch shows that it is needed.
        ledger: Where the time of copies is booked.

    Attributes:
        copies_all: Whether everything is copied before each batch by now.
        is_whole: Whether everything was copied before this batch.
        num_exchanges: The exchanges of gradients in this batch.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Any],
        others: Sequence[Any] = (),
        followers: Callable[[], Iterable[Any]] = tuple,
        *,
        copies: bool | None,
        ledger: Ledger | None = None,
    ) -> None:
        self._models, self._optimizers, self._others, self._followers = models, optimizers, others, followers
        self.copies_all, self._watches = copies is True, copies is None
        self._ledger = ledger or Ledger()
        self._is_used = self._is_off = False
        self._copies = _Copies()
        self._parameters: list[torch.nn.Parameter] = []
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._frozen: list[torch.nn.Parameter] = []
        self._digests: list[torch.Tensor] = []  # of these
        self._moving: dict[int, torch.nn.Parameter] = {}  # those of them that changed in the first batch, by identity
        self._num_usual = math.inf  # exchanges of the first batch
        self._is_first = True
        self.forget()

    def forget(self) -> None:
        """Forget the batch, which is over or of no interest."""
        self._is_open = self._is_copied = self.is_whole = self._has_stepped = False
        self.num_exchanges = 0
        self._num_collectives: float | None = None  # of all ranks and kinds, where an optimizer stepped last
        self._places: list[tuple[dict[str, Any], str, torch.Tensor | None]] = []
        self._contents: list[tuple[Any, Any]] = []  # of dicts and lists
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def switch_off(self) -> None:
        """Copy nothing: a failure in the middle of a batch restarts the call from the snapshot."""
        self._is_off = True

    def open_call(self, is_used: bool = True) -> None:
        """Begin a call, or go on with one after a failure; without `is_used`, none of its batches could be repeated."""
        self.forget()
        self._is_used = is_used and not self._is_off
        self._is_first, self._num_usual = True, math.inf
        if not self._is_used:
            return
        self._parameters = [each for model in self._models for each in model.parameters()]
        modules = [module for model in self._models for module in model.modules()]
        require_names(torch.nn.Module(), "_buffers")
        require_names(torch, "_foreach_copy_")
        self._buffers = [(module._buffers, name) for module in modules for name in module._buffers]
        self._frozen = [] if self.copies_all else [each for each in self._parameters if not each.requires_grad]
        self._moving, self._digests = {}, digests_of(self._frozen)

    # ---------------------------------------------------------------------------------------------------- in a batch

    def begin_batch(self, waiting: Sequence[torch.Tensor] = ()) -> None:
        """Copy what the batch that begins may change.

        Args:
            waiting: Parameters with gradients of earlier batches that no optimizer has stepped with yet.
        """
        self._is_open = True
        if not self._is_used:
            return
        copies_all = self.copies_all or (self._watches and self._is_first) or bool(waiting)
        if not (copies_all or self._watches or self._buffers or self._moving):
            self._copies = _Copies()
            return
        before = self._ledger.enter(UNDO)
        try:
            self._take(waiting, copies_all)
        except (MemoryError, RuntimeError) as error:  # of PyTorch, without memory
            logger.warning("no memory to copy what a batch may change, so this worker stops copying: %s", error)
            self._copies = _Copies()
            self._is_off, self._is_used = True, False
        finally:
            self._ledger.enter(before)

    def _take(self, waiting: Sequence[torch.Tensor], copies_all: bool) -> None:
        self._places = [(buffers, name, _kept(buffers.get(name))) for buffers, name in self._buffers]
        tensors = [each for _, _, each in self._places if each is not None]
        seen = {*map(id, self._parameters)}
        if copies_all:
            self._gradients = [(parameter, _kept(parameter.grad)) for parameter in waiting]
            tensors += [each for _, each in self._gradients if each is not None]
            for each in (*self._optimizers, *self._others, *self._followers()):
                self._look_into(vars(each), seen, tensors)
            self._flags = [each.requires_grad for each in self._parameters]
            self._drawn = rng.capture()
        elif self._watches:  # learning rates and schedules are small, and user code may change them before an exchange
            seen |= {id(vars(each)) for each in self._optimizers}
            for content in (*(each.param_groups for each in self._optimizers), *map(vars, self._others)):
                self._look_into(content, seen, tensors)
        parameters = self._parameters if copies_all else [*self._moving.values()]
        self._copies.take_copies([*parameters, *filter(_is_writable, tensors)])
        self._is_copied, self.is_whole = True, copies_all

    def _look_into(self, value: Any, seen: set[int], tensors: list[torch.Tensor]) -> None:
        """Note what containers hold, and objects of known kinds; collect the tensors in them."""
        value = vars(value) if isinstance(value, _OPEN) else value
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        if isinstance(value, dict | list):
            self._contents.append((value, value.copy()))
        if isinstance(value, dict | list | tuple):
            for each in value.values() if isinstance(value, dict) else value:
                self._look_into(each, seen, tensors)

    def note_exchange(self) -> None:
        """Called when gradients of a model are exchanged, at most once in each backward pass."""
        if not self._is_open:
            return
        self.num_exchanges += 1
        if not self._watches or not self._is_used or self.copies_all:
            return
        is_more = not self._is_first and self.num_exchanges > self._num_usual
        self.copies_all = self._has_stepped or is_more or (self._is_first and self._copies.differ(self._parameters))

    def note_step(self) -> None:
        """Called before an optimizer steps."""
        self._has_stepped = True
        if self._watches and self._is_used and not self.copies_all:
            self._num_collectives = _num_collectives()

    def note_return(self) -> None:
        """Called when user code is done with the batch; what is exchanged from here to its end is the library's."""
        if self._num_collectives is not None:
            self.copies_all = self.copies_all or _num_collectives() != self._num_collectives
        self._num_collectives = None

    def end_batch(self) -> None:
        """The batch is complete."""
        self.note_return()
        is_telling = self.num_exchanges > 0 or not self._watches
        if self._is_open and self._is_used and self._is_first and is_telling and not self.copies_all:
            self._end_first()
        self.forget()

    def _end_first(self) -> None:
        if self._watches and not self._has_stepped and self._copies.differ(self._parameters):  # it is not known when
            self.copies_all = True
        self._is_first, self._num_usual = False, self.num_exchanges
        before, self._digests = self._digests, digests_of(self._frozen)
        for each, *digests in zip(self._frozen, before, self._digests, strict=True):
            if not torch.equal(*digests):
                self._moving[id(each)] = each
        if not self.copies_all:
            self._copies = _Copies()  # the memory is free again

    # ------------------------------------------------------------------------------------------------- after a failure

    def can_put_back(self, has_broken: bool) -> bool:
        """Return whether the state is that before the batch, or can be made that one.

        Args:
            has_broken: Whether one of the exchanges that were noted has failed.
        """
        if not self._is_open or self.is_whole:
            return True
        if not self._is_used or self._has_stepped:
            return False
        if self._watches and self.num_exchanges - has_broken >= self._num_usual:
            return False  # user code was past what it does before its step
        pairs = zip(self._frozen, self._digests, strict=True)
        return all(id(each) in self._moving or torch.equal(_digest_of(each), digest) for each, digest in pairs)

    def put_back(self) -> None:
        """Put back what the batch has changed, where `can_put_back` says so."""
        for container, content in self._contents:
            if isinstance(container, list):
                container[:] = content
            else:
                container.update(content)  # nothing is missing at any moment: another thread may read it
                for name in container.keys() - content.keys():
                    del container[name]
        for buffers, name, value in self._places:
            buffers[name] = value
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self.is_whole:
            for parameter, flag in zip(self._parameters, self._flags, strict=True):
                parameter.requires_grad_(flag)
            rng.restore(self._drawn)
        if self._is_copied:
            self._copies.put_back()
        self.forget()


class _Copies:
    """Copies of tensors, on their devices, in memory that is used again."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []  # where the content of each tensor is, which `.data = ...` changes
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def take_copies(self, tensors: list[torch.Tensor]) -> None:
        """Copy tensors, and let go of the memory that this does not need."""
        for index, tensor in enumerate(tensors):
            kinds = [(each.shape, each.dtype, each.device) for each in (tensor, *self._copies[index : index + 1])]
            if len({*kinds}) > 1 or len(kinds) == 1:
                self._copies[index : index + 1] = [torch.empty_like(tensor, requires_grad=False)]
        del self._copies[len(tensors) :]
        _copy(self._copies, tensors)
        self._tensors, self._places = tensors, [each.data for each in tensors]

    def differ(self, first: Sequence[torch.Tensor]) -> bool:
        """Return whether the first of the tensors have other numbers than when they were copied."""
        pairs = zip(first, self._copies, strict=False)
        return not all(torch.equal(each, copy) for each, copy in pairs)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the tensors the numbers that they had."""
        for tensor, place in zip(self._tensors, self._places, strict=True):
            if tensor.data_ptr() != place.data_ptr() or tensor.shape != place.shape:
                tensor.data = place
        _copy(self._tensors, self._copies)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors: on a GPU, those of a kind together."""
    kinds: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kinds.setdefault((target.device, None if target.is_cpu else target.dtype), []).append((target, source))
    for pairs in kinds.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _kept(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return what to put back in the place of a tensor: itself, or a copy of a sparse one."""
    return tensor.clone() if tensor is not None and tensor.layout != torch.strided else tensor


def _is_writable(tensor: torch.Tensor) -> bool:
    """Return whether numbers can be written into a tensor: not into a sparse or an expanded one."""
    if tensor.layout != torch.strided:
        return False
    return all(stride > 0 or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def digests_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a digest of each tensor, to see later whether it has changed."""
    return [*map(_digest_of, tensors)]


def _digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums of the bits of a tensor, which others than equal numbers hardly have: one sum for each row."""
    bits = tensor.detach()
    if bits.is_complex():
        bits = torch.view_as_real(bits).flatten(-2 if bits.ndim else 0)
    size, kinds = bits.element_size(), {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    has_words = bits.ndim > 0 and bits.is_contiguous() and not bits.storage_offset() * size % 8
    kind = torch.int64 if has_words and not bits.shape[-1] * size % 8 else kinds[size]  # sums of words are faster
    return bits.view(kind).sum(-1, dtype=torch.int64)


def _num_collectives() -> float:
    """Return how many collectives this process has begun in the group of all ranks, those of user code with them.

    NaN, which differs from itself, where PyTorch does not say.
    """
    group: Any = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None  # stubs lack a method
    return 0 if group is None else getattr(group, "_get_sequence_number_for_group", lambda: math.nan)()


# ------------------------------------------------------------------------------------------------------------- memory


def lacks_memory(models: Sequence[torch.nn.Module], num_sharing: int) -> str | None:
    """Return what copies of everything take, in words, if that is more than half of the free memory.

    Args:
        models: The trained modules, with optimizers that hold as much as Adam.
        num_sharing: How many workers share the memory of the node.
    """
    tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
    num_bytes = sum(each.nbytes * (3 if each.requires_grad else 1) for each in tensors)
    free = _free_bytes(next((each.device for each in tensors), torch.device("cpu")), num_sharing)
    if free is None or num_bytes <= free // 2:
        return None
    return f"{num_bytes / 2**20:.0f} of {free / 2**20:.0f} MiB that are free"


def _free_bytes(device: torch.device, num_sharing: int) -> int | None:
    """Return the free memory of a GPU, or this worker's part of that of the node; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        words = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")[2].split(maxsplit=1)
        free = int(words[0]) * 1024
    except (OSError, IndexError):  # not Linux
        return None
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    with suppress(OSError, ValueError):  # without a container, or without a limit
        free = min(free, int(limit.read_text(encoding="ascii")) - int(used.read_text(encoding="ascii")))
    return free // num_sharing
