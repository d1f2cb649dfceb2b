"""What a training function can call, and the replica in each worker that runs the function.

Outside of a function that a trainer runs, `report` and the others do nothing but warn once, so that the same function
also works by itself.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from raysgd._state_codec import StateEncoder, decode
from raysgd.engine.replica import Capture
from raysgd.engine.types import Heartbeat, World
from raysgd.exceptions import SessionMisuseError as SessionMisuseError  # is found here too
from raysgd.exceptions import TrainBackendError
from raysgd.train._mailbox import Ended, Mailbox
from raysgd.train._shards import with_to_torch
from raysgd.train.constants import (
    DATE,
    HOSTNAME,
    NODE_IP,
    PID,
    TIME_THIS_ITER_S,
    TIME_TOTAL_S,
    TIMESTAMP,
    TRAINING_ITERATION,
)

_INLINE_BYTES = 1 << 20  # smaller states travel with the message; larger ones are fetched beside the training
_PATIENCE_S = 1.0
_PLAIN = (type(None), bool, int, float, str)
_UNSET: Any = type("_Unset", (), {"__repr__": lambda self: "<unset>"})()


class TrainingResultType(Enum):
    """What a message is."""

    REPORT = auto()
    CHECKPOINT = auto()


@dataclass(frozen=True)
class TrainingResult:
    """A message as it reaches code that drives a `BackendExecutor` itself."""

    type: TrainingResultType
    data: dict[str, Any]


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint on its way to the driver.

    Attributes:
        score: The value that decides how good it is; None when it lacks it.
        data: The encoded checkpoint, if it is small and sure to be taken.
        token: Else what to fetch it with.
    """

    score: Any = None
    data: Any = None
    token: int | None = None


@dataclass(frozen=True)
class Message:
    """What a function hands over: metrics or a checkpoint, perhaps metrics with a checkpoint."""

    kind: TrainingResultType
    data: Any = None
    checkpoint_ref: CheckpointRef | None = None


@dataclass(frozen=True)
class FunctionSpec:
    """What a worker needs to know to run a function.

    Attributes:
        function: The user's function, its argument bound.
        encode: What is done to all that leaves the worker.
        score_attribute: The key of a checkpoint that decides how good it is.
        is_detailed: Whether to add where and when to each report.
        is_muted: Whether its reports are not waited for.
        explain: What is raised for an exception of the function.
    """

    function: Callable[[], Any]
    encode: Callable[[dict[str, Any]], Any]
    score_attribute: str
    is_detailed: bool = False
    is_muted: bool = False
    explain: Callable[[Exception], Exception] | None = None

    def run(self) -> Any:
        """Runs the function."""
        try:
            return self.function()
        except Exception as error:
            explained = self.explain(error) if self.explain is not None else error
            if explained is error:
                raise
            raise explained.with_traceback(error.__traceback__) from error


class PendingCheckpoints:
    """Checkpoints that wait in this worker for the driver.

    Those of rank 0 are copies, which the driver is sure to fetch. What another rank reports is copied only if the
    driver asks for it, because rank 0 has none; until the driver has said so, the function waits.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copies: dict[int, Any] = {}
        self._open: set[int] = set()
        self._wanted: set[int] = set()
        self._num = 0

    def keep(self, copy: Any) -> int:
        """Keeps a copy until it is fetched; returns the token to fetch it with."""
        with self._changed:
            self._num += 1
            self._copies[self._num] = copy
            return self._num

    def announce(self) -> int:
        """Returns a token for a copy that is made only if the driver asks for it."""
        with self._changed:
            self._num += 1
            self._open.add(self._num)
            return self._num

    def settle(self, token: int, make_copy: Callable[[], Any]) -> None:
        """From the function: waits for the driver's word on what was announced, and makes the copy if it is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: token in self._wanted or token not in self._open)
            if token not in self._open:
                return
        try:
            copy = make_copy()
        except BaseException:
            self.refuse(token)
            raise
        with self._changed:
            self._copies[token] = copy
            self._changed.notify_all()

    def refuse(self, token: int) -> None:
        """From another thread: says that nobody will fetch what was announced."""
        with self._changed:
            self._open.discard(token)
            self._changed.notify_all()

    def fetch(self, token: int) -> Any:
        """What is kept under `token`, once. Called from another thread, while the function goes on.

        Raises:
            KeyError: It is gone.
        """
        with self._changed:
            self._wanted.add(token)
            self._changed.notify_all()
            self._changed.wait_for(lambda: token in self._copies or token not in self._open)
            self._wanted.discard(token)
            self._open.discard(token)
            return self._copies.pop(token)

    def clear(self) -> None:
        """Lets go of what nobody will ask for."""
        with self._changed:
            self._copies.clear()
            self._open.clear()
            self._changed.notify_all()


class Session:
    """One run of a function in this worker, as the function sees it.

    Args:
        world: This worker's place.
        spec: What to run.
        checkpoint: What to go on from.
        shard: This worker's part of the data, or a dict of such parts.
        pending: Where large checkpoints wait.
    """

    # What leaves the worker is prepared by the backend, then encoded in the thread of the function: with one copy, in
    # which tensors and arrays are apart, so that no later step has to look at, or even touch, gigabytes in Python.

    def __init__(
        self,
        world: World,
        spec: FunctionSpec,
        checkpoint: dict[str, Any] | None = None,
        shard: Any = None,
        pending: PendingCheckpoints | None = None,
    ) -> None:
        self.world = world
        self.checkpoint = checkpoint
        self.shard = with_to_torch(shard)
        self.accelerator: Any = None
        self.is_muted = spec.is_muted
        self.iteration = 0
        self._spec = spec
        self._began = self._last_report = time.monotonic()
        self._pending_checkpoints = pending or PendingCheckpoints()
        self._checkpoints, self._reports = StateEncoder(), StateEncoder()  # two, as one is in GB and the other is not
        self.mailbox = Mailbox(spec.run)

    def report(self, metrics: Mapping[str, Any], checkpoint: Mapping[str, Any] | None = None) -> None:
        """Hands metrics over, and perhaps a checkpoint with them."""
        if checkpoint is not None:
            self.checkpoint = dict(checkpoint)
        if self.is_muted and checkpoint is None:
            return
        data = self._packed(self._spec.encode(self._filled(dict(metrics))))
        if checkpoint is None:
            self.mailbox.offer(Message(TrainingResultType.REPORT, data))
        elif self.world.rank == 0:
            self.mailbox.offer(Message(TrainingResultType.REPORT, data, self._checkpoint_ref(checkpoint)))
        else:
            self._offer_in_case(data, checkpoint)

    def _offer_in_case(self, data: Any, checkpoint: Mapping[str, Any]) -> None:
        """Hands metrics over, and a checkpoint that the driver wants only if no lower rank has one."""
        content = self._content(checkpoint)
        token = self._pending_checkpoints.announce()
        checkpoint_ref = CheckpointRef(content.get(self._spec.score_attribute), token=token)
        self.mailbox.offer(Message(TrainingResultType.REPORT, data, checkpoint_ref))
        self._pending_checkpoints.settle(token, lambda: self._checkpoints.encode(self._spec.encode(content)))

    def save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Hands a checkpoint over. Only rank 0's is kept, but the step is one of all ranks."""
        self.checkpoint = checkpoint
        checkpoint_ref = self._checkpoint_ref(checkpoint) if self.world.rank == 0 else None
        self.mailbox.offer(Message(TrainingResultType.CHECKPOINT, None, checkpoint_ref))

    def _checkpoint_ref(self, checkpoint: Mapping[str, Any]) -> CheckpointRef:
        content = self._content(checkpoint)
        score = content.get(self._spec.score_attribute)
        encoded = self._checkpoints.encode(self._spec.encode(content))
        if len(encoded.skeleton) + encoded.num_bytes < _INLINE_BYTES:
            return CheckpointRef(score, encoded)
        return CheckpointRef(score, token=self._pending_checkpoints.keep(encoded))

    def _content(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        return {**checkpoint, TIMESTAMP: int(time.time())}

    def _packed(self, data: Any) -> Any:
        """What a backend made of metrics; encoded, unless it is plain."""
        if isinstance(data, dict) and all(type(value) in _PLAIN for value in data.values()):
            return data
        return self._reports.encode(data)

    def _filled(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics with what every report has."""
        now = time.monotonic()
        self.iteration += 1
        metrics.setdefault(TIME_THIS_ITER_S, now - self._last_report)
        self._last_report = now
        metrics[TIMESTAMP] = int(time.time())
        metrics[TRAINING_ITERATION] = self.iteration
        if self._spec.is_detailed:
            metrics[DATE] = time.strftime("%Y-%m-%d_%H-%M-%S")
            metrics[HOSTNAME] = socket.gethostname()
            metrics[NODE_IP] = _node_ip()
            metrics[PID] = os.getpid()
            metrics[TIME_TOTAL_S] = now - self._began
        return metrics


def _node_ip() -> str:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    return "127.0.0.1"


# One function runs at a time in a worker process; threads that it starts see the same session.
_current: Session | None = None
_warned: set[str] = set()
_warned_lock = threading.Lock()


def current_session() -> Session | None:
    """The session of the function that runs in this process; None outside of one."""
    return _current


class FunctionSession:
    """The replica: runs one function after the other, each handing over one message at a time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._session: Session | None = None
        self._pending_checkpoints = PendingCheckpoints()
        self._num_messages = 0
        self.worker_object: Any = None

    def setup(self) -> None:
        """There is nothing to build before there is a function."""

    def begin(self, spec: FunctionSpec, checkpoint: dict[str, Any] | None, shard: Any) -> None:
        """Starts a function.

        Raises:
            TrainBackendError: One is running already.
        """
        global _current
        if self._session is not None:
            raise TrainBackendError("a function is running in this worker already")
        self._pending_checkpoints.clear()
        self._session = _current = Session(self.world, spec, checkpoint, shard, self._pending_checkpoints)
        self._session.mailbox.start()

    def next(self) -> Message | Ended:
        """The function's next message, waiting for it.

        Raises:
            TrainBackendError: No function was started.
            Exception: What the function raised.
        """
        session = self._running()
        try:
            message = session.mailbox.take()
            while session.is_muted and _is_mere_report(message):
                message = session.mailbox.take()
        except SystemExit:
            _leave_process()
            raise
        except BaseException:
            self._close()
            raise
        self._num_messages += 1
        if isinstance(message, Ended):
            self._close()
        assert isinstance(message, Message | Ended)
        return message

    def mute(self) -> None:
        """Lets the function go on without its reports."""
        self._running().is_muted = True

    def end(self) -> bool:
        """Ends the function at its next message; returns False when it did not come to one in time."""
        if self._session is None:
            return True
        self._pending_checkpoints.clear()  # a function that waits for the driver's word goes on to its next message
        is_over = self._session.mailbox.cancel(_PATIENCE_S)
        self._close()
        return is_over

    def _running(self) -> Session:
        if self._session is None:
            raise TrainBackendError("no function is running in this worker: call `start_training` first")
        return self._session

    def _close(self) -> None:
        global _current
        if _current is self._session:
            _current = None
        self._session = None

    # ---------------------------------------------------------------------------------------------- as a replica

    def capture(self, landed_token: int | None) -> Capture:
        """What a function knows is its own business; it goes on from its checkpoint, which the driver has."""
        return Capture()

    def fetch(self, token: int) -> Any:
        """A checkpoint that was too large to travel with its message."""
        return self._pending_checkpoints.fetch(token)

    def refuse(self, token: int) -> None:
        """Says that the driver will not fetch a checkpoint."""
        self._pending_checkpoints.refuse(token)

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Nothing: the next call starts the function, from the newest checkpoint."""

    def heartbeat(self) -> Heartbeat:
        """A sign of life."""
        session = self._session
        if session is None:
            return Heartbeat()
        return Heartbeat(epoch=session.iteration, step=self._num_messages, phase="in the function")

    def shutdown(self) -> None:
        """Leaves the function behind; its thread ends with the process."""
        self._close()


def _is_mere_report(message: Any) -> bool:
    return isinstance(message, Message) and message.kind is TrainingResultType.REPORT and message.checkpoint_ref is None


def _leave_process() -> None:
    """A function that exits takes its worker along, as it would on its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def start_function(replica: FunctionSession, *start: Any) -> None:
    """Starts the function, so that it works while the driver does something else."""
    _start(replica, start)


def take_step(replica: FunctionSession, *start: Any) -> Message | Ended:
    """What the driver calls for each step; where the function does not run yet, it is started first."""
    _start(replica, start)
    return replica.next()


def mute(replica: FunctionSession, *start: Any) -> None:
    """See `FunctionSession.mute`."""
    _start(replica, start)
    replica.mute()


def _start(replica: FunctionSession, start: Sequence[Any]) -> None:
    """Starts the function if told how: with its spec, its encoded checkpoint, and its shard of the data."""
    if not start:
        return
    spec, checkpoint, shard = start
    replica.begin(spec, decode(checkpoint, copy=True) if checkpoint is not None else None, shard)


def end_function(replica: FunctionSession) -> bool:
    """See `FunctionSession.end`."""
    return replica.end()


def fetch_checkpoint(replica: FunctionSession, token: int) -> Any:
    """See `FunctionSession.fetch`."""
    return replica.fetch(token)


def refuse_checkpoint(replica: FunctionSession, token: int) -> None:
    """See `FunctionSession.refuse`."""
    replica.refuse(token)


# -------------------------------------------------------------------------------------------------- public functions


def report(*args: Any, checkpoint: Any = _UNSET, **kwargs: Any) -> None:
    """Hands metrics over to the driver, and waits until they were fetched.

    Either all metrics are keywords: `report(loss=0.1)`, where `checkpoint` is a name like any other. Or they are one
    dict: `report({"loss": 0.1}, checkpoint=...)`, where `checkpoint` is None or a dict to save with them. Every worker
    has to report the same number of times.

    Raises:
        TypeError: Anything else.
    """
    if not args:
        metrics, saved = dict(kwargs), None
        if checkpoint is not _UNSET:
            metrics["checkpoint"] = checkpoint
    else:
        metrics, saved = _positional(args, kwargs, checkpoint)
    session = _session_or_warning("report")
    if session is not None:
        session.report(metrics, saved)


def _positional(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], checkpoint: Any
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    if len(args) > 1 or not isinstance(args[0], dict) or kwargs:
        raise TypeError(
            "`report` takes either keywords, `report(loss=0.1)`, or one dict, `report({'loss': 0.1})` and perhaps "
            f"`checkpoint`; it was given {args!r} and the keywords {sorted(kwargs)}."
        )
    if checkpoint is _UNSET or checkpoint is None:
        return args[0], None
    if not isinstance(checkpoint, Mapping):
        raise TypeError(f"`checkpoint={checkpoint!r}`: need a dict, or None.")
    return args[0], checkpoint


def save_checkpoint(**kwargs: Any) -> None:
    """Saves a checkpoint, made of the keywords. Every worker has to call it; that of rank 0 is kept.

    The state is copied once before this returns; it is sent and written while the function goes on.
    """
    session = _session_or_warning("save_checkpoint")
    if session is not None:
        session.save_checkpoint(kwargs)


def load_checkpoint() -> dict[str, Any] | None:
    """The newest checkpoint of this run, or the one that it was started from; None when there is none."""
    session = _session_or_warning("load_checkpoint")
    return session.checkpoint if session is not None else None


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """This worker's part of the dataset that `run` was given; by its name where `run` was given a dict of them.

    Raises:
        RuntimeError: There are several, and no name was given.
        KeyError: There is none of that name.
    """
    session = _session_or_warning("get_dataset_shard")
    if session is None:
        return None
    shard = session.shard
    if shard is None:
        warnings.warn("No dataset was passed to `run`, so there is no shard: `None` is returned.", stacklevel=2)
        return None
    if not isinstance(shard, dict):
        return shard
    if dataset_name is None:
        raise RuntimeError(f"There are several datasets: say which one, of {sorted(shard)}, with `dataset_name`.")
    if dataset_name not in shard:
        raise KeyError(f"There is no dataset {dataset_name!r}: there are {sorted(shard)}.")
    return shard[dataset_name]


def world_rank() -> int:
    """This worker's rank among all; 0 outside of a run."""
    return _current.world.rank if _current is not None else 0


def local_rank() -> int:
    """This worker's rank among those on its node; 0 outside of a run."""
    return _current.world.local_rank if _current is not None else 0


def world_size() -> int:
    """The number of workers; 1 outside of a run."""
    return _current.world.size if _current is not None else 1


def _session_or_warning(function: str) -> Session | None:
    """The current session; without one, a warning, once for each function."""
    if _current is not None:
        return _current
    with _warned_lock:
        is_new = function not in _warned
        _warned.add(function)
    if is_new:
        warnings.warn(
            f"`{function}` has no effect: it was called outside of a function that a trainer runs.", stacklevel=3
        )
    return None
