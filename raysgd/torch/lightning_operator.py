"""`LightningOperator`: trains a `LightningModule`, in place of Lightning's own `Trainer`.

The module's steps, hooks, `configure_optimizers` and `self.log` work unchanged. raysgd manages processes, data,
checkpoints and recovery. Values that a step returns or logs are averaged over the samples of all workers, unless
`self.log` gets another `reduce_fx`.

Hooks have the signatures of Lightning 2. `docs/lightning.md` lists the hooks that are called. Hooks that Lightning 2
removed (`training_epoch_end`, `validation_epoch_end`, `training_step_end`, `validation_step_end`,
`on_pretrain_routine_start`, `configure_apex`) are called if the module has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.imports import require
from raysgd.core.numbers.meters import AverageMeterCollection
from raysgd.torch import lightning
from raysgd.torch.data.sample_order import length_of
from raysgd.torch.objects.models import begin_training
from raysgd.torch.step.schedulers import Plateau
from raysgd.torch.training_operator import TrainingOperator
from raysgd.trainer.messages.epochs import VALIDATES
from raysgd.utils import NUM_SAMPLES

# Lightning can be installed under either name.
if not any(find_spec(name) for name in ("lightning", "pytorch_lightning")):
    require("lightning", extra="lightning", purpose="`LightningOperator`")

logger = logging.getLogger(__name__)

SCHEDULER_STEP_PTL = "ptl"  # value of `scheduler_step_freq` if `configure_optimizers` defines when schedulers step


def make_operator(
    parent: type[TrainingOperator], lightning_module_cls: type[Any], train_dataloader: Any, val_dataloader: Any
) -> type[LightningOperator]:
    """Create an operator class that trains a `LightningModule`. Implements `TrainingOperator.from_ptl`.

    Args:
        parent: Class on which the user called `from_ptl`. If it is a `LightningOperator`, the new class inherits from
            it; otherwise the new class inherits from `LightningOperator`.
        lightning_module_cls: The user's `LightningModule` class.
        train_dataloader: Loader for training; None to call the module's `train_dataloader`.
        val_dataloader: Loader for validation; None to call the module's `val_dataloader`.
    """
    lightning.lightning_base(lightning_module_cls)
    for name, given in (("train_dataloader", train_dataloader), ("val_dataloader", val_dataloader)):
        if hasattr(given, "setup") and hasattr(given, "train_dataloader"):
            raise TypeError(
                f"`{name}` is a `LightningDataModule`, which a `LightningOperator` does not run: call "
                "`data.prepare_data()` and `data.setup('fit')`, and pass `train_dataloader=data.train_dataloader(), "
                "val_dataloader=data.val_dataloader()`."
            )
    members = {
        "_lightning_module_cls": lightning_module_cls,
        "_train_dataloader": train_dataloader,
        "_val_dataloader": val_dataloader,
    }
    parent = parent if issubclass(parent, LightningOperator) else LightningOperator
    return type("CustomLightningOperator", (parent,), members)


class LightningOperator(TrainingOperator):
    """Trains the `LightningModule` class passed to `TrainingOperator.from_ptl`.

    Subclass `LightningOperator` to override the operator's methods.

    Attributes:
        ddp_args: Options for `DistributedDataParallel`. Set it to `{}`, which is faster, if every loss uses all
            parameters.
    """

    _lightning_module_cls: type[Any]
    _train_dataloader: Any = None
    _val_dataloader: Any = None
    ddp_args: Mapping[str, Any] = {"find_unused_parameters": True}
    _freezes_in_batches = True  # freezing is no error: a GAN, for example, may freeze one network in some batches
    warms_up = False  # a warm-up batch would run before `on_train_start`, contrary to what the module's hooks expect

    def setup(self, config: dict[str, Any]) -> None:
        """Create the `LightningModule` and run its setup hooks, in the order of Lightning 2."""
        module = self._module = lightning.instantiate(self._lightning_module_cls, config, says_so=self.world_rank == 0)
        self._hooks, self._has_started = lightning.LightningHooks(module), False
        self._meters: AverageMeterCollection | None = None
        self._trainer = module.trainer = lightning.TrainerStandIn.of(
            self._raysgd.world, self.device, self._hooks.part_of_package("plugins").Precision(), self._backward
        )
        self._trainer.accumulate_grad_batches = self._raysgd.context.settings.step_options.accumulate_grad_batches
        lightning.warn_of_what_is_not_called(self._hooks, type(module).__name__)
        self._prepare_data()
        self._hooks.call("setup", "fit")
        self._hooks.call("configure_model")
        self._register_module()
        self._hooks.call("on_fit_start")
        self._hooks.call("on_pretrain_routine_start")
        self.register_data(
            train_loader=self._loader(self._train_dataloader, "train_dataloader"),
            validation_loader=self._loader(self._val_dataloader, "val_dataloader"),
        )

    def _prepare_data(self) -> None:
        per_node = getattr(self._module, "prepare_data_per_node", True)
        if (self.local_rank if per_node else self.world_rank) == 0:
            self._hooks.call("prepare_data")
        self._raysgd.sum_over_workers(0.0)  # wait until `prepare_data` has returned on all workers

    def _register_module(self) -> None:
        module, trainer = self._module, self._trainer
        if not self._hooks.overrides("configure_optimizers"):
            raise self._hooks.part_of_package("utilities.exceptions").MisconfigurationException(
                f"`{type(module).__name__}` does not define `configure_optimizers`: return the optimizers there."
            )
        # Move the module first, because some optimizers create state on the parameters' device in their constructor.
        self._raysgd.context.to_device(module)
        optimizers, self._scheduler_dicts = lightning.optimizers_and_schedulers(module.configure_optimizers())
        lightning.check_optimizers(module, optimizers)
        self._raysgd.scheduler_step_freq = SCHEDULER_STEP_PTL
        schedulers = [entry["scheduler"] for entry in self._scheduler_dicts]
        by_batches = [
            each for each in self._scheduler_dicts if each["interval"] in lightning.PER_BATCH and each["frequency"] > 1
        ]
        self._progress = lightning.LightningProgress(counts_batches=bool(by_batches))
        self.register(models=[module], optimizers=optimizers, schedulers=schedulers, ddp_args=dict(self.ddp_args))
        trainer.model, trainer.optimizers = self.model, self.optimizers
        trainer.lr_scheduler_configs = [SimpleNamespace(**entry) for entry in self._scheduler_dicts]
        trainer.strategy._lightning_optimizers = [
            lightning.SteppingOptimizer(each, self._step) for each in self.optimizers
        ]

    def _configure_apex_amp(
        self, amp: Any, models: list[torch.nn.Module], optimizers: list[Any], apex_args: dict[str, Any]
    ) -> tuple[Any, Any]:
        if not self._hooks.has("configure_apex"):
            return super()._configure_apex_amp(amp, models, optimizers, {"opt_level": "O2", **apex_args})
        model, optimizers = self._module.configure_apex(amp, models[0], optimizers, "O2")
        return [model], optimizers

    def _loader(self, given: Any, hook: str) -> Any:
        loader = self._hooks.call(hook) if given is None and self._hooks.overrides(hook) else given
        return lightning.one_loader(loader, hook)

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """Train on all batches, or until `on_train_batch_start` returns -1 on any worker.

        With `strategy="none"`, only the worker on which the hook returns -1 stops. If the epoch continues after a
        failure, the surviving workers do not call the epoch-start hooks a second time.

        Returns:
            What the module's hook `training_epoch_end` returned. If there is no such hook, or if it returned None, the
            mean and the last value (`last_<name>`) of each number that `training_step` returns or logs. The loss is
            named `train_loss`, even if the step returns it as `loss`.

        Raises:
            ValueError: A scheduler steps every few epochs, but `num_steps` ends the call within an epoch.
        """
        if num_steps is not None and any(each["frequency"] > 1 for each in self._of_epochs()):
            raise ValueError(
                f'`train(num_steps={num_steps})` counts as an epoch of the module, but a scheduler with `"interval": '
                '"epoch"` and a "frequency" counts passes over the data: omit one of the two, or write `"interval": '
                '"step"`.'
            )
        self._progress.begin_call(epoch_idx, self.global_step)
        self._trainer.current_epoch, self._trainer.global_step = epoch_idx, self._progress.num_steps
        info = {**self._raysgd.info_of_call(num_steps, epoch_idx), **(info or {})}
        begin_training(self._module)
        meters, before = self._raysgd.take_meters(), self._meters
        trained = self._raysgd.trained
        flags = trained.flags
        with torch.enable_grad(), self._epoch("train", "training_epoch_end", meters):
            if not self._has_started:
                self._hooks.call("on_train_start")
            self._has_started = True
            if meters is not before:
                self._hooks.call("on_train_epoch_start")
            if trained.flags != flags:  # a hook has frozen or unfrozen parameters, or added a parameter group
                self.rewrap()
            self._train_on_batches(iterator, info, meters)
            result = self._end_epoch(meters, "training_epoch_end", "on_train_epoch_end")
            self._step_schedulers(lightning.PER_EPOCH, epoch_idx + 1, result, waits=info.get(VALIDATES, False))
        return result

    def _train_on_batches(self, iterator: Iterable[Any], info: dict[str, Any], meters: AverageMeterCollection) -> None:
        leg = self._raysgd.sync.leg
        self._parts: list[dict[str, Any]] = []  # metrics of each part of the current batch, if the batch is split
        for batch_idx, batch in enumerate(iterator, start=meters.num_batches):
            batch = self._to_device(batch)
            self._values.begin_batch(is_counted=not leg.plan.is_padding)
            if self._is_stopped_at(batch, batch_idx):
                self._skip_rest(iterator)
                break
            metrics = self.train_batch(batch, {**self._raysgd.info_of_batch(batch_idx), **info})
            self._raysgd.end_batch(metrics, batch)
            if leg.plan.ends_step:
                self._progress.end_batch(self.global_step)
        meters.count_pending()
        self._progress.end_batch(self.global_step)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train on one batch, and return the batch's metrics.

        With manual optimization, the module's `training_step` steps the optimizers itself.
        """
        batch_idx = batch_info["batch_idx"]
        if self._module.automatic_optimization:
            output = self._optimize(batch, batch_idx)
        else:
            _, output = self._training_step(batch, batch_idx)
        leg = self._raysgd.sync.leg
        leg.skip()  # if the module ran no backward pass, record that it skipped the batch
        if self._scheduler_dicts:
            num_samples = 0 if leg.plan.is_padding else self._raysgd.num_samples(batch)
            numbers = lightning.numbers_in(output, self._values.loss_name)
            self._parts.append({NUM_SAMPLES: num_samples, **numbers, **self._values.of_batch})
            if leg.plan.ends_step and not (self._raysgd.precision.has_skipped() or self._raysgd.meters.is_left_out):
                self._step_schedulers(
                    lightning.PER_BATCH, self._progress.batches_of_epoch(self.global_step + 1), *self._parts
                )
            if leg.plan.ends_global_batch:
                self._parts.clear()
        self._hooks.call("on_train_batch_end", output, batch, batch_idx, dataloader_idx=0)
        return self._values.metrics_of(output)

    def _optimize(self, batch: Any, batch_idx: int) -> Any:
        """Call the module's `optimizer_step` with a closure that runs the training step and the backward pass.

        With gradient accumulation, the module's `optimizer_step` is called only in the last batch before an optimizer
        step. In the other batches, this method calls the closure directly.

        Returns:
            The detached output of the training step.
        """
        optimizer = self.optimizers[0] if self.optimizers else None
        where = self._trainer.current_epoch, batch_idx
        output = None

        def closure() -> torch.Tensor | None:
            nonlocal output
            loss, output = self._training_step(batch, batch_idx)
            leg = self._raysgd.sync.leg
            if optimizer is not None and not (leg.rules.has_several and leg.adds_to(optimizer)):
                self._hooks.call("on_before_zero_grad", optimizer)
                self._hooks.call("optimizer_zero_grad", *where, optimizer, optimizer_idx=0)
            if loss is None:
                self._raysgd.gradients.skip(optimizer)
                return None
            self._backward(loss, optimizer)
            return loss.detach()

        if optimizer is None or not self._raysgd.sync.leg.plan.ends_step:
            closure()
        else:
            stepping = self._trainer.strategy._lightning_optimizers[0]
            self._hooks.call("optimizer_step", *where, stepping, closure)
            self._count_step()  # Lightning counts a step even if `training_step` returned None
        return output

    def _count_step(self) -> None:
        self._progress.count_step()
        self._trainer.global_step = self._progress.num_steps

    def _training_step(self, batch: Any, batch_idx: int) -> tuple[torch.Tensor | None, Any]:
        """Run the module's `training_step`. Return the loss for the backward pass, and the detached output.

        The loss is None with manual optimization, and on a single worker also if `training_step` returned None.

        Raises:
            ValueError: `training_step` returned None, and there are other workers, or others may join.
        """
        output, sync = None, self._raysgd.sync

        def run() -> torch.Tensor | None:
            nonlocal output
            with self.timers.record("fwd"), self._raysgd.precision.forward():
                output = self._hooks.call("training_step", batch, batch_idx, dataloader_idx=0, optimizer_idx=0)
                if self._hooks.has("training_step_end"):
                    output = self._hooks.call("training_step_end", output)
            if not self._module.automatic_optimization:
                return None
            loss, may_grow = lightning.loss_of(output), sync.averages and self._raysgd.context.settings.may_grow
            if loss is None and (may_grow or sync.num_ranks > 1):
                raise ValueError(
                    "`training_step` returned None, which works on a single worker only, to which none can be added: "
                    "other workers would wait for the gradients of the batch. Return `0 * loss` instead, which counts "
                    "with its samples."
                )
            return loss

        loss = run() if self.model is self._module else lightning.run_in_forward_of(self.model, self._module, run)
        return loss, lightning.detached(output)

    def _backward(self, loss: torch.Tensor, optimizer: Any = None, *arguments: Any, **options: Any) -> None:
        """Compute the gradients of a loss. The module's `manual_backward` also calls this method."""
        if not self._module.automatic_optimization and isinstance(self.model, DistributedDataParallel):
            self._hooks.part_of_package("overrides.distributed").prepare_for_backward(self.model, loss)
        self._hooks.call("on_before_backward", loss)
        precision = self._raysgd.precision

        def run(loss: torch.Tensor) -> None:
            if self._hooks.overrides("backward") or arguments or options:
                scaler = precision.scaler
                self._module.backward(scaler.scale(loss) if scaler else loss, *arguments, **options)
            else:
                precision.backward(loss, optimizer)

        with self.timers.record("grad"):
            self._raysgd.gradients.backward(loss, optimizer, run=run, clears=False)
        self._hooks.call("on_after_backward")

    def _step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        """Run the closure, finish averaging the gradients, and step the optimizer. Return the closure's loss.

        The module gets its optimizers in `SteppingOptimizer` wrappers, whose `step` calls this method. If all workers
        have skipped all batches of the step, the optimizer does not step.
        """
        loss, batch = closure() if closure is not None else None, self._raysgd.sync.leg.batch

        def before(optimizer: Any) -> None:
            self._hooks.call("on_before_optimizer_step", optimizer, optimizer_idx=0)
            if self._module.automatic_optimization and self._hooks.overrides("configure_gradient_clipping"):
                self._hooks.call("configure_gradient_clipping", optimizer, None, None)

        with self.timers.record("apply"):
            self._raysgd.gradients.apply(optimizer, before)
        if not (self._module.automatic_optimization or id(optimizer) in batch.skipped):
            self._count_step()
        return loss

    def _is_stopped_at(self, batch: Any, batch_idx: int) -> bool:
        stops = self._hooks.call("on_train_batch_start", batch, batch_idx, dataloader_idx=0) == -1
        if not (self._raysgd.sync.averages and self._hooks.overrides("on_train_batch_start")):
            return stops
        return self._raysgd.sum_over_workers(float(stops))[0] > 0  # stop on all ranks, or the others would wait

    def _skip_rest(self, iterator: Iterable[Any]) -> None:
        """Consume the epoch's remaining batches, so that the next epoch starts at the beginning of the data.

        The batches of a loader without a length are not consumed, because there may be no end to them.
        """
        leg = self._raysgd.sync.leg
        leg.end_waiting()  # tell the other ranks not to wait for a backward pass of this rank
        if length_of(self._raysgd.data.train_loader) is not None:
            for _ in iterator:
                leg.end_waiting()

    def _step_schedulers(
        self, intervals: tuple[str, ...], count: int, *parts: Mapping[str, Any], waits: bool = False
    ) -> None:
        if not self._module.automatic_optimization:
            return
        for entry in self._scheduler_dicts:
            if entry["interval"] not in intervals or count % entry["frequency"]:
                continue
            needs_value, mean_of = entry["reduce_on_plateau"], self._raysgd.mean_over_workers
            value = mean_of(str(entry["monitor"]), *parts) if needs_value else None
            if not needs_value or value is not None:
                self._hooks.call("lr_scheduler_step", entry["scheduler"], value)
            elif not waits:
                logger.warning(
                    "no metric `%s` was reported, so its scheduler waits until you call `trainer.update_scheduler`",
                    entry["monitor"],
                )

    def _of_epochs(self) -> list[dict[str, Any]]:
        entries = self._scheduler_dicts if self._module.automatic_optimization else []
        return [entry for entry in entries if entry["interval"] in lightning.PER_EPOCH]

    def _plateaus(self, epoch: int) -> list[Plateau]:
        return [
            (str(entry["monitor"]), partial(self._hooks.call, "lr_scheduler_step", entry["scheduler"]))
            for entry in self._of_epochs()
            if entry["reduce_on_plateau"] and epoch % entry["frequency"] == 0
        ]

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate on all batches of `val_iterator`, and run the module's validation hooks.

        Returns:
            What the module's hook `validation_epoch_end` returned. If there is no such hook, or if it returned None,
            the mean and the last value of each number that `validation_step` returns or logs. The loss is named
            `val_loss`.
        """
        meters = self._raysgd.new_meters()
        with torch.no_grad(), self._epoch("validation", "validation_epoch_end", meters):
            self._hooks.call_or("on_validation_model_zero_grad", self._module.zero_grad)
            self._hooks.call_or("on_validation_model_eval", self._module.eval)
            self._hooks.call("on_validation_start")
            self._hooks.call("on_validation_epoch_start")
            for batch_idx, batch in enumerate(val_iterator):
                self._values.begin_batch()
                metrics = self.validate_batch(self._to_device(batch), {"batch_idx": batch_idx, **(info or {})})
                meters.update(*self._raysgd.values_and_weight(metrics, "validate_batch"))
            result = self._end_epoch(meters, "validation_epoch_end", "on_validation_epoch_end")
            self._hooks.call("on_validation_end")
            return result

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Run the module's `validation_step` and its hooks on one batch, and return the batch's metrics.

        The step runs on the module without its `DistributedDataParallel` wrapper, because the wrapper's forward pass
        may wait for workers that have fewer batches.
        """
        batch_idx = batch_info["batch_idx"]
        self._hooks.call("on_validation_batch_start", batch, batch_idx, dataloader_idx=0)
        with self.timers.record("eval_fwd"), self._raysgd.precision.forward():
            output = self._hooks.call("validation_step", batch, batch_idx, dataloader_idx=0)
            if self._hooks.has("validation_step_end"):
                output = self._hooks.call("validation_step_end", output)
        self._hooks.call("on_validation_batch_end", output, batch, batch_idx, dataloader_idx=0)
        return self._values.metrics_of(output)

    def predict_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> Any:
        """Call the module's `predict_step` on a batch. If the user did not override it, call the module on the input.

        Returns:
            The predictions for the batch.
        """
        if not self._hooks.overrides("predict_step"):
            return super().predict_batch(batch, batch_info)
        with self._raysgd.precision.forward():
            return self._hooks.call("predict_step", self._to_device(batch), batch_info["batch_idx"], dataloader_idx=0)

    @contextmanager
    def _epoch(self, stage: str, hook: str, meters: AverageMeterCollection) -> Iterator[None]:
        """Collect the values that the module logs during the `with` block.

        Args:
            stage: "train" or "validation". The module can read it from `self.trainer`.
            hook: Name of the hook that needs the steps' outputs at the end of the epoch.
            meters: Meters that accumulate the epoch's metrics. If they are the same object as in the previous call to
                `_epoch`, the epoch continues after a failure, and the values collected so far are kept.
        """
        if meters is not self._meters:
            keeps_outputs = self._hooks.has(hook) or self._hooks.wants(f"on_{stage}_epoch_end", "outputs")
            self._values = lightning.EpochValues("train_loss" if stage == "train" else "val_loss", keeps_outputs)
        self._meters = meters
        self._trainer.training, self._trainer.validating = stage == "train", stage == "validation"
        try:
            with self._values.listening_to(self._module):
                yield
        finally:
            self._trainer.training = self._trainer.validating = False

    def _end_epoch(self, meters: AverageMeterCollection, old_hook: str, hook: str) -> dict[str, Any]:
        values = self._values
        values.begin_values_of_epoch()
        returned = self._hooks.call(old_hook, values.outputs)
        self._hooks.call(hook, outputs=values.outputs)
        if returned is None:
            result: dict[str, Any] = values.summary(meters, self._raysgd.new_meters())
        else:
            result = lightning.result_of_hook(old_hook, returned, values.loss_name, meters.n)
        self._trainer.callback_metrics = {**self._trainer.callback_metrics, **result}
        return result

    def _to_device(self, batch: Any) -> Any:
        batch = self._hooks.call("on_before_batch_transfer", batch, 0)
        batch = self._hooks.call("transfer_batch_to_device", batch, self.device, 0)
        return self._hooks.call("on_after_batch_transfer", batch, 0)

    @property
    def _needs_copies(self) -> bool | None:  # type: ignore[override]
        if not self._module.automatic_optimization:
            return True
        return None if any(map(self._hooks.overrides, ("optimizer_step", "backward"))) else False

    @property
    def model(self) -> Any:
        """The module or, if the strategy wraps the module, its `DistributedDataParallel` wrapper."""
        return self._raysgd.registered.models[0]

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that `configure_optimizers` returned."""
        return self._raysgd.registered.optimizers

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers that `configure_optimizers` returned."""
        return self._raysgd.registered.schedulers

    @property
    def scheduler_dicts(self) -> list[dict[str, Any]]:
        """For each scheduler, a dict with the scheduler and Lightning's entries that define when it steps."""
        return self._scheduler_dicts

    def get_model(self) -> Any:
        """Return the unwrapped `LightningModule`."""
        return self._module

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: counts of steps and batches, and entries that `on_save_checkpoint` adds."""
        checkpoint = self._progress.state_dict()
        self._hooks.call("on_save_checkpoint", checkpoint)
        return checkpoint

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` returned, and pass it to the module's `on_load_checkpoint`."""
        if state_dict is not None:
            self._progress.load_state_dict(state_dict)
            self._hooks.call("on_load_checkpoint", state_dict)

    def _check_saved_state(self, state_dict: Any) -> None:
        if state_dict is not None:
            self._progress.check_state(state_dict)


__all__ = ["LightningOperator"]
