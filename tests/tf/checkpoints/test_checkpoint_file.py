"""The checkpoint file: what comes back, and what is refused."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.exceptions import CheckpointCorruptedError, UnsafeCheckpointError
from raysgd.tf.checkpoints import checkpoint_file


def state(**more: Any) -> dict[str, Any]:
    return {"epoch": 2, "models": [[np.arange(6.0).reshape(2, 3)]], "optimizers": [[np.array(3)]], **more}


def round_trip(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    checkpoint_file.write(folder / "file", content)
    return checkpoint_file.read(folder / "file")


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    arrays = [np.zeros((0, 3)), np.array(1.5), np.arange(4, dtype=np.uint8)[::2], np.array([True]), np.array(["a"])]
    back = round_trip(tmp_path, state(models=[arrays]))["models"][0]
    for before, after in zip(arrays, back, strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert np.array_equal(before, after)


def test_numbers_that_numpy_does_not_know_come_back(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    [[back]] = round_trip(tmp_path, state(models=[[array]]))["models"]
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2.5, math.inf, "text", b"bytes", [1, [2]], (1, "a"), {"a": (1,)}, {1: "one", (2, 3): None}, {}],
)
def test_plain_values_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    back = round_trip(tmp_path, state(operator=value))["operator"]
    assert back == value
    assert type(back) is type(value)


def test_a_value_with_the_name_that_marks_others_comes_back(tmp_path: Path) -> None:
    assert round_trip(tmp_path, state(operator={"raysgd": "array", "value": "x"}))["operator"]["value"] == "x"


def test_numbers_of_numpy_become_plain(tmp_path: Path) -> None:
    back = round_trip(tmp_path, state(operator=[np.float32(0.5), np.int64(3)]))["operator"]
    assert back == [0.5, 3]
    assert [type(value) for value in back] == [float, int]


def test_numpy_reads_the_arrays_too(tmp_path: Path) -> None:
    checkpoint_file.write(tmp_path / "file", state())
    with np.load(tmp_path / "file") as archive:
        assert archive["models/0/0"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_what_cannot_be_given_back_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"state\['operator'\]\['when'\].*`builtins.object`.*Convert it"):
        checkpoint_file.write(tmp_path / "file", state(operator={"when": object()}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [0.3, 0.5, 0.9])
def test_a_flipped_bit_is_found(tmp_path: Path, place: float) -> None:
    path = tmp_path / "file"
    checkpoint_file.write(path, state(models=[[np.arange(5000.0)]]))
    content = bytearray(path.read_bytes())
    content[int(place * 40000)] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptedError, match="no intact checkpoint"):
        checkpoint_file.read(path)


@pytest.mark.parametrize("content", [b"", b"something else", None])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file"
    checkpoint_file.write(path, state())
    path.write_bytes(path.read_bytes()[:-50] if content is None else content)
    with pytest.raises(CheckpointCorruptedError):
        checkpoint_file.read(path)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        checkpoint_file.read(tmp_path / "file")


@pytest.mark.parametrize("num_levels", [101, 5000])
def test_what_is_nested_too_deeply_is_refused(num_levels: int, tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(num_levels):
        nested = [nested]
    with pytest.raises(ValueError, match="`state` is nested more than 100 levels deep"):
        checkpoint_file.write(tmp_path / "file", state(operator=nested))
    with pytest.raises(ValueError, match="nested"):
        checkpoint_file.check(state(operator=nested))


def test_a_state_without_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks \['models'\]"):
        round_trip(tmp_path, {"epoch": 1, "optimizers": []})


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_file, "FORMAT_VERSION", 2)
    checkpoint_file.write(tmp_path / "file", state())
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"format 2.*Upgrade"):
        checkpoint_file.read(tmp_path / "file")


def test_a_file_of_the_former_library_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(
        pickle.dumps({"epoch": 3, "weights": [np.ones(2)], "optimizer_weights": [np.int64(7), np.ones(2)]})
    )
    back = checkpoint_file.read(path)
    assert (back["epoch"], back["models"][0][0].tolist()) == (3, [1.0, 1.0])
    assert [np.asarray(weight).tolist() for weight in back[checkpoint_file.FORMER_OPTIMIZER]] == [7, [1.0, 1.0]]
    assert "optimizers" not in back


def test_a_file_of_the_former_library_cannot_run_code(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps({"epoch": 3, "weights": [Path("x")], "optimizer_weights": []}))
    with pytest.raises(UnsafeCheckpointError, match="pathlib"):
        checkpoint_file.read(path)
