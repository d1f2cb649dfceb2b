"""The files of a trial, and the config as they carry it."""

from __future__ import annotations

import csv
import json
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.air.constants import CSV_LOGGER, JSON_LOGGER, TENSORBOARD_LOGGER
from raysgd.air.result import read_reports
from raysgd.core.writers.sinks import SafeSink, as_json
from raysgd.storage import open_folder
from raysgd.train.fit.recorder import open_writers, shown_config, write_error
from raysgd.train.fit.recorder import write_params as write_parameters
from tests.helpers.run_if import RunIf
from tests.train.fit.notes import events, lines_in


def read_table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "progress.csv", newline="") as file:
        return list(csv.DictReader(file))


def open_results(folder: Path, config: dict[str, Any]) -> SafeSink:
    [results] = open_writers(folder, config, [CSV_LOGGER, TENSORBOARD_LOGGER])
    return results


def open_table(folder: Path) -> SafeSink:
    [table] = open_writers(folder, {}, [JSON_LOGGER, TENSORBOARD_LOGGER])
    return table


@pytest.fixture
def table(tmp_path: Path) -> SafeSink:
    return open_table(tmp_path)


class TestResults:
    def test_values_that_json_does_not_know(self, tmp_path: Path) -> None:
        file = open_results(tmp_path, {"model": Path})
        file.write({"a": np.float32(0.5), "b": np.arange(2), "c": None, "d": {("x", 1): {1: 2}}, "e": b"z"}, 1)
        [line] = lines_in(tmp_path)
        assert line == {
            "a": 0.5,
            "b": [0, 1],
            "c": None,
            "d": {"('x', 1)": {"1": 2}},
            "e": "b'z'",
            "config": {"model": f"{Path}"},
        }

    @pytest.mark.parametrize("key", ["x", ("x", 1)])
    def test_programs_read_the_numbers_back_that_were_written(self, tmp_path: Path, key: Any) -> None:
        numbers = [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf"), None, 0.1]
        open_results(tmp_path, {"floor": -math.inf}).write({"loss": math.nan, "of": {key: numbers}}, 1)
        [line] = read_reports(open_folder(tmp_path))
        assert math.isnan(line["loss"])
        assert repr(line["of"][str(key)]) == "[nan, inf, -inf, nan, inf, None, 0.1]"
        assert line["config"] == {"floor": -math.inf}

    def test_json_for_others_has_null_for_what_is_no_number(self) -> None:
        assert as_json({"a": math.nan, "b": np.float32("inf"), "c": {1: np.array([math.nan])}}) == (
            '{"a": null, "b": null, "c": {"1": [null]}}'
        )

    def test_a_dict_inside_of_itself(self) -> None:
        value: dict[str, Any] = {"n": 1}
        value["self"] = value
        assert '"..."' in as_json(value)

    def test_lists_that_are_nested_too_deep(self) -> None:
        value: list[Any] = []
        for _ in range(100_000):
            value = [value]
        assert as_json(value) == f'{"[" * 51}"..."{"]" * 51}'


class TestTable:
    def test_nested_metrics_have_columns(self, tmp_path: Path, table: SafeSink) -> None:
        table.write({"n": 1, "val": {"loss": 0.5}, "config": {"lr": 1}}, 1)
        assert read_table(tmp_path) == [{"n": "1", "val/loss": "0.5"}]

    def test_a_new_metric_is_a_new_column(self, tmp_path: Path, table: SafeSink) -> None:
        table.write({"n": 1}, 1)
        table.write({"n": 2, "loss": 0.5}, 1)
        table.write({"loss": 0.25}, 1)
        assert read_table(tmp_path) == [
            {"n": "1", "loss": ""},
            {"n": "2", "loss": "0.5"},
            {"n": "", "loss": "0.25"},
        ]

    def test_a_table_is_continued(self, tmp_path: Path, table: SafeSink) -> None:
        table.write({"n": 1, "text": 'a "b", c\nd'}, 1)
        (tmp_path / "progress.csv").write_text((tmp_path / "progress.csv").read_text() + "2,cut o")
        later = open_table(tmp_path)
        later.write({"n": 3, "text": "", "loss": 1}, 1)
        assert [row["n"] for row in read_table(tmp_path)] == ["1", "2", "3"]
        assert read_table(tmp_path)[0]["text"] == 'a "b", c\nd'

    @pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe,\x00\n", b"a,a\n1,2,3\n", b'"'])
    def test_a_damaged_table_is_written_on(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "progress.csv").write_bytes(content)
        file = open_table(tmp_path)
        file.write({"loss": 0.5}, 1)
        assert read_table(tmp_path)[-1]["loss"] == "0.5"


@RunIf(modules=["tensorboardX"])
def test_tensorboard_is_shown_the_metrics_by_iteration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writers = open_writers(tmp_path, {})
    for iteration in (1, 2):
        result = {"loss": iteration / 2, "val": {"a": iteration}, "training_iteration": iteration, "date": "today"}
        write_all(writers, {**result, "config": {"x": "y"}, "checkpoint_dir_name": None, "done": False})
    close_all(writers)
    assert [found for found in events(tmp_path) if found[0] != "ray/tune/done"] == [
        ("ray/tune/loss", 1, 0.5),
        ("ray/tune/val/a", 1, 1.0),
        ("ray/tune/loss", 2, 1.0),
        ("ray/tune/val/a", 2, 2.0),
    ]
    assert caplog.records == []
    assert not [thread for thread in threading.enumerate() if "EventLogger" in thread.name]


@RunIf(modules=["tensorboardX"])
def test_a_broken_tensorboardx_costs_only_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: str, **options: Any) -> None:
        raise ImportError("libprotobuf is missing")

    monkeypatch.setattr("tensorboardX.SummaryWriter", broken)
    writers = open_writers(tmp_path, {})
    for iteration in (1, 2, 3):
        write_all(writers, {"loss": 1.0, "training_iteration": iteration})
    close_all(writers)
    assert len(lines_in(tmp_path)) == 3
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("TensorBoard: could not write (ImportError: libprotobuf is missing); the run continues")


def test_loggers_of_the_user_replace_ours(tmp_path: Path) -> None:
    writers = open_writers(tmp_path, {}, [JSON_LOGGER, TENSORBOARD_LOGGER])
    close_all(writers)
    assert len(writers) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["progress.csv"]


class TestParameters:
    def test_are_there_for_people_and_for_programs(self, tmp_path: Path) -> None:
        write_parameters(tmp_path, {"train_loop_config": {"lr": 0.1, "f": np.float32(1)}})
        assert json.loads((tmp_path / "params.json").read_text()) == {"train_loop_config": {"lr": 0.1, "f": 1.0}}
        assert pickle.loads((tmp_path / "params.pkl").read_bytes())["train_loop_config"]["lr"] == 0.1

    def test_that_cannot_be_pickled_are_there_for_people(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_parameters(tmp_path, {"lock": threading.Lock(), "lr": 1})
        assert json.loads((tmp_path / "params.json").read_text())["lr"] == 1
        assert not (tmp_path / "params.pkl").exists()
        assert "params.pkl was not written, because the config cannot be pickled" in caplog.text


class TestErrors:
    def test_are_there_in_words_and_as_they_are(self, tmp_path: Path) -> None:
        write_error(tmp_path, ValueError("first"), 1)
        try:
            raise KeyError("second \udcff") from OSError("below")
        except KeyError as error:
            write_error(tmp_path, error, 2)
        text = (tmp_path / "error.txt").read_text()
        assert text.startswith("Failure # 1 (occurred at 2")
        assert "Failure # 2" in text
        assert "OSError: below" in text
        assert isinstance(pickle.loads((tmp_path / "error.pkl").read_bytes()), KeyError)

    def test_that_cannot_be_pickled_are_there_in_words(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_error(tmp_path, ValueError(threading.Lock()), 1)
        assert "ValueError: <unlocked" in (tmp_path / "error.txt").read_text()
        assert not (tmp_path / "error.pkl").exists()
        assert "cannot be pickled" in caplog.text

    def test_the_error_of_an_earlier_attempt_is_not_that_of_the_run(self, tmp_path: Path) -> None:
        write_error(tmp_path, ValueError("first"), 1)
        write_error(tmp_path, ValueError(threading.Lock()), 2)
        assert not (tmp_path / "error.pkl").exists()


def write_all(writers: list[SafeSink], result: dict[str, Any]) -> None:
    for writer in writers:
        writer.write(result, result["training_iteration"])


def close_all(writers: list[SafeSink]) -> None:
    for writer in writers:
        writer.close()


URI = "s3://id:secret@bucket/a"


@pytest.mark.parametrize(
    "value",
    [0.1, 3, True, None, "adam", [1, [2, 3]], (1, 2), {"lr": {"low": 0.1}}, {}, np.float32(1), {3: "three"}],
    ids=str,
)
def test_a_config_is_shown_as_it_is(value: Any) -> None:
    assert shown_config(value) == value


def test_the_keys_of_stores_are_not_shown() -> None:
    assert shown_config({"a": URI, "b": {"c": ["x", URI, {"d": URI}]}}) == {
        "a": "s3://***@bucket/a",
        "b": {"c": ["x", "s3://***@bucket/a", {"d": "s3://***@bucket/a"}]},
    }


@pytest.mark.parametrize(
    ("value", "note"),
    [
        (np.zeros(1 << 16), r"(ndarray: 524,"),
        ([0.5] * 100_000, "(list: "),
        ("x" * 100_000, "(str: 100,"),
        ({str(number): number for number in range(10_000)}, "(dict: "),
    ],
    ids=["array", "list", "text", "table"],
)
def test_a_large_value_is_shown_by_its_kind_and_size(value: Any, note: str) -> None:
    shown = shown_config({"lr": 0.1, "model": {"large": value, "depth": 3}})
    assert (shown["lr"], shown["model"]["depth"]) == (0.1, 3)
    assert shown["model"]["large"].startswith(note)


def test_many_values_that_are_not_large_are_all_shown() -> None:
    config = {str(number): "x" * 1000 for number in range(100)}
    assert shown_config(config) == config


def test_what_is_inside_of_itself_or_cannot_be_pickled_is_no_problem() -> None:
    lock, config, numbers = threading.Lock(), {"lr": 0.1}, [1]
    config |= {"self": config, "lock": lock, "numbers": numbers}  # type: ignore[dict-item]
    numbers.append(numbers)  # type: ignore[arg-type]
    shown = shown_config(config)
    assert (shown["self"], shown["lock"], shown["numbers"][0]) == ("...", lock, 1)
