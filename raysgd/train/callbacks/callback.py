"""`TrainingCallback`, the base class of callbacks for `Trainer.run`."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, ClassVar

from raysgd.train.callbacks.results_preprocessors import ExcludedKeysResultsPreprocessor, ResultsPreprocessor
from raysgd.train.constants import ALL_RESERVED_KEYS


class TrainingCallback:
    """Observes a run. All methods except `process_results` do nothing by default; override those that you need.

    Attributes:
        results_preprocessor: Preprocesses the results for `handle_result`.
        RESERVED_KEYS: Reserved keys of the results, such as profiler traces, that this callback needs. All other
            reserved keys are removed from its results.
        reads_checkpoints: True if `finish_training` reads the checkpoints in the run's folder. If the folder is in a
            remote store, checkpoints are downloaded only for such callbacks.
    """

    results_preprocessor: ResultsPreprocessor | None = None
    RESERVED_KEYS: ClassVar[Set[str]] = frozenset()
    reads_checkpoints: bool = False

    def start_training(self, logdir: str, config: Any = None, **info: Any) -> None:
        """Called before the training function starts, with the run's folder and the function's config."""

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Called for every report, with a list of the workers' metrics by rank.

        With `elastic=True`, the list may lack workers that have just joined the group.
        """

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """Called once at the end of a run. `error` is True if the run ended with an exception."""

    def process_results(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Remove reserved keys from a report, preprocess it, and call `handle_result`. Do not override this method."""
        hidden = ALL_RESERVED_KEYS - set(self.RESERVED_KEYS)
        shown = ExcludedKeysResultsPreprocessor(hidden).preprocess(results)
        if self.results_preprocessor is not None:
            shown = self.results_preprocessor.preprocess(shown)
        self.handle_result(shown, **info)
