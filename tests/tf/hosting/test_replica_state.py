"""What a state is made of, and which one is refused, on a replica that is alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raysgd.engine.shared.types import World
from raysgd.messages.epochs import EpochRequest
from raysgd.tf.operator.internals import TFSettings
from raysgd.tf.tf_runner import TFRunner
from raysgd.worker.state.replica_state import RESUME
from tests.tf.models import Line

REQUEST = EpochRequest(2, {}, False, seed=0)


class Noting(Line):
    """Has a state of its own, which it changes in place."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.seen: list[int] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(batch_info["batch_idx"])
        return super().train_batch(batch, batch_info)

    def state_dict(self) -> Any:
        return self.seen

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen[:] = state_dict


@pytest.fixture
def runner(keras_here: Any) -> TFRunner:
    runner = TFRunner(TFSettings(Noting, {"layers": "batch_norm"}, seed=0), World(0, 1))
    runner.setup()
    return runner


def test_fit_is_to_validate_where_there_is_data_or_a_method_of_the_user(keras_here: Any) -> None:
    class Unvalidated(Line):
        def register_data(self, **given: Any) -> None:
            super().register_data(**{**given, "validation_dataset": None})

    class Own(Unvalidated):
        def validate(self, val_iterator: Any, info: Any = None) -> dict[str, Any]:
            return {}

    found = [TFRunner(TFSettings(each, {}, seed=0), World(0, 1)).setup() for each in (Line, Unvalidated, Own)]
    assert [facts.has_validation for facts in found] == [True, False, True]


def test_a_state_is_taken_over_as_it_was(runner: TFRunner) -> None:
    runner.train_epoch(REQUEST)
    capture = runner.capture(None)
    before = capture.shared_state
    assert list(before) == ["epoch", "operator", "models", "optimizers", RESUME]
    runner.train_epoch(REQUEST)
    runner.restore(before, capture.rank_state)
    after = runner.state()
    assert after[RESUME] == before[RESUME]
    assert after["operator"] == before["operator"] == list(range(REQUEST.num_steps or 0))
    for one, other in zip(before["models"][0], after["models"][0], strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state["models"][0].pop(), "variables"),
        (lambda state: state["models"][0].__setitem__(0, np.zeros((1, 1), "float32")), "Shapes: "),
        (lambda state: state["models"][0].__setitem__(0, np.array(["a"])), "which are not numbers"),
        (lambda state: state["models"].__setitem__(0, 5), "is not a list of arrays"),
        (lambda state: state.update(epoch=-1), "`epoch` is -1"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(runner: TFRunner, damage: Any, message: str) -> None:
    state, before = runner.state(), runner.state()
    damage(state)
    with pytest.raises(ValueError, match=message):
        runner.restore(state, None)
    for one, other in zip(before["models"][0], runner.state()["models"][0], strict=True):
        assert np.array_equal(one, other)


def test_random_states_of_other_layers_are_left_alone(runner: TFRunner) -> None:
    runner.restore(runner.state(), [np.zeros(2)] * 5)
