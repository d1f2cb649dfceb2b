"""Runs programs with the library and without, and judges each one: equal, refused or wrong."""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from raysgd.exceptions import RaySGDError, WorkerError, WorkersLostError
from raysgd.torch import TorchTrainer
from tests.helpers.forked import FOR_TORCH, forks
from tests.helpers.patience import awaiting_new_workers
from tests.programs.grammar import Words, drawn, read, smaller, written
from tests.programs.kinds import kind_of
from tests.programs.outcomes import Outcome, differences
from tests.sequences import cluster
from tests.sequences.running import Hang, alarm

HANG_S = 150.0
EQUAL, REFUSED, WRONG = "equal", "refused", "wrong"
_AFTER_A_LOSS = ("continued", "restored")


@dataclass
class Verdict:
    """What came of a program.

    Attributes:
        program: The words that repeat it.
        word: "equal", "refused" or "wrong".
        reason: What was raised, or what differs.
        is_killed: Whether a worker died.
        exact: What it returned and its weights, to the last bit; empty where it returned nothing.
    """

    program: str
    word: str = EQUAL
    reason: str = ""
    is_killed: bool = False
    exact: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.program} | {self.reason}"


@dataclass
class Sums:
    """What came of some programs.

    Attributes:
        words: How often each verdict.
        num_killed: In how many a worker died.
        seconds: How long they took together.
        refused: Those that were refused, each in a line.
        wrong: The wrong ones, each in a line.
    """

    words: Counter[str] = field(default_factory=Counter)
    num_killed: int = 0
    seconds: float = 0.0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def count(self, verdict: Verdict, seconds: float) -> None:
        self.words[verdict.word] += 1
        self.num_killed += verdict.is_killed
        self.seconds += seconds
        self.refused += [str(verdict)] * (verdict.word == REFUSED)
        self.wrong += [str(verdict)] * (verdict.word == WRONG)

    def add(self, other: Sums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def are_too_many_refused(self) -> bool:
        """Whether more than a fifth were."""
        return self.words[REFUSED] * 5 > self.words.total()

    def __str__(self) -> str:
        return (
            f"{self.words.total()} programs in {self.seconds:.0f} s of one process, {self.num_killed} with a lost "
            f"worker: {', '.join(f'{self.words[word]} {word}' for word in (EQUAL, REFUSED, WRONG))}"
        )

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Sums:
        found = json.loads(text)
        return cls(**{**found, "words": Counter(found["words"])})


class Runner:
    """Runs programs of one kind.

    Args:
        kind: Its name.

    Attributes:
        sums: What came of them.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.sums = kind_of(kind), Sums()

    def words_of(self, program: int | str) -> dict[str, Any]:
        """Return the words of a seed, or of what somebody wrote down."""
        kind = self.kind
        if isinstance(program, str):
            return kind.settled(read(program, kind.choices))
        return kind.settled(drawn(kind.name, kind.choices, kind.core, program))

    def run(self, program: int | str) -> Verdict:
        """Run a program, by its seed or its words."""
        began, words = time.monotonic(), self.words_of(program)
        verdict = self._judged(words)
        if isinstance(program, int):
            verdict.program = f"--kind {self.kind.name} --only {program} | {verdict.program}"
        self.sums.count(verdict, time.monotonic() - began)
        return verdict

    def smallest(self, program: int | str) -> Verdict:
        """Run a program that is wrong, and smaller ones, as long as these are wrong too. Return the smallest one."""
        words = self.words_of(program)
        found = self._judged(words)
        is_smaller = found.word == WRONG
        while is_smaller:
            is_smaller = False
            for candidate in map(self.kind.settled, smaller(words, self.kind.choices)):
                if candidate != words and len(self._written(candidate)) < len(self._written(words)):
                    verdict = self._judged(candidate)
                    if verdict.word == WRONG:
                        words, found, is_smaller = candidate, verdict, True
                        break
        return found

    def _written(self, words: Words) -> str:
        return written(words, self.kind.choices)

    def _judged(self, words: Words) -> Verdict:
        verdict = Verdict(self._written(words))
        expected = self.kind.plain(words)
        try:
            with alarm(HANG_S):
                found = self._outcome(words, verdict)
        except (Exception, Hang) as error:
            verdict.word = REFUSED if is_refusal(error) else WRONG
            verdict.reason = _told(error)
            return verdict
        verdict.exact = found.exact
        lines = differences(expected, found)
        if lines:
            verdict.word, verdict.reason = WRONG, "; ".join(lines[:6])
        return verdict

    def _outcome(self, words: Words, verdict: Verdict) -> Outcome:
        is_here = words["workers"] == 1 and words["kill"] == "no"
        trainer = TorchTrainer(
            training_operator_cls=self.kind.operator(words),
            num_workers=int(words["workers"]),
            num_cpus_per_worker=1 if is_here else 0.5,
            use_local=is_here,
            use_gpu=False,
            **self.kind.options(words),
        )
        try:
            outcome = self.kind.run(trainer, words)
            verdict.is_killed = any(each.kind in _AFTER_A_LOSS for each in trainer.status().events)
            return outcome
        finally:
            trainer.shutdown(force=True)


def is_refusal(error: BaseException) -> bool:
    """Return whether the library says that it does not do this. What else workers raise is a fault."""
    is_fault = isinstance(error, WorkersLostError | WorkerError)
    return isinstance(error, ValueError | TypeError) or (isinstance(error, RaySGDError) and not is_fault)


def _told(error: BaseException) -> str:
    lines = traceback.format_exception_only(error)
    return " ".join(" ".join(lines).split())[:500]


@contextmanager
def laboratory(preloaded: Sequence[str] = FOR_TORCH) -> Iterator[None]:
    """Have a Ray cluster whose workers fork."""
    with ExitStack() as stack:
        found = stack.enter_context(forks(preloaded))
        stack.enter_context(awaiting_new_workers())
        stack.enter_context(cluster.of_this_process(found))
        yield
