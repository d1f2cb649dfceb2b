"""What `raysgd status` reads in the folder of a run: of each kind, half-written, damaged, or made to deceive.

Covers `raysgd.cli.run_status`. The folders are written by the trainers themselves, except for the damaged ones.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from raysgd import TorchTrainer
from raysgd.callbacks import Callback, Checkpointing, Run
from raysgd.cli.run_status import read_status
from raysgd.exceptions import CallbackError, StorageError
from tests.torch.operators_for_tests import LinearOperator

NOW = 1_000_000.0


def status_of(path: Path | str) -> str:
    return read_status(str(path), now=NOW)


def write_lines(path: Path, *entries: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{entry if isinstance(entry, str) else json.dumps(entry)}\n" for entry in entries))


def make_trial(folder: Path, **note: Any) -> Path:
    """A run of two reports, in the folder of its experiment."""
    trial = folder / "TorchTrainer_1f3a9_00000_0_2026-11-21_10-00-00"
    reports = [
        {"loss": value, "training_iteration": n, "timestamp": NOW - 60 * n} for n, value in ((1, 0.5), (2, 0.25))
    ]
    write_lines(trial / "result.json", *reports)
    if note:
        (folder / "run.json").write_text(json.dumps({"trial": trial.name, "trainer": "TorchTrainer", **note}))
    return trial


class TestARunOfFitInTheStyleOfAir:
    @pytest.mark.parametrize(
        ("status", "words"),
        [("TERMINATED", "finished"), ("ERROR", "failed"), ("RUNNING", "running: the last report is 2 min old")],
    )
    def test_the_experiment_leads_to_its_trial(self, tmp_path: Path, status: str, words: str) -> None:
        make_trial(tmp_path, status=status)
        text = status_of(tmp_path)
        assert words in text
        assert "fit() of TorchTrainer" in text
        assert "loss=0.25" in text
        assert "2, the last report is 2 min old" in text
        assert "checkpoints: none" in text

    def test_the_trial_alone_says_whether_it_is_done(self, tmp_path: Path) -> None:
        trial = make_trial(tmp_path)
        assert "state:       running: the last report is" in status_of(trial)
        write_lines(trial / "result.json", {"loss": 0.1, "done": True})
        assert "finished" in status_of(trial)

    def test_an_error_is_shown_as_text_and_its_pickle_is_not_read(self, tmp_path: Path) -> None:
        trial, trap = make_trial(tmp_path, status="ERROR"), tmp_path / "trap"

        class Evil:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(trap),)

        (trial / "error.txt").write_text("Traceback:\n  ...\nValueError: no such \x1b[2Jcolumn\n")
        (trial / "error.pkl").write_bytes(pickle.dumps(Evil()))
        text = status_of(tmp_path)
        assert "ValueError: no such \\x1b[2Jcolumn" in text
        assert "\x1b" not in text
        assert not trap.exists()

    def test_lines_that_are_not_whole_are_left_out(self, tmp_path: Path) -> None:
        trial = make_trial(tmp_path)
        with open(trial / "result.json", "ab") as file:
            file.write(b'[1]\n\xff\xfe\nnull\n{"loss": 0.1')
        assert "reports:     2," in status_of(trial)

    @pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"trial": 3}', '{"trial": "../.."}', "[" * 100_000])
    def test_a_damaged_note_is_no_traceback(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "run.json").write_text(content)
        assert "`run.json` is damaged, or names a missing folder" in status_of(tmp_path)

    def test_numbers_out_of_range_are_shown_anyway(self, tmp_path: Path) -> None:
        write_lines(
            tmp_path / "result.json",
            f'{{"loss": NaN, "huge": {10**400}, "timestamp": -1e400, "text\\u001b[0m": 1, "nested": {{"a": 1}}}}',
        )
        text = status_of(tmp_path)
        assert "loss=nan, huge=too large, text\\x1b[0m=1" in text


class TestARunOfAFunctionTrainer:
    def test_the_latest_run_is_shown(self, tmp_path: Path) -> None:
        for name, loss in (("run_002", 0.5), ("run_010", 0.125)):
            content = [[{"loss": 1.0}], [{"loss": loss, "_timestamp": NOW - 30, "_training_iteration": 2}]]
            write_lines(tmp_path / name / "results.json", content)
        (tmp_path / "run_010" / "checkpoints" / "checkpoint_000002").mkdir(parents=True)
        text = status_of(tmp_path)
        assert "run_010" in text
        assert "running: the last report is 30 s old" in text
        assert "loss=0.125" in text
        assert "1, the newest is checkpoint_000002" in text
        assert "runs:        2" in text
        assert "loss=0.5" in status_of(tmp_path / "run_002")

    @pytest.mark.parametrize("content", [None, "", "[", "{}", "[[], 3, [4]]"])
    def test_a_run_without_a_whole_log_has_no_reports(self, tmp_path: Path, content: str | None) -> None:
        (tmp_path / "run_001").mkdir()
        if content is not None:
            (tmp_path / "run_001" / "results.json").write_text(content)
        expected = "not written: add a `JsonLoggerCallback`" if content is None else "none yet"
        assert f"reports:     {expected}" in status_of(tmp_path)


class TestARunOfAClassBasedTrainer:
    HISTORY: ClassVar[dict[str, Any]] = {
        "rows": [{"epoch": 3, "train_loss": 0.5, "val_accuracy": 0.75}],
        "records": [
            {"kind": "train", "epoch": 3, "metrics": {}, "began_at": NOW - 90, "seconds": 30, "num_workers": 1}
        ],
        "events": [{"kind": "continued", "old_size": 2, "new_size": 1, "seconds": 1.0, "cause": "lost rank 1"}],
        "stop_reason": None,
    }

    def write_sidecar(self, folder: Path, epoch: int, **history: Any) -> None:
        whole = {**self.HISTORY, **history}
        content = {"raysgd_run": 1, "epoch": epoch, "history": whole, "callbacks": [], "parts": []}
        write_lines(folder / f"epoch_{epoch:04d}.ckpt.run.json", content)

    def test_what_is_beside_the_newest_checkpoint_is_shown(self, tmp_path: Path) -> None:
        self.write_sidecar(tmp_path / "checkpoints", 2, rows=[])
        self.write_sidecar(tmp_path / "checkpoints", 3)
        text = status_of(tmp_path)
        assert "epochs:      3" in text
        assert "train_loss=0.5, val_accuracy=0.75" in text
        assert "2, the newest is epoch_0003.ckpt" in text
        assert "continued: lost rank 1" in text
        assert "running: the newest checkpoint is 60 s old" in text

    def test_the_newest_checkpoint_is_the_one_with_most_epochs(self, tmp_path: Path) -> None:
        for epoch in (2, 9_999, 10_000):
            self.write_sidecar(tmp_path, epoch)
        (tmp_path / "epoch_0002.ckpt.run.json").rename(tmp_path / "manual.ckpt.run.json")
        (tmp_path / "torn.ckpt.run.json").write_text("{")
        assert "4, the newest is epoch_10000.ckpt" in status_of(tmp_path)

    def test_a_run_that_says_nothing_for_a_while_may_be_over(self, tmp_path: Path) -> None:
        self.write_sidecar(
            tmp_path, 3, records=[{**self.HISTORY["records"][0], "began_at": NOW - 7500.0, "seconds": 0.0}]
        )
        words = "state:       silent (in a long epoch, or its driver is gone): the newest checkpoint is 2 h old"
        assert words in " ".join(status_of(tmp_path).replace("\n" + 13 * " ", " ").splitlines())

    def test_a_run_that_has_trained_all_its_epochs_is_finished(self, tmp_path: Path) -> None:
        self.write_sidecar(tmp_path, 3)
        beside = tmp_path / "epoch_0003.ckpt.run.json"
        for epochs, state in ((3, "finished"), (4, "running:"), ("3", "running, or")):
            beside.write_text(json.dumps({**json.loads(beside.read_text()), "epochs": epochs}))
            assert f"state:       {state}" in status_of(tmp_path)

    def test_the_text_fits_the_terminal_and_has_four_metrics(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        names = ["grad_norm", "lr", "train_loss", "num_samples", "val_loss", "val_accuracy", "seconds"]
        row = {"epoch": 3, **dict.fromkeys(names, 0.5)}
        self.write_sidecar(tmp_path, 3, rows=[row], stop_reason=20 * "because ")
        text = status_of(tmp_path).replace(str(tmp_path), "folder")
        assert max(map(len, text.splitlines())) <= 60
        assert "grad_norm=0.5, train_loss=0.5, val_loss=0.5, val_accuracy=0.5" in " ".join(text.split())
        assert "lr=" not in text
        assert "stopped: because because" in " ".join(text.split())

    def test_what_happened_is_read_from_all_parts_of_the_history(self, tmp_path: Path) -> None:
        self.write_sidecar(tmp_path, 3)
        beside, part = tmp_path / "epoch_0003.ckpt.run.json", "history-0123456789abcdef.json"
        beside.write_text(json.dumps({**json.loads(beside.read_text()), "parts": [part]}))
        events = [{**event, "cause": "lost rank 7"} for event in self.HISTORY["events"]]
        write_lines(tmp_path / part, {**self.HISTORY, "events": events})
        text = status_of(tmp_path)
        assert "lost rank 7" in text
        assert "lost rank 1" in text

    @pytest.mark.parametrize("parts", [["../x.json"], [3], ["history-0123456789abcdef.json"]])
    def test_where_a_part_is_elsewhere_or_missing_the_file_before_counts(self, tmp_path: Path, parts: Any) -> None:
        self.write_sidecar(tmp_path, 2, rows=[{"epoch": 2}])
        self.write_sidecar(tmp_path, 3)
        beside = tmp_path / "epoch_0003.ckpt.run.json"
        beside.write_text(json.dumps({**json.loads(beside.read_text()), "parts": parts}))
        write_lines(tmp_path.parent / "x.json", self.HISTORY)
        assert "epochs:      2" in status_of(tmp_path)

    def test_a_log_is_newer_than_the_checkpoints(self, tmp_path: Path) -> None:
        self.write_sidecar(tmp_path, 3)
        write_lines(tmp_path / "metrics.jsonl", {"epoch": 4, "train_loss": 0.25}, "{")
        text = status_of(tmp_path)
        assert "epochs:      4" in text
        assert "train_loss=0.25" in text

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", '{"epoch": "x", "history": 3}', '{"history": {"rows": [1, null]}}']
    )
    def test_a_damaged_file_is_no_traceback(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "epoch_0001.ckpt.run.json").write_text(content)
        assert "epochs:      0" in status_of(tmp_path)


class InSecondEpoch(Callback):
    """Does something at the beginning of the second epoch."""

    def __init__(self, act: Callable[[Run], None]) -> None:
        self._act = act

    def on_epoch_begin(self, run: Run) -> None:
        if run.epoch == 1:
            self._act(run)


class TestTheEndOfARunOfAClassBasedTrainer:
    @pytest.fixture
    def trainer(self) -> Iterator[TorchTrainer]:
        with TorchTrainer(training_operator_cls=LinearOperator, use_local=True) as trainer:
            yield trainer

    @pytest.mark.parametrize("name", ["began_at", "seconds"])
    def test_a_time_that_is_no_time_is_no_traceback(self, trainer: TorchTrainer, tmp_path: Path, name: str) -> None:
        trainer.fit(1, callbacks=[Checkpointing(tmp_path)])
        beside, index = tmp_path / "epoch_0001.ckpt.run.json", tmp_path / "checkpoints.json"
        content = json.loads(beside.read_text())
        content["epochs"] = 2
        content["history"]["records"][-1][name] = 10**400
        beside.write_text(json.dumps(content))
        index.unlink()
        assert "epochs:      1" in status_of(tmp_path)

    def fail(self, run: Run) -> None:
        raise ValueError("no disk at s3://key:hidden@bucket\nand more")

    def interrupt(self, run: Run) -> None:
        raise KeyboardInterrupt

    def test_an_error_is_shown_with_its_first_line(self, trainer: TorchTrainer, tmp_path: Path) -> None:
        with pytest.raises(CallbackError):
            trainer.fit(3, callbacks=[InSecondEpoch(self.fail), Checkpointing(tmp_path)])
        text = " ".join(status_of(tmp_path).split())
        assert "state: failed: CallbackError: The callback `InSecondEpoch` failed in `on_epoch_begin`: Value" in text
        assert "and more" not in text
        assert "hidden" not in text
        assert "epochs: 1" in text

    def test_a_run_that_failed_before_its_first_checkpoint_is_a_run(
        self, trainer: TorchTrainer, tmp_path: Path
    ) -> None:
        with pytest.raises(CallbackError):
            trainer.fit(3, callbacks=[InSecondEpoch(self.fail), Checkpointing(tmp_path, every_n_epochs=2)])
        assert "failed: CallbackError" in status_of(tmp_path)

    def test_an_interrupt_is_no_failure(self, trainer: TorchTrainer, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(3, callbacks=[InSecondEpoch(self.interrupt), Checkpointing(tmp_path)])
        assert "state:       interrupted: KeyboardInterrupt" in status_of(tmp_path)

    def test_a_loop_that_was_left_has_stopped(self, trainer: TorchTrainer, tmp_path: Path) -> None:
        for _ in trainer.epochs(3, callbacks=[Checkpointing(tmp_path)]):
            break
        assert "state:       stopped: the program has left the loop over the epochs" in status_of(tmp_path)

    def test_a_run_that_resumes_runs_again(self, trainer: TorchTrainer, tmp_path: Path) -> None:
        with pytest.raises(CallbackError):
            trainer.fit(2, callbacks=[InSecondEpoch(self.fail), Checkpointing(tmp_path)])
        shown = list[str]()
        looks = InSecondEpoch(lambda run: shown.append(status_of(tmp_path)))
        trainer.fit(2, callbacks=[looks, Checkpointing(tmp_path)], resume_from="auto")
        assert "state:       running" in shown[0]
        assert "state:       finished" in status_of(tmp_path)


class TestWhatIsNoRun:
    def test_an_empty_folder_names_what_was_expected(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"it is empty\. Expected one of: .*`result\.json`.*`run_001`.*metrics"):
            status_of(tmp_path)

    def test_another_folder_says_what_it_has(self, tmp_path: Path) -> None:
        for number in range(9):
            (tmp_path / f"{number}\x1b.txt").touch()
        with pytest.raises(ValueError, match=r"it has 0\\x1b\.txt, 1.*, \.\.\.\. Expected") as caught:
            status_of(tmp_path)
        assert "\x1b" not in str(caught.value)

    def test_a_folder_that_is_not_there_and_a_file_are_told_apart(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="does not exist"):
            status_of(tmp_path / "x")
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="is a file, not a folder"):
            status_of(tmp_path / "file")


def test_a_folder_in_a_store_is_read_by_its_uri() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/status-bucket/run/result.json", b'{"loss": 0.125, "done": true}\n')
    try:
        text = status_of("memory://status-bucket/run")
    finally:
        memory.rm("/status-bucket", recursive=True)
    assert "loss=0.125" in text
    assert "finished" in text


def test_a_key_in_a_uri_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"does not exist|is not the folder of a run") as info:
        status_of("memory://id:hidden@bucket/run")
    assert "hidden" not in str(info.value)


def test_what_could_be_read_without_an_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(StorageError, match="not a regular file"):
        read_status(str(tmp_path))
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").symlink_to("/dev/zero")
    with pytest.raises(StorageError, match="not a regular file"):
        read_status(str(tmp_path))
