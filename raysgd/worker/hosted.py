"""An operator hosted by a framework: its data, its loop, its state, and its place in a group.

A replica hosts one operator at a time. Another config or another class makes another `Hosted`; what belongs to the
process, such as the time that it spent, stays with the replica.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.engine.shared.types import World
from raysgd.exceptions import OnFailure
from raysgd.messages.facts import RunnerFacts
from raysgd.messages.prediction import PredictRequest, Work
from raysgd.messages.weight_sums import WeightSums
from raysgd.worker.data.epoch_run import EpochRun
from raysgd.worker.data.feed import Feed
from raysgd.worker.data.loop import Loop
from raysgd.worker.ledger import Ledger
from raysgd.worker.state.replica_state import ReplicaState


class Hosted(ABC):
    """An operator, and what is made for it. A subclass makes `operator`, `loop` and `state` in `build`.

    Args:
        settings: What all of it is made from.
        world: The place among the replicas.
        feed: Has the data.
        ledger: Where the replica books its time.

    Attributes:
        settings: Those of now: entries of the config may have changed.
        world: The place among the replicas.
        feed: Has the data.
        operator: The live operator.
        loop: Takes the steps of training calls.
        state: Reads and replaces the state.
        has_trained: Whether the random numbers of this rank were used.
    """

    settings: Any
    operator: Any
    loop: Loop
    state: ReplicaState

    def __init__(self, settings: Any, world: World, feed: Feed, ledger: Ledger) -> None:
        self.settings, self.world, self.feed = settings, world, feed
        self.operator = None
        self.loop = Loop(feed)
        self._ledger = ledger
        self.has_trained = False

    @abstractmethod
    def build(self) -> RunnerFacts:
        """Make the operator, which runs the user's `setup`, and what else there is. Return its facts."""

    @abstractmethod
    def facts(self) -> RunnerFacts:
        """The facts that the driver wants to know about it."""

    @abstractmethod
    def warm_up(self) -> None:
        """Take a step in advance. The state of another rank replaces later what it changes of registered state."""

    @abstractmethod
    def take_place(self, world: World) -> None:
        """Take a place in another group, which this process has joined."""

    @abstractmethod
    def send(self, state: Any, takers: Sequence[int]) -> None:
        """Send something to other ranks of the group."""

    @abstractmethod
    def receive(self, source: int, takers: Sequence[int]) -> Any:
        """Receive what another rank sends to `takers`, of which this one is one."""

    @abstractmethod
    def settle_in(self) -> None:
        """Called in another group when all ranks have the same state."""

    def names_of_all(self, name: str) -> Collection[str] | None:
        """Return the names of the ranks of the group, each of which says its `name`; None where they do not."""
        return None

    @abstractmethod
    def training(self, run: EpochRun, stream: Any) -> AbstractContextManager[Any]:
        """The context for the operator's `train_epoch`."""

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[Any]:
        """The context for the operator's `validate`."""

    @abstractmethod
    def predicting(self) -> AbstractContextManager[Any]:
        """The context for the operator's `predict_batch`: it leaves everything as it was."""

    @abstractmethod
    def weight_sums(self) -> WeightSums | None:
        """Return what the weights are that have to be equal on all ranks; None where there are none."""

    @abstractmethod
    def giving_back_random_numbers(self) -> AbstractContextManager[None]:
        """Give random numbers back: those drawn inside are drawn again afterwards."""

    @abstractmethod
    def to_predict(self, request: PredictRequest, work: Work, share: Any) -> Iterator[tuple[Any, int]]:
        """The batches of this replica in a prediction, and the rows of each."""

    @abstractmethod
    def as_array(self, value: Any) -> Any:
        """A tensor as an array; other values as they are."""

    @property
    def group_obstacle(self) -> str | None:
        """The reason why this replica cannot continue in another group at all."""
        return self.feed.obstacle("train") or self.feed.obstacle("validation")

    @property
    def epoch_obstacle(self) -> str | None:
        """The reason why an epoch of this operator can only begin again, even with new workers."""
        operator, name = self.operator, type(self.operator).__name__
        if operator.resumes_epochs is False:
            return f"`{name}` sets `resumes_epochs` to False"
        if operator.resumes_epochs is None and not is_of_library(type(operator).train_epoch):
            return f"`{name}` overrides `train_epoch` and does not set `resumes_epochs`"
        return self.feed.obstacle("train")

    @property
    def has_own_validate(self) -> bool:
        """True if the `validate` of the operator is the user's, which may need no data. The library's needs some."""
        return not is_of_library(type(self.operator).validate)

    def follow(self, settings: Any) -> None:
        """Tell the operator what has changed since it was made, as those were told that were there."""
        before = self.settings
        for number in range(len(before.config_changes), len(settings.config_changes)):
            self.change_config(settings.after(number + 1))
        if settings.callbacks_revision != before.callbacks_revision:
            self.install_callbacks(settings.worker_callbacks)
        self.settings = settings

    def change_config(self, settings: Any) -> list[str]:
        """Change entries of the config in the operator.

        Args:
            settings: Those with the new values; the last one of their changes is made.

        Returns:
            The names of the entries that surely had no effect but to be there.
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
        """The hyperparameters that the `setup` of another one has chosen differently; empty if none."""

    @abstractmethod
    def take_edited(self, edited: Any) -> None:
        """Take over such hyperparameters."""

    @abstractmethod
    def follow_config(self) -> None:
        """Give the optimizers the hyperparameters of `setup` again."""

    def install_callbacks(self, callbacks: Sequence[WorkerCallback]) -> None:
        """Let these callbacks, and no others, run around each step."""
        self.operator._raysgd.callbacks.install(callbacks, self.operator)
        self.loop.note_boundary()

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Take over a state; see `ReplicaState.restore`."""
        self.state.restore(shared_state, own_state)
        self.loop.note_restored()

    def close(self) -> None:
        """Drop the iterators, and with them the processes of loaders. The operator itself stays usable."""
        self.feed.close()


def is_of_library(method: Any) -> bool:
    """Return whether a method is the library's."""
    is_ours: bool = method.__module__.startswith("raysgd.")
    return is_ours
