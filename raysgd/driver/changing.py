"""Changes of what live workers train: another config or class, the state of another trainer; without new processes.

Whatever is changed, workers that start later are made with it, and what cannot be changed leaves all as it was.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from raysgd import _arguments as checks
from raysgd.driver.trainer import AnyOperatorT, ClassTrainer, naming_config_entry
from raysgd.engine.snapshots import Snapshot
from raysgd.exceptions import OnFailure, RaySGDError, UnpicklableError
from raysgd.messages.settings import ReplicaSettings
from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)


class ChangingTrainer(ClassTrainer[AnyOperatorT]):
    """A trainer whose workers can be told to train something else."""

    def reset_config(self, config: Mapping[str, Any] | None = None) -> None:
        """Begins again with another config, as a new trainer would: new operators, in the same worker processes.

        With Horovod and `MultiWorkerMirroredStrategy` the processes are new, too. What was trained is gone: `save` it
        before if you need it. Random generators are seeded again only if the trainer has a `seed`.

        Args:
            config: As for a new trainer.

        Raises:
            ValueError, TypeError: The config cannot work; nothing was changed.
            WorkerError: The user's set-up failed; also of the class that it raised. The workers are ended, and the next
                call starts new ones with the new config.
        """
        self._begin_again(replace(self._settings, config=self._checked_config(config)))

    def _begin_again(self, settings: ReplicaSettings) -> None:
        with self._controller.turns.take_turn():  # calls that were made before have the settings of before
            self._take_settings(replace(settings, revision=settings.revision + 1, config_changes=()))
            self._calls.sharing = self._new_sharing()
            with _naming_config_entries(settings.config):
                self._renew()
        self._check_same_data(("train_data", "validation_data"))

    def update_config(self, **changes: Any) -> None:
        """Changes entries of the config in the running operators, which keep their state.

        Each operator's `config` has the new values, and its `config_changed` is called. With `TorchTrainer`, that gives
        the optimizers the learning rate `lr`. Workers that start later run `setup` with the config from before, and
        then `config_changed` as these did.

        Args:
            **changes: New values by name. The config has to have these names already.

        Raises:
            ValueError: The config has no such entry, or it cannot be changed in running operators.
            UnpicklableError: A value cannot be sent to the workers.
            WorkerError: `config_changed` raised; also of the class that it raised. The old config holds on all workers.
        """
        with self._controller.turns.take_turn():
            settings = self._with_changes(changes)
            with _naming_config_entries(settings.config):
                options = {"changes_state": True, "keeps_alike": True, "is_repeatable": False}
                answers = self._on_all(self._runner_cls.change_config, self._settings_to_send(settings), **options)
            self._take_settings(settings)  # not before: workers that start during the call are told by it
            self._calls.sharing.follow(settings.config)
        if answers[0]:
            logger.warning(
                "no optimizer follows %s: the operators find the new value in `self.config`. Override "
                "`config_changed(self, config, changed)` to do something with it",
                ", ".join(f"`config[{name!r}]`" for name in answers[0]),
            )

    def _with_changes(self, changes: Mapping[str, Any]) -> ReplicaSettings:
        """The settings with changes of the config, checked."""
        config = self._settings.config
        for name in changes:
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
        before = {name: self._replicas.settings.config[name] for name in changes}  # as it can be sent
        return replace(
            self._settings,
            config=self._checked_config(checks.with_entries(config, changes)),
            config_changes=(*self._settings.config_changes, before),
        )

    def reload(self, training_operator_cls: type[AnyOperatorT]) -> None:
        """Goes on with another operator class, usually an edited one, in the same workers and with the same state.

        Each worker makes an operator of the new class and gives it the state of the old one. Only when all have done so
        they drop the old ones. Hyperparameters of optimizers that the new class chooses differently are taken over.
        Attributes that are not part of the state are as the new `setup` makes them.

        Args:
            training_operator_cls: The new class.

        Raises:
            TypeError: It is no operator class.
            ValueError: The state does not fit what the new class registers, or the trainer is one with FSDP, Horovod or
                creator functions. The old class is kept on all workers.
            WorkerError: `setup` of the new class raised; also of the class that it raised. The old class is kept.
        """
        self._check_reload(training_operator_cls)
        with self._controller.turns.take_turn():
            self._reload(training_operator_cls)

    def _reload(self, training_operator_cls: type[Any]) -> None:
        revision = self._settings.revision + 1
        settings = replace(
            self._settings, training_operator_cls=training_operator_cls, revision=revision, config_changes=()
        )
        if self._group_settings.is_driver_only:
            self._controller.ensure_group()
        else:
            _send_by_value(training_operator_cls)
            self._newest_snapshot()  # its way to the driver is waited for below
        edited = self._prepared(settings)
        if not self._group_settings.is_driver_only:
            self._controller.snapshot()  # the calls before this one were of the old class
        with self._adopted(settings):
            options = {"changes_state": bool(edited), "keeps_alike": True, "is_repeatable": False}
            facts = self._on_all(self._runner_cls.finish_reload, revision, edited, **options)
        self._calls.sharing.forget()
        if None in facts:  # the group was changed in between
            self._controller.kill_group()
            self._controller.ensure_group()
        else:
            self._controller.keep_facts(facts)

    @abstractmethod
    def _check_reload(self, training_operator_cls: Any) -> None:
        """Refuses what is no class of operators, and trainers whose workers cannot make another one beside theirs."""

    def _prepared(self, settings: ReplicaSettings) -> Any:
        """Lets all workers make an operator of the new class; returns what is edited in its hyperparameters."""
        with OnFailure(self._drop_prepared):
            answers = self._on_all(self._runner_cls.prepare_reload, settings, keeps_alike=True)
            for name in ("train_data", "validation_data"):
                found = [getattr(facts, name) for facts, _ in answers]
                if len(set(found)) > 1:
                    raise ValueError(
                        f"`reload({settings.training_operator_cls.__name__})`: the workers registered different "
                        f"{name.replace('_', ' ')}: {found}. The old class is kept."
                    )
        return answers[0][1]

    def _drop_prepared(self) -> None:
        with suppress(RaySGDError):  # what has failed before is what to see
            if self._controller.group is not None:
                self._on_all(self._runner_cls.drop_reload)

    def take_state_of(self, other: Any) -> None:
        """Loads the state of another trainer that is alive, past the driver and without a file.

        Where configs differ, optimizers keep the hyperparameters of `setup`; a scheduled learning rate keeps its place.

        Args:
            other: A trainer of the same class and kind of operators, with any number of workers.

        Raises:
            TypeError: It is a trainer of another class.
            ValueError, KeyError: The state does not fit; the workers are as they were.
        """
        if not isinstance(other, ChangingTrainer) or other._runner_cls is not self._runner_cls:
            raise TypeError(
                f"`take_state_of` got a `{type(other).__name__}`: need a trainer of the same kind, a "
                f"`{type(self).__name__}`."
            )
        self._load_snapshot(other._shared_snapshot())
        if dict(other.config) != dict(self.config):
            self._follow_config()

    @abstractmethod
    def _load_snapshot(self, snapshot: Snapshot) -> None:
        """Loads what workers had, perhaps another trainer's. It may be shared: nothing of it is changed."""

    def _follow_config(self) -> None:
        self._on_all(self._runner_cls.follow_config, changes_state=True, keeps_alike=True)

    @contextmanager
    def _adopted(self, settings: ReplicaSettings) -> Iterator[None]:
        """Workers that start from now on are made with other settings; no longer so if the body fails."""
        before = self._settings
        self._take_settings(settings)
        with OnFailure(partial(self._take_settings, before)):
            yield

    def _renew(self) -> None:
        """Makes new operators, from the present settings."""
        if self.backend in ("horovod", "mwms"):  # what these set up in a process stays there
            self._controller.restart()
        else:
            self._controller.renew(self._runner_cls.renew, self._replicas.settings)


@contextmanager
def _naming_config_entries(config: Mapping[str, Any]) -> Iterator[None]:
    """Errors of what cannot be sent to workers name the entry of the config."""
    try:
        yield
    except UnpicklableError as error:
        raise naming_config_entry(error, config) from error.__cause__


def _send_by_value(operator_cls: type[Any]) -> None:
    """Lets a class of a user's module travel as it is now: workers may have imported what the module was before."""
    module = sys.modules.get(operator_cls.__module__)
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__.partition(".")[0] in ("__main__", "raysgd"):
        return
    if not path.startswith(tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))):
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(module)
