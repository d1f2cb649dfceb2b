"""The checkpoint file: what comes back, and what is refused."""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
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
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = [np.zeros((0, 3)), np.array(1.5), np.arange(4, dtype=np.uint8)[::2], np.array([True]), np.array(["a"])]
    arrays.append(np.array([1.5, -2.0], ml_dtypes.bfloat16))  # which NumPy does not know
    back = round_trip(tmp_path, state(models=[arrays]))["models"][0]
    for before, after in zip(arrays, back, strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert np.array_equal(before, after)


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
    with pytest.raises(CheckpointCorruptedError, match="not an intact checkpoint"):
        checkpoint_file.read(path)


@pytest.mark.parametrize("content", [b"", b"something else", None])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file"
    checkpoint_file.write(path, state())
    path.write_bytes(path.read_bytes()[:-50] if content is None else content)
    with pytest.raises(CheckpointCorruptedError):
        checkpoint_file.read(path)


def test_an_archive_whose_members_begin_ahead_of_it_is_refused(tmp_path: Path) -> None:
    checkpoint_file.write(tmp_path / "file", state())
    content = bytearray((tmp_path / "file").read_bytes())
    place = len(content) - 6  # of where the list of members begins
    struct.pack_into("<I", content, place, struct.unpack_from("<I", content, place)[0] + 1)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointCorruptedError, match="begin ahead of it"):
        checkpoint_file.read(tmp_path / "file")


def test_an_array_whose_dtype_is_not_the_recorded_one_is_refused(tmp_path: Path) -> None:
    checkpoint_file.write(tmp_path / "written", state(models=[[np.arange(3, dtype=np.int32)]]))
    with zipfile.ZipFile(tmp_path / "written") as old, zipfile.ZipFile(tmp_path / "file", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b'"int32"', b'"float32"'))
    with pytest.raises(CheckpointCorruptedError, match="a different type than the file says"):
        checkpoint_file.read(tmp_path / "file")


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


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_file_of_the_former_library_is_read(protocol: int, tmp_path: Path) -> None:
    weights = [np.arange(6, dtype=">f4").reshape(2, 3).T, np.array(True), np.zeros((0, 2), np.float16)]
    old = {"epoch": 3, "weights": weights, "optimizer_weights": (np.int64(7), np.ones(2))}
    (tmp_path / "file").write_bytes(pickle.dumps(old, protocol))
    back = checkpoint_file.read(tmp_path / "file")
    assert back["epoch"] == 3
    for before, after in zip(weights, back["models"][0], strict=True):
        assert after.dtype == before.dtype.newbyteorder("=")
        np.testing.assert_array_equal(after, before)
    assert [np.asarray(weight).tolist() for weight in back[checkpoint_file.FORMER_OPTIMIZER]] == [7, [1.0, 1.0]]
    assert "optimizers" not in back


def former(weight: bytes) -> bytes:
    """A file of the former library with what these opcodes make as its only weight."""
    return b"\x80\x04}(\x8c\x05epochK\x01\x8c\x07weights]" + weight + b"a\x8c\x11optimizer_weights]u."


FLOATS = b"cnumpy\ndtype\n\x8c\x02f8\x89\x88\x87R(K\x03\x8c\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
NEW_ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"


def test_such_a_file_is_read_if_it_is_as_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(former(NEW_ARRAY + b"(K\x01K\x01\x85" + FLOATS + b"\x89C\x08" + bytes(8) + b"tb"))
    assert checkpoint_file.read(tmp_path / "file")["models"][0][0].tolist() == [0.0]


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (pickle.dumps(Path("x"), 4)[2:-1], UnsafeCheckpointError, "pathlib"),
        (pickle.dumps(np.array([None]), 4)[2:-1], UnsafeCheckpointError, "'O8'"),
        (pickle.dumps(np.array(["a"]), 4)[2:-1], UnsafeCheckpointError, "'U1'"),
        (pickle.dumps(np.zeros(1, "i4,f8"), 4)[2:-1], UnsafeCheckpointError, "'V12'"),
        (b"cbuiltins\neval\n\x8c\x011\x85R", UnsafeCheckpointError, "builtins.eval"),
        (NEW_ARRAY + b"(K\x01J\xff\xff\xff\x7f\x85" + FLOATS + b"\x89C\x08" + bytes(8) + b"tb", None, "reshape"),
        (NEW_ARRAY + b"(K\x01K\x01\x85K\x05\x89C\x08" + bytes(8) + b"tb", None, "without its bytes"),
        (NEW_ARRAY, None, "unpack"),
        (FLOATS, None, "not a list of arrays"),
        (b"\x8e\xff\xff\xff\xff\xff\x00\x00\x00x", None, "remain"),
        (b"Kr" + b"r\xff\xff\xff\x7f", None, "more values than it has"),
        (b"K\x01", None, "not a list of arrays"),
    ],
)
def test_any_other_is_refused(weight: bytes, error: type[Exception] | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(former(weight))
    with pytest.raises(error or CheckpointCorruptedError, match=message):
        checkpoint_file.read(tmp_path / "file")
