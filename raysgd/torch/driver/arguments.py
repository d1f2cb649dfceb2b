"""Resolves defaults of `TorchTrainer`'s arguments and checks the arguments, before any worker starts.

A check raises `ValueError` or `TypeError`, with a message that says what was passed, what is allowed, and what to do.
A missing Horovod raises `ImportError`. Arguments of older versions raise `RemovedNameError`. The settings classes,
such as `TorchSettings`, check individual options. This module checks combinations of options, and options that can only
be checked in the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from raysgd.core import arguments as checks
from raysgd.core.arguments import did_you_mean, is_number, refuse_text
from raysgd.core.cluster.ray_cluster import gpus_of_nodes
from raysgd.core.cluster.resources import GpuChoice
from raysgd.core.connections.torch import view_of_driver
from raysgd.core.text.log_lines import Once
from raysgd.exceptions import RemovedNameError
from raysgd.torch import constants
from raysgd.torch.data import call_data
from raysgd.torch.objects.precision import choose_precision
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.options import FSDPOptions
from raysgd.torch.training_operator import TrainingOperator
from raysgd.trainer.configuration import GroupSettings, Placement, ReplicaSettings, chosen
from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)


def check_place(num_workers: int, use_local: Any) -> None:
    """Check that these arguments let the workers communicate.

    Several workers need `torch.distributed`. With `use_local`, the worker with rank 0 runs in this process. Other
    workers cannot reach this process if it is connected to the cluster through Ray Client.

    Raises:
        ValueError: The workers cannot communicate.
    """
    if use_local and num_workers > 1:
        from raysgd.core.cluster.ray_cluster import is_ray_client

        if is_ray_client():
            raise ValueError(
                "`use_local=True` does not work through a Ray Client connection, because this process is not in the "
                "cluster. Omit it."
            )
        if torch.cuda.is_available() and _once.is_first("use_local"):
            logger.warning(
                "`use_local=True`: rank 0 shares this process, and its view of CUDA devices, with your program"
            )
    if num_workers > 1 and not torch.distributed.is_available():
        raise ValueError(
            f"`num_workers={num_workers}`: this build of PyTorch has no `torch.distributed`, so it can use only 1."
        )


_once = Once()


def check_operator_class(operator_cls: Any) -> None:
    """Check that the trainer's argument `training_operator_cls` is a subclass of `TrainingOperator`."""
    checks.check_operator_class(operator_cls, TrainingOperator, "TrainingOperator")


def check_dataset(dataset: Any, name: str = "dataset", *, steps_apart: bool = False, global_option: str = "") -> None:
    """Check that a dataset can be sharded over the workers.

    Args:
        dataset: The dataset that the user passed to `train`, `validate` or `fit`; None for the registered data.
        name: Name of the argument, for errors.
        steps_apart: True if the workers' steps are not synchronized (`strategy="none"`).
        global_option: Name of the trainer's option that splits each batch over the workers. Such an option needs data
            that can be sharded by samples. Empty if no such option is on.

    Raises:
        TypeError: The dataset's type is not supported.
        ValueError: The dataset does not support the trainer's options.
    """
    if dataset is None:
        return
    kind = call_data.kind_of(dataset)
    if global_option and kind in ("ray", "shards"):
        raise ValueError(
            f"`train(dataset=...)` got `{type(dataset).__name__}`, which {global_option} cannot shard by "
            "samples: pass arrays, a map-style dataset, or a `DataLoader` over one."
        )
    if kind == "ray" and steps_apart:
        raise ValueError(
            "`train(dataset=...)` got a dataset of Ray Data, which several workers share only if they step together: "
            'omit `strategy="none"`.'
        )
    if kind is None:
        raise TypeError(
            f"`{name}=` got `{type(dataset).__name__}`: need a `DataLoader`, a dataset of PyTorch or of Ray Data, "
            "arrays or a data frame, a list of dicts (the samples), a function `(config, batch_size)` that returns a "
            "loader, or an object with `set_num_shards(n)` and `get_shard(i)`."
        )


def check_use_gpu(use_gpu: Any, num_gpus_per_worker: Any, backend: Any) -> None:
    """Reject invalid values of the arguments that say which GPUs workers use, and how they communicate."""
    if use_gpu != "auto":
        refuse_text(use_gpu=use_gpu)
        if not use_gpu and torch.cuda.is_available():
            logger.info("GPUs are available, but `use_gpu` is off: pass `use_gpu=True` to train on them")
    if (
        not is_number(num_gpus_per_worker)
        or num_gpus_per_worker <= 0
        or (num_gpus_per_worker > 1 and num_gpus_per_worker % 1)
    ):
        raise ValueError(
            f"`num_gpus_per_worker={num_gpus_per_worker!r}`: need a whole number of GPUs, or a fraction between 0 "
            "and 1. To train without GPUs pass `use_gpu=False`."
        )
    if backend not in ("auto", "nccl", "gloo", "horovod"):
        raise ValueError(f'`backend={backend!r}`: allowed are "auto", "gloo", "nccl" and "horovod".')


def choose_gpus(use_gpu: bool | str, group: GroupSettings) -> GpuChoice:
    """Decide how many GPUs each worker gets, and over which backend the workers communicate.

    Args:
        use_gpu: The user's argument.
        group: The other arguments, with the user's backend and number of GPUs for each worker.

    Raises:
        ValueError: The workers cannot share the cluster's GPUs.
    """
    driver = view_of_driver((group.placement.runtime_env or {}).get("env_vars"))
    return group.choose_gpus(use_gpu, driver, num_gpus_per_worker=group.num_gpus_per_worker, backend=group.backend)


def choose_for(options: Mapping[str, Any]) -> GpuChoice:
    """Decide how many GPUs each worker of a trainer gets that another process will create.

    Args:
        options: The user's keyword arguments for the trainer.

    Raises:
        ValueError, TypeError: An argument is invalid, or the workers cannot share the cluster's GPUs.
    """
    given = {"use_gpu": "auto", "backend": "auto", "num_workers": 1, "num_gpus_per_worker": 1, **options}
    check_use_gpu(given["use_gpu"], given["num_gpus_per_worker"], given["backend"])
    given["num_workers"] = checks.check_num_workers("num_workers", given["num_workers"], hint="")
    group = chosen(GroupSettings, given, timeout_s=1, min_workers=1, placement=chosen(Placement, given))
    return choose_gpus(given["use_gpu"], group)


def settle_gpus(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a detached trainer with the GPUs that `use_gpu="auto"` chooses now.

    If the trainer's process is restarted, it thus makes the same choice, even if the cluster has changed.
    """
    if options.get("use_gpu", "auto") != "auto":
        return options
    gpus = choose_for(options)
    tell_unused_gpus("auto", gpus)
    chosen = {"use_gpu": gpus.num_gpus > 0, "backend": gpus.backend}
    return {**options, **chosen, **({"num_gpus_per_worker": gpus.num_gpus} if gpus.num_gpus else {})}


def tell_unused_gpus(use_gpu: bool | str, choice: GpuChoice) -> None:
    """Warn if `use_gpu="auto"` chose CPUs although the cluster has GPUs, because PyTorch sees none in this process."""
    if use_gpu == "auto" and not choice.num_gpus and (found := sum(gpus_of_nodes())):
        logger.warning(
            "the nodes have %g GPUs, but training runs on CPUs, because PyTorch cannot use GPUs in this process. "
            "Pass `use_gpu=True` to train on the GPUs",
            found,
        )


def check_horovod(precision: str, strategy: str, use_gpu: bool) -> None:
    """Check that Horovod is installed, and that the other options work with `backend="horovod"`."""
    from raysgd.core.connections.horovod import INSTALL_COMMAND, import_horovod

    hvd = import_horovod()
    if precision == "apex":
        raise ValueError(
            'Apex does not work with `backend="horovod"`, because both rebuild the optimizer: use '
            '`precision="fp16"` or "bf16", or `backend="gloo"` or "nccl".'
        )
    if strategy == "fsdp":
        raise ValueError(
            '`strategy="fsdp"` does not work with `backend="horovod"`, which cannot shard models: use `backend="gloo"` '
            'or "nccl".'
        )
    if use_gpu and not (hvd.cuda_built() or hvd.rocm_built()):
        raise ValueError(
            '`use_gpu` is on, but this Horovod was built for CPUs: pass `use_gpu=False`, use `backend="nccl"`, or run: '
            f"HOROVOD_GPU_OPERATIONS=NCCL {INSTALL_COMMAND}"
        )


def resolve_timeout(timeout_s: float | None, backend: str) -> float:
    """Return the timeout of collectives in seconds: the user's `timeout_s`, or the backend's default."""
    if timeout_s is not None:
        return timeout_s
    return constants.NCCL_TIMEOUT_S if backend == "nccl" else 1800


def check_spares(group: GroupSettings, strategy: str) -> None:
    """Reject the option `spare_workers` if the other settings do not let a spare worker replace a lost worker."""
    group.refuse_spares(
        ((strategy != "ddp", f'`strategy="{strategy}"`'), (group.backend == "horovod", '`backend="horovod"`')),
        'workers outside the driver, `Recovery(in_place=True)`, and `strategy="ddp"` on gloo or NCCL',
    )


def outlives_its_process(options: Mapping[str, Any]) -> bool:
    """Return True if the workers of a detached trainer can survive when the trainer's process dies.

    Args:
        options: Keyword arguments that the user passed to the trainer.
    """
    is_ddp = options.get("strategy") in (None, "ddp") and options.get("wrap_ddp", True)
    return is_ddp and options.get("backend") != "horovod"


def check_batch_size(settings: ReplicaSettings, num_workers: int) -> None:
    """Check the batch size in the config. Warn if the trainer rounds it down to a multiple of `num_workers`.

    With `split_batches=True`, the trainer does not round the batch size.
    """
    config = settings.config
    if BATCH_SIZE not in config:
        return
    requested, effective = config[BATCH_SIZE], settings.batch_options.global_size(config[BATCH_SIZE], num_workers)
    if effective != requested:
        words = "the batch size %s is not divisible by %s workers: using %s"
        logger.warning(words, requested, num_workers, effective)


STRATEGIES = ("ddp", "fsdp", "none")


def resolve_strategy(strategy: str | None, wrap_ddp: bool) -> str:
    """Return the strategy's name. If `strategy` is None, the older argument `wrap_ddp` determines the strategy."""
    refuse_text(wrap_ddp=wrap_ddp)
    if strategy is None:
        return "ddp" if wrap_ddp else "none"
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        allowed = ", ".join(f'"{name}"' for name in STRATEGIES)
        raise ValueError(f"`strategy={strategy!r}`: allowed are {allowed}, or None to go by `wrap_ddp`.")
    if not wrap_ddp and strategy != "none":
        raise ValueError(
            f'`wrap_ddp=False` and `strategy="{strategy}"` contradict each other: leave `wrap_ddp` out, or pass '
            '`strategy="none"`.'
        )
    return strategy


_OTHER_FSDP = {
    "state_dict_type": "A whole state is put together only where you ask for it: `save(path, whole=True)`.",
    "sharding_strategy": 'Models are sharded: pass `reshard_after_forward`, or `strategy="ddp"` for whole models.',
    "sync_module_states": "Leave it out: all workers take the weights of rank 0 while `register` shards the model.",
    "use_orig_params": "Leave it out: parameters keep their names and shapes.",
    "param_init_fn": "Initialize the model in `setup`, where it is whole.",
    "auto_wrap_policy": "Pass `min_block_parameters`.",
    "mixed_precision": "Pass `mp_policy`.",
    "cpu_offload": "Pass `offload_policy`.",
}
"""Arguments of PyTorch's older FSDP1 that `strategy_options` does not support, with advice for error messages."""


def fsdp_options(strategy_options: Any, strategy: str) -> FSDPOptions:
    """Convert the argument `strategy_options` to `FSDPOptions`.

    Raises:
        ValueError: An option is unknown or invalid, or the strategy is not FSDP.
    """
    if strategy_options is None:
        return FSDPOptions()
    if not isinstance(strategy_options, Mapping):
        raise ValueError(f"`strategy_options={strategy_options!r}`: need a dict of options, or None.")
    if strategy != "fsdp":
        raise ValueError(
            f'`strategy_options` is given with `strategy="{strategy}"`: pass `strategy="fsdp"`, or omit it.'
        )
    known = [option.name for option in fields(FSDPOptions)]
    for name in strategy_options:
        if name not in known:
            hint = f" {_OTHER_FSDP[name]}" if name in _OTHER_FSDP else did_you_mean(str(name), known)
            raise ValueError(f"`strategy_options` has {name!r}: allowed are {', '.join(map(repr, known))}.{hint}")
    options = FSDPOptions(**strategy_options)
    smallest = options.min_block_parameters
    if isinstance(smallest, bool) or not isinstance(smallest, int) or smallest < 1:
        raise ValueError(
            f"`strategy_options={{'min_block_parameters': {smallest!r}}}`: need a count of parameters, 1 or more."
        )
    if not isinstance(options.reshard_after_forward, bool):
        raise ValueError(
            f"`strategy_options={{'reshard_after_forward': {options.reshard_after_forward!r}}}`: allowed are True and "
            "False."
        )
    return options


def check_combination(settings: TorchSettings, gpus: GpuChoice, group: GroupSettings) -> None:
    """Reject combinations of options that do not work together. The error message names the options."""
    precision, strategy = choose_precision(settings.use_fp16, settings.precision), settings.strategy
    step, fsdp, batches = settings.step_options, settings.fsdp_options, settings.batch_options
    option, is_deterministic, num_batches = batches.global_option, batches.deterministic, step.accumulate_grad_batches
    is_lightning = hasattr(settings.training_operator_cls, "_lightning_module_cls")
    # With `split_batches` or `deterministic`, the library splits each batch among the workers. To do so, it must shard
    # the data by samples and weight the gradients by sample counts.
    splits_with = strategy == "ddp" or (strategy == "fsdp" and not is_deterministic) or not batches.is_global
    way_out = 'it needs `strategy="ddp"` on gloo or NCCL. Use that, or omit it'
    _refuse_first(
        (batches.is_global and settings.use_horovod, f'{option} cannot work with `backend="horovod"`: {way_out}.'),
        (not splits_with, f'{option} cannot work with `strategy="{strategy}"`: {way_out}.'),
        (
            batches.is_global and not settings.add_dist_sampler,
            f"{option} cannot work with `add_dist_sampler=False`: the library has to shard the data. Omit one of the "
            "two.",
        ),
        (
            is_deterministic and num_batches > 1,
            f"{option} cannot work with `accumulate_grad_batches={num_batches}`: multiply the global batch size by "
            "this number, and pass `micro_batch_size`.",
        ),
        (
            is_deterministic and precision == "apex",
            f"{option} cannot work with Apex: it exchanges gradients in every backward pass. Use "
            '`precision="fp16"` or `"bf16"`.',
        ),
        (
            is_deterministic and step.sync_batchnorm,
            f"{option} cannot work with `sync_batchnorm=True`: workers take different numbers of shards, and would "
            "wait for each other. Omit one of the two.",
        ),
        (
            is_deterministic and is_lightning,
            f"{option} cannot work with an operator made of a `LightningModule`: its hooks run the backward pass. Pass "
            "`split_batches=True` instead, with which any number of workers takes the same steps up to rounding, or "
            "write a `TrainingOperator`.",
        ),
    )
    if settings.use_horovod:
        check_horovod(precision, strategy, settings.use_gpu)
    in_place = (
        (strategy != "ddp", f'`strategy="{strategy}"`'),
        (not settings.recovery.in_place, "`Recovery(in_place=False)`"),
        (group.is_driver_only, "`use_local=True`"),
    )
    _refuse_first(
        (
            precision == "apex" and strategy == "fsdp",
            'Apex with `strategy="fsdp"` cannot work: Apex replaces parameters, and so does FSDP. Pass '
            '`precision="fp16"` or `precision="bf16"`.',
        ),
        (
            precision == "apex" and not settings.use_gpu,
            'Apex without GPUs cannot work: Apex has GPU kernels only. Pass `use_gpu=True`, or `precision="bf16"`.',
        ),
        (
            strategy == "fsdp" and group.num_workers > 1 and gpus.is_shared and gpus.backend == "gloo",
            '`strategy="fsdp"` for workers that share a GPU over gloo '
            f"(`num_gpus_per_worker={gpus.num_gpus:g}`) cannot work: the parts of the models would be gathered through "
            "the memory of the host in each layer. Pass at most as many `num_workers` as there are GPUs, "
            '`strategy="ddp"`, or `use_gpu=False`.',
        ),
        (
            precision == "apex" and step.compile is not False,
            'Apex with `compile` cannot work: Apex patches PyTorch while it runs. Pass `precision="fp16"` or '
            '`precision="bf16"`.',
        ),
        (
            precision in ("fp16", "bf16", "legacy") and fsdp.mp_policy is not None,
            "mixed precision with `strategy_options={'mp_policy': ...}` cannot work: both choose formats. Pass "
            '`precision="fp32"` with the policy, or leave the policy out.',
        ),
        (
            precision in ("fp16", "legacy") and fsdp.offload_policy is not None,
            "fp16 with `strategy_options={'offload_policy': ...}` cannot work: the gradient scaler needs gradients on "
            'the device. Pass `precision="bf16"`, or leave the policy out.',
        ),
        (
            fsdp.offload_policy is not None and not settings.use_gpu,
            "`strategy_options={'offload_policy': ...}` without GPUs cannot work: everything is in the memory of the "
            "host already. Leave the policy out.",
        ),
        (
            step.sync_batchnorm and not settings.use_gpu,
            "`sync_batchnorm=True` without GPUs cannot work: PyTorch's `SyncBatchNorm` runs on GPUs only. Pass "
            "`use_gpu=True`, or leave it out.",
        ),
        (
            step.sync_batchnorm and strategy == "none",
            '`sync_batchnorm=True` with `strategy="none"` cannot work: it needs workers that step together. Pass '
            '`strategy="ddp"`, or convert the models in `setup`.',
        ),
        (
            is_lightning and strategy == "fsdp",
            'an operator made of a `LightningModule` with `strategy="fsdp"` cannot work: its steps do not run through '
            '`forward`. Pass `strategy="ddp"`, or write a `TrainingOperator`.',
        ),
        (
            is_lightning and step.compile is not False,
            "an operator made of a `LightningModule` with `compile` cannot work: its steps do not run through "
            "`forward`. Call `self.compile()` in the module's `configure_model`.",
        ),
        *(
            (
                batches.is_auto and applies,
                f'`micro_batch_size="auto"` cannot work with {what}: no step is repeated in place. Pass the number of '
                "samples that a worker can process at once.",
            )
            for applies, what in in_place
        ),
    )


def _refuse_first(*obstacles: tuple[bool, str]) -> None:
    """Raise an error with the first message whose flag is True."""
    for applies, message in obstacles:
        if applies:
            raise ValueError(message)


def refuse_other_name(given: Mapping[str, Any]) -> None:
    """Raise if the user passed the operator class under another name than `training_operator_cls`.

    Args:
        given: The user's keyword arguments.

    Raises:
        TypeError: One of the arguments is an operator class.
    """
    for name, value in given.items():
        if isinstance(value, type) and issubclass(value, TrainingOperator):
            raise TypeError(f"`TorchTrainer` does not know `{name}`: write `training_operator_cls={value.__name__}`.")


_CREATORS = ("model_creator", "data_creator", "optimizer_creator", "scheduler_creator", "loss_creator")
_MAY_BE_EMPTY = ("data_loader_args", "dataloader_config", *_CREATORS)
_FORMER = {
    **dict.fromkeys(
        _CREATORS,
        "make an operator class from your creator functions with `TrainingOperator.from_creators(...)` and pass it as "
        "`training_operator_cls`. `raysgd migrate` does so",
    ),
    "num_replicas": "use `num_workers`",
    "batch_size": f"put the batch size of all workers into `config` under `raysgd.utils.BATCH_SIZE` ({BATCH_SIZE!r})",
    "apex_args": "pass it to `TrainingOperator.register`",
    "train_function": "override `train_epoch(self, iterator, info)` of a `TrainingOperator`",
    "validation_function": "override `validate(self, val_iterator, info)` of a `TrainingOperator`",
    "data_loader_args": "make the `DataLoader` with these options in the operator's `setup`",
    "dataloader_config": "make the `DataLoader` with these options in the operator's `setup`",
}
"""Arguments of older versions, with what to do instead."""


def take_former(given: dict[str, Any]) -> Any:
    """Remove arguments of older versions from the keyword arguments in `given`.

    Raises:
        RemovedNameError: One of these arguments is not None. Three cases are allowed: `serialize_data_creation`, an
            empty dict of options for data loaders, and False as a creator function.

    Returns:
        The value of `serialize_data_creation`, which the trainer accepts for compatibility and ignores. None if the
        argument was not passed.
    """
    for name, instead in _FORMER.items():
        value = given.pop(name, None)
        if value is not None and (value or name not in _MAY_BE_EMPTY):
            raise RemovedNameError(f"`{name}` is no longer an argument of `TorchTrainer`: {instead}.")
    serialize_data_creation = given.pop("serialize_data_creation", None)
    if serialize_data_creation is True:
        logger.warning(
            "`serialize_data_creation` of the trainer has no effect. Pass it to `TrainingOperator.from_creators`"
        )
    return serialize_data_creation
