"""The state of a replica: what all ranks share, what is each rank's own, and how both are checked and taken over."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from raysgd.worker.data.feed import Feed
from raysgd.worker.state.copies import StateCopy
from raysgd.worker.state.state_checks import check_progress

RESUME = "resume"  # key of what only snapshots and files carry: the position in the data and the step counter


def place_in(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many passes over the train data a state has seen to their end, and how many batches in all."""
    resume = state.get(RESUME) or {}
    position = resume.get("position") or {}
    is_mid_pass = bool(position.get("is_mid_pass") or position.get("is_unknown"))
    return int(state["epoch"]) - is_mid_pass, int(resume.get("global_step") or 0)


class ReplicaState(ABC):
    """Reads and replaces the state of one replica."""

    def __init__(self, operator: Any, feed: Feed) -> None:
        self._operator = operator
        self._feed = feed

    @abstractmethod
    def _parts(self) -> dict[str, Any]:
        """The state of what is registered."""

    @abstractmethod
    def _check_parts(self, state: Mapping[str, Any]) -> None:
        """Refuse parts that do not fit what is registered; see `check`."""

    @abstractmethod
    def _apply_parts(self, state: Mapping[str, Any]) -> None:
        """Take over the parts of a state that fits."""

    @abstractmethod
    def _more_progress(self) -> dict[str, Any]:
        """More entries to keep under `RESUME`."""

    @abstractmethod
    def _apply_more_progress(self, resume: Mapping[str, Any]) -> None:
        """Take that over."""

    @abstractmethod
    def copy_for_driver(self, rank: int) -> StateCopy | None:
        """Copy what the driver will fetch when all ranks copy the state: on rank 0 all, on others nothing.

        Of a divided state every rank keeps its part.
        """

    @abstractmethod
    def own(self) -> Any:
        """The part of the state that is this rank's own: its random states."""

    @abstractmethod
    def check_own(self, own: Any) -> None:
        """Refuse what does not fit as a rank's own state."""

    @abstractmethod
    def restore_own(self, own: Any) -> None:
        """Take it over."""

    def decoded(self, state: Any) -> Mapping[str, Any]:
        """A copy as the state that it was made of."""
        decoded: Mapping[str, Any] = state
        return decoded

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Take over a snapshot or a checkpoint; nothing is changed if it does not fit.

        Args:
            shared_state: A copy of the state, or the state itself where it did not have to travel. Nothing of it is
                kept.
            own_state: The random states of this rank; None to keep those that it has.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not fit what is registered.
        """
        state = self.decoded(shared_state)
        self.check(state)
        if own_state is not None:
            self.check_own(own_state)
        self.apply(state)
        if own_state is not None:
            self.restore_own(own_state)

    def read(self) -> dict[str, Any]:
        """The state."""
        operator = self._operator
        return {
            "epoch": self._feed.epoch,
            "operator": operator.state_dict(),
            **self._parts(),
            **operator._raysgd.callbacks.part_of_state(),
            RESUME: {
                "global_step": operator.global_step,
                "position": self._feed.position(),
                **self._more_progress(),
            },
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not fit what is registered.
        """
        check_progress(state["epoch"], state.get(RESUME))
        self._feed.check_position((state.get(RESUME) or {}).get("position"))
        self._check_parts(state)
        self._operator._raysgd.callbacks.check(state)
        state["operator"]

    def apply(self, state: Mapping[str, Any]) -> None:
        """Take over a state that fits. Nothing of it is kept.

        What the user's own `load_state_dict` of an operator refuses is only found here, after what comes before it has
        been loaded.
        """
        operator = self._operator
        own_state = copy.deepcopy(state["operator"])  # first: no copy fails when something has been replaced
        self._apply_parts(state)
        self._feed.epoch = int(state["epoch"])
        operator.load_state_dict(own_state)
        resume = state.get(RESUME) or {}
        self._apply_more_progress(resume)
        operator.global_step = resume.get("global_step", operator.global_step)
        self._feed.go_to(int(state["epoch"]), resume.get("position"))
        operator._raysgd.callbacks.apply(state, operator)
