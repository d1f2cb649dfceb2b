"""How programs end that train: with and without `shutdown`, interrupted, and as a worker themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from raysgd.core.engine.placement import Reservation
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.helpers.hygiene import RaySurroundings
from tests.torch.operators_for_tests import LinearOperator
from tests.torch.programs import run_in_terminal, run_program

pytestmark = pytest.mark.integration


def gathered_ranks(operator: TrainingOperator) -> list[int]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, operator.world_rank)
    return ranks


def test_rank_0_may_be_the_driver_while_the_others_are_not(ray_cluster: None, tmp_path: Path) -> None:
    class OnlyHere(LinearOperator):
        pass

    def hook() -> None:
        os.environ["RAYSGD_TEST_HOOK"] = "ran"

    with TorchTrainer(
        training_operator_cls=OnlyHere, num_workers=2, use_local=True, initialization_hook=hook
    ) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        assert pids[0] == os.getpid() != pids[1]
        assert trainer.apply_all_workers(lambda: os.environ["RAYSGD_TEST_HOOK"]) == ["ran", "ran"]
        operator = trainer.get_local_operator()
        assert (operator.world_rank, operator._is_distributed) == (0, True)
        assert trainer.apply_all_operators(gathered_ranks) == [[0, 1], [0, 1]]
        assert trainer.train()["num_samples"] == 20
        assert trainer.validate(reduce_results=False)[0]["num_samples"] == 7
        assert trainer.get_model() is operator.model.module  # type: ignore[attr-defined]
        before = trainer.state_dict()
        trainer.load(trainer.save(tmp_path / "last.pt"))
        assert trainer.state_dict()["epoch"] == before["epoch"] == 1
    os.environ.pop("RAYSGD_TEST_HOOK")
    assert not dist.is_initialized()
    assert operator.validate([])["batch_count"] == 0


def test_the_hook_runs_before_torch_is_loaded(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a worker that Ray starts itself, as it does if that is to have variables: see `tests/helpers/forked.py`."""

    actor_options = Reservation.actor_options

    def options(reservation: Reservation, index: int) -> dict[str, Any]:
        return {**actor_options(reservation, index), "runtime_env": {"env_vars": {"GIVEN": "yes"}}}

    def hook() -> None:
        os.environ["LOADED_BEFORE_THE_HOOK"] = " ".join({"torch", "raysgd.torch"} & sys.modules.keys())

    monkeypatch.setattr(Reservation, "actor_options", options)
    with TorchTrainer(training_operator_cls=LinearOperator, initialization_hook=hook) as trainer:
        [found] = trainer.apply_all_workers(lambda: [os.environ[name] for name in ("GIVEN", "LOADED_BEFORE_THE_HOOK")])
    assert found == ["yes", ""]


def test_a_program_that_never_shuts_down_ends_well_and_leaves_nothing(ray_cluster: None) -> None:
    """Its output goes to a pipe: one line of progress for each epoch, and none of it twice."""
    before = RaySurroundings.now()
    ended = run_program(
        """
        import time
        from raysgd.torch import TorchTrainer
        from tests.torch.operators_for_tests import LinearOperator

        trainer = TorchTrainer(training_operator_cls=LinearOperator, num_workers=2, use_tqdm=True)
        for _ in range(3):
            trainer.train(info={"num_epochs": 3})
            time.sleep(0.2)
        """
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "batch/s" in line]
    assert [line.partition(":")[0] for line in lines] == ["1/3e", "2/3e", "3/3e"]
    assert all("3/3" in line.partition("|")[2] for line in lines)
    assert ended.stdout == ""
    assert before.leaks() == []


def test_an_interrupt_is_raised_again_and_leaves_nothing(ray_cluster: None) -> None:
    """In a terminal, where the bar of the workers is to be seen until then."""
    before = RaySurroundings.now()
    status, text = run_in_terminal(
        """
        import os, time
        from raysgd.torch import TorchTrainer
        from tests.torch.operators_for_tests import LinearOperator

        class Slow(LinearOperator):
            def optimizer_step(self):
                super().optimizer_step()
                time.sleep(0.3)

        trainer = TorchTrainer(training_operator_cls=Slow, num_workers=2, use_tqdm=True)
        pids = trainer.apply_all_workers(os.getpid)
        trainer.train()
        try:
            trainer.train(num_steps=1000)
        except KeyboardInterrupt:
            print("INTERRUPTED")
        deadline = time.monotonic() + 120
        while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        print("ORPHANS", [pid for pid in pids if os.path.exists(f"/proc/{pid}")])
        print("EPOCH", trainer.state_dict()["epoch"])
        """,
        interrupt_at="/1000",
    )
    assert status == 0, text
    lines = text.replace("\r", "\n").splitlines()
    assert "INTERRUPTED" in lines
    assert "ORPHANS []" in lines
    assert "EPOCH 1" in lines, "the state before the call is kept"
    drawn = [line for line in lines if "batch/s" in line]
    assert {line.partition(":")[0] for line in drawn} == {"1e", "2e"}
    assert any("/1000" in line for line in drawn)
    assert before.leaks() == []


LOCAL_PAIR = """
    from raysgd.torch import TorchTrainer
    from tests.torch.operators_for_tests import LinearOperator

    trainer = TorchTrainer(training_operator_cls=LinearOperator, num_workers=2, use_local=True)
    trainer.train()
"""


@pytest.mark.parametrize(
    ("ending", "num_times"),
    [pytest.param("", 10, marks=pytest.mark.soak), ("    trainer.shutdown()\n", 1)],
    ids=["left alone", "shut down"],
)
def test_a_program_that_is_a_worker_itself_ends_well(ending: str, num_times: int, ray_cluster: None) -> None:
    before = RaySurroundings.now()
    for _ in range(num_times):
        ended = run_program(LOCAL_PAIR + ending)
        assert ended.returncode == 0, ended.stderr
    assert before.leaks() == []
