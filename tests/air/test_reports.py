from __future__ import annotations

from typing import Any

import pytest

from raysgd import train
from raysgd.air import session
from raysgd.air.reports import ValidationConfig, ValidationTaskConfig


def loss_of(checkpoint: Any, **kwargs: Any) -> dict[str, float]:
    return {"val_loss": 1.0}


def test_what_a_report_says_comes_before_what_the_trainer_says() -> None:
    config = ValidationConfig(loss_of, ValidationTaskConfig({"a": 1, "b": 1}, timeout_s=3))
    assert config.merged(True) == ValidationTaskConfig({"a": 1, "b": 1}, 3)
    assert config.merged(ValidationTaskConfig({"b": 2})) == ValidationTaskConfig({"a": 1, "b": 2}, None)
    assert ValidationConfig(loss_of).merged(True) == ValidationTaskConfig({}, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ValidationConfig(3), "`fn=3`: need a function"),  # type: ignore[arg-type]
        (lambda: ValidationConfig(loss_of, {"timeout_s": 1}), "`task_config=.*need a `raysgd.train.Val"),  # type: ignore[arg-type]
        (lambda: ValidationTaskConfig([1]), r"`fn_kwargs=\[1\]`: need a dict"),  # type: ignore[arg-type]
        (lambda: ValidationTaskConfig(timeout_s=0), "`timeout_s=0`: need a number of seconds above 0"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_those_of_ray_are_other_classes() -> None:
    theirs = pytest.importorskip("ray.train.v2.api.validation_config")
    from raysgd.train.torch import TorchTrainer

    given: Any = theirs.ValidationConfig(fn=loss_of)
    with pytest.raises(ValueError, match="Those of Ray have the same names"):
        TorchTrainer(lambda: None, scaling_config=train.ScalingConfig(num_workers=1), validation_config=given)
    with pytest.raises(ValueError, match="That of Ray has the same name"):
        session.report({}, validation=theirs.ValidationTaskConfig())
