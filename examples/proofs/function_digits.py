"""Trains a classifier of handwritten digits with your own function, on two workers that may disappear and come back.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % decide which checkpoint is
best, and the remaining 20 % test that checkpoint.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import load_digits, parse_arguments, print_result, ray_running
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import CheckpointStrategy, Trainer, TrainingCallback
from raysgd.train.callbacks import JsonLoggerCallback
from raysgd.train.torch import gather_state, get_device, load_state, prepare_data_loader, prepare_model


def load_data() -> list[TensorDataset]:
    """Return train, validation and test data, which are always the same."""
    return [TensorDataset(torch.tensor(images).flatten(1), torch.tensor(digits)) for images, digits in load_digits()]


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def accuracy(model: torch.nn.Module, data: TensorDataset, device: torch.device | str = "cpu") -> float:
    images, digits = (tensor.to(device) for tensor in data.tensors)
    with torch.no_grad():
        return (model.eval()(images).argmax(dim=1) == digits).double().mean().item()


def learn_digits(config: dict[str, Any]) -> float:
    """Train in every worker, and return the accuracy. After a failure, this runs again from the last checkpoint."""
    training, validation, _ = load_data()
    loader = prepare_data_loader(DataLoader(training, batch_size=64 // train.world_size(), shuffle=True))
    torch.manual_seed(0)
    model = prepare_model(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    first, found, checkpoint = 0, 0.0, train.load_checkpoint()
    if checkpoint is not None:
        first = checkpoint["epoch"] + 1
        load_state(model, checkpoint["model"])
        load_state(optimizer, checkpoint["optimizer"])
    for epoch in range(first, config["num_epochs"]):
        if train.world_size() > 1:
            loader.sampler.set_epoch(epoch)
        model.train()
        for images, digits in loader:
            loss = torch.nn.functional.cross_entropy(model(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = accuracy(model, validation, get_device())
        train.report(epoch=epoch, loss=float(loss), accuracy=found)
        state = {"model": gather_state(model), "optimizer": gather_state(optimizer)}
        train.save_checkpoint(epoch=epoch, accuracy=found, **state)
    return found


class Show(TrainingCallback):
    """Prints the reports of rank 0 in the driver."""

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        print(f"epoch {results[0]['epoch']:2d}: validation accuracy {results[0]['accuracy']:.3f}", flush=True)


def run(num_epochs: int, num_workers: int | tuple[int, int], use_gpu: bool) -> tuple[float, int]:
    """Train. Return the accuracy of the best checkpoint on the test data, and the number of workers at the end."""
    with tempfile.TemporaryDirectory(prefix="raysgd-") as folder:
        trainer = Trainer("torch", num_workers=num_workers, use_gpu=use_gpu, logdir=folder)
        trainer.start()
        returned = trainer.run(
            learn_digits,
            {"num_epochs": num_epochs, "lr": 0.005},
            callbacks=[Show(), JsonLoggerCallback()],
            checkpoint_strategy=CheckpointStrategy(num_to_keep=2, checkpoint_score_attribute="accuracy"),
        )
        trainer.shutdown()
        log = json.loads(Path(trainer.latest_run_dir, "results.json").read_text())
        best = trainer.best_checkpoint
    model = make_model()
    model.load_state_dict(best["model"])
    test_accuracy = accuracy(model, load_data()[2])
    print(f"{len(log)} reports; the best checkpoint, of epoch {best['epoch']}, reads {test_accuracy:.3f} of the digits")
    return test_accuracy, len(returned)


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 2 if args.smoke_test else 15
    with ray_running(args, num_cpus=args.num_workers):
        print("training on one worker", flush=True)
        alone, _ = run(num_epochs, 1, args.use_gpu)
        print(f"training on up to {args.num_workers} workers", flush=True)
        together, num_workers = run(num_epochs, (1, args.num_workers), args.use_gpu)
    print_result(
        args,
        test_accuracy=together,
        test_accuracy_of_one_process=alone,
        epochs=num_epochs,
        num_workers_at_the_end=num_workers,
    )


if __name__ == "__main__":
    main()
