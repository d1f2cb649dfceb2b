"""Files written in the background: which failures stop what comes later."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from raysgd.exceptions import WorkersLostError
from raysgd.storage.background_writer import BackgroundWriter


class Disk:
    """What was written, by the names of the files."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}

    def write(self, path: str, state: dict[str, Any]) -> None:
        name = os.path.basename(path)
        if name == "full":
            raise OSError("no space")
        self.files[name] = state


def lost() -> dict[str, Any]:
    raise WorkersLostError("lost with its worker")


@pytest.mark.parametrize("in_background", [True, False])
def test_a_state_that_was_lost_is_made_up_for_by_a_later_file(in_background: bool) -> None:
    disk = Disk()
    writer = BackgroundWriter(disk.write)
    writer.submit("first", lost)
    if in_background:
        writer.submit("second", lambda: {"epoch": 2})
    else:
        writer.write("second", {"epoch": 2})
    writer.close()
    assert disk.files == {"second": {"epoch": 2}}


def test_a_state_that_was_lost_and_not_made_up_for_is_told_by_the_end() -> None:
    disk = Disk()
    writer = BackgroundWriter(disk.write)
    writer.write("first", {"epoch": 1})
    writer.submit("second", lost)
    with pytest.raises(WorkersLostError, match="lost with its worker"):
        writer.close()
    writer.close()


def test_other_failures_stop_the_next_write_as_ever() -> None:
    writer = BackgroundWriter(Disk().write)
    writer.submit("first", lost)
    writer.submit("full", dict)
    with pytest.raises(OSError, match="no space"):
        writer.write("third", {})
    with pytest.raises(WorkersLostError):
        writer.wait()


def test_a_file_lands_where_its_path_led_when_it_was_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, has_moved = tmp_path / "before", tmp_path / "after", Event()
    before.mkdir()
    after.mkdir()
    monkeypatch.chdir(before)
    writer = BackgroundWriter(lambda path, state: Path(path).write_text(state))
    writer.submit("last.pt", lambda: str(has_moved.wait(10)))
    monkeypatch.chdir(after)
    has_moved.set()
    writer.close()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pt")] == ["before/last.pt"]
