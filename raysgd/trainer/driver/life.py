"""`TrainerLife`: a trainer's workers and settings, from the start of the workers until the trainer ends.

The workers end when the user shuts the trainer down, when the trainer is garbage-collected, or when the program exits.
The trainer's methods use this object, and so do the objects that run the trainer's calls and change its settings.
`Framework` says what differs between PyTorch and Keras.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from raysgd.callbacks.sidecar import Sidecar
from raysgd.core import arguments as checks
from raysgd.core.arrays.user_data import CallData
from raysgd.core.cluster.ray_cluster import draining_nodes, end_with, run_into
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.policies import ElasticRules, FailurePolicy, ScalingPolicy
from raysgd.core.engine.shared.interface import Call, CallHandle, Connection, FrontEndWords, GroupSpec
from raysgd.core.engine.shared.types import Heartbeat
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot
from raysgd.core.history.accounts import Accounts
from raysgd.core.history.history import CallRecorder, Kind
from raysgd.core.history.status import Gauges, TrainerStatus, ask_status, glance
from raysgd.core.sending import is_sendable
from raysgd.core.text.log_lines import Once
from raysgd.core.text.tracebacks import hide_library_frames
from raysgd.exceptions import OnFailure, UnpicklableError
from raysgd.storage.background_writer import BackgroundWriter
from raysgd.trainer.configuration import GroupSettings, ReplicaMaker, ReplicaSettings, global_batch_in_words
from raysgd.trainer.driver.leaving import answer_signal
from raysgd.trainer.driver.listeners import ProgressListeners
from raysgd.trainer.driver.saving import Content, FileSaves
from raysgd.trainer.driver.shared_data import DataSharing, store_share
from raysgd.trainer.messages.epochs import BegunEpoch, EpochAnswer, RunnerFacts, merged
from raysgd.trainer.messages.prediction import BatchRequest, PredictionSource

if TYPE_CHECKING:
    from raysgd.trainer.worker.runner import ClassRunner

FitProgress = tuple[Sidecar, Any, int | None]
"""The data that another process needs to continue a call to `fit`.

A tuple of three values: the sidecar (the run's progress, as it is also saved next to each checkpoint); the folder in
which callbacks write, or None if unknown; and the number of steps over all epochs, or None if the run does not pause
inside epochs.
"""

NoteProgress = Callable[[FitProgress], None]
"""Function that stores the progress of a call to `fit`, so that another process can continue the call."""

logger = logging.getLogger(__name__)

WORDS = FrontEndWords(
    when_shut_down="Create a new one; `save` before `shutdown` keeps the state.",
    when_interrupted="State that you had not saved is lost.",
    when_starved="The last completed state is kept: it can be saved, and the next call looks for resources again.",
    when_spent=(
        "The last completed state is kept: call again to continue with new workers, or use `shutdown(force=True)`."
    ),
    when_not_granted=(
        "Ask for fewer workers or less per worker, free what is held, add nodes, or wait longer by setting the "
        "environment variable SGD_PLACEMENT_GROUP_TIMEOUT_S."
    ),
    after_end="the last completed state is kept",
    restart_point="from the last completed call",
)
"""Words for the engine's messages to users of `TorchTrainer` and `TFTrainer`. Other trainers use the same engine."""


class Framework(ABC):
    """Holds what PyTorch's and Keras's trainers do differently. Each trainer has an object of its own subclass.

    The object has no reference to its trainer, so that a trainer is freed as soon as the program drops it. Methods that
    need the trainer's workers and settings receive its `TrainerLife`.

    Attributes:
        runner_cls: Class of the replicas, the objects that run the trainer's calls in the workers. A subclass of
            `ClassRunner`.
        connection: Connects the workers in a communication group of the framework.
        reservation_timeout_s: Seconds to wait until Ray has reserved the workers' resources.
        shard_advice: Advice in an error message for users whose workers each load their own shard of the data.
        keeps_survivors: True if workers that survive a failure can continue from their current training state, without
            a snapshot.
        renews_survivors: True if workers that survive a failure can load a snapshot in their processes, instead of in
            new ones.
        acts_between_steps: True if the workers can call worker callbacks around their steps, and a run can stop after
            any step of an epoch, and later continue there.
    """

    runner_cls: type[ClassRunner]
    connection: Connection
    reservation_timeout_s: float
    shard_advice: str
    keeps_survivors = True
    renews_survivors = False
    acts_between_steps = False

    def to_send(self, settings: Any) -> Any:
        """Return settings in a form that can be pickled and sent to other processes."""
        return settings

    def check_config(self, life: TrainerLife, config: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the config as a dictionary, or raise an error if the trainer cannot work with it."""
        checked = checks.check_config(config)
        self.check_settings(replace(life.settings, config=checked), life.group_settings.num_workers)
        return checked

    @staticmethod
    @abstractmethod
    def check_settings(settings: Any, num_workers: int) -> None:
        """Raise an error if the config in these settings is invalid, or cannot work with this number of workers."""

    @abstractmethod
    def check_reload(self, life: TrainerLife, operator_cls: Any) -> None:
        """Raise an error if `reload` got no operator class, or if the workers cannot hold a second operator."""

    @abstractmethod
    def check_dataset(self, life: TrainerLife, dataset: Any, training: bool, name: str = "dataset") -> None:
        """Raise an error if a call cannot use `dataset` in place of the data that the operator registered."""

    def check_fit(self, life: TrainerLife, epochs: int) -> None:
        """Raise an error if `fit` cannot train for this many epochs."""
        return None

    @abstractmethod
    def call_data_of(self, data: Any, config: Mapping[str, Any]) -> CallData | None:
        """Return how to divide the data that the user passed to a call over the workers.

        Args:
            data: The data.
            config: The config of one worker.
        """

    def goes_on_with(self, dataset: Any) -> bool:
        """Return True if a training call on `dataset` can continue in another group of workers after a failure."""
        return False

    def shown(self, life: TrainerLife) -> AbstractContextManager[Any]:
        """Return a context manager that displays the progress of the training call that runs in its block."""
        return nullcontext()

    @abstractmethod
    def check_answers(self, life: TrainerLife, kind: Kind, answers: Sequence[EpochAnswer], num_steps: Any) -> None:
        """Raise an error if the workers' answers contradict each other.

        After a training call, this check runs before the call counts as completed.

        Args:
            life: The trainer's workers.
            kind: The type of call.
            answers: The answers by rank.
            num_steps: The number of steps that the user asked for, or None.
        """

    def merged(self, answers: Sequence[EpochAnswer], reduce_results: bool) -> Any:
        """Merge the workers' answers into the result that the user's call to the trainer returns."""
        return merged(answers, reduce_results)

    def after_evaluation(self, life: TrainerLife) -> None:
        """Called after an evaluation, which may have changed the states of the workers' random number generators."""
        return None

    def after_validation(self, life: TrainerLife, trained: Mapping[str, Any], validated: Mapping[str, Any]) -> bool:
        """After `fit` has validated, step the learning rate schedulers that depend on metrics of the validation.

        Args:
            life: The trainer's workers.
            trained: Metrics of the epoch's training. Schedulers that depend on one of these have already stepped.
            validated: Metrics of the epoch's validation.

        Returns:
            True if a scheduler has stepped, which changes the training state.
        """
        return False

    @abstractmethod
    def to_predict(self, data: Any, asked: BatchRequest) -> PredictionSource:
        """Return the source of the batches to predict.

        Args:
            data: The data that the user passed to `predict`.
            asked: The user's arguments that say how to make batches of the data.
        """

    @abstractmethod
    def content_of(self, snapshot: Snapshot) -> Content:
        """Return the content of a checkpoint file with a snapshot, a copy of the training state."""

    @abstractmethod
    def place_in(self, snapshot: Snapshot) -> tuple[int, int]:
        """Return the number of epochs, and of batches over all epochs, that were trained before a snapshot was taken.

        The snapshot must already be in the driver.
        """

    @abstractmethod
    def load_state(self, life: TrainerLife, state: dict[str, Any]) -> None:
        """Load a state dict, as the trainer's `state_dict` returns it, into all workers."""

    @abstractmethod
    def load_snapshot(self, life: TrainerLife, snapshot: Snapshot) -> None:
        """Load a snapshot of this or another trainer into all workers.

        The snapshot must not be modified, because other trainers may still use it.
        """


T = TypeVar("T")


@hide_library_frames
class BackgroundCall(CallHandle[T]):
    """A handle to a trainer's call that runs in a background thread.

    Args:
        future: Receives the call's result or error.
        interrupt: Interrupts the call as Ctrl-C would. Called from a thread other than the one that runs the call.
    """

    def __init__(self, future: Future[T], interrupt: Callable[[], None]) -> None:
        self._future, self._interrupt = future, interrupt

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return its result. Ctrl-C during the wait interrupts the call.

        Args:
            timeout: Seconds to wait. None waits until the call finishes.

        Raises:
            TimeoutError: The call is still running. It is not interrupted.
            TrainerShutdownError: The trainer was shut down, or its Ray session ended, before the call finished.
            Exception: The error that the call raised.
        """
        try:
            wait([self._future], timeout)
        except KeyboardInterrupt:
            self._interrupt()
            wait([self._future])
            raise
        if not self._future.done():
            raise TimeoutError(f"The call is still running after `timeout={timeout!r}` seconds. It continues.")
        return self._future.result()


def begin_in_background(
    controller: ElasticController,
    at_once: bool,
    work: Callable[[], Any],
    rest: Callable[[Any, Callable[[], None]], Any] | None = None,
) -> CallHandle[Any]:
    """Start a call in a background thread and return its handle. Later calls to the trainer wait for this call.

    Background calls run one after the other, in the order in which they were started.

    Args:
        controller: Runs the call on the workers.
        at_once: True to run the call now, without a background thread. Needed if the driver is a worker.
        work: Runs the call on the workers. If `rest` is given, later calls wait only for `work`.
        rest: Finishes the call on a spare worker while later calls use the training workers. Takes the result of
            `work` and a function that raises `KeyboardInterrupt` if the call was interrupted.

    Raises:
        TrainerShutdownError: The trainer was shut down.
        ValueError: This thread is inside a block of `Turns.closed`.
    """
    turns = controller.turns
    place = turns.reserve()

    def run() -> Any:
        with turns.take_turn(place):
            begun = work()
        return begun if rest is None else rest(begun, place.check_wanted)

    if at_once:
        future = Future[Any]()
        run_into(future, run)
    else:
        with OnFailure(partial(turns.give_up, place)):
            future = controller.threads.start(run, "raysgd-call")
    return BackgroundCall(future, partial(turns.interrupt, place))


class Figures:
    """Figures of one trainer, for users and for Ray's metrics: its throughput, and how the workers spend their time.

    Args:
        controller: Controller of the workers.
        name: Name of the trainer in Ray's metrics.
        used: Trainer options that performance warnings must not recommend, for example because they are already set.

    Attributes:
        heartbeats: The last heartbeat of each rank in the last training call.
        samples_per_s: Samples per second in the last training call. None before the first training call, and if the
            call did not count samples.
        accounts: Records of how the workers have spent their time since the trainer's start.
    """

    def __init__(self, controller: ElasticController, name: str, used: Sequence[str] = ()) -> None:
        self._controller, self._gauges = controller, Gauges(name)
        self.heartbeats: dict[int, Heartbeat] = {}
        self.samples_per_s: float | None = None
        self.accounts = Accounts(used=used)

    def report(self) -> None:
        """Publish the trainer's status and throughput in Ray's metrics.

        Do nothing if this was done less than a second ago and no worker was lost or added since then.
        """
        now = partial(glance, self._controller, self.heartbeats, self.samples_per_s)
        self._gauges.report(len(self._controller.history.events), lambda: self._with_ledger(now()))

    def status(self) -> TrainerStatus:
        """Request heartbeats from the workers, and return the trainer's status."""
        return self._with_ledger(ask_status(self._controller, self.samples_per_s))

    def _with_ledger(self, status: TrainerStatus) -> TrainerStatus:
        """Return a copy of the status with the time ledger, which shows how each rank spent its time."""
        self.accounts.note_times({each.rank: each.heartbeat for each in status.workers if each.heartbeat is not None})
        self.accounts.warn()
        return replace(status, ledger=self.accounts.ledger(len(status.workers)))

    def end(self) -> None:
        """In Ray's metrics, set the trainer's numbers of workers and its throughput to 0."""
        self._gauges.report_end()


class LargestBatch:
    """The number of samples that a worker processes at once, as `micro_batch_size="auto"` has found (ADR 178).

    Every attempt at a call sends this number to all workers.

    Attributes:
        size: The number. None until memory runs out: each worker then processes its whole share of a global batch. Set
            after each call to the size that the workers have used, perhaps because they loaded it from a checkpoint.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self._members: Collection[Any] | None = None  # workers of the last attempt; None to accept any workers
        self._short: Collection[Any] = ()  # workers for which twice the size was too large

    def split(self, sizes: Mapping[Any, int]) -> None:
        """Reduce the size, because memory ran out.

        Args:
            sizes: For each worker that ran out of memory, the number of samples that it can process at once.
        """
        self.size, self._short, self._members = min(sizes.values()), {*sizes}, None
        logger.warning(
            "a worker ran out of memory, so the workers repeat the step, with at most %d samples at once from now on",
            self.size,
        )

    def for_group(self, workers: Collection[Any]) -> int | None:
        """Return the size for the next attempt. If the workers that ran out of memory have left, try twice the size.

        Args:
            workers: The workers of the group.
        """
        members, before = {*workers}, self._members
        if self.size is not None and before not in (None, members) and members.isdisjoint(self._short):
            self.size *= 2
        self._members = members
        return self.size


@contextmanager
def naming_config_entries(config: Mapping[str, Any]) -> Iterator[None]:
    """If the block raises an error because a config entry cannot be pickled, add the entry's name to the error."""
    try:
        yield
    except UnpicklableError as error:
        names = [name for name, value in config.items() if not is_sendable(value)]
        raise (UnpicklableError(f"`config[{names[0]!r}]`: {error}") if names else error) from error.__cause__


class TrainerLife:
    """Starts the workers of one trainer, holds what the trainer uses while they run, and ends them.

    This object has no reference to its trainer. When the trainer is freed, this object is freed too, and the workers
    end.

    Args:
        group_settings: Number of workers, their resources, and how to handle failures.
        settings: The settings from which each worker creates its replica.
        framework: What PyTorch's and Keras's trainers do differently.
        name: Name of the trainer's class.
        has_chosen_batches: True if the user passed `split_batches`.

    Attributes:
        group_settings: The argument of this name. It never changes.
        settings: The current settings. Change them with `take_settings`.
        framework: The argument of this name.
        replicas: Creates the replica of each worker, the object that holds the worker's operator.
        store: Function `(rank, value)` that puts a value into Ray's object store, unless the rank runs in the driver.
        controller: Starts, replaces and ends the workers, and runs calls on them.
        listeners: Functions that receive the progress of calls.
        recorder: Adds each call to the trainer's history.
        begin_in_background: Starts a call in a background thread; see the function.
        sharing: Divides datasets over the workers according to the current config.
        figures: The trainer's throughput, and how the workers spend their time.
        once: Remembers which warnings have been logged.
        writer: Writes files in background threads.
        saves: Writes the trainer's checkpoint files.
        left_file: File in which a detached trainer is saved if it ends after the program that started it has exited.
            None for other trainers, and without a folder.
        note_fit: In a detached trainer that another process could continue, the function that stores the progress of
            `fit` for that process. Otherwise, None.
        fit_progress: Progress of an earlier process's `fit`, from which the next `fit` continues. Usually None.
        begun_epoch: Epoch that the last `fit` left unfinished. The next `fit` continues it if the state has not changed
            since.
        largest_batch: How many samples a worker processes at once. None without `micro_batch_size="auto"`.
    """

    def __init__(
        self,
        group_settings: GroupSettings,
        settings: ReplicaSettings,
        framework: Framework,
        name: str,
        has_chosen_batches: bool,
    ) -> None:
        self.group_settings = group_settings
        self.settings = settings
        self._has_chosen_batches = has_chosen_batches
        self.framework = framework
        self.replicas = ReplicaMaker(framework.runner_cls)
        self.replicas.settings = framework.to_send(settings)
        self.store = partial(store_share, group_settings.use_local)
        self.controller = make_controller(group_settings, self.replicas, framework)
        self.listeners = ProgressListeners(self.controller)
        self.recorder = CallRecorder(self.controller.history.events)
        self.begin_in_background = partial(begin_in_background, self.controller, group_settings.use_local)
        self.sharing = self.new_sharing()
        self.figures = Figures(self.controller, f"{name}-{id(self):x}", self.used_options())
        self.once = Once()
        self.writer = BackgroundWriter()
        self.saves = FileSaves(self.controller, self.writer)
        self.left_file: str | None = None
        self.note_fit: NoteProgress | None = None
        self.fit_progress: FitProgress | None = None
        self.begun_epoch: BegunEpoch | None = None
        self.largest_batch = LargestBatch() if settings.batch_options.is_auto else None
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
        self.controller.monitor.observer = self.figures.report
        self.check_same_data()
        recovery = self.group_settings.recovery
        checks.warn_of_obstacle(
            self.facts.epoch_obstacle,
            snapshot_every_n_steps=recovery.snapshot_every_n_steps,
            resize_interval_s=None if recovery.wait_for_workers else recovery.resize_interval_s,
        )

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
            self.figures.end()
        finally:
            self.writer.close()

    def interrupt(self) -> None:
        """End the running call from another thread, as Ctrl-C does.

        If the driver is the only worker, do nothing.
        """
        if not self.group_settings.is_driver_only:
            self.controller.turns.interrupt()

    @property
    def facts(self) -> RunnerFacts:
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
        return DataSharing(self.replicas.settings, self.store, self.framework.call_data_of)

    @property
    def global_batch_in_words(self) -> str:
        """Description of the global batch if its size depends on the number of workers. Otherwise, an empty string.

        Also empty if the batch size is unknown, or if the user requested only one worker. With
        `micro_batch_size="auto"`, how many samples a worker processes at once, if memory has run out.
        """
        facts = self.facts
        if self.largest_batch is not None and self.largest_batch.size is not None:
            return f"at most {self.largest_batch.size} samples at once, because memory ran out"
        if facts.keeps_global_batch or facts.batch_size is None or self.group_settings.num_workers == 1:
            return ""
        return global_batch_in_words(self.controller.num_workers, facts.batch_size)

    def warn_of_whole_batches(self) -> None:
        """Log a warning the first time, if each worker takes whole batches and the user has not chosen this."""
        num_workers, size = self.group_settings.num_workers, self.facts.batch_size
        advises = self.framework.keeps_survivors and self.global_batch_in_words and not self._has_chosen_batches
        if size is not None and advises and self.once.is_first("whole batches"):
            logger.warning(
                "each of %d workers takes whole batches of %d, %d in all; `split_batches=True` divides them, so that "
                "numbers do not depend on the workers and the others go on at once when one dies",
                num_workers,
                size,
                num_workers * size,
            )

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

    def of_first(self, name: str) -> Any:
        """Return an attribute of the replica of rank 0, such as "epochs_done". Called while workers are idle."""
        return self.controller.run(Call(attrgetter(name), rank=0))[0]

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

    def save(self, checkpoint: Any, content_of: Callable[[Snapshot], Content], blocking: bool, owner: Any) -> Any:
        """Write the current training state to a file, in the background if `blocking` is False. Return `checkpoint`.

        Args:
            checkpoint: Path or URI of the file.
            content_of: Function that returns the file's content for a snapshot.
            blocking: Whether to return only when the file is complete.
            owner: The trainer. See `FileSaves.submit`.
        """
        if blocking:
            self.saves.write(checkpoint, content_of(self.snapshot()))
        else:
            self.saves.submit(checkpoint, self.newest_snapshot(), content_of, owner)
        return checkpoint

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


def make_controller(settings: GroupSettings, make_replica: ReplicaMaker, framework: Framework) -> ElasticController:
    """Return the controller for a trainer's settings.

    Args:
        settings: Number of workers, their resources and how to handle failures.
        make_replica: Creates the replica of a worker, the object that holds the worker's training operator.
        framework: What differs between PyTorch and Keras.
    """
    is_wanted = settings.recovery.in_place and not settings.is_driver_only
    continues = is_wanted and framework.keeps_survivors
    recovery = settings.recovery
    every_s, operator_cls = recovery.snapshot_every_s, make_replica.settings.training_operator_cls
    if settings.use_local and every_s == "auto":
        # Take a snapshot after each call. The user may change the operator in the driver between two calls, and the
        # trainer cannot notice this.
        every_s = 0.0
    num_gpus = settings.num_gpus_per_worker if make_replica.settings.use_gpu else 0
    group = GroupSpec(
        connection=framework.connection,
        make_replica=make_replica,
        resources=settings.placement.resources(settings.num_cpus_per_worker, num_gpus),
        packs=settings.placement.packs(by_default=num_gpus > 0),
        use_local=settings.use_local,
        initialization_hook=settings.initialization_hook,
        reservation_timeout_s=framework.reservation_timeout_s,
        captures=not settings.is_driver_only,
        snapshot_every_s=every_s,
        snapshots_inside=recovery.snapshot_every_n_steps is not None,
        regroups=continues,
        renews=is_wanted and framework.renews_survivors,
        num_spares=settings.spare_workers,
        heartbeat_s=recovery.heartbeat_s,
        settle_timeout_s=recovery.settle_timeout_s,
        words=replace(WORDS, name=f"the trainer of `{operator_cls.__name__}`"),
    )
    scaling = ScalingPolicy(
        max_workers=settings.num_workers, min_workers=settings.min_workers, num_local=int(settings.use_local)
    )

    def keeps_global_batch() -> bool:
        facts = controller.facts[0]
        return facts.keeps_global_batch and facts.epoch_obstacle is None

    controller = ElasticController(
        group,
        scaling,
        FailurePolicy(continues),
        rules=ElasticRules(recovery.wait_for_workers, recovery.resize_interval_s, draining_nodes, keeps_global_batch),
    )
    return controller


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
