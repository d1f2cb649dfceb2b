"""Saving with one number of workers and going on with another."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from raysgd.core.state.state_codec import lend
from raysgd.testing import kill_worker
from raysgd.torch import TorchTrainer
from raysgd.torch.checkpoints.checkpoint_file import CheckpointCorruptedError
from raysgd.torch.driver import framework
from tests.helpers.s3_server import S3Server
from tests.helpers.sent import sent_by_load
from tests.torch.operators_for_tests import NUM_FEATURES, ScheduledOperator, equal, samples_seen

pytestmark = pytest.mark.integration

NUM_SAMPLES = 44


class Resumed(ScheduledOperator):
    """Everything that a state has, in a model whose dropout the config decides."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.extra: Any = None

    def make_model(self) -> torch.nn.Module:
        dropout = torch.nn.Dropout(self.config.get("dropout", 0.0))
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 8), dropout, torch.nn.Linear(8, 1))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "noise": numpy.random.random()}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().validate_batch(batch, batch_info), "noise": torch.rand(())}

    def state_dict(self) -> Any:
        return self.extra

    def load_state_dict(self, state_dict: Any) -> None:
        self.extra = state_dict


def config_of(**changes: Any) -> dict[str, Any]:
    return {"num_samples": NUM_SAMPLES, "shuffle": True, "optimizer": "adam", **changes}


def start(num_workers: int, **options: Any) -> TorchTrainer:
    config = config_of(**options.pop("config", {}))
    return TorchTrainer(
        training_operator_cls=options.pop("operator", Resumed),
        num_workers=num_workers,
        config=config,
        scheduler_step_freq="batch",
        num_cpus_per_worker=0.5,
        **options,
    )


@pytest.fixture
def alone(make_local: Callable[..., TorchTrainer]) -> Callable[..., TorchTrainer]:
    def make(**changes: Any) -> TorchTrainer:
        return make_local(Resumed, config=config_of(**changes), scheduler_step_freq="batch")

    return make


@pytest.fixture(scope="module")
def drops(ray_cluster: None) -> Iterator[TorchTrainer]:
    """Two workers that draw random numbers in each step."""
    with start(2, config={"dropout": 0.5}) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def three(ray_cluster: None) -> Iterator[TorchTrainer]:
    """Three workers, of another seed than everybody else."""
    with start(3, config={"seed": 9}) as trainer:
        yield trainer


def flat(seen: list[list[list[int]]]) -> list[int]:
    return [number for rank in seen for batch in rank for number in batch]


# ------------------------------------------------------------------------------------------------ the same number


@pytest.mark.promise("Checkpoints are complete")
@pytest.mark.parametrize("num_steps", [None, 3], ids=["between passes", "inside a pass"])
def test_two_workers_resume_to_the_last_bit(num_steps: int | None, drops: TorchTrainer, tmp_path: Path) -> None:
    drops.train(num_steps=num_steps)
    drops.validate()
    path = drops.save(tmp_path / "last.pt")
    results = [drops.train(), drops.validate(), drops.train(num_steps=4)]
    seen, end = drops.apply_all_operators(samples_seen), drops.state_dict()
    drops.load(path)
    assert equal([drops.train(), drops.validate(), drops.train(num_steps=4)], results)
    again = drops.apply_all_operators(samples_seen)
    assert [batches[-len(again[0]) :] for batches in seen] == again
    assert equal(drops.state_dict(), end)


def test_a_file_of_many_workers_sends_each_worker_its_own_random_states_only(
    drops: TorchTrainer, tmp_path: Path
) -> None:
    largest, stored = sent_by_load(drops, tmp_path / "few.pt", times=2)
    again, stored_again = sent_by_load(drops, tmp_path / "many.pt", times=100)
    assert 5000 < largest < 25_000
    assert abs(again - largest) < 100
    assert stored_again == stored


def test_a_loss_after_a_load_goes_back_to_what_was_loaded(ray_cluster: None, tmp_path: Path) -> None:
    """Also when the file is gone by then: the driver has the state itself."""
    with start(2, config={"dropout": 0.5}) as trainer:
        trainer.train()
        path = Path(trainer.save(tmp_path / "last.pt"))
        results, end = [trainer.train(), trainer.train()], trainer.state_dict()
        trainer.load(path)
        path.unlink()
        kill_worker(trainer, (0, 1))
        assert [trainer.train(), trainer.train()] == results
        assert equal(trainer.state_dict(), end)


def test_a_file_that_the_workers_do_not_find_is_loaded_all_the_same(drops: TorchTrainer, tmp_path: Path) -> None:
    path = Path(drops.save(tmp_path / "last.pt"))
    saved = drops.state_dict()
    drops.train()
    with path.open("rb") as file:
        path.unlink()
        drops.load(f"/proc/self/fd/{file.fileno()}")
    assert equal(drops.state_dict(), saved)


@pytest.mark.promise("Checkpoints in cloud storage")
def test_a_file_in_a_store_is_fetched_for_the_workers(drops: TorchTrainer, s3_server: S3Server) -> None:
    uri = drops.save(s3_server.uri("workers/last.pt"))
    saved = drops.state_dict()
    results = [drops.train(), drops.train()]
    drops.load(uri)
    assert equal(drops.state_dict(), saved)
    assert equal([drops.train(), drops.train()], results)


# ------------------------------------------------------------------------------------------------ another number


def test_a_state_goes_through_every_number_of_workers(
    three: TorchTrainer, drops: TorchTrainer, alone: Callable[..., TorchTrainer], tmp_path: Path
) -> None:
    first = alone(seed=5)
    first.train()
    first.apply_all_operators(lambda operator: operator.load_state_dict({"best": 0.25}))
    expected = first.state_dict()
    assert (expected["epoch"], expected["operator"]) == (1, {"best": 0.25})
    path = first.save(tmp_path / "1.pt")
    for trainer in (three, drops):
        trainer.load(path)
        assert equal(trainer.state_dict(), expected)
        path = trainer.save(tmp_path / f"{trainer.num_workers}.pt")
    last = alone()
    last.load(path)
    assert equal(last.state_dict(), expected)
    three.load_state_dict(expected)
    assert equal(three.state_dict(), expected)
    assert three.apply_all_operators(lambda operator: operator.extra) == [{"best": 0.25}] * 3  # type: ignore[attr-defined]
    assert three.train()["epoch"] == 2


@pytest.mark.promise("Each sample once")
def test_a_pass_goes_on_with_another_number_of_workers(
    three: TorchTrainer, drops: TorchTrainer, alone: Callable[..., TorchTrainer], tmp_path: Path
) -> None:
    """From 1 to 3 to 2 and back to 1 inside one shuffled pass: each sample once, and the steps of one process."""
    first = alone()
    first.train(num_steps=2)
    path = first.save(tmp_path / "1.pt")
    seen = flat(first.apply_all_operators(samples_seen))
    assert len(seen) == 8

    reference = alone(batch_size=12)
    three.apply_all_operators(samples_seen)
    for trainer in (three, reference):
        trainer.load(path)
        result = trainer.train(num_steps=1)
        assert (result["epoch"], result["num_samples"]) == (1, 12)
    torch.testing.assert_close(three.get_model().state_dict(), reference.get_model().state_dict(), rtol=1e-6, atol=1e-6)
    seen += flat(three.apply_all_operators(samples_seen))

    drops.apply_all_operators(samples_seen)
    drops.load(three.save(tmp_path / "3.pt"))
    drops.train(num_steps=2)
    seen += flat(drops.apply_all_operators(samples_seen))
    assert drops.apply_all_operators(lambda operator: operator.global_step) == [5, 5]

    last = alone()
    last.load(drops.save(tmp_path / "2.pt"))
    result = last.train()
    assert (result["epoch"], result["num_samples"]) == (1, NUM_SAMPLES - 8 - 12 - 16)
    assert sorted(seen + flat(last.apply_all_operators(samples_seen))) == list(range(NUM_SAMPLES))
    assert last.train()["num_samples"] == NUM_SAMPLES


# ------------------------------------------------------------------------------------------------ what does not fit


@pytest.mark.usefixtures("patient")
def test_what_does_not_fit_leaves_the_workers_as_they_were(three: TorchTrainer, tmp_path: Path) -> None:
    three.train()  # whatever is left of a pass
    three.train(num_steps=2)
    before = three.state_dict()
    pids = [info.pid for info in three.worker_group.infos]
    path = three.save(tmp_path / "last.pt")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointCorruptedError, match=r"last\.pt"):
        three.load(path)
    with pytest.raises(FileNotFoundError):
        three.load(tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"2 models.*registered 1"):
        three.load_state_dict({**before, "models": before["models"] * 2})
    with pytest.raises(ValueError, match=r"has no .schedulers."):
        three.load_state_dict({key: value for key, value in before.items() if key != "schedulers"})
    with pytest.raises(ValueError, match=r"(?s)nothing was loaded.*on ranks 0, 1, 2") as caught:
        three.load_state_dict({**before, "models": [{"weight": torch.ones(1)}]})
    assert str(caught.value).count("raised at") == 1
    assert equal(three.state_dict(), before)
    assert [info.pid for info in three.worker_group.infos] == pids
    assert three.train()["num_samples"] == NUM_SAMPLES - 24


def test_workers_that_do_not_see_the_file_get_the_state_from_the_driver(three: TorchTrainer, tmp_path: Path) -> None:
    path = three.save(tmp_path / "last.pt")
    before = three.state_dict()
    three.train()
    with path.open("rb") as file:
        by_descriptor = f"/proc/self/fd/{file.fileno()}"  # another file, or none, in the workers
        three.load(by_descriptor)
    assert equal(three.state_dict(), before)


def test_a_loaded_state_survives_the_end_of_all_workers_and_of_its_file(ray_cluster: None, tmp_path: Path) -> None:
    with start(2) as trainer:
        trainer.train()
        path = trainer.save(tmp_path / "last.pt")
        before = trainer.state_dict()
        trainer.train()
        pids = [info.pid for info in trainer.worker_group.infos]
        trainer.load(path)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        path.unlink()
        assert equal(trainer.state_dict(), before)


def test_a_file_that_is_written_to_while_a_part_is_loaded_leaves_the_workers_as_they_were(
    three: TorchTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = three.save(tmp_path / "last.pt")
    os.utime(path, (1, 1))
    three.train()
    before = three.state_dict()

    def written_to(state: Any) -> Any:
        path.open("r+b").write(b"PK")
        return lend(state)

    monkeypatch.setattr(framework, "lend", written_to)
    with pytest.raises(CheckpointCorruptedError, match="written to while it was read"):
        three.load(path, parts=("models",))
    assert equal(three.state_dict(), before)


# ------------------------------------------------------------------------------------------------ in the background
