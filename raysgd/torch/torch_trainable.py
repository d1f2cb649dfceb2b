"""`BaseTorchTrainable`: a trial of Ray Tune that creates a `TorchTrainer` and runs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from raysgd.core.arguments import with_entries
from raysgd.exceptions import RemovedNameError
from raysgd.torch.driver import arguments
from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.trainer.configuration import Placement
from raysgd.trainer.driver import tune_trial

_BESIDE = ("resources_per_worker", "accelerator_type")
_RESOURCES = ("num_workers", "num_cpus_per_worker", "num_gpus_per_worker", "use_gpu", "use_local", *_BESIDE)


class BaseTorchTrainable(tune_trial.trainer_trainable("`BaseTorchTrainable`")):  # type: ignore[misc]
    """A trial of Ray Tune that, in each iteration, trains for one epoch and then validates.

    `TorchTrainer.as_trainable` returns a subclass. Subclass that class or this one. Override `step` to change what an
    iteration does, or `_create_trainer(tune_config)` to create the trainer yourself.
    """

    _checkpoint_name = "trainer.checkpoint"

    @property
    def trainer(self) -> TorchTrainer:
        """The `TorchTrainer` that this trial has created."""
        return self._trainer

    def step(self) -> dict[str, Any]:
        """Train for one epoch, then validate. Return both results in one dict.

        For a key that both results contain, the dict has the value from the validation. If a worker dies, the trial
        fails immediately, and Tune's `FailureConfig` decides whether to run it again.
        """
        if hasattr(self, "_train"):
            raise RemovedNameError(
                f"`{type(self).__name__}._train` is no longer called: rename it to `step`, as in `ray.tune.Trainable`."
            )
        trained = self.trainer.train(max_retries=0, profile=True)
        return tune_trial.merged(trained, self.trainer.validate(profile=True))


def make_trainable(
    trainer_cls: type[TorchTrainer],
    args: tuple[Any, ...],
    override_tune_step: Callable[[Any, dict[str, Any]], Any] | None,
    options: Mapping[str, Any],
) -> type[BaseTorchTrainable]:
    """Create a trial class. Implements `TorchTrainer.as_trainable`.

    Args:
        trainer_cls: Class of the trainer.
        args: Positional arguments of `as_trainable`, which are rejected.
        override_tune_step: Function `(trainer, info)` that replaces `step`, or None.
        options: Arguments for the trainer.

    Raises:
        TypeError: Positional arguments were passed.
        ValueError: `override_tune_step` does not accept two arguments.
    """
    if args:
        raise TypeError(f"`as_trainable` got {args!r} without names: pass all arguments of the trainer by name.")
    check_step(override_tune_step)

    class TorchTrainable(BaseTorchTrainable):
        """A trial whose trainer is created from the arguments of `as_trainable` and the trial's config."""

        def step(self) -> dict[str, Any]:
            if override_tune_step is None:
                return super().step()
            return override_tune_step(self._trainer, {"iteration": self.training_iteration})

        def _create_trainer(self, tune_config: dict[str, Any]) -> TorchTrainer:
            self._resources = _resources_of(options, tune_config)
            return trainer_cls(**{**options, **self._resources, "config": _config_of(options, tune_config)})

        def _reset_trainer(self, tune_config: dict[str, Any]) -> bool:
            if _resources_of(options, tune_config) != self._resources:
                return False
            self._trainer.reset_config(_config_of(options, tune_config))
            return True

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:
            return tune_trial.reservation(_bundles_of(options, config))

    return TorchTrainable


def check_step(override_tune_step: Any) -> None:
    """Check that `override_tune_step` is None or a function of two arguments: the trainer and a dict.

    Raises:
        ValueError: `override_tune_step` is something else.
    """
    names = [*inspect.signature(override_tune_step).parameters] if callable(override_tune_step) else []
    if override_tune_step is not None and len(names) != 2:
        raise ValueError(
            f"`override_tune_step={override_tune_step!r}`: need a function of two arguments, the trainer and a dict "
            "with `iteration`."
        )


def _config_of(options: Mapping[str, Any], tune_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config` in the trainer's arguments (`options`), updated with what Tune chose for a trial."""
    return with_entries(options.get("config") or {}, tune_config)


def _resources_of(options: Mapping[str, Any], tune_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's arguments that determine which resources it reserves.

    Values in the trial's config replace values in `options`, the arguments that the user passed.
    """
    found = {name: source[name] for source in (options, tune_config) for name in _RESOURCES if name in source}
    use_gpu = found.get("use_gpu")
    return {**found, "use_gpu": options.get("use_gpu", "auto") if use_gpu in ("auto", None) else bool(use_gpu)}


def _bundles_of(options: Mapping[str, Any], tune_config: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the resources that Tune reserves for a trial: a dict for the trial's process, then one for each worker.

    Spare workers are included. If the trial's process runs a worker itself (`use_local`), it has no separate dict.
    """
    found = _resources_of(options, tune_config)
    num_gpus = arguments.choose_for({**options, **found}).num_gpus
    beside = Placement(*(found.get(name) for name in _BESIDE))
    worker = {"CPU": found.get("num_cpus_per_worker", 1), "GPU": num_gpus, **beside.custom}
    num_workers = found.get("num_workers", 1) + options.get("spare_workers", 0)
    return [*([] if found.get("use_local") else [{"CPU": 1}]), *[worker] * num_workers]
