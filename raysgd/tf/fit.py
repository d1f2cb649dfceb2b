"""The place of Keras's `fit` on one worker, the callbacks that tell it, and what it takes to continue in another group.

Keras draws its batches itself, and nothing is called between two steps that would not slow them down. What is counted
are the exchanges of gradients: a step has its exchange, and changes nothing before it.

Why `fit` is counted by its exchanges: ADR 31.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raysgd.tf.data.batch_streams import Passes
from raysgd.tf.objects import learning_rates, registration
from raysgd.tf.parallel.averaging import ExchangeRecord
from raysgd.worker.state.state_checks import check_count, require

_AT_STEPS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


@dataclass(frozen=True)
class FitPlace:
    """The place of a `fit`.

    Attributes:
        epoch: The epoch of Keras that is running, or the one that comes next.
        num_steps: Steps of it completed.
        num_passes: Passes over the dataset begun before the one that these steps belong to.
        num_batches: Batches of that pass used; more than `num_steps` where `steps_per_epoch` says when epochs end.
        logs: What epochs before it reported, the newest of each.
        is_over: Whether Keras is done, because it has gone through all epochs or a callback wanted it to stop.
    """

    epoch: int
    num_steps: int = 0
    num_passes: int = 0
    num_batches: int = 0
    logs: Mapping[str, float] = field(default_factory=dict)
    is_over: bool = False


def check_state(state: Any) -> None:
    """Refuse what `FitStream.resume` could not continue from.

    Raises:
        ValueError: It is not what `FitStream.state` returned.
    """
    require(isinstance(state, Mapping), "the position of `fit` is not a dict")
    known = set(FitPlace.__dataclass_fields__) if "epoch" in state else {"num_passes", "logs"}
    require(set(state) == known, f"where `fit` is has not the entries {sorted(known)}")
    require(isinstance(state["logs"], Mapping), "the logs of `fit` are not a dict")
    for name in known - {"logs", "is_over"}:
        check_count(name, state[name])


class FitStream:
    """Stands for the batches that `fit` draws: counts them, and knows where to go on."""

    pass_index = 0
    source: Any = None

    def __init__(self, passes: Passes, exchanges: ExchangeRecord) -> None:
        self.passes = passes
        self.place: FitPlace | None = None
        self.logs: Mapping[str, float] = {}  # what the last `fit` that is over reported
        self.measures = False  # whether the metrics of the model are those of the epoch that is running
        self.has_begun = False  # whether callbacks of this process were told that the training begins
        self.steps_per_execution = 1
        self.at_boundary: Callable[[], None] | None = None
        self._exchanges = exchanges
        self._num_steps_before = 0
        self._num_exchanges_before: int | None = None  # before the epoch that is running; None between epochs
        self._num_passes_elsewhere: int | None = None

    @property
    def num_steps_completed(self) -> int:
        """Steps completed in this process."""
        return self._num_steps_before + self._num_steps_here

    num_steps_taken = num_steps_completed

    @property
    def is_mid_pass(self) -> bool:
        """True if a `fit` was begun and is not over."""
        return self.place is not None

    @property
    def is_whole(self) -> bool:
        """True if no step, and no execution of several, is half done."""
        return self._num_exchanges % (self._exchanges.num_per_step * self.steps_per_execution) == 0

    @property
    def _num_exchanges(self) -> int:
        """The number of exchanges in the epoch that is running."""
        before = self._num_exchanges_before
        return 0 if before is None else self._exchanges.num_completed - before

    @property
    def _num_steps_here(self) -> int:
        return self._num_exchanges // self._exchanges.num_per_step

    def state(self) -> dict[str, Any]:
        """Return what another rank, or another process later, needs to go on."""
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
        """Return nothing: Keras draws its batches itself."""
        return iter(())

    def settle(self) -> None:
        """Say that Keras is done; what all ranks do together after that may still break off."""
        self._close()
        if self.place is not None:
            self.place = replace(self.place, is_over=True)

    def end(self) -> None:
        """Say that the call is over: the next one begins a `fit`."""
        self._close()
        self.has_begun = False
        if self.place is not None:
            self.logs, self.place = self.place.logs, None

    def break_off(self) -> None:
        """Forget the step that broke off; it will be taken again."""
        if self.place is not None:
            self.place = self._present_place()
        self._close()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on where another rank is, or was when a snapshot was taken."""
        self._close()
        self.measures = False
        self.place, self.logs = (FitPlace(**state) if "epoch" in state else None), state["logs"]
        self.has_begun = self.has_begun and self.place is not None
        self._num_passes_elsewhere = state["num_passes"]

    def _close(self) -> None:
        self._num_steps_before, self._num_exchanges_before = self.num_steps_completed, None

    def begin_fit(self, first_epoch: int) -> bool:
        """Get ready for a `fit`; return whether it continues one that broke off."""
        if self.place is None:
            self.go_to_next_pass()
            self.place = FitPlace(first_epoch, num_passes=self.passes.num_begun)
            return False
        self._num_passes_elsewhere = None
        return True

    def go_to_next_pass(self) -> None:
        """Begin the next `fit` with the pass that a restored state says, if there is one."""
        if self._num_passes_elsewhere is not None:
            self.passes.go_to(self._num_passes_elsewhere)
        self._num_passes_elsewhere = None

    def data(self) -> Any:
        """Return the dataset from here on, not divided."""
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
        """Note that Keras is done with it."""
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
        """Return how many steps an epoch has, if that is known."""
        if steps_per_epoch is not None:
            return steps_per_epoch
        length = int(self.passes.dataset.cardinality())
        return length if length >= 0 else None

    def before_exchange(self) -> None:
        """Do what is to be done at a boundary, between two steps."""
        if self.at_boundary is not None and self.is_whole:
            self.at_boundary()


def _plain(value: Any) -> Any:
    """Return a number of Keras's as one of Python."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def tracker(
    stream: FitStream, model: Any, steps_per_epoch: int | None, agree: Callable[[], None], rates: learning_rates.Rates
) -> Any:
    """Return a callback for the last place: it tells `stream` of epochs, and lets the ranks agree.

    Callbacks of a new worker begin where a `fit` goes on, and do not change its learning rate, which is `rates`.
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
    """Return callbacks that are told of a part of a `fit` what they would be told of the whole one.

    Args:
        model: The model.
        callbacks: All of them.
        num_steps_before: Steps of the epoch that an earlier part took.
        params: What Keras tells callbacks: `verbose`, `epochs`, and the `steps` of an epoch.
    """
    of_keras: Any = registration.keras_of(model).callbacks.CallbackList

    class Callbacks(of_keras):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_begin(batch + num_steps_before, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch + num_steps_before, logs)

    return Callbacks(callbacks, add_history=True, add_progbar=params["verbose"] != 0, model=model, **params)


def merger(model: Any, merge: Callable[[], None], evaluating: Callable[[], AbstractContextManager[None]]) -> Any:
    """Return a callback for the first place: it merges what the ranks have apart before others use the model.

    At the end of an epoch these are the test steps of the validation, which are inside `evaluating`, and the callbacks
    of the user, which may evaluate by themselves.
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
    """Return a callback for the last place: after each step it stops all ranks if one of them is to stop."""

    def end_batch(batch: int, logs: Any = None) -> None:
        model.stop_training = is_anyone(bool(model.stop_training))

    return registration.keras_of(model).callbacks.LambdaCallback(on_train_batch_end=end_batch)


def acts_on_steps(model: Any, callback: Any) -> bool:
    """Return whether a callback does something at a step, such as to stop."""
    callback_cls: Any = registration.keras_of(model).callbacks.Callback
    methods = {name: getattr(callback, name, None) for name in _AT_STEPS}
    return any(
        getattr(method, "__func__", method) is not getattr(callback_cls, name) for name, method in methods.items()
    )


@contextmanager
def one_part(
    model: Any, callbacks: Sequence[Any], measures: bool, silenced: Sequence[str], is_last: bool
) -> Iterator[None]:
    """Inside, a `fit` is a part of one that broke off.

    Args:
        model: The model.
        callbacks: Those of the user.
        measures: Whether the model's metrics are to go on counting in the first epoch.
        silenced: Methods of the callbacks that other parts call.
        is_last: Whether the optimizer is to write what it has averaged into the model at the end.
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
    """Stand for a method that another part calls."""
