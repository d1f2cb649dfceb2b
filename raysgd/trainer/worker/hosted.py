"""`HostedOperator`: an operator together with its data, training loop, state, and rank in a group.

A replica hosts one operator at a time, and each new operator gets a new `HostedOperator`. Objects that belong to the
process, such as the ledger of its time, stay with the replica.
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
    """An operator with its data, loop and state. Subclasses create `operator`, `loop` and `state` in `build`.

    Args:
        settings: Settings from which to build the operator.
        world: This worker's rank and the size of the group.
        feed: Provides the data.
        ledger: Records how the replica spends its time.

    Attributes:
        settings: The current settings, including later changes to the config.
        world: This worker's rank and the size of the group.
        feed: Provides the data.
        operator: The live operator.
        loop: Runs the steps of training calls.
        state: Reads and restores the state.
        has_trained: True if this rank has trained, so its random generators have advanced.
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
        """Create the operator, its loop and its state. This runs the user's `setup`.

        Return the facts that the driver needs.
        """

    @abstractmethod
    def facts(self) -> RunnerFacts:
        """Return the facts that the driver needs about the operator."""

    @abstractmethod
    def warm_up(self) -> None:
        """Train on one batch before joining a group, so that the first real step is fast.

        Another rank's state replaces the result.
        """

    @abstractmethod
    def take_place(self, world: World) -> None:
        """Adapt to a new rank and group size. This process has already joined the new group."""

    @abstractmethod
    def send(self, state: Any, takers: Sequence[int]) -> None:
        """Send a state to the ranks `takers`."""

    @abstractmethod
    def receive(self, source: int, takers: Sequence[int]) -> Any:
        """Receive the state that rank `source` sends to the ranks `takers`, which include this rank."""

    @abstractmethod
    def settle_in(self) -> None:
        """Called in a new group once all ranks have the same state."""

    def names_of_all(self, name: str) -> Collection[str] | None:
        """Gather the names of all ranks in the group. Return None if this framework does not gather names."""
        return None

    @abstractmethod
    def training(self, run: EpochRun, stream: Any) -> AbstractContextManager[Any]:
        """Return the context manager in which to run the operator's `train_epoch`."""

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[Any]:
        """Return the context manager in which to run the operator's `validate`."""

    @abstractmethod
    def predicting(self) -> AbstractContextManager[Any]:
        """Return the context manager in which to run the operator's `predict_batch` without changing the operator."""

    @abstractmethod
    def weight_sums(self) -> WeightSums | None:
        """Return checksums of the weights that must be in sync on all ranks, or None if no weights need to be."""

    @abstractmethod
    def giving_back_random_numbers(self) -> AbstractContextManager[None]:
        """Return a context manager that restores the random state on exit, as if its block had drawn no numbers."""

    def inside_epoch(self) -> AbstractContextManager[None]:
        """Return the context manager for a validation inside an epoch, which must not affect the rest of the epoch."""
        return self.giving_back_random_numbers()

    @abstractmethod
    def to_predict(self, request: PredictRequest, work: Work, share: Any) -> Iterator[tuple[Any, int]]:
        """Yield this replica's batches of a prediction, each with its number of rows."""

    @abstractmethod
    def as_array(self, value: Any) -> Any:
        """Convert a tensor to an array. Return other values unchanged."""

    @property
    def group_obstacle(self) -> str | None:
        """Reason why this replica can never continue in a new group, or None if it can."""
        return self.feed.obstacle("train") or self.feed.obstacle("validation")

    @property
    def epoch_obstacle(self) -> str | None:
        """Reason why an interrupted epoch must start over, even with new workers, or None if it can continue."""
        operator, name = self.operator, type(self.operator).__name__
        if operator.resumes_epochs is False:
            return f"`{name}` sets `resumes_epochs` to False"
        if operator.resumes_epochs is None and not is_of_library(type(operator).train_epoch):
            return f"`{name}` overrides `train_epoch` and does not set `resumes_epochs`"
        return self.feed.obstacle("train")

    @property
    def has_own_validate(self) -> bool:
        """True if the user overrides `validate`. Unlike the library's method, an override may work without data."""
        return not is_of_library(type(self.operator).validate)

    def follow(self, settings: Any) -> None:
        """Apply, in order, the config and callback changes in `settings` that this operator has not applied yet."""
        before = self.settings
        for number in range(len(before.config_changes), len(settings.config_changes)):
            self.change_config(settings.after(number + 1))
        if settings.callbacks_revision != before.callbacks_revision:
            self.install_callbacks(settings.worker_callbacks)
        self.settings = settings

    def change_config(self, settings: Any) -> list[str]:
        """Change entries of the operator's config.

        Args:
            settings: Settings with the new values. Only the last entry of `config_changes` is applied.

        Returns:
            Names of the entries whose change certainly has no effect beyond `operator.config`.
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
        """Return the hyperparameters to which `candidate`, an operator of an edited class, gave new values.

        Empty if no value changed.
        """

    @abstractmethod
    def take_edited(self, edited: Any) -> None:
        """Apply the hyperparameters that `edited_by` returned."""

    @abstractmethod
    def follow_config(self) -> None:
        """Reset the optimizers' hyperparameters to the values that `setup` chose."""

    def install_callbacks(self, callbacks: Sequence[WorkerCallback]) -> None:
        """Install these callbacks, replacing the previously installed callbacks."""
        self.operator._raysgd.callbacks.install(callbacks, self.operator)
        self.loop.note_boundary()

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Restore a snapshot or a checkpoint; see `ReplicaState.restore`."""
        self.state.restore(shared_state, own_state)
        self.loop.note_restored()

    def close(self) -> None:
        """Drop the data iterators, which ends the data loaders' worker processes. The operator stays usable."""
        self.feed.close()


def is_of_library(method: Any) -> bool:
    """Return True if a method is defined by the library, False if by the user."""
    is_ours: bool = method.__module__.startswith("raysgd.")
    return is_ours
