"""Files that a store gives back with other content, of the same length, are not handed out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raysgd.storage import Folder, StorageError
from tests.helpers.store_damage import alter
from tests.storage.conftest import KINDS

IN_STORES = [kind for kind in KINDS if kind not in ("local", "file-uri")]
ALTERED = "its content was altered"


@pytest.fixture(params=IN_STORES)
def folder(request: pytest.FixtureRequest, place: Callable[[str], Folder]) -> Folder:
    """A folder in a store of each kind, which is asked once."""
    return place(request.param).without_retries()


def committed(folder: Folder, source: Path, num_uploads: int = 2) -> Folder:
    """A folder that several have uploaded to, each one file at the top and one deeper."""
    for rank in range(num_uploads):
        (source / f"{rank}" / "deep").mkdir(parents=True)
        (source / f"{rank}" / f"weights-{rank}").write_bytes(bytes(range(256)) * 4)
        (source / f"{rank}" / "deep" / f"{rank}").write_bytes(b"deep")
        folder.staged("whole").upload(source / f"{rank}")
    return folder.commit("whole")


class TestUploadedFolders:
    @pytest.mark.parametrize("name", ["weights-0", "weights-1", "deep/1"])
    def test_are_not_handed_out_with_an_altered_file(self, folder: Folder, tmp_path: Path, name: str) -> None:
        whole = committed(folder, tmp_path / "source")
        assert whole.names() == ["deep", "weights-0", "weights-1"]
        whole.download(tmp_path / "copy")
        assert sorted(path.name for path in (tmp_path / "copy").rglob("*")) == [
            *("0", "1", "deep", "weights-0", "weights-1")
        ]
        alter(whole, name, at=2)
        with pytest.raises(StorageError, match=rf"could not read `.*/whole/{name}.*`: {ALTERED}"):
            whole.download(tmp_path / "altered")
        with pytest.raises(StorageError, match=ALTERED):
            folder.download(tmp_path / "above")
        assert [*(tmp_path / "altered").rglob(name), *(tmp_path / "above").rglob(name)] == []

    def test_are_not_handed_out_with_an_altered_list(self, folder: Folder, tmp_path: Path) -> None:
        whole = committed(folder, tmp_path / "source", num_uploads=1)
        [name] = lists_in(whole)
        alter(whole, name, at=0)
        with pytest.raises(StorageError, match=rf"could not read `.*/whole/{name}.*`: it is not a list of checksums"):
            whole.download(tmp_path / "copy")

    def test_without_a_list_are_taken_as_they_are(self, folder: Folder, tmp_path: Path) -> None:
        whole = committed(folder, tmp_path / "source")
        alter(whole, "weights-0", at=2)
        for name in lists_in(whole):
            whole.remove(name)
        whole.download(tmp_path / "copy")
        assert (tmp_path / "copy" / "weights-0").stat().st_size == 1024

    def test_may_be_uploaded_again(self, folder: Folder, tmp_path: Path) -> None:
        (tmp_path / "source").mkdir()
        for content in (b"first", b"other"):
            (tmp_path / "source" / "a").write_bytes(content)
            folder.staged("whole").upload(tmp_path / "source")
        folder.commit("whole").download(tmp_path / "copy")
        assert (tmp_path / "copy" / "a").read_bytes() == b"other"

    def test_are_not_handed_out_with_an_altered_file_that_was_written(self, folder: Folder, tmp_path: Path) -> None:
        folder.staged("whole").write("weights", b"old")
        folder.staged("whole").write("weights", b"new")
        whole = folder.commit("whole")
        whole.download(tmp_path / "copy")
        assert (tmp_path / "copy" / "weights").read_bytes() == b"new"
        alter(whole, "weights", at=2)
        with pytest.raises(StorageError, match=ALTERED):
            whole.download(tmp_path / "altered")

    def test_may_have_notes_that_change(self, folder: Folder, tmp_path: Path) -> None:
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / ".note").write_bytes(b"1")
        folder.staged("whole").upload(tmp_path / "source")
        assert lists_in(folder) == []
        folder.commit("whole").write(".note", b"2")
        (folder / "whole").download(tmp_path / "copy")
        assert (tmp_path / "copy" / ".note").read_bytes() == b"2"

    def test_that_grow_have_no_list(self, folder: Folder, tmp_path: Path) -> None:
        (tmp_path / "log").write_bytes(b"1")
        folder.upload(tmp_path)
        assert lists_in(folder) == []


def lists_in(folder: Folder) -> list[str]:
    from pyarrow import fs

    infos = folder.filesystem.get_file_info(fs.FileSelector(folder.path, recursive=True))
    return [info.base_name for info in infos if info.base_name.startswith(".raysgd-sums-")]
