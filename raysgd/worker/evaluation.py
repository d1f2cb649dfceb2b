"""The calls of one replica in which nothing is learned: `validate`, and the rounds of `predict`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any

from raysgd.messages.epochs import EpochAnswer, EpochRequest, accepted
from raysgd.messages.prediction import PredictionPlace, PredictRequest, Work, coming, outputs_of
from raysgd.worker.activity import Activity
from raysgd.worker.answering import CallAnswers
from raysgd.worker.data.around_batch import around_batches, completing
from raysgd.worker.data.batch_streams import redrawing
from raysgd.worker.data.logged import forget
from raysgd.worker.hosted import Hosted
from raysgd.worker.ledger import Ledger
from raysgd.worker.running import RunningCall


class Evaluation:
    """Validates and predicts.

    Args:
        hosted: The operator and what belongs to it.
        activity: What the replica is doing.
        answering: Makes the answers.
        ledger: Where the time is booked.

    Attributes:
        has_left: Whether no more batches are to be validated; None where nothing says so.
    """

    has_left: Callable[[], bool] | None = None

    def __init__(self, hosted: Hosted, activity: Activity, answering: CallAnswers, ledger: Ledger) -> None:
        self._hosted = hosted
        self._activity = activity
        self._answering = answering
        self._ledger = ledger

    def validate(self, request: EpochRequest, share: Any) -> EpochAnswer:
        """Runs the operator's `validate` once.

        Args:
            request: What is asked.
            share: This replica's part of data that the driver divides; None if it has that already.
        """
        with self._ledger.evaluating():
            return self._validate(request, share)

    def _validate(self, request: EpochRequest, share: Any) -> EpochAnswer:
        operator, loop, feed = self._hosted.operator, self._hosted.loop, self._hosted.feed
        options = loop.validation_options(request)
        self._answering.begin(operator, request.profile)
        feed.take_share("validation", request, share)
        if feed.ray_loader("validation") is not None:  # all ranks have to begin a pass together
            request = replace(request, starts_over=True)
        forget(operator._raysgd)
        with (
            self._hosted.evaluating(),
            feed.validation.stream(request) as stream,
            around_batches(operator, "validate_batch", stream.place, [completing(operator._raysgd, stream.place)]),
        ):
            began_at = stream.num_steps_taken
            self._activity.running = RunningCall(stream, began_at, request.num_steps, request.info, "validation")
            operator._raysgd.latest_metrics = {}
            try:
                batches = stream.take(request.num_steps)
                batches = batches if request.redraw is None else redrawing(batches, request.redraw)
                if (has_left := self.has_left) is not None:
                    batches = takewhile(lambda batch: not has_left(), batches)
                args, named = accepted(operator.validate, batches, info=dict(request.info), **options)
                with self._answering.timed("validation"):
                    returned = operator.validate(*args, **named)
            finally:
                self._activity.running = None
        num_steps = stream.num_steps_taken - began_at
        answer = self._answering.answer(operator, returned, request, num_steps, loop.plain)
        return replace(answer, epoch_idx=max(0, feed.epoch - 1))

    def predict(self, request: PredictRequest, work: Work, share: Any) -> list[Any]:
        """Takes part in a round.

        Args:
            request: What is asked.
            work: This replica's batches.
            share: What it needs for the whole prediction; None if nothing, or if it has that already.

        Returns:
            The output for each batch, as arrays.
        """
        hosted, operator, place = self._hosted, self._hosted.operator, PredictionPlace(request)
        with self._ledger.evaluating():
            self._answering.begin(operator, profile=False)
            self._activity.running = RunningCall(place, 0, request.total, request.info, "predict")
            operator._raysgd.latest_metrics = {}
            try:
                with hosted.predicting():
                    batches = (coming(request, *each) for each in hosted.to_predict(request, work, share))
                    return outputs_of(operator, batches, request, place, hosted.as_array)
            finally:
                self._activity.running = None
