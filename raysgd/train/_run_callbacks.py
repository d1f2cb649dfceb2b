"""The callbacks of one run: called in their order, and each of them at the end, whatever the end is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysgd.callbacks.adapters import FunctionCalls
from raysgd.callbacks.callback import Callback
from raysgd.engine.history import Event
from raysgd.storage import Folder
from raysgd.train._run_folders import fetch_checkpoints, local_run_dir
from raysgd.train.callbacks.callback import TrainingCallback, call_with_known
from raysgd.train.constants import ALL_RESERVED_KEYS, BASIC_AUTOFILLED_KEYS, DETAILED_AUTOFILLED_KEYS

logger = logging.getLogger(__name__)

_RESERVED = ALL_RESERVED_KEYS | BASIC_AUTOFILLED_KEYS | DETAILED_AUTOFILLED_KEYS
_OBSTACLE = (
    "`run.stop` cannot end a run of `raysgd.train.Trainer`: the function decides when it returns. Let it return, or "
    "use `TorchTrainer(train_loop_per_worker, run_config=RunConfig(callbacks=[...])).fit()` of `raysgd.train.torch`."
)


class RunCallbacks:
    """The callbacks of a run.

    Raises:
        TypeError: It is something else.
    """

    def __init__(self, callbacks: Any) -> None:
        if callbacks is not None and (isinstance(callbacks, str | bytes) or not isinstance(callbacks, Iterable)):
            raise TypeError(f"`callbacks={callbacks!r}`: need a list of callbacks, or None.")
        given = list(callbacks or ())
        self._own = [callback for callback in given if isinstance(callback, Callback)]
        self._calls: FunctionCalls | None = None
        self._newest: str | None = None
        self._callbacks: list[TrainingCallback] = [each for each in given if not isinstance(each, Callback)]
        for callback in self._callbacks:
            if isinstance(callback, type) or not hasattr(callback, "start_training"):
                raise TypeError(
                    f"`callbacks` has {callback!r}: need objects of subclasses of "
                    "`raysgd.callbacks.Callback` or `raysgd.train.TrainingCallback`."
                )

    @contextmanager
    def around(self, run_dir: Path | Folder, config: Any) -> Iterator[None]:
        """Calls `start_training` before the run, and `finish_training` after it.

        Where the folder of the run is in a store, callbacks get a folder of this machine, which goes there at the end.
        """
        if not self._callbacks and not self._own:
            yield
            return
        with local_run_dir(run_dir) as local:
            failure: BaseException | None = None
            calls = FunctionCalls(self._own, "train", config, local, _OBSTACLE)
            try:
                for callback in self._callbacks:
                    call_with_known(callback.start_training, logdir=str(local), config={} if config is None else config)
                self._calls = calls
                calls.begin()
                yield
            except BaseException as error:
                failure = error
                raise
            finally:
                if any(getattr(callback, "reads_checkpoints", False) for callback in self._callbacks):
                    fetch_checkpoints(run_dir, local)
                self._finish(calls, failure)

    def process(
        self, results: list[dict[str, Any]], events: Sequence[Event] = (), checkpoint: str | None = None
    ) -> None:
        """Gives all callbacks what there is at one report.

        Args:
            results: The metrics of all workers.
            events: What happened to the workers so far.
            checkpoint: Where the newest checkpoint is, if there is one.
        """
        for callback in self._callbacks:
            callback.process_results(results)
        if self._calls is not None and self._own:
            self._calls.report(without_reserved(results[0]), events)
            if checkpoint is not None and checkpoint != self._newest:
                self._newest = checkpoint
                self._calls.checkpoint(checkpoint)

    def _finish(self, calls: FunctionCalls, failure: BaseException | None) -> None:
        errors: list[Exception] = []
        has_failed = failure is not None
        for callback in self._callbacks:
            try:
                callback.finish_training(error=has_failed)
            except Exception as error:
                errors.append(error)
        try:
            calls.end(failure)
        except Exception as error:
            errors.append(error)
        for hidden in errors[1:] if not has_failed else errors:
            logger.error("a callback failed in `finish_training`: %r", hidden)
        if errors and not has_failed:
            raise errors[0]


def without_reserved(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What the function reported, without what the library adds for its own callbacks."""
    return {name: value for name, value in metrics.items() if name not in _RESERVED}
