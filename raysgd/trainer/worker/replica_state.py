"""Reads, checks and replaces the training state of a worker.

One part of the state is the same on all ranks, such as the model's weights. Another part belongs to one rank only: the
states of its random number generators.
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.arguments import is_integer, is_saved_count
from raysgd.core.engine.shared.interface import Capture
from raysgd.core.text.log_lines import errors_printable
from raysgd.trainer.worker.feed import DataFeed
from raysgd.trainer.worker.ledger import Ledger

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


# A training state up to this size, in bytes, is sent to the driver with the answer to a call. A second call to fetch
# the state would take longer.
_INLINE_BYTES = 65536


@dataclass(frozen=True)
class StateCopy:
    """A copy of the training state, or of this rank's shard if the state is sharded over the ranks.

    Attributes:
        content: The copied state.
        num_bytes: Size of the copied state in bytes.
        is_part: True if the state is sharded, and this is one shard.
    """

    content: Any
    num_bytes: int
    is_part: bool = False


class StateCopies:
    """Copies the training state of one worker, and stores the copies for the driver to fetch.

    Each stored copy is identified by a number, its token. This object also stores this rank's parts of the two newest
    snapshots that were taken inside the running training call. A second thread fetches copies while the training thread
    runs.

    Args:
        every: Number of steps between snapshots inside a training call, or None for no such snapshots.
        ledger: Records how long copying takes.

    Attributes:
        every: Number of steps between snapshots inside a training call.
        newest: Number of steps of the running call after which its newest snapshot was taken. 0 if there is none.
    """

    def __init__(self, every: int | None, ledger: Ledger) -> None:
        self.every, self._ledger = every, ledger
        self._kept: dict[int, StateCopy] = {}  # the copies by token
        self._changing = threading.Lock()
        self._claimed: int | None = None  # token of the copy that the driver fetches next, or fetched last
        self._last_token = 0
        self._parts: dict[int, Capture] = {}
        self.newest = 0

    def after_call(self, state: Any, rank: int, landed_token: int | None) -> Capture:
        """Copy the training state between two calls, and return this rank's part of the snapshot.

        A large copy, or a copy of one shard of the state, is not in the returned part. It is stored here, so that the
        driver can fetch it.

        Args:
            state: The `ReplicaState` of this worker.
            rank: Rank of this worker.
            landed_token: Token of the last copy that has arrived in the driver. That copy and earlier copies are
                discarded. None if no copy has arrived.
        """
        part = self._taken(state, rank, lambda token: landed_token is None or token > landed_token)
        self._claimed = part.token or self._claimed
        return part

    def inside_call(self, state: Any, rank: int, progress: Any) -> Capture:
        """Copy the training state inside a training call, and return this rank's part of the snapshot.

        Older copies are discarded, except the one that the driver fetches next or has fetched last.

        Args:
            state: The `ReplicaState` of this worker.
            rank: Rank of this worker.
            progress: Progress of the training call, which is stored with the copy.
        """
        return self._taken(state, rank, lambda token: token == self._claimed, progress)

    def _taken(self, state: Any, rank: int, keeps: Callable[[int], bool], progress: Any = None) -> Capture:
        """Copy the training state, and return this rank's part of the snapshot.

        A small copy of the shared state is added directly. For a large copy, or a copy of one shard of the state, only
        its token is added; the copy itself is stored in this object.

        Args:
            state: Reads the training state.
            rank: Rank of this worker.
            keeps: Function that returns True if the former copy with this token must stay.
            progress: Progress of the running call.
        """
        with self._ledger.copying():
            # Without the lock, a change could get lost, because `fetch` in the second thread replaces the dictionary.
            with self._changing:
                self._kept = {token: copy for token, copy in self._kept.items() if keeps(token)}
            copy, part = state.copy_for_driver(rank), Capture(state.own(), progress=progress)
            if copy is None:
                return part
            if copy.num_bytes <= _INLINE_BYTES and not copy.is_part:
                return replace(part, shared_state=copy.content)
            with self._changing:
                self._last_token += 1
                self._kept[self._last_token] = copy
                return replace(part, token=self._last_token, is_part=copy.is_part)

    def fetch(self, token: int) -> Any:
        """Return the copy that this token identifies.

        Discard earlier copies, which the driver does not need anymore.
        """
        with self._changing:
            self._kept = {each: copy for each, copy in self._kept.items() if each >= token}
            self._claimed, copy = token, self._kept[token]
        return copy.content

    # ------------------------------------------------------------------------------------ mid-call snapshots

    def is_due(self, num_steps: int) -> bool:
        """Return True if a snapshot must be taken after `num_steps` steps of the running training call."""
        return self.every is not None and num_steps - self.newest >= self.every

    def keep(self, num_steps: int, part: Capture) -> None:
        """Store this rank's part of a snapshot inside the running call. Of earlier parts, keep only the newest.

        Args:
            num_steps: Number of steps of the call after which the snapshot was taken.
            part: This rank's part of the snapshot.
        """
        self._parts = {number: self._parts[number] for number in (self.newest,) if number in self._parts}
        self._parts[num_steps] = part
        self.newest = num_steps

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of the snapshot that was taken after `number` steps of the running call.

        If the part refers to a stored copy of the state, keep that copy until the driver fetches it. Return None if the
        part or this copy was discarded.
        """
        part = self._parts.get(number)
        if part is not None and part.token is not None:
            with self._changing:
                if part.token not in self._kept:
                    return None
                self._claimed = part.token
        return part

    def forget_call(self) -> None:
        """Discard this rank's parts of snapshots inside a call, because the call ends or the worker group changes."""
        self._parts, self.newest = {}, 0

    def clear(self) -> None:
        """Discard all copies of the training state."""
        self.forget_call()
        with self._changing:
            self._kept = {}


def require(holds: bool, finding: str) -> None:
    """Raise an error if a state dict does not meet a condition.

    Args:
        holds: Whether the condition is met.
        finding: What is wrong if it is not met, for the error message.

    Raises:
        ValueError: `holds` is False.
    """
    if not holds:
        raise ValueError(f"The state does not match, so nothing was loaded: {finding}.")


def check_progress(epoch: Any, resume: Any) -> None:
    """Check the progress in a state dict: the epoch, the step counter and the position in the data.

    Args:
        epoch: The epoch number in the state dict.
        resume: The step counter and the position, or None if the state dict has none.

    Raises:
        ValueError: A value is invalid. The message names the value.
    """
    check_count("epoch", epoch)
    if resume is None:
        return
    require(isinstance(resume, Mapping), f"`resume` is a `{type(resume).__name__}`, not a dict")
    check_count("global_step", resume.get("global_step", 0))
    check_count("largest_batch", resume.get("largest_batch", 1))
    if resume.get("position") is not None:
        _check_position(resume["position"])


def _check_position(position: Any) -> None:
    require(isinstance(position, Mapping), f"the position in the data is a `{type(position).__name__}`, not a dict")
    check_count("pass_index", position.get("pass_index"))
    if position.get("is_unknown"):
        return
    check_count("consumed", position.get("consumed"))
    require(is_integer(position.get("seed")) and abs(position["seed"]) < 2**64, "the seed of the data is not a number")
    require(is_integer(position.get("order", 0)), "the order of the data is not a number")
    require(isinstance(position.get("is_mid_pass"), bool), "the position does not say if it is inside an epoch")
    if "num_samples" in position:
        check_count("num_samples", position["num_samples"])
        require(position["consumed"] <= position["num_samples"], "the position is after the end of the data")


def check_count(name: str, value: Any) -> None:
    """Check that a value in a state dict is a non-negative integer.

    Args:
        name: Name of the value, for the error message.
        value: The value.

    Raises:
        ValueError: The value is not a non-negative integer, or is too large.
    """
    found = value if is_integer(value) else f"a `{type(value).__name__}`"
    require(is_saved_count(value), f"`{name}` is {found}, not a count")


def check_parts(state: Mapping[str, Any], counts: Mapping[str, int], *others: str) -> None:
    """Check that a state dict has the state of as many models and optimizers as the operator has registered.

    The driver, which has no operator, also calls this function.

    Args:
        state: The state dict to load.
        counts: Number of registered objects by key of the state dict, such as "models".
        *others: Further keys that the state dict must have.

    Raises:
        ValueError: A key is missing, or its value is not a list or has the wrong number of objects.
    """
    missing = [key for key in ("epoch", *others, *counts) if key not in state]
    if missing:
        raise ValueError(
            f"The state has no {', '.join(map(repr, missing))}, so nothing was loaded. It has "
            f"{sorted(map(str, state))}. Load it into an operator like the one that saved it."
        )
    for key, count in counts.items():
        if not isinstance(state[key], list | tuple):
            raise ValueError(
                f"The state's {key!r} is a `{type(state[key]).__name__}` instead of a list. Nothing was loaded."
            )
        if len(state[key]) != count:
            raise ValueError(
                f"The state holds {len(state[key])} {key}, but the operator registered {count}. Nothing was loaded. "
                "Load the state into an operator like the one that saved it."
            )
