"""The example modules for TensorFlow that user code imports from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysgd.tf import TFTrainer
from tests.helpers.lazily import imported

example = imported("raysgd.tf.examples.tensorflow_train_example")
pytestmark = pytest.mark.integration


def test_the_line_is_found(ray_cluster: None) -> None:
    config = example.create_config(100)
    assert (config["fit_config"], config["evaluate_config"]) == ({"steps_per_epoch": 10}, {"steps": 4})
    with TFTrainer(
        example.simple_model, example.simple_dataset, config=config, num_replicas=1, use_local=True, seed=1
    ) as trainer:
        first, second = ({**trainer.train(), **trainer.validate()} for _ in range(2))
    for name in ("train_loss", "validation_loss", "validation_mean_squared_error"):
        assert second[name] < first[name]


def test_the_example_prints_its_results(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    example.train_example()
    lines = capsys.readouterr().out.splitlines()
    assert "'validation_loss'" in lines[0]
    assert lines[-1].startswith("half of 0.5 is about 0.2")


@pytest.mark.soak  # tests/tf/test_tf_trainer_integration.py has trials without the example
def test_tune_finds_a_config(ray_cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # Tune writes there
    assert example.tune_example()["trainer_config"] == example.create_config(128)


def test_the_network_for_images_trains(ray_cluster: None) -> None:
    from raysgd.tf.examples import cifar_tf_example

    results = cifar_tf_example.main(smoke_test=True, num_replicas=1, augment_data=True)
    assert set(results) == {
        "loss",
        "accuracy",
        "train_loss",
        "train_accuracy",
        "validation_loss",
        "validation_accuracy",
    }


@pytest.mark.soak  # the tests above have the same without new processes
@pytest.mark.parametrize(
    ("module", "said"),
    [("tensorflow_train_example", "half of 0.5 is about 0.2"), ("cifar_tf_example", "'validation_accuracy'")],
)
def test_a_module_trains_when_it_is_run(module: str, said: str) -> None:
    command = [sys.executable, "-m", f"raysgd.tf.examples.{module}", "--smoke-test"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
