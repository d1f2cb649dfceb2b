"""Searches for the learning rate and the size of a network with Ray Tune. Each trial trains on two workers.

Data: the 569 tumors of scikit-learn, with 30 numbers each. Packages: the extra `tune`, scikit-learn.
"""

from pathlib import Path

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch.utils.data import TensorDataset, random_split

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator


class Tumors(ClassificationOperator):
    def build_model(self, config):
        width = config["width"]
        return torch.nn.Sequential(torch.nn.Linear(30, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))

    def build_data(self, config):
        numbers, is_benign = load_breast_cancer(return_X_y=True)
        data = TensorDataset(torch.tensor(scale(numbers), dtype=torch.float32), torch.tensor(is_benign))
        return random_split(data, [400, 169], generator=torch.Generator().manual_seed(0))


trainable = TorchTrainer.as_trainable(
    training_operator_cls=Tumors,
    config={"batch_size": 32, "seed": 0},  # 32 rows per step, over all workers
    num_workers=2,
    num_cpus_per_worker=0.5,  # Tune reserves one CPU for itself, so a trial needs two
    split_batches=True,
)
tuner = tune.Tuner(
    trainable,
    param_space={"lr": tune.loguniform(1e-4, 1e-1), "width": tune.choice([8, 32, 128])},
    tune_config=tune.TuneConfig(
        metric="val_loss",
        mode="min",
        num_samples=6,
        scheduler=ASHAScheduler(max_t=8, grace_period=2),  # stops bad trials early
        reuse_actors=True,  # the next trial reuses the workers of the last one
    ),
    run_config=tune.RunConfig(
        storage_path=str(Path("trials").resolve()),
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        verbose=1,
    ),
)
best = tuner.fit().get_best_result()
print(f"lr {best.config['lr']:.4f}, width {best.config['width']}: accuracy {best.metrics['val_accuracy']:.3f}")
print(f"the trainer of the best trial: {best.checkpoint.path}")
