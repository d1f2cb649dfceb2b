"""Checks `TFTrainer`'s arguments before anything starts, and provides defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raysgd.core.arguments import check_kind, check_num_workers, check_operator_class
from raysgd.core.arrays.user_data import kind_of
from raysgd.core.cluster.gpus import DriverView
from raysgd.core.cluster.ray_cluster import choose_gpus_of_cluster
from raysgd.core.connections.tensorflow import GROWTH
from raysgd.core.text.secrets import masked
from raysgd.tf.creator_operator import make_operator
from raysgd.tf.objects import datasets, registration
from raysgd.tf.operator.internals import TFSettings
from raysgd.tf.training_operator import TrainingOperator
from raysgd.trainer.configuration import GroupSettings, ReplicaSettings
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
    choice = choose_gpus_of_cluster(
        use_gpu,
        group.num_workers + group.spare_workers,
        DriverView(num_here),
        group.placement.custom,
        uses_ray=not group.is_driver_only,
        has_driver=group.use_local,
    )
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


def creator_of_model(operator_cls: Any) -> Callable[[dict[str, Any]], Any]:
    """Return the user's `model_creator` from an operator class that `resolve_operator` created."""
    return operator_cls._model_creator


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
        _check_callbacks(config, num_workers)
        data = (config.get("fit_config") or {}).get("validation_data")
        datasets.check_can_be_divided("config['fit_config']['validation_data']", data)
    if BATCH_SIZE in config:
        options.global_size(config[BATCH_SIZE], num_workers)


def check_can_be_constant(dataset: Any, settings: ReplicaSettings) -> None:
    """Check that a call's data can be sharded by samples, which `split_batches=True` requires.

    Raises:
        ValueError: The data cannot be sharded by samples.
    """
    if settings.batch_options.split_batches and kind_of(dataset) == "ray":
        raise ValueError(
            f"`train(dataset=...)` got `{type(dataset).__name__}`, which `split_batches=True` cannot shard by "
            "samples: pass arrays or a `tf.data.Dataset`."
        )


def _check_options_for_keras(config: Mapping[str, Any]) -> None:
    """Check the types of `fit_config` and `evaluate_config`, and reject options that do not work with raysgd."""
    for key in ("fit_config", "evaluate_config"):
        options = config.get(key)
        check_kind(f"config[{key!r}]", options, Mapping | None, "a dict of options for Keras")
        for name in [name for name in _INSTEAD if options is not None and options.get(name) is not None]:
            raise ValueError(f"`config[{key!r}][{name!r}]` cannot work: {_INSTEAD[name]}.")
        for callback in _callbacks_in(config, key):
            if isinstance(callback, type) or not hasattr(callback, "set_model"):
                raise TypeError(
                    f"`config[{key!r}]['callbacks']` has {callback!r}: need objects of subclasses of "
                    "`keras.callbacks.Callback`. Those of raysgd belong to `trainer.fit(5, callbacks=[...])`."
                )


def _callbacks_in(config: Mapping[str, Any], key: str = "fit_config") -> Iterable[Any]:
    callbacks = (config.get(key) or {}).get("callbacks") or ()
    return callbacks if isinstance(callbacks, list | tuple) else [callbacks]


def _check_callbacks(config: Mapping[str, Any], num_workers: int) -> None:
    """Check that the Keras callbacks work with several workers."""
    if any("BackupAndRestore" in registration.class_names(callback) for callback in _callbacks_in(config)):
        raise ValueError(
            f"`BackupAndRestore` in `config['fit_config']['callbacks']` with `num_workers={num_workers}` cannot work: "
            "it would restore weights and epoch on rank 0 only. Omit it. After a worker fails, the call "
            "continues by itself (`recovery`), and a new trainer continues from a file (`save` and `load`)."
        )


_BEGIN_AGAIN = {"EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler"}
"""Keras callbacks that reset their state, or count epochs from zero, in each `fit`."""


def check_calls_of_fit(config: Mapping[str, Any], epochs: int) -> None:
    """Reject Keras callbacks that restart in each call to Keras's `fit`, because there is one call per epoch."""
    names = set().union(*map(registration.class_names, _callbacks_in(config))) & _BEGIN_AGAIN
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
