"""Trains a DCGAN with a custom training step: two models and two optimizers.

The data is MNIST in its original format, from `data_dir`. Nothing is downloaded. Test mode trains on a few images of
random noise instead. Existing programs and tests import names from this module. For an example to read, see `gan.py` in
the repository's folder `examples`.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator
from raysgd.utils import BATCH_SIZE

NOISE_DIM = 100
NUM_EPOCHS = 5
_NUM_TEST_IMAGES = 32
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")


class Generator(nn.Module):
    """Generates images of 28x28 pixels from noise."""

    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(NOISE_DIM, features * 4, 7, bias=False),
            nn.BatchNorm2d(features * 4),
            nn.ReLU(),
            nn.ConvTranspose2d(features * 4, features * 2, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(features * 2),
            nn.ReLU(),
            nn.ConvTranspose2d(features * 2, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Generate an image from each row of noise."""
        return self.layers(noise.view(-1, NOISE_DIM, 1, 1))


class Discriminator(nn.Module):
    """Scores images from 0 (generated) to 1 (real)."""

    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, features, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(features, features * 2, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(features * 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(features * 2, 1, 7),
            nn.Sigmoid(),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the score of each image."""
        judged: torch.Tensor = self.layers(images)
        return judged.flatten()


def model_creator(config: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """Create the discriminator and the generator."""
    return Discriminator(), Generator()


def optimizer_creator(models: Sequence[nn.Module], config: dict[str, Any]) -> tuple[torch.optim.Optimizer, ...]:
    """Create an optimizer for each model."""
    rate = config.get("lr", 0.0002)
    return tuple(torch.optim.Adam(model.parameters(), lr=rate, betas=(0.5, 0.999)) for model in models)


class GANOperator(TrainingOperator):
    """Steps the discriminator, then the generator, on each batch."""

    def setup(self, config: dict[str, Any]) -> None:
        models = model_creator(config)
        optimizers = optimizer_creator(models, config)
        images, labels = _load_data(config)
        self.models, self.optimizers, self.criterion = self.register(
            models=models, optimizers=optimizers, criterion=nn.BCELoss()
        )
        self.model = nn.ModuleList(self.models)  # the default training loop puts `self.model` into training mode
        self.classifier = _trained_classifier(images, labels).to(self.device)
        loader = DataLoader(TensorDataset(images), batch_size=config[BATCH_SIZE], shuffle=True)
        self.register_data(train_loader=loader)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Take one step of both models. Report their losses and the inception score of the generated images."""
        (discriminator, generator), (of_discriminator, of_generator) = self.models, self.optimizers
        real = batch[0].to(self.device)
        fake = generator(torch.randn(len(real), NOISE_DIM, device=self.device))
        ones, zeros = torch.ones(len(real), device=self.device), torch.zeros(len(real), device=self.device)
        of_discriminator.zero_grad()
        loss_d = self.criterion(discriminator(real), ones) + self.criterion(discriminator(fake.detach()), zeros)
        loss_d.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        loss_g = self.criterion(discriminator(fake), ones)
        loss_g.backward()
        of_generator.step()
        score = inception_score(self.classifier, fake.detach())
        return {"loss_g": loss_g.item(), "loss_d": loss_d.item(), "inception": score, "num_samples": len(real)}


@torch.no_grad()
def inception_score(classifier: nn.Module, images: torch.Tensor) -> float:
    """Return the inception score of images, from 1 to 10.

    The score is high if the classifier assigns each image to one class with confidence, and if all classes occur.
    """
    shares = classifier(images).softmax(dim=1)
    divergence = shares * (shares.clamp_min(1e-12) / shares.mean(dim=0).clamp_min(1e-12)).log()
    return float(divergence.sum(dim=1).mean().exp())


def _trained_classifier(images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Train a small network for one pass over at most 20,000 digits, to classify generated images."""
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(classifier.parameters(), lr=0.002)
    for part in torch.arange(min(len(images), 20_000)).split(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(classifier(images[part]), labels[part]).backward()
        optimizer.step()
    return classifier.requires_grad_(False).eval()


def _load_data(config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images with pixels from -1 to 1, and the digits that they show."""
    if config.get("test_mode"):
        noise = torch.randn(_NUM_TEST_IMAGES, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        return noise.clamp(-1, 1), torch.arange(_NUM_TEST_IMAGES) % 10
    images, labels = (read_mnist_file(Path(config["data_dir"]).expanduser(), name) for name in _FILES)
    return (torch.from_numpy(images).float() / 127.5 - 1).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def read_mnist_file(folder: Path, name: str) -> np.ndarray[Any, Any]:
    """Read a file of MNIST, gzipped or not.

    Args:
        folder: Folder that contains the file, directly or in a subfolder.
        name: Name of the file, without the ending `.gz`.
    """
    found = sorted(path for ending in ("", ".gz") for path in folder.rglob(name + ending))
    if not found:
        raise FileNotFoundError(
            f"There is no `{name}` below `{folder}`: put MNIST's files there and name the folder with `data_dir`, or "
            "use `test_mode=True`."
        )
    content = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
    num_dimensions = content[3]
    sizes = np.frombuffer(content, ">i4", num_dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions).reshape(sizes).copy()


def train_example(
    num_workers: int = 1, use_gpu: bool = False, test_mode: bool = False, data_dir: str = "~/data/"
) -> list[dict[str, Any]]:
    """Train the DCGAN, print the metrics of each epoch, and return them in a list.

    Args:
        num_workers: Number of workers.
        use_gpu: True to give each worker a GPU.
        test_mode: True to train for one epoch on a few images of random noise, as a smoke test.
        data_dir: Folder with the MNIST files.
    """
    config = {"lr": 0.0002, BATCH_SIZE: 16 if test_mode else 128, "test_mode": test_mode, "data_dir": data_dir}
    results: list[dict[str, Any]] = []
    with TorchTrainer(
        training_operator_cls=GANOperator, config=config, num_workers=num_workers, use_gpu=use_gpu
    ) as trainer:
        for epoch in range(1 if test_mode else NUM_EPOCHS):
            results.append(trainer.train(info={"epoch_idx": epoch, "num_epochs": NUM_EPOCHS}))
            print(results[-1])
    return results


if __name__ == "__main__":
    from raysgd.core.arguments import parse_arguments

    args = parse_arguments(__doc__)
    train_example(args.num_workers, args.use_gpu, args.smoke_test)
