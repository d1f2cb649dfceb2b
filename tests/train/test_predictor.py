"""`Predictor`: batches in any form, and the models of both frameworks."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.air import Checkpoint
from raysgd.train.batch_predictor import BatchPredictor
from raysgd.train.predictor import Predictor, PredictorNotSerializableException
from raysgd.train.torch import TorchCheckpoint, TorchPredictor
from tests.helpers.run_if import RunIf

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")


class Plus(Predictor):
    """Adds what its checkpoint says."""

    def __init__(self, number: float, preprocessor: Any = None) -> None:
        super().__init__(preprocessor)
        self.number = number

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> Plus:
        return cls(checkpoint.to_dict()["number"], checkpoint.get_preprocessor())

    def _predict_pandas(self, data: Any, times: int = 1, **kwargs: Any) -> Any:
        return data + times * self.number


class Doubling:
    """A preprocessor."""

    def transform_batch(self, data: Any) -> Any:
        return data * 2


class Sum(torch.nn.Module):
    def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        return columns["x"] + columns["y"]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (np.array([1, 2]), [3, 4]),
        ({"x": np.array([1, 2])}, {"x": [3, 4]}),
        (pd.DataFrame({"x": [1, 2]}), {"x": {0: 3, 1: 4}}),
        (pa.table({"x": [1, 2]}), {"x": [3, 4]}),
    ],
    ids=["array", "dict", "frame", "table"],
)
def test_predictions_have_the_form_of_the_data(data: Any, found: Any) -> None:
    made = Plus(2).predict(data)
    assert type(made) is type(data)
    if isinstance(made, np.ndarray):
        assert made.tolist() == found
    elif isinstance(made, dict):
        assert {name: column.tolist() for name, column in made.items()} == found
    else:
        assert (made.to_dict() if hasattr(made, "to_dict") else made.to_pydict()) == found


def test_the_preprocessor_of_the_checkpoint_comes_first_and_options_reach_the_method() -> None:
    predictor = Plus.from_checkpoint(Checkpoint.from_dict({"number": 1, "_preprocessor": Doubling()}))
    assert predictor.predict(np.array([1, 2]), times=10).tolist() == [12, 14]
    predictor.set_preprocessor(None)
    assert predictor.get_preprocessor() is None
    assert predictor.predict(np.array([1, 2])).tolist() == [2, 3]


def test_a_function_is_a_predictor() -> None:
    assert Predictor.from_pandas_udf(lambda frame: frame.sum(axis=1).to_frame("sum")).predict(
        {"x": np.array([1, 2]), "y": np.array([3, 4])}
    )["sum"].tolist() == [4, 6]


def test_a_predictor_stays_where_it_is() -> None:
    with pytest.raises(PredictorNotSerializableException, match="`Plus` cannot be pickled: send the checkpoint"):
        pickle.dumps(Plus(1))


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="need an array of NumPy, a dict of arrays"):
        Plus(1).predict(3)


def test_a_model_of_pytorch_gets_tensors_and_gives_arrays() -> None:
    model = torch.nn.Linear(2, 1)
    checkpoint = TorchCheckpoint.from_state_dict(model.state_dict())
    predictor = TorchPredictor.from_checkpoint(checkpoint, torch.nn.Linear(2, 1))
    rows = np.random.default_rng(0).standard_normal((3, 2))  # float64
    wanted = model(torch.tensor(rows, dtype=torch.float32)).detach().numpy()
    np.testing.assert_array_equal(predictor.predict(rows), wanted)
    np.testing.assert_array_equal(predictor.predict({"x": rows})["predictions"], wanted)
    frame = predictor.predict(pd.DataFrame({"x": list(rows)}))
    np.testing.assert_array_equal(np.stack(frame["predictions"]), wanted)


def test_several_columns_are_a_dict_and_types_can_be_chosen() -> None:
    found = TorchPredictor(Sum()).predict(
        pd.DataFrame({"x": [1, 2], "y": [3, 4]}), dtype={"x": torch.float16, "y": torch.float16}
    )
    assert found["predictions"].dtype == np.float16
    assert found["predictions"].tolist() == [4, 6]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match="PyTorch sees no GPU"):
        TorchPredictor(Sum(), use_gpu=True)


@RunIf(modules=["tensorflow"])
def test_a_model_of_keras_gets_tensors_and_gives_arrays() -> None:
    import tensorflow as tf

    from raysgd.train.tensorflow import TensorflowCheckpoint, TensorflowPredictor

    def build() -> Any:
        return tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])

    model = build()
    predictor = TensorflowPredictor.from_checkpoint(TensorflowCheckpoint.from_model(model), build)
    rows = np.random.default_rng(0).standard_normal((3, 2))
    np.testing.assert_allclose(predictor.predict(rows), model(rows.astype(np.float32)).numpy(), rtol=1e-6)


@RunIf(modules=["tensorflow"])
def test_a_checkpoint_of_another_framework_is_refused_with_both_names() -> None:
    from raysgd.train.tensorflow import TensorflowPredictor

    of_torch = TorchCheckpoint.from_model(Sum())
    of_keras = Checkpoint.from_dict({"model": [np.zeros(2)]})
    with pytest.raises(RuntimeError, match=r"is a `list`.*`TensorflowPredictor`"):
        TorchPredictor.from_checkpoint(of_keras)
    with pytest.raises(RuntimeError, match=r"is a `Sum`.*`TorchPredictor`"):
        TensorflowPredictor.from_checkpoint(of_torch, lambda: None)


class TestBatchPredictor:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((Checkpoint.from_dict({"number": 1}), dict), "`predictor_cls=<class 'dict'>`: need a subclass of"),
            (("folder", Plus), "`checkpoint='folder'`: need a `raysgd.air.Checkpoint`. Those of Ray"),
        ],
    )
    def test_names_what_is_wrong(self, arguments: Any, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            BatchPredictor(*arguments)

    def test_refuses_what_is_no_dataset_and_what_ray_has_no_longer(self) -> None:
        predictor = BatchPredictor.from_checkpoint(Checkpoint.from_dict({"number": 1}), Plus)
        with pytest.raises(TypeError, match="need a dataset of Ray Data"):
            predictor.predict([1, 2])
        with pytest.raises(NotImplementedError, match="Call `predict`"):
            predictor.predict_pipelined(None)


@pytest.mark.integration
@pytest.mark.usefixtures("ray_cluster")
def test_a_dataset_is_predicted_behind_the_preprocessor_of_the_checkpoint() -> None:
    import ray.data
    from ray.data.preprocessors import Chain, Concatenator, StandardScaler

    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.from_items([{"x": float(number), "label": number} for number in range(8)])
    preprocessor = Chain(StandardScaler(columns=["x"]), Concatenator(columns=["x"], output_column_name="features"))
    preprocessor.fit(dataset)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 10.0)
    predictor = BatchPredictor.from_checkpoint(
        TorchCheckpoint.from_model(model, preprocessor=preprocessor), TorchPredictor
    )
    found = predictor.predict(dataset, feature_columns=["features"], keep_columns=["label"], batch_size=3).to_pandas()
    found = found.sort_values("label")
    values = torch.arange(8, dtype=torch.float64)
    wanted = 10 * (values - values.mean()) / values.std(correction=0)
    assert found["label"].tolist() == list(range(8))
    assert [float(each[0]) for each in found["predictions"]] == pytest.approx(wanted.tolist(), rel=1e-5)

    summed = BatchPredictor.from_pandas_udf(lambda frame: frame[["x"]] + 1).predict(dataset)
    assert sorted(row["x"] for row in summed.take_all()) == [float(number) for number in range(1, 9)]
