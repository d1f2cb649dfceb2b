"""What takes the steps of a training call: whether one is half done, and what `fit` changes about it."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.engine.shared.types import World
from raysgd.messages.epochs import EpochRequest
from raysgd.tf.creator_operator import make_operator
from raysgd.tf.fit import check_state
from raysgd.tf.hosting.hosted import FitLoop, OperatorLoop
from raysgd.tf.operator.internals import TFSettings
from raysgd.tf.tf_runner import TFRunner
from tests.tf.models import Line, make_data, make_model

REQUEST = EpochRequest(2, {}, False, seed=0)


def loop_of(operator_cls: Any) -> tuple[TFRunner, Any]:
    runner = TFRunner(TFSettings(operator_cls, {}, seed=0, num_workers=2), World(0, 1))
    runner.setup()
    return runner, runner._hosted.loop


def test_an_operator_is_between_two_steps_when_no_exchange_has_come_since(keras_here: Any) -> None:
    runner, loop = loop_of(Line)
    assert type(loop) is OperatorLoop
    runner.train_epoch(REQUEST)
    loop.note_boundary()
    assert loop.is_whole
    runner._hosted.synchronizer.exchanges.num_completed += 1
    assert not loop.is_whole
    assert loop.extra_results() == {"epoch": 1}
    assert loop.validation_options(REQUEST) == {}
    assert loop.order_obstacle is None
    assert "8 samples used" in loop.progress_text()


class Raises(Line):
    """Raises in the third batch of its first call, and tells what it has trained on."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen = getattr(self, "seen", [])
        if len(self.seen) == 2 and not getattr(self, "has_raised", False):
            self.has_raised = True
            raise ZeroDivisionError
        self.seen.append(batch[0].numpy().tolist())
        return super().train_batch(batch, batch_info)


def test_the_next_call_begins_with_the_batch_that_raised(keras_here: Any) -> None:
    runner = TFRunner(TFSettings(Raises, {"shuffles": True}, seed=0), World(0, 1))
    undisturbed = TFRunner(TFSettings(Raises, {"shuffles": True}, seed=0), World(0, 1))
    undisturbed.setup()
    undisturbed.operator.has_raised = True  # type: ignore[attr-defined]
    undisturbed.train_epoch(EpochRequest(None, {}, False, seed=0))
    runner.setup()
    with pytest.raises(ZeroDivisionError):
        runner.train_epoch(EpochRequest(None, {}, False, seed=0))
    runner.train_epoch(EpochRequest(None, {}, False, seed=0))
    assert runner.epoch == 1
    assert runner.operator.seen == undisturbed.operator.seen  # type: ignore[attr-defined]


def test_fit_counts_for_itself(keras_here: Any) -> None:
    runner, loop = loop_of(make_operator(make_model, make_data))
    assert type(loop) is FitLoop
    answer: Any = runner.train_epoch(EpochRequest(None, {}, False, 0))
    assert (answer.epoch_idx, runner.epoch) == (0, 1)
    assert loop.is_whole
    assert loop.extra_results() == {}
    assert loop.validation_options(REQUEST) == {"num_steps": 2}
    assert loop.progress_text() == "", "it is over"
    assert loop.fit.state().keys() == {"num_passes", "logs"}
    with pytest.raises(ValueError, match="is not a dict"):
        check_state(5)
    loop.fit.resume({"num_passes": 4, "logs": {"loss": 1.0}})
    assert loop.results(None) == {"loss": 1.0, "train_loss": 1.0}
