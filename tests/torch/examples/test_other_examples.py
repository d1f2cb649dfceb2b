"""The example modules for PyTorch that user code imports from, beside `train_example`.

Covers `raysgd.torch.examples.dcgan`, `raysgd.torch.examples.cifar_pytorch_example` and
`raysgd.torch.examples.tune_example`; each trains in this process, without Ray, except where it says so.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from raysgd import TorchTrainer
from raysgd.torch.examples import cifar_pytorch_example, dcgan, tune_example
from raysgd.utils import BATCH_SIZE


def test_the_gan_steps_two_models_with_two_optimizers() -> None:
    config = {"lr": 0.0002, BATCH_SIZE: 16, "test_mode": True}
    with TorchTrainer(training_operator_cls=dcgan.GANOperator, config=config, use_local=True, use_gpu=False) as trainer:
        before = [model.state_dict() for model in trainer.get_model()]
        before = [{name: value.clone() for name, value in state.items()} for state in before]
        result = trainer.train(info={"epoch_idx": 0, "num_epochs": 5})
        after = [model.state_dict() for model in trainer.get_model()]
    assert result["num_samples"] == 32
    assert 1 <= result["inception"] <= 10
    assert {"loss_g", "loss_d"} <= set(result)
    for old, new in zip(before, after, strict=True):
        assert not any(torch.equal(old[name], new[name]) for name in old if name.endswith("layers.0.weight"))


def test_files_of_mnist_are_read_packed_or_not(tmp_path: Path) -> None:
    images = np.arange(3 * 28 * 28, dtype=np.int64).astype(np.uint8).reshape(3, 28, 28)
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    header = bytes([0, 0, 8, 3]) + np.array([3, 28, 28], ">i4").tobytes()
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(header + images.tobytes())
    packed = gzip.compress(bytes([0, 0, 8, 1]) + np.array([3], ">i4").tobytes() + bytes([7, 8, 9]))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(packed)
    found, labels = dcgan._load_data({"data_dir": str(tmp_path)})
    assert labels.tolist() == [7, 8, 9]
    torch.testing.assert_close((found[:, 0] + 1) * 127.5, torch.tensor(images).float())


def test_data_that_are_not_there_are_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte.*test_mode=True"):
        dcgan._load_data({"data_dir": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"binary version.*test_mode=True"):
        cifar_pytorch_example._load_data({"data_dir": str(tmp_path)})


def test_files_of_cifar_are_read(tmp_path: Path) -> None:
    rows = np.zeros((2, 1 + 3 * 32 * 32), np.uint8)
    rows[:, 0], rows[:, 1] = [3, 9], [10, 20]
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        rows.tofile(tmp_path / name)
    train, test = cifar_pytorch_example._load_data({"data_dir": str(tmp_path)})
    assert (len(train), len(test)) == (4, 2)
    image, label = train[1]
    assert (image.shape, image[0, 0, 0].item(), label.item()) == ((3, 32, 32), 20, 9)


@pytest.mark.soak  # a ResNet on CPUs
@pytest.mark.integration
def test_the_resnet_trains_on_noise(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    result = cifar_pytorch_example.train_cifar(test_mode=True)
    assert result["val_num_samples"] == 32
    assert "train_loss" in capsys.readouterr().out


@pytest.mark.parametrize(("reduces", "kind"), [(False, "StepLR"), (True, "ReduceLROnPlateau")])
def test_the_operator_of_the_trials_has_the_scheduler_that_it_was_asked_for(reduces: bool, kind: str) -> None:
    operator_cls = tune_example.get_custom_training_operator(lr_reduce_on_plateau=reduces)
    with TorchTrainer(
        training_operator_cls=operator_cls,
        config={BATCH_SIZE: 128},
        scheduler_step_freq="manual",
        use_local=True,
        use_gpu=False,
    ) as trainer:
        before, _ = trainer.validate()["val_loss"], trainer.train()
        trainer.update_scheduler(before)
        assert trainer.validate()["val_loss"] < before
        operator = trainer.get_local_operator()
        assert type(operator.scheduler).__name__ == kind
        assert operator.optimizer.defaults["lr"] == 1e-4


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.parametrize("by_hand", [False, True])
def test_tune_finds_the_larger_rate(
    by_hand: bool, ray_cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # Tune writes there
    operator_cls = tune_example.get_custom_training_operator(lr_reduce_on_plateau=by_hand)
    search = tune_example.tune_example_manual if by_hand else tune_example.tune_example
    assert search(operator_cls)["lr"] == 1e-3


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.parametrize("module", ["train_example", "dcgan"])
def test_a_module_runs_as_a_program(module: str, ray_cluster: None, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", f"raysgd.torch.examples.{module}", "--smoke-test", "--address", address]
    finished = subprocess.run(
        command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=250, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "loss" in finished.stdout
