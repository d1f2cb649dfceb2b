"""The state of a replica: what all ranks share, what is each rank's own, and how both are checked and taken over."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from raysgd._fitting import check_progress
from raysgd.exceptions import NotRegisteredError
from raysgd.replicas.feed import Feed

RESUME = "resume"  # key of what only snapshots and files carry: the position in the data and the step counter


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
        """Refuses parts that do not fit what is registered; see `check`."""

    @abstractmethod
    def _apply_parts(self, state: Mapping[str, Any]) -> None:
        """Takes over the parts of a state that fits."""

    @abstractmethod
    def _more_progress(self) -> dict[str, Any]:
        """What else to keep under `RESUME`."""

    @abstractmethod
    def _apply_more_progress(self, resume: Mapping[str, Any]) -> None:
        """Takes that over."""

    @abstractmethod
    def copied(self) -> tuple[Any, int]:
        """A copy that can wait until the driver fetches it, and its bytes."""

    @abstractmethod
    def help_copy(self) -> None:
        """On other ranks: does what rank 0 cannot do alone when it copies the state."""

    @abstractmethod
    def own(self) -> Any:
        """What is this rank's own: its random states."""

    @abstractmethod
    def check_own(self, own: Any) -> None:
        """Refuses what does not fit as a rank's own state."""

    @abstractmethod
    def restore_own(self, own: Any) -> None:
        """Takes it over."""

    def decoded(self, state: Any) -> Mapping[str, Any]:
        """A copy as the state that it was made of."""
        decoded: Mapping[str, Any] = state
        return decoded

    def read(self) -> dict[str, Any]:
        """The state.

        Raises:
            NotRegisteredError: Nothing was registered.
        """
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
        """Refuses a state that does not fit.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not fit what is registered.
        """
        check_progress(state["epoch"], state.get(RESUME))
        self._check_parts(state)
        self._operator._raysgd.callbacks.check(state)
        state["operator"]

    def apply(self, state: Mapping[str, Any]) -> None:
        """Takes over a state that fits. Nothing of it is kept.

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

    def not_registered(self) -> NotRegisteredError:
        """What to raise where there is nothing to save."""
        return NotRegisteredError(
            f"`{type(self._operator).__name__}.setup` never called `register`: register models and optimizers there, "
            "so that the library can save and restore them."
        )
