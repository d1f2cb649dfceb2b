"""Reads, checks and replaces a replica's state: a part that all ranks share, and a part that only this rank has."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from raysgd.trainer.worker.data.feed import DataFeed
from raysgd.trainer.worker.state.copies import StateCopy
from raysgd.trainer.worker.state.state_checks import check_progress

RESUME = "resume"  # key of the data position and the step counter, which only snapshots and checkpoint files contain


def place_in(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of completed passes over the train data and the number of steps recorded in a state dict."""
    resume = state.get(RESUME) or {}
    position = resume.get("position") or {}
    is_mid_pass = bool(position.get("is_mid_pass") or position.get("is_unknown"))
    return int(state["epoch"]) - is_mid_pass, int(resume.get("global_step") or 0)


class ReplicaState(ABC):
    """Reads and replaces the state of one replica."""

    def __init__(self, operator: Any, feed: DataFeed) -> None:
        self._operator = operator
        self._feed = feed

    @abstractmethod
    def _parts(self) -> dict[str, Any]:
        """Return the state dicts of the registered objects."""

    @abstractmethod
    def _check_parts(self, state: Mapping[str, Any]) -> None:
        """Check that the parts match the registered objects; see `check`."""

    @abstractmethod
    def _apply_parts(self, state: Mapping[str, Any]) -> None:
        """Load the parts of a state that has been checked."""

    @abstractmethod
    def _more_progress(self) -> dict[str, Any]:
        """Return additional progress to store under the `RESUME` key of a state dict."""

    @abstractmethod
    def _apply_more_progress(self, resume: Mapping[str, Any]) -> None:
        """Load the progress that `_more_progress` returned."""

    @abstractmethod
    def copy_for_driver(self, rank: int) -> StateCopy | None:
        """Copy this rank's part of the shared state for the driver.

        Rank 0 copies the whole state, and other ranks return None. If the state is sharded, every rank copies its part.
        """

    @abstractmethod
    def own(self) -> Any:
        """Return the state that only this rank has: the states of its random generators."""

    @abstractmethod
    def check_own(self, own: Any) -> None:
        """Check that `own` is valid as this rank's own state."""

    @abstractmethod
    def restore_own(self, own: Any) -> None:
        """Load this rank's own state."""

    def decoded(self, state: Any) -> Mapping[str, Any]:
        """Convert a copy made for the driver back into a state dict."""
        decoded: Mapping[str, Any] = state
        return decoded

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Restore a snapshot or a checkpoint. If it does not match this operator, nothing changes.

        Args:
            shared_state: A copy of the state, or the live state if it never left this process. No reference to it is
                retained.
            own_state: This rank's random states; None to leave the current random states unchanged.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not match the registered objects.
        """
        state = self.decoded(shared_state)
        self.check(state)
        if own_state is not None:
            self.check_own(own_state)
        self.apply(state)
        if own_state is not None:
            self.restore_own(own_state)

    def read(self) -> dict[str, Any]:
        """Return the live state dict. Its tensors are not copied."""
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
        """Check that a state can be loaded.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not match the registered objects.
        """
        check_progress(state["epoch"], state.get(RESUME))
        self._feed.check_position((state.get(RESUME) or {}).get("position"))
        self._check_parts(state)
        self._operator._raysgd.callbacks.check(state)
        state["operator"]

    def apply(self, state: Mapping[str, Any]) -> None:
        """Load a state that has been checked. No reference to it is retained.

        If the user's `load_state_dict` raises, the registered objects' states are already replaced, because `check`
        cannot predict the error.
        """
        operator = self._operator
        own_state = copy.deepcopy(state["operator"])  # first, because copying may fail and nothing is replaced yet
        self._apply_parts(state)
        self._feed.epoch = int(state["epoch"])
        operator.load_state_dict(own_state)
        resume = state.get(RESUME) or {}
        self._apply_more_progress(resume)
        operator.global_step = resume.get("global_step", operator.global_step)
        self._feed.go_to(int(state["epoch"]), resume.get("position"))
        operator._raysgd.callbacks.apply(state, operator)
