"""The example module for training functions that user code imports from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from raysgd.train.examples import train_fashion_mnist_example as example


def test_the_files_of_torchvision_are_read_beside_those_of_mnist(tmp_path: Path) -> None:
    for dataset, pixel in (("MNIST", 1), ("FashionMNIST", 255)):
        folder = tmp_path / dataset / "raw"
        folder.mkdir(parents=True)
        images = np.full((2, 28, 28), pixel, np.uint8)
        header = bytes([0, 0, 8, 3]) + np.array([2, 28, 28], ">i4").tobytes()
        (folder / "t10k-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = bytes([0, 0, 8, 1]) + np.array([2], ">i4").tobytes() + bytes([7, 8])
        (folder / "t10k-labels-idx1-ubyte").write_bytes(labels)
    image, label = example._images({"data_dir": str(tmp_path)}, "t10k")[1]
    assert torch.equal(image, torch.ones(28, 28))
    assert label == 8


def test_data_that_are_not_there_are_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"download=True.*\"test_mode\": True"):
        example._images({"data_dir": str(tmp_path / "data")}, "train")


@pytest.mark.soak
@pytest.mark.integration
def test_it_trains_on_noise(ray_cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the trainer writes there
    for losses in example.train_fashion_mnist(num_workers=2, test_mode=True):
        assert losses[1] < losses[0]
