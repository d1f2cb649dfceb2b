"""Arguments of the old library: refused where they ask for something, in the old order, and taken out either way."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.torch import TorchTrainer
from raysgd.torch.driver import arguments


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_replicas": 0, "batch_size": 8}, "`num_replicas` .*use `num_workers`"),
        ({"batch_size": 8, "apex_args": {}}, "`batch_size` .*BATCH_SIZE"),
        ({"apex_args": {}, "data_loader_args": {"a": 1}}, r"`apex_args` .*TrainingOperator\.register"),
        ({"data_loader_args": {"a": 1}}, "`data_loader_args` .*`setup`"),
    ],
)
def test_the_first_of_several_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DeprecationWarning, match=message):
        arguments.take_others(given)


def test_creators_are_refused_before_the_others() -> None:
    given = {"num_replicas": 2, "loss_creator": print}
    with pytest.raises(DeprecationWarning, match="Creator functions"):
        arguments.take_creators(given)


def test_creators_are_refused_before_the_missing_operator_class() -> None:
    with pytest.raises(DeprecationWarning, match="`raysgd migrate`"):
        TorchTrainer(model_creator=print)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="training_operator_cls"):
        TorchTrainer(model_creator=None)  # type: ignore[call-arg]


def test_a_trainer_may_have_creators_of_its_own() -> None:
    class Own(TorchTrainer):
        def __init__(self, model_creator: Any) -> None:
            super().__init__(training_operator_cls=model_creator)

    with pytest.raises(TypeError, match="need a subclass of `TrainingOperator`"):
        Own(model_creator=print)


def test_what_asks_for_nothing_is_taken_out_and_the_rest_is_left() -> None:
    given = {"model_creator": None, "loss_creator": 0, "batch_size": None, "data_loader_args": {}, "unknown": 1}
    arguments.take_creators(given)
    assert arguments.take_others(given) is None
    assert given == {"unknown": 1}


def test_what_has_no_effect_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert arguments.take_others({"serialize_data_creation": True}) is True
    assert "`serialize_data_creation` of the trainer has no effect" in caplog.text
