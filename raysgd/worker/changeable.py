"""Changes of a live replica without a new process: to an edited class, and steps at other rates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._numbers.results import as_number
from raysgd.engine.shared.types import HeldAtStep, World
from raysgd.messages.epochs import EpochAnswer, EpochRequest
from raysgd.messages.facts import RunnerFacts
from raysgd.messages.range_test import Loss
from raysgd.utils import NUM_SAMPLES
from raysgd.worker.data.around_batch import AroundBatch
from raysgd.worker.data.loop import Loop
from raysgd.worker.hosted import Hosted
from raysgd.worker.state.state_checks import check_parts


class OperatorChanges(ABC):
    """A replica's methods for `reload` and `find_lr`. ADR 72 says why a class is edited in two steps."""

    _hosted: Any
    _candidate: Any

    @abstractmethod
    def _make_hosted(self, settings: Any, world: World) -> Any:
        """The hosted operator that these settings make in this framework; its `build` was not called yet."""

    @abstractmethod
    def _take(self, hosted: Hosted) -> None:
        """Works with this operator from here on; no call of it was made yet."""

    @abstractmethod
    def train_epoch(self, request: EpochRequest, share: Any = None) -> EpochAnswer | HeldAtStep:
        """Runs the operator's `train_epoch` once."""

    def prepare_reload(self, settings: Any) -> tuple[RunnerFacts, Any]:
        """Makes an operator of another class with the state of this one, which goes on until `finish_reload`.

        Returns:
            Its facts, and the hyperparameters that its `setup` chooses differently.

        Raises:
            ValueError: The state does not fit.
        """
        hosted = self._hosted
        self._candidate, own = None, hosted.state.own()
        with hosted.giving_back_random_numbers():
            candidate = self._make_hosted(settings, hosted.world)
            facts: RunnerFacts = candidate.build()
            state = hosted.state.read()
            check_parts(state, facts.counts)
            candidate.restore(state, own)
        candidate.has_trained = hosted.has_trained
        self._candidate = candidate
        return facts, hosted.edited_by(candidate)

    def finish_reload(self, revision: int, edited: Any) -> RunnerFacts | None:
        """Goes on with the operator that `prepare_reload` made; None where there is none."""
        if self._hosted.settings.revision != revision:  # else it was made with the new class
            candidate = self._candidate
            if candidate is None or candidate.settings.revision != revision:
                return None
            self._hosted.feed.close()
            self._take(candidate)
        self._hosted.take_edited(edited)
        facts: RunnerFacts = self._hosted.facts()
        return facts

    def drop_reload(self) -> None:
        """Forgets what `prepare_reload` made."""
        self._candidate = None

    def follow_config(self) -> None:
        """Gives the optimizers the hyperparameters of `setup` again, after a state of another config was loaded."""
        self._hosted.follow_config()

    def take_steps(self, rates: Sequence[float], metric: str, request: EpochRequest, *share: Any) -> list[Loss]:
        """Takes a step with each of these learning rates, or as many as the pass has left; returns the losses."""
        losses: list[Loss] = []
        internals, loop = self._hosted.operator._raysgd, self._hosted.loop
        with internals.setting_rates() as set_rate:

            def before() -> None:
                set_rate(rates[min(len(losses), len(rates) - 1)])

            def after(metrics: Any, batch: Any) -> Any:
                losses.append(_loss(metrics, metric, loop))
                return metrics

            internals.around_batch.append(AroundBatch(after, before))
            try:
                self.train_epoch(request, *share)
            finally:
                internals.around_batch.clear()
        return losses


def _loss(metrics: Any, metric: str, loop: Loop) -> Loss:
    loss = as_number(loop.plain(metrics.get(metric))) if isinstance(metrics, Mapping) else None
    if loss is None:
        found = ", ".join(f"`{name}`" for name in metrics) if isinstance(metrics, Mapping) else "no dict"
        raise ValueError(f'`find_lr(metric="{metric}")`: `train_batch` reports no such number. It reports {found}.')
    return float(loss), float(as_number(metrics[NUM_SAMPLES]))
