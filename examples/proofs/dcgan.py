"""Trains a DCGAN: a convolutional generator learns to draw digits, against a discriminator.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each; all but 360 are for training. Score: the fraction of
generated images in which a small classifier sees a digit with a confidence above 0.9. The classifier is trained on
the same digits. For comparison, the program also shows the scores of the other 360 digits and of an untrained
generator. A generator that draws only one digit would also score well, so the digits are counted.
"""

from __future__ import annotations

from typing import Any

import torch
from _common import one_process_then_workers, parse_arguments, print_result, ray_running
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import GANOperator

NOISE_DIM = 32
NUM_HELD_OUT = 360
NUM_GENERATED = 2000


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images with pixels from -1 to 1, and the digits on them, in a fixed random order."""
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
    """Train a digit classifier in this process."""
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
    """Return for each image whether the judge is sure that it sees some digit."""
    return judge(images).softmax(dim=1).amax(dim=1) > 0.9


def draw(generator: nn.Module) -> torch.Tensor:
    noise = torch.randn(NUM_GENERATED, NOISE_DIM, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return generator.eval()(noise)


def train(num_epochs: int, judge: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Train with these trainer options. Return the generator before and after training."""
    config = {"noise_dim": NOISE_DIM, "lr": 0.001, "batch_size": 64, "seed": 0, "judge": judge}
    with TorchTrainer(training_operator_cls=DigitsGAN, config=config, split_batches=True, **options) as trainer:
        _, untrained = trainer.get_model(to_cpu=True)
        for epoch in range(1, num_epochs + 1):
            trained = trainer.train()
            if epoch % 10 == 0 or epoch == num_epochs:
                losses = f"loss of discriminator {trained['loss_d']:.3f}, of generator {trained['loss_g']:.3f}"
                print(f"epoch {epoch:3d}: {losses}, score {trainer.validate()['score']:.3f}", flush=True)
        _, generator = trainer.get_model(to_cpu=True)
    return untrained, generator


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 6 if args.smoke_test else 100
    images, digits = load_images()
    judge = train_judge(images[NUM_HELD_OUT:], digits[NUM_HELD_OUT:])

    def score(shown: torch.Tensor) -> float:
        return confident(judge, shown).double().mean().item()

    with ray_running(args):
        found = [train(num_epochs, judge, **options) for options in one_process_then_workers(args)]
    (untrained, alone), (_, generator) = found[0], found[-1]
    judge.cpu()  # a trainer in this process may have moved it to a GPU
    generated = draw(generator)
    counts = judge(generated).argmax(dim=1).bincount(minlength=10).tolist()
    print(f"{NUM_GENERATED} generated images, of each digit from 0 to 9 as the judge sees it: {counts}")
    print_result(
        args,
        score=score(generated),
        score_of_one_process=score(draw(alone)),
        score_of_real_digits=score(images[:NUM_HELD_OUT]),
        score_untrained=score(draw(untrained)),
        digits_drawn=counts,
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
