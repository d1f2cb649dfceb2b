"""One run of a function on all workers: a sequence of small calls to the controller, the only one that retries.

A call asks every worker for the next message of its function. When the group was replaced since the last call, the same
call starts the function there, from the newest checkpoint of the run.

Why a function starts with the call that asks for its next step: ADR 94. Why workers are replaced after a failed run:
ADR 7.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle

from raysgd._state.state_codec import EncodedState, decode, lend
from raysgd._text.log_lines import Once, named
from raysgd.air.reports import PreemptionInfo
from raysgd.engine.controller import ElasticController
from raysgd.engine.policies import RetryBudget
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import World
from raysgd.exceptions import OnFailure, RaySGDError, StepMismatchError, WorkerError
from raysgd.train._plugin_hooks import PluginHooks
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
    TrainingResultType,
    is_mere_report,
)
from raysgd.train._worker.shards import DividedData
from raysgd.train.checkpoint import CheckpointLostError, CheckpointTaker

logger = logging.getLogger(__name__)


class FunctionRun:
    """One run.

    Attributes:
        may_restart: Whether nothing would be lost if the function was started again right now.
        returned: What the functions returned, by rank, once they have.
        is_over: Whether they have ended, in whatever way.

    Args:
        controller: Keeps the workers alive.
        hooks: Knows the workers that run now.
        spec: The function.
        checkpoints: Takes the checkpoints.
        budget: The restarts that the run may use up.
        decode: Undoes the encoding of what leaves a worker.
        data: Divides the data; None for none.
        max_workers: With fewer, more are looked for where a restart loses nothing: at the start and after a checkpoint.
        resize_interval_s: How often to look.
        on_wait: Called some ten times a second while a step is waited for.
        preemption: Says which nodes are about to be taken away.
    """

    def __init__(
        self,
        controller: ElasticController,
        hooks: PluginHooks,
        spec: FunctionSpec,
        checkpoints: CheckpointTaker,
        budget: RetryBudget,
        decode: Callable[[Any], dict[str, Any]],
        data: DividedData | None = None,
        max_workers: int = 1,
        resize_interval_s: float = 60.0,
        on_wait: Callable[[], None] | None = None,
        preemption: Callable[[], PreemptionInfo | None] = lambda: None,
    ) -> None:
        self._controller, self._hooks = controller, hooks
        self._spec, self._data, self._decode = spec, data, decode
        self._checkpoints, self._budget = checkpoints, budget
        self._max_workers, self._resize_interval_s = max_workers, resize_interval_s
        self._on_wait, self._preemption = on_wait, preemption
        self._queues = MessageQueues()
        self._attempt: int | None = None  # the group of workers that the function was started on last
        self._joined_attempt: int | None = None
        self._num_changes = 0  # of the group, before the function began
        self._is_muted = False
        self._next_check = float("-inf")
        self._once = Once()
        self.may_restart = True
        self.returned: list[Any] | None = None
        self.is_over = False

    def start(self) -> None:
        """Start the function on all workers.

        Raises:
            WorkersLostError: They were lost, again and again.
        """
        with self._aborted_on_error():
            self._call(FunctionReplica.start)

    def next_step(self) -> FunctionStep:
        """The next step of all workers; its checkpoint, if any, is taken over.

        Raises:
            StepMismatchError: The functions are out of step.
            WorkerError: A function raised; of that class too.
            WorkersLostError: Workers were lost, and no restart is left.
            ValueError: A checkpoint lacks its score.
        """
        with self._aborted_on_error():
            step = check_step(self._next_messages())
            while step.checkpoint_ref is not None and not self._take(step, step.checkpoint_ref):
                step = check_step(self._next_messages())  # the functions were started again, and come to this one again
            self.may_restart = step.checkpoint_ref is not None
            if step.kind is None:
                self.is_over = True
                self.returned = list(step.data)
                self._checkpoints.flush()
                self._end_those_that_wait()
                if self._spec.is_elastic and not self._queues.are_all_there:  # some stepped in too late
                    self._controller.kill_group()
        return step

    def next_reports(self) -> list[dict[str, Any]] | None:
        """The metrics of all workers at their next report; None when the functions have ended."""
        if self.is_over:
            return None
        while (step := self.next_step()).kind is TrainingResultType.CHECKPOINT:
            pass
        return None if step.kind is None else [self.decoded(data) for data in step.data]

    def decoded(self, data: Any) -> dict[str, Any]:
        """Return what a worker encoded, such as metrics, in separate memory and as the backend reads it."""
        return self._decode(decode(data, copy=True) if isinstance(data, EncodedState) else data)

    def finish(self) -> list[Any]:
        """Let the functions come to their end without their reports; what they returned, by rank."""
        if not self.is_over:
            self.mute()
        while not self.is_over:
            self.next_step()
        assert self.returned is not None
        return self.returned

    def mute(self) -> None:
        """From here on reports are not waited for; checkpoints are."""
        self._is_muted = True
        with self._aborted_on_error():
            self._call(FunctionReplica.mute)
        self._queues.drop_reports()

    def abort(self, error: BaseException | None = None) -> None:
        """End the functions, wherever they are, so that the workers are free for another run."""
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
        """Tell whether the workers are as good as new: all functions ended alike, or the only one there was has ended.

        Where some ranks failed and others did not, the others may be in the middle of a collective, and the
        next collective would get the answers of that one.
        """
        size = len(self._members)
        if isinstance(error, WorkerError) and len(error.faults) == size:
            return True
        if size > 1 or self._controller.num_workers != size:
            return False
        try:
            return all(self._controller.run(Call(FunctionReplica.end_function), max_retries=0))
        except RaySGDError as failed:  # a worker was lost, or something else ended the call
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

    # --------------------------------------------------------------------------------------- the workers that run it

    def _starts(self, worlds: Sequence[World]) -> list[tuple[Any, ...]]:
        """Return the arguments that start the function on each rank of a group; none where it runs.

        The controller asks for them at each attempt. There is no way back from here to the controller: the group is the
        one that the hooks saw start.
        """
        hooks = self._hooks
        if self._is_running:
            return [()] * len(worlds)
        hooks.on_training_start()
        self._checkpoints.begin_attempt()
        self._num_changes = hooks.num_changes
        is_whole = self._data is None or self._data.is_whole
        spec = replace(self._spec, is_muted=self._is_muted, has_parts=not is_whole)
        checkpoint = self._checkpoints.restart_point
        shared: Any = None
        if checkpoint is not None:
            [shared, *_] = hooks.group.share(lend(checkpoint))
        parts = [None] if self._data is None else self._data(len(worlds), hooks.workers.workers)
        if is_whole:
            start = spec, shared, parts[0]
            hooks.replicas.start = start  # of data that are divided there is no part for who comes later
            starts = [start] * len(worlds)  # one object: the engine then packs it once
        else:
            starts = [(spec, shared, hooks.store(part)) for part in parts]
        self._attempt = hooks.num_started
        return starts

    @property
    def _is_running(self) -> bool:
        """True if the function runs on the workers that there are, or on those that are left of them."""
        return self._attempt == self._hooks.num_started

    @property
    def _members(self) -> Mapping[Any, int]:
        """The name of each worker on which it runs, by rank, whatever its rank was before.

        With it comes the number of the group, since the function began, in which it stepped in; 0 where it did not.
        """
        infos = self._hooks.group.infos if self._is_running else ()
        return {info: max(0, self._hooks.joined.get(info, 0) - self._num_changes) for info in infos}

    @property
    def _can_be_joined(self) -> bool:
        """True if others can step in where the function is."""
        return self._spec.is_elastic and bool(self._hooks.replicas.start)

    def _end_those_that_wait(self) -> None:
        """End the workers beside the group that would have stepped in: they run the function in advance."""
        if self._spec.is_elastic:
            self._hooks.replicas.start = ()
            self._hooks.group.standby.kill_all()

    def _call(
        self,
        function: Callable[..., Any],
        args_for: Callable[..., list[tuple[Any, ...]]] | None = None,
        may_continue: bool = True,
    ) -> list[Any]:
        may_grow = self._controller.num_workers < self._max_workers and self._may_grow()
        if may_grow:
            self._checkpoints.flush()  # what is on its way would be lost with the workers that make place
        call = Call(
            function, args_for or self._starts, changes_state=may_grow, on_wait=self._on_wait, may_continue=may_continue
        )
        values = self._controller.run(call, budget=self._budget)
        if self._can_be_joined and self._attempt != self._joined_attempt:
            self._joined_attempt = self._attempt
            self._controller.stand_by()
        return values

    def _may_grow(self) -> bool:
        """Return whether to start the function again on more workers, where there is room and nothing is lost by that.

        Where it can be joined, workers are started that step in when they are ready.
        """
        may_join = self._can_be_joined and self._is_running
        now = time.monotonic()
        if not (may_join or self.may_restart) or now < self._next_check:
            return False
        self._next_check = now + self._resize_interval_s
        if may_join and self._controller.admits_others():
            self._controller.stand_by()
            return False
        if not self.may_restart:
            self._next_check = float("-inf")
        return self.may_restart

    # ------------------------------------------------------------------------------------------------- what they say

    def _next_messages(self) -> Sequence[Message | None]:
        """The next message of each rank that reports, once their questions are answered."""
        while True:
            self._queues.follow(self._attempt, self._members)
            while not self._queues.has_step:
                self._queues.extend(self._call(FunctionReplica.next_messages, self._told_to_take))
                self.may_restart = self.may_restart and self._queues.has_step  # else steps came behind the checkpoint
            messages = self._queues.take_step()
            questions = questions_in(messages)
            if not questions:
                return messages
            answer = answer_to(questions, self._preemption)
            self._call(
                FunctionReplica.answer,
                lambda worlds, answer=answer: [(answer, *start) for start in self._starts(worlds)],
            )

    def _told_to_take(self, worlds: Sequence[World]) -> list[tuple[Any, ...]]:
        """Return the workers' arguments: the number of their next checkpoint, and whether a message is needed."""
        starts, queues = self._starts(worlds), self._queues
        queues.follow(self._attempt, self._members)
        index, told = self._checkpoints.next_index, dict[Any, tuple[Any, ...]]()
        # Ranks that are told the same get one object: the engine then packs it once.
        return [
            told.setdefault(key, (index, *key[:2], *start))
            for rank, start in enumerate(starts)
            for key in [(queues.is_needed(rank), queues.num_taken(rank) if self._spec.is_elastic else 0, id(start))]
        ]

    def _take(self, step: FunctionStep, checkpoint_ref: CheckpointRef) -> bool:
        """Take the checkpoint of a step; return False where it was lost before it was stored."""
        for rank, token in step.refused:
            self._controller.ensure_group().submit_beside(rank, FunctionReplica.refuse, token)
        if not self._store(step.stored):
            return False
        receive = None if checkpoint_ref.is_stored else self._receiver(checkpoint_ref, step.source)
        self._checkpoints.add(checkpoint_ref.score, receive)
        return True

    def _store(self, stored: Mapping[int, CheckpointRef]) -> bool:
        """Let the ranks that wait for that store their folders, without the names that lower ranks use."""
        self.may_restart = False  # or the group might grow, and lose them
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
        told = self._told_to_store(tokens, taken)
        return all(self._call(FunctionReplica.store, told, may_continue=False)) if tokens else True

    def _told_to_store(
        self, tokens: Mapping[int, int], taken: Mapping[int, Sequence[str]]
    ) -> Callable[[Sequence[World]], list[tuple[Any, ...]]]:
        attempt = self._attempt

        def told(worlds: Sequence[World]) -> list[tuple[Any, ...]]:
            starts = self._starts(worlds)
            waiting = tokens if self._attempt == attempt else {}
            return [(waiting.get(rank), taken.get(rank, ()), *start) for rank, start in enumerate(starts)]

        return told

    def _receiver(self, checkpoint_ref: CheckpointRef, source: int) -> Callable[[], dict[str, Any]]:
        """Get a checkpoint: out of the message, or from the worker that holds it."""
        if checkpoint_ref.token is None:
            return lambda: self.decoded(checkpoint_ref.data)
        transfer = self._controller.ensure_group().fetch(source, FunctionReplica.fetch, checkpoint_ref.token)
        return lambda: self.decoded(_arrived(transfer))


class MessageQueues:
    """The messages of each rank until there is the same step of all: oldest first, those of lost workers dropped.

    Why functions may run ahead of their reports: ADR 94.
    """

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._members: Sequence[Any] = ()
        self._queues: list[deque[Any]] = []
        self._nums_taken: list[int] = []
        self._met: set[Any] = set()
        self._joined: Mapping[Any, int] = {}

    def follow(self, attempt: int | None, members: Mapping[Any, int]) -> None:
        """Say which workers messages come from, by rank; of others nothing is kept.

        Args:
            attempt: How often functions were started: those that start again have told nothing yet.
            members: What each worker is known by, with the number of the group in which it stepped in.
        """
        known = dict(zip(self._members, zip(self._queues, self._nums_taken, strict=True), strict=True))
        if attempt != self._attempt:
            known, self._met = {}, set(members)
        if not self._met.intersection(members):  # those that they have met are all lost by now
            self._met = set(members)
        self._joined = members
        kept = [known.get(member, (deque(), 0)) for member in members]
        self._attempt, self._members = attempt, tuple(members)
        self._queues, self._nums_taken = [queue for queue, _ in kept], [number for _, number in kept]

    @property
    def has_step(self) -> bool:
        """True if there is a message of each rank that reports."""
        for queue in self._queues:
            while queue and isinstance(queue[0], RanksMet):
                number = queue.popleft().number
                self._met |= {member for member, joined in self._joined.items() if joined <= number}
        return bool(self._queues) and all(self._queues[rank] for rank in self._reporting)

    @property
    def _reporting(self) -> list[int]:
        """The ranks that report: those that have stepped in do when they have met the others."""
        return [rank for rank, member in enumerate(self._members) if member in self._met]

    @property
    def are_all_there(self) -> bool:
        """True if all ranks report."""
        return len(self._reporting) == len(self._members)

    def is_needed(self, rank: int) -> bool:
        """Return whether there is none of this rank, and it reports."""
        return not self._queues[rank] and self._members[rank] in self._met

    def num_taken(self, rank: int) -> int:
        """Return how many messages of this rank have come so far."""
        return self._nums_taken[rank]

    def extend(self, found: Sequence[Sequence[Message]]) -> None:
        """Take what the ranks answered."""
        for rank, messages in enumerate(found):
            self._queues[rank].extend(messages)
            self._nums_taken[rank] += len(messages)

    def take_step(self) -> list[Message | None]:
        """The oldest message of each rank, of which there has to be one; None of a rank that does not report yet."""
        reporting = self._reporting
        return [queue.popleft() if rank in reporting else None for rank, queue in enumerate(self._queues)]

    def drop_reports(self) -> None:
        """Drop reports that carry only metrics, as the workers do with theirs once they are muted."""
        self._queues = [deque(message for message in queue if not is_mere_report(message)) for queue in self._queues]


@dataclass(frozen=True)
class FunctionStep:
    """One step of the functions on all workers.

    Attributes:
        kind: Metrics or a checkpoint; None when all functions have ended.
        data: The encoded metrics of all workers that report, or what the functions returned, by rank.
        checkpoint_ref: The checkpoint, if there is one. Of one that travels and one that is stored, that which travels.
        source: The rank that has it.
        refused: The tokens of checkpoints that other ranks have too, and wait to hear about, by rank.
        stored: The checkpoints that ranks store themselves, by rank.
    """

    kind: TrainingResultType | None
    data: tuple[Any, ...]
    checkpoint_ref: CheckpointRef | None = None
    source: int = 0
    refused: tuple[tuple[int, int], ...] = ()
    stored: Mapping[int, CheckpointRef] = field(default_factory=dict)


def check_step(messages: Sequence[Message | None]) -> FunctionStep:
    """One step out of the workers' messages; None of those that do not report yet.

    Raises:
        StepMismatchError: They are not of the same kind.
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
    found = {rank: message for rank, message in enumerate(messages) if isinstance(message, FunctionMessage)}
    kinds = {message.kind for message in found.values()}
    if len(kinds) > 1:
        saving = [rank for rank, message in found.items() if message.kind is TrainingResultType.CHECKPOINT]
        raise StepMismatchError(
            f"The functions are out of step: {named(saving)} called `save_checkpoint` where the others called "
            "`report`. Every worker must make the same calls in the same order."
        )
    return _step_of(found, kinds.pop())


def _step_of(found: Mapping[int, FunctionMessage], kind: TrainingResultType) -> FunctionStep:
    """The step that messages of one kind make; of checkpoints that are not stored yet, the lowest rank's is used."""
    refs = {rank: m.checkpoint_ref for rank, m in found.items() if m.checkpoint_ref is not None}
    stored = {rank: ref for rank, ref in refs.items() if ref.is_stored}
    sent = {rank: ref for rank, ref in refs.items() if not ref.is_stored}
    source = min(sent or stored, default=0)
    refused = tuple((rank, ref.token) for rank, ref in sent.items() if rank != source and ref.token is not None)
    data = tuple(message.data for message in found.values())
    return FunctionStep(kind, data, refs.get(source), source, refused, stored)


def questions_in(messages: Sequence[Any]) -> Sequence[Question]:
    """Return what all functions ask; nothing where they do something else.

    Raises:
        StepMismatchError: Some ask, and others do not, or ask for something else.
    """
    told = {rank: message for rank, message in enumerate(messages) if message is not None}
    names = {rank: message.name if isinstance(message, Question) else None for rank, message in told.items()}
    if len(set(names.values())) > 1:
        said = ", ".join(f"rank {rank}: {name or type(messages[rank]).__name__}" for rank, name in names.items())
        raise StepMismatchError(
            "The functions are out of step: all workers have to call the functions of `raysgd.train.collective` and "
            f"`{PREEMPTION}` at the same place. What they did: {said}."
        )
    return [message for message in messages if isinstance(message, Question)]


def answer_to(questions: Sequence[Question], preemption: Callable[[], PreemptionInfo | None]) -> bytes:
    """Return the answer for all ranks, pickled."""
    answer: bytes = questions[0].data if questions[0].name == BROADCAST else cloudpickle.dumps(preemption())
    return answer


def taken_names(names: Mapping[int, Collection[str]]) -> dict[int, tuple[str, ...]]:
    """Return the names of each rank that a lower one uses too.

    >>> taken_names({2: ["rank_2"], 1: ["model", "rank_1"], 0: ["model", "rank_0"]})
    {0: (), 1: ('model',), 2: ()}
    """
    below: set[str] = set()
    taken = {}
    for rank in sorted(names):
        taken[rank] = tuple(name for name in names[rank] if name in below)
        below.update(names[rank])
    return taken


def _arrived(transfer: Any) -> Any:
    """Return what a worker sent, waiting for it.

    Raises:
        CheckpointLostError: The worker is gone.
        Exception: The worker could not encode it.
    """
    from ray.exceptions import RayError, RayTaskError

    try:
        return transfer.result(None)
    except RayTaskError:
        raise
    except RayError as error:
        raise CheckpointLostError(str(error).partition("\n")[0]) from error
