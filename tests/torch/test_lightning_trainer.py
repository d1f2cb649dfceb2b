"""The same modules in Lightning's own `Trainer` and in a `LightningOperator`, in one process: equal to 1e-6.

Covers `raysgd.torch.lightning`: what is supported is what these tests hold to Lightning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.hooks import DataHooks, ModelHooks
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError

from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.lightning import NEVER_CALLED

NUM_EPOCHS = 3
X = torch.randn(18, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(dim=1, keepdim=True) ** 2)


class Plain(LightningModule):
    """A small network; every other module here changes one thing about it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.other = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=5)


class DictOutput(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "size": len(batch[0])}


class LeavesOut(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else self.loss(batch)


class EndsEarly(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers.insert(1, torch.nn.BatchNorm1d(8))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((each for each in self.parameters() if each.requires_grad), lr=0.05)


def scheduled(make: Callable[[Any], Any], **entry: Any) -> type[Plain]:
    class Scheduled(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **entry}}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train_loss", loss := self.loss(batch), on_step=entry.get("interval") == "step", on_epoch=True)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(round(optimizer.param_groups[0]["lr"], 8))

    return Scheduled


def halving(optimizer: Any) -> Any:
    return StepLR(optimizer, 1, gamma=0.5)


def warming_up(optimizer: Any) -> Any:
    return LinearLR(optimizer, start_factor=0.1, total_iters=8)


def impatient(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)


class Manual(Plain):
    """Two optimizers, a step of each in every batch, and a scheduler that the module steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            first.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward((self.other(self(batch[0]).detach()) - batch[1]).abs().mean())
            second.step()
        self.seen.append(self.global_step)

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        first, second = (torch.optim.SGD(part.parameters(), lr=0.02) for part in (self.layers, self.other))
        return [first, second], [StepLR(first, 1)]


class OwnSteps(Plain):
    """Every hook around a step that may change it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + batch_idx) / (1 + epoch)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.layers[0].weight.grad.mul_(2)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")


class EvenBatches(Plain):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*DATA[:16]), batch_size=4)


class LeavesOutOfSteps(EvenBatches):
    """The last batch of a step, the first one of another, and in one epoch a whole step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_left_out = batch_idx < 2 if self.current_epoch == 1 else batch_idx in (1, 2)
        return None if is_left_out else self.loss(batch)


MODULES: dict[str, tuple[type[Plain], dict[str, Any], dict[str, Any]]] = {
    "plain": (Plain, {}, {}),
    "a dict": (DictOutput, {}, {}),
    "batches left out": (LeavesOut, {}, {}),
    "epochs that end early": (EndsEarly, {}, {}),
    "frozen parts and batch norm": (Frozen, {}, {}),
    "scheduled by step": (scheduled(warming_up, interval="step"), {}, {}),
    "scheduled every other step": (scheduled(halving, interval="step", frequency=2), {}, {}),
    "scheduled by epoch": (scheduled(halving), {}, {}),
    "scheduled every other epoch": (scheduled(halving, frequency=2), {}, {}),
    "on a plateau": (scheduled(impatient, monitor="train_loss"), {}, {}),
    "on a plateau of steps in parts": (
        scheduled(impatient, monitor="train_loss", interval="step"),
        {},
        {"micro_batch_size": 2, "split_batches": True},
    ),
    "clipped norm": (Plain, {"gradient_clip_val": 0.1}, {"clip_grad_norm": 0.1}),
    "clipped values": (
        Plain,
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"clip_grad_value": 0.01},
    ),
    "accumulated": (
        EvenBatches,
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 2},
    ),
    "accumulated without some": (
        LeavesOutOfSteps,
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 2},
    ),
    "manual": (Manual, {}, {}),
    "steps of its own": (OwnSteps, {}, {}),
    "bf16": (Plain, {"precision": "bf16-mixed"}, {"precision": "bf16"}),
}


def weights(module: Any) -> torch.Tensor:
    return torch.cat([each.detach().double().flatten() for each in module.state_dict().values()])


def by_lightning(module_cls: type[Plain], num_epochs: int = NUM_EPOCHS, **options: Any) -> Any:
    module = module_cls()
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_epochs=num_epochs, accelerator="cpu", num_sanity_val_steps=0, enable_model_summary=False,
            **silent, **options,
        )  # fmt: skip
        trainer.fit(module)
    return module


def by_operator(module_cls: type[Plain], num_epochs: int = NUM_EPOCHS, **options: Any) -> tuple[Any, list[Any]]:
    """The module, and what training and validation of each epoch reported."""
    operator_cls = TrainingOperator.from_ptl(module_cls)
    with TorchTrainer(training_operator_cls=operator_cls, use_local=True, **options) as trainer:
        rows = [{**trainer.train(), **trainer.validate()} for _ in range(num_epochs)]
        return trainer.get_model(), rows


@pytest.fixture(autouse=True)
def leaves_no_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", MODULES)
def test_weights_are_those_of_lightnings_own_trainer(name: str) -> None:
    module_cls, their_options, our_options = MODULES[name]
    theirs = by_lightning(module_cls, **their_options)
    ours, _ = by_operator(module_cls, **our_options)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-6)
    assert ours.seen == theirs.seen, "learning rates, or what else the module noted"
    assert not torch.allclose(weights(ours), weights(module_cls()), atol=1e-3), "it was trained"


def test_a_plateau_of_the_validation_in_fit_is_that_of_lightnings_own_trainer() -> None:
    for entry in ({"monitor": "val_loss"}, {"monitor": "val_loss", "frequency": 2}):
        module_cls = scheduled(impatient, **entry)
        theirs = by_lightning(module_cls, 5)
        with TorchTrainer(training_operator_cls=TrainingOperator.from_ptl(module_cls), use_local=True) as trainer:
            trainer.fit(5)
            ours = trainer.get_model()
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-6)
        assert ours.seen == theirs.seen, "learning rates"
        assert min(ours.seen) < max(ours.seen)


class Predicts(Plain):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"twice": 2 * self(batch[0]), "batch": torch.full((len(batch[0]),), batch_idx)}


@pytest.mark.parametrize("module_cls", [Plain, Predicts])
def test_predictions_are_those_of_lightnings_own_trainer(module_cls: type[Plain]) -> None:
    theirs = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    rows = DataLoader(X if module_cls is Plain else DATA, batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs.predict(module_cls(), rows)
    operator_cls = TrainingOperator.from_ptl(module_cls)
    with TorchTrainer(training_operator_cls=operator_cls, use_local=True) as trainer:
        found = trainer.predict(rows)
    if module_cls is Plain:
        torch.testing.assert_close(torch.as_tensor(found), torch.cat(expected), rtol=0, atol=1e-6)
    else:
        for name in ("twice", "batch"):
            torch.testing.assert_close(torch.as_tensor(found[name]), torch.cat([each[name] for each in expected]))


class Logging(Plain):
    """Logs in all the ways; and keeps what Lightning would show at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.val_error = MeanAbsoluteError(), MeanAbsoluteError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.loss(batch)
        self.error.update(self(x), y)
        self.log("in_steps", loss)
        self.log("in_both", 2 * loss, on_step=True, on_epoch=True)
        self.log_dict({"index": float(batch_idx), "first": x[0, 0]}, on_step=False, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("least", loss, on_step=False, on_epoch=True, reduce_fx=torch.min)
        self.log("total", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=len(x))
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("at_the_end", 3.0 + self.current_epoch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.val_error.update(self(batch[0]), batch[1])
        self.log("val_error", self.val_error)
        self.log("val_index", float(batch_idx))

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", 5.0)


class Showing(Logging):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.keep()

    def on_train_end(self) -> None:
        self.keep()

    def keep(self) -> None:
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def test_what_a_module_logs_is_what_lightning_shows() -> None:
    theirs = by_lightning(Showing).seen
    _, ours = by_operator(Logging)
    for shown, reported in zip(theirs, ours, strict=True):
        expected = {name: value for name, value in shown.items() if name not in ("in_steps", "in_both")}
        expected["last_in_steps"] = expected.pop("in_steps", shown["in_steps"])
        expected["last_in_both"], expected["in_both"] = expected.pop("in_both_step"), expected.pop("in_both_epoch")
        assert {name: reported[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        assert len(expected) >= 14


CALLED = (
    *("prepare_data", "setup", "configure_model", "configure_optimizers", "on_fit_start"),
    *("train_dataloader", "val_dataloader", "on_train_start", "on_train_epoch_start"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start"),
    *("optimizer_step", "training_step", "on_before_zero_grad", "optimizer_zero_grad"),
    *("on_before_backward", "backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "lr_scheduler_step"),
    *("on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_start"),
    *("on_validation_epoch_start", "on_validation_batch_start", "validation_step", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
    *("on_save_checkpoint", "on_load_checkpoint"),
)
"""Hooks and methods that are called as Lightning's own `Trainer` calls them in `fit`, in this order."""

OTHER_STAGES = ("test_", "predict_", "on_test_", "on_predict_")
"""How hooks begin that belong to other stages than training and validation: only `predict_step` is ever called."""

HOOKS = [each for each in CALLED if "checkpoint" not in each]


def test_each_hook_of_lightning_is_called_or_known_not_to_be() -> None:
    hooks = {name for base in (ModelHooks, DataHooks) for name in vars(base) if not name.startswith("_")}
    hooks = {name for name in hooks if not name.startswith(OTHER_STAGES)}
    assert hooks - set(CALLED) - set(NEVER_CALLED) == set()
    assert set(CALLED) & set(NEVER_CALLED) == set()
    assert [name for name in [*CALLED, *NEVER_CALLED] if not hasattr(LightningModule, name)] == []


def noting(base: type[Plain]) -> type[Plain]:
    """A module that writes down all hooks that are called."""

    def note(name: str) -> Any:
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            if name != "transfer_batch_to_device":  # Lightning leaves it out on a CPU
                is_validating = self._trainer and self._trainer.validating and name != "val_dataloader"
                self.seen.append(f"{name} {VALIDATING if is_validating else ''}")
            return getattr(base, name)(self, *arguments, **options)

        return method

    return type("Noting", (base,), {name: note(name) for name in HOOKS})


@pytest.mark.parametrize("base", [Plain, MODULES["scheduled by step"][0], MODULES["accumulated"][0], Manual])
def test_hooks_are_called_in_the_order_of_lightning(base: type[Plain]) -> None:
    module_cls = noting(base)
    window = 2 if base is EvenBatches else 1
    theirs = by_lightning(module_cls, 2, accumulate_grad_batches=window).seen
    ours = by_operator(module_cls, 2, accumulate_grad_batches=window)[0].seen
    for is_validation in (False, True):  # ours comes when the program says so, theirs before the epoch has ended
        expected, found = ([each for each in seen if is_of(each, is_validation)] for seen in (theirs, ours))
        assert found == expected
        assert len(expected) > 20
    called = {each.split()[0] for each in ours if isinstance(each, str)}
    if base is not Manual:  # what is missing is not there or noted: schedulers, and steps on a CPU
        assert set(HOOKS) - called <= {"lr_scheduler_step", "transfer_batch_to_device"}


VALIDATING = "in validation"


def is_of(noted: Any, is_validation: bool) -> bool:
    return isinstance(noted, str) and (VALIDATING in noted) == is_validation
