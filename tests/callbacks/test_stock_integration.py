"""The stock callbacks on several workers, one of which is killed: what they find is what one process finds.

Covers `raysgd.callbacks.worker_callback`.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle
import torch

from raysgd.callbacks import (
    EMA,
    Callback,
    Checkpointing,
    EarlyStopping,
    GradientNorms,
    HTMLReport,
    LearningRateMonitor,
    ProfilerTrace,
    ProgressBar,
    Run,
)
from raysgd.core.history.history import History
from raysgd.core.numbers.results import CallProgress
from raysgd.testing import kill_worker
from raysgd.torch import TorchTrainer
from tests.callbacks.test_report import Page
from tests.torch import operators_for_tests
from tests.torch.operators_for_tests import LinearOperator

pytestmark = pytest.mark.integration

JOINT_BATCH = 8


@pytest.fixture(autouse=True)
def ships_the_operators() -> Iterator[None]:
    """Let workers use them without a path to the tests."""
    ray.cloudpickle.register_pickle_by_value(operators_for_tests)
    yield
    ray.cloudpickle.unregister_pickle_by_value(operators_for_tests)


class KillInSecondEpoch(Callback):
    """Keeps the progress of all calls, too."""

    def __init__(self) -> None:
        self.seen: list[CallProgress] = []

    def on_epoch_begin(self, run: Run) -> None:
        if run.epoch == 1:
            kill_worker(run.trainer, 1, at="step:1")

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        self.seen.append(progress)


class Steps(Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        self.losses.append((step, metrics["train_loss"]))


@dataclass
class Story:
    """What came of a run."""

    history: History
    average: torch.Tensor
    loss_of_average: float
    stopping: EarlyStopping
    saving: Checkpointing
    steps: list[tuple[int, float]]


def train(trainer: TorchTrainer, folder: Path, *more: Callback, epochs: int = 9, patience: int = 1) -> Story:
    ema, stopping = EMA(decay=0.8), EarlyStopping("val_loss", patience=patience, min_delta=0.3)
    saving = Checkpointing(folder / "checkpoints", metric="val_loss", keep_last=2)
    callbacks = [saving, ema, GradientNorms(), LearningRateMonitor(), stopping, steps := Steps(), *more]
    history = trainer.fit(epochs, callbacks=callbacks, resume_from="auto", log_every_n_steps=1)
    own = trainer.validate()["val_loss"]
    with ema.swap(trainer):
        loss_of_average = trainer.validate()["val_loss"]
    assert trainer.validate()["val_loss"] == own != loss_of_average
    return Story(history, ema.get_model(trainer).weight, loss_of_average, stopping, saving, steps.losses)


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Has the log, and what else is written into it."""
    stream, logger = io.StringIO(), logging.getLogger("raysgd")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def test_two_workers_one_of_which_is_killed_find_what_one_process_finds(
    ray_cluster: None, make_local: Callable[..., TorchTrainer], stream: io.StringIO, tmp_path: Path
) -> None:
    alone = train(make_local(config={"batch_size": JOINT_BATCH}), tmp_path / "alone")
    options: dict[str, Any] = {"config": {"batch_size": JOINT_BATCH // 2}, "num_workers": 2, "spare_workers": 1}
    with TorchTrainer(training_operator_cls=LinearOperator, **options) as trainer:
        killing, traces = KillInSecondEpoch(), ProfilerTrace(tmp_path / "traces", (1, 2))
        showing = [ProgressBar(stream=stream), HTMLReport(tmp_path / "report.html")]
        together = train(trainer, tmp_path / "together", *showing, killing, traces)
        assert [event.is_failure for event in trainer.history.events].count(True) == 1
        assert "continued" in trainer._repr_html_()
    check_that_bar_and_report_show_the_loss(stream.getvalue().splitlines(), Page(tmp_path / "report.html"), together)
    assert [each.kind for each in killing.seen if each.is_done] == ["train", "validation"] * len(together.history)
    for name in ("val_loss", "grad_norm", "max_grad_norm", "lr"):
        assert together.history[name] == pytest.approx(alone.history[name], abs=1e-6)
    assert [step for step, _ in together.steps] == [*range(1, 3 * len(alone.history) + 1)]
    others = [number for number in range(len(alone.steps)) if number not in (3, 4)]  # which the lost worker measured
    assert [together.steps[each][1] for each in others] == pytest.approx([alone.steps[each][1] for each in others])
    assert torch.allclose(together.average, alone.average, rtol=0, atol=1e-6)
    assert together.loss_of_average == pytest.approx(alone.loss_of_average, abs=1e-6)
    assert 3 <= len(alone.history) < 9
    assert together.history.stop_reason == alone.history.stop_reason
    assert together.stopping.state_dict() == pytest.approx(alone.stopping.state_dict(), abs=1e-6)
    assert Path(together.saving.best or "").name == Path(alone.saving.best or "").name
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {"rank0.json", "rank1.json"}

    num_epochs = len(alone.history) + 1
    later = [
        train(make_local(config={"batch_size": JOINT_BATCH}), tmp_path / name, epochs=num_epochs, patience=2)
        for name in ("alone", "together")
    ]
    assert [len(each.history) for each in later] == [num_epochs] * 2
    assert torch.allclose(later[0].average, later[1].average, rtol=0, atol=1e-6)


def check_that_bar_and_report_show_the_loss(lines: list[str], page: Page, story: Story) -> None:
    assert [row["train_loss"] for row in page.data["history"]["rows"]] == story.history["train_loss"]
    assert [event["kind"] for event in page.data["history"]["events"] if event["cause"].startswith("lost rank 1")]
    assert "lost rank 1" in page.text
    shown = [line.split("  ")[0] for line in lines if line.startswith("epoch")]
    assert shown == [f"epoch {number}/9" for number in story.history["epoch"]]
    assert any(line.startswith("lost rank 1") for line in lines)
