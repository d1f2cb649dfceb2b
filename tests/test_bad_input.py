"""What no trainer takes: an error before an actor starts, with the value, what is allowed, and what to do."""

from __future__ import annotations

import math
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from raysgd import Recovery
from raysgd.callbacks import Checkpointing, EarlyStopping
from raysgd.core import arguments as checks
from raysgd.core.engine.platform import Platform
from raysgd.tf import TFTrainer
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.driver import arguments
from raysgd.train import CheckpointStrategy, Trainer, data_parallel_trainer
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.torch import TorchConfig
from raysgd.utils import BATCH_SIZE
from raysgd.v2 import Trainer as TrainerV2
from tests.helpers.run_if import RunIf
from tests.torch.operators_for_tests import LinearOperator

NAN, INF = math.nan, math.inf
NO_NUMBERS = (NAN, INF, -1, "1", None, True)
NO_COUNTS = (0, -1, 1.5, "2", None, True, 10**9, NAN)
NO_TIMES = (NAN, INF, -INF, -1, "10", True, 10**18)
TEXTS = ("yes", "no", b"no")
Row = tuple[str, Any]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which a trainer goes as far as to look for a cluster."""

    def look() -> None:
        raise AssertionError("the trainer was about to start actors")

    monkeypatch.setattr(Platform, "ensure_running", staticmethod(look))
    monkeypatch.setattr("raysgd.train._workers.ensure_ray", look)


def rows(argument: str, *values: Any) -> list[Row]:
    return [(argument, value) for value in values]


def named(row: Row) -> str:
    """The same words in every process, which several that share the tests rely on."""
    return f"{row[0]}={re.sub(' at 0x[0-9a-f]+', '', repr(row[1])):.30}"


def assert_refused(argument: str, value: Any, call: Callable[[], object]) -> None:
    """The call raises an error that names the argument, shows the value, and says what is allowed."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert argument in message
    assert _shown(value) in message
    assert any(word in message for word in ("need", "allowed", "pass", "names", "Lower", "Raise", "least"))


def _shown(value: Any) -> str:
    """What of a value has to be in a message; nothing of one that has no name for itself."""
    return repr(value) if isinstance(value, int | float | str | bytes | tuple | None) else ""


# ------------------------------------------------------------------------------------------------ TorchTrainer

OF_BOTH: list[Row] = [
    *rows("num_workers", *NO_COUNTS),
    *rows("num_cpus_per_worker", *NO_NUMBERS),
    *rows("resources_per_worker", "fast_disk", 3, {"CPU": 2}, {"fast_disk": -1}, {3: 1}),
    *rows("accelerator_type", "", 100),
    *rows("placement_strategy", "pack", "STRICT_PACK", 3),
    *rows("runtime_env", "env.yaml", 3),
    *rows("timeout_s", *NO_TIMES, 0),
    *rows("heartbeat_s", *NO_TIMES, 0, 1e-9, None),
    *rows("resize_interval_s", *NO_TIMES, 0),
    *rows("settle_timeout_s", *NO_TIMES, 0, None),
    *rows("min_workers", 0, -1, 1.5, "1", True, 10**9, 2),
    *rows("spare_workers", -1, 1.5, "1", True, 10**9),
    *rows("snapshot_every_n_steps", 0, -1, 2.5, "2", True),
    *rows("snapshot_every_s", -1, NAN, INF, "atuo", "2", True),
    *rows("use_gpu", *TEXTS),
    *rows("use_local", *TEXTS),
    *rows("config", "lr=1", [1], 3),
    *rows("initialization_hook", "hook", 3),
    *rows("recovery", "rejoin", True, None, 30, {"heartbeat_s": 30}, Recovery),
    *rows("split_batches", "constant", 18),
]
TORCH: list[Row] = [
    *OF_BOTH,
    *rows("num_gpus_per_worker", *NO_NUMBERS, 0, 1.5),
    *rows("accumulate_grad_batches", 0, -1, 1.5, "2", True),
    *rows("clip_grad_norm", 0, -1, NAN, INF, "1", True),
    *rows("clip_grad_value", 0, -1, NAN, INF, "1", True),
    *rows("wrap_ddp", *TEXTS),
    *rows("use_tqdm", *TEXTS),
    *rows("add_dist_sampler", *TEXTS),
    *rows("sync_batchnorm", *TEXTS, 1),
    *rows("activation_checkpointing", *TEXTS, 1),
    *rows("compile", "yes", 1, None),
    *rows("use_fp16", "yes", None, 2),
    *rows("precision", "fp8", 16),
    *rows("backend", "mpi", None, 3),
    *rows("strategy", "dp", True),
    *rows("scheduler_step_freq", "step", 1),
    *rows("training_operator_cls", None, "LinearOperator", TrainingOperator.__init__, dict),
    *rows("strategy_options", 3, "x"),
    *rows("micro_batch_size", 0, -1, 1.5, "4", True, 8),
    *rows("deterministic", *TEXTS),
]


def passed(name: str, value: Any) -> dict[str, Any]:
    """The argument of a trainer that takes an option: the option itself, or what holds it."""
    if name in [field.name for field in fields(Recovery)]:
        return {"recovery": Recovery(**{name: value})}
    return {name: value}


@pytest.mark.parametrize("row", TORCH, ids=named)
def test_torch_trainer_refuses_an_argument(row: Row) -> None:
    assert_refused(*row, lambda: TorchTrainer(**{"training_operator_cls": LinearOperator, **passed(*row)}))


BATCH_SIZES = (0, -1, True, "8", 2.5, None, 1, NAN)


@pytest.mark.parametrize("size", BATCH_SIZES, ids=repr)
def test_a_batch_size_that_cannot_be_divided_is_refused(size: Any) -> None:
    config = {BATCH_SIZE: size}
    assert_refused(
        BATCH_SIZE, size, lambda: TorchTrainer(training_operator_cls=LinearOperator, num_workers=2, config=config)
    )
    assert_refused(BATCH_SIZE, size, lambda: TFTrainer(dict, dict, config, num_replicas=2))


UNPICKLABLE: dict[str, Callable[[], Any]] = {
    "a lock": threading.Lock,
    "a generator": lambda: (number for number in range(3)),
    "a connection": socket.socket,
}


@pytest.mark.parametrize("what", UNPICKLABLE)
def test_a_config_that_cannot_be_sent_is_refused_by_its_key(what: str) -> None:
    value = UNPICKLABLE[what]()
    for trainer_cls, options in (
        (TorchTrainer, {"training_operator_cls": LinearOperator}),
        (TFTrainer, {"model_creator": dict, "data_creator": dict}),
    ):
        with pytest.raises(TypeError, match=r"`config\['mine'\]`.*cannot be pickled: .*Omit"):
            trainer_cls(config={"lr": 1, "mine": value}, **options)
    if hasattr(value, "close"):
        value.close()


# ------------------------------------------------------------------------------------------------ its methods


@pytest.fixture(scope="module")
def trainer() -> Iterator[TorchTrainer]:
    with TorchTrainer(training_operator_cls=LinearOperator, use_local=True) as trainer:
        yield trainer


METHODS: list[tuple[str, Row]] = [
    *(("train", row) for row in rows("num_steps", -1, 1.5, "3", True, NAN)),
    *(("train", row) for row in rows("max_retries", -1, 1.5, "3", True, None)),
    *(("train", row) for row in rows("info", 3, "x", [1])),
    *(("train", row) for row in rows("profile", *TEXTS)),
    *(("train", row) for row in rows("reduce_results", *TEXTS)),
    *(("train", row) for row in rows("dataset", 3, [1])),
    *(("validate", row) for row in rows("num_steps", -1, 1.5, "3", True)),
    *(("validate", row) for row in rows("info", 3, "x")),
    *(("validate", row) for row in rows("reduce_results", *TEXTS)),
    *(("save", row) for row in rows("checkpoint", 3, None, b"x", "", "a\0b", 1.5, ["x"])),
    *(("load", row) for row in rows("checkpoint", 3, None, b"x", "", "a\0b", 1.5, ["x"])),
    *(("load_state_dict", row) for row in rows("state_dict", None, 3, [1], "x")),
]


@pytest.mark.parametrize(("method", "row"), METHODS, ids=[f"{method} {named(row)}" for method, row in METHODS])
def test_a_method_refuses_an_argument_and_the_trainer_goes_on(method: str, row: Row, trainer: TorchTrainer) -> None:
    name, value = row
    with pytest.raises((ValueError, TypeError), match=name if method != "load_state_dict" else "need what"):
        getattr(trainer, method)(**{name: value})
    assert trainer.train(num_steps=1)["batch_count"] == 1


@pytest.mark.parametrize("switch", ["blocking", "weights_only"])
def test_texts_for_switches_of_save_and_load_are_refused(switch: str, trainer: TorchTrainer, tmp_path: Path) -> None:
    assert_refused(switch, "no", lambda: trainer.save(tmp_path / "file", **{switch: "no"}))
    assert not (tmp_path / "file").exists()
    assert_refused("weights_only", "no", lambda: trainer.load(tmp_path / "file", weights_only="no"))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ register


class Registering(LinearOperator):
    """Registers what its config says in the place of what is right."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Linear(2, 1)
        given: dict[str, Any] = {"models": model, "optimizers": torch.optim.SGD(model.parameters(), lr=0.1)}
        self.register(**{**given, **config.get("register", {})})
        self.register_data(**config.get("register_data", {}))


def without_parameters() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": []}], lr=0.1)


REGISTERED: list[tuple[str, Row]] = [
    *(("register", row) for row in rows("models", None, 3, "resnet", [], [3], torch.nn.Linear)),
    *(("register", row) for row in rows("optimizers", None, 3, "sgd", [3], without_parameters())),
    *(("register", row) for row in rows("criterion", 3, "mse", [1])),
    *(("register", row) for row in rows("schedulers", 3, "step", [3])),
    *(("register", row) for row in rows("ddp_args", 3, "x", [1])),
    *(("register", row) for row in rows("apex_args", 3, "x", [1])),
    *(("register", row) for row in rows("model", 3)),
    *(("register_data", row) for row in rows("train_loader", 3, "path", {"a": 1}, list, True)),
    *(("register_data", row) for row in rows("validation_loader", 3, "path", {"a": 1}, list, True)),
]


@pytest.mark.parametrize(("method", "row"), REGISTERED, ids=[f"{method} {named(row)}" for method, row in REGISTERED])
def test_what_cannot_be_registered_is_refused_at_once(method: str, row: Row) -> None:
    name, value = row
    config = {method: {name: value}}
    with pytest.raises((ValueError, TypeError), match=rf"`?{name}"):
        TorchTrainer(training_operator_cls=Registering, use_local=True, config=config, scheduler_step_freq="manual")


# ------------------------------------------------------------------------------------------------ the first hour


def with_setup(**methods: Any) -> Any:
    """A class of operators of which all is right but these."""
    return type("Digits", (LinearOperator,), methods)


class Map(torch.utils.data.Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return [torch.zeros(4, 1)] * 2

    def __len__(self) -> int:
        return 3


Module = type("LightningModule", (torch.nn.Module,), {"__module__": "lightning.pytorch.core.module"})
TRAINER: Any = type("Trainer", (), {"__module__": "transformers.trainer"})
SAMPLES = torch.utils.data.TensorDataset(torch.zeros(4, 1))
MISTAKES: list[tuple[Callable[[TorchTrainer], object], str]] = [
    (lambda trainer: TorchTrainer(LinearOperator, epochs=5), "`epochs`: `trainer.fit(5)` trains 5 epochs"),
    (lambda trainer: TorchTrainer(LinearOperator, callbacks=[]), "pass it to `trainer.fit(5, callbacks=[...])`"),
    (lambda trainer: trainer.fit(max_epochs=2), "`fit` does not know `max_epochs`: `trainer.fit(5)` trains 5 epochs"),
    (lambda trainer: trainer.epochs(banana=2), "write `for row in trainer.epochs(5):`"),
    (lambda trainer: trainer.train(epochs=3), "`train` does not know `epochs`: `trainer.fit(5)` trains 5"),
    (lambda trainer: trainer.fit(2, patience=3), 'pass `callbacks=[EarlyStopping("val_loss", patience=3)]`'),
    (
        lambda trainer: trainer.fit(2, num_workers=3),
        "`fit` does not know `num_workers`: pass it to `TorchTrainer(num_w",
    ),
    (lambda trainer: EarlyStopping(monitor="loss"), '`EarlyStopping` does not know `monitor`: write `EarlyStopping("'),  # type: ignore[call-arg]
    (lambda trainer: EarlyStopping(pace=3), 'not know `pace`: write `EarlyStopping("val_loss", patience=3)`'),  # type: ignore[call-arg]
    (lambda trainer: Checkpointing(save_top_k=3), 'write `metric="val_loss", keep_best=3`'),  # type: ignore[call-arg]
    (
        lambda trainer: trainer.train()["loss"],
        "'loss' is not in this result. Available: 'num_samples', 'epoch', 'batch_count', 'train_",
    ),
    (lambda trainer: TorchTrainer(with_setup(__init__=lambda self, lr=1: None)), "Rename it to `setup(self, config)`"),
    (lambda trainer: TorchTrainer(torch.nn.Linear(1, 1)), "Create the model in the `setup` of one."),
    (lambda trainer: TorchTrainer(type("Lit", (Module,), {})), "`TrainingOperator.from_ptl(Lit)` makes one"),
    (lambda trainer: TorchTrainer(TRAINER), "A subclass of `raysgd.operators.HuggingFaceOperator`"),
    *(
        (partial(lambda method, trainer: local(with_setup(**method)), method), message)
        for method, message in (
            ({"setup": lambda self, config: self.register(1, 2, 3)}, "got 3 arguments without names: write"),
            ({"setup": lambda self, config: self.register(model=1)}, "`model`: write `self.model, self.optimizer"),
            ({"setup": lambda self, config: self.register_data(1)}, "`self.register_data(train_loader=loader, "),
            ({"setup": lambda self, config: self.register_data(train_loader=SAMPLES)}, "=DataLoader(dataset, batch"),
            ({"setup": lambda self, config: None}, "`Digits.setup` never called `register`"),
        )
    ),
    *(
        (partial(lambda given, trainer: local(Registering, config={"register": given}), given), message)
        for given, message in (
            ({"optimizers": torch.optim.SGD}, "the class `SGD` instead of an object of it"),
            ({"criterion": torch.nn.MSELoss}, "pass a loss module such as `torch.nn.MSELoss()`"),
        )
    ),
    (lambda trainer: local(with_setup(train_batch=lambda *_: None)).train(), "`Digits.train_batch` returned a"),
    (lambda trainer: local(with_setup(validate_batch=lambda *_: 3)).validate(), "`Digits.validate_batch` returned"),
]


def local(operator_cls: Any = LinearOperator, **options: Any) -> TorchTrainer:
    return TorchTrainer(operator_cls, use_local=True, **options)


@pytest.mark.parametrize(("mistake", "line"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_of_the_first_hour_is_answered_by_the_line_to_write(
    mistake: Callable[[TorchTrainer], object], line: str, trainer: TorchTrainer
) -> None:
    with pytest.raises((TypeError, ValueError, KeyError), match=re.escape(line)):
        mistake(trainer)


def test_constructors_of_old_programs_run() -> None:
    own = with_setup(__init__=lambda self, *args, **kwargs: LinearOperator.__init__(self, *args, **kwargs))
    assert local(own).train()["epoch"] == 1


WARNED: list[tuple[Callable[[], object], str]] = [
    (lambda: local().train(3), "`train(3)` trains on 3 batches: for epochs write `fit(3)`"),
    (lambda: local(with_setup(train_bacth=print)), "calls `Digits.train_bacth`: did you mean `train_batch`?"),
    (lambda: local(with_setup(validation_batch=print)), "did you mean `validate_batch`?"),
    (lambda: local(with_setup(training_step=print)), "did you mean `train_batch`?"),
    (lambda: local(with_setup(on_epoch_end=print)), "callbacks have such methods: `trainer.fit(5, callbacks=[...])`"),
    (
        lambda: local(Registering, config={"register_data": {"train_loader": Map()}}),
        "If the items are samples, wrap the object in",
    ),
    (lambda: local(Diverging).train(), "`train_loss` is NaN"),
]


class Diverging(LinearOperator):
    def forward(self, features: Any, target: Any) -> Any:
        output, loss = super().forward(features, target)
        return output, loss * NAN


@pytest.mark.parametrize(("mistake", "line"), WARNED, ids=[message for _, message in WARNED])
def test_what_may_be_meant_is_warned_of_once(
    mistake: Callable[[], object], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    mistake()
    assert caplog.text.count(line) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver has a GPU")
@pytest.mark.parametrize(("use_gpu", "num_gpus", "is_said"), [("auto", 8, True), ("auto", 0, False), (False, 8, False)])
def test_gpus_of_nodes_are_pointed_at_where_the_driver_has_none(
    use_gpu: Any, num_gpus: int, is_said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arguments, "gpus_of_nodes", lambda: [num_gpus])
    local(use_gpu=use_gpu)
    assert caplog.text.count("the nodes have 8 GPUs, but training runs on CPUs") == is_said
    assert caplog.text.count("Pass `use_gpu=True` to train on the GPUs") == is_said


def test_methods_that_own_methods_may_call_are_nobodys_mistake(caplog: pytest.LogCaptureFixture) -> None:
    local(with_setup(training_step=print, train_batch=print, on_epoch_end=print, train_epoch=print, helper=print))
    assert not caplog.records


class Counting(LinearOperator):
    """Says how many samples a batch has."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "num_samples": self.config["told"]}


@pytest.mark.parametrize("number", [-4, NAN, INF, -0.5], ids=repr)
def test_a_number_of_samples_that_cannot_be_is_refused(number: float) -> None:
    with TorchTrainer(training_operator_cls=Counting, use_local=True, config={"told": number}) as trainer:
        assert_refused("num_samples", number, trainer.train)


# ------------------------------------------------------------------------------------------------ TFTrainer

TF: list[Row] = [
    *(row for row in OF_BOTH if row != ("num_workers", None)),  # the number may come as `num_replicas`
    *rows("num_replicas", 0, -1, 1.5, "2", True, 10**9),
    *rows("timeout_s", None),
    *rows("seed", -1, 1.5, "2", True, 2**31),
    *rows("verbose", "yes", b"no"),
    *rows("model_creator", None, 3, "make"),
    *rows("data_creator", None, 3, "make"),
]


@pytest.mark.parametrize("row", TF, ids=named)
def test_tf_trainer_refuses_an_argument(row: Row) -> None:
    options: dict[str, Any] = {"model_creator": dict, "data_creator": dict}
    with pytest.raises((ValueError, TypeError), match=row[0]) as caught:
        TFTrainer(**{**options, **passed(*row)})
    assert row[1] is None or _shown(row[1]) in str(caught.value)


# ------------------------------------------------------------------------------------------------ Trainer

FUNCTIONS: list[Row] = [
    *rows("num_workers", *NO_COUNTS, (0, 2), (3, 2), (1, 10**9), (1,), (1, "2"), [2, 1]),
    *rows("max_retries", 1.5, "3", True, None),
    *rows("heartbeat_s", *NO_TIMES, 0, 1e-9, None),
    *rows("resize_interval_s", *NO_TIMES, None),
    *rows("use_gpu", *TEXTS),
    *rows("resources_per_worker", 3, "CPU", ["CPU"], {"CPU": -1}, {"CPU": NAN}, {"CPU": "2"}, {"disk": INF}, {3: 1}),
    *rows("accelerator_type", "", 100),
    *rows("placement_strategy", "pack", "STRICT_PACK", 3),
    *rows("runtime_env", "env.yaml", 3),
    *rows("backend", "mpi", None, 3, TorchConfig),
    *rows("logdir", 3, b"x", "", "a\0b"),
]


@pytest.mark.parametrize("row", FUNCTIONS, ids=named)
def test_trainer_of_functions_refuses_an_argument(row: Row, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "torch", "logdir": tmp_path / "runs", row[0]: row[1]}
    assert_refused(*row, lambda: Trainer(**options))
    assert not (tmp_path / "runs").exists()


DIVIDING: list[Row] = [
    ("split_batches", True),
    ("micro_batch_size", 4),
    ("deterministic", True),
]
"""Options for steps that the library divides."""

OF_FUNCTIONS: list[Callable[..., object]] = [
    partial(Trainer, "torch"),
    partial(TrainerV2, "horovod"),
    partial(data_parallel_trainer.TorchTrainer, print),
    partial(data_parallel_trainer.TensorflowTrainer, print),
    partial(data_parallel_trainer.HorovodTrainer, print),
    partial(DataParallelTrainer, print),
]


@RunIf(modules=["horovod"])
@pytest.mark.parametrize("row", DIVIDING, ids=named)
def test_options_of_operators_are_refused_by_name_elsewhere(row: Row) -> None:
    where = r"omit it, or pass it to `raysgd.torch.TorchTrainer`.* with an operator"
    for make in OF_FUNCTIONS:
        with pytest.raises(TypeError, match=rf"Trainer` does not know `{row[0]}`: {where}"):
            make(**dict([row]))
    if row[0] != "split_batches":
        with pytest.raises(TypeError, match=rf"`TFTrainer` does not know `{row[0]}`: {where}"):
            TFTrainer(dict, dict, **dict([row]))


@pytest.mark.parametrize(
    ("name", "torch_line", "tf_line", "function_line"),
    [
        ("gradient_accumulation_steps", "`accumulate_grad_batches=4`", "not there", "write it in the function"),
        ("bf16", '`precision="bf16"`', "set_global_policy(", "accelerate(amp=True)"),
        (
            "gradient_clip_val",
            "`clip_grad_norm=1.0`",
            "`keras.optimizers.Adam(global_clipnorm=1.0)`",
            "in the function",
        ),
        ("class_weight", "CrossEntropyLoss(weight=", '{"fit_config": {"class_weight"', "write it in the function"),
        ("monitor", 'Checkpointing("checkpoints", metric="val_loss"', "restore_best_at_end=True", '"val_loss", "min"'),
        ("save_top_k", "keep_last=2", "keep_last=2", "CheckpointConfig(num_to_keep=2)"),
        ("warmup_ratio", 'scheduler_step_freq="batch"', "schedules.CosineDecay(", "write it in the function"),
        ("max_steps", "`trainer.fit(max_steps=1000)`", "`trainer.train(num_steps=100)`", "write it in the function"),
        ("devices", "`num_workers=4`", "`num_workers=4`", "`scaling_config=ScalingConfig(...)`"),
        ("learning_rate", 'config={"lr": 0.001}', "keras.optimizers.AdamW", "write it in the function"),
    ],
)
def test_words_of_other_libraries_are_answered_by_the_line_to_write(
    name: str, torch_line: str, tf_line: str, function_line: str
) -> None:
    option: dict[str, Any] = {name: 1}
    for make, line in (
        (partial(TorchTrainer, LinearOperator), torch_line),
        (partial(TFTrainer, dict, dict), tf_line),
        (partial(data_parallel_trainer.TorchTrainer, print), function_line),
        (partial(Trainer, "torch"), function_line),
    ):
        with pytest.raises(TypeError, match=rf"Trainer` does not know `{name}`: .*{re.escape(line)}"):
            make(**option)


def test_a_keyword_of_functions_that_is_misspelt_or_gone_is_answered() -> None:
    with pytest.raises(TypeError, match="`TorchTrainer` does not know `validation_config`: validate in the function"):
        data_parallel_trainer.TorchTrainer(print, validation_config=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"`TorchTrainer` does not know `run_cfg`\. Did you mean `run_config`\?"):
        data_parallel_trainer.TorchTrainer(print, run_cfg=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"`Trainer` does not know `num_worker`\. Did you mean `num_workers`\?"):
        Trainer("torch", num_worker=2)


@pytest.mark.parametrize(
    ("place", "row"),
    [*(({"backend": "horovod"}, row) for row in DIVIDING), ({"strategy": "fsdp"}, ("deterministic", True))],
    ids=str,
)
def test_they_are_refused_by_name_where_nothing_can_divide_steps(place: dict[str, Any], row: Row) -> None:
    joint = {} if row[0] == "deterministic" else {"split_batches": True}
    [(what, value)] = place.items()
    with pytest.raises(ValueError, match=rf'cannot work with `{what}="{value}"`.*Use that, or omit it'):
        TorchTrainer(training_operator_cls=LinearOperator, num_workers=2, **{**joint, **place, row[0]: row[1]})


RUNS: list[Row] = [
    *rows("train_func", None, 3, "f", lambda a, b: None),
    *rows("config", threading.Lock()),
    *rows("callbacks", 3, "x", [3], [dict]),
    *rows("dataset", 3, "x", {"train": 3}),
    *rows("checkpoint", 3, [1], "/no/such/file", f"{__file__}/inside"),
    *rows("checkpoint_strategy", 3, "all"),
]


@pytest.mark.parametrize("row", RUNS, ids=named)
def test_a_run_that_cannot_be_is_refused_before_it_leaves_a_trace(row: Row, tmp_path: Path) -> None:
    trainer = Trainer("torch", logdir=tmp_path)
    options: dict[str, Any] = {"train_func": print_nothing, row[0]: row[1]}
    with pytest.raises((ValueError, TypeError), match=row[0]):
        trainer.run(**options)
    assert list(tmp_path.iterdir()) == []


def print_nothing() -> None:
    pass


@pytest.mark.parametrize("timeout_s", [*NO_TIMES, 0], ids=repr)
def test_a_config_of_a_backend_refuses_a_time(timeout_s: Any, tmp_path: Path) -> None:
    trainer = Trainer(TorchConfig(timeout_s=timeout_s), logdir=tmp_path)
    assert_refused("timeout_s", timeout_s, trainer.start)


def test_a_hook_that_cannot_be_called_is_refused(tmp_path: Path) -> None:
    trainer = Trainer("torch", logdir=tmp_path)
    assert_refused("initialization_hook", "hook", lambda: trainer.start("hook"))  # type: ignore[arg-type]


STRATEGIES: list[Row] = [
    *rows("num_to_keep", -1, 1.5, "2", True),
    *rows("checkpoint_score_attribute", None, 3),
    *rows("checkpoint_score_order", "best", None, True),
]


@pytest.mark.parametrize("row", STRATEGIES, ids=named)
def test_a_strategy_of_checkpoints_refuses_a_value(row: Row) -> None:
    options: dict[str, Any] = {row[0]: row[1]}
    assert_refused(*row, lambda: CheckpointStrategy(**options))


# ------------------------------------------------------------------------------------------------ what is not refused


@pytest.mark.parametrize(
    "options",
    [
        {"use_gpu": 0, "wrap_ddp": 1, "use_tqdm": [], "add_dist_sampler": {}, "use_local": 1},
        {"use_gpu": None, "use_local": np.True_},
        {"num_workers": np.int64(1), "num_cpus_per_worker": np.float32(1), "timeout_s": np.int32(5), "use_local": True},
    ],
)
def test_other_values_keep_their_truth(options: dict[str, Any]) -> None:
    with TorchTrainer(training_operator_cls=LinearOperator, **options) as trainer:
        assert trainer.train(num_steps=1)["batch_count"] == 1


# ------------------------------------------------------------------------------------------------ what all check alike


def test_nothing_unknown_is_nothing_to_refuse() -> None:
    checks.refuse_unknown("Trainer", {}, ["num_workers"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("xyz", r"`Trainer` does not know `xyz`\.$"),
        ("split_batches", r"pass it to `raysgd.torch.TorchTrainer` or `raysgd.tf.TFTrainer`, with an operator"),
        ("deterministic", r"omit it, or pass it to `raysgd.torch.TorchTrainer`, with an operator\.$"),
    ],
)
def test_what_is_unknown_is_guessed_at_or_sent_to_where_it_is_known(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        checks.refuse_unknown("Trainer", [name], ["num_workers", "backend"])


@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3), 3])
def test_counts_become_those_of_python(value: Any) -> None:
    assert type(checks.check_count("n", value, "")) is int
    assert checks.check_num_steps(value) == 3
    assert checks.check_num_workers("n", value, "") == 3


@pytest.mark.parametrize(("value", "is_one"), [(1.5, True), (np.float32(2), True), (True, False), (math.inf, False)])
def test_what_a_number_is(value: Any, is_one: bool) -> None:
    assert checks.is_number(value) is is_one


def test_a_time_may_be_its_least_unless_that_is_excluded() -> None:
    assert checks.check_seconds("t", 0) == 0
    with pytest.raises(ValueError, match="`t=0`: need a number of seconds, more than 0"):
        checks.check_seconds("t", 0, may_be_least=False)


class Options(dict[str, Any]):
    """Has its entries as attributes, as an `AttrDict` has."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def test_a_config_is_copied_as_what_it_is() -> None:
    given = Options(lr=0.1)
    copied: Any = checks.with_entries(checks.check_config(given), {"depth": 2})
    assert (copied.lr, copied.depth, given) == (0.1, 2, {"lr": 0.1})
    assert type(checks.check_config(MappingProxyType(given))) is dict
