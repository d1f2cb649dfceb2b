"""Callbacks of Keras through which a `fit` tells how far it is and what the ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from raysgd.tf.objects import registration
from raysgd.tf.step.fit_run import FitStream

_AT_STEPS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def tracker(stream: FitStream, model: Any, steps_per_epoch: int | None, agree: Callable[[], None]) -> Any:
    """A callback that tells `stream` of epochs, and lets the ranks agree after those of the user were called."""
    callback_cls: Any = registration.keras_of(model).callbacks.Callback

    class Tracker(callback_cls):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            stream.begin_epoch(epoch, steps_per_epoch)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            stream.end_epoch(logs or {}, steps_per_epoch)
            agree()

    return Tracker()


def merger(model: Any, merge: Callable[[], None], evaluating: Callable[[], AbstractContextManager[None]]) -> Any:
    """A callback for the first place: it merges what the ranks have apart before others use the model.

    At the end of an epoch these are the test steps of the validation, which are inside `evaluating`, and the callbacks
    of the user, which may evaluate by themselves.
    """
    callback_cls: Any = registration.keras_of(model).callbacks.Callback

    class Merger(callback_cls):
        is_merged = False
        inside = ExitStack()

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.is_merged = False

        def on_test_begin(self, logs: Any = None) -> None:
            self.merge_once()
            self.inside.enter_context(evaluating())

        def on_test_end(self, logs: Any = None) -> None:
            self.inside.close()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.merge_once()

        def merge_once(self) -> None:
            if not self.is_merged:
                merge()
            self.is_merged = True

    return Merger()


def stopper(model: Any, is_anyone: Callable[[bool], bool]) -> Any:
    """A callback for the last place: after each step it stops all ranks if one of them is to stop."""
    callback_cls: Any = registration.keras_of(model).callbacks.Callback

    class Stopper(callback_cls):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = is_anyone(bool(self.model.stop_training))

    return Stopper()


def acts_on_steps(model: Any, callback: Any) -> bool:
    """Return whether a callback does something at a step, such as to stop."""
    callback_cls: Any = registration.keras_of(model).callbacks.Callback
    methods = {name: getattr(callback, name, None) for name in _AT_STEPS}
    return any(
        getattr(method, "__func__", method) is not getattr(callback_cls, name) for name, method in methods.items()
    )


@contextmanager
def one_part(model: Any, callbacks: Sequence[Any], measures: bool, silenced: Sequence[str]) -> Iterator[None]:
    """Inside, a `fit` is a part of one that broke off.

    Args:
        model: The model.
        callbacks: Those of the user.
        measures: Whether the model's metrics are to go on counting in the first epoch.
        silenced: Methods of the callbacks that other parts call.
    """

    def nothing() -> None:
        vars(model).pop("reset_metrics", None)  # once: the next epoch starts from zero

    if measures:
        object.__setattr__(model, "reset_metrics", nothing)
    for callback in callbacks:
        vars(callback).update(dict.fromkeys(silenced, _nothing))
    try:
        yield
    finally:
        nothing()
        for callback in callbacks:
            for name in silenced:
                vars(callback).pop(name, None)


def _nothing(logs: Any = None) -> None:
    """Stands for a method of a callback."""
