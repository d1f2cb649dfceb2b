"""A trainer for people: one line of text, and a card in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysgd._text.cards import card
from raysgd.history import readable

if TYPE_CHECKING:
    from raysgd.driver.throughput import Throughput
    from raysgd.engine.shared.time_spent import TimeLedger
    from raysgd.engine.status import TrainerStatus
    from raysgd.history.history import History


class TrainerViews:
    """What Python and notebooks show of a trainer."""

    training_operator_cls: type[Any]
    backend: str
    max_replicas: Any
    num_workers: Any
    history: Any
    status: Any
    _controller: Any
    _throughput: Throughput

    def ledger(self) -> TimeLedger:
        """Where the time of every rank went, as of its last sign of life. Asks no worker, and works after `shutdown`.

        `status().ledger` is the same as of now. Its notes say what is missing.
        """
        controller = self._controller
        return self._throughput.accounts.ledger(None if controller.is_stopped else controller.num_workers)

    def __repr__(self) -> str:
        """One line, from what the driver knows: no worker is asked."""
        try:
            return f"<{self._title()}: {', '.join(self._facts_in_words())}>"
        except AttributeError:  # its start has failed
            return f"<{type(self).__name__}: not started>"

    def _repr_html_(self) -> str:
        if self._controller.is_stopped:
            return card(self._title(), note=", ".join(self._facts_in_words()))
        status: TrainerStatus = self.status()
        return status.as_card(self._title())

    def _title(self) -> str:
        return f"{type(self).__name__} of {self.training_operator_cls.__name__}"

    def _facts_in_words(self) -> list[str]:
        history: History = self.history
        workers = (
            "shut down"
            if self._controller.is_stopped
            else f"{self.num_workers} of {readable.counted(self.max_replicas, 'worker')}"
        )
        told = [workers, self.backend]
        if history.records:
            told.insert(1, f"epoch {history.records[-1].epoch}")
        losses = sum(event.is_loss for event in history.events)
        return told + ([f"{readable.counted(losses, 'loss', 'losses')} of workers"] if losses else [])
