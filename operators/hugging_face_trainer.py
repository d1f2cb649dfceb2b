"""A `transformers.Trainer` that is configured already, as arguments of `TorchTrainer`."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Iterator
from dataclasses import MISSING, Field, fields
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from raysgd import StepOptions
from raysgd._imports.optional import require

_MAPPED = (
    *("per_device_", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_", "optim"),
    *("weight_decay", "adam_", "gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16", "torch_compile"),
    *("gradient_checkpointing", "seed", "data_seed", "dataloader_", "remove_unused_columns", "label_names"),
    *("train_sampling_strategy", "group_by_length", "length_column_name"),
)
_OF_THE_PROCESS = (
    *("output_dir", "use_cpu", "local_rank", "disable_tqdm", "report_to", "run_name", "project", "trackio_", "do_"),
    *("tf32", "skip_memory_metrics", "use_cache", "ddp_b", "ddp_s", "ddp_timeout", "accelerator_config"),
    *("average_tokens_across_devices", "prediction_loss_only", "fsdp_config", "logging_dir", "_n_gpu"),
)
_DONE_BY_CALLBACKS = (
    *("logging_", "log_", "eval_", "save_", "hub_", "push_to_hub", "load_best_model", "metric_for_best_model"),
    *("greater_is_better", "include_", "batch_eval_metrics"),
)
"""The arguments of each kind, by how their names begin. Any other one that is set is refused."""
RUNGS = {
    "compute_loss": "forward",
    "compute_loss_func": "forward",
    "training_step": "train_batch",
    "create_optimizer": "build_optimizer",
    "optimizer": "build_optimizer",
    "optimizer_cls_and_kwargs": "build_optimizer",
    "create_scheduler": "build_scheduler",
    "lr_scheduler": "build_scheduler",
}
"""What changes a step in a `transformers.Trainer`, methods and objects, each with the method to override here."""
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
    train = _loader(trainer.get_train_dataloader(), drop_last=args.dataloader_drop_last)
    validation = None
    if trainer.eval_dataset is not None:
        validation = _loader(trainer.get_eval_dataloader(), drop_last=False)
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
        "joint_batch": "constant",
        "scheduler_step_freq": "batch",
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "step_options": StepOptions(
            accumulate_grad_batches=args.gradient_accumulation_steps,
            clip_grad_norm=args.max_grad_norm or None,
            compile=bool(args.torch_compile),
            activation_checkpointing=bool(args.gradient_checkpointing),
        ),
    }


def _optimizer(trainer: Any, overridden: Collection[str]) -> dict[str, Any]:
    """Return the optimizer and its options, as the config of an operator names them."""
    made, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    options = dict(options)
    lr = options.pop("lr", trainer.args.learning_rate)
    if {"params", "model", "optimizer_dict"} & options.keys() and "build_optimizer" not in overridden:
        name = trainer.args.optim
        raise ValueError(f"`optim={name!r}` chooses what it trains by itself: {_override('build_optimizer')}")
    return {"optimizer": partial(made, **options), "lr": lr, "weight_decay": trainer.args.weight_decay}


def _schedule(args: Any, num_batches: int) -> dict[str, Any]:
    """Return the schedule, as the config of an operator names it."""
    per_epoch = max(1, math.ceil(num_batches / args.gradient_accumulation_steps))
    num_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return {
        "scheduler": args.lr_scheduler_type.value,
        "num_training_steps": num_steps,
        "num_warmup_steps": args.get_warmup_steps(num_steps),
    }


def _loader(given: DataLoader[Any], drop_last: bool) -> DataLoader[Any]:
    """Return the same batches in a loader that travels, with the sampler that the trainer has chosen."""
    batches = given.batch_sampler
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"The data of the trainer has no index, or comes in batches of a `{type(batches).__name__}`: "
            f"{_override('build_data')}"
        )
    return DataLoader(
        given.dataset,
        batch_size=batches.batch_size,
        sampler=batches.sampler,
        drop_last=drop_last,
        collate_fn=given.collate_fn,
        num_workers=given.num_workers,
    )


def _check(trainer: Any, overridden: Collection[str], base: type[Any]) -> None:
    """Check that a trainer can be mapped; warn of what has no effect.

    Raises:
        ValueError: It says something that changes the numbers and is not done here.
    """
    refused, without_effect = _differing(trainer.args)
    refused += [
        f"`{name}`: {_override(rung)}" for name, rung in _changed_steps(trainer, base) if rung not in overridden
    ]
    if refused:
        raise ValueError("`from_trainer` cannot map this to `TorchTrainer`: " + "; ".join(refused))
    of_evaluation = ("compute_metrics", "preprocess_logits_for_metrics")
    without_effect += [f"`{name}`" for name in of_evaluation if getattr(trainer, name)]
    if without_effect:
        warnings.warn(
            f"`from_trainer`: {', '.join(without_effect)} have no effect in `TorchTrainer`. Its callbacks save, "
            "log and stop early; `validate_batch` of the operator has metrics.",
            stacklevel=4,
        )


def _differing(args: Any) -> tuple[list[str], list[str]]:
    """Return the arguments that are not those by default: what is refused, and what has no effect."""
    changed = {
        each.name: getattr(args, each.name)
        for each in fields(args)
        if not each.name.startswith(_MAPPED + _OF_THE_PROCESS) and _is_changed(getattr(args, each.name), each)
    }
    without_effect = [f"`{name}`" for name in changed if name.startswith(_DONE_BY_CALLBACKS)]
    refused = [f"`{name}={changed[name]!r}`" for name in changed if not name.startswith(_DONE_BY_CALLBACKS)]
    if args.lr_scheduler_type.value in _WITH_METRIC:
        refused.append(f"`lr_scheduler_type={args.lr_scheduler_type.value!r}`, which needs a metric")
    if args.world_size > 1:
        refused.append(f"{args.world_size} processes: make the trainer in a program without a launcher")
    return refused, without_effect


def _is_changed(value: Any, argument: Field[Any]) -> bool:
    """Return whether an argument was set; what is empty may be so in several ways."""
    default = argument.default_factory() if argument.default_factory is not MISSING else argument.default
    return bool(value or default) and value != default


def _changed_steps(trainer: Any, base: type[Any]) -> Iterator[tuple[str, str]]:
    """The methods and objects of a trainer that change a step, each with the method that does the same here."""
    for name, rung in RUNGS.items():
        is_own_method = getattr(type(trainer), name, None) is not getattr(base, name, None)
        if is_own_method or (not hasattr(base, name) and getattr(trainer, name, None) is not None):
            yield name, rung


def _override(method: str) -> str:
    return f"override `{method}` in a subclass of `HuggingFaceOperator`, and call its `from_trainer`."
