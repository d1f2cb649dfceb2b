"""Trains a residual network on a folder of images: one folder for each class, read in the workers as they are needed.

Data: generated: 480 color images of 32x32 pixels with a disc, a square or a cross of any color and place, on noise.
They are written to files first, as PPM, which needs no library to read. For other formats, change `read_image`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import one_process_then_workers, parse_arguments, print_result, ray_running
from torch import nn
from torch.utils.data import Dataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator
from raysgd.torch.resnet import BasicBlock, ResNet
from raysgd.utils import BATCH_SIZE

SIZE = 32
HEADER = f"P6 {SIZE} {SIZE} 255\n".encode()
CLASSES = ("cross", "disc", "square")


def draw(name: str, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """An image with one shape."""
    image = random.integers(0, 120, (SIZE, SIZE, 3), dtype=np.uint8)
    x, y = np.meshgrid(*[np.arange(SIZE) - random.integers(11, SIZE - 11)] * 2)
    radius = random.integers(6, 10)
    inside = np.maximum(abs(x), abs(y)) < radius * 0.85
    shape = {
        "disc": x**2 + y**2 < radius**2,
        "square": inside,
        "cross": inside & (np.minimum(abs(x), abs(y)) < radius / 3),
    }[name]
    image[shape] = random.integers(90, 256, 3)
    return image


def write_images(folder: Path, num_each: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for index in range(num_each):
            (folder / name / f"{index:04d}.ppm").write_bytes(HEADER + draw(name, random).tobytes())


def read_image(path: Path) -> torch.Tensor:
    """An image with values from -1 to 1, colors first."""
    pixels = np.frombuffer(path.read_bytes(), np.uint8, offset=len(HEADER)).reshape(SIZE, SIZE, 3)
    return torch.tensor(pixels).permute(2, 0, 1) / 127.5 - 1


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """The images in the folders of a folder; the names of these are the classes, in order of the alphabet."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [
            (path, label) for label, name in enumerate(self.classes) for path in sorted((folder / name).glob("*.ppm"))
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        return read_image(path), label


class ShapesOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return ResNet(BasicBlock, [1, 1, 1, 1], len(CLASSES))  # `ResNet18(config)` has twice as many layers; for GPUs

    def build_data(self, config: dict[str, Any]) -> tuple[ImageFolder, ImageFolder]:
        folder = Path(config["folder"])  # which all nodes can read
        return ImageFolder(folder / "train"), ImageFolder(folder / "validation")


def train(num_epochs: int, folder: str, **options: Any) -> float:
    """Trains with these options of a trainer; returns the last accuracy."""
    config = {"lr": 0.001, BATCH_SIZE: 32, "seed": 0, "folder": folder}
    with TorchTrainer(training_operator_cls=ShapesOperator, config=config, split_batches=True, **options) as trainer:
        for row in trainer.epochs(num_epochs):
            losses = f"train loss {row['train_loss']:.3f}, validation loss {row['val_loss']:.3f}"
            print(f"  epoch {row['epoch']}: {losses}, accuracy {row['val_accuracy']:.3f}", flush=True)
    return row["val_accuracy"]


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs, num_each = (3, 60) if args.smoke_test else (4, 120)
    with tempfile.TemporaryDirectory(prefix="raysgd-") as folder, ray_running(args):
        write_images(Path(folder, "train"), num_each, seed=1)
        write_images(Path(folder, "validation"), 40, seed=2)
        found = [train(num_epochs, folder, **options) for options in one_process_then_workers(args)]
    print_result(args, accuracy=found[-1], accuracy_of_one_process=found[0], epochs=num_epochs)


if __name__ == "__main__":
    main()
