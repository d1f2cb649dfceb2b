"""What the guides to the old libraries show how to do, each as a user would write it here. One trainer serves all.

Functions for TensorFlow and Horovod are in `test_frameworks_integration`, Ray Tune is in `test_tune_integration`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import CheckpointStrategy, Trainer, TrainingCallback
from raysgd.train.callbacks import (
    JsonLoggerCallback,
    PrintCallback,
    TBXLoggerCallback,
    TorchTensorboardProfilerCallback,
)
from raysgd.train.callbacks.results_preprocessors import AverageResultsPreprocessor
from raysgd.train.torch import (
    TorchWorkerProfiler,
    accelerate,
    backward,
    enable_reproducibility,
    get_device,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from tests.helpers.run_if import RunIf

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer(backend="torch", num_workers=2, logdir=tmp_path_factory.mktemp("guides"))
    made.start()
    yield made
    made.shutdown()


# ------------------------------------------------------------------------------------------ from one process to many


def fit(config: dict[str, Any]) -> float:
    """A training as it is before anything is distributed, but for the lines with `prepare`."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    loader = prepare_data_loader(DataLoader(TensorDataset(x, 3 * x), batch_size=config.get("batch_size", 4)))
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, checkpoint = 0, train.load_checkpoint()
    if checkpoint is not None:
        first = checkpoint["epoch"] + 1
        model.load_state_dict(checkpoint["model"])
    for epoch in range(first, config["num_epochs"]):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        train.report(epoch=epoch, loss=loss.item())
        train.save_checkpoint(epoch=epoch, loss=loss.item(), model=model.state_dict())
    return float(next(model.parameters()).detach())


def test_a_function_without_arguments_runs_on_every_worker(trainer: Trainer) -> None:
    def greet() -> str:
        return f"worker {train.world_rank()} of {train.world_size()}"

    assert trainer.run(greet) == ["worker 0 of 2", "worker 1 of 2"]


def test_a_training_in_one_process_becomes_one_of_many_by_preparing_its_parts(trainer: Trainer) -> None:
    first, second = trainer.run(fit, config={"num_epochs": 20})
    assert first == second == pytest.approx(3, abs=0.1)


def test_two_models_train_against_each_other(trainer: Trainer) -> None:
    def play() -> list[float]:
        torch.manual_seed(train.world_rank())
        generator, critic = prepare_model(torch.nn.Linear(2, 1)), prepare_model(torch.nn.Linear(1, 1))
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in (generator, critic)]

        def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        for _ in range(3):
            real, noise = torch.ones(4, 1), torch.randn(4, 2)
            step(optimizers[1], (critic(generator(noise).detach()) - critic(real)).mean())
            step(optimizers[0], -critic(generator(noise)).mean())
        return [float(weight) for model in (generator, critic) for weight in model.module.weight.detach().flatten()]

    first, second = trainer.run(play)
    assert first == second


# ------------------------------------------------------------------------------------------ reports


def test_results_are_taken_one_by_one_until_they_are_good_enough(trainer: Trainer) -> None:
    iterator = trainer.run_iterator(fit, {"num_epochs": 6})
    taken = 0
    for results in iterator:
        taken += 1
        if max(result["loss"] for result in results) < 0.5:
            break
    assert 0 < taken < 6
    assert iterator.get_final_results() is None
    final = iterator.get_final_results(force=True)
    assert final is not None
    assert len(final) == 2
    assert trainer.latest_checkpoint is not None
    assert trainer.latest_checkpoint["epoch"] == 5


class LossPrinter(TrainingCallback):
    """Prints the mean of the workers' losses; the preprocessor computed it."""

    results_preprocessor = AverageResultsPreprocessor(["loss"])

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        print(f"epoch {results[0]['epoch']}: {results[0]['avg(loss)']:.1f}")


def test_callbacks_print_and_log(trainer: Trainer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logger = JsonLoggerCallback(workers_to_log=[1])
    callbacks = [LossPrinter(), PrintCallback(), logger, TBXLoggerCallback(logdir=str(tmp_path))]
    trainer.run(fit, {"num_epochs": 2}, callbacks=callbacks)
    printed = capsys.readouterr().out
    assert printed.startswith("epoch 0: ")
    assert '"epoch": 1' in printed
    assert trainer.latest_run_dir is not None
    assert logger.log_path == trainer.latest_run_dir / "results.json"
    assert [[result["epoch"] for result in step] for step in json.loads(logger.log_path.read_text())] == [[0], [1]]
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_a_metric_over_all_workers_is_made_by_a_collective(trainer: Trainer) -> None:
    def count() -> None:
        num_right = torch.tensor([3.0 + train.world_rank(), 8.0])
        torch.distributed.all_reduce(num_right)
        train.report(accuracy=(num_right[0] / num_right[1]).item())

    [results] = list(trainer.run_iterator(count))
    assert [result["accuracy"] for result in results] == [7 / 16] * 2


def test_the_profiler_writes_into_the_folder_of_the_run(trainer: Trainer, tmp_path: Path) -> None:
    def profiled(config: dict[str, Any]) -> None:
        profiler = TorchWorkerProfiler(config["folder"])
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=0, warmup=0, active=1),
            on_trace_ready=profiler.trace_handler,
        ) as profile:
            for _ in range(2):
                torch.ones(2).sum()
                profile.step()
                train.report(**profiler.get_and_clear_profile_traces())

    log = JsonLoggerCallback()
    trainer.run(profiled, {"folder": str(tmp_path)}, callbacks=[TorchTensorboardProfilerCallback(), log])
    assert trainer.latest_run_dir is not None
    traces = sorted(path.name for path in (trainer.latest_run_dir / "pytorch_profiler").iterdir())
    assert traces == [f"worker_{rank}_epoch_{step}.pt.trace.json" for rank in range(2) for step in (1, 2)]
    assert "trace" not in log.log_path.read_text()


# ------------------------------------------------------------------------------------------ checkpoints


def test_a_later_run_goes_on_where_the_last_one_stopped(trainer: Trainer) -> None:
    at_once = trainer.run(fit, {"num_epochs": 4})
    trainer.run(fit, {"num_epochs": 2})
    assert trainer.run(fit, {"num_epochs": 4}, checkpoint=trainer.latest_checkpoint) == at_once
    trainer.run(fit, {"num_epochs": 3})
    assert trainer.run(fit, {"num_epochs": 4}, checkpoint=trainer.latest_checkpoint_path) == at_once


def test_the_best_checkpoints_stay(trainer: Trainer) -> None:
    strategy = CheckpointStrategy(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    trainer.run(fit, {"num_epochs": 3}, checkpoint_strategy=strategy)
    assert trainer.latest_run_dir is not None
    best = trainer.latest_run_dir / "checkpoints" / "checkpoint_000003"
    assert trainer.best_checkpoint_path == best
    assert list(best.parent.iterdir()) == [best]
    assert Trainer.load_checkpoint_from_path(best)["epoch"] == 2


# ------------------------------------------------------------------------------------------ precision, reproducibility


def test_mixed_precision_is_two_more_lines(trainer: Trainer) -> None:
    def learn() -> float:
        accelerate(amp=True)
        model = prepare_model(torch.nn.Linear(1, 1, bias=False))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(20):
            inputs = torch.ones(2, 1, device=get_device())
            optimizer.zero_grad()
            backward(torch.nn.functional.mse_loss(model(inputs), 4 * inputs))
            optimizer.step()
        return float(next(model.parameters()).detach())

    assert trainer.run(learn) == pytest.approx([4, 4], abs=0.1)


def test_two_runs_with_one_seed_are_one(trainer: Trainer) -> None:
    def noisy() -> float:
        enable_reproducibility(seed=3)
        loader = prepare_data_loader(DataLoader(TensorDataset(torch.randn(8, 1)), batch_size=2, shuffle=True))
        found = float(sum(batch.sum() * index for index, (batch,) in enumerate(loader)))
        torch.use_deterministic_algorithms(False)
        return found

    assert trainer.run(noisy) == trainer.run(noisy)


# ------------------------------------------------------------------------------------------ data


@RunIf(modules=["pandas", "pyarrow"])
def test_a_dataset_is_read_as_tensors_in_each_worker(trainer: Trainer) -> None:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False

    def add_up() -> float:
        shard = train.get_dataset_shard("train")
        total = sum(float(batch["id"].sum()) for batch in shard.iter_torch_batches(batch_size=2))
        summed = torch.tensor(total)
        torch.distributed.all_reduce(summed)
        return float(summed)

    data = {"train": ray.data.range(8, override_num_blocks=2)}
    assert trainer.run(add_up, dataset=data) == [28.0, 28.0]
