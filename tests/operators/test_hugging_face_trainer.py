"""What `from_trainer` makes of a trainer of `transformers`: the same steps, or an error that names the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import TorchTrainer
from raysgd.operators import HuggingFaceOperator

pytestmark = pytest.mark.usefixtures("keeps_the_environment")


CASES = {
    "by default": ("classify texts", {}),
    "with all that is mapped": (
        "classify texts",
        {
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "adam_beta1": 0.8,
            "max_grad_norm": 0.5,
            "dataloader_drop_last": True,
            "data_seed": 11,
            "seed": 3,
        },
    ),
    "with another optimizer, and words": (
        "label words",
        {"optim": "sgd", "learning_rate": 0.1, "max_steps": 7, "lr_scheduler_type": "constant"},
    ),
}


@pytest.mark.parametrize(("task", "arguments"), CASES.values(), ids=CASES)
def test_each_step_has_the_loss_that_the_trainer_of_transformers_has(
    lab: Any, task: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    theirs = lab.their_trainer(task, tmp_path, **arguments)
    options = HuggingFaceOperator.from_trainer(theirs)
    expected = lab.losses_of(theirs)
    with TorchTrainer(**options, use_local=True) as trainer:
        found = [trainer.train(num_steps=1)["train_loss"] for _ in expected]
        weights = lab.weights(trainer.get_model())
        assert trainer.validate()["num_samples"] == 5
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(weights, lab.weights(theirs.model), rtol=0, atol=1e-5)
    assert max(expected) - min(expected) > 0.05, "they were trained"


def test_accumulated_steps_reach_the_same_weights(lab: Any, tmp_path: Path) -> None:
    theirs = lab.their_trainer(
        "next words", tmp_path, gradient_accumulation_steps=3, dataloader_drop_last=True, optim="sgd"
    )
    options = HuggingFaceOperator.from_trainer(theirs)
    theirs.train()
    with TorchTrainer(**options, use_local=True) as trainer:
        assert trainer.train()["num_samples"] == 20
        trainer.train()
        torch.testing.assert_close(lab.weights(trainer.get_model()), lab.weights(theirs.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0}, ["label_smoothing_factor=0.1", "neftune_noise"]),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, ["needs a metric"]),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, ["lr_scheduler_kwargs"]),
        ({"optimizers": "given"}, ["`optimizer`: override `build_optimizer`"]),
        ({"trainer_class": "other loss"}, ["`compute_loss`: override `forward`"]),
    ],
)
def test_what_changes_the_numbers_and_is_not_mapped_is_named(
    lab: Any, arguments: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    if "optimizers" in arguments:
        arguments = {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), None)}
    if "trainer_class" in arguments:
        arguments = {"trainer_class": lab.OtherLoss}
    theirs = lab.their_trainer("classify texts", tmp_path, **arguments)
    with pytest.raises(ValueError, match="cannot map") as caught:
        HuggingFaceOperator.from_trainer(theirs)
    for name in named:
        assert name in str(caught.value)


def test_a_subclass_may_do_what_is_not_mapped(lab: Any, tmp_path: Path) -> None:
    class Own(HuggingFaceOperator):
        def forward(self, features: Any, target: Any) -> tuple[Any, ...]:
            output, loss, *rest = super().forward(features, target)
            return (output, 2 * loss, *rest)

    theirs = lab.their_trainer("classify texts", tmp_path, trainer_class=lab.OtherLoss, learning_rate=0.0001)
    options = Own.from_trainer(theirs)
    expected = lab.losses_of(theirs)
    with TorchTrainer(**options, use_local=True) as trainer:
        assert trainer.train(num_steps=1)["train_loss"] == pytest.approx(expected[0], abs=1e-5)


def test_what_has_no_effect_is_told_of_and_what_is_no_trainer_is_refused(lab: Any, tmp_path: Path) -> None:
    theirs = lab.their_trainer(
        "classify texts", tmp_path, save_strategy="no", eval_strategy="epoch", compute_metrics=len
    )
    with pytest.warns(UserWarning, match="`eval_strategy`, `save_strategy`, `compute_metrics` have no effect"):
        HuggingFaceOperator.from_trainer(theirs)
    with pytest.raises(TypeError, match=r"need a `transformers.Trainer`"):
        HuggingFaceOperator.from_trainer(theirs.args)
