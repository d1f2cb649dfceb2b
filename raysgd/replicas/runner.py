"""What the replicas of operators have in common: one training call, from its first step to its answer, across losses.

A subclass adds what depends on the framework: how the operator is made, what its state is, and where batches come from.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from raysgd._meters import NUM_SAMPLES
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.engine.replica import Capture
from raysgd.engine.types import Handover, Heartbeat, Held, ReplicaProgress, World
from raysgd.replicas.answering import Answering
from raysgd.replicas.changeable import Changeable
from raysgd.replicas.copies import MidCallSnapshots, PendingCopies
from raysgd.replicas.epoch_run import EpochRun, Gate, HeldAtBoundary, RunState
from raysgd.replicas.epochs import EpochAnswer, EpochRequest, Progress, call_with_accepted
from raysgd.replicas.facts import RunnerFacts
from raysgd.replicas.feed import Feed
from raysgd.replicas.ledger import Ledger, copying, evaluating, regrouping
from raysgd.replicas.logged import completing, counting, forget
from raysgd.replicas.loop import Loop
from raysgd.replicas.prediction import PredictsRounds
from raysgd.replicas.replica_state import ReplicaState
from raysgd.replicas.results import as_number
from raysgd.replicas.running import Running
from raysgd.replicas.streams import Stream, WatchedBatches, redrawing


class ClassRunner(PredictsRounds, Changeable, ABC):
    """Hosts one operator; a `RegroupingReplica` together with what a subclass adds.

    A subclass makes `_operator`, `_loop` and `_state` in `setup`.

    Args:
        world: The place among the replicas.
        snapshot_every_n_steps: How often to copy the state inside a training call.
        feed: Has the data.

    Attributes:
        stock_train_epochs: The `train_epoch`s that are the library's.
    """

    stock_train_epochs: ClassVar[tuple[Any, ...]]
    _settings: Any
    _state: ReplicaState

    def __init__(self, world: World, snapshot_every_n_steps: int | None, feed: Feed) -> None:
        self._world = world
        self._operator: Any = None
        self._feed = feed
        self._loop = Loop(feed)
        self._answering = Answering()
        self._copies = PendingCopies()
        self._running: Running | None = None
        self._run: EpochRun | None = None
        self._inside = MidCallSnapshots(snapshot_every_n_steps)
        self._ledger: Ledger = vars(self).get("_ledger") or Ledger()  # kept by `renew`

    @property
    def epoch(self) -> int:
        """How many passes over the train data were begun."""
        return self._feed.epoch

    @property
    def epochs_done(self) -> int:
        """How many passes over the train data were completed."""
        position = self._feed.position()
        is_mid_pass = position is not None and (position.get("is_mid_pass") or position.get("is_unknown"))
        return self._feed.epoch - bool(is_mid_pass)

    @abstractmethod
    def renew(self, settings: Any) -> Any:
        """Makes a new operator, from other settings, in the group that there is. Returns facts, like `setup`."""

    def change_config(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> list[str]:
        """Changes entries of the config in the operator.

        Args:
            config: That of all workers together, with the new values.
            changed: The values before, by name.

        Returns:
            The names of the entries that surely had no effect but to be there.
        """
        operator = self._operator
        before, settings = dict(operator.config), self._settings
        self._settings = replace(settings, config=config)
        operator.config.update((name, config[name]) for name in changed)
        try:
            operator.config_changed(operator.config, changed)
        except BaseException:
            self._settings = settings
            operator.config.clear()
            operator.config.update(before)
            raise
        return []

    @abstractmethod
    def _facts(self) -> RunnerFacts:
        """What the driver wants to know about this replica."""

    @property
    @abstractmethod
    def _connection_obstacle(self) -> str | None:
        """Why this replica cannot connect with another group at all."""

    @abstractmethod
    def _training(self, run: EpochRun, stream: Any) -> AbstractContextManager[Any]:
        """What has to be around the operator's `train_epoch`."""

    @abstractmethod
    def _evaluating(self) -> AbstractContextManager[Any]:
        """What has to be around the operator's `validate`."""

    @abstractmethod
    def _take_place(self, world: World) -> None:
        """Takes a place in another group, which this process has joined."""

    @abstractmethod
    def _send(self, state: Any, takers: Sequence[int]) -> None:
        """Sends something to other ranks of the group."""

    @abstractmethod
    def _receive(self, source: int, takers: Sequence[int]) -> Any:
        """What another rank sends to `takers`, of which this one is one."""

    def state(self) -> dict[str, Any]:
        """The state; copy before anything else runs."""
        return self._state.read()

    @copying
    def capture(self, landed_token: int | None) -> Capture:
        """Copies the state once: rank 0 what all ranks share, every rank what is its own."""
        self._copies.drop_landed(landed_token)
        return self._copies.claimed(self._with_copy(Capture(self._state.own())))

    @copying
    def _capture_inside(self, run: EpochRun) -> Capture:
        """The same inside a call; a copy that was not fetched gives way to this one."""
        self._copies.drop_unclaimed()
        return self._with_copy(Capture(self._state.own(), progress=run.state(with_metrics=True)))

    def _with_copy(self, part: Capture) -> Capture:
        if self._world.rank:
            self._state.help_copy()
            return part
        return self._copies.add(part, *self._state.copied())

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Takes over a snapshot or a checkpoint; nothing is changed if it does not fit.

        Args:
            shared_state: A copy of the state, or the state itself where it did not have to travel. Nothing of it is
                kept.
            own_state: The random states of this rank; None to keep those that it has.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not fit what is registered.
        """
        state = self._state.decoded(shared_state)
        self._state.check(state)
        if own_state is not None:
            self._state.check_own(own_state)
        self._apply(state)
        self._run = None
        self._inside.clear()
        if own_state is not None:
            self._state.restore_own(own_state)

    def _apply(self, state: Mapping[str, Any]) -> None:
        self._state.apply(state)
        self._loop.note_boundary()

    def shutdown(self) -> None:
        """Drops the iterators, and with them the processes of loaders. The operator itself stays usable."""
        self._feed.close()
        self._running = self._run = None
        self._inside.clear()
        self._copies.clear()

    def fetch(self, token: int) -> Any:
        """The copy of the state that `token` names."""
        return self._copies.fetch(token)

    @property
    def _group_obstacle(self) -> str | None:
        """Why this replica cannot continue in another group at all."""
        return self._connection_obstacle or self._feed.obstacle("train") or self._feed.obstacle("validation")

    @property
    def _epoch_obstacle(self) -> str | None:
        """Why an epoch of this operator can only begin again, even with new workers."""
        operator, name = self._operator, type(self._operator).__name__
        if operator.resumes_epochs is False:
            return f"`{name}` sets `resumes_epochs` to False"
        if operator.resumes_epochs is None and type(operator).train_epoch not in self.stock_train_epochs:
            return f"`{name}` overrides `train_epoch` and does not set `resumes_epochs`"
        return self._feed.obstacle("train")

    def install_callbacks(self, callbacks: Sequence[WorkerCallback]) -> None:
        """Lets these callbacks, and no others, run around each step."""
        self._operator._raysgd.callbacks.install(callbacks, self._operator)
        self._loop.note_boundary()

    def replica_progress(self) -> ReplicaProgress:
        """How far the training call is that broke off or was held, or the last one that was completed."""
        self._ledger.leave_group()
        run, loop, obstacle = self._run, self._loop, self._group_obstacle
        if run is None or run.is_finished:
            num_steps = run.num_completed + 1 if run is not None else 0
            return ReplicaProgress(num_steps, True, obstacle or loop.order_obstacle)
        obstacle = obstacle or self._epoch_obstacle or loop.order_obstacle
        return ReplicaProgress(run.num_completed, loop.is_whole, obstacle, loop.progress_text())

    def heartbeat(self) -> Heartbeat:
        """A sign of life; called from a second thread, so it only reads."""
        run, running = self._run, self._running
        if run is None or run.is_finished:
            return self._heartbeat("between calls" if running is None else running.phase, -1)
        if running is None:
            return self._heartbeat("broken off", run.num_completed)
        num_samples, snapshot = self._loop.num_samples(run), self._inside.newest
        return self._heartbeat("training", run.num_completed, num_samples, snapshot)

    def _heartbeat(self, phase: str, step: int, num_samples: int = 0, snapshot: int = 0) -> Heartbeat:
        own_s, data, spent = self._loop.own_s, self._loop.ledger(), self._ledger.reading()
        return Heartbeat(self.epoch, step, phase, num_samples, snapshot, time.monotonic(), own_s, data, time=spent)

    def propose_hold(self, margin: int, at: int | None) -> int | None:
        """Asks to stop between two steps, from a second thread; see `RegroupingReplica`."""
        run = self._run
        if run is None or run.is_finished or self._running is None or self._epoch_obstacle is not None:
            return None
        step = run.num_completed + margin if at is None else at
        return step if run.gate.propose(step, lambda: run.num_completed) else None

    def settle_hold(self, is_agreed: bool) -> None:
        """Says what became of the proposal."""
        if self._run is not None:
            self._run.gate.settle(is_agreed)

    def part_of_snapshot(self, number: int) -> Capture | None:
        """This rank's part of the snapshot taken inside the running call after `number` steps."""
        part = self._inside.part(number)
        if part is not None and part.token is not None and not self._copies.claim(part.token):
            return None
        return part

    def restore_inside(self, shared_state: Any, own_state: Any, first: RunState, parts: Iterable[RunState]) -> None:
        """Takes over a snapshot that was taken inside a training call, ready to continue the call."""
        self.restore(shared_state, own_state)
        run = EpochRun(first.epoch_idx, first.num_requested, self._loop.new_meters())
        run.count(part.metrics for part in parts)
        run.take_over(first)
        self._run = run

    @regrouping
    def regroup(self, world: World, handover: Handover) -> Any:
        """Continues in the new group; takes over the state of `handover.source` if it is among the takers."""
        self._loop.break_off()
        self._detach()
        self.drop_reload()  # what was made for the group before
        self._world = world
        self._take_place(world)
        self._hand_over(handover)
        if self._world.rank == 0 and self._run is not None:
            self._run.count(part.metrics for part in handover.orphans)
        self._operator.world_changed()
        return self._facts()

    def _hand_over(self, handover: Handover) -> None:
        """Gives all ranks of another group the same state."""
        if self._world.rank == handover.source and handover.takers:
            run = self._run.state(with_metrics=False) if self._run is not None else None
            self._send((self.state(), run), handover.takers)
        elif self._world.rank in handover.takers:
            self._take_over(*self._receive(handover.source, handover.takers))

    def _detach(self) -> None:
        """Leaves the stream as it is: it will be another one, or at another place."""
        self._inside.clear()
        if self._run is not None and not self._run.is_finished:
            self._loop.return_to_boundary()
            self._run.detach()

    def _take_over(self, state: Mapping[str, Any], run: RunState | None) -> None:
        self._state.check(state)
        self._apply(state)
        if run is None:
            self._run = None
            return
        self._run = self._run or EpochRun(run.epoch_idx, run.num_requested, self._loop.new_meters())
        self._run.take_over(run)

    def train_epoch(self, request: EpochRequest, share: Any = None) -> EpochAnswer | Held:
        """Runs the operator's `train_epoch` once.

        Args:
            request: What is asked.
            share: This replica's part of data that the driver divides; None if it has that already.
        """
        self._ledger.begin_call()
        self._loop.begin_call()
        self._feed.take_share("train", request, share)
        stream = self._loop.stream(request)
        self._answering.begin(self._operator, request.profile)
        self._inside.clear()
        self._run = EpochRun(self._loop.pass_index(stream), request.num_steps, self._loop.new_meters())
        return self._go_through(self._run, stream, request)

    def resume_epoch(self, request: EpochRequest, share: Any = None) -> EpochAnswer | Held:
        """Goes on with a `train_epoch` that broke off or was held, wherever in the data it is by now."""
        run = self._run
        if run is None:  # nothing was begun yet when it broke off
            return self.train_epoch(request, share)
        if run.answer is not None:
            return run.answer
        if run.is_finished:  # by another rank's account: there is nothing left but to say what was seen here
            return self._finish(run, self._loop.results(run), request)
        return self._go_through(run, self._loop.stream(request), request)

    def _go_through(self, run: EpochRun, stream: Stream, request: EpochRequest) -> EpochAnswer | Held:
        operator = self._operator
        internals = operator._raysgd
        info = {**request.info, **internals.info_of_call(request.num_steps, run.epoch_idx)}
        epoch_before = self.epoch
        run.attach(stream)
        can_resume = self._loop.can_resume(stream) and self._epoch_obstacle is None
        stream.at_boundary = partial(self._at_boundary, run) if can_resume else self._note_boundary
        coming = iter(()) if run.is_exhausted else stream.take(run.num_steps_left)
        coming = coming if request.redraw is None else redrawing(coming, request.redraw)
        batches = WatchedBatches(self._ledger.timing(coming), self._loop.step)
        began_at = stream.num_steps_taken - run.num_completed
        self._running = Running(stream, began_at, request.num_steps, info, "train")
        internals.meters_to_fill, internals.latest_metrics = run.meters, {}
        forget(internals)
        try:
            with (
                self._ledger.call(self._loop.first_bin),
                self._training(run, stream),
                counting(operator, self._loop.step),
                internals.callbacks.around_steps(operator, self._loop.step),
                self._answering.timed("train_epoch"),
            ):
                internals.callbacks.begin_epoch(run, operator)
                self._loop.note_boundary()
                returned = call_with_accepted(
                    operator.train_epoch, batches, info=info, num_steps=request.num_steps, epoch_idx=run.epoch_idx
                )
                stream.settle()
        except HeldAtBoundary:
            run.gate = Gate()
            return Held(run.num_completed, self._capture_inside(run))
        finally:
            self._running = internals.meters_to_fill = stream.at_boundary = None
        if not batches.was_touched and self.epoch == epoch_before:
            self._feed.begin_pass()  # one that brought its own data
        return self._finish(run, returned, request, place=self._feed.place_of_call(stream))

    def _finish(self, run: EpochRun, returned: Any, request: EpochRequest, place: Any = None) -> EpochAnswer:
        operator, loop = self._operator, self._loop
        returned = operator._raysgd.callbacks.end_epoch(operator, returned)
        extra = loop.extra_results()
        extra = {**extra, "timings": self._ledger.of_call()} if request.profile else extra
        answer = self._answering.answer(operator, returned, request, run.num_completed, loop.plain, extra)
        told = answer.metrics.values.get(NUM_SAMPLES) if answer.metrics is not None else None
        num_samples = int(told) if isinstance(told, int | float) else self._loop.num_samples(run)
        heartbeat = self._heartbeat("between calls", -1, num_samples)
        answer = replace(answer, epoch_idx=run.epoch_idx, heartbeat=heartbeat, place=place)
        run.finish(answer)
        self._loop.end_call()
        self._ledger.end_call()
        return answer

    @evaluating
    def validate(self, request: EpochRequest, share: Any = None) -> EpochAnswer:
        """Runs the operator's `validate` once; arguments as in `train_epoch`."""
        operator, options = self._operator, self._loop.validation_options(request)
        self._answering.begin(self._operator, request.profile)
        self._feed.take_share("validation", request, share)
        if self._feed.ray_loader("validation") is not None:  # all ranks have to begin a pass together
            request = replace(request, starts_over=True)
        forget(operator._raysgd)
        with self._evaluating(), completing(operator), self._feed.validation.stream(request) as stream:
            began_at = stream.num_steps_taken
            self._running = Running(stream, began_at, request.num_steps, request.info, "validation")
            operator._raysgd.latest_metrics = {}
            try:
                batches = stream.take(request.num_steps)
                batches = batches if request.redraw is None else redrawing(batches, request.redraw)
                with self._answering.timed("validation"):
                    returned = call_with_accepted(operator.validate, batches, info=dict(request.info), **options)
            finally:
                self._running = None
        num_steps = stream.num_steps_taken - began_at
        answer = self._answering.answer(operator, returned, request, num_steps, self._loop.plain)
        return replace(answer, epoch_idx=max(0, self.epoch - 1))

    def _at_boundary(self, run: EpochRun) -> None:
        """Between two steps: takes a snapshot if one is due, and stops if that was agreed on."""
        self._note_boundary()
        num_completed = run.num_completed
        if self._inside.is_due(num_completed):
            self._inside.keep(num_completed, self._capture_inside(run))
        if run.gate.stops(num_completed):
            raise HeldAtBoundary

    def _note_boundary(self) -> None:
        self._loop.note_boundary()
        self._ledger.commit()

    def progress(self) -> Progress | None:
        """How far the running call is; called from a second thread, so it only reads."""
        running = self._running
        if running is None:
            return None
        latest = {name: as_number(value) for name, value in self._operator._raysgd.latest_metrics.items()}
        return running.progress({k: v for k, v in latest.items() if v is not None}, max(0, self.epoch - 1))
