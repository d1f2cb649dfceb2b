"""A hosted operator: the operator with its data, its loop, its state, and its place in a group.

A replica hosts one operator at a time, and a new operator gets a new `HostedOperator`. Whatever belongs to the process,
such as the record of its time, stays with the replica.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core.engine.shared.types import World
from raysgd.exceptions import OnFailure
from raysgd.trainer.messages.facts import RunnerFacts
from raysgd.trainer.messages.prediction import PredictRequest, Work
from raysgd.trainer.messages.weight_sums import WeightSums
from raysgd.trainer.worker.data.epoch_run import EpochRun
from raysgd.trainer.worker.data.feed import DataFeed
from raysgd.trainer.worker.data.loop import Loop
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.state.replica_state import ReplicaState


class HostedOperator(ABC):
    """An operator with its data, loop and state. A subclass makes `operator`, `loop` and `state` in `build`.

    Args:
        settings: Settings to build the operator from.
        world: Rank of this worker, and size of the group.
        feed: Provides the data.
        ledger: Records what the replica spends its time on.

    Attributes:
        settings: The current settings, with changed entries of the config.
        world: Rank of this worker, and size of the group.
        feed: Provides the data.
        operator: The live operator.
        loop: Takes the steps of training calls.
        state: Reads and replaces the state.
        has_trained: True if random numbers of this rank were used.
    """

    settings: Any
    operator: Any
    loop: Loop
    state: ReplicaState

    def __init__(self, settings: Any, world: World, feed: DataFeed, ledger: Ledger) -> None:
        self.settings, self.world, self.feed = settings, world, feed
        self.operator = None
        self.loop = Loop(feed)
        self._ledger = ledger
        self.has_trained = False

    @abstractmethod
    def build(self) -> RunnerFacts:
        """Make the operator, which runs the user's `setup`, and its loop and state. Return facts about them."""

    @abstractmethod
    def facts(self) -> RunnerFacts:
        """Return the facts that the driver needs about the operator."""

    @abstractmethod
    def warm_up(self) -> None:
        """Take a step in advance. Registered state that it changes is replaced by another rank's state later."""

    @abstractmethod
    def take_place(self, world: World) -> None:
        """Take a place in a new group, which this process has already joined."""

    @abstractmethod
    def send(self, state: Any, takers: Sequence[int]) -> None:
        """Send a value to the ranks `takers`."""

    @abstractmethod
    def receive(self, source: int, takers: Sequence[int]) -> Any:
        """Receive the value that `source` sends to the ranks `takers`, which include this one."""

    @abstractmethod
    def settle_in(self) -> None:
        """Called in a new group when all ranks have the same state."""

    def names_of_all(self, name: str) -> Collection[str] | None:
        """Send this rank's `name` to the group and return the names of all ranks. None if names are not exchanged."""
        return None

    @abstractmethod
    def training(self, run: EpochRun, stream: Any) -> AbstractContextManager[Any]:
        """Return the context for the operator's `train_epoch`."""

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[Any]:
        """Return the context for the operator's `validate`."""

    @abstractmethod
    def predicting(self) -> AbstractContextManager[Any]:
        """Return the context for the operator's `predict_batch`. It leaves the operator unchanged."""

    @abstractmethod
    def weight_sums(self) -> WeightSums | None:
        """Return checksums of the weights that must be equal on all ranks; None if there are none."""

    @abstractmethod
    def giving_back_random_numbers(self) -> AbstractContextManager[None]:
        """Return a context that restores the random state at its end, so that the same numbers are drawn again."""

    def inside_epoch(self) -> AbstractContextManager[None]:
        """Return the context of a validation inside an epoch, which leaves the rest of the epoch unchanged."""
        return self.giving_back_random_numbers()

    @abstractmethod
    def to_predict(self, request: PredictRequest, work: Work, share: Any) -> Iterator[tuple[Any, int]]:
        """Yield this replica's batches in a prediction, each with its number of rows."""

    @abstractmethod
    def as_array(self, value: Any) -> Any:
        """Convert a tensor to an array. Other values are returned unchanged."""

    @property
    def group_obstacle(self) -> str | None:
        """Reason why this replica can never continue in a new group; None if it can."""
        return self.feed.obstacle("train") or self.feed.obstacle("validation")

    @property
    def epoch_obstacle(self) -> str | None:
        """Reason why an interrupted epoch must begin again, even with new workers; None if it can continue."""
        operator, name = self.operator, type(self.operator).__name__
        if operator.resumes_epochs is False:
            return f"`{name}` sets `resumes_epochs` to False"
        if operator.resumes_epochs is None and not is_of_library(type(operator).train_epoch):
            return f"`{name}` overrides `train_epoch` and does not set `resumes_epochs`"
        return self.feed.obstacle("train")

    @property
    def has_own_validate(self) -> bool:
        """True if the user overrides `validate`. An own `validate` may need no data; the library's does."""
        return not is_of_library(type(self.operator).validate)

    def follow(self, settings: Any) -> None:
        """Apply changes of the settings that were made since this operator was built, in their order."""
        before = self.settings
        for number in range(len(before.config_changes), len(settings.config_changes)):
            self.change_config(settings.after(number + 1))
        if settings.callbacks_revision != before.callbacks_revision:
            self.install_callbacks(settings.worker_callbacks)
        self.settings = settings

    def change_config(self, settings: Any) -> list[str]:
        """Change entries of the operator's config.

        Args:
            settings: Settings with the new values. Only the last of their config changes is applied.

        Returns:
            Names of the entries whose change surely has no effect beyond `operator.config`.
        """
        operator, changed = self.operator, settings.config_changes[-1]
        before, own = dict(operator.config), self.settings
        self.settings = replace(own, config=settings.config, config_changes=settings.config_changes)
        operator.config.update((name, settings.config[name]) for name in changed)

        def put_back() -> None:
            self.settings = own
            operator.config.clear()
            operator.config.update(before)

        with OnFailure(put_back):
            operator.config_changed(operator.config, changed)
        return []

    @abstractmethod
    def edited_by(self, candidate: Any) -> Any:
        """Return the hyperparameters that the `setup` of `candidate` chose differently; empty if there are none."""

    @abstractmethod
    def take_edited(self, edited: Any) -> None:
        """Apply the hyperparameters that `edited_by` returned."""

    @abstractmethod
    def follow_config(self) -> None:
        """Set the optimizers' hyperparameters to those of `setup` again."""

    def install_callbacks(self, callbacks: Sequence[WorkerCallback]) -> None:
        """Run these callbacks around each step, in place of the earlier ones."""
        self.operator._raysgd.callbacks.install(callbacks, self.operator)
        self.loop.note_boundary()

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Restore a snapshot or a checkpoint; see `ReplicaState.restore`."""
        self.state.restore(shared_state, own_state)
        self.loop.note_restored()

    def close(self) -> None:
        """Drop the iterators, which ends the processes of loaders. The operator stays usable."""
        self.feed.close()


def is_of_library(method: Any) -> bool:
    """Return True if a method is the library's, False if it is the user's."""
    is_ours: bool = method.__module__.startswith("raysgd.")
    return is_ours
