"""Trains a classifier of handwritten digits, exports the model in three ways, and compares their outputs.

`torch.export` writes a program that runs without the code of the model. ONNX runs without PyTorch. safetensors
contains only the weights. All formats accept batches of any size, and must return the same output as the trained
model.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. The score is the accuracy on the 20 % that are only for
testing.
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
    """Defines the model and the data of each worker."""

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
    """Return train, validation and test data, which are always the same."""
    return [TensorDataset(torch.tensor(images)[:, None], torch.tensor(digits)) for images, digits in load_digits()]


def train(num_epochs: int, weights: Path, **options: Any) -> torch.nn.Module:
    """Train with these trainer options, and save the weights. Return the model in evaluation mode."""
    with TorchTrainer(training_operator_cls=DigitsOperator, config=CONFIG, split_batches=True, **options) as trainer:
        for _ in range(num_epochs):
            result = trainer.train()
            print(f"epoch {result['epoch']:2d}: train loss {result['train_loss']:.3f}", flush=True)
        trainer.save(weights, format="safetensors")
        model: torch.nn.Module = trainer.get_model(to_cpu=True)
    return model.eval()


def exported(model: torch.nn.Module, images: torch.Tensor, path: Path) -> torch.Tensor:
    """Export a model with `torch.export`, save and load the program, and return its output."""
    program = torch.export.export(model, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)
    output: torch.Tensor = torch.export.load(path).module()(images)
    return output


def converted(model: torch.nn.Module, images: torch.Tensor, path: Path) -> torch.Tensor:
    """Export a model to an ONNX file, and return its output. The onnx package runs it; an ONNX runtime is faster."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about its own internals
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
    """Load the saved weights into a new model, and return its output."""
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
