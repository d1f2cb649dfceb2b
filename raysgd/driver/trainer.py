"""`ClassTrainer`: what both class-based front ends have, such as calls on all operators, predictions, and the end."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic
from weakref import finalize

from raysgd import _arguments as checks
from raysgd._text.cards import card
from raysgd._text.log_lines import Once
from raysgd.arrays.containers import Container
from raysgd.arrays.data_kinds import CallData
from raysgd.driver.calls import EpochCalls
from raysgd.driver.controlling import make_controller
from raysgd.driver.fit_methods import FitMethods
from raysgd.driver.keeping import FileSaves
from raysgd.driver.predicting import PredictionRounds, usual_batch_size
from raysgd.driver.progress_listeners import ProgressListeners
from raysgd.driver.sharing import DataSharing, place_share
from raysgd.driver.throughput import Throughput
from raysgd.driver.trainer_views import ReadOnlyConfig, in_words, show_options
from raysgd.engine.background_calls import BackgroundCalls
from raysgd.engine.controller import ElasticController
from raysgd.engine.shared.connection import Connection
from raysgd.engine.shared.time_spent import TimeLedger
from raysgd.engine.snapshots import NewestSnapshot, Snapshot
from raysgd.engine.status import TrainerStatus
from raysgd.engine.worker import is_sendable
from raysgd.exceptions import UnpicklableError
from raysgd.history.history import CallRecorder
from raysgd.messages import replica_calls
from raysgd.messages.batching import global_batch_in_words
from raysgd.messages.prediction_data import BatchRequest, PredictionSource
from raysgd.messages.recovery import Recovery
from raysgd.messages.settings import GroupSettings, ReplicaMaker, ReplicaSettings
from raysgd.storage.background_writer import BackgroundWriter
from raysgd.utils import BATCH_SIZE

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    AnyOperatorT = TypeVar("AnyOperatorT", default=Any)
else:
    from typing import TypeVar  # without a default, before Python 3.13

    AnyOperatorT = TypeVar("AnyOperatorT")

T = TypeVar("T")
TrainerT = TypeVar("TrainerT", bound="ClassTrainer[Any]")

logger = logging.getLogger(__name__)


class ClassTrainer(FitMethods, Generic[AnyOperatorT]):
    """The driver's handle on N replicas of an operator. Each replica has the attribute `operator`."""

    training_operator_cls: type[AnyOperatorT]
    initialization_hook: Callable[[], Any] | None
    num_cpus_per_worker: float
    use_gpu: bool
    backend: str
    timeout_s: float
    use_local: bool
    min_workers: int
    spare_workers: int
    recovery: Recovery
    _runner_cls: Any
    """The class of the replicas, a `ClassRunner`."""
    _divide_by_hand: str
    """What to do where each worker loads a part of the data by itself."""

    def __init__(self, group: GroupSettings, settings: ReplicaSettings, writer: BackgroundWriter) -> None:
        self._group_settings, self._settings, self._writer = group, settings, writer
        self._place = partial(place_share, group.use_local)
        show_options(self, group, settings, settings.batch_options)
        self._replicas = ReplicaMaker(self._runner_cls)
        self._begin(self._make_controller())
        self._check_same_data(("train_data", "validation_data"))
        checks.warn_of_obstacle(
            self._facts.epoch_obstacle,
            snapshot_every_n_steps=settings.recovery.snapshot_every_n_steps,
            resize_interval_s=None if group.recovery.wait_for_workers else group.recovery.resize_interval_s,
        )
        if self._global_batch_in_words:
            logger.info("%s", self._global_batch_in_words)

    @property
    def _new_sharing(self) -> Callable[[], DataSharing]:
        """What divides data, by the settings of the time. It does not hold the trainer, which could not be freed."""
        replicas, place, call_data_of = self._replicas, self._place, self._call_data_of

        def new_sharing() -> DataSharing:
            settings = replicas.settings
            return DataSharing(settings.config, place, call_data_of, settings.batch_options.config_for)

        return new_sharing

    @abstractmethod
    def _make_connection(self) -> Connection:
        """Return what connects the workers."""

    @property
    def _renews_survivors(self) -> bool:
        """True if those that cannot go on can go back to a snapshot in their processes."""
        return False

    @property
    @abstractmethod
    def _reservation_timeout_s(self) -> float:
        """The time to wait for resources."""

    def _settings_to_send(self, settings: Any) -> ReplicaSettings:
        """Return what the replicas are made from, as something that other processes can use."""
        return settings

    def _take_settings(self, settings: ReplicaSettings) -> None:
        """Makes workers that start from now on from other settings."""
        is_other = settings.revision != self._settings.revision
        self._settings = settings
        self._replicas.settings = self._settings_to_send(settings)
        show_options(self, settings)
        if is_other and self._controller.group is not None:
            self._controller.group.standby.kill_all()  # others are told what has changed when they step in

    def _make_controller(self) -> ElasticController:
        """Return what keeps the workers alive, as the trainer's arguments ask for it."""
        self._replicas.settings = self._settings_to_send(self._settings)
        return make_controller(
            self._group_settings,
            self._replicas,
            self._make_connection(),
            self._reservation_timeout_s,
            keeps_survivors=self._keeps_survivors,
            renews_survivors=self._renews_survivors,
        )

    def _begin(self, controller: ElasticController) -> None:
        """Starts the workers; they end with the trainer, also without a `shutdown`."""
        self._controller = controller
        self._listeners = ProgressListeners(controller)
        self._recorder = CallRecorder(controller.history.events)
        self._background = BackgroundCalls(controller, at_once=self.use_local)
        self._throughput = Throughput(f"{type(self).__name__}-{id(self):x}", controller, self._used_options())
        self._calls = EpochCalls(
            self._runner_cls, controller, self._throughput, self._listeners, self.use_local, self._new_sharing()
        )
        self._once = Once()
        self._finalizer = finalize(self, _abandon, controller)
        self._saves = FileSaves(controller, self._writer)
        try:
            controller.start()
        except UnpicklableError as error:
            raise naming_config_entry(error, self._settings.config) from error.__cause__
        controller.observe_with(self._throughput.report)

    def _used_options(self) -> list[str]:
        """Return the options that shorten what the ledger counts, as far as they are used already."""
        recovery = self._settings.recovery
        used = {
            "spare_workers": self._group_settings.spare_workers > 0,
            "snapshot_every_n_steps": recovery.snapshot_every_n_steps is None,  # a larger number would copy no less
        }
        return [name for name, is_used in used.items() if is_used]

    @property
    @abstractmethod
    def _call_data_of(self) -> Callable[[Any, Mapping[str, Any]], CallData | None]:
        """A function of the data of a call and the config of one worker, which says who divides them."""

    @abstractmethod
    def _to_predict(self, data: Any, asked: BatchRequest) -> tuple[PredictionSource, Container]:
        """Return where the batches come from, and what the results are returned in."""

    def predict(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        streaming: bool = False,
        feature_columns: Any = None,
        has_target: bool | None = None,
        info: Mapping[str, Any] | None = None,
        max_retries: int = 3,
    ) -> Any:
        """Predicts on all workers: one result for each row of the data, in the order of the rows.

        Each batch goes through the operator's `predict_batch`, in evaluation mode and without gradients. The batches
        are those of one process, whatever the number of workers. The training state does not change.

        Args:
            data: An array or tensor, a tuple or dict of them, a data frame, a dataset or loader of the framework, a
                dataset of Ray Data, `raysgd.data.Arrays` or `RayBatches`, or an iterator over batches.
            batch_size: Rows in a batch of one worker. None: that of the data, else that of the config, else 32.
            streaming: Whether to return an iterator with one result for each batch, for data or results that do not
                fit in memory. It works as you draw from it.
            feature_columns: Of a data frame or a dataset of Ray Data: the columns that the model gets.
            has_target: Whether batches that are tuples end with a target, which is left out. None: those of datasets
                and loaders do if they have several parts; arrays that you pass are all inputs.
            info: Added to `batch_info`.
            max_retries: How many times a round of batches is repeated after a failure.

        Returns:
            The same kind of container as `data`. See `docs/predict.md`. Arrays without rows are one batch without rows.

        Raises:
            TypeError: The data is of an unknown kind.
            ValueError: The order of the data cannot be kept, they have no such columns, or an output has other rows
                than its batch.
            WorkerError: The operator raised; also of the class that it raised. Never retried.
            WorkersLostError: Workers were lost and the retries are used up.
        """
        checks.refuse_text(streaming=streaming)
        if has_target is not None and not isinstance(has_target, bool):
            raise ValueError(f"`has_target={has_target!r}`: need True, False or None.")
        checks.check_max_retries(max_retries)
        info = checks.check_info(info)
        size = usual_batch_size(self._settings, self.num_workers) if batch_size is None else batch_size
        size = checks.check_count("batch_size", size, "It is the number of rows in a batch.")
        source, container = self._to_predict(data, BatchRequest(size, batch_size is not None, feature_columns))
        predict, listeners = self._runner_cls.predict, self._listeners
        rounds = PredictionRounds(
            self._controller, predict, source, info, has_target, max_retries, self._place, listeners
        )
        return container.stream(rounds.outputs()) if streaming else container.collect(rounds.outputs())

    def load_state_dict(self, state_dict: Mapping[str, Any], blocking: bool = True) -> None:
        """Loads such a state into all workers; returns when they have it.

        Args:
            state_dict: What `state_dict` returned, here or in another trainer with any number of workers.
            blocking: Accepted for compatibility: loading always waits, so that an error is not lost.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not fit what is registered; the workers are as they were.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"`load_state_dict` got `{type(state_dict).__name__}`: need what `state_dict` returns, a dict."
            )
        self._load_state(dict(state_dict))

    @abstractmethod
    def _load_state(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""

    def _checked_config(self, config: Mapping[str, Any] | None) -> dict[str, Any]:
        """A config that this trainer can work with."""
        return checks.check_config(config)

    def apply_all_workers(self, fn: Callable[[], T]) -> list[T]:
        """Runs `fn()` once in each worker process; returns the results in rank order."""
        return self._on_all(replica_calls.execute, fn, changes_state=True, is_repeatable=False)  # it may seed, say

    def apply_all_operators(self, fn: Callable[[AnyOperatorT], T]) -> list[T]:
        """Runs `fn(operator)` in each worker, all at the same time; returns the results in rank order.

        Where it raises on some workers only, or not at the same line, all are replaced: some may have
        changed and others not.
        """
        return self._on_all(replica_calls.apply, fn, changes_state=True, keeps_alike=True, is_repeatable=False)

    def get_local_operator(self) -> AnyOperatorT:
        """The live operator of rank 0, with `use_local=True` only.

        Raises:
            NotImplementedError: All workers are remote.
        """
        runner = self._controller.ensure_group().local_replica
        if runner is None:
            raise NotImplementedError(
                "The operators live in other processes: use `apply_all_operators(fn)`, or create the trainer with "
                "`use_local=True`."
            )
        operator: AnyOperatorT = runner.operator
        return operator

    def shutdown(self, force: bool = False) -> None:
        """Ends the workers and gives their resources back; a second time it does nothing.

        From another thread it ends a running call too, which raises `TrainerShutdownError`.

        Args:
            force: End the processes at once instead of letting them close first.
        """
        try:
            self._finalizer.detach()
            self._saves.await_states()
            self._controller.stop(force)
            self._background.await_end()
            self._throughput.stop_reporting()
        finally:
            self._writer.close()

    def _interrupt(self) -> None:
        """From another thread: ends the running call as Ctrl-C does, unless it runs in the driver alone."""
        if not self._group_settings.is_driver_only:
            self._controller.turns.interrupt_running()

    def __enter__(self: TrainerT) -> TrainerT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(force=error is not None)

    def status(self) -> TrainerStatus:
        """Return how the trainer is doing: workers, throughput, where the time went, data, failures, last snapshot.

        Prints as a few lines of text, and as a card in a notebook. Asks the workers, beside their work. May be called
        from a second thread while `train` runs.
        """
        found = self._throughput.with_ledger(self._controller.status(self._throughput.samples_per_s))
        return replace(found, global_batch=self._global_batch_in_words)

    @property
    def _global_batch_in_words(self) -> str:
        """The size of a step in words, where the user left it to the number of workers; else empty."""
        facts = self._facts
        if facts.keeps_global_batch or facts.batch_size is None or self.max_replicas == 1:
            return ""
        return global_batch_in_words(self.num_workers, facts.batch_size, self._keeps_survivors)

    def ledger(self) -> TimeLedger:
        """Returns where the time of every rank went, up to its last sign of life. Asks no worker.

        `status().ledger` is the same as of now. Its notes say what is missing.
        """
        controller = self._controller
        return self._throughput.accounts.ledger(None if controller.is_stopped else controller.num_workers)

    def __repr__(self) -> str:
        """One line, from what the driver knows: no worker is asked."""
        try:
            return f"<{self._title}: {self._in_words()}>"
        except AttributeError:  # its start has failed
            return f"<{type(self).__name__}: not started>"

    def _repr_html_(self) -> str:
        if self._controller.is_stopped:
            return card(self._title, note=self._in_words())
        return self.status().as_card(self._title)

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} of {self.training_operator_cls.__name__}"

    def _in_words(self) -> str:
        num_workers = None if self._controller.is_stopped else self.num_workers
        return ", ".join(in_words(num_workers, self.max_replicas, self.backend, self.history))

    def _snapshot(self) -> Snapshot:
        """The state as it is now. What lives in the driver may have been changed there, in ways that no call shows."""
        if self.use_local:
            self._controller.snapshots.touch()
        return self._controller.snapshot()

    def _newest_snapshot(self) -> NewestSnapshot:
        """The state as it is now, once it is copied; perhaps it is on its way to the driver."""
        if self.use_local:
            self._controller.snapshots.touch()
        return self._controller.newest_snapshot()

    def _shared_snapshot(self) -> Snapshot:
        """The same for what all ranks share; random numbers may be those of a little earlier, which costs no copy."""
        landed = self._controller.landed_snapshot() if not self.use_local else None
        return self._snapshot() if landed is None else landed

    @property
    def config(self) -> dict[str, Any]:
        """A read-only copy of the config, with the batch size that the present number of workers really takes."""
        config = dict(self._settings.config)
        if BATCH_SIZE in config:
            options = self._settings.batch_options
            config[BATCH_SIZE] = options.global_size(config[BATCH_SIZE], self._controller.num_workers)
        return ReadOnlyConfig(config)

    @property
    def max_replicas(self) -> int:
        """The number of workers to train with, at most."""
        return self._group_settings.num_workers

    @property
    def num_workers(self) -> int:
        """The number of workers that there are now."""
        return self._controller.num_workers

    @property
    def worker_group(self) -> Any:
        """The running group, started again if it was ended; `RuntimeError` after `shutdown`."""
        return self._controller.ensure_group()

    @property
    def _facts(self) -> Any:
        """The facts that a replica reports after `setup`; alike on all ranks, but for the data."""
        return self._controller.facts[0]

    @property
    def _num_failures(self) -> int:
        return self._controller.history.num_failures

    @property
    def _last_resize(self) -> float:
        return self._controller.history.last_resize

    def _check_same_data(self, names: Sequence[str]) -> None:
        """All ranks must divide the same data; otherwise they would train on overlapping parts unnoticed."""
        for name in names:
            found = [getattr(facts, name) for facts in self._controller.facts]
            if len(set(found)) > 1:
                self.shutdown(force=True)
                raise ValueError(
                    f"The workers registered different {name.replace('_', ' ')}: {found}. The library divides one "
                    "dataset that all workers have alike. If each worker loads its own part, "
                    f"{self._divide_by_hand}."
                )


def naming_config_entry(error: UnpicklableError, config: Mapping[str, Any]) -> UnpicklableError:
    """The error of a start whose parts cannot be sent to workers; by name where it is an entry of the config."""
    found = [key for key, value in config.items() if not is_sendable(value)]
    return UnpicklableError(f"`config[{found[0]!r}]`: {error}") if found else error


def _abandon(controller: ElasticController) -> None:
    """Ends a trainer that was never shut down, at its collection or at the end of the program."""
    controller.stop(force=True)
