"""What `from_trainer` makes of a trainer of `transformers`: the same steps, or an error that names the rest."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from raysgd import TorchTrainer
from raysgd.operators import HuggingFaceOperator
from raysgd.operators.hugging_face_trainer import CARRIED_OVER, RUNGS, WITHOUT_EFFECT

pytestmark = pytest.mark.usefixtures("keeps_the_environment")


class OneDecays(Trainer):
    """One that chooses what has weight decay."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return ["classifier.bias"]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
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
            "per_device_eval_batch_size": 2,
            "data_seed": 11,
            "seed": 3,
        },
    ),
    "with vectors that decay": ("classify images", {"weight_decay": 0.9}),
    "with a method that is asked": ("classify texts", {"weight_decay": 0.9, "trainer_class": OneDecays}),
    "with activations computed again": ("classify texts", {"gradient_checkpointing": True}),
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
        assert trainer.validate()["num_samples"] == (4 if theirs.args.dataloader_drop_last else 5)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(weights, lab.weights(theirs.model), rtol=0, atol=1e-5)
    assert max(expected) - min(expected) > 0.05, "they were trained"


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("4.53"), reason="counts steps otherwise where batches are left over"
)
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


class Changed(Trainer):
    """One whose methods do what they did."""

    training_step, prediction_step = lambda *args: None, lambda *args: None
    get_batch_samples, _prepare_inputs, log = lambda *args: None, lambda *args: None, lambda *args: None


class Stopping(TrainerCallback):
    """Does what no list says."""


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "arguments": (
        {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "lr_scheduler_kwargs": {"num_cycles": 2}},
        ["`label_smoothing_factor=0.1`: override `forward`", "`neftune_noise_alpha=5.0`", "lr_scheduler_kwargs"],
    ),
    "what changes the model at the end": (
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch", "bf16_full_eval": True},
        ["`load_best_model_at_end=True`", "`bf16_full_eval=True`"],
    ),
    "a schedule": ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, ["needs a metric"]),
    "an optimizer": (
        {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), None)},
        ["`optimizer`: override `build_optimizer`"],
    ),
    "methods": (
        {"trainer_class": Changed},
        [
            *("`training_step`: override `train_batch`", "`prediction_step`: override `validate_batch`"),
            *("`get_batch_samples`: override `count_labels`", "`_prepare_inputs`: override `prepare_batch`"),
        ],
    ),
    "callbacks": (
        {"callbacks": [Stopping, EarlyStoppingCallback()]},
        ["`trainer.remove_callback(Stopping)`", "`trainer.remove_callback(EarlyStoppingCallback)`"],
    ),
    "several data sets": ({"eval_dataset": {"a": [], "b": []}}, ["`eval_dataset` with several data sets: keep one"]),
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.values(), ids=REFUSED)
def test_what_changes_the_numbers_and_is_not_mapped_is_named(
    lab: Any, arguments: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    theirs = lab.their_trainer("classify texts", tmp_path, **arguments)
    with pytest.raises(ValueError, match="cannot map") as caught:
        HuggingFaceOperator.from_trainer(theirs)
    for text in named:
        assert text in str(caught.value)
    assert "`log`" not in str(caught.value), "it has no effect on the numbers"


@pytest.mark.parametrize(
    "arguments",
    [{"train_sampling_strategy": "group_by_length"}, {"accelerator_config": {"use_seedable_sampler": False}}],
)
def test_an_order_that_another_process_would_draw_otherwise_is_refused(
    lab: Any, arguments: dict[str, Any], tmp_path: Path
) -> None:
    if "train_sampling_strategy" in arguments and not hasattr(TrainingArguments, "train_sampling_strategy"):
        arguments = {"group_by_length": True}
    theirs = lab.their_trainer("classify texts", tmp_path, **arguments)
    with pytest.raises(ValueError, match=r"Sampler` that has no generator.*override `build_data`"):
        HuggingFaceOperator.from_trainer(theirs)


NOT_DONE_HERE = """
bf16_full_eval fp16_full_eval fp16_opt_level fp16_backend half_precision_backend tf32 full_determinism
auto_find_batch_size neftune_noise_alpha use_liger_kernel liger_kernel_config past_index jit_mode_eval use_ipex
torchdynamo dataloader_in_order load_best_model_at_end deepspeed fsdp fsdp_min_num_params parallelism_config
fsdp_transformer_layer_cls_to_wrap tp_size tpu_num_cores mp_parameters

train _inner_training_loop _init_training_state _prepare_for_training _run_epoch _finalize_training
_maybe_log_save_evaluate create_optimizer_and_scheduler loss_is_scaled_for_ga set_initial_training_values
_validate_args _build_accelerator_args create_accelerator_and_postprocess propagate_args_to_deepspeed
_fsdp_qlora_plugin_updates _prepare_context_parallel_inputs get_total_train_batch_size get_sp_size get_cp_size
get_tp_size _defer_fsdp_gradient_reduction _sync_replicated_trainable_parameters _wrap_model _update_auto_batch_size
_mixed_mesh_grad_norm _has_mixed_mesh_grads _get_learning_rate _load_best_model _move_model_to_device end
_activate_neftune _deactivate_neftune torch_jit_model_eval ipex_optimize_model tokenizer
_nested_gather _gather_and_numpify

CallbackHandler EarlyStoppingCallback
"""
"""What is refused without a method to override, because somebody decided so and not because it is new."""


def test_each_argument_method_and_callback_of_the_installed_transformers_is_in_one_list() -> None:
    names = [each.name for each in fields(TrainingArguments)]
    names += [name for name in vars(Trainer) if not name.startswith("__")]
    waiting, callbacks = [TrainerCallback], set()
    while waiting:
        callbacks |= {each for each in waiting if each.__module__.startswith("transformers.")}
        waiting = [each for parent in waiting for each in parent.__subclasses__()]
    names += [each.__name__ for each in callbacks - {TrainerCallback}]
    lists = [CARRIED_OVER.split(), WITHOUT_EFFECT.split(), [*RUNGS, *NOT_DONE_HERE.split()]]
    found = {name: sum(name in each for each in lists) for name in names}
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert "TensorBoardCallback" in found


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
    with pytest.warns(UserWarning, match="have no effect in `TorchTrainer`") as warned:
        HuggingFaceOperator.from_trainer(theirs)
    [text] = {str(each.message) for each in warned}
    named = set(text.partition(" have no effect")[0].split("`")[3::2])
    assert named == {"disable_tqdm", "eval_strategy", "save_strategy", "compute_metrics"}
    with pytest.raises(TypeError, match=r"need a `transformers.Trainer`"):
        HuggingFaceOperator.from_trainer(theirs.args)
