"""`LiveChanges`: changes the config, the operator class or the callbacks of running workers, without new processes.

Workers that start later receive the same change. If an update of the config or a reload of the class fails on one
worker, all workers keep the old config or class.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core import arguments as checks
from raysgd.exceptions import OnFailure, RaySGDError
from raysgd.trainer.configuration import ReplicaSettings
from raysgd.trainer.driver.changes import naming_config_entries, refuse_changes, send_by_value
from raysgd.trainer.driver.life import TrainerLife, find_different_data

logger = logging.getLogger(__name__)


class LiveChanges:
    """Changes the settings of one trainer, and updates the operators in its workers to match the settings.

    Args:
        life: The trainer's workers and settings.
    """

    def __init__(self, life: TrainerLife) -> None:
        self._life, self._runner_cls = life, life.framework.runner_cls

    def begin_again(self, config: Mapping[str, Any] | None, operator_cls: type[Any] | None = None) -> None:
        """Replace the operators in all workers by new operators, which `setup` creates from another config.

        Args:
            config: The new config.
            operator_cls: The new operator class. Default: as before.
        """
        life = self._life
        checked = life.framework.check_config(life, config)
        cls = operator_cls or life.settings.training_operator_cls
        settings = replace(life.settings, training_operator_cls=cls, config=checked)
        with life.controller.turns.take_turn():  # wait for earlier calls, which still use the old settings
            life.take_settings(replace(settings, revision=settings.revision + 1, config_changes=()))
            life.sharing = life.new_sharing()
            with naming_config_entries(settings.config):
                if life.group_settings.backend == "horovod":  # Horovod can be initialized only once per process
                    life.controller.restart()
                else:
                    life.controller.renew(self._runner_cls.renew, life.replicas.settings)
        life.check_same_data()

    def change_config(self, changes: Mapping[str, Any]) -> None:
        """Change entries of the config in the running operators, which keep their state.

        Args:
            changes: New values by name.
        """
        life = self._life
        with life.controller.turns.take_turn():
            settings = self._with_changes(changes)
            with naming_config_entries(settings.config):
                options = {"changes_state": True, "keeps_alike": True, "is_repeatable": False}
                answers = life.on_all(self._runner_cls.change_config, life.framework.to_send(settings), **options)
            # Change the settings after the call, because the call itself also changes workers that start during it.
            life.take_settings(settings)
            life.sharing.follow(settings)
        if answers[0]:
            logger.warning(
                "no optimizer follows %s: the operators find the new value in `self.config`. To do something with it, "
                "override `config_changed(self, config, changed)`, or call `trainer.apply_all_operators`",
                ", ".join(f"`config[{name!r}]`" for name in answers[0]),
            )

    def _with_changes(self, changes: Mapping[str, Any]) -> ReplicaSettings:
        """Check the changes to the config, and return the settings with the new config."""
        life, settings = self._life, self._life.settings
        refuse_changes(settings.config, changes)
        # Take the old values from `replicas`, where they are in a form that can be pickled.
        old_values = {name: life.replicas.settings.config[name] for name in changes}
        config = life.framework.check_config(life, checks.with_entries(settings.config, changes))
        return replace(settings, config=config, config_changes=(*settings.config_changes, old_values))

    def follow_config(self) -> None:
        """In all workers, set the hyperparameters of the optimizers back to the values that `setup` chose.

        Called after the state of a trainer with another config was loaded.
        """
        self._life.on_all(self._runner_cls.follow_config, changes_state=True, keeps_alike=True)

    def use_worker_callbacks(self, callbacks: Sequence[WorkerCallback]) -> None:
        """From now on, make all workers, including later ones, call exactly these worker callbacks.

        If a worker callback raises an error in its `on_begin`, all workers keep the callbacks that they had.
        """
        life = self._life
        with life.controller.turns.take_turn():
            before = life.settings.worker_callbacks

            def restore() -> None:
                with suppress(RaySGDError):  # an error here must not hide the error of the new callbacks
                    self._install_worker_callbacks(before)

            with OnFailure(restore):
                self._install_worker_callbacks(tuple(callbacks))

    def _install_worker_callbacks(self, callbacks: tuple[WorkerCallback, ...]) -> None:
        life = self._life
        revision = life.settings.callbacks_revision + 1
        life.take_settings(replace(life.settings, worker_callbacks=callbacks, callbacks_revision=revision))
        if life.controller.group is not None:  # if no workers are running, the next ones start with these callbacks
            life.on_all(self._runner_cls.follow, life.replicas.settings, changes_state=True, leaves_as_new=True)

    def reload(self, training_operator_cls: type[Any]) -> None:
        """Replace the operators in all workers by operators of another class, which take over their state."""
        life, controller = self._life, self._life.controller
        with controller.turns.take_turn():
            before, revision = life.settings, life.settings.revision + 1
            settings = replace(
                before, training_operator_cls=training_operator_cls, revision=revision, config_changes=()
            )
            if life.group_settings.is_driver_only:
                controller.ensure_group()
            else:
                send_by_value(training_operator_cls)
                life.newest_snapshot()  # start to transfer a snapshot to the driver; `snapshot()` below waits for it
            edited = self._prepared(settings)
            if not life.group_settings.is_driver_only:
                controller.snapshot()  # workers that start later load it instead of repeating calls of the old class
            life.take_settings(settings)
            with OnFailure(partial(life.take_settings, before)):
                options = {"changes_state": bool(edited), "keeps_alike": True, "is_repeatable": False}
                finish = partial(life.on_all, self._runner_cls.finish_reload, revision, edited, **options)
                facts = finish()
                if None in facts:  # a worker that has just joined did not prepare the operator: restart all workers
                    controller.kill_group()
                    controller.ensure_group()
                    facts = finish()
            life.sharing.forget()
            controller.keep_facts(facts)

    def _prepared(self, settings: ReplicaSettings) -> Any:
        """Create an operator of the new class in all workers, beside the old operator.

        Return the hyperparameters of optimizers that the new class changes.
        """
        with OnFailure(self._drop_prepared):
            answers = self._life.on_all(self._runner_cls.prepare_reload, settings, keeps_alike=True)
            different = find_different_data(facts for facts, _ in answers)
            if different is not None:
                raise ValueError(
                    f"`reload({settings.training_operator_cls.__name__})`: the workers registered different "
                    f"{different}. The old class is kept."
                )
        return answers[0][1]

    def _drop_prepared(self) -> None:
        with suppress(RaySGDError):  # an error here must not hide the error that made `reload` fail
            if self._life.controller.group is not None:
                self._life.on_all(self._runner_cls.drop_reload)
