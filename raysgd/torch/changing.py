"""Changes of what the live workers of a `TorchTrainer` train: another operator class, the state of another trainer."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raysgd.engine.call import Call
from raysgd.engine.types import World
from raysgd.torch import arguments
from raysgd.torch.range_test import Loss, LrCurve, RangeTest, take_steps
from raysgd.torch.saving import SavingTrainer
from raysgd.torch.settings import TorchSettings
from raysgd.torch.state_loader import StateLoader
from raysgd.torch.torch_runner import TorchRunner

if TYPE_CHECKING:
    from raysgd.torch.torch_trainer import TorchTrainer
    from raysgd.torch.training_operator import TrainingOperator


class ChangingTorchTrainer(SavingTrainer):
    """A trainer whose workers can go on with another class, or with the state of others."""

    _settings: TorchSettings
    _runner_cls = TorchRunner

    def reload(self, training_operator_cls: type[TrainingOperator]) -> None:
        """Goes on with another operator class, usually an edited one, in the same workers and with the same state.

        Each worker makes an operator of the new class and gives it the state of the old one. Only when all have done so
        they drop the old ones. Hyperparameters of optimizers that the new class chooses differently are taken over.
        Attributes that are not part of the state are as the new `setup` makes them.

        Args:
            training_operator_cls: The new class.

        Raises:
            TypeError: It is no operator class.
            ValueError: The state does not fit what the new class registers, or the trainer is one with FSDP or Horovod.
                The old class is kept on all workers.
            WorkerError: `setup` of the new class raised; also of the class that it raised. The old class is kept.
        """
        arguments.check_operator_class(training_operator_cls)
        if self._facts.is_sharded or self.backend == "horovod":
            what = '`backend="horovod"`' if self.backend == "horovod" else '`parallel="fsdp"`'
            raise ValueError(f"`reload` cannot work with {what}: save, and load into a new trainer with the new class.")
        settings = replace(
            self._settings, training_operator_cls=training_operator_cls, revision=self._settings.revision + 1
        )
        if self._group_settings.is_driver_only:
            self._controller.ensure_group()
        else:
            _send_by_value(training_operator_cls)
            self._controller.snapshot()  # the calls before this one were of the old class
        edited = self._prepared(settings)
        with self._adopted(settings):
            options = {"changes_state": True, "keeps_alike": True, "is_repeatable": False}
            facts = self._on_all(TorchRunner.finish_reload, settings.revision, edited, **options)
        self._sharing.forget()
        if None in facts:  # the group was changed in between
            self._controller.kill_group()
            self._controller.ensure_group()
        else:
            self._controller.take_facts(facts)

    def _prepared(self, settings: TorchSettings) -> Any:
        """Lets all workers make an operator of the new class; returns what is edited in its hyperparameters."""
        try:
            answers = self._on_all(TorchRunner.prepare_reload, settings)
            for name in ("train_data", "validation_data"):
                found = [getattr(facts, name) for facts, _ in answers]
                if len(set(found)) > 1:
                    raise ValueError(
                        f"`reload({settings.training_operator_cls.__name__})`: the workers registered different "
                        f"{name.replace('_', ' ')}: {found}. The old class is kept."
                    )
        except BaseException:
            with suppress(Exception):
                if self._controller.group is not None:
                    self._on_all(TorchRunner.drop_reload)
            raise
        return answers[0][1]

    def find_lr(
        self,
        start: float = 1e-6,
        end: float = 10.0,
        num_steps: int = 100,
        *,
        metric: str = "train_loss",
        stop_at: float = 4.0,
    ) -> LrCurve:
        """Trains some steps with learning rates that grow, to find a good one; then puts the state back.

        Models, optimizers, schedulers, random numbers, the position in the data and the operator's own state are as
        before. Attributes of your own that are not part of the state are not put back.

        Args:
            start: The first learning rate. If there are several parameter groups, that of the first; the others keep
                their ratios to it.
            end: The last one.
            num_steps: How many steps.
            metric: What `train_batch` reports the loss as.
            stop_at: It ends when the smoothed loss is this many times its minimum, or the loss is not finite.

        Returns:
            Rates and losses, the rate at which the loss falls fastest (`suggestion`), and `plot(path)`.

        Raises:
            ValueError: An argument cannot work, or there is no such metric.
            WorkerError: The operator raised; also of the class that it raised. The state is put back.
        """
        test = RangeTest(start, end, num_steps, metric, stop_at)
        snapshot = self._snapshot()
        try:
            return test.run(partial(self._steps_with, metric))
        finally:
            StateLoader(self._controller).load_snapshot(snapshot)

    def _steps_with(self, metric: str, rates: Sequence[float]) -> list[list[Loss]]:
        """Takes a step with each of these learning rates; returns the losses of each worker."""
        asked = self._asked(len(rates), profile=False, reduce_results=True, info=None)

        def requests(worlds: Sequence[World]) -> list[tuple[Any, ...]]:
            shared = self._requests_with_data("train", asked, None, worlds)
            return [(rates, metric, *request) for request in shared]

        return self._controller.run(Call(take_steps, requests, changes_state=True, keeps_alike=True))

    def take_state_of(self, other: TorchTrainer) -> None:
        """Loads the state of another trainer that is alive, past the driver and without a file.

        Where configs differ, optimizers keep the hyperparameters of `setup`; a scheduled learning rate keeps its place.

        Args:
            other: A trainer of the same kind of operators, with any number of workers.

        Raises:
            ValueError, KeyError: The state does not fit; the workers are as they were.
        """
        StateLoader(self._controller).load_snapshot(other._shared_snapshot())
        if dict(other.config) != dict(self.config):
            self._follow_config()

    def _follow_config(self) -> None:
        self._on_all(TorchRunner.follow_config, changes_state=True, keeps_alike=True)


def _send_by_value(operator_cls: type[Any]) -> None:
    """Lets a class of a user's module travel as it is now: workers may have imported what the module was before."""
    module = sys.modules.get(operator_cls.__module__)
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__.partition(".")[0] in ("__main__", "raysgd"):
        return
    if not path.startswith(tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))):
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(module)
