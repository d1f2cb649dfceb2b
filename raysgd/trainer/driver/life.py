"""`TrainerLife`: a trainer's workers and settings, from the start of the workers until the trainer ends.

The workers end when the user shuts the trainer down, when the trainer is garbage-collected, or when the program exits.
The trainer's methods use this object, and so do the objects that run the trainer's calls and change its settings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from raysgd.core import arguments as checks
from raysgd.core.arrays.data_kinds import CallData
from raysgd.core.cluster.program_end import end_with
from raysgd.core.engine.shared.call import Call
from raysgd.core.engine.shared.connection import Connection
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot
from raysgd.core.history.history import CallRecorder
from raysgd.core.text.log_lines import Once
from raysgd.storage.background_writer import BackgroundWriter
from raysgd.trainer.configuration.batching import global_batch_in_words
from raysgd.trainer.configuration.settings import GroupSettings, ReplicaMaker, ReplicaSettings
from raysgd.trainer.driver.background_calls import BackgroundCalls
from raysgd.trainer.driver.calls import EpochCalls, ProgressListeners
from raysgd.trainer.driver.changes import naming_config_entries
from raysgd.trainer.driver.leaving import answer_signal
from raysgd.trainer.driver.make_controller import make_controller
from raysgd.trainer.driver.saving import FileSaves
from raysgd.trainer.driver.shared_data import DataSharing, store_share
from raysgd.trainer.driver.trainer_port import FitProgress, NoteProgress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Framework:
    """The parts of starting, changing and ending workers that differ between PyTorch's and Keras's trainers.

    Attributes:
        runner_cls: Class of the replicas, the objects that run the trainer's calls in the workers. A subclass of
            `ClassRunner`.
        connection: Connects the workers in a communication group of the framework.
        reservation_timeout_s: Seconds to wait until Ray has reserved the workers' resources.
        keeps_survivors: True if workers that survive a failure can continue from their current training state, without
            a snapshot.
        renews_survivors: True if workers that survive a failure can load a snapshot in their processes, instead of in
            new ones.
        call_data_of: Function that returns how to divide data over the workers. Its arguments are the data that the
            user passed to a call, and the config of one worker.
        shard_advice: Advice in an error message for users whose workers each load their own shard of the data.
        to_send: Function that returns settings in a form that can be pickled and sent to other processes.
    """

    runner_cls: Any
    connection: Connection
    reservation_timeout_s: float
    keeps_survivors: bool
    renews_survivors: bool
    call_data_of: Callable[[Any, Mapping[str, Any]], CallData | None]
    shard_advice: str
    to_send: Callable[[Any], ReplicaSettings] = lambda settings: settings


class TrainerLife:
    """Starts the workers of one trainer, holds what the trainer uses while they run, and ends them.

    This object has no reference to its trainer. When the trainer is freed, this object is freed too, and the workers
    end.

    Args:
        group_settings: Number of workers, their resources, and how to handle failures.
        settings: The settings from which each worker creates its replica.
        framework: What PyTorch's and Keras's trainers do differently.
        name: Name of the trainer's class.

    Attributes:
        group_settings: The argument of this name. It never changes.
        settings: The current settings. Change them with `take_settings`.
        framework: The argument of this name.
        replicas: Creates the replica of each worker, the object that holds the worker's operator.
        store: Function `(rank, value)` that puts a value into Ray's object store, unless the rank runs in the driver.
        controller: Starts, replaces and ends the workers, and runs calls on them.
        listeners: Functions that receive the progress of calls.
        recorder: Adds each call to the trainer's history.
        background: Runs calls in a background thread.
        epoch_calls: Runs `train` and `validate` calls, and measures their throughput.
        once: Remembers which warnings have been logged.
        writer: Writes files in a background thread.
        saves: Writes the trainer's checkpoint files.
        note_fit: In a detached trainer, the function that stores the progress of `fit` for a later process. Otherwise,
            None.
        fit_progress: Progress of an earlier process's `fit`, from which the next `fit` continues. Usually None.
    """

    def __init__(
        self, group_settings: GroupSettings, settings: ReplicaSettings, framework: Framework, name: str
    ) -> None:
        self.group_settings = group_settings
        self.settings: Any = settings
        self.framework = framework
        self.replicas = ReplicaMaker(framework.runner_cls)
        self.replicas.settings = framework.to_send(settings)
        self.store = partial(store_share, group_settings.use_local)
        self.controller = make_controller(
            group_settings,
            self.replicas,
            framework.connection,
            framework.reservation_timeout_s,
            keeps_survivors=framework.keeps_survivors,
            renews_survivors=framework.renews_survivors,
        )
        self.listeners = ProgressListeners(self.controller)
        self.recorder = CallRecorder(self.controller.history.events)
        self.background = BackgroundCalls(self.controller, at_once=group_settings.use_local)
        self.epoch_calls = EpochCalls(
            framework.runner_cls,
            self.controller,
            self.listeners,
            self.new_sharing(),
            use_local=group_settings.use_local,
            name=f"{name}-{id(self):x}",
            used=self.used_options(),
        )
        self.once = Once()
        self.writer = BackgroundWriter()
        self.saves = FileSaves(self.controller, self.writer)
        self.note_fit: NoteProgress | None = None
        self.fit_progress: FitProgress | None = None
        self._finalizer = end_with(self, self.controller.stop, force=True)

    def start(self) -> None:
        """Start the workers.

        Raises:
            ValueError: The workers registered different datasets.
            UnpicklableError: An entry of the config cannot be sent to the workers.
            WorkerError: The operator's `setup` raised an error.
        """
        with naming_config_entries(self.settings.config):
            self.controller.start()
        self.controller.observe_with(self.epoch_calls.report)
        self.check_same_data()
        recovery = self.group_settings.recovery
        checks.warn_of_obstacle(
            self.facts.epoch_obstacle,
            snapshot_every_n_steps=recovery.snapshot_every_n_steps,
            resize_interval_s=None if recovery.wait_for_workers else recovery.resize_interval_s,
        )
        if self.global_batch_in_words:
            logger.info("%s", self.global_batch_in_words)

    def end(self, force: bool) -> None:
        """End the workers and free their resources. A second call does nothing.

        Args:
            force: Whether to kill the processes immediately instead of letting them close first.
        """
        answer_signal()
        try:
            self._finalizer.detach()
            self.saves.await_states()
            self.controller.stop(force)
            self.epoch_calls.stop_reporting()
        finally:
            self.writer.close()

    def interrupt(self) -> None:
        """End the running call from another thread, as Ctrl-C does.

        If the driver is the only worker, do nothing.
        """
        if not self.group_settings.is_driver_only:
            self.controller.turns.interrupt_running()

    @property
    def facts(self) -> Any:
        """The report of rank 0 after `setup`, with the number of models, for example.

        The reports of other ranks may have another seed and describe other data, but are equal otherwise.
        """
        return self.controller.facts[0]

    def check_same_data(self) -> None:
        """Check that all workers registered the same datasets. If not, end the workers and raise an error.

        Each worker takes its shard from the dataset that this worker has registered. Shards of different datasets could
        overlap unnoticed.
        """
        different = find_different_data(self.controller.facts)
        if different is not None:
            self.end(force=True)
            raise ValueError(
                f"The workers registered different {different}. The library divides one dataset that all workers have "
                f"alike. If each worker loads its own part, {self.framework.shard_advice}."
            )

    # ----------------------------------------------------------------------------------------------- settings and data

    def take_settings(self, settings: ReplicaSettings) -> None:
        """Make these the trainer's settings, and use them for all workers that start later."""
        is_other = settings.revision != self.settings.revision
        self.settings = settings
        self.replicas.settings = self.framework.to_send(settings)
        if is_other and self.controller.group is not None:
            # After `reload` or `reset_config`, end the spare workers, whose operators are outdated. Any other change of
            # the settings reaches a spare worker when it joins the group.
            self.controller.group.standby.kill_all()

    def used_options(self) -> list[str]:
        """Return the trainer options that performance advice must not recommend to the user.

        These options are already set, or changing them cannot help.
        """
        used = {
            "spare_workers": self.group_settings.spare_workers > 0,
            # If this option is None, no snapshots are taken inside epochs, so they cannot be taken less often.
            "snapshot_every_n_steps": self.group_settings.recovery.snapshot_every_n_steps is None,
        }
        return [name for name, is_used in used.items() if is_used]

    def new_sharing(self) -> DataSharing:
        """Return a new object that divides datasets over the workers according to the current settings."""
        settings = self.replicas.settings
        of_worker = settings.batch_options.config_for
        return DataSharing(settings.config, self.store, self.framework.call_data_of, of_worker)

    @property
    def global_batch_in_words(self) -> str:
        """Description of the global batch if its size depends on the number of workers. Otherwise, an empty string.

        Also empty if the batch size is unknown, or if the user requested only one worker.
        """
        facts = self.facts
        if facts.keeps_global_batch or facts.batch_size is None or self.group_settings.num_workers == 1:
            return ""
        return global_batch_in_words(self.controller.num_workers, facts.batch_size, self.framework.keeps_survivors)

    # -------------------------------------------------------------------------------------------- workers and snapshots

    def on_all(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call `function(replica, *args)` in all workers, where `replica` is the object that holds the operator.

        Return the results by rank.

        Args:
            function: The function to call.
            *args: Arguments of the function after the replica.
            **options: Further arguments of the `Call` that the workers run.
        """
        return self.controller.run(Call(function, lambda worlds: [args] * len(worlds), **options))

    def snapshot(self) -> Snapshot:
        """Return a snapshot, a copy of the current training state, when it has arrived in the driver."""
        self._distrust_copies()
        return self.controller.snapshot()

    def newest_snapshot(self) -> NewestSnapshot:
        """Return a handle to a snapshot of the current training state, as soon as the workers have copied their state.

        The snapshot may still be on its way to the driver.
        """
        self._distrust_copies()
        return self.controller.newest_snapshot()

    def shared_snapshot(self) -> Snapshot:
        """Return a snapshot of the current state that all workers share, such as the model's weights.

        If the driver already has a snapshot of this state, that snapshot is returned, so that the workers need not copy
        their state again. The states of the workers' random number generators in it may be slightly older.
        """
        landed = self.controller.landed_snapshot() if not self.group_settings.use_local else None
        return self.snapshot() if landed is None else landed

    def _distrust_copies(self) -> None:
        """If rank 0 runs in the driver, mark earlier snapshots as outdated, because users can change its operator."""
        if self.group_settings.use_local:
            self.controller.snapshots.touch()


def find_different_data(facts: Iterable[Any]) -> str | None:
    """Return which data the workers registered differently, with a description of each worker's data.

    Return None if all workers registered the same datasets.

    Args:
        facts: What each worker reported after `setup`.
    """
    reports = list(facts)
    for name in ("train_data", "validation_data"):
        descriptions = [getattr(report, name) for report in reports]
        if len(set(descriptions)) > 1:
            return f"{name.replace('_', ' ')}: {descriptions}"
    return None
