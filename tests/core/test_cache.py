"""The cache folder, from which code is run: who may have written there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raysgd.core.files import cache_folder, check_private, make_private

NOBODY = 65534


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/home/me/.cache/raysgd"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/raysgd"),
        ({"XDG_CACHE_HOME": "", "RAYSGD_CACHE": ""}, "/home/me/.cache/raysgd"),
        ({"XDG_CACHE_HOME": "/cache", "RAYSGD_CACHE": "/own"}, "/own"),
    ],
)
def test_the_cache_is_where_users_keep_such_things(environment: dict[str, str], folder: str) -> None:
    assert cache_folder(environment, "/home/me") == folder


def test_folders_are_made_for_the_user_alone_from_the_top(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")} == {0o700}
    make_private(tmp_path / "a" / "b" / "c")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
@pytest.mark.parametrize("name", ["a", "a/b", "a/b/file"])
def test_what_others_can_write_to_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    path = tmp_path / "a" / "b" / "file"
    make_private(path.parent)
    path.touch(0o600)
    check_private(path)
    (tmp_path / name).chmod(mode)
    with pytest.raises(PermissionError, match=rf"`{tmp_path / name}` is writable for other users \(mode {mode:o}\)"):
        check_private(path)
    with pytest.raises(PermissionError, match=f"run `chmod go-w {tmp_path / name}` if it is yours"):
        check_private(path)


def test_a_folder_like_tmp_may_be_above(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    make_private(tmp_path / "shared" / "cache")
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    make_private(tmp_path / "link" / "cache")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to other users")
@pytest.mark.parametrize("owned", ["cache", "cache/detached", "cache/detached/file", "link", "middle", "middle/hop"])
def test_what_another_user_owns_is_refused(tmp_path: Path, owned: str) -> None:
    path = tmp_path / "cache" / "detached" / "file"
    make_private(path.parent)
    path.touch(0o600)
    (tmp_path / "middle").mkdir()
    (tmp_path / "middle" / "hop").symlink_to("../cache")
    (tmp_path / "link").symlink_to(tmp_path / "middle" / "hop")
    check_private(tmp_path / "link" / "detached" / "file")
    os.chown(tmp_path / owned, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"{Path(owned).name}` belongs to another user"):
        check_private(tmp_path / "link" / "detached" / "file")


def test_a_folder_between_two_links_is_checked_too(tmp_path: Path) -> None:
    make_private(tmp_path / "cache")
    make_private(tmp_path / "middle")
    (tmp_path / "middle" / "hop").symlink_to(tmp_path / "cache")
    (tmp_path / "link").symlink_to("middle/hop")
    check_private(tmp_path / "link")
    (tmp_path / "middle").chmod(0o777)
    with pytest.raises(PermissionError, match=f"`{tmp_path / 'middle'}` is writable"):
        check_private(tmp_path / "link")


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        check_private(tmp_path / "a")
