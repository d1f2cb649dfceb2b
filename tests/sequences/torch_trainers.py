"""Class trainers of PyTorch, whose models count how often each sample was used. Workers import this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from raysgd.data import IterableStream
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.sequences import deaths
from tests.sequences.books import BATCH_SIZE, NUM_OTHERS, NUM_SAMPLES, NUM_VALIDATED
from tests.sequences.grammar import NUM_WORKERS, Grammar, Word
from tests.sequences.subjects import CALLS, MOMENTS, MOST, ClassTrainer

NUM_ALL = NUM_SAMPLES + NUM_OTHERS


class Numbers(Dataset[tuple[int, int]]):
    """The numbers of samples, twice: as features and as targets."""

    def __init__(self, first: int, num_samples: int) -> None:
        self.first, self.num_samples = first, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        deaths.at("item")
        return self.first + index, self.first + index


class NumbersInTurn:
    """The same as a function that returns an iterable."""

    def __init__(self, first: int, num_samples: int) -> None:
        self.first, self.num_samples = first, num_samples

    def __call__(self) -> Iterator[tuple[int, int]]:
        for number in range(self.first, self.first + self.num_samples):
            deaths.at("item")
            yield number, number


class Backwards(Sampler[int]):
    """An order that the library does not know."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        deaths.at("sampler")
        return iter(range(self.num_samples - 1, -1, -1))


def collate(rows: Sequence[Any]) -> Any:
    """Collate in a function that the library does not know."""
    deaths.at("collate")
    return torch.utils.data.default_collate(list(rows))


def loader(kind: str, first: int, num_samples: int, shuffle: bool = False) -> Any:
    """Return data of a kind: "plain", "collate", "sampler" or "stream"."""
    if kind == "stream":
        return IterableStream(NumbersInTurn(first, num_samples)).batch(BATCH_SIZE)
    numbers = Numbers(first, num_samples)
    if kind == "sampler":
        return DataLoader(numbers, BATCH_SIZE, sampler=Backwards(num_samples))
    return DataLoader(numbers, BATCH_SIZE, shuffle=shuffle, collate_fn=collate if kind == "collate" else None)


class Counts(torch.nn.Embedding):
    """A number for each sample, 0 in the beginning."""

    def __init__(self) -> None:
        super().__init__(NUM_ALL, 1, _weight=torch.zeros(NUM_ALL, 1, dtype=torch.float64))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        deaths.at("model")
        return super().forward(numbers)


def negative_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient, with the batch size as learning rate, adds 1 for each sample."""
    return -output.mean()


def optimizer_of(model: torch.nn.Module) -> torch.optim.SGD:
    """Return the optimizer that adds it."""
    return torch.optim.SGD(model.parameters(), lr=float(BATCH_SIZE))


class Stock(TrainingOperator):
    """Trains in the library's own loop. Config: `folder` of deaths, `data`, the kind of the registered data."""

    def setup(self, config: dict[str, Any]) -> None:
        deaths.install(config["folder"])
        self.register_objects()
        self.register_data(
            train_loader=loader(config["data"], 0, NUM_SAMPLES, shuffle=True),
            validation_loader=loader("plain", 0, NUM_VALIDATED),
        )

    def register_objects(self) -> None:
        """Register what is trained."""
        model = Counts()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer_of(model), criterion=negative_mean
        )

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> torch.Tensor:
        return torch.as_tensor(self.model(batch[0] if isinstance(batch, (tuple, list)) else batch))


class OwnBatch(Stock):
    """Has a `train_batch` of its own."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = -self.model(batch[0]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item(), "num_samples": len(batch[0])}


class TwoOptimizers(Stock):
    """Trains two models in turn, as a GAN does."""

    def register_objects(self) -> None:
        models = [Counts(), Counts()]
        self.models, self.optimizers = self.register(
            models=models, optimizers=[optimizer_of(model) for model in models]
        )
        self.model = self.models[0]
        self.criterion = negative_mean

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        losses = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            loss = -model(batch[0]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return {"train_loss": losses[0], "num_samples": len(batch[0])}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"val_loss": -self.model(batch[0]).mean().item(), "num_samples": len(batch[0])}


class Evenly(torch.optim.Optimizer):
    """Adds 1 for each sample of a step, however many batches it has, if each has the same share in the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / parameter.grad.abs().max())


class OwnLoop(Stock):
    """Has a `train_epoch` of its own, and leaves it inside a window of accumulated gradients."""

    resumes_epochs = True

    def register_objects(self) -> None:
        model = Counts()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=Evenly(model.parameters()), criterion=negative_mean
        )

    def train_epoch(self, iterator: Any, info: dict[str, Any]) -> dict[str, Any]:
        until, rows = info["until"], []
        batches = iter(iterator)
        for batch in batches if self.global_step < until else ():
            rows.append(self.train_batch(batch, {"batch_idx": len(rows)}))
            self.global_step += 1
            if self.global_step >= until:
                break
        deaths.at("end")
        num_samples = sum(row["num_samples"] for row in rows)
        loss = sum(row["train_loss"] * row["num_samples"] for row in rows) / max(1, num_samples)
        return {"num_samples": num_samples, "train_loss": loss}


class TorchSubject(ClassTrainer):
    """`TorchTrainer` with an operator.

    Attributes:
        operator: The class that is trained.
        data: The kind of the registered data.
        others: The kind of the data that calls bring.
    """

    grammar = Grammar(CALLS, MOST, ("item", "model"), MOMENTS)
    operator: ClassVar[type[Any]] = Stock
    data: ClassVar[str] = "plain"
    others: ClassVar[str] = "plain"

    def made(self) -> Any:
        return TorchTrainer(training_operator_cls=self.operator, config=self.config(0), **self.options())

    def options(self) -> dict[str, Any]:
        """Return the arguments of a trainer: each third one has a spare worker."""
        return {
            "num_workers": NUM_WORKERS,
            "num_cpus_per_worker": 0.5,
            "use_gpu": False,
            "split_batches": True,
            "seed": 1,
            "spare_workers": int(self.number % 3 == 2),
        }

    def config(self, number: int) -> dict[str, Any]:
        return {"folder": str(self.folder / "deaths"), "data": self.data, "x": number}

    def begin_again(self) -> None:
        self.trainer.reset_config(self.config(self.num_changes))

    def new_other(self) -> Any:
        return loader(self.others, NUM_SAMPLES, NUM_OTHERS)

    def tables(self) -> Sequence[Sequence[float]]:
        models = self.trainer.get_model()
        models = models if isinstance(models, (tuple, list)) else [models]
        return [model.weight.detach().flatten().tolist() for model in models]

    def predict(self) -> Sequence[float]:
        found: list[float] = self.trainer.predict(Numbers(0, NUM_ALL)).flatten().tolist()
        return found


class OwnBatchSubject(TorchSubject):
    operator, counts_all = OwnBatch, False


class TwoOptimizersSubject(TorchSubject):
    operator, counts_all = TwoOptimizers, False


class OwnLoopSubject(TorchSubject):
    operator, counts_all = OwnLoop, False
    grammar = Grammar(
        {name: weight for name, weight in CALLS.items() if name not in ("fit", "data", "new")},
        MOST,
        ("item", "model", "end"),
        {**MOMENTS, "hook": 6},
    )

    def options(self) -> dict[str, Any]:
        return {**super().options(), "accumulate_grad_batches": 4}

    def _train(self, word: Word, is_whole: bool) -> None:
        data = self.books.registered
        num_steps = min(word.number or data.all_batches, data.all_batches - data.num_batches)
        before = data.num_passes * data.all_batches + data.num_batches
        result = self.trainer.train(info={"until": before + num_steps}, blocking=word.name == "train")
        result = result if word.name == "train" else result.result()
        self._compare(str(word), result, self.books.train(num_steps), is_whole)


class CollateSubject(TorchSubject):
    data, grammar = "collate", Grammar(CALLS, MOST, ("item", "model", "collate"), MOMENTS)


class SamplerSubject(TorchSubject):
    data, grammar = "sampler", Grammar(CALLS, MOST, ("item", "model", "sampler"), MOMENTS)


class StreamSubject(TorchSubject):
    data = "stream"


MORE_DATA = {**CALLS, "data": 8, "new": 3}


class DatasetSubject(TorchSubject):
    grammar = Grammar(MORE_DATA, MOST, ("item", "model"), MOMENTS)


class DatasetCollateSubject(TorchSubject):
    others, grammar = "collate", Grammar(MORE_DATA, MOST, ("item", "model", "collate"), MOMENTS)


class DatasetStreamSubject(TorchSubject):
    others, grammar = "stream", Grammar(MORE_DATA, MOST, ("item", "model"), MOMENTS)


class LightningSubject(TorchSubject):
    """The same model as a module of Lightning."""

    counts_all = False

    def made(self) -> Any:
        from tests.sequences.lightning_module import Module

        operator = TrainingOperator.from_ptl(
            Module,
            train_dataloader=loader("plain", 0, NUM_SAMPLES, shuffle=True),
            val_dataloader=loader("plain", 0, NUM_VALIDATED),
        )
        return TorchTrainer(training_operator_cls=operator, config=self.config(0), **self.options())

    def tables(self) -> Sequence[Sequence[float]]:
        return [self.trainer.get_model().counts.weight.detach().flatten().tolist()]


SUBJECTS: dict[str, type[TorchSubject]] = {
    "stock": TorchSubject,
    "own-batch": OwnBatchSubject,
    "two-optimizers": TwoOptimizersSubject,
    "own-loop": OwnLoopSubject,
    "lightning": LightningSubject,
    "collate": CollateSubject,
    "sampler": SamplerSubject,
    "stream": StreamSubject,
    "dataset": DatasetSubject,
    "dataset-collate": DatasetCollateSubject,
    "dataset-stream": DatasetStreamSubject,
}
