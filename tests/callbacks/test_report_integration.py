"""A run on two workers that loses one: what the bar and the report say about it."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest

from raysgd import testing
from raysgd._numbers.results import CallProgress
from raysgd.callbacks import Callback, HTMLReport, ProgressBar, Run
from raysgd.torch import TorchTrainer
from tests.callbacks.test_report import Page
from tests.torch.operators_for_tests import LinearOperator

pytestmark = pytest.mark.integration


class LoseOne(Callback):
    """Loses a worker in the second epoch, and keeps the progress of all calls."""

    def __init__(self) -> None:
        self.seen: list[CallProgress] = []

    def on_epoch_begin(self, run: Run) -> None:
        if run.epoch == 1:
            testing.kill_worker(run.trainer, 1, at="step:1")

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        self.seen.append(progress)


def test_a_loss_is_in_the_report_and_the_log_stays_clean(ray_cluster: None, tmp_path: Path) -> None:
    stream, watching = io.StringIO(), LoseOne()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("raysgd")
    logger.addHandler(handler)
    callbacks: list[Any] = [ProgressBar(stream=stream), HTMLReport(tmp_path / "report.html"), watching]
    try:
        with TorchTrainer(training_operator_cls=LinearOperator, num_workers=2) as trainer:
            history = trainer.fit(3, callbacks=callbacks)
            assert repr(trainer).startswith("<TorchTrainer of LinearOperator: ")
            assert "continued" in trainer._repr_html_()
    finally:
        logger.removeHandler(handler)
    page = Page(tmp_path / "report.html")
    assert [row["train_loss"] for row in page.data["history"]["rows"]] == history["train_loss"]
    assert [event["kind"] for event in page.data["history"]["events"] if event["cause"].startswith("lost rank 1")]
    assert any("mark bad" in (attributes["class"] or "") for attributes in page.all("g"))
    assert any(attributes["class"] == "bad" for attributes in page.all("rect"))
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("epoch")] == [
        "epoch 1/3",
        "epoch 2/3",
        "epoch 3/3",
    ]
    assert any(line.startswith("lost rank 1") for line in lines)
    done = [progress.kind for progress in watching.seen if progress.is_done]
    assert done == ["train", "validation"] * 3
