"""Programs that report metrics of their own.

- `task`, `reduction`: what is learned, and what the criterion does with the losses of the samples. The program makes a
  mean of `none` and `sum`.
- `train`: how the metric is reported in training: not at all, by `self.log`, by `forward`, or by an own `train_batch`.
- `metric`: a mean, one that is NaN where some sample is in the batch, a mean over some samples with a weight of its
  own, or an object of torchmetrics.
- `called`: its name, which may be one of the library's.
- `count`: whether an own `train_batch` and `validate_batch` return `num_samples`, or `batch_weight` beside it.
- `validate`: the stock validation; an own `validate_batch` with a plain loss, the criterion, the criterion and a
  penalty, or two heads; or an own `validate`.
- `by`: calls of `train` and `validate`, or `fit` with the metrics of each two steps.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset

from raysgd.callbacks import Callback
from raysgd.torch import TrainingOperator
from raysgd.utils import BATCH_WEIGHT, AverageMeterCollection
from tests.programs.grammar import Choices, Value, Words
from tests.programs.outcomes import Outcome, Row
from tests.programs.parts import (
    NUM_CLASSES,
    OPTIMIZERS,
    RATE,
    Kind,
    Mean,
    arm,
    batches_of_calls,
    chunks,
    classes,
    flat,
    is_killed,
    network,
    steps_of,
    table,
    train_and_validate,
)

MOST_ROWS = 31
INPUTS = table(1, MOST_ROWS, 3)
NUMBERS = INPUTS.sum(1, keepdim=True) + table(2, MOST_ROWS, 1) / 3
LABELS = classes(3, MOST_ROWS)
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)
TOKENS = 1.0 + torch.arange(MOST_ROWS, dtype=torch.float64) % 3
"""How many of what the mean is over each sample has, with `count=weight`."""
NUM_OF_STEPS = 2
OBJECTS: dict[str, Any] = {
    "object-mean": torchmetrics.MeanMetric,
    "object-sum": torchmetrics.SumMetric,
    "object-max": torchmetrics.MaxMetric,
}
OF_LIBRARY = ("epoch", "batch_count", "seconds", "num_workers")


class OfNumbers(torch.nn.Module):
    """A mean of squares that the library does not know."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).pow(2).mean()


def criterion_of(words: Words) -> Any:
    reduction = str(words["reduction"])
    found = {
        "mse": lambda: torch.nn.MSELoss(reduction=reduction),
        "huber": lambda: torch.nn.HuberLoss(reduction=reduction),
        "labels": lambda: torch.nn.CrossEntropyLoss(reduction=reduction),
        "ignored": lambda: torch.nn.CrossEntropyLoss(ignore_index=0, reduction=reduction),
        "weighed": lambda: torch.nn.CrossEntropyLoss(weight=WEIGHTS, reduction=reduction),
        "smoothed": lambda: torch.nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=1, reduction=reduction),
        "own": OfNumbers,
    }
    return found[str(words["task"])]()


def has_labels(words: Words) -> bool:
    return words["task"] in ("labels", "ignored", "weighed", "smoothed")


def weight_of(words: Words, numbers: torch.Tensor) -> float:
    """Return how many the mean of the loss is over."""
    if words["count"] == "weight":
        return float(TOKENS[numbers].sum())
    labels = LABELS[numbers]
    if words["reduction"] != "mean":
        return float(len(numbers))
    counted = {"ignored": (labels != 0).double(), "smoothed": (labels != 1).double(), "weighed": WEIGHTS[labels]}
    return float(counted.get(str(words["task"]), torch.ones(len(numbers))).sum())


def loss_of(words: Words, criterion: Any, output: torch.Tensor, target: Any, numbers: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    if words["count"] == "weight":
        losses, weights = errors_of(output, target).pow(2), TOKENS[numbers]
        return (losses * weights).sum() / weights.sum()
    return mean_by(words, criterion, output, target)


def mean_by(words: Words, criterion: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of what the criterion returns."""
    loss: torch.Tensor = criterion(output, target)
    return loss.mean() if words["reduction"] == "none" else loss / len(target) if words["reduction"] == "sum" else loss


def errors_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a number of each sample."""
    if target.ndim == 1:
        return 1 - output.softmax(1)[torch.arange(len(target)), target]
    return (output - target).abs()[:, 0]


def reported(words: Words, errors: torch.Tensor, numbers: torch.Tensor) -> dict[str, Any]:
    """Return the metric of a batch, and its weight if it has one."""
    name = str(words["called"])
    if words["metric"] == "nan" and bool((numbers == 3).any()):
        return {name: torch.nan}
    if words["metric"] == "some":
        is_one = numbers % 4 == 0
        return {name: errors[is_one].mean(), f"batch_weight_of_{name}": float(is_one.sum())}
    return {name: errors.mean()}


class Reporting(TrainingOperator):
    """The program. Config: `words`."""

    def setup(self, config: dict[str, Any]) -> None:
        words = self.words = config["words"]
        model = network(NUM_CLASSES if has_labels(words) else 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=OPTIMIZERS[words["optimizer"]](model.parameters(), RATE),
            criterion=criterion_of(words),
        )
        num_rows = int(words["rows"])
        targets = LABELS if has_labels(words) else NUMBERS
        data = TensorDataset(INPUTS[:num_rows], torch.arange(num_rows), targets[:num_rows])
        self.register_data(train_loader=DataLoader(data, int(words["batch"])), validation_loader=DataLoader(data, 7))
        self.object = OBJECTS[words["metric"]]().set_dtype(torch.float64) if words["metric"] in OBJECTS else None

    def metrics_of(self, output: torch.Tensor, target: torch.Tensor, numbers: torch.Tensor) -> dict[str, Any]:
        """Return the metric of a batch."""
        errors = errors_of(output.detach(), target)
        if self.object is None:
            return reported(self.words, errors, numbers)
        self.object.update(errors)
        return {str(self.words["called"]): self.object}

    def forward(self, features: Any, target: Any) -> Any:
        inputs, numbers = features
        output = self.model(inputs)
        loss = loss_of(self.words, self.criterion, output, target, numbers)
        returned = (output, loss, weight_of(self.words, numbers)) if self.words["count"] == "weight" else (output, loss)
        if self.words["train"] == "log" and self.model.training:
            for name, value in self.metrics_of(output, target, numbers).items():
                self.log(name, value)
        if self.words["train"] == "forward" and self.model.training:
            return (*returned, self.metrics_of(output, target, numbers))
        return returned

    def counts_of(self, numbers: torch.Tensor) -> dict[str, Any]:
        """Return what the program says of the number of samples."""
        words = self.words
        weight = {BATCH_WEIGHT: weight_of(words, numbers)} if words["count"] == "weight" else {}
        return {**({} if words["count"] == "unsaid" else {"num_samples": len(numbers)}), **weight}


class ReportingItself(Reporting):
    """The same with an own `train_batch`."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        inputs, numbers, target = batch
        output = self.model(inputs)
        loss = loss_of(self.words, self.criterion, output, target, numbers)
        counts = self.counts_of(numbers)
        self.backward(loss, weight=counts.get(BATCH_WEIGHT))
        self.optimizer_step()
        return {"train_loss": loss.detach(), **self.metrics_of(output, target, numbers), **counts}


def _validate_batch(self: Any, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
    words, (inputs, numbers, target) = self.words, batch
    output = self.model(inputs)
    return {
        "val_loss": validated_loss(words, self.criterion, output, target),
        **self.metrics_of(output, target, numbers),
        **({} if words["count"] == "unsaid" else {"num_samples": len(numbers)}),
    }


def validated_loss(words: Words, criterion: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of an own `validate_batch`."""
    how = words["validate"]
    if how in ("errors", "loop", "sums"):
        return errors_of(output, target).mean()
    loss = mean_by(words, criterion, output, target)
    if how == "heads":
        other = (target + 1) % NUM_CLASSES if target.ndim == 1 else target + 1
        return loss + mean_by(words, criterion, output.flip(-1), other)
    return loss + output.pow(2).mean() if how == "penalty" else loss


def _validate_in_a_loop(self: Any, val_iterator: Any, info: Any = None) -> dict[str, Any]:
    self.model.eval()
    meters = AverageMeterCollection()
    with torch.no_grad():
        for inputs, _, target in val_iterator:
            meters.update({"val_loss": errors_of(self.model(inputs), target).mean().item()}, n=len(inputs))
    found: dict[str, Any] = meters.summary()
    return found


def _validate_with_sums(self: Any, val_iterator: Any, info: Any = None) -> dict[str, Any]:
    self.model.eval()
    total, num_samples = 0.0, 0
    with torch.no_grad():
        for inputs, _, target in val_iterator:
            total += float(errors_of(self.model(inputs), target).sum())
            num_samples += len(inputs)
    return {"val_loss": total / num_samples, "num_samples": num_samples}


VALIDATIONS: dict[str, Any] = {"loop": ("validate", _validate_in_a_loop), "sums": ("validate", _validate_with_sums)}
OWN_BATCHES = ("errors", "criterion", "penalty", "heads")
CLASSES: dict[tuple[bool, str], type[Any]] = {}
for _base in (Reporting, ReportingItself):
    for _how in ("stock", *OWN_BATCHES, *VALIDATIONS):
        _method, _function = VALIDATIONS.get(_how, ("validate_batch", _validate_batch))
        _name = f"{_base.__name__}_{_how}"
        _members = {"__module__": __name__, "__qualname__": _name} | ({} if _how == "stock" else {_method: _function})
        CLASSES[_base is ReportingItself, _how] = globals()[_name] = type(_name, (_base,), _members)


class Noting(Callback):
    """Notes the metrics of steps."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def on_step_metrics(self, run: Any, step: int, metrics: dict[str, float]) -> None:
        self.rows.append({"step": step, "train_loss": metrics["train_loss"]})


class Metrics(Kind):
    """See the module."""

    name = "metrics"
    core = ("task", "train", "metric", "count", "validate", "by")
    choices: ClassVar[Choices] = {
        "rows": (24, 22, 17, 31),
        "batch": (6, 4, 5, 9),
        "calls": ("all,all", "1,all,all"),
        "split": ("yes", "yes", "yes", "no"),
        "task": ("mse", "huber", "labels", "ignored", "weighed", "smoothed", "own"),
        "reduction": ("mean", "mean", "mean", "mean", "mean", "none", "none", "sum"),
        "train": ("no", "log", "forward", "own"),
        "metric": ("mean", "nan", "some", *OBJECTS),
        "called": (*["error"] * 20, *OF_LIBRARY),
        "count": ("said", "unsaid", "weight"),
        "validate": ("stock", *OWN_BATCHES, *VALIDATIONS),
        "by": ("calls", "calls", "steps"),
        "optimizer": tuple(OPTIMIZERS),
        "micro": ("no", "no", 1, 2),
        "accumulate": (1, 1, 2),
    }

    def settled(self, words: Words) -> dict[str, Value]:
        new = dict(words)
        if new["task"] == "own":
            new["reduction"] = "mean"
        if new["count"] == "weight" and new["validate"] != "stock":
            new["count"] = "said"
        if new["count"] == "weight":
            new["reduction"] = "mean"
        if new["validate"] == "heads" and new["task"] in ("ignored", "weighed", "smoothed"):
            new["validate"] = "criterion"  # as with a penalty, it is unknown how much such a loss counts
        if new["reduction"] != "mean" and new["task"] in ("ignored", "weighed", "smoothed"):
            new["task"] = "labels"
        if new["train"] == "no" and new["validate"] not in OWN_BATCHES:
            new.update(metric="mean", called="error")
        if new["called"] != "error" and new["metric"] != "mean":
            new["called"] = "error"
        if new["by"] == "steps":
            new.update(calls="all,all", accumulate=1)
        if new["split"] == "no":
            new["micro"] = "no"
        return new

    def operator(self, words: Words) -> type[Any]:
        return CLASSES[words["train"] == "own", str(words["validate"])]

    def options(self, words: Words) -> dict[str, Any]:
        return {
            "config": {"words": dict(words)},
            "split_batches": words["split"] == "yes",
            "micro_batch_size": None if words["micro"] == "no" else words["micro"],
            "accumulate_grad_batches": words["accumulate"],
            "seed": 3,
        }

    def run(self, trainer: Any, words: Words) -> Outcome:
        if words["by"] == "calls":
            return train_and_validate(trainer, words)
        noting, outcome = Noting(), Outcome()
        for call in range(len(steps_of(words))):
            arm(trainer, words, call)
            history = trainer.fit(1, callbacks=[noting], progress=False, log_every_n_steps=NUM_OF_STEPS)
            row = dict(history[-1])
            outcome.rows += [row, {"val_loss": row["val_loss"]}]
        outcome.rows += noting.rows if words["kill"] == "no" else []  # those of lost workers are not in them
        return outcome.keep(trainer.get_model())

    def plain(self, words: Words) -> Outcome:
        model = network(NUM_CLASSES if has_labels(words) else 1)
        optimizer = OPTIMIZERS[str(words["optimizer"])](model.parameters(), RATE)
        criterion, outcome, steps = criterion_of(words), Outcome(), []  # type: ignore[var-annotated]
        num_rows, size = int(words["rows"]), int(words["batch"])
        targets, step = LABELS if has_labels(words) else NUMBERS, 0
        size *= 1 if words["split"] == "yes" else int(words["workers"])
        for call, (epoch, batches) in enumerate(batches_of_calls(words, lambda _: chunks(range(num_rows), size))):
            mean, of_steps, errors = Mean(), Mean(), []
            for window in chunks(batches, int(words["accumulate"])):
                numbers = torch.tensor(flat(window))
                output = model(INPUTS[numbers])
                loss = loss_of(words, criterion, output, targets[numbers], numbers)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                errors.append(errors_of(output.detach(), targets[numbers]))
                step += len(window)
                for each in (mean, of_steps):
                    each.add(loss.item(), weight_of(words, numbers))
                if step % NUM_OF_STEPS == 0:
                    steps.append({"step": step, "train_loss": of_steps.value})
                    of_steps = Mean()
            numbers = torch.tensor(flat(batches))
            row: Row = {"train_loss": mean.value, "epoch": epoch, "num_samples": len(numbers)}
            if words["train"] != "no":
                row.update(self._expected(words, torch.cat(errors), numbers))
            outcome.rows.append(self._compared(words, call, row))
            outcome.rows.append(self._validated(words, model, criterion))
        if words["by"] == "steps" and words["kill"] == "no":
            outcome.rows += steps
        return outcome.keep(model)

    @staticmethod
    def _expected(words: Words, errors: torch.Tensor, numbers: torch.Tensor) -> Row:
        """Return the metric over all samples of a call."""
        name, how = str(words["called"]), str(words["metric"])
        if how in OBJECTS:
            return {name: {"mean": errors.mean(), "sum": errors.sum(), "max": errors.max()}[how[7:]].item()}
        if words["count"] == "weight" and how == "mean":
            return {name: float((errors * TOKENS[numbers]).sum() / TOKENS[numbers].sum())}
        return {name: float(reported(words, errors, numbers)[name])}

    @staticmethod
    def _compared(words: Words, call: int, row: Row) -> Row:
        """Return a row without what the documentation promises nothing of."""
        if is_killed(words, call) and words["train"] == "own":
            return {}
        if is_killed(words, call) and words["metric"] in OBJECTS:
            row.pop(str(words["called"]), None)
        if words["by"] == "steps":
            row.pop("num_samples")
        return row

    @staticmethod
    def _validated(words: Words, model: Any, criterion: Any) -> Row:
        numbers = torch.arange(int(words["rows"]))
        target = (LABELS if has_labels(words) else NUMBERS)[numbers]
        with torch.no_grad():
            output = model(INPUTS[numbers])
            if words["validate"] == "stock":
                loss = loss_of(words, criterion, output, target, numbers)
            else:
                loss = validated_loss(words, criterion, output, target)
        row: Row = {"val_loss": loss.item()}
        if words["by"] == "calls":
            row["num_samples"] = len(numbers)
            if words["validate"] in OWN_BATCHES:
                row.update(Metrics._expected({**words, "count": "said"}, errors_of(output, target), numbers))
        return row


KIND = Metrics()
