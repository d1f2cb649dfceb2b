"""The journal that `fit` keeps, with one worker in this process: what is in it, and when there is none."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.callbacks import Callback, Checkpointing, CSVLogger, GradientNorms, HTMLReport, Run
from raysgd.exceptions import WorkerError
from raysgd.journal.journal import NO_LOSS, NO_NORM, STEPS, STEPS_FILE, Journal, JournalWriter, StepRecord
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.torch.operators_for_tests import LinearOperator, OwnBatchOperator

Make = Callable[..., TorchTrainer]


class Losses(Callback):
    """Keeps the loss of each step as loggers get it."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        self.losses[step] = metrics["train_loss"]


def test_each_step_has_the_loss_that_loggers_get(make_local: Make, tmp_path: Path) -> None:
    seen = Losses()
    history = make_local(LinearOperator).fit(3, folder=tmp_path, callbacks=[seen], log_every_n_steps=1)
    journal = Journal(tmp_path)
    assert history.journal == str(tmp_path)
    assert journal.numbers() == list(range(1, 16))
    assert {step: journal.check_step(step).loss for step in journal.numbers()} == seen.losses
    assert [(leg.after, leg.until, leg.epoch) for leg in journal.legs] == [(0, 5, 1), (5, 10, 2), (10, 15, 3)]
    assert {journal.check_step(step).weight for step in journal.numbers()} == {4.0}
    assert journal.check_step(1).norm is None


@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.1}, {}])
def test_the_norm_of_gradients_is_kept_if_something_computes_it(
    make_local: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    callbacks = [] if options else [GradientNorms()]
    history = make_local(LinearOperator, **options).fit(1, folder=tmp_path, callbacks=callbacks)
    norms = [Journal(tmp_path).check_step(step).norm for step in range(1, 6)]
    if callbacks:
        assert sum(norms) / 5 == pytest.approx(history[0]["grad_norm"])
    assert all(norm > 0.1 for norm in norms), "before clipping"


def test_a_step_of_several_batches_is_one_record(make_local: Make, tmp_path: Path) -> None:
    seen = Losses()
    trainer = make_local(LinearOperator, accumulate_grad_batches=2)
    trainer.fit(2, folder=tmp_path, callbacks=[seen], log_every_n_steps=1)
    journal = Journal(tmp_path)
    assert journal.numbers() == [2, 4, 5, 7, 9, 10], "the last step of an epoch has one batch"
    assert journal.check_step(2).weight == 8.0
    assert journal.check_step(4).loss == pytest.approx(seen.losses[4])
    assert [journal.begin_of(step) for step in (2, 4, 5, 7)] == [0, 2, 4, 5]
    with pytest.raises(ValueError, match=r"`--step 3`: the journal has steps 2 to 10, and none with .* nearest is 2"):
        journal.check_step(3)


def test_the_weight_of_a_loss_is_what_the_operator_says(make_local: Make, tmp_path: Path) -> None:
    make_local(OwnBatchOperator).fit(1, folder=tmp_path)
    assert Journal(tmp_path).numbers() == list(range(1, 6))


def test_a_resumed_run_goes_on_in_the_same_journal(make_local: Make, tmp_path: Path) -> None:
    saving: dict[str, Any] = {"folder": tmp_path, "resume_from": "auto"}
    make_local(LinearOperator).fit(4, callbacks=[Checkpointing(keep_last=None)], folder=tmp_path)
    whole = Journal(tmp_path)
    assert whole.checkpoints == {5 * epoch: f"checkpoints/epoch_{epoch:04d}.ckpt" for epoch in (1, 2, 3, 4)}
    for name in ("epoch_0004.ckpt", "epoch_0003.ckpt"):  # as if the program had died in the third epoch
        (tmp_path / "checkpoints" / name).unlink()
    make_local(LinearOperator).fit(3, callbacks=[Checkpointing(keep_last=None)], **saving)
    resumed = Journal(tmp_path)
    assert resumed.last_step == 15
    assert resumed.steps.tolist() == whole.steps[:15].tolist()
    assert list(resumed.checkpoints) == [5, 10, 15]
    assert [leg.after for leg in resumed.legs] == [0, 5, 10]
    assert resumed.legs[1].run["epochs"] == 4
    assert resumed.legs[2].run["epochs"] == 3


def test_a_run_from_the_beginning_replaces_the_journal(make_local: Make, tmp_path: Path) -> None:
    make_local(LinearOperator).fit(3, folder=tmp_path)
    make_local(LinearOperator, config={"lr": 0.5}).fit(1, folder=tmp_path)
    journal = Journal(tmp_path)
    assert journal.last_step == 5
    assert len(journal.legs) == 1
    assert journal.legs[0].run["config"] == {"lr": 0.5}


def test_the_config_is_kept_without_secrets_and_objects(make_local: Make, tmp_path: Path) -> None:
    config = {"lr": 0.1, "api_key": "abc", "loss": torch.nn.MSELoss(), "betas": (0.9, 0.99)}
    make_local(LinearOperator, config=config, clip_grad_norm=2.0).fit(1, folder=tmp_path)
    run = Journal(tmp_path).legs[0].run
    assert run["config"] == {"lr": 0.1, "betas": [0.9, 0.99]}
    assert run["config_left_out"] == ["api_key", "loss"]
    assert run["options"]["step_options"]["clip_grad_norm"] == 2.0
    assert "abc" not in (tmp_path / "journal" / "journal.jsonl").read_text()


class OwnEpoch(TrainingOperator):
    """Takes its steps itself."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Linear(1, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        data = TensorDataset(torch.ones(8, 1), torch.ones(8, 1))
        self.register_data(train_loader=DataLoader(data, batch_size=4))

    def train_epoch(self, iterator: Any, info: Any = None, **_: Any) -> dict[str, Any]:
        return {"train_loss": [self.train_batch(batch, info)["train_loss"].item() for batch in iterator][-1]}


def test_an_own_train_epoch_has_no_steps_and_the_journal_says_so(make_local: Make, tmp_path: Path) -> None:
    make_local(OwnEpoch).fit(1, folder=tmp_path)
    with pytest.raises(ValueError, match="no steps: `OwnEpoch` overrides `train_epoch`, which takes the steps itself"):
        Journal(tmp_path).check_step(1)


@pytest.mark.parametrize(
    ("callbacks", "has_journal"),
    [([CSVLogger], True), ([HTMLReport], True), ([Checkpointing], True), ([GradientNorms], False), ([], False)],
)
def test_a_journal_is_kept_if_a_callback_writes_to_the_folder_of_the_run(
    make_local: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, callbacks: list[Any], has_journal: bool
) -> None:
    monkeypatch.setattr("raysgd.callbacks.callback.RESULTS_FOLDER", tmp_path)
    history = make_local(LinearOperator).fit(1, callbacks=[each() for each in callbacks])
    assert (history.journal is not None) == has_journal
    assert len(list(tmp_path.glob("*/journal/steps.bin"))) == has_journal


_PROGRAM = """
import sys
from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import LinearOperator

with TorchTrainer(training_operator_cls=LinearOperator, use_local=True) as trainer:
    trainer.train()
    trainer.fit(1)
print([name for name in sys.modules if name.startswith(("raysgd.journal", "raysgd.replay"))])
"""


def test_a_run_without_a_folder_enters_no_file_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


class Fails(LinearOperator):
    """Fails in the eighth batch."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.global_step == 7:
            raise self.config["error"]("a bad row")
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_steps_before_an_error_are_kept(make_local: Make, tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises((WorkerError, KeyboardInterrupt)):
        make_local(Fails, config={"error": error}).fit(3, folder=tmp_path)
    assert Journal(tmp_path).numbers() == list(range(1, 8))


def test_a_journal_that_cannot_be_written_ends_no_run(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "journal").write_text("a file, where the folder has to be")
    with caplog.at_level(logging.WARNING, logger="raysgd.journal"):
        assert len(make_local(LinearOperator).fit(2, folder=tmp_path)) == 2
    assert [record.message for record in caplog.records if "journal of the run ends here" in record.message] == [
        f"the journal of the run ends here: FileExistsError: [Errno 17] File exists: '{tmp_path}/journal'"
    ]


@pytest.mark.parametrize("link", ["journal", "journal/journal.jsonl", "journal/steps.bin"])
def test_a_journal_is_not_written_through_a_link_that_leads_out_of_the_folder(tmp_path: Path, link: str) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "journal.jsonl").write_text("line 1\nthe only copy")
    place = tmp_path / "run" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(mine if link == "journal" else mine / "journal.jsonl")
    with pytest.raises(OSError, match="leads out of the run's folder: remove the link"):
        JournalWriter(tmp_path / "run", {}).begin_leg({"step": 0})
    assert [path.name for path in mine.iterdir()] == ["journal.jsonl"]
    assert (mine / "journal.jsonl").read_text() == "line 1\nthe only copy"


def test_records_may_come_in_any_order_and_leave_gaps(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, {"raysgd": "1"})
    writer.note_checkpoint("nothing.ckpt", 0)  # before the first step, there is nothing to note it in
    writer.begin_leg({"step": 0})
    writer.write_steps(np.array([3, 6]), np.array([(0.5, NO_NORM, 4), (0.25, NO_NORM, 4)], STEPS))
    assert Journal(tmp_path).numbers() == [3, 6]
    writer.write_steps(np.array([2, 5]), np.array([(0.1 + 0.2, 7.5, 3), (math.nan, NO_NORM, NO_LOSS)], STEPS))
    journal = Journal(tmp_path)
    assert journal.numbers() == [2, 3, 5, 6]
    assert journal.step(2) == StepRecord(2, 0.1 + 0.2, 7.5, 3)
    assert journal.step(3) == StepRecord(3, 0.5, None, 4), "steps in between stay as they are"
    assert [journal.step(number) for number in (0, 1, 4, 7)] == [None] * 4
    assert (tmp_path / "journal" / STEPS_FILE).stat().st_size == 6 * 16


def test_lost_steps_are_no_batches_of_the_next_step(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, {})
    writer.begin_leg({"step": 0})
    writer.write_steps(np.array([1, 2, 3, 7, 9]), np.array([(0.5, NO_NORM, 4)] * 5, STEPS))
    writer.note_gap(4, 6)
    assert [Journal(tmp_path).begin_of(step) for step in (3, 7, 9)] == [2, 6, 7]
    writer.begin_leg({"step": 4})  # the steps from 5 are repeated
    writer.write_steps(np.array([7]), np.array([(0.5, NO_NORM, 4)], STEPS))
    assert Journal(tmp_path).begin_of(7) == 4


@pytest.mark.parametrize("rest", ['{"kind": "checkp', '{"kind": "leg", "step": 3}', "\0\0\0"])
def test_a_line_that_was_cut_off_is_left_out_and_replaced_by_the_next(tmp_path: Path, rest: str) -> None:
    lines = tmp_path / "journal" / "journal.jsonl"
    JournalWriter(tmp_path, {}).begin_leg({"step": 0})
    with lines.open("a") as file:
        file.write(rest)
    assert [leg.after for leg in Journal(tmp_path).legs] == [0]
    writer = JournalWriter(tmp_path, {})
    writer.begin_leg({"step": 2})
    writer.note_checkpoint("a.ckpt", 2)
    assert [leg.after for leg in Journal(tmp_path).legs] == [0, 2]
    assert Journal(tmp_path).checkpoints == {2: "a.ckpt"}
    assert len(lines.read_text().splitlines()) == 5


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no journal\. `TorchTrainer.fit` keeps one if you pass `folder="):
        Journal(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "leg"', "line 1 of .* is damaged"),
        ('{"kind": "leg"}', "journal.jsonl` is damaged: KeyError\\('step'\\)"),
        ('["leg"]', "is damaged"),
        (json.dumps({"kind": "run", "format": 2, "raysgd": "9.0"}), "format 2, and this version .* format 1: use .* 9"),
    ],
)
def test_a_damaged_journal_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "journal.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=message):
        Journal(tmp_path)
