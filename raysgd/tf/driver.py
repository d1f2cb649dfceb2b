"""The driver's part of a `TFTrainer`: checks arguments before anything starts, and saves and loads states.

`TFFramework` has what a `TFTrainer` does differently from a `TorchTrainer`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysgd.core.arguments import check_kind, check_num_workers, check_operator_class
from raysgd.core.arrays.user_data import CallData, kind_of
from raysgd.core.cluster.resources import DriverView
from raysgd.core.connections.tensorflow import GROWTH, TensorFlowConnection, keras_of_driver
from raysgd.core.engine.snapshots import Snapshot
from raysgd.core.history.history import Kind
from raysgd.core.text.secrets import masked
from raysgd.streams.source import check_stream_of_call
from raysgd.streams.stream import Stream
from raysgd.tf.checkpoints import checkpoint_file
from raysgd.tf.creator_operator import CreatorOperator, listed_callbacks, make_operator
from raysgd.tf.data import sources
from raysgd.tf.objects import datasets, registration
from raysgd.tf.tf_runner import TFRunner
from raysgd.tf.training_operator import TFSettings, TrainingOperator
from raysgd.trainer.configuration import GroupSettings
from raysgd.trainer.driver.life import Framework, TrainerLife
from raysgd.trainer.driver.saving import Content, load_into_all, load_snapshot_into_all
from raysgd.trainer.messages.comparison import check_equal
from raysgd.trainer.messages.epochs import EpochAnswer
from raysgd.trainer.messages.prediction import BatchRequest, PredictionSource
from raysgd.trainer.worker.replica_state import RESUME, check_parts, place_in
from raysgd.utils import BATCH_SIZE


def resolve_num_workers(num_workers: Any, num_replicas: Any) -> int:
    """Return the number of workers from `num_workers` or its older name `num_replicas`. If both are None, return 1."""
    if num_workers is not None and num_replicas is not None and num_workers != num_replicas:
        raise ValueError(
            f"`num_workers={num_workers!r}` and `num_replicas={num_replicas!r}` are two names for one argument: pass "
            "one."
        )
    name, value = ("num_replicas", num_replicas) if num_workers is None else ("num_workers", num_workers)
    if value is None:
        return 1
    return check_num_workers(name, value, hint=f"To run without Ray actors pass `use_local=True` with `{name}=1`.")


def choose_num_gpus(use_gpu: bool | str, group: GroupSettings) -> float:
    """Return the number of GPUs of each worker; a fraction if workers share GPUs, 0 for CPUs.

    With "auto", connect to Ray, unless this process is the only worker.

    Raises:
        ValueError: More than four workers would share a GPU. Or a worker in this process would take all memory of a GPU
            that it shares.
    """
    num_here = 0
    if use_gpu == "auto" and group.use_local:
        import tensorflow as tf

        num_here = len(tf.config.list_physical_devices("GPU"))
    choice = group.choose_gpus(use_gpu, DriverView(num_here))
    if choice.is_shared and group.use_local and not GROWTH.items() <= os.environ.items():
        raise ValueError(
            '`use_gpu="auto"` with `use_local=True`: this process shares its GPU with other workers, but TensorFlow '
            "would take all of its memory. Set `TF_FORCE_GPU_ALLOW_GROWTH=true` before the program starts, or pass "
            "`use_gpu=False`."
        )
    return choice.num_gpus


def resolve_operator(operator_cls: Any, model_creator: Any, data_creator: Any) -> type[TrainingOperator]:
    """Return the operator class that the user passed, or create one from the user's creator functions."""
    if operator_cls is None:
        missing = [
            name
            for name, creator in (("model_creator", model_creator), ("data_creator", data_creator))
            if creator is None
        ]
        if missing:
            raise TypeError(
                f"`TFTrainer` needs `{'` and `'.join(missing)}`: pass `model_creator` and `data_creator`, or "
                "`training_operator_cls`."
            )
        return make_operator(model_creator, data_creator)
    if model_creator is not None or data_creator is not None:
        raise ValueError("got both `training_operator_cls` and creator functions: pass one of the two.")
    check_operator_class(operator_cls, TrainingOperator, "raysgd.tf.TrainingOperator")
    return operator_cls


_FROM_CREATOR = "the data comes from `data_creator`. Return it there, as datasets of batches"
_INSTEAD = {
    "x": _FROM_CREATOR,
    "y": _FROM_CREATOR,
    "batch_size": "the datasets decide their batches. Call `.batch(batch_size)` on them in `data_creator`",
    "validation_split": "a dataset cannot be split by Keras. Pass `validation_data`, a dataset or arrays",
    "sample_weight": "the weights belong to the batches. Let the datasets yield `(x, y, sample_weight)`",
}
"""Options of Keras's `fit` and `evaluate` that are rejected, and what to do instead."""


def check_config(settings: TFSettings, num_workers: int) -> None:
    """Check that a trainer's config has valid options for Keras and works with this number of workers."""
    config, options = settings.config, settings.batch_options
    _check_options_for_keras(config)
    if num_workers > 1:
        if any(
            "BackupAndRestore" in registration.class_names(callback)
            for callback in listed_callbacks(config.get("fit_config") or {})
        ):
            raise ValueError(
                f"`BackupAndRestore` in `config['fit_config']['callbacks']` with `num_workers={num_workers}` cannot "
                "work: it would restore weights and epoch on rank 0 only. Omit it. After a worker fails, the call "
                "continues by itself (`recovery`), and a new trainer continues from a file (`save` and `load`)."
            )
        data = (config.get("fit_config") or {}).get("validation_data")
        datasets.check_can_be_divided("config['fit_config']['validation_data']", data)
    if BATCH_SIZE in config:
        options.global_size(config[BATCH_SIZE], num_workers)


def _check_options_for_keras(config: Mapping[str, Any]) -> None:
    """Check the types of `fit_config` and `evaluate_config`, and reject options that do not work with raysgd."""
    for key in ("fit_config", "evaluate_config"):
        options = config.get(key)
        check_kind(f"config[{key!r}]", options, Mapping | None, "a dict of options for Keras")
        for name in [name for name in _INSTEAD if options is not None and options.get(name) is not None]:
            raise ValueError(f"`config[{key!r}][{name!r}]` cannot work: {_INSTEAD[name]}.")
        for callback in listed_callbacks(config.get(key) or {}):
            if isinstance(callback, type) or not hasattr(callback, "set_model"):
                raise TypeError(
                    f"`config[{key!r}]['callbacks']` has {callback!r}: need objects of subclasses of "
                    "`keras.callbacks.Callback`. Those of raysgd belong to `trainer.fit(5, callbacks=[...])`."
                )


_BEGIN_AGAIN = {"EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler"}
"""Keras callbacks that reset their state, or count epochs from zero, in each `fit`."""


def check_calls_of_fit(config: Mapping[str, Any], epochs: int) -> None:
    """Reject Keras callbacks that restart in each call to Keras's `fit`, because there is one call per epoch."""
    names = set().union(*map(registration.class_names, listed_callbacks(config.get("fit_config") or {}))) & _BEGIN_AGAIN
    if names and epochs > 1:
        raise ValueError(
            f"`{min(names)}` in `config['fit_config']['callbacks']` with `trainer.fit({epochs})` cannot work: this "
            f"calls Keras's `fit` {epochs} times, and the callback starts over in each call. Set "
            "`config['fit_config']['epochs']` and call `trainer.train()`, or give `trainer.fit` callbacks of "
            "`raysgd.callbacks`."
        )


def refuse_keras_file(checkpoint: Any) -> None:
    """Check that a checkpoint path does not have one of Keras's suffixes, because Keras could not read the file."""
    if str(checkpoint).endswith((".keras", ".h5", ".hdf5")):
        raise ValueError(
            f"`checkpoint={masked(checkpoint)!r}`: `save` writes an archive of NumPy, which Keras does not read. Call "
            f"`trainer.get_model().save({str(checkpoint)!r})`, or save a `.npz` file to load it into a trainer."
        )


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
    check_settings = staticmethod(check_config)

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
        if not self._travels or not sources.is_dataset(data):
            return settings
        packed = datasets.packed("config['fit_config']['validation_data']", data)
        config = {**settings.config, "fit_config": {**options, "validation_data": packed}}
        return replace(settings, config=config)

    def check_reload(self, life: TrainerLife, operator_cls: Any) -> None:
        resolve_operator(operator_cls, None, None)
        if self.trains_with_fit:
            raise ValueError(
                "`reload` needs an operator class, but this trainer has creator functions, whose steps are those of "
                "Keras's `fit`. Pass `training_operator_cls`, or save the state and load it into a new trainer."
            )

    def check_dataset(self, life: TrainerLife, dataset: Any, training: bool, name: str = "dataset") -> None:
        sources.check(dataset, name, with_fit=self.trains_with_fit, training=training)
        if training and life.settings.batch_options.split_batches and kind_of(dataset) == "ray":
            raise ValueError(
                f"`train(dataset=...)` got `{type(dataset).__name__}`, which `split_batches=True` cannot shard by "
                "samples: pass arrays or a `tf.data.Dataset`."
            )
        if isinstance(dataset, Stream):
            check_stream_of_call(dataset, name, life.settings.obstacle_of_streams)

    def check_fit(self, life: TrainerLife, epochs: int) -> None:
        if self.trains_with_fit:
            check_calls_of_fit(life.settings.config, epochs)

    def call_data_of(self, data: Any, config: Mapping[str, Any]) -> CallData | None:
        return sources.call_data_of(data, config, seed=self._seed, travels=self._travels)

    def check_answers(self, life: TrainerLife, kind: Kind, answers: Sequence[EpochAnswer], num_steps: Any) -> None:
        check_equal({rank: answer.weight_sums for rank, answer in enumerate(answers)}, _REASONS)

    def merged(self, answers: Sequence[EpochAnswer], reduce_results: bool) -> Any:
        if self.trains_with_fit and reduce_results:  # the workers have merged the metrics already
            return super().merged(answers[:1], reduce_results=False)[0]
        return super().merged(answers, reduce_results)

    def to_predict(self, data: Any, asked: BatchRequest) -> PredictionSource:
        return sources.source_to_predict(data, asked)

    def content_of(self, snapshot: Snapshot) -> Content:
        state = {**snapshot.shared_state, RANKS: list(snapshot.rank_states)}
        checkpoint_file.check(state)
        return state, checkpoint_file.write

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
