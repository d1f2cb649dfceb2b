"""The callbacks of one run: called in their order, and each of them at the end, whatever the end is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysgd.callbacks.adapters import FunctionCalls, as_list
from raysgd.callbacks.callback import Callback
from raysgd.callbacks.calling import Dispatcher
from raysgd.engine.shared.group_events import GroupEvent
from raysgd.storage import Folder
from raysgd.train._rules.run_folders import fetch_checkpoints, local_run_dir
from raysgd.train.constants import ALL_RESERVED_KEYS, BASIC_AUTOFILLED_KEYS, DETAILED_AUTOFILLED_KEYS

_RESERVED = ALL_RESERVED_KEYS | BASIC_AUTOFILLED_KEYS | DETAILED_AUTOFILLED_KEYS
_OBSTACLE = (
    "`run.stop` cannot end a run of `raysgd.train.Trainer`: the function decides when it returns. Let it return, or "
    "use `TorchTrainer(train_loop_per_worker, run_config=RunConfig(callbacks=[...])).fit()` of `raysgd.train.torch`."
)


class TrainerCallbacks:
    """The callbacks of a run.

    Raises:
        TypeError: It is something else.
    """

    def __init__(self, callbacks: Any) -> None:
        given = as_list(callbacks)
        self._own = [callback for callback in given if isinstance(callback, Callback)]
        self._calls: FunctionCalls | None = None
        self._newest: str | None = None
        self._of_trainer = Dispatcher((each for each in given if not isinstance(each, Callback)), advice=None)
        for callback in self._of_trainer.callbacks:
            if isinstance(callback, type) or not hasattr(callback, "start_training"):
                raise TypeError(
                    f"`callbacks` has {callback!r}: need objects of subclasses of "
                    "`raysgd.callbacks.Callback` or `raysgd.train.TrainingCallback`."
                )

    @property
    def are_told_of_checkpoints(self) -> bool:
        """True if any callback hears of checkpoints: to know the newest one is to wait until it is written."""
        return bool(self._own)

    @contextmanager
    def around(self, run_dir: Path | Folder, config: Any) -> Iterator[None]:
        """Calls `start_training` before the run, and `finish_training` after it.

        Where the folder of the run is in a store, callbacks get a folder of this machine, which goes there at the end.
        """
        if not self._of_trainer.callbacks and not self._own:
            yield
            return
        with local_run_dir(run_dir) as local:
            failure: BaseException | None = None
            self._calls = FunctionCalls(self._own, "train", config, local, _OBSTACLE)
            try:
                self._of_trainer.on("start_training", logdir=str(local), config={} if config is None else config)
                self._calls.begin_run()
                yield
            except BaseException as error:
                failure = error
                raise
            finally:
                if any(getattr(each, "reads_checkpoints", False) for each in self._of_trainer.callbacks):
                    fetch_checkpoints(run_dir, local)
                self._finish(self._calls, failure)

    def process(
        self, results: list[dict[str, Any]], events: Sequence[GroupEvent] = (), checkpoint: str | None = None
    ) -> None:
        """Gives all callbacks what there is at one report.

        Args:
            results: The metrics of all workers.
            events: What happened to the workers so far.
            checkpoint: Where the newest checkpoint is, if there is one.
        """
        self._of_trainer.on("process_results", results)
        if self._calls is not None and self._own:
            self._calls.report(without_reserved(results[0]), events)
            if checkpoint is not None and checkpoint != self._newest:
                self._newest = checkpoint
                self._calls.checkpoint(checkpoint)

    def _finish(self, calls: FunctionCalls, failure: BaseException | None) -> None:
        has_failed = failure is not None
        try:
            self._of_trainer.finish(["finish_training"], error=has_failed, has_failed=has_failed)
        finally:
            calls.end_run(failure)


def without_reserved(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the function reported, without what the library adds for its own callbacks."""
    return {name: value for name, value in metrics.items() if name not in _RESERVED}
