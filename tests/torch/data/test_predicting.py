"""`TorchTrainer.predict` with one worker in this process: kinds of data and results, refusals, what stays as it was.

Covers `raysgd.trainer.messages.prediction`, `raysgd.trainer.messages.prediction` and
`raysgd.trainer.messages.prediction`, which come to life only with the arrays of a framework.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from raysgd.core.numbers.results import CallProgress
from raysgd.data import Arrays
from raysgd.torch import TorchTrainer, TrainingOperator

NUM_ROWS = 23
X = np.random.default_rng(0).standard_normal((NUM_ROWS, 3)).astype(np.float32)
ROWS = TensorDataset(torch.from_numpy(X), torch.zeros(NUM_ROWS, 2))

Both = namedtuple("Both", ["mean", "parts"])


class Net(TrainingOperator):
    """Two layers with dropout between them."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), self.head())
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        data = TensorDataset(torch.randn(20, 3), torch.randn(20, 2))
        self.register_data(train_loader=DataLoader(data, batch_size=4, shuffle=True), validation_loader=None)

    def head(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 2)


class Several(Net):
    """Has a method of its own, whose outputs have whatever form `info` names."""

    def predict_batch(self, batch: Any, batch_info: Any) -> Any:
        output = super().predict_batch(batch, batch_info)
        rows = [f"row {round(float(number), 2)}" for number in output[:, 0]]
        return {
            "tuple": (output, output.sum(1)),
            "named": Both(output.mean(1), {"first": output[:, 0]}),
            "dict": {"logits": output, "loss": None},
            "list": rows,
            "short": output[1:],
            "number": output.mean(),
            "nothing": {},
            "growing": output[:, : 1 + batch_info["batch_idx"] % 2],
            "noise": torch.rand(len(output)) + output[:, 0],
        }[batch_info["form"]]


class Words(IterableDataset[Any]):
    """Rows one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


@pytest.fixture(scope="module")
def trainer() -> Iterator[TorchTrainer]:
    with TorchTrainer(training_operator_cls=Several, use_local=True, config={"batch_size": 5}) as made:
        made.train()
        yield made


@pytest.fixture(scope="module")
def expected(trainer: TorchTrainer) -> Any:
    with torch.no_grad():
        return trainer.get_model(to_cpu=True).eval()(torch.from_numpy(X)).numpy()


@pytest.fixture(scope="module", autouse=True)
def stock(trainer: TorchTrainer) -> Iterator[TorchTrainer]:
    """The same model with the stock method."""
    with TorchTrainer(training_operator_cls=Net, use_local=True) as made:
        made.load_state_dict(trainer.state_dict())
        yield made


def frame() -> pd.DataFrame:
    return pd.DataFrame(X, columns=["a", "b", "c"], index=[f"id {number}" for number in range(NUM_ROWS)])


class ByName(TrainingOperator):
    """Takes columns by name, and answers as models for language do."""

    def setup(self, config: dict[str, Any]) -> None:
        self.model, self.optimizer = self.register(
            models=Named(), optimizers=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        )


class Named(torch.nn.Module):
    def forward(self, ids: Any, mask: Any, labels: Any = None) -> dict[str, Any]:
        assert labels is None
        return {"logits": ids * mask, "hidden": ids}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (X, np.ndarray),
        (X.astype(np.float64), np.ndarray),
        (torch.from_numpy(X), torch.Tensor),
        ((X,), np.ndarray),
        (Arrays(X, batch_size=7), np.ndarray),
        (Arrays((X, np.zeros((NUM_ROWS, 2)))), np.ndarray),
        (Arrays(frame(), feature_columns=["a", "b", "c"], label_column="a"), pd.DataFrame),
        (frame(), pd.DataFrame),
        (ROWS, torch.Tensor),
        (TensorDataset(torch.from_numpy(X)), torch.Tensor),
        (DataLoader(ROWS, batch_size=6), torch.Tensor),
        (DataLoader(ROWS, batch_size=6, drop_last=True), torch.Tensor),
        (DataLoader(Words(), batch_size=6), torch.Tensor),
        (Words(), torch.Tensor),
        ([torch.from_numpy(X[:9]), torch.from_numpy(X[9:])].__iter__(), torch.Tensor),
    ],
)
def test_each_kind_of_data_gives_the_results_of_one_process(
    stock: TorchTrainer, expected: Any, data: Any, kind: type
) -> None:
    found = stock.predict(data)
    assert isinstance(found, kind)
    assert np.abs(np.asarray(found) - expected).max() < 1e-6


class InOther(TrainingOperator):
    """Computes in the type that the config says."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).to(config["dtype"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )


@pytest.mark.parametrize("of_data", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("of_model", [torch.float64, torch.float32, torch.bfloat16])
def test_arrays_reach_the_model_in_its_own_type_to_predict_train_and_validate(
    of_data: Any, of_model: torch.dtype
) -> None:
    x = X.astype(of_data)
    y = x[:, :2] + 1
    features = pd.DataFrame(x, columns=["a", "b", "c"])
    frame = features.assign(d=y[:, 0], e=y[:, 1])
    pairs = [
        (x, y),
        (torch.from_numpy(x), torch.from_numpy(y)),
        Arrays(frame, feature_columns=["a", "b", "c"], label_column=["d", "e"]),
        DataLoader(TensorDataset(torch.from_numpy(x).to(of_model), torch.from_numpy(y).to(of_model)), batch_size=5),
    ]
    config = {"dtype": of_model, "batch_size": 5}
    with TorchTrainer(training_operator_cls=InOther, use_local=True, config=config) as trainer:
        model, before = trainer.get_model(), trainer.state_dict()
        with torch.no_grad():
            expected = model(torch.from_numpy(x).to(of_model)).double().numpy()
        for data in (x, torch.from_numpy(x), features):
            found = np.asarray(trainer.predict(data), np.float64)
            assert np.abs(found - expected).max() < 8 * torch.finfo(of_model).eps
        losses = []
        for pair in pairs:
            trainer.load_state_dict(before)
            losses.append((trainer.train(dataset=pair)["train_loss"], trainer.validate(dataset=pair)["val_loss"]))
        assert losses == [losses[-1]] * 4
        assert trainer.get_model().weight.dtype == of_model


@pytest.mark.parametrize("num_rows", [0, 1, 5, 6, 23])
@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_no_row_is_lost_or_padded(stock: TorchTrainer, expected: Any, num_rows: int, batch_size: int) -> None:
    found = stock.predict(X[:num_rows], batch_size=batch_size)
    assert len(found) == num_rows
    assert num_rows == 0 or np.abs(found - expected[:num_rows]).max() < 1e-6


@pytest.mark.parametrize("data", [X[:0], torch.from_numpy(X[:0]), (X[:0],), frame()[:0]])
def test_of_no_rows_there_are_no_results_of_the_form_that_others_have(stock: TorchTrainer, data: Any) -> None:
    found, others = stock.predict(data), stock.predict(frame() if isinstance(data, pd.DataFrame) else X)
    assert found.shape == (0, *others.shape[1:])
    assert not isinstance(data, np.ndarray | pd.DataFrame) or type(found) is type(others)


def test_columns_are_of_data_that_have_names(stock: TorchTrainer) -> None:
    for data in (ROWS, DataLoader(ROWS), (X,), iter([X]), Arrays(X)):
        with pytest.raises(ValueError, match=r"`feature_columns='a'` with a `.*`, which has no named columns"):
            stock.predict(data, feature_columns="a")


def test_a_frame_keeps_its_index_and_may_have_other_columns(stock: TorchTrainer, expected: Any) -> None:
    found = stock.predict(frame().assign(text="no number"), feature_columns=["a", "b", "c"])
    assert list(found.columns) == ["prediction_0", "prediction_1"]
    assert list(found.index) == list(frame().index)
    assert np.abs(found.to_numpy() - expected).max() < 1e-6
    with pytest.raises(ValueError, match=r"non-numeric columns, \['text'\]\. Select .* `feature_columns`"):
        stock.predict(frame().assign(text="no number"))
    with pytest.raises(KeyError, match=r"`feature_columns`: the data frame has no column 'd'\. Available: a, b, c\."):
        stock.predict(frame(), feature_columns=["a", "d"])


def test_streams_give_a_result_for_each_batch(stock: TorchTrainer, expected: Any) -> None:
    found = list(stock.predict(torch.from_numpy(X), batch_size=10, streaming=True))
    assert [len(part) for part in found] == [10, 10, 3]
    assert torch.equal(torch.cat(found), stock.predict(torch.from_numpy(X), batch_size=10))
    frames = list(stock.predict(frame(), batch_size=10, streaming=True))
    assert pd.concat(frames).index.equals(frame().index)


def test_a_stream_draws_no_more_than_it_needs(stock: TorchTrainer) -> None:
    drawn = []

    def batches() -> Iterator[Any]:
        for number in range(1000):
            drawn.append(number)
            yield torch.zeros(1, 3)

    stream = stock.predict(batches(), streaming=True)
    assert not drawn
    next(stream)
    assert len(drawn) == 1
    stream.close()


def test_several_outputs_keep_their_structure(trainer: TorchTrainer, expected: Any) -> None:
    whole, total = trainer.predict(X, info={"form": "tuple"})
    assert np.abs(whole - expected).max() < 1e-6
    assert np.abs(total - expected.sum(1)).max() < 1e-6
    both = trainer.predict(torch.from_numpy(X), info={"form": "named"})
    assert type(both).__name__ == "Both"
    assert both.parts["first"].shape == (NUM_ROWS,)
    assert list(trainer.predict(X, info={"form": "dict"})) == ["logits"]
    texts = trainer.predict(X, info={"form": "list"})
    assert len(texts) == NUM_ROWS
    assert texts[0].startswith("row ")
    columns = trainer.predict(frame(), info={"form": "named"}).columns
    assert list(columns) == ["mean", "parts.first"]


def test_dicts_go_to_the_model_by_name_without_their_target() -> None:
    data = {"ids": np.arange(6.0), "mask": np.ones(6), "labels": np.zeros(6)}
    with TorchTrainer(training_operator_cls=ByName, use_local=True) as trainer:
        found = trainer.predict(data, batch_size=4)
        assert found["prediction"].tolist() == list(range(6))
        rows = [{name: torch.tensor(column[index]) for name, column in data.items()} for index in range(6)]
        assert trainer.predict(DataLoader(rows, batch_size=4)).tolist() == list(range(6))


def test_targets_may_be_inputs(stock: TorchTrainer, expected: Any) -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        stock.predict(DataLoader(ROWS, batch_size=6), has_target=False)
    assert len(stock.predict((X, np.zeros(NUM_ROWS)), has_target=True)) == NUM_ROWS


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("short", "`Several.predict_batch` returned 4 rows for a batch of 5 rows"),
        ("number", "returned a `ndarray` without rows"),
        ("nothing", r"returned \{\}"),
        ("growing", r"one has \(1,\) where another has \(2,\)"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(trainer: TorchTrainer, form: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trainer.predict(X, info={"form": form})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataLoader(ROWS, batch_size=4, shuffle=True), "`shuffle=True`"),
        (DataLoader(ROWS, batch_size=4, sampler=SubsetRandomSampler([1, 2])), "the sampler `SubsetRandomSampler`"),
        (DataLoader(ROWS, batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(ROWS), 2, False)), "`Own`"),
        (DataLoader(ROWS, batch_size=None), "forms no batches"),
        (DataLoader(Words(), batch_size=4, num_workers=2), "`IterableDataset` with `num_workers=2`"),
        ((X, X[:4]), "different numbers of rows"),
    ],
)
def test_data_without_an_order_is_refused_by_name(stock: TorchTrainer, data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stock.predict(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([X], r"`numpy.asarray\(data\)`"),
        ([torch.ones(2)], r"`torch.stack\(data\)`"),
        (3, "the data themselves"),
        ("x", "`str`"),
    ],
)
def test_other_things_are_no_data(stock: TorchTrainer, data: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        stock.predict(data)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"streaming": "no"}, ValueError),
        ({"info": 3}, TypeError),
        ({"has_target": 2}, ValueError),
        ({"has_target": "no"}, ValueError),
        ({"feature_columns": ["a"]}, ValueError),
        ({"feature_columns": 3}, TypeError),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    stock: TorchTrainer, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="`{}=".format(*options)):
        stock.predict(X, **options)


def test_training_goes_on_as_if_nothing_had_been_predicted(make_local: Callable[..., TorchTrainer]) -> None:
    results = []
    for predicts in (False, True):
        trainer = make_local(Several)
        trainer.train(num_steps=2)
        if predicts:
            before = [part.training for part in trainer.get_model().modules()]
            trainer.predict(Words(), info={"form": "noise"})
            trainer.predict(DataLoader(ROWS, batch_size=4, num_workers=1), info={"form": "noise"})
            assert [part.training for part in trainer.get_model().modules()] == before
        trainer.train()
        results.append(trainer.state_dict()["models"][0])
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_listeners_hear_how_far_it_is(stock: TorchTrainer) -> None:
    heard: list[CallProgress] = []
    with stock._life.listeners.listening(heard.append):
        stock.predict(X, batch_size=5)
    assert [each.kind for each in heard] == ["predict"] * len(heard)
    assert [each.num_steps for each in heard] == sorted(each.num_steps for each in heard)
    assert (heard[-1].num_steps, heard[-1].total, heard[-1].is_done) == (5, 5, True)
