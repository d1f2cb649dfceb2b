"""Trains a DCGAN: a convolutional generator learns to draw digits, against a discriminator.

Data: the 1,797 real digits, 8x8 pixels each, that come with scikit-learn; all but 360 are trained on. Score: a small
classifier, trained here on the same digits, judges generated images; the score is the share to which it assigns a digit
with a confidence above 0.9. What a score means is told by that of the 360 real digits and that of a generator before
its training. A generator that draws but one digit would score well, too, so the digits are counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from typing import Any

import ray
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import GANOperator
from raysgd.utils import BATCH_SIZE

NOISE_DIM = 32
NUM_HELD_OUT = 360
NUM_GENERATED = 2000


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images with pixels from -1 to 1, and the digits on them, in a fixed random order."""
    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels / 8 - 1, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return images[order], torch.tensor(digits)[order]


class DigitsGAN(GANOperator):
    def build_generator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(
            nn.Linear(NOISE_DIM, 64 * 2 * 2, bias=False),
            nn.Unflatten(1, (64, 2, 2)),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, kernel_size=4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 1, kernel_size=4, stride=2, padding=1),
            nn.Tanh(),
        )

    def build_discriminator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, kernel_size=4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 1),
        )

    def build_data(self, config: dict[str, Any]) -> tuple[Any, Any]:
        images, _ = load_images()
        return TensorDataset(images[NUM_HELD_OUT:]), TensorDataset(images[:NUM_HELD_OUT])

    def score_samples(self, real: torch.Tensor, generated: torch.Tensor) -> dict[str, Any]:
        judge = self.config["judge"].to(self.device)
        return {"score": confident(judge, generated).double().mean()}


def train_judge(images: torch.Tensor, digits: torch.Tensor) -> nn.Module:
    """Returns a classifier of digits, trained in this process."""
    torch.manual_seed(0)
    judge = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10)
    )
    optimizer = torch.optim.Adam(judge.parameters(), lr=0.003)
    for _ in range(20):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            functional.cross_entropy(judge(images[batch]), digits[batch]).backward()
            optimizer.step()
    return judge.eval()


@torch.no_grad()
def confident(judge: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Tells for each image whether the judge is sure to see some digit on it."""
    return judge(images).softmax(dim=1).amax(dim=1) > 0.9


def draw(generator: nn.Module) -> torch.Tensor:
    noise = torch.randn(NUM_GENERATED, NOISE_DIM, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return generator.eval()(noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=2, help="processes that train together (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--smoke-test", action="store_true", help="only one epoch, to see that it runs")
    parser.add_argument("--address", help="a running Ray cluster, for example `auto` (default: start one)")
    args = parser.parse_args()
    num_epochs = 1 if args.smoke_test else 100

    options: dict[str, Any] = {"address": args.address}
    if args.address is None:  # start a cluster on this machine, for as long as this program runs
        num_cpus = max(args.num_workers, os.cpu_count() or 1)
        options = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)

    images, digits = load_images()
    judge = train_judge(images[NUM_HELD_OUT:], digits[NUM_HELD_OUT:])
    config = {"noise_dim": NOISE_DIM, "lr": 0.001, BATCH_SIZE: 64, "seed": 0, "judge": judge}
    with TorchTrainer(
        training_operator_cls=DigitsGAN, config=config, num_workers=args.num_workers, use_gpu=args.use_gpu
    ) as trainer:
        _, untrained = trainer.get_model(to_cpu=True)
        for epoch in range(1, num_epochs + 1):
            trained = trainer.train()
            if epoch % 10 == 0 or epoch == num_epochs:
                losses = f"loss of discriminator {trained['loss_d']:.3f}, of generator {trained['loss_g']:.3f}"
                print(f"epoch {epoch:3d}: {losses}, score {trainer.validate()['score']:.3f}", flush=True)
        _, generator = trainer.get_model(to_cpu=True)
    ray.shutdown()

    generated = draw(generator)
    counts = judge(generated).argmax(dim=1).bincount(minlength=10).tolist()
    result = {
        "score": confident(judge, generated).double().mean().item(),
        "score_of_real_digits": confident(judge, images[:NUM_HELD_OUT]).double().mean().item(),
        "score_untrained": confident(judge, draw(untrained)).double().mean().item(),
        "digits_drawn": counts,
        "num_workers": args.num_workers,
        "epochs": num_epochs,
    }
    print(f"{NUM_GENERATED} generated images, of each digit from 0 to 9 as the judge sees it: {counts}")
    print(f"score {result['score']:.3f}; real digits reach {result['score_of_real_digits']:.3f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
