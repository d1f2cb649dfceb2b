"""Views of a trainer: a line of text, a card in a notebook, its options as attributes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

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
    losses = sum(event.is_loss for event in history.events)
    return told + ([f"{readable.counted(losses, 'loss', 'losses')} of workers"] if losses else [])


def show_options(trainer: object, *settings: Any) -> None:
    """Lets every option be read as an attribute, unless the class says more about it than what was passed."""
    for each in settings:
        names = [field.name for field in fields(each) if not hasattr(type(trainer), field.name)]
        vars(trainer).update({name: getattr(each, name) for name in names})
