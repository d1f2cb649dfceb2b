"""`BatchPredictor`: predictions for a dataset of Ray Data, behind a preprocessor that was fit on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from raysgd.train.batch_predictor import BatchPredictor
from raysgd.train.torch import TorchCheckpoint, TorchPredictor
from tests.helpers.processes import shipped
from tests.helpers.run_if import RunIf

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster"), RunIf(modules=["pandas", "pyarrow"])]


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    with shipped(request.module):
        yield


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
