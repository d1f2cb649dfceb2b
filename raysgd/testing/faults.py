"""Faults in a running trainer: in its worker processes, in files that it writes, and in nodes of a local test cluster.

A fault happens at once, or when a process reaches a given point. A point in a worker, such as a training step, has a
`Trap` in this worker. A point in the driver is a wrapped method of the trainer.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from raysgd.exceptions import OnFailure, TrainerShutdownError
from raysgd.storage import files

if TYPE_CHECKING:
    from raysgd.core.engine.group import WorkerGroup
    from raysgd.core.engine.platform import Platform
    from raysgd.core.engine.shared.interface import GroupSpec
    from raysgd.core.engine.shared.types import GroupReport, World

IN_WORKERS = ("validate", "snapshot", "continue")
"""Values of the argument `at` for faults that happen when the worker reaches a certain point, besides `step:N`.
`kill_worker` describes each value."""

IN_DRIVER = ("save", "load", "state_dict", "get_model", "setup")
"""Values of the argument `at` for faults that happen when the driver calls a method of the trainer or starts workers.
`kill_worker` describes each value."""

_STEP = re.compile(r"step:(\d+)")
_GONE_S = 30.0
_ANSWER_S = 5.0
_CONFIRMED_S = 30.0
_LATE_S = 60.0
_keys = itertools.count()
_patches: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""For each trainer, the replaced methods of its armed faults, by trigger point: the name of a method, or "setup"."""


def kill_worker(trainer: Any, rank: int | Sequence[int], at: str = "now") -> None:
    """Kill the process of one or more ranks with SIGKILL.

    Args:
        trainer: A running trainer with workers outside the driver.
        rank: The rank, or several ranks to kill together.
        at: When to kill the process. Unless `at` is "now", this function returns before the process is killed.

            * "now": immediately. This function returns when Ray has noticed that the process is gone.
            * "step:N": when the process starts training step N, where 0 is its next step.
            * "validate": when the process starts to validate.
            * "snapshot": when the process copies its training state for a snapshot. This happens after a call to the
              trainer, such as `train`, and with `snapshot_every_n_steps` also during the call.
            * "continue": when the process joins a new worker group after another rank was lost.
            * "setup": when the worker with this rank is set up the next time that all workers start.
            * "save", "load", "state_dict", "get_model": when the driver calls this method of the trainer. The process
              that has the rank at that moment is killed.

    Raises:
        ValueError: There is no such rank, `at` is invalid, or the rank is the driver itself.
        RuntimeError: The trainer was shut down, or its workers are currently being replaced. Or the fault must be armed
            in a worker, as for "step:N", and one of these ranks has died or does not answer.
    """
    _end_with(signal.SIGKILL, trainer, rank, at)


def hang_rank(trainer: Any, rank: int | Sequence[int], at: str = "now") -> None:
    """Stop the process of one or more ranks with SIGSTOP, as if its machine had frozen. The process never continues.

    During the next call to the trainer, such as `train`, the stopped process does not send heartbeats. After
    `heartbeat_s` seconds without a heartbeat, the trainer kills the process.

    Args:
        trainer: A running trainer with workers outside the driver.
        rank: The rank, or several ranks to stop together.
        at: When to stop the process. The values are the same as for `kill_worker`, except that "setup" is not allowed.
            With "now", this function sends the signal and returns without waiting for the process to stop.

    Raises:
        ValueError: There is no such rank, `at` is invalid, or the rank is the driver itself.
        RuntimeError: The trainer was shut down, or its workers are currently being replaced. Or the fault must be armed
            in a worker, as for "step:N", and one of these ranks has died or does not answer.
    """
    _end_with(signal.SIGSTOP, trainer, rank, at)


@contextlib.contextmanager
def slow_rank(trainer: Any, rank: int | Sequence[int], seconds: float) -> Iterator[None]:
    """Inside the ``with`` block, make the processes of one or more ranks sleep before each training step.

    Args:
        trainer: A running trainer.
        rank: The rank, or several ranks. With `use_local=True`, the rank in the driver's process is allowed, too.
        seconds: Number of seconds to sleep before each step.

    Raises:
        ValueError: The rank does not exist, or `seconds` is not a positive number.
        RuntimeError: The trainer was shut down, its workers are currently being replaced, or one of these ranks has
            died and the trainer has not noticed yet.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ValueError(f"`seconds={seconds!r}`: need a positive number of seconds to pause before each step.")
    ranks = check_ranks(trainer, rank, may_be_driver=True)
    trap = Trap(functools.partial(time.sleep, float(seconds)), "step", once=False)
    arm(trainer, ranks, trap)
    try:
        yield
    finally:
        disarm_everywhere(trainer, trap.key)


def disarm(trainer: Any) -> None:
    """Disarm all faults of a trainer that are armed but have not happened yet.

    Raises:
        TypeError: `trainer` is not a trainer.
    """
    controller_of(trainer)
    for point in IN_DRIVER:
        _disarm(trainer, point)
    disarm_everywhere(trainer, None)


@contextlib.contextmanager
def fail_save(trainer: Any, error: OSError | None = None, after_bytes: int = 0) -> Iterator[None]:
    """Inside the ``with`` block, make `trainer.save` fail while it writes a file, as if the disk were full.

    A save in the background (`blocking=False`) that starts inside the block fails too. At the end of the block, the
    program waits until such saves have ended.

    Args:
        trainer: A running trainer.
        error: The exception that a write raises. Default: an `OSError` with "No space left on device".
        after_bytes: Number of bytes of each file that are still written before the exception is raised.

    Raises:
        ValueError: `after_bytes` is negative or not an integer, or `error` is not an `OSError`.
    """
    if isinstance(after_bytes, bool) or not isinstance(after_bytes, int) or after_bytes < 0:
        raise ValueError(f"`after_bytes={after_bytes!r}`: need a whole number of bytes, 0 or more.")
    if error is not None and not isinstance(error, OSError):
        raise ValueError(f"`error={error!r}`: need an `OSError`, as a failed write raises.")
    controller_of(trainer)
    failure = error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    targets: set[str] = set()
    saving, save = files.saving, trainer.save

    @functools.wraps(save)
    def noting(checkpoint: Any, *args: Any, **keywords: Any) -> Any:
        targets.add(os.fspath(checkpoint))
        return save(checkpoint, *args, **keywords)

    @contextlib.contextmanager
    def failing(target: Any) -> Iterator[Any]:
        with saving(target) as file:
            yield _FullFile(file, after_bytes, failure) if os.fspath(target) in targets else file

    with mock.patch.object(files, "saving", failing), mock.patch.object(trainer, "save", noting):
        try:
            yield
        finally:
            trainer._life.writer.drain()


def remove_node(cluster: Any, node: Any = None, *, trainer: Any = None, rank: int | None = None) -> Any:
    """Kill all processes of one node of a local test cluster, without a graceful shutdown.

    Name the node with `node`, or with both `trainer` and `rank`.

    Args:
        cluster: The `ray.cluster_utils.Cluster` that contains the node.
        node: The node to remove, as `cluster.add_node` returned it.
        trainer: A running trainer that has a worker on the node to remove.
        rank: The rank of the worker on the node to remove.

    Returns:
        The removed node.

    Raises:
        ValueError: The node is not in the cluster, or is the driver's node or the head node. Or there is no such rank,
            the rank is the driver itself, or the arguments name the node in neither or both of the two ways.
        RuntimeError: The trainer was shut down, or its workers are currently being replaced.
    """
    if (node is None) == (trainer is None) or (trainer is None) != (rank is None):
        raise ValueError(
            "`remove_node` needs either `node`, or both `trainer` and `rank`, to know which node to remove."
        )
    if rank is not None:
        [rank] = check_ranks(trainer, rank, may_be_driver=False)
        node_id = group_of(trainer).infos[rank].node_id
        nodes = (cluster.head_node, *cluster.worker_nodes)
        node = next((found for found in nodes if found is not None and found.node_id == node_id), None)
        if node is None:
            raise ValueError(f"`rank={rank}`: its worker is on node {node_id}, which is not in this cluster.")
    if node is cluster.head_node:
        raise ValueError(
            "This is the head node, and removing it would end the cluster: put workers on nodes that you added."
        )
    if node not in cluster.worker_nodes:
        raise ValueError(f"`node={node!r}` is not a node of this cluster, or was removed before.")
    import ray

    if ray.is_initialized() and node.node_id == ray.get_runtime_context().get_node_id():
        raise ValueError(
            "The driver is connected through this node, so removing it would end the driver: choose another one."
        )
    cluster.remove_node(node, allow_graceful=False)
    return node


def check_ranks(trainer: Any, rank: int | Sequence[int], may_be_driver: bool) -> list[int]:
    """Check that faults can be armed in the workers with these ranks, and return the ranks in ascending order.

    Args:
        trainer: A running trainer.
        rank: The rank, or several ranks.
        may_be_driver: True if the fault may be armed in the driver's own process.

    Raises:
        ValueError: The trainer has no such rank, or the rank is the driver and `may_be_driver` is False.
        RuntimeError: The trainer was shut down, or its workers are being replaced.
    """
    group = group_of(trainer)
    ranks: list[Any] = list(rank) if isinstance(rank, list | tuple | range | set | frozenset) else [rank]
    if not ranks:
        raise ValueError(f"`rank={rank!r}`: name at least one rank.")
    for each in ranks:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < len(group):
            raise ValueError(f"`rank={rank!r}`: the trainer has the ranks 0 to {len(group) - 1} at this moment.")
        if not may_be_driver and each not in group.remote_ranks:
            raise ValueError(
                f"`rank={rank!r}`: rank {each} is this process (`use_local=True`), so killing it would end your test. "
                f"Use one of {group.remote_ranks or 'the ranks of a trainer with remote workers'}."
            )
    return sorted(set(ranks))


def controller_of(trainer: Any) -> Any:
    """Return the trainer's controller, the object in the driver that runs calls on the workers and retries them.

    Raises:
        TypeError: `trainer` is not a trainer.
    """
    if not hasattr(trainer, "_life"):
        raise TypeError(f"`trainer={trainer!r}`: need a `TorchTrainer` or a `TFTrainer` that is running.")
    return trainer._life.controller


def group_of(trainer: Any) -> WorkerGroup:
    """Return the trainer's current worker group, the object that holds its workers by rank.

    Raises:
        RuntimeError: The trainer was shut down, or its workers are being replaced.
    """
    controller = controller_of(trainer)
    controller.check_active()
    group: WorkerGroup | None = controller.group
    if group is None:
        raise RuntimeError("The trainer has no workers now, because they are being replaced: try again later.")
    return group


def _end_with(number: signal.Signals, trainer: Any, rank: int | Sequence[int], at: str) -> None:
    step = _check_moment(at, allow_setup=number == signal.SIGKILL)
    ranks = check_ranks(trainer, rank, may_be_driver=False)
    if at == "now":
        _signal(trainer, ranks, number, waits=number == signal.SIGKILL)
    elif at == "setup":
        arm_setup(trainer, ranks)
    elif at in IN_DRIVER:
        arm_call(trainer, at, functools.partial(_signal, trainer, ranks, number, waits=False))
    else:
        place, _, _ = at.partition(":")
        arm(trainer, ranks, Trap(functools.partial(send_itself, number), place, step or 0))


def _check_moment(at: str, allow_setup: bool) -> int | None:
    """Check the argument `at`, which says when a fault happens. Return N if `at` is "step:N", else None.

    Raises:
        ValueError: `at` has no allowed value. "setup" is allowed only if `allow_setup` is True.
    """
    names = [name for name in (*IN_WORKERS, *IN_DRIVER) if allow_setup or name != "setup"]
    if at == "now" or at in names:
        return None
    match = _STEP.fullmatch(at) if isinstance(at, str) else None
    if match is None:
        words = ", ".join(f'"{name}"' for name in names)
        raise ValueError(f'`at={at!r}`: allowed are "now", "step:N" with a number N of 0 or more, {words}.')
    return int(match[1])


def _signal(trainer: Any, ranks: Sequence[int], number: int, waits: bool) -> None:
    """Send a signal to the workers with these ranks. Skip ranks that are gone.

    Args:
        trainer: A running trainer.
        ranks: The ranks.
        number: Number of the signal.
        waits: True to return only when the processes are gone.
    """
    group = group_of(trainer)
    calls = {rank: group.submit_beside(rank, _send_to_self, number) for rank in ranks if rank in group.remote_ranks}
    if not waits:
        return
    import ray

    _, deaf = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
    # A process that SIGSTOP has stopped cannot run `_send_to_self`, so Ray kills it.
    for rank in [rank for rank, call in calls.items() if call in deaf]:
        group.kill_rank(rank)
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=_GONE_S)


def _send_to_self(replica: Any, number: int) -> None:
    os.kill(os.getpid(), number)


def _arm_in_driver(trainer: Any, point: str, owner: Any, name: str, trapped: Callable[..., Any]) -> None:
    """Replace the method `name` of `owner` until the fault at this trigger point is disarmed."""
    _disarm(trainer, point)
    _patches.setdefault(trainer, {})[point] = patch = mock.patch.object(owner, name, trapped)
    patch.start()


def _disarm(trainer: Any, point: str) -> bool:
    """Disarm a trainer's fault at a trigger point in the driver. Return False if none is armed."""
    patch = _patches.get(trainer, {}).pop(point, None)
    if patch is not None:
        patch.stop()
    return patch is not None


def arm_call(trainer: Any, name: str, act: Callable[[], None]) -> None:
    """Arm a fault: call `act` immediately before the next call to the trainer's method `name`."""
    _disarm(trainer, name)
    original = getattr(trainer, name)

    @functools.wraps(original)
    def trapped(*args: Any, **keywords: Any) -> Any:
        if _disarm(trainer, name):  # not if another patch has put back this method since
            act()
        return original(*args, **keywords)

    _arm_in_driver(trainer, name, trainer, name, trapped)


def arm_setup(trainer: Any, ranks: Sequence[int]) -> None:
    """Arm a fault that kills the workers with these ranks while the trainer sets up its next worker group.

    A worker group that is too small to have all of these ranks does not trigger the fault.
    """
    _disarm(trainer, "setup")
    lifecycle = controller_of(trainer)
    original = lifecycle.make_group

    def make_group(spec: GroupSpec, num_workers: int, platform: Platform) -> WorkerGroup:
        group: WorkerGroup = original(spec, num_workers, platform)
        if num_workers > max(ranks):
            _disarm(trainer, "setup")
            build, doomed = group._build, functools.partial(_made_unless_doomed, spec.make_replica, ranks)

            def build_once(*, captures: bool) -> GroupReport:
                group._build, group._spec = build, replace(spec, make_replica=doomed)  # type: ignore[method-assign]
                try:
                    return build(captures=captures)
                finally:
                    group._spec = spec  # what is built later, also in place of the killed workers, is not killed

            group._build = build_once  # type: ignore[method-assign]
        return group

    _arm_in_driver(trainer, "setup", lifecycle, "make_group", make_group)


def _made_unless_doomed(make_replica: Callable[[World], Any], ranks: Sequence[int], world: World) -> Any:
    """Create a worker's replica (the object that runs the user's code), or kill the worker's process instead."""
    if world.rank in ranks:
        os.kill(os.getpid(), signal.SIGKILL)
    return make_replica(world)


def send_itself(number: int) -> None:
    """Send this process a signal that kills or stops it, and wait for the signal to take effect."""
    os.kill(os.getpid(), number)
    time.sleep(_LATE_S)  # on a busy machine, the signal may take effect some time after `os.kill` returns


@dataclass
class Trap:
    """Causes a fault in a worker process when the process reaches a trigger point, such as its next training step.

    Attributes:
        act: Function that causes the fault.
        place: The trigger point: "step", "validate", "snapshot" or "continue".
        num_before: How many more times the process reaches the trigger point without a fault.
        once: True to cause the fault only once. False to cause it each time.
        key: Identifier of the trap, which is unique across processes.
        is_armed: True if the trap still causes a fault.
    """

    act: Callable[[], None]
    place: str
    num_before: int = 0
    once: bool = True
    key: str = field(default_factory=lambda: f"{os.getpid()}-{next(_keys)}")
    is_armed: bool = True

    def spring(self) -> None:
        """Cause the fault if the trap is armed. Called each time that the process reaches the trigger point.

        The first `num_before` calls do not cause the fault.
        """
        if not self.is_armed:
            return
        if self.num_before > 0:
            self.num_before -= 1
            return
        self.is_armed = not self.once
        self.act()

    def before(self, owner: Any, name: str, counts: Callable[..., bool] = lambda *_, **__: True) -> None:
        """Wrap the method `name` of `owner` so that each call to the method first calls `spring`.

        Args:
            owner: The object with the method.
            name: Name of the method.
            counts: Function of the method's arguments that returns False for calls that do not call `spring`.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def trapped(*args: Any, **keywords: Any) -> Any:
            if counts(*args, **keywords):
                self.spring()
            return original(*args, **keywords)

        setattr(owner, name, trapped)

    def before_each_step(self, hosted: Any) -> None:
        """Call `spring` before the user's training loop gets the first batch of each step.

        Keras's `fit` reads batches on its own schedule. With Keras, `spring` is called before each all-reduce of
        gradients instead.
        """
        fit = getattr(hosted.feed, "fit", None)
        if fit is not None:
            self.before(fit, "before_exchange")
        else:  # `open` is also called for each further micro-batch of a step
            self.before(hosted.parts, "open", lambda plan, item: plan.starts_global_batch)


_traps: list[Trap] = []  # all traps that were set in this process, including those that are no longer armed


def _set(replica: Any, trap: Trap) -> str | None:
    """Set a trap in this worker process. The worker may be training at the same time.

    Args:
        replica: The object that runs the user's code in this worker.
        trap: The trap to set.

    Returns:
        None, or an explanation if this type of replica never reaches the trap's trigger point.
    """
    needed = {"step": "_hosted", "validate": "operator", "snapshot": "capture", "continue": "regroup"}
    if not hasattr(replica, needed[trap.place]):
        return f"its `{type(replica).__name__}` has no `{needed[trap.place]}`"
    _traps.append(trap)
    if trap.place == "step":
        trap.before_each_step(replica._hosted)
    elif trap.place == "validate":
        trap.before(replica.operator, "validate")
    else:
        trap.before(replica, needed[trap.place])
    if trap.place == "snapshot" and hasattr(replica, "_hosted"):
        trap.before(replica._copies, "inside_call")
    return None


def _unset(replica: Any, key: str | None) -> None:
    for trap in _traps:
        trap.is_armed = trap.is_armed and key is not None and trap.key != key


def arm(trainer: Any, ranks: Sequence[int], trap: Trap) -> None:
    """Set a trap in the workers with these ranks, and wait until each worker confirms this.

    Raises:
        ValueError: The workers of this type of trainer never reach the trap's trigger point.
        RuntimeError: A worker has died or does not answer. The trap is not set in any worker.
    """
    with OnFailure(functools.partial(disarm_everywhere, trainer, trap.key)):
        reasons = group_of(trainer).ask_beside(_set, trap, ranks=ranks, timeout_s=_CONFIRMED_S)
        for rank in ranks:
            if rank not in reasons:
                raise RuntimeError(
                    f"`rank={rank}`: its worker has died or does not answer, and the trainer has not noticed yet. Make "
                    "a call first, such as `trainer.validate()`, which replaces the worker."
                )
            if reasons[rank] is not None:
                raise ValueError(f"`at={trap.place!r}` is not for this trainer: {reasons[rank]}.")


def disarm_everywhere(trainer: Any, key: str | None) -> None:
    """Disarm the trap with this key in all workers of a trainer. With `key=None`, disarm all traps in the workers.

    Do nothing if the trainer was shut down or has no workers at present.
    """
    with contextlib.suppress(TrainerShutdownError):
        controller = controller_of(trainer)
        controller.check_active()
        group = controller.group
        if group is not None:
            group.ask_beside(_unset, key)


class _FullFile:
    """A file whose `write` raises `failure` when more than `num_left` bytes are written in total."""

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
