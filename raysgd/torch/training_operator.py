"""`TrainingOperator`: the class that users subclass to say what is trained, on what, and how.

The methods form a ladder; each rung does one thing and calls the next one:

    train_epoch -> train_batch -> prepare_batch, forward, backward, optimizer_step
    validate    -> validate_batch -> prepare_batch, forward
    optimizer_step -> clip_grad_norm, clip_grad_value

Override the lowest rung that changes what you want to change; the library keeps doing the rest.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raysgd._meters import AverageMeterCollection, as_weight
from raysgd._timers import TimerCollection
from raysgd.engine.types import World
from raysgd.exceptions import InvalidRegistrationError, NotRegisteredError
from raysgd.replicas.epochs import bind_batch_info
from raysgd.torch import batches, registration
from raysgd.torch.accuracy import accuracy, compared_by, watching
from raysgd.torch.blocks import checkpoint_activations
from raysgd.torch.constants import (
    NUM_STEPS,
    SCHEDULER_STEP,
    SCHEDULER_STEP_BATCH,
    SCHEDULER_STEP_EPOCH,
    USE_FP16,
)
from raysgd.torch.ddp import DDP
from raysgd.torch.ddp_hooks import COMM_HOOK
from raysgd.torch.metric_objects import capture
from raysgd.torch.modes import begin_training
from raysgd.torch.parallel import NoParallel, unwrap
from raysgd.torch.precision import Precision
from raysgd.torch.sampling import ShardedLoader, Unsharded, shard_loader
from raysgd.torch.settings import TorchSettings
from raysgd.utils import BATCH_WEIGHT, IS_PADDING, NUM_SAMPLES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OperatorContext:
    """The place of one operator among its replicas, and the objects that it works with."""

    settings: TorchSettings
    world: World
    device: torch.device
    precision: Precision = field(default_factory=Precision)
    parallel: NoParallel = field(default_factory=NoParallel)


class TrainingOperator:
    """Defines a training by subclassing; every worker has one instance.

    Override `setup` (required): create models, optimizers and loaders there, and hand them to `register` and
    `register_data`. With a single `self.model`, `self.optimizer` and `self.criterion` nothing else is needed. Do not
    override `__init__`.

    Example:
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
        timers: Timers of the running call; `with self.timers.record("name"):` adds one to `profile=True`.
        global_step: Batches trained on by the stock `train_epoch`.
        train_loader: The registered train loader, as this worker iterates over it.
        validation_loader: The registered validation loader, as this worker iterates over it.
        resumes_epochs: Whether an epoch may continue after workers were lost or added, by calling `train_epoch`
            again with the batches that are left. None: yes if `train_epoch` is the stock one. An operator with a
            `train_epoch` of its own may set it to True if that keeps nothing between batches but what the library or
            `state_dict` knows; False makes every loss start from the last snapshot.
        warms_up_standby: Whether a standby worker calls `train_batch` once on the first batch, so that it is fast when
            it steps in. Attributes are put back afterwards. Files and logs are not: check `batch_info.get("warm_up")`
            before you write, or set this to False.
        scheduler_metric: Name of the metric of `train_batch` whose mean over an epoch a `ReduceLROnPlateau` goes by,
            with `scheduler_step_freq="epoch"`.
    """

    resumes_epochs: bool | None = None
    warms_up_standby: bool = True
    scheduler_metric: str | None = None

    def __init__(self, config: dict[str, Any], context: OperatorContext) -> None:
        self._config = config
        self._context = context
        self._world_rank = context.world.rank
        self._local_rank = context.world.local_rank
        self._is_distributed = context.world.is_distributed
        self._device = context.device
        self._use_gpu = context.device.type == "cuda"
        self._use_fp16: bool | str = False
        self._use_tqdm = context.settings.use_tqdm
        self._wrap_ddp = isinstance(context.parallel, DDP)
        self._add_dist_sampler = context.settings.add_dist_sampler
        self._scheduler_step_freq = context.settings.scheduler_step_freq
        self._precision = context.precision
        self._parallel = context.parallel
        self._amp: Any = None
        self._amp_scaler: Any = None
        self._latest_metrics: dict[str, Any] = {}
        self._meters_to_fill: AverageMeterCollection | None = None
        self._acting: Any = None  # the optimizer that stock code is about to use
        self._warned_of_weight = self._warned_of_nothing = False
        self._has_warned_of_accuracy = self._has_warned_of_schedulers = False
        self._is_clipped = self._has_clipped = False
        self._step_handles: list[Any] = []
        self.world_size = context.world.size
        self.timers = TimerCollection()
        self.global_step = 0
        self.setup(config)

    # ------------------------------------------------------------------------------------------------ to override

    def setup(self, config: dict[str, Any]) -> None:
        """Creates everything and registers it. Runs once in each worker, inside the process group.

        Args:
            config: The trainer's `config`, with the batch size under `BATCH_SIZE` already divided by the workers.
        """
        raise NotImplementedError("Override `setup` to create and register models and optimizers.")

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """Trains on all batches of `iterator` and returns the averaged metrics.

        Args:
            iterator: This worker's batches. Draw one, train on it, draw the next.
            info: What the caller passed as `info`, and the entries that the library adds.
            num_steps: The caller's `num_steps`.
            epoch_idx: Index of the pass over the data, from 0.

        Returns:
            `batch_count`, `num_samples`, and for each metric of `train_batch` its mean and `last_<metric>`.
        """
        begin_training(self._require("model"))
        info = {**self._own_info(num_steps, epoch_idx), **(info or {})}
        schedulers = self._checked_schedulers()
        meters, self._meters_to_fill = self._meters_to_fill or self._new_meters(), None
        step, train_batch = self._parallel.step, bind_batch_info(self.train_batch)
        for batch_idx, batch in enumerate(iterator, start=meters.num_batches):
            batch_info = {**self._batch_info(batch_idx), **info}
            metrics = train_batch(batch, batch_info)
            if not step.is_padding:
                self._compare_weights(metrics)
            if step.is_boundary:
                step.confirm()
                meters.count_held()
                if self.scheduler_step_freq == SCHEDULER_STEP_BATCH:
                    self._step_schedulers_of_batch(schedulers)
            if not step.is_padding:
                count = meters.update if step.is_boundary else meters.hold
                count(*self._checked(metrics))
            self.global_step += 1
        meters.count_held()
        summary = meters.summary()
        if self.scheduler_step_freq == SCHEDULER_STEP_EPOCH:
            self._step_schedulers_of_epoch(schedulers, summary)
        return summary

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Takes one optimizer step on one batch; with accumulation, on the last of several.

        Args:
            batch: A sequence whose last element is the target and whose others are the inputs of the model; or a dict,
                which is passed to the model by keyword (its target is under one of `batches.TARGET_NAMES`).
            batch_info: `batch_idx`, `global_step`, `is_padding` and the entries of `info`. A batch is padding where
                this worker has no samples left and repeats some, with weight 0, because the others have. In the
                warm-up of a standby worker also `warm_up=True`: the step does not count.

        Returns:
            Metrics of the batch: numbers, tensors of one element (these are not read before the epoch ends, so the host
            never waits for the device), or torchmetrics objects. `num_samples` is the weight in the average;
            `batch_weight`, if there is one, is that instead, and `num_samples` is only added up.
        """
        features, target = self.prepare_batch(batch)
        with self.timers.record("fwd"), self._precision.forward():
            _, loss, weight = batches.parts_of_forward(self.forward(features, target))
        with self._acting_on(self._require("optimizer")):
            with self.timers.record("grad"):
                self.backward(loss) if weight is None else self._backward_with(loss, weight)
            if self._parallel.step.is_boundary:
                with self.timers.record("apply"):
                    self.optimizer_step()
        return {"train_loss": loss.detach(), NUM_SAMPLES: _num_samples(features, target), **_weight_entry(weight)}

    def prepare_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        """Splits a batch into inputs and target and brings them to the device."""
        features, target = batches.split(batch)
        if self.use_gpu:
            return tuple(to_device(feature, self.device) for feature in features), to_device(target, self.device)
        return features, target

    def forward(self, features: Sequence[Any], target: Any) -> tuple[Any, ...]:
        """Returns the output of the model and the loss, the mean over the samples. Used in training and validation.

        The loss is that of the criterion; without one, that which the model has put into its output as `loss`.
        An override may return the loss alone.
        Where the loss is the mean over something else (tokens, boxes), return how many of these there are as a third.
        """
        output = batches.call(self._require("model"), features)
        loss = batches.own_loss(output) if getattr(self, "criterion", None) is None else None
        if loss is not None:
            return output, loss
        return output, self._require("criterion")(batches.prediction(output), target)

    def backward(self, loss: torch.Tensor, *, optimizer: Any = None, weight: Any = None) -> None:
        """Clears the gradients, unless there are some to add to, and computes new ones.

        Args:
            loss: The mean over the samples of the batch; with a weight the mean over what that counts.
            optimizer: The optimizer that the loss is for, or a list of all those that it is for. Needed where several
                are registered.
            weight: How much the batch counts in the mean over all batches of a step and all workers: a number from 0
                on, such as the number of tokens. All workers have to give one, or none. None: its samples.

        Raises:
            ValueError: It is unknown which optimizer the loss is for, or the weight is invalid.
            RuntimeError: It is not known which batch the loss is of.
        """
        chosen = self._chosen("backward", optimizer)
        cleared = [*chosen, *self._bystanders(optimizer, chosen)]
        step = self._parallel.step
        own = None if weight is None else as_weight("weight", weight)
        if not step.keeps_gradients(cleared if step.window == 1 else chosen, own):
            for each in cleared:
                each.zero_grad()
        if own is None:
            self._precision.backward(self._parallel.weighted(loss, chosen[0]), chosen[0])
            return
        counting = 0.0 if step.is_padding else own
        with self._parallel.weighting(loss, chosen, counting, self._trained_parameters()) as weighted:
            self._precision.backward(weighted, chosen[0])
        if step.window == 1:
            self._complete(cleared)

    def optimizer_step(self, optimizer: Any = None) -> None:
        """Steps the optimizer with the gradients, the mean over all workers' samples by now.

        With accumulation it does nothing before the last batch of a step, and the stock `train_batch` does not call it
        before. It does nothing either where no worker's batch counted (`weight=0`).

        Args:
            optimizer: The optimizer to step, or a list of them. Needed where several are registered.

        Raises:
            ValueError: It is not known which optimizer to step.
        """
        chosen = self._chosen("optimizer_step", optimizer)
        if self._parallel.step.is_boundary:
            for each in chosen:
                self._apply_gradients(each)

    def accumulate_grad_batches(self, epoch_idx: int) -> int:
        """How many batches make an optimizer step: what the trainer was told. Asked once in each call of `train`.

        Override it to change the number over time; all workers have to answer alike.
        """
        return self._context.settings.step_options.accumulate_grad_batches

    def clip_grad_norm(self, parameters: list[torch.Tensor], max_norm: float) -> None:
        """Clips the norm of all gradients of an optimizer together; only where the trainer was given a bound."""
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value(self, parameters: list[torch.Tensor], max_value: float) -> None:
        """Clips each number of the gradients by itself; only where the trainer was given a bound."""
        torch.nn.utils.clip_grad_value_(parameters, max_value)

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluates on all batches of `val_iterator` and returns the averaged metrics.

        Ranks may have different numbers of batches, so nothing in here may be a collective.
        """
        self._require("model").eval()
        meters, validate_batch = self._new_meters(), bind_batch_info(self.validate_batch)
        with torch.no_grad():
            for batch_idx, batch in enumerate(val_iterator):
                metrics = validate_batch(batch, {"batch_idx": batch_idx, **(info or {})})
                self._count(meters, metrics)
        return meters.summary()

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluates one batch: `val_loss`, `val_accuracy` (how often the prediction is the target) and weight."""
        features, target = self.prepare_batch(batch)
        criterion = getattr(self, "criterion", getattr(self, "_criterion", None))
        with self.timers.record("eval_fwd"), self._precision.forward(), watching(criterion) as comparisons:
            output, loss, weight = batches.parts_of_forward(self.forward(features, target))
        output = batches.prediction(output)
        if type(self).forward is TrainingOperator.forward:
            comparisons += compared_by(criterion, output, target)
        return {
            "val_loss": loss.detach(),
            "val_accuracy": self._known(accuracy(output, target, comparisons)),
            NUM_SAMPLES: _num_samples(features, target),
            **_weight_entry(weight),
        }

    def state_dict(self) -> Any:
        """State of your own for checkpoints and recovery; what is registered is taken care of. Return CPU data."""
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes over what `state_dict` returned, which may be None."""

    def world_changed(self) -> None:
        """Called on every worker after the number of workers has changed under it, with the new `world_size`.

        For what `setup` computed from the number of workers, such as a learning rate. A worker that steps in has run
        `setup`; one that stayed has not run it again.
        """

    # ------------------------------------------------------------------------------------------------ to call in setup

    def register(
        self,
        *,
        models: Any,
        optimizers: Any,
        criterion: Any = None,
        schedulers: Any = None,
        ddp_args: dict[str, Any] | None = None,
        apex_args: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> Any:
        """Hands models, optimizers, criterion and schedulers to the library, which places, prepares and wraps them.

        Args:
            models: One module, or a list or tuple of them.
            optimizers: One optimizer or several.
            criterion: The loss, the mean over the samples of a batch; moved to the device if it can be. One with
                parameters to train is wrapped, saved and restored like a model.
            schedulers: One learning-rate scheduler or several; needs the trainer's `scheduler_step_freq`.
            ddp_args: Options for `DistributedDataParallel`, and `comm_hook`: a communication hook, or a tuple of its
                state and the hook. Nothing else than DDP uses them.
            apex_args: Options for `apex.amp.initialize`.
            **unknown: Refused, with advice.

        Returns:
            `(models, optimizers[, criterion][, schedulers])`, each in the container it was given in.

        Raises:
            InvalidRegistrationError: Something is of the wrong kind, or an optimizer of several workers has parameters
                that belong to nothing else that is registered.
            ValueError: Options are no dict, or schedulers come without `scheduler_step_freq`.
            TypeError: An unknown keyword.
        """
        _refuse_unknown(unknown)
        ddp_args, apex_args = _options("ddp_args", ddp_args), _options("apex_args", apex_args)
        model_parts, optimizer_parts = registration.models_of(models), registration.optimizers_of(optimizers)
        scheduler_parts, criterion = registration.schedulers_of(schedulers), registration.criterion_of(criterion)
        if scheduler_parts is not None and self.scheduler_step_freq is None:
            raise ValueError(
                '`register(schedulers=...)` needs `TorchTrainer(scheduler_step_freq=...)`: pass "batch" or "epoch" '
                "to have "
                'the library step `self.scheduler`, or "manual" to step it yourself.'
            )
        placed = [self._build(self._place(model)) for model in model_parts.items]
        self._criterion = self._place(criterion) if criterion is not None else None
        self._check_parameters(optimizer_parts.items, [*placed, self._criterion])
        own_of_criterion = registration.own_parameters(self._criterion, placed)
        prepared, optimizers = self._precision.prepare(
            placed,
            optimizer_parts.items,
            lambda amp, models, optimizers: self._configure_apex_amp(amp, models, optimizers, apex_args),
        )
        self._warn_of_models_left_out(prepared)
        self._original_models = prepared
        self._optimizers = [self._parallel.wrap_optimizer(optimizer) for optimizer in optimizers]
        self._use_fp16 = self._precision.flag
        self._amp, self._amp_scaler = self._precision.namespace, self._precision.scaler
        if self._wrap_ddp:
            self._models = self._configure_ddp(prepared, self.device_ids, ddp_args)
        else:
            self._models = [self._parallel.wrap(model, self.device_ids, {}) for model in prepared]
        self._take_criterion_in(own_of_criterion, ddp_args)
        self._parallel.rebind_optimizers(self._optimizers)
        self._watch_steps()
        self._compile()
        self._schedulers = scheduler_parts.items if scheduler_parts is not None else []
        result = [model_parts.mirror(self._models), optimizer_parts.mirror(self._optimizers)]
        if self._criterion is not None:
            result.append(self._criterion)
        if scheduler_parts is not None:
            result.append(scheduler_parts.mirror(self._schedulers))
        return tuple(result)

    def _check_parameters(self, optimizers: Sequence[Any], parts: Sequence[Any]) -> None:
        """Refuses, or with one worker warns about, optimizers that train what is not averaged or saved."""
        if self._is_distributed and not self._parallel.synchronizes:
            return  # the user keeps the replicas equal
        found = registration.outsiders(optimizers, [part for part in parts if isinstance(part, torch.nn.Module)], self)
        if not found:
            return
        words = (
            "`register(optimizers=...)` got an optimizer of parameters that belong to no registered model and not to "
            f"the criterion: {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}."
        )
        way_out = (
            "Make them part of a model or of the criterion (`model.scale = torch.nn.Parameter(...)`), or pass the "
            "module that holds them in `models`, too."
        )
        if self._is_distributed:
            harm = "Their gradients would not be averaged over the workers, and nothing would save them."
            raise InvalidRegistrationError(f"{words} {harm} {way_out}")
        logger.warning("%s Nothing saves them, and with several workers they are refused. %s", words, way_out)

    def _take_criterion_in(self, own: Sequence[torch.nn.Parameter], ddp_args: dict[str, Any]) -> None:
        """Treats a criterion with parameters of its own as a model."""
        self._original_criterion: torch.nn.Module | None = None
        self._own_criterion: torch.nn.Module | None = None
        if not own:
            return
        assert isinstance(self._criterion, torch.nn.Module), "nothing else has parameters"
        if any(parameter.requires_grad for parameter in own):
            self._original_criterion = self._criterion
        # Without the communication hook: its state is that of one model.
        options = {name: value for name, value in ddp_args.items() if name != COMM_HOOK} if self._wrap_ddp else {}
        self._criterion = self._own_criterion = self._parallel.wrap(self._criterion, self.device_ids, options)

    @property
    def _trained(self) -> list[torch.nn.Module]:
        """What is trained and saved, without wrappers: the models, and a criterion with parameters behind them."""
        return [*getattr(self, "_original_models", ()), *_present(getattr(self, "_original_criterion", None))]

    @property
    def _wrapped(self) -> list[torch.nn.Module]:
        """The same, with wrappers, and a criterion all of whose parameters are frozen, too."""
        return [*getattr(self, "_models", ()), *_present(getattr(self, "_own_criterion", None))]

    def _warn_of_models_left_out(self, prepared: Sequence[torch.nn.Module]) -> None:
        kept = {id(unwrap(model)) for model in prepared}
        if any(id(unwrap(model)) not in kept for model in getattr(self, "_original_models", None) or ()):
            logger.warning(
                "`register` was called again: what it was given before is not trained together, saved or restored any "
                "more. Pass all models at once, as a tuple: `register(models=(a, b), optimizers=(...))`"
            )

    def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None:
        """Hands the loaders to the library.

        A `DataLoader` over a map-style dataset is divided over the workers, in the order that it asks for itself; its
        `batch_size` is that of one worker. Any other iterable is used as it is, by every worker.
        """
        registration.check_loader("train_loader", train_loader)
        registration.check_loader("validation_loader", validation_loader)
        self._train_loader, self._train_data = self._divide(train_loader, training=True)
        self._validation_loader, self._validation_data = self._divide(validation_loader, training=False)
        self.__dict__.setdefault("train_loader", self._train_loader)
        self.__dict__.setdefault("validation_loader", self._validation_loader)

    def _divide(self, loader: Any, *, training: bool) -> tuple[Any, ShardedLoader | Unsharded | None]:
        if loader is None:
            return None, None
        if not self._add_dist_sampler:
            return loader, Unsharded(loader, "`add_dist_sampler=False`", warn=False)
        world = self._context.world
        data = shard_loader(loader, rank=world.rank, world_size=world.size, training=training, pin_memory=self.use_gpu)
        if isinstance(data, Unsharded) and data.warn and world.is_distributed and world.rank == 0:
            logger.warning(
                "the %s loader is not divided over the workers (%s): each worker reads all of it",
                "train" if training else "validation",
                data.reason,
            )
        return data.loader, data

    def _place(self, part: Any) -> Any:
        return part.to(self.device) if self.use_gpu and hasattr(part, "to") else part

    def _build(self, model: torch.nn.Module) -> torch.nn.Module:
        """What is done to a model before it is wrapped. The names in its state stay as they are."""
        options = self._context.settings.model_options
        if options.sync_batchnorm and self._is_distributed:
            model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if options.activation_checkpointing:
            checkpoint_activations(model)
        return model

    def _compile(self) -> None:
        """Compiles in place, so that nothing gets another name or identity."""
        chosen = self._context.settings.model_options.compile
        if chosen is False:
            return
        for model in self._models:
            model.compile(**(chosen if isinstance(chosen, Mapping) else {}))

    def _configure_ddp(
        self, models: list[torch.nn.Module], device_ids: list[int] | None, ddp_args: dict[str, Any]
    ) -> list[torch.nn.Module]:
        """Wraps the models; override to wrap them in another way."""
        return [self._parallel.wrap(model, device_ids, ddp_args) for model in models]

    def _configure_apex_amp(
        self, amp: Any, models: list[torch.nn.Module], optimizers: list[Any], apex_args: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Initialises Apex; override to do so in another way."""
        models, optimizers = amp.initialize(models, optimizers, **apex_args)
        return models, optimizers

    # ------------------------------------------------------------------------------------------------ to call anywhere

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for a forward pass and its loss in the trainer's precision; in fp32 it does nothing.

        The stock methods do this around `forward`. Use it in a `train_batch` or `validate_batch` of your own:
        `with self.autocast(): loss = ...`.
        """
        return self._precision.forward()

    # ------------------------------------------------------------------------------------------------ to read

    @property
    def config(self) -> dict[str, Any]:
        """The config, with the batch size under `BATCH_SIZE` divided by the workers."""
        return self._config

    @property
    def world_rank(self) -> int:
        """Rank among all workers; 0 when alone."""
        return self._world_rank

    @property
    def local_rank(self) -> int:
        """Rank among the workers of this node."""
        return self._local_rank

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return self._device

    @property
    def device_ids(self) -> list[int] | None:
        """What `DistributedDataParallel` wants as `device_ids`: None on a CPU."""
        return [self.device.index or 0] if self.device.type == "cuda" else None

    @property
    def use_gpu(self) -> bool:
        """Whether the trainer requested a GPU and there is one."""
        return self._use_gpu

    @property
    def use_fp16(self) -> bool | str:
        """Whether mixed precision is at work; False before `register`."""
        return self._use_fp16

    @property
    def use_fp16_native(self) -> bool:
        """Whether PyTorch's own mixed precision is at work."""
        return self._use_fp16 is True

    @property
    def use_fp16_apex(self) -> bool:
        """Whether Apex is at work."""
        return self._use_fp16 == "apex"

    @property
    def use_tqdm(self) -> bool:
        """Whether the trainer shows a progress bar."""
        return self._use_tqdm

    @property
    def scheduler_step_freq(self) -> str | None:
        """When the library steps `self.scheduler`."""
        return self._scheduler_step_freq

    # ------------------------------------------------------------------------------------------------ constructors

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
        """Makes an operator class out of creator functions.

        Args:
            model_creator: `config` -> model or models.
            optimizer_creator: What the model creator returned, `config` -> optimizer or optimizers.
            data_creator: `config` -> train loader, or train and validation loader.
            loss_creator: A loss class of PyTorch, or `config` -> loss.
            scheduler_creator: What the optimizer creator returned, `config` -> scheduler or schedulers.
            serialize_data_creation: Lets the workers of a node create their data one after the other, so that only the
                first one downloads.

        Raises:
            ValueError: The model or optimizer creator is not callable.
        """
        for name, creator in (("model_creator", model_creator), ("optimizer_creator", optimizer_creator)):
            if not callable(creator):
                raise ValueError(f"`{name}={creator!r}`: need a function that takes the config (see `from_creators`).")
        creators = {
            "_model_creator": model_creator,
            "_optimizer_creator": optimizer_creator,
            "_data_creator": data_creator,
            "_loss_creator": loss_creator,
            "_scheduler_creator": scheduler_creator,
        }
        members = {name: staticmethod(creator) if creator else None for name, creator in creators.items()}
        members["_serialize_data_creation"] = serialize_data_creation  # type: ignore[assignment]
        return type("CustomCreatorOperator", (CreatorOperator,), members)

    @classmethod
    def from_ptl(
        cls, lightning_module_cls: type[Any], train_dataloader: Any = None, val_dataloader: Any = None
    ) -> type[TrainingOperator]:
        """Makes an operator class out of a `LightningModule` class; see `raysgd.torch.lightning_operator`.

        Args:
            lightning_module_cls: Of `lightning` or `pytorch_lightning`. It is given `config=config` if it takes that.
            train_dataloader: Trained on instead of what the module's `train_dataloader` returns.
            val_dataloader: Evaluated on instead of what the module's `val_dataloader` returns.

        Raises:
            ImportError: Lightning is not installed.
            TypeError: It is no such class.
        """
        from raysgd.torch.lightning_operator import make_operator

        return make_operator(cls, lightning_module_cls, train_dataloader, val_dataloader)

    # ------------------------------------------------------------------------------------------------ for the library

    def _require(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise NotRegisteredError(
                f"The stock methods need `self.{name}`: set it in `setup` from what `register` returns, or "
                "override the method "
                f"that uses it (`{type(self).__name__}` does neither)."
            ) from None

    def _begin_call(self) -> None:
        self._has_clipped = False
        self._precision.begin_call()

    def _take_place(self, world: World) -> None:
        self._context = replace(self._context, world=world)
        self._world_rank, self._local_rank = world.rank, world.local_rank
        self._is_distributed, self.world_size = world.is_distributed, world.size

    @contextmanager
    def _acting_on(self, optimizer: Any) -> Iterator[None]:
        """Says which optimizer `backward` and `optimizer_step` are for, to overrides without such an argument too."""
        before, self._acting = self._acting, optimizer
        try:
            yield
        finally:
            self._acting = before

    def _chosen(self, method: str, given: Any) -> list[Any]:
        """The optimizers that a rung is to act on."""
        if given is not None:
            chosen = list(given) if isinstance(given, list | tuple) else [given]
            if not chosen or not all(hasattr(each, "zero_grad") and hasattr(each, "step") for each in chosen):
                raise ValueError(
                    f"`optimizer={given!r}`: pass an optimizer that `register` returned, or a list of them."
                )
            return chosen
        if self._acting is not None:
            return [self._acting]
        num_registered = len(getattr(self, "_optimizers", ()))
        if num_registered > 1:
            arguments = "loss, " if method == "backward" else ""
            raise ValueError(
                f"`self.{method}` was called without `optimizer`, and {num_registered} optimizers are registered: pass "
                f"the one that it is for, as in `self.{method}({arguments}optimizer=self.optimizer)`, or a list of "
                "them. The gradients of the others would add up."
            )
        return [self._require("optimizer")]

    def _bystanders(self, given: Any, chosen: list[Any]) -> list[Any]:
        """Optimizers that stock code does not step, but whose gradients its one loss is to be the only source of."""
        if given is not None:
            return []
        registered = getattr(self, "_optimizers", ())
        return [each for each in registered if each is not chosen[0]] if len(registered) > 1 else []

    def _trained_parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for part in self._trained for parameter in part.parameters())

    def _backward_with(self, loss: torch.Tensor, weight: Any) -> None:
        """Calls the rung with what `forward` returned."""
        if not _takes(self.backward, "weight"):
            raise TypeError(
                f"`{type(self).__name__}.forward` returned a weight, but its `backward` does not take one: write "
                "`def backward(self, loss, **options)` and pass the options on to `super().backward(loss, **options)`."
            )
        self.backward(loss, weight=weight)

    def _apply_gradients(self, optimizer: Any) -> None:
        """Steps one optimizer, all of whose gradients are there."""
        step = self._parallel.step
        if step.window > 1:
            self._complete_gradients(optimizer)
        if not step.is_left_out(optimizer):
            self._clip_gradients(optimizer)
            self._step_prepared(optimizer)
        step.stepped(optimizer)

    def _step_prepared(self, optimizer: Any) -> None:
        """Steps an optimizer whose gradients are clipped already."""
        self._is_clipped = True
        try:
            self._precision.step(optimizer)
        finally:
            self._is_clipped = False

    def _watch_steps(self) -> None:
        """Lets the trainer's options act, or be missed, also where user code steps an optimizer by itself."""
        for handle in self._step_handles:
            handle.remove()
        hooked = [each for each in self._optimizers if hasattr(each, "register_step_pre_hook")]
        self._step_handles = [each.register_step_pre_hook(self._before_step) for each in hooked]

    def _misses_clipping(self) -> bool:
        """Whether a bound for gradients was not used in this call, and user code may have stepped past it."""
        is_hooked = len(self._step_handles) == len(getattr(self, "_optimizers", ()))
        return self._context.settings.step_options.clips and not self._has_clipped and not is_hooked

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in each step of an optimizer, from any caller."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._check_gradients(optimizer)
            return None

        def compute() -> Any:
            loss = closure()
            self._check_gradients(optimizer)
            return loss

        return (optimizer, compute, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def _check_gradients(self, optimizer: Any) -> None:
        if all(parameter.grad is None for parameter in self._precision.parameters(optimizer)):
            return  # such a step changes nothing: some programs take one ahead of a scheduler
        self._precision.check_use()
        if not self._is_clipped and self._context.settings.step_options.clips:
            _unscale_for_step(optimizer)
            self._clip(optimizer)

    def _complete(self, optimizers: Sequence[Any]) -> None:
        """Does at the end of a backward pass what there is to do for a step of one batch."""
        for optimizer in optimizers:
            self._complete_gradients(optimizer)
        for optimizer in optimizers:
            self._parallel.step.stepped(optimizer)

    def _complete_gradients(self, optimizer: Any) -> None:
        """Makes of the gradients of several batches what one batch of all their samples would have given.

        Where nothing in them counts, they are cleared, so that a step of the optimizer changes nothing.
        """
        step, parameters = self._parallel.step, self._precision.parameters(optimizer)
        if step.is_unexchanged(optimizer):
            self._parallel.exchange(parameters)
        correction = step.correction(optimizer)
        if correction == 0.0:
            step.leave_out(optimizer)
            self._warn_of_nothing()
        for parameter in parameters:
            if correction == 0.0:
                parameter.grad = None
            elif correction != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(correction)

    def _clip_gradients(self, optimizer: Any) -> None:
        if self._context.settings.step_options.clips:
            self._precision.unscale(optimizer)
            self._clip(optimizer)

    def _clip(self, optimizer: Any) -> None:
        options, self._has_clipped = self._context.settings.step_options, True
        parameters = [each for each in self._precision.parameters(optimizer) if each.grad is not None]
        if options.clip_grad_norm is not None:
            self.clip_grad_norm(parameters, options.clip_grad_norm)
        if options.clip_grad_value is not None:
            self.clip_grad_value(parameters, options.clip_grad_value)

    def _finish_window(self) -> None:
        """At the end of a call: steps what is left of a window, where the loop ended before the window did."""
        step = self._parallel.step
        if not step.is_pending:
            return
        step.is_boundary = True
        for optimizer in self._optimizers:
            if step.waits_for(optimizer):
                with self._acting_on(optimizer):
                    arguments = (optimizer,) if _takes(self.optimizer_step, "optimizer") else ()
                    self.optimizer_step(*arguments)

    def _warn_of_nothing(self) -> None:
        if not self._warned_of_nothing:
            self._warned_of_nothing = True
            logger.warning(
                "nothing counts in a step: all workers gave `weight=0`. The optimizer does not step then. Later steps "
                "like this one are not reported"
            )

    def _compare_weights(self, metrics: Any) -> None:
        """Warns once where metrics are averaged by a weight, and gradients are not."""
        if self._warned_of_weight or not isinstance(metrics, Mapping) or BATCH_WEIGHT not in metrics:
            return
        weight = as_weight(BATCH_WEIGHT, metrics[BATCH_WEIGHT])
        if not any(math.isclose(weight, given, rel_tol=1e-6) for given in self._parallel.step.weights):
            self._warned_of_weight = True
            logger.warning(
                "`%s.train_batch` returned `batch_weight` %s, and no backward pass of the batch had that weight. It "
                "averages metrics, not gradients: to average these too, call `self.backward(loss, weight=...)` with it",
                type(self).__name__,
                weight,
            )

    def _checked_schedulers(self) -> list[Any]:
        """What the stock `train_epoch` steps: `self.scheduler`, which may be several."""
        own, freq = getattr(self, "scheduler", None), self.scheduler_step_freq
        schedulers = [] if own is None else list(own) if isinstance(own, list | tuple) else [own]
        has_plateau = any(isinstance(each, ReduceLROnPlateau) for each in schedulers)
        lacks_metric = freq == SCHEDULER_STEP_EPOCH and self.scheduler_metric is None
        if has_plateau and (lacks_metric or freq == SCHEDULER_STEP_BATCH):
            raise ValueError(
                f'`scheduler_step_freq="{freq}"`: `ReduceLROnPlateau` needs a metric of an epoch. Pass "epoch", and '
                'name a metric of `train_batch` in your operator, as in `scheduler_metric = "train_loss"`. To go by '
                'a metric of the validation, pass "manual" and call `trainer.update_scheduler(result["val_loss"])`.'
            )
        return schedulers

    def _step_schedulers_of_batch(self, schedulers: Sequence[Any]) -> None:
        has_stepped = not (schedulers and (self._precision.has_skipped() or self._parallel.step.is_idle))
        for scheduler in schedulers if has_stepped else ():
            scheduler.step()

    def _step_schedulers_of_epoch(self, schedulers: Sequence[Any], metrics: Mapping[str, Any]) -> None:
        for scheduler in schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(self._value_for_scheduler(metrics))
            else:
                scheduler.step()

    def _value_for_scheduler(self, metrics: Mapping[str, Any]) -> float:
        name = str(self.scheduler_metric)
        value = self._monitored(name, metrics)
        if value is None:
            raise ValueError(
                f"`scheduler_metric={name!r}`: no worker reported a number with that name in this epoch. "
                f"`train_batch` reports {', '.join(f'`{each}`' for each in metrics)}."
            )
        return value

    def _monitored(self, name: str, metrics: Mapping[str, Any]) -> float | None:
        """The mean of a metric over all workers, who have to agree about a learning rate."""
        own = (float(metrics[name]), 1.0) if name in metrics else (0.0, 0.0)
        total, count = self._sum_over_workers(*getattr(metrics, "totals", {}).get(name, own))
        return total / count if count else None

    def _sum_over_workers(self, *values: float) -> list[float]:
        """The sums of all workers' values; every worker has to ask."""
        if not self._context.world.is_distributed:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        self._parallel.all_sum(tensor)
        sums: list[float] = tensor.tolist()
        return sums

    def _scheduler_steps(self) -> list[Any]:
        """How far the registered schedulers are."""
        return [getattr(scheduler, "last_epoch", None) for scheduler in getattr(self, "_schedulers", ())]

    def _warn_of_idle_schedulers(self, before: list[Any]) -> None:
        """Warns once about schedulers that are never stepped; `before` is how far they were before the pass."""
        is_ours = self.scheduler_step_freq in (SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH)
        is_idle = any(each is not None for each in before) and self._scheduler_steps() == before
        if not is_ours or not is_idle or getattr(self, "scheduler", None) is not None:
            return
        if not self._has_warned_of_schedulers and self.world_rank == 0:
            logger.warning(
                "no scheduler was stepped in this epoch: the library steps `self.scheduler`, which is not set. Set it "
                "in `setup` to what `register` returns for `schedulers`, one or a list. To step it yourself, pass "
                '`scheduler_step_freq="manual"`'
            )
        self._has_warned_of_schedulers = True

    def _known(self, found: Any) -> Any:
        """NaN for an accuracy that the library cannot tell, and a warning once."""
        if found is not None:
            return found
        if not self._has_warned_of_accuracy and self.world_rank == 0:
            logger.warning(
                "`val_accuracy` is NaN: the shapes of outputs and targets do not tell where the classes are, or what "
                "one number per sample means. Use a loss of PyTorch as `self.criterion`, such as `CrossEntropyLoss` "
                "(classes in dimension 1) or `BCEWithLogitsLoss`, or override `validate_batch` and return it yourself"
            )
        self._has_warned_of_accuracy = True
        return float("nan")

    def _own_info(self, num_steps: int | None, epoch_idx: int) -> dict[str, Any]:
        return {
            NUM_STEPS: num_steps,
            USE_FP16: bool(self.use_fp16),
            "epoch_idx": epoch_idx,
            SCHEDULER_STEP: self.scheduler_step_freq,
        }

    def _batch_info(self, batch_idx: int) -> dict[str, Any]:
        return {"batch_idx": batch_idx, "global_step": self.global_step, IS_PADDING: self._parallel.step.is_padding}

    def _new_meters(self) -> AverageMeterCollection:
        return AverageMeterCollection(to_floats=read_tensors, capture_object=capture)

    def _count(self, meters: AverageMeterCollection, metrics: dict[str, Any]) -> None:
        meters.update(*self._checked(metrics))

    def _checked(self, metrics: dict[str, Any]) -> tuple[dict[str, Any], int | float]:
        """Metrics of a batch, and their weight."""
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"`{type(self).__name__}.train_batch` or `validate_batch` returned a `{type(metrics).__name__}`: "
                "return a dict of metrics, an empty one if there are no metrics."
            )
        self._latest_metrics = metrics
        values = {name: value for name, value in metrics.items() if name != NUM_SAMPLES}
        return values, metrics.get(NUM_SAMPLES, 1)


class CreatorOperator(TrainingOperator):
    """An operator made of creator functions; see `TrainingOperator.from_creators`. Subclass it to override a rung."""

    _model_creator: Callable[..., Any]
    _optimizer_creator: Callable[..., Any]
    _data_creator: Callable[..., Any] | None = None
    _loss_creator: Any = None
    _scheduler_creator: Callable[..., Any] | None = None
    _serialize_data_creation = True

    def setup(self, config: dict[str, Any]) -> None:
        """Calls the creators and registers what they return."""
        loaders = self._create_data(config)
        models = self._model_creator(config)
        optimizers = self._optimizer_creator(models, config)
        schedulers = self._scheduler_creator(optimizers, config) if self._scheduler_creator else None
        criterion = self._create_loss(config)
        self._registered = self.register(
            models=models, optimizers=optimizers, criterion=criterion, schedulers=schedulers
        )
        self._has_schedulers = schedulers is not None
        if _is_multiple(models) or _is_multiple(optimizers):
            logger.info("several models or optimizers: the stock loops use the first of each")
        self.register_data(train_loader=loaders[0], validation_loader=loaders[1])

    def _create_data(self, config: dict[str, Any]) -> tuple[Any, Any]:
        if self._data_creator is None:
            return None, None
        with _one_at_a_time() if self._serialize_data_creation else nullcontext():
            loaders = self._data_creator(config)
        if loaders is None or loaders is False or (isinstance(loaders, list | tuple) and not loaders):
            raise InvalidRegistrationError(
                "`data_creator` returned nothing: return a train loader, or train and validation loader."
            )
        if not isinstance(loaders, list | tuple):
            return loaders, None
        if len(loaders) > 2:
            raise ValueError(
                f"`data_creator` returned {len(loaders)} loaders: return one (train) or two (train, validation)."
            )
        return loaders[0], loaders[1] if len(loaders) == 2 else None

    def _create_loss(self, config: dict[str, Any]) -> Any:
        creator = self._loss_creator
        if isinstance(creator, type) and issubclass(creator, torch.nn.modules.loss._Loss):
            return creator()
        return creator(config) if creator else None

    @property
    def models(self) -> Any:
        """The models as `model_creator` returned them, wrapped."""
        return self._registered[0]

    @property
    def optimizers(self) -> Any:
        """The optimizers as `optimizer_creator` returned them."""
        return self._registered[1]

    @property
    def schedulers(self) -> Any:
        """The schedulers as `scheduler_creator` returned them."""
        return self._registered[-1] if self._has_schedulers else self._absent("schedulers")

    @property
    def model(self) -> torch.nn.Module:
        """The first or only model."""
        return self._models[0]

    @property
    def optimizer(self) -> Any:
        """The first or only optimizer."""
        return self._optimizers[0] if self._optimizers else self._absent("optimizer")

    @property
    def scheduler(self) -> Any:
        """The first or only scheduler."""
        return self._schedulers[0] if self._schedulers else self._absent("scheduler")

    @property
    def criterion(self) -> Any:
        """The loss."""
        return self._criterion if self._criterion is not None else self._absent("criterion")

    def _absent(self, name: str) -> Any:
        raise AttributeError(f"no `{name}`: no creator returned one")


def _num_samples(features: Sequence[Any], target: Any) -> int:
    return batches.count_samples(features if target is None else (target,))


def _weight_entry(weight: Any) -> dict[str, Any]:
    return {} if weight is None else {BATCH_WEIGHT: weight}


def _takes(method: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(each.name == name or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def to_device(value: Any, device: torch.device) -> Any:
    """Copies tensors in nested tuples, lists and dicts to `device`, without waiting where memory is pinned."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        moved = copy.copy(value)  # whatever class of dict it is
        moved.update((key, to_device(item, device)) for key, item in value.items())
        return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value.to(device) if hasattr(value, "to") else value


def read_tensors(tensors: list[torch.Tensor]) -> list[float]:
    """The values of tensors with one element, with one wait for the device."""
    if len({tensor.device for tensor in tensors}) > 1:
        return [float(tensor) for tensor in tensors]
    values: list[float] = torch.stack([tensor.reshape(()).double() for tensor in tensors]).tolist()
    return values


def _unscale_for_step(optimizer: Any) -> None:
    """Brings gradients to their true size that a fused optimizer is to unscale in its step, as `GradScaler` told it."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter.grad is not None:
            parameter.grad.div_(scale)
    optimizer.grad_scale = None


def _refuse_unknown(unknown: dict[str, Any]) -> None:
    if not unknown:
        return
    hint = (
        "Loaders go into `register_data(train_loader=..., validation_loader=...)`. " if "loader" in str(unknown) else ""
    )
    raise TypeError(
        f"`register` does not know {', '.join(f'`{name}`' for name in unknown)}. {hint}"
        "Allowed are models, optimizers, criterion, schedulers, ddp_args and apex_args."
    )


def _present(part: torch.nn.Module | None) -> list[torch.nn.Module]:
    return [] if part is None else [part]


def _options(name: str, given: Any) -> dict[str, Any]:
    if given and not isinstance(given, dict):
        raise ValueError(f"`{name}={given!r}`: need a dict of keyword arguments.")
    return dict(given or {})


def _one_at_a_time() -> Any:
    from filelock import FileLock

    name = f".raydata-{os.getuid()}.lock"  # one file for all users would belong to the first, and shut out the others
    return FileLock(os.path.join(tempfile.gettempdir(), name))


def _is_multiple(component: Any) -> bool:
    """Whether `component` holds several objects."""
    return isinstance(component, Iterable) and isinstance(component, Sized) and len(component) > 1


def get_test_operator(operator_cls: type[TrainingOperator]) -> type[TrainingOperator]:
    """An operator for tests whose epochs call `config["custom_func"](operator, iterator, info)`."""

    class _TestOperator(operator_cls):  # type: ignore[valid-type, misc]
        def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any], **kwargs: Any) -> Any:
            function = self.config.get("custom_func")
            return function(self, iterator, info) if callable(function) else {"done": 1}

        def validate(self, val_iterator: Iterable[Any], info: dict[str, Any]) -> Any:
            return self.train_epoch(val_iterator, info)

    return _TestOperator


def get_test_metrics_operator(operator_cls: type[TrainingOperator]) -> type[TrainingOperator]:
    """An operator for tests that reports `config["scores"]` and `config["val_scores"]` as `config["key"]`."""

    class _TestMetricsOperator(operator_cls):  # type: ignore[valid-type, misc]
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self._train_scores = list(config["scores"])
            self._val_scores = list(config["val_scores"])
            self.key = config["key"]

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            metrics = super().train_batch(batch, batch_info)
            return {**metrics, self.key: self._train_scores.pop(0) / metrics[NUM_SAMPLES]}

        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            metrics = super().validate_batch(batch, batch_info)
            return {**metrics, self.key: self._val_scores.pop(0) / metrics[NUM_SAMPLES]}

    return _TestMetricsOperator


__all__ = [
    "CreatorOperator",
    "OperatorContext",
    "TrainingOperator",
    "get_test_metrics_operator",
    "get_test_operator",
]
