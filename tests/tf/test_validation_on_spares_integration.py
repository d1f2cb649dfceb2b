"""Validation on a spare with TensorFlow, by an operator and by creator functions."""

from __future__ import annotations

import os
from typing import Any

import pytest

from raysgd import testing
from raysgd._numbers.metric_names import validation_name
from raysgd.tf import TFTrainer
from tests.tf.lab import forget_pytorch
from tests.tf.models import Line, make_data, make_model

pytestmark = pytest.mark.integration

CREATORS = {"model_creator": make_model, "data_creator": make_data}


@pytest.mark.keras_in_turns("keras2", "keras3")
@pytest.mark.parametrize("what", [{"training_operator_cls": Line}, CREATORS], ids=["operator", "creators"])
def test_a_spare_of_a_single_worker_validates_the_weights_of_the_last_call_and_takes_its_place(
    what: dict[str, Any], ray_cluster: None, keras_here: Any
) -> None:
    options: dict[str, Any] = {"num_workers": 1, "seed": 1, "timeout_s": 240, "initialization_hook": forget_pytorch}
    with TFTrainer(**what, config={"batch_size": 4}, spare_workers=1, **options) as trainer:
        trainer.train()
        inline = trainer.validate()
        handle = trainer.validate(blocking=False)
        trainer.train()
        beside = handle.result(300)
        assert beside == pytest.approx(inline, rel=1e-6, nan_ok=True)
        assert trainer.validate() != pytest.approx(inline, rel=1e-6, nan_ok=True)
        history = trainer.fit(2, validate="async")
        last = {validation_name(name): value for name, value in trainer.validate().items()}
        assert {name: history[-1][name] for name in last} == pytest.approx(last, rel=1e-6, nan_ok=True)
        assert history[-1]["val_seconds"] > 0

        [spare] = trainer._controller.group.standby._idle  # type: ignore[union-attr]
        testing.kill_worker(trainer, 0)
        trainer.train()
        assert trainer.apply_all_workers(os.getpid) == [spare.info.pid]
