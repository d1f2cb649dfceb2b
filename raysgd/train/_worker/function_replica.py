"""`FunctionReplica`, the object that runs training functions in a worker."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.air.session import close_session, open_session
from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.types import Heartbeat, HeldAtStep, ReplicaProgress, StateHandover, World
from raysgd.core.state.state_codec import decode
from raysgd.exceptions import TrainBackendError
from raysgd.train._worker.function_session import Session
from raysgd.train._worker.mailbox import PendingCheckpoints
from raysgd.train._worker.membership import Membership
from raysgd.train._worker.messages import FunctionEnded, FunctionSpec, Message, is_mere_report

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
        """Create the user's object in this worker."""
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

    def run_function(self, spec: FunctionSpec, checkpoint: dict[str, Any] | None, shard: Any) -> None:
        """Start a training function in its own thread.

        Args:
            spec: The function, and how to run it.
            checkpoint: The checkpoint from which the function starts; None to start from the beginning.
            shard: This worker's shard of the data.

        Raises:
            TrainBackendError: A function is already running.
        """
        if self._session is not None:
            raise TrainBackendError("a function is running in this worker already")
        self._pending_checkpoints.clear()
        self._num_messages, self._unconfirmed = 0, []
        make_session = spec.make_session or Session
        self._session = make_session(self.world, spec, checkpoint, shard, self._pending_checkpoints)
        self._membership, self._obstacle = self._session.membership, None
        open_session(self._session)
        self._session.mailbox.start()

    def next(self, index: int | None = None) -> Message:
        """Wait for the function's next message and return it. If the function is muted, skip its reports.

        Args:
            index: Number for the next checkpoint, if the workers themselves write checkpoints to storage.

        Raises:
            TrainBackendError: No function is running.
            BaseException: Any exception that the function raised. Or the wait was interrupted, because the group broke
                or because new workers are about to join.
        """
        session = self._session
        if session is None:
            raise TrainBackendError("no function is running in this worker: call `start_training` first")
        try:
            message = session.mailbox.next_message(index)
            while session.is_muted and is_mere_report(message):
                message = session.mailbox.next_message(index)
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

    def start(self, *start: Any) -> None:
        """Start a training function, or let a running function continue in the group that this worker has joined.

        Args:
            start: The spec, encoded checkpoint and data shard of the function to start. Empty if the function is
                running.
        """
        if self._membership is not None and not start:
            self._membership.go_on()
        if start:
            spec, checkpoint, shard = start
            self.run_function(spec, decode(checkpoint, copy=True) if checkpoint is not None else None, shard)

    def next_messages(
        self, index: int | None, is_needed: bool, num_taken: int = 0, *start: Any
    ) -> list[Message] | HeldAtStep:
        """Return the function's next messages. If `is_needed` is True, wait for the first of them.

        A message with a checkpoint is the last one of the list. If `hold` interrupted the wait, return a `HeldAtStep`.
        This method raises the same exceptions as `next`.

        Args:
            index: Number for the next checkpoint, if the workers themselves write checkpoints to storage.
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
            messages = [self.next(index)] if is_needed else []
        except _WaitBrokenOff:
            assert self._membership is not None, "only functions that go on are held"
            return HeldAtStep(self._membership.num_done, None)
        while messages and self._has_more_behind(messages):
            messages.append(self.next(index))
        return messages

    def _has_more_behind(self, messages: Sequence[Message]) -> bool:
        """Return True if the function has another message ready that can be sent together with `messages`."""
        session = self._session
        if session is None or session.is_muted or not is_mere_report(messages[-1]):
            return False
        return len(messages) <= session.mailbox.num_ahead and session.mailbox.has_more

    def answer(self, value: Any, *start: Any) -> None:
        """Pass the driver's answer to the question that the function has asked.

        If this call starts the function, the answer is dropped, because the function will ask the question again.
        """
        self.start(*start)
        if not start and self._session is not None:
            self._session.mailbox.answer(value)

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


def describe_process() -> tuple[str, Any]:
    """Return this worker's host name and its Ray actor handle."""
    import ray

    return socket.gethostname(), ray.get_runtime_context().current_actor


def _leave_process() -> None:
    """End the worker process, because its training function has called `sys.exit`."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
