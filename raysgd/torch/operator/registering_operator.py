"""`RegisteringOperator`: the methods that `TrainingOperator` offers in `setup`, and views of the registered objects."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch

from raysgd.core.arguments import answer_mistakes
from raysgd.torch.operator.internals import TorchInternals
from raysgd.torch.operator.registrar import register_data
from raysgd.trainer.worker.operator import BaseOperator, ReadOnlyView

Models = TypeVar("Models")
Optimizers = TypeVar("Optimizers")
Criterion = TypeVar("Criterion")
Schedulers = TypeVar("Schedulers")

_REGISTER = "Pass what you make to `self.register` in `setup`, and keep what that returns."
_REGISTER_DATA = "Pass loaders to `self.register_data` in `setup`."
_PRECISION = "`TorchTrainer(precision=...)` chooses it."


class RegisteringOperator(BaseOperator):
    """Registers models, optimizers and data, and provides the device and the precision of the training."""

    train_loader: Any
    validation_loader: Any

    _raysgd: TorchInternals
    # Users' subclasses may read these attributes, because the operators of `ray.util.sgd` had them.
    _world_rank, _local_rank = ReadOnlyView("world.rank"), ReadOnlyView("world.local_rank")
    _is_distributed, _device = ReadOnlyView("world.is_distributed"), ReadOnlyView("context.device")
    _use_gpu, _use_fp16, _use_tqdm = (
        ReadOnlyView("use_gpu"),
        ReadOnlyView("fp16", _PRECISION),
        ReadOnlyView("context.settings.use_tqdm"),
    )
    _wrap_ddp, _add_dist_sampler = ReadOnlyView("context.wrap_ddp"), ReadOnlyView("context.settings.add_dist_sampler")
    _scheduler_step_freq = ReadOnlyView("scheduler_step_freq")
    _amp, _amp_scaler = ReadOnlyView("amp", _PRECISION), ReadOnlyView("scaler", _PRECISION)
    _original_models, _models = (
        ReadOnlyView("registered.original_models", _REGISTER),
        ReadOnlyView("registered.models", _REGISTER),
    )
    _optimizers, _schedulers = (
        ReadOnlyView("registered.optimizers", _REGISTER),
        ReadOnlyView("registered.schedulers", _REGISTER),
    )
    _criterion = ReadOnlyView("registered.criterion", _REGISTER)
    _train_loader = ReadOnlyView("data.train_loader", _REGISTER_DATA)
    _validation_loader = ReadOnlyView("data.validation_loader", _REGISTER_DATA)

    @overload
    def register(
        self,
        *,
        models: Models,
        optimizers: Optimizers,
        criterion: None = ...,
        schedulers: None = ...,
        ddp_args: dict[str, Any] | None = ...,
        apex_args: dict[str, Any] | None = ...,
    ) -> tuple[Models, Optimizers]: ...

    @overload
    def register(
        self,
        *,
        models: Models,
        optimizers: Optimizers,
        criterion: Criterion,
        schedulers: None = ...,
        ddp_args: dict[str, Any] | None = ...,
        apex_args: dict[str, Any] | None = ...,
    ) -> tuple[Models, Optimizers, Criterion]: ...

    @overload
    def register(
        self,
        *,
        models: Models,
        optimizers: Optimizers,
        criterion: None = ...,
        schedulers: Schedulers,
        ddp_args: dict[str, Any] | None = ...,
        apex_args: dict[str, Any] | None = ...,
    ) -> tuple[Models, Optimizers, Schedulers]: ...

    @overload
    def register(
        self,
        *,
        models: Models,
        optimizers: Optimizers,
        criterion: Criterion,
        schedulers: Schedulers,
        ddp_args: dict[str, Any] | None = ...,
        apex_args: dict[str, Any] | None = ...,
    ) -> tuple[Models, Optimizers, Criterion, Schedulers]: ...

    @answer_mistakes(
        "`self.model, self.optimizer, self.criterion = self.register(models=model, optimizers=optimizer, "
        "criterion=loss)`; loaders go into `self.register_data(train_loader=..., validation_loader=...)`"
    )
    def register(
        self,
        *,
        models: Any,
        optimizers: Any,
        criterion: Any = None,
        schedulers: Any = None,
        ddp_args: dict[str, Any] | None = None,
        apex_args: dict[str, Any] | None = None,
    ) -> Any:
        """Register models, optimizers, criterion and schedulers, which the library moves to the device and wraps.

        Args:
            models: A module, or a list or tuple of modules.
            optimizers: An optimizer, or a list or tuple of optimizers.
            criterion: Loss function that returns the mean over the samples of a batch. It is moved to the device. A
                criterion with trainable parameters is wrapped, saved and restored like a model.
            schedulers: A learning-rate scheduler, or a list or tuple of schedulers. Requires the trainer's
                `scheduler_step_freq`.
            ddp_args: Options for `DistributedDataParallel`, and `comm_hook`: a communication hook, or a tuple of the
                hook's state and the hook. Ignored without DDP.
            apex_args: Options for `apex.amp.initialize`.

        Returns:
            `(models, optimizers[, criterion][, schedulers])`, each in the same container type as the argument.

        Raises:
            InvalidRegistrationError: An object has the wrong type, or an optimizer has no parameters. Or there are
                several workers, and an optimizer has parameters that belong to no registered module.
            ValueError: `ddp_args` or `apex_args` is not a dict, or `schedulers` was passed without the trainer's
                `scheduler_step_freq`.
            TypeError: An unknown keyword argument was passed.
        """
        return self._raysgd.register(
            models=models,
            optimizers=optimizers,
            criterion=criterion,
            schedulers=schedulers,
            ddp_args=ddp_args,
            apex_args=apex_args,
        )

    @answer_mistakes("`self.register_data(train_loader=loader, validation_loader=another)`")
    def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None:
        """Register the data loaders.

        A `DataLoader` over a map-style dataset is sharded over the workers. Its sampler decides the order. Its
        `batch_size` applies to one worker or, with the trainer's `split_batches=True`, to all workers together. A
        `Stream` and a dataset of Ray Data are sharded, too. Any other iterable is not sharded: every worker reads all
        of it. With the trainer's `add_dist_sampler=False`, nothing is sharded, and streams are rejected.
        """
        data = self._raysgd.data = register_data(
            self._raysgd.context, train_loader, validation_loader, self._raysgd.as_batch
        )
        self.__dict__.setdefault("train_loader", data.train_loader)
        self.__dict__.setdefault("validation_loader", data.validation_loader)

    def rewrap(self) -> None:
        """Update the wrappers after you freeze or unfreeze parameters, or add parameter groups, outside of `setup`.

        All workers must call `rewrap` at the same time, between two batches: at the start of your own `train_epoch`, or
        through `trainer.apply_all_operators` between two calls. Workers that join later get the same changes. Saved
        files do not record the changes. If a new trainer loads such a file, its operator's `setup` must make the same
        changes.

        Raises:
            ValueError: The gradients of the trainable parameters cannot be averaged.
            RuntimeError: The workers train different parameters.
        """
        self._raysgd.rewrap()

    def _configure_ddp(
        self, models: list[torch.nn.Module], device_ids: list[int] | None, ddp_args: dict[str, Any]
    ) -> list[torch.nn.Module]:
        """Wrap models for distributed training, and return the wrappers. Override this method to wrap differently."""
        return [self._raysgd.parallel.wrap(model, device_ids, ddp_args) for model in models]

    def _configure_apex_amp(
        self, amp: Any, models: list[torch.nn.Module], optimizers: list[Any], apex_args: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Initialize Apex, and return its models and optimizers. Override this method to initialize it differently."""
        models, optimizers = amp.initialize(models, optimizers, **apex_args)
        return models, optimizers

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager for computing the forward pass and loss in the trainer's precision. No-op in fp32.

        The default methods run `forward` in this context manager. In your own `train_batch` or `validate_batch`, write
        `with self.autocast(): loss = ...`.
        """
        return self._raysgd.precision.forward()

    @property
    def device(self) -> torch.device:
        """The device to which the library moves models and batches."""
        return self._raysgd.context.device

    @property
    def device_ids(self) -> list[int] | None:
        """The `device_ids` argument for `DistributedDataParallel`; None on a CPU."""
        return self._raysgd.context.device_ids

    @property
    def use_fp16(self) -> bool | str:
        """True for PyTorch's mixed precision, "apex" for Apex, otherwise False. False before `register`."""
        return self._raysgd.fp16

    @property
    def use_fp16_native(self) -> bool:
        """True if PyTorch's native mixed precision is used."""
        return self._raysgd.fp16 is True

    @property
    def use_fp16_apex(self) -> bool:
        """True if the mixed precision of NVIDIA Apex is used."""
        return self._raysgd.fp16 == "apex"

    @property
    def use_tqdm(self) -> bool:
        """True if the trainer shows a progress bar."""
        return self._raysgd.context.settings.use_tqdm

    @property
    def scheduler_step_freq(self) -> str | None:
        """The trainer's `scheduler_step_freq`: when the library steps `self.scheduler`."""
        return self._raysgd.scheduler_step_freq
