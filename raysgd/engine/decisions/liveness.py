"""Pure: which worker to poll for a heartbeat, and which has been silent for too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raysgd.engine.decisions.own_time import OwnTime
from raysgd.engine.shared.types import Outcome

KeyT = TypeVar("KeyT")

_ROUND_S = 1.0
_ROUNDS_PER_HEARTBEAT = 3  # with the default of 30 s, 1,000 ranks still cost no more than the share below
_QUESTION_S = 0.0005  # of the driver's time, for one question and its answer
_SHARE = 0.05  # of the driver's time that questions may take


@dataclass(frozen=True)
class PollResult(Generic[KeyT]):
    """The answers and the silence since the last look.

    Attributes:
        answers: Who answered, and what.
        silent: Who has not answered for too long, and for how many seconds. They are not waited for any more.
    """

    answers: list[tuple[KeyT, Outcome]]
    silent: list[tuple[KeyT, float]]


class LivenessCheck(Generic[KeyT]):
    """Keeps the questions that are open. Seconds in which this process did not look at them do not count.

    Args:
        heartbeat_s: A worker that does not answer for so long is silent.
        poll: What became of a question, as of now.
        now: Time.
    """

    def __init__(self, heartbeat_s: float, poll: Callable[[KeyT, Any], Outcome], now: Callable[[], float]) -> None:
        self._heartbeat_s, self._poll, self._own_time = heartbeat_s, poll, OwnTime(now)
        self._asked: dict[KeyT, tuple[Any, float]] = {}

    def round_s(self, num_keys: int, wanted_s: float = _ROUND_S) -> float:
        """Time from one round of questions to the next: as wanted, longer for many workers, but still often enough."""
        return min(max(wanted_s, num_keys * _QUESTION_S / _SHARE), self._heartbeat_s / _ROUNDS_PER_HEARTBEAT)

    def ask(self, keys: Iterable[KeyT], submit: Callable[[KeyT], Any]) -> None:
        """Asks all who do not owe an answer already."""
        for key in keys:
            if key not in self._asked:
                self._asked[key] = submit(key), self._own_time.look()

    def poll(self) -> PollResult[KeyT]:
        """Looks who has answered."""
        now = self._own_time.look()
        polled: PollResult[KeyT] = PollResult([], [])
        for key, (question, asked_at) in list(self._asked.items()):
            found = self._poll(key, question)
            if found.answered:
                polled.answers.append((key, found))
            elif now - asked_at > self._heartbeat_s:
                polled.silent.append((key, now - asked_at))
            else:
                continue
            del self._asked[key]
        self.rest()
        return polled

    def rest(self) -> None:
        """Says that until now this process was here to poll."""
        self._own_time.catch_up()

    def remove(self, key: KeyT) -> None:
        """Expects no answer from `key` any more."""
        self._asked.pop(key, None)
