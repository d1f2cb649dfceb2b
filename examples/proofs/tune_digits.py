"""Searches for a learning rate with Ray Tune, which ends bad trials early. Interrupts the search and resumes it.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % decide which trial is best,
and the remaining 20 % test that trial. Each trial is a `TorchTrainer`. Tune resumes from files in a store: `--store
s3://bucket/folder`, or a folder on this machine. One process trains again with the best config.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import load_digits, parse_arguments, print_result, ray_running
from pyarrow.fs import FileSystem
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator

os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # Tune itself prints nothing
RATES = [0.001, 0.003, 0.0001, 0.00001]
CONFIG = {"batch_size": 64, "seed": 0}  # 64 samples in each step, over all workers


def load_data() -> list[TensorDataset]:
    """Return train, validation and test data, which are always the same."""
    return [TensorDataset(torch.tensor(images).flatten(1), torch.tensor(digits)) for images, digits in load_digits()]


class DigitsOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def build_data(self, config: dict[str, Any]) -> list[TensorDataset]:
        return load_data()[:2]


OPTIONS = {"training_operator_cls": DigitsOperator, "split_batches": True}


class Interruption(tune.Callback):
    """Prints each result. Interrupts the search once, after some results, like Ctrl-C."""

    left = 0  # on the class, because Tune restores instances as they were before the interruption

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        epoch, accuracy = result["training_iteration"], result["val_accuracy"]
        print(f"  lr {trial.config['lr']:<7g} epoch {epoch:2d}: accuracy {accuracy:.3f}", flush=True)
        Interruption.left -= 1
        if Interruption.left == 0:
            print("interrupted", flush=True)
            os.kill(os.getpid(), signal.SIGINT)


def search(store: str, num_epochs: int, **options: Any) -> tune.ResultGrid:
    """Try all learning rates. The search is interrupted and then resumed."""
    filesystem, path = FileSystem.from_uri(store)
    trainable = TorchTrainer.as_trainable(**OPTIONS, **options)
    first = tune.Tuner(
        trainable,
        param_space={**CONFIG, "lr": tune.grid_search(RATES)},
        tune_config=tune.TuneConfig(
            metric="val_accuracy",
            mode="max",
            scheduler=AsyncHyperBandScheduler(max_t=num_epochs, grace_period=1, reduction_factor=2),
            max_concurrent_trials=1,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            storage_path=path,
            storage_filesystem=filesystem,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=1),
            callbacks=[Interruption()],
            verbose=0,
        ),
    )
    Interruption.left = num_epochs + num_epochs // 2
    place = first.fit().experiment_path
    return tune.Tuner.restore(place, trainable, storage_filesystem=filesystem).fit()


def accuracy(trainer: TorchTrainer) -> float:
    images, digits = load_data()[2].tensors
    with torch.no_grad():
        return (trainer.get_model(to_cpu=True).eval()(images).argmax(dim=1) == digits).double().mean().item()


def main() -> None:
    args = parse_arguments(__doc__, store="where checkpoints go, as a URI or a folder (default: a temporary folder)")
    num_epochs, gpu = 4 if args.smoke_test else 8, args.use_gpu
    with ray_running(args, num_cpus=args.num_workers + 1), tempfile.TemporaryDirectory(prefix="raysgd-") as folder:
        store = args.store or folder
        store = store if "://" in store else Path(store).resolve().as_uri()
        found = search(store, num_epochs, num_workers=args.num_workers, use_gpu=gpu)
        best = found.get_best_result()
        with TorchTrainer(**OPTIONS, config=best.config, use_local=True, use_gpu=gpu) as trainer:
            with best.checkpoint.as_directory() as saved:
                trainer.load(f"{saved}/trainer.checkpoint")
            tuned = accuracy(trainer)
    with TorchTrainer(**OPTIONS, config=best.config, use_local=True, use_gpu=gpu) as trainer:
        trainer.fit(num_epochs, validation_freq=0)
        alone = accuracy(trainer)
    epochs = [result.metrics["training_iteration"] for result in found]
    early = sum(number < num_epochs for number in epochs)
    print_result(
        args,
        f"The search was interrupted and resumed. Of {len(epochs)} learning rates, {early} were stopped early. "
        f"With the best, {best.config['lr']:g}, workers get {tuned:.3f} of the digits right, one process {alone:.3f}.",
        test_accuracy=tuned,
        test_accuracy_of_one_process=alone,
        learning_rate=best.config["lr"],
        epochs_of_trials=epochs,
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
