"""The checksum in checkpoint files of earlier versions."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from raysgd.torch._former_checksum import FormerChecksum

BLOCK = 503 * 521 * 8


def digest(content: bytes, *, piece: int | None = None) -> str:
    checksum = FormerChecksum()
    for start in range(0, len(content), piece or len(content) or 1):
        checksum.update(content[start : start + (piece or len(content))])
    return checksum.hexdigest()


@pytest.fixture(scope="module")
def content() -> bytes:
    """A little more than two blocks, ending in the middle of a word."""
    return np.random.default_rng(0).bytes(2 * BLOCK + 12_345)


@pytest.mark.parametrize("piece", [1000, 4168, 4169, 65_536, BLOCK, BLOCK + 1])
def test_it_does_not_depend_on_how_the_bytes_are_cut(content: bytes, piece: int) -> None:
    assert digest(content, piece=piece) == digest(content)


def described(content: bytes) -> str:
    """The checksum, computed as its description says, a word at a time."""
    words = struct.unpack(f"<{-(-len(content) // 8)}Q", content + bytes(-len(content) % 8))
    checksum = hashlib.sha256()
    for start in range(0, len(content), BLOCK):
        columns = [0] * 521
        for i, word in enumerate(words[start // 8 : (start + BLOCK) // 8]):
            columns[i % 521] = (columns[i % 521] + word) % 2**64
        checksum.update(struct.pack("<521Q", *columns))
    checksum.update(struct.pack("<Q", len(content)))
    return checksum.hexdigest()


@pytest.mark.parametrize("length", [0, 1, 4168, 4200, BLOCK - 8, BLOCK, BLOCK + 5])
def test_it_is_what_its_description_says(content: bytes, length: int) -> None:
    assert digest(content[:length]) == described(content[:length])


def test_it_stays_the_same_from_version_to_version() -> None:
    content = bytes(range(256)) * 20_000
    assert digest(content) == "844735c2a1aa20d537f4b1d6fc44d2427efa1fb633deb0dfd8160f7c928039fd"
    assert digest(b"") == "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc"


def test_lengths_make_a_difference_even_for_zeros() -> None:
    lengths = [0, 1, 7, 8, 4167, 4168, 4169, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK]
    assert len({digest(bytes(length)) for length in lengths}) == len(lengths)


@pytest.mark.parametrize("position", [0, 1, 4167, 4168, BLOCK - 1, BLOCK, 2 * BLOCK + 12_344])
def test_each_flipped_bit_is_found(content: bytes, position: int) -> None:
    expected = digest(content)
    for bit in range(8):
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        assert digest(bytes(damaged)) != expected
