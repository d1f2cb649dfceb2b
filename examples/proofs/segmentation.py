"""Finds handwritten digits in photos, pixel by pixel, with `SegmentationOperator`, in one process and on two workers.

Data: semi-synthetic. Real digits of scikit-learn (8x8 pixels, enlarged to 16x16) are drawn on random crops of its two
real photos, so the pixels of each digit are known. Other digits, on other parts of the photos, test the result.
Score: intersection over union of the pixels of digits. A model that sees a digit everywhere reaches about 0.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from _common import one_process_then_workers, parse_arguments, print_result, ray_running
from sklearn.datasets import load_digits, load_sample_images
from torch import nn
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import SegmentationOperator

SIZE, SIZE_OF_DIGIT = 32, 16
IS_INK = 0.4  # minimum opacity of a pixel that belongs to the digit


def make_data(num_images: int, *, is_test: bool) -> TensorDataset:
    """Return images, and a label for each pixel: 1 on a digit, 0 elsewhere. The images are always the same."""
    rng = torch.Generator().manual_seed(int(is_test))
    photos = torch.tensor(np.stack(load_sample_images().images), dtype=torch.float32).permute(0, 3, 1, 2) / 255
    left, right = photos.tensor_split([photos.shape[-1] * 2 // 3], dim=-1)
    digits = torch.tensor(load_digits().images / 16, dtype=torch.float32)[:, None]
    digits = interpolate(digits, size=SIZE_OF_DIGIT, mode="bilinear")
    pools = (right, digits[1500:]) if is_test else (left, digits[:1500])
    images, classes = zip(*(make_image(*pools, rng) for _ in range(num_images)), strict=True)
    return TensorDataset(torch.stack(images), torch.stack(classes))


def make_image(photos: torch.Tensor, digits: torch.Tensor, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one digit in a random color at a random position of a random crop."""

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=rng))

    photo, digit = photos[below(len(photos))], digits[below(len(digits))]
    top, left = below(photo.shape[1] - SIZE), below(photo.shape[2] - SIZE)
    image, opacity = photo[:, top : top + SIZE, left : left + SIZE], torch.zeros(1, SIZE, SIZE)
    top, left = below(SIZE - SIZE_OF_DIGIT), below(SIZE - SIZE_OF_DIGIT)
    opacity[:, top : top + SIZE_OF_DIGIT, left : left + SIZE_OF_DIGIT] = digit
    color = torch.rand(3, 1, 1, generator=rng)
    return image * (1 - opacity) + color * opacity, (opacity[0] > IS_INK).long()


def block(num_inputs: int, num_outputs: int, *, dilation: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=dilation, dilation=dilation)
    return nn.Sequential(convolution, nn.BatchNorm2d(num_outputs), nn.ReLU())


class Digits(SegmentationOperator):
    """Defines the model and the data of each worker."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        dilations = (1, 2, 4, 2, 1)
        blocks = [block(24 if index else 3, 24, dilation=each) for index, each in enumerate(dilations)]
        return nn.Sequential(*blocks, nn.Conv2d(24, 2, kernel_size=1))

    def build_data(self, config: dict[str, Any]) -> tuple[TensorDataset, TensorDataset]:
        return make_data(config["num_images"], is_test=False), make_data(200, is_test=True)


def train(config: dict[str, Any], num_epochs: int, **options: Any) -> dict[str, Any]:
    """Train with these trainer options. Return the metrics of the test images."""
    with TorchTrainer(training_operator_cls=Digits, config=config, split_batches=True, **options) as trainer:
        for row in trainer.epochs(num_epochs):
            background, digits = row["val_iou"]
            scores = f"IoU of digits {digits:.3f}, of the background {background:.3f}"
            print(f"epoch {row['epoch']:2d}: train loss {row['train_loss']:.3f}, {scores}", flush=True)
        return trainer.validate()


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs, num_images = (3, 400) if args.smoke_test else (15, 1500)
    config = {"lr": 0.01, "batch_size": 32, "num_classes": 2, "seed": 0, "num_images": num_images}
    with ray_running(args):
        found = [train(config, num_epochs, **options) for options in one_process_then_workers(args)]
    print(
        f"intersection over union of digits, on {found[-1]['num_samples']} other images: {found[-1]['val_iou'][1]:.3f}"
    )
    print_result(
        args,
        test_iou=found[-1]["val_iou"][1],
        test_iou_of_one_process=found[0]["val_iou"][1],
        test_miou=found[-1]["val_miou"],
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
