"""Data for one call: which kinds there are, and that they are used as registered loaders are.

Covers `raysgd.core.arrays.user_data` and `raysgd.core.arrays.user_data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from raysgd.data import Arrays
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.data import call_data
from raysgd.torch.data.sampling import ShardedLoader

NUM_ROWS = 11
X = np.random.default_rng(0).standard_normal((NUM_ROWS, 2)).astype(np.float32)
Y = X.sum(1, keepdims=True)
ROWS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
FRAME = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y[:, 0], "text": ["-"] * NUM_ROWS})


class Line(TrainingOperator):
    """A linear model, and a record of the first features that it has seen."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        loader = DataLoader(ROWS, batch_size=4, shuffle=config.get("shuffle", False))
        self.register_data(train_loader=loader, validation_loader=DataLoader(ROWS, batch_size=4))
        self.seen: list[list[float]] = []

    def train_batch(self, batch: Any, batch_info: Any) -> Any:
        self.seen.append(batch[0][:, 0].tolist())
        return super().train_batch(batch, batch_info)


class Stream(IterableDataset[Any]):
    """The same rows one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def make_loader(config: dict[str, Any], batch_size: int) -> DataLoader[Any]:
    assert config["batch_size"] == batch_size
    return DataLoader(ROWS, batch_size=batch_size)


KINDS = {
    "arrays": (X, Y),
    "tensors": (torch.from_numpy(X), torch.from_numpy(Y)),
    "wrapped": Arrays((X, Y), batch_size=4),
    "frame": Arrays(FRAME, feature_columns=["a", "b"], label_column=["y"]),
    "columns": Arrays({"a": X[:, 0], "b": X[:, 1], "y": Y[:, 0]}, feature_columns=["a", "b"], label_column=["y"]),
    "dataset": ROWS,
    "loader": DataLoader(ROWS, batch_size=4),
    "stream": DataLoader(Stream(), batch_size=4),
    "creator": make_loader,
}


class Shards:
    """Data that divide themselves."""

    def set_num_shards(self, number: int) -> None: ...

    def get_shard(self, index: int) -> list[Any]:
        return [index]


def test_the_kind_of_data_says_who_divides_them() -> None:
    kinds = {name: call_data.kind_of(data) for name, data in KINDS.items()}
    batches = {"loader": "batches", "stream": "batches", "creator": "creator"}
    assert kinds == {**dict.fromkeys(KINDS, "rows"), **batches}
    whole = call_data.call_data_of(ROWS, {"batch_size": 4})
    assert whole is not None
    assert whole.goes_to_all
    first, second = whole.shares(2)
    assert first is second
    shards = call_data.call_data_of(Shards(), {})
    assert shards is not None
    assert not shards.goes_to_all
    assert [share.data for share in shards.shares(2)] == [[0], [1]]
    assert call_data.call_data_of([1], {}) is None


@pytest.fixture
def trainer(make_local: Callable[..., TorchTrainer]) -> TorchTrainer:
    return make_local(Line, config={"batch_size": 4})


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_with_data_of_its_own_is_as_one_with_registered_data(
    make_local: Callable[..., TorchTrainer], kind: str
) -> None:
    registered, trainer = (make_local(Line, config={"batch_size": 4}) for _ in range(2))
    expected = [registered.train(), registered.validate()["val_loss"], registered.test(ROWS)["test_loss"]]
    data = KINDS[kind]
    found = [trainer.train(dataset=data), trainer.validate(dataset=data)["val_loss"], trainer.test(data)["test_loss"]]
    assert found[0]["num_samples"] == NUM_ROWS
    assert found[0]["train_loss"] == pytest.approx(expected[0]["train_loss"], abs=1e-6)
    assert found[1:] == pytest.approx(expected[1:], abs=1e-6)


SAMPLES = [{"x": [1.0] * (1 + index % 3), "y": float(index)} for index in range(NUM_ROWS)]


class Texts(Line):
    """Samples are dicts with lists of different length, which only its loader can make batches of."""

    def register_data(self, **loaders: Any) -> None:
        name = self.config.get("registers", "train_loader")
        super().register_data(**{name: DataLoader(SAMPLES, batch_size=4, collate_fn=self.collate)})  # type: ignore[arg-type]

    @staticmethod
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        x = [[sum(sample["x"]), float(len(sample["x"]))] for sample in samples]
        return {"input": torch.tensor(x), "target": torch.tensor([[sample["y"]] for sample in samples])}

    def prepare_batch(self, batch: Any) -> Any:
        return (batch["input"],), batch["target"]

    train_batch = TrainingOperator.train_batch


class LikeADataset:
    """Samples by their numbers."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Any:
        return SAMPLES[index]


@pytest.mark.parametrize("samples", [SAMPLES, LikeADataset()])
@pytest.mark.parametrize("registers", ["train_loader", "validation_loader"])
def test_samples_become_batches_as_those_of_the_registered_loader(
    make_local: Callable[..., TorchTrainer], samples: Any, registers: str
) -> None:
    trainer = make_local(Texts, config={"batch_size": 4, "registers": registers})
    assert trainer.train(dataset=samples)["num_samples"] == NUM_ROWS
    loss, model = trainer.validate(dataset=samples)["val_loss"], trainer.get_model()
    assert trainer.test(samples)["test_loss"] == loss
    batch = Texts.collate(SAMPLES)
    expected = model(batch["input"])
    assert loss == pytest.approx(torch.nn.functional.mse_loss(expected, batch["target"]).item(), rel=1e-5)
    torch.testing.assert_close(trainer.predict(samples), expected.detach())


@pytest.mark.parametrize("kind", ["loader", "dataset", "creator"])
def test_calls_with_the_same_object_go_on_where_the_last_one_stopped(trainer: TorchTrainer, kind: str) -> None:
    for _ in range(4):
        trainer.train(num_steps=2, dataset=KINDS[kind])
    seen = [number for batch in trainer.get_local_operator().seen for number in batch]
    assert seen == pytest.approx([*X[:, 0], *X[:, 0], *X[:8, 0]][: len(seen)])
    trainer.train(num_steps=1, dataset=DataLoader(ROWS, batch_size=4))
    assert trainer.get_local_operator().seen[-1] == pytest.approx(X[:4, 0])


def test_the_position_in_registered_data_stays(trainer: TorchTrainer) -> None:
    trainer.train(num_steps=1)
    trainer.train(dataset=ROWS)
    trainer.train(num_steps=1)
    assert trainer.get_local_operator().seen[-1] == pytest.approx(X[4:8, 0])


def test_data_that_were_changed_are_sent_again(trainer: TorchTrainer) -> None:
    rows = [(torch.from_numpy(X[0]), torch.from_numpy(Y[0]))]
    data = type("Growing", (), {"__len__": lambda self: len(rows), "__getitem__": lambda self, i: rows[i]})()
    assert trainer.train(dataset=data)["num_samples"] == 1
    rows.extend(rows)
    assert trainer.train(dataset=data)["num_samples"] == 2


def test_each_pass_over_shuffled_data_has_an_order_of_its_own(trainer: TorchTrainer) -> None:
    data = Arrays((X, Y), shuffle=True, drop_last=True)
    assert trainer.train(dataset=data)["num_samples"] == 8
    trainer.train(dataset=data)
    seen = trainer.get_local_operator().seen
    assert seen[:2] != seen[2:]


@pytest.mark.parametrize("size", [1, 2, 3, 13])
def test_every_sample_is_used_once_by_any_number_of_workers(size: int) -> None:
    for loader in (DataLoader(ROWS, batch_size=2), DataLoader(Stream(), batch_size=2)):
        seen: list[float] = []
        for rank in range(size):
            found = call_data.divided(loader, rank, size, training=False)
            if isinstance(found, ShardedLoader):
                found.sampler.plan_pass(0, seed=0)
                found = found.loader
            seen += [float(row) for batch in found for row in batch[0][:, 0]]
        assert sorted(seen) == pytest.approx(sorted(X[:, 0]))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ([1], TypeError, "`dataset=` got `list`: need a `DataLoader`"),
        ((X, Y[:3]), ValueError, "different numbers of rows"),
        (lambda config, batch_size: 3, TypeError, "The creator in `dataset=` returned a `int`"),
        (Arrays(FRAME), ValueError, r"non-numeric columns, \['text'\]"),
    ],
)
def test_other_data_are_refused(trainer: TorchTrainer, data: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        trainer.train(dataset=data)


def test_data_without_a_batch_size_are_refused(make_local: Callable[..., TorchTrainer]) -> None:
    with pytest.raises(ValueError, match=r"a `tuple`, which has no batch size: pass `raysgd.data.Arrays"):
        make_local(Line).train(dataset=(X, Y))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": [1]}, "`Arrays` got a `list`"),
        ({"data": X, "batch_size": 0}, "`batch_size=0`"),
        ({"data": FRAME, "label_column": "y"}, "without `feature_columns`"),
        ({"data": X, "feature_columns": ["a"]}, "no named columns"),
        ({"data": X, "shuffle": "no"}, "`shuffle='no'`"),
    ],
)
def test_arrays_are_checked_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Arrays(**options)
