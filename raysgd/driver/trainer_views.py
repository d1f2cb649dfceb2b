"""A trainer in words, for one line of text and a card in a notebook."""

from __future__ import annotations

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
