"""The replica in a worker that runs functions: the driver calls its methods."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd._state.state_codec import decode
from raysgd.air._running import close_session, open_session
from raysgd.engine.shared.replica import Capture
from raysgd.engine.shared.types import Heartbeat, HeldAtStep, ReplicaProgress, StateHandover, World
from raysgd.exceptions import TrainBackendError
from raysgd.train._worker.function_session import Session
from raysgd.train._worker.mailbox import PendingCheckpoints
from raysgd.train._worker.membership import Membership
from raysgd.train._worker.messages import FunctionEnded, FunctionSpec, Message, is_mere_report

_NEXT_MESSAGE_S = 1.0  # how long a function may take to its next message when it is ended


class FunctionReplica:
    """Runs one function after the other; each gives the driver one message at a time.

    Args:
        world: This worker's place.
        start: What starts the function that the worker is to step in with; as for `start`.

    Attributes:
        worker_object: The object of the user's class in this worker; None without one.
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
        """Nothing: there is nothing to build before there is a function."""

    def make_object(self, make: Callable[[], Any]) -> None:
        """Make the object of this worker."""
        self.worker_object = make()

    def call_object(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of that object.

        Raises:
            AttributeError: There is none of that name.
        """
        return getattr(self.worker_object, name)(*args, **kwargs)

    def warm_up(self) -> None:
        """Run the function of the others until it asks for its place.

        Raises:
            RuntimeError: It does not.
            Exception: What it raised.
        """
        import ray

        spec, *shared = self._start_later
        found = [ray.get(value) if isinstance(value, ray.ObjectRef) else value for value in shared]
        self.start(replace(spec, steps_in=True), *found)
        assert self._membership is not None, "only functions that go on are run in advance"
        self._membership.await_rest()
        self._check_is_waiting()

    def _check_is_waiting(self) -> None:
        """Raise what the function has raised, or an error if it has ended."""
        mailbox = self._session.mailbox if self._session is not None else None
        if mailbox is not None and mailbox.error is not None:
            raise mailbox.error
        if mailbox is None or mailbox.is_over:
            raise RuntimeError("the function ended without a batch, so no worker can step in where it is")

    def run_function(self, spec: FunctionSpec, checkpoint: dict[str, Any] | None, shard: Any) -> None:
        """Start a function.

        Raises:
            TrainBackendError: A function is running already.
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
        """The function's next message, waiting for it.

        Args:
            index: The number of the next checkpoint that workers store themselves.

        Raises:
            TrainBackendError: No function was started.
            Exception: What the function raised.
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
        except BaseException as error:  # whatever the function raised
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
        """Start a function if `start` has what that takes: its spec, its encoded checkpoint, its shard of the data.

        One that runs goes on in the group that this worker is in, if it has joined another one.
        """
        if self._membership is not None and not start:
            self._membership.go_on()
        if start:
            spec, checkpoint, shard = start
            self.run_function(spec, decode(checkpoint, copy=True) if checkpoint is not None else None, shard)

    def next_messages(
        self, index: int | None, is_needed: bool, num_taken: int = 0, *start: Any
    ) -> list[Message] | HeldAtStep:
        """The messages that there are, at least one, and none behind a checkpoint; as `next`. Or it was held.

        Args:
            index: The number of the next checkpoint that workers store themselves.
            is_needed: Whether to wait for one; else there are none, because the driver has some of this worker already.
            num_taken: How many messages the driver has got, where functions go on when other workers are lost: what it
                has not got went down with the answers of those.
            start: What starts the function first, where it does not run yet.
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
        """Return whether to add a message that is there already. A function may well report as fast as it is read."""
        session = self._session
        if session is None or session.is_muted or not is_mere_report(messages[-1]):
            return False
        return len(messages) <= session.mailbox.num_ahead and session.mailbox.has_more

    def answer(self, value: Any, *start: Any) -> None:
        """Give the function the answer to its question. One that is only started with this has not asked yet."""
        self.start(*start)
        if not start and self._session is not None:
            self._session.mailbox.answer(value)

    def mute(self, *start: Any) -> None:
        """Let the function continue without waiting for its reports to be read. It may have ended before that."""
        self.start(*start)
        if self._session is not None:
            self._session.is_muted = True

    def end_function(self) -> bool:
        """End the function at its next message; return False if it sent none in time."""
        if self._session is None:
            return True
        self._pending_checkpoints.clear()  # a function that waits for the driver continues to its next message
        is_over = self._session.mailbox.cancel(_NEXT_MESSAGE_S)
        self._close()
        return is_over

    def _close(self) -> None:
        close_session(self._session)
        self._session = None

    def capture(self, landed_token: int | None) -> Capture:
        """Nothing: a function restarts from its checkpoint, which the driver has."""
        return Capture()

    def fetch(self, token: int) -> Any:
        """A checkpoint that was too large to travel with its message."""
        return self._pending_checkpoints.fetch(token)

    def store(self, token: int | None, taken: Sequence[str], *start: Any) -> bool:
        """Store the folder that waits under a token, if there is one, without the names that lower ranks use too.

        Returns:
            False where it was lost, with its function.
        """
        self.start(*start)
        if start or token is None:
            return not start
        try:
            self._pending_checkpoints.fetch(token, taken)
        except KeyError:  # it failed, and the function says why
            return False
        return True

    def refuse(self, token: int) -> None:
        """Take note that the driver will not fetch a checkpoint."""
        self._pending_checkpoints.refuse(token)

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Nothing: the next call starts the function from the newest checkpoint."""

    def replica_progress(self) -> ReplicaProgress:
        """Return how many steps the function has taken; it has to be able to go on where it is.

        Nothing is taken over from one that has not met the others.
        """
        membership = self._membership
        if membership is None:
            return ReplicaProgress(obstacle=self._obstacle or "the function began on a single worker")
        obstacle = self._obstacle or membership.obstacle
        if self._session is not None and self._session.mailbox.error is not None:
            obstacle = f"the function of rank {self.world.rank} raised {self._session.mailbox.error!r}"
        return ReplicaProgress(
            membership.num_done,
            is_whole=not membership.is_new,
            obstacle=obstacle,
            words=f"after step {membership.num_done}",
            admits=membership.admits or membership.is_new,
        )

    def regroup(self, world: World, handover: StateHandover) -> None:
        """Take a place in another group. A rank that is behind has the gradients of the step that it lacks.

        Raises:
            RuntimeError: The function was to step in, and has not come to its first batch.
            Exception: What it raised on its way there.
        """
        self.world = world
        if self._session is None:
            return
        self._session.regroup(world, world.rank in handover.takers)
        membership = self._session.membership
        if membership is not None and membership.is_new:
            self._check_is_waiting()
            if not membership.is_at_first_batch:
                raise RuntimeError("a function that was to step in does not come to its first batch")

    def hold(self) -> None:
        """End a call that waits for a message, so that others can step in. The function goes on meanwhile."""
        session = self._session
        if session is not None and not session.mailbox.is_broken_off:
            session.mailbox.break_off(_WaitBrokenOff())

    def heartbeat(self) -> Heartbeat:
        """A sign of life."""
        session = self._session
        if session is None:
            return Heartbeat()
        return Heartbeat(epoch=session.iteration, step=self._num_messages, phase="in the function")

    def shutdown(self) -> None:
        """Abandon the function; its thread ends with the process."""
        self._close()


class _WaitBrokenOff(BaseException):
    """Ends the wait for a message, so that others can step in."""


@dataclass
class FunctionReplicas:
    """Makes replicas; those of workers that are to step in run a function in advance.

    Attributes:
        start: What starts it, as for `FunctionReplica.start`; empty as long as there is none.
    """

    start: tuple[Any, ...] = ()

    def __call__(self, world: World) -> FunctionReplica:
        return FunctionReplica(world, self.start)


def describe_process() -> tuple[str, Any]:
    """The name of this worker's host, and Ray's handle on this worker."""
    import ray

    return socket.gethostname(), ray.get_runtime_context().current_actor


def _leave_process() -> None:
    """End the worker of a function that called `sys.exit`, which would end its process without a worker too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
