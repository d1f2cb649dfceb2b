"""What the tests of Ray AIR 2.0 asserted of configs, trainers and predictors, retold, where no worker is needed."""

from __future__ import annotations

import itertools
import re
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from raysgd.air import Checkpoint, CheckpointConfig, DatasetConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.air.constants import MAX_REPR_LENGTH
from raysgd.train.base_trainer import BaseTrainer
from raysgd.train.batch_predictor import BatchPredictor
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.torch import TorchCheckpoint, TorchPredictor

pd = pytest.importorskip("pandas")


class Idle(BaseTrainer):
    """A trainer of a user's own."""

    def training_loop(self) -> None:
        pass


class Doubling(torch.nn.Module):
    """Doubles its input."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2


class Twice(torch.nn.Module):
    """Has two outputs."""

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": inputs, "b": inputs}


CONFIGS = [
    CheckpointConfig(),
    CheckpointConfig(num_to_keep=1),
    DatasetConfig(),
    DatasetConfig(fit=True),
    FailureConfig(),
    FailureConfig(max_failures=2),
    RunConfig(),
    RunConfig(name="experiment", failure_config=FailureConfig(max_failures=2)),
    ScalingConfig(),
    ScalingConfig(num_workers=2, use_gpu=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_the_text_of_a_config_is_the_call_that_makes_it(config: Any) -> None:
    assert eval(repr(config)) == config
    assert len(repr(config)) < MAX_REPR_LENGTH


def test_the_keys_of_a_storage_are_not_in_the_text_of_a_config() -> None:
    pytest.importorskip("pyarrow")
    assert (
        repr(RunConfig(storage_path="s3://me:hidden@bucket/runs")) == "RunConfig(storage_path='s3://***@bucket/runs')"
    )


@pytest.mark.parametrize(
    "made",
    [
        Checkpoint(data_dict={"epoch": 3}),
        BatchPredictor.from_checkpoint(Checkpoint.from_dict({"factor": 2.0}), TorchPredictor),
        TorchPredictor(Doubling()),
        Idle(datasets={"train": [1, 2]}),
        DataParallelTrainer(print, scaling_config=ScalingConfig(num_workers=2)),
    ],
    ids=lambda made: type(made).__name__,
)
def test_the_text_of_an_object_is_one_short_line_that_names_its_class(made: Any) -> None:
    assert re.fullmatch(rf"{type(made).__name__}\(.*\)", repr(made))
    assert len(repr(made)) < MAX_REPR_LENGTH


@pytest.mark.parametrize("value", ["invalid", False, True])
@pytest.mark.parametrize("name", ["run_config", "scaling_config", "datasets", "preprocessor", "resume_from_checkpoint"])
def test_each_argument_of_a_trainer_is_checked_and_may_be_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}"):
        Idle(**{name: value})
    Idle(**{name: None})


RESERVATIONS = itertools.product(
    [None, {"CPU": 1}, {"CPU": 2, "GPU": 1}],
    [None, 1, 2],
    [(None, False), (None, True), ({}, False), ({"CPU": 1}, False), ({"CPU": 2, "GPU": 1}, True), ({"CPU": 0}, False)],
    ["PACK", "SPREAD"],
)


def test_what_tune_reserves_makes_the_config_again() -> None:
    for trainer_resources, num_workers, (resources, use_gpu), strategy in RESERVATIONS:
        config = ScalingConfig(trainer_resources, num_workers, use_gpu, resources, strategy)
        factory = config.as_placement_group_factory()
        again = ScalingConfig.from_placement_group_factory(factory)
        assert (again, again.as_placement_group_factory()) == (config, factory)


def loop() -> None:
    """A function for workers."""


class Own(DataParallelTrainer):
    """A trainer that says itself which datasets it needs and divides."""

    _dataset_config: ClassVar = {"train": DatasetConfig(split=True, required=True), "test": DatasetConfig()}


def test_a_class_of_trainers_has_its_own_treatment_of_datasets_and_a_user_changes_fields_of_it() -> None:
    trainer = Own(loop, datasets={"train": [1], "test": [2]}, dataset_config={"test": DatasetConfig(split=True)})
    assert {name: config.split for name, config in trainer.get_dataset_config().items()} == {
        "train": True,
        "test": True,
    }
    Own(loop, datasets={"train": [1]})
    for datasets in ({"test": [1]}, {"train": [1], "other": [2]}):
        with pytest.raises(ValueError, match=r"`datasets` (lacks \['train'\]|has \['other'\])"):
            Own(loop, datasets=datasets)


class TestTorchPredictor:
    def test_has_model_and_preprocessor_of_the_checkpoint_and_evaluates(self) -> None:
        model = Doubling().train()
        predictor = TorchPredictor.from_checkpoint(TorchCheckpoint.from_model(model, preprocessor="scaler"))
        assert (type(predictor.model), predictor.get_preprocessor()) == (Doubling, "scaler")
        assert not predictor.model.training

    @pytest.mark.parametrize(
        ("given", "expected"),
        [(torch.float16, np.float16), (torch.float64, np.float64), (torch.int32, np.int32), (torch.int64, np.int64)],
    )
    def test_computes_in_the_type_that_it_is_given(self, given: torch.dtype, expected: type) -> None:
        found = TorchPredictor(Doubling()).predict(np.array([1, 2, 3]), dtype=given)
        assert (found.dtype, found.tolist()) == (expected, [2, 4, 6])

    def test_names_several_outputs(self) -> None:
        found = TorchPredictor(Twice()).predict(np.array([1, 2, 3]))
        assert {name: each.tolist() for name, each in found.items()} == {"a": [1, 2, 3], "b": [1, 2, 3]}

    def test_passes_a_data_frame_of_a_subclass_on_and_refuses_anything_else(self) -> None:
        class Framing(TorchPredictor):
            def call_model(self, inputs: Any) -> Any:
                return pd.DataFrame([{"shape": each.shape[0]} for each in super().call_model(inputs)])

        class Listing(TorchPredictor):
            def call_model(self, inputs: Any) -> Any:
                return [{"key": each} for each in super().call_model(inputs)]

        images = np.zeros((2, 5, 3), np.float32)
        assert Framing(Doubling()).predict(pd.DataFrame({"image": list(images)}))["shape"].tolist() == [5, 5]
        with pytest.raises(ValueError, match=r"`Listing\.call_model` returned a `list`: need .* a data frame"):
            Listing(Doubling()).predict(images)


def test_a_checkpoint_that_is_gone_from_its_store_says_so() -> None:
    with pytest.raises(FileNotFoundError):
        Checkpoint.from_uri("memory://nowhere/at/all").to_directory()
