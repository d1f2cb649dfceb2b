"""Changes of what live workers train with: another config, in part or as a whole, without new processes.

Whatever is changed, workers that start later are made with it, and what cannot be changed leaves all as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from raysgd import _checks
from raysgd.engine.call import Call
from raysgd.engine.renewal import renew, restart
from raysgd.exceptions import UnpicklableError
from raysgd.replicas.settings import ReplicaSettings
from raysgd.replicas.trainer import ClassTrainer, naming_config_entry, show_options
from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)


class ChangingTrainer(ClassTrainer):
    """A trainer whose workers can be told to train with something else."""

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
        self._settings = replace(self._settings, config=self._checked_config(config))
        self._sharing = self._new_sharing()
        self._replicas.settings = self._settings_to_send()
        with self._naming_config_entries():
            self._renew()
        self._check_same_data(("train_data", "validation_data"))

    def update_config(self, **changes: Any) -> None:
        """Changes entries of the config in the running operators, which keep their state.

        Each operator's `config` has the new values, and its `config_changed` is called. With `TorchTrainer`, that gives
        the optimizers the hyperparameters that the config names, such as `lr`. Workers that start later are made with
        the new config.

        Args:
            **changes: New values by name. The config has to have these names already.

        Raises:
            ValueError: The config has no such entry, or it cannot be changed in running operators.
            UnpicklableError: A value cannot be sent to the workers.
            WorkerError: `config_changed` raised; also of the class that it raised. The old config holds on all workers.
        """
        config, before = self._with_changes(changes)
        with self._adopted(replace(self._settings, config=config)), self._naming_config_entries():
            sent = self._replicas.settings.config
            options = {"changes_state": True, "keeps_alike": True, "is_repeatable": False}
            answers = self._on_all(self._runner_cls.change_config, sent, before, **options)
        if answers[0]:
            logger.warning(
                "no optimizer follows %s: the operators find the new value in `self.config`. Override "
                "`config_changed(self, config, changed)` to do something with it",
                ", ".join(f"`config[{name!r}]`" for name in answers[0]),
            )

    def _with_changes(self, changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The config with changes, checked, and the values that the entries had before."""
        config = self._settings.config
        for name in changes:
            if name == BATCH_SIZE:
                raise ValueError(
                    f"`update_config({name}=...)`: loaders are made with it. Use `reset_config`, or load the state "
                    "into a new trainer."
                )
            if name not in config:
                guess = _checks.did_you_mean(name, map(str, config))
                raise ValueError(
                    f"`update_config({name}=...)`: the config has no `{name}`.{guess} "
                    f"It has {', '.join(f'`{each}`' for each in config) or 'no entries'}."
                )
        return self._checked_config({**config, **changes}), {name: config[name] for name in changes}

    @contextmanager
    def _adopted(self, settings: ReplicaSettings) -> Iterator[None]:
        """Workers that start from now on are made with other settings; no longer so if the body fails."""
        before = self._settings
        self._take_settings(settings)
        try:
            yield
        except BaseException:
            self._take_settings(before)
            raise

    def _take_settings(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._replicas.settings = self._settings_to_send()
        show_options(self, settings)
        group = self._controller.group
        if group is not None:
            group.standby.kill_all()  # they were made with other settings

    @contextmanager
    def _naming_config_entries(self) -> Iterator[None]:
        """Errors of what cannot be sent to workers name the entry of the config."""
        try:
            yield
        except UnpicklableError as error:
            raise naming_config_entry(error, self._settings.config) from error.__cause__

    def _renew(self) -> None:
        """Makes new operators, from the present settings."""
        if self.backend in ("horovod", "mwms"):  # what these set up in a process stays there
            restart(self._controller)
        else:
            renew(self._controller, self._runner_cls.renew, self._replicas.settings)

    def _on_all(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Runs a method of the replicas on all of them."""
        return self._controller.run(Call(function, lambda worlds: [args] * len(worlds), **options))
