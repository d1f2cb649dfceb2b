from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd.exceptions import StorageError
from raysgd.storage import Folder, files
from raysgd.storage._uris import child_of


@pytest.fixture(params=["local", "file-uri", "s3", "memory"])
def location(request: pytest.FixtureRequest, place: Callable[[str], Folder]) -> str:
    """Where a file may go."""
    folder = place(request.param)
    folder.make()
    if request.param == "local":
        return str(folder.local_path / "a.pt")
    return child_of(folder.uri, "a.pt")


def test_a_file_is_saved_and_found_again(location: str) -> None:
    with files.saving(location) as file:
        file.write(b"0000 the rest")
        file.seek(0)
        assert file.read(4) == b"0000"
        file.seek(0)
        file.write(b"head")
    with files.local_copy(location) as path:
        assert Path(path).read_bytes() == b"head the rest"
        assert Path(path).name == "a.pt"
    assert Path(path).exists() == location.startswith(("/", "file:")), "a copy goes with its block"


def test_a_file_whose_saving_fails_stays_as_it_was(location: str) -> None:
    with files.saving(location) as file:
        file.write(b"old")
    with pytest.raises(ZeroDivisionError), files.saving(location) as file:
        file.write(b"new" * (1 // file.tell()))
    with files.local_copy(location) as path:
        assert Path(path).read_bytes() == b"old"


def test_a_missing_file_is_not_found(location: str) -> None:
    with pytest.raises(FileNotFoundError), files.local_copy(location) as path:
        Path(path).read_bytes()


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_may_never_end_is_not_read(kind: str, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "pipe"
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(OSError, match=f"`{path}` is not a regular file"), files.local_copy(path):
        pass


@pytest.mark.parametrize(
    "location",
    ["last.pt", Path("/mnt/last.pt"), "file:///mnt/last.pt", "s3://bucket/a/last.pt", Path("s3://bucket/last.pt")],
)
def test_what_names_a_file_is_accepted(location: Any) -> None:
    files.check_location("checkpoint", location)


@pytest.mark.parametrize(
    ("location", "kind", "message"),
    [
        (None, TypeError, "`checkpoint=None`: need a path or a URI"),
        ("", ValueError, "`checkpoint=''`: need a path or a URI"),
        (
            "s3://bucket",
            ValueError,
            "`checkpoint='s3://bucket'`: need the URI of a file, such as 's3://bucket/folder/last.pt'.",
        ),
        ("s3://k:secret@bucket/a/", ValueError, r"`checkpoint='s3://***@bucket/a/'`: need the URI of a file"),
        ("nowhere://bucket/a", ValueError, "`checkpoint='nowhere://bucket/a'`: `nowhere` is unknown"),
        ("file://host/a", ValueError, "`checkpoint='file://host/a'`: `host` is the name of a machine"),
        ("oss://bucket/a", ModuleNotFoundError, "`checkpoint='oss://bucket/a'`"),
    ],
)
def test_what_names_no_file_is_refused(location: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        files.check_location("checkpoint", location)


def test_errors_of_a_store_say_that_the_state_is_kept() -> None:
    with (
        pytest.raises(StorageError, match=r"no network\. The trainer still has its state") as caught,
        files.state_is_kept(),
    ):
        raise StorageError("no network.")
    assert isinstance(caught.value.__cause__, StorageError)
    with pytest.raises(PermissionError, match=r"^x$"), files.state_is_kept():
        raise PermissionError("x")


def test_a_location_is_shown_without_its_keys() -> None:
    for location in ("s3://id:secret@bucket/a", Path("s3://id:secret@bucket/a")):
        assert files.shown(location) == "s3://***@bucket/a"
    assert files.shown(Path("/mnt/a")) == "/mnt/a"
