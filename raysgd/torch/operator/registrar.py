"""Implements the operator's `register` and `register_data`: checks, prepares, wraps and records the user's objects.

The library trains, saves and restores only registered objects, not the operator's other attributes. The user may pass
models, optimizers and schedulers as a single object, or as a list or tuple. `register` returns the wrapped objects in
the same form.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from raysgd.core.arrays.user_data import Convert, RayBatches, RayLoader, ray_batches, ray_batches_of
from raysgd.core.engine.shared.types import World
from raysgd.exceptions import InvalidRegistrationError
from raysgd.streams.source import StreamData, stream_data
from raysgd.streams.stream import Stream
from raysgd.torch.data.sampling import GlobalBatchRule, ShardedLoader, UndividedLoader, shard_loader
from raysgd.torch.objects.criteria import observable
from raysgd.torch.objects.models import checkpoint_activations, is_empty, refuse_states
from raysgd.torch.operator.settings import OperatorContext, TorchSettings
from raysgd.torch.parallel.sync import COMM_HOOK
from raysgd.torch.parallel.tensors import unwrap
from raysgd.trainer.worker.operator import RegisteredParts, parts_of

logger = logging.getLogger(__name__)


def models_of(given: Any) -> RegisteredParts:
    """Return the models in the argument `models` of `register`. A module counts as one model, even if it is iterable.

    Raises:
        InvalidRegistrationError: An object is not a module, or the argument contains no module.
    """
    what = "a `torch.nn.Module` (criteria go into `criterion`, loaders into `register_data`)"
    return parts_of("models", given, lambda item: isinstance(item, torch.nn.Module), what)


def optimizers_of(given: Any) -> RegisteredParts:
    """Return the optimizers in the argument `optimizers` of `register`. Any object with a `step` method is accepted.

    Raises:
        InvalidRegistrationError: An object has no `step` method, or an optimizer has no parameters.
    """
    parts = parts_of("optimizers", given, _steps, "an optimizer, which has a `step`", may_be_empty=True)
    for optimizer in parts.items:
        _check_parameters(optimizer)
    return parts


def _check_parameters(optimizer: Any) -> None:
    groups = getattr(optimizer, "param_groups", None)
    if isinstance(groups, list) and not any(group["params"] for group in groups):
        raise InvalidRegistrationError(
            f"`register(optimizers=...)` got a `{type(optimizer).__name__}` without parameters, so it would train "
            "nothing. Create it with `model.parameters()` of a model that has parameters."
        )


def criterion_of(given: Any) -> Any:
    """Check the argument `criterion` of `register`, which may be None, and return the argument.

    Raises:
        InvalidRegistrationError: The criterion is not callable, or is a class.
    """
    if given is None:
        return None
    if not callable(given) or isinstance(given, type):
        raise InvalidRegistrationError(
            f"`register(criterion={given!s:.100})`: pass a loss module such as `torch.nn.MSELoss()`, or a function of "
            "output and target."
        )
    return given


def check_loader(name: str, given: Any, *, warn: bool = True) -> None:
    """Check that the loader passed to `register_data` yields batches. Warn about a dataset, which may yield samples.

    Args:
        name: Name of the argument of `register_data`, for messages.
        given: Value of the argument; None if the user omitted it.
        warn: False to suppress the warning.

    Raises:
        InvalidRegistrationError: The loader is not iterable, or yields samples.
    """
    can_be_iterated = hasattr(given, "__iter__") or hasattr(given, "__getitem__")
    if given is not None and (not can_be_iterated or isinstance(given, type | str | bytes | Mapping)):
        raise InvalidRegistrationError(
            f"`register_data({name}={given!s:.100})`: pass a `DataLoader`, or something else that yields batches."
        )
    inner = given
    while isinstance(inner, Subset):
        inner = inner.dataset
    if isinstance(inner, TensorDataset):
        raise InvalidRegistrationError(
            f"`register_data({name}=...)` got a `{type(given).__name__}`, so each of its samples would be used as a "
            f"batch. Wrap it in a loader: `{name}=DataLoader(dataset, batch_size=32, shuffle=True)`."
        )
    if warn and isinstance(given, Dataset) and not isinstance(given, IterableDataset):
        logger.warning(
            "`register_data(%s=...)` got a `%s`, so each worker uses each of its items as a batch. If the items "
            "are samples, wrap the object in a loader: `%s=DataLoader(dataset, batch_size=32, shuffle=True)`",
            name,
            type(given).__name__,
            name,
        )


def schedulers_of(given: Any) -> RegisteredParts | None:
    """Return the schedulers in the argument `schedulers` of `register`. Return None if the user passed no argument.

    Raises:
        InvalidRegistrationError: An object has no `step` method.
    """
    if given is None or given is False:
        return None
    return parts_of("schedulers", given, _steps, "a scheduler, which has a `step`", may_be_empty=True)


def _steps(item: Any) -> bool:
    return hasattr(item, "step") and not isinstance(item, type)


def own_parameters(part: Any, models: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return the parameters of a criterion, except parameters of registered models that the criterion contains."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    parameters = part.parameters() if isinstance(part, torch.nn.Module) else ()
    return [parameter for parameter in parameters if id(parameter) not in known]


def outsiders(optimizers: Sequence[Any], modules: Iterable[torch.nn.Module], owner: Any) -> list[str]:
    """Return a description of each parameter of the optimizers that belongs to none of the modules.

    Args:
        optimizers: Optimizers that the user registers, before wrapping replaces their parameters.
        modules: The registered modules, which are trained, saved and restored.
        owner: The operator. If one of its attributes contains the parameter, the description is the attribute's name.
    """
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    return [
        _named(parameter, owner) or f"parameter {index} in group {group_index} of `{type(optimizer).__name__}`"
        for optimizer in optimizers
        for group_index, group in enumerate(getattr(optimizer, "param_groups", ()))
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in known
    ]


def _named(parameter: Any, owner: Any) -> str | None:
    for name, value in vars(owner).items():
        if value is parameter:
            return f"`self.{name}`"
        for inner, each in value.named_parameters() if isinstance(value, torch.nn.Module) else ():
            if each is parameter:
                return f"`self.{name}.{inner}`"
    return None


@dataclass
class RegisteredObjects:
    """The objects that the operator passed to `register`, before and after wrapping. Empty until `register` is called.

    Attributes:
        original_models: Models without wrappers.
        models: Models with wrappers such as `DistributedDataParallel`. Training calls the wrappers.
        optimizers: Optimizers. With Horovod, they are wrapped.
        criterion: Criterion, wrapped like a model if it has parameters.
        original_criterion: Unwrapped criterion if it has trainable parameters; otherwise None.
        own_criterion: Wrapped criterion if it has any parameters, trainable or frozen; otherwise None.
        schedulers: Learning rate schedulers.
        returned: Return value of `register`.
        has_schedulers: True if the argument `schedulers` was passed, even if it is an empty container.
    """

    original_models: list[torch.nn.Module] = field(default_factory=list)
    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    criterion: Any = None
    original_criterion: torch.nn.Module | None = None
    own_criterion: torch.nn.Module | None = None
    schedulers: list[Any] = field(default_factory=list)
    returned: tuple[Any, ...] = ()
    has_schedulers: bool = False

    @property
    def trained(self) -> list[torch.nn.Module]:
        """Unwrapped modules that are trained and saved: the models, and the criterion if it has trainable weights."""
        own = self.original_criterion
        return [*self.original_models] if own is None else [*self.original_models, own]

    @property
    def wrapped(self) -> list[torch.nn.Module]:
        """The wrapped models, and the wrapped criterion if it has parameters, trainable or frozen."""
        own = self.own_criterion
        return [*self.models] if own is None else [*self.models, own]


@dataclass(frozen=True)
class RegisteredData:
    """The data that the operator passed to `register_data`, prepared for this worker.

    Attributes:
        train: Training data, sharded if possible; None if the operator registered none.
        validation: Validation data, sharded if possible; None if the operator registered none.
    """

    train: ShardedLoader | UndividedLoader | StreamData | None = None
    validation: ShardedLoader | UndividedLoader | StreamData | None = None

    @property
    def ray_batches(self) -> dict[str, RayBatches]:
        """Datasets of Ray Data that the driver must shard, under the keys "train" and "validation"."""
        return ray_batches_of({"train": self.train_loader, "validation": self.validation_loader})

    @property
    def train_loader(self) -> Any:
        """The loader for training, or None if the operator registered no training data.

        If the data is sharded, the loader yields only this worker's batches.
        """
        return None if self.train is None else self.train.loader

    @property
    def validation_loader(self) -> Any:
        """The loader for validation, or None if the operator registered no validation data.

        If the data is sharded, the loader yields only this worker's batches.
        """
        return None if self.validation is None else self.validation.loader


def register(operator: Any, given: Mapping[str, Any]) -> None:
    """Check the objects that an operator registers, move them to the device, and prepare and wrap them.

    The objects are in `operator._raysgd.registered` before the models are wrapped, because the user's overrides may
    read them there.

    Args:
        operator: The operator. The user may have overridden its methods for wrapping models and for Apex.
        given: Arguments of the operator's `register`, by name.

    Raises:
        InvalidRegistrationError: An object has the wrong type, or an optimizer has no parameters. Or there are several
            workers, and an optimizer has parameters that belong to no registered module.
        ValueError: `ddp_args` or `apex_args` is not a dict, or schedulers are passed without `scheduler_step_freq`.
    """
    internals, context, parallel = operator._raysgd, operator._raysgd.context, operator._raysgd.parallel
    ddp_args, apex_args = _options("ddp_args", given["ddp_args"]), _options("apex_args", given["apex_args"])
    models = models_of(given["models"])
    optimizers = optimizers_of(given["optimizers"])
    criterion = criterion_of(given["criterion"])
    schedulers = schedulers_of(given["schedulers"])
    if schedulers is not None and operator.scheduler_step_freq is None:
        raise ValueError(
            '`register(schedulers=...)` needs `TorchTrainer(scheduler_step_freq=...)`: pass "batch" or "epoch" to '
            'have the library step `self.scheduler`, or "manual" to step it yourself.'
        )
    if any(map(is_empty, models.items)):
        refuse_states(optimizers.items)
    on_device = [_build(context, context.to_device(model)) for model in models.items]
    criterion = context.to_device(criterion) if criterion is not None else None
    _check_outsiders(operator, context, optimizers.items, [*on_device, criterion])
    own_of_criterion = own_parameters(criterion, on_device)
    criterion = criterion if own_of_criterion else observable(criterion)
    prepared, stepped = context.precision.prepare(
        on_device, optimizers.items, lambda *parts: operator._configure_apex_amp(*parts, apex_args)
    )
    _warn_of_models_left_out(prepared, internals.registered.original_models)
    stepped = [parallel.wrap_optimizer(optimizer) for optimizer in stepped]
    internals.registered = registered = RegisteredObjects(prepared, prepared, stepped, criterion)
    if context.wrap_ddp:
        registered.models = operator._configure_ddp(prepared, context.device_ids, ddp_args)
    else:
        registered.models = [parallel.wrap(model, context.device_ids, {}) for model in prepared]
    if own_of_criterion:
        _wrap_criterion(context, registered, own_of_criterion, ddp_args)
    parallel.rebind_optimizers(stepped)
    returned = [models.mirror(registered.models), optimizers.mirror(stepped)]
    returned += [] if registered.criterion is None else [registered.criterion]
    if schedulers is not None:
        returned.append(schedulers.mirror(schedulers.items))
        registered.schedulers, registered.has_schedulers = schedulers.items, True
    registered.returned = tuple(returned)
    options = compile_options(context)
    # `Module.compile` changes the model in place, so user code that refers to the model uses the compiled model, too.
    if options is not None:
        for model in registered.models:
            model.compile(**options)
            code = (type(each).forward.__module__ for each in model.modules())
            if operator.world_rank == 0 and all(module.startswith("torch.nn.") for module in code):
                logger.warning(
                    "`compile` compiles only code of your own, and this model consists of modules of `torch.nn`: give "
                    "it a class of your own, whose `forward` calls them."
                )


def compile_options(context: OperatorContext) -> dict[str, Any] | None:
    """Return the options with which to compile models, or None not to compile them.

    Where a worker's share of a global batch can change, models are compiled once for all sizes, unless the user chose
    otherwise. A lost worker then costs no compilation.
    """
    chosen = context.settings.step_options.compile
    changes = context.settings.batch_options.is_global and context.is_one_of_several
    options: dict[str, Any] = {"dynamic": True} if changes else {}
    return None if chosen is False else options | dict(chosen if isinstance(chosen, Mapping) else {})


def _build(context: OperatorContext, model: torch.nn.Module) -> torch.nn.Module:
    """Apply the options `sync_batchnorm` and `activation_checkpointing` to a model, and return the model.

    The keys of its state dict do not change.
    """
    options = context.settings.step_options
    if options.sync_batchnorm and context.is_one_of_several:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if options.activation_checkpointing:
        checkpoint_activations(model)
    return model


def _wrap_criterion(
    context: OperatorContext, registered: RegisteredObjects, own: Sequence[torch.nn.Parameter], ddp_args: dict[str, Any]
) -> None:
    """Wrap a criterion that has parameters as if it were a model.

    Args:
        context: Rank, device and settings of the operator.
        registered: Registered objects, with a criterion that is not wrapped yet.
        own: Parameters of the criterion, except parameters of registered models that the criterion contains.
        ddp_args: Options for `DistributedDataParallel`.
    """
    assert isinstance(registered.criterion, torch.nn.Module), "nothing else has parameters"
    if any(parameter.requires_grad for parameter in own):
        registered.original_criterion = registered.criterion
    # Do not install the user's communication hook on the criterion's wrapper, because the hook's state may be specific
    # to the model.
    options = {name: value for name, value in ddp_args.items() if name != COMM_HOOK}
    wrapped = context.parallel.wrap(registered.criterion, context.device_ids, options if context.wrap_ddp else {})
    registered.criterion = registered.own_criterion = wrapped


def _check_outsiders(operator: Any, context: OperatorContext, optimizers: Sequence[Any], parts: Sequence[Any]) -> None:
    """Reject optimizers with parameters that belong to no registered module. With a single worker, only warn."""
    is_distributed = context.world.is_distributed
    if is_distributed and not context.parallel.sync.averages:
        return  # with `strategy="none"`, user code keeps the workers' models in sync
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    found = outsiders(optimizers, modules, operator)
    if not found:
        return
    words = (
        "`register(optimizers=...)` got an optimizer with parameters that belong neither to a registered model nor "
        f"to the criterion: {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}."
    )
    way_out = (
        "Make these parameters part of a model or of the criterion (`model.scale = torch.nn.Parameter(...)`), or also "
        "pass the module that holds them in `models`."
    )
    if is_distributed:
        harm = "Their gradients would not be averaged over the workers, and no checkpoint would contain them."
        raise InvalidRegistrationError(f"{words} {harm} {way_out}")
    logger.warning(
        "%s Training continues, but no checkpoint contains them, and several workers would refuse them. %s",
        words,
        way_out,
    )


def register_data(
    context: OperatorContext, train_loader: Any, validation_loader: Any, make_batch: Convert
) -> RegisteredData:
    """Check the user's training and validation data, and return it prepared for this worker: sharded if possible.

    Args:
        context: Rank, device and settings of the operator.
        train_loader: Training data: a loader, another iterable, a stream, a dataset of Ray Data, or None.
        validation_loader: Validation data, of the same types.
        make_batch: Function that converts arrays from Ray Data to a batch.

    Raises:
        InvalidRegistrationError: A loader does not yield batches, or the trainer's options do not support a stream or a
            dataset of Ray Data.
    """
    for name, loader in (("train_loader", train_loader), ("validation_loader", validation_loader)):
        if ray_batches(loader) is None and not isinstance(loader, Stream):
            check_loader(name, loader, warn=context.world.rank == 0)
    return RegisteredData(
        _divided(context, train_loader, make_batch, training=True),
        _divided(context, validation_loader, make_batch, training=False),
    )


def global_batches(settings: TorchSettings) -> GlobalBatchRule | None:
    """Return the rule for splitting each global batch (the batch of one step of all workers) among the workers.

    Return None if no option of the trainer requires global batches. In that case, a loader's batch size is the size of
    one worker's batch.
    """
    options = settings.batch_options
    if not options.is_global:
        return None
    num_shards = options.num_shards if options.deterministic else 0
    multiple = 1 if options.split_batches else num_shards
    return GlobalBatchRule(options.cap, num_shards=num_shards, multiple=multiple)


def _divided(
    context: OperatorContext, loader: Any, make_batch: Convert, *, training: bool
) -> ShardedLoader | UndividedLoader | StreamData | None:
    if loader is None:
        return None
    if isinstance(loader, Stream):
        return _of_stream(context, loader, "train" if training else "validation")
    batches = ray_batches(loader)
    if batches is not None:
        return _of_ray(context, batches, make_batch, training=training)
    if not context.settings.add_dist_sampler:
        return UndividedLoader(loader, "`add_dist_sampler=False`", warn=False)
    world, pins = context.world, context.use_gpu
    rule = global_batches(context.settings)
    data = shard_loader(loader, rank=world.rank, world_size=world.size, training=training, pin_memory=pins, rule=rule)
    if isinstance(data, UndividedLoader) and data.warn and world.is_distributed and world.rank == 0:
        logger.warning(
            "the %s loader is not sharded over the workers (%s), so each worker reads all of its data",
            "train" if training else "validation",
            data.reason,
        )
    return data


def _of_stream(context: OperatorContext, stream: Stream, name: str) -> StreamData:
    """Return the data of a `Stream` for training or validation. Its shards are distributed over the workers.

    Raises:
        InvalidRegistrationError: The trainer's options do not support streams.
    """
    rule, reason = global_batches(context.settings), context.settings.obstacle_of_streams
    if rule is None or reason is not None:
        raise InvalidRegistrationError(f"`register_data({name}_loader=...)` got {reason}")
    return stream_data(stream, name, rule.of_streams, context.world.size)


def _of_ray(context: OperatorContext, batches: RayBatches, make_batch: Convert, *, training: bool) -> UndividedLoader:
    """Return a loader over a Ray Data dataset. The driver shards the dataset, unless each worker reads all of it."""
    world, settings = context.world, context.settings
    is_shared = world.is_distributed and settings.add_dist_sampler
    if training and is_shared and not context.parallel.sync.averages:
        raise InvalidRegistrationError(
            "`register_data(train_loader=...)` got a dataset of Ray Data, which several workers share only if they "
            'step together. With `strategy="none"` pass `add_dist_sampler=False` too, and give each worker a '
            "different dataset."
        )
    sized = batches.sized(settings.config_for(world.size))
    loader = RayLoader(sized, world if is_shared else World(0, 1), make_batch)
    return UndividedLoader(loader, "Ray Data shards it, and stores no position", warn=False)


def _warn_of_models_left_out(prepared: Sequence[torch.nn.Module], before: Sequence[torch.nn.Module]) -> None:
    kept = {id(unwrap(model)) for model in prepared}
    if any(id(unwrap(model)) not in kept for model in before):
        logger.warning(
            "`register` was called again, so the models of the first call are no longer averaged, saved or restored. "
            "Pass all models at once, as a tuple: `register(models=(a, b), optimizers=(...))`"
        )


def _options(name: str, given: Any) -> dict[str, Any]:
    if given and not isinstance(given, dict):
        raise ValueError(f"`{name}={given!r}`: need a dict of keyword arguments.")
    return dict(given or {})
