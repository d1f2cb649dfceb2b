"""Messages between the driver and the functions in the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

BROADCAST = "broadcast_from_rank_zero"
PREEMPTION = "get_preemption_info"
"""Questions that functions ask the driver, each named after the function that users call."""


class TrainingResultType(Enum):
    """The kinds of messages."""

    REPORT = auto()
    CHECKPOINT = auto()


@dataclass(frozen=True)
class TrainingResult:
    """A message in the form that code which drives a `BackendExecutor` itself gets."""

    type: TrainingResultType
    data: dict[str, Any]


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint on its way to the driver.

    Attributes:
        score: Value that the checkpoint is ranked by; None if it has none.
        data: The encoded checkpoint, if it is small and certain to be kept.
        token: Otherwise, the token to fetch it with.
        files: Names of the files if the worker stores them itself, so that nothing is sent. With a token, the worker
            first waits to hear which of these names lower ranks use too.
    """

    score: Any = None
    data: Any = None
    token: int | None = None
    files: tuple[str, ...] | None = None

    @property
    def is_stored(self) -> bool:
        """True if the worker stores the checkpoint itself."""
        return self.files is not None


@dataclass(frozen=True)
class FunctionMessage:
    """A message of a function: metrics, a checkpoint, or metrics with a checkpoint."""

    kind: TrainingResultType
    data: Any = None
    checkpoint_ref: CheckpointRef | None = None


@dataclass(frozen=True)
class Question:
    """A question that the functions of all ranks ask the driver at the same point.

    Attributes:
        name: Name of the function that asks.
        data: This rank's argument, pickled.
    """

    name: str
    data: bytes = b""


@dataclass(frozen=True)
class RanksMet:
    """From here on all ranks of a group report, also the workers that stepped in.

    Attributes:
        number: Number of earlier groups since the function started.
    """

    number: int


@dataclass(frozen=True)
class FunctionEnded:
    """The function returned this value."""

    value: Any = None


Message = FunctionMessage | FunctionEnded | Question | RanksMet


def is_mere_report(message: Any) -> bool:
    """Return True if the message carries metrics without a checkpoint."""
    return (
        isinstance(message, FunctionMessage)
        and message.kind is TrainingResultType.REPORT
        and message.checkpoint_ref is None
    )


@dataclass(frozen=True)
class FunctionSpec:
    """A function with all that a worker needs to run it.

    Attributes:
        function: The user's function, with its config bound.
        encode: Prepares everything that leaves the worker.
        score_attribute: Key in a checkpoint whose value ranks it.
        is_detailed: True if reports include host, process and time.
        is_muted: True if the function does not wait until its reports are read.
        explain: Turns an exception of the function into the one to raise.
        make_session: Creates the session of the function, from the arguments of `Session`; None for a `Session`.
        num_ahead: Number of reports that may wait for the driver before the function is blocked.
        is_elastic: True if the function continues in place when other workers are lost.
        steps_in: True if it starts in a worker that is to step into a running group.
        has_parts: True if its data was divided at the start, so that a lost worker's part is lost.
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
