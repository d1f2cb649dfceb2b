"""The trainer's arguments: what is refused before anything starts.

Covers `raysgd.tf.driver`: what counts is what a user of the trainer is told.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.callbacks import Checkpointing
from raysgd.core.cluster import ray_cluster
from raysgd.tf import TFTrainer, TrainingOperator, driver
from raysgd.tf.driver import TFFramework
from raysgd.trainer.configuration import GroupSettings, Recovery


def creator(config: dict[str, Any]) -> Any:
    raise AssertionError("nothing may start")


CREATORS = {"model_creator": creator, "data_creator": creator}


class Operator(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        raise AssertionError("nothing may start")


class BackupAndRestore:
    """Told by its name, like that of Keras: no framework is loaded here."""

    def set_model(self, model: Any) -> None:
        """Take a model, as Keras's callbacks do."""


LAYER = type("Layer", (), {"__module__": "keras.src.layers.layer", "__call__": lambda self, features: features})
KERAS_MODEL = type("Sequential", (LAYER,), {})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "needs `model_creator` and `data_creator`.*or `training_operator_cls`"),
        ({"model_creator": creator}, TypeError, "needs `data_creator`"),
        ({**CREATORS, "training_operator_cls": Operator}, ValueError, "pass one of the two"),
        ({"training_operator_cls": 3}, TypeError, "is 3"),
        ({"training_operator_cls": dict}, TypeError, "need a subclass of `raysgd.tf.TrainingOperator`"),
        ({**CREATORS, "num_workers": 2, "num_replicas": 3}, ValueError, "two names for one argument"),
        ({**CREATORS, "num_worker": 2}, TypeError, "does not know `num_worker`. Did you mean `num_workers`"),
        ({**CREATORS, "backend": "gloo"}, TypeError, "does not know `backend`: omit it"),
        ({**CREATORS, "config": {"fit_config": 3}}, TypeError, r"`config\['fit_config'\]=3`"),
        ({**CREATORS, "config": {"fit_config": {"x": [1]}}}, ValueError, r"\['x'\]` cannot work: .* `data_creator`"),
        ({**CREATORS, "config": {"fit_config": {"batch_size": 8}}}, ValueError, r"Call `\.batch\(batch_size\)`"),
        ({**CREATORS, "config": {"fit_config": {"validation_split": 0.2}}}, ValueError, "Pass `validation_data`"),
        (
            {**CREATORS, "num_workers": 2, "config": {"fit_config": {"validation_data": ([1], "here")}}},
            TypeError,
            r"\['validation_data'\]` is made of `int`, `str`: need a `tf\.data\.Dataset` of batches, or arrays",
        ),
        ({**CREATORS, "config": {"evaluate_config": {"sample_weight": [1]}}}, ValueError, r"yield `\(x, y, sample_w"),
        (
            {**CREATORS, "num_workers": 2, "config": {"fit_config": {"callbacks": BackupAndRestore()}}},
            ValueError,
            r"`BackupAndRestore` .* with `num_workers=2` .*`save` and `load`",
        ),
        (
            {**CREATORS, "config": {"fit_config": {"callbacks": [Checkpointing()]}}},
            TypeError,
            r"has <raysgd.*Checkpointing.*subclasses of `keras.callbacks.Callback`.*`trainer.fit\(5, callbacks=\[",
        ),
        (
            {**CREATORS, "config": {"evaluate_config": {"callbacks": BackupAndRestore}}},
            TypeError,
            r"\['evaluate_config'\]\['callbacks'\]` has <class .*: need objects",
        ),
        (
            {**CREATORS, "model_creator": KERAS_MODEL()},
            ValueError,
            r"(?s)object of `Sequential`.*    def model_creator\(config\):\n        return Sequential",
        ),
        (
            {**CREATORS, "model_creator": lambda: creator},
            ValueError,
            "does not accept what workers pass: `config`",
        ),
        (
            {**CREATORS, "data_creator": ([1], [2])},
            ValueError,
            "`data_creator` is an object of `tuple`: need a function",
        ),
        ({**CREATORS, "spare_workers": 1, "use_local": True}, ValueError, "`spare_workers=1` with `use_local=True`"),
        ({**CREATORS, "recovery": Recovery(undo=True)}, ValueError, "works with `TorchTrainer` only"),
        ({**CREATORS, "heartbeat_s": 5}, TypeError, r"takes `heartbeat_s` as `recovery=Recovery\(heartbeat_s="),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TFTrainer(**options)


def group(**options: Any) -> GroupSettings:
    return GroupSettings(**{"num_workers": 2, "backend": "sockets", "timeout_s": 1.0, **options})


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that has one GPU."""
    monkeypatch.setattr(ray_cluster, "ensure_ray", lambda: None)
    monkeypatch.setattr(ray_cluster, "gpus_of_nodes", lambda custom: (1.0,))


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("use_gpu", "num_workers", "num_spares", "num_gpus"),
    [("auto", 1, 0, 1), ("auto", 2, 0, 0.5), ("auto", 2, 1, 0.3333), (True, 2, 0, 1), (False, 2, 0, 0)],
)
def test_workers_of_keras_share_gpus_only_with_auto(
    use_gpu: Any, num_workers: int, num_spares: int, num_gpus: float
) -> None:
    assert driver.choose_num_gpus(use_gpu, group(num_workers=num_workers, spare_workers=num_spares)) == num_gpus


@pytest.mark.parametrize(("num_gpus", "grows"), [(1, False), (0.5, True)])
def test_tensorflow_does_not_take_all_memory_of_a_gpu_that_workers_share(num_gpus: float, grows: bool) -> None:
    settings: Any = SimpleNamespace(seed=0, training_operator_cls=object)
    connection: Any = TFFramework(group(num_gpus_per_worker=num_gpus), settings).connection
    assert ("TF_FORCE_GPU_ALLOW_GROWTH" in connection.variables) is grows


@pytest.mark.usefixtures("one_gpu")
def test_a_driver_that_would_take_all_memory_of_a_shared_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(config=SimpleNamespace(list_physical_devices=lambda kind: ["GPU:0"]))
    monkeypatch.setitem(sys.modules, "tensorflow", seen)
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    with pytest.raises(ValueError, match="Set `TF_FORCE_GPU_ALLOW_GROWTH=true` before the program starts"):
        driver.choose_num_gpus("auto", group(use_local=True))
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    assert driver.choose_num_gpus("auto", group(use_local=True)) == 0.5
    seen.config.list_physical_devices = lambda kind: []
    assert driver.choose_num_gpus("auto", group(use_local=True)) == 0, "rank 0 is here, where no GPU is"


class EarlyStopping(BackupAndRestore):
    """So is this one."""


@pytest.mark.parametrize(
    ("callback", "epochs", "is_refused"),
    [
        (EarlyStopping(), 5, True),
        (EarlyStopping(), 1, False),
        (BackupAndRestore(), 5, False),
    ],
)
def test_callbacks_of_keras_that_begin_again_in_each_call_are_refused(
    callback: Any, epochs: int, is_refused: bool
) -> None:
    config = {"fit_config": {"callbacks": [callback]}}
    if not is_refused:
        driver.check_calls_of_fit(config, epochs)
        return
    message = rf"`{type(callback).__name__}` in .* with `trainer.fit\({epochs}\)` .* call `trainer.train\(\)`"
    with pytest.raises(ValueError, match=message):
        driver.check_calls_of_fit(config, epochs)


@pytest.mark.parametrize("name", ["model.keras", "weights.h5"])
def test_a_file_of_keras_is_refused_with_what_writes_it(name: str) -> None:
    trainer = object.__new__(TFTrainer)  # there are no workers
    with pytest.raises(ValueError, match=rf"which Keras does not read. Call `trainer.get_model\(\).save\('{name}'\)`"):
        trainer.save(name)


def test_a_missing_tensorflow_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "tensorflow" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ImportError, match=r"needs `tensorflow`.*pip install .*\"tensorflow>="):
        TFTrainer(**CREATORS, num_workers=2)


@pytest.mark.parametrize("method", ["save", "load", "restore"])
def test_a_uri_of_no_file_is_refused_before_anything_is_asked_of_a_worker(method: str) -> None:
    trainer = object.__new__(TFTrainer)  # there are no workers
    with pytest.raises(ValueError, match="`checkpoint='s3://bucket/'`: need the URI of a file"):
        getattr(trainer, method)("s3://bucket/")
