"""`TorchTrainer.as_trainable`: the class, its requests, and a trial in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import raysgd.torch
from raysgd import TorchTrainer
from raysgd.core.cluster import ray_cluster
from raysgd.core.cluster.resources import DriverView
from raysgd.torch import BaseTorchTrainable, torch_trainer
from raysgd.torch.driver import arguments
from raysgd.utils import BATCH_SIZE
from tests.helpers.run_if import RunIf
from tests.torch.operators_for_tests import LinearOperator, ScheduledOperator, equal

pytestmark = RunIf(modules=["ray.tune", "pandas", "pyarrow"])

LOCAL = {"training_operator_cls": LinearOperator, "use_local": True, "use_gpu": False}


Make = Callable[..., Any]


@pytest.fixture
def make_trial() -> Iterator[Make]:
    """Make a trial in this process, and end it behind the test."""
    trials = []

    def make(config: dict[str, Any], /, cls: Any = None, **options: Any) -> Any:
        trials.append((cls or TorchTrainer.as_trainable(**{**LOCAL, **options}))(config))
        return trials[-1]

    yield make
    for trial in trials:
        trial.stop()


def rate_of(operator: LinearOperator) -> float:
    rate: float = operator.optimizer.param_groups[0]["lr"]
    return rate


def test_it_is_found_where_the_old_library_had_it() -> None:
    assert torch_trainer.BaseTorchTrainable is raysgd.torch.BaseTorchTrainable  # type: ignore[attr-defined]
    assert issubclass(TorchTrainer.as_trainable(**LOCAL), BaseTorchTrainable)


@pytest.mark.parametrize("step", [lambda: {}, lambda trainer: {}, lambda trainer, info, more=None: {}, "train"])
def test_a_step_of_your_own_takes_the_trainer_and_a_dict(step: Any) -> None:
    with pytest.raises(ValueError, match="override_tune_step"):
        TorchTrainer.as_trainable(**LOCAL, override_tune_step=step)


def test_arguments_have_names() -> None:
    with pytest.raises(TypeError, match="by name"):
        TorchTrainer.as_trainable(LinearOperator)


@pytest.mark.parametrize(
    ("options", "config", "bundles"),
    [
        ({}, {}, [{"CPU": 1}, {"CPU": 1}]),
        ({"num_workers": 2, "num_cpus_per_worker": 3}, {}, [{"CPU": 1}, {"CPU": 3}, {"CPU": 3}]),
        ({"num_workers": 2}, {"num_workers": 1, "num_cpus_per_worker": 2}, [{"CPU": 1}, {"CPU": 2}]),
        ({"num_workers": 2, "use_local": True}, {}, [{"CPU": 1}, {"CPU": 1}]),
        ({}, {"use_local": True}, [{"CPU": 1}]),
        ({"use_gpu": True}, {}, [{"CPU": 1}, {"CPU": 1, "GPU": 1}]),
        ({"use_gpu": "auto"}, {"use_gpu": True, "num_gpus_per_worker": 0.5}, [{"CPU": 1}, {"CPU": 1, "GPU": 0.5}]),
        ({"num_workers": 2, "spare_workers": 1}, {}, [{"CPU": 1}] * 4),
        ({"resources_per_worker": {"fast_disk": 2}}, {}, [{"CPU": 1}, {"CPU": 1, "fast_disk": 2}]),
        ({"accelerator_type": "A100"}, {}, [{"CPU": 1}, {"CPU": 1, "accelerator_type:A100": 0.001}]),
    ],
)
def test_what_tune_reserves_follows_the_arguments_and_the_config_of_the_trial(
    options: dict[str, Any], config: dict[str, Any], bundles: list[dict[str, float]]
) -> None:
    without_gpu = {"use_gpu": False, **options} if options.get("use_gpu") == "auto" else options
    trainable_cls = TorchTrainer.as_trainable(training_operator_cls=LinearOperator, **without_gpu)
    request = trainable_cls.default_resource_request(config)
    assert (request.bundles, request.strategy) == (bundles, "PACK")


@pytest.mark.parametrize(
    ("of_nodes", "num_workers", "share"), [((), 2, 0), ((1.0,), 1, 1), ((1.0,), 2, 0.5), ((1.0, 1.0), 2, 1)]
)
def test_tune_reserves_for_each_worker_what_the_gpus_of_the_cluster_allow(
    of_nodes: tuple[float, ...], num_workers: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "view_of_driver", lambda environment: DriverView(0))
    monkeypatch.setattr(ray_cluster, "ensure_ray", lambda: None)
    monkeypatch.setattr(ray_cluster, "gpus_of_nodes", lambda custom: of_nodes)
    trainable_cls = TorchTrainer.as_trainable(training_operator_cls=LinearOperator, num_workers=num_workers)
    _, *workers = trainable_cls.default_resource_request({}).bundles
    assert workers == [{"CPU": 1, "GPU": share} if share else {"CPU": 1}] * num_workers


def test_the_config_of_a_trial_counts_more_and_changes_nothing_that_is_shared(make_trial: Make) -> None:
    options = {"config": {"lr": 1.0, BATCH_SIZE: 8}, "num_cpus_per_worker": 2}
    trial = make_trial({"lr": 0.02, "num_cpus_per_worker": 1}, **options)
    assert trial.trainer.config == {"lr": 0.02, BATCH_SIZE: 8, "num_cpus_per_worker": 1}
    assert options == {"config": {"lr": 1.0, BATCH_SIZE: 8}, "num_cpus_per_worker": 2}


def test_a_trial_trains_and_validates_saves_and_goes_on(make_trial: Make, tmp_path: Path) -> None:
    trial = make_trial({"lr": 0.02}, config={"lr": 0.01})
    assert trial.trainer.config["lr"] == 0.02
    first, second = trial.train(), trial.train()
    assert second["train_loss"] <= first["train_loss"]
    assert second["val_loss"] <= first["val_loss"]
    assert first["num_samples"] == 13, "that of validation"
    assert {"mean_fwd_s", "mean_eval_fwd_s"} <= set(first["profile"]), "of training and of validation"
    assert trial.save_checkpoint(str(tmp_path)) == str(tmp_path)
    third = trial.step()
    trial.load_checkpoint(str(tmp_path))
    assert trial.step()["val_loss"] == third["val_loss"]
    trial.load_checkpoint(str(tmp_path / "trainer.checkpoint"))
    assert trial.step()["val_loss"] == third["val_loss"]
    trial.stop()
    assert trial.trainer is None


def test_a_step_of_your_own_gets_the_number_of_steps_before_it(make_trial: Make) -> None:
    def step(trainer: TorchTrainer, info: dict[str, Any]) -> dict[str, Any]:
        return {"iteration_seen": info["iteration"], **trainer.train(num_steps=1)}

    trial = make_trial({}, override_tune_step=step)
    assert [trial.train()["iteration_seen"] for _ in range(3)] == [0, 1, 2]


def test_a_method_that_nobody_calls_any_more_is_refused(make_trial: Make) -> None:
    class Former(TorchTrainer.as_trainable(**LOCAL)):  # type: ignore[misc]
        def _train(self) -> dict[str, Any]:
            return {}

    with pytest.raises(DeprecationWarning, match="rename it to `step`"):
        make_trial({}, Former).step()


def test_a_trial_that_is_reset_is_as_a_new_one(make_trial: Make) -> None:
    used, new = make_trial({"lr": 0.5, "num_samples": 8}), make_trial({"lr": 0.01})
    used.step()
    before = used.trainer
    assert used.reset_config({"lr": 0.01})
    assert used.trainer is before
    for trial in (used, new):
        trial.last = trial.step()
    assert used.last["val_loss"] == new.last["val_loss"]
    assert equal(used.trainer.state_dict()["models"], new.trainer.state_dict()["models"])
    assert used.reset_config({"lr": 0.01, "num_cpus_per_worker": 2}), "other workers, so another trainer"
    assert used.trainer is not before
    assert used.trainer.num_cpus_per_worker == 2


@pytest.mark.parametrize("given", ["", "trainer.checkpoint"])
def test_a_checkpoint_of_another_config_brings_the_state_but_not_the_numbers_of_its_optimizer(
    make_trial: Make, tmp_path: Path, given: str
) -> None:
    config = {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)}
    options = {"training_operator_cls": ScheduledOperator, "config": config, "scheduler_step_freq": "epoch"}
    better, worse = (make_trial({"lr": lr}, **options) for lr in (0.1, 0.4))
    better.step()
    better.save_checkpoint(str(tmp_path))
    worse.load_checkpoint(str(tmp_path / given))
    assert equal(better.trainer.state_dict()["models"], worse.trainer.state_dict()["models"])
    assert rate_of(worse.trainer.get_local_operator()) == pytest.approx(0.2), "one epoch along its schedule"
    better.load_checkpoint(str(tmp_path))
    assert rate_of(better.trainer.get_local_operator()) == pytest.approx(0.05)
