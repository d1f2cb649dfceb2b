"""Creates and inspects a `LightningModule`, calls its hooks, and provides replacements for its trainer and logger."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

from raysgd.core.arguments import is_integer
from raysgd.core.arrays import trees
from raysgd.core.engine.shared.types import World
from raysgd.core.numbers.meters import AverageMeterCollection, MetricSummary, weight_of
from raysgd.trainer.worker.replica_state import check_count, require
from raysgd.utils import BATCH_SIZE, NUM_SAMPLES

logger = logging.getLogger(__name__)

PER_BATCH = ("step", "batch")  # values of a scheduler's "interval"; "batch" is raysgd's name for "step"
PER_EPOCH = ("epoch",)
NEVER_CALLED = {
    "on_train_end": "the library does not know when training has ended. Call the code of this hook in your program",
    "on_fit_end": "the library does not know when training has ended. Call the code of this hook in your program",
    "teardown": "the library does not know when training has ended. Call the code of this hook in your program",
    "on_validation_model_train": "the mode of each part of the model is restored before the next training",
    "configure_callbacks": "Lightning's callbacks are not supported: use callbacks of `trainer.fit`",
    "configure_sharded_model": "use `configure_model`, and `TorchTrainer(strategy='fsdp')` to shard a model",
}
"""Lightning hooks that raysgd never calls, with advice. If a module overrides one, a warning is logged.

Tests compare this table with Lightning, and `docs/lightning.md` shows it to users.
"""

_LENGTHS = ("estimated_stepping_batches", "max_epochs", "max_steps", "num_training_batches")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def lightning_base(module_cls: Any) -> type[Any]:
    """Return the class `LightningModule`, from `lightning` or `pytorch_lightning`, that `module_cls` derives from.

    Raises:
        TypeError: The class does not derive from `LightningModule`.
    """
    for base in module_cls.__mro__ if isinstance(module_cls, type) else ():
        package = base.__module__.partition(".")[0]
        if base.__name__ == "LightningModule" and package in ("lightning", "pytorch_lightning"):
            return base
    raise TypeError(f"`{module_cls!r}`: need a subclass of `LightningModule`, the class itself.")


def instantiate(module_cls: type[Any], config: dict[str, Any], says_so: bool) -> Any:
    """Create a module from the operator's config.

    If the constructor has a parameter `config`, it gets the config. Otherwise, each entry of the config is passed to
    the parameter with its name. ADR 86 explains why the config is passed in this way.

    Args:
        module_cls: The user's module class.
        config: Config of the operator.
        says_so: True to log which config entries are passed to the constructor, and which match no parameter.

    Raises:
        TypeError: The constructor needs a parameter that the config does not have.
    """
    parameters = inspect.signature(module_cls.__init__).parameters
    if "config" in parameters:
        return module_cls(config=config)
    named = [each for each in parameters.values() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)][1:]
    missing = [each.name for each in named if each.default is each.empty and each.name not in config]
    if missing:
        raise TypeError(
            f"`{module_cls.__name__}` needs `{missing[0]}`: pass it to the trainer, as "
            f"`config={{{missing[0]!r}: ...}}`."
        )
    taken = {each.name: config[each.name] for each in named if each.name in config}
    unused = [repr(key) for key in config if key not in taken and key != BATCH_SIZE]
    if says_so and taken:
        logger.info("`%s` gets %s from the config", module_cls.__name__, ", ".join(taken))
    if says_so and unused:
        logger.warning("`%s` has no parameter for %s of the config", module_cls.__name__, ", ".join(unused))
    return module_cls(**taken)


class LightningHooks:
    """Calls the methods of a module that Lightning's own trainer would call."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._base = lightning_base(type(module))
        self._accepted: dict[str, tuple[int | None, list[str]]] = {}

    def has(self, name: str) -> bool:
        """Return True if the user's module has a method called `name`, inherited or not."""
        return hasattr(self._module, name)

    def overrides(self, name: str) -> bool:
        """Return True if the class of the user's module overrides the method `name` of `LightningModule`."""
        return getattr(type(self._module), name, None) is not getattr(self._base, name, None)

    def wants(self, name: str, parameter: str) -> bool:
        """Return True if the user's module has a method called `name` with a parameter called `parameter`."""
        return self.has(name) and parameter in inspect.signature(getattr(self._module, name)).parameters

    def call(self, name: str, *arguments: Any, **by_name: Any) -> Any:
        """Call a method of the module, if it exists, with as many arguments as it accepts.

        Args:
            name: Name of the method.
            arguments: Positional arguments that Lightning 2 passes. The method may accept fewer.
            by_name: Arguments that Lightning 1 passed. Each is passed only if the method has such a parameter.

        Returns:
            The return value of the method; None if the module has no such method.
        """
        method = getattr(self._module, name, None)
        if method is None:
            return None
        if name not in self._accepted:
            parameters = inspect.signature(method).parameters.values()
            kinds = [parameter.kind for parameter in parameters if parameter.name not in by_name]
            takes_all = inspect.Parameter.VAR_POSITIONAL in kinds
            num_arguments = None if takes_all else sum(kind in _POSITIONAL for kind in kinds)
            self._accepted[name] = num_arguments, [each.name for each in parameters if each.name in by_name]
        num_arguments, names = self._accepted[name]
        return method(*arguments[:num_arguments], **{each: by_name[each] for each in names})

    def call_or(self, name: str, otherwise: Callable[[], Any]) -> None:
        """Call the module's method `name` if the user overrode it. If not, call the function `otherwise`."""
        if self.overrides(name):
            self.call(name)
        else:
            otherwise()

    def part_of_package(self, name: str) -> Any:
        """Import a submodule of the package that the module's base class comes from, such as `lightning.pytorch`."""
        return import_module(f"{self._base.__module__.removesuffix('.core.module')}.{name}")


class TrainerStandIn(SimpleNamespace):
    """Replaces Lightning's `Trainer` as the `self.trainer` of a module.

    The object has attributes that a module may read, such as `current_epoch`, but no methods such as `fit`.
    """

    @classmethod
    def of(
        cls, world: World, device: torch.device, precision_plugin: Any, backward: Callable[..., None]
    ) -> TrainerStandIn:
        """Create the object that a worker's module uses as its trainer.

        Args:
            world: Rank of the worker, and the number of ranks.
            device: Device of the worker's models.
            precision_plugin: Lightning's precision plugin. The module uses it to clip gradients.
            backward: Function that computes gradients. The module's `manual_backward` calls it.
        """
        flags = ("training", "validating", "testing", "predicting", "sanity_checking", "barebones")
        absent = ("progress_bar_callback", "gradient_clip_val", "gradient_clip_algorithm", "_results")
        return cls(
            **dict.fromkeys(flags, False),
            **dict.fromkeys(absent),
            current_epoch=0,
            global_step=0,
            global_rank=world.rank,
            local_rank=world.local_rank,
            world_size=world.size,
            is_global_zero=world.rank == 0,
            accumulate_grad_batches=1,
            callback_metrics={},
            logger=_NoLogger(),
            loggers=[],
            precision_plugin=precision_plugin,
            strategy=cls(backward=backward, root_device=device),
        )

    def __getattr__(self, name: str) -> Any:
        if name in _LENGTHS:
            raise AttributeError(
                f"no `{name}`: only your program knows how long it trains. Pass the number yourself, as in "
                "`TorchTrainer(config={'total_steps': 1000}, ...)`, and use it in `configure_optimizers`."
            )
        known = ", ".join(sorted(each for each in vars(self) if not each.startswith("_")))
        raise AttributeError(f"no `{name}`: a `LightningOperator` has no Lightning `Trainer`. Available: {known}.")


class _NoLogger:
    """The `self.logger` of a module. Accessing any attribute raises an error that says how to report values instead.

    The object is falsy, like `self.logger` in Lightning if no logger is configured.
    """

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"no `{name}`: a `LightningOperator` has no Lightning logger. Report numbers with `self.log(name, value)`, "
            "and pass `raysgd.callbacks`, as in `trainer.fit(3, callbacks=[TensorBoardLogger()])`."
        )


class SteppingOptimizer:
    """Wraps a module's optimizer. The hook `optimizer_step` gets this wrapper, and `self.optimizers()` returns it.

    The wrapper's `step` first averages, unscales and clips the gradients, then steps the optimizer. Other hooks, such
    as `on_before_zero_grad`, get the optimizer without the wrapper.
    """

    def __init__(self, optimizer: Any, step: Callable[[Any, Any], Any]) -> None:
        self.optimizer = optimizer
        self._step = step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run `closure`, if given, then step the optimizer. Return the closure's result."""
        return self._step(self.optimizer, closure)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that `isinstance` recognizes the optimizer's class, even in Lightning's checks
        return type(self.__dict__["optimizer"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


def run_in_forward_of(wrapper: Any, module: Any, run: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
    """Run a training step inside the forward pass of `DistributedDataParallel`, which prepares the backward pass.

    `DistributedDataParallel` calls the module's `forward`, which is replaced by a function that runs the training step.
    The module gets its own `forward` back before the training step starts.

    Args:
        wrapper: `DistributedDataParallel` that wraps the module.
        module: The user's module.
        run: Function that runs the training step and returns the loss.

    Returns:
        The loss for the backward pass. None with manual optimization, where the step has run the backward pass.
    """
    is_manual = not module.automatic_optimization
    own = {name: value for name, value in vars(module).items() if name == "forward"}

    def restore() -> None:
        vars(module).pop("forward", None)
        vars(module).update(own)

    def in_place_of_forward(_: int) -> torch.Tensor | None:
        restore()  # the training step may call the module's own `forward`
        loss = run()
        if is_manual:
            wrapper.require_backward_grad_sync = False  # `manual_backward` has already prepared each backward pass
            return None
        # If the training step skipped the batch, the other ranks still wait for gradients from this rank.
        return _no_loss(wrapper, module) if loss is None else loss

    vars(module)["forward"] = in_place_of_forward
    try:
        loss: torch.Tensor | None = wrapper(0)
    finally:
        restore()
        if is_manual:
            wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = True
    return loss


def _no_loss(wrapper: Any, module: torch.nn.Module) -> torch.Tensor:
    """Return a loss whose gradients are zero.

    A rank needs such a loss if its training step returned None, because all ranks must take part in the all-reduce.
    """
    used = [each for each in module.parameters() if each.requires_grad]
    # With `find_unused_parameters`, use only one parameter. If all were used, parameters that no rank's loss depends on
    # would get zero gradients, and the optimizer would step them.
    if getattr(wrapper, "find_unused_parameters", False):
        used = used[:1]
    return torch.stack([(each * 0).sum() for each in used]).sum()


def one_loader(given: Any, name: str) -> Any:
    """Return the data loader in `given`, which is either the loader itself or a list or dict with one loader.

    Args:
        given: The argument that the user passed, or the return value of the module's hook.
        name: Name of the argument or hook, for errors.

    Raises:
        ValueError: `given` contains several loaders.
    """
    several = list(given.values()) if isinstance(given, Mapping) else given
    if not (isinstance(several, list | tuple) and several and all(isinstance(each, DataLoader) for each in several)):
        return given
    if len(several) > 1:
        raise ValueError(f"`{name}` gave {len(several)} loaders: need one. Join the datasets, or choose one.")
    return several[0]


def optimizers_and_schedulers(returned: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Parse what a module's `configure_optimizers` returned, in any of the forms that Lightning allows.

    Returns:
        The optimizers, and a complete dict for each scheduler: `scheduler`, `interval`, `frequency`, `monitor`,
        `reduce_on_plateau`, `strict`.

    Raises:
        TypeError: The return value has none of the allowed forms.
        ValueError: The dict of a scheduler is invalid.
    """
    if returned is None:
        logger.warning("`configure_optimizers` returned nothing, so training runs without an optimizer")
        return [], []
    parts = list(returned) if isinstance(returned, list | tuple) else [returned]
    if all(_is_optimizer(part) for part in parts):
        return parts, []
    if all(isinstance(part, Mapping) and "optimizer" in part for part in parts):
        return [part["optimizer"] for part in parts], [_entry_of(part) for part in parts if part.get("lr_scheduler")]
    if len(parts) == 2 and isinstance(parts[0], list | tuple) and all(_is_optimizer(part) for part in parts[0]):
        schedulers = parts[1] if isinstance(parts[1], list | tuple) else [parts[1]]
        return list(parts[0]), [_entry_of({"lr_scheduler": scheduler}) for scheduler in schedulers]
    raise TypeError(
        f"`configure_optimizers` returned `{returned!r}`: allowed are an optimizer, several, a list of optimizers and "
        'one of schedulers, a dict with "optimizer" and optionally "lr_scheduler", several such dicts, and None.'
    )


def _entry_of(part: Mapping[str, Any]) -> dict[str, Any]:
    given = part["lr_scheduler"]
    given = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = given.get("scheduler")
    if not hasattr(scheduler, "step"):
        raise ValueError(f'`{given!r}` in what `configure_optimizers` returned: need a scheduler under "scheduler".')
    if part.get("frequency", 1) != 1:
        logger.warning('"frequency" of an optimizer has no effect. Only a scheduler may have a "frequency"')
    entry = {
        "interval": "epoch",
        "frequency": 1,
        "monitor": part.get("monitor"),
        "reduce_on_plateau": isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau),
        "strict": True,
        **given,
    }
    if entry["interval"] not in PER_BATCH + PER_EPOCH:
        raise ValueError(f'`"interval": {entry["interval"]!r}` of a scheduler: allowed are "step", "batch", "epoch".')
    if not isinstance(entry["frequency"], int) or entry["frequency"] < 1:
        raise ValueError(f'`"frequency": {entry["frequency"]!r}` of a scheduler: need a whole number, 1 or more.')
    return entry


def _is_optimizer(part: Any) -> bool:
    return hasattr(part, "step") and hasattr(part, "zero_grad")


def warn_of_what_is_not_called(hooks: LightningHooks, name: str) -> None:
    """Log a warning for each hook that a module overrides although raysgd never calls it.

    Args:
        hooks: Hooks of the module.
        name: Name of the module's class, for the message.
    """
    for hook, advice in NEVER_CALLED.items():
        if hooks.has(hook) and hooks.overrides(hook):
            logger.warning("`%s.%s` is never called: %s", name, hook, advice)


def check_optimizers(module: Any, optimizers: Sequence[Any]) -> None:
    """Raise if raysgd does not support the module's optimizers.

    Raises:
        ValueError: With automatic optimization, the module has several optimizers, so it is unclear when each steps. Or
            an optimizer is `LBFGS`, which computes gradients several times in a step.
    """
    name = type(module).__name__
    if len(optimizers) > 1 and module.automatic_optimization:
        raise ValueError(
            f"`{name}.configure_optimizers` returned {len(optimizers)} optimizers: set `self.automatic_optimization = "
            "False` in `__init__` and step each of them in `training_step` (`first, second = self.optimizers()`), or "
            "return one optimizer with several groups of parameters."
        )
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise ValueError(
            f"`{name}.configure_optimizers` returned `LBFGS`, which computes gradients several times in a step: use "
            "another optimizer."
        )


_AGGREGATES = {"min": "MinMetric", "max": "MaxMetric", "sum": "SumMetric"}


class EpochValues:
    """Collects the metrics that a `LightningModule` reports in one epoch.

    Args:
        loss_name: Name under which the loss is reported, such as "train_loss".
        keeps_outputs: True to store what `training_step` or `validation_step` returns for each batch, because a hook
            of the module needs all these outputs at the end of the epoch.

    Attributes:
        outputs: What the module's step returned for each batch so far, without padding batches and without None. Empty
            if `keeps_outputs` is False.
        of_batch: Values that the module logged in the current batch.
    """

    def __init__(self, loss_name: str, keeps_outputs: bool) -> None:
        self.loss_name = loss_name
        self.outputs: list[Any] = []
        self.of_batch: dict[str, Any] = {}
        self._of_epoch: dict[str, Any] = {}
        self._keeps_outputs = keeps_outputs
        self._is_in_batch, self._is_counted = False, True
        self._aggregates: dict[str, Any] = {}

    def begin_batch(self, is_counted: bool = True) -> None:
        """Start a new batch. Values that the module logs from now on belong to this batch.

        Args:
            is_counted: False for a padding batch, which repeats samples. Its values are discarded.
        """
        self.of_batch = {}
        self._is_in_batch, self._is_counted = True, is_counted

    def begin_values_of_epoch(self) -> None:
        """Declare that all batches are done. Values that the module logs from now on belong to the epoch."""
        self._is_in_batch, self._is_counted = False, True

    def metrics_of(self, output: Any) -> dict[str, Any]:
        """Return the metrics of the current batch: numbers in the step's `output`, and values that the module logged.

        With `keeps_outputs`, also store the output.
        """
        if self._keeps_outputs and self._is_counted and output is not None:
            self.outputs.append(output)
        return {**numbers_in(output, self.loss_name), **self.of_batch}

    @contextmanager
    def listening_to(self, module: Any) -> Iterator[None]:
        """Receive the values that the module passes to `self.log` and `self.log_dict` during the `with` block."""

        # Assign plain functions. A deep copy of the module would also copy this object if these were bound methods.
        def log(
            name: str, value: Any, *_: Any, reduce_fx: Any = "mean", batch_size: int | None = None, **__: Any
        ) -> None:
            self._take(name, value, reduce_fx, batch_size)

        def log_dict(dictionary: Any, *_: Any, **options: Any) -> None:
            for name, value in dictionary.items():
                log(name, value, **options)

        module.log, module.log_dict = log, log_dict
        try:
            yield
        finally:
            del module.log, module.log_dict

    def _take(self, name: str, value: Any, reduce_fx: Any, batch_size: int | None) -> None:
        if not self._is_counted:
            return
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        kind = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
        if kind in _AGGREGATES:
            value = self._aggregated(name, kind, value)
        elif kind not in ("mean", "avg"):
            raise ValueError(f'`self.log({name!r}, reduce_fx={reduce_fx!r})`: allowed are "mean", "min", "max", "sum".')
        if not self._is_in_batch:
            self._of_epoch[name] = value
            return
        self.of_batch[name] = value
        self.of_batch.pop(weight_of(name), None)
        if batch_size is not None:
            self.of_batch[weight_of(name)] = batch_size

    def _aggregated(self, name: str, kind: str, value: Any) -> Any:
        if name not in self._aggregates:
            metric = getattr(import_module("torchmetrics"), _AGGREGATES[kind])()
            self._aggregates[name] = metric.to(value.device) if isinstance(value, torch.Tensor) else metric
        self._aggregates[name].update(value)
        return self._aggregates[name]

    def summary(self, meters: AverageMeterCollection, fresh: AverageMeterCollection) -> MetricSummary:
        """Return the metrics of the epoch: averages over batches, and values that the module logged outside of batches.

        Args:
            meters: Meters with the metrics of the batches.
            fresh: Empty meters, to which this method adds the values that the module logged outside of batches.
        """
        batches = meters.summary()
        if not self._of_epoch:
            return batches
        fresh.update(self._of_epoch, n=meters.n or 1)  # weight these values by the number of samples in the epoch
        once = fresh.summary()
        values = {**batches, **{name: once[name] for name in self._of_epoch}}
        return MetricSummary(values, {**batches.totals, **once.totals}, {**batches.objects, **once.objects})


def result_of_hook(name: str, returned: Any, loss_name: str, num_samples: int | float) -> dict[str, Any]:
    """Convert the return value of an epoch-end hook to a dict of metrics.

    Args:
        name: Name of the hook, for errors.
        returned: Return value of the hook.
        loss_name: Name of the metric if the hook returned only a tensor.
        num_samples: Weight of this worker's metrics in the average over the workers.

    Raises:
        TypeError: The result is neither a tensor nor a dict.
    """
    if isinstance(returned, torch.Tensor):
        return {NUM_SAMPLES: num_samples, loss_name: returned}
    if isinstance(returned, Mapping):
        return {NUM_SAMPLES: num_samples, **returned}
    raise TypeError(f"`{name}` returned a `{type(returned).__name__}`: return a tensor, a dict of metrics, or nothing.")


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the loss in what `training_step` returned. Return None if `training_step` returned None to skip the batch.

    Raises:
        RuntimeError: `training_step` returned a dict without a loss.
        TypeError: `training_step` returned neither a tensor, a dict, nor None.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(output, Mapping) and loss is None:
        raise RuntimeError(f'`training_step` returned a dict with {sorted(output)}: put the loss under "loss".')
    if loss is not None and not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"`training_step` returned a `{type(loss).__name__}`: return a tensor, a dict with one, or None."
        )
    return loss


def detached(output: Any) -> Any:
    """Return the output of a `training_step` with its tensors detached from the autograd graph.

    Tensors in nested dicts, lists and tuples are included.
    """
    return trees.mapped(output, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, in_lists=True)


def numbers_in(output: Any, loss_name: str) -> dict[str, Any]:
    """Return the numeric values in a step's output by name. The loss is also returned under `loss_name`."""
    if isinstance(output, torch.Tensor):
        return {loss_name: output}
    if not isinstance(output, Mapping):
        return {}
    found = {name: value for name, value in output.items() if _is_number(value)}
    return {loss_name: found["loss"], **found} if "loss" in found else found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


_KEY = "raysgd_progress"


class LightningProgress:
    """Counts optimizer steps, as Lightning does, and the batches of the current epoch.

    With gradient accumulation or manual optimization, the number of optimizer steps differs from the number of batches.

    Args:
        counts_batches: True if a scheduler depends on the number of batches since the epoch started. Otherwise,
            `state_dict` may omit this number.

    Attributes:
        num_steps: Number of optimizer steps, which Lightning calls the global step.
    """

    def __init__(self, counts_batches: bool) -> None:
        self.num_steps = 0
        self._counts_batches = counts_batches
        self._num_batches = self._ahead = 0
        self._epoch: int | None = None
        self._began_at = 0

    def begin_call(self, epoch: int, num_batches: int) -> None:
        """Start a call to `train`. An epoch may take several calls.

        Args:
            epoch: Index of the epoch.
            num_batches: Number of batches trained before the call, in all epochs.
        """
        if num_batches != self._num_batches:  # the operator's state was replaced, so the counts are outdated
            self._ahead, self._epoch = 0, None
        self.num_steps = num_batches + self._ahead
        if epoch != self._epoch:
            self._epoch, self._began_at = epoch, num_batches

    def count_step(self) -> None:
        """Increment the number of optimizer steps."""
        self.num_steps += 1

    def end_batch(self, num_batches: int) -> None:
        """Record the end of a batch. `num_batches` is the number of batches trained so far in all epochs."""
        self._num_batches, self._ahead = num_batches, self.num_steps - num_batches

    def batches_of_epoch(self, num_batches: int) -> int:
        """Return how many of the `num_batches` batches trained in all epochs belong to the current epoch."""
        return num_batches - self._began_at

    def state_dict(self) -> dict[str, Any]:
        """Return the counts to save. The dict is empty if they follow from the number of batches trained."""
        if not self._ahead and not (self._counts_batches and self._num_batches):
            return {}
        return {_KEY: [self._num_batches, self._ahead, self._epoch, self._began_at]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the counts that `state_dict` returned. An empty dict means one optimizer step per batch so far."""
        default = (self._num_batches, 0, self._epoch, self._began_at)
        self._num_batches, self._ahead, self._epoch, self._began_at = state.get(_KEY, default)

    @staticmethod
    def check_state(state: Any) -> None:
        """Check that `load_state_dict` can load a state.

        Raises:
            ValueError: The state is not a mapping, or the counts in it are damaged.
        """
        require(
            isinstance(state, Mapping), f"the state of `LightningOperator` is a `{type(state).__name__}`, not a dict"
        )
        counts = state.get(_KEY, (0, 0, 0, 0))
        require(isinstance(counts, list | tuple) and len(counts) == 4, f"`{_KEY}` is not a list of four counts")
        num_batches, ahead, epoch, began_at = counts
        require(is_integer(ahead), f"`{_KEY}` has a `{type(ahead).__name__}`, not a count of steps")
        for count in (num_batches, 0 if epoch is None else epoch, began_at, num_batches + ahead):
            check_count(_KEY, count)
