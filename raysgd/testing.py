"""Faults on purpose, for tests of what your training does when something breaks.

Each function arms something in the real processes of a running trainer: a SIGKILL, a SIGSTOP, a pause, a write that
fails. Nothing is simulated, and nothing of it is there unless one of these functions was called. See `docs/testing.md`.

A fault is armed in the process that has the rank at that time. It goes with the process, also to another rank; a
process that takes its place later is unharmed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import itertools
import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raysgd.exceptions import TrainerShutdownError

if TYPE_CHECKING:
    from raysgd.engine.group_spec import GroupSpec
    from raysgd.engine.types import World
    from raysgd.engine.worker_group import WorkerGroup

IN_WORKERS = ("validate", "snapshot", "rejoin")
"""Moments that come up in the worker itself; `step:N` is another one."""

IN_DRIVER = ("save", "load", "state_dict", "get_model", "setup")
"""Moments that come up in the driver."""

_STEP = re.compile(r"step:(\d+)")
_PATIENCE_S = 30.0
_ANSWER_S = 5.0


# ------------------------------------------------------------------------------------------------------ processes


def kill_worker(trainer: Any, rank: int | Sequence[int], at: str = "now") -> None:
    """Ends the process of a rank, or of several at once, with SIGKILL.

    Args:
        trainer: A running trainer with workers beside the driver.
        rank: Which one, or several.
        at: When.

            * "now": at once. Returns when Ray knows that the process is gone.
            * "step:N": as it begins its training step number N from now on, counted from 0.
            * "validate": as it begins to evaluate.
            * "snapshot": as it copies its state, right behind a call or, with `snapshot_every_n_steps`, inside one.
            * "rejoin": as it is to go on in a new group, after another rank was lost.
            * "setup": as whoever gets this rank is set up, the next time that all workers are started anew.
            * "save", "load", "state_dict", "get_model": as the driver begins this call of the trainer.

    Raises:
        ValueError: There is no such rank or moment, or the rank is the driver itself.
        RuntimeError: The trainer was shut down, or its workers are being replaced at this moment.
    """
    _end_with(signal.SIGKILL, trainer, rank, at)


def hang_rank(trainer: Any, rank: int | Sequence[int], at: str = "now") -> None:
    """Stops the process of a rank with SIGSTOP, as if its machine had frozen. It never goes on.

    The trainer notices during a call, after `heartbeat_s`, and ends the process.

    Args:
        trainer: A running trainer with workers beside the driver.
        rank: Which one, or several.
        at: When, as for `kill_worker` but "setup". With "now" it returns at once; the signal arrives moments later.

    Raises:
        ValueError: There is no such rank or moment, or the rank is the driver itself.
        RuntimeError: The trainer was shut down, or its workers are being replaced at this moment.
    """
    _end_with(signal.SIGSTOP, trainer, rank, at)


@contextlib.contextmanager
def slow_rank(trainer: Any, rank: int | Sequence[int], seconds: float) -> Iterator[None]:
    """Lets one rank, or several, pause before each training step, as long as the block lasts.

    Args:
        trainer: A running trainer.
        rank: Which one, or a list; the driver itself, too.
        seconds: How long it pauses.

    Raises:
        ValueError: There is no such rank, or `seconds` is not a positive number.
        RuntimeError: The trainer was shut down, or its workers are being replaced at this moment.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ValueError(f"`seconds={seconds!r}`: need a positive number of seconds to pause before each step.")
    ranks = _check_ranks(trainer, rank, may_be_driver=True)
    trap = _Trap(_Pause(float(seconds)), "step", once=False)
    _arm(trainer, ranks, trap)
    try:
        yield
    finally:
        _disarm_everywhere(trainer, trap.key)


def disarm(trainer: Any) -> None:
    """Takes back all that was armed with this trainer and has not happened yet.

    Raises:
        TypeError: It is no trainer.
    """
    _controller(trainer)
    for undo in list(_armed_in_driver.get(trainer, {}).values()):
        undo()
    _disarm_everywhere(trainer, None)


def _end_with(number: signal.Signals, trainer: Any, rank: int | Sequence[int], at: str) -> None:
    step = _check_moment(at, allow_setup=number == signal.SIGKILL)
    ranks = _check_ranks(trainer, rank, may_be_driver=False)
    if at == "now":
        _signal_now(trainer, ranks, number)
    elif at == "setup":
        _arm_setup(trainer, ranks)
    elif at in IN_DRIVER:
        _arm_call(trainer, at, functools.partial(_signal_soon, trainer, ranks, number))
    else:
        place, _, _ = at.partition(":")
        _arm(trainer, ranks, _Trap(_Signal(number), place, step or 0))


def _check_moment(at: str, allow_setup: bool) -> int | None:
    """The number of the step, for `step:N`.

    Raises:
        ValueError: There is no such moment.
    """
    names = [name for name in (*IN_WORKERS, *IN_DRIVER) if allow_setup or name != "setup"]
    if at == "now" or at in names:
        return None
    found = _STEP.fullmatch(at) if isinstance(at, str) else None
    if found is None:
        words = ", ".join(f'"{name}"' for name in names)
        raise ValueError(f'`at={at!r}`: allowed are "now", "step:N" with a number N of 0 or more, {words}.')
    return int(found[1])


def _check_ranks(trainer: Any, rank: int | Sequence[int], may_be_driver: bool) -> list[int]:
    group = _group(trainer)
    ranks: list[Any] = list(rank) if isinstance(rank, list | tuple | range | set | frozenset) else [rank]
    if not ranks:
        raise ValueError(f"`rank={rank!r}`: name at least one rank.")
    for found in ranks:
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < len(group):
            raise ValueError(f"`rank={rank!r}`: the trainer has the ranks 0 to {len(group) - 1} at this moment.")
        if not may_be_driver and found not in group.remote_ranks:
            raise ValueError(
                f"`rank={rank!r}`: rank {found} is this very process (`use_local=True`), which would end your test. "
                f"Take one of {group.remote_ranks or 'the ranks of a trainer with remote workers'}."
            )
    return sorted(set(ranks))


def _controller(trainer: Any) -> Any:
    if not hasattr(trainer, "_controller"):
        raise TypeError(f"`trainer={trainer!r}`: need a `TorchTrainer` or a `TFTrainer` that is running.")
    return trainer._controller


def _group(trainer: Any) -> WorkerGroup:
    """The workers as they are."""
    group: WorkerGroup | None = _controller(trainer).group
    if group is None:
        raise RuntimeError("The trainer has no workers at this moment, they are being replaced: try again later.")
    return group


# ------------------------------------------------------------------------------------------------------ signals


def _signal_now(trainer: Any, ranks: Sequence[int], number: int) -> None:
    group = _group(trainer)
    calls = {rank: group.submit_beside(rank, _send_to_self, number) for rank in ranks}
    if number != signal.SIGKILL:
        return
    import ray

    _, deaf = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
    for rank in [rank for rank, call in calls.items() if call in deaf]:  # stopped, say
        group.kill_rank(rank)
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=_PATIENCE_S)


def _signal_soon(trainer: Any, ranks: Sequence[int], number: int) -> None:
    """Without waiting for what comes of it; ranks that are no more are left out."""
    group = _group(trainer)
    for rank in ranks:
        if rank in group.remote_ranks:
            group.submit_beside(rank, _send_to_self, number)


def _send_to_self(replica: Any, number: int) -> None:
    os.kill(os.getpid(), number)


# ------------------------------------------------------------------------------------------------------ in workers


@dataclass(frozen=True)
class _Signal:
    """Sends this very process a signal that kills or stops it, and waits for that."""

    number: int

    def __call__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(_LATE_S)  # another thread may take the signal, on a busy machine some milliseconds later


@dataclass(frozen=True)
class _Pause:
    """Sleeps."""

    seconds: float

    def __call__(self) -> None:
        time.sleep(self.seconds)


_LATE_S = 1.0
_keys = itertools.count()


@dataclass
class _Trap:
    """Does something when a place is come to.

    Attributes:
        act: What.
        place: Where: "step", "validate", "snapshot" or "rejoin".
        num_before: How many times the place is passed unharmed before.
        once: Whether it happens a single time.
        key: Names it, over all processes.
    """

    act: Callable[[], None]
    place: str
    num_before: int = 0
    once: bool = True
    key: str = field(default_factory=lambda: f"{os.getpid()}-{next(_keys)}")
    is_armed: bool = True

    def spring(self) -> None:
        """The place is come to."""
        if not self.is_armed:
            return
        if self.num_before > 0:
            self.num_before -= 1
            return
        self.is_armed = not self.once
        self.act()

    def before(self, owner: Any, name: str) -> None:
        """Springs whenever the method `name` of this very object is called."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def trapped(*args: Any, **keywords: Any) -> Any:
            self.spring()
            return original(*args, **keywords)

        setattr(owner, name, trapped)

    def before_each_step(self, runner: Any) -> None:
        """Springs whenever a batch is handed to the user's loop, of whatever generation that is.

        Keras's `fit` draws its batches itself: there it springs before the exchange of gradients.
        """
        streams: list[Any] = []  # of the running call, and of calls to come

        def watched(stream: Any) -> Any:
            if stream not in streams:
                streams[:] = [stream]
                self.before(stream, "_hand_out" if hasattr(stream, "_hand_out") else "before_exchange")
            return stream

        if runner._train_stream is not None:
            watched(runner._train_stream)
        original = runner._training_stream
        runner._training_stream = lambda *request: watched(original(*request))


_traps: list[_Trap] = []  # of this process


def _set(replica: Any, trap: _Trap) -> str | None:
    """In the worker, beside its work: sets the trap. Returns why it cannot."""
    needed = {"step": "_training_stream", "validate": "operator", "snapshot": "capture", "rejoin": "regroup"}
    if not hasattr(replica, needed[trap.place]):
        return f"its `{type(replica).__name__}` has no `{needed[trap.place]}`"
    _traps.append(trap)
    if trap.place == "step":
        trap.before_each_step(replica)
    elif trap.place == "validate":
        trap.before(replica.operator, "validate")
    elif trap.place == "snapshot":
        trap.before(replica, "capture")
        if hasattr(replica, "_capture_inside"):
            trap.before(replica, "_capture_inside")
    else:
        trap.before(replica, "regroup")
    return None


def _unset(replica: Any, key: str | None) -> None:
    for trap in _traps:
        trap.is_armed = trap.is_armed and key is not None and trap.key != key


def _arm(trainer: Any, ranks: Sequence[int], trap: _Trap) -> None:
    group = _group(trainer)
    for transfer in [group.beside(rank, _set, trap) for rank in ranks]:
        reason = transfer.result(_PATIENCE_S)
        if reason is not None:
            raise ValueError(f"`at={trap.place!r}` is not for this trainer: {reason}.")


def _disarm_everywhere(trainer: Any, key: str | None) -> None:
    with contextlib.suppress(TrainerShutdownError):
        group = _controller(trainer).group
        if group is not None:
            group.ask_beside("beside", _unset, key)


# ------------------------------------------------------------------------------------------------------ in the driver


_armed_in_driver: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], None]]] = weakref.WeakKeyDictionary()


def _take_back(trainer: Any, name: str) -> None:
    """Takes back what is armed at this moment already, so that one thing happens there and not two."""
    undo = _armed_in_driver.get(trainer, {}).get(name)
    if undo is not None:
        undo()


def _arm_call(trainer: Any, name: str, act: Callable[[], None]) -> None:
    """Lets `act` happen when the method `name` of this trainer is called the next time."""
    _take_back(trainer, name)
    original = getattr(trainer, name)

    @functools.wraps(original)
    def trapped(*args: Any, **keywords: Any) -> Any:
        undo()
        act()
        return original(*args, **keywords)

    def undo() -> None:
        trainer.__dict__.pop(name, None)
        _armed_in_driver[trainer].pop(name, None)

    setattr(trainer, name, trapped)
    _armed_in_driver.setdefault(trainer, {})[name] = undo


def _arm_setup(trainer: Any, ranks: Sequence[int]) -> None:
    """Lets the next group that is started, and has these ranks, lose them over its set-up."""
    _take_back(trainer, "setup")
    starter = _controller(trainer).starter
    original = starter.make_group

    def make_group(spec: GroupSpec, num_workers: int) -> WorkerGroup:
        if num_workers <= max(ranks):
            group: WorkerGroup = original(spec, num_workers)
            return group
        undo()
        doomed_spec = replace(spec, make_replica=_Doomed(spec.make_replica, tuple(ranks)))
        doomed: WorkerGroup = original(doomed_spec, num_workers)
        return doomed

    def undo() -> None:
        starter.make_group = original
        _armed_in_driver[trainer].pop("setup", None)

    starter.make_group = make_group
    _armed_in_driver.setdefault(trainer, {})["setup"] = undo


@dataclass(frozen=True)
class _Doomed:
    """Makes replicas, but on some ranks ends the process instead."""

    make_replica: Callable[[World], Any]
    ranks: tuple[int, ...]

    def __call__(self, world: World) -> Any:
        if world.rank in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.make_replica(world)


# ------------------------------------------------------------------------------------------------------ nodes


def remove_node(cluster: Any, node: Any = None, *, trainer: Any = None, rank: int | None = None) -> Any:
    """Ends all processes of a node of a local test cluster, without a word to anybody.

    Args:
        cluster: A `ray.cluster_utils.Cluster`.
        node: What its `add_node` returned; or leave it out and say whose node it is:
        trainer: A running trainer.
        rank: The node is the one of this rank's worker.

    Returns:
        The node.

    Raises:
        ValueError: It is no node of the cluster, or the one of the driver or of Ray's own head; or nothing says which.
        RuntimeError: The trainer was shut down, or its workers are being replaced at this moment.
    """
    node = _find_node(cluster, node, trainer, rank)
    cluster.remove_node(node, allow_graceful=False)
    return node


def _find_node(cluster: Any, node: Any, trainer: Any, rank: int | None) -> Any:
    if (node is None) == (trainer is None) or (trainer is None) != (rank is None):
        raise ValueError("`remove_node` needs either `node`, or both `trainer` and `rank`, to know which node to end.")
    if node is None:
        [rank] = _check_ranks(trainer, rank if rank is not None else 0, may_be_driver=False)
        node_id = _group(trainer).infos[rank].node_id
        nodes = [cluster.head_node, *cluster.worker_nodes]
        node = next((found for found in nodes if found is not None and found.node_id == node_id), None)
        if node is None:
            raise ValueError(f"`rank={rank}`: its worker is on node {node_id}, which is none of this cluster.")
    if node is cluster.head_node:
        raise ValueError("This is the head node, without which the cluster ends: put workers on nodes that you added.")
    if node not in cluster.worker_nodes:
        raise ValueError(f"`node={node!r}` is no node of this cluster, or was removed before.")
    import ray

    if ray.is_initialized() and node.node_id == ray.get_runtime_context().get_node_id():
        raise ValueError("The driver is connected through this node, so it would end with it: take another one.")
    return node


# ------------------------------------------------------------------------------------------------------ files


@contextlib.contextmanager
def fail_save(trainer: Any, error: OSError | None = None, after_bytes: int = 0) -> Iterator[None]:
    """Lets the writes of `trainer.save` fail, as on a full disk, as long as the block lasts.

    Writes in the background (`blocking=False`) that were begun inside the block fail too; its end waits for them.

    Args:
        trainer: A running trainer.
        error: What is raised; "no space left on device" unless said otherwise.
        after_bytes: How much of each file is really written before.

    Raises:
        ValueError: `after_bytes` is negative or no whole number, or `error` is no `OSError`.
    """
    if isinstance(after_bytes, bool) or not isinstance(after_bytes, int) or after_bytes < 0:
        raise ValueError(f"`after_bytes={after_bytes!r}`: need a whole number of bytes, 0 or more.")
    if error is not None and not isinstance(error, OSError):
        raise ValueError(f"`error={error!r}`: need an `OSError`, which is what a write that fails raises.")
    _controller(trainer)
    front_end = next(cls.__module__ for cls in type(trainer).__mro__ if cls.__module__.startswith("raysgd."))
    writing: Any = importlib.import_module(f"{front_end.rpartition('.')[0]}.checkpoint_file")
    number = errno.ENOSPC
    failure = error or OSError(number, os.strerror(number))
    targets: set[str] = set()
    replacing = writing.replacing
    save = trainer.save

    @functools.wraps(save)
    def noting(checkpoint: Any, *args: Any, **keywords: Any) -> Any:
        targets.add(os.path.realpath(checkpoint))
        return save(checkpoint, *args, **keywords)

    @contextlib.contextmanager
    def failing(target: str) -> Iterator[Any]:
        with replacing(target) as file:
            yield _FullFile(file, after_bytes, failure) if target in targets else file

    writing.replacing = failing
    trainer.save = noting
    try:
        yield
    finally:
        thread = trainer._writer._thread
        if thread is not None:
            thread.join()
        del trainer.save
        writing.replacing = replacing


class _FullFile:
    """A file that takes so many bytes and no more."""

    def __init__(self, file: Any, num_left: int, failure: OSError) -> None:
        self._file, self._num_left, self._failure = file, num_left, failure

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        if len(view) > self._num_left:
            self._file.write(view[: self._num_left])
            self._num_left = 0
            raise self._failure
        self._num_left -= len(view)
        return int(self._file.write(view))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
