"""The trainer on real workers. Most tests share one trainer, because starting workers is what takes time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.exceptions import InactiveWorkerGroupError, StepMismatchError, WorkerError
from raysgd.storage import Folder
from raysgd.train import Trainer, TrainingCallback
from raysgd.train.backend import BackendConfig
from raysgd.train.callbacks import JsonLoggerCallback
from raysgd.train.worker_group import WorkerHandle
from tests.helpers.run_if import RunIf
from tests.helpers.s3_server import S3Server
from tests.train import lab

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def shared(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    half = {"CPU": 0.5}  # beside those that a test starts for itself
    trainer = Trainer("torch", num_workers=2, logdir=tmp_path_factory.mktemp("shared"), resources_per_worker=half)
    trainer.start()
    yield trainer
    trainer.shutdown()


@pytest.fixture(scope="module")
def alone(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A started trainer of one worker."""
    made = Trainer(BackendConfig(), logdir=tmp_path_factory.mktemp("alone"), resources_per_worker={"CPU": 0.5})
    made.start()
    yield made
    made.shutdown()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    """A trainer of two workers that nothing connects, not started."""
    made = Trainer(BackendConfig(), num_workers=2, logdir=tmp_path)
    yield made
    made.shutdown()


class Recorder(TrainingCallback):
    """Writes down what it is told."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.started: list[tuple[str, Any]] = []
        self.results: list[list[dict[str, Any]]] = []
        self.ended: list[bool] = []
        self._fails_at = fails_at

    def start_training(self, logdir: str, config: Any = None, **info: Any) -> None:
        super().start_training(logdir)
        self.started.append((logdir, config))

    def handle_result(self, results: list[dict[str, Any]]) -> None:  # type: ignore[override]
        self.results.append(results)
        if len(self.results) == self._fails_at:
            raise ArithmeticError("the callback is broken")

    def finish_training(self, error: bool = False, **info: Any) -> None:
        self.ended.append(error)


@pytest.mark.promise("A function")
def test_a_run_reports_saves_and_returns(shared: Trainer) -> None:
    recorder = Recorder()
    config = {"num_steps": 3, "save_every": 2}
    assert shared.run(lab.count_up, config, callbacks=[recorder]) == [0, 0]
    assert lab.numbers(recorder.results) == [[0, 0], [1, 1], [2, 2]]
    assert [[result["rank"] for result in step] for step in recorder.results] == [[0, 1]] * 3
    assert recorder.results[0][0]["size"] == 2
    assert recorder.started == [(str(shared.latest_run_dir), config)]
    assert recorder.ended == [False]
    assert shared.latest_checkpoint["number"] == 2
    assert sorted(path.name for path in shared.latest_checkpoint_dir.iterdir()) == [
        "checkpoint_000001",
        "checkpoint_000002",
    ]
    assert Trainer.load_checkpoint_from_path(shared.latest_checkpoint_dir / "checkpoint_000001")["number"] == 0


def test_a_run_goes_to_a_store(
    shared: Trainer, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysgd.train.constants.DEFAULT_RESULTS_DIR", tmp_path)
    before = shared.logdir
    shared.logdir = results = shared.create_logdir(s3_server.uri("trainer"))
    try:
        logger = JsonLoggerCallback()
        assert shared.run(lab.count_up, {"num_steps": 3, "save_every": 2}, callbacks=[logger]) == [0, 0]
        run_dir, path = shared.latest_run_dir, shared.latest_checkpoint_path
        assert isinstance(run_dir, Folder)
        assert run_dir.names() == ["checkpoints", "results.json"]
        assert run_dir.read("results.json") == logger.log_path.read_bytes()
        assert (run_dir / "checkpoints").names() == ["checkpoint_000001", "checkpoint_000002"]
        assert shared.run(lab.count_up, {"num_steps": 5}, checkpoint=path) == [3, 3]
    finally:
        shared.logdir = before
    assert isinstance(results, Folder)
    assert len(results.names()) == 2


def test_results_can_be_taken_one_by_one(shared: Trainer) -> None:
    iterator = shared.run_iterator(lab.count_up, {"num_steps": 3})
    assert [result["number"] for result in next(iterator)] == [0, 0]
    assert not iterator.is_finished()
    assert iterator.get_final_results() is None
    with pytest.raises(RuntimeError, match="already active"):
        shared.run(lab.count_up, {"num_steps": 1})
    assert iterator.get_final_results(force=True) == [0, 0]
    assert iterator.is_finished()
    assert list(iterator) == []
    assert shared.latest_checkpoint["number"] == 2


def test_an_iterator_of_a_run_that_failed_is_at_its_end(shared: Trainer) -> None:
    def function() -> None:
        train.report(number=0)
        raise KeyError("bad sample 7")

    iterator = shared.run_iterator(function)
    assert [result["number"] for result in next(iterator)] == [0, 0]
    with pytest.raises(KeyError, match="bad sample 7"):
        next(iterator)
    assert iterator.is_finished()
    assert iterator.get_final_results() is None
    assert iterator.get_final_results(force=True) is None
    assert list(iterator) == []


@pytest.mark.usefixtures("patient")
def test_an_exception_of_all_ranks_is_raised_as_what_it_is_and_keeps_the_workers(shared: Trainer) -> None:
    import os

    pids = shared.run(os.getpid)
    recorder = Recorder()

    def function() -> None:
        raise KeyError("bad sample 7")

    with pytest.raises(KeyError, match="bad sample 7") as caught:
        shared.run(function, callbacks=[recorder])
    assert isinstance(caught.value, WorkerError)
    assert [fault.rank for fault in caught.value.faults] == [0, 1]
    assert "in function" in caught.value.faults[0].location
    assert recorder.ended == [True]
    assert shared.run(os.getpid) == pids


@pytest.mark.usefixtures("patient")
def test_an_exception_that_speaks_of_connections_is_no_lost_worker(shared: Trainer, tmp_path: Path) -> None:
    def function() -> None:
        import tempfile

        tempfile.mkstemp(dir=tmp_path)
        raise RuntimeError("database: connection refused")

    before = list(shared.history.events)
    with pytest.raises(RuntimeError, match="database: connection refused") as caught:
        shared.run(function)
    assert isinstance(caught.value, WorkerError)
    assert [fault.rank for fault in caught.value.faults] == [0, 1]
    assert len(list(tmp_path.iterdir())) == 2, "the function was started once on each rank"
    assert shared.history.events == before, "no worker was restarted"


def test_an_exception_of_one_rank_ends_all_although_others_go_on(trainer: Trainer) -> None:
    trainer.start()
    with pytest.raises(KeyError, match="bad sample 7") as caught:
        trainer.run(lab.fail_on_rank_1)
    assert isinstance(caught.value, WorkerError)
    assert caught.value.faults[0].rank == 1


def test_functions_that_are_out_of_step_are_ended_and_the_trainer_can_be_used_again(trainer: Trainer) -> None:
    def function() -> None:
        train.report(number=0)
        if train.world_rank() == 0:
            train.report(number=1)

    recorder = Recorder()
    trainer.start()
    with pytest.raises(StepMismatchError, match="rank 1"):
        trainer.run(function, callbacks=[recorder])
    assert lab.numbers(recorder.results) == [[0, 0]]
    assert trainer.run(train.world_rank) == [0, 1]


def test_a_broken_callback_ends_the_run_and_all_callbacks_hear_of_it(alone: Trainer) -> None:
    broken, other = Recorder(fails_at=1), Recorder()
    with pytest.raises(ArithmeticError, match="the callback is broken"):
        alone.run(lab.count_up, {"num_steps": 3}, callbacks=[broken, other])
    assert (broken.ended, other.ended, other.results) == ([True], [True], [])
    assert alone.run(lab.count_up, {"num_steps": 1}) == [0]


def test_lost_workers_are_replaced_and_the_function_goes_on_from_its_checkpoint(
    trainer: Trainer, tmp_path: Path
) -> None:
    def note_process() -> None:
        import os

        (tmp_path / f"process_{os.getpid()}").touch()

    recorder = Recorder()
    trainer.start(note_process)
    config = {"num_steps": 4, "deaths": [(1, 1, tmp_path / "first"), (0, 3, tmp_path / "second")]}
    assert trainer.run(lab.count_up, config, callbacks=[recorder]) == [3, 3]
    seen = [first for first, _ in lab.numbers(recorder.results)]
    assert seen == sorted(seen)  # what was reported just before a death may be seen twice, nothing is lost
    assert set(seen) == {0, 1, 2, 3}
    assert len(list(trainer.latest_checkpoint_dir.iterdir())) == 4
    assert recorder.ended == [False]
    assert len(list(tmp_path.glob("process_*"))) == 6  # the hook ran in those that came for the lost ones, too


def test_a_trainer_can_be_started_again(trainer: Trainer) -> None:
    with pytest.raises(RuntimeError, match="call `start`"):
        trainer.run(lab.count_up)
    trainer.shutdown()  # harmless
    for _ in range(2):
        trainer.start()
        for call in (trainer.start, lambda: trainer.to_tune_trainable(lab.count_up)):
            with pytest.raises(RuntimeError, match="already started"):
                call()
        assert trainer.run(train.world_size) == [2, 2]
        trainer.shutdown()
    with pytest.raises(RuntimeError):
        trainer.run(lab.count_up)


def test_an_exception_of_the_hook_is_the_callers(trainer: Trainer) -> None:
    def broken() -> None:
        raise LookupError("no such disk")

    with pytest.raises(LookupError, match="no such disk"):
        trainer.start(broken)
    assert not trainer.is_started


class Counter:
    def __init__(self, first: int, step: int = 1) -> None:
        self.value, self.step = first, step

    def up(self) -> int:
        self.value += self.step
        return self.value

    def kill(self) -> str:
        return "only a method"

    def total(self) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor(float(self.value))
        dist.all_reduce(value)
        return float(value)


def call_until_it_is_dead(handle: WorkerHandle) -> None:
    import ray

    while True:
        ray.get(handle.up.remote())


def test_a_class_of_the_users_own_lives_in_connected_workers_and_anew_after_a_loss(tmp_path: Path) -> None:
    import ray
    from ray.exceptions import RayActorError

    trainer = Trainer("torch", num_workers=2, logdir=tmp_path)
    group = trainer.to_worker_group(Counter, 1, step=2)
    try:
        assert ray.get(group[0].up.remote()) == 3
        assert ray.get([worker.total.remote() for worker in group]) == [4.0, 4.0]
        with pytest.raises(RuntimeError, match="already started"):
            trainer.to_worker_group(Counter, 1)
        old = group[0]
        assert ray.get(old.kill.remote()) == "only a method"
        group[1].kill()
        ray.kill(old.ray_actor)
        for handle in group[1], old:
            with pytest.raises(RayActorError):
                call_until_it_is_dead(handle)
        group.restart()
        with pytest.raises(InactiveWorkerGroupError, match=r"get a new handle, `group\[0\]`"):
            old.up.remote()
        assert ray.get([worker.total.remote() for worker in group]) == [2.0, 2.0]  # connected, from the beginning
    finally:
        group.shutdown()


@pytest.mark.parametrize("amp", [False, True])
def test_a_model_of_pytorch_is_kept_equal_and_arrives_without_its_wrapper(shared: Trainer, amp: bool) -> None:
    import torch

    first, second = shared.run(lab.fit, {"num_epochs": 10, "amp": amp})
    assert first == second == pytest.approx([2.0, 1.0], abs=0.05)
    checkpoint = shared.latest_checkpoint
    assert type(checkpoint["model"]) is torch.nn.Linear
    assert [float(parameter.detach()) for parameter in checkpoint["model"].parameters()] == first
    assert set(checkpoint["state"]) == {"module.weight", "module.bias"}


def test_a_divided_model_learns_as_a_whole_one_and_goes_on_from_its_checkpoint(shared: Trainer) -> None:
    config = {"num_epochs": 4, "strategy": "ddp"}
    expected = shared.run(lab.fit_divided, config)[0]
    assert shared.latest_checkpoint is not None
    whole = shared.latest_checkpoint
    config |= {"strategy": "fsdp", "options": {"min_block_parameters": 1}}
    shared.run(lab.fit_divided, {**config, "num_epochs": 2})
    halfway = shared.latest_checkpoint
    assert halfway["model"].keys() == whole["model"].keys()
    assert shared.run(lab.fit_divided, config, checkpoint=halfway) == [pytest.approx(expected, rel=1e-5)] * 2
    assert halfway["optimizer"]["state"].keys() == whole["optimizer"]["state"].keys()
    assert shared.run(lab.fit_divided, {**config, "strategy": None}, checkpoint=whole)[0] == pytest.approx(expected)


def read_twice() -> list[list[int]]:
    """As rows, and as batches of tensors, the way of the guides of Ray 1."""
    shard = train.get_dataset_shard("train")
    batches = shard.to_torch(label_column="id", feature_columns=["x"], batch_size=2)
    return [
        sorted(row["id"] for row in shard.iter_rows()),
        sorted(int(label) for features, labels in batches for label in labels if features.shape[1:] == (1,)),
    ]


@RunIf(modules=["pandas", "pyarrow"])
def test_each_row_of_ray_data_is_in_one_shard_and_can_be_read_again(shared: Trainer) -> None:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.from_items([{"id": number, "x": number / 2} for number in range(10)], override_num_blocks=3)
    returned: list[Any] = shared.run(read_twice, dataset={"train": dataset})
    assert [[len(part) for part in parts] for parts in returned] == [[5, 5], [5, 5]]
    assert all(first == again for first, again in returned)
    assert sorted(returned[0][0] + returned[1][0]) == list(range(10))


def test_data_that_cannot_be_divided_after_all_leaves_the_workers_as_they_were(shared: Trainer) -> None:
    import os

    class Broken:
        def split(self, n: int, *, equal: bool) -> list[Any]:
            raise ArithmeticError("too few rows")

    pids = shared.run(os.getpid)
    with pytest.raises(ArithmeticError, match="too few rows"):
        shared.run(lab.count_up, {"num_steps": 1}, dataset=Broken())
    assert shared.run(os.getpid) == pids


def test_a_large_checkpoint_that_cannot_leave_the_worker_is_an_error(alone: Trainer) -> None:
    def function() -> None:
        import numpy as np

        train.save_checkpoint(weights=np.zeros(1 << 18), stuck=Stuck())
        train.report(number=1)

    with pytest.raises(LookupError, match="cannot be pickled"):
        alone.run(function)
    assert alone.run(train.world_size) == [1]


class Stuck:
    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise LookupError("cannot be pickled")


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        pytest.param("exception", KeyError, marks=pytest.mark.soak),
        pytest.param("mismatch", StepMismatchError, marks=pytest.mark.soak),
        ("callback", ArithmeticError),
    ],
)
def test_a_large_checkpoint_that_was_handed_over_arrives_although_the_run_fails(
    trainer: Trainer, ending: str, error: type[Exception]
) -> None:
    def function() -> None:
        import time

        import numpy as np

        train.save_checkpoint(number=1, weights=np.zeros(1 << 18), slow=Slow())
        if ending == "exception" and train.world_rank() == 1:
            raise KeyError("bad sample 7")
        if ending == "exception":
            time.sleep(600)
        if ending == "callback" or train.world_rank() == 0:
            train.report(number=1)

    trainer.start()
    with pytest.raises(error):
        trainer.run(function, callbacks=[Recorder(fails_at=1)])
    assert trainer.latest_checkpoint["number"] == 1
    assert trainer.latest_checkpoint_path is not None


def test_a_large_checkpoint_that_was_handed_over_is_gone_on_from_although_another_worker_dies(
    trainer: Trainer, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"

    def function() -> int:
        import os
        import signal
        import time

        import numpy as np

        checkpoint = train.load_checkpoint()
        if not lab.claim(flag / str(train.world_rank())):
            return checkpoint["number"] if checkpoint else 0
        train.save_checkpoint(number=1, weights=np.zeros(1 << 18), slow=Slow())
        train.report(number=1)
        if train.world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return -1

    flag.mkdir()
    trainer.start()
    assert trainer.run(function) == [1, 1]


class Slow:
    """Takes longer to leave its worker than it takes to see that another one failed."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        import time

        time.sleep(1.5)
        return Slow, ()
