"""The record of what a rank does in a call that all ranks have to do alike."""

from __future__ import annotations

import pytest

from raysgd.torch.parallel.joint_record import JointRecord


def test_ranks_that_do_the_same_come_to_the_same_record_in_each_call() -> None:
    records = [JointRecord(), JointRecord()]
    for call, num in enumerate((3, 0, 40), start=1):
        for record in records:
            record.begin()
            with record.of_call():
                for _ in range(num):
                    record.note("model 1 exchanged")
        works = [record.work for record in records]
        assert works[0] == works[1]
        assert works[0] is not None
        assert (works[0].num, works[0].is_over, works[0].number) == (num, True, call)


def test_a_call_that_fails_is_not_over_and_what_is_done_behind_it_does_not_count() -> None:
    record = JointRecord()
    record.begin()
    record.note("model 1 exchanged")
    with pytest.raises(OSError, match="gone"), record.of_call():
        raise OSError("gone")
    record.note("something")
    assert record.work is not None
    assert (record.work.num, record.work.is_over) == (1, False)


def test_in_another_group_there_is_nothing_to_compare_before_a_call_began() -> None:
    record = JointRecord()
    record.begin()
    record.forget()
    record.note("something")
    assert record.work is None
    record.begin()
    assert record.work is not None
    assert (record.work.num, record.work.number) == (0, 1)
