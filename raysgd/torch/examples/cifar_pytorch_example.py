"""Trains a ResNet on CIFAR-10.

The data is CIFAR-10 in its binary version, from `~/data/cifar-10-batches-bin`. Nothing is downloaded. Test mode trains
on a few images of random noise instead. Existing programs and tests import names from this module.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch.resnet import ResNet18
from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator
from raysgd.utils import BATCH_SIZE

DATA_DIR = "~/data/cifar-10-batches-bin"
_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_NUM_TEST_IMAGES = 32


def initialization_hook() -> None:
    """Make NCCL ignore the loopback and Docker network interfaces. Runs in every worker before anything else."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "^lo,docker0")


class CifarTrainingOperator(TrainingOperator):
    """Trains a ResNet18 with stochastic gradient descent and a learning rate that decreases in steps."""

    def setup(self, config: dict[str, Any]) -> None:
        model = ResNet18(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1), momentum=config.get("momentum", 0.9))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[150, 250, 350], gamma=0.1)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.CrossEntropyLoss(), schedulers=scheduler
        )
        train, validation = _load_data(config)
        self.register_data(
            train_loader=DataLoader(train, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(validation, batch_size=config[BATCH_SIZE]),
        )

    def prepare_batch(self, batch: Any) -> Any:
        """Normalize the images. In training, also mirror about half of them."""
        images, labels = batch
        if self.model.training:
            is_mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
            images = torch.where(is_mirrored, images.flip(3), images)
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _DEVIATION))
        return super().prepare_batch(((images / 255 - mean) / deviation, labels))


def _load_data(config: dict[str, Any]) -> tuple[TensorDataset, TensorDataset]:
    if config.get("test_mode"):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (_NUM_TEST_IMAGES, 3, 32, 32), dtype=torch.uint8, generator=generator)
        noise = TensorDataset(images, torch.arange(_NUM_TEST_IMAGES) % 10)
        return noise, noise
    folder = Path(config.get("data_dir", DATA_DIR)).expanduser()
    train, test = sorted(folder.glob("data_batch_*.bin")), folder / "test_batch.bin"
    if not train or not test.exists():
        raise FileNotFoundError(
            f"There is no CIFAR-10 in `{folder}`: download its binary version from "
            "https://www.cs.toronto.edu/~kriz/cifar.html and unpack it there, or use `test_mode=True`."
        )
    return _read(train), _read([test])


def _read(files: list[Path]) -> TensorDataset:
    """Read binary files of CIFAR-10. An image is a byte for the label, then 32x32 bytes for each color channel."""
    rows = np.concatenate([np.fromfile(file, dtype=np.uint8) for file in files]).reshape(-1, 1 + 3 * 32 * 32)
    images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32))
    return TensorDataset(images, torch.from_numpy(rows[:, 0].astype(np.int64)))


def train_cifar(
    test_mode: bool = False, num_workers: int = 1, use_gpu: bool = False, num_epochs: int = 5, fp16: bool = False
) -> dict[str, Any]:
    """Train, validate after each epoch, print the metrics, and return the metrics of the last validation.

    Args:
        test_mode: True to train for one epoch on a few images of random noise, as a smoke test.
        num_workers: Number of workers.
        use_gpu: True to give each worker a GPU.
        num_epochs: Number of epochs.
        fp16: True to train with mixed precision.
    """
    with TorchTrainer(
        training_operator_cls=CifarTrainingOperator,
        initialization_hook=initialization_hook,
        config={"lr": 0.1, BATCH_SIZE: (16 if test_mode else 128) * num_workers, "test_mode": test_mode},
        num_workers=num_workers,
        use_gpu=use_gpu,
        scheduler_step_freq="epoch",
        use_fp16=fp16,
    ) as trainer:
        for row in trainer.epochs(1 if test_mode else num_epochs):
            print(row)
    return {name: value for name, value in trainer.history[-1].items() if name.startswith("val_")}


if __name__ == "__main__":
    from raysgd.core.arguments import parse_arguments

    args = parse_arguments(__doc__)
    train_cifar(args.smoke_test, args.num_workers, args.use_gpu)
