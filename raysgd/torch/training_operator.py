"""`TrainingOperator`: the class that users subclass to define their model, data and training step.

The methods form a ladder. Each method does one job and calls the methods below it:

    train_epoch -> train_batch -> prepare_batch, forward, backward, optimizer_step
    validate    -> validate_batch -> prepare_batch, forward
    optimizer_step -> clip_grad_norm, clip_grad_value

Override the lowest method that covers your change. The library's methods above it call your override.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from raysgd.core.arguments import answer_mistakes
from raysgd.core.imports import lazy_names
from raysgd.torch.data import batches
from raysgd.torch.objects.criteria import accuracy, ignored_by, known
from raysgd.torch.objects.models import begin_training, to_device
from raysgd.torch.operator.internals import TorchInternals, weights_of
from raysgd.torch.operator.registrar import register_data
from raysgd.torch.operator.settings import OperatorContext
from raysgd.torch.step import schedulers
from raysgd.torch.step.gradients import backward_with
from raysgd.torch.step.schedulers import Plateau
from raysgd.trainer.messages.epochs import VALIDATES, bind_batch_info
from raysgd.trainer.worker.operator import BaseOperator, ReadOnlyView, is_stock, made_by_hand, required, rung
from raysgd.utils import BATCH_WEIGHT

if TYPE_CHECKING:
    from raysgd.torch.creator_operator import CreatorOperator
    from raysgd.torch.operators_for_tests import get_test_metrics_operator, get_test_operator

Models = TypeVar("Models")
Optimizers = TypeVar("Optimizers")
Criterion = TypeVar("Criterion")
Schedulers = TypeVar("Schedulers")

_REGISTER = "Pass what you make to `self.register` in `setup`, and keep what that returns."
_REGISTER_DATA = "Pass loaders to `self.register_data` in `setup`."
_PRECISION = "`TorchTrainer(precision=...)` chooses it."


class TrainingOperator(BaseOperator):
    """Base class that defines what to train and how. Every worker runs one instance.

    Subclasses must override `setup`: create the models, optimizers and loaders there, and pass them to `register` and
    `register_data`. With a single `self.model`, `self.optimizer` and `self.criterion`, nothing else is required. Do not
    override `__init__`.

    Examples:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Line(TrainingOperator):
        ...     def setup(self, config):
        ...         model = torch.nn.Linear(1, 1)
        ...         optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        ...         self.model, self.optimizer, self.criterion = self.register(
        ...             models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        ...         )
        ...         x = torch.linspace(0, 1, 64).reshape(-1, 1)
        ...         self.register_data(train_loader=DataLoader(TensorDataset(x, 2 * x), batch_size=8))
        >>> from raysgd import TorchTrainer
        >>> with TorchTrainer(training_operator_cls=Line, config={"lr": 0.1}, use_local=True) as trainer:
        ...     result = trainer.train()
        >>> result["num_samples"], result["epoch"]
        (64, 1)

    Attributes:
        world_size: Number of workers.
        timers: Timers of the current call to `train` or `validate`. `with self.timers.record("name"):` measures a block
            of code. With `profile=True`, the call's result contains the measured times.
        global_step: Number of global batches that the default `train_epoch` has trained on. A global batch is what all
            workers train on in one step. If a failure interrupts a step, `global_step` goes back to its value before
            that step.
        train_loader: The registered train loader. If it is sharded, it yields only this worker's batches.
        validation_loader: The registered validation loader. If it is sharded, it yields only this worker's batches.
        resumes_epochs: True if an epoch may continue after workers were lost or added, by calling `train_epoch` again
            with the remaining batches. False: restart from the last snapshot after every failure. None (default): True
            unless you override `train_epoch`. An override may set it to True if its only state between batches is
            state that the library or `state_dict` covers.
        warms_up: True if a new worker runs `train_batch` once on the first batch, so that its first real step is fast.
            Another worker's state then overwrites the registered objects. Other side effects of `train_batch` remain:
            check `batch_info.get("warm_up")` to avoid them, or set this to False.
        compares_ranks: True to raise `RanksDifferError` from training calls when the workers' weights differ. To
            compare only some models, set a tuple of them in `setup`.
        excludes_frozen_from_state: True if `setup` recreates all frozen parameters, such as a pretrained base model
            under an adapter, identically on every worker and in every run. Snapshots, checkpoints and the state sent to
            new workers then contain only the trained parameters, and digests to verify the frozen parameters. See
            `docs/huggingface.md`.
        scheduler_metric: Name of the epoch metric that `ReduceLROnPlateau` gets, with `scheduler_step_freq="epoch"`: a
            metric of `train_batch` or, in `fit`, a validation metric. None means `val_loss`.
    """

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

    scheduler_metric: str | None = None
    excludes_frozen_from_state: bool = False
    # Which state a worker copies before each batch, to undo the batch if a failure interrupts it. True: all state.
    # False: only the models' buffers, and frozen parameters that batches change. None: all state before the first batch
    # of a call. What happens in that batch decides what is copied before later batches.
    _needs_copies: bool | None = False

    _freezes_in_batches = False

    def __init__(self, config: dict[str, Any] | None = None, context: OperatorContext | None = None) -> None:
        if config is None or context is None:
            raise made_by_hand(type(self))
        super().__init__(config, TorchInternals(self, config, context))

    # ------------------------------------------------------------------------------------ for `setup`

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

    # ------------------------------------------------------------------------------------ the ladder

    @rung
    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """Train on all batches of `iterator` and return the averaged metrics.

        Args:
            iterator: This worker's batches. Train on each batch before you draw the next. Drawing the next batch, or
                returning, marks the step as done.
            info: The `info` dict passed to `trainer.train`, with entries that the library adds.
            num_steps: The `num_steps` argument of `trainer.train`.
            epoch_idx: Index of the epoch, from 0.

        Returns:
            A dict with `batch_count`, `num_samples`, and the mean and `last_<metric>` of each `train_batch` metric.
        """
        internals = self._raysgd
        for model in self._models_of("train_batch"):
            begin_training(model)
        info = {**internals.info_of_call(num_steps, epoch_idx), **(info or {})}
        validates = info.get(VALIDATES, False)
        by_batch, by_epoch = schedulers.schedulers_of(self, validates)
        meters, leg, train_batch = internals.take_meters(), internals.sync.leg, bind_batch_info(self.train_batch)
        for batch_idx, batch in enumerate(iterator, start=meters.num_batches):
            internals.begin_metrics()
            metrics = train_batch(batch, {**internals.info_of_batch(batch_idx), **info})
            internals.end_batch(metrics, batch)
            if by_batch and leg.plan.ends_step and not (internals.precision.has_skipped() or leg.batch.skipped):
                for scheduler in by_batch:
                    scheduler.step()
        meters.count_pending()
        summary = meters.summary()
        if by_epoch:
            schedulers.step_after_epoch(
                by_epoch, self.scheduler_metric, summary, internals.mean_over_workers, validates
            )
        return summary

    def _models_of(self, method: str) -> list[torch.nn.Module]:
        """Return the models whose mode the loop around a method sets.

        That is `self.model`. If there is none, and user code overrides the method, return all registered models.
        """
        if hasattr(self, "model") or is_stock(self, method):
            return [required(self, "model")]
        return [model for model in self._raysgd.registered.models if isinstance(model, torch.nn.Module)]

    def _plateaus(self, epoch: int) -> list[Plateau]:
        """Return the `ReduceLROnPlateau` schedulers to step after an epoch, with the metrics that they need.

        Args:
            epoch: Number of epochs completed, including this epoch.
        """
        return schedulers.plateaus_of(self)

    @rung
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train on one batch and step the optimizer. With gradient accumulation, only the last batch steps it.

        Args:
            batch: Either a sequence of the model inputs followed by the target, or a dict or dataclass. Entries of a
                dict or dataclass are passed to the model by keyword; the target is the entry with a name in
                `batches.TARGET_NAMES`.
            batch_info: A dict with `batch_idx`, `global_step`, `epoch_idx` (from 0), `scheduler_step`, `is_padding` and
                the entries of the `info` dict passed to `train_epoch`. A worker that runs out of samples before the
                others gets padding batches (`is_padding`), which repeat samples with weight 0. A new worker's warm-up
                batch has `warm_up=True`; its optimizer step does not affect training.

        Returns:
            Metrics of the batch: numbers, one-element tensors, or torchmetrics objects. Tensors are read when the
            epoch ends, so that the host does not wait for the device. Metrics are averaged with the weight
            `batch_weight` or, if it is missing, `num_samples`. `num_samples` is also summed.
        """
        internals = self._raysgd
        features, target = self.prepare_batch(batch)
        with self.timers.record("fwd"), internals.precision.forward():
            # The output is not kept, so that its memory is free during the backward pass.
            loss, weight = internals.parts_of_forward(self.forward(features, target))[1:]
        size = internals.size_of(features, target, weight)
        metrics = internals.report({"train_loss": loss.detach(), **size})
        with internals.gradients.acting_on_usual():
            with self.timers.record("grad"):
                if weight is None:
                    self.backward(loss)
                else:
                    backward_with(self, loss, weight)
            if internals.sync.leg.plan.ends_step:
                with self.timers.record("apply"):
                    self.optimizer_step()
        return metrics

    def prepare_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        """Split a batch into model inputs and target, and move both to the device."""
        features, target = batches.split_batch(batch)
        gpu = self._raysgd.gpu
        if gpu is None:
            return features, target
        moved = to_device(target, gpu)
        self._raysgd.loss_calls.note_copy(target, moved)
        return tuple(to_device(feature, gpu) for feature in features), moved

    def forward(self, features: Any, target: Any) -> Any:
        """Return the model's output and the mean loss over the samples. Runs in training and validation.

        The criterion computes the loss. Without a criterion, the model's output must contain a `loss`.

        An override may return only the loss. If the loss is a mean over other units, such as tokens or boxes, return
        the number of units as a third value. An override may also return a dict of metrics as the last value. These are
        reported like metrics that are passed to `self.log`.
        """
        model = required(self, "model")
        is_unnamed = len(features) != 1 or isinstance(features[0], torch.Tensor)
        output = model(*features) if is_unnamed else batches.call_model(model, features)
        criterion = getattr(self, "criterion", None)
        if criterion is None:
            loss = batches.own_loss(output)
            if loss is not None:
                return output, loss
            criterion = required(self, "criterion")
        return output, self._raysgd.loss_calls.call(criterion, batches.prediction(output), target)

    def backward(self, loss: torch.Tensor, *, optimizer: Any = None, weight: Any = None) -> None:
        """Compute the gradients of a loss. Do not call `zero_grad`: `backward` clears the previous step's gradients.

        Gradients of several losses of a batch accumulate until the batch's `optimizer_step`.

        Args:
            loss: The mean loss over the samples of the batch, or over the units that `weight` counts.
            optimizer: The optimizer or list of optimizers that the loss trains. Required if several are registered.
            weight: Nonnegative weight of the batch in the mean over all workers and all batches of the step, such as
                its number of tokens. Either all workers pass a weight or none does. Default: the number of samples, or
                the number of labels if the criterion is a PyTorch loss over labels.

        Raises:
            ValueError: It is unclear which optimizer the loss trains, the weight is invalid, or user code cleared the
                gradients of earlier batches of the step.
        """
        self._raysgd.gradients.backward(loss, optimizer, weight)

    @rung
    def optimizer_step(self, optimizer: Any = None) -> None:
        """Step the optimizer with gradients averaged over all workers' samples.

        Does nothing if the batch's weight is 0 on every worker. With gradient accumulation, it does nothing before the
        last batch of a step. An override is not called before that batch. It gets the averaged gradients, unscaled.

        Args:
            optimizer: The optimizer or list of optimizers to step. Required if several are registered.

        Raises:
            ValueError: It is unclear which optimizer to step.
        """
        self._raysgd.gradients.apply(optimizer)

    def accumulate_grad_batches(self, epoch_idx: int) -> int:
        """Return the number of batches to accumulate per optimizer step.

        The library calls this method at the start of each call to `train`, and again if the worker group changes during
        the call. The default is the trainer's argument with the same name. Override the method to change the number
        from epoch to epoch. All workers must return the same number.
        """
        return self._raysgd.context.settings.step_options.accumulate_grad_batches

    def clip_grad_norm(self, parameters: list[torch.Tensor], max_norm: float) -> torch.Tensor | None:
        """Clip the total norm of an optimizer's gradients. Only called if the trainer has `clip_grad_norm`.

        Returns:
            The norm before clipping, which the run's journal records. An override may return None.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value(self, parameters: list[torch.Tensor], max_value: float) -> None:
        """Clip each element of the gradients. Only called if the trainer has `clip_grad_value`."""
        torch.nn.utils.clip_grad_value_(parameters, max_value)

    @rung
    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate on all batches of `val_iterator` and return the averaged metrics.

        Do not run collectives here: workers may have different numbers of batches.
        """
        for model in self._models_of("validate_batch"):
            model.eval()
        with torch.no_grad():
            return self._raysgd.validated(val_iterator, info)

    @rung
    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch and return its metrics, including those of `measure_batch`.

        The other metrics are `val_loss`, its weight and, for classifiers, `val_accuracy` and its weight. `val_accuracy`
        is NaN if it is unclear how to interpret the output.
        """
        internals = self._raysgd
        output, target, comparisons, counted = internals.evaluate(batch)
        weight, ignored = counted.get(BATCH_WEIGHT), ignored_by(internals.criterion)
        right = accuracy(output, target, comparisons, weight, ignored)
        share, num_labels = known(right, internals.once, says_so=self.world_rank == 0)
        metrics = {"val_loss": counted["val_loss"], "val_accuracy": share, **counted}
        if right is not None and num_labels is None:  # omit the accuracy, because the model does not predict classes
            del metrics["val_accuracy"]
        return {**metrics, **weights_of(metrics, val_accuracy=num_labels), **self.measure_batch(output, target)}

    def measure_batch(self, output: Any, target: Any) -> dict[str, Any]:
        """Return additional metrics of a validation batch, which `validate_batch` reports. Empty unless overridden.

        Args:
            output: The predictions: the model's output, or the output's `logits` if it has them.
            target: The target that `prepare_batch` returned.
        """
        return {}

    def evaluate_batch(self, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Run the model once on a validation batch, for use in your own `validate_batch`.

        Returns:
            The arguments for `measure_batch` (predictions and target), and a dict with `val_loss` and its weight.
        """
        output, target, _, metrics = self._raysgd.evaluate(batch)
        return output, target, metrics

    # ------------------------------------------------------------------------------------ what the trainer chose

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

    @classmethod
    def from_creators(
        cls,
        model_creator: Callable[[dict[str, Any]], Any],
        optimizer_creator: Callable[[Any, dict[str, Any]], Any],
        data_creator: Callable[[dict[str, Any]], Any] | None = None,
        loss_creator: Any = None,
        scheduler_creator: Callable[[Any, dict[str, Any]], Any] | None = None,
        serialize_data_creation: bool = True,
    ) -> type[CreatorOperator]:
        """Create an operator class from creator functions.

        The class that `MyOperator.from_creators(...)` returns is a subclass of `MyOperator`. The `setup` of
        `MyOperator` runs after the creators and can use `self.model`, `self.optimizer` and so on.

        Args:
            model_creator: Called with `config`; returns the model or models.
            optimizer_creator: Called with the result of `model_creator` and `config`; returns the optimizer or
                optimizers.
            data_creator: Called with `config`; returns the train loader, or the train and validation loaders.
            loss_creator: A PyTorch loss class, or a function that is called with `config` and returns the criterion.
            scheduler_creator: Called with the result of `optimizer_creator` and `config`; returns the scheduler or
                schedulers.
            serialize_data_creation: True to run `data_creator` on the workers of a node one after the other, so that
                only the first worker downloads the data.

        Raises:
            ValueError: A creator cannot be called with its arguments.
        """
        from raysgd.torch.creator_operator import make_operator

        creators = {
            "model_creator": model_creator,
            "optimizer_creator": optimizer_creator,
            "data_creator": data_creator,
            "loss_creator": loss_creator,
            "scheduler_creator": scheduler_creator,
        }
        return make_operator(cls, creators, serialize_data_creation)

    @classmethod
    def from_ptl(
        cls, lightning_module_cls: type[Any], train_dataloader: Any = None, val_dataloader: Any = None
    ) -> type[TrainingOperator]:
        """Create an operator class from a `LightningModule` class. See `raysgd.torch.lightning_operator`.

        Args:
            lightning_module_cls: A `LightningModule` subclass from `lightning` or `pytorch_lightning`. Its constructor
                is called with `config=config`. If it has no `config` parameter, it gets the config entries that match
                its parameters.
            train_dataloader: Loader to use instead of the module's `train_dataloader`.
            val_dataloader: Loader to use instead of the module's `val_dataloader`.

        Raises:
            ImportError: Lightning is not installed.
            TypeError: The class is not a `LightningModule`, or a loader is a `LightningDataModule`.
        """
        from raysgd.torch.lightning_operator import make_operator

        return make_operator(cls, lightning_module_cls, train_dataloader, val_dataloader)


_FOR_TESTS = "raysgd.torch.operators_for_tests"  # programs for `ray.util.sgd` import its functions from this module
lazy_names(
    __name__,
    {
        "CreatorOperator": "raysgd.torch.creator_operator",  # imported lazily, because that module imports this one
        "get_test_metrics_operator": _FOR_TESTS,
        "get_test_operator": _FOR_TESTS,
    },
)


__all__ = [
    "CreatorOperator",
    "OperatorContext",
    "TrainingOperator",
    "get_test_metrics_operator",
    "get_test_operator",
]
