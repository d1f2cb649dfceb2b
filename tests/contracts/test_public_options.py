"""The names that users of operators write: a new one is decided on here, and none goes unnoticed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields

import raysgd
from raysgd import Recovery, TFTrainer, TorchTrainer
from raysgd.trainer.driver.fit_loop import FitOptions

WHAT = "training_operator_cls config seed add_dist_sampler scheduler_step_freq use_tqdm"
WHERE = (
    "num_workers num_cpus_per_worker use_gpu num_gpus_per_worker resources_per_worker accelerator_type "
    "placement_strategy runtime_env initialization_hook backend timeout_s use_local detached"
)
STEP = (
    "strategy strategy_options wrap_ddp use_fp16 precision split_batches micro_batch_size deterministic "
    "accumulate_grad_batches clip_grad_norm clip_grad_value sync_batchnorm compile activation_checkpointing"
)
FAILURE = "recovery min_workers spare_workers"
ONLY_KERAS = {"model_creator", "data_creator", "num_replicas", "verbose"}


def options(takes: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(takes).parameters if name not in ("self", "unknown")]


def test_torch_trainer_takes_four_groups_of_options() -> None:
    assert options(TorchTrainer) == f"{WHAT} {WHERE} {STEP} {FAILURE}".split()
    documented = inspect.getdoc(TorchTrainer) or ""
    assert [line for line in documented.splitlines() if line.startswith("Args")] == [
        "Args: What is trained",
        "Args: Where it runs",
        "Args: What a step computes",
        "Args: What follows a failure",
    ]


def test_options_of_both_frameworks_have_one_name() -> None:
    assert set(options(TFTrainer)) - ONLY_KERAS <= set(options(TorchTrainer))


def test_fit_and_epochs_take_what_is_checked_in_one_place() -> None:
    assert {*options(TorchTrainer.fit)} == {field.name for field in fields(FitOptions)}
    assert [name for name in options(TorchTrainer.fit) if name != "progress"] == options(TorchTrainer.epochs)
    for method in (TorchTrainer.fit, TorchTrainer.epochs):
        parameters = inspect.signature(method).parameters
        assert {name: parameters[name].default for name in options(method)} == {
            field.name: field.default if field.name != "progress" else None
            for field in fields(FitOptions)
            if field.name in parameters
        }


def test_recovery_has_nine_rules() -> None:
    assert [field.name for field in fields(Recovery)] == [
        "in_place",
        "wait_for_workers",
        "resize_interval_s",
        "heartbeat_s",
        "form_timeout_s",
        "settle_timeout_s",
        "snapshot_every_s",
        "snapshot_every_n_steps",
        "undo",
    ]


def test_the_package_has_few_names() -> None:
    assert raysgd.__all__ == [
        "CallRecord",
        "CreatorOperator",
        "Detached",
        "GroupEvent",
        "History",
        "Preempted",
        "PyTorchTrainer",
        "Recovery",
        "TFTrainer",
        "TorchTrainer",
        "TrainerStatus",
        "TrainingOperator",
        "__version__",
        "attach",
        "detached_trainers",
    ]
