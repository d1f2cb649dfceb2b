"""The journal that `fit` keeps, with one worker in this process: what is in it, and when there is none."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
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
from raysgd.journal.entries import CHECKPOINT, GAP, LEFT_OUT, RunLine, RunOptions, read_line
from raysgd.journal.journal import Journal, JournalWriter, StepRecord
from raysgd.journal.keeper import header_of
from raysgd.journal.steps import CHECKS_FILE, NO_LOSS, NO_NORM, STEPS, STEPS_FILE
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.constants import VALID_SCHEDULER_STEP
from raysgd.torch.driver.arguments import STRATEGIES
from raysgd.torch.objects.precision import PRECISIONS
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.options import StepOptions
from raysgd.trainer.configuration import BatchOptions
from tests.journal.made import DATA, HEADER, leg_line
from tests.journal.test_steps import change_byte
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
    assert resumed.legs[1].run.epochs == 4
    assert resumed.legs[2].run.epochs == 3


def test_a_run_from_the_beginning_replaces_the_journal(make_local: Make, tmp_path: Path) -> None:
    make_local(LinearOperator).fit(3, folder=tmp_path)
    make_local(LinearOperator, config={"lr": 0.5}).fit(1, folder=tmp_path)
    journal = Journal(tmp_path)
    assert journal.last_step == 5
    assert len(journal.legs) == 1
    assert journal.legs[0].run.config == {"lr": 0.5}


def test_a_run_that_continues_another_one_replaces_the_journal_of_a_third(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving: dict[str, Any] = {"folder": tmp_path / "first", "callbacks": [Checkpointing(keep_last=None)]}
    make_local(LinearOperator).fit(2, **saving)
    make_local(LinearOperator, config={"lr": 0.5}).fit(4, folder=tmp_path / "here")
    file = tmp_path / "first" / "checkpoints" / "epoch_0002.ckpt"
    make_local(LinearOperator).fit(3, folder=tmp_path / "here", resume_from=file)
    journal = Journal(tmp_path / "here")
    assert journal.numbers() == [11, 12, 13, 14, 15]
    assert [leg.run.config for leg in journal.legs] == [{}]
    assert f"the journal in {tmp_path / 'here'} is of another run, so this run replaces it: {file} is" in caplog.text
    with pytest.raises(ValueError, match="the journal has steps 11 to 15, and none with this number"):
        journal.check_step(3)


def test_a_trainer_goes_on_in_its_own_journal_only(make_local: Make, tmp_path: Path) -> None:
    make_local(LinearOperator, config={"lr": 0.5}).fit(4, folder=tmp_path / "other")
    trainer = make_local(LinearOperator)
    for _ in range(2):
        trainer.fit(1, folder=tmp_path / "own")
    trainer.fit(1, folder=tmp_path / "other")
    assert Journal(tmp_path / "own").numbers() == [*range(1, 11)]
    assert Journal(tmp_path / "other").numbers() == [*range(11, 16)]


def test_checkpoints_may_be_in_another_folder(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for epochs, place in ((1, "files"), (2, tmp_path / "files")):
        saving = Checkpointing(place, keep_last=None)
        make_local(LinearOperator).fit(epochs, folder="run", callbacks=[saving], resume_from="auto")
    journal = Journal(tmp_path / "run")
    assert journal.numbers() == [*range(1, 11)]
    assert [*journal.checkpoints.values()] == [str(tmp_path / "files" / f"epoch_000{number}.ckpt") for number in (1, 2)]
    assert caplog.messages == [f"resumed from `{tmp_path}/files/epoch_0001.ckpt`, which has 1 epochs"]


def test_the_config_is_kept_without_secrets_and_objects(make_local: Make, tmp_path: Path) -> None:
    config = {"lr": 0.1, "api_key": "abc", "loss": torch.nn.MSELoss(), "betas": (0.9, 0.99)}
    make_local(LinearOperator, config=config, clip_grad_norm=2.0).fit(1, folder=tmp_path)
    run = Journal(tmp_path).legs[0].run
    assert run.config == {"lr": 0.1, "betas": [0.9, 0.99]}
    assert run.config_left_out == ("api_key", "loss")
    assert run.options.clip_grad_norm == 2.0
    assert "abc" not in (tmp_path / "journal" / "journal.jsonl").read_text()


def test_an_option_that_is_no_plain_data_leaves_the_others_in_the_journal(make_local: Make, tmp_path: Path) -> None:
    compiling = {"backend": lambda module, inputs: module.forward}
    make_local(LinearOperator, compile=compiling, clip_grad_norm=2.0).fit(1, folder=tmp_path)
    options = Journal(tmp_path).legs[0].run.options
    assert (options.left_out, options.clip_grad_norm) == (("compile",), 2.0)


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
    writer = JournalWriter(tmp_path, HEADER)
    writer.begin_leg(leg_line(0))
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
    writer = JournalWriter(tmp_path, HEADER)
    writer.begin_leg(leg_line(0))
    writer.write_steps(np.array([1, 2, 3, 7, 9]), np.array([(0.5, NO_NORM, 4)] * 5, STEPS))
    writer.note(GAP, first_step=4, last_step=6)
    assert [Journal(tmp_path).begin_of(step) for step in (3, 7, 9)] == [2, 6, 7]
    writer.begin_leg(leg_line(4))  # the steps from 5 are repeated
    writer.write_steps(np.array([7]), np.array([(0.5, NO_NORM, 4)], STEPS))
    assert Journal(tmp_path).begin_of(7) == 4


@pytest.mark.parametrize("rest", ['{"kind": "checkp', '{"kind": "leg", "step": 3}', "\0\0\0"])
def test_a_line_that_was_cut_off_is_left_out_and_replaced_by_the_next(tmp_path: Path, rest: str) -> None:
    lines = tmp_path / "journal" / "journal.jsonl"
    JournalWriter(tmp_path, HEADER).begin_leg(leg_line(0))
    with lines.open("a") as file:
        file.write(rest)
    assert [leg.after for leg in Journal(tmp_path).legs] == [0]
    writer = JournalWriter(tmp_path, HEADER)
    writer.begin_leg(leg_line(2))
    writer.note(CHECKPOINT, step=2, location="a.ckpt")
    assert [leg.after for leg in Journal(tmp_path).legs] == [0, 2]
    assert Journal(tmp_path).checkpoints == {2: "a.ckpt"}
    assert len(lines.read_text().splitlines()) == 5


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no journal\. `TorchTrainer.fit` keeps one if you pass `folder="):
        Journal(tmp_path)


EARLIER = Path(__file__).parents[1] / "earlier_files" / "files" / "journals"
RUN_LINE = {"kind": "run", "format": 1, **HEADER}


def written(folder: Path, *lines: Any) -> Path:
    """Write the lines of a journal without steps. A string is a line as it is."""
    path = folder / "journal" / "journal.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    (path.parent / STEPS_FILE).touch()
    return folder


def damaged_leg(**entries: Any) -> list[Any]:
    return [RUN_LINE, {"kind": "leg", **leg_line(), **entries}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"journal.jsonl` is damaged: no line describes the program"),
        (['{"kind": "leg"'], "line 1 of .*journal.jsonl` is damaged: Expecting"),
        (["[" * 200 + "]" * 200], "line 1 of .* is damaged: need an object in braces"),
        ([{**RUN_LINE, "config": json.loads('{"a":' * 150 + "1" + "}" * 150)}], "need at most 100 objects and lists"),
        ([RUN_LINE, {"kind": "leg"}], "line 2 of .* is damaged: `step` is missing"),
        ([RUN_LINE, {"kind": ["leg"]}], "line 2 of .* is damaged: `kind` is a list: need one of 'run', 'leg'"),
        ([{"kind": "leg", **leg_line()}], "line 1 of .* is damaged: no line before it describes the program"),
        (damaged_leg(num_workers=True), "line 2 of .* is damaged: `num_workers` is True: need an integer from 1 to 10"),
        (damaged_leg(data={"kind": "x\x1b"}), r"`data.kind` is 'x\\x1b': need one of 'loader'"),
        (damaged_leg(data={**DATA, "rule": {"cap": 0}}), "`data.rule.cap` is 0: need an integer from 1"),
        (damaged_leg(consumed=21), "`consumed` is 21, and the pass has 20 samples"),
        ([RUN_LINE, {"kind": "checkpoint", "step": 1, "location": "a\0b"}], r"`location` is 'a\\x00b': need a path"),
        ([{**RUN_LINE, "options": {**HEADER["options"], "strategy": "x"}}], "`options.strategy` is 'x': need one of"),
        ([{**RUN_LINE, "format": 2, "raysgd": "9.0"}], "format 2, and this version .* format 1: use .* 9.0"),
    ],
)
def test_a_damaged_journal_is_refused_with_file_line_and_entry(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Journal(written(tmp_path, *lines))


def test_a_line_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, RUN_LINE)
    with (folder / "journal" / "journal.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"line 2 of .* is damaged: 'utf-8' codec"):
        Journal(folder)


def test_steps_without_a_file_or_a_leg_are_refused(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, HEADER)
    writer.begin_leg(leg_line(0))
    writer.write_steps(np.array([1, 2]), np.array([(0.5, NO_NORM, 4)] * 2, STEPS))
    lines = (tmp_path / "journal" / "journal.jsonl").read_text()
    written(tmp_path, RUN_LINE, {"kind": "leg", **leg_line(1)})
    with pytest.raises(ValueError, match=r"has step 1, and the line of the first leg .* begins after step 1"):
        Journal(tmp_path)
    (tmp_path / "journal" / "journal.jsonl").write_text(lines)
    (tmp_path / "journal" / STEPS_FILE).unlink()
    with pytest.raises(ValueError, match=r"steps.bin` is missing: it has the losses of the steps. Copy the whole"):
        Journal(tmp_path)


def test_a_uri_is_no_folder_of_a_run() -> None:
    with pytest.raises(
        ValueError, match=r"need a path on a local or mounted disk, not a URI. Copy the folder of the run"
    ):
        Journal("s3://bucket/run")


def test_an_option_that_could_name_code_is_not_taken_from_a_journal(tmp_path: Path) -> None:
    step_options = {**HEADER["options"]["step_options"], "compile": {"options": {"cpp.cxx": [None, "evil"]}}}
    del step_options["clip_grad_norm"]  # the program had an object there
    line = {**RUN_LINE, "options": {**HEADER["options"], "step_options": step_options}}
    options = Journal(written(tmp_path, line, {"kind": "leg", **leg_line()})).legs[0].run.options
    assert (options.compile, options.clip_grad_norm) == (False, None)
    assert options.left_out == ("clip_grad_norm", "compile")


OPTIONS: dict[str, tuple[Any, ...]] = {
    "strategy": STRATEGIES,
    "scheduler_step_freq": (None, *sorted(VALID_SCHEDULER_STEP)),
    "precision": (None, *(name for name in PRECISIONS if name != "apex")),
    "use_fp16": (False, True, 1),
    "use_gpu": (False, True),
    "use_horovod": (False, True),
    "add_dist_sampler": (False, True),
    "seed": (None, 0, 2**31 - 1),
}
STEP_OPTIONS: dict[str, tuple[Any, ...]] = {
    "accumulate_grad_batches": (1, 1000),
    "clip_grad_norm": (None, 2, 0.5),
    "clip_grad_value": (None, 1),
    "sync_batchnorm": (False, True),
    "compile": (False, True),
    "activation_checkpointing": (False, True),
}
BATCH_OPTIONS: dict[str, tuple[Any, ...]] = {
    "split_batches": (False, True),
    "deterministic": (False, True),
    "num_shards": (1, 10_000),
}


def read_back(**options: Any) -> RunOptions:
    """Return the options of a trainer as they are read from the journal that it writes."""
    line = {"kind": "run", **header_of(TorchSettings(LinearOperator, {}, **options))}
    run = read_line(json.loads(json.dumps({**HEADER, **line})), None)
    assert isinstance(run, RunLine)
    assert run.options.left_out == ()
    return run.options


def test_each_value_of_an_option_is_read_as_it_was_written() -> None:
    for name, values in OPTIONS.items():
        assert [getattr(read_back(**{name: value}), name) for value in values] == [*values]
    for name, values in STEP_OPTIONS.items():
        options = (read_back(step_options=StepOptions(**{name: value})) for value in values)
        assert [getattr(each, name) for each in options] == [*values]
    for name, values in BATCH_OPTIONS.items():
        options = (read_back(batch_options=BatchOptions(**{name: value})) for value in values)
        assert [getattr(each, name) for each in options] == [*values]
    assert read_back(batch_options=BatchOptions(deterministic=True, micro_batch_size=3)).micro_batch_size == 3


@pytest.mark.parametrize(("run", "steps", "checkpoints"), [("dataset", 20, [10, 20]), ("stream", 12, [3, 6, 9, 12])])
def test_journals_of_earlier_versions_are_read(run: str, steps: int, checkpoints: list[int]) -> None:
    journal = Journal(EARLIER / run)
    assert journal.numbers() == list(range(1, steps + 1))
    assert [*journal.checkpoints] == checkpoints
    assert journal.legs[-1].run.options.left_out == ()


def test_a_run_goes_on_in_a_journal_of_an_earlier_version(tmp_path: Path) -> None:
    earlier = EARLIER / "dataset"
    folder = shutil.copytree(earlier, tmp_path / "run")
    writer = JournalWriter(folder, HEADER)
    writer.begin_leg(leg_line(15))
    writer.write_steps(np.array([16]), np.array([(0.5, NO_NORM, 4)], STEPS))
    assert Journal(folder).steps[:15].tolist() == Journal(earlier).steps[:15].tolist()
    change_byte(folder / "journal" / STEPS_FILE, 3)
    with pytest.raises(ValueError, match="steps 1 to 256 do not have their checksum"):
        Journal(folder)


@pytest.mark.parametrize("name", ["journal.jsonl", STEPS_FILE, CHECKS_FILE])
def test_a_link_out_of_the_folder_of_the_run_and_a_pipe_are_not_read(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "run", RUN_LINE, {"kind": "leg", **leg_line()}) / "journal" / name
    content = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    (tmp_path / "outside").write_bytes(content)
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=rf"{name}` is a link out of the folder of the run, or no regular file"):
        Journal(tmp_path / "run")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises((ValueError, FileNotFoundError), match=r"no regular file|has no journal"):
        Journal(tmp_path / "run")


def test_a_leg_replaces_what_was_left_out_after_its_beginning(tmp_path: Path) -> None:
    writer, entry = JournalWriter(tmp_path, HEADER), {"optimizer": 0, "reason": "a spike", "ranks": [], "back_to": None}
    writer.begin_leg(leg_line())
    for step in (2, 5, 6):
        writer.note(LEFT_OUT, **entry | {"step": step})
    writer.begin_leg(leg_line(5, attempt=[1, 2]))
    writer.note(LEFT_OUT, **entry | {"step": 7, "ranks": [1, 2], "back_to": 4})
    assert [(each.step, str(each)) for each in Journal(tmp_path).left_out] == [
        (2, "left out: a spike"),
        (5, "left out: a spike"),
        (7, "left out: a spike on rank 1, 2; the state after step 4 was restored"),
    ]
