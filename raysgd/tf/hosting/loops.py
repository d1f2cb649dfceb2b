"""Loops that take the steps of a training call: one of the operator over our batches, or Keras's `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.engine.shared.types import DataLedger
from raysgd.messages.epochs import EpochRequest
from raysgd.tf.creator_operator import CreatorOperator
from raysgd.tf.fit import FitStream
from raysgd.tf.hosting.feed import TFFeed
from raysgd.tf.parallel.keras_sync import Synchronizer
from raysgd.tf.training_operator import TrainingOperator
from raysgd.worker.data.epoch_run import EpochRun
from raysgd.worker.data.loop import Loop
from raysgd.worker.ledger import STEP


class OperatorLoop(Loop):
    """The loop of an operator that draws batches.

    Attributes:
        fit: The place of a `fit` of Keras; None where the loop is the operator's.
    """

    fit: FitStream | None = None
    _feed: TFFeed

    def __init__(self, operator: TrainingOperator, synchronizer: Synchronizer, feed: TFFeed) -> None:
        super().__init__(feed)
        self._operator = operator
        self._synchronizer = synchronizer
        self._num_exchanges = 0  # at the last step boundary
        self.step = synchronizer.step

    def plain(self, value: Any) -> Any:
        """Tensors as numbers where they have one element, and as arrays in any case."""
        value = value.numpy() if hasattr(value, "numpy") else value
        return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value

    @property
    def is_whole(self) -> bool:
        return self._synchronizer.exchanges.num_completed == self._num_exchanges

    def note_boundary(self) -> None:
        self._num_exchanges = self._synchronizer.exchanges.num_completed

    @property
    def own_s(self) -> float | None:
        return self._synchronizer.exchanges.own_s or None

    def begin_call(self) -> None:
        self._synchronizer.exchanges.forget_call()
        internals = self._operator._raysgd
        internals.forget_stale_steps()
        internals.num_left_out = 0

    @property
    def _is_mid_pass(self) -> bool:
        return bool((self._feed.position() or {}).get("is_mid_pass"))

    @property
    def order_obstacle(self) -> str | None:
        if self._is_mid_pass and not self._feed.train_passes.can_repeat():
            return "the train dataset is shuffled, and too large for a copy that repeats the order of this pass"
        return None


class FitLoop(OperatorLoop):
    """A `fit` of Keras, which draws batches itself: what it waits for data is not known."""

    first_bin = STEP
    fit: FitStream
    _operator: CreatorOperator

    def __init__(self, operator: CreatorOperator, synchronizer: Synchronizer, feed: TFFeed) -> None:
        super().__init__(operator, synchronizer, feed)
        self.fit = FitStream(feed.train_passes, synchronizer.exchanges)

    @property
    def is_whole(self) -> bool:
        return self.fit.is_whole

    def begin_call(self) -> None:
        self.fit.end()  # one that an exception in user code broke off is not continued
        super().begin_call()

    def end_call(self) -> None:
        self.fit.end()

    def stream(self, request: EpochRequest) -> FitStream:
        return self.fit

    def pass_index(self, stream: Any) -> int:
        return self.fit.pass_index if self._is_mid_pass else self._feed.epoch

    @property
    def _is_mid_pass(self) -> bool:
        return self.fit.is_mid_pass

    def can_resume(self, stream: Any) -> bool:
        return True

    def break_off(self) -> None:
        self.fit.break_off()

    def ledger(self) -> DataLedger | None:
        return self.fit.ledger()

    def progress_text(self) -> str:
        place = self.fit.state()
        return f"epoch {place['epoch']} of `fit`, {place['num_steps']} steps taken" if "epoch" in place else ""

    def num_samples(self, run: EpochRun) -> int:
        return self._synchronizer.exchanges.num_samples

    def results(self, run: EpochRun) -> Any:
        return CreatorOperator.results_of(self.fit.logs)

    def extra_results(self) -> dict[str, Any]:
        return {}

    def validation_options(self, request: EpochRequest) -> Mapping[str, Any]:
        return {"num_steps": request.num_steps}
