"""What class-based trainers can do beside single calls: `fit`, `test`, and the history of all calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.engine.call import Call
from raysgd.engine.controller import ElasticController
from raysgd.engine.worker import is_sendable
from raysgd.exceptions import UnpicklableError
from raysgd.replicas.fitting import Fit, FitOptions
from raysgd.replicas.history import History
from raysgd.replicas.making import ReplicaMaker
from raysgd.replicas.recording import CallRecorder, as_test
from raysgd.replicas.results import Metrics
from raysgd.replicas.settings import GroupSettings


class FitMethods(ABC):
    """What a trainer has that trains in epochs; `ClassTrainer` completes it."""

    _recorder: CallRecorder
    _controller: ElasticController
    _replicas: ReplicaMaker
    _group_settings: GroupSettings
    _settings: Any
    _runner_cls: Any
    _runs_worker_callbacks = False
    """Whether replicas call callbacks around their steps."""

    @abstractmethod
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains for one pass over the data."""

    @abstractmethod
    def validate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates on the validation data."""

    @abstractmethod
    def save(self, checkpoint: Any) -> Any:
        """Writes the state to a file."""

    @abstractmethod
    def load(self, checkpoint: Any) -> Any:
        """Loads a file that `save` wrote."""

    def fit(
        self,
        epochs: int,
        *,
        callbacks: Iterable[Any] = (),
        validation_freq: int = 1,
        dataset: Any = None,
        validation_dataset: Any = None,
        resume_from: str | Path | None = None,
        folder: str | Path | None = None,
    ) -> History:
        """Trains for some epochs, validates after each of them, and calls callbacks. Call it again for more epochs.

        Args:
            epochs: How many more epochs to train. With `resume_from` it is the total: those that the checkpoint has
                count.
            callbacks: Objects of subclasses of `raysgd.callbacks.Callback`, called in this order.
            validation_freq: Validate after every so many epochs; 0 for never. Without validation data, nothing is
                validated.
            dataset: Trained on instead of the registered data, as in `train`.
            validation_dataset: Validated on instead of the registered data, as in `validate`.
            resume_from: A file that `run.save` or `save` wrote, or its URI: loaded first. "auto" is the newest
                checkpoint that the callbacks find, and starts from the beginning if there is none.
            folder: Where callbacks put their files. Default: a new folder in `~/ray_results`.

        Returns:
            One row per epoch, and all that happened.

        Raises:
            CallbackError: A callback failed. The state of the training is kept.
            WorkerError, WorkersLostError: As in `train`.
        """
        options = FitOptions(
            epochs=epochs,
            callbacks=callbacks,
            validation_freq=validation_freq,
            dataset=dataset,
            validation_dataset=validation_dataset,
            resume_from=resume_from,
            folder=folder,
        )
        return Fit(self, options).run()

    def test(self, dataset: Any) -> Metrics:
        """Evaluates on other data than the registered ones, as `validate(dataset=...)`; names begin with `test_`."""
        with self._recorder.as_test():
            return as_test(self.validate(dataset=dataset))

    @property
    def history(self) -> History:
        """Every call of `train`, `validate` and `test` since the start, and what happened to the workers."""
        return self._recorder.history

    def _use_worker_callbacks(self, callbacks: Sequence[tuple[str, WorkerCallback]]) -> None:
        """Lets these callbacks, and no others, run in the workers that there are, and in those to come.

        Raises:
            TypeError: This trainer has none in its workers.
            UnpicklableError: One of them cannot be sent to a worker.
        """
        for name, callback in callbacks:
            if not self._runs_worker_callbacks:
                raise TypeError(
                    f"`{name}` runs in the workers, around each step, which `{type(self).__name__}` cannot do: leave "
                    "it out, or train with `TorchTrainer`."
                )
            if not is_sendable(callback):
                raise UnpicklableError(f"`{name}` runs in the workers, and `{callback!r}` cannot be pickled.")
        chosen = tuple(callback for _, callback in callbacks)
        self._settings = replace(self._settings, worker_callbacks=chosen)
        self._replicas.settings = replace(self._replicas.settings, worker_callbacks=chosen)
        group = self._controller.group
        if group is not None:  # else the next workers are made with them
            group.standby.kill_all()  # they were made without; others follow
            function, args = self._runner_cls.install_callbacks, (chosen,)
            call = Call(function, lambda worlds: [args] * len(worlds), changes_state=True, leaves_as_new=True)
            self._controller.run(call)
