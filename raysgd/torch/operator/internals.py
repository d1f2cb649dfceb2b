"""`TorchInternals`: the library's private state for a `TrainingOperator`.

It is stored in the operator's attribute `_raysgd`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from itertools import takewhile
from typing import Any

import torch

from raysgd.core.arrays.user_data import BatchForm
from raysgd.torch.constants import SCHEDULER_STEP, USE_FP16
from raysgd.torch.data import batches
from raysgd.torch.data.batches import as_batch
from raysgd.torch.objects import hyperparameters
from raysgd.torch.objects.criteria import LossCall, observable
from raysgd.torch.objects.hyperparameters import Hyperparameters
from raysgd.torch.objects.precision import warn_of_short_weights
from raysgd.torch.operator.batch_metrics import BatchMetrics
from raysgd.torch.operator.registrar import RegisteredData, RegisteredObjects, register
from raysgd.torch.operator.settings import OperatorContext
from raysgd.torch.parallel.undo import StepRecord, Undo
from raysgd.torch.step.gradients import Gradients
from raysgd.trainer.messages.prediction import HAS_TARGET
from raysgd.trainer.worker.operator import required
from raysgd.trainer.worker.replica_state import require

logger = logging.getLogger(__name__)

_FORMER_NAME = "remakes_frozen"  # of `excludes_frozen_from_state`


class TorchInternals(BatchMetrics):
    """The library's private state for a `TrainingOperator`.

    Attributes:
        registered: Models, optimizers, criterion and schedulers that the operator registered.
        data: Data loaders that the operator registered.
        scheduler_step_freq: When the library steps schedulers: "batch", "epoch", "manual" or None.
        precision: Numeric precision of the training.
        trained: Records frozen parameters and optimizers' parameter groups; None before the end of `setup`.
        remade: Frozen parameters that snapshots and checkpoints omit; None without `excludes_frozen_from_state`.
        gradients: Computes gradients, and steps optimizers. It also clips gradients if user code calls `step` itself.
        chosen: Hyperparameters of the optimizers, such as learning rates, that `setup` chose.
        gpu: The worker's GPU, to which batches are moved; None on a CPU.
        follows_rate: True if the optimizers' learning rates were adjusted when the config's `lr` last changed.
    """

    def __init__(self, operator: Any, config: dict[str, Any], context: OperatorContext) -> None:
        super().__init__(operator, config, context)
        self.data = RegisteredData()
        self._keep(RegisteredObjects())
        self.scheduler_step_freq = context.settings.scheduler_step_freq
        self.precision = context.precision
        self.gpu = context.device if context.use_gpu else None
        self.chosen: list[Hyperparameters] = []
        self.follows_rate = False
        parts = operator, context.precision, self.sync, context.settings.step_options, self.callbacks
        self.gradients = Gradients(*parts, once=self.once)
        self.trained: Any = None
        self.remade: Any = None

    @property
    def use_gpu(self) -> bool:
        return self.context.use_gpu

    def as_batch(self, arrays: Any, form: BatchForm) -> Any:
        """Convert arrays from Ray Data to a batch that the operator's models accept."""
        return as_batch(arrays, form, self.registered.original_models)

    # Before `register` is called, the next three properties return False or None, because no model uses the precision.

    @property
    def fp16(self) -> bool | str:
        """Value of the operator's attribute `use_fp16`: False, True for PyTorch's mixed precision, or "apex"."""
        return self.precision.flag if self.registered.original_models else False

    @property
    def amp(self) -> Any:
        """Value of the operator's attribute `_amp`: a namespace with `autocast`, or Apex's module `amp`."""
        return self.precision.namespace if self.registered.original_models else None

    @property
    def scaler(self) -> Any:
        """Value of the operator's attribute `_amp_scaler`: the gradient scaler of PyTorch's mixed precision."""
        return self.precision.scaler if self.registered.original_models else None

    @property
    def criterion(self) -> Any:
        """The operator's attribute `criterion` or, if it has none, the registered criterion, which may be None."""
        return getattr(self._operator, "criterion", self.registered.criterion)

    def register(self, **given: Any) -> tuple[Any, ...]:
        """Prepare, wrap and record the objects passed to the operator's `register`. Return the wrapped objects."""
        if self._excludes_frozen:
            self.parallel.shares_frozen = False
        register(self._operator, self.context, given, self.registered, self._keep)
        self.gradients.watch(self.registered.optimizers)
        return self.registered.returned

    def _keep(self, registered: RegisteredObjects) -> None:
        self.registered = registered

    def finish_setup(self, reports_ahead: bool = False) -> None:
        """Prepare for training at the end of `setup`. From now on, the gradients of frozen parameters are not averaged.

        Args:
            reports_ahead: True to add a batch's metrics to the epoch's metrics before the batch's backward pass. This
                requires that no user code changes the metrics that `train_batch` returns.
        """
        self._reports_ahead = reports_ahead
        criterion = getattr(self._operator, "criterion", None)
        if observable(criterion) is not criterion:  # user code has set another one than `register` returned
            self._operator.criterion = observable(criterion)
        self.trained = TrainedParts(self.registered)
        self.parallel.rewrap(self.registered.wrapped, is_agreed=True)
        if self._excludes_frozen:
            self._leave_out_frozen()
        if self.world.rank == 0:
            warn_of_short_weights(self.registered.optimizers, type(self._operator).__name__)

    def prepare_steps(self) -> None:
        """From now on, call the user's `optimizer_step` only when a step is due, and after its gradients are ready."""
        own = self._operator.optimizer_step

        @wraps(own)
        def optimizer_step(*args: Any, **options: Any) -> Any:
            is_due = self.gradients.are_ready(options.get("optimizer", args[0] if args else None))
            return own(*args, **options) if is_due else None

        self._operator.optimizer_step = optimizer_step

    @property
    def _excludes_frozen(self) -> bool:
        """True if the operator excludes frozen parameters from its state, also under the attribute's former name."""
        return self._operator.excludes_frozen_from_state or getattr(self._operator, _FORMER_NAME, False)

    def _leave_out_frozen(self) -> None:
        """Check that all ranks have the same frozen parameters, then omit them from snapshots and checkpoints.

        Raises:
            ValueError: The ranks' frozen parameters differ, or the models are sharded.
        """
        from raysgd.torch.objects.remade import RemadeParameters

        name = type(self._operator).__name__
        if hasattr(self._operator, _FORMER_NAME) and self.world.rank == 0:
            logger.warning("`%s.%s` has a new name: write `excludes_frozen_from_state = True`", name, _FORMER_NAME)
        if self.parallel.is_sharded:
            raise ValueError(
                f'`{name}.excludes_frozen_from_state = True` cannot work with `strategy="fsdp"`, where each worker has '
                'a part of what is frozen and reads the parts of checkpoints itself. Remove it, or use "ddp".'
            )
        num_models = len(self.registered.original_models)
        self.remade = RemadeParameters(self.registered.trained, type(self._operator), num_models)
        if self.world.is_distributed:
            self.remade.check_ranks(self.sum_over_workers)

    def rewrap(self) -> None:
        """Average the gradients of all parameters that are trainable now. Implements the operator's `rewrap`."""
        self.parallel.rewrap(self.registered.wrapped)
        if self.trained is not None:  # `self.trained` is None until `setup` has returned
            self.trained.note()
        if self.remade is not None:
            self.remade.follow_trained()

    def follow_trained(self, noted: Noted | None) -> None:
        """Freeze and unfreeze parameters and set parameter groups, as recorded in a snapshot that all ranks load.

        Args:
            noted: Frozen parameters and parameter groups from the snapshot; None for those at the end of `setup`.
        """
        if self.trained.take(noted):
            self.parallel.rewrap(self.registered.wrapped, is_agreed=True)

    def follow(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Adjust the optimizers' learning rates if the config's `lr` has changed.

        Args:
            config: The operator's config after the change.
            changed: Previous values of the config entries that have changed.
        """
        if "lr" not in changed:
            return
        new = hyperparameters.follow(self.chosen, config["lr"], changed["lr"])
        self.follows_rate = any(map(any, new))
        self.chosen = hyperparameters.updated(self.chosen, new)
        hyperparameters.apply(new, self.registered.optimizers, self.registered.schedulers)

    def copy_state(self) -> Callable[[], None]:
        """Copy the state that optimizer steps change, on its devices. Return a function that restores the copy.

        Raises:
            ValueError: There is not enough memory, or the state of an object cannot be copied.
        """
        registered, precision = self.registered, [self.precision] if self.precision.is_mixed else []
        others, callbacks = [*registered.schedulers, *precision], self.callbacks
        undo = Undo(registered.trained, registered.optimizers, others, lambda: callbacks.followers, mode="all")
        undo.open_call()
        record = StepRecord()
        record.note_saved(undo.save(nullcontext()))
        if record.saved is None or not record.saved.copied_all:
            raise ValueError("`Guard(rewind=...)` cannot copy the training state, as the log says: omit `rewind`.")
        return lambda: undo.undo_step(record)

    def trained_parameters(self) -> Iterator[torch.Tensor]:
        """Return all parameters of the registered models and of a criterion with trainable parameters."""
        return (parameter for part in self.registered.trained for parameter in part.parameters())

    def info_of_call(self, num_steps: int | None, epoch_idx: int) -> dict[str, Any]:
        operator = self._operator
        told = {USE_FP16: bool(self.precision.flag), SCHEDULER_STEP: operator.scheduler_step_freq}
        return {**super().info_of_call(num_steps, epoch_idx), **told}

    def evaluate(self, batch: Any) -> tuple[Any, Any, list[LossCall], dict[str, Any]]:
        """Run `forward` on a validation batch.

        Returns:
            - The predictions.
            - The target.
            - Records of the calls to PyTorch's losses that the criterion made.
            - A dict with `val_loss`, the number of samples, and the batch's weight if `forward` returned one.
        """
        operator = self._operator
        comparisons: list[LossCall] = []
        features, target = operator.prepare_batch(batch)
        noting = self.loss_calls.on(self.criterion, comparisons.append)
        with operator.timers.record("eval_fwd"), self.precision.forward(), noting:
            output, loss, weight = self.parts_of_forward(operator.forward(features, target))
        metrics = {"val_loss": loss.detach(), **self.size_of(features, target, weight)}
        return batches.prediction(output), target, comparisons, metrics

    def predict(self, batch: Any, info: Mapping[str, Any]) -> Any:
        """Call the model on the inputs of a batch and return its predictions. The default `predict_batch` does this."""
        operator, model = self._operator, required(self._operator, "model")
        features = batches.inputs(operator.prepare_batch, batch, info.get(HAS_TARGET, False), model)
        with operator.timers.record("predict_fwd"), self.precision.forward():
            output = batches.call_model(model, features)
        return batches.prediction(output)


Flags = tuple[list[list[bool]], list[int]]
Noted = dict[str, Any]
"""Names of parameters, in a dict with two keys.

`frozen`: for each module, the names of its frozen parameters. `groups`: for each optimizer, a list of names for each
parameter group. Names in `groups` are prefixed with the index of the module.
"""


class TrainedParts:
    """Records which parameters are frozen and which parameter groups optimizers have, and detects changes.

    Args:
        registered: Objects that the operator's `setup` registered.
    """

    def __init__(self, registered: RegisteredObjects) -> None:
        self._registered = registered
        self._of_setup = _read(registered)
        self.note()

    def note(self) -> None:
        """Record the current frozen parameters and parameter groups."""
        self._now, self._flags = _read(self._registered), _flags_of(self._registered)

    @property
    def since_setup(self) -> Noted | None:
        """Frozen parameters and parameter groups at the last call to `note`, to store in a snapshot.

        None if they have not changed since the end of `setup`.
        """
        return None if self._now == self._of_setup else self._now

    @property
    def flags(self) -> Flags:
        """Current `requires_grad` of each parameter, and current number of parameter groups of each optimizer."""
        return _flags_of(self._registered)

    def has_changed(self, freezes_in_batches: bool = False) -> bool:
        """Return True if parameters were frozen or unfrozen, or parameter groups were added, since the last `note`.

        If all parameters of a model are now frozen, the model counts as unchanged. The reason is that user code, such
        as a GAN, may freeze a whole model during a part of each batch.

        Args:
            freezes_in_batches: True to ignore newly frozen parameters. Unfrozen parameters and added parameter groups
                are still detected.
        """
        present = _flags_of(self._registered)
        if present == self._flags:
            return False
        (flags, counts), (noted, noted_counts) = present, self._flags
        if freezes_in_batches:
            noted = [
                [now and before for now, before in zip(*both, strict=True)] for both in zip(flags, noted, strict=True)
            ]
        return counts != noted_counts or any(
            any(now) and now != before for now, before in zip(flags, noted, strict=True)
        )

    def check(self, freezes_in_batches: bool = False) -> None:
        """Check that user code has called `rewrap` after each change of the frozen parameters or parameter groups.

        Args:
            freezes_in_batches: True to ignore newly frozen parameters. Unfrozen parameters and added parameter groups
                are still detected.

        Raises:
            ValueError: Parameters were frozen or unfrozen, or parameter groups were added, without a call to `rewrap`.
        """
        if self.has_changed(freezes_in_batches):
            raise ValueError(
                "Parameters were frozen or unfrozen (`requires_grad`), or parameter groups were added, since `setup` "
                "or the last `self.rewrap()`. Call `self.rewrap()` on all workers after such a change."
            )

    def take(self, noted: Noted | None) -> bool:
        """Freeze and unfreeze parameters and replace parameter groups, as recorded in a snapshot.

        Args:
            noted: Frozen parameters and parameter groups from the snapshot; None for those at the end of `setup`.

        Returns:
            True if anything has changed.

        Raises:
            ValueError: A parameter group in the snapshot has parameters that the operator has not registered.
        """
        noted = noted or self._of_setup
        if noted == self._now and not self.has_changed():
            return False
        groups = self.groups_after(noted)
        for part, frozen in zip(self._registered.trained, map(set, noted["frozen"]), strict=True):
            for name, parameter in part.named_parameters():
                parameter.requires_grad_(name not in frozen)
        for optimizer, own in zip(self._registered.optimizers, groups, strict=True):
            _give_groups(optimizer, own)
        self.note()
        return True

    def groups_after(self, noted: Noted | None) -> list[list[list[torch.Tensor]]]:
        """Return the parameters in each group of each optimizer, as they are after `take(noted)`.

        Raises:
            ValueError: A parameter group in the snapshot has parameters that the operator has not registered.
        """
        parameters = _names(self._registered)
        names = {id(parameter): name for name, parameter in parameters.items()}
        groups = (noted or self._of_setup)["groups"]
        pairs = zip(self._registered.optimizers, groups, strict=True)
        return [_groups_after(_groups_of(each), _named(each, names), some, parameters) for each, some in pairs]


def _flags_of(registered: RegisteredObjects) -> Flags:
    flags = [[parameter.requires_grad for parameter in part.parameters()] for part in registered.trained]
    return flags, [len(getattr(optimizer, "param_groups", ())) for optimizer in registered.optimizers]


def _read(registered: RegisteredObjects) -> Noted:
    names = {id(parameter): name for name, parameter in _names(registered).items()}
    frozen = [[name for name, each in part.named_parameters() if not each.requires_grad] for part in registered.trained]
    return {"frozen": frozen, "groups": [_named(optimizer, names) for optimizer in registered.optimizers]}


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    return groups


def _named(optimizer: Any, names: Mapping[int, str]) -> list[list[str | None]]:
    """Return the parameters' names in each parameter group of an optimizer.

    Args:
        optimizer: The optimizer.
        names: Names of the parameters of registered modules, by parameter ID. Other parameters get None.
    """
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in _groups_of(optimizer)]


def _names(registered: RegisteredObjects) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": parameter
        for index, part in enumerate(registered.trained)
        for name, parameter in part.named_parameters()
    }


def _groups_after(
    own: Sequence[Mapping[str, Any]],
    own_names: Sequence[Sequence[str | None]],
    names: Sequence[Sequence[str | None]],
    parameters: Mapping[Any, torch.Tensor],
) -> list[list[torch.Tensor]]:
    """Return the parameters in each group of an optimizer, once its groups have the parameters with these names.

    Args:
        own: The optimizer's groups.
        own_names: Names of the parameters in each of these groups.
        names: Names of the parameters in each group afterwards. From the first group with other names on, all of its
            parameters must be registered.
        parameters: Registered parameters by name.
    """
    alike = [*takewhile(lambda pair: pair[0] == pair[1], zip(own_names, names, strict=False))]
    added = names[len(alike) :]
    strangers = [name for group in added for name in group if name not in parameters]
    require(not strangers, f"an optimizer has parameters that are not registered here ({strangers})")
    kept = [list(group["params"]) for group in own[: len(alike)]]
    return [*kept, *([parameters[name] for name in group] for group in added)]


def _give_groups(optimizer: Any, groups: Sequence[Sequence[torch.Tensor]]) -> None:
    """Replace an optimizer's parameter groups, starting with the first group that differs from its entry in `groups`.

    The optimizer's state of the parameters in replaced groups is discarded.

    Args:
        optimizer: Optimizer to change.
        groups: The parameters in each group.
    """
    own = [[*map(id, group["params"])] for group in _groups_of(optimizer)]
    wanted = [[*map(id, group)] for group in groups]
    num_alike = len([*takewhile(lambda pair: pair[0] == pair[1], zip(own, wanted, strict=False))])
    for group in _groups_of(optimizer)[num_alike:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    if len(own) > num_alike:
        del optimizer.param_groups[num_alike:]
    for added in groups[num_alike:]:
        optimizer.add_param_group({"params": list(added)})
