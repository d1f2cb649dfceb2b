from __future__ import annotations

import pytest

from raysgd.writers.failing import never_ends_a_run


class Fails:
    def __init__(self, *errors: BaseException | None) -> None:
        self.errors = list(errors)

    @never_ends_a_run
    def write(self, value: int) -> int:
        error = self.errors.pop(0)
        if error is not None:
            raise error
        return value


def test_a_failure_costs_one_warning_for_each_kind_of_error(caplog: pytest.LogCaptureFixture) -> None:
    logger = Fails(OSError("full"), None, OSError("full again"), ValueError("closed"))
    assert [logger.write(number) for number in range(4)] == [None, 1, None, None]
    assert [record.getMessage()[:43] for record in caplog.records] == [
        "Fails: could not write (OSError: full); the",
        "Fails: could not write (ValueError: closed)",
    ]


def test_an_interrupt_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        Fails(KeyboardInterrupt()).write(1)
