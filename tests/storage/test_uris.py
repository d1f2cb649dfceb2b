from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysgd.storage._uris import checked_text, child_of, divided, local_path_of


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
