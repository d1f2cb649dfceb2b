"""The checksum of checkpoint files."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from raysgd.torch._body_digest import BodyDigest

SECTOR, PAGE, BLOCK = 512, 4096, 503 * 521 * 8


def digest(content: bytes, *, piece: int | None = None) -> str:
    checksum = BodyDigest()
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


@pytest.mark.parametrize("num_cpus", [1, 3])
def test_several_threads_find_the_same(monkeypatch: pytest.MonkeyPatch, num_cpus: int) -> None:
    content = np.random.default_rng(0).bytes(11 * BLOCK + 12_345)
    monkeypatch.setattr("os.cpu_count", lambda: num_cpus)
    assert digest(content) == digest(content, piece=65_536)


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


@pytest.mark.parametrize("word", [1.0, -0.0, float("nan")])
def test_a_zeroed_page_of_equal_numbers_is_found(word: float) -> None:
    content = np.full(BLOCK // 8 * 2, word).tobytes()
    for start in (0, PAGE, BLOCK - PAGE, BLOCK - 100):
        damaged = content[:start] + bytes(PAGE) + content[start + PAGE :]
        assert digest(damaged) != digest(content)


@pytest.mark.parametrize("values", [(1.0, 2.0), (1.0, -1.0), (0.0, -0.0)])
@pytest.mark.parametrize("size", [PAGE, 16 * PAGE])
def test_exchanged_stretches_of_equal_numbers_are_found(values: tuple[float, float], size: int) -> None:
    content = np.concatenate([np.full(PAGE * 64 // 8, value) for value in values]).tobytes()
    for distance in range(size, len(content) - size, 7 * size):
        assert digest(exchanged(content, 0, distance, size)) != digest(content) or (
            content[:size] == content[distance : distance + size]
        )


def test_exchanged_pages_of_an_identity_matrix_are_found() -> None:
    content = np.eye(512).tobytes()  # Every page has the same sum.
    expected = digest(content)
    assert all(digest(exchanged(content, 0, start, PAGE)) != expected for start in range(PAGE, len(content), PAGE))


def test_exchanged_sectors_and_blocks_are_found(content: bytes) -> None:
    expected = digest(content)
    for start, size in [(SECTOR, SECTOR), (100 * SECTOR, SECTOR), (PAGE, PAGE), (BLOCK, BLOCK)]:
        assert digest(exchanged(content, 0, start, size)) != expected


def exchanged(content: bytes, first: int, second: int, size: int) -> bytes:
    return (
        content[:first]
        + content[second : second + size]
        + content[first + size : second]
        + content[first : first + size]
        + content[second + size :]
    )
