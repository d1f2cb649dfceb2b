"""`TFFramework`: what the driver of a `TFTrainer` does differently from a `TorchTrainer`'s."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysgd.core.arrays.user_data import CallData
from raysgd.core.connections.tensorflow import GROWTH, TensorFlowConnection, keras_of_driver
from raysgd.core.engine.snapshots import Snapshot
from raysgd.core.history.history import Kind
from raysgd.streams.source import check_stream_of_call
from raysgd.streams.stream import Stream
from raysgd.tf.checkpoints import checkpoint_file
from raysgd.tf.creator_operator import CreatorOperator
from raysgd.tf.data import call_data
from raysgd.tf.driver import arguments
from raysgd.tf.objects import datasets
from raysgd.tf.operator.internals import TFSettings
from raysgd.tf.tf_runner import TFRunner
from raysgd.trainer.configuration import GroupSettings
from raysgd.trainer.driver.life import Framework, TrainerLife
from raysgd.trainer.driver.saving import Content, load_into_all, load_snapshot_into_all
from raysgd.trainer.messages.comparison import check_equal
from raysgd.trainer.messages.epochs import EpochAnswer
from raysgd.trainer.messages.prediction import BatchRequest, Found
from raysgd.trainer.worker.replica_state import RESUME, check_parts, place_in

RANKS = "ranks"
_REASONS = (
    "weights that are changed by hand, as with `variable.assign_sub(...)`, or by an optimizer that is not registered; "
    "a callback of Keras that acts on the metrics of a batch, which are those of its worker, or draws random numbers"
)


class TFFramework(Framework):
    """Holds what the driver of a `TFTrainer` does differently from a `TorchTrainer`'s.

    Args:
        group: The trainer's settings for its workers.
        settings: The settings of the workers' operators.

    Attributes:
        trains_with_fit: True if the trainer has creator functions, whose model is trained with Keras's own `fit`.
    """

    runner_cls = TFRunner
    shard_advice = "set the auto-shard policy in the dataset's options to OFF"

    def __init__(self, group: GroupSettings, settings: TFSettings) -> None:
        self.trains_with_fit = issubclass(settings.training_operator_cls, CreatorOperator)
        self._seed, self._travels = settings.seed, not group.is_driver_only
        growth = GROWTH if group.num_gpus_per_worker < 1 else {}
        log_level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")
        variables = {**keras_of_driver(), "TF_CPP_MIN_LOG_LEVEL": log_level, **growth}
        self.connection = TensorFlowConnection(
            variables, timeout_s=group.timeout_s, form_timeout_s=group.recovery.form_timeout_s
        )
        self.reservation_timeout_s = float(os.environ.get("SGD_PLACEMENT_GROUP_TIMEOUT_S", "100"))

    def to_send(self, settings: TFSettings) -> TFSettings:
        """Return the settings to send to the workers.

        If the `validation_data` of `fit_config` is a dataset, it is serialized.
        """
        options = settings.config.get("fit_config") or {}
        data = options.get("validation_data")
        if not self._travels or not call_data.is_dataset(data):
            return settings
        packed = datasets.packed("config['fit_config']['validation_data']", data)
        config = {**settings.config, "fit_config": {**options, "validation_data": packed}}
        return replace(settings, config=config)

    def check_config(self, life: TrainerLife, config: Mapping[str, Any] | None) -> dict[str, Any]:
        checked = super().check_config(life, config)
        settings: Any = replace(life.settings, config=checked)
        arguments.check_config(settings, life.group_settings.num_workers)
        return checked

    def check_reload(self, life: TrainerLife, operator_cls: Any) -> None:
        arguments.resolve_operator(operator_cls, None, None)
        if self.trains_with_fit:
            raise ValueError(
                "`reload` needs an operator class, but this trainer has creator functions, whose steps are those of "
                "Keras's `fit`. Pass `training_operator_cls`, or save the state and load it into a new trainer."
            )

    def check_dataset(self, life: TrainerLife, dataset: Any, training: bool, name: str = "dataset") -> None:
        call_data.check(dataset, name, with_fit=self.trains_with_fit, training=training)
        if training:
            arguments.check_can_be_constant(dataset, life.settings)
        if isinstance(dataset, Stream):
            check_stream_of_call(dataset, name, life.settings.obstacle_of_streams)

    def check_fit(self, life: TrainerLife, epochs: int) -> None:
        if self.trains_with_fit:
            arguments.check_calls_of_fit(life.settings.config, epochs)

    def call_data_of(self, data: Any, config: Mapping[str, Any]) -> CallData | None:
        return call_data.call_data_of(data, config, seed=self._seed, travels=self._travels)

    def check_answers(self, life: TrainerLife, kind: Kind, answers: Sequence[EpochAnswer], num_steps: Any) -> None:
        check_equal({rank: answer.weight_sums for rank, answer in enumerate(answers)}, _REASONS)

    def merged(self, answers: Sequence[EpochAnswer], reduce_results: bool) -> Any:
        if self.trains_with_fit and reduce_results:  # the workers have merged the metrics already
            return super().merged(answers[:1], reduce_results=False)[0]
        return super().merged(answers, reduce_results)

    def to_predict(self, data: Any, asked: BatchRequest) -> Found:
        return call_data.source_to_predict(data, asked)

    def content_of(self, snapshot: Snapshot) -> Content:
        return content_of(snapshot)

    def place_in(self, snapshot: Snapshot) -> tuple[int, int]:
        return place_in(snapshot.shared_state)

    def load_state(self, life: TrainerLife, state: dict[str, Any]) -> None:
        load(life, state, ())

    def load_snapshot(self, life: TrainerLife, snapshot: Snapshot) -> None:
        check_parts(snapshot.shared_state, life.facts.counts)
        load_snapshot_into_all(life.controller, TFRunner.restore, snapshot)


def load(life: TrainerLife, state: dict[str, Any], rank_states: tuple[Any, ...]) -> None:
    """Load a state into all workers.

    Args:
        life: The trainer's workers.
        state: The state that is the same for all ranks.
        rank_states: The state of each rank, if the file has one.
    """
    check_parts(state, life.facts.counts)
    whole = {"operator": None, RESUME: {}, **state}
    # If the file was saved with the same number of workers, it has the state of every rank of this trainer.
    is_complete = len(rank_states) == life.controller.num_workers
    load_into_all(life.controller, TFRunner.restore, whole, rank_states, is_complete)


def content_of(snapshot: Snapshot) -> Content:
    """Return a pair: a checkpoint file's content, as views of a snapshot's arrays, and the function that writes it."""
    return {**snapshot.shared_state, RANKS: list(snapshot.rank_states)}, checkpoint_file.write


def checked_content_of(snapshot: Snapshot) -> Content:
    """Return what `content_of` returns, or raise an error if `load` could not read it."""
    state, write = content_of(snapshot)
    checkpoint_file.check(state)
    return state, write
