"""Files that a store gives back with other content, of the same length, are not handed out."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from raysgd.storage import Folder, StorageError, open_folder
from raysgd.storage._checksums import ArrivingContent, SentContent
from raysgd.storage.files import local_copy, saving
from tests.helpers.s3_server import S3Server
from tests.helpers.store_damage import alter
from tests.storage.conftest import KINDS

IN_STORES = [kind for kind in KINDS if kind not in ("local", "file-uri")]
ALTERED = "its content was altered"


@pytest.fixture(params=IN_STORES)
def folder(request: pytest.FixtureRequest, place: Callable[[str], Folder]) -> Folder:
    """A folder in a store of each kind, which is asked once."""
    return place(request.param).without_retries()


def sealed(content: bytes) -> bytes:
    return b"".join(SentContent(lambda: iter([content]), sealed=True)())


def check(content: bytes, piece_bytes: int, listed: tuple[str, ...] = ()) -> None:
    arriving = ArrivingContent()
    for start in range(0, len(content), piece_bytes):
        arriving.update(content[start : start + piece_bytes])
    arriving.check(listed)


class TestSeals:
    @pytest.mark.parametrize("piece_bytes", [1, 100, 193, 194, 10_000])
    def test_find_each_byte_that_was_altered(self, piece_bytes: int) -> None:
        whole = sealed(b'{"a": 1}' * 50)
        check(whole, piece_bytes)
        mark = range(400, 465)  # without it there is no seal
        for place in sorted({*range(0, len(whole), 7), 399, 465, len(whole) - 1} - {*mark}):
            other = bytearray(whole)
            other[place] ^= 1
            with pytest.raises(OSError, match=ALTERED):
                check(bytes(other), piece_bytes)

    def test_are_skipped_by_readers(self) -> None:
        assert json.loads(sealed(b'{"a": 1}')) == {"a": 1}
        assert pickle.loads(sealed(pickle.dumps({"a": 1}))) == {"a": 1}

    def test_are_the_xxh128_of_what_comes_before_in_blanks_and_tabs(self) -> None:
        bits = sealed(b"content")[-128:].replace(b" ", b"0").replace(b"\t", b"1")
        assert f"{int(bits, 2):032x}" == xxhash.xxh128_hexdigest(b"content")

    @pytest.mark.parametrize("content", [b"", b"short", b"text" + b" " * 400, b"text\n" + b"\t" * 192])
    def test_are_not_taken_for_what_other_files_end_with(self, content: bytes) -> None:
        check(content, 100)

    def test_count_more_than_lists(self) -> None:
        check(sealed(b"new"), 100, (xxhash.xxh128_hexdigest(b"old"),))

    def test_of_a_second_attempt_begin_at_the_start(self) -> None:
        attempts: Iterator[bytes] = iter([b"half", b"whole"])
        content = SentContent(lambda: iter([next(attempts)]), sealed=True)
        assert b"half" in next(content())
        check(b"".join(content()), 100)
        assert content.checksum == xxhash.xxh128_hexdigest(b"whole")


class TestSealedFiles:
    def test_are_not_handed_out_when_they_were_altered(self, folder: Folder, tmp_path: Path) -> None:
        folder.write("a.json", b'{"rate": 1}', sealed=True)
        with folder.writing("b.pkl", sealed=True) as file:
            pickle.dump({"rate": 1}, file)
        assert json.loads(folder.read("a.json")) == pickle.loads(folder.read("b.pkl")) == {"rate": 1}
        for name in ("a.json", "b.pkl"):
            alter(folder, name, at=5)
            with pytest.raises(StorageError, match=rf"could not read `.*/{name}.*`: {ALTERED}"):
                folder.read(name)
            with pytest.raises(StorageError, match=ALTERED):
                folder.fetch(name, tmp_path / name)
            with pytest.raises(StorageError, match=ALTERED), folder.reading(name):
                pass
        with pytest.raises(StorageError, match=ALTERED):
            folder.download(tmp_path)
        assert list(tmp_path.glob("*.*")) == []

    def test_at_the_address_of_a_file(self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
        address = s3_server.uri("checksums/a.json")
        with saving(address, sealed=True) as file:
            file.write(b'{"rate": 1}')
        with local_copy(address) as path:
            assert json.loads(Path(path).read_bytes()) == {"rate": 1}
        alter(open_folder(s3_server.uri("checksums")), "a.json", at=9)
        with pytest.raises(StorageError, match=rf"/checksums/a.json.*{ALTERED}"), local_copy(address):
            pass

    def test_have_nothing_more_on_a_disk(self, tmp_path: Path) -> None:
        open_folder(tmp_path).write("a", b"1", sealed=True)
        with open_folder(tmp_path).writing("b", sealed=True) as file:
            file.write(b"2")
        with saving(tmp_path / "c", sealed=True) as file:
            file.write(b"3")
        assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [b"1", b"2", b"3"]


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
        for place, reason in ((0, ALTERED), (-150, "it is not a list of checksums")):  # in the mark: no seal
            alter(whole, name, at=place)
            with pytest.raises(StorageError, match=rf"could not read `.*/whole/{name}.*`: {reason}"):
                whole.download(tmp_path / "copy")
            alter(whole, name, at=place)
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

    def test_may_get_a_sealed_file_in_place_of_one(self, folder: Folder, tmp_path: Path) -> None:
        whole = committed(folder, tmp_path / "source")
        whole.write("deep/0", b'{"note": 1}', sealed=True)
        whole.write("more", b"2")
        whole.download(tmp_path / "copy")
        assert json.loads((tmp_path / "copy" / "deep" / "0").read_bytes()) == {"note": 1}
        alter(whole, "deep/0", at=2)
        with pytest.raises(StorageError, match=ALTERED):
            whole.download(tmp_path / "altered")

    def test_that_grow_have_no_list(self, folder: Folder, tmp_path: Path) -> None:
        (tmp_path / "log").write_bytes(b"1")
        folder.upload(tmp_path)
        assert lists_in(folder) == []


def lists_in(folder: Folder) -> list[str]:
    from pyarrow import fs

    infos = folder.filesystem.get_file_info(fs.FileSelector(folder.path, recursive=True))
    return [info.base_name for info in infos if info.base_name.startswith(".raysgd-sums-")]
