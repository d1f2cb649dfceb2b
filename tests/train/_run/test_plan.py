from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from raysgd.exceptions import UnpicklableError
from raysgd.train._run.plan import RunPlan
from raysgd.train.checkpoint import CheckpointStrategy, write_checkpoint


def nothing() -> None: ...


def echo(config: Any) -> Any:
    return config


def test_the_function_gets_its_config() -> None:
    assert RunPlan.checked(echo, {"lr": 1}).function() == {"lr": 1}
    assert RunPlan.checked(echo).function() == {}
    assert RunPlan.checked(nothing, {"lr": 1}).function() is None


def test_a_checkpoint_is_read_from_its_file_once(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write_checkpoint({"epoch": 3}, path)
    plan = RunPlan.checked(nothing, checkpoint=path)
    path.unlink()
    assert plan.checkpoint == {"epoch": 3}


def test_a_checkpoint_of_the_users_is_not_shared() -> None:
    own = {"epoch": 3}
    plan = RunPlan.checked(nothing, checkpoint=own)
    assert plan.checkpoint == own
    assert plan.checkpoint is not own


class Holder:
    """A function with something that cannot be sent."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"train_func": 3}, TypeError, "`train_func=3`"),
        ({"train_func": lambda a, b: None}, ValueError, "takes 2 parameters"),
        ({"dataset": [1]}, TypeError, "`dataset` is, or holds, a list"),
        ({"checkpoint": 3}, TypeError, "`checkpoint=3`"),
        ({"checkpoint": "none/such"}, ValueError, "no such file"),
        (
            {"checkpoint_strategy": {"num_to_keep": 1}},
            TypeError,
            r"`checkpoint_strategy=\{'num_to_keep': 1\}`: need a `CheckpointStrategy`",
        ),
        ({"config": threading.Lock()}, UnpicklableError, "`config` cannot be sent to the workers"),
        ({"train_func": Holder(threading.Lock())}, UnpicklableError, "`train_func` cannot be sent to the workers"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RunPlan.checked(**{"train_func": nothing, **options})


def test_a_plan_has_what_it_was_given() -> None:
    strategy = CheckpointStrategy(2)
    assert RunPlan.checked(nothing, None, None, None, strategy) == RunPlan(nothing, checkpoint_strategy=strategy)
