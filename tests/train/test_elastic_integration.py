"""A run that begins with few workers and grows. The loss of a node has a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.train import Trainer, TrainingCallback
from raysgd.train.backend import BackendConfig

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


def hold(num_cpus: int) -> Any:
    """Takes CPUs away from everybody else; `ray.kill` gives them back."""
    import ray

    class Holder:
        def is_there(self) -> bool:
            return True

    holder = ray.remote(num_cpus=num_cpus)(Holder).remote()
    assert ray.get(holder.is_there.remote())
    return holder


class Release(TrainingCallback):
    """Gives CPUs back at a step."""

    def __init__(self, holder: Any, at: int) -> None:
        self.holder, self.at = holder, at
        self.sizes: list[int] = []
        self.numbers: list[int] = []

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        self.sizes.append(len(results))
        self.numbers.append(results[0]["number"])
        if results[0]["number"] == self.at and self.holder is not None:
            import ray

            ray.kill(self.holder)
            self.holder = None


def wait_until_free(num_cpus: int) -> None:
    """The trainer looks once after each checkpoint; Ray may be a moment late in saying what is free."""
    import time

    import ray

    while ray.available_resources().get("CPU", 0) < num_cpus:
        time.sleep(0.05)


def count_slowly(config: dict[str, Any]) -> int:
    checkpoint = train.load_checkpoint()
    first = checkpoint["number"] + 1 if checkpoint else 0
    for number in range(first, 6):
        train.report(number=number)
        train.save_checkpoint(number=number)
        if number == 3 and train.world_size() < 3:
            wait_until_free(2)
    return first


def test_a_run_begins_with_what_there_is_and_grows_after_a_checkpoint(tmp_path: Path) -> None:
    callback = Release(hold(3), at=1)
    trainer = Trainer(BackendConfig(), num_workers=(1, 3), logdir=tmp_path, resize_interval_s=0)
    try:
        trainer.start()
        returned = trainer.run(count_slowly, callbacks=[callback])
        assert len(returned) == 3
        assert returned[0] in (2, 3, 4, 5)  # where it grew: Ray may be late in saying what is free
        assert callback.numbers == [0, 1, 2, 3, 4, 5]  # nothing was done twice
        assert callback.sizes == sorted(callback.sizes)
        assert (callback.sizes[0], callback.sizes[-1]) == (1, 3)
    finally:
        trainer.shutdown()
