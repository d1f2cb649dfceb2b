"""The names of the contract for `fit` and its values, where scripts for Ray import them: each is one object."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

import raysgd.air
import raysgd.air.session
import raysgd.train

# A module path without `raysgd.`, and the name; then where the same object is defined.
CONFIGS = ("CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig", "SyncConfig")
KEYWORD_FUNCTIONS = (
    "get_dataset_shard",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
)
VENDORS = [
    ("comet", "CometLoggerCallback", "comet_ml"),
    ("keras", "ReportCheckpointCallback", "tensorflow"),
    ("mlflow", "MLflowLoggerCallback", "mlflow"),
    ("wandb", "WandbLoggerCallback", "wandb"),
]
SAME = [
    *((f"{package}:{name}", f"air.config:{name}") for package in ("air", "train") for name in CONFIGS),
    ("air:DatasetConfig", "air.config:DatasetConfig"),
    ("air:Checkpoint", "air.checkpoint:Checkpoint"),
    ("air:Result", "air.result:Result"),
    ("train:Checkpoint", "air:Checkpoint"),
    ("train:DataConfig", "train.fit.data:DataConfig"),
    ("train:Result", "air:Result"),
    ("train:TRAIN_DATASET_KEY", "air.constants:TRAIN_DATASET_KEY"),
    ("train.constants:TRAIN_DATASET_KEY", "air.constants:TRAIN_DATASET_KEY"),
    *((f"air.session:{name}", f"train.session:{name}") for name in raysgd.air.session.__all__),
    *((f"train:{name}", f"air.session:{name}") for name in ("get_checkpoint", "get_dataset_shard", "report")),
    ("train:get_context", "train.session:get_context"),
    *((f"train.train_loop_utils:{name}", f"train:{name}") for name in KEYWORD_FUNCTIONS),
    ("train.backend:BackendConfig", "train:BackendConfig"),
    ("train.error:SessionMisuseError", "exceptions:SessionMisuseError"),
    ("train.session:SessionMisuseError", "exceptions:SessionMisuseError"),
    ("train.trainer:BaseTrainer", "train.base_trainer:BaseTrainer"),
    ("train.trainer:GenDataset", "train.base_trainer:GenDataset"),
    ("train.trainer:TrainingFailedError", "exceptions:TrainingFailedError"),
    ("train.base_trainer:TrainingFailedError", "exceptions:TrainingFailedError"),
    ("train.trainer:TrainingIterator", "train:TrainingIterator"),
    *(
        (f"torch.building_blocks:{name}", f"torch.data.batches:{name}")
        for name in ("call_model", "own_loss", "prediction", "split_batch")
    ),
    ("torch.building_blocks:counts_labels", "torch.objects.criteria:counts_labels"),
    ("torch.building_blocks:require", "core.imports:require"),
    ("tune:ResultGrid", "tune.tuner:ResultGrid"),
    ("tune:Tuner", "tune.tuner:Tuner"),
]
FRAMEWORKS = [
    ("train.torch", "TorchCheckpoint"),
    ("train.torch", "TorchConfig"),
    ("train.torch", "TorchTrainer"),
    ("train.tensorflow", "TensorflowCheckpoint"),
    ("train.tensorflow", "TensorflowConfig"),
    ("train.tensorflow", "TensorflowTrainer"),
    ("train.tensorflow", "prepare_dataset_shard"),
    ("train.horovod", "HorovodConfig"),
    ("train.horovod", "HorovodTrainer"),
]
CONSTANTS = {
    "MODEL_KEY": "model",
    "PREPROCESSOR_KEY": "_preprocessor",
    "TRAIN_DATASET_KEY": "train",
    "EVALUATION_DATASET_KEY": "evaluation",
    "WILDCARD_KEY": "*",
}


def found_at(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"raysgd.{module}"), name)


@pytest.mark.parametrize(("place", "origin"), SAME, ids=[place for place, _ in SAME])
def test_a_name_is_one_object_wherever_it_is_imported_from(place: str, origin: str) -> None:
    assert found_at(place) is found_at(origin)


@pytest.mark.parametrize(("module", "name"), FRAMEWORKS, ids=[name for _, name in FRAMEWORKS])
def test_what_belongs_to_a_framework_is_in_its_module(module: str, name: str) -> None:
    framework = module.rpartition(".")[2]
    pytest.importorskip({"horovod": "horovod.torch"}.get(framework, framework))
    assert callable(found_at(f"{module}:{name}"))


@pytest.mark.parametrize(("module", "name", "package"), VENDORS, ids=[package for _, _, package in VENDORS])
def test_what_logs_to_others_is_at_both_paths(module: str, name: str, package: str) -> None:
    places = [f"{folder}.{module}:{name}" for folder in ("air.callbacks", "air.integrations")]
    if importlib.util.find_spec(package) is not None:
        assert found_at(places[0]) is found_at(places[1])
        return
    for place in places:
        with pytest.raises(ModuleNotFoundError, match=rf"`{package}`, which is not installed\. Run: pip install"):
            found_at(place)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_key_is_what_it_was(name: str) -> None:
    assert getattr(raysgd.air.constants, name) == CONSTANTS[name]


@pytest.mark.parametrize("package", [raysgd.air, raysgd.train], ids=lambda package: package.__name__)
def test_all_public_names_can_be_found(package: Any) -> None:
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    assert set(package.__all__) <= set(dir(package))


def test_encoded_data_is_there_for_backends() -> None:
    assert found_at("train.backend:EncodedData") is Any


def test_the_trainer_of_functions_is_at_its_path() -> None:
    assert issubclass(
        found_at("train.data_parallel_trainer:DataParallelTrainer"), found_at("train.trainer:BaseTrainer")
    )
