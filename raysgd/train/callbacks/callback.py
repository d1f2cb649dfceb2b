"""The base class of callbacks."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, ClassVar

from raysgd.train.callbacks.results_preprocessors import ExcludedKeysResultsPreprocessor, ResultsPreprocessor
from raysgd.train.constants import ALL_RESERVED_KEYS


class TrainingCallback:
    """Told of a run. Every method does nothing; override what you need.

    Attributes:
        results_preprocessor: What the results go through before `handle_result`.
        RESERVED_KEYS: Keys of other callbacks' own results that this one is shown too.
        reads_checkpoints: Whether `finish_training` needs the checkpoints in the folder of the run. Only then they are
            fetched from a store.
    """

    results_preprocessor: ResultsPreprocessor | None = None
    RESERVED_KEYS: ClassVar[Set[str]] = frozenset()
    reads_checkpoints: bool = False

    def start_training(self, logdir: str, config: Any = None, **info: Any) -> None:
        """Called before the function is started, with the folder of the run and the config of the function."""

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Called for every report, with the metrics of the workers, by rank."""

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """Called once at the end; `error` says whether it ended with an exception."""

    def process_results(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Leave out what belongs to other callbacks, preprocess, and call `handle_result`. Leave as it is."""
        hidden = ALL_RESERVED_KEYS - set(self.RESERVED_KEYS)
        shown = ExcludedKeysResultsPreprocessor(hidden).preprocess(results)
        if self.results_preprocessor is not None:
            shown = self.results_preprocessor.preprocess(shown)
        self.handle_result(shown, **info)
