"""Trains a classifier of handwritten digits, exports the model in three ways, and compares what they compute.

`torch.export` writes a program that runs without the code of the model; ONNX runs without PyTorch; safetensors holds
the weights alone. All take batches of any size, and have to give what the trained model gives.

Data: the 1,797 real digits, 8x8 pixels each, that come with scikit-learn. The score is the accuracy on the 20 % of them
that were not trained on.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from _common import load_digits, one_process_then_workers, parse_arguments, print_result, ray_running
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator

CONFIG = {"lr": 0.002, "batch_size": 64, "seed": 0}


class DigitsOperator(ClassificationOperator):
    """What each worker trains, and on what."""

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        return make_model()

    def build_data(self, config: dict[str, Any]) -> list[TensorDataset]:
        return load_data()[:2]


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(16 * 4 * 4, 10),
    )


def load_data() -> list[TensorDataset]:
    """Returns train, validation and test data, the same ones every time."""
    return [TensorDataset(torch.tensor(images)[:, None], torch.tensor(digits)) for images, digits in load_digits()]


def train(num_epochs: int, weights: Path, **options: Any) -> torch.nn.Module:
    """Trains with these options of a trainer; returns the model, ready to be used, and saves its weights."""
    with TorchTrainer(training_operator_cls=DigitsOperator, config=CONFIG, split_batches=True, **options) as trainer:
        for _ in range(num_epochs):
            result = trainer.train()
            print(f"epoch {result['epoch']:2d}: train loss {result['train_loss']:.3f}", flush=True)
        trainer.save(weights, format="safetensors")
        model: torch.nn.Module = trainer.get_model(to_cpu=True)
    return model.eval()


def exported(model: torch.nn.Module, images: torch.Tensor, path: Path) -> torch.Tensor:
    """What the program computes that `torch.export` makes of a model, after it was saved and loaded."""
    program = torch.export.export(model, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)
    output: torch.Tensor = torch.export.load(path).module()(images)
    return output


def converted(model: torch.nn.Module, images: torch.Tensor, path: Path) -> torch.Tensor:
    """What the ONNX file computes that is made of a model; onnx itself runs it here, a runtime does so faster."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about its internals
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            model,
            (images[:2],),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=["images"],
            output_names=["scores"],
            verbose=False,
        )
    assert program is not None
    program.save(path)
    onnx.checker.check_model(path)
    [scores] = ReferenceEvaluator(str(path)).run(None, {"images": images.numpy()})
    return torch.tensor(scores)


def refilled(images: torch.Tensor, path: Path) -> torch.Tensor:
    """What a new model computes with the weights that were saved."""
    from safetensors.torch import load_file

    model = make_model()
    model.load_state_dict(load_file(path))
    output: torch.Tensor = model.eval()(images)
    return output


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs, accuracies = 1 if args.smoke_test else 8, []
    images, digits = load_data()[2].tensors
    with ray_running(args), tempfile.TemporaryDirectory(prefix="raysgd-") as folder, torch.no_grad():
        for options in one_process_then_workers(args):
            with torch.enable_grad():
                model = train(num_epochs, Path(folder, "digits.safetensors"), **options)
            scores = model(images)
            accuracies.append((scores.argmax(dim=1) == digits).double().mean().item())
            print(f"accuracy on held-out digits: {accuracies[-1]:.3f}", flush=True)
        differences = {
            "torch_export": exported(model, images, Path(folder, "digits.pt2")),
            "onnx": converted(model, images, Path(folder, "digits.onnx")),
            "safetensors": refilled(images, Path(folder, "digits.safetensors")),
        }
    found = {f"difference_of_{name}": (output - scores).abs().max().item() for name, output in differences.items()}
    for name, difference in found.items():
        print(f"{name.replace('_', ' ')}: {difference:.1e}")
    print_result(args, test_accuracy=accuracies[-1], test_accuracy_of_one_process=accuracies[0], **found)


if __name__ == "__main__":
    main()
