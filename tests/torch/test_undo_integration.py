"""Programs that step several times in a batch rejoin after a loss in the middle of one.

Covers `raysgd.torch.step.undo` in a group of several processes.
"""

from __future__ import annotations

import random
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from raysgd import Recovery
from raysgd.exceptions import UnevenStepsError
from tests.helpers.doors import controller_of
from tests.helpers.run_if import RunIf
from tests.torch.torn import BETWEEN, IN_EXCHANGE, NUM_STEPS, trainer_of, weights_of_first

pytestmark = pytest.mark.integration

OPTIONS = {"num_cpus_per_worker": 0.5, "recovery": Recovery(wait_for_workers=False, resize_interval_s=600.0, undo=True)}


with suppress(ImportError):  # it leaves environment variables, for which no test is to answer
    import_module("lightning.pytorch")


@pytest.mark.parametrize("program", ["gan", pytest.param("lightning by hand", marks=RunIf(modules=["lightning"]))])
def test_a_batch_that_broke_off_half_way_is_undone_and_repeated(
    ray_cluster: None, tmp_path: Path, program: str
) -> None:
    steps = random.Random(program).sample(range(1, NUM_STEPS), 2)
    with trainer_of(program, tmp_path, 3, **OPTIONS) as trainer:
        before = trainer.state_dict()
        trainer.train()
        undisturbed = weights_of_first(trainer)
        trainer.load_state_dict(before)
        first, second = sorted(steps)
        (tmp_path / f"{first} {BETWEEN} 2").touch()
        (tmp_path / f"{second} {IN_EXCHANGE} 0").touch()
        trainer.train()
        assert not list(tmp_path.glob("[0-9]*"))
        assert [each.kind for each in controller_of(trainer).history.events if each.is_failure] == ["continued"] * 2, (
            steps
        )
        data = trainer.status().data
        assert data is not None
        assert data.used == data.due
        assert weights_of_first(trainer) == pytest.approx(undisturbed, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("program", ["own loop", pytest.param("stock loop inside", marks=pytest.mark.soak)])
def test_a_loop_of_user_code_is_called_again_with_the_batches_that_are_left(
    ray_cluster: None, tmp_path: Path, program: str
) -> None:
    with trainer_of(program, tmp_path, 3, **OPTIONS) as trainer:
        before = trainer.state_dict()
        trainer.train()
        undisturbed = weights_of_first(trainer)
        trainer.load_state_dict(before)
        (tmp_path / f"2 {BETWEEN} 2").touch()
        (tmp_path / f"6 {IN_EXCHANGE} 0").touch()
        [survivor] = trainer.train(reduce_results=False)
        assert not list(tmp_path.glob("[0-9]*"))
        assert [each.kind for each in controller_of(trainer).history.events if each.is_failure] == ["continued"] * 2
        assert survivor["num_loops"] == 4
        assert weights_of_first(trainer) == pytest.approx(undisturbed, rel=1e-6, abs=1e-9)


def test_a_step_in_a_loop_that_one_worker_leaves_out_is_an_error(ray_cluster: None, tmp_path: Path) -> None:
    with (
        trainer_of("own loop", tmp_path, 2, config={"flaw": "alone"}, **OPTIONS) as trainer,
        pytest.raises(UnevenStepsError, match="optimizer 1 stepped"),
    ):
        trainer.train()
