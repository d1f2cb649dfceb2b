"""Tracks the position in Keras's `fit` on one worker, so that `fit` can be resumed from this position.

Keras draws its batches itself, and a callback after every step would slow down training. The position is therefore
counted in gradient all-reduces, here called exchanges. Each step has a fixed number of exchanges, and changes no
weights before they have finished.

ADR 31 explains why the position in a `fit` is counted in all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raysgd.tf.data.sources import Passes
from raysgd.tf.objects import registration
from raysgd.tf.parallel.averaging import ExchangeRecord
from raysgd.tf.parallel.step import assigned
from raysgd.trainer.worker.replica_state import check_count, require

_AT_STEPS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


@dataclass(frozen=True)
class FitPlace:
    """A position in a `fit`.

    Attributes:
        epoch: Keras's current epoch, or the next epoch if none is running.
        num_steps: Number of completed steps of this epoch.
        num_passes: Number of passes over the dataset that were started before the current pass.
        num_batches: Number of batches of the current pass used so far. With `steps_per_epoch`, a pass may span several
            epochs, so this may exceed `num_steps`.
        logs: The latest value of each metric that Keras has reported in earlier epochs.
        is_over: True if `fit` has finished, because all epochs are done or a callback stopped it.
    """

    epoch: int
    num_steps: int = 0
    num_passes: int = 0
    num_batches: int = 0
    logs: Mapping[str, float] = field(default_factory=dict)
    is_over: bool = False


def check_state(state: Any) -> None:
    """Check that `FitStream.resume` can resume from a state.

    Raises:
        ValueError: `state` is not a result of `FitStream.state`.
    """
    require(isinstance(state, Mapping), "the position of `fit` is not a dict")
    known = set(FitPlace.__dataclass_fields__) if "epoch" in state else {"num_passes", "logs"}
    require(set(state) == known, f"the position of `fit` does not have exactly the entries {sorted(known)}")
    require(isinstance(state["logs"], Mapping), "the logs of `fit` are not a dict")
    for name in known - {"logs", "is_over"}:
        check_count(name, state[name])


class FitStream:
    """Takes the place of a cursor while Keras's `fit` draws the batches, and tracks the position in the `fit`.

    After an interruption, the next `fit` resumes from this position.

    Args:
        passes: The training dataset and the number of passes over it.
        exchanges: Counts the gradient all-reduces.

    Attributes:
        place: The position in the current `fit`. It is updated when an epoch starts or ends, and when the `fit` is
            interrupted or resumed, but not after each step. None between two calls.
        at_boundary: If set, called before each step. With `steps_per_execution`, called before each graph call, which
            runs several steps.
    """

    pass_index = num_batches_open = 0
    source: Any = None

    def __init__(self, passes: Passes, exchanges: ExchangeRecord) -> None:
        self.passes = passes
        self.place: FitPlace | None = None
        self.logs: Mapping[str, float] = {}  # metrics that the most recently finished `fit` reported
        self.measures = False  # True if the model's metrics contain values of the current epoch
        self.has_begun = False  # True if the callbacks' `on_train_begin` was called in this process
        self.steps_per_execution = 1
        self.at_boundary: Callable[[], None] | None = None
        self._exchanges = exchanges
        self._num_steps_before = 0
        self._num_exchanges_before: int | None = None  # `num_completed` at the epoch's start; None between epochs
        self._num_passes_elsewhere: int | None = None

    @property
    def num_batches_completed(self) -> int:
        """Number of steps of Keras's `fit` that this process has completed."""
        return self._num_steps_before + self._num_steps_here

    num_batches_taken = num_batches_completed

    @property
    def is_mid_pass(self) -> bool:
        """True from the start of a `fit` until the training call has ended."""
        return self.place is not None

    @property
    def is_whole(self) -> bool:
        """True between two steps, when all gradient all-reduces of a step have finished.

        With `steps_per_execution`, which runs several steps in one graph call, this is True only between graph calls.
        """
        return self._num_exchanges % (self._exchanges.num_per_step * self.steps_per_execution) == 0

    @property
    def _num_exchanges(self) -> int:
        """Number of gradient all-reduces that were completed in the current epoch."""
        before = self._num_exchanges_before
        return 0 if before is None else self._exchanges.num_completed - before

    @property
    def _num_steps_here(self) -> int:
        return self._num_exchanges // self._exchanges.num_per_step

    def state(self) -> dict[str, Any]:
        """Return the current position in the `fit` as a dict, from which any rank or a later process can resume.

        Between two calls, the dict contains only the number of passes over the dataset and the metrics of the last
        `fit`.
        """
        if self.place is None:
            restored = self._num_passes_elsewhere
            return {"num_passes": self.passes.num_begun if restored is None else restored, "logs": dict(self.logs)}
        return asdict(self._present_place())

    def _present_place(self) -> FitPlace:
        assert self.place is not None
        done = self._num_steps_here
        place = self.place
        return replace(place, num_steps=place.num_steps + done, num_batches=place.num_batches + done)

    def drawn(self, *_: Any) -> Iterator[Any]:
        """Return no items, because Keras draws the batches itself."""
        return iter(())

    def commit(self) -> None:
        """Record that Keras's `fit` has finished. If the call fails later, the `fit` will not be repeated."""
        self._close()
        if self.place is not None:
            self.place = replace(self.place, is_over=True)

    def end(self) -> None:
        """Discard the position in the `fit` when a training call ends. The next call then starts a new `fit`."""
        self._close()
        self.has_begun = False
        if self.place is not None:
            self.logs, self.place = self.place.logs, None

    def break_off(self) -> None:
        """After a step was interrupted, store the position before that step. The step will be repeated from there."""
        if self.place is not None:
            self.place = self._present_place()
        self._close()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Load a position in the `fit` from another rank's state or from a snapshot. The next `fit` resumes there."""
        self._close()
        self.measures = False
        self.place, self.logs = (FitPlace(**state) if "epoch" in state else None), state["logs"]
        self.has_begun = self.has_begun and self.place is not None
        self._num_passes_elsewhere = state["num_passes"]

    def _close(self) -> None:
        self._num_steps_before, self._num_exchanges_before = self.num_batches_completed, None

    def calling(self, at_boundary: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside the block, call a function before each step."""
        return assigned(self, at_boundary=at_boundary)

    def begin_fit(self, first_epoch: int) -> bool:
        """Prepare for a call to Keras's `fit`. Return True if the call must resume an interrupted `fit`."""
        if self.place is None:
            self.go_to_next_pass()
            self.place = FitPlace(first_epoch, num_passes=self.passes.num_begun)
            return False
        self._num_passes_elsewhere = None
        return True

    def go_to_next_pass(self) -> None:
        """If a state was loaded, move the shuffled dataset to the pass in which the next `fit` must start."""
        if self._num_passes_elsewhere is not None:
            self.passes.go_to(self._num_passes_elsewhere)
        self._num_passes_elsewhere = None

    def data(self) -> Any:
        """Return the unsharded training dataset without the batches that the current pass has already used."""
        assert self.place is not None
        self.passes.go_to(self.place.num_passes)
        return self.passes.counted(self.place.num_batches)

    def begin_epoch(self, epoch: int) -> None:
        """Update the position when Keras starts an epoch."""
        assert self.place is not None
        if not self.place.num_batches:
            self.place = replace(self.place, num_passes=self.passes.num_begun)
        self.place = replace(self.place, epoch=epoch)
        self._num_exchanges_before = self._exchanges.num_completed
        self.measures = True

    def end_epoch(self, logs: Mapping[str, Any], steps_per_epoch: int | None) -> None:
        """Update the position when Keras has finished the current epoch.

        Args:
            logs: The metrics that Keras reports for the epoch.
            steps_per_epoch: The `steps_per_epoch` of `fit`. If it is None, an epoch is one pass over the dataset.
        """
        place = self._present_place()
        self._close()
        length = int(self.passes.dataset.cardinality())
        is_kept = steps_per_epoch is not None and place.num_steps >= steps_per_epoch
        if is_kept and 0 <= length <= place.num_batches:
            is_kept = False
        self.place = FitPlace(
            place.epoch + 1,
            num_passes=place.num_passes if is_kept else self.passes.num_begun,
            num_batches=place.num_batches if is_kept else 0,
            logs={**place.logs, **{name: plain(value) for name, value in logs.items()}},
        )
        self.measures = False

    def num_steps_of_epoch(self, steps_per_epoch: int | None) -> int | None:
        """Return the number of steps in an epoch, or None if it is unknown or infinite."""
        if steps_per_epoch is not None:
            return steps_per_epoch
        length = int(self.passes.dataset.cardinality())
        return length if length >= 0 else None

    def before_exchange(self) -> None:
        """Call `at_boundary` if the next gradient all-reduce is the first one of a step.

        With `steps_per_execution`, call it only before the first step of a graph call.
        """
        if self.at_boundary is not None and self.is_whole:
            self.at_boundary()


def plain(value: Any) -> Any:
    """Convert a Keras scalar to a Python number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def tracker(
    stream: FitStream, model: Any, steps_per_epoch: int | None, agree: Callable[[], None], rates: registration.Rates
) -> Any:
    """Return a Keras callback that reports the start and end of epochs to `stream`, and calls `agree` after each epoch.

    It must be the last callback. If a `fit` is resumed, the callback also sets the learning rate to `rates`. The user's
    callbacks on a new worker have missed earlier epochs and may have set another learning rate.
    """

    def keep_rate(logs: Any = None) -> None:
        registration.set_rates(rates, [model.optimizer])

    def begin_epoch(epoch: int, logs: Any = None) -> None:
        if stream.place is not None and stream.place.num_steps:
            keep_rate()
        stream.begin_epoch(epoch)

    def end_epoch(epoch: int, logs: Any = None) -> None:
        stream.end_epoch(logs or {}, steps_per_epoch)
        agree()

    return registration.keras_of(model).callbacks.LambdaCallback(
        on_train_begin=keep_rate, on_epoch_begin=begin_epoch, on_epoch_end=end_epoch
    )


def callbacks_of_part(model: Any, callbacks: Sequence[Any], num_steps_before: int, **params: Any) -> Any:
    """Return a Keras callback list for one part of an interrupted `fit`.

    The callbacks get step numbers that continue those of the earlier parts, as if there were one `fit`.

    Args:
        model: The model to train.
        callbacks: The user's callbacks and raysgd's.
        num_steps_before: Number of steps of the epoch that earlier parts took.
        params: The `params` of Keras callbacks: `verbose`, `epochs`, and the `steps` per epoch.
    """
    of_keras: Any = registration.keras_of(model).callbacks.CallbackList

    class Callbacks(of_keras):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_begin(batch + num_steps_before, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch + num_steps_before, logs)

    return Callbacks(callbacks, add_history=True, add_progbar=params["verbose"] != 0, model=model, **params)


def merger(model: Any, merge: Callable[[], None], evaluating: Callable[[], AbstractContextManager[None]]) -> Any:
    """Return a Keras callback that calls `merge` once at the end of each epoch. It must be the first callback.

    `merge` merges the ranks' statistics, such as BatchNorm's. It must run before the epoch's validation, and before the
    user's callbacks, because they may run evaluations themselves. The validation runs inside the context manager that
    `evaluating` returns.
    """
    inside, is_merged = ExitStack(), False

    def merge_once() -> None:
        nonlocal is_merged
        if not is_merged:
            merge()
        is_merged = True

    def begin_epoch(epoch: int, logs: Any = None) -> None:
        nonlocal is_merged
        is_merged = False

    def begin_test(logs: Any = None) -> None:
        merge_once()
        inside.enter_context(evaluating())

    return registration.keras_of(model).callbacks.LambdaCallback(
        on_epoch_begin=begin_epoch,
        on_epoch_end=lambda epoch, logs=None: merge_once(),
        on_test_begin=begin_test,
        on_test_end=lambda logs=None: inside.close(),
    )


def stopper(model: Any, is_anyone: Callable[[bool], bool]) -> Any:
    """Return a Keras callback that stops all ranks after the same step if any rank has set `model.stop_training`.

    It must come after the user's callbacks, because they may set `model.stop_training`.
    """

    def end_batch(batch: int, logs: Any = None) -> None:
        model.stop_training = is_anyone(bool(model.stop_training))

    return registration.keras_of(model).callbacks.LambdaCallback(on_train_batch_end=end_batch)


def acts_on_steps(model: Any, callback: Any) -> bool:
    """Return True if a callback overrides a method that Keras calls in each step."""
    callback_cls: Any = registration.keras_of(model).callbacks.Callback
    methods = {name: getattr(callback, name, None) for name in _AT_STEPS}
    return any(
        getattr(method, "__func__", method) is not getattr(callback_cls, name) for name, method in methods.items()
    )


@contextmanager
def one_part(
    model: Any, callbacks: Sequence[Any], measures: bool, silenced: Sequence[str], is_last: bool
) -> Iterator[None]:
    """Inside the block, make Keras's `fit` act as one part of a `fit` that was interrupted.

    Args:
        model: The model to train.
        callbacks: The user's callbacks.
        measures: True to keep the values of the model's metrics when the first epoch starts, instead of resetting them.
        silenced: Callback methods that must not be called in this part, because another part calls them.
        is_last: True for the last part. When that part ends, the optimizer writes its averaged weights into the model.
    """

    def nothing() -> None:
        vars(model).pop("reset_metrics", None)  # skip only the first reset; later epochs reset the metrics as usual

    if measures:
        object.__setattr__(model, "reset_metrics", nothing)
    if not is_last:
        vars(model.optimizer)["finalize_variable_values"] = _nothing
    for callback in callbacks:
        vars(callback).update(dict.fromkeys(silenced, _nothing))
    try:
        yield
    finally:
        nothing()
        vars(model.optimizer).pop("finalize_variable_values", None)
        for callback in callbacks:
            for name in silenced:
                vars(callback).pop(name, None)


def _nothing(*arguments: Any, **named: Any) -> None:
    """Do nothing. Replaces a method of a callback or an optimizer that must not run in this part of a `fit`."""
