"""Whether a step may count as done, after what became of its all-reduces, and what ranks compare of their actions.

Covers `raysgd.torch.parallel.undo` and `raysgd.torch.parallel.sync`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError

import raysgd
from raysgd.torch.parallel import undo
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.sync import _tracked
from raysgd.torch.parallel.undo import FlightRecorder, OpenStep

OF_OTHERS = {"error", "has_begun", "waiting", "restore"}  # names that other objects have, too
RECORDED = {name for name in vars(OpenStep()) if name[0] != "_"} - OF_OTHERS
LOST = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:41803")


class Group:
    """Connections that hold until somebody says otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_broken, self.leg = False, Leg()
        monkeypatch.setattr(undo, "is_group_broken", lambda: self.is_broken)

    def all_reduce(self, *errors: Exception | None) -> None:
        """The gradients of a model, a bucket for each of `errors`, as a backward pass waits for them and goes on."""
        for index, error in enumerate(errors):
            is_last = index == len(errors) - 1
            if is_last:
                self.leg.note_all_reduce()
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            watched = _tracked(future, self.leg, is_last)
            future.set_result(torch.ones(1)) if error is None else future.set_exception(error)
            assert watched.done()
            if error is None:
                assert watched.value() == 1.0
            else:
                with pytest.raises(type(error)):
                    watched.wait()

    def end_step(self) -> None:
        self.leg.record.check()
        self.leg.renew_record()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


def test_steps_count_as_long_as_nothing_is_broken_whatever_was_averaged_in_them(group: Group) -> None:
    for errors in ((None, None), (), (None,)):
        group.all_reduce(*errors)
        group.end_step()


def test_a_step_whose_all_reduces_came_through_counts_though_the_group_broke_behind_them(group: Group) -> None:
    group.all_reduce(None, None)
    group.is_broken = True
    group.end_step()


@pytest.mark.parametrize("errors", [(LOST,), (None, LOST), (LOST, None)])
def test_a_step_with_an_all_reduce_that_failed_does_not_count_and_none_does_after_it(
    errors: tuple[Exception | None, ...], group: Group
) -> None:
    group.all_reduce(None)
    group.end_step()
    group.all_reduce(*errors)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            group.end_step()
        group.all_reduce(None)


def test_an_exception_that_says_nothing_about_the_group_is_the_business_of_user_code(group: Group) -> None:
    group.all_reduce(RuntimeError("in a hook of the user"))
    group.end_step()


def test_a_step_without_an_all_reduce_does_not_count_in_a_group_that_is_broken(group: Group) -> None:
    group.all_reduce(None)
    group.end_step()
    group.is_broken = True
    with pytest.raises(DistNetworkError, match="user code went on"):
        group.end_step()


def test_what_is_lost_of_a_former_group_later_does_not_break_the_next_one(group: Group) -> None:
    late: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    _tracked(late, group.leg, is_last=True)
    former = group.leg.record
    group.leg = Leg()
    late.set_exception(LOST)
    assert former.error is LOST
    group.end_step()


def test_nobody_but_a_record_changes_what_it_has_recorded() -> None:
    found = []
    for path in Path(raysgd.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            places = [getattr(node, "target", None), *getattr(node, "targets", ())]
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in ("add", "append"):
                places.append(called.value)
            of_record = [each.attr for each in places if isinstance(each, ast.Attribute) and each.attr in RECORDED]
            found += [(path.name, each) for each in of_record if path.name not in ("leg.py", "sync.py", "undo.py")]
    assert not found


def test_ranks_that_do_the_same_come_to_the_same_record_in_each_call() -> None:
    for call, num in enumerate((3, 0, 40), start=1):
        records = [FlightRecorder(call), FlightRecorder(call)]
        for each in records:
            with each.of_call():
                for _ in range(num):
                    each.note("model 1 exchanged")
        works = [each.work for each in records]
        assert works[0] == works[1]
        assert works[0] is not None
        assert (works[0].num, works[0].is_over, works[0].number) == (num, True, call)


def test_a_call_that_fails_is_not_over_and_what_is_done_behind_it_does_not_count() -> None:
    recorder = FlightRecorder(1)
    recorder.note("model 1 exchanged")
    with pytest.raises(OSError, match="gone"), recorder.of_call():
        raise OSError("gone")
    recorder.note("something")
    assert recorder.work is not None
    assert (recorder.work.num, recorder.work.is_over) == (1, False)


def test_in_another_group_there_is_nothing_to_compare_before_a_call_began() -> None:
    recorder = FlightRecorder()
    recorder.note("something")
    assert recorder.work is None
