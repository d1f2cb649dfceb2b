"""The bar of `use_tqdm`, on streams that are a terminal and on streams that are not."""

from __future__ import annotations

import io

import pytest

from raysgd.core.numbers.results import CallProgress
from raysgd.torch.driver.framework import epoch_bar


class Terminal(io.StringIO):
    """Claims to be one."""

    def isatty(self) -> bool:
        return True


def news(num_steps: int, loss: float | None = 0.5) -> CallProgress:
    return CallProgress(num_steps=num_steps, total=10, epoch_idx=2, num_epochs=None, loss=loss)


def test_a_file_gets_one_line_for_an_epoch() -> None:
    stream = io.StringIO()
    with epoch_bar(stream) as show:
        for num_steps in range(10):
            show(news(num_steps))
        assert stream.getvalue() == ""
        show(news(10, loss=0.25))
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert text.startswith("3e: 100%")
    assert "10/10" in text
    assert "loss=0.25" in text


def test_a_file_gets_a_line_also_for_an_epoch_too_short_for_news() -> None:
    stream = io.StringIO()
    with epoch_bar(stream) as show:
        show(CallProgress(4, 4, 0, None, None))
    assert stream.getvalue().count("\n") == 1
    assert "4/4" in stream.getvalue()
    assert "loss" not in stream.getvalue()


def test_without_news_nothing_is_drawn() -> None:
    for stream in (io.StringIO(), Terminal()):
        with epoch_bar(stream):
            pass
        assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_a_failed_epoch_leaves_no_line_and_clears_the_bar(stream: io.StringIO) -> None:
    def fail() -> None:
        with epoch_bar(stream) as show:
            show(news(3))
            raise KeyError("user code")

    with pytest.raises(KeyError):
        fail()
    assert "\n" not in stream.getvalue()
    assert not stream.getvalue().rpartition("\r")[2].strip()


def test_an_unknown_total_is_no_obstacle() -> None:
    stream = io.StringIO()
    with epoch_bar(stream) as show:
        show(CallProgress(num_steps=6, total=None, epoch_idx=0, num_epochs=None, loss=None))
    assert "6" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1
