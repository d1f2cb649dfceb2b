"""`TorchTrainer`: the class with which a program trains a `TrainingOperator` on several workers.

The trainer checks the arguments of each call, passes the call to the engine (`raysgd.core.engine`), and merges the
workers' results. The engine starts the workers through Ray, runs calls on them, and recovers from failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.compat.names import former_names
from raysgd.core import arguments as checks
from raysgd.core.text.tracebacks import hide_library_frames
from raysgd.exceptions import RemovedNameError
from raysgd.storage import files
from raysgd.torch.checkpoints import divided
from raysgd.torch.driver import arguments, framework
from raysgd.torch.driver.framework import FileFormat, LoadReport, TorchFramework
from raysgd.torch.objects.models import unpacked
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.configuration import BatchOptions, GroupSettings, Placement, Recovery, chosen
from raysgd.trainer.driver.trainer import ClassTrainer, show_options
from raysgd.trainer.worker.operator import OperatorT
from raysgd.trainer.worker.replica_state import RESUME

if TYPE_CHECKING:
    from raysgd.detached.protocol import Detached


@hide_library_frames
class TorchTrainer(ClassTrainer[OperatorT]):
    """Trains a `TrainingOperator` on one or more workers.

    Args: What is trained
        training_operator_cls: The operator class, not an instance.
        config: Dict passed to the operator. The key `BATCH_SIZE` may hold the total batch size of all workers.
        seed: Nonnegative integer seed for initial weights, data order and random numbers. Before `setup`, the global
            random number generators of all workers get the same seed. After `setup`, each worker gets a different seed.
        add_dist_sampler: True to shard registered loaders of map-style datasets over the workers.
        scheduler_step_freq: When the library steps the learning-rate scheduler: "batch", "epoch", or "manual" for
            never.
        use_tqdm: True to show a progress bar in `train`.

    Args: Where it runs
        num_workers: Number of workers. After a failure, training may continue with fewer workers for a while.
        num_cpus_per_worker: CPUs to reserve for each worker. Also sets the worker's number of threads.
        use_gpu: True to reserve GPUs for each worker. "auto" to go by the cluster: a GPU for each worker; if there are
            fewer GPUs, at most 4 workers share one; without GPUs, workers train on CPUs.
        num_gpus_per_worker: Number of GPUs to reserve for each worker if `use_gpu` reserves GPUs. With a fraction,
            workers share a GPU.
        resources_per_worker: Custom Ray resources for each worker, such as `{"fast_disk": 1}`.
        accelerator_type: Ray's name for the type of GPU that workers need, such as "A100".
        placement_strategy: "PACK" to use as few nodes as possible, "SPREAD" to use as many as possible. None packs
            workers with GPUs, so that most of their traffic stays inside a node, and spreads workers without GPUs.
        runtime_env: Ray runtime environment of the worker processes. Default: the job's environment. A worker in the
            driver ignores it.
        initialization_hook: Function without arguments, called first in each worker process. Use it, for example, to
            set environment variables.
        backend: "nccl", "gloo", "auto" (NCCL if each worker has a GPU, or if NCCL lets workers share a GPU; otherwise
            gloo), or "horovod", which you must build first with `python -m raysgd.horovod.install`.
        timeout_s: Timeout of a collective in seconds. Default: 1800 or, with NCCL, the environment variable
            NCCL_TIMEOUT_S if it is set.
        use_local: True to run the worker with rank 0 in this process. With `num_workers=1`, the trainer does not use
            Ray, and you can attach a debugger.
        detached: Name of a trainer that outlives this program, or a `raysgd.Detached` with the name and options. The
            constructor then returns a handle with the trainer's methods. See `docs/detached.md`.

    Args: What a step computes
        strategy: How the workers' models stay in sync. "ddp": `DistributedDataParallel`, or `DistributedOptimizer` with
            Horovod. "fsdp": models and optimizer states are sharded over the workers. "none": the operator synchronizes
            them. None means "ddp".
        strategy_options: Dict of options for the strategy "fsdp". Allowed keys: `min_block_parameters`,
            `reshard_after_forward`, `mp_policy` and `offload_policy`.
        wrap_ddp: False means `strategy="none"`. Kept for older code.
        use_fp16: True for PyTorch's native mixed precision on GPUs, "apex" for Apex.
        precision: "fp32", "fp16", "bf16" (PyTorch's native mixed precision, on GPUs and CPUs) or "apex". Replaces
            `use_fp16`.
        split_batches: False: a loader's batch size applies to one worker. True: it applies to all workers together,
            like `config[BATCH_SIZE]`. Each batch is split over the workers as evenly as possible, and its size stays
            constant when the number of workers changes. Requires DDP. Default: False, and the log says what a batch is.
        micro_batch_size: Maximum number of samples of a split batch that a worker processes at once. A worker with more
            samples processes them in several batches and accumulates the gradients for one step. "auto" to halve the
            batches, and repeat the step, when a worker runs out of memory. See `docs/recipes/batch-size.md`.
        deterministic: True to get bitwise the same weights as a run on `num_workers` workers without failures, even if
            workers are lost or added. See `docs/operator.md`. Requires DDP and, on GPUs, deterministic kernels.
        accumulate_grad_batches: Number of batches to accumulate per optimizer step. The gradient equals that of one
            large batch.
        clip_grad_norm: Maximum total norm of an optimizer's gradients; None for no limit.
        clip_grad_value: Maximum absolute value of each gradient element; None for no limit.
        sync_batchnorm: True to compute batch norm statistics over the batches of all workers. Requires GPUs.
        compile: True to compile models with `torch.compile`, or a dict of options for `torch.compile`.
        activation_checkpointing: True to save memory by recomputing the elements of `ModuleList` and `Sequential` in
            the backward pass instead of storing their activations.

    Args: What follows a failure
        recovery: A `raysgd.Recovery` that defines how to handle failures: timeouts, whether surviving workers continue,
            and how often to take snapshots (copies of the workers' state to restart from).
        min_workers: Minimum number of workers. With fewer, training waits for resources.
        spare_workers: Number of extra workers that stand by to replace lost workers. Spares occupy resources.
            Meanwhile, they can validate while the group trains, with `validate(blocking=False)` or
            `fit(validate="async")`; each validation runs on one spare.

    Raises:
        ValueError, TypeError: An argument is invalid; nothing was started.
        ImportError: `backend`, `use_fp16` or `precision` needs a package that is not installed; nothing was started.
        RemovedNameError: An argument of an older version was passed.
        ReservationTimeoutError: Ray did not reserve the workers' resources in time. This error is a `TimeoutError`.
        WorkerError: The operator's `setup` raised an exception. The error is also an instance of that exception's
            class.

    Examples:
        >>> from raysgd.operators import ClassificationOperator  # doctest: +SKIP
        >>> with TorchTrainer(  # doctest: +SKIP
        ...     training_operator_cls=MyOperator, config={"lr": 0.1}, num_workers=2, split_batches=True
        ... ) as trainer:
        ...     for row in trainer.fit(5):
        ...         print(row["train_loss"], row["val_loss"])
    """

    num_gpus_per_worker: float
    use_fp16: bool | str
    precision: str | None
    strategy: str
    split_batches: bool
    micro_batch_size: int | Literal["auto"] | None
    deterministic: bool
    use_tqdm: bool
    add_dist_sampler: bool
    scheduler_step_freq: str | None
    seed: int | None

    def __init__(
        self,
        training_operator_cls: type[OperatorT],
        *,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        add_dist_sampler: bool = True,
        scheduler_step_freq: Literal["batch", "epoch", "manual"] | None = None,
        use_tqdm: bool = False,
        num_workers: int = 1,
        num_cpus_per_worker: float = 1,
        use_gpu: bool | Literal["auto"] = "auto",
        num_gpus_per_worker: float = 1,
        resources_per_worker: Mapping[str, float] | None = None,
        accelerator_type: str | None = None,
        placement_strategy: Literal["PACK", "SPREAD"] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        initialization_hook: Callable[[], Any] | None = None,
        backend: Literal["auto", "gloo", "nccl", "horovod"] = "auto",
        timeout_s: float | None = None,
        use_local: bool = False,
        detached: str | Detached | None = None,
        strategy: Literal["ddp", "fsdp", "none"] | None = None,
        strategy_options: Mapping[str, Any] | None = None,
        wrap_ddp: bool = True,
        use_fp16: bool | Literal["apex"] = False,
        precision: Literal["fp32", "fp16", "bf16", "apex"] | None = None,
        split_batches: bool | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        deterministic: bool = False,
        accumulate_grad_batches: int = 1,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        sync_batchnorm: bool = False,
        compile: bool | Mapping[str, Any] = False,
        activation_checkpointing: bool = False,
        recovery: Recovery = Recovery(),
        min_workers: int = 1,
        spare_workers: int = 0,
        **unknown: NoReturn,
    ) -> None:
        given = locals()
        num_workers = checks.check_num_workers(
            "num_workers", num_workers, hint="To run without Ray actors pass `use_local=True` with `num_workers=1`."
        )
        self.serialize_data_creation = arguments.take_former(unknown)
        arguments.check_place(num_workers, use_local)
        known = TorchTrainer.__init__.__annotations__
        checks.refuse_unknown("TorchTrainer", unknown, known, recovery=Recovery)
        arguments.check_operator_class(training_operator_cls)
        arguments.check_use_gpu(use_gpu, num_gpus_per_worker, backend)
        chosen_strategy = arguments.resolve_strategy(strategy, wrap_ddp)
        settings = chosen(
            TorchSettings,
            given,
            config=checks.check_config(config),
            use_gpu=False,
            strategy=chosen_strategy,
            use_horovod=backend == "horovod",
            step_options=chosen(StepOptions, given),
            fsdp_options=arguments.fsdp_options(strategy_options, chosen_strategy),
            batch_options=self._divide(
                chosen(
                    BatchOptions,
                    given,
                    split_batches=False if split_batches is None else split_batches,
                    num_shards=num_workers,
                )
            ),
        )
        group = chosen(
            GroupSettings,
            given,
            num_workers=num_workers,
            timeout_s=arguments.resolve_timeout(timeout_s, backend),
            placement=chosen(Placement, given),
        )
        arguments.check_spares(group, chosen_strategy)
        regroups = num_workers > 1 or settings.batch_options.is_auto
        has_room_to_grow = regroups and not use_local and group.recovery.in_place
        gpus = arguments.choose_gpus(use_gpu, group)
        group = replace(
            group,
            backend=gpus.backend,
            timeout_s=arguments.resolve_timeout(timeout_s, gpus.backend),
            num_gpus_per_worker=gpus.num_gpus or num_gpus_per_worker,
        )
        may_grow = has_room_to_grow and settings.keeps_survivors
        settings = replace(settings, use_gpu=gpus.num_gpus > 0, may_grow=may_grow)
        arguments.check_combination(settings, gpus, group)
        arguments.check_batch_size(settings, num_workers)
        show_options(self, settings.step_options)
        has_chosen = split_batches is not None
        super().__init__(group, settings, TorchFramework(group, settings), has_chosen_batches=has_chosen)
        arguments.tell_unused_gpus(use_gpu, gpus)

    if not TYPE_CHECKING:  # type checkers should see only `__init__` with its typed arguments

        @wraps(__init__, assigned=())  # `inspect.signature` then shows the arguments of `__init__`
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Create a trainer or the handle of a detached one, as `Detachable` does."""
            # Check here, because Python raises its own TypeError instead of running `__init__` if
            # `training_operator_cls` is missing.
            if not args and "training_operator_cls" not in kwargs and cls.__init__ is TorchTrainer.__init__:
                arguments.refuse_other_name(kwargs)
                arguments.take_former(kwargs)
            return super().__new__(cls, *args, **kwargs)

    _outlives_its_process = staticmethod(arguments.outlives_its_process)
    _settle = staticmethod(arguments.settle_gpus)

    def _divide(self, options: BatchOptions) -> BatchOptions:
        """Return the options for splitting a global batch, the batch of one step of all workers, among the workers.

        `raysgd.replay`, which repeats steps of a finished run, overrides this method to split batches as that run did.
        """
        return options

    @property
    def worker_callbacks(self) -> tuple[WorkerCallback, ...]:
        """The `WorkerCallback` objects that run in the workers during the current call to `fit`."""
        return self._life.settings.worker_callbacks

    @property
    def wrap_ddp(self) -> bool:
        """True if the strategy is "ddp". Kept for older code; `strategy` is its replacement."""
        return self.strategy == "ddp"

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the training state.

        The dict contains the epoch, the state that the operator's `state_dict` returned, and the states of the models,
        the optimizers, the schedulers, the gradient scaler, and a criterion with trainable parameters.
        """
        state = divided.whole(self._life.snapshot().shared_state, copy=True)
        del state[RESUME]
        return dict(state)

    def save(
        self,
        checkpoint: str | PathLike[str],
        blocking: bool = True,
        weights_only: bool = True,
        format: FileFormat = "torch",
        *,
        whole: bool = False,
        frozen: bool = False,
    ) -> Any:
        """Save the training state from the driver, atomically and with a checksum. `torch.load` can read the file.

        With `strategy="fsdp"`, `save` writes a folder with one file per worker, so that no process needs the whole
        state. The path must be on a file system that the driver and all workers share. `load` can read the folder into
        any number of workers. The folder is complete when `save` returns, even with `blocking=False`.

        Args:
            checkpoint: A path, or the URI of a file in cloud storage, such as `s3://bucket/last.pt`.
            blocking: False to return at once. The state is copied before the next call can change it, then sent to the
                driver and written in the background. If sending or writing fails, the next `save` or `shutdown` raises.
                If the worker with rank 0 is lost before it has sent the state, the file is not written: a message is
                logged, and `shutdown` raises unless a later `save` has succeeded.
            weights_only: False to allow arbitrary objects in the operator's own state. Load such a file with
                `load(..., weights_only=False)`.
            format: "torch" for the whole state, "safetensors" for the model weights only.
            whole: True to gather sharded models in the driver and write one file. This is always done for
                "safetensors" and URIs.
            frozen: True to include frozen parameters that the file omits by default, because the operator's
                `excludes_frozen_from_state` says that `setup` recreates them.

        Returns:
            The `checkpoint` argument.

        Raises:
            ImportError: safetensors is not installed.
            ValueError: The dict that the operator's `state_dict` returned contains an object that `load` would reject
                (the message names its key), or the URI does not name a file.
            OSError: The file could not be written. For a URI, the error is a `StorageError`. The training state is
                unaffected.
        """
        files.check_location("checkpoint", checkpoint)
        checks.refuse_text(blocking=blocking, weights_only=weights_only, whole=whole, frozen=frozen)
        framework.check_format(format)
        if self._life.facts.is_sharded and format == "torch" and not (whole or files.is_uri(checkpoint)):
            self._life.writer.wait()  # an earlier call with `blocking=False` may still be writing to the same path
            framework.save_folder(self._life.controller, checkpoint, weights_only)
            self._life.saves.note_file(files.shown(checkpoint))
            return checkpoint
        content = partial(framework.content_of, weights_only=weights_only, file_format=format)
        if frozen:
            content = partial(content, frozen=self._life.on_all(TorchRunner.remade_tensors, rank=0)[0])
        return self._life.save(checkpoint, content, blocking, self)

    def load(
        self,
        checkpoint: str | PathLike[str],
        weights_only: bool = True,
        *,
        strict: bool = True,
        parts: Sequence[str] | None = None,
    ) -> LoadReport | Any:
        """Load a checkpoint into all workers: a file or folder from `save`, or a file of `ray.util.sgd`.

        Args:
            checkpoint: A path or URI. A safetensors file has only the models; the rest of the state does not change.
            weights_only: False to unpickle arbitrary objects. Only use it with files that you trust.
            strict: False to load only the weights whose names and shapes match.
            parts: Parts of the state to load; the other parts do not change. Any of "models", "criterion",
                "optimizers", "schedulers", "precision", "operator" and "progress". Default: all parts, or only the
                models with `strict=False`.

        Returns:
            If only some parts were loaded, a report of what was loaded and what did not match. Otherwise None.

        Raises:
            FileNotFoundError: The file does not exist.
            StorageError: Cloud storage could not be reached. This error is an `OSError`.
            CheckpointCorruptedError: The file is truncated or was modified.
            ValueError: The file does not match the objects that the operator registered. The workers are
                unchanged.
        """
        files.check_location("checkpoint", checkpoint)
        checks.refuse_text(weights_only=weights_only)
        return framework.load(self._life, checkpoint, weights_only, framework.checked_parts(parts, strict), strict)

    def update_scheduler(self, metric: Any) -> None:
        """Call `step(metric)` of every registered scheduler, as `ReduceLROnPlateau` requires.

        Raises:
            NotRegisteredError: The operator registered no scheduler.
        """
        self._life.on_all(TorchRunner.update_schedulers, metric, changes_state=True, keeps_alike=True)

    def get_model(self, to_cpu: bool = False) -> Any:
        """Return the trained model without wrappers, or a list of models if several are registered.

        With `use_local=True`, the result is the live model, unless you pass `to_cpu=True` or the model is sharded.
        Otherwise, it is a copy.

        Args:
            to_cpu: True for a copy on the CPU. By default, the model is on a GPU if the workers use GPUs and this
                process has one.
        """
        is_local = self._life.controller.ensure_group().local_replica is not None
        is_sharded = self._life.facts.is_sharded
        copied = to_cpu or not is_local or is_sharded
        models = self._life.on_all(TorchRunner.models, copied, rank=None if is_sharded else 0)[0]
        if copied:
            models = [unpacked(model) for model in models]
        if self.use_gpu and torch.cuda.is_available() and not to_cpu:
            models = [model.cuda() for model in models]
        return models[0] if len(models) == 1 else models

    @classmethod
    def as_trainable(
        cls, *args: Any, override_tune_step: Callable[[Any, dict[str, Any]], Any] | None = None, **kwargs: Any
    ) -> type[Any]:
        """Return a trainable class for `ray.tune`, whose trials each create a trainer.

        The trainer's config is the `config` argument, updated with the config that Tune chose for the trial. These keys
        of the trial's config replace the trainer's arguments: `num_workers`, `num_cpus_per_worker`,
        `num_gpus_per_worker`, `use_gpu`, `use_local`, `resources_per_worker` and `accelerator_type`.

        Args:
            args: Rejected. Pass all arguments by name.
            override_tune_step: Function that runs one iteration of a trial. It gets the trainer and a dict with
                `iteration`, and returns the iteration's result. Default: call `train`, then `validate`.
            kwargs: Arguments of the trainer.

        Raises:
            MissingTuneError: Ray Tune is not installed. This error is both an `ImportError` and a `RuntimeError`.
            TypeError: Positional arguments were passed.
            ValueError: `override_tune_step` does not take two arguments.
        """
        from raysgd.torch.torch_trainable import make_trainable

        return make_trainable(cls, args, override_tune_step, kwargs)

    def restore(self, *args: Any) -> None:
        """Raise an error that says to use `load`. Older versions had this method.

        Raises:
            RemovedNameError: Always.
        """
        raise RemovedNameError("`TorchTrainer.restore` was renamed: use `load`.")


former_names(__name__)
