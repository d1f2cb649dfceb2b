"""Trains on a Ray Data dataset: Ray Data tasks read and transform the rows, and workers receive them in batches.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % for validation. They are
first written to Parquet files and then read, as you would do with larger data.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from _common import Arrays, load_digits, one_process_then_workers, parse_arguments, print_result, ray_running
from torch import nn

from raysgd import TorchTrainer
from raysgd.data import RayBatches
from raysgd.operators import ClassificationOperator
from raysgd.utils import BATCH_SIZE

CONFIG = {"lr": 0.003, BATCH_SIZE: 64, "seed": 0}


def write(data: Arrays, folder: Path) -> str:
    """Write images to three files, as lists of 64 pixels. Values go from 0 to 16, as from a camera."""
    images, digits = data
    for index, part in enumerate(np.array_split(np.arange(len(digits)), 3)):
        columns = {"pixels": list(images[part].reshape(-1, 64) * 16), "digit": digits[part]}
        folder.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{index}.parquet")
    return str(folder)


def scale(batch: dict[str, Any]) -> dict[str, Any]:
    """Scale pixels to values from 0 to 1, in Ray Data tasks."""
    return {"pixels": (np.stack(batch["pixels"]) / 16).astype("float32"), "digit": batch["digit"]}


def read(folder: str, *, shuffles: bool) -> RayBatches:
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.read_parquet(folder, override_num_blocks=2).map_batches(scale)
    rows = (rows.random_shuffle(seed=0) if shuffles else rows).materialize()  # leave this out if memory is scarce
    return RayBatches(rows, feature_columns="pixels", label_column="digit", batches_per_block=4)


class DigitsOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def build_data(self, config: dict[str, Any]) -> tuple[None, None]:
        return None, None

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register_data(train_loader=config["train"], validation_loader=config["validation"])


def train(num_epochs: int, folder: Path, **options: Any) -> float:
    """Train with these trainer options. Return the last accuracy."""
    datasets = {name: read(str(folder / name), shuffles=name == "train") for name in ("train", "validation")}
    with TorchTrainer(training_operator_cls=DigitsOperator, config={**CONFIG, **datasets}, **options) as trainer:
        for row in trainer.epochs(num_epochs):
            counts = f"{row['num_samples']} rows in training, {row['val_num_samples']} in validation"
            print(f"  epoch {row['epoch']}: accuracy {row['val_accuracy']:.3f}; {counts}", flush=True)
    return row["val_accuracy"]


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 2 if args.smoke_test else 8
    with ray_running(args, num_cpus=args.num_workers + 2), tempfile.TemporaryDirectory(prefix="raysgd-") as name:
        folder = Path(name)  # on a cluster: a folder that all nodes can read, or a bucket
        for part, data in zip(("train", "validation"), load_digits(), strict=False):
            write(data, folder / part)
        found = [train(num_epochs, folder, **options) for options in one_process_then_workers(args)]
    print_result(args, accuracy=found[-1], accuracy_of_one_process=found[0], epochs=num_epochs)


if __name__ == "__main__":
    main()
