"""Views of a trainer: a line of text, its options as attributes, its config to look at."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NoReturn

from raysgd._text.secrets import masked
from raysgd.history import readable
from raysgd.history.history import History


def in_words(num_workers: int | None, max_replicas: int, backend: str, history: History) -> list[str]:
    """Return how a trainer is doing, from what the driver knows.

    Args:
        num_workers: How many workers there are; None after the end.
        max_replicas: How many there are at most.
        backend: How they are connected.
        history: What the trainer did.
    """
    most = readable.counted(max_replicas, "worker")
    told = ["shut down" if num_workers is None else f"{num_workers} of {most}", backend]
    if history.records:
        told.insert(1, f"epoch {history.records[-1].epoch}")
    return told + readable.failures(history.events)


def show_options(trainer: object, *settings: Any) -> None:
    """Lets every option be read as an attribute, unless the class says more about it than what was passed."""
    for each in settings:
        names = [field.name for field in fields(each) if not hasattr(type(trainer), field.name)]
        vars(trainer).update({name: getattr(each, name) for name in names})


class ReadOnlyConfig(dict[str, Any]):
    """A copy of a config, as `trainer.config` returns it, which refuses changes. Change `dict(config)` instead."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "`trainer.config` is a copy, so a change to it would not reach the workers. Begin again with the new "
            "config: `trainer.reset_config(config)`; or change the running operators, and anything that they computed "
            "from it: `trainer.apply_all_operators(lambda operator: operator.config.update(lr=0.1))`."
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __repr__(self) -> str:
        return repr(masked(dict(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyConfig, (dict(self),)
