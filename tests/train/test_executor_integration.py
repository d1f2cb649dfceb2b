"""The executor and the worker group, driven as their developers do.

Covers `raysgd.train.worker_group` and `raysgd.train.worker_group`: views of the workers that an executor
starts.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.exceptions import InactiveWorkerGroupError, TrainBackendError, TrainingWorkerError, WorkersLostError
from raysgd.train.backend import Backend, BackendConfig
from raysgd.train.executor import BackendExecutor
from raysgd.train.session import TrainingResultType
from raysgd.train.worker_group import WorkerGroup
from tests.train import lab

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


Start = Callable[..., BackendExecutor]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts executors, and ends their workers behind the test."""
    executors: list[BackendExecutor] = []

    def start(config: BackendConfig | None = None, **options: Any) -> BackendExecutor:
        executors.append(BackendExecutor(config or BackendConfig(), **{"num_workers": 2, **options}))
        executors[-1].start()
        return executors[-1]

    yield start
    for executor in executors:
        executor.shutdown()


@pytest.fixture
def bundles() -> Iterator[Any]:
    """A placement group of the user's own."""
    from ray.util import placement_group, remove_placement_group

    made = placement_group([{"CPU": 0.5}, {"CPU": 0.5}])
    yield made
    remove_placement_group(made)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_works_before_the_start() -> None:
    executor = BackendExecutor(BackendConfig())
    assert not executor.is_started
    assert not executor.is_started()
    with pytest.raises(InactiveWorkerGroupError):
        len(executor.worker_group)
    with pytest.raises(InactiveWorkerGroupError):
        executor.worker_group.execute(os.getpid)
    for call in (executor.fetch_next_result, executor.finish_training, lambda: executor.start_training(die)):
        with pytest.raises(InactiveWorkerGroupError):
            call()


def test_a_training_is_driven_by_hand(start: Start, tmp_path: Path) -> None:
    executor = start()
    assert executor.is_started()
    assert len(executor.worker_group) == 2
    for call in (executor.fetch_next_result, executor.get_next_results, executor.pause_reporting):
        with pytest.raises(TrainBackendError, match="call `start_training`"):
            call()

    def function() -> int:
        train.report(number=1)
        train.save_checkpoint(number=1)
        train.save_checkpoint(number=2)
        train.report(number=2)
        return train.world_rank()

    executor.start_training(function, tmp_path, latest_checkpoint_id=100)
    with pytest.raises(TrainBackendError, match="already active"):
        executor.start_training(function)
    results = executor.fetch_next_result()
    assert results is not None
    assert [result["number"] for result in results] == [1, 1]
    step = executor.get_next_results()
    assert step is not None
    assert [result.type for result in step] == [TrainingResultType.CHECKPOINT] * 2
    assert [result.data.get("number") for result in step] == [1, None]
    assert executor.finish_training() == [0, 1]
    assert executor.latest_checkpoint_id == 102
    assert executor.latest_checkpoint_dir == tmp_path / "checkpoints"
    assert executor.latest_checkpoint["number"] == 2
    assert executor.run(sum, [1, 2]) == [3, 3]
    with pytest.raises(TrainBackendError, match="call its `shutdown`"):
        executor.worker_group.shutdown()
    assert len(executor.worker_group) == 2
    with pytest.raises(ZeroDivisionError):
        executor.run(divmod, 1, 0)


def has_process_group() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def test_workers_of_pytorch_leave_their_group_at_a_word_and_are_ended_as_others(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    from raysgd.train.torch import TorchBackend, TorchConfig

    executor = start(TorchConfig())
    assert executor.run(has_process_group) == [True, True]
    TorchBackend().on_shutdown(executor.get_worker_group(), TorchConfig())
    assert executor.run(has_process_group) == [False, False]
    executor.shutdown()
    assert [record for record in caplog.records if "on_shutdown" in record.getMessage()] == []


class ChattyBackend(Backend):
    """Writes down in the workers what is asked of it, and multiplies what leaves them."""

    def on_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, ChattyConfig)
        worker_group.execute(_note, f"{backend_config.word} of {len(worker_group)}")
        worker_group.execute_single(0, _note, "you are the first")
        if backend_config.flag is not None and lab.claim(backend_config.flag):
            worker_group.execute_single(1, die)

    def on_training_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        worker_group.execute(_note, "training starts")

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        raise ConnectionError("logged, no more")

    @staticmethod
    def encode_data(data_dict: dict[str, Any]) -> Any:
        return ("encoded", data_dict)

    @staticmethod
    def decode_data(encoded_data: Any) -> dict[str, Any]:
        kind, data = encoded_data
        assert kind == "encoded"
        return {**data, "decoded": True}


class ChattyConfig(BackendConfig):
    def __init__(self, flag: Path | None = None) -> None:
        self.word, self.flag = "hello", flag

    @property
    def backend_cls(self) -> type[Backend]:
        return ChattyBackend


def _note(text: str) -> None:
    os.environ["RAYSGD_TEST_NOTES"] = os.environ.get("RAYSGD_TEST_NOTES", "") + text + "; "


def _notes() -> str:
    train.report(number=1)
    train.save_checkpoint(number=2)
    return os.environ["RAYSGD_TEST_NOTES"]


def test_a_backend_of_the_users_own_is_told_of_everything_and_survives_a_death(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = start(ChattyConfig(tmp_path / "flag"))
    assert executor._get_num_failures() == 1, "a worker died in `on_start`"
    executor.start_training(_notes)
    results = executor.fetch_next_result()
    assert results is not None
    assert [result["decoded"] for result in results] == [True, True]
    assert executor.finish_training() == [
        "hello of 2; you are the first; training starts; ",
        "hello of 2; training starts; ",
    ]
    assert executor.latest_checkpoint["decoded"]
    executor.shutdown()
    assert caplog.text.count("logged, no more") == 1
    executor.start()
    executor.shutdown(patience_s=0)
    assert caplog.text.count("logged, no more") == 1, "without patience it is not told"


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_cpus_per_worker": -1},
        {"num_gpus_per_worker": -1},
        {"actor_cls_args": [1]},
        {"actor_cls_kwargs": {"a": 1}},
    ],
)
def test_a_group_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_(workers|cpus_per_worker|gpus_per_worker)|actor_cls"):
        WorkerGroup(**options)


def test_a_group_of_workers_grows_shrinks_and_starts_again() -> None:
    import ray

    group = WorkerGroup(num_workers=2, num_cpus_per_worker=0.5)
    try:
        with pytest.raises(RuntimeError, match="already started"):
            group.start()
        pids = group.execute(os.getpid)
        assert len({*pids, os.getpid()}) == 3
        assert group.execute_single(1, os.getpid) == pids[1]
        assert ray.get(group.execute_async(pow, 2, 3)) == [8, 8]
        assert group.execute_single(-1, os.getpid) == pids[1]
        for index in (2, -3):
            with pytest.raises(ValueError, match="there are 2 workers"):
                group.execute_single(index, os.getpid)
        with pytest.raises(ZeroDivisionError):
            group.execute(divmod, 1, 0)
        metadata = group.workers[0].metadata
        assert (metadata.node_id, metadata.gpu_ids) == (ray.get_runtime_context().get_node_id(), [])
        group.add_workers(1)
        assert len(group) == 3
        group.remove_workers([0])
        assert group.execute(os.getpid)[0] == pids[1]
        with pytest.raises(TrainingWorkerError, match="worker 1 died"):
            gather_death(group)
        group.shutdown()
        assert len(group) == 0
        with pytest.raises(RuntimeError, match="There are no workers"):
            group.execute(os.getpid)
        group.start()
        assert len(group) == 2
    finally:
        group.shutdown(patience_s=0)


def test_workers_go_into_a_placement_group_of_the_users_own_and_leave_it_alone(bundles: Any) -> None:
    from ray.util import placement_group_table

    group = WorkerGroup(num_workers=2, num_cpus_per_worker=0.5, placement_group=bundles)
    try:
        assert set(group.execute(placement_group_of)) == {bundles.id.hex()}
        with pytest.raises(ValueError, match="resources for 2 workers"):
            group.add_workers(1)
        assert len(group) == 2
    finally:
        group.shutdown()
    assert placement_group_table(bundles)["state"] == "CREATED"


@pytest.mark.parametrize(("option", "is_outside"), [("default", False), (None, True)])
def test_workers_may_leave_the_placement_group_of_the_one_who_starts_them(
    bundles: Any, option: str | None, is_outside: bool
) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(bundles, placement_group_capture_child_tasks=True)
    starter = ray.remote(num_cpus=0.5, scheduling_strategy=strategy)(start_one_inside)
    assert (ray.get(starter.remote(option)) != bundles.id.hex()) is is_outside


def start_one_inside(option: str | None) -> str:
    group = WorkerGroup(num_cpus_per_worker=0.5, placement_group=option)
    try:
        [found] = group.execute(placement_group_of)
        return str(found)
    finally:
        group.shutdown()


def placement_group_of() -> str | None:
    import ray

    group = ray.util.get_current_placement_group()
    return group.id.hex() if group is not None else None


def gather_death(group: WorkerGroup) -> None:
    from raysgd.train.worker_group import gather

    gather([group.execute_single_async(0, os.getpid), group.execute_single_async(1, die)])


def test_losses_are_counted_anew_for_each_piece_of_work(start: Start, tmp_path: Path) -> None:
    executor = start(num_workers=1, max_retries=2)
    config = {"num_steps": 2, "deaths": [(0, 1, tmp_path / "death")]}
    executor.start_training(partial(lab.count_up, config))
    assert len(executor.finish_training()) == 1
    assert executor._get_num_failures() == 1
    with pytest.raises(TrainingWorkerError, match="new workers have started"):
        executor.run(die)
    assert executor._get_num_failures() == 1
    with pytest.raises(WorkersLostError, match=r"died while .*`max_retries` allows no more failures"):
        executor.get_with_failure_handling(executor.worker_group.execute_async(die))
    assert executor.run(sum, [1, 2]) == [3], "there are new workers all the same"
    executor.shutdown()
    executor.start()
    assert executor._get_num_failures() == 0


def tf_config() -> Any:
    return json.loads(os.environ["TF_CONFIG"]), os.environ["TF_USE_LEGACY_KERAS"]


def test_workers_of_tensorflow_know_each_other_and_the_keras_of_the_driver(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysgd.train.tensorflow import TensorflowConfig

    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    found, keras = zip(*start(TensorflowConfig()).run(tf_config), strict=True)
    assert keras == ("1", "1")
    addresses = found[0]["cluster"]["worker"]
    assert addresses == found[1]["cluster"]["worker"]
    assert len(set(addresses)) == 2
    assert all(int(address.rpartition(":")[2]) > 0 for address in addresses)
    assert [each["task"] for each in found] == [{"type": "worker", "index": rank} for rank in range(2)]


class WorkerObject:
    def __init__(self, name: str) -> None:
        self.name = name

    def greet(self) -> str:
        return f"I am {self.name}"


def test_workers_that_replace_lost_ones_have_objects_of_the_class_too() -> None:
    import ray

    executor = BackendExecutor(BackendConfig(), num_workers=1)
    executor.start(train_cls=WorkerObject, train_cls_kwargs={"name": "Ada"})
    try:
        with pytest.raises(TrainingWorkerError, match="new workers have started"):
            executor.run(die)
        [worker] = executor.worker_group.workers
        assert ray.get(worker.actor.greet.remote()) == "I am Ada"
    finally:
        executor.shutdown()
