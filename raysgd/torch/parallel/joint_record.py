"""Comparison of what the ranks do in a training call, where that takes no exchange: when it ends, and when it fails.

A rank that makes another number of exchanges than the others pairs its own with other ones of theirs. Nothing in an
exchange tells, unless the sizes differ. So each rank records what it does, the driver compares the records once the
call is over, and the ranks do where an exchange fails. A rank that has ended the call a while ago tells the others: who
is at an exchange beyond that would wait for ever, and breaks the group instead.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from raysgd.connections.mesh.mesh import NotAligned
from raysgd.connections.mesh.words import RankStatements
from raysgd.connections.torch import is_connection_error, words_of_group
from raysgd.exceptions import UnevenStepsError
from raysgd.messages.joint_work import JointWork, difference

_NUM_MARKS = 32  # by so much ranks may be apart that do the same: a GPU works on behind what was recorded
_PATIENCE_S = 2.0


class JointRecord:
    """This rank's record of what all ranks have to do alike in the calls of one group.

    Args:
        find_words: Returns what the ranks of the group say to each other through; None where they cannot.

    Attributes:
        has_parted: Whether the ranks were found to have done different things.
    """

    def __init__(self, find_words: Callable[[], RankStatements | None] = words_of_group) -> None:
        self._find_words = find_words
        self.forget()

    def forget(self) -> None:
        """Start over, in another group."""
        self.has_parted = False
        self._call: _Call | None = None

    def begin(self) -> None:
        """Begin a call, as all ranks do."""
        self.has_parted = False
        self._call = call = _Call(self._find_words())
        if call.words is not None:
            call.words.begin(call.hear)

    def note(self, what: str) -> None:
        """Record that something begins that all ranks do at this place."""
        if self._call is not None and self._call.is_open:
            self._call.note(what)

    @property
    def work(self) -> JointWork | None:
        """The work of the last call of this group; None where there was none."""
        return None if self._call is None else self._call.work(is_over=True)

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Compare, if an exchange fails in the block, what the ranks did; tell them some time after it ends.

        Raises:
            UnevenStepsError: They did different things.
        """
        call = self._call
        if call is None:
            yield
            return
        try:
            yield
            call.say_later()
        except Exception as error:
            words = call.difference() if isinstance(error, NotAligned) or is_connection_error(error) else ""
            self.has_parted = bool(words)
            if words:
                raise UnevenStepsError(words).with_traceback(error.__traceback__) from error
            raise
        finally:
            call.is_open = False


class _Call:
    """One call.

    Args:
        words: What the ranks say to each other through; None where they cannot.
    """

    def __init__(self, words: RankStatements | None) -> None:
        self.words = words
        self.is_open = True
        self._counts: Counter[str] = Counter()
        self._marks = deque([0], _NUM_MARKS)
        self._changing = threading.Lock()
        self._ended: JointWork | None = None

    def note(self, what: str) -> None:
        with self._changing:
            self._counts[what] += 1
            self._marks.append(zlib.crc32(what.encode(), self._marks[-1]))
        if self._ended is not None:
            self._compare_with(self._ended)

    def work(self, is_over: bool = False) -> JointWork:
        with self._changing:
            return JointWork(dict(self._counts), tuple(self._marks), is_over)

    def hear(self, word: bytes) -> None:
        """Called in another thread, with the word of another rank."""
        work = _decoded(word)
        if self.is_open and work.is_over:
            self._ended = work
            self._compare_with(work)
        elif self.words is not None and not (self.is_open or work.is_over):  # that rank waits to hear it
            self.words.say_last()

    def _compare_with(self, ended: JointWork) -> None:
        """Break the group where this rank is at an exchange that one which has ended its call did not make."""
        if self.words is not None and difference({0: self.work(), 1: ended}):
            self.words.interrupt()

    def difference(self) -> str:
        """Return what the ranks did that cannot become the same, once they have all said what they did."""
        if self.words is None:
            return ""
        self.words.say(_encoded(self.work()))
        others = self.words.await_all(_PATIENCE_S)
        return difference({self.words.rank: self.work()} | {rank: _decoded(word) for rank, word in others.items()})

    def say_later(self) -> None:
        """Tell the others what this rank did if they are still in the call after a while."""
        if self.words is not None:
            self.words.say_later(partial(_encoded, self.work(is_over=True)))


def _encoded(work: JointWork) -> bytes:
    return json.dumps(vars(work)).encode()


def _decoded(word: bytes) -> JointWork:
    values = json.loads(word)
    return JointWork(values["counts"], tuple(values["marks"]), values["is_over"])
