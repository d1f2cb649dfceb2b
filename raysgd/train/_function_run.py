"""One run of a user's training function on all workers.

The driver makes a sequence of short calls to the workers through the controller, the only object that retries failed
calls. A call requests the next message of every worker's function. If the worker group was replaced since the last
call, the same call also starts the function in the new group, from the run's newest checkpoint.

ADR 94 explains why the call that requests the next step also starts the function. ADR 7 explains why workers are
replaced after a failed run.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import cloudpickle

from raysgd.air.reports import PreemptionInfo
from raysgd.core.engine.shared.interface import Call
from raysgd.core.engine.shared.types import World
from raysgd.core.engine.transfers import Transfer
from raysgd.core.state.state_codec import EncodedState, decode, lend
from raysgd.core.text.log_lines import Once, named
from raysgd.exceptions import OnFailure, RaySGDError, StepMismatchError, WorkerError, WorkersLostError
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.messages import (
    BROADCAST,
    PREEMPTION,
    CheckpointRef,
    FunctionEnded,
    FunctionMessage,
    FunctionSpec,
    Message,
    Question,
    RanksMet,
    Request,
    TrainingResultType,
    is_mere_report,
)
from raysgd.train._worker.shards import DividedData
from raysgd.train._workers import FunctionWorkers
from raysgd.train.checkpoint import CheckpointLostError
from raysgd.trainer.driver.leaving import Leaving

logger = logging.getLogger(__name__)

_POLL_S = 0.2
LEAVING_S = 30.0
"""How many seconds functions may take to save a checkpoint after a signal that the program must end.

This is the default grace period of Kubernetes and Slurm.
"""


class FunctionRun:
    """One run of a user's training function on all workers.

    Attributes:
        may_restart: True if restarting the function now would lose no progress.
        returned: Return values of the function by rank; None until it has finished on all workers.
        is_over: True once the function has finished, failed or been aborted.

    Args:
        workers: The workers, on which the controller repeats failed calls. While the group is smaller than its maximum,
            look for resources for more workers whenever a restart would lose no progress: at the start and after a
            checkpoint. If new workers can join without a restart, look for resources at any time.
        spec: The function, and how to run it.
        data: Object that shards the data; None for a run without data.
        on_wait: Called about ten times a second while waiting for a step.
        leaving: Reports whether a signal has asked the program to end.
    """

    def __init__(
        self,
        workers: FunctionWorkers,
        spec: FunctionSpec,
        data: DividedData | None = None,
        on_wait: Callable[[], None] | None = None,
        leaving: Leaving | None = None,
    ) -> None:
        self._workers, self._controller = workers, workers.controller
        self._checkpoints, self._budget = workers.checkpoints, workers.budget
        self._spec, self._data, self._on_wait = spec, data, on_wait or (lambda: None)
        self._leaving = leaving or Leaving()
        self._know_of_signal = False  # True once `get_preemption_info` has reported a signal to the functions
        self._queues = MessageQueues()
        self._answer = b""  # to the question that the functions have asked, pickled
        self._attempt: int | None = None  # `workers.num_started` when the function was last started
        self._joined_attempt: int | None = None
        self._num_changes = 0  # `workers.num_changes` when the function was last started
        self._is_muted = False
        self._next_check = float("-inf")
        self._once = Once()
        self.may_restart = True
        self.returned: list[Any] | None = None
        self.is_over = False

    def start(self) -> None:
        """Start the training function on all workers.

        Raises:
            TrainBackendError: A function is already running.
            WorkersLostError: Workers died more often than the budget allows.
        """
        self._workers.check_free()
        self._workers.current_run = self
        self._budget.renew()
        with self._aborted_on_error():
            self._call(FunctionReplica.start)

    def next_step(self) -> FunctionStep:
        """Wait for the next `FunctionStep` of all workers and return it.

        If the step has a checkpoint, first let the workers store it, or start its transfer to the driver.

        Raises:
            StepMismatchError: The workers' functions did not make the same calls of `report` and `save_checkpoint`.
            WorkerError: A function raised. The error is also an instance of the class that was raised.
            WorkersLostError: Workers were lost, and no retry is left.
            ValueError: A checkpoint lacks the score that ranks it.
            OSError: A checkpoint could not be written.
            Preempted: A signal asked the program to end. The newest checkpoint, if there is one, is stored.
        """
        with self._aborted_on_error():
            if self.may_restart and self._leaving.is_due():
                self._leave()
            step = check_step(self._next_messages())
            while step.checkpoint_ref is not None and not self._take(step, step.checkpoint_ref):
                step = check_step(self._next_messages())  # the checkpoint was lost and will be saved again
            self.may_restart = step.checkpoint_ref is not None
            if step.kind is None and self._know_of_signal:
                self._leave()
            if step.kind is None:
                self.is_over = True
                self.returned = list(step.data)
                self._checkpoints.flush()
                self._end_those_that_wait()
                # End the workers if some of them were added too late to join the training before it finished.
                if self._spec.is_elastic and not self._queues.are_all_there:
                    self._controller.kill_group()
        return step

    def next_reports(self) -> list[dict[str, Any]] | None:
        """Wait for the next report of all workers and return their metrics. Return None if the functions have ended."""
        if self.is_over:
            return None
        while (step := self.next_step()).kind is TrainingResultType.CHECKPOINT:
            pass
        return None if step.kind is None else [self.decoded(data) for data in step.data]

    def decoded(self, data: Any) -> dict[str, Any]:
        """Return a decoded copy of data from a worker, such as metrics, in the format of the backend."""
        return self._workers.decode(decode(data, copy=True) if isinstance(data, EncodedState) else data)

    def finish(self) -> list[Any]:
        """Let the functions run to their end, discard their further reports, and return their results by rank."""
        if not self.is_over:
            self.mute()
        while not self.is_over:
            self.next_step()
        assert self.returned is not None
        return self.returned

    def mute(self) -> None:
        """Discard reports from now on, so that the workers' functions do not wait until their reports are read.

        Checkpoints are still received.
        """
        self._is_muted = True
        with self._aborted_on_error():
            self._call(FunctionReplica.mute)
        self._queues.drop_reports()

    def abort(self, error: BaseException | None = None) -> None:
        """Stop the functions so that another run can start on the workers. Kill the workers if they cannot be reused.

        Args:
            error: The error that ends the run; None if the run is stopped for another reason.
        """
        if self.is_over:
            return
        self.is_over = True
        if self._attempt is None:
            return
        if self._can_be_kept(error):
            self._end_those_that_wait()
        else:
            self._controller.kill_group()

    def _can_be_kept(self, error: BaseException | None) -> bool:
        """Return True if the workers can run another function.

        This is the case if the function has raised an exception on every rank, or if there is only one rank and this
        method can stop its function. If only some ranks failed, the other ranks may still be inside a collective. A
        collective of the next function could then receive the old function's data.
        """
        size = len(self._members)
        if isinstance(error, WorkerError) and len(error.faults) == size:
            return True
        if size > 1 or self._controller.num_workers != size:
            return False
        try:
            return all(self._controller.run(Call(FunctionReplica.end_function), max_retries=0))
        except RaySGDError as failed:  # the call to end the function failed, for example because a worker was lost
            logger.debug("ending the function failed: %s", failed)
            return False

    @contextmanager
    def _aborted_on_error(self) -> Iterator[None]:
        with OnFailure(self.abort):
            try:
                yield
            except WorkerError as error:
                self.abort(error)
                raise
            except WorkersLostError as lost:
                if not self._leaving.is_due():
                    raise
                logger.warning("%s", lost)
                self._leave()

    # --------------------------------------------------------------------------------------------- ending on a signal

    def _leave(self) -> NoReturn:
        """Wait until the newest checkpoint, if any, is stored. Then end the program, because a signal asked for it.

        Raises:
            Preempted: Always.
        """
        newest = self._checkpoints.keep_newest()
        logger.warning(
            "%s: left the run; %s",
            self._leaving.reason,
            "nothing is saved" if newest is None else f"the newest checkpoint is {newest}",
        )
        self._leaving.end_program(newest)

    def _leave_if_late(self) -> None:
        """End the program after a signal if the functions take too long to save a checkpoint."""
        if self._leaving.is_due():
            if self._once.is_first("signal"):
                words = "%s: the run ends at its next checkpoint, or in %g s"
                logger.warning(words, self._leaving.reason, LEAVING_S)
            if self._leaving.since_signal_s > LEAVING_S:
                self._leave()

    def _watch(self) -> None:
        """Call `on_wait`, and end the program if a signal requires it. Called while the driver waits for workers."""
        self._on_wait()
        self._leave_if_late()

    def _find_preemption(self) -> PreemptionInfo | None:
        """Return the answer to `get_preemption_info`: the workers' nodes that will soon be taken away.

        If a signal is ending the program, return all of the workers' nodes.
        """
        if not self._leaving.is_due():
            return self._workers.preemption(None)
        self._know_of_signal = True
        return self._workers.preemption(int((time.time() - self._leaving.since_signal_s + LEAVING_S) * 1000))

    # ---------------------------------------------------------------------------------------------------------- workers

    def _starts(self, worlds: Sequence[World]) -> list[tuple[Any, ...]]:
        """Return each rank's arguments for starting the function, or empty tuples if the function is already running.

        The controller calls this method at each attempt of a call, so this method must not call the controller itself.
        """
        workers = self._workers
        if self._is_running:
            return [()] * len(worlds)
        workers.on_training_start()
        self._checkpoints.begin_attempt()
        self._num_changes = workers.num_changes
        goes_to_all = self._data is None or self._data.goes_to_all
        spec = replace(self._spec, is_muted=self._is_muted, has_parts=not goes_to_all)
        checkpoint = self._checkpoints.restart_point
        shared: Any = None
        if checkpoint is not None:
            [shared, *_] = workers.group.share(lend(checkpoint))
        parts = [None] if self._data is None else self._data(len(worlds), workers.workers.workers)
        if goes_to_all:
            start = spec, shared, parts[0]
            # Standby workers can start with these arguments, too, because the arguments contain no rank's own shard.
            workers.replicas.start = start
            starts = [start] * len(worlds)  # one object for all ranks, so that the engine pickles it only once
        else:
            starts = [(spec, shared, workers.group.store(part).reference) for part in parts]
        self._attempt, self._answer = workers.num_started, b""  # the function will ask its questions again
        return starts

    @property
    def _is_running(self) -> bool:
        """True if the function was started on the current worker group, and not only on an earlier worker group."""
        return self._attempt == self._workers.num_started

    @property
    def _members(self) -> Mapping[Any, int]:
        """The workers that run the function, in rank order, each with a number that says when it joined.

        The number is 0 if the worker was in the group when the function started, and otherwise the number of the group
        change that added the worker. Changes are counted from the start of the function.
        """
        infos = self._workers.group.infos if self._is_running else ()
        return {info: max(0, self._workers.joined.get(info, 0) - self._num_changes) for info in infos}

    @property
    def _can_be_joined(self) -> bool:
        """True if new workers can join the group while the function is running, without a restart."""
        return self._spec.is_elastic and bool(self._workers.replicas.start)

    def _end_those_that_wait(self) -> None:
        """Kill the standby workers that are waiting inside the function. Called when the run is over."""
        if self._spec.is_elastic:
            self._workers.replicas.start = ()
            self._workers.group.standby.kill_all()

    def _call(
        self,
        function: Callable[..., Any],
        args_for: Callable[..., list[tuple[Any, ...]]] | None = None,
        may_continue: bool = True,
        on_wait: Callable[[], None] | None = None,
    ) -> list[Any]:
        is_small = self._controller.num_workers < self._workers.max_workers
        may_grow = is_small and not self._leaving.is_due() and self._may_grow()
        if may_grow:
            self._checkpoints.flush()  # the restart would lose a checkpoint that is still being sent to the driver
        call = Call(
            function,
            args_for or self._starts,
            changes_state=may_grow,
            on_wait=on_wait or self._watch,
            may_continue=may_continue,
        )
        values = self._controller.run(call, budget=self._budget)
        if self._can_be_joined and self._attempt != self._joined_attempt:
            self._joined_attempt = self._attempt
            self._controller.stand_by()
        return values

    def _may_grow(self) -> bool:
        """Return True if resources may be free for more workers and restarting the function would lose no progress.

        If new workers can join without a restart, start standby workers and return False.
        """
        may_join = self._can_be_joined and self._is_running
        now = time.monotonic()
        if not (may_join or self.may_restart) or now < self._next_check:
            return False
        self._next_check = now + self._workers.resize_interval_s
        if may_join and self._controller.admits_others():
            self._controller.stand_by()
            return False
        if not self.may_restart:
            self._next_check = float("-inf")
        return self.may_restart

    # --------------------------------------------------------------------------------------------------------- messages

    def _next_messages(self) -> Sequence[Message | None]:
        """Return the next message of each rank. First answer any questions that the functions ask the driver.

        Ranks that do not report yet have None in place of a message.
        """
        while True:
            self._leave_if_late()
            self._queues.follow(self._attempt, self._members)
            while not self._queues.has_step:
                self._queues.extend(self._call(FunctionReplica.next_messages, self._told_to_take))
                # If a rank's message is still missing, the other ranks are already past the last checkpoint. A restart
                # would lose what they have done since that checkpoint.
                self.may_restart = self.may_restart and self._queues.has_step
            messages, self._answer = self._queues.take_step(), b""
            questions = questions_in(messages)
            if not questions:
                return messages
            is_broadcast = questions[0].name == BROADCAST
            self._answer = questions[0].data if is_broadcast else cloudpickle.dumps(self._find_preemption())

    def _told_to_take(self, worlds: Sequence[World]) -> list[tuple[Any, ...]]:
        """Return each rank's arguments for the remote call of `FunctionReplica.next_messages`."""
        starts, queues = self._starts(worlds), self._queues
        queues.follow(self._attempt, self._members)
        request, by_key = Request(self._checkpoints.next_index, self._answer), dict[Any, tuple[Any, ...]]()
        # Ranks with equal arguments get the same tuple, so that the engine pickles it only once.
        return [
            by_key.setdefault(key, (request, *key[:2], *start))
            for rank, start in enumerate(starts)
            for key in [(queues.is_needed(rank), queues.num_taken(rank) if self._spec.is_elastic else 0, id(start))]
        ]

    def _take(self, step: FunctionStep, checkpoint_ref: CheckpointRef) -> bool:
        """Take over a step's checkpoint: let workers store it, or start its transfer to the driver.

        Return False if the checkpoint was lost.
        """
        for rank, token in step.refused:
            self._controller.ensure_group().submit_beside(rank, FunctionReplica.refuse, token)
        if not self._store(step.stored):
            return False
        receive = None if checkpoint_ref.is_stored else self._receiver(checkpoint_ref, step.source)
        self._checkpoints.add(checkpoint_ref.score, receive)
        return True

    def _store(self, stored: Mapping[int, CheckpointRef]) -> bool:
        """Let waiting ranks store their checkpoint folders, omitting files that lower ranks also have.

        Return False if a checkpoint was not stored, because its function was restarted or could not store it.
        """
        # Do not let the next call restart the function on more workers, because that would lose the folders.
        self.may_restart = False
        taken = taken_names({rank: ref.files or () for rank, ref in stored.items()})
        tokens = {rank: ref.token for rank, ref in stored.items() if ref.token is not None}
        left_out = {rank: names for rank, names in taken.items() if names}
        if left_out and self._once.is_first("taken"):
            logger.warning(
                "%s reported checkpoints with files of the same names as lower ranks, such as `%s`: only those of the "
                "lowest rank are stored. Use names with the rank, or report the folder on one rank",
                named(sorted(left_out)),
                min(left_out.values())[0],
            )
        attempt = self._attempt

        def arguments(worlds: Sequence[World]) -> list[tuple[Any, ...]]:
            starts = self._starts(worlds)
            waiting = tokens if self._attempt == attempt else {}
            return [(waiting.get(rank), taken.get(rank, ()), *start) for rank, start in enumerate(starts)]

        if not tokens:
            return True
        # Do not call `_watch`, which would end the program while folders are stored.
        return all(self._call(FunctionReplica.store, arguments, may_continue=False, on_wait=self._on_wait))

    def _receiver(self, checkpoint_ref: CheckpointRef, source: int) -> Callable[[], dict[str, Any]]:
        """Return a function that returns a checkpoint's content.

        If the content was not sent with the message, start its transfer from the worker now.
        """
        if checkpoint_ref.token is None:
            return lambda: self.decoded(checkpoint_ref.data)
        group = self._controller.ensure_group()
        transfer = group.fetch(source, FunctionReplica.fetch, checkpoint_ref.token)
        return lambda: self.decoded(arrived(transfer, lambda: group.is_cut_off, self._leaving.is_due))


class MessageQueues:
    """The messages that the driver has received from each rank and not used yet, oldest first.

    The messages of a rank that is ahead wait here until all ranks have sent a message for the same step. Messages of
    lost workers are dropped. ADR 94 explains why functions may run ahead of their reports.
    """

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._joined: Mapping[Any, int] = {}
        self._queues: dict[Any, deque[Any]] = {}
        self._nums_taken = Counter[Any]()
        self._met: set[Any] = set()

    def follow(self, attempt: int | None, members: Mapping[Any, int]) -> None:
        """Set the workers whose messages are queued, in rank order, and drop the messages of all other workers.

        Args:
            attempt: Number of the group on which the function was last started. A new number empties all queues.
            members: The workers, each with the number of the group change that added it.
        """
        if attempt != self._attempt:
            self._queues, self._nums_taken, self._met = {}, Counter(), set(members)
        if not self._met.intersection(members):  # all workers that had reported before are lost
            self._met = set(members)
        self._attempt, self._joined = attempt, members
        self._queues = {member: self._queues.get(member, deque()) for member in members}

    @property
    def has_step(self) -> bool:
        """True if the messages for the next step are complete: every rank that reports has sent one."""
        for queue in self._queues.values():
            while queue and isinstance(queue[0], RanksMet):
                number = queue.popleft().number
                self._met |= {member for member, joined in self._joined.items() if joined <= number}
        return bool(self._queues) and all(queue or member not in self._met for member, queue in self._queues.items())

    @property
    def are_all_there(self) -> bool:
        """True if all ranks report. A worker that was added later reports once it has loaded the other ranks' state."""
        return self._met.issuperset(self._queues)

    def is_needed(self, rank: int) -> bool:
        """Return True if the driver must wait for a message of this rank: the rank reports and its queue is empty."""
        member, queue = [*self._queues.items()][rank]
        return not queue and member in self._met

    def num_taken(self, rank: int) -> int:
        """Return the number of messages that the driver has received from this rank."""
        return self._nums_taken[[*self._queues][rank]]

    def extend(self, by_rank: Sequence[Sequence[Message]]) -> None:
        """Append each rank's new messages to the rank's queue."""
        for (member, queue), messages in zip(self._queues.items(), by_rank, strict=True):
            queue.extend(messages)
            self._nums_taken[member] += len(messages)

    def take_step(self) -> list[Message | None]:
        """Remove and return each rank's oldest message, or None for a rank that does not report yet.

        Each reporting rank must have a message.
        """
        return [queue.popleft() if member in self._met else None for member, queue in self._queues.items()]

    def drop_reports(self) -> None:
        """Drop the queued messages that contain only metrics, because reports are no longer read."""
        for member, queue in self._queues.items():
            self._queues[member] = deque(message for message in queue if not is_mere_report(message))


@dataclass(frozen=True)
class FunctionStep:
    """The messages that all workers sent at the same step of their functions: a report, a checkpoint, or the end.

    Attributes:
        kind: The type of the messages in this step, such as a report; None once all functions have finished.
        data: Encoded metrics of all reporting workers, or return values of the functions, in rank order.
        checkpoint_ref: The step's checkpoint; None if the step has none. If some ranks send a checkpoint to the driver
            and others store their own, this is the checkpoint that is sent.
        source: Rank from which the driver gets the checkpoint.
        refused: Ranks whose checkpoint will not be used, each with the checkpoint's token. The functions on these ranks
            wait until the driver calls `FunctionReplica.refuse`.
        stored: By rank, the checkpoints that the workers themselves store.
    """

    kind: TrainingResultType | None
    data: tuple[Any, ...]
    checkpoint_ref: CheckpointRef | None = None
    source: int = 0
    refused: tuple[tuple[int, int], ...] = ()
    stored: Mapping[int, CheckpointRef] = field(default_factory=dict)


def check_step(messages: Sequence[Message | None]) -> FunctionStep:
    """Combine the messages of all workers into one step. A message is None if its worker does not report yet.

    If several ranks want to send a checkpoint, the checkpoint of the lowest rank is used.

    Raises:
        StepMismatchError: The workers' functions did not make the same calls of `report` and `save_checkpoint`.
    """
    ended = [message for message in messages if isinstance(message, FunctionEnded)]
    if len(ended) == sum(message is not None for message in messages):
        return FunctionStep(None, tuple(end.value for end in ended))
    if ended:
        ranks = [rank for rank, message in enumerate(messages) if isinstance(message, FunctionEnded)]
        raise StepMismatchError(
            "The functions made a different number of calls: they ended on "
            f"{named(ranks)}, and still report or save on the others. Every worker has to call `report` and "
            "`save_checkpoint` equally often."
        )
    reports = {rank: message for rank, message in enumerate(messages) if isinstance(message, FunctionMessage)}
    kinds = {message.kind for message in reports.values()}
    if len(kinds) > 1:
        saving = [rank for rank, message in reports.items() if message.kind is TrainingResultType.CHECKPOINT]
        raise StepMismatchError(
            f"The functions are out of step: {named(saving)} called `save_checkpoint` where the others called "
            "`report`. Every worker must make the same calls in the same order."
        )
    refs = {rank: m.checkpoint_ref for rank, m in reports.items() if m.checkpoint_ref is not None}
    stored = {rank: ref for rank, ref in refs.items() if ref.is_stored}
    sent = {rank: ref for rank, ref in refs.items() if not ref.is_stored}
    source = min(sent or stored, default=0)
    refused = tuple((rank, ref.token) for rank, ref in sent.items() if rank != source and ref.token is not None)
    data = tuple(message.data for message in reports.values())
    return FunctionStep(kinds.pop(), data, refs.get(source), source, refused, stored)


def questions_in(messages: Sequence[Any]) -> Sequence[Question]:
    """Return the questions that all ranks' functions ask the driver, or [] if the messages are not questions.

    Raises:
        StepMismatchError: Only some functions asked a question, or they asked different questions.
    """
    sent = {rank: message for rank, message in enumerate(messages) if message is not None}
    names = {rank: message.name if isinstance(message, Question) else None for rank, message in sent.items()}
    if len(set(names.values())) > 1:
        said = ", ".join(f"rank {rank}: {name or type(messages[rank]).__name__}" for rank, name in names.items())
        raise StepMismatchError(
            "The functions are out of step: all workers have to call the functions of `raysgd.train.collective` and "
            f"`{PREEMPTION}` at the same place. What they did: {said}."
        )
    return [message for message in messages if isinstance(message, Question)]


def taken_names(names: Mapping[int, Collection[str]]) -> dict[int, tuple[str, ...]]:
    """Return for each rank the file names that a lower rank also uses.

    >>> taken_names({2: ["rank_2"], 1: ["model", "rank_1"], 0: ["model", "rank_0"]})
    {0: (), 1: ('model',), 2: ()}
    """
    below: set[str] = set()
    taken = {}
    for rank in sorted(names):
        taken[rank] = tuple(name for name in names[rank] if name in below)
        below.update(names[rank])
    return taken


def arrived(transfer: Transfer, is_cut_off: Callable[[], bool], is_ending: Callable[[], bool]) -> Any:
    """Wait until a worker's checkpoint has been transferred to the driver, and return the checkpoint.

    Args:
        transfer: The checkpoint in transit.
        is_cut_off: Returns True if Ray was stopped. To read from Ray's object store would then end this process.
        is_ending: Returns True if the program is about to end.

    Raises:
        CheckpointLostError: The worker died, or Ray was stopped and the program is about to end.
        Exception: The worker could not encode the checkpoint.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    # Without `fetch_local=False`, each wait that ends too early could discard a part that has already arrived.
    while (is_gone := is_cut_off()) or not ray.wait([transfer.reference], timeout=_POLL_S, fetch_local=False)[0]:
        if is_gone and is_ending():
            raise CheckpointLostError("Ray was stopped before the checkpoint was in the driver")
        if is_gone:
            time.sleep(_POLL_S)
    try:
        return transfer.result(None)
    except RayTaskError:
        raise
    except RayError as error:
        raise CheckpointLostError(str(error).partition("\n")[0]) from error
