"""What sequences happen to: a trainer of some kind, which starts whole again before each of them."""

from __future__ import annotations

import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from raysgd.core.engine.worker import WorkerProcess
from tests.helpers.doors import controller_of
from tests.sequences import books
from tests.sequences.books import Books, Wrong
from tests.sequences.grammar import NUM_WORKERS, Grammar, Word

LATE_S = 60.0
CALLS = {
    "train": 8,
    "background": 2,
    "validate": 4,
    "predict": 3,
    "update": 2,
    "save": 1,
    "load": 2,
    "model": 3,
    "fit": 1,
    "data": 2,
    "new": 1,
}
"""The calls that are drawn, each in proportion to its number."""
MOST = {"train": 14, "background": 14, "data": 8, "new": 8}
"""For calls that take a number of steps or epochs, the largest."""
MOMENTS = {"kill": 5, "lose": 3, "soon": 3, "call": 5, "hook": 2}
"""The moments of deaths, as the calls."""
_PLACE = re.compile(r'([^/"]+", line \d+, in \w+)')


class Subject(ABC):
    """A running trainer.

    Args:
        folder: For files; all workers see it.
        number: Trainers with different numbers have different options.

    Attributes:
        grammar: What may happen to it.
        num_kept: How many workers are never killed.
    """

    grammar: ClassVar[Grammar]
    num_kept: ClassVar[int] = 0

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number
        self.books = Books()

    @abstractmethod
    def start_over(self) -> None:
        """Have all workers, and the state of the beginning."""

    @abstractmethod
    def pids(self) -> list[int]:
        """Return the processes of the workers, by rank; some may be dead."""

    @abstractmethod
    def grow(self) -> None:
        """Have all workers again."""

    @abstractmethod
    def call(self, word: Word, is_whole: bool) -> None:
        """Make a call, and compare what it returns.

        Args:
            word: The call.
            is_whole: Whether no one dies in it.

        Raises:
            Wrong: It returned something else.
        """

    @abstractmethod
    def check(self) -> None:
        """Compare the state and the history at the end of a sequence.

        Raises:
            Wrong: They differ.
        """

    @abstractmethod
    def events(self) -> list[str]:
        """Return what happened to the group, in words of the library."""

    @abstractmethod
    def close(self) -> None:
        """End all."""

    def stacks(self) -> list[str]:
        """Return where the workers are in their code, as far as they answer."""
        return []

    def end_process(self) -> None:
        """Kill the process of a detached trainer."""
        raise NotImplementedError


class ClassTrainer(Subject):
    """A trainer that is a class: what PyTorch and Keras have in common.

    Attributes:
        num_changes: How often the config was changed.
        suffix: Of the file that the trainer saves.
        names: What its results have.
        counts_all: Whether a result counts the samples of lost workers; the documentation says for what it does not.
    """

    suffix: ClassVar[str] = ".pt"
    counts_all: ClassVar[bool] = True
    names: ClassVar[Sequence[str]] = books.NAMES

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder, number)
        self.trainer = self.made()
        self.num_changes = 0
        self._num_rows = 0
        self._other: Any = None
        self._file = self.folder / f"saved{self.suffix}"

    @abstractmethod
    def made(self) -> Any:
        """Return a new trainer."""

    @abstractmethod
    def begin_again(self) -> None:
        """Let the trainer take the state of the beginning."""

    @abstractmethod
    def new_other(self) -> Any:
        """Return data for single calls."""

    @abstractmethod
    def tables(self) -> Sequence[Sequence[float]]:
        """Return the weights of each model."""

    @abstractmethod
    def predict(self) -> Sequence[float]:
        """Return the weights that the trainer predicts for all samples."""

    def start_over(self) -> None:
        self.grow()
        self.begin_again()
        if self.trainer.num_workers < NUM_WORKERS:
            raise Wrong(f"only {self.trainer.num_workers} workers came")
        self.books, self._other, self._num_rows = Books(), self.new_other(), len(self.trainer.history)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.trainer.status().workers]

    def grow(self) -> None:
        deadline = time.monotonic() + LATE_S
        while self.trainer.num_workers < NUM_WORKERS:
            if time.monotonic() > deadline:
                raise Wrong(f"no worker came in {LATE_S:g} s")
            self._update()
            time.sleep(0.1)

    def _update(self) -> None:
        self.num_changes += 1
        self.trainer.update_config(x=self.num_changes)

    def call(self, word: Word, is_whole: bool) -> None:
        calls: Mapping[str, Callable[[Word, bool], None]] = {
            "train": self._train,
            "background": self._train,
            "data": self._train_on_others,
            "new": self._train_on_others,
            "fit": self._fit,
            "validate": self._validate,
            "predict": self._predict,
            "update": lambda word, is_whole: self._update(),
            "save": self._save,
            "load": self._load,
            "model": lambda word, is_whole: self.books.check_weights(self.tables()),
        }
        calls[word.name](word, is_whole)

    def _train(self, word: Word, is_whole: bool) -> None:
        if word.name == "train":
            result = self.trainer.train(num_steps=word.number)
        else:
            result = self.trainer.train(num_steps=word.number, blocking=False).result()
        expected = self.books.train(word.number)
        self._compare(str(word), result, expected, is_whole or self.counts_all)

    def _train_on_others(self, word: Word, is_whole: bool) -> None:
        is_new = word.name == "new"
        if is_new:
            self._other = self.new_other()
        result = self.trainer.train(num_steps=word.number, dataset=self._other)
        expected = self.books.train_on_others(word.number, is_new)
        self._compare(str(word), result, expected, is_whole or self.counts_all)

    def _fit(self, word: Word, is_whole: bool) -> None:
        num_epochs = word.number or 2
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            history = self.trainer.fit(num_epochs, progress=False, folder=folder)
        if len(history) != num_epochs:
            raise Wrong(f"{word} returned {len(history)} rows")
        for row in history:
            self._compare(str(word), row, self.books.train(), is_whole or self.counts_all)

    def _validate(self, word: Word, is_whole: bool) -> None:
        self._compare(str(word), self.trainer.validate(), self.books.validate(), is_whole)

    def _predict(self, word: Word, is_whole: bool) -> None:
        self.books.check_weights([self.predict()])

    def _compare(self, what: str, found: Any, expected: Mapping[str, float], is_whole: bool) -> None:
        books.compare(what, found, expected, is_whole, self.names)

    def _save(self, word: Word, is_whole: bool) -> None:
        self.trainer.save(self._file)
        self.books.save()

    def _load(self, word: Word, is_whole: bool) -> None:
        if self.books.saved is None:
            return self._save(word, is_whole)
        self.trainer.load(self._file)
        self.books.load()
        return None

    def check(self) -> None:
        self.books.check_weights(self.tables())
        self.books.check_rows(self.trainer.history[self._num_rows :], self.names)

    def events(self) -> list[str]:
        return [str(event.kind) for event in self.trainer.status().events]

    def stacks(self) -> list[str]:
        group = controller_of(self.trainer).group
        stacks = group.ask_workers(WorkerProcess.stack) if group is not None else {}
        return [f"rank {rank}: {' > '.join(re.findall(_PLACE, stack)[-10:])}" for rank, stack in stacks.items()]

    def close(self) -> None:
        self.trainer.shutdown(force=True)
