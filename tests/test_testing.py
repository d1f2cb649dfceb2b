from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd import testing
from raysgd.core.arrays.division import BatchPlan
from raysgd.testing.faults import Trap, _check_moment, _FullFile


@pytest.mark.parametrize("at", ["", "step", "step:", "step:-1", "step:1.5", "step: 3", "later", "Step:1", None, 3])
def test_a_moment_that_there_is_not_is_refused_with_those_that_there_are(at: Any) -> None:
    with pytest.raises(ValueError, match=r'allowed are "now", "step:N".*"validate".*"save".*"setup"'):
        _check_moment(at, allow_setup=True)


def test_moments_that_there_are() -> None:
    names = ["now", *testing.IN_WORKERS, *testing.IN_DRIVER]
    assert [_check_moment(name, allow_setup=True) for name in names] == [None] * len(names)
    assert _check_moment("step:12", allow_setup=True) == 12


def test_nobody_can_be_stopped_before_he_is_there() -> None:
    with pytest.raises(ValueError, match="allowed are") as caught:
        _check_moment("setup", allow_setup=False)
    assert '"setup"' not in str(caught.value)


class Loop:
    def __init__(self) -> None:
        self.calls: list[int] = []

    def step(self, number: int) -> int:
        """Does a step."""
        self.calls.append(number)
        return -number


def test_a_trap_lets_so_many_pass_and_springs_once() -> None:
    loop, sprung = Loop(), []
    Trap(lambda: sprung.append(list(loop.calls)), "step", num_before=2).before(loop, "step")
    assert [loop.step(number) for number in range(5)] == [0, -1, -2, -3, -4]
    assert sprung == [[0, 1]]
    assert loop.step.__doc__ == Loop.step.__doc__


def test_a_trap_may_spring_every_time_until_it_is_taken_back() -> None:
    loop, sprung = Loop(), []
    trap = Trap(lambda: sprung.append(1), "step", once=False)
    trap.before(loop, "step")
    loop.step(0), loop.step(1)
    trap.is_armed = False
    loop.step(2)
    assert (len(sprung), loop.calls) == (2, [0, 1, 2])


def test_a_step_of_several_micro_batches_is_one_step() -> None:
    begun, sprung = list[bool](), list[int]()
    parts = SimpleNamespace(open=lambda plan, item: begun.append(plan.starts_global_batch))
    hosted: Any = SimpleNamespace(feed=SimpleNamespace(), parts=parts)
    Trap(lambda: sprung.append(len(begun)), "step", num_before=1).before_each_step(hosted)
    for is_first in (True, False, False, True, False):
        parts.open(BatchPlan(starts_global_batch=is_first), None)
    assert (sprung, len(begun)) == ([3], 5)


def test_a_full_file_takes_what_still_fits(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        full = _FullFile(file, 5, OSError(errno.ENOSPC, "full"))
        assert full.write(b"abc") == 3
        with pytest.raises(OSError, match="full"):
            full.write(memoryview(b"defg"))
        with pytest.raises(OSError, match="full"):
            full.write(b"h")
        full.flush()
    assert (tmp_path / "file").read_bytes() == b"abcde"


@pytest.mark.parametrize("after_bytes", [-1, 1.5, True, None])
def test_a_size_that_is_none_is_refused(after_bytes: Any) -> None:
    with pytest.raises(ValueError, match="whole number of bytes"), testing.fail_save(None, after_bytes=after_bytes):
        pass


def test_an_error_that_no_write_raises_is_refused() -> None:
    with pytest.raises(ValueError, match="need an `OSError`"), testing.fail_save(None, error=KeyError()):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), True, "1"])
def test_a_pause_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match="positive number of seconds"), testing.slow_rank(None, 0, seconds):
        pass


@pytest.mark.parametrize("named", [{}, {"trainer": object()}, {"rank": 0}, {"node": object(), "rank": 0}])
def test_a_node_that_nobody_named_is_refused(named: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either `node`, or both"):
        testing.remove_node(object(), **named)


@pytest.mark.parametrize("trainer", [None, "trainer", object()])
def test_only_a_trainer_can_be_disarmed(trainer: Any) -> None:
    with pytest.raises(TypeError, match="need a `TorchTrainer` or a `TFTrainer`"):
        testing.disarm(trainer)
