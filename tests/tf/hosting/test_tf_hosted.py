"""An operator and its runner, alone: steps and their states, what `fit` changes, and what the library keeps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from raysgd.core.engine.shared.types import World
from raysgd.exceptions import InvalidRegistrationError
from raysgd.tf.creator_operator import make_operator
from raysgd.tf.fit import check_state
from raysgd.tf.hosting.tf_hosted import FitParts, KerasParts
from raysgd.tf.tf_runner import TFRunner
from raysgd.tf.training_operator import OperatorContext, TFSettings, TrainingOperator
from raysgd.trainer.configuration import BatchOptions
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.worker.replica_state import RESUME
from tests.tf.lab import largest_difference
from tests.tf.models import Line, TrainsMore, make_data, make_model

REQUEST = EpochRequest(2, {}, False, seed=0)


def parts_of(operator_cls: Any) -> tuple[TFRunner, Any]:
    runner = TFRunner(TFSettings(operator_cls, {}, seed=0, num_workers=2), World(0, 1))
    runner.setup()
    return runner, runner._hosted.parts


def test_an_operator_is_between_two_steps_when_no_exchange_has_come_since(keras_here: Any) -> None:
    runner, parts = parts_of(Line)
    assert type(parts) is KerasParts
    feed = runner._hosted.feed
    runner.train_epoch(REQUEST)
    parts.note_committed()
    assert parts.can_be_source
    runner._hosted.synchronizer.exchanges.num_completed += 1
    assert not parts.can_be_source
    assert parts.extra_results() == {"epoch": 1}
    assert parts.validation_options(REQUEST) == {}
    assert feed.order_obstacle is None
    assert "8 samples used" in feed.progress_text()


def test_batches_of_workers_contradict_batches_that_are_split(keras_here: Any) -> None:
    settings = TFSettings(Line, {"sharding": "worker"}, seed=0, batch_options=BatchOptions(True))
    with pytest.raises(ValueError, match=r"`split_batches=True`: .* Write `register_data\(train_dataset=\.\.\.\)`"):
        TFRunner(settings, World(0, 1)).setup()


@pytest.mark.keras_in_turns("keras3")
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("operator_cls", [Line, make_operator(make_model, make_data)])
def test_training_goes_on_in_the_order_that_followed_the_state_that_was_loaded(
    keras_here: Any, operator_cls: Any, num_workers: int
) -> None:
    def trained() -> Any:
        runner.train_epoch(EpochRequest(None, {}, False, seed=0))
        return np.concatenate([array.reshape(-1) for array in runner.state()["models"][0]])

    runner = TFRunner(TFSettings(operator_cls, {"shuffles": True}, seed=0, num_workers=num_workers), World(0, 1))
    runner.setup()
    for _ in range(2):  # from the beginning, and after an epoch
        saved = runner.state()
        expected = trained()
        trained()
        runner.restore(saved, None)
        runner.restore(runner.state(), None)  # as where a worker steps in before the next call
        np.testing.assert_array_equal(trained(), expected)


class Unnamed(Line):
    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        super().setup(config)
        self.register(models=self.model, optimizers=self.optimizer, loss=self.loss, metrics=tf.keras.metrics.Recall())


def test_results_have_the_names_of_a_new_process_after_another_setup(keras_here: Any) -> None:
    runner, _ = parts_of(Unnamed)
    first = runner.validate(REQUEST).metrics
    runner.renew(TFSettings(Unnamed, {}, seed=0, num_workers=2))
    assert first is not None
    assert (runner.validate(REQUEST).metrics or {}).keys() == first.keys()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_that_is_alone_for_now_refuses_what_one_that_joins_would_not_get(
    keras_here: Any, num_workers: int
) -> None:
    runner = TFRunner(TFSettings(TrainsMore, {}, seed=0, num_workers=num_workers), World(0, 1))
    runner.setup()
    with nullcontext() if num_workers == 1 else pytest.raises(InvalidRegistrationError, match="no registered model"):
        runner.train_epoch(REQUEST)


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
    runner, parts = parts_of(make_operator(make_model, make_data))
    assert type(parts) is FitParts
    feed: Any = runner._hosted.feed
    answer: Any = runner.train_epoch(EpochRequest(None, {}, False, 0))
    assert (answer.epoch_idx, runner.epoch) == (0, 1)
    assert parts.can_be_source
    assert parts.extra_results() == {}
    assert parts.validation_options(REQUEST) == {"num_steps": 2}
    assert feed.progress_text() == "", "it is over"
    assert feed.fit.state().keys() == {"num_passes", "logs"}
    with pytest.raises(ValueError, match="is not a dict"):
        check_state(5)
    feed.fit.resume({"num_passes": 4, "logs": {"loss": 1.0}})
    assert parts.results(None) == {"loss": 1.0, "train_loss": 1.0}


# ------------------------------------------------------------------------------------------------ states


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


def test_the_scale_of_losses_is_part_of_the_state(keras_here: Any, keras: str) -> None:
    def made() -> tuple[TFRunner, Any]:
        settings = TFSettings(make_operator(make_model, make_data), {"policy": "mixed_float16"}, seed=0)
        runner = TFRunner(settings, World(0, 1))
        runner.setup()
        optimizer: Any = runner.operator._optimizers[0]
        return runner, optimizer._loss_scale.current_loss_scale if keras == "keras2" else optimizer.dynamic_scale

    (runner, scale), (other, scale_of_other) = made(), made()
    scale.assign(64.0)
    runner.train_epoch(REQUEST)
    state = runner.state()
    other.restore(state, None)
    assert float(scale_of_other.numpy()) == 64
    assert largest_difference(other.state(), state, "optimizers") == 0
    if keras == "keras2":  # a file from before the state had the scale and its counter
        scale_of_other.assign(32.0)
        other.restore({**state, "optimizers": [state["optimizers"][0][2:]]}, None)
        assert float(scale_of_other.numpy()) == 32


def test_random_states_of_other_layers_are_left_alone(runner: TFRunner) -> None:
    runner.restore(runner.state(), [np.zeros(2)] * 5)


# ------------------------------------------------------------------------------------------------ the record


def make(operator_cls: type[TrainingOperator]) -> Any:
    return operator_cls({}, OperatorContext(TFSettings(operator_cls, {}, seed=0), World(rank=0, size=1)))


def test_the_record_is_what_was_registered() -> None:
    operator = make(Line)
    registered = operator._raysgd.registered
    assert (operator._models, operator._optimizers) == ([operator.model], [operator.optimizer])
    assert (registered.loss, [metric.name for metric in registered.metrics]) == (operator.loss, ["mae"])
    data = operator._raysgd.data
    assert (operator.train_dataset, operator.validation_dataset) == (data.train_dataset, data.validation_dataset)


@pytest.mark.parametrize("name", ["_models", "_optimizers", "_config"])
def test_an_assignment_to_a_name_of_the_record_is_refused(name: str) -> None:
    class Careless(Line):
        def setup(self, config: dict[str, Any]) -> None:
            setattr(self, name, {"mine": 1})

    with pytest.raises(AttributeError, match=rf"`self\.{name}` belongs to the library"):
        make(Careless)


def test_any_other_private_name_is_free() -> None:
    names = ["_context", "_loss", "_metrics", "_train_dataset", "_sharding", "_train_function", "_trained", "_count"]

    class Careless(Line):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            for name in names:
                setattr(self, name, "mine")

    result = make(Careless).train_epoch(make(Line).train_dataset)
    assert result == pytest.approx(make(Line).train_epoch(make(Line).train_dataset))
    assert {"train_loss", "train_mae", "num_samples"} <= result.keys()


def test_steps_are_traced_again_when_other_variables_are_trained() -> None:
    operator = make(Line)
    operator.train_epoch(operator.train_dataset)
    traced = operator._raysgd.train_function
    operator.train_epoch(operator.train_dataset)
    assert operator._raysgd.train_function is traced
    operator.model.layers[0].trainable = False
    operator._raysgd.forget_stale_steps()
    assert operator._raysgd.train_function is None
