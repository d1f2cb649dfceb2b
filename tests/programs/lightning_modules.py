"""Programs with a `LightningModule`, which Lightning's own `Trainer` runs in one process.

- `optimization`: `automatic`, `manual`, or `pair`: manual with two optimizers.
- `scheduler`, `interval`, `frequency`: what `configure_optimizers` returns beside the optimizer. Manual modules step it
  by hand.
- `none`: what `training_step` returns None for: no batch, or some. With several workers, it returns a loss.
- `log`: how the loss is logged, and what beside it.
- `loss`: whether a step returns the loss or a dict.
- `hook`: which hook the module overrides.
- `size`: whether `self.log` gets `batch_size`.

With accumulation both weight the batches alike only where these are whole, so they are.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torchmetrics
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TrainingOperator
from tests.programs.grammar import Choices, Value, Words
from tests.programs.outcomes import Outcome, Row
from tests.programs.parts import OPTIMIZERS, RATE, Kind, chunks, is_killed, network, table, train_and_validate

NUM_EPOCHS = 3
MOST_ROWS = 31
INPUTS = table(1, MOST_ROWS, 3)
TARGETS = INPUTS.sum(1, keepdim=True) + table(2, MOST_ROWS, 1) / 3
BOUND = 0.5
WITHOUT_ROWS = (1, 3)
"""Numbers of the batches that are left out."""

SCHEDULERS: dict[str, Any] = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 2 * RATE, 60, cycle_momentum=False),
    "warm": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
}


def data(words: Words) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders for training and validation. Where a step returns None, the targets are NaN."""
    num_rows, size = int(words["rows"]), int(words["batch"])
    targets = TARGETS[:num_rows].clone()
    batches = chunks(range(num_rows), size)
    if words["none"] == "batch":
        for number in WITHOUT_ROWS:
            targets[batches[number]] = torch.nan
    validated = TensorDataset(INPUTS[:num_rows], TARGETS[:num_rows])
    return DataLoader(TensorDataset(INPUTS[:num_rows], targets), size), DataLoader(validated, 7)


class Module(pl.LightningModule):
    """The program. Config: `words`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        words = self.words = config["words"]
        self.automatic_optimization = words["optimization"] == "automatic"
        self.first, self.second = network(1), network(1, 8)
        self.error = torchmetrics.MeanMetric().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words, (inputs, target) = self.words, batch
        is_there = ~torch.isnan(target[:, 0])
        if not bool(is_there.any()):
            return None
        inputs, target = inputs[is_there], target[is_there]
        if words["optimization"] == "pair":
            return self._pair(inputs, target)
        errors = (self.first(inputs) - target).pow(2)
        loss = errors.mean()
        self._log_all(loss, errors.detach(), len(inputs))
        if words["optimization"] == "manual":
            self._by_hand(self.optimizers(), loss)
            self._step_scheduler_by_hand()
        return {"loss": loss, "size": len(inputs)} if words["loss"] == "dict" else loss

    def _pair(self, inputs: torch.Tensor, target: torch.Tensor) -> None:
        for model, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            errors = (model(inputs) - target).pow(2)
            self._by_hand(optimizer, errors.mean())
            self.untoggle_optimizer(optimizer)
            if model is self.first:
                self._log_all(errors.mean().detach(), errors.detach(), len(inputs))

    def _by_hand(self, optimizer: Any, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.words["clip"] != "no":
            self.clip_gradients(optimizer, gradient_clip_val=BOUND, gradient_clip_algorithm=self.words["clip"])
        optimizer.step()

    def _step_scheduler_by_hand(self) -> None:
        if self.words["scheduler"] not in ("no", "plateau") and self.words["interval"] == "step":
            self.lr_schedulers().step()

    def _log_all(self, loss: torch.Tensor, errors: torch.Tensor, num_rows: int) -> None:
        words = self.words
        size = {"batch_size": num_rows} if words["size"] == "said" else {}
        by_step = {"on_step": words["log"] in ("both", "step"), "on_epoch": words["log"] != "step"}
        optimizers = self.optimizers()
        first = optimizers[0] if isinstance(optimizers, list) else optimizers
        self.log("train_loss", loss, **by_step, **size)
        values = {"rate": first.param_groups[0]["lr"], "square": errors.sqrt().mean()}
        if words["log"] == "dict":
            self.log_dict(values, on_step=False, on_epoch=True, **size)
        else:
            self.log("rate", values["rate"], on_step=False, on_epoch=True, **size)
        if words["log"] == "reduced":
            for name, value in {"max": errors.max(), "min": errors.min(), "sum": errors.sum()}.items():
                self.log(f"error_{name}", value, on_step=False, on_epoch=True, reduce_fx=name, **size)
        if words["log"] == "object":
            self.error.update(errors)
            self.log("error", self.error, on_step=False, on_epoch=True, **size)
        if words["log"] == "steps":
            self.log("steps", float(self.global_step), on_step=False, on_epoch=True, reduce_fx="max", **size)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, target = batch
        size = {"batch_size": len(inputs)} if self.words["size"] == "said" else {}
        self.log("val_loss", (self.first(inputs) - target).pow(2).mean(), **size)

    def configure_optimizers(self) -> Any:
        words, make = self.words, OPTIMIZERS[self.words["optimizer"]]
        if words["optimization"] == "pair":
            return [make(self.first.parameters(), RATE), make(self.second.parameters(), RATE)]
        optimizer = make(self.first.parameters(), RATE)
        if words["scheduler"] == "no":
            return optimizer
        scheduler = {
            "scheduler": SCHEDULERS[words["scheduler"]](optimizer),
            "interval": words["interval"],
            "frequency": words["frequency"],
            **({"monitor": "train_loss"} if words["scheduler"] == "plateau" else {}),
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class WarmingUp(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = RATE * (self.global_step + 1) / 5


class Stopping(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class Penalized(Module):
    def on_after_backward(self) -> None:
        for parameter in self.first.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=0.01)


class Halving(Module):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.first[2].bias.mul_(0.5)


class ClippingItself(Module):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        torch.nn.utils.clip_grad_norm_(self.first.parameters(), BOUND / 2)


HOOKS: dict[str, type[Module]] = {
    "no": Module,
    "optimizer_step": WarmingUp,
    "on_train_batch_start": Stopping,
    "on_after_backward": Penalized,
    "on_train_epoch_end": Halving,
    "configure_gradient_clipping": ClippingItself,
}
LOGGED = ("train_loss", "rate", "square", "error", "error_max", "error_min", "error_sum", "steps")


class Noting(pl.Callback):
    """Notes what Lightning reports."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.rows: list[Row] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        names = [
            name for name in LOGGED if name in found and not (name == "train_loss" and self.words["log"] == "step")
        ]
        row: Row = {"epoch": trainer.current_epoch + 1, **{name: found[name] for name in names}}
        self.rows += [row, {name: value for name, value in found.items() if name == "val_loss"}]


class Lightning(Kind):
    """See the module."""

    name = "lightning"
    core = ("optimization", "scheduler", "interval", "none", "log", "micro")
    choices: ClassVar[Choices] = {
        "rows": (24, 22, 31),
        "batch": (6, 4, 5),
        "optimization": ("automatic", "automatic", "manual", "pair"),
        "optimizer": tuple(OPTIMIZERS),
        "scheduler": ("no", *SCHEDULERS),
        "interval": ("step", "epoch"),
        "frequency": (1, 2, 3),
        "none": ("no", "no", "batch", "batch"),
        "log": ("epoch", "both", "step", "dict", "object", "reduced", "steps"),
        "loss": ("tensor", "dict"),
        "hook": tuple(HOOKS),
        "size": ("said", "said", "not"),
        "accumulate": (1, 1, 2, 3),
        "micro": ("no", "no", 1, 2),
        "clip": ("no", "norm", "value"),
    }

    def settled(self, words: Words) -> dict[str, Value]:
        new = dict(words)
        is_automatic = new["optimization"] == "automatic"
        if not is_automatic:
            new.update(accumulate=1, micro="no")
            if new["hook"] in ("optimizer_step", "configure_gradient_clipping"):
                new["hook"] = "no"
        if new["optimization"] == "pair":
            new.update(scheduler="no", loss="tensor")
            new["hook"] = "no" if new["hook"] == "on_after_backward" else new["hook"]
        if new["accumulate"] != 1:
            new.update(rows=24, batch=4, none="no")
            if new["hook"] == "on_after_backward":
                new["hook"] = "no"  # Lightning calls it for each batch of a step
        if is_automatic and new["workers"] != 1:
            new["none"] = "no"
        if new["none"] == "batch" and new["log"] == "object":
            new["log"] = "epoch"
        if new["micro"] != "no" and new["hook"] == "on_train_batch_start":
            new["hook"] = "no"  # it is called for each part
        if new["hook"] == "on_train_batch_start" and new["accumulate"] != 1:
            new["hook"] = "no"
        if new["micro"] != "no" and new["hook"] == "on_after_backward":
            new["hook"] = "no"
        if new["scheduler"] == "no":
            new.update(interval="step", frequency=1)
        if new["scheduler"] == "plateau" and new["interval"] == "step" and new["log"] != "both":
            new["log"] = "both"
        if new["scheduler"] == "plateau" and new["none"] != "no":
            new["none"] = "no"
        if new["hook"] == "optimizer_step":
            new["scheduler"] = "no"
            new.update(interval="step", frequency=1)
        if new["hook"] == "configure_gradient_clipping":
            new["clip"] = "no"
        if new["none"] != "no" and new["clip"] == "value":
            new["clip"] = "norm"  # PyTorch cannot clip no gradients by value, which Lightning would ask for
        return new

    def operator(self, words: Words) -> type[Any]:
        train_loader, validation_loader = data(words)
        return TrainingOperator.from_ptl(
            HOOKS[str(words["hook"])], train_dataloader=train_loader, val_dataloader=validation_loader
        )

    def options(self, words: Words) -> dict[str, Any]:
        is_automatic = words["optimization"] == "automatic"
        return {
            "config": {"words": dict(words), "calls": ""},
            "split_batches": True,
            "accumulate_grad_batches": words["accumulate"],
            "micro_batch_size": None if words["micro"] == "no" else words["micro"],
            "clip_grad_norm": BOUND if is_automatic and words["clip"] == "norm" else None,
            "clip_grad_value": BOUND if is_automatic and words["clip"] == "value" else None,
            "seed": 3,
        }

    def run(self, trainer: Any, words: Words) -> Outcome:
        return train_and_validate(trainer, {**words, "calls": ",".join(["all"] * NUM_EPOCHS)})

    def plain(self, words: Words) -> Outcome:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        module, noting = HOOKS[str(words["hook"])]({"words": words}), Noting(words)
        is_clipped = words["optimization"] == "automatic" and words["clip"] != "no"
        trainer = pl.Trainer(
            max_epochs=NUM_EPOCHS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            accumulate_grad_batches=int(words["accumulate"]),
            gradient_clip_val=BOUND if is_clipped else None,
            gradient_clip_algorithm=str(words["clip"]) if is_clipped else None,
            callbacks=[noting],
        )
        trainer.fit(module, *data(words))
        if words["hook"] == "on_train_epoch_end":  # it comes before the validation here, and behind it in Lightning
            noting.rows = [{} if "val_loss" in row else row for row in noting.rows]
        rows = noting.rows
        for call in range(NUM_EPOCHS):  # a module leaves out a batch of a lost worker
            if is_killed(words, call):
                rows[2 * call] = {"epoch": call + 1}
        return Outcome(rows).keep(module)


KIND = Lightning()
