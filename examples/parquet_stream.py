"""Trains on Parquet files that two workers read as a stream: each row once per epoch, with few rows in memory at a
time.

Data: `rides/*.parquet`. If the folder is missing, 80,000 synthetic taxi rides are written there. The fare depends on
distance, hour and traffic. Packages: the extras `torch`, `metrics` and `storage`.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from raysgd import TorchTrainer
from raysgd.data import ParquetStream
from raysgd.operators import RegressionOperator

RIDES = Path("rides").resolve()  # on a cluster: a folder that every node can read


def to_sample(row):
    angle = 2 * np.pi * row["hour"] / 24
    features = [row["distance_km"] / 10, np.sin(angle), np.cos(angle), row["is_weekend"]]
    return np.float32(features), np.float32(row["fare"])


class Fares(RegressionOperator):
    def build_model(self, config):
        layers = [torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))

    def build_data(self, config):
        train = ParquetStream(f"{RIDES}/train-*.parquet").shuffle(buffer=4096).map(to_sample)
        validation = ParquetStream(f"{RIDES}/validation-*.parquet").map(to_sample)
        return train.batch(256), validation.batch(256)  # 256 rows per step, over all workers


def make_rides():
    RIDES.mkdir()
    random = np.random.default_rng(0)
    for number in range(10):
        distance, hour = random.gamma(2.0, 2.5, 8000), random.integers(0, 24, 8000)
        is_weekend = random.random(8000) < 2 / 7
        is_slow = np.isin(hour, (7, 8, 9, 16, 17, 18)) & ~is_weekend
        fare = 3 + distance * (1.8 + 0.9 * is_slow) + random.normal(0, 1, 8000)
        table = pa.table({"distance_km": distance, "hour": hour, "is_weekend": is_weekend, "fare": fare})
        part = "train" if number < 9 else "validation"
        pq.write_table(table, RIDES / f"{part}-{number}.parquet", row_group_size=1000)


if not RIDES.exists():
    make_rides()
config = {"lr": 0.003, "seed": 0}
with TorchTrainer(training_operator_cls=Fares, config=config, num_workers=2, split_batches=True) as trainer:
    history = trainer.fit(5)
print(history)
print(f"the fare is off by {history[-1]['val_mae']:.2f} on average; the noise alone is {(2 / np.pi) ** 0.5:.2f}")
