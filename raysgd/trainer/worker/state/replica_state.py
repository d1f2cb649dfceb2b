"""Reads, checks and replaces the training state of a worker.

One part of the state is the same on all ranks, such as the model's weights. Another part belongs to one rank only: the
states of its random number generators.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from raysgd.core.text.printable import errors_printable
from raysgd.trainer.worker.data.feed import DataFeed
from raysgd.trainer.worker.state.copies import StateCopy
from raysgd.trainer.worker.state.state_checks import check_progress

# Key in a state dict for the position in the data and the step counter. The dicts that the `state_dict` methods of
# trainers return do not have this key.
RESUME = "resume"


def place_in(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many epochs were completed, and how many steps were taken, when a state dict was saved."""
    resume = state.get(RESUME) or {}
    position = resume.get("position") or {}
    is_mid_pass = bool(position.get("is_mid_pass") or position.get("is_unknown"))
    return int(state["epoch"]) - is_mid_pass, int(resume.get("global_step") or 0)


class ReplicaState(ABC):
    """Reads and replaces the training state of one worker. Each framework has a subclass.

    Args:
        operator: The worker's training operator.
        feed: Provides the batches. Its position in the data is part of the state.
    """

    def __init__(self, operator: Any, feed: DataFeed) -> None:
        self._operator = operator
        self._feed = feed

    @abstractmethod
    def _parts(self) -> dict[str, Any]:
        """Return the state dicts of the registered objects, such as models and optimizers, by kind of object."""

    @abstractmethod
    def _check_parts(self, state: Mapping[str, Any]) -> None:
        """Raise an error if the state dicts of objects do not match the registered objects. See `check`."""

    @abstractmethod
    def _apply_parts(self, state: Mapping[str, Any]) -> None:
        """Load the state dicts of objects into the registered objects. `_check_parts` has checked them before."""

    @abstractmethod
    def _more_progress(self) -> dict[str, Any]:
        """Return more entries to store under the `RESUME` key of a state dict."""

    @abstractmethod
    def _apply_more_progress(self, resume: Mapping[str, Any]) -> None:
        """Load the entries that `_more_progress` returned.

        Args:
            resume: The value under the `RESUME` key of a state dict.
        """

    @abstractmethod
    def copy_for_driver(self, rank: int) -> StateCopy | None:
        """Return a copy of the state that all ranks share, to send it to the driver.

        Rank 0 copies the whole state, and other ranks return None. If the state is sharded over the ranks, every rank
        copies its shard.
        """

    @abstractmethod
    def own(self) -> Any:
        """Return the state that only this rank has: the states of its random number generators."""

    @abstractmethod
    def check_own(self, own: Any) -> None:
        """Raise an error if `own`, from a snapshot or checkpoint, does not hold states of random number generators."""

    @abstractmethod
    def restore_own(self, own: Any) -> None:
        """Load the state that only this rank has: the states of its random number generators."""

    def decoded(self, state: Any) -> Mapping[str, Any]:
        """Return the state dict in a copy that was made for the driver."""
        decoded: Mapping[str, Any] = state
        return decoded

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Load the training state of a snapshot or a checkpoint.

        If the state does not match this operator, nothing is changed.

        Args:
            shared_state: The state that all ranks share: a copy that was made for the driver, or the state dict itself
                if it has never left this process. No reference to this argument is kept.
            own_state: The states of this rank's random number generators. None to leave them unchanged.

        Raises:
            ValueError: A part is missing or does not match the registered objects.
        """
        state = self.decoded(shared_state)
        self.check(state)
        if own_state is not None:
            self.check_own(own_state)
        self.apply(state)
        if own_state is not None:
            self.restore_own(own_state)

    def read(self) -> dict[str, Any]:
        """Return the training state as a state dict, without copying its tensors."""
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

    @errors_printable()
    def check(self, state: Mapping[str, Any]) -> None:
        """Check that a state dict can be loaded into this worker's operator.

        Raises:
            ValueError: A part is missing or does not match the registered objects.
        """
        check_progress(state["epoch"], state.get(RESUME))
        self._feed.check_position((state.get(RESUME) or {}).get("position"))
        self._check_parts(state)
        self._operator._raysgd.callbacks.check(state, self._operator)
        self._operator._check_saved_state(state["operator"])

    def apply(self, state: Mapping[str, Any]) -> None:
        """Load a state dict that `check` has checked. No reference to the state dict is kept.

        If a `load_state_dict` of user code raises an error, in the operator, an optimizer or a callback, other parts of
        the state have already been replaced. `check` cannot foresee such errors.
        """
        operator = self._operator
        own_state = copy.deepcopy(state["operator"])  # copy it first: if copying fails, nothing has been replaced yet
        self._apply_parts(state)
        self._feed.epoch = int(state["epoch"])
        operator.load_state_dict(own_state)
        resume = state.get(RESUME) or {}
        self._apply_more_progress(resume)
        operator.global_step = resume.get("global_step", operator.global_step)
        self._feed.go_to(int(state["epoch"]), resume.get("position"))
        operator._raysgd.callbacks.apply(state, operator)
