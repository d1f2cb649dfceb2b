"""A `transformers.Trainer` that is configured already, as arguments of `TorchTrainer`."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Iterator
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from raysgd._imports import require

CARRIED_OVER = """
output_dir use_cpu no_cuda use_mps_device local_rank _n_gpu run_name logging_dir report_to do_train do_eval do_predict
use_cache accelerator_config fsdp_config dataloader_pin_memory

per_device_train_batch_size per_device_eval_batch_size per_gpu_train_batch_size per_gpu_eval_batch_size
num_train_epochs max_steps gradient_accumulation_steps max_grad_norm seed data_seed bf16 fp16
learning_rate lr_scheduler_type warmup_ratio warmup_steps
optim optim_args optim_target_modules adafactor weight_decay adam_beta1 adam_beta2 adam_epsilon
torch_compile gradient_checkpointing activation_checkpointing
dataloader_drop_last dataloader_num_workers remove_unused_columns label_names
train_sampling_strategy group_by_length length_column_name

get_train_dataloader get_eval_dataloader _get_dataloader _get_train_sampler _get_eval_sampler
_set_signature_columns_if_needed _remove_unused_columns _get_collator_with_removed_columns
get_decay_parameter_names get_optimizer_cls_and_kwargs call_model_init

DefaultFlowCallback PrinterCallback ProgressCallback NotebookProgressCallback
"""
"""The arguments, methods and callbacks that the result follows, and those of the process of the trainer alone."""
WITHOUT_EFFECT = """
logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node log_level
log_level_replica disable_tqdm project trackio_space_id trackio_bucket_id trackio_static_space_id debug
skip_memory_metrics tpu_metrics_debug include_tokens_per_second include_num_input_tokens_seen
eval_strategy eval_steps eval_delay eval_on_start eval_accumulation_steps
eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_for_metrics include_inputs_for_metrics
prediction_loss_only use_legacy_prediction_loop compute_metrics preprocess_logits_for_metrics
save_strategy save_steps save_total_limit save_safetensors save_on_each_node save_only_model enable_jit_checkpoint
overwrite_output_dir metric_for_best_model greater_is_better ignore_data_skip resume_from_checkpoint
restore_callback_states_from_checkpoint push_to_hub push_to_hub_model_id push_to_hub_organization push_to_hub_token
hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
torch_empty_cache_steps torch_compile_backend torch_compile_mode
gradient_checkpointing_kwargs activation_checkpointing_kwargs average_tokens_across_devices
dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
ray_scope

log log_metrics metrics_format save_metrics save_state save_model _save _save_tpu _save_checkpoint _save_rng_state
_save_optimizer_and_scheduler _save_scaler _load_from_checkpoint _load_rng_state _load_optimizer_and_scheduler
_load_scaler _load_callback_state _issue_warnings_after_load compare_trainer_and_checkpoint_args
_get_output_dir _sorted_checkpoints _rotate_checkpoints _determine_best_metric
init_hf_repo create_model_card _push_from_checkpoint _finish_current_push _add_sm_patterns_to_gitignore
hyperparameter_search _hp_search_setup _report_to_hp_search _tune_save_checkpoint
add_callback pop_callback remove_callback is_local_process_zero is_world_process_zero
get_learning_rates get_num_trainable_parameters get_optimizer_group num_examples num_tokens store_flos
floating_point_ops _track_num_input_tokens _get_grad_norm get_test_dataloader predict

AzureMLCallback ClearMLCallback CodeCarbonCallback CometCallback DVCLiveCallback DagsHubCallback FlyteCallback
KubeflowCallback MLflowCallback NeptuneCallback SwanLabCallback TensorBoardCallback TrackioCallback WandbCallback
JITCheckpointCallback
"""
"""Those that change neither weights nor metrics."""
RUNGS = {
    name: rung
    for rung, names in {
        "forward": "compute_loss compute_loss_func label_smoothing_factor compute_loss_context_manager "
        "autocast_smart_context_manager",
        "count_labels": "get_batch_samples _get_num_items_in_batch",
        "prepare_batch": "_prepare_input _prepare_inputs",
        "train_batch": "training_step _clip_grad_norm",
        "build_optimizer": "create_optimizer optimizer optimizer_cls_and_kwargs",
        "build_scheduler": "create_scheduler lr_scheduler lr_scheduler_kwargs",
        "validate": "evaluate _evaluate evaluation_loop prediction_loop",
        "validate_batch": "prediction_step",
    }.items()
    for name in names.split()
}
"""Refused, each with the method to override here. The names in no list are refused, too."""
_OBJECTS = """
compute_loss_func optimizer optimizer_cls_and_kwargs lr_scheduler compute_metrics preprocess_logits_for_metrics
"""
_WITH_METRIC = ("reduce_lr_on_plateau", "greedy")


def options_from(trainer: Any, operator_class: type[Any], overridden: Collection[str]) -> dict[str, Any]:
    """Return arguments for `TorchTrainer`; see `HuggingFaceOperator.from_trainer`.

    Args:
        trainer: A `transformers.Trainer`.
        operator_class: The operator that trains in its place.
        overridden: The methods among `RUNGS` that the operator overrides, so that it does by itself what they do.
    """
    transformers = require("transformers", extra="hf", purpose="`from_trainer`")
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"`trainer={trainer!r:.200}`: need a `transformers.Trainer`.")
    _check(trainer, overridden, transformers.Trainer)
    args = trainer.args
    train = _loader(trainer.get_train_dataloader())
    validation = None if trainer.eval_dataset is None else _loader(trainer.get_eval_dataloader())
    model = copy.deepcopy(trainer.model)  # the trainer may go on
    return {
        "training_operator_cls": operator_class,
        "config": {
            "model_creator": lambda config: copy.deepcopy(model),
            "data_creator": lambda config: (train, validation),
            "seed": args.seed,
            **_optimizer(trainer, overridden),
            **_schedule(args, len(train)),
        },
        "split_batches": True,
        "scheduler_step_freq": "batch",
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "accumulate_grad_batches": args.gradient_accumulation_steps,
        "clip_grad_norm": args.max_grad_norm or None,
        "compile": bool(args.torch_compile),
        "activation_checkpointing": bool(args.gradient_checkpointing or vars(args).get("activation_checkpointing")),
    }


def _optimizer(trainer: Any, overridden: Collection[str]) -> dict[str, Any]:
    """Return the optimizer and its options, as the config of an operator names them."""
    made, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    options = dict(options)
    lr = options.pop("lr", trainer.args.learning_rate)
    is_plain = issubclass(made, torch.optim.Optimizer) and "bitsandbytes" not in str(made)
    chooses = not is_plain or {"params", "model", "optimizer_dict"} & options.keys()
    if chooses and "build_optimizer" not in overridden:
        name = trainer.args.optim
        raise ValueError(f"`optim={name!r}` chooses what it trains by itself: {_override('build_optimizer')}")
    return {
        "optimizer": partial(made, **options),
        "lr": lr,
        "weight_decay": trainer.args.weight_decay,
        "decaying_parameters": frozenset(trainer.get_decay_parameter_names(trainer.model)),
    }


def _schedule(args: Any, num_batches: int) -> dict[str, Any]:
    """Return the schedule, as the config of an operator names it."""
    per_epoch = max(1, math.ceil(num_batches / args.gradient_accumulation_steps))
    num_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return {
        "scheduler": args.lr_scheduler_type.value,
        "num_training_steps": num_steps,
        "num_warmup_steps": args.get_warmup_steps(num_steps),
    }


def _loader(given: DataLoader[Any]) -> DataLoader[Any]:
    """Return the same batches in a loader that travels, with the sampler that the trainer has chosen."""
    from accelerate.data_loader import SeedableRandomSampler

    batches = given.batch_sampler
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"The data of the trainer has no index, or comes in batches of a `{type(batches).__name__}`: "
            f"{_override('build_data')}"
        )
    sampler = batches.sampler
    if getattr(sampler, "generator", sampler) is None and not isinstance(sampler, SeedableRandomSampler):
        raise ValueError(
            f"The trainer draws the order of its data with a `{type(sampler).__name__}` that has no generator, so a "
            f"worker would draw another one: {_override('build_data')}"
        )
    return DataLoader(
        given.dataset,
        batch_size=batches.batch_size,
        sampler=sampler,
        drop_last=batches.drop_last,
        collate_fn=given.collate_fn,
        num_workers=given.num_workers,
    )


def _check(trainer: Any, overridden: Collection[str], base: type[Any]) -> None:
    """Check that a trainer can be mapped; warn of what has no effect.

    Raises:
        ValueError: It says something that changes the numbers and is not done here.
    """
    args = trainer.args
    found = dict(_differences(trainer, base))
    carried_over, without_effect = CARRIED_OVER.split(), WITHOUT_EFFECT.split()
    refused = [
        text + (f": override `{RUNGS[name]}`" if name in RUNGS else "")
        for name, text in found.items()
        if name not in (*carried_over, *without_effect) and RUNGS.get(name) not in overridden
    ]
    if args.lr_scheduler_type.value in _WITH_METRIC:
        refused.append(f"`lr_scheduler_type={args.lr_scheduler_type.value!r}`, which needs a metric")
    if args.world_size > 1:
        refused.append(f"{args.world_size} processes: make the trainer in a program without a launcher")
    if isinstance(trainer.eval_dataset, dict):
        refused.append("`eval_dataset` with several data sets: keep one")
    if refused:
        raise ValueError(
            f"`from_trainer` cannot map this to `TorchTrainer`: {'; '.join(refused)}. Leave it out, or override what "
            "is named in a subclass of `HuggingFaceOperator`, and call its `from_trainer`."
        )
    left_out = [f"`{name}`" for name in found if name in without_effect]
    if left_out:
        warnings.warn(
            f"`from_trainer`: {', '.join(left_out)} have no effect in `TorchTrainer`. Its callbacks save, "
            "log and stop early; `validate_batch` of the operator has metrics.",
            stacklevel=4,
        )


def _differences(trainer: Any, base: type[Any]) -> Iterator[tuple[str, str]]:
    """What is set or changed in a trainer, by name, as text: arguments, methods, objects and callbacks.

    Arguments are not compared with new ones: making these resets the state of `accelerate` that the trainer uses.
    """
    for each in fields(trainer.args):
        value = getattr(trainer.args, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if value != default and (value or default):  # what is empty may be so in several ways
            yield each.name, f"`{each.name}={value!r:.80}`"
    subclasses = type(trainer).__mro__[: type(trainer).__mro__.index(base)]
    own = vars(trainer).keys() | {name for each in subclasses for name in vars(each)}
    yield from ((name, f"`{name}`") for name in vars(base) if name in own and not name.startswith("__"))
    yield from ((name, f"`{name}`") for name in _OBJECTS.split() if getattr(trainer, name) is not None)
    for name, module in ((type(each).__name__, type(each).__module__) for each in trainer.callback_handler.callbacks):
        known = name if module.startswith("transformers.") else f"{module}.{name}"
        yield known, f"the callback `{name}`: `trainer.remove_callback({name})`; `fit` takes callbacks"


def _override(method: str) -> str:
    return f"override `{method}` in a subclass of `HuggingFaceOperator`, and call its `from_trainer`."
