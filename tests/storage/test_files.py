from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd.exceptions import StorageError
from raysgd.storage import Folder, files
from raysgd.storage._uris import checked_text, child_of, divided, local_path_of


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
        ("s3://bucket", ValueError, "`checkpoint='s3://bucket'`: need the URI of a file, such as 's3://bucket/fol"),
        ("s3://k:secret@bucket/a/", ValueError, r"`checkpoint='s3://***@bucket/a/'`: need the URI of a file"),
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


# ------------------------------------------------------------------------------------------------ locations


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("s3://bucket/x", "s3://bucket/x"),
        (Path("s3://bucket/x"), "s3://bucket/x"),
        (Path("file:///mnt/x"), "file:///mnt/x"),
        (Path("/mnt/x"), "/mnt/x"),
        ("C:/x", "C:/x"),
    ],
)
def test_a_location_is_text(location: Any, text: str) -> None:
    assert checked_text("path", location) == text


@pytest.mark.parametrize(
    ("location", "kind"), [(3, TypeError), (b"x", TypeError), ("", ValueError), ("a\0", ValueError)]
)
def test_what_is_no_location_is_refused(location: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"`place=.*need a path or a URI"):
        checked_text("place", location)


def test_a_file_uri_is_a_path() -> None:
    assert local_path_of("path", "file:///mnt/a%20b") == Path("/mnt/a b")
    assert local_path_of("path", "file://localhost/mnt") == Path("/mnt")
    assert local_path_of("path", Path("/mnt/a b%?#ü").as_uri()) == Path("/mnt/a b%?#ü")
    assert local_path_of("path", "~/x") == Path.home() / "x"
    assert local_path_of("path", "a/../x") == Path.cwd() / "x"
    with pytest.raises(ValueError, match=r"`path='file://mnt/x'`: `mnt` is the name of a machine"):
        local_path_of("path", "file://mnt/x")


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3://bucket", ("s3://bucket", "", "")),
        ("s3://bucket/", ("s3://bucket", "", "")),
        ("s3://bucket/a b/c=1/", ("s3://bucket", "a b/c=1", "")),
        (
            "s3://b/a?region=x&endpoint_override=http://1.2.3.4:5",
            ("s3://b", "a", "?region=x&endpoint_override=http://1.2.3.4:5"),
        ),
        ("abfs://container@account.dfs.core.windows.net/a", ("abfs://container@account.dfs.core.windows.net", "a", "")),
        ("memory://a/b", ("memory://a", "b", "")),
    ],
)
def test_a_uri_has_parts(uri: str, parts: tuple[str, str, str]) -> None:
    assert divided(uri) == parts


def test_what_is_inside_has_the_options_of_what_it_is_in() -> None:
    assert child_of("s3://b?region=x", "a/b") == "s3://b/a/b?region=x"
    assert child_of("s3://b/a/", "") == "s3://b/a"
