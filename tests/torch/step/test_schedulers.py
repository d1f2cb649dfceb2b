"""A schedule of fixed length says that it is over where the training goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import ScheduledOperator

Make = Callable[..., TorchTrainer]


def options(freq: str, length: int) -> dict[str, object]:
    scheduler = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=length)
    return {"operator_cls": ScheduledOperator, "scheduler_step_freq": freq, "config": {"scheduler": scheduler}}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "CosineAnnealingLR" in record.getMessage()]


@pytest.mark.parametrize(("freq", "length"), [("epoch", 2), ("batch", 10)])
def test_a_cosine_that_is_over_is_warned_of_once(
    freq: str, length: int, make_local: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_local(**options(freq, length))
    trainer.fit(2)
    assert warnings_of(caplog) == []
    trainer.fit(2)
    [warning] = warnings_of(caplog)
    assert f"`CosineAnnealingLR(T_max={length})` has taken its {length} steps" in warning


def test_a_run_that_resumes_with_more_epochs_keeps_the_length_of_its_file_and_says_so(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "old.ckpt"
    first = make_local(**options("epoch", 2))
    first.fit(2)
    first.save(path)
    make_local(**options("epoch", 4)).fit(4, resume_from=path)
    [warning] = warnings_of(caplog)
    assert "T_max=2" in warning
    assert 'trainer.load(path, parts=["models"])' in warning


class UnderAnotherName(ScheduledOperator):
    def setup(self, config: dict[str, object]) -> None:
        super().setup(config)
        del self.scheduler


@pytest.mark.parametrize(("freq", "num_warnings"), [("epoch", 1), ("batch", 1), ("manual", 0)])
def test_a_scheduler_that_never_steps_is_warned_of_once(
    freq: str, num_warnings: int, make_local: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_local(**{**options(freq, 2), "operator_cls": UnderAnotherName})
    trainer.train(), trainer.train()
    words = f'`scheduler_step_freq="{freq}"` steps `self.scheduler`, which is not set'
    assert sum(words in record.getMessage() for record in caplog.records) == num_warnings
