"""Undoes a step that a failure interrupted: copies the state that a step may change, and restores it afterwards.

What has happened in the running step is in its `OpenStep`. A step is committed when the training code asks for the
next batch, or ends. From then on, it is never undone, and a new `OpenStep` begins. That of an interrupted step remains
until the step is undone.

A lost worker breaks the other ranks' gradient all-reduce in the middle of their batch. By then, the default training
code has changed only the models' buffers, because its only all-reduce comes before its only optimizer step. Custom
training code may have changed any state. For custom code, all state is copied before the first batch of each call, and
what happens in this batch is observed. If weights change or an optimizer steps before an all-reduce, all state is also
copied before each later batch. A batch that may have changed state without a copy is never repeated. Instead, the call
restarts from the snapshot, the last state that the driver has.
"""

from __future__ import annotations

import logging
import math
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError

from raysgd.core.connections.torch import is_connection_error, is_group_broken, wait_for_collectives
from raysgd.core.memory import ran_out
from raysgd.core.private_names import require_names
from raysgd.torch.objects import rng
from raysgd.torch.parallel.copies import ObjectCopies, TensorCopies, digest_of, is_writable, kept
from raysgd.trainer.messages.comparison import JointWork

logger = logging.getLogger(__name__)
Mode = Literal["never", "off", "buffers", "learn", "all"]
_NUM_MARKS = 32  # number of hashes to report, one per recent action; a rank further behind cannot be compared


class OpenStep:
    """A record of what has happened on this rank since the last commit, and the state from before.

    Values of tensors are not in this object; `TensorCopies` has copies of them.

    Attributes:
        error: The first exception of a lost connection in an all-reduce, even if user code has caught it. None if all
            connections are open, as far as is known.
        has_begun: True if a batch has begun since the last commit.
        waiting: Parameters that already had gradients when the step began, because no optimizer had stepped with these
            gradients yet.
        copied_all: True if all state was copied before the step.
        has_unknown: True if state that the step may change cannot be copied.
        restore: Functions that restore the state: objects, buffers, and the rest of what was copied.
        learner: The `Undo` if it learns from the step what to copy before later steps; None otherwise.
        num_all_reduces: Number of all-reduces of gradients. If the gradients of one backward pass of a model are sent
            in several all-reduces, only the last one counts.
        has_outcome: True if an all-reduce came through, or still runs and will report a lost connection.
        stepped: IDs of the optimizers that have started to step.
        num_collectives: Number of collectives that had started in PyTorch's default process group when an optimizer
            last started to step. None if no optimizer has stepped, or if the number is not needed.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.has_begun = self.copied_all = self.has_unknown = self.has_outcome = False
        self.waiting: Sequence[torch.Tensor] = ()
        self.restore: list[Callable[[], object]] = []
        self.learner: Undo | None = None
        self.num_all_reduces = 0
        self.stepped: set[int] = set()
        self.num_collectives: float | None = None
        self._awaited: float | None = None  # number of collectives that had started before the latest `wait`

    def note_all_reduce(self) -> None:
        """Record that a model's last gradients are about to be averaged."""
        self.num_all_reduces += 1
        if self.learner is not None:
            self.learner.see_all_reduce(self)

    @property
    def has_changed(self) -> bool:
        """True if an optimizer has started to step, without a copy of all state from before."""
        return bool(self.stepped) and not self.copied_all

    @contextmanager
    def noting_lost_connections(self, is_lost: Callable[[BaseException], bool] = is_connection_error) -> Iterator[None]:
        """Record the step's first connection error in the `with` block. Every exception is raised again."""
        try:
            yield
        except Exception as error:  # communication raises different classes of exceptions in each backend
            if is_lost(error):
                self.note_lost_connection(error)
            raise

    def note_lost_connection(self, error: BaseException) -> None:
        """Record that an all-reduce of the step failed because a connection was lost."""
        self.error = self.error or error

    def note_outcome(self) -> None:
        """Record that an all-reduce came through, or has started and will report a lost connection."""
        self.has_outcome = True

    def note_step(self, optimizer: Any) -> None:
        """Record that an optimizer starts to step."""
        self.stepped.add(id(optimizer))
        if self.learner is not None:
            self.num_collectives = _num_collectives()

    def wait(self) -> None:
        """Wait until the gradients are exchanged, and raise if that failed. Called before they are used in a step.

        Do not wait again before another collective has started.
        """
        number = _num_collectives()
        if number != self._awaited:
            with self.noting_lost_connections():
                wait_for_collectives()
            self._awaited = number

    def check(self) -> None:
        """Raise if the step's gradients were not averaged, though user code may have caught the exception.

        If a rank was lost after the all-reduces of the step, its gradients are the mean over all ranks.

        Raises:
            Exception: The first connection error. Its class depends on the backend.
            DistNetworkError: No all-reduce came through in the step, and a connection to another rank has closed.
        """
        if self.error is not None:
            raise self.error
        if not self.has_outcome and is_group_broken():
            raise DistNetworkError("the connection to another rank ended, and user code went on with the next batch")


def _num_collectives() -> float:
    """Return how many collectives the library and user code have started in PyTorch's default group in this process.

    Return NaN if this version of PyTorch does not count them. NaN differs from itself, so a caller that compares two
    results finds that they differ.
    """
    # The type is Any, because PyTorch's type stubs lack the method that is called below.
    group: Any = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return 0 if group is None else getattr(group, "_get_sequence_number_for_group", lambda: math.nan)()


class FlightRecorder:
    """Records this rank's all-reduces and steps in one call, to find ranks that do something else.

    If a rank calls more or fewer collectives than the other ranks, its calls are matched with the wrong calls on those
    ranks, or its last call waits forever. Collectives detect this only if the tensors' sizes differ. Therefore, each
    rank sends this record in the heartbeats of a call and with the call's result, and the driver compares the records.
    Any thread may read it.

    Args:
        number: Number of the call in this worker group, the same on all ranks. 0 before the first call, and if the
            ranks may differ; nothing is recorded then.

    Attributes:
        number: Number of the call in this worker group.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._changing = threading.Lock()
        self._is_open, self._is_over = number > 0, False
        self._counts: Counter[str] = Counter()
        self._marks = deque([0], _NUM_MARKS)

    def note(self, what: str) -> None:
        """Record that this rank starts an action. All ranks must start the same actions in the same order.

        Args:
            what: Name of the action, such as "gradients were exchanged".
        """
        with self._changing:
            if self._is_open:
                self._counts[what] += 1
                self._marks.append(zlib.crc32(what.encode(), self._marks[-1]))

    @property
    def work(self) -> JointWork | None:
        """The recorded actions, in the form that is sent to the driver; None before the worker group's first call."""
        with self._changing:
            if not self.number:
                return None
            return JointWork(dict(self._counts), tuple(self._marks), self._is_over, self.number)

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Record actions in the `with` block. If the block does not raise, mark the record as complete at its end."""
        try:
            yield
            self._is_over = True
        finally:
            self._is_open = False


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
        self.digests = [*map(digest_of, self.frozen)]
        self.moving: dict[int, torch.nn.Parameter] = {}
        self.copied: Sequence[torch.nn.Parameter] = ()
        self.num_usual = math.inf
        self.is_first = True

    def end_first(self) -> None:
        """Record which frozen parameters the first batch has changed. Called at the end of the first batch."""
        before, self.digests = self.digests, [*map(digest_of, self.frozen)]
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
    between two optimizer steps. What happens in a step is in an `OpenStep`, which the caller keeps.

    Args:
        models: Modules that are trained, without wrappers.
        optimizers: Optimizers of the modules. Their steps must be in the `OpenStep`.
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
        is_told_of_batches: True if `begin_step` must be called before each batch. False if no batch is repeated and no
            gradients are kept.
        raises_lack: True if `begin_step` raises if memory lacks, because smaller batches leave more of it.
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

    def waiting_parameters(self, record: OpenStep | None = None) -> list[torch.Tensor]:
        """Return the parameters that have gradients with which no optimizer has stepped yet.

        The list is empty if no later step uses a batch's gradients.

        Args:
            record: The running step; None at a boundary.
        """
        if not self._keeps_gradients:
            return []
        optimizers = self._without_step(record) if record is not None and record.has_begun else self._not_stepped
        return [each for each in parameters_of(optimizers) if each.grad is not None]

    def _without_step(self, record: OpenStep) -> list[Any]:
        """Return the optimizers that have not stepped since the last boundary."""
        return [each for each in self._optimizers if id(each) not in record.stepped]

    def note_loaded(self) -> None:
        """Record that another state was loaded. No optimizer has stepped with the gradients that exist."""
        self._not_stepped = list(self._optimizers)

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

    def begin_step(self, record: OpenStep, copying: AbstractContextManager[None]) -> None:
        """Copy the state that a step may change, before its first batch begins.

        If there is not enough memory, log a warning and call `switch_off`, unless `raises_lack` is True.

        Args:
            record: The step.
            copying: Context in which to copy, such as one that measures the time. Not used if nothing is copied.
        """
        waiting, watched = self.waiting_parameters(), self._watched
        record.has_begun, record.waiting, record.num_all_reduces = True, waiting, 0
        if watched is None:
            return
        learns = self.mode == "learn"
        record.learner = self if learns else None
        copies_all = self.mode == "all" or (learns and watched.is_first) or bool(waiting)
        if not (copies_all or learns or watched.buffers or watched.moving):
            self._copies = TensorCopies()
            return
        try:
            with copying:
                self._take(record, watched, copies_all)
        except (MemoryError, RuntimeError) as error:  # PyTorch raises `RuntimeError` if it cannot allocate memory
            self._copies = TensorCopies()
            record.copied_all, record.has_unknown, record.restore = False, False, []
            if self.raises_lack and ran_out(error):
                record.has_begun = False
                raise
            logger.warning(
                "not enough memory to copy the state that a batch may change, so this worker stops copying. If a "
                "worker is lost in the middle of a batch, the call restarts from the snapshot. The error was: %s",
                error,
            )
            self.switch_off()

    def _take(self, record: OpenStep, watched: _Watched, copies_all: bool) -> None:
        buffers = [(owner, name, kept(owner.get(name))) for owner, name in watched.buffers]
        tensors = [each for _, _, each in buffers if each is not None]
        seen, contents, gradients = {*map(id, watched.parameters)}, list[tuple[Any, Any]](), list[tuple[Any, Any]]()
        if copies_all:
            gradients = [(parameter, kept(parameter.grad)) for parameter in record.waiting]
            tensors += [each for _, each in gradients if each is not None]
            contents = [(each, vars(each)) for each in (*self._optimizers, *self._others, *self._followers())]
        elif self.mode == "learn":
            # Always copy the optimizers' hyperparameters, such as learning rates, and the schedulers' states. They are
            # small, and user code may change them before the first all-reduce of a batch.
            seen |= {id(vars(each)) for each in self._optimizers}
            contents = [(each, each.param_groups) for each in self._optimizers]
            contents += [(each, vars(each)) for each in self._others]
        objects = ObjectCopies(seen)
        record.restore.append(objects.restore)
        for owner, content in contents:
            objects.copy(content)
            if objects.unknown is not None:
                record.has_unknown = True
                self._warn_of_unknown(owner, objects.unknown)
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
        record.copied_all = copies_all and not record.has_unknown
        record.restore += [partial(owner.__setitem__, name, value) for owner, name, value in buffers]
        record.restore += [partial(setattr, parameter, "grad", gradient) for parameter, gradient in gradients]
        if record.copied_all:
            record.restore += [partial(each.requires_grad_, each.requires_grad) for each in watched.parameters]
            record.restore.append(partial(rng.restore, rng.capture()))
        record.restore.append(self._copies.restore)

    def _warn_of_unknown(self, owner: Any, unknown: type) -> None:
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

    def see_all_reduce(self, record: OpenStep) -> None:
        """Look at the step when a model's gradients are about to be all-reduced.

        If this batch may have changed state before the all-reduce, all state is copied before each later batch.
        """
        watched = self._watched
        if watched is None:
            return
        is_more = not watched.is_first and record.num_all_reduces > watched.num_usual
        if record.stepped or is_more or (watched.is_first and self._copies.differ(watched.copied)):
            self.copy_all()

    def see_return(self, record: OpenStep) -> None:
        """When user code has finished a batch, check whether the code started collectives after an optimizer step.

        If it did, all state is copied before each later batch. Collectives after `see_return` come from the library.
        """
        number, record.num_collectives = record.num_collectives, None
        if number is not None and number != _num_collectives():
            self.copy_all()

    def forget(self, record: OpenStep) -> None:
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

    def can_undo(self, record: OpenStep) -> bool:
        """Return True if the state from before the step is unchanged, or if `undo_step` can restore it.

        If batches are not repeated, or if no batch has begun since the last boundary, only the optimizers matter. The
        method then returns True if none has stepped.
        """
        watched = self._watched
        if record.has_changed or record.copied_all or not record.has_begun or self.mode == "never":
            return not record.has_changed
        if watched is None or record.has_unknown:
            return False
        if self.mode != "buffers" and record.num_all_reduces - (record.error is not None) >= watched.num_usual:
            return False  # as many all-reduces as usual have succeeded, so user code may have changed weights
        return watched.are_unchanged()

    def undo_step(self, record: OpenStep) -> None:
        """Restore the state from before the step. Call this only if `can_undo` returns True.

        Gradients that the step has computed are discarded. Gradients from before the step are restored, if no optimizer
        had stepped with them.
        """
        if self.is_told_of_batches and not record.has_begun:
            return
        waiting = {*map(id, record.waiting)}
        for parameter in parameters_of(self._optimizers):
            if id(parameter) not in waiting:
                parameter.grad = None
        for restore in record.restore:
            restore()


def parameters_of(optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Return the parameters in the parameter groups of optimizers."""
    groups = (group for each in optimizers for group in getattr(each, "param_groups", ()))
    return (parameter for group in groups for parameter in group["params"])


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
