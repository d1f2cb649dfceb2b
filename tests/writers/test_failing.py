from __future__ import annotations

import pytest

from raysgd.writers.failing import FailureWarnings


def test_a_failure_costs_one_warning_for_each_kind_of_error(caplog: pytest.LogCaptureFixture) -> None:
    failures, written = FailureWarnings("Table"), []
    for number, error in enumerate([OSError("full"), None, OSError("full again"), ValueError("closed")]):
        with failures.instead():
            if error is not None:
                raise error
            written.append(number)
    assert written == [1]
    assert [record.getMessage()[:43] for record in caplog.records] == [
        "Table: could not write (OSError: full); the",
        "Table: could not write (ValueError: closed)",
    ]


def test_an_interrupt_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt), FailureWarnings("Table").instead():
        raise KeyboardInterrupt
