"""What every folder does, on a disk and in stores.

Covers `raysgd.storage.folder` and `raysgd.storage._store`, which are told apart only by what
is below.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from raysgd.storage import Folder, StorageError, open_folder
from raysgd.storage._store import make_new

CONTENT = bytes(range(256)) * 8


def tree_at(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def interrupted() -> int:
    raise ZeroDivisionError


def a_tree(path: Path) -> Path:
    (path / "deep" / "deeper").mkdir(parents=True)
    (path / "empty").mkdir()
    (path / "top.bin").write_bytes(CONTENT)
    (path / "none").write_bytes(b"")
    (path / "deep" / "deeper" / "a b=1,ü.gz").write_bytes(b"not compressed")
    return path


class TestFiles:
    def test_are_given_back_as_they_were_written(self, folder: Folder) -> None:
        for name in ("a", "in/a/folder", "with space,lr=0.1", "x.gz"):
            folder.write(name, CONTENT)
            assert folder.read(name) == CONTENT
            assert folder.has(name)

    def test_that_are_missing_are_not_found(self, folder: Folder) -> None:
        assert not folder.has("a")
        with pytest.raises(FileNotFoundError):
            folder.read("a")
        folder.write("b", b"")
        with pytest.raises(FileNotFoundError), folder.reading("a"):
            pass

    def test_keep_what_they_were_when_a_write_ends_in_an_exception(self, folder: Folder) -> None:
        folder.write("a", CONTENT)
        with pytest.raises(ZeroDivisionError), folder.writing("a") as file:
            file.write(b"half" * interrupted())
        assert folder.read("a") == CONTENT
        assert folder.names() == ["a"]

    def test_can_be_sought_in_while_they_are_written_and_read(self, folder: Folder) -> None:
        with folder.writing("a") as file:
            file.write(b"0000 the rest")
            file.seek(0)
            assert file.read(4) == b"0000"
            file.seek(0)
            file.write(b"head")
        with folder.reading("a") as file:
            file.seek(5)
            assert file.read() == b"the rest"
        assert folder.read("a") == b"head the rest"

    def test_are_removed_also_if_they_are_not_there(self, folder: Folder) -> None:
        folder.write("a", CONTENT)
        folder.remove("a")
        folder.remove("a")
        assert not folder.has("a")

    @pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../b", "a//b", ".", "nul\0l"])
    def test_stay_inside(self, folder: Folder, name: str) -> None:
        for call in (folder.read, folder.has, folder.remove, folder.__truediv__, folder.staged, folder.commit):
            with pytest.raises(ValueError, match="need the name of"):
                call(name)
        with pytest.raises(ValueError, match="need the name of"):
            folder.write(name, b"")

    def test_are_whole_for_readers_at_any_moment(self, folder: Folder) -> None:
        contents = [bytes([number]) * 200_000 for number in range(4)]
        folder.write("a", contents[0])
        done = threading.Event()

        def keep_writing() -> None:
            while not done.is_set():
                for content in contents:
                    folder.write("a", content)

        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(keep_writing)
            try:
                seen = [folder.read("a") for _ in range(15)]
            finally:
                done.set()
            writer.result()
        assert all(content in contents for content in seen)


def skip_where_empty_folders_vanish(folder: Folder) -> None:
    if folder.uri.startswith("gs:") and Version(metadata.version("pyarrow")) < Version("26"):
        pytest.skip("this version of pyarrow leaves nothing in such a store for an empty folder")


class TestFolders:
    def test_are_made_and_deleted(self, folder: Folder) -> None:
        skip_where_empty_folders_vanish(folder)
        inner = folder / "a" / "b"
        assert not inner.exists()
        inner.make()
        inner.make()
        assert inner.exists()
        inner.write("file", CONTENT)
        (folder / "a").delete()
        (folder / "a").delete()
        assert not inner.exists()
        assert folder.names() == []

    def test_that_are_new_are_different_for_all_who_make_one_at_the_same_time(self, folder: Folder) -> None:
        skip_where_empty_folders_vanish(folder)
        begins = threading.Barrier(4)

        def make(_: int) -> Folder:
            begins.wait()
            return make_new(folder, "run")

        with ThreadPoolExecutor(4) as threads:
            made = set(threads.map(make, range(4)))
        assert len(made) == 4
        assert all(each.exists() and each.name.startswith("run") for each in made)

    def test_a_new_one_that_cannot_be_made_is_a_storage_error(self, folder: Folder) -> None:
        if not folder.is_local:
            pytest.skip("a store has no longest name")
        with pytest.raises(StorageError, match="make the folder"):
            make_new(folder, "x" * 300)

    def test_name_what_is_in_them(self, folder: Folder) -> None:
        assert folder.names() == []
        folder.write("b", b"")
        folder.write("a/deep", b"")
        folder.staged("c").write("x", b"")
        assert [name for name in folder.names() if name != "c"] == ["a", "b"]

    def test_travel_whole(self, folder: Folder, tmp_path: Path) -> None:
        skip_where_empty_folders_vanish(folder)
        source = a_tree(tmp_path / "source")
        folder.upload(source)
        folder.download(tmp_path / "copy")
        assert tree_at(tmp_path / "copy") == tree_at(source)
        assert (tmp_path / "copy" / "empty").is_dir()
        assert folder.read("deep/deeper/a b=1,ü.gz") == b"not compressed"

    def test_travel_without_some_files(self, folder: Folder, tmp_path: Path) -> None:
        source = a_tree(tmp_path / "source")
        left_out, *others = sorted(tree_at(source))
        folder.upload(source, [left_out, "nothing"])
        folder.download(tmp_path / "copy")
        assert set(tree_at(tmp_path / "copy")) == {*others}

    def test_are_not_copied_from_where_nothing_is(self, folder: Folder, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            folder.upload(tmp_path / "nothing")
        with pytest.raises(FileNotFoundError):
            (folder / "nothing").download(tmp_path / "copy")

    def test_with_more_than_files_and_folders_are_refused(self, folder: Folder, tmp_path: Path) -> None:
        source = a_tree(tmp_path / "source")
        os.mkfifo(source / "pipe")
        with pytest.raises(StorageError, match="neither a file nor a folder"):
            folder.upload(source)
        (source / "pipe").unlink()
        (source / "loop").symlink_to(source)
        with pytest.raises(StorageError, match="leads to a folder that contains the link"):
            folder.upload(source)

    def test_are_the_same_after_a_journey(self, folder: Folder) -> None:
        folder.write("in/a", CONTENT)
        inner = folder / "in"
        assert pickle.loads(pickle.dumps(inner)) == inner
        assert pickle.loads(pickle.dumps(inner)).read("a") == CONTENT
        assert inner.name == "in"
        assert hash(inner) == hash(folder / "in")
        assert inner != folder

    def test_can_be_used_through_pyarrow(self, folder: Folder) -> None:
        folder.write("in/a", CONTENT)
        with folder.filesystem.open_input_file(f"{folder.path}/in/a") as file:
            assert file.read() == CONTENT


class TestCommits:
    def test_an_empty_folder_can_be_committed(self, folder: Folder, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        folder.staged("whole").upload(tmp_path / "empty")
        assert folder.commit("whole").names() == []
        assert folder.committed() == ["whole"]

    def test_make_whole_what_several_have_put_there(self, folder: Folder, tmp_path: Path) -> None:
        def put(rank: int) -> None:
            source = tmp_path / f"rank-{rank}"
            source.mkdir()
            (source / f"part-{rank}").write_bytes(bytes([rank]) * 1000)
            (source / "shared").write_bytes(b"the same from all")
            folder.staged("whole").upload(source)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(put, range(4)))
        assert folder.committed() == []
        whole = folder.commit("whole")
        assert whole == folder / "whole"
        assert folder.committed() == ["whole"]
        assert whole.names() == ["part-0", "part-1", "part-2", "part-3", "shared"]
        assert [whole.read(f"part-{rank}") for rank in range(4)] == [bytes([rank]) * 1000 for rank in range(4)]
        assert "whole" in folder.names()

    def test_may_be_repeated(self, folder: Folder) -> None:
        folder.staged("a").write("x", b"1")
        assert folder.commit("a") == folder.commit("a")
        assert folder.committed() == ["a"]

    def test_of_nothing_are_refused(self, folder: Folder) -> None:
        with pytest.raises(FileNotFoundError):
            folder.commit("a")
        folder.make()
        with pytest.raises(FileNotFoundError):
            folder.commit("a")
        assert folder.committed() == []

    def test_end_with_the_folder(self, folder: Folder) -> None:
        for name in ("a", "b"):
            folder.staged(name).write("x", b"1")
            folder.commit(name)
        (folder / "a").delete()
        assert folder.committed() == ["b"]
        assert folder.names() == ["b"]
        folder.staged("a").write("x", b"2")
        assert folder.committed() == ["b"]
        assert folder.commit("a").read("x") == b"2"

    def test_leave_out_what_is_discarded(self, folder: Folder) -> None:
        folder.discard_staged("checkpoint_")
        for name in ("checkpoint_1", "checkpoint_2", "mine"):
            folder.staged(name).write("x", b"1")
        folder.commit("checkpoint_1")
        folder.discard_staged("checkpoint_")
        assert folder.committed() == ["checkpoint_1"]
        with pytest.raises(FileNotFoundError):
            folder.commit("checkpoint_2")
        assert folder.commit("mine").read("x") == b"1"

    def test_do_not_show_in_the_folder_itself(self, folder: Folder, tmp_path: Path) -> None:
        folder.staged("a").write("x", b"1")
        folder.commit("a").download(tmp_path / "copy")
        assert tree_at(tmp_path / "copy") == {"x": b"1"}
        assert folder.names() == ["a"]
        folder.download(tmp_path / "all")
        assert tree_at(tmp_path / "all") == {"a/x": b"1"}

    def test_take_names_without_slashes(self, folder: Folder) -> None:
        for call in (folder.staged, folder.commit):
            with pytest.raises(ValueError, match="without slashes"):
                call("a/b")


WRITER = """
    import sys
    from raysgd.storage import open_folder

    folder = open_folder(sys.argv[1]).staged("checkpoint_7")
    print("writing", flush=True)
    number = 0
    while True:
        folder.write(f"part-{number % 5}", bytes([number % 256]) * 300_000)
        number += 1
"""


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_writer_that_is_killed_leaves_nothing_that_counts(kind: str, place: Callable[[str], Folder]) -> None:
    folder = place(kind)
    folder.staged("checkpoint_6").write("x", CONTENT)
    folder.commit("checkpoint_6")
    program = [sys.executable, "-c", textwrap.dedent(WRITER), folder.uri]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        staged = folder.staged("checkpoint_7")
        while "part-4" not in staged.names():
            pass
        writer.kill()
    parts = [staged.read(name) for name in staged.names()]
    assert all(len(part) == 300_000 and len(set(part)) == 1 for part in parts)
    assert folder.committed() == ["checkpoint_6"]
    folder.discard_staged("checkpoint_")
    assert folder.names() == ["checkpoint_6"]
    assert folder.committed() == ["checkpoint_6"]


def test_a_folder_on_a_disk_is_committed_once(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for content in (b"1", b"2"):
        folder.staged("a").write("x", content)
        if content == b"1":
            folder.commit("a")
    with pytest.raises(StorageError, match=r"could not commit .*a folder with this name exists already"):
        folder.commit("a")
    assert (folder / "a").read("x") == b"1"


def test_of_a_link_only_the_link_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (open_folder(tmp_path) / "link").delete()
    assert [path.name for path in tmp_path.iterdir()] == ["real"]


def test_a_delete_that_is_killed_leaves_no_half_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(tmp_path)
    folder.staged("checkpoint_1").write("x", b"1")
    folder.commit("checkpoint_1")

    def die(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        (folder / "checkpoint_1").delete()
    monkeypatch.undo()
    assert folder.committed() == folder.names() == []
    folder.discard_staged("checkpoint_")
    assert list(tmp_path.iterdir()) == []


FULL = """
    import resource, signal, sys
    from pathlib import Path
    from raysgd.storage import StorageError, open_folder

    folder = open_folder(sys.argv[1])
    folder.write("a", b"old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        folder.write("a", b"x" * 100_000)
    except StorageError as error:
        print(error.errno, error)
    try:
        folder.staged("c").upload(Path(sys.argv[2]))
    except StorageError as error:
        print(error.errno, error)
    assert folder.read("a") == b"old"
    assert folder.committed() == []
"""


def test_a_full_disk_is_named_and_leaves_what_was_there(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "large").write_bytes(b"x" * 100_000)
    program = [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path / "folder"), str(source)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("Free some space there, or use another place." in line for line in lines)
    assert f"{tmp_path}/folder/a" in lines[0]
    assert not list((tmp_path / "folder").rglob(".raysgd-*"))


def test_a_disk_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"could not write `.*/file/a`.*use another place"):
        open_folder(tmp_path / "file").write("a", b"")
    with pytest.raises(StorageError, match="could not make the folder"):
        open_folder(tmp_path / "file").make()
    assert not open_folder(tmp_path / "file").exists()


def test_a_disk_needs_no_package(tmp_path: Path) -> None:
    program = """
        import sys
        from raysgd.storage import open_folder
        folder = open_folder(sys.argv[1])
        folder.staged("a").write("x", b"1")
        folder.commit("a").read("x")
        print({"pyarrow", "fsspec", "ray", "torch", "numpy"} & set(sys.modules))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "set()"
