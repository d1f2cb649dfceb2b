"""Models of `transformers` on several workers, which have to do what one process does with all the texts.

The tasks run side by side in the workers of one trainer: importing `transformers` takes longer than all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle
import torch

from raysgd import Recovery, TorchTrainer
from raysgd.operators import HuggingFaceOperator
from raysgd.testing import kill_worker
from tests.helpers.doors import controller_of
from tests.torch import lab

pytestmark = pytest.mark.integration

TASKS = ("classify texts", "label words", "label pixels", "next words", "text to text", "adapter")
CALLS = (("train", None), ("train", None), ("validate", None))


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """The models, which workers can use without a path to the tests."""
    alone = importlib.import_module("tests.operators.hugging_face_lab")
    for module in (alone, lab):
        ray.cloudpickle.register_pickle_by_value(module)
    yield alone
    for module in (alone, lab):
        ray.cloudpickle.unregister_pickle_by_value(module)


def config(task: str, num_workers: int) -> dict[str, Any]:
    """Batches of six texts in all; in the last step of a pass there are four, and three workers have 2, 1 and 1."""
    return {"task": task, "lr": 0.1, "optimizer": "sgd", "batch_size": 6 // num_workers}


def weights(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in state.values()])


@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_n_workers_train_what_one_process_would_whatever_the_lengths_of_texts(
    num_workers: int, alone: Any, ray_cluster: None, tmp_path: Path
) -> None:
    first = config("next words", num_workers)
    options: dict[str, Any] = {
        "num_workers": num_workers,
        "recovery": Recovery(wait_for_workers=False, resize_interval_s=600.0),
    }
    with TorchTrainer(training_operator_cls=alone.Task, config=first, **options) as trainer:
        folder = HuggingFaceOperator.save_pretrained(trainer, tmp_path)
        found = {
            task: lab.run_together(trainer, lab.Experiment(alone.Task, config(task, num_workers), CALLS))
            for task in TASKS
        }
        kill_worker(trainer, 0, at="step:2")
        assert trainer.train()["num_samples"] == alone.NUM_SAMPLES
        assert [each.kind for each in controller_of(trainer).history.events if each.is_failure] == ["continued"]
    for task in TASKS:
        expected = lab.run_alone(lab.Experiment(alone.Task, config(task, 1), CALLS))
        for result, expected_result in zip(found[task].results, expected.results, strict=True):
            names = [name for name in expected_result if name.endswith(("_loss", "_accuracy", "num_samples"))]
            names = [name for name in names if not name.startswith("last_")]
            assert {name: result[name] for name in names} == pytest.approx(
                {name: expected_result[name] for name in names}, rel=1e-6
            )
            assert len(names) >= 2
        for model in found[task].model:
            torch.testing.assert_close(weights(model), weights(expected.model[0]), rtol=0, atol=1e-6)
        before = weights(alone.model_of(task).state_dict())
        assert (weights(expected.model[0]) - before).abs().max() > 1e-3, "they were trained"
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(str(folder))
    assert torch.equal(alone.weights(saved), alone.weights(alone.model_of("next words")))
