"""Keras's `fit` on one worker: its position, the callbacks that report it, and how it continues in another group.

Keras draws its batches itself, and a call between two steps would slow them down. So the exchanges of gradients are
counted instead: each step has a fixed number of them, and changes nothing before they are done.

ADR 31 says why `fit` is counted by its exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raysgd.tf.data.batch_streams import Passes
from raysgd.tf.objects import learning_rates, registration
from raysgd.tf.parallel.averaging import ExchangeRecord
from raysgd.trainer.worker.state.state_checks import check_count, require

_AT_STEPS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


@dataclass(frozen=True)
class FitPlace:
    """The position of a `fit`.

    Attributes:
        epoch: Keras's current epoch, or the next one.
        num_steps: Completed steps of this epoch.
        num_passes: Number of passes over the dataset that were begun before the current one.
        num_batches: Batches of the current pass that were used; may exceed `num_steps` with `steps_per_epoch`.
        logs: Newest value of each metric that earlier epochs reported.
        is_over: True if Keras is done, because all epochs are done or a callback stopped it.
    """

    epoch: int
    num_steps: int = 0
    num_passes: int = 0
    num_batches: int = 0
    logs: Mapping[str, float] = field(default_factory=dict)
    is_over: bool = False


def check_state(state: Any) -> None:
    """Check that `FitStream.resume` can continue from a state.

    Raises:
        ValueError: `FitStream.state` did not return it.
    """
    require(isinstance(state, Mapping), "the position of `fit` is not a dict")
    known = set(FitPlace.__dataclass_fields__) if "epoch" in state else {"num_passes", "logs"}
    require(set(state) == known, f"where `fit` is has not the entries {sorted(known)}")
    require(isinstance(state["logs"], Mapping), "the logs of `fit` are not a dict")
    for name in known - {"logs", "is_over"}:
        check_count(name, state[name])


class FitStream:
    """The stream of a `fit`. Keras draws the batches; this counts them and knows where to continue."""

    pass_index = 0
    source: Any = None

    def __init__(self, passes: Passes, exchanges: ExchangeRecord) -> None:
        self.passes = passes
        self.place: FitPlace | None = None
        self.logs: Mapping[str, float] = {}  # reported by the last `fit` that ended
        self.measures = False  # True if the metrics of the model are those of the current epoch
        self.has_begun = False  # True if the callbacks of this process got the begin of the training
        self.steps_per_execution = 1
        self.at_boundary: Callable[[], None] | None = None
        self._exchanges = exchanges
        self._num_steps_before = 0
        self._num_exchanges_before: int | None = None  # before the current epoch; None between epochs
        self._num_passes_elsewhere: int | None = None

    @property
    def num_steps_completed(self) -> int:
        """Number of steps completed in this process."""
        return self._num_steps_before + self._num_steps_here

    num_steps_taken = num_steps_completed

    @property
    def is_mid_pass(self) -> bool:
        """True if a `fit` was begun and has not ended."""
        return self.place is not None

    @property
    def is_whole(self) -> bool:
        """True between two steps or, with `steps_per_execution`, between two executions."""
        return self._num_exchanges % (self._exchanges.num_per_step * self.steps_per_execution) == 0

    @property
    def _num_exchanges(self) -> int:
        """Number of exchanges in the current epoch."""
        before = self._num_exchanges_before
        return 0 if before is None else self._exchanges.num_completed - before

    @property
    def _num_steps_here(self) -> int:
        return self._num_exchanges // self._exchanges.num_per_step

    def state(self) -> dict[str, Any]:
        """Return the position, from which another rank or a later process can continue."""
        if self.place is None:
            restored = self._num_passes_elsewhere
            return {"num_passes": self.passes.num_begun if restored is None else restored, "logs": dict(self.logs)}
        return asdict(self._present_place())

    def _present_place(self) -> FitPlace:
        assert self.place is not None
        done = self._num_steps_here
        place = self.place
        return replace(place, num_steps=place.num_steps + done, num_batches=place.num_batches + done)

    def take(self, num_steps: int | None) -> Iterator[Any]:
        """Return no batches, because Keras draws them itself."""
        return iter(())

    def settle(self) -> None:
        """Note that Keras is done. The ranks' final exchanges may still fail."""
        self._close()
        if self.place is not None:
            self.place = replace(self.place, is_over=True)

    def end(self) -> None:
        """End the call. The next one begins a new `fit`."""
        self._close()
        self.has_begun = False
        if self.place is not None:
            self.logs, self.place = self.place.logs, None

    def break_off(self) -> None:
        """Forget the interrupted step, which will be repeated."""
        if self.place is not None:
            self.place = self._present_place()
        self._close()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another rank or of a snapshot."""
        self._close()
        self.measures = False
        self.place, self.logs = (FitPlace(**state) if "epoch" in state else None), state["logs"]
        self.has_begun = self.has_begun and self.place is not None
        self._num_passes_elsewhere = state["num_passes"]

    def _close(self) -> None:
        self._num_steps_before, self._num_exchanges_before = self.num_steps_completed, None

    def begin_fit(self, first_epoch: int) -> bool:
        """Prepare for a `fit`. Return True if it continues an interrupted one."""
        if self.place is None:
            self.go_to_next_pass()
            self.place = FitPlace(first_epoch, num_passes=self.passes.num_begun)
            return False
        self._num_passes_elsewhere = None
        return True

    def go_to_next_pass(self) -> None:
        """Begin the next `fit` with the pass that a restored state names, if there is one."""
        if self._num_passes_elsewhere is not None:
            self.passes.go_to(self._num_passes_elsewhere)
        self._num_passes_elsewhere = None

    def data(self) -> Any:
        """Return the rest of the dataset, not divided."""
        assert self.place is not None
        self.passes.go_to(self.place.num_passes)
        return self.passes.counted(self.place.num_batches)

    def begin_epoch(self, epoch: int) -> None:
        """Note that Keras begins an epoch."""
        assert self.place is not None
        if not self.place.num_batches:
            self.place = replace(self.place, num_passes=self.passes.num_begun)
        self.place = replace(self.place, epoch=epoch)
        self._num_exchanges_before = self._exchanges.num_completed
        self.measures = True

    def end_epoch(self, logs: Mapping[str, Any], steps_per_epoch: int | None) -> None:
        """Note that Keras has ended the epoch."""
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
            logs={**place.logs, **{name: _plain(value) for name, value in logs.items()}},
        )
        self.measures = False

    def num_steps_of_epoch(self, steps_per_epoch: int | None) -> int | None:
        """Return the number of steps in an epoch, or None if it is unknown."""
        if steps_per_epoch is not None:
            return steps_per_epoch
        length = int(self.passes.dataset.cardinality())
        return length if length >= 0 else None

    def before_exchange(self) -> None:
        """Run the work between two steps, if this exchange is the first one of a step."""
        if self.at_boundary is not None and self.is_whole:
            self.at_boundary()


def _plain(value: Any) -> Any:
    """Convert a number of Keras to one of Python."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def tracker(
    stream: FitStream, model: Any, steps_per_epoch: int | None, agree: Callable[[], None], rates: learning_rates.Rates
) -> Any:
    """Return the last callback of a `fit`: it tells `stream` about epochs, and lets the ranks agree after each.

    It also sets the learning rate to `rates`: callbacks of a new worker, which begins in the middle of a `fit`, may
    have changed it.
    """

    def keep_rate(logs: Any = None) -> None:
        learning_rates.apply(rates, [model.optimizer])

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
    """Return callbacks for a part of a `fit` that see it as the whole `fit`.

    Args:
        model: The model.
        callbacks: All callbacks.
        num_steps_before: Steps of the epoch that an earlier part took.
        params: The `params` of Keras callbacks: `verbose`, `epochs`, and the `steps` of an epoch.
    """
    of_keras: Any = registration.keras_of(model).callbacks.CallbackList

    class Callbacks(of_keras):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_begin(batch + num_steps_before, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch + num_steps_before, logs)

    return Callbacks(callbacks, add_history=True, add_progbar=params["verbose"] != 0, model=model, **params)


def merger(model: Any, merge: Callable[[], None], evaluating: Callable[[], AbstractContextManager[None]]) -> Any:
    """Return the first callback of a `fit`: it merges statistics of the ranks before other callbacks use the model.

    At the end of an epoch it does so before the validation, whose steps run inside `evaluating`, and before the user's
    callbacks, which may evaluate themselves.
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
    """Return the last callback of a `fit`: after each step it stops all ranks if one of them is to stop."""

    def end_batch(batch: int, logs: Any = None) -> None:
        model.stop_training = is_anyone(bool(model.stop_training))

    return registration.keras_of(model).callbacks.LambdaCallback(on_train_batch_end=end_batch)


def acts_on_steps(model: Any, callback: Any) -> bool:
    """Return True if a callback overrides a method that is called at each step."""
    callback_cls: Any = registration.keras_of(model).callbacks.Callback
    methods = {name: getattr(callback, name, None) for name in _AT_STEPS}
    return any(
        getattr(method, "__func__", method) is not getattr(callback_cls, name) for name, method in methods.items()
    )


@contextmanager
def one_part(
    model: Any, callbacks: Sequence[Any], measures: bool, silenced: Sequence[str], is_last: bool
) -> Iterator[None]:
    """Run a `fit` as one part of an interrupted `fit`.

    Args:
        model: The model.
        callbacks: The callbacks of the user.
        measures: True if the model's metrics keep counting in the first epoch.
        silenced: Methods of the callbacks that another part calls.
        is_last: True if the optimizer writes its averages into the model at the end.
    """

    def nothing() -> None:
        vars(model).pop("reset_metrics", None)  # once: the next epoch starts from zero

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
    """Replace a method that another part calls."""
