"""`TrainingOperator`: the class that users subclass to define a training.

The methods form a ladder. Each one does one thing and calls the next:

    train_epoch -> train_batch -> prepare_batch, forward, backward, optimizer_step
    validate    -> validate_batch -> prepare_batch, forward
    optimizer_step -> clip_grad_norm, clip_grad_value

Override the lowest method that changes what you want to change. The library does the rest.
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
from raysgd.torch.objects.modes import begin_training
from raysgd.torch.objects.moving import to_device
from raysgd.torch.operator.internals import TorchInternals, weights_of
from raysgd.torch.operator.registrar import register_data
from raysgd.torch.operator.settings import OperatorContext
from raysgd.torch.step import schedulers
from raysgd.torch.step.gradients import backward_with
from raysgd.torch.step.schedulers import Plateau
from raysgd.trainer.messages.epochs import VALIDATES, bind_batch_info
from raysgd.trainer.worker.operator import BaseOperator, ReadOnlyView, made_by_hand, required, rung
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
    """Defines a training by subclassing; every worker has one instance.

    Override `setup` (required): create models, optimizers and loaders there, and pass them to `register` and
    `register_data`. If there is one `self.model`, `self.optimizer` and `self.criterion`, you need nothing else. Do not
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
        timers: Timers of the current call; `with self.timers.record("name"):` adds one to `profile=True`.
        global_step: Number of global batches that the stock `train_epoch` has trained on. The last one counts as done
            only when the loop asks for the next batch; if a failure interrupts its step, `global_step` goes back.
        train_loader: The registered train loader, as this worker iterates over it.
        validation_loader: The registered validation loader, as this worker iterates over it.
        resumes_epochs: True if an epoch may continue after workers were lost or added, by calling `train_epoch` again
            with the remaining batches. None: True if `train_epoch` is the stock one. If you override it, you may set
            this to True, provided that it keeps nothing between batches except what the library or `state_dict` covers.
            False restarts from the last snapshot after every failure.
        warms_up: True if a new worker calls `train_batch` once on the first batch, so that it is fast when it steps in.
            The registered objects are then replaced by another worker's state. Other effects of `train_batch` remain:
            check `batch_info.get("warm_up")`, or set this to False.
        compares_ranks: True if training calls raise `RanksDifferError` when the weights of the workers differ; or a
            tuple of the models to compare, set in `setup`.
        remakes_frozen: True if `setup` makes all frozen parameters again, alike on every worker and in every run, such
            as a pretrained base for an adapter. Then snapshots, checkpoints and the state for a new worker contain only
            the trained parameters, and digests of the frozen ones, which are compared. See `docs/huggingface.md`.
        scheduler_metric: Name of the epoch metric for `ReduceLROnPlateau`, with `scheduler_step_freq="epoch"`: a metric
            of `train_batch`, or in `fit` one of the validation. None is `val_loss`.
    """

    scheduler_metric: str | None = None
    remakes_frozen: bool = False
    _needs_copies: bool | None = False  # before each batch, to undo it; None: the first batch of a call decides
    train_loader: Any
    validation_loader: Any

    _raysgd: TorchInternals
    _freezes_in_batches = False
    # Subclasses have read these names since the first version of the library.
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

    def __init__(self, config: dict[str, Any] | None = None, context: OperatorContext | None = None) -> None:
        if config is None or context is None:
            raise made_by_hand(type(self))
        super().__init__(config, TorchInternals(self, config, context))

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
            iterator: This worker's batches. Draw one, train on it, draw the next. A step counts as done when you draw
                the next batch, or return.
            info: The caller's `info`, with entries that the library adds.
            num_steps: The caller's `num_steps`.
            epoch_idx: Index of the pass over the data, from 0.

        Returns:
            `batch_count`, `num_samples`, and the mean and `last_<metric>` of each metric of `train_batch`.
        """
        internals = self._raysgd
        begin_training(required(self, "model"))
        info = {**internals.info_of_call(num_steps, epoch_idx), **(info or {})}
        validates, has_scheduler = info.get(VALIDATES, False), getattr(self, "scheduler", None) is not None
        by_batch, by_epoch = schedulers.schedulers_of(self, validates) if has_scheduler else ([], [])
        meters, leg, train_batch = internals.take_meters(), internals.parallel.leg, bind_batch_info(self.train_batch)
        for batch_idx, batch in enumerate(iterator, start=meters.num_batches):
            internals.begin_batch()
            metrics = train_batch(batch, {**internals.info_of_batch(batch_idx), **info})
            internals.end_batch(metrics, batch)
            if by_batch and leg.batch.is_boundary:
                schedulers.step_after_batch(by_batch, internals.precision, leg.batch)
        meters.count_held()
        summary = meters.summary()
        if by_epoch:
            schedulers.step_after_epoch(
                by_epoch, self.scheduler_metric, summary, internals.mean_over_workers, validates
            )
        return summary

    def _plateaus(self, epoch: int) -> list[Plateau]:
        """Return the schedulers that need a metric after this epoch, counted from 1. The validation may report it."""
        return schedulers.plateaus_of(self)

    @rung
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Take one optimizer step on one batch. With accumulation, step only on the last batch of several.

        Args:
            batch: A sequence of the inputs of the model and, as last element, the target. Or a dict or a dataclass,
                whose entries are passed to the model by keyword (the target has one of `batches.TARGET_NAMES`).
            batch_info: `batch_idx`, `global_step`, `epoch_idx` (index of the pass, from 0), `scheduler_step`,
                `is_padding` and the entries of `info`. If this worker has no samples left and others have, its batch is
                padding: it repeats samples with weight 0. In the warm-up of a new worker, there is also
                `warm_up=True`: the step does not count.

        Returns:
            Metrics of the batch: numbers, tensors of one element, or torchmetrics objects. Tensors are read when the
            epoch ends, so that the host does not wait for the device. Metrics are averaged with the weight
            `batch_weight`, or `num_samples` if there is none. `num_samples` is also added up.
        """
        internals = self._raysgd
        features, target = self.prepare_batch(batch)
        with self.timers.record("fwd"), internals.precision.forward():
            _, loss, weight = internals.parts_of_forward(self.forward(features, target))
        counts = internals.counts_of(features, target, weight)
        metrics = internals.report({"train_loss": loss.detach(), **counts})
        with internals.choice.acting_on_usual():
            with self.timers.record("grad"):
                if weight is None:
                    self.backward(loss)
                else:
                    backward_with(self, loss, weight)
            if internals.parallel.leg.batch.is_boundary:
                with self.timers.record("apply"):
                    self.optimizer_step()
        return metrics

    def prepare_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        """Split a batch into inputs and target, and move them to the device."""
        features, target = batches.split(batch)
        device = self._raysgd.context.device
        if device.type == "cuda":
            return tuple(to_device(feature, device) for feature in features), to_device(target, device)
        return features, target

    def forward(self, features: Any, target: Any) -> Any:
        """Return the model's output and the loss, a mean over the samples. Used in training and validation.

        The loss is that of the criterion, or without a criterion the `loss` in the model's output.

        An override may return the loss alone. If the loss is a mean over something else (tokens, boxes), return their
        number as a third value. A dict of metrics may follow as the last value; it is reported like `self.log`.
        """
        model = required(self, "model")
        is_unnamed = len(features) != 1 or isinstance(features[0], torch.Tensor)
        output = model(*features) if is_unnamed else batches.call(model, features)
        criterion = getattr(self, "criterion", None)
        if criterion is None:
            loss = batches.own_loss(output)
            if loss is not None:
                return output, loss
            criterion = required(self, "criterion")
        return output, self._raysgd.loss_calls.call(criterion, batches.prediction(output), target)

    def backward(self, loss: torch.Tensor, *, optimizer: Any = None, weight: Any = None) -> None:
        """Compute the gradients of a loss. Do not call `zero_grad`: this clears the gradients of the last step.

        Gradients of several losses of a batch add up until its `optimizer_step`.

        Args:
            loss: The mean over the samples of the batch, or over what `weight` counts.
            optimizer: The optimizer, or a list of the optimizers, that the loss is for. Needed if several are
                registered.
            weight: How much the batch counts in the mean over all batches of a step and all workers: a number from 0
                on, such as the number of tokens. All workers must pass a weight, or none. None: its number of samples,
                or of labels if the criterion is a PyTorch loss over labels.

        Raises:
            ValueError: It is unclear which optimizer the loss is for, a weight is invalid, or gradients were cleared.
        """
        internals = self._raysgd
        chosen = internals.choice.chosen("backward", optimizer)
        are_alone = len(internals.choice.registered) == 1
        bystanders = [] if are_alone else internals.choice.bystanders(optimizer, chosen)
        internals.gradients.compute(loss, chosen, bystanders, weight, internals.trained_parameters)

    @rung
    def optimizer_step(self, optimizer: Any = None) -> None:
        """Step the optimizer. Its gradients are the mean over all workers' samples.

        With accumulation, it does nothing before the last batch of a step. (The stock `train_batch` only calls it
        then.) It also does nothing if no worker's batch counts (`weight=0`).

        Args:
            optimizer: The optimizer to step, or a list of several. Needed if several are registered.

        Raises:
            ValueError: It is unclear which optimizer to step.
        """
        self._raysgd.gradients.apply(self._raysgd.choice.chosen("optimizer_step", optimizer))

    def accumulate_grad_batches(self, epoch_idx: int) -> int:
        """Return the number of batches in an optimizer step. Called once in each call of `train`.

        By default, it is the trainer's argument. Override it to change the number over time. All workers must return
        the same number.
        """
        return self._raysgd.context.settings.step_options.accumulate_grad_batches

    def clip_grad_norm(self, parameters: list[torch.Tensor], max_norm: float) -> torch.Tensor | None:
        """Clip the norm of all gradients of an optimizer together. Only called if the trainer has `clip_grad_norm`.

        Returns:
            The norm before, for the journal of the run. An override may return None.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value(self, parameters: list[torch.Tensor], max_value: float) -> None:
        """Clip each number in the gradients. Only called if the trainer has `clip_grad_value`."""
        torch.nn.utils.clip_grad_value_(parameters, max_value)

    @rung
    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate on all batches of `val_iterator` and return the averaged metrics.

        Workers may have different numbers of batches, so do not use collectives here.
        """
        internals = self._raysgd
        required(self, "model").eval()
        meters, validate_batch = internals.new_meters(), bind_batch_info(self.validate_batch)
        with torch.no_grad():
            for batch_idx, batch in enumerate(val_iterator):
                metrics = validate_batch(batch, {"batch_idx": batch_idx, **(info or {})})
                meters.update(*internals.values_and_weight(metrics, "validate_batch"))
        return meters.summary()

    @rung
    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch. Return `val_loss`, `val_accuracy` if the model predicts classes, and weights."""
        internals = self._raysgd
        output, target, comparisons, counted = internals.evaluate(batch)
        weight, ignored = counted.get(BATCH_WEIGHT), ignored_by(internals.criterion)
        right = accuracy(output, target, comparisons, weight, ignored)
        share, num_labels = known(right, internals.once, says_so=self.world_rank == 0)
        metrics = {"val_loss": counted["val_loss"], "val_accuracy": share, **counted}
        if right is not None and num_labels is None:  # nothing is classified
            del metrics["val_accuracy"]
        return {**metrics, **weights_of(metrics, val_accuracy=num_labels), **self.measure_batch(output, target)}

    def measure_batch(self, output: Any, target: Any) -> dict[str, Any]:
        """Return more metrics of a validation batch. Override it; `validate_batch` calls it and reports them.

        Args:
            output: The predictions: the model's output, or the `logits` in it.
            target: The target that `prepare_batch` returned.
        """
        return {}

    def evaluate_batch(self, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Compute a validation batch, for your own `validate_batch`. The model is called once.

        Returns:
            The output and the target for `measure_batch`, and a dict with `val_loss` and its weight.
        """
        output, target, _, metrics = self._raysgd.evaluate(batch)
        return output, target, metrics

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
        """Pass models, optimizers, criterion and schedulers to the library, which places, prepares and wraps them.

        Args:
            models: One module, or a list or tuple of several.
            optimizers: One optimizer or several.
            criterion: The loss, a mean over the samples of a batch. It is moved to the device. If it has trainable
                parameters, it is wrapped, saved and restored like a model.
            schedulers: One learning-rate scheduler or several. Needs the trainer's `scheduler_step_freq`.
            ddp_args: Options for `DistributedDataParallel`, and `comm_hook`: a communication hook, or a tuple of its
                state and the hook. Ignored without DDP.
            apex_args: Options for `apex.amp.initialize`.

        Returns:
            `(models, optimizers[, criterion][, schedulers])`, each in the kind of container that you passed.

        Raises:
            InvalidRegistrationError: An object is of the wrong kind. Or there are several workers, and an optimizer has
                parameters that belong to no registered module.
            ValueError: Options are no dict, or schedulers come without `scheduler_step_freq`.
            TypeError: An unknown keyword.
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
        """Pass the loaders to the library.

        A `DataLoader` over a map-style dataset is divided over the workers. Its sampler decides the order, and its
        `batch_size` is for one worker. Every worker reads all of any other iterable.
        """
        data = self._raysgd.data = register_data(
            self._raysgd.context, train_loader, validation_loader, self._raysgd.as_batch
        )
        self.__dict__.setdefault("train_loader", data.train_loader)
        self.__dict__.setdefault("validation_loader", data.validation_loader)

    def rewrap(self) -> None:
        """Call this after you freeze or unfreeze parameters, or add parameter groups, outside of `setup`.

        All workers must call it at the same time, between two batches: at the beginning of your own `train_epoch`, or
        with `trainer.apply_all_operators` between two calls. Later workers freeze and add the same. Files do not
        contain what is frozen or added, so your `setup` decides after `load`.

        Raises:
            ValueError: The gradients of the trainable parameters cannot be averaged.
            RuntimeError: The workers train different parameters.
        """
        self._raysgd.rewrap()

    def _configure_ddp(
        self, models: list[torch.nn.Module], device_ids: list[int] | None, ddp_args: dict[str, Any]
    ) -> list[torch.nn.Module]:
        """Wrap the models. Override this to wrap them differently."""
        return [self._raysgd.parallel.wrap(model, device_ids, ddp_args) for model in models]

    def _configure_apex_amp(
        self, amp: Any, models: list[torch.nn.Module], optimizers: list[Any], apex_args: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Initialize Apex. Override this to do so differently."""
        models, optimizers = amp.initialize(models, optimizers, **apex_args)
        return models, optimizers

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass and its loss in the trainer's precision. In fp32, it does nothing.

        The stock methods run `forward` in it. Use it in your own `train_batch` or `validate_batch`:
        `with self.autocast(): loss = ...`.
        """
        return self._raysgd.precision.forward()

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        return self._raysgd.context.device

    @property
    def device_ids(self) -> list[int] | None:
        """`device_ids` of `DistributedDataParallel`; None on a CPU."""
        return self._raysgd.context.device_ids

    @property
    def use_fp16(self) -> bool | str:
        """True or "apex" if mixed precision is used; False before `register`."""
        return self._raysgd.fp16

    @property
    def use_fp16_native(self) -> bool:
        """True if PyTorch's own mixed precision is used."""
        return self._raysgd.fp16 is True

    @property
    def use_fp16_apex(self) -> bool:
        """True if Apex is used."""
        return self._raysgd.fp16 == "apex"

    @property
    def use_tqdm(self) -> bool:
        """True if the trainer shows a progress bar."""
        return self._raysgd.context.settings.use_tqdm

    @property
    def scheduler_step_freq(self) -> str | None:
        """When the library steps `self.scheduler`: the trainer's argument."""
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
        """Make an operator class from creator functions.

        `Own.from_creators(...)` also has the methods of `Own`. The `setup` of `Own` runs after the creators, and finds
        their objects in `self.model`, `self.optimizer` and so on.

        Args:
            model_creator: Returns the model or models, given `config`.
            optimizer_creator: Returns the optimizer or optimizers, given what `model_creator` returned, and `config`.
            data_creator: Returns the train loader, or the train and the validation loader, given `config`.
            loss_creator: A loss class of PyTorch, or a function that returns the loss, given `config`.
            scheduler_creator: Returns the scheduler or schedulers, given what `optimizer_creator` returned, and
                `config`.
            serialize_data_creation: True to let the workers of a node create their data one after the other, so that
                only the first one downloads them.

        Raises:
            ValueError: A creator is not a function of the arguments that it is called with.
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
        """Make an operator class from a `LightningModule` class; see `raysgd.torch.lightning_operator`.

        Args:
            lightning_module_cls: The class, from `lightning` or `pytorch_lightning`. Its constructor gets
                `config=config`, or without such a parameter the entries of the config that it has parameters for.
            train_dataloader: Replaces the loader of the module's `train_dataloader`.
            val_dataloader: Replaces the loader of the module's `val_dataloader`.

        Raises:
            ImportError: Lightning is not installed.
            TypeError: The class is no `LightningModule`, or a loader is a `LightningDataModule`.
        """
        from raysgd.torch.lightning_operator import make_operator

        return make_operator(cls, lightning_module_cls, train_dataloader, val_dataloader)


_FOR_TESTS = "raysgd.torch.operators_for_tests"  # programs for the old library import these from here
lazy_names(
    __name__,
    {
        "CreatorOperator": "raysgd.torch.creator_operator",  # imports this module
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
