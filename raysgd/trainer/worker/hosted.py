"""`HostedOperator`: the training operator in a worker, together with its data, its training loop and its state.

A worker has one operator at a time, and each new operator gets a new `HostedOperator`. Objects that belong to the
worker process, such as the record of how its time was spent, do not belong to the `HostedOperator`.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core.connections.group import Gather
from raysgd.core.engine.shared.types import Heartbeat, World
from raysgd.core.numbers.meters import BATCH_COUNT, MetricSummary, refuse_taken
from raysgd.core.numbers.timing import TimerCollection
from raysgd.exceptions import OnFailure
from raysgd.trainer.messages.comparison import WeightSums
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest, RunnerFacts
from raysgd.trainer.messages.prediction import PredictRequest, Work
from raysgd.trainer.worker.feed import DataFeed
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.operator import is_stock
from raysgd.trainer.worker.replica_state import ReplicaState
from raysgd.trainer.worker.step_loop import StepParts


class HostedOperator(ABC):
    """The training operator in a worker, with its data, training loop and state. Each framework has a subclass.

    The subclasses create `operator`, `parts` and `state` in `build`.

    Args:
        settings: Settings with which to create the operator.
        world: This worker's rank and the number of workers in its group.
        feed: Provides the batches.
        ledger: Records how the worker spends its time.

    Attributes:
        settings: The current settings, including later changes of the config.
        world: This worker's rank and the number of workers in its group.
        feed: Provides the batches.
        ledger: Records how the worker spends its time.
        operator: The operator, an instance of the user's class.
        parts: What the framework does at the events of a step.
        state: Reads and restores the training state.
        as_array: Function that converts a tensor to an array, and returns other values unchanged.
        name: Identifies this rank to other ranks. Unlike its number, the name stays the same in later groups.
        timers: The timers of the operator, which measure only in calls with `profile`.
        has_trained: True if this worker has trained, so that its random number generators have advanced.
    """

    settings: Any
    operator: Any
    parts: StepParts
    state: ReplicaState
    as_array: Callable[[Any], Any]

    def __init__(self, settings: Any, world: World, feed: DataFeed, ledger: Ledger) -> None:
        self.settings, self.world, self.feed = settings, world, feed
        self.operator = None
        self.parts = StepParts(feed)
        self.ledger = ledger
        self.name, self.timers = uuid.uuid4().hex, TimerCollection()
        self.has_trained = False

    @abstractmethod
    def build(self) -> RunnerFacts:
        """Create the operator, its loop and its state. This runs the user's `setup`.

        Return the facts about the operator that the driver needs, such as the number of models.
        """

    @abstractmethod
    def facts(self) -> RunnerFacts:
        """Return the facts about the operator that the driver needs, such as the number of models."""

    @abstractmethod
    def warm_up(self) -> None:
        """Train on a batch or two before this worker joins a group, so that its first step in the group is fast.

        The changed training state does not matter, because the worker receives another rank's state when it joins.
        """

    @abstractmethod
    def take_rank(self, world: World) -> None:
        """Adapt the operator to a new group of workers, which this process has already joined.

        Args:
            world: This worker's rank in the new group, and the number of workers.
        """

    @abstractmethod
    def send(self, state: Any, takers: Sequence[int]) -> None:
        """Send a training state to other ranks.

        Args:
            state: The training state.
            takers: The ranks that receive the state.
        """

    @abstractmethod
    def receive(self, source: int, takers: Sequence[int]) -> Any:
        """Receive the training state that another rank sends, and return it.

        Args:
            source: The rank that sends the state.
            takers: All ranks that receive the state, including this one.
        """

    def finish_regroup(self) -> None:  # noqa: B027 - Keras models hold no reference to the group
        """Called in a new group of workers when all ranks have the same training state."""

    @property
    def gather(self) -> Gather | None:
        """The all-gather with which the ranks send each other their metrics in each step. None if they do not."""
        return None

    def names_of_all(self) -> Collection[str] | None:
        """Return the names of all ranks in the group. Return None if the ranks do not send each other their metrics."""
        gather = self.gather
        names = () if gather is None else gather(np.frombuffer(self.name.encode(), np.uint8))
        return {name.tobytes().decode() for name in names} or None

    def set_timers(self, profile: bool) -> None:
        """If `profile` is True, reset and enable the operator's timers. Otherwise, disable the timers."""
        if profile:
            self.timers.reset()
            self.timers.enable()
        else:
            self.timers.disable()
        self.operator.timers = self.timers

    def answer(
        self, returned: Any, request: EpochRequest, num_steps: int, extra: Mapping[str, Any] | None = None
    ) -> EpochAnswer:
        """Create the answer that this worker sends to the driver at the end of a training or validation call.

        Args:
            returned: The return value of the operator's `train_epoch` or `validate`. A value that is not a mapping is
                sent unchanged.
            request: The driver's request.
            num_steps: Number of steps that the call has taken.
            extra: Metrics that the library adds to those in `returned`.
        """
        if not isinstance(returned, Mapping):
            return EpochAnswer(None, returned, num_steps)
        plain, together = self.parts.plain, {**self.operator._raysgd.take_outside(), **returned}
        for name in together.keys() - {BATCH_COUNT}:
            refuse_taken(name)
        values = {**(extra or {}), **{name: plain(value) for name, value in together.items()}}
        if request.profile:
            values["profile"] = self.timers.stats()
        behind = (returned.totals, returned.objects) if isinstance(returned, MetricSummary) else ()
        return EpochAnswer(MetricSummary(values, *behind), None, num_steps)

    def heartbeat(self, phase: str, step: int = -1, num_samples: int = 0, snapshot: int = 0) -> Heartbeat:
        """Return this worker's current progress, and how its time was spent. A second thread may call this method.

        Args:
            phase: What the worker is doing, such as "training".
            step: Number of completed steps of the training call, or -1 between calls.
            num_samples: Number of samples that this rank has used in the call.
            snapshot: Number of steps after which the newest snapshot inside the call was taken.
        """
        return Heartbeat(
            self.feed.epoch,
            step,
            phase,
            num_samples,
            snapshot,
            time.monotonic(),
            self.ledger.own_s,
            self.feed.samples_used(),
            time=self.ledger.reading(),
            joint_work=self.parts.joint_work,
        )

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[StepParts]:
        """Return the context manager in which to run the operator's `validate`, with the parts of its steps."""

    @abstractmethod
    def predicting(self) -> AbstractContextManager[Any]:
        """Return the context manager in which to run the operator's `predict_batch` without changing the operator."""

    @abstractmethod
    def weight_sums(self) -> WeightSums | None:
        """Return checksums of the weights that must be equal on all ranks. Return None if no weights must be equal."""

    @contextmanager
    def giving_back_random_numbers(self) -> Iterator[None]:
        """Restore the states of this rank's random number generators when the block ends.

        After the block, these generators continue as if no random numbers had been drawn in it. Subclasses document
        which generators they leave out.
        """
        drawn = self.state.own()
        try:
            yield
        finally:
            self.state.restore_own(drawn)

    def inside_epoch(self) -> AbstractContextManager[None]:
        """Return the context manager in which to validate in the middle of an epoch.

        It makes sure that the validation does not affect the rest of the epoch.
        """
        return self.giving_back_random_numbers()

    @abstractmethod
    def to_predict(self, request: PredictRequest, work: Work, share: Any) -> Iterator[tuple[Any, int]]:
        """Yield the batches that this worker predicts in one round of a `predict` call, each with its number of rows.

        Args:
            request: The driver's request.
            work: The batches of this worker, or the row indices of its batches.
            share: The dataset to which row indices refer. None if there is none, or if this worker already has it.
        """

    @property
    def group_obstacle(self) -> str | None:
        """Reason why this worker can never continue in another group of workers, or None if it can."""
        return self.feed.obstacle("train") or self.feed.obstacle("validation")

    @property
    def epoch_obstacle(self) -> str | None:
        """Reason why an interrupted epoch must start over, even with new workers, or None if it can continue."""
        operator, name = self.operator, type(self.operator).__name__
        if operator.resumes_epochs is False:
            return f"`{name}` sets `resumes_epochs` to False"
        if operator.resumes_epochs is None and not is_stock(operator, "train_epoch"):
            return f"`{name}` overrides `train_epoch` and does not set `resumes_epochs`"
        return self.feed.obstacle("train")

    @property
    def has_own_validate(self) -> bool:
        """True if the user overrides `validate`. Unlike the library's method, an override can work without data."""
        return not is_stock(self.operator, "validate")

    def follow(self, settings: Any) -> None:
        """Apply the config and the worker callbacks of newer settings to the operator.

        Changes of the config are applied one after the other, in the order in which the user made them.
        """
        before = self.settings
        for number in range(len(before.config_changes), len(settings.config_changes)):
            self.change_config(settings.after(number + 1))
        if settings.callbacks_revision != before.callbacks_revision:
            self.install_callbacks(settings.worker_callbacks)
        self.settings = settings

    def change_config(self, settings: Any) -> list[str]:
        """Change entries of the operator's config.

        Args:
            settings: Settings with the new values. Only the entries in the last item of `config_changes` are changed.

        Returns:
            Names of the entries whose change has no effect except on the value in `operator.config`. Entries for which
            this is uncertain are not included.
        """
        operator, changed = self.operator, settings.config_changes[-1]
        before, own = dict(operator.config), self.settings
        self.settings = replace(own, config=settings.config, config_changes=settings.config_changes)
        operator.config.update((name, settings.config[name]) for name in changed)

        def restore() -> None:
            self.settings = own
            operator.config.clear()
            operator.config.update(before)

        with OnFailure(restore):
            operator.config_changed(operator.config, changed)
        return []

    @abstractmethod
    def edited_by(self, candidate: Any) -> Any:
        """Return the hyperparameters of optimizers that an edited version of the user's class sets to other values.

        Return an empty object if no value has changed.

        Args:
            candidate: The `HostedOperator` of the edited class.
        """

    @abstractmethod
    def take_edited(self, edited: Any) -> None:
        """Set the hyperparameters of the optimizers to the values that `edited_by` returned."""

    def install_callbacks(self, callbacks: Sequence[WorkerCallback]) -> None:
        """Let the operator call these worker callbacks, and no others, from now on."""
        self.operator._raysgd.callbacks.install(callbacks, self.operator)
        self.parts.note_committed()

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Load the training state of a snapshot or a checkpoint. See `ReplicaState.restore`."""
        self.state.restore(shared_state, own_state)
        self.parts.note_loaded()

    def draw_apart(self) -> None:  # noqa: B027 - Keras keeps its seeds in the model
        """If this worker joins a run, let it draw other random numbers than the worker that it replaces has drawn."""

    def close(self) -> None:
        """Drop the iterators over data, which ends the worker processes of data loaders. The operator stays usable."""
        self.feed.close()
