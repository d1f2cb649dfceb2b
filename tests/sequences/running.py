"""Runs sequences one after the other, and judges them by what `docs/fault-tolerance.md` and `docs/data.md` promise.

The settings are those with which all of it is promised: the default `Recovery`, a global batch that stays, data that
the library divides. Then, whoever dies and steps in:

* each sample of a pass is used once, in the weights;
* `epoch`, and each row of the history, are those of an undisturbed training;
* `num_samples` and the loss are those of all samples that trained the weights. With code and frameworks for which the
  page names an exception, and in validations, a call in which a worker dies may count fewer samples;
* predictions are those of the weights, and `load` goes back to what `save` wrote;
* as many workers as before come back, and no call takes longer than `HANG_S`;
* nothing is raised. `REFUSALS` lists what the documentation allows.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.helpers.forked import forks
from tests.helpers.patience import awaiting_new_workers
from tests.sequences import cluster, deaths
from tests.sequences.books import Wrong
from tests.sequences.grammar import GROWTH, Word
from tests.sequences.kinds import preloaded
from tests.sequences.subjects import Subject

HANG_S = 90.0
NUM_OF_ONE_TRAINER = 8
NOTICED_S = 0.4
REFUSALS: tuple[str, ...] = ()
"""Patterns of messages that may be raised. The sequence ends there, and is not wrong."""


class Hang(BaseException):
    """Something took too long; no code of the library takes it for an error of a user."""


# What the handlers of signals have seen: Cython, which Ray is written in, may turn their exceptions into others.
_interrupts: list[int] = []
hangs: list[str] = []


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C."""
    _interrupts.append(number)
    raise KeyboardInterrupt


@dataclass
class Sums:
    """What happened in some sequences.

    Attributes:
        num_sequences: How many there were.
        seconds: How long they took together.
        calls: How many calls of each name.
        deaths: How many processes were lost, by moment.
        num_growths: How often workers stepped in.
        refused: What was raised for reasons that the documentation names, and how often.
        wrong: The wrong ones, each in a line.
    """

    num_sequences: int = 0
    seconds: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    num_growths: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Sums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        pace = 60 * self.num_sequences / self.seconds if self.seconds else 0
        return (
            f"{self.num_sequences} sequences in {self.seconds:.0f} s of one process ({pace:.1f} in a minute), "
            f"{self.calls.total()} calls {dict(self.calls)}, {self.deaths.total()} deaths {dict(self.deaths)}, "
            f"{self.num_growths} growths, refused {dict(self.refused)}, {len(self.wrong)} wrong"
        )

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Sums:
        found = json.loads(text)
        return cls(**{**found, **{name: Counter(found[name]) for name in ("calls", "deaths", "refused")}})


class Run:
    """One sequence.

    Args:
        subject: What it happens to; it has started over.
        sums: What happens is counted here.
    """

    def __init__(self, subject: Subject, sums: Sums) -> None:
        self._subject, self._sums = subject, sums
        self._armed: dict[int, str] = {}  # which process is to die at which moment
        self._timers: list[tuple[int, int, str]] = []  # process, milliseconds, moment
        self._is_disturbed = False

    def go_through(self, words: Sequence[Word]) -> None:
        """Make all calls, with their deaths, and compare all in the end.

        Raises:
            Wrong: Something is not as documented.
        """
        for word in words:
            with alarm(HANG_S, self._subject):  # of each, because a sequence of several deaths may take longer
                if word.is_death:
                    self._die(word)
                elif word.name == GROWTH:
                    self._subject.grow()
                else:
                    self._call(word)
        with alarm(HANG_S, self._subject):
            self._subject.check()

    def _die(self, word: Word) -> None:
        self._is_disturbed = True
        subject = self._subject
        if word.name == "process":
            if word.arguments:
                self._timers.append((0, int(word.arguments[0]), word.name))
            else:
                subject.end_process()
                self._sums.deaths[word.name] += 1
            return
        pids = [pid for pid in subject.pids() if deaths.lives(pid)]
        if not pids:
            return
        ranks = word.arguments if word.name in ("kill", "lose") else word.arguments[:1]
        victims = list(dict.fromkeys(pids[int(rank) % len(pids)] for rank in ranks))
        doomed = {*self._armed, *(pid for pid, _, _ in self._timers)}
        victims = victims[: max(0, len({*pids} - doomed - {*victims}) + len(victims) - subject.num_kept)]
        for pid in victims:
            if word.name in ("kill", "lose"):
                deaths.end(pid)
                self._sums.deaths[word.name] += 1
            elif word.name == "soon":
                self._timers.append((pid, int(word.arguments[1]), word.name))
            else:
                deaths.arm(subject.folder / "deaths", pid, " ".join(map(str, (word.name, *word.arguments[1:]))))
                self._armed[pid] = word.name
        if word.name == "lose":
            time.sleep(NOTICED_S)

    def _call(self, word: Word) -> None:
        threads = [threading.Thread(target=self._end_after, args=each) for each in self._timers]
        is_late, self._timers = bool(threads), []
        for thread in threads:
            thread.start()
        try:
            self._subject.call(word, is_whole=not self._is_disturbed)
        finally:
            for thread in threads:
                thread.join()
            deaths.disarm(self._subject.folder / "deaths")
            for pid, moment in self._armed.items():
                self._sums.deaths[moment] += not deaths.lives(pid)
            self._armed.clear()
        self._sums.calls[word.name] += 1
        self._is_disturbed = is_late  # it may have come after the call

    def _end_after(self, pid: int, milliseconds: int, moment: str) -> None:
        time.sleep(milliseconds / 1000)
        if moment == "process":
            self._subject.end_process()
        else:
            deaths.end(pid)
        self._sums.deaths[moment] += 1


class Runner:
    """Runs sequences of one kind.

    Args:
        kind: Its name.
        subject_class: What they happen to.
        folder: For files.
        sums: What happens is counted here.
    """

    def __init__(self, kind: str, subject_class: type[Subject], folder: Path, sums: Sums) -> None:
        self._kind, self._class, self._folder, self.sums = kind, subject_class, folder, sums
        self._subject: Subject | None = None
        self._number = -1
        self._seeds: list[int] = []  # that this trainer went through before

    def run_seed(self, seed: int) -> str | None:
        """Run the sequence of a seed. Return what is wrong with it, if anything is."""
        return self.run(self._class.grammar.drawn(seed), seed // NUM_OF_ONE_TRAINER, seed)

    def run(self, words: Sequence[Word], number: int = 0, seed: int | None = None) -> str | None:
        """Run a sequence.

        Args:
            words: What happens.
            number: Of the trainer: one that runs goes on only if it has this number.
            seed: Where it comes from.

        Returns:
            What is wrong with it, if anything is.
        """
        began, step = time.monotonic(), "start"
        if self._subject is None or number != self._number:
            self.close()
        try:
            with alarm(HANG_S * 2):
                subject = self._subject = self._subject or self._new(number)
                step = "start over"
                subject.start_over()
            num_events = len(subject.events())
            step = " ".join(map(str, words))
            Run(subject, self.sums).go_through(words)
            found = None
            events = subject.events()[num_events:]
        except (Exception, Hang) as error:
            if _interrupts:
                raise KeyboardInterrupt from error
            found, events = self._fault(error), self._events()
        refusal = next((each for each in REFUSALS if found is not None and re.search(each, found)), None)
        self.sums.num_sequences += 1
        self.sums.seconds += time.monotonic() - began
        self.sums.num_growths += events.count("grown")
        if found is None:
            self._seeds += [] if seed is None else [seed]
            return None
        if refusal is not None:
            self.sums.refused[refusal] += 1
            self.close()
            return None
        again = f"--only {seed}" if seed is not None else f'--only "{step}"'
        line = f"--kind {self._kind} {again} | {step} | {found} | events {events}"
        line += f" | before it, the trainer went through {self._seeds}" if self._seeds else ""
        self.sums.wrong.append(line)
        self.close()
        return line

    def _new(self, number: int) -> Subject:
        self._number, self._seeds = number, []
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        (folder / "deaths").mkdir()
        return self._class(folder, number)

    @staticmethod
    def _fault(error: BaseException) -> str:
        if hangs:
            return f"HANG {hangs.pop()}"
        if isinstance(error, Wrong):
            return f"WRONG {error}"
        last = traceback.format_exception_only(error)[-1].strip().replace("\n", " ")
        return f"RAISED {last[:600]}"

    def _events(self) -> list[str]:
        with suppress(Exception, Hang), alarm(20):
            return self._subject.events() if self._subject is not None else []
        return ["unknown"]

    def close(self) -> None:
        """End the trainer."""
        subject, self._subject = self._subject, None
        if subject is not None:
            with suppress(Exception, Hang), alarm(60):
                subject.close()


@contextmanager
def alarm(seconds: float, subject: Subject | None = None) -> Iterator[None]:
    """Raise `Hang` in the main thread if the block takes longer. It says where all are."""

    def ring(number: int, frame: FrameType | None) -> None:
        frames = {**sys._current_frames(), threading.get_ident(): frame}
        stacks = [f"a thread of the driver: {_places(each)}" for each in frames.values()]
        asking = threading.Thread(target=lambda: stacks.extend(subject.stacks() if subject else ()), daemon=True)
        asking.start()
        asking.join(20)
        hangs.append("\n    ".join([f"{seconds:g} s have passed", *stacks]))
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _places(frame: FrameType | None) -> str:
    places = [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in traceback.extract_stack(frame)]
    return " > ".join(places[-10:])


@contextmanager
def laboratory(kind: str) -> Iterator[Path]:
    """Have a Ray cluster whose workers fork, and a folder."""
    with ExitStack() as stack:
        found = stack.enter_context(forks(preloaded(kind)))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(awaiting_new_workers())
        is_detached = kind.startswith("detached")
        stack.enter_context(cluster.of_another_process() if is_detached else cluster.of_this_process(found))
        yield Path(folder)
