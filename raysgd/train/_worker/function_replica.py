"""`FunctionReplica`, the object that runs training functions in a worker, and `Session`, of one such function.

`raysgd.train.report` and similar functions call the session.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from raysgd.air.reports import UploadOptions, node_ip
from raysgd.air.session import close_session, open_session
from raysgd.core.engine.shared.interface import Capture
from raysgd.core.engine.shared.types import Heartbeat, HeldAtStep, ReplicaProgress, StateHandover, World
from raysgd.core.state.state_codec import EncodedState, StateEncoder, decode
from raysgd.core.text.secrets import masked
from raysgd.exceptions import TrainBackendError
from raysgd.train import constants
from raysgd.train._worker.membership import Membership
from raysgd.train._worker.messages import (
    NO_WORDS,
    CheckpointRef,
    FunctionEnded,
    FunctionMessage,
    FunctionSpec,
    Mailbox,
    Message,
    PendingCheckpoints,
    Question,
    Request,
    TrainingResultType,
    is_mere_report,
)
from raysgd.train._worker.shards import StreamPart, with_to_torch

_NEXT_MESSAGE_S = 1.0  # how long to wait for the next message of a function that is being stopped


class FunctionReplica:
    """Runs a user's training functions in a worker, one after another, and passes their messages to the driver.

    The driver calls the methods of this class remotely.

    Args:
        world: This worker's rank and the number of workers.
        start: In a standby worker, the arguments with which `warm_up` calls `start`. Empty in all other workers.

    Attributes:
        worker_object: The instance of the user's class in this worker, or None.
    """

    def __init__(self, world: World, start: Sequence[Any] = ()) -> None:
        self.world = world
        self._start_later = start
        self._session: Session | None = None
        self._pending_checkpoints = PendingCheckpoints()
        self._num_messages = 0
        self._unconfirmed: list[Message] = []
        self._membership: Membership | None = None
        self._obstacle: str | None = "no function was started here"
        self.worker_object: Any = None

    def setup(self) -> None:
        """Called when the worker starts. There is nothing to build before a function starts."""

    def make_object(self, make: Callable[[], Any]) -> None:
        """Create the user's object in this worker, unless the worker has it already."""
        if self.worker_object is None:
            self.worker_object = make()

    def call_object(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's object.

        Raises:
            AttributeError: The object has no such method.
        """
        return getattr(self.worker_object, name)(*args, **kwargs)

    def warm_up(self) -> None:
        """In a standby worker, run the function until it needs its rank or waits for the driver.

        The worker gets its rank when it joins a group.

        Raises:
            RuntimeError: The function ended before it needed its rank.
            Exception: Any exception that the function raised.
        """
        import ray

        spec, *shared = self._start_later
        values = [ray.get(value) if isinstance(value, ray.ObjectRef) else value for value in shared]
        self.start(replace(spec, steps_in=True), *values)
        assert self._membership is not None, "only functions that go on are run in advance"
        self._membership.await_rest()
        self._check_is_waiting()

    def _check_is_waiting(self) -> None:
        """Check that the function is still running.

        Raises:
            RuntimeError: The function has ended.
            Exception: Any exception that the function raised.
        """
        mailbox = self._session.mailbox if self._session is not None else None
        if mailbox is not None and mailbox.error is not None:
            raise mailbox.error
        if mailbox is None or mailbox.is_over:
            raise RuntimeError("the function ended before its first batch, so no new worker can join")

    def start(self, spec: FunctionSpec | None = None, checkpoint: Any = None, shard: Any = None) -> None:
        """Start a training function in its own thread, or let a running function continue in another group.

        Args:
            spec: The function, and how to run it. None if the function is running: it then continues in the group that
                this worker has joined.
            checkpoint: The checkpoint from which the function starts, encoded; None to start from the beginning.
            shard: This worker's shard of the data.

        Raises:
            TrainBackendError: A function is already running.
        """
        if spec is None:
            if self._membership is not None:
                self._membership.go_on()
            return
        if self._session is not None:
            raise TrainBackendError("a function is running in this worker already")
        self._pending_checkpoints.clear()
        self._num_messages, self._unconfirmed = 0, []
        begin_from = decode(checkpoint, copy=True) if checkpoint is not None else None
        make_session = spec.make_session or Session
        self._session = make_session(self.world, spec, begin_from, shard, self._pending_checkpoints)
        self._membership, self._obstacle = self._session.membership, None
        open_session(self._session)
        self._session.mailbox.start()

    def next(self, request: Request = NO_WORDS) -> Message:
        """Wait for the function's next message and return it. If the function is muted, skip its reports.

        Raises:
            TrainBackendError: No function is running.
            BaseException: Any exception that the function raised. Or the wait was interrupted, because the group broke
                or because new workers are about to join.
        """
        session = self._session
        if session is None:
            raise TrainBackendError("no function is running in this worker: call `start_training` first")
        try:
            message = session.mailbox.next_message(request)
            while session.is_muted and is_mere_report(message):
                message = session.mailbox.next_message(request)
        except SystemExit:
            _leave_process()
            raise
        except BaseException as error:  # any exception of the user's function
            if not session.mailbox.is_broken_off:
                self._obstacle = f"the function of rank {self.world.rank} raised {error!r}"
                self._close()
            raise
        self._num_messages += 1
        if isinstance(message, FunctionEnded):
            self._close()
        assert isinstance(message, Message)
        if self._membership is not None:
            self._unconfirmed.append(message)
        return message

    def next_messages(
        self, request: Request, is_needed: bool, num_taken: int = 0, *start: Any
    ) -> list[Message] | HeldAtStep:
        """Return the function's next messages. If `is_needed` is True, wait for the first of them.

        A message with a checkpoint is the last one of the list. If `hold` interrupted the wait, return a `HeldAtStep`.
        This method raises the same exceptions as `next`.

        Args:
            request: What the driver tells the function.
            is_needed: True to wait for a message. False to return no new message, because the driver still has an
                unread message from this worker, or the worker does not report yet.
            num_taken: Number of messages that the driver has received, for functions that continue in place. Later
                messages were lost when a call failed, and are sent again.
            start: Arguments of `start`, if the function is not running yet.
        """
        self.start(*start)
        num_lost = self._num_messages - num_taken
        self._unconfirmed = self._unconfirmed[max(0, len(self._unconfirmed) - num_lost) :]
        if self._unconfirmed:
            return list(self._unconfirmed)
        try:
            messages = [self.next(request)] if is_needed else []
        except _WaitBrokenOff:
            assert self._membership is not None, "only functions that go on are held"
            return HeldAtStep(self._membership.num_done, None)
        while messages and self._has_more_behind(messages):
            messages.append(self.next(request))
        return messages

    def _has_more_behind(self, messages: Sequence[Message]) -> bool:
        """Return True if the function has another message ready that can be sent together with `messages`."""
        session = self._session
        if session is None or session.is_muted or not is_mere_report(messages[-1]):
            return False
        return len(messages) <= session.mailbox.num_ahead and session.mailbox.has_more

    def mute(self, *start: Any) -> None:
        """Discard the function's reports from now on, so that it does not wait until they are read.

        The function may have ended already.
        """
        self.start(*start)
        if self._session is not None:
            self._session.is_muted = True

    def end_function(self) -> bool:
        """Stop the function at its next message. Return False if it did not stop in time."""
        if self._session is None:
            return True
        self._pending_checkpoints.clear()  # releases a function that waits until the driver fetches a checkpoint
        is_over = self._session.mailbox.cancel(_NEXT_MESSAGE_S)
        self._close()
        return is_over

    def _close(self) -> None:
        close_session(self._session)
        self._session = None

    def capture(self, landed_token: int | None) -> Capture:
        """Return an empty snapshot, because a function restarts from its newest checkpoint, which the driver has."""
        return Capture()

    def fetch(self, token: int) -> Any:
        """Return the checkpoint with this token, whose content was not sent with its message."""
        return self._pending_checkpoints.fetch(token)

    def store(self, token: int | None, taken: Sequence[str], *start: Any) -> bool:
        """Let the function store the checkpoint folder with this token. Wait until the folder is stored.

        Args:
            token: The checkpoint's token; None if this rank has no folder to store.
            taken: Names of files for this rank to omit, because a lower rank stores them.
            start: Arguments of `start`, if the function is not running yet.

        Returns:
            False if the checkpoint was not stored, because its function was restarted or could not store it.
        """
        self.start(*start)
        if start or token is None:
            return not start
        try:
            self._pending_checkpoints.fetch(token, taken)
        except KeyError:  # storing has failed, and the function raises the cause
            return False
        return True

    def refuse(self, token: int) -> None:
        """Let the function continue, because the driver will not fetch the checkpoint with this token."""
        self._pending_checkpoints.refuse(token)

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Do nothing, because the next call starts the function from the newest checkpoint."""

    def replica_progress(self) -> ReplicaProgress:
        """Return the number of steps taken, and the reason why the function cannot continue in another group, if any.

        A worker that has not loaded the other ranks' state yet cannot be the source of the state for other
        workers.
        """
        membership = self._membership
        if membership is None:
            return ReplicaProgress(obstacle=self._obstacle or "the function began on a single worker")
        obstacle = self._obstacle or membership.obstacle
        if self._session is not None and self._session.mailbox.error is not None:
            obstacle = f"the function of rank {self.world.rank} raised {self._session.mailbox.error!r}"
        return ReplicaProgress(
            membership.num_done,
            can_be_source=not membership.is_new,
            obstacle=obstacle,
            words=f"after step {membership.num_done}",
            admits=membership.admits or membership.is_new,
        )

    def regroup(self, world: World, handover: StateHandover) -> None:
        """Let the function continue in another group that this process has joined.

        If this rank is one step behind, it takes that step with the gradients that it already has.

        Raises:
            RuntimeError: The worker is new in the group, and its function has ended or has not reached its first batch.
                Or this rank is behind, and does not have the gradients of that step.
            Exception: Any exception that the function raised before its first batch.
        """
        self.world = world
        if self._session is None:
            return
        self._session.regroup(world, world.rank in handover.takers)
        membership = self._session.membership
        if membership is not None and membership.is_new:
            self._check_is_waiting()
            if not membership.is_at_first_batch:
                raise RuntimeError("the function of a new worker did not reach its first batch")

    def hold(self) -> None:
        """Interrupt a `next_messages` call that is waiting, so that new workers can join the group.

        The function keeps running.
        """
        session = self._session
        if session is not None and not session.mailbox.is_broken_off:
            session.mailbox.break_off(_WaitBrokenOff())

    def heartbeat(self) -> Heartbeat:
        """Return the function's progress: the number of its reports and of its messages."""
        session = self._session
        if session is None:
            return Heartbeat()
        return Heartbeat(epoch=session.iteration, step=self._num_messages, phase="in the function")

    def shutdown(self) -> None:
        """Close the function's session. The function's thread ends when the process ends."""
        self._close()


class _WaitBrokenOff(BaseException):
    """Raised to interrupt a call that waits for a message, so that new workers can join the group."""


@dataclass
class FunctionReplicas:
    """Creates the `FunctionReplica` of each worker.

    Attributes:
        start: Arguments with which standby workers call `FunctionReplica.start`, to run the function in advance until
            it needs its rank. Empty if no function is running, or if each rank has its own shard of the data.
    """

    start: tuple[Any, ...] = ()

    def __call__(self, world: World) -> FunctionReplica:
        return FunctionReplica(world, self.start)


def _leave_process() -> None:
    """End the worker process, because its training function has called `sys.exit`."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


_INLINE_BYTES = 1 << 20  # checkpoints below this size are sent with the message; larger ones are fetched later
_PLAIN = (type(None), bool, int, float, str)


class Session:
    """One run of a training function in this worker. `raysgd.train.report` and similar functions call its methods.

    Args:
        world: This worker's rank and the number of workers.
        spec: The function and how to run it.
        checkpoint: The checkpoint that the function starts from.
        shard: This worker's shard of the data, or a dict of shards.
        pending: Holds large checkpoints until the driver fetches them.

    Attributes:
        membership: The function's membership in a group that may change during the run; None if the group cannot
            change.
    """

    def __init__(
        self,
        world: World,
        spec: FunctionSpec,
        checkpoint: dict[str, Any] | None = None,
        shard: Any = None,
        pending: PendingCheckpoints | None = None,
    ) -> None:
        self._world = world
        self.checkpoint = checkpoint
        self.shard = with_to_torch(shard)
        self.accelerator: Any = None
        self.facts: Any = None
        self.is_muted = spec.is_muted
        self.iteration = 0
        self._spec = spec
        self._began = self._last_report = time.monotonic()
        self._pending_checkpoints = pending or PendingCheckpoints()
        # The function's thread encodes everything that leaves the worker. Encoding makes one copy without pickling
        # tensors and arrays, so no later step handles gigabytes in Python. An encoder reuses its buffers. Reports have
        # their own encoder, so that a small report never occupies the large buffer of a checkpoint.
        self._checkpoints, self._reports = StateEncoder(), StateEncoder()
        self.mailbox = Mailbox(self._run, spec.num_ahead)
        self.membership: Membership | None = None
        if spec.is_elastic and (spec.steps_in or world.is_distributed):
            self.membership = Membership(world, self.mailbox, spec.steps_in)
            if spec.has_parts:
                self.membership.flaw = "the dataset was divided at the start, and the part of a lost worker is lost"

    @property
    def world(self) -> World:
        """This worker's rank and the number of workers.

        In a standby worker, the function waits here until the worker has joined a group and has a rank.
        """
        if self.membership is not None:
            self.membership.await_place()
        return self._world

    def _part_of(self, shard: Any) -> Any:
        """Return a shard of the data in the form in which the user's training function gets it.

        A worker's part of a stream is given a callable that returns the worker's `World`, because the rank may not be
        known yet. Any other shard is returned unchanged.
        """
        return shard.of_worker(lambda: self.world) if isinstance(shard, StreamPart) else shard

    def _run(self) -> Any:
        """Run the user's training function and return its return value. Called in the function's own thread."""
        try:
            return self._spec.function()
        except Exception as error:  # raised by the user's function
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained.with_traceback(error.__traceback__) from error

    def _explained(self, error: Exception) -> Exception:
        """Return the exception to raise: the function's own exception, or a replacement that gives advice."""
        return error if self._spec.explain is None else self._spec.explain(error)

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, options: UploadOptions | None = None) -> None:
        """Send metrics, optionally with a checkpoint, which is a dict or a `Checkpoint`.

        Raises:
            TypeError: `checkpoint` has another type. Or `options` were passed: only functions that `fit` runs support
                them.
        """
        if options is not None:
            raise TypeError(f"`{options}`: only functions that `fit` runs can choose how a checkpoint is stored.")
        if self.is_repeating:
            return
        if checkpoint is not None:
            self.checkpoint = checkpoint = content_of(checkpoint)
        if self.is_muted and checkpoint is None:
            return
        data = self._packed(self._spec.encode(self._filled(dict(metrics))))
        if checkpoint is None:
            self._send_metrics(data)
        else:
            self._send(data, checkpoint)

    @property
    def is_repeating(self) -> bool:
        """True while the function is in a batch that has failed because a worker was lost.

        The loader will yield the batch again, and the function will report again. Also True in a new worker before its
        first batch, because the other ranks have already sent the reports that the new worker would send there.
        """
        return self.membership is not None and self.membership.has_failed

    def regroup(self, world: World, is_behind: bool) -> None:
        """Let the function continue in another group that this process has already joined.

        Args:
            world: The rank in that group, and the number of its ranks.
            is_behind: True if another rank has taken one more step than this rank; see `Membership.join`.
        """
        assert self.membership is not None, "the function cannot continue in another group"
        self._world = world
        self.membership.join(world, is_behind)
        self.mailbox.mend()

    def ask(self, name: str, data: Any = None) -> Any:
        """Ask the driver a question and return its answer, which is the same on all ranks. All ranks must ask.

        Args:
            name: Name of the question. It determines how the driver computes the answer.
            data: This rank's data, from which the driver computes the answer.

        Raises:
            RuntimeError: The function runs in a new worker that has not joined the other ranks yet. The other ranks
                have asked the question before, and the driver cannot answer it again.
        """
        if self.membership is not None and self.membership.is_new:
            raise RuntimeError(f"`{name}` was called before the first batch, so no new worker can join. Call it later.")
        self.mailbox.offer(Question(name, cloudpickle.dumps(data)))
        return pickle.loads(self.mailbox.await_request().answer)

    def _send_metrics(self, data: Any) -> None:
        """Send metrics without a checkpoint to the driver.

        Encoded metrics are in a buffer that the next report reuses, so the function waits until the metrics are read.
        """
        self.mailbox.offer(
            FunctionMessage(TrainingResultType.REPORT, data), may_wait=not isinstance(data, EncodedState)
        )

    def _send(self, data: Any, checkpoint: Mapping[str, Any]) -> None:
        """Send metrics with a checkpoint to the driver, which uses the checkpoint only if no lower rank has one."""
        if self.world.rank == 0:
            self.mailbox.offer(FunctionMessage(TrainingResultType.REPORT, data, self._checkpoint_ref(checkpoint)))
            return
        content = self._content(checkpoint)
        ref = CheckpointRef(content.get(self._spec.score_attribute))
        self._announce(data, ref, lambda _: self._checkpoints.encode(self._spec.encode(content)))

    def _announce(self, data: Any, checkpoint_ref: CheckpointRef, make: Callable[[Any], Any]) -> None:
        """Send metrics that announce a checkpoint. If the driver then requests the checkpoint, create it.

        Args:
            data: The metrics.
            checkpoint_ref: Describes the checkpoint.
            make: Function that creates the checkpoint.
        """
        token = self._pending_checkpoints.announce()
        self.mailbox.offer(FunctionMessage(TrainingResultType.REPORT, data, replace(checkpoint_ref, token=token)))
        self._pending_checkpoints.copy_if_fetched(token, make)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that the function has saved, or else the checkpoint from which it started.

        Return None if there is no such checkpoint.
        """
        return self.checkpoint

    def current_checkpoint(self) -> Any:
        """Return the result of `load_checkpoint` as a `Checkpoint`, or None."""
        if not self.checkpoint:
            return None
        from raysgd.air.checkpoint import Checkpoint

        return Checkpoint.from_dict(self.checkpoint)

    def dataset_shard(self, name: str | None) -> Any:
        """Return this worker's shard of the data; see `get_dataset_shard`."""
        if self.shard is None:
            warnings.warn("No dataset was passed to `run`, so there is no shard: `None` is returned.", stacklevel=3)
            return None
        if not isinstance(self.shard, dict):
            return self._part_of(self.shard)
        if name is None:
            raise RuntimeError(f"There are several datasets: choose one of {sorted(self.shard)}, with `dataset_name`.")
        if name not in self.shard:
            raise KeyError(f"There is no dataset {name!r}. Available: {sorted(self.shard)}.")
        return self._part_of(self.shard[name])

    def save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Send a checkpoint to the driver. Only rank 0's checkpoint is stored, but all ranks must call this method."""
        if self.is_repeating:
            return
        self.checkpoint = checkpoint
        checkpoint_ref = self._checkpoint_ref(checkpoint) if self.world.rank == 0 else None
        self.mailbox.offer(FunctionMessage(TrainingResultType.CHECKPOINT, None, checkpoint_ref))

    def _checkpoint_ref(self, checkpoint: Mapping[str, Any]) -> CheckpointRef:
        content = self._content(checkpoint)
        score = content.get(self._spec.score_attribute)
        encoded = self._checkpoints.encode(self._spec.encode(content))
        if len(encoded.skeleton) + encoded.num_bytes < _INLINE_BYTES:
            return CheckpointRef(score, encoded)
        return CheckpointRef(score, token=self._pending_checkpoints.keep(encoded))

    def _content(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        return {**checkpoint, constants.TIMESTAMP: int(time.time())}

    def _packed(self, data: Any) -> Any:
        """Return metrics in the form in which they are sent: unchanged if all values are plain, else encoded."""
        if isinstance(data, dict) and all(type(value) in _PLAIN for value in data.values()):
            return data
        return self._reports.encode(data)

    def _filled(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return a report's metrics, with the values that raysgd adds to every report."""
        now = time.monotonic()
        self.iteration += 1
        metrics.setdefault(constants.TIME_THIS_ITER_S, now - self._last_report)
        self._last_report = now
        metrics[constants.TIMESTAMP] = int(time.time())
        metrics[constants.TRAINING_ITERATION] = self.iteration
        return {**metrics, **self._details()}

    def _details(self) -> dict[str, Any]:
        """Return time, host and process for a report, or an empty dict if reports do not include them."""
        if not self._spec.is_detailed:
            return {}
        return {
            constants.DATE: time.strftime("%Y-%m-%d_%H-%M-%S"),
            constants.HOSTNAME: socket.gethostname(),
            constants.NODE_IP: node_ip(),
            constants.PID: os.getpid(),
            constants.TIME_TOTAL_S: time.monotonic() - self._began,
        }


def content_of(checkpoint: Any) -> dict[str, Any]:
    """Return the content of a checkpoint that the function has reported, as a dict.

    Raises:
        TypeError: `checkpoint` is neither a dict nor a `Checkpoint`.
    """
    if isinstance(checkpoint, Mapping):
        return dict(checkpoint)
    from raysgd.air.checkpoint import Checkpoint

    if isinstance(checkpoint, Checkpoint):
        return checkpoint.to_dict()
    raise TypeError(f"`checkpoint={masked(checkpoint)!r}`: need a dict or a `Checkpoint`, or None.")
