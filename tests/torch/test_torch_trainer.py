"""The trainer's arguments, and everything it does that needs no more than one worker in this process.

Covers `raysgd.torch.driver.arguments` and `raysgd.trainer.driver.trainer`: what counts is what a user of the trainer is
told.
"""

from __future__ import annotations

import inspect
import math
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.fsdp

import raysgd
from raysgd.core.cluster import ray_cluster
from raysgd.core.cluster.resources import DriverView
from raysgd.data import Dataset
from raysgd.exceptions import InvalidCountError, WorkerError
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.constants import NUM_STEPS, SCHEDULER_STEP, USE_FP16
from raysgd.torch.driver import arguments
from raysgd.trainer.configuration import Recovery
from raysgd.utils import BATCH_SIZE
from tests.helpers.doors import controller_of
from tests.torch.apex_double import StrictAmp
from tests.torch.operators_for_tests import (
    LinearOperator,
    OwnBatchOperator,
    OwnEpochOperator,
    OwnModelOperator,
    ScheduledOperator,
    dataset,
)
from tests.torch.programs import run_program

MakeTrainer = Callable[..., TorchTrainer]


# ------------------------------------------------------------------------------------------------ arguments

RETIRED = {
    **dict.fromkeys(("model_creator", "data_creator", "optimizer_creator", "scheduler_creator", "loss_creator"), False),
    **dict.fromkeys(("num_replicas", "batch_size", "apex_args"), None),
    "serialize_data_creation": False,
    "data_loader_args": {},
}
"""Arguments that the old library had, each with a value that asks for nothing."""


def test_arguments_but_the_class_are_keywords_with_the_defaults_of_old() -> None:
    parameters = dict(inspect.signature(TorchTrainer.__init__).parameters)
    del parameters["self"], parameters["unknown"]
    assert len(parameters) <= 37
    assert parameters.pop("training_operator_cls").default is inspect.Parameter.empty
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert defaults.pop("timeout_s") is None, "which stands for 1800, or for what the environment says with NCCL"
    expected = {
        "initialization_hook": None,
        "config": None,
        "num_workers": 1,
        "num_cpus_per_worker": 1,
        "use_gpu": "auto",
        "backend": "auto",
        "wrap_ddp": True,
        "use_fp16": False,
        "use_tqdm": False,
        "add_dist_sampler": True,
        "scheduler_step_freq": None,
        "use_local": False,
    }
    assert {name: defaults[name] for name in expected} == expected
    assert not {*RETIRED} & {*defaults}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            "train",
            {
                "num_steps": None,
                "profile": False,
                "reduce_results": True,
                "max_retries": 3,
                "info": None,
                "dataset": None,
            },
        ),
        ("validate", {"num_steps": None, "profile": False, "reduce_results": True, "info": None, "dataset": None}),
        ("get_model", {"to_cpu": False}),
        ("shutdown", {"force": False}),
    ],
)
def test_methods_have_the_parameters_of_old_in_their_order(method: str, expected: dict[str, Any]) -> None:
    found = inspect.signature(getattr(TorchTrainer, method)).parameters
    assert {name: found[name].default for name in list(found)[1 : len(expected) + 1]} == expected


def test_what_was_passed_can_be_read_back(make_local: MakeTrainer) -> None:
    def hook() -> None: ...

    trainer = make_local(
        config={"lr": 0.1}, initialization_hook=hook, scheduler_step_freq="manual", wrap_ddp=False, timeout_s=60
    )
    assert trainer.training_operator_cls is LinearOperator
    assert trainer.initialization_hook is hook
    assert trainer.config == {"lr": 0.1}
    expected = {
        "backend": "nccl" if torch.cuda.is_available() else "gloo",
        "num_cpus_per_worker": 1,
        "max_replicas": 1,
        "serialize_data_creation": None,
        "wrap_ddp": False,
        "timeout_s": 60,
        "use_fp16": False,
        "use_tqdm": False,
        "add_dist_sampler": True,
        "use_local": True,
        "scheduler_step_freq": "manual",
        "min_workers": 1,
        "spare_workers": 0,
        "recovery": Recovery(),
        "accumulate_grad_batches": 1,
        "clip_grad_norm": None,
        "_num_failures": 0,
        "_last_resize": -math.inf,
    }
    assert {name: getattr(trainer, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("operator_cls", "options", "expected"),
    [
        (LinearOperator, {"config": {"batch_size": 7}}, (False, 7, None)),
        (LinearOperator, {"config": {"batch_size": 7, BATCH_SIZE: 7}}, (True, 7, None)),
        (LinearOperator, {"config": {"batch_size": 7}, "split_batches": True}, (True, 7, None)),
        (
            LinearOperator,
            {"config": {"batch_size": 7}, "add_dist_sampler": False},
            (False, None, "add_dist_sampler=False"),
        ),
        (OwnEpochOperator, {"config": {"batch_size": 7}}, (False, 7, "`OwnEpochOperator` overrides")),
    ],
)
def test_the_driver_is_told_what_a_step_depends_on(
    operator_cls: Any, options: dict[str, Any], expected: tuple[Any, ...], make_local: MakeTrainer
) -> None:
    [facts] = controller_of(make_local(operator_cls, **options)).facts
    keeps_global_batch, batch_size, obstacle = expected
    assert (facts.keeps_global_batch, facts.batch_size) == (keeps_global_batch, batch_size)
    assert facts.epoch_obstacle is None if obstacle is None else obstacle in facts.epoch_obstacle


def test_a_single_worker_is_told_nothing_about_its_global_batch(
    make_local: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "raysgd")
    assert make_local().status().global_batch == ""
    assert "global batch" not in caplog.text


@pytest.mark.parametrize(
    ("num_gpus", "backend", "expected"),
    [(1, "auto", "nccl"), (2, "auto", "nccl"), (0.5, "auto", "gloo"), (1, "gloo", "gloo")],
)
def test_workers_that_share_a_gpu_talk_over_gloo(
    num_gpus: float, backend: str, expected: str, make_local: MakeTrainer
) -> None:
    trainer = make_local(use_gpu=True, num_gpus_per_worker=num_gpus, backend=backend)
    assert (trainer.backend, trainer.num_gpus_per_worker) == (expected, num_gpus)


def test_a_collective_may_take_half_an_hour_unless_told_otherwise(make_local: MakeTrainer) -> None:
    assert make_local(use_gpu=False).timeout_s == 1800


def a_function(*args: Any) -> None: ...


def no_lightning_module() -> type[TrainingOperator]:
    return type("Lit", (LinearOperator,), {"_lightning_module_cls": None})


COUNT_ERRORS = (ValueError, AssertionError)  # one exception that is both

# In the order in which they are looked at.
REFUSED: list[tuple[dict[str, Any], type[BaseException], str]] = [
    ({"num_workers": 0}, ValueError, "`num_workers=0`: need an integer from 1 to"),
    ({"model_creator": a_function}, DeprecationWarning, "TrainingOperator.from_creators"),
    ({"num_replicas": 2}, DeprecationWarning, "use `num_workers`"),
    ({"batch_size": 8}, DeprecationWarning, "BATCH_SIZE"),
    ({"apex_args": {}}, DeprecationWarning, "TrainingOperator.register"),
    ({"train_function": a_function}, DeprecationWarning, "override `train_epoch"),
    ({"validation_function": a_function}, DeprecationWarning, "override `validate"),
    ({"data_loader_args": {"a": 1}}, DeprecationWarning, "DataLoader"),
    ({"dataloader_config": {"a": 1}}, DeprecationWarning, "DataLoader"),
    ({"scheduler_step_freq": "step"}, ValueError, "allowed are None, 'batch', 'epoch', 'manual'"),
]

ALSO_REFUSED: list[tuple[dict[str, Any], type[BaseException], str]] = [
    *[({"num_workers": value}, ValueError, f"`num_workers={value}`") for value in (-1, 1.5, True, None)],
    *[
        ({name: a_function}, DeprecationWarning, "TrainingOperator.from_creators")
        for name in ("data_creator", "optimizer_creator", "scheduler_creator", "loss_creator")
    ],
    *[({"num_cpus_per_worker": value}, ValueError, "num_cpus_per_worker") for value in (-1, "2")],
    *[
        ({"num_gpus_per_worker": value}, ValueError, f"`num_gpus_per_worker={value!r}`")
        for value in (0, -1, 1.5, True, "1")
    ],
    (
        {"use_gpu": True, "num_gpus_per_worker": 0.5, "backend": "nccl"},
        ValueError,
        "from version 2.30 on and with `NCCL_MULTI_RANK_GPU_ENABLE=1`. Here, the variable is not set",
    ),
    (
        {"use_gpu": True, "num_gpus_per_worker": 0.5, "strategy": "fsdp"},
        ValueError,
        '`strategy="fsdp"` for workers that share a GPU over gloo',
    ),
    ({"initialization_hook": lambda runner: None}, TypeError, "each worker calls the hook without arguments"),
    ({"backend": "mpi"}, ValueError, r"`backend='mpi'`.*allowed are"),
    *[({"min_workers": value}, kind, "min_workers") for value in (0, -1, 1.0) for kind in COUNT_ERRORS],
    *[({"min_workers": 3, "num_workers": 2}, kind, "`min_workers=3` with `num_workers=2`") for kind in COUNT_ERRORS],
    *[({"spare_workers": value}, kind, "spare_workers") for value in (-1, True, "1") for kind in COUNT_ERRORS],
    ({"spare_workers": 1, "recovery": Recovery(in_place=False)}, ValueError, "no spare can replace a lost worker"),
    ({"spare_workers": 1, "num_workers": 1, "use_local": True}, ValueError, "with `use_local=True` cannot work"),
    ({"validation_workers": 1}, TypeError, "spare workers validate as well, pass `spare_workers=1`"),
    *[
        ({field.name: 1}, TypeError, rf"takes `{field.name}` as `recovery=Recovery\({field.name}=\.\.\.\)`")
        for field in fields(Recovery)
    ],
    *[
        ({"recovery": value}, TypeError, "`recovery=.*need a `raysgd.Recovery`")
        for value in (None, "restart", {"heartbeat_s": 1.0})
    ],
    ({"timeout_s": 0}, ValueError, "`timeout_s=0`"),
    ({"timeout_s": "long"}, ValueError, "`timeout_s='long'`"),
    ({"timeout_s": True}, ValueError, "`timeout_s=True`"),
    *[({"use_fp16": value}, ValueError, "use_fp16") for value in (None, "native", "O1", 2)],
    ({"precision": "fp8"}, ValueError, r"`precision='fp8'`: allowed are"),
    ({"use_fp16": True, "precision": "bf16"}, ValueError, "both choose a format"),
    *[({"strategy": value}, ValueError, r'`strategy=.*allowed are "ddp", "fsdp", "none"') for value in ("dp", 1, "")],
    ({"strategy": "fsdp", "wrap_ddp": False}, ValueError, "contradict each other"),
    ({"strategy_options": ["a"]}, ValueError, r"`strategy_options=\['a'\]`: need a dict"),
    ({"strategy_options": {}}, ValueError, '`strategy_options` is given with `strategy="ddp"`'),
    *[
        ({"strategy": "fsdp", "strategy_options": options}, ValueError, message)
        for options, message in (
            ({"mp_polici": 1}, "Did you mean `mp_policy`"),
            ({"state_dict_type": "full"}, r"`save\(path, whole=True\)`"),
            ({"sharding_strategy": "NO_SHARD"}, '`strategy="ddp"` for whole models'),
            ({"cpu_offload": True}, "Pass `offload_policy`"),
            ({"min_block_parameters": 0}, "'min_block_parameters': 0"),
            ({"reshard_after_forward": 2}, "'reshard_after_forward': 2"),
        )
    ],
    *[
        (
            {option: True, "add_dist_sampler": False},
            ValueError,
            f"`{option}=True` cannot work with `add_dist_sampler=False`",
        )
        for option in ("split_batches", "deterministic")
    ],
    (
        {"deterministic": True, "strategy": "fsdp"},
        ValueError,
        '`deterministic=True` cannot work with `strategy="fsdp"`',
    ),
    ({"split_batches": True, "strategy": "none"}, ValueError, 'cannot work with `strategy="none"`'),
    ({"deterministic": True, "accumulate_grad_batches": 2}, ValueError, "with `accumulate_grad_batches=2`"),
    (
        {"deterministic": True, "training_operator_cls": no_lightning_module()},
        ValueError,
        "an operator made of a `LightningModule`: .* Pass `split_batches=True` instead",
    ),
    ({"deterministic": "yes"}, ValueError, "need True or False"),
    ({"split_batches": True, "config": {BATCH_SIZE: 0}}, ValueError, "need an integer of at least 1"),
    ({"scheduler_step_freq": 1}, ValueError, "`scheduler_step_freq=1`"),
    ({"scheduler_step_freq": ["batch"]}, ValueError, "`scheduler_step_freq="),
    ({"config": {BATCH_SIZE: 1}, "num_workers": 2}, ValueError, "`num_workers=2`"),
    ({"config": {BATCH_SIZE: "8"}}, ValueError, "8"),
    ({"config": 3}, TypeError, "`config=3`"),
    ({"initialization_hook": "hook"}, TypeError, "`initialization_hook='hook'`"),
    ({"num_wokers": 2}, TypeError, "Did you mean `num_workers`"),
    ({"quux": 2}, TypeError, "`quux`"),
    ({"training_operator_cls": object}, TypeError, "subclass of `TrainingOperator`"),
    ({"training_operator_cls": None}, TypeError, "subclass of `TrainingOperator`"),
    ({"training_operator_cls": a_function}, TypeError, "subclass of `TrainingOperator`"),
]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr("raysgd.core.engine.controller.ElasticController.start", start)


@pytest.mark.parametrize(("arguments", "kind", "message"), REFUSED + ALSO_REFUSED)
@pytest.mark.usefixtures("nothing_starts")
def test_wrong_arguments_are_refused_before_anything_starts(
    arguments: dict[str, Any], kind: type[BaseException], message: str
) -> None:
    with pytest.raises(kind, match=message):
        TorchTrainer(**{"training_operator_cls": LinearOperator, "num_workers": 2, **arguments})


# What each of two arguments allows by itself, and both together cannot be.
EXCLUDED: list[tuple[dict[str, Any], str]] = [
    (
        {"strategy": "fsdp", "strategy_options": {"mp_policy": object()}, "precision": "bf16"},
        "mixed precision with `strategy_options",
    ),
    (
        {"strategy": "fsdp", "strategy_options": {"mp_policy": object()}, "use_fp16": True},
        "mixed precision with `strategy_options",
    ),
    (
        {"strategy": "fsdp", "strategy_options": {"offload_policy": object()}, "precision": "fp16"},
        "fp16 with `strategy_options",
    ),
    ({"strategy": "fsdp", "strategy_options": {"offload_policy": object()}}, "'offload_policy': ...}` without GPUs"),
    ({"sync_batchnorm": True}, "`sync_batchnorm=True` without GPUs"),
    (
        {"sync_batchnorm": True, "strategy": "none", "use_gpu": True},
        '`sync_batchnorm=True` with `strategy="none"`',
    ),
    ({"strategy": "fsdp", "training_operator_cls": no_lightning_module()}, "LightningModule"),
    ({"compile": True, "training_operator_cls": no_lightning_module()}, "LightningModule"),
    ({"precision": "apex"}, "Apex without GPUs"),
    ({"use_fp16": "apex", "compile": True, "use_gpu": True}, "Apex with `compile`"),
    ({"precision": "apex", "strategy": "fsdp", "use_gpu": True}, 'Apex with `strategy="fsdp"`'),
]


@pytest.mark.parametrize(("arguments", "message"), EXCLUDED)
@pytest.mark.usefixtures("nothing_starts")
def test_what_cannot_work_together_is_refused_by_name(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apex = ModuleType("apex")
    apex.amp = StrictAmp()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", apex)
    with pytest.raises(ValueError, match=re.escape(message) + r".*cannot work: .*"):
        TorchTrainer(**{"training_operator_cls": LinearOperator, "num_workers": 2, "use_gpu": False, **arguments})


@pytest.mark.parametrize("index", range(len(REFUSED)))
@pytest.mark.usefixtures("nothing_starts")
def test_of_several_wrong_arguments_the_first_is_named(index: int) -> None:
    arguments = {name: value for wrong, _, _ in REFUSED[index:] for name, value in wrong.items()}
    _, kind, message = REFUSED[index]
    with pytest.raises(kind, match=message):
        TorchTrainer(training_operator_cls=LinearOperator, **arguments)


@pytest.mark.usefixtures("nothing_starts")
def test_an_instance_is_told_from_a_class() -> None:
    class Instance(LinearOperator):
        def __init__(self) -> None: ...

    with pytest.raises(TypeError, match=r"an instance of `Instance`.*the class itself"):
        TorchTrainer(training_operator_cls=Instance())  # type: ignore[arg-type]


def test_an_operator_class_under_another_name_is_told_its_own() -> None:
    options: dict[str, Any] = {"operator": LinearOperator}
    with pytest.raises(TypeError, match=r"`operator`: write `training_operator_cls=LinearOperator`"):
        TorchTrainer(**options)


def test_an_operator_that_is_made_by_hand_is_told_to_pass_the_class() -> None:
    make: Any = LinearOperator
    with pytest.raises(TypeError, match=r"`LinearOperator\(\)`.*`training_operator_cls=LinearOperator`"):
        make()


def test_creators_are_refused_before_the_missing_operator_class() -> None:
    with pytest.raises(DeprecationWarning, match="`raysgd migrate`") as raised:
        TorchTrainer(model_creator=print)  # type: ignore[call-arg]
    assert isinstance(raised.value, ValueError)
    with pytest.raises(TypeError, match="training_operator_cls"):
        TorchTrainer(model_creator=None)  # type: ignore[call-arg]


def test_a_trainer_may_have_creators_of_its_own() -> None:
    class Own(TorchTrainer):
        def __init__(self, model_creator: Any) -> None:
            super().__init__(training_operator_cls=model_creator)

    with pytest.raises(TypeError, match="need a subclass of `TrainingOperator`"):
        Own(model_creator=print)


def test_the_operator_class_is_required() -> None:
    with pytest.raises(TypeError, match="training_operator_cls"):
        TorchTrainer()  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [None, "", False])
def test_a_falsy_frequency_is_none_at_all(value: Any, make_local: MakeTrainer) -> None:
    make_local(scheduler_step_freq=value)


def test_an_argument_that_does_nothing_any_more_is_named_in_the_log(
    make_local: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    make_local(serialize_data_creation=True)
    assert "`serialize_data_creation` of the trainer has no effect" in caplog.text


def test_retired_arguments_that_ask_for_nothing_are_accepted(
    make_local: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_local(**RETIRED)
    assert trainer.serialize_data_creation is False
    assert "no effect" not in caplog.text


def test_a_batch_size_that_does_not_divide_is_named_in_the_log(
    nothing_starts: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AssertionError, match="workers were started"):
        TorchTrainer(training_operator_cls=LinearOperator, num_workers=2, config={BATCH_SIZE: 21})
    assert "the batch size 21 is not divisible by 2 workers: using 20" in caplog.text


def test_options_that_have_no_effect_are_named_in_the_log(
    make_local: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    make_local(
        LinearOperator, recovery=Recovery(snapshot_every_n_steps=5, wait_for_workers=False, resize_interval_s=1.0)
    )
    make_local(OwnEpochOperator)
    assert "no effect" not in caplog.text
    make_local(OwnEpochOperator, recovery=Recovery(snapshot_every_n_steps=5))
    assert "`snapshot_every_n_steps=5`: no effect inside an epoch, because `OwnEpochOperator` overrides" in caplog.text


def test_apex_is_asked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch, nothing_starts: None) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(ImportError, match="apex"):
        TorchTrainer(training_operator_cls=LinearOperator, use_fp16="apex")


def test_tqdm_is_asked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch, nothing_starts: None) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ValueError, match="use_tqdm"):
        TorchTrainer(training_operator_cls=LinearOperator, use_tqdm=True)


# ------------------------------------------------------------------------------------------------ the config


def test_the_callers_config_stays_as_it_is(make_local: MakeTrainer) -> None:
    config = {BATCH_SIZE: 21, "batch_size": 5}
    trainer = make_local(config=config)
    assert trainer.get_local_operator().config == {BATCH_SIZE: 21, "batch_size": 5}
    trainer.get_local_operator().config["lr"] = 1
    assert config == {BATCH_SIZE: 21, "batch_size": 5}


def test_without_a_config_there_is_an_empty_one(make_local: MakeTrainer) -> None:
    trainer = make_local()
    assert trainer.config == trainer.get_local_operator().config == {}


# ------------------------------------------------------------------------------------------------ epochs


def test_results_have_their_keys_in_their_order(make_local: MakeTrainer) -> None:
    trainer = make_local()
    assert list(trainer.train()) == ["num_samples", "epoch", "batch_count", "train_loss", "last_train_loss"]
    assert list(trainer.train(profile=True))[-1] == "profile"
    validation = ["num_samples", "batch_count", "val_loss", "last_val_loss"]
    assert list(trainer.validate()) == validation, "nothing is classified"
    assert list(trainer.validate(profile=True)) == [*validation, "profile"]


class Tells(LinearOperator):
    """Returns what it is told."""

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        list(iterator)
        return {"told": info}

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {"told": info}


def test_the_info_of_a_call_reaches_the_operator(make_local: MakeTrainer) -> None:
    trainer = make_local(Tells)
    mine = {"num_epochs": 5}
    own = {USE_FP16: False, SCHEDULER_STEP: None}
    assert trainer.train(info=mine)["told"] == {"num_epochs": 5, NUM_STEPS: None, "epoch_idx": 0, **own}
    assert trainer.train(num_steps=2)["told"] == {NUM_STEPS: 2, "epoch_idx": 1, **own}
    assert trainer.validate(info=mine)["told"] == mine
    assert trainer.validate()["told"] == {}
    assert mine == {"num_epochs": 5}


@pytest.mark.parametrize(
    ("calls", "options", "kind", "message"),
    [
        *[(["train"], {"max_retries": -1}, kind, "`max_retries=-1`") for kind in (*COUNT_ERRORS, InvalidCountError)],
        *[(["train", "validate"], {"num_steps": value}, ValueError, "num_steps") for value in (-1, 1.5, "3", True)],
        (["train", "validate"], {"info": 3}, TypeError, "`info=3`"),
    ],
)
def test_wrong_arguments_of_calls_are_refused(
    calls: list[str], options: dict[str, Any], kind: type[Exception], message: str, make_local: MakeTrainer
) -> None:
    trainer = make_local()
    for call in calls:
        with pytest.raises(kind, match=message):
            getattr(trainer, call)(**options)
    assert trainer.train()["epoch"] == 1


def test_whole_numbers_may_be_numpys(make_local: MakeTrainer) -> None:
    trainer = make_local(num_workers=numpy.int64(1), accumulate_grad_batches=numpy.int64(1))
    assert trainer.train(num_steps=numpy.int64(2), max_retries=numpy.int64(0))["batch_count"] == 2


class CountsByClass(LinearOperator):
    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> dict[Any, Any]:
        return {0: 0.9, 1: 0.8}


def test_metrics_may_have_any_names(make_local: MakeTrainer) -> None:
    found = make_local(CountsByClass).train()
    assert (found[0], found[1]) == (0.9, 0.8)


def test_an_operator_may_return_whatever_it_likes_unless_it_is_to_be_reduced(make_local: MakeTrainer) -> None:
    class Odd(LinearOperator):
        def train_epoch(self, iterator: Any, info: Any) -> Any:  # type: ignore[override]
            return "done"

    trainer = make_local(Odd)
    assert trainer.train(reduce_results=False) == ["done"]
    with pytest.raises(TypeError, match=r"returned a `str`.*reduce_results=False"):
        trainer.train()


def test_a_dataset_replaces_the_validation_loader_for_one_call(make_local: MakeTrainer) -> None:
    trainer, data = make_local(config={"batch_size": 4}), dataset(6)
    assert trainer.validate(num_steps=3)["batch_count"] == 3
    assert trainer.validate(dataset=data)["num_samples"] == 6
    assert trainer.validate(num_steps=1, dataset=data)["num_samples"] == 4
    assert trainer.validate()["batch_count"] == 1  # what the first call has left


def test_calls_with_a_dataset_of_pairs_continue_where_the_last_one_stopped_unless_it_failed(
    make_local: MakeTrainer,
) -> None:
    trainer = make_local(Fails)
    seen = trainer.get_local_operator().seen  # type: ignore[attr-defined]
    samples = [(torch.zeros(1, 3), torch.tensor([number]), torch.zeros(1, 1)) for number in range(3)]
    data = Dataset(samples, batch_size=1)
    for _ in range(4):
        trainer.train(num_steps=1, dataset=data)
    with pytest.raises(ZeroDivisionError):
        trainer.train(dataset=data, info={"fail_at": 0})
    trainer.train(num_steps=1, dataset=data)
    assert seen == [[0], [1], [2], [0], [0]]


# ------------------------------------------------------------------------------------------------ schedulers


PLATEAU: dict[str, Any] = {"factor": 0.5, "patience": 2, "threshold": 0.9999}


class Scores(ScheduledOperator):
    def validate(self, val_iterator: Iterable[Any]) -> dict[str, Any]:  # type: ignore[override]
        return {"score": 3.0, "last_val_loss": 4.0}


def on_plateau(make_local: MakeTrainer, operator_cls: type[ScheduledOperator] = ScheduledOperator) -> TorchTrainer:
    scheduler = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, **PLATEAU)
    return make_local(operator_cls, config={"scheduler": scheduler}, scheduler_step_freq="epoch")


def rate_of(trainer: TorchTrainer) -> float:
    return trainer.get_local_operator().optimizer.param_groups[0]["lr"]  # type: ignore[attr-defined, no-any-return]


def test_fit_steps_a_plateau_by_the_loss_of_each_validation(make_local: MakeTrainer) -> None:
    trainer, replayed = on_plateau(make_local), on_plateau(make_local)
    plateau = replayed.get_local_operator().scheduler  # type: ignore[attr-defined]
    for _ in range(3):
        for row in trainer.fit(4, validation_freq=2):
            if "val_loss" in row:
                plateau.step(row["val_loss"])
        assert trainer.get_local_operator().scheduler.state_dict() == plateau.state_dict()  # type: ignore[attr-defined]
    assert plateau.last_epoch == 6
    assert rate_of(trainer) == rate_of(replayed) < 0.05


def test_a_run_that_resumes_lowers_the_rate_when_the_whole_one_does(make_local: MakeTrainer, tmp_path: Path) -> None:
    whole, first, resumed = (on_plateau(make_local) for _ in range(3))
    whole.fit(9)
    first.fit(6)
    assert rate_of(first) != rate_of(whole)
    resumed.fit(9, resume_from=first.save(tmp_path / "six.pt"))
    assert rate_of(resumed) == rate_of(whole)
    for name, value in whole.get_model().state_dict().items():
        assert torch.equal(resumed.get_model().state_dict()[name], value)


def test_a_plateau_may_go_by_any_metric_of_training_or_validation(make_local: MakeTrainer) -> None:
    for metric in ("val_score", "score", "train_loss", "last_val_loss"):
        operator_cls = type("Named", (Scores,), {"scheduler_metric": metric})
        trainer = on_plateau(make_local, operator_cls)
        row = trainer.fit(1)[0]
        assert trainer.get_local_operator().scheduler.best == row.get(metric, 3.0)  # type: ignore[attr-defined]


def test_a_plateau_without_a_metric_to_go_by_is_an_error(make_local: MakeTrainer) -> None:
    for call in (lambda each: each.train(), lambda each: each.fit(1, validation_freq=0)):
        with pytest.raises(ValueError, match=r"In `fit` with validation data, it then follows `val_loss`"):
            call(on_plateau(make_local))
    other = on_plateau(make_local, type("Named", (Scores,), {"scheduler_metric": "val_loss"}))
    with pytest.raises(ValueError, match=r"follows `val_loss`, but neither .* Available: .*`train_loss`.*`val_score`"):
        other.fit(1)


def test_the_status_counts_epochs_as_the_history_does(make_local: MakeTrainer) -> None:
    trainer = make_local()
    for _ in range(2):
        trainer.train()
    assert trainer.history[-1]["epoch"] == 2
    shown = f"{trainer.status()} {trainer._repr_html_()}"
    assert set(re.findall(r"epoch (\d+)", shown)) == {"2"}
    assert "pass" not in shown


def test_a_metric_without_a_scheduler_is_an_error(make_local: MakeTrainer) -> None:
    with pytest.raises(RuntimeError, match="registered no scheduler"):
        make_local().update_scheduler(1.0)


# ------------------------------------------------------------------------------------------------ functions


@pytest.mark.parametrize("returned", [None, 0.5])
def test_a_batch_that_returns_no_dict_is_an_error_that_says_so(returned: Any, make_local: MakeTrainer) -> None:
    class Forgets(LinearOperator):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
            return returned

    with pytest.raises(TypeError, match=r"`Forgets.train_batch` returned a `\w+`: return a dict of metrics"):
        make_local(Forgets).train()


def test_data_without_a_batch_are_told_of(make_local: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    class UsedUp(LinearOperator):
        def make_loader(self, data: Any, shuffle: bool = False) -> Any:
            return iter(super().make_loader(data, shuffle))

    trainer = make_local(UsedUp)
    for call in (trainer.train, trainer.validate):
        assert call()["batch_count"] > 0
        assert call(num_steps=0)["batch_count"] == 0
    assert not caplog.text
    assert trainer.train()["batch_count"] == 0
    assert "the train data has no batches" in caplog.text
    assert trainer.validate()["batch_count"] == 0
    assert "the validation data has no batches" in caplog.text


def test_models_are_the_live_ones_unless_they_are_to_be_on_the_cpu(make_local: MakeTrainer) -> None:
    trainer = make_local()
    live = trainer.get_model()
    assert live is trainer.get_local_operator().model  # type: ignore[attr-defined]
    copied = trainer.get_model(to_cpu=True)
    assert copied is not live
    before = copied.weight.clone()
    trainer.train()
    assert torch.equal(copied.weight, before)
    assert not torch.equal(live.weight, before)


class Registers(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        models = config["models"]()
        parameters = [p for model in (models if isinstance(models, list) else [models]) for p in model.parameters()]
        self.register(models=models, optimizers=torch.optim.SGD(parameters, lr=0.1))


def test_several_models_are_a_list_and_one_is_itself(make_local: MakeTrainer) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def found(models: Any) -> Any:
        return make_local(Registers, config={"models": models}).get_model()

    assert isinstance(found(model), torch.nn.Linear)
    assert isinstance(found(lambda: [model()]), torch.nn.Linear)
    assert [type(each) for each in found(lambda: [model(), model()])] == [torch.nn.Linear] * 2
    assert isinstance(found(lambda: torch.nn.Sequential(model())), torch.nn.Sequential)


# ------------------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize("force", [False, True])
def test_shutting_down_twice_does_nothing(force: bool, make_local: MakeTrainer) -> None:
    trainer = make_local()
    assert trainer.shutdown(force=force) is None
    assert trainer.shutdown(force=force) is None


def test_nothing_works_after_the_end(make_local: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_local()
    path = trainer.save(tmp_path / "last.pt")
    state = trainer.state_dict()
    trainer.shutdown()
    for call in (
        trainer.train,
        trainer.validate,
        trainer.state_dict,
        trainer.get_model,
        trainer.get_local_operator,
        lambda: trainer.save(path),
        lambda: trainer.load(path),
        lambda: trainer.load_state_dict(state),
        lambda: trainer.apply_all_workers(os.getpid),
        lambda: trainer.apply_all_operators(id),
        lambda: trainer.update_scheduler(1.0),
        lambda: trainer.worker_group,
    ):
        with pytest.raises(RuntimeError, match=r"This trainer was shut down.*Create a new one"):
            call()


def test_the_operator_outlives_its_trainer(make_local: MakeTrainer) -> None:
    trainer = make_local()
    operator = trainer.get_local_operator()
    trainer.train()
    trainer.shutdown()
    assert operator.validate([]) == {"batch_count": 0, "num_samples": 0}
    assert operator.model.weight.shape == (1, 3)  # type: ignore[attr-defined]


def test_a_context_ends_with_the_users_own_exception() -> None:
    with (
        pytest.raises(KeyError, match="mine"),
        TorchTrainer(training_operator_cls=LinearOperator, use_local=True) as trainer,
    ):
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="was shut down"):
        trainer.train()


def test_restore_names_what_replaced_it(make_local: MakeTrainer) -> None:
    with pytest.raises(DeprecationWarning, match="load"):
        make_local().restore("path")


# ------------------------------------------------------------------------------------------------ exceptions


class Fails(LinearOperator):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info.get("fail_at") == batch_info["batch_idx"]:
            raise ZeroDivisionError("on purpose")
        return super().train_batch(batch, batch_info)


def test_an_exception_of_the_users_is_of_its_own_class_and_leads_to_the_users_line(make_local: MakeTrainer) -> None:
    trainer = make_local(Fails)
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        trainer.train(info={"fail_at": 2})
    assert isinstance(caught.value, WorkerError)
    lines = str(caught.value).splitlines()
    assert lines[0] == "ZeroDivisionError: on purpose"
    assert f"{__file__}:" in lines[1]
    assert 'raise ZeroDivisionError("on purpose")' in lines[1]
    assert "rank 0" in lines[2]


def test_python_shows_the_users_lines_of_an_exception_and_little_else(make_local: MakeTrainer) -> None:
    trainer = make_local(Fails)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.train(info={"fail_at": 2})
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(lines) <= 15
    assert "Traceback" in lines[0]
    assert any(f'"{__file__}"' in line and "in train_batch" in line for line in lines)
    assert "on rank 0" in lines[-1]


class ReturnsNothing(LinearOperator):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        super().train_batch(batch, batch_info)


def test_where_no_line_of_the_users_was_running_none_is_blamed_and_the_method_is_named(make_local: MakeTrainer) -> None:
    with pytest.raises(TypeError) as caught:
        make_local(ReturnsNothing).train()
    what, where, _ = str(caught.value).splitlines()
    assert what.endswith(
        f"`train_batch` is defined at {__file__}:{ReturnsNothing.train_batch.__code__.co_firstlineno}."
    )
    assert re.fullmatch(
        r"  raised at raysgd/trainer/worker/operator\.py:\d+ in values_and_weight \(in no method of yours\)", where
    )


class WithoutSuper(LinearOperator):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.hidden = 8


def test_an_init_that_does_not_call_that_of_the_library_is_named(make_local: MakeTrainer) -> None:
    line = WithoutSuper.__init__.__code__.co_firstlineno
    with pytest.raises(TypeError, match=rf"`WithoutSuper.__init__` does not call .*`__init__` is defined at .*:{line}"):
        make_local(WithoutSuper)


def test_a_debugger_finds_the_users_frame_with_its_variables(make_local: MakeTrainer) -> None:
    trainer = make_local(Fails)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.train(info={"fail_at": 2})
    assert isinstance(caught.value, WorkerError)
    for error in (caught.value, caught.value.faults[0].error):
        assert error is not None
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        assert frame.f_code.co_name == "train_batch"
        assert frame.f_locals["batch_info"]["batch_idx"] == 2


class Interrupted(LinearOperator):
    """Trains on numbers in a random order, and is interrupted where `info` says so; tells which numbers it has seen."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        loader: Any = torch.utils.data.DataLoader(Interrupting(), batch_size=2, shuffle=config["is_divided"])
        self.register_data(train_loader=loader if config["is_divided"] else [*loader])
        self.seen: list[float] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        is_due = batch_info["batch_idx"] == 1
        if is_due and batch_info.get("at") == "before":
            raise KeyboardInterrupt
        self.optimizer.step()
        if is_due and batch_info.get("at") == "after":
            raise KeyboardInterrupt
        self.seen += batch.flatten().tolist()
        return {}


class Interrupting(torch.utils.data.Dataset[torch.Tensor]):
    num_due: int | None = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if Interrupting.num_due is not None:
            Interrupting.num_due -= 1
            if Interrupting.num_due < 0:
                raise KeyboardInterrupt
        return torch.tensor([float(index)])


@pytest.mark.parametrize("at", ["before", "after", "loading"])
def test_the_next_call_begins_with_the_batch_that_raised_unless_its_optimizer_had_stepped(
    at: str, make_local: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_local(Interrupted, config={"is_divided": True})
    seen = trainer.get_local_operator().seen
    trainer.train(num_steps=1)
    for num_due in (3, 1) if at == "loading" else (None,):
        monkeypatch.setattr(Interrupting, "num_due", num_due)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(info={"at": at})
    monkeypatch.setattr(Interrupting, "num_due", None)
    assert trainer.train()["epoch"] == 1
    assert sorted(seen) == [*range(8)] if at != "after" else len({*seen}) == len(seen) == 6
    assert trainer.train()["epoch"] == 2
    assert sorted(seen[-8:]) == [*range(8)]


def test_where_the_library_does_not_divide_the_data_they_begin_again_after_an_exception(
    make_local: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_local(Interrupted, config={"is_divided": False})
    with pytest.raises(KeyboardInterrupt):
        trainer.train(info={"at": "before"})
    assert trainer.train()["epoch"] == 2
    assert trainer.get_local_operator().seen == [0, 1, *range(8)]
    assert "reading the data from the beginning" in caplog.text


def test_a_state_after_an_exception_is_that_of_the_live_model(make_local: MakeTrainer) -> None:
    trainer = make_local(Fails)
    before = trainer.state_dict()["models"][0]["weight"]
    with pytest.raises(ZeroDivisionError):
        trainer.train(info={"fail_at": 2})
    after = trainer.state_dict()["models"][0]["weight"]
    assert torch.equal(after, trainer.get_model().weight)
    assert not torch.equal(after, before)


def test_an_exception_in_setup_is_of_its_own_class() -> None:
    class Broken(TrainingOperator):
        def setup(self, config: dict[str, Any]) -> None:
            raise FileNotFoundError(2, "no data", "train.csv")

    with pytest.raises(FileNotFoundError) as caught:
        TorchTrainer(training_operator_cls=Broken, use_local=True)
    assert (caught.value.errno, caught.value.strerror) == (2, "no data")


# ------------------------------------------------------------------------------------------------ this process


def test_the_hook_runs_before_the_operator_is_made(make_local: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(LinearOperator):
        def setup(self, config: dict[str, Any]) -> None:
            self.found = os.environ["SET_BY_THE_HOOK"]
            super().setup(config)

    trainer = make_local(Reads, initialization_hook=lambda: monkeypatch.setenv("SET_BY_THE_HOOK", "yes"))
    assert trainer.get_local_operator().found == "yes"  # type: ignore[attr-defined]


def test_one_worker_in_this_process_needs_no_ray() -> None:
    program = """
        import ray
        from raysgd.torch import TorchTrainer
        from tests.torch.operators_for_tests import LinearOperator

        trainer = TorchTrainer(training_operator_cls=LinearOperator, use_local=True)
        trainer.train(), trainer.validate(), trainer.get_model(), trainer.save("last.pt"), trainer.load("last.pt")
        assert not ray.is_initialized()
        trainer.shutdown()
        assert not ray.is_initialized()
    """
    ended = run_program(program)
    assert ended.returncode == 0, ended.stderr


# ------------------------------------------------------------------------------------------------ steps


def test_a_skipped_step_does_not_advance_a_batch_scheduler(make_local: MakeTrainer) -> None:
    class Overflows(ScheduledOperator):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self._raysgd.precision.load_state_dict({**self._raysgd.precision.state_dict(), "scale": 1024.0})

        def forward(self, features: Any, target: Any) -> Any:
            output, loss = super().forward(features, target)
            return output, loss * (float("inf") if self.global_step in (1, 2) else 1.0)

    trainer = make_local(Overflows, precision="fp16", use_gpu=False, scheduler_step_freq="batch")
    trainer.train()
    operator: Any = trainer.get_local_operator()
    assert operator.global_step == 5
    assert operator.scheduler.last_epoch == 3
    assert operator._amp_scaler.get_scale() == 256.0


def test_a_batch_scheduler_steps_with_the_optimizer(make_local: MakeTrainer) -> None:
    trainer = make_local(ScheduledOperator, accumulate_grad_batches=2, scheduler_step_freq="batch")
    trainer.train()  # 5 batches
    assert trainer.get_local_operator().scheduler.last_epoch == 3  # type: ignore[attr-defined]


def test_the_number_of_batches_for_a_step_may_change_with_the_epoch(make_local: MakeTrainer) -> None:
    class Grows(LinearOperator):
        def accumulate_grad_batches(self, epoch_idx: int) -> int:
            return super().accumulate_grad_batches(epoch_idx) * (epoch_idx + 1)

        def optimizer_step(self) -> None:
            super().optimizer_step()
            self.seen.append([self.global_step])

        def prepare_batch(self, batch: Any) -> Any:
            features, _, target = batch
            return (features,), target

    trainer = make_local(Grows, accumulate_grad_batches=2)
    trainer.train()
    trainer.train()
    assert trainer.get_local_operator().seen == [[1], [3], [4], [8], [9]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("answer", [0, 1.5, True, None])
def test_a_strange_number_of_batches_is_refused(answer: Any, make_local: MakeTrainer) -> None:
    class Strange(LinearOperator):
        def accumulate_grad_batches(self, epoch_idx: int) -> Any:
            return answer

    with pytest.raises(ValueError, match=r"`Strange.accumulate_grad_batches` returned"):
        make_local(Strange).train()


def test_gradients_computed_past_the_library_cannot_be_accumulated(make_local: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=r"`self.backward` was not called.* To compute gradients yourself, omit the"):
        make_local(OwnBatchOperator, accumulate_grad_batches=2).train()


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_batch_of_an_accumulated_step_is_not_left_out(left_out: int, make_local: MakeTrainer) -> None:
    class Leaves(LinearOperator):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            return {} if batch_info["batch_idx"] == left_out else super().train_batch(batch, batch_info)

    with pytest.raises(ValueError, match=r"`accumulate_grad_batches=2`: a batch was skipped.* pass `0 \* loss`"):
        make_local(Leaves, accumulate_grad_batches=2).train()


def test_a_rung_that_clips_can_be_overridden(make_local: MakeTrainer) -> None:
    class Notes(LinearOperator):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self._raysgd.precision.load_state_dict({**self._raysgd.precision.state_dict(), "scale": 64.0})

        def clip_grad_norm(self, parameters: list[torch.Tensor], max_norm: float) -> None:
            self.norm = float(
                torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
            )
            super().clip_grad_norm(parameters, max_norm)

        def clip_grad_value(self, parameters: list[torch.Tensor], max_value: float) -> None:
            self.largest = max(float(each.grad.norm()) for each in parameters if each.grad is not None)
            super().clip_grad_value(parameters, max_value)

    trainer = make_local(Notes, precision="fp16", use_gpu=False, clip_grad_norm=0.5, clip_grad_value=0.4)
    trainer.train(num_steps=1)
    operator: Any = trainer.get_local_operator()
    assert 0.5 < operator.norm < 20, "unscaled, and not yet clipped"
    assert operator.largest <= 0.5 + 1e-6, "the norm comes first, so that both bounds hold at the end"


@pytest.mark.parametrize(("operator_cls", "is_compiled"), [(OwnModelOperator, True), (LinearOperator, False)])
def test_a_model_of_which_nothing_is_compiled_is_warned_of(
    operator_cls: Any, is_compiled: bool, make_local: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    make_local(operator_cls, compile={"backend": "eager"}).train(num_steps=1)
    assert bool(counters["stats"]) == is_compiled
    assert ("consists of modules of `torch.nn`" in caplog.text) != is_compiled


def test_compiled_models_keep_names_and_identity(make_local: MakeTrainer) -> None:
    options: dict[str, Any] = {"compile": {"backend": "eager"}, "activation_checkpointing": True}
    plain, compiled = make_local(OwnModelOperator), make_local(OwnModelOperator, **options)
    assert list(plain.state_dict()["models"][0]) == list(compiled.state_dict()["models"][0])
    assert compiled.train()["train_loss"] == pytest.approx(plain.train()["train_loss"], rel=1e-6)
    assert compiled.validate()["val_loss"] == pytest.approx(plain.validate()["val_loss"], rel=1e-6)
    operator: Any = compiled.get_local_operator()
    assert operator.model._compiled_call_impl is not None
    assert operator.model is compiled.get_model()


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.__setitem__("lr", 1),
        lambda config: config.update(lr=1),
        lambda config: config.pop("lr"),
        lambda config: config.setdefault("new", 1),
    ],
)
def test_the_config_cannot_be_changed_where_that_would_change_nothing(
    make_local: MakeTrainer, change: Callable[[dict[str, Any]], Any]
) -> None:
    trainer = make_local(config={"lr": 0.1})
    with pytest.raises(TypeError, match="apply_all_operators"):
        change(trainer.config)
    assert trainer.config == {"lr": 0.1}
    assert pickle.loads(pickle.dumps(trainer.config)) == {"lr": 0.1}
    assert type(trainer.config.copy()) is dict


class ByIndex(LinearOperator):
    """As the guide of the old library has it."""

    def train_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        return {**super().train_batch(batch, {}), "index": batch_idx}

    def validate_batch(self, batch: Any, *, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().validate_batch(batch, batch_info), "index": batch_info["batch_idx"]}


def test_batch_methods_may_take_an_index_or_their_info_by_keyword(make_local: MakeTrainer) -> None:
    trainer = make_local(ByIndex)
    assert trainer.train(num_steps=3)["last_index"] == 2
    assert trainer.validate(num_steps=2)["last_index"] == 1


class WatchedSamples(torch.utils.data.TensorDataset):
    """Watches which functions of the library are called between two samples in the middle."""

    def __init__(self) -> None:
        super().__init__(torch.ones(8, 2), torch.ones(8, 1))
        self.called: list[str] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index in (4, 5):
            sys.setprofile(self.watch if index == 4 else None)
        return super().__getitem__(index)

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = not code.co_name.startswith("<") and not code.co_flags & inspect.CO_GENERATOR
        if event == "call" and is_function and str(Path(raysgd.__file__).parent) in code.co_filename:
            self.called.append(code.co_name)


class Watched(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model, self.samples = torch.nn.Linear(2, 1), WatchedSamples()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters()), criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=torch.utils.data.DataLoader(self.samples))


def test_a_step_of_the_stock_loop_takes_few_calls(make_local: MakeTrainer) -> None:
    trainer = make_local(Watched)
    trainer.train()
    called = trainer.get_local_operator().samples.called  # type: ignore[attr-defined]
    assert {"train_batch", "optimizer_step", "commit"} <= {*called}
    assert len(called) <= 60, "three more in a worker, where the compiler is not imported yet"


def test_the_process_of_a_detached_trainer_gets_what_was_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may restart it when the cluster has become another."""
    monkeypatch.setattr(arguments, "view_of_driver", lambda environment: DriverView(0, "1", 23007))
    monkeypatch.setattr(ray_cluster, "ensure_ray", lambda: None)
    monkeypatch.setattr(ray_cluster, "gpus_of_nodes", lambda custom: (1.0,))
    options = {"num_workers": 2, "config": {}}
    chosen = {"use_gpu": True, "num_gpus_per_worker": 0.5, "backend": "nccl"}
    assert arguments.settle_gpus(options) == {**options, **chosen}
    assert arguments.settle_gpus({"use_gpu": False}) == {"use_gpu": False}
    with pytest.raises(ValueError, match=r"with 5 workers .spares count too"):
        arguments.settle_gpus({"num_workers": 4, "spare_workers": 1})
