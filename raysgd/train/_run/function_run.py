"""One run of a function on all workers: a sequence of small calls to the controller, the only one that retries.

A call asks every worker for the next message of its function. When the group was replaced since the last call, the same
call starts the function there, from the newest checkpoint of the run: `Launch` makes what that takes.

Why a function starts with the call that asks for its next step: ADR 94. Why workers are replaced after a failed run:
ADR 7.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from raysgd._state.state_codec import EncodedState, decode
from raysgd._text.log_lines import Once, named
from raysgd.engine.controller import ElasticController
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import World
from raysgd.exceptions import StepMismatchError, WorkerError
from raysgd.train._rules.arrivals import CheckpointLostError, CheckpointTaker
from raysgd.train._rules.max_retries import LossCounter
from raysgd.train._run.answers import answer_to, questions_in
from raysgd.train._run.launch import Launch
from raysgd.train._worker.ahead import MessageQueues
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.mailbox import FunctionEnded
from raysgd.train._worker.messages import CheckpointRef, FunctionMessage, Question, TrainingResultType
from raysgd.train._worker.stored_files import taken_names

logger = logging.getLogger(__name__)


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


def check_step(messages: Sequence[FunctionMessage | FunctionEnded | Question | None]) -> FunctionStep:
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


class FunctionRun:
    """One run.

    Attributes:
        may_restart: Whether nothing would be lost if the function was started again right now.
        returned: What the functions returned, by rank, once they have.
        is_over: Whether they have ended, in whatever way.

    Args:
        controller: Keeps the workers alive.
        launch: Starts the function on a group.
        decode: Undoes the encoding of what leaves a worker.
        checkpoints: Takes the checkpoints.
        retries: Counts the restarts that the run may use up.
        max_workers: With fewer, more are looked for where a restart loses nothing: at the start and after a checkpoint.
        resize_check_s: How often to look.
        now: The clock.
        on_wait: Called some ten times a second while a step is waited for.
        answers: What functions may ask for, by name.
    """

    def __init__(
        self,
        controller: ElasticController,
        launch: Launch,
        decode: Callable[[Any], dict[str, Any]],
        checkpoints: CheckpointTaker,
        retries: LossCounter,
        max_workers: int = 1,
        resize_check_s: float = 60.0,
        now: Callable[[], float] = time.monotonic,
        on_wait: Callable[[], None] | None = None,
        answers: Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        self._controller = controller
        self._answers = answers or {}
        self._launch = launch
        self._decode = decode
        self._checkpoints = checkpoints
        self._retries = retries
        self._ahead = MessageQueues()
        self._max_workers = max_workers
        self._resize_check_s = resize_check_s
        self._now = now
        self._on_wait = on_wait
        self._next_check = float("-inf")
        self._once = Once()
        self._joined_attempt: int | None = None
        self.may_restart = True
        self.returned: list[Any] | None = None
        self.is_over = False

    def start(self) -> None:
        """Starts the function on all workers.

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
            step = self._taken_step()
            self.may_restart = step.checkpoint_ref is not None
            if step.kind is None:
                self.is_over = True
                self.returned = list(step.data)
                self._checkpoints.flush()
                self._end_those_that_wait()
        return step

    def _end_those_that_wait(self) -> None:
        """Ends the workers that would have stepped in: those beside the group, and those in it that came too late."""
        if self._launch.is_elastic:
            self._launch.end()
            if not self._ahead.are_all_there:
                self._controller.kill_group()

    def _taken_step(self) -> FunctionStep:
        messages = self._next_messages()
        while questions := questions_in(messages):
            self._answer(answer_to(questions, self._answers))
            messages = self._next_messages()
        step = check_step(messages)
        if step.checkpoint_ref is None or self._take(step, step.checkpoint_ref):
            return step
        return self._taken_step()  # the functions were started again, and come to this one once more

    def _next_messages(self) -> Sequence[FunctionMessage | FunctionEnded | Question | None]:
        """The next message of each rank that reports."""
        self._ahead.begin(self._launch.attempt, self._launch.members)
        while not self._ahead.has_step:
            self._ahead.add(self._call(FunctionReplica.take, self._told))
            self.may_restart = self.may_restart and self._ahead.has_step  # else steps were taken since the checkpoint
        return self._ahead.take_step()

    def _answer(self, answer: bytes) -> None:
        """Lets the functions go on with an answer."""
        self._call(FunctionReplica.answer, lambda worlds: [(answer, *start) for start in self._launch(worlds)])

    @contextmanager
    def _aborted_on_error(self) -> Iterator[None]:
        try:
            with self._retries.named():
                yield
        except BaseException as error:
            self.abort(error)
            raise

    def next_reports(self) -> list[dict[str, Any]] | None:
        """The metrics of all workers at their next report; None when the functions have ended."""
        if self.is_over:
            return None
        while (step := self.next_step()).kind is TrainingResultType.CHECKPOINT:
            pass
        return None if step.kind is None else self.decoded(step)

    def decoded(self, step: FunctionStep) -> list[dict[str, Any]]:
        """The metrics in a step."""
        return [self._unpacked(data) for data in step.data]

    def decoded_by(self, rank: int, step: FunctionStep) -> dict[str, Any]:
        """The metrics of one rank in a step."""
        return self._unpacked(step.data[rank])

    def finish(self) -> list[Any]:
        """Lets the functions come to their end without their reports; what they returned, by rank."""
        if not self.is_over:
            self.mute()
        while not self.is_over:
            self.next_step()
        assert self.returned is not None
        return self.returned

    def mute(self) -> None:
        """From here on reports are not waited for; checkpoints are."""
        self._launch.is_muted = True
        with self._aborted_on_error():
            self._call(FunctionReplica.mute)
        self._ahead.drop_reports()

    def abort(self, error: BaseException | None = None) -> None:
        """Ends the functions, wherever they are, so that the workers are free for another run."""
        if self.is_over:
            return
        self.is_over = True
        if self._launch.attempt is None:
            return
        if not self._can_be_kept(error):
            self._controller.kill_group()
        elif self._launch.is_elastic:
            self._launch.end()

    def _can_be_kept(self, error: BaseException | None) -> bool:
        """Tells whether the workers are as good as new: all functions ended alike, or the only one there was has ended.

        Where some ranks failed and others did not, the others may be in the middle of a collective, and the
        next collective would get the answers of that one.
        """
        size = len(self._launch.members)
        if isinstance(error, WorkerError) and len(error.faults) == size:
            return True
        if size > 1 or self._controller.num_workers != size:
            return False
        try:
            return all(self._controller.run(Call(FunctionReplica.end), max_retries=0))
        except Exception as failed:
            logger.debug("ending the function failed: %s", failed)
            return False

    def _told(self, worlds: Sequence[World]) -> list[tuple[Any, ...]]:
        """Returns the workers' arguments: the number of their next checkpoint, and whether a message is needed."""
        starts, ahead = self._launch(worlds), self._ahead
        ahead.begin(self._launch.attempt, self._launch.members)
        index, told = self._checkpoints.next_index, dict[Any, tuple[Any, ...]]()
        # Ranks that are told the same get one object: the engine then packs it once.
        return [
            told.setdefault(key, (index, *key[:2], *start))
            for rank, start in enumerate(starts)
            for key in [(ahead.is_needed(rank), ahead.num_taken(rank) if self._launch.is_elastic else 0, id(start))]
        ]

    def _call(
        self,
        function: Callable[..., Any],
        args_for: Callable[..., list[tuple[Any, ...]]] | None = None,
        may_rejoin: bool = True,
    ) -> list[Any]:
        may_grow = self._controller.num_workers < self._max_workers and self._may_grow()
        if may_grow:
            self._checkpoints.flush()  # what is on its way would be lost with the workers that make place
        call = Call(
            function, args_for or self._launch, changes_state=may_grow, on_wait=self._on_wait, may_rejoin=may_rejoin
        )
        values = self._controller.run(call, budget=self._retries.budget)
        if self._launch.can_be_joined and self._launch.attempt != self._joined_attempt:
            self._joined_attempt = self._launch.attempt
            self._controller.stand_by()
        return values

    def _may_grow(self) -> bool:
        """Return whether to start the function again on more workers, where there is room and nothing is lost by that.

        Where it can be joined, workers are started that step in when they are ready.
        """
        may_join = self._launch.can_be_joined and self._launch.has_started
        if not (may_join or self.may_restart) or not self._is_due():
            return False
        if may_join and self._controller.admits_others():
            self._controller.stand_by()
            return False
        if not self.may_restart:
            self._next_check = float("-inf")
        return self.may_restart

    def _is_due(self) -> bool:
        """Return whether it is time to look for room again."""
        now = self._now()
        if now < self._next_check:
            return False
        self._next_check = now + self._resize_check_s
        return True

    def _take(self, step: FunctionStep, checkpoint_ref: CheckpointRef) -> bool:
        """Takes the checkpoint of a step; returns False where it was lost before it was stored."""
        for rank, token in step.refused:
            self._controller.ensure_group().submit_beside(rank, FunctionReplica.refuse, token)
        if not self._store(step.stored):
            return False
        receive = None if checkpoint_ref.is_stored else self._receiver(checkpoint_ref, step.source)
        self._checkpoints.add(checkpoint_ref.score, receive)
        return True

    def _store(self, stored: Mapping[int, CheckpointRef]) -> bool:
        """Lets the ranks that wait for that store their folders: first those that use no name of a lower one."""
        self.may_restart = False  # or the group might grow, and lose them
        taken = taken_names({rank: ref.files or () for rank, ref in stored.items()})
        waiting = {rank: ref.token for rank, ref in stored.items() if ref.token is not None}
        for is_taken in (False, True):
            tokens = {rank: token for rank, token in waiting.items() if bool(taken[rank]) is is_taken}
            told = self._told_to_store(tokens, taken)
            moved = self._call(FunctionReplica.store, told, may_rejoin=False) if tokens else []
            if None in moved:
                return False
            self._warn_of({rank: names for rank, names in enumerate(moved) if names})
        return True

    def _told_to_store(
        self, tokens: Mapping[int, int], taken: Mapping[int, Sequence[str]]
    ) -> Callable[[Sequence[World]], list[tuple[Any, ...]]]:
        attempt = self._launch.attempt

        def told(worlds: Sequence[World]) -> list[tuple[Any, ...]]:
            starts = self._launch(worlds)
            waiting = tokens if self._launch.attempt == attempt else {}
            return [(waiting.get(rank), taken.get(rank, ()), *start) for rank, start in enumerate(starts)]

        return told

    def _warn_of(self, moved: Mapping[int, Sequence[str]]) -> None:
        """Says, once, that ranks use one name for different files."""
        if moved and self._once.is_first("moved"):
            names = sorted({name for names in moved.values() for name in names})
            logger.warning(
                "%s reported checkpoints with files of the same names as lower ranks, but other content: %s. The files "
                "of the lowest rank keep their names; the others' end in `.rank_%d` and so on. Use names with the "
                "rank, or report the folder on one rank",
                named(sorted(moved)),
                ", ".join(f"`{name}`" for name in names[:5]),
                min(moved),
            )

    def _receiver(self, checkpoint_ref: CheckpointRef, source: int) -> Callable[[], dict[str, Any]]:
        """Gets a checkpoint: out of the message, or from the worker that holds it."""
        if checkpoint_ref.token is None:
            return lambda: self._unpacked(checkpoint_ref.data)
        transfer = self._controller.ensure_group().fetch(source, FunctionReplica.fetch, checkpoint_ref.token)
        return lambda: self._unpacked(_arrived(transfer))

    def _unpacked(self, data: Any) -> dict[str, Any]:
        """Return what a worker encoded, in separate memory, then read by the backend."""
        return self._decode(decode(data, copy=True) if isinstance(data, EncodedState) else data)


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
