"""Changes the config, the operator class or the callbacks of running workers, without new processes.

Workers that start later receive the same change. If an update of the config or a reload of the class fails on one
worker, all workers keep the old config or class.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core import arguments as checks
from raysgd.core.config_keys import BATCH_SIZE
from raysgd.core.text.secrets import masked
from raysgd.exceptions import OnFailure, RaySGDError
from raysgd.trainer.configuration import ReplicaSettings
from raysgd.trainer.driver.life import TrainerLife, find_different_data, naming_config_entries

logger = logging.getLogger(__name__)


def begin_again(life: TrainerLife, config: Mapping[str, Any] | None, operator_cls: type[Any] | None = None) -> None:
    """Replace the operators in all workers by new operators, which `setup` creates from another config.

    Args:
        life: The trainer's workers and settings.
        config: The new config.
        operator_cls: The new operator class. Default: as before.
    """
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
                life.controller.renew(life.framework.runner_cls.renew, life.replicas.settings)
    life.check_same_data()


def change_config(life: TrainerLife, changes: Mapping[str, Any]) -> None:
    """Change entries of the config in the running operators, which keep their state.

    Args:
        life: The trainer's workers and settings.
        changes: New values by name.
    """
    with life.controller.turns.take_turn():
        refuse_changes(life.settings.config, changes)
        # Take the old values from `replicas`, where they are in a form that can be pickled.
        old_values = {name: life.replicas.settings.config[name] for name in changes}
        config = life.framework.check_config(life, checks.with_entries(life.settings.config, changes))
        settings = replace(life.settings, config=config, config_changes=(*life.settings.config_changes, old_values))
        with naming_config_entries(settings.config):
            options = {"changes_state": True, "keeps_alike": True, "is_repeatable": False}
            answers = life.on_all(life.framework.runner_cls.change_config, life.framework.to_send(settings), **options)
        # Change the settings after the call, because the call itself also changes workers that start during it.
        life.take_settings(settings)
        life.sharing.follow(settings)
    if answers[0]:
        logger.warning(
            "no optimizer follows %s: the operators find the new value in `self.config`. To do something with it, "
            "override `config_changed(self, config, changed)`, or call `trainer.apply_all_operators`",
            ", ".join(f"`config[{name!r}]`" for name in answers[0]),
        )


def use_worker_callbacks(life: TrainerLife, callbacks: Sequence[WorkerCallback]) -> None:
    """From now on, make all workers, including later ones, call exactly these worker callbacks.

    If a worker callback raises an error in its `on_begin`, all workers keep the callbacks that they had.
    """
    with life.controller.turns.take_turn():
        before = life.settings.worker_callbacks

        def restore() -> None:
            with suppress(RaySGDError):  # an error here must not hide the error of the new callbacks
                _install_worker_callbacks(life, before)

        with OnFailure(restore):
            _install_worker_callbacks(life, tuple(callbacks))


def _install_worker_callbacks(life: TrainerLife, callbacks: tuple[WorkerCallback, ...]) -> None:
    revision = life.settings.callbacks_revision + 1
    life.take_settings(replace(life.settings, worker_callbacks=callbacks, callbacks_revision=revision))
    if life.controller.group is not None:  # if no workers are running, the next ones start with these callbacks
        life.on_all(life.framework.runner_cls.follow, life.replicas.settings, changes_state=True, leaves_as_new=True)


def reload(life: TrainerLife, training_operator_cls: type[Any]) -> None:
    """Replace the operators in all workers by operators of another class, which take over their state."""
    controller = life.controller
    with controller.turns.take_turn():
        before, revision = life.settings, life.settings.revision + 1
        settings = replace(before, training_operator_cls=training_operator_cls, revision=revision, config_changes=())
        if life.group_settings.is_driver_only:
            controller.ensure_group()
        else:
            send_by_value(training_operator_cls)
            life.newest_snapshot()  # start to transfer a snapshot to the driver; `snapshot()` below waits for it
        edited = _prepared(life, settings)
        if not life.group_settings.is_driver_only:
            controller.snapshot()  # workers that start later load it instead of repeating calls of the old class
        life.take_settings(settings)
        with OnFailure(partial(life.take_settings, before)):
            options = {"changes_state": bool(edited), "keeps_alike": True, "is_repeatable": False}
            finish = partial(life.on_all, life.framework.runner_cls.finish_reload, revision, edited, **options)
            facts = finish()
            if None in facts:  # a worker that has just joined did not prepare the operator: restart all workers
                controller.kill_group()
                controller.ensure_group()
                facts = finish()
        life.sharing.forget()
        controller.keep_facts(facts)


def _prepared(life: TrainerLife, settings: ReplicaSettings) -> Any:
    """Create an operator of the new class in all workers, beside the old operator.

    Return the hyperparameters of optimizers that the new class changes.
    """
    with OnFailure(partial(_drop_prepared, life)):
        answers = life.on_all(life.framework.runner_cls.prepare_reload, settings, keeps_alike=True)
        different = find_different_data(facts for facts, _ in answers)
        if different is not None:
            raise ValueError(
                f"`reload({settings.training_operator_cls.__name__})`: the workers registered different "
                f"{different}. The old class is kept."
            )
    return answers[0][1]


def _drop_prepared(life: TrainerLife) -> None:
    with suppress(RaySGDError):  # an error here must not hide the error that made `reload` fail
        if life.controller.group is not None:
            life.on_all(life.framework.runner_cls.drop_reload)


class ReadOnlyConfig(dict[str, Any]):
    """Read-only copy of a config, returned by `trainer.config`. `dict(config)` returns a copy that you can change."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "`trainer.config` is a copy, so a change to it would not reach the workers. Begin again with the new "
            "config: `trainer.reset_config(config)`; or change the running operators, and anything that they computed "
            "from it: `trainer.apply_all_operators(lambda operator: operator.config.update(lr=0.1))`."
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __repr__(self) -> str:
        return repr(masked(dict(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyConfig, (dict(self),)


def refuse_changes(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Check that entries of the config can be changed in running operators.

    Args:
        config: The trainer's config.
        names: The names of the entries to change.

    Raises:
        ValueError: The config has no such entry, or the entry is `BATCH_SIZE`, from which `setup` created the loaders.
    """
    for name in names:
        if name == BATCH_SIZE:
            raise ValueError(
                f"`update_config({name}=...)`: loaders are made with it. Use `reset_config`, or load the state "
                "into a new trainer."
            )
        if name not in config:
            guess = checks.did_you_mean(name, map(str, config))
            raise ValueError(
                f"`update_config({name}=...)`: the config has no `{name}`.{guess} "
                f"It has {', '.join(f'`{each}`' for each in config) or 'no entries'}."
            )


def send_by_value(operator_cls: type[Any]) -> None:
    """Make pickle send the operator class itself to the workers, instead of only the names of its module and class.

    The workers may have imported an older version of the module, before the user edited it. Classes of raysgd and
    of installed packages are still sent by name.
    """
    module = sys.modules.get(operator_cls.__module__)
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__.partition(".")[0] in ("__main__", "raysgd"):
        return
    if not path.startswith(tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))):
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(module)
