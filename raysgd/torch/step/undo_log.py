"""The undo log: what a batch may change, as it was before the batch.

A batch may step several optimizers, or move weights for a second backward pass. If a rank is lost in the middle of it,
the state of the others belongs to no step. With the log they go back to the beginning of the batch, and repeat it. What
forward passes change by themselves, the running statistics of batch norms, would count twice in the repetition of any
batch. Why: ADR 120.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.lr_scheduler import LRScheduler

from raysgd.engine.shared.time_spent import UNDO
from raysgd.messages.recovery import Undo
from raysgd.torch.objects.precision import Precision
from raysgd.torch.objects.rng import GeneratorCopies
from raysgd.torch.step.own_steps import tells_of_steps
from raysgd.torch.step.tensor_copies import PooledCopies, TensorCopies
from raysgd.worker.ledger import Ledger
from raysgd.worker.state.putting_back import StateNotes
from raysgd.worker.state.time_budget import TimeBudget

_SHARE, _LEAST_S = 0.02, 60e-6
_IN_STATES = frozenset((torch.Tensor, type(None)))
_OPEN = (LRScheduler, Precision, torch.amp.GradScaler, torch.optim.Optimizer)


class UndoLog:
    """Copies of what a batch changes, taken before it does.

    Args:
        models: What is trained, without wrappers.
        optimizers: What trains it.
        others: What else has a state that a batch may change, such as schedulers.
        followers: Returns what is called when an optimizer steps.
        mode: See `Recovery`.
        may_tear: Whether a batch may change models and need the other ranks after that.
        has_changed: Returns whether this batch has changed a model so far.
        ledger: Where the time is booked.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Any],
        others: Iterable[Any],
        followers: Callable[[], Iterable[Any]],
        mode: Undo,
        may_tear: bool,
        has_changed: Callable[[], bool],
        ledger: Ledger | None = None,
    ) -> None:
        self._models, self._optimizers = models, optimizers
        self._mode, self._may_tear = mode, may_tear and all(map(tells_of_steps, optimizers))
        self._has_changed, self._ledger = has_changed, ledger or Ledger()
        self._noted_at_begin = [*others, *filter(_has_another_inside, optimizers)]
        self._followers = followers
        self._budget = TimeBudget(_SHARE, _LEAST_S, partial(self._ledger.seconds_of, UNDO))
        self._pool = PooledCopies()
        self._of_optimizers: dict[int, tuple[list[Any], TensorCopies, list[Callable[[], object]]]] = {}  # by identity
        self._copies_all = self._may_tear
        self._is_torn = self._may_tear and mode is True  # an exchange was seen to follow a change
        self._most_exchanges: int | None = None  # in a batch
        self._is_used = False
        self._parameters: Sequence[torch.Tensor] = []
        self._buffers: Sequence[torch.Tensor] = []
        self._statistics: Sequence[torch.Tensor] = []
        self._apart: frozenset[int] = frozenset()
        self._copies = TensorCopies([], [])
        self._generators = GeneratorCopies()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._undos: list[Callable[[], object]] = []
        self._is_open = self._is_whole = False
        self._num_exchanges = 0
        self._noted: set[int] = set()

    def open_call(self, is_of_use: bool) -> None:
        """Begin a call.

        Args:
            is_of_use: Whether a loss can be followed by a repetition of the batch.
        """
        self._begin_anew()
        self._budget.pause()
        self._is_used = is_of_use and self._mode is not False
        parts = self._models if self._is_used else []
        parameters = [each for part in parts for each in part.parameters()]
        buffers = [buffer for part in parts for buffer in part.buffers()]
        if not (_are_same(parameters, self._parameters) and _are_same(buffers, self._buffers)):
            self._parameters, self._buffers = parameters, buffers
            self._apart = frozenset(map(id, [*parameters, *self._optimizers]))
            norms = [module for part in parts for module in part.modules() if isinstance(module, _NormBase)]
            self._statistics = [each for norm in norms for each in norm.buffers(recurse=False)]
            self._choose()
        self._is_used = self._is_used and bool(self._copies or self._may_tear)

    def _choose(self) -> None:
        """Choose the tensors that are copied before each batch."""
        parameters = self._parameters if self._copies_all else []
        trained = [each for each in parameters if each.requires_grad]
        self._copies = TensorCopies([*self._statistics, *trained], [*self._buffers, *parameters])

    def begin(self, waiting: Iterable[Any]) -> None:
        """Copy what the batch that begins may change by itself. The one before was ended or undone.

        Args:
            waiting: Optimizers with gradients of batches before that they did not step with yet.
        """
        if not self._is_used or not (self._budget.has_some() or self._mode is True):
            return
        before, num_bytes = self._ledger.enter(UNDO), self._copies.num_bytes_new
        try:
            self._is_open = not num_bytes or self._has_room(3 * num_bytes)
            if self._is_open:
                self._take(waiting)
        finally:
            self._ledger.enter(before)
        if num_bytes:
            self._budget.forgive()  # getting memory takes longer

    def _has_room(self, num_bytes: int) -> bool:
        """Return whether there is memory for copies. On a GPU this is known when a first batch has had its own."""
        device = next((each.device for each in self._parameters), torch.device("cpu"))
        if device.type != "cuda":
            return True
        return self._most_exchanges is not None and num_bytes <= torch.cuda.mem_get_info(device)[0] // 2

    def _take(self, waiting: Iterable[Any]) -> None:
        self._copies.take()
        self._undos.append(self._copies.put_back)
        if not self._copies_all:
            return
        self._generators.take()
        self._pool.begin()
        flags = [each.requires_grad for each in self._parameters]
        self._undos += [self._generators.put_back, partial(_set_flags, self._parameters, flags)]
        self._note(self._noted_at_begin)
        self._undos.append(_refilling(list(_groups_of(self._optimizers))))
        for parameter in (each for group in _groups_of(waiting) for each in group["params"]):
            self._undos.append(self._pool.undo_of(parameter.grad) or _nothing)
            self._undos.append(partial(setattr, parameter, "grad", parameter.grad))
        self._is_whole = True

    def _note(self, owners: Iterable[Any]) -> None:
        new = {id(owner): owner for owner in owners if id(owner) not in self._noted}
        if not new:
            return
        self._noted.update(new)
        notes = StateNotes(set(self._apart), self._pool.undo_of, _may_hold_tensors)
        for owner in new.values():
            notes.take(owner)
        self._undos += notes.undos

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Copy what the step of an optimizer changes besides; the last one of a batch leaves nothing to undo."""
        if not self._is_whole:
            return
        is_last = self._most_exchanges is not None and self._num_exchanges >= self._most_exchanges
        self._is_whole = False  # also where there is no memory for a copy, and user code goes on
        if is_last and self._mode is not True:
            return
        before = self._ledger.enter(UNDO)
        try:
            self._note_optimizer(optimizer)
            self._note(self._followers())
            self._is_whole = True
        finally:
            self._ledger.enter(before)

    def _note_optimizer(self, optimizer: Any) -> None:
        """Copy what belongs to an optimizer; the tensors of PyTorch's own together, which takes a third of the time."""
        is_known = type(optimizer).__module__.startswith("torch.optim.") and id(optimizer) not in self._noted
        states = [optimizer.state, *optimizer.state.values()] if is_known else []
        values = [value for state in states[1:] for value in state.values()]
        if not is_known or not _IN_STATES.issuperset(map(type, values)):
            self._note([optimizer])
            return
        self._noted.add(id(optimizer))
        parts, copies, undos = self._of_optimizers.get(id(optimizer), ([], None, []))
        if copies is None or not _are_same(parts, [*states, *values]):
            copies = TensorCopies([each for each in values if each is not None], ())
            undos = [copies.put_back, _refilling(states)]
            self._of_optimizers[id(optimizer)] = [*states, *values], copies, undos
        copies.take()
        self._undos += [*undos, _refilling([vars(optimizer)])]

    def note_exchange(self) -> None:
        """Called when gradients are exchanged."""
        self._num_exchanges += 1
        if self._is_used and self._may_tear and not self._is_torn:
            self._is_torn = self._has_changed()

    def end(self) -> None:
        """The batch is complete."""
        if not self._is_used:
            return
        if self._is_open:
            self._generators.learn()
        if self._num_exchanges:
            self._most_exchanges = max(self._most_exchanges or 0, self._num_exchanges)
            if self._copies_all != self._is_torn:
                self._copies_all = self._is_torn
                self._choose()
        self._begin_anew()

    @property
    def can_undo(self) -> bool:
        """True if all that the batch may have changed was copied."""
        return self._is_whole and self._copies.are_complete

    def undo(self) -> bool:
        """Undo what the batch has changed, as far as that was copied; return whether that is all of it."""
        is_all = self.can_undo
        for undo in reversed(self._undos):
            undo()
        self._begin_anew()
        return is_all


def _has_another_inside(optimizer: Any) -> bool:
    """Return whether an optimizer may step without being asked to, as an object inside it."""
    return any(isinstance(each, torch.optim.Optimizer) for each in getattr(optimizer, "__dict__", {}).values())


def _are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


def _groups_of(optimizers: Iterable[Any]) -> Iterator[dict[str, Any]]:
    return (group for optimizer in optimizers for group in optimizer.param_groups)


def _may_hold_tensors(kind: type) -> bool:
    return issubclass(kind, _OPEN)


def _set_flags(parameters: Iterable[torch.Tensor], flags: Iterable[bool]) -> None:
    for parameter, flag in zip(parameters, flags, strict=True):
        parameter.requires_grad_(flag)


def _refilling(values: Sequence[dict[Any, Any]]) -> Callable[[], object]:
    """Return what gives dicts the content that they have now."""
    return partial(_refill, values, [*map(dict, values)])


def _refill(values: Iterable[dict[Any, Any]], contents: Iterable[dict[Any, Any]]) -> None:
    for value, content in zip(values, contents, strict=True):
        value.update(content)  # none is missing at any moment: another thread may read them
        for name in value.keys() - content.keys():
            del value[name]


def _nothing() -> None: ...
