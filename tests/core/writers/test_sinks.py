"""Sinks whose failures are warnings, and files of metrics.

How tables grow is tested with the runs of functions, in `tests/train/fit/test_recorder_files.py`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.core.text.log_lines import Once
from raysgd.core.writers.sinks import (
    CsvTable,
    EventFile,
    FileSink,
    JsonLines,
    JsonList,
    RunInFolder,
    SafeSink,
    Sink,
    failures_warned,
)
from tests.helpers.run_if import RunIf
from tests.train.fit.notes import events


class Flaky(Sink):
    """Notes its calls, and fails in some of them."""

    def __init__(self, *failures: str) -> None:
        self.calls: list[Any] = []
        self.failures = list(failures)

    def open(self, run: Any, first_step: int | None = None) -> None:
        self._note("open", first_step)

    def write(self, row: Any, step: int) -> None:
        self._note("write", step, row)

    def close(self, *, has_failed: bool = False) -> None:
        self._note("close", has_failed)

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.failures:
            self.failures.remove(call[0])
            raise OSError(f"no {call[0]}")


RUN = RunInFolder(Path("run"))


def test_rows_go_through_without_what_is_hidden() -> None:
    sink = Flaky()
    safe = SafeSink(sink, "Mine", hidden=["b"])
    safe.open(RUN, first_step=3)
    safe.write({"a": 1, "b": 2}, 4)
    safe.close()
    assert sink.calls == [("open", 3), ("write", 4, {"a": 1}), ("close", False)]


@pytest.mark.parametrize("sink_cls", [JsonLines, JsonList, CsvTable])
@pytest.mark.parametrize("link", ["metrics", "below"])
def test_files_of_a_run_are_not_written_through_links_that_lead_out_of_its_folder(
    sink_cls: Any, link: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("the only copy")
    (tmp_path / "run" / "metrics").symlink_to(tmp_path / "mine")
    (tmp_path / "run" / "below").symlink_to(tmp_path)
    name = "metrics" if link == "metrics" else "below/mine"
    with pytest.raises(OSError, match=r"leads out of the run's folder: remove the link.*run/"):
        sink_cls(name).open(RunInFolder(tmp_path / "run"), first_step=1)
    assert (tmp_path / "mine").read_text() == "the only copy"


def test_what_cannot_be_opened_raises_and_each_row_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    sink = Flaky("open", "open")
    safe = SafeSink(sink, "Mine")
    with pytest.raises(OSError, match="no open"):
        safe.open(RUN, first_step=0)
    safe.write({}, 1)
    safe.write({}, 2)
    safe.close(has_failed=True)
    half_open = [("open", 0), ("close", True)]
    assert sink.calls == [*half_open, *half_open, ("open", 0), ("write", 2, {}), ("close", True)]
    assert caplog.text.count("Mine: could not write (OSError: no open); the run continues") == 1


def test_rows_that_fail_cost_only_themselves_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    sink = Flaky("write", "write", "close")
    safe = SafeSink(sink, "Mine")
    safe.open(RUN)
    for step in (1, 2, 3):
        safe.write({}, step)
    safe.close()
    assert [call[1] for call in sink.calls if call[0] == "write"] == [1, 2, 3]
    assert len(caplog.records) == 1


def test_what_was_not_opened_is_not_closed() -> None:
    sink = Flaky("open", "open")
    safe = SafeSink(sink, "Mine")
    safe.close()
    assert sink.calls == []


@RunIf(modules=["tensorboardX"])
def test_a_file_for_tensorboard_is_opened_with_the_first_row_and_again_for_the_next_run(tmp_path: Path) -> None:
    sink = copy.deepcopy(EventFile("logs", "mine"))
    for name in ("first", "second"):
        sink.open(RunInFolder(tmp_path / name))
        assert list((tmp_path / name / "logs").iterdir()) == []
        for step in (1, 2):
            sink.write({"loss": step / 2}, step)
        sink.close()
        assert list(events(tmp_path / name / "logs")) == [("mine/loss", 1, 0.5), ("mine/loss", 2, 1.0)]
    sink.close()


@RunIf(modules=["tensorboardX"])
def test_a_number_in_an_array_is_a_number_for_tensorboard_and_costs_no_other_row(tmp_path: Path) -> None:
    sink = EventFile("logs", "")
    sink.open(RunInFolder(tmp_path))
    for step in (1, 2, 3, 4):
        sink.write({"loss": np.array(step / 2) if step == 2 else step / 2, "words": np.array("x")}, step)
    sink.close()
    assert list(events(tmp_path / "logs")) == [("loss", step, step / 2) for step in (1, 2, 3, 4)]


def test_a_failure_costs_one_warning_for_each_kind_of_error(caplog: pytest.LogCaptureFixture) -> None:
    warned, written = Once(), []
    for number, error in enumerate([OSError("full"), None, OSError("full again"), ValueError("closed")]):
        with failures_warned("Table", warned):
            if error is not None:
                raise error
            written.append(number)
    assert written == [1]
    assert [record.getMessage()[:43] for record in caplog.records] == [
        "Table: could not write (OSError: full); the",
        "Table: could not write (ValueError: closed)",
    ]


def test_an_interrupt_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt), failures_warned("Table", Once()):
        raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------------------- files


def test_what_stands_at_the_end_of_each_line_also_ends_an_empty_one(tmp_path: Path) -> None:
    file = opened(JsonLines("a.jsonl", {"config": {"lr": 1}}), tmp_path)
    file.write({"n": 1}, 1)
    file.write({}, 1)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines == [{"n": 1, "config": {"lr": 1}}, {"config": {"lr": 1}}]


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    file = opened(JsonLines("a.jsonl"), tmp_path)
    for row in ({"n": 1}, {}):
        file.write(row, 1)
    with open(tmp_path / "a.jsonl", "a") as disk:  # which was full after so many bytes
        disk.write('{"n": ')
    file.write({"n": 3}, 1)
    assert (tmp_path / "a.jsonl").read_text() == '{"n": 1}\n{}\n{"n": \n{"n": 3}\n'


def test_lines_that_are_kept_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"epoch": 1, "x": 1e0}', '{"epoch": 2}', "[3]", "[" * 100_000, '{"training_iteration": 1}', '{"n": 1}']
    path.write_text("\n".join([*lines, '{"epoch": 1, "cut']))
    JsonLines(path).open(RunInFolder(tmp_path), first_step=1)
    assert path.read_text() == '{"epoch": 1, "x": 1e0}\n{"training_iteration": 1}\n'


def opened(file: FileSink, folder: Path) -> FileSink:
    file.open(RunInFolder(folder))
    return file


def test_a_list_is_whole_after_each_report(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    file = opened(JsonList(path), tmp_path)
    for expected in ([], [{"n": 0}], [{"n": 0}, {"n": 1}]):
        assert json.loads(path.read_text()) == expected
        file.write({"n": len(expected)}, 1)


def test_a_list_is_whole_again_after_a_report_that_was_cut_off(tmp_path: Path) -> None:
    file = opened(JsonList("a.json"), tmp_path)
    file.write(1, 1)
    (tmp_path / "a.json").write_text('[1, {"n": ')
    file.write(3, 1)
    assert json.loads((tmp_path / "a.json").read_text()) == [1, 3]


def test_rows_that_are_kept_stay_and_the_table_goes_on_behind_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.csv"
    path.write_text('epoch,text\n1,"a, b"\n,b\nx,c\n2,c\n3,d\n')
    table = CsvTable("a.csv")
    table.open(RunInFolder(tmp_path), first_step=2)
    table.write({"epoch": 3, "text": "e"}, 3)
    assert path.read_text() == 'epoch,text\n1,"a, b"\n2,c\n3,e\n'


def test_the_table_of_a_new_run_has_its_own_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for row in ({"epoch": 1, "val_loss": 2}, {"epoch": 1, "loss": 3}):
        table = CsvTable("a.csv")
        table.open(RunInFolder(tmp_path), first_step=0)
        table.write(row, 1)
    assert path.read_text() == "epoch,loss\n1,3\n"
