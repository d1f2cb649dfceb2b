"""Mistakes of the first hour in one process: types, names, shapes, devices, resources, sessions, files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raysgd.callbacks import Callback, Checkpointing, EarlyStopping
from raysgd.exceptions import CallbackError, NoDataError, TrainerShutdownError
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.train import ScalingConfig
from raysgd.train.torch import TorchTrainer as FunctionTrainer
from tests.mistakes import mistaken
from tests.mistakes.mistaken import Careless
from tests.mistakes.table import Mistake, check


def local(operator_cls: Any = Careless, **options: Any) -> TorchTrainer[Any]:
    return TorchTrainer(operator_cls, use_local=True, **options)


def in_setup(mistake: str) -> Any:
    return lambda trainer: local(config={"mistake": mistake}).train()


def in_batch(mistake: str) -> Any:
    return lambda trainer: trainer.train(info={"mistake": mistake})


def creators(**changed: Any) -> Any:
    made: dict[str, Any] = {
        "model_creator": lambda config: torch.nn.Linear(3, 1),
        "optimizer_creator": lambda model, config: torch.optim.SGD(model.parameters()),
        **changed,
    }
    return lambda trainer: TrainingOperator.from_creators(**made)


class TrainsInside(Callback):
    """Calls the trainer from inside of its `fit`."""

    def on_result(self, run: Any, result: dict[str, Any]) -> None:
        run.trainer.train()


def after_shutdown(trainer: Any) -> object:
    own = local()
    own.shutdown()
    return own.train()


TYPES = [
    Mistake(
        "a model as operator", lambda _: local(torch.nn.Linear(1, 1)), TypeError, "Create the model in the `setup`"
    ),
    Mistake("config is a list", lambda _: local(config=[1]), TypeError, "need a dict"),
    Mistake(
        "a model as creator", creators(model_creator=torch.nn.Linear(1, 1)), ValueError, "def model_creator(config):"
    ),
    Mistake("a class of optimizers", creators(optimizer_creator=torch.optim.SGD), ValueError, "(model, config):"),
    Mistake("data as creator", creators(data_creator=[1, 2]), ValueError, "def data_creator(config):"),
    Mistake("samples as loader", in_setup("registers_samples"), TypeError, "DataLoader(dataset, batch"),
    Mistake("a class as optimizer", in_setup("registers_a_class"), TypeError, "the class `SGD` instead of an object"),
    Mistake("a class as loss", in_setup("registers_the_class_of_a_loss"), TypeError, "such as `torch.nn.MSELoss()`"),
    Mistake("no names", in_setup("registers_by_position"), TypeError, "write `self.model, self.optimizer"),
    Mistake("nothing returned", in_batch("returns_nothing"), TypeError, "`Careless.train_batch` returned"),
    Mistake("a number returned", in_batch("returns_a_number"), TypeError, "`Careless.train_batch` returned"),
    Mistake("one callback", lambda each: each.fit(1, callbacks=EarlyStopping()), TypeError, "need a list of callbacks"),
    Mistake("class of callbacks", lambda each: each.fit(1, callbacks=[EarlyStopping]), TypeError, "`EarlyStopping()`?"),
    Mistake("epochs in words", lambda each: each.fit("5"), ValueError, "need a number of epochs"),
    Mistake("other data", lambda each: each.train(dataset=3), TypeError, "need a `DataLoader`"),
]
NAMES = [
    Mistake("of Lightning", lambda _: local(max_epochs=3), TypeError, "`trainer.fit(5)` trains 5 epochs"),
    Mistake("of transformers", lambda _: local(max_grad_norm=1), TypeError, "pass `clip_grad_norm=1.0` to the trainer"),
    Mistake("of Keras", lambda each: each.fit(5, patience=3), TypeError, 'EarlyStopping("val_loss", patience=3)'),
    Mistake("of a callback", lambda _: Checkpointing(save_top_k=3), TypeError, "keep_best=3"),  # type: ignore[call-arg]
    Mistake("of another trainer", lambda _: local(scaling_config=1), TypeError, "`raysgd.train.torch.TorchTrainer`"),
    Mistake("misspelled", lambda _: local(num_worker=2), TypeError, "Did you mean `num_workers`?"),
    Mistake("a metric", lambda each: each.fit(1, callbacks=[EarlyStopping("val_los")]), CallbackError, "`val_loss`?"),
    Mistake("a result", lambda each: each.train()["loss"], KeyError, "'train_loss'"),
    Mistake("the loss", lambda _: local(mistaken.WithoutLoss).train(), ValueError, "has no `self.model`"),
    Mistake("a key", in_setup("reads_a_missing_key"), KeyError, "learning_rat", 'self.rate = config["learning_rat"]'),
]
SHAPES = [
    Mistake(
        "of a model",
        in_batch("multiplies_wrong_shapes"),
        RuntimeError,
        "mat1 and mat2 shapes",
        "return self.model(batch[0].transpose(0, 1)[:, :2])",
    ),
    Mistake(
        "of a loss",
        in_batch("compares_other_types"),
        (RuntimeError, ValueError, IndexError),  # type: ignore[arg-type]
        "on rank 0",
        "return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[2].squeeze(1))",
    ),
    Mistake(
        "of samples",
        in_setup("has_samples_of_two_sizes"),
        RuntimeError,
        "stack expects each tensor to be equal size",
        "return torch.stack([features for features, _ in samples]), torch.stack([target for _, target in samples])",
    ),
    Mistake("of a batch size", lambda _: local(micro_batch_size=4), ValueError, "split_batches=True"),
]
DEVICES_AND_RESOURCES = [
    Mistake(
        "no GPU in setup",
        in_setup("uses_a_missing_gpu"),
        (AssertionError, RuntimeError),  # type: ignore[arg-type]
        "CUDA",
        'self.buffer = torch.zeros(3, device="cuda:7")',
    ),
    Mistake(
        "NCCL on parts",
        lambda _: TorchTrainer(Careless, num_workers=2, num_gpus_per_worker=0.5, backend="nccl"),
        ValueError,
        'pass `backend="gloo"`',
    ),
    Mistake("a backend", lambda _: local(backend="mpi"), ValueError, '"auto", "gloo", "nccl" and "horovod"'),
    Mistake("no workers", lambda _: TorchTrainer(Careless, num_workers=0), ValueError, "need an integer from 1"),
    Mistake(
        "CPU as a resource", lambda _: TorchTrainer(Careless, resources_per_worker={"CPU": 2}), ValueError, "num_cpus_p"
    ),
    Mistake("GPUs in words", lambda _: local(use_gpu="yes"), ValueError, "need True or False"),
]
SESSIONS = [
    Mistake(
        "nothing to validate on",
        lambda _: local(mistaken.WithoutValidation).validate(),
        NoDataError,
        "validation_loader",
    ),
    Mistake(
        "a path as checkpoint",
        lambda _: FunctionTrainer(print, resume_from_checkpoint="runs/last"),  # type: ignore[arg-type]
        ValueError,
        "`Checkpoint.from_directory(...)`",
    ),
    Mistake("after the end", after_shutdown, TrainerShutdownError, "shut"),
    Mistake("a call in a call", lambda each: each.fit(1, callbacks=[TrainsInside()]), CallbackError, "fit"),
    Mistake(
        "nothing to resume", lambda each: each.fit(1, resume_from="auto"), ValueError, "`callbacks=[Checkpointing("
    ),
    Mistake("no such file", lambda each: each.load("/there/is/no/file"), FileNotFoundError, "/there/is/no/file"),
    Mistake("a folder as file", lambda each: each.save("/"), OSError, "add a file name"),
    Mistake(
        "a lock", lambda _: TorchTrainer(Careless, config={"mine": threading.Lock()}), TypeError, "`config['mine']`"
    ),
    Mistake("two parameters", lambda _: FunctionTrainer(mistaken.takes_two), ValueError, "train_loop_per_worker"),
    Mistake(
        "num_workers of functions",
        lambda _: FunctionTrainer(print, num_workers=2),  # type: ignore[call-arg]
        TypeError,
        "`scaling_config=ScalingConfig(num_workers=...)`",
    ),
    Mistake("workers in words", lambda _: ScalingConfig(num_workers="2"), ValueError, "num_workers"),  # type: ignore[arg-type]
]
CODE = [
    Mistake(
        "a method", in_batch("calls_a_missing_method"), AttributeError, "to_device", 'return batch.to_device("cpu")'
    ),
    Mistake("arithmetic", in_batch("divides_by_zero"), ZeroDivisionError, "division", "return len(batch) / 0"),
    Mistake(
        "a file",
        in_setup("opens_a_missing_file"),
        FileNotFoundError,
        "/there/is/no/labels.txt",
        'self.labels = Path("/there/is/no/labels.txt").read_text()',
    ),
    Mistake(
        "a dataset",
        in_setup("has_a_broken_dataset"),
        IndexError,
        "out of bounds",
        "return dataset(1)[7]",
    ),
]
TABLE = {
    f"{kind}: {each.name}": each
    for kind, mistakes in {
        "types": TYPES,
        "names": NAMES,
        "shapes": SHAPES,
        "devices and resources": DEVICES_AND_RESOURCES,
        "sessions": SESSIONS,
        "code": CODE,
    }.items()
    for each in mistakes
}


@pytest.fixture(scope="module")
def trainer() -> Iterator[TorchTrainer[Any]]:
    with local() as trainer:
        yield trainer


@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_is_said_with_the_line_to_write(name: str, trainer: TorchTrainer[Any]) -> None:
    check(TABLE[name], trainer)


def test_a_trainer_goes_on_after_all_of_them(trainer: TorchTrainer[Any]) -> None:
    assert trainer.train()["batch_count"] == 5
