"""The checksum at the end of a checkpoint file, as other tools see it."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
import xxhash

from raysgd.exceptions import CheckpointCorruptedError
from raysgd.torch.checkpoints.checkpoint_file import read, write
from raysgd.torch.checkpoints.seal import Seal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "last.pt", {"epoch": 1, "operator": None, "models": [torch.ones(300)], "optimizers": []})
    return tmp_path / "last.pt"


def test_the_checksum_is_the_xxh128_of_the_archive_without_the_comment(path: Path) -> None:
    content = path.read_bytes()
    assert content[-48:-32] == b"raysgd:1:xxh128:"
    assert xxhash.xxh128_hexdigest(content[:-50] + b"\0\0") == content[-32:].decode()


def test_xxh128_is_what_everybody_else_calls_so() -> None:
    assert xxhash.xxh128_hexdigest(b"") == "99aa06d3014798d86001c324468d497f"


def test_zip_tools_skip_it(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.comment.startswith(b"raysgd:1:xxh128:")
        assert archive.testzip() is None


def test_each_changed_byte_is_found(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    for position in [*range(0, len(content), 37), *range(len(content) - 90, len(content))]:
        damaged = bytearray(content)
        damaged[position] ^= 1
        (tmp_path / "damaged.pt").write_bytes(damaged)
        with pytest.raises(CheckpointCorruptedError):
            read(tmp_path / "damaged.pt")


@pytest.mark.parametrize("num_bytes", [0, 1, 31, 1000])
def test_what_it_says_is_what_is_found(num_bytes: int) -> None:
    file = io.BytesIO(bytes(num_bytes) + b"PK\x05\x06" + bytes(18))
    seal = Seal("0" * 32)
    seal.append_to(file)
    assert Seal.at_end_of(file.getvalue()) == seal
    assert seal.num_sealed_bytes(len(file.getvalue())) == num_bytes + 20


@pytest.mark.parametrize("tail", [b"", b"raysgd:1:xxh128:00", b"\x14\0raysgd:1:sha1:00000000"])
def test_anything_else_is_none(tail: bytes) -> None:
    assert Seal.at_end_of(tail) is None
