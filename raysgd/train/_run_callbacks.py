"""The callbacks of one run: called in their order, and each of them at the end, whatever the end is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysgd.storage import Folder
from raysgd.train._run_folders import fetch_checkpoints, local_run_dir
from raysgd.train.callbacks.callback import TrainingCallback, call_with_known

logger = logging.getLogger(__name__)


class RunCallbacks:
    """The callbacks of a run.

    Raises:
        TypeError: It is something else.
    """

    def __init__(self, callbacks: Any) -> None:
        if callbacks is not None and (isinstance(callbacks, str | bytes) or not isinstance(callbacks, Iterable)):
            raise TypeError(f"`callbacks={callbacks!r}`: need a list of callbacks, or None.")
        self._callbacks: list[TrainingCallback] = list(callbacks or ())
        for callback in self._callbacks:
            if isinstance(callback, type) or not hasattr(callback, "start_training"):
                raise TypeError(f"`callbacks` has {callback!r}: need objects of subclasses of `TrainingCallback`.")

    @contextmanager
    def around(self, run_dir: Path | Folder, config: Any) -> Iterator[None]:
        """Calls `start_training` before the run, and `finish_training` after it.

        Where the folder of the run is in a store, callbacks get a folder of this machine, which goes there at the end.
        """
        if not self._callbacks:
            yield
            return
        with local_run_dir(run_dir) as local:
            has_failed = True
            try:
                for callback in self._callbacks:
                    call_with_known(callback.start_training, logdir=str(local), config={} if config is None else config)
                yield
                has_failed = False
            finally:
                if any(getattr(callback, "reads_checkpoints", False) for callback in self._callbacks):
                    fetch_checkpoints(run_dir, local)
                self._finish(has_failed)

    def process(self, results: list[dict[str, Any]]) -> None:
        """Gives all callbacks the metrics of all workers at one report."""
        for callback in self._callbacks:
            callback.process_results(results)

    def _finish(self, has_failed: bool) -> None:
        errors: list[Exception] = []
        for callback in self._callbacks:
            try:
                callback.finish_training(error=has_failed)
            except Exception as error:
                errors.append(error)
        for hidden in errors[1:] if not has_failed else errors:
            logger.error("a callback failed in `finish_training`: %r", hidden)
        if errors and not has_failed:
            raise errors[0]
