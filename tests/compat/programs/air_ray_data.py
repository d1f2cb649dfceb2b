"""Ray 2.3: Ray AIR, Ray Data with a preprocessor, a trainer of one's own, and predictions with a `BatchPredictor`."""
# ray_train

import ray
import torch
from ray.air import session
from ray.air.config import RunConfig, ScalingConfig
from ray.data.preprocessors import Chain, Concatenator, StandardScaler
from ray.train.batch_predictor import BatchPredictor
from ray.train.constants import MODEL_KEY, PREPROCESSOR_KEY, TRAIN_DATASET_KEY
from ray.train.data_parallel_trainer import DataParallelTrainer
from ray.train.torch import TorchCheckpoint, TorchConfig, TorchPredictor, TorchTrainer, prepare_model


class MyTrainer(TorchTrainer):
    _scaling_config_allowed_keys = DataParallelTrainer._scaling_config_allowed_keys + ["num_workers"]  # noqa: RUF005


def loop():
    model = prepare_model(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard = session.get_dataset_shard(TRAIN_DATASET_KEY)
    for _ in range(4):
        for batch in shard.iter_torch_batches(batch_size=8, dtypes=torch.float):
            loss = ((model(batch["features"]).flatten() - batch["y"]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        session.report({"loss": loss.item()}, checkpoint=TorchCheckpoint.from_model(model))


ray.init(num_cpus=4, include_dashboard=False, ignore_reinit_error=True)
dataset = ray.data.from_items([{"a": float(i), "b": i % 5, "y": (i - 20) / 20 + i % 5} for i in range(40)])
dataset = dataset.repartition(4)
preprocessor = Chain(StandardScaler(["a", "b"]), Concatenator(columns=["a", "b"], output_column_name="features"))
trainer = MyTrainer(
    loop,
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(local_dir="results", name="data"),
    datasets={TRAIN_DATASET_KEY: dataset},
    preprocessor=preprocessor,
)
result = trainer.fit()
for loss in result.metrics_dataframe["loss"]:
    print("loss", loss)
assert {MODEL_KEY, PREPROCESSOR_KEY} <= set(result.checkpoint.to_dict())
predictor = BatchPredictor.from_checkpoint(result.checkpoint, TorchPredictor)
found = predictor.predict(dataset, feature_columns=["features"], keep_columns=["y"], dtype=torch.float).to_pandas()
errors = [(float(row.predictions[0]) - row.y) ** 2 for row in found.itertuples()]
assert len(errors) == 40
assert sum(errors) / 40 < 1
