"""Runs on real workers that validate, save and end inside epochs: held at a step, and going on from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator, testing
from raysgd.callbacks import Callback, Checkpointing, CSVLogger, Run
from raysgd.core.history.history import History
from raysgd.torch import TorchTrainer
from tests.torch.ledger import Ledger, uses
from tests.torch.operators_for_tests import DropoutOperator, ScheduledOperator, equal
from tests.torch.streamed import StreamOperator

pytestmark = pytest.mark.integration

NUM_EPOCHS = 2
CONFIG = {"num_samples": 192, "batch_size": 12, "step_s": 0.01}  # 16 steps an epoch


class Validations(Callback):
    """Keeps the results of validations inside epochs, and may kill a worker after the first one."""

    def __init__(self, kills: int | None = None) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self._kills = kills

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        self.steps.append(step)
        self.losses.append(metrics["val_loss"])
        if self._kills is not None:
            testing.kill_worker(run.trainer, self._kills)
            self._kills = None


def make(num_workers: int, operator_cls: Any = Ledger, **options: Any) -> TorchTrainer:
    given = {"config": CONFIG, "split_batches": True, "num_cpus_per_worker": 0.5, "seed": 3, **options}
    return TorchTrainer(training_operator_cls=operator_cls, num_workers=num_workers, **given)


def without_times(history: History) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in history]


class Draws(ScheduledOperator, DropoutOperator):
    """Draws random numbers in training and in validation, and has a scheduler."""

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        torch.rand(7)
        return super().validate_batch(batch, batch_info)


@pytest.mark.parametrize("more", [{}, {"use_local": True}, {"strategy": "fsdp"}], ids=str)
def test_the_training_has_the_same_bits_with_and_without_validations_inside(
    more: dict[str, Any], ray_cluster: None, tmp_path: Path
) -> None:
    found = []
    for number, every in enumerate((None, 4)):
        config = {"num_samples": 96, "shuffle": True, "optimizer": "adam"}
        options: dict[str, Any] = {"config": config, "split_batches": False, **more}
        options |= {"accumulate_grad_batches": 2, "scheduler_step_freq": "batch"}
        with make(2, Draws, **options) as trainer:
            told, logger = Validations(), CSVLogger(tmp_path / f"{number}.csv")
            given: dict[str, Any] = {"callbacks": [told, logger], "log_every_n_steps": 3}
            history = trainer.fit(NUM_EPOCHS, validate_every_n_steps=every, **given)
            found.append((trainer.state_dict(), without_times(history), told.steps))
    (state, rows, none), (with_validations, same_rows, steps) = found
    assert equal(with_validations, state)
    assert same_rows == rows
    assert (none, steps) == ([], [4, 8, 16, 20])  # 12 and 24 are the ends of epochs


class SomeLabels(TrainingOperator):
    """Classifies; some labels are ignored, so that batches count by their labels."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        labels = torch.where(torch.rand(99) < config["ignored"], -100, torch.randint(0, 3, (99,)))
        data = TensorDataset(torch.randn(99, 5), labels)
        model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), 0.01),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        self.register_data(train_loader=DataLoader(data, 12), validation_loader=DataLoader(data, 50))


@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_the_first_step_after_a_validation_inside_is_weighted_with_the_same_bits(
    ignored: float, ray_cluster: None
) -> None:
    states = []
    for every in (None, 4):
        with make(2, SomeLabels, config={"ignored": ignored}) as trainer:
            trainer.fit(NUM_EPOCHS, validate_every_n_steps=every)
            states.append(trainer.state_dict())
    assert equal(*states)


@pytest.fixture(scope="module")
def whole(ray_cluster: None) -> Iterator[tuple[History, list[float]]]:
    """The run that nothing disturbs, and the losses of its validations inside epochs."""
    with make(2) as trainer:
        told = Validations()
        yield trainer.fit(NUM_EPOCHS, callbacks=[told], validate_every_n_steps=5), told.losses


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_after", [False, True], ids=["in it", "after it"])
def test_a_worker_that_dies_in_a_validation_inside_or_after_it_costs_no_sample(
    rank: int, is_after: bool, whole: tuple[History, list[float]]
) -> None:
    with make(2) as trainer:
        told = Validations(kills=rank if is_after else None)
        if not is_after:
            testing.kill_worker(trainer, rank, at="validate")
        history = trainer.fit(NUM_EPOCHS, callbacks=[told], validate_every_n_steps=5)
        assert uses(trainer) == {NUM_EPOCHS}
        assert any(event.is_failure for event in trainer.history.events)
    assert told.steps == [5, 10, 15, 20, 25, 30]
    assert told.losses == pytest.approx(whole[1], rel=1e-5)
    for name in ("epoch", "num_samples", "batch_count"):
        assert history[name] == whole[0][name]
    assert history["train_loss"] == pytest.approx(whole[0]["train_loss"], rel=1e-5)


def test_a_run_ends_at_a_step_and_goes_on_with_more_of_them_and_other_workers(
    whole: tuple[History, list[float]], tmp_path: Path
) -> None:
    names, steps = [], []
    for num_workers, max_steps in ((3, 6), (2, 21), (4, 32)):
        with make(num_workers) as trainer:
            saving, told = Checkpointing(tmp_path / "files", keep_last=1), Validations()
            options: dict[str, Any] = {"validate_every_n_steps": 5, "resume_from": "auto"}
            history = trainer.fit(max_steps=max_steps, callbacks=[saving, told], **options)
            names.append(Path(str(saving.newest)).name)
            steps += told.steps
            assert history.stop_reason is None
            used = uses(trainer)
    assert names == ["epoch_0000_step_000006.ckpt", "epoch_0001_step_000005.ckpt", "epoch_0002.ckpt"]
    assert steps == [5, 10, 15, 20, 25, 30]
    assert used == {NUM_EPOCHS}
    assert history["num_samples"] == whole[0]["num_samples"]
    assert history["train_loss"] == pytest.approx(whole[0]["train_loss"], rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_worker_that_dies_before_the_first_step_of_a_resumed_epoch_had_taken_over_counts(
    rank: int, whole: tuple[History, list[float]], tmp_path: Path
) -> None:
    with make(3) as trainer:
        trainer.fit(max_steps=6, callbacks=[Checkpointing(tmp_path)])
    with make(2) as trainer:
        testing.kill_worker(trainer, rank, at="step:0")
        history = trainer.fit(NUM_EPOCHS, resume_from="auto", callbacks=[Checkpointing(tmp_path)])
        assert uses(trainer) == {NUM_EPOCHS}
        assert any(event.is_failure for event in trainer.history.events)
    assert history["num_samples"] == whole[0]["num_samples"]
    assert history["train_loss"] == pytest.approx(whole[0]["train_loss"], rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_ends_at_its_last_step_though_a_worker_dies_as_it_stops_there(
    rank: int, ray_cluster: None, tmp_path: Path
) -> None:
    with make(2) as trainer:
        testing.kill_worker(trainer, rank, at="snapshot")
        saving = Checkpointing(tmp_path)
        trainer.fit(max_steps=6, callbacks=[saving])
        assert any(event.is_failure for event in trainer.history.events)
        assert Path(str(saving.newest)).name == "epoch_0000_step_000006.ckpt"
        assert uses(trainer) == {0, 1}


def test_files_are_written_behind_the_training_also_where_a_worker_dies(
    whole: tuple[History, list[float]], tmp_path: Path
) -> None:
    with make(2) as trainer:
        testing.kill_worker(trainer, 0, at="step:9")
        saving = Checkpointing(tmp_path, every_n_steps=5, keep_last=None, blocking=False)
        history = trainer.fit(NUM_EPOCHS, callbacks=[saving])
        assert uses(trainer) == {NUM_EPOCHS}
        assert any(event.is_failure for event in trainer.history.events)
        state = trainer.state_dict()
        trainer.load(tmp_path / "epoch_0001_step_000004.ckpt")  # the state of that step, and not of a later one
        trainer.fit(NUM_EPOCHS, resume_from=tmp_path / "epoch_0001_step_000004.ckpt")
        assert uses(trainer) == {NUM_EPOCHS}
        for name, tensor in trainer.state_dict()["models"][0].items():
            torch.testing.assert_close(tensor, state["models"][0][name], rtol=1e-5, atol=1e-6)
    assert history["num_samples"] == whole[0]["num_samples"]
    names = sorted(path.name for path in tmp_path.glob("*_step_*.ckpt"))
    assert names == [f"epoch_{step // 16:04d}_step_{step % 16:06d}.ckpt" for step in range(5, 32, 5)]


class Streamed(StreamOperator):
    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        torch.rand(7)
        return super().validate_batch(batch, batch_info)


def test_a_stream_is_validated_inside_and_ends_at_a_step(ray_cluster: None, tmp_path: Path) -> None:
    config = {"kind": "shuffled"}
    with make(2, Streamed, config=config) as trainer:
        wanted = trainer.fit(NUM_EPOCHS)
        state = trainer.state_dict()
    with make(2, Streamed, config=config) as trainer:
        told, options = Validations(), {"validate_every_n_steps": 3, "log_every_n_steps": 0}
        first = trainer.fit(NUM_EPOCHS, max_steps=7, callbacks=[told], **options)
        history = trainer.fit(NUM_EPOCHS, callbacks=[told], **options)  # in the same workers
        assert told.steps[:2] == [3, 6]
        assert equal(trainer.state_dict(), state)
    assert [*first, *without_times(history)] == without_times(wanted)
