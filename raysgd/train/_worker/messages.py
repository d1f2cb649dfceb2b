"""Messages between the driver and the functions in the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

BROADCAST = "broadcast_from_rank_zero"
PREEMPTION = "get_preemption_info"
"""What functions ask the driver for: each is named as what users call."""


class TrainingResultType(Enum):
    """The kinds of messages."""

    REPORT = auto()
    CHECKPOINT = auto()


@dataclass(frozen=True)
class TrainingResult:
    """A message as code sees it that drives a `BackendExecutor` itself."""

    type: TrainingResultType
    data: dict[str, Any]


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint on its way to the driver.

    Attributes:
        score: The value by which it is judged; None if the checkpoint has none.
        data: The encoded checkpoint, if it is small and certainly kept.
        token: Otherwise, what to fetch it with.
        files: The names of the files that the worker stores itself, so that nothing travels: at once, or with a token
            when it is told which of these names lower ranks use too.
    """

    score: Any = None
    data: Any = None
    token: int | None = None
    files: tuple[str, ...] | None = None

    @property
    def is_stored(self) -> bool:
        """True if its worker stores it."""
        return self.files is not None


@dataclass(frozen=True)
class FunctionMessage:
    """A message of a function: metrics, a checkpoint, or metrics with a checkpoint."""

    kind: TrainingResultType
    data: Any = None
    checkpoint_ref: CheckpointRef | None = None


@dataclass(frozen=True)
class Question:
    """A question that all functions ask the driver in step.

    Attributes:
        name: What they ask for.
        data: What this rank says with it, pickled.
    """

    name: str
    data: bytes = b""


@dataclass(frozen=True)
class RanksMet:
    """From here on all ranks of a group report, also those that have stepped in.

    Attributes:
        number: How many groups there were before, since the function began.
    """

    number: int


@dataclass(frozen=True)
class FunctionEnded:
    """The function returned this value."""

    value: Any = None


Message = FunctionMessage | FunctionEnded | Question | RanksMet


def is_mere_report(message: Any) -> bool:
    """Return whether it is metrics without a checkpoint."""
    return (
        isinstance(message, FunctionMessage)
        and message.kind is TrainingResultType.REPORT
        and message.checkpoint_ref is None
    )


@dataclass(frozen=True)
class FunctionSpec:
    """A function with all that a worker needs to run it.

    Attributes:
        function: The user's function, its argument bound.
        encode: Prepares everything that leaves the worker.
        score_attribute: The key in a checkpoint by which it is judged.
        is_detailed: Whether each report also says where and when it was made.
        is_muted: Whether the function does not wait for its reports to be read.
        explain: Turns an exception of the function into the one to raise.
        make_session: Makes the session in which the function runs, of what `Session` takes; None for a `Session`.
        num_ahead: How many reports may wait for the driver while the function goes on.
        is_elastic: Whether the function goes on where it is when other workers are lost.
        steps_in: Whether it begins in a worker that is to step in where others are in the middle.
        has_parts: Whether its data were divided at the start: a part is lost with its worker.
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
