"""Files that are written whole. What is left over, and what a full disk does, `tests/torch/checkpoints` shows."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.core import files

PIECE = files._PIECE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux begins to write a part of a file to the disk")
def test_the_system_begins_to_write_a_large_file_to_the_disk_before_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_flush = files._find_begin_flush()
    assert begin_flush is not None
    begun: list[tuple[int, int, int]] = []

    def note(descriptor: int, start: int, num_bytes: int, flags: int) -> int:
        begun.append((start, num_bytes, begin_flush(descriptor, start, num_bytes, flags)))
        return begun[-1][2]

    monkeypatch.setattr(files, "_find_begin_flush", lambda: note)
    content = os.urandom(3 * PIECE + 5)
    with files.replacing(str(tmp_path / "large")) as file:
        file.write(content[:3])
        file.write(content[3:])
        assert begun, "the file is not complete yet"
        file.seek(0)
        file.write(content[:3])  # behind all that has begun, nothing begins again
    assert [start for start, _, _ in begun] == [0, *(sum(each[1] for each in begun[:n]) for n in range(1, len(begun)))]
    assert sum(num_bytes for _, num_bytes, _ in begun) > 2 * PIECE
    assert {result for _, _, result in begun} == {0}, "the system accepts it"
    assert (tmp_path / "large").read_bytes() == content


def test_where_the_system_cannot_begin_early_the_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    found: Any = files._find_begin_flush.__wrapped__()
    assert found is None
    monkeypatch.setattr(files, "_find_begin_flush", lambda: None)
    content = os.urandom(2 * PIECE + 5)
    with files.replacing(str(tmp_path / "large")) as file:
        file.write(content)
    assert (tmp_path / "large").read_bytes() == content


def test_a_folder_is_not_replaced_and_the_error_says_so_for_any_file(tmp_path: Path) -> None:
    with (
        pytest.raises(IsADirectoryError, match="the path is a folder: add a file name"),
        files.replacing(str(tmp_path)),
    ):
        pass
