"""The journal of a host: what is valid, what was written half, what is thrown away."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysgd.host import journal
from raysgd.host.journal import Journal, journal_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hosts" / "run"


def test_the_newest_of_each_name_is_read_by_the_next_process(path: Path) -> None:
    written = Journal(path)
    written.put({"a": b"1", "b": b"2"})
    written.put({"a": b"3", "c": b"4", "b": None})
    assert Journal(path).read() == {"a": b"3", "c": b"4"}
    assert Journal(path).read() == {"a": b"3", "c": b"4"}


def test_what_was_not_written_to_its_end_does_not_count_and_is_followed_by_what_does(path: Path) -> None:
    Journal(path).put({"a": b"1"})
    whole = path.stat().st_size
    Journal(path).put({"a": b"2", "b": b"2"})
    for length in range(whole, path.stat().st_size):
        half = path.with_name(f"half-{length}")
        half.write_bytes(path.read_bytes()[:length])
        following = Journal(half)
        assert following.read() == {"a": b"1"}
        following.put({"c": b"3"})
        assert Journal(half).read() == {"a": b"1", "c": b"3"}


def test_the_file_does_not_grow_without_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MOST_WASTE", 10_000)
    written = Journal(path)
    for number in range(1000):
        written.put({"a": b"%d" % number, f"call:{number}": b"x" * 100, f"call:{number - 1}": None})
    assert path.stat().st_size < 11_000
    assert Journal(path).read() == {"a": b"999", "call:999": b"x" * 100}


def test_only_the_user_can_read_it_and_nothing_is_left_of_it(path: Path) -> None:
    written = Journal(path)
    written.put({"a": b"1"})
    assert path.stat().st_mode & 0o77 == 0
    assert path.parent.stat().st_mode & 0o77 == 0
    assert written.read() == {"a": b"1"}
    assert path.stat().st_mode & 0o77 == 0
    written.end()
    written.put({"a": b"2"})
    assert list(path.parent.iterdir()) == []
    assert written.read() == {}


def test_journals_are_among_the_caches_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSGD_CACHE", "/somewhere")
    assert journal_path("run-7", "0123") == Path("/somewhere/hosts/run-7-0123")
    monkeypatch.delenv("RAYSGD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert journal_path("run-7", "0123") == Path("/caches/raysgd/hosts/run-7-0123")
