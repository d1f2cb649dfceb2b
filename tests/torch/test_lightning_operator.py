"""Lightning modules on one worker in this process, without Ray.

Covers `raysgd.torch.lightning`: a
module calls them, never a user.
"""

from __future__ import annotations

import copy
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision

from raysgd.callbacks import Guard
from raysgd.core.engine.shared.types import World
from raysgd.journal.journal import Journal
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.lightning import optimizers_and_schedulers, run_in_forward_of
from raysgd.torch.lightning_operator import LightningOperator
from raysgd.torch.objects.precision import NativeAmp, Precision
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.training_operator import OperatorContext
from tests import bad_batches
from tests.torch.lab import Experiment, run_alone, validate_on_spare
from tests.torch.operators_for_tests import NUM_FEATURES, LinearOperator, dataset

MakeTrainer = Callable[..., TorchTrainer]
Module = Any  # what tests look up on a module is unknown to type checkers

NUM_BATCHES, BATCH_SIZE, LR = 5, 4, 0.05


class Line(lightning.pytorch.LightningModule):
    """A linear model on the data of `LinearOperator`, with the shortest steps that work."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(NUM_FEATURES, 1)
        self.seen: list[Any] = []

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.line(features)

    def loss(self, batch: Any) -> torch.Tensor:
        features, _, target = batch
        return torch.nn.functional.mse_loss(self(features), target)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(18), batch_size=BATCH_SIZE)

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(13, seed=1), batch_size=BATCH_SIZE)


@pytest.fixture
def train_local(make_local: MakeTrainer) -> Callable[..., tuple[TorchTrainer, Module]]:
    """Make a trainer of a module class, and give it with the live module."""

    def make(module_cls: type[Any] = Line, **options: Any) -> tuple[TorchTrainer, Module]:
        trainer = make_local(TrainingOperator.from_ptl(module_cls), **options)
        return trainer, trainer.get_model()

    return make


Train = Callable[..., tuple[TorchTrainer, Module]]


def make(module_cls: type[Any], precision: Precision | None = None) -> LightningOperator:
    """An operator by itself."""
    operator_cls: Any = TrainingOperator.from_ptl(module_cls)
    place = TorchSettings(operator_cls, {}), World(rank=0, size=1), torch.device("cpu")
    operator: LightningOperator = operator_cls({}, OperatorContext(*place, precision or Precision()))
    operator._raysgd.finish_setup()
    return operator


def weights(model: torch.nn.Module) -> list[float]:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


# ---------------------------------------------------------------------------------------- classes


def test_a_spare_measures_what_the_worker_whose_state_it_has_does() -> None:
    before, inline, beside = validate_on_spare(TrainingOperator.from_ptl(Line), {})
    assert beside == inline != before


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_modules_of_both_packages_are_trained(package: Any, make_local: MakeTrainer) -> None:
    module_cls: Any = type("Module", (package.LightningModule,), {**vars(Line), "__init__": _make_line(package)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        trainer = make_local(TrainingOperator.from_ptl(module_cls))
        first, second = trainer.train(), trainer.train()
    assert second["train_loss"] < first["train_loss"]
    assert set(trainer.validate()) == {"batch_count", "num_samples", "val_loss", "last_val_loss"}


def _make_line(package: Any) -> Callable[[Any], None]:
    def __init__(self: Any) -> None:
        package.LightningModule.__init__(self)
        self.line = torch.nn.Linear(NUM_FEATURES, 1)

    return __init__


@pytest.mark.parametrize("wrong", [torch.nn.Linear, Line(), None])
def test_anything_else_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(TypeError, match="need a subclass of `LightningModule`"):
        TrainingOperator.from_ptl(wrong)


def test_lightning_is_looked_for_only_when_it_is_needed() -> None:
    program = """
import sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
from raysgd.torch import TrainingOperator
try:
    TrainingOperator.from_ptl(object)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert re.search(r'pip install "lightning[!>]=', done.stdout)


class Named(Line):
    """Its constructor names what it takes."""

    def __init__(self, hidden: int, lr: float = 0.1, **others: Any) -> None:
        super().__init__()
        self.taken = (hidden, lr, others)


def test_a_constructor_gets_the_entries_of_the_config_that_it_names(
    make_local: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = {"hidden": 8, "lr": 0.5, "depth": 2}
    assert make_local(TrainingOperator.from_ptl(Named), config=config).get_model().taken == (8, 0.5, {})
    assert "`Named` gets hidden, lr from the config" in caplog.messages
    assert "`Named` has no parameter for 'depth' of the config" in caplog.messages


def test_a_constructor_without_its_argument_is_an_error_with_the_line_to_write(make_local: MakeTrainer) -> None:
    with pytest.raises(TypeError, match=r"`Named` needs `hidden`: .* `config=\{'hidden': ...\}`"):
        make_local(TrainingOperator.from_ptl(Named))


def test_a_data_module_is_refused_with_the_loaders_to_pass() -> None:
    with pytest.raises(TypeError, match=r"pass `train_dataloader=data\.train_dataloader\(\)"):
        TrainingOperator.from_ptl(Line, lightning.pytorch.LightningDataModule())


def test_the_config_goes_to_a_constructor_that_asks_for_it(make_local: MakeTrainer) -> None:
    class Configured(Line):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__()
            self.config = config

    assert make_local(TrainingOperator.from_ptl(Configured), config={"a": 1}).get_model().config == {"a": 1}


def test_a_subclass_of_the_operator_is_subclassed_further() -> None:
    class Own(LightningOperator):
        ddp_args: ClassVar[dict[str, Any]] = {}

    assert issubclass(Own.from_ptl(Line), Own)
    assert issubclass(LinearOperator.from_ptl(Line), LightningOperator)


# ---------------------------------------------------------------------------------------- equal to a plain operator


def test_the_model_is_handed_out_bare(train_local: Train) -> None:
    trainer, module = train_local()
    trainer.train()
    assert trainer.apply_all_operators(lambda operator: type(operator.get_model())) == [Line]
    copied = trainer.get_model(to_cpu=True)
    assert copied is not module
    assert copied._trainer is None
    assert weights(copied) == weights(module)
    assert {"log", "log_dict", "forward"} & vars(module).keys() == set()


def test_the_operator_shows_what_the_module_configured() -> None:
    class Scheduled(Line):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [StepLR(optimizer, 1)]

    operator = make(Scheduled)
    module = operator.get_model()
    assert operator.model is module
    assert operator.optimizers == [module.optimizers(use_pl_optimizer=False)]
    assert operator.schedulers == [module.lr_schedulers()]
    assert [entry["interval"] for entry in operator.scheduler_dicts] == ["epoch"]
    assert operator.scheduler_step_freq == "ptl"


# ---------------------------------------------------------------------------------------- hooks


def test_the_module_knows_where_it_is(train_local: Train) -> None:
    class Curious(Line):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append((self.current_epoch, self.global_step, self.global_rank, self.device.type))

    trainer, module = train_local(Curious)
    trainer.train()
    trainer.train(num_steps=2)
    assert module.seen[NUM_BATCHES - 1 :] == [(0, 5, 0, "cpu"), (1, 6, 0, "cpu"), (1, 7, 0, "cpu")]
    assert (module.trainer.world_size, module.trainer.is_global_zero, bool(module.logger)) == (1, True, False)
    assert module.trainer.callback_metrics["train_loss"] > 0
    with pytest.raises(AttributeError, match=r"no `lightning_module`.* current_epoch,"):
        _ = module.trainer.lightning_module
    with pytest.raises(AttributeError, match=r"no `estimated_stepping_batches`: .*config={'total_steps': 1000}"):
        _ = module.trainer.estimated_stepping_batches
    with pytest.raises(AttributeError, match=r"no `experiment`: .* `self.log\(name, value\)`"):
        module.logger.experiment.add_scalar("loss", 1.0)


def test_what_the_module_steered_out_of_training_mode_stays_so(train_local: Train) -> None:
    class Frozen(Line):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.BatchNorm1d(NUM_FEATURES).eval()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append((self.training, self.frozen.training))
            return super().training_step(batch, batch_idx)

    trainer, module = train_local(Frozen)
    trainer.train(num_steps=1)
    trainer.validate()
    trainer.train(num_steps=1)
    assert module.seen == [(True, False)] * 2


def test_a_module_may_unfreeze_layers_and_add_a_group_when_an_epoch_begins(train_local: Train) -> None:
    """As the methods of Lightning's `BaseFinetuning` do."""

    class Finetunes(Line):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(1, 1)
            self.finetuning = lightning.pytorch.callbacks.BaseFinetuning
            self.finetuning.freeze(self.line)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.head(self.line(features))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=LR)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.finetuning.unfreeze_and_add_param_group(self.line, self.trainer.optimizers[0])

    trainer, module = train_local(Finetunes)
    before = module.line.weight.clone()
    trainer.train()
    assert torch.equal(module.line.weight, before)
    trainer.train()
    assert not torch.equal(module.line.weight, before)


def test_minus_one_ends_the_epoch_and_the_next_one_begins_with_a_new_pass(train_local: Train) -> None:
    class Impatient(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch[1].tolist())
            return -1 if batch_idx == 2 else None

        def on_train_epoch_end(self) -> None:
            self.seen.append("end")

    trainer, module = train_local(Impatient)
    for epoch in (1, 2):
        result = trainer.train()
        assert (result["epoch"], result["batch_count"], result["num_samples"]) == (epoch, 2, 2 * BATCH_SIZE)
    numbers = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], "end"]
    assert module.seen == numbers * 2
    assert module.global_step == 4


def test_minus_one_at_the_very_first_batch_is_an_epoch_without_metrics(train_local: Train) -> None:
    class Unwilling(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            return -1

    trainer, module = train_local(Unwilling)
    before = weights(module)
    assert trainer.train() == {"batch_count": 0, "num_samples": 0, "epoch": 1}
    assert weights(module) == before


def test_fit_neither_validates_nor_calls_hooks_of_validation_without_a_loader(train_local: Train) -> None:
    class Unvalidated(Line):
        val_dataloader = lightning.pytorch.LightningModule.val_dataloader

        def on_validation_start(self) -> None:
            self.seen.append("validation")

    trainer, module = train_local(Unvalidated)
    history = trainer.fit(2)
    assert (history["epoch"], "val_loss" in history[-1], module.seen) == ([1, 2], False, [])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        index = 0
        while True:
            yield torch.full((NUM_FEATURES,), float(index)), index, torch.zeros(1)
            index += 1


def test_minus_one_is_how_an_epoch_over_endless_data_ends(train_local: Train) -> None:
    class Streaming(Line):
        def train_dataloader(self) -> Any:
            return DataLoader(Endless(), batch_size=2)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch[1].tolist())
            return -1 if batch_idx == 1 else None

    trainer, module = train_local(Streaming)
    trainer.train()
    trainer.train()
    assert module.seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_hooks_may_take_fewer_arguments_or_any(train_local: Train) -> None:
    class Lax(Line):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return self.loss(batch)

        def on_train_batch_start(self, *arguments: Any) -> None:
            self.seen.append(len(arguments))

        def on_train_batch_end(self, outputs: Any) -> None:  # type: ignore[override]
            self.seen.append(outputs.ndim)

    trainer, module = train_local(Lax)
    trainer.train(num_steps=1)
    assert module.seen == [2, 0]


# ---------------------------------------------------------------------------------------- hooks of Lightning 1


class Old(Line):
    """The hooks that Lightning 2 does not have any more, and the signatures of the others then."""

    def on_pretrain_routine_start(self) -> None:
        self.seen.append("on_pretrain_routine_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.seen.append(("on_train_batch_start", dataloader_idx))

    def training_step_end(self, output: Any) -> Any:
        return {"loss": output, "twice": 2 * output.detach(), "parts": [output, (output,)]}

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int) -> None:  # type: ignore[override]
        self.seen.append(("optimizer_zero_grad", optimizer_idx))
        optimizer.zero_grad()

    def training_epoch_end(self, outputs: list[Any]) -> Any:
        for output in outputs:
            first, (second,) = output["parts"]
            assert not any(value.requires_grad for value in (output["loss"], first, second))
        self.seen.append(("training_epoch_end", len(outputs)))
        return None

    def on_train_epoch_end(self, outputs: list[Any]) -> None:  # type: ignore[override]
        self.seen.append(("on_train_epoch_end", len(outputs)))

    def validation_step_end(self, output: Any) -> Any:
        return {"val_loss": output, "images": torch.zeros(2, 2)}

    def validation_epoch_end(self, outputs: list[Any]) -> Any:
        self.seen.append(("validation_epoch_end", len(outputs)))
        return {"worst": max(float(output["val_loss"]) for output in outputs)}


def test_hooks_of_lightning_1_are_honoured(train_local: Train) -> None:
    trainer, module = train_local(Old)
    result = trainer.train()
    assert module.seen == [
        "on_pretrain_routine_start",
        *[("on_train_batch_start", 0), ("optimizer_zero_grad", 0)] * NUM_BATCHES,
        ("training_epoch_end", NUM_BATCHES),
        ("on_train_epoch_end", NUM_BATCHES),
    ]
    assert result["twice"] == pytest.approx(2 * result["train_loss"])
    module.seen.clear()
    assert list(trainer.validate()) == ["num_samples", "worst"]
    assert module.seen == [("validation_epoch_end", 4)]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (torch.tensor(0.5), {"num_samples": 18, "train_loss": 0.5, "epoch": 1}),
        ({"a": 1, "b": torch.tensor(2.0)}, {"num_samples": 18, "a": 1, "b": 2.0, "epoch": 1}),
    ],
)
def test_what_training_epoch_end_returns_is_the_result(returned: Any, expected: Any, train_local: Train) -> None:
    class Own(Line):
        def training_epoch_end(self, outputs: list[Any]) -> Any:
            return returned

    assert train_local(Own)[0].train() == expected


def test_apex_is_configured_by_the_module_or_with_o2() -> None:
    calls = []
    amp = SimpleNamespace(
        initialize=lambda models, optimizers, **options: calls.append(options) or (models, optimizers)
    )

    class Apex(Line):
        def configure_apex(self, amp: Any, model: Any, optimizers: list[Any], amp_level: str) -> Any:
            calls.append(amp_level)
            return model, optimizers

    for module_cls in (Line, Apex):
        operator: Any = make(module_cls)
        module = operator.get_model()
        assert operator._configure_apex_amp(amp, [module], [], {}) == ([module], [])
    assert calls == [{"opt_level": "O2"}, "O2"]


# ---------------------------------------------------------------------------------------- optimizers


PARAMETERS = [torch.nn.Parameter(torch.zeros(1))]
OPTIMIZER, OTHER = torch.optim.SGD(PARAMETERS, lr=0.1), torch.optim.Adam(PARAMETERS)
STEP, PLATEAU = StepLR(OPTIMIZER, 1), ReduceLROnPlateau(OPTIMIZER)


@pytest.mark.parametrize(
    ("returned", "optimizers", "schedulers"),
    [
        (None, [], []),
        (OPTIMIZER, [OPTIMIZER], []),
        ([OPTIMIZER, OTHER], [OPTIMIZER, OTHER], []),
        ((OPTIMIZER, OTHER), [OPTIMIZER, OTHER], []),
        (([OPTIMIZER], [STEP]), [OPTIMIZER], [(STEP, "epoch", 1, None, False)]),
        (([OPTIMIZER], []), [OPTIMIZER], []),
        (([OPTIMIZER], STEP), [OPTIMIZER], [(STEP, "epoch", 1, None, False)]),
        (
            ([OPTIMIZER, OTHER], [{"scheduler": STEP, "interval": "step", "frequency": 3}, PLATEAU]),
            [OPTIMIZER, OTHER],
            [(STEP, "step", 3, None, False), (PLATEAU, "epoch", 1, None, True)],
        ),
        ({"optimizer": OPTIMIZER}, [OPTIMIZER], []),
        ({"optimizer": OPTIMIZER, "lr_scheduler": None}, [OPTIMIZER], []),
        ({"optimizer": OPTIMIZER, "lr_scheduler": STEP}, [OPTIMIZER], [(STEP, "epoch", 1, None, False)]),
        (
            {"optimizer": OPTIMIZER, "lr_scheduler": PLATEAU, "monitor": "a"},
            [OPTIMIZER],
            [(PLATEAU, "epoch", 1, "a", True)],
        ),
        (
            {"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": PLATEAU, "monitor": "b"}, "monitor": "a"},
            [OPTIMIZER],
            [(PLATEAU, "epoch", 1, "b", True)],
        ),
        (
            [{"optimizer": OPTIMIZER, "lr_scheduler": STEP, "frequency": 2}, {"optimizer": OTHER}],
            [OPTIMIZER, OTHER],
            [(STEP, "epoch", 1, None, False)],
        ),
        (({"optimizer": OPTIMIZER}, {"optimizer": OTHER}), [OPTIMIZER, OTHER], []),
    ],
)
def test_every_form_of_configure_optimizers_is_read(returned: Any, optimizers: Any, schedulers: Any) -> None:
    found, entries = optimizers_and_schedulers(returned)
    keys = ("scheduler", "interval", "frequency", "monitor", "reduce_on_plateau")
    assert found == optimizers
    assert [tuple(entry[key] for key in keys) for entry in entries] == schedulers


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (3, TypeError, "returned `3`: allowed are"),
        ([OPTIMIZER, STEP, None], TypeError, "allowed are"),
        ({"lr_scheduler": STEP}, TypeError, "allowed are"),
        (([OPTIMIZER], [{"interval": "step"}]), ValueError, 'need a scheduler under "scheduler"'),
        (([OPTIMIZER], [{"scheduler": STEP, "interval": "day"}]), ValueError, "\"interval\": 'day'"),
        (([OPTIMIZER], [{"scheduler": STEP, "frequency": 0}]), ValueError, '"frequency": 0'),
    ],
)
def test_other_forms_are_refused(returned: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        optimizers_and_schedulers(returned)


def test_a_module_may_do_without_an_optimizer(train_local: Train) -> None:
    class Idle(Line):
        def configure_optimizers(self) -> None:
            return None

    trainer, module = train_local(Idle)
    before = weights(module)
    assert trainer.train()["batch_count"] == NUM_BATCHES
    assert weights(module) == before


def test_a_module_is_told_of_hooks_that_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    class Hopeful(Line):
        def on_train_end(self) -> None: ...

        def configure_callbacks(self) -> Any: ...

        def test_step(self, batch: Any) -> None: ...

    make(Hopeful)
    said = [record.message for record in caplog.records if "is never called" in record.message]
    assert [message.split("`")[1] for message in said] == ["Hopeful.on_train_end", "Hopeful.configure_callbacks"]
    caplog.clear()
    make(Line)
    assert "is never called" not in caplog.text


class OwnBackward(Line):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


@pytest.mark.parametrize("module_cls", [Line, OwnBackward])
def test_gradients_are_at_their_true_size_when_the_module_looks_at_them(module_cls: type[Line]) -> None:
    class Looking(module_cls):  # type: ignore[valid-type, misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(self.line.weight.grad.reshape(-1).tolist())

    precision = NativeAmp(torch.float16, torch.device("cpu"))
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plain, mixed = make(Looking), make(Looking, precision=precision)
    for operator in (plain, mixed):
        operator.train_epoch(operator.get_model().train_dataloader())
    assert len(mixed.get_model().seen) == NUM_BATCHES
    for expected, found in zip(plain.get_model().seen, mixed.get_model().seen, strict=True):
        assert found == pytest.approx(expected, abs=0.02)
    assert weights(mixed.get_model()) == pytest.approx(weights(plain.get_model()), abs=0.01)


def test_several_batches_make_a_step(train_local: Train) -> None:
    class Noting(Line):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(("step", self.trainer.accumulate_grad_batches))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.seen.append("clear")

    class Large(Line):
        def train_dataloader(self) -> Any:
            loader = super().train_dataloader()
            return DataLoader(loader.dataset, batch_size=2 * loader.batch_size)

    trainer, module = train_local(Noting, accumulate_grad_batches=2)
    large_trainer, large = train_local(Large)
    trainer.train()
    large_trainer.train()
    assert NUM_BATCHES == 5
    assert module.seen == ["clear", ("step", 2)] * 3
    assert weights(module) == pytest.approx(weights(large), abs=1e-6)


def test_a_batch_that_the_module_leaves_out_ends_a_step_of_others(train_local: Train) -> None:
    class LeavesOut(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (1, 2, 3) else super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append("step")

    trainer, module = train_local(LeavesOut, accumulate_grad_batches=2)
    trainer.train()
    assert module.seen == ["step", "step"], "on batch 1, with that of 0, and on the last one"


def test_a_worker_that_others_may_join_has_to_return_a_loss_for_each_batch(process_group: None) -> None:
    class LeavesOut(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    run_alone(Experiment(TrainingOperator.from_ptl(LeavesOut)))
    with pytest.raises(ValueError, match=r"`training_step` returned None.*Return `0 \* loss`"):
        run_alone(Experiment(TrainingOperator.from_ptl(LeavesOut), options={"may_grow": True}))


# ---------------------------------------------------------------------------------------- manual optimization


def test_manual_backward_with_options_reaches_the_loss(train_local: Train) -> None:
    class Twice(Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.optimizers().zero_grad()
            self.manual_backward(loss, retain_graph=True)
            once = self.line.weight.grad.clone()
            self.manual_backward(loss)
            self.seen.append(torch.equal(self.line.weight.grad, 2 * once))

    trainer, module = train_local(Twice)
    trainer.train()
    assert module.seen == [True] * NUM_BATCHES


def test_a_closure_of_a_module_that_optimizes_by_itself_is_called_in_the_step(train_local: Train) -> None:
    class Closed(Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> None:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))

            optimizer.step(closure)

    plain, expected = train_local()
    closed, module = train_local(Closed)
    plain.train()
    closed.train()
    assert weights(module) == weights(expected)


class Wrapper(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Any:
        return 2 * self.inner(*inputs)


@pytest.mark.parametrize("has_own", [False, True])
def test_a_step_runs_inside_the_wrapper_and_finds_the_real_forward_there(has_own: bool) -> None:
    module: Module = Line()
    if has_own:
        module.forward = lambda features: module.line(features) + 1
    before, features = dict(vars(module)), torch.ones(1, NUM_FEATURES)
    expected = module(features)
    assert torch.equal(run_in_forward_of(Wrapper(module), module, lambda: module(features)), 2 * expected)
    assert vars(module) == before

    def fail() -> None:
        raise OSError("in the step")

    with pytest.raises(OSError, match="in the step"):
        run_in_forward_of(Wrapper(module), module, fail)
    assert vars(module) == before


def test_a_step_that_is_left_out_inside_a_wrapper_has_a_loss_without_effect() -> None:
    module = Line()
    loss: Any = run_in_forward_of(Wrapper(module), module, lambda: None)
    loss.backward()
    assert [each.grad.abs().sum().item() for each in module.parameters()] == [0.0, 0.0]


# ---------------------------------------------------------------------------------------- refusals


def of_line(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda module: make(module.line)


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        (
            {"configure_optimizers": lightning.pytorch.LightningModule.configure_optimizers},
            MisconfigurationException,
            "`Wrong` does not define `configure_optimizers`",
        ),
        (
            {
                "configure_optimizers": of_line(
                    lambda line: [torch.optim.SGD([each], lr=LR) for each in (line.weight, line.bias)]
                )
            },
            ValueError,
            "`Wrong.configure_optimizers` returned .*automatic_optimization = F",
        ),
        (
            {"configure_optimizers": of_line(lambda line: torch.optim.LBFGS(line.parameters()))},
            ValueError,
            "`Wrong.configure_optimizers` returned .*`LBFGS`, which computes gradients several times",
        ),
        (
            {"val_dataloader": lambda _: [DataLoader(dataset(4))] * 2},
            ValueError,
            "`val_dataloader` gave 2 loaders",
        ),
        ({"training_epoch_end": lambda module, outputs: 3}, TypeError, "`training_epoch_end` returned a `int`"),
        *[
            ({"training_step": lambda module, batch, batch_idx, output=output: output}, error, words)
            for output, error, words in (
                ({"a": 1}, RuntimeError, r"dict with \['a'\]: put the loss under \"loss\""),
                (3.0, TypeError, "returned a `float`"),
                ({"loss": 3.0}, TypeError, "returned a `float`"),
                ([torch.zeros(1)], TypeError, "returned a `list`"),
            )
        ],
    ],
)
def test_a_module_that_cannot_be_trained_is_told_what_to_write(
    method: dict[str, Any], error: type[Exception], words: str, train_local: Train
) -> None:
    with pytest.raises(error, match=words):
        train_local(type("Wrong", (Line,), method))[0].train()


# ---------------------------------------------------------------------------------------- schedulers


def scheduled(**entry: Any) -> type[Line]:
    """A module with a scheduler that tells when it was stepped, and with what."""

    class Scheduled(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append("step")
            return super().training_step(batch, batch_idx)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.seen.append(metric if metric is None else round(metric, 4))
            super().lr_scheduler_step(scheduler, metric)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            make_scheduler = entry.get("make", lambda optimizer: StepLR(optimizer, 1))
            options = {name: value for name, value in entry.items() if name != "make"}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make_scheduler(optimizer), **options}}

    return Scheduled


@pytest.mark.parametrize("interval", ["step", "batch"])
def test_both_words_for_a_scheduler_of_every_batch_are_known(interval: str, train_local: Train) -> None:
    trainer, module = train_local(scheduled(interval=interval))
    trainer.train(num_steps=3)
    assert module.seen == ["step", None] * 3


def test_a_scheduler_may_be_stepped_every_few_batches_across_calls(train_local: Train) -> None:
    trainer, module = train_local(scheduled(interval="step", frequency=2))
    trainer.train(num_steps=3)
    trainer.train(num_steps=1)
    assert module.seen == ["step", "step", None, "step", "step", None]


def test_a_scheduler_of_every_few_batches_counts_those_that_are_taken_in_parts_once(train_local: Train) -> None:
    options = {"split_batches": True, "micro_batch_size": 2}
    trainer, module = train_local(scheduled(interval="step", frequency=2), **options)
    trainer.train()
    trainer.train()
    assert module.seen.count("step") == 18
    assert module.seen.count(None) == 2 * (NUM_BATCHES // 2)
    assert trainer.apply_all_operators(lambda operator: operator.global_step) == [2 * NUM_BATCHES]


def test_every_few_epochs_is_not_every_few_calls(train_local: Train) -> None:
    trainer, module = train_local(scheduled(frequency=2))
    with pytest.raises(
        ValueError, match=r'`train\(num_steps=3\)` counts as an epoch of the module.*`"interval": "step"`'
    ):
        trainer.train(num_steps=3)
    assert not module.seen


def test_a_plateau_may_be_looked_for_in_every_batch(train_local: Train) -> None:
    trainer, module = train_local(scheduled(make=ReduceLROnPlateau, monitor="train_loss", interval="step"))
    result = trainer.train(num_steps=1)
    assert module.seen == ["step", round(result["train_loss"], 4)]


def test_a_scheduler_whose_metric_is_elsewhere_waits(train_local: Train, caplog: pytest.LogCaptureFixture) -> None:
    trainer, module = train_local(scheduled(make=ReduceLROnPlateau, monitor="val_loss"))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert module.seen == ["step"] * NUM_BATCHES
    assert "no metric `val_loss` was reported" in caplog.text
    trainer.update_scheduler(3.0)
    assert module.lr_schedulers().best == 3.0


# ---------------------------------------------------------------------------------------- outputs of steps


def test_numbers_in_the_output_of_a_step_are_metrics(train_local: Train) -> None:
    class Rich(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return {"loss": loss, "twice": 2 * loss, "index": batch_idx, "features": batch[0], "note": "hello"}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"size": len(batch[0])}

    trainer, _ = train_local(Rich)
    result = trainer.train()
    assert result["loss"] == result["train_loss"] == pytest.approx(result["twice"] / 2)
    assert result["index"] == pytest.approx((0 + 4 * (1 + 2 + 3) + 2 * 4) / 18), "weighted by samples"
    assert result["last_index"] == 4
    assert not {"features", "note"} & set(result)
    assert trainer.validate()["size"] == pytest.approx((3 * 4 * 4 + 1) / 13)


def test_a_step_that_returns_nothing_is_left_out(train_local: Train) -> None:
    class Picky(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) if batch_idx == 1 else None

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(self.global_step)

    trainer, module = train_local(Picky)
    result = trainer.train()
    assert module.seen == [1]
    assert result["train_loss"] == result["last_train_loss"]
    assert result["batch_count"] == NUM_BATCHES
    assert trainer.validate() == {"batch_count": 4, "num_samples": 13}


# ---------------------------------------------------------------------------------------- logging


def test_a_way_that_is_not_known_is_refused_and_leaves_the_module_as_it_was(train_local: Train) -> None:
    class Logging(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("a", 1, reduce_fx=torch.median)

    trainer, module = train_local(Logging)
    with pytest.raises(ValueError, match=r"`self.log\('a', reduce_fx=.*allowed are \"mean\""):
        trainer.train()
    assert "log" not in vars(module)
    assert module.trainer.training is False


def test_collections_of_metric_objects_are_computed_over_everything_and_reset(train_local: Train) -> None:
    class Measured(Line):
        def __init__(self) -> None:
            super().__init__()
            self.collection = MetricCollection([BinaryAccuracy(), BinaryPrecision()], prefix="val_")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.collection.update(torch.ones(len(batch[1])), (batch[1] % 2).int())
            self.log_dict(self.collection)

    trainer, _ = train_local(Measured)
    for _ in range(2):
        result = trainer.validate()
        expected = pytest.approx(6 / 13)
        assert (result["val_BinaryAccuracy"], result["val_BinaryPrecision"]) == (expected, expected)


def test_a_module_that_copies_itself_while_it_trains_does_not_copy_its_surroundings(train_local: Train) -> None:
    class Averaged(Line):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = [copy.deepcopy(self)]

    trainer, module = train_local(Averaged)
    trainer.train()
    assert module.seen[0]._trainer is None
    assert weights(module.seen[0]) == weights(module)


# ---------------------------------------------------------------------------------------- data


def test_given_loaders_win_even_without_a_length(make_local: MakeTrainer) -> None:
    train, validation = DataLoader(Endless(), batch_size=2), [next(iter(DataLoader(dataset(6), batch_size=6)))]
    trainer = make_local(TrainingOperator.from_ptl(Line, train_dataloader=train, val_dataloader=validation))
    assert trainer.train(num_steps=3)["num_samples"] == 6
    assert trainer.validate()["num_samples"] == 6


@pytest.mark.parametrize("wrap", [lambda loader: [loader], lambda loader: {"a": loader}])
def test_a_loader_may_be_alone_in_a_container(wrap: Callable[[Any], Any], train_local: Train) -> None:
    class Wrapped(Line):
        def val_dataloader(self) -> Any:
            return wrap(super().val_dataloader())

    assert train_local(Wrapped)[0].validate()["num_samples"] == 13


def test_data_is_prepared_once_for_each_node_or_once_at_all() -> None:
    class Preparing(Line):
        def prepare_data(self) -> None:
            self.seen.append("prepared")

    class Once(Preparing):
        def __init__(self) -> None:
            super().__init__()
            self.prepare_data_per_node = False

    def is_prepared(module_cls: type[Line], rank: int, local_rank: int) -> bool:
        operator = make(module_cls)
        operator._raysgd.take_rank(operator, replace(operator._raysgd.world, rank=rank, local_rank=local_rank))
        operator.get_model().seen.clear()
        operator._prepare_data()
        return operator.get_model().seen == ["prepared"]

    places = [(0, 0), (1, 1), (2, 0)]
    assert [is_prepared(Preparing, *place) for place in places] == [True, False, True]
    assert [is_prepared(Once, *place) for place in places] == [True, False, False]


# ---------------------------------------------------------------------------------------- checkpoints


def test_what_the_module_saves_comes_back(train_local: Train, tmp_path: Path) -> None:
    class Saving(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"a": 1}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen.append(checkpoint)

    trainer, module = train_local(Saving)
    trainer.train(num_steps=2)
    trainer.save(tmp_path / "checkpoint")
    expected = weights(module)
    other, module = train_local(Saving)
    other.load(tmp_path / "checkpoint")
    assert module.seen == [{"mine": {"a": 1}}]
    assert weights(module) == expected
    assert trainer.train() == other.train()
    assert module.global_step == NUM_BATCHES


def test_steps_that_are_no_batches_are_counted_on_in_another_trainer(train_local: Train, tmp_path: Path) -> None:
    class TwoSteps(Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(2):
                self.optimizers().zero_grad()
                self.manual_backward(self.loss(batch))
                self.optimizers().step()

    trainer, module = train_local(TwoSteps)
    trainer.train(num_steps=3)
    assert module.global_step == 6
    trainer.save(tmp_path / "checkpoint")
    other, restored = train_local(TwoSteps)
    other.load(tmp_path / "checkpoint")
    other.train()
    assert restored.global_step == 2 * NUM_BATCHES
    afresh, module = train_local(TwoSteps)
    afresh.load_state_dict(trainer.state_dict())  # which has no position to resume at
    afresh.train()
    assert module.global_step == 2 * NUM_BATCHES


@pytest.mark.parametrize(
    "state", [5, {"raysgd_progress": [1]}, {"raysgd_progress": [0, "x", 0, 0]}, {"raysgd_progress": [1, 0, 0, 10**400]}]
)
def test_damaged_counts_are_refused_before_anything_is_loaded(train_local: Train, state: Any) -> None:
    trainer, module = train_local()
    damaged = {**trainer.state_dict(), "operator": state}
    trainer.train()
    before = [each.clone() for each in module.state_dict().values()]
    with pytest.raises(ValueError, match="does not match, so nothing was loaded"):
        trainer.load_state_dict(damaged)
    assert all(map(torch.equal, before, module.state_dict().values()))


def test_a_scheduler_of_every_few_batches_goes_on_in_another_trainer(train_local: Train, tmp_path: Path) -> None:
    trainer, _ = train_local(scheduled(interval="step", frequency=3))
    trainer.train()
    trainer.train(num_steps=2)
    trainer.save(tmp_path / "checkpoint")
    other, module = train_local(scheduled(interval="step", frequency=3))
    other.load(tmp_path / "checkpoint")
    other.train(num_steps=1)
    assert module.seen == ["step", None], "the third batch of the second epoch"


def test_a_module_that_saves_nothing_has_an_empty_state(train_local: Train) -> None:
    trainer, _ = train_local()
    assert trainer.state_dict()["operator"] == {}


def test_the_phases_of_a_step_are_timed(train_local: Train) -> None:
    trainer, _ = train_local()
    assert {"mean_fwd_s", "mean_grad_s", "mean_apply_s"} <= set(trainer.train(profile=True)["profile"])
    assert "mean_eval_fwd_s" in trainer.validate(profile=True)["profile"]


class Guarded(lightning.pytorch.LightningModule):
    """Has bad samples in the batches 4 and 7."""

    faults: ClassVar = {3 * bad_batches.SIZE: bad_batches.NAN, 6 * bad_batches.SIZE: bad_batches.INFINITE}
    is_manual = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.is_manual
        self.model = bad_batches.network()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = bad_batches.loss_of(self.model, *batch)
        if self.is_manual:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            self.lr_schedulers().step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}]

    def train_dataloader(self) -> Any:
        return DataLoader(bad_batches.samples(9, self.faults), batch_size=bad_batches.SIZE)


class GuardedByHand(Guarded):
    """Has manual optimization."""

    is_manual = True


@pytest.mark.parametrize("precision", [None, "fp16"])
@pytest.mark.parametrize("module", [Guarded, GuardedByHand])
def test_a_guard_leaves_bad_steps_of_a_module_out(
    make_local: MakeTrainer, tmp_path: Path, module: Any, precision: str | None
) -> None:
    trainer = make_local(TrainingOperator.from_ptl(module), precision=precision)
    trainer.fit(1, callbacks=[Guard()], folder=tmp_path)
    assert [each.step for each in Journal(tmp_path).left_out] == [4, 7]
    if (
        module is Guarded and precision is None
    ):  # a module that steps its scheduler itself does so after a step that was left out, too
        expected, _ = bad_batches.expected(bad_batches.Case(bad_batches.Stock, 1, 1, 9, Guarded.faults), [])
        assert all(map(torch.equal, trainer.state_dict()["models"][0].values(), expected))
