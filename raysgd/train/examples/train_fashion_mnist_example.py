"""Trains a small network on Fashion-MNIST with a training function.

Reads Fashion-MNIST in MNIST's format from `config["data_dir"]`, by default `~/data`. Nothing is downloaded. Test mode
uses a few images of noise. Do not rename anything here: existing programs and tests import these names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.torch.examples.dcgan import read_mnist_file
from raysgd.train.torch import get_device, prepare_data_loader, prepare_model
from raysgd.train.trainer import Trainer

DATA_DIR = "~/data"
_NUM_TEST_IMAGES = 64


class NeuralNetwork(nn.Module):
    """A three-layer network that classifies ten types of clothes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return each image's scores for the ten classes."""
        return self.layers(images)


def train_func(config: dict[str, Any]) -> list[float]:
    """Train for some epochs. After each epoch, report the loss on this worker's test images. Return these losses.

    Args:
        config: `lr`, `batch_size` of each worker, and `epochs`; optionally `data_dir` and `test_mode`.
    """
    loaders = [
        prepare_data_loader(DataLoader(_images(config, part), config["batch_size"], shuffle=part == "train"))
        for part in ("train", "t10k")
    ]
    model = prepare_model(NeuralNetwork())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    losses: list[float] = []
    for _ in range(config["epochs"]):
        model.train()
        for images, labels in loaders[0]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        losses.append(_loss_of(model, loaders[1]))
        train.report(loss=losses[-1])
    return losses


@torch.no_grad()
def _loss_of(model: nn.Module, loader: Any) -> float:
    model.eval()
    total = torch.zeros(2, device=get_device())
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
        total += torch.stack([loss, torch.full_like(loss, len(labels))])
    return float(total[0] / total[1])


def _images(config: dict[str, Any], part: str) -> TensorDataset:
    if config.get("test_mode"):
        noise = torch.rand(_NUM_TEST_IMAGES, 28, 28, generator=torch.Generator().manual_seed(0))
        return TensorDataset(noise, torch.arange(_NUM_TEST_IMAGES) % 10)
    folder = Path(config.get("data_dir", DATA_DIR)).expanduser()
    if not (folder := next(folder.rglob("FashionMNIST"), folder)).is_dir():
        raise FileNotFoundError(
            f"There is no Fashion-MNIST in `{folder}`: download it with `torchvision.datasets.FashionMNIST("
            f'root="{config.get("data_dir", DATA_DIR)}", download=True)`, or pass `"test_mode": True` in the config.'
        )
    images, labels = (read_mnist_file(folder, f"{part}-{name}") for name in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    return TensorDataset(torch.from_numpy(images).float() / 255, torch.from_numpy(labels.astype(np.int64)))


def train_fashion_mnist(num_workers: int = 1, use_gpu: bool = False, test_mode: bool = False) -> list[list[float]]:
    """Train the network on several workers. Print and return the losses of each worker.

    Args:
        num_workers: Number of workers.
        use_gpu: True if each worker gets a GPU.
        test_mode: True to train two epochs on a few images of noise, as a smoke test.
    """
    trainer = Trainer(backend="torch", num_workers=num_workers, use_gpu=use_gpu)
    trainer.start()
    config = {"lr": 1e-3, "batch_size": 64, "epochs": 2 if test_mode else 4, "test_mode": test_mode}
    losses: list[list[float]] = trainer.run(train_func, config)
    trainer.shutdown()
    print(f"Loss results: {losses}")
    return losses


if __name__ == "__main__":
    from raysgd.core.arguments import parse_arguments

    args = parse_arguments(__doc__)
    train_fashion_mnist(args.num_workers, args.use_gpu, args.smoke_test)
