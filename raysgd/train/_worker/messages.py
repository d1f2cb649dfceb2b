"""Messages between the driver and the training functions in the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

BROADCAST = "broadcast_from_rank_zero"
PREEMPTION = "get_preemption_info"
"""Questions that functions ask the driver. Each has the name of the function that users call."""


class TrainingResultType(Enum):
    """Type of a `FunctionMessage`: a report of metrics, or a checkpoint."""

    REPORT = auto()
    CHECKPOINT = auto()


@dataclass(frozen=True)
class TrainingResult:
    """A training function's message, as `BackendExecutor` returns it."""

    type: TrainingResultType
    data: dict[str, Any]


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint in a function's message to the driver: its content, or how to get the content.

    Attributes:
        score: Value by which the checkpoint is ranked; None if it has no score.
        data: The encoded checkpoint, if it is small and comes from rank 0, whose checkpoint is always used.
        token: Number with which to fetch the checkpoint from the worker, if it was not sent in `data`.
        files: Names of the checkpoint's files, if the worker itself writes them to storage and nothing is sent. If
            there is a token too, the worker first waits until the driver sends the names that lower ranks also use.
    """

    score: Any = None
    data: Any = None
    token: int | None = None
    files: tuple[str, ...] | None = None

    @property
    def is_stored(self) -> bool:
        """True if the worker itself writes the checkpoint to storage."""
        return self.files is not None


@dataclass(frozen=True)
class FunctionMessage:
    """A message from a training function to the driver: metrics, a checkpoint, or metrics with a checkpoint."""

    kind: TrainingResultType
    data: Any = None
    checkpoint_ref: CheckpointRef | None = None


@dataclass(frozen=True)
class Question:
    """A question that the functions of all ranks ask the driver at the same point.

    Attributes:
        name: Name of the library function that asks the question, such as `broadcast_from_rank_zero`.
        data: This rank's argument, pickled.
    """

    name: str
    data: bytes = b""


@dataclass(frozen=True)
class RanksMet:
    """A message to the driver: all ranks of a group report from now on, including workers that were added later.

    Attributes:
        number: Number of the group: how many groups came before it since the function started.
    """

    number: int


@dataclass(frozen=True)
class FunctionEnded:
    """The last message of a training function, with its return value."""

    value: Any = None


Message = FunctionMessage | FunctionEnded | Question | RanksMet


def is_mere_report(message: Any) -> bool:
    """Return True if the message contains metrics but no checkpoint."""
    return (
        isinstance(message, FunctionMessage)
        and message.kind is TrainingResultType.REPORT
        and message.checkpoint_ref is None
    )


@dataclass(frozen=True)
class FunctionSpec:
    """A training function, with everything that a worker needs to run it.

    Attributes:
        function: The user's function, with its config bound.
        encode: The plug-in's `encode_data`, which prepares reports and checkpoints before they leave the worker.
        score_attribute: Key in a checkpoint whose value ranks the checkpoint.
        is_detailed: True if reports include host, process and time.
        is_muted: True to discard reports, so that the function does not wait until they are read.
        explain: Converts the function's exception to the exception to raise.
        make_session: Creates the function's session from the arguments of `Session`; None to use `Session`.
        num_ahead: Number of reports that may wait for the driver before the function is blocked.
        is_elastic: True if the function continues in place when other workers are lost.
        steps_in: True in a standby worker, which will join a group that is already running the function.
        has_parts: True if the function's data was sharded at the start, so that a lost worker's shard is lost.
    """

    function: Callable[[], Any]
    encode: Callable[[dict[str, Any]], Any]
    score_attribute: str
    is_detailed: bool = False
    is_muted: bool = False
    explain: Callable[[Exception], Exception] | None = None
    make_session: Callable[..., Any] | None = None
    num_ahead: int = 0
    is_elastic: bool = False
    steps_in: bool = False
    has_parts: bool = False
