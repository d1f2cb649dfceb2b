"""`TorchTrainer`: the driver's handle on N replicas of a `TrainingOperator`.

A front end: it checks arguments, turns calls into requests for the engine, and merges what comes back. Workers, Ray and
failures are the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from raysgd import _arguments as checks
from raysgd.arrays.data_kinds import CallData, is_whole
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.compat.names import former_names
from raysgd.connections.horovod import HorovodConnection
from raysgd.connections.torch import TorchConnection
from raysgd.detached.cluster import start
from raysgd.detached.protocol import Detached
from raysgd.driver.trainer import ClassTrainer, show_options
from raysgd.engine.shared.connection import Connection
from raysgd.engine.shared.tracebacks import hide_library_frames
from raysgd.engine.snapshots import Snapshot
from raysgd.history.history import Kind
from raysgd.messages.batch_options import BatchOptions
from raysgd.messages.epochs import EpochAnswer, EpochRequest
from raysgd.messages.placement import Placement
from raysgd.messages.prediction_data import BatchRequest, Found
from raysgd.messages.recovery import Recovery
from raysgd.messages.settings import GroupSettings
from raysgd.storage import files
from raysgd.streams.source import check_stream_of_call
from raysgd.streams.stream import Stream
from raysgd.torch import constants
from raysgd.torch.checkpoints import divided_state
from raysgd.torch.data import call_data
from raysgd.torch.driver import arguments, epoch_checks, partial_loading, saving
from raysgd.torch.driver.partial_loading import LoadReport
from raysgd.torch.driver.progress_bar import epoch_bar
from raysgd.torch.driver.saving import FileFormat
from raysgd.torch.objects.moving import unpacked
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.step import schedulers
from raysgd.torch.torch_runner import TorchRunner
from raysgd.worker.operator import OperatorT
from raysgd.worker.state.replica_state import RESUME, place_in


@hide_library_frames
class TorchTrainer(ClassTrainer[OperatorT]):
    """Trains a `TrainingOperator` on one or many workers.

    Args: What is trained
        training_operator_cls: The operator class, not an instance.
        config: Passed to the operator. Under the key `BATCH_SIZE` it may hold the batch size of all workers together.
        seed: Where initial weights, the order of the data and random numbers come from; an integer, 0 or more. The
            global generators are seeded in each worker: alike before `setup`, then each worker's own.
        add_dist_sampler: Whether registered loaders over map-style datasets are divided over the workers.
        scheduler_step_freq: When the library steps the learning-rate scheduler: "batch", "epoch", or "manual" for
            never.
        use_tqdm: Whether to show a progress bar in `train`.

    Args: Where it runs
        num_workers: How many workers to train with. After failures there may be fewer for a while.
        num_cpus_per_worker: CPUs to reserve for each worker, and its number of threads.
        use_gpu: True reserves GPUs for each worker; "auto" does so if the driver sees one.
        num_gpus_per_worker: How many, with `use_gpu`. A part of one lets workers share it, over gloo.
        resources_per_worker: What else each worker needs of Ray's custom resources, such as `{"fast_disk": 1}`.
        accelerator_type: The kind of GPU that workers need, by the name that Ray has for it, such as "A100".
        placement_strategy: "PACK" puts workers on as few nodes as there is room on, "SPREAD" on as many. None packs
            workers with GPUs, so that most of their traffic stays inside a node, and spreads others.
        runtime_env: The environment of the workers' processes, as Ray takes it; None for that of the job. It does not
            apply to a worker in the driver.
        initialization_hook: Called without arguments in each worker process before anything else, to set environment
            variables for instance.
        backend: "nccl", "gloo", "auto" (NCCL where each worker has a GPU, else gloo), or "horovod", which has to be
            built first with `python -m raysgd.horovod.install`.
        timeout_s: Seconds that a collective may take. With NCCL the default comes from the environment variable
            NCCL_TIMEOUT_S.
        use_local: Run rank 0 in this very process. With `num_workers=1` no Ray is needed, and a debugger works.
        detached: A name, under which the trainer outlives this program, or a `raysgd.Detached`. What you get is a
            handle with the same methods. See `docs/detached.md`.

    Args: What a step computes
        strategy: How several workers are kept equal: "ddp" (`DistributedDataParallel`, or with Horovod its
            `DistributedOptimizer`), "fsdp" (models and optimizer states divided over the workers), "none" (the operator
            does it). None means "ddp".
        strategy_options: For "fsdp": `min_block_parameters`, `reshard_after_forward`, `mp_policy`, `offload_policy`.
        wrap_ddp: The older way to say `strategy="none"`.
        use_fp16: True for PyTorch's own mixed precision on GPUs, "apex" for Apex.
        precision: "fp32", "fp16", "bf16" (PyTorch's own mixed precision, on CPUs too) or "apex"; instead of `use_fp16`.
        split_batches: False: the batch size of a loader counts one worker. True: it counts all workers together,
            divided as evenly as can be and held constant when the number of workers changes; so is
            `config[BATCH_SIZE]`. With DDP.
        micro_batch_size: The most samples of a split batch that fit into a worker. One with a larger share takes it in
            several batches, whose gradients add up to one step.
        deterministic: Whether weights have the same bits whatever happens to workers, as on `num_workers` workers that
            nothing happens to; see `docs/operator.md`. With DDP. The kernels of GPUs have to be deterministic, too.
        accumulate_grad_batches: How many batches make an optimizer step; its gradient is that of one large batch.
        clip_grad_norm: Bound for the norm of the gradients of an optimizer, all together.
        clip_grad_value: Bound for each single number of the gradients.
        sync_batchnorm: Whether batch norms look at the batches of all workers. On GPUs.
        compile: Whether models are compiled by `torch.compile`; a dict holds options for it.
        activation_checkpointing: Whether the elements of `ModuleList` and `Sequential` are computed a second time in
            the backward pass instead of being kept, which saves memory.

    Args: What follows a failure
        recovery: Who waits for whom, limits of time, and snapshots; a `raysgd.Recovery`.
        min_workers: With fewer than these, wait for resources.
        spare_workers: How many more workers wait, ready, to step in for a lost one. Until then they validate while the
            others train, for `validate(blocking=False)` and `fit(validate="async")`: each validation runs on one of
            them. They hold resources.

    Raises:
        ValueError, TypeError: An argument is wrong; nothing was started.
        ImportError: `backend` or `use_fp16` asks for a package that is missing; nothing was started.
        DeprecationWarning: An argument that older versions of the API had.
        ReservationTimeoutError: The cluster did not grant the resources; a `TimeoutError`.
        WorkerError: The user's set-up failed; also of the class that it raised.

    Examples:
        >>> from raysgd.operators import ClassificationOperator  # doctest: +SKIP
        >>> options = {"num_workers": 2, "split_batches": True}
        >>> trainer = TorchTrainer(training_operator_cls=MyOperator, **options)  # doctest: +SKIP
        >>> for _ in range(5):  # doctest: +SKIP
        ...     print(trainer.train(), trainer.validate())
    """

    num_gpus_per_worker: float
    use_fp16: bool | str
    precision: str | None
    strategy: str
    split_batches: bool
    micro_batch_size: int | None
    deterministic: bool
    use_tqdm: bool
    add_dist_sampler: bool
    scheduler_step_freq: str | None
    seed: int | None
    _settings: TorchSettings
    _runner_cls = TorchRunner
    _leaves_epochs = _runs_worker_callbacks = True
    _divide_by_hand = "pass `add_dist_sampler=False`"

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
        split_batches: bool = False,
        micro_batch_size: int | None = None,
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
        num_workers = checks.check_num_workers(
            "num_workers", num_workers, hint="To run without Ray actors pass `use_local=True` with `num_workers=1`."
        )
        arguments.take_creators(unknown)
        arguments.check_place(num_workers, use_local)
        self.serialize_data_creation = arguments.take_others(unknown)
        known = TorchTrainer.__init__.__annotations__
        checks.refuse_unknown("TorchTrainer", unknown, known, recovery=Recovery)
        arguments.check_operator_class(training_operator_cls)
        asked, use_gpu = use_gpu, arguments.resolve_use_gpu(use_gpu)
        arguments.check_num_gpus(num_gpus_per_worker, backend, num_workers)
        chosen_backend = arguments.resolve_backend(backend, use_gpu and num_gpus_per_worker >= 1)
        chosen_strategy = arguments.resolve_strategy(strategy, wrap_ddp)
        settings = TorchSettings(
            training_operator_cls,
            checks.check_config(config),
            use_gpu=use_gpu,
            recovery=recovery,
            scheduler_step_freq=scheduler_step_freq,
            use_fp16=use_fp16,
            precision=precision,
            strategy=chosen_strategy,
            use_horovod=chosen_backend == "horovod",
            use_tqdm=use_tqdm,
            add_dist_sampler=add_dist_sampler,
            step_options=StepOptions(
                accumulate_grad_batches=accumulate_grad_batches,
                clip_grad_norm=clip_grad_norm,
                clip_grad_value=clip_grad_value,
                sync_batchnorm=sync_batchnorm,
                compile=compile,
                activation_checkpointing=activation_checkpointing,
            ),
            fsdp_options=arguments.fsdp_options(strategy_options, chosen_strategy),
            batch_options=BatchOptions(split_batches, micro_batch_size, deterministic, num_workers),
            seed=seed,
        )
        group = GroupSettings(
            num_workers=num_workers,
            backend=chosen_backend,
            timeout_s=arguments.resolve_timeout(timeout_s, chosen_backend),
            num_cpus_per_worker=num_cpus_per_worker,
            num_gpus_per_worker=num_gpus_per_worker,
            placement=Placement(resources_per_worker, accelerator_type, placement_strategy, runtime_env),
            initialization_hook=initialization_hook,
            use_local=use_local,
            recovery=recovery,
            min_workers=min_workers,
            spare_workers=spare_workers,
        )
        arguments.check_spares(group, chosen_strategy)
        has_room_to_grow = num_workers > 1 and not use_local and group.recovery.in_place
        settings = replace(settings, may_grow=has_room_to_grow and settings.keeps_survivors)
        arguments.check_combination(settings)
        arguments.check_batch_size(settings, num_workers)
        show_options(self, settings.step_options)
        super().__init__(group, settings)
        self._shows_progress = use_tqdm
        arguments.warn_of_unused_gpus(asked)

    if not TYPE_CHECKING:  # type checkers take the arguments and the class from `__init__`

        @wraps(__init__, assigned=())  # so the signature stays the one of `__init__`
        def __new__(cls, *args: Any, detached: str | Detached | None = None, **kwargs: Any) -> Any:
            """Return a trainer of this program or, with `detached`, the handle on one that outlives it."""
            if not args and "training_operator_cls" not in kwargs and cls.__init__ is TorchTrainer.__init__:
                arguments.refuse_other_name(kwargs)  # without the class, Python does not get as far as `__init__`
                arguments.take_creators(kwargs)
            if detached is None:
                return super().__new__(cls)
            asked = kwargs.get("use_gpu", "auto")
            kwargs["use_gpu"] = arguments.resolve_use_gpu(asked)  # the trainer's process has none itself
            handle = start(cls, detached, args, kwargs, is_lasting=arguments.outlives_its_process(kwargs))
            arguments.warn_of_unused_gpus(asked)
            return handle

    @property
    def worker_callbacks(self) -> tuple[WorkerCallback, ...]:
        """The callbacks that `fit` has in the workers while it runs."""
        return self._settings.worker_callbacks

    @property
    def wrap_ddp(self) -> bool:
        """True if models are wrapped in `DistributedDataParallel`; the older way to ask for `strategy`."""
        return self.strategy == "ddp"

    def _make_connection(self) -> Connection:
        if self.backend == "horovod":
            return HorovodConnection(self.timeout_s, self.recovery.form_timeout_s)
        may_grow = self._settings.may_grow
        return TorchConnection(self.backend, self.timeout_s, self.recovery.form_timeout_s, joins_alone=may_grow)

    @property
    def _keeps_survivors(self) -> bool:
        keeps_survivors: bool = self._settings.keeps_survivors
        return keeps_survivors

    @property
    def _renews_survivors(self) -> bool:
        return self.strategy == "fsdp"

    @property
    def _reservation_timeout_s(self) -> float:
        return constants.SGD_PLACEMENT_GROUP_TIMEOUT_S

    def _check_dataset(self, dataset: Any, training: bool, name: str = "dataset") -> None:
        if isinstance(dataset, Stream):
            check_stream_of_call(dataset, name, self._settings.obstacle_of_streams)
            return
        steps_apart = training and self.num_workers > 1 and not self._facts.is_synchronous
        options = self._settings.batch_options
        divides = training and (self.num_workers > 1 or options.deterministic or options.micro_batch_size is not None)
        global_option = options.global_option if divides else ""
        arguments.check_dataset(dataset, name, steps_apart=steps_apart, global_option=global_option)

    def _goes_on_with(self, dataset: Any) -> bool:
        return is_whole(call_data.kind_of(dataset))

    @contextmanager
    def _shown(self) -> Iterator[None]:
        with epoch_bar() as show, self._listeners.listening(show):
            yield

    def _check_answers(self, kind: Kind, answers: Sequence[EpochAnswer], asked: EpochRequest) -> None:
        if kind == "train" and self._facts.is_synchronous:
            epoch_checks.check_alike(answers)
        epoch_checks.warn_of_nothing(kind, answers, asked.num_steps)

    def _after_evaluation(self) -> None:
        self._controller.snapshots.touch_ranks()  # it may have drawn random numbers, which `save` keeps

    @property
    def _call_data_of(self) -> Callable[[Any, Mapping[str, Any]], CallData | None]:
        return call_data.call_data_of

    def _to_predict(self, data: Any, asked: BatchRequest) -> Found:
        return call_data.source_to_predict(data, asked)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: epoch, operator, models, optimizers, schedulers, and of mixed precision."""
        state = divided_state.whole(self._snapshot().shared_state, copy=True)
        del state[RESUME]
        return dict(state)

    def _load_state(self, state: dict[str, Any]) -> None:
        saving.load_state(self._controller, state)

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
        """Write the state to a file of the driver, atomically, with a checksum. `torch.load` reads it too.

        With `strategy="fsdp"` it writes a folder, in which each worker has a file: no process needs the whole state.
        All workers and the driver have to see its path. `load` reads it into any number of workers.

        Args:
            checkpoint: The path, or the URI of a file in a store, such as `s3://bucket/last.pt`.
            blocking: False returns at once. The state is copied before the next call can change it, then sent and
                written in the background. An error is raised by the next `save` or by `shutdown`. If rank 0 is lost
                meanwhile, the file is not written: the log says so, and `shutdown` raises if no later `save` has made
                up for it.
            weights_only: False lets the operator's own state hold any object; such a file needs `load(...,
                weights_only=False)`.
            format: "torch" for the whole state, "safetensors" for the weights of the models alone.
            whole: Whether to gather divided models in the driver and write one file. So it is in any case with
                "safetensors", and with a URI. A folder is written when `save` returns, also without `blocking`.
            frozen: Whether the file also holds frozen parameters that `setup` makes again (`remakes_frozen`).

        Returns:
            `checkpoint`.

        Raises:
            ImportError: safetensors is not installed.
            ValueError: The operator's own state could not be loaded back; the message names the key. Or the URI is
                not one of a file.
            OSError: The file could not be written; a `StorageError` for a URI. The state is kept.
        """
        files.check_location("checkpoint", checkpoint)
        checks.refuse_text(blocking=blocking, weights_only=weights_only, whole=whole, frozen=frozen)
        saving.check_format(format)
        if self._facts.is_sharded and format == "torch" and not (whole or files.is_uri(checkpoint)):
            self._writer.wait()  # an earlier file of this name may be on its way
            saving.save_folder(self._controller, checkpoint, weights_only)
            return checkpoint
        content = partial(saving.content_of, weights_only=weights_only, file_format=format)
        if frozen:
            content = partial(content, frozen=self._on_all(TorchRunner.remade_tensors, rank=0)[0])
        if blocking:
            self._saves.write(checkpoint, content(self._snapshot()))
        else:
            self._saves.submit(checkpoint, self._newest_snapshot(), content, self)
        return checkpoint

    def _save_snapshot(self, checkpoint: str, snapshot: Snapshot) -> None:
        self._saves.write(checkpoint, saving.content_of(snapshot, True, "torch"))

    def _place_in(self, snapshot: Snapshot) -> tuple[int, int]:
        return place_in(divided_state.outline(snapshot.shared_state))

    def load(
        self,
        checkpoint: str | PathLike[str],
        weights_only: bool = True,
        *,
        strict: bool = True,
        parts: Sequence[str] | None = None,
    ) -> LoadReport | Any:
        """Load what `save` wrote, a file or a folder, or a file of the old library, into all workers.

        Args:
            checkpoint: The path or the URI. A file of safetensors has models only, and the rest stays as it is.
            weights_only: False also unpickles arbitrary objects. Only for files that you trust.
            strict: False loads the weights that fit by name and shape, and by default nothing else.
            parts: What to load of the file, the rest stays as it is: some of "models", "criterion", "optimizers",
                "schedulers", "precision", "operator", "progress". Default: all, and with `strict=False` the models.

        Returns:
            What was loaded and what did not fit, if only a part was loaded; else None.

        Raises:
            FileNotFoundError: There is no such file.
            StorageError: A store could not be reached. An `OSError`.
            CheckpointCorruptedError: The file is truncated or was changed.
            ValueError, KeyError: The file does not fit; the workers are as they were.
        """
        files.check_location("checkpoint", checkpoint)
        checks.refuse_text(weights_only=weights_only)
        chosen = partial_loading.checked_parts(parts, strict)
        return saving.load(checkpoint, weights_only, chosen, strict, self._controller, self._saves, self._snapshot)

    def _check_reload(self, training_operator_cls: Any) -> None:
        arguments.check_operator_class(training_operator_cls)
        if self._facts.is_sharded or self.backend == "horovod":
            what = '`backend="horovod"`' if self.backend == "horovod" else '`strategy="fsdp"`'
            raise ValueError(f"`reload` cannot work with {what}: save, and load into a new trainer with the new class.")

    def _load_snapshot(self, snapshot: Snapshot) -> None:
        saving.load_snapshot(self._controller, snapshot)

    def update_scheduler(self, metric: Any) -> None:
        """Step every registered scheduler with `metric`, as `ReduceLROnPlateau` wants it."""
        self._schedule(TorchRunner.update_schedulers, metric)

    def _after_validation(self, trained: Mapping[str, Any], validated: Mapping[str, Any]) -> bool:
        metrics = self._facts.plateau_metrics
        values = schedulers.values_after_validation(metrics, trained, validated) if metrics else None
        if values:
            self._schedule(TorchRunner.step_plateaus, values)
        return bool(values)

    def _schedule(self, function: Callable[..., Any], value: Any) -> None:
        """Let all workers set their learning rates by the same value."""
        self._on_all(function, value, changes_state=True, keeps_alike=True)

    def get_model(self, to_cpu: bool = False) -> Any:
        """The trained model, or a list of models, without any wrapper.

        From remote workers it is a copy; with `use_local=True` it is the live model, unless `to_cpu` asks for a copy
        or the model is sharded.
        """
        is_local = self._controller.ensure_group().local_replica is not None
        is_sharded = self._facts.is_sharded
        copied = to_cpu or not is_local or is_sharded
        models = self._on_all(TorchRunner.models, copied, rank=None if is_sharded else 0)[0]
        if copied:
            models = [unpacked(model) for model in models]
        if self.use_gpu and torch.cuda.is_available() and not to_cpu:
            models = [model.cuda() for model in models]
        return models[0] if len(models) == 1 else models

    def _checked_config(self, config: Mapping[str, Any] | None) -> dict[str, Any]:
        checked = super()._checked_config(config)
        arguments.check_batch_size(replace(self._settings, config=checked), self.max_replicas)
        return checked

    @classmethod
    def as_trainable(
        cls, *args: Any, override_tune_step: Callable[[Any, dict[str, Any]], Any] | None = None, **kwargs: Any
    ) -> type[Any]:
        """A class for `ray.tune`: each trial has such a trainer, with the trial's config merged into `config`.

        `num_workers`, `num_cpus_per_worker`, `num_gpus_per_worker`, `use_gpu` and `use_local` in it replace arguments.

        Args:
            args: Refused: the constructor takes names only.
            override_tune_step: `(trainer, info)` -> the result of a step. Default: `train`, then `validate`.
            kwargs: For the constructor.

        Raises:
            MissingTuneError: Ray Tune is not installed; an `ImportError` and a `RuntimeError`.
            ValueError: `override_tune_step` does not take two arguments.
        """
        from raysgd.torch.torch_trainable import make_trainable

        return make_trainable(cls, args, override_tune_step, kwargs)

    def restore(self, *args: Any) -> None:
        """Retired.

        Raises:
            DeprecationWarning: Always.
        """
        raise DeprecationWarning("`TorchTrainer.restore` was renamed: use `load`.")


former_names(__name__)
