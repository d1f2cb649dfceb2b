"""Programs about how many samples a batch has: own collators and samplers, batches that do not divide, weights.

- `rows`, `batch`: rows of the data, and of a batch; with `split=no` of one worker.
- `calls`: the steps of each call of `train`; `all` is the rest of the pass.
- `task`: what is learned. In `ignored` some labels are left out, in `weighed` classes have weights, `own` is a loss
  that the library does not know, in `pairs` each sample has a weight in the data.
- `collate`: the loader's own, or one that drops rows, makes three samples of each, joins the nodes of graphs, pads
  texts or returns a dict.
- `say`: what the program says beside the loss: `nothing`, or `weight`, how many the mean is over.
- `step`: the stock step; or an own `train_batch` with `self.backward`, or with `loss.backward()`. Both return
  `num_samples`.
- `nan`: whether some targets are NaN, and an own `train_batch` leaves them out.
- `leave`: the number of a batch that an own `train_batch` leaves out.
- `grow`: whether the data grow between the calls.
- `loader`: `divided`, or `own`: each worker loads its own part.
- `criterion`: what a loss over labels is: a `module` of PyTorch, a `function`, a `subclass` with its own `forward`, or
  a `compiled` module.
- `rung`: whether an own `optimizer_step` clips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler

from raysgd.torch import TrainingOperator
from raysgd.utils import BATCH_WEIGHT
from tests.programs.grammar import Choices, Value, Words
from tests.programs.outcomes import Outcome, Row
from tests.programs.parts import (
    NUM_CLASSES,
    OPTIMIZERS,
    RATE,
    Kind,
    Mean,
    batches_of_calls,
    chunks,
    classes,
    flat,
    is_killed,
    network,
    steps_of,
    table,
    train_and_validate,
    without,
)

NUM_GROWN = 8
BOUND, OWN_BOUND = 0.5, 0.3
PADDING = -100
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)
WITH_LABELS = ("labels", "ignored", "weighed", "texts")
SETTINGS: dict[str, dict[str, Any]] = {"ignored": {"ignore_index": 0}, "weighed": {"weight": WEIGHTS}}


class Halved(torch.nn.CrossEntropyLoss):
    """A loss of PyTorch with a temperature."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output / 2, target)


def criterion_of(words: Words) -> Any:
    """Return the loss of a program."""
    task, kind = str(words["task"]), words.get("criterion", "module")
    if task not in WITH_LABELS:
        return {"mse": torch.nn.MSELoss(), "bce": torch.nn.BCEWithLogitsLoss()}.get(task, logarithms)
    settings = SETTINGS.get(task, {})
    if kind == "function":
        return partial(functional.cross_entropy, **settings) if settings else functional.cross_entropy
    criterion = Halved(**settings) if kind == "subclass" else torch.nn.CrossEntropyLoss(**settings)
    return torch.compile(criterion, backend="eager") if kind == "compiled" else criterion


def logarithms(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a mean over the samples that the library does not know."""
    return (output - target).pow(2).log1p().mean()


class Rows(Dataset[Any]):
    """Inputs, target and number of each row; with the loader's own collator no number, which no model takes."""

    def __init__(self, words: Words) -> None:
        self.words, self.num_rows = words, int(words["rows"])
        self.collate = Collate(words)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Any:
        words, task = self.words, str(self.words["task"])
        if words["collate"] == "graphs":
            num_nodes, width = 2 + 5 * index % 7, widths(words)
            return table(index, num_nodes, 3), self._target(index, num_nodes, width), index
        if words["collate"] == "texts":
            length = 1 + index % 5
            return table(index, length, 3), classes(index, length), index
        inputs = table(index, 3)
        target = self._target(index, 1, 1)[0]
        if task == "pairs":
            return inputs, torch.tensor(float(index % 4) / 2, dtype=torch.float64), target
        return (inputs, target) if words["collate"] == "loader" else (inputs, target, index)

    def collated(self, numbers: Sequence[int]) -> Any:
        """Return a batch of rows with these numbers."""
        rows = [self[number] for number in numbers]
        return torch.utils.data.default_collate(rows) if self.words["collate"] == "loader" else self.collate(rows)

    def _target(self, index: int, num: int, width: int) -> torch.Tensor:
        task = str(self.words["task"])
        if task in WITH_LABELS:
            return classes(index, num)
        target = table(100 + index, num, width)
        if task == "bce":
            return (target > 0).double()
        return torch.full_like(target, torch.nan) if self.words["nan"] == "some" and index % 3 == 0 else target


def widths(words: Words) -> int:
    """Return how many numbers a target has."""
    return 3 if words["collate"] == "graphs" and words["task"] == "mse" else 1


def num_outputs(words: Words) -> int:
    return NUM_CLASSES if words["task"] in WITH_LABELS else widths(words)


class Collate:
    """Makes batches of rows with numbers. It says the same of a row whatever else is in the batch."""

    def __init__(self, words: Words) -> None:
        self.how = str(words["collate"])

    def __call__(self, rows: Sequence[Any]) -> Any:
        if self.how == "drop":
            rows = [row for row in rows if row[2] % 3 != 1]
            empty = torch.zeros(0, 3, dtype=torch.float64)
            return self._stacked(rows) if rows else (empty, empty[:, :1])
        if self.how == "triple":
            inputs, targets = self._stacked(rows)
            return torch.cat([inputs, inputs / 2, inputs / 4]), targets.repeat(3, *[1] * (targets.ndim - 1))
        if self.how == "graphs":
            return torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
        if self.how == "texts":
            inputs = torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True)
            return inputs, torch.nn.utils.rnn.pad_sequence([row[1] for row in rows], True, PADDING)
        inputs, targets = self._stacked(rows)
        return {"input": inputs, "labels": targets} if self.how == "dict" else (inputs, targets)

    @staticmethod
    def _stacked(rows: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


class InTurns(Sampler[int]):
    """Even rows, then odd ones; or backwards; or with repetitions."""

    def __init__(self, how: str, rows: Rows) -> None:
        self.how, self.rows = how, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.how, len(self.rows)))


def order_of(how: str, num_rows: int) -> list[int]:
    """Return the numbers of the rows in a pass."""
    numbers = list(range(num_rows))
    if how == "turns":
        return numbers[::2] + numbers[1::2]
    if how == "repeats":
        return [number // 2 for number in numbers]
    return numbers[::-1] if how == "backwards" else numbers


def weight_of(words: Words, batch: Any) -> float:
    """Return how many samples, labels or weights the mean of a batch is over."""
    target = target_of(batch)
    if words["task"] == "ignored":
        return float((target != 0).sum())
    if words["task"] == "texts":
        return float((target != PADDING).sum())
    if words["task"] == "weighed":
        return float(WEIGHTS[target].sum())
    return float(batch[1].sum()) if words["task"] == "pairs" else float(len(target))


def target_of(batch: Any) -> torch.Tensor:
    found: torch.Tensor = batch["labels"] if isinstance(batch, dict) else batch[-1]
    return found


def inputs_of(batch: Any) -> torch.Tensor:
    found: torch.Tensor = batch["input"] if isinstance(batch, dict) else batch[0]
    return found


def loss_of(words: Words, model: Any, criterion: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and loss of a batch."""
    output, target = model(inputs_of(batch)), target_of(batch)
    if words["task"] == "pairs":
        losses = (output - target).pow(2).mean(1)
        return output, (losses * batch[1]).sum() / batch[1].sum()
    output = output.transpose(1, 2) if words["task"] == "texts" else output
    return output, criterion(output, target)


def kept(words: Words, batch: Any) -> Any:
    """Return a batch without the pairs whose target is NaN."""
    if words["nan"] == "no":
        return batch
    is_there = ~torch.isnan(target_of(batch)).any(1)
    return tuple(part[is_there] for part in batch)


class Counting(TrainingOperator):
    """The program in the stock step. Config: `words`."""

    def setup(self, config: dict[str, Any]) -> None:
        words = self.words = config["words"]
        model = Named(words)
        optimizer = OPTIMIZERS[words["optimizer"]](model.parameters(), RATE)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=criterion_of(words)
        )
        self.rows = Rows(words)
        train_loader, validation_loader = self.loader(self.rows, int(words["batch"])), self.loader(Rows(words), 7)
        self.register_data(train_loader=train_loader, validation_loader=validation_loader)

    def loader(self, rows: Rows, size: int) -> Any:
        """Return the data for training, which are `self.rows`, or for validation."""
        words = self.words
        collate = None if words["collate"] == "loader" else Collate(words)
        if words["loader"] == "own" and rows is self.rows:
            part = torch.utils.data.Subset(rows, range(self.world_rank, len(rows), self.world_size))
            return DataLoader(part, size, collate_fn=collate)
        sampler = InTurns(str(words["sampler"]), rows) if words["sampler"] != "loader" else None
        drops = words["last"] == "drop" and rows is self.rows
        return DataLoader(rows, size, sampler=sampler, collate_fn=collate, drop_last=drops)


class Named(torch.nn.Module):
    """A model that takes dicts, too."""

    def __init__(self, words: Words) -> None:
        super().__init__()
        self.layers = network(num_outputs(words))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(input)
        return found


class Weighing(Counting):
    """The same, and `forward` says how many the mean is over."""

    def forward(self, features: Any, target: Any) -> Any:
        words = self.words
        batch = features[0] if isinstance(features[0], dict) else (*features, target)
        output, loss = loss_of(words, self.model, self.criterion, batch)
        return (output, loss, weight_of(words, batch)) if words["say"] == "weight" else (output, loss)


class OwnBatch(Weighing):
    """The same with an own `train_batch`."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        words = self.words
        if str(batch_info["batch_idx"]) == str(words["leave"]):
            return {}
        batch = kept(words, batch)
        _, loss = loss_of(words, self.model, self.criterion, batch)
        weight = {BATCH_WEIGHT: weight_of(words, batch)} if words["say"] == "weight" else {}
        if words["step"] == "plain":
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        else:
            self.backward(loss, weight=weight.get(BATCH_WEIGHT))
            self.optimizer_step()
        return {"train_loss": loss.detach(), "num_samples": len(target_of(batch)), **weight}


class Clips:
    """An own `optimizer_step`, beside one of the others."""

    def optimizer_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OWN_BOUND)  # type: ignore[attr-defined]
        super().optimizer_step()  # type: ignore[misc]


class CountingClipped(Clips, Counting):
    pass


class WeighingClipped(Clips, Weighing):
    pass


class OwnBatchClipped(Clips, OwnBatch):
    pass


CLIPPED: dict[type[Any], type[Any]] = {
    Counting: CountingClipped,
    Weighing: WeighingClipped,
    OwnBatch: OwnBatchClipped,
}


class Counts(Kind):
    """See the module."""

    name = "counts"
    core = ("task", "collate", "say", "step", "criterion")
    choices: ClassVar[Choices] = {
        "rows": (24, 22, 17, 31),
        "batch": (6, 4, 5, 9),
        "calls": ("all,all", "1,all,all", "all,1,all"),
        "split": ("yes", "yes", "yes", "no"),
        "task": ("mse", "bce", "labels", "ignored", "weighed", "own", "pairs"),
        "collate": ("loader", "drop", "triple", "graphs", "texts", "dict"),
        "say": ("nothing", "weight", "weight", "weight"),
        "step": ("stock", "own", "plain"),
        "sampler": ("loader", "turns", "backwards", "repeats"),
        "last": ("keep", "keep", "drop"),
        "optimizer": tuple(OPTIMIZERS),
        "micro": ("no", 1, 2, 3),
        "accumulate": (1, 2, 3),
        "clip": ("no", 1),
        "deterministic": ("no", "no", "yes"),
        "nan": ("no", "no", "no", "some"),
        "leave": ("no", "no", 1, 0),
        "grow": ("no", "no", "no", "yes"),
        "loader": ("divided", "divided", "divided", "own"),
        "criterion": ("module", "function", "function", "subclass", "compiled"),
        "rung": ("no", "clip"),
    }

    def settled(self, words: Words) -> dict[str, Value]:
        new = dict(words)
        if new["criterion"] != "module":
            new["task"] = {"mse": "ignored", "bce": "weighed"}.get(str(new["task"]), new["task"])
        if new["collate"] == "texts":
            new["task"] = "texts"
        elif new["task"] == "texts" or (new["task"] == "pairs" and new["collate"] != "loader"):
            new["task"] = "mse"
        if new["collate"] == "drop" and new["task"] in WITH_LABELS:
            new["task"] = "mse"  # with the targets of an empty batch
        if new["task"] == "pairs":
            new["say"] = "weight"
            new["step"] = "own" if new["step"] == "plain" else new["step"]
        if new["nan"] == "some" and (new["task"] not in ("mse", "own") or new["collate"] != "loader"):
            new["nan"] = "no"
        if new["nan"] == "some":
            new.update(say="weight", step="own")
        if new["step"] == "plain" and (new["say"] == "weight" or new["task"] in ("ignored", "weighed", "texts")):
            new["step"] = "own"
        if new["step"] == "stock" or new["micro"] != "no" or new["accumulate"] != 1:
            new["leave"] = "no"  # each part of a batch has a number, and accumulated batches are not left out
        if new["loader"] == "own":
            new.update(split="no", kill="no", last="keep", sampler="loader", calls="all,all", grow="no")
        if new["split"] == "no":
            new["micro"] = "no"
        if new["deterministic"] == "yes":
            new.update(accumulate=1, say="nothing", loader="divided", leave="no", nan="no")
            if new["task"] in ("ignored", "weighed", "texts"):  # these say a weight, which the page excludes
                new["task"] = "labels"
            new["collate"] = "dict" if new["collate"] == "dict" else "loader"
            new["step"] = "own" if new["step"] == "plain" else new["step"]
            if new["task"] == "pairs":
                new["task"] = "mse"
        if new["micro"] != "no" or new["accumulate"] != 1:
            new["step"] = "own" if new["step"] == "plain" else new["step"]
        if new["task"] not in WITH_LABELS:
            new["criterion"] = "module"
        if new["criterion"] in ("function", "compiled") or (new["criterion"] == "subclass" and new["step"] == "own"):
            new["say"] = "nothing"  # the library counts labels by itself, or asks
        if new["step"] == "plain":
            new["rung"] = "no"  # it calls the optimizer's own step
        if new["grow"] == "yes":
            new.update(calls="all,all", kill="no")  # a sampler of its own follows them
            new["sampler"] = "turns" if new["sampler"] == "loader" else new["sampler"]
        return new

    def operator(self, words: Words) -> type[Any]:
        operator_cls: type[Any] = OwnBatch
        if words["step"] == "stock":
            operator_cls = Weighing if words["say"] == "weight" or words["task"] in ("pairs", "texts") else Counting
        return operator_cls if words["rung"] == "no" else CLIPPED[operator_cls]

    def options(self, words: Words) -> dict[str, Any]:
        return {
            "config": {"words": dict(words)},
            "split_batches": words["split"] == "yes",
            "micro_batch_size": None if words["micro"] == "no" else words["micro"],
            "accumulate_grad_batches": words["accumulate"],
            "clip_grad_norm": None if words["clip"] == "no" else BOUND,
            "deterministic": words["deterministic"] == "yes",
            "add_dist_sampler": words["loader"] == "divided",
            "seed": 3,
        }

    def run(self, trainer: Any, words: Words) -> Outcome:
        if words["grow"] == "no":
            return train_and_validate(trainer, words)
        outcome = Outcome()
        for call in range(len(steps_of(words))):
            if call:
                trainer.apply_all_operators(grow)
            outcome.rows += [dict(trainer.train()), dict(trainer.validate())]
        return outcome.keep(trainer.get_model())

    def plain(self, words: Words) -> Outcome:
        rows = Rows(words)

        def batches_of_pass(index: int) -> list[list[int]]:
            num_rows = len(rows) + (NUM_GROWN * index if words["grow"] == "yes" else 0)
            order = order_of(str(words["sampler"]), num_rows)
            num_workers, size = int(words["workers"]), int(words["batch"])
            if words["loader"] == "own":
                parts = [chunks(order[rank::num_workers], size) for rank in range(num_workers)]
                most = max(map(len, parts))
                return [flat(part[step] for part in parts if step < len(part)) for step in range(most)]
            size *= 1 if words["split"] == "yes" else num_workers
            return chunks(order, size, words["last"] == "drop")

        validated = order_of(str(words["sampler"]), len(rows))
        return trained_plainly(words, batches_of_pass, validated)


def trained_plainly(
    words: Words,
    batches_of_pass: Callable[[int], list[list[int]]],
    validated: Sequence[int],
    others: list[list[int]] | None = None,
) -> Outcome:
    """Train in one process, without the library.

    Args:
        words: Of the program.
        batches_of_pass: Number of a pass, from 0 on -> the numbers of the rows in each of its batches.
        validated: The numbers of the rows that are evaluated after each call.
        others: The same for a pass over other data, after the first call.
    """
    model, criterion = Named(words), criterion_of(words)
    optimizer = OPTIMIZERS[str(words["optimizer"])](model.parameters(), RATE)
    rows, outcome = Rows(words), Outcome()
    calls = [(number, *call) for number, call in enumerate(batches_of_calls(words, batches_of_pass))]
    if others is not None:
        calls.insert(1, (-1, 0, others))
    for number, epoch, batches in calls:
        loss_of_call, num_samples = Mean(), 0.0
        is_left = [str(index) == str(words["leave"]) for index in range(len(batches))]
        for window in chunks([*zip(batches, is_left, strict=True)], int(words["accumulate"])):
            taken = flat(batch for batch, left in window if not left)
            if not taken:
                continue
            batch = kept(words, rows.collated(taken))
            _, loss = loss_of(words, model, criterion, batch)
            optimizer.zero_grad()
            loss.backward()
            if words.get("rung", "no") != "no":
                torch.nn.utils.clip_grad_norm_(model.parameters(), OWN_BOUND)
            if words["clip"] != "no":
                torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)
            optimizer.step()
            loss_of_call.add(loss.detach(), weight_of(words, batch))
            num_samples += num_counted(words, len(taken), batch, is_stock=words["step"] == "stock")
        row: Row = {"epoch": epoch, "train_loss": loss_of_call.value, "num_samples": num_samples}
        row = compared(words, number, row)
        outcome.rows.append(row if others is None else without(row, "epoch"))
        outcome.rows.append(_validated(words, model, criterion, rows.collated(validated), len(validated)))
    return outcome.keep(model)


def num_counted(words: Words, num_drawn: int, batch: Any, is_stock: bool) -> int:
    """Return what `num_samples` says of a batch: the samples that were drawn for it where the library draws them."""
    return num_drawn if is_stock and words["loader"] == "divided" else len(target_of(batch))


def _validated(words: Words, model: Any, criterion: Any, batch: Any, num_rows: int) -> Row:
    with torch.no_grad():
        output, loss = loss_of(words, model, criterion, batch)
    target = target_of(batch)
    num_times = int(words["workers"]) if words["loader"] == "own" else 1  # each worker evaluates all
    row: Row = {"val_loss": loss.item(), "num_samples": num_times * num_counted(words, num_rows, batch, is_stock=True)}
    if words["task"] in WITH_LABELS and words["task"] != "weighed" and words["say"] == "nothing":
        is_counted = target != {"ignored": 0, "texts": PADDING}.get(str(words["task"]), -1)
        row["val_accuracy"] = float((output.argmax(1) == target)[is_counted].double().mean())
    return row


def grow(operator: Any) -> None:
    """Add rows to the data of a worker."""
    operator.rows.num_rows += NUM_GROWN


def compared(words: Words, call: int, row: Row) -> Row:
    """Return a row without what the documentation promises nothing of.

    An own `train_batch` leaves out a batch of a lost worker, and one that was left out counts as the step says.
    """
    if is_killed(words, call) and words["step"] != "stock":
        return {"epoch": row["epoch"]}
    if words["leave"] != "no":
        row = without(row, "num_samples", *["train_loss"] * (not row["num_samples"]))
    return row


KIND = Counts()
