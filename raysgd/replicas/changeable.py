"""What a live replica can be changed to without a new process: one of an edited class; and steps at other rates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from raysgd._fitting import check_parts
from raysgd.engine.types import Held, World
from raysgd.replicas.epochs import EpochAnswer, EpochRequest
from raysgd.replicas.facts import RunnerFacts
from raysgd.replicas.feed import Feed
from raysgd.replicas.loop import Loop
from raysgd.replicas.range_test import Loss, watching
from raysgd.replicas.replica_state import ReplicaState


class Changeable(ABC):
    """What a replica has for `reload` and `find_lr`. Why a class is edited in two steps: ADR 80."""

    _kept_by_reload: ClassVar[tuple[str, ...]] = ("_copies", "_ledger")
    """What a replica keeps that becomes one of another class."""

    _candidate: Any = None
    _operator: Any
    _settings: Any
    _world: World
    _feed: Feed
    _loop: Loop
    _state: ReplicaState

    @abstractmethod
    def setup(self) -> Any:
        """Builds the operator; returns facts."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state; copy before anything else runs."""

    @abstractmethod
    def train_epoch(self, request: EpochRequest, share: Any = None) -> EpochAnswer | Held:
        """Runs the operator's `train_epoch` once."""

    @abstractmethod
    def _facts(self) -> RunnerFacts:
        """What the driver wants to know about this replica."""

    @abstractmethod
    def _giving_back_random_numbers(self) -> AbstractContextManager[None]:
        """What is drawn inside is drawn again afterwards."""

    @abstractmethod
    def _edited_by(self, candidate: Any) -> Any:
        """Which hyperparameters the `setup` of another replica has chosen differently; nothing if none."""

    @abstractmethod
    def _take_edited(self, edited: Any) -> None:
        """Takes over such hyperparameters."""

    def prepare_reload(self, settings: Any) -> tuple[RunnerFacts, Any]:
        """Makes an operator of another class with the state of this one, which goes on until `finish_reload`.

        Returns:
            Its facts, and the hyperparameters that its `setup` chooses differently.

        Raises:
            ValueError: The state does not fit.
        """
        self._candidate, own = None, self._state.own()
        with self._giving_back_random_numbers():
            candidate: Any = type(self)(settings, self._world)  # type: ignore[call-arg]
            facts = candidate.setup()
            state = self.state()
            check_parts(state, facts.counts)
            candidate.restore(state, own)
        for name in self._kept_by_reload:
            setattr(candidate, name, getattr(self, name))
        self._candidate = candidate
        return facts, self._edited_by(candidate)

    def finish_reload(self, revision: int, edited: Any) -> RunnerFacts | None:
        """Goes on as the replica that `prepare_reload` made; None where there is none."""
        if self._settings.revision != revision:  # else it was made with the new class
            if self._candidate is None or self._candidate._settings.revision != revision:
                return None
            feed, self.__dict__ = self._feed, self._candidate.__dict__  # shared: parts of it know it by its first self
            feed.close()
        self._take_edited(edited)
        return self._facts()

    def drop_reload(self) -> None:
        """Forgets what `prepare_reload` made."""
        self._candidate = None

    def take_steps(self, rates: Sequence[float], metric: str, request: EpochRequest, *share: Any) -> list[Loss]:
        """Takes a step with each of these learning rates, or as many as the pass has left; returns the losses."""
        with watching(self._operator, self._loop, rates, metric) as losses:
            self.train_epoch(request, *share)
        return losses
