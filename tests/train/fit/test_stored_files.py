from __future__ import annotations

from pathlib import Path

import pytest

from raysgd.storage import Folder, open_folder
from raysgd.train._function_run import taken_names
from raysgd.train.fit.fit_session import names_in, store_beside


@pytest.fixture
def target(tmp_path: Path) -> Folder:
    """Where rank 0 has stored two files."""
    folder = open_folder(tmp_path / "target")
    folder.write("model", b"of rank 0")
    folder.write("deep/epoch", b"3")
    return folder


def source(tmp_path: Path, **files: str) -> Path:
    for name, content in files.items():
        path = tmp_path / "source" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "source"


def test_names_are_those_of_all_files(tmp_path: Path) -> None:
    assert set(names_in(source(tmp_path, model="1", deep__epoch="3"))) == {"model", "deep/epoch"}


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        ({}, {}),
        ({0: ["a"], 1: ["b"]}, {0: (), 1: ()}),
        ({0: ["a", "b"], 2: ["b", "c"], 1: ["c"]}, {0: (), 1: (), 2: ("b", "c")}),
        ({3: ["a"], 1: ["a"]}, {1: (), 3: ("a",)}),
    ],
)
def test_a_name_is_taken_by_the_lowest_rank(names: dict[int, list[str]], taken: dict[int, tuple[str, ...]]) -> None:
    assert taken_names(names) == taken


def test_files_with_other_content_get_a_name_with_the_rank(tmp_path: Path, target: Folder) -> None:
    folder = source(tmp_path, model="of rank 1", deep__epoch="3", own="1")
    assert store_beside(folder, target, 1, ["model", "deep/epoch"]) == ["model"]
    found = {name: target.read(name) for name in names_in(target.local_path)}
    assert found == {"model": b"of rank 0", "model.rank_1": b"of rank 1", "deep/epoch": b"3", "own": b"1"}


def test_files_that_only_begin_alike_are_not_the_same(tmp_path: Path, target: Folder) -> None:
    folder = source(tmp_path, model="of rank 0 and more", deep__epoch="")
    assert store_beside(folder, target, 1, ["model", "deep/epoch"]) == ["model", "deep/epoch"]
    assert target.read("deep/epoch.rank_1") == b""


def test_a_rank_that_has_such_a_file_itself_loses_nothing(tmp_path: Path, target: Folder) -> None:
    folder = source(tmp_path, model="1")
    (folder / "model.rank_1").write_text("2")
    store_beside(folder, target, 1, ["model"])
    assert (target.read("model.rank_1.rank_1"), target.read("model.rank_1")) == (b"1", b"2")


def test_a_file_that_the_other_rank_has_not_stored_yet_is_kept(tmp_path: Path, target: Folder) -> None:
    assert store_beside(source(tmp_path, late="1"), target, 2, ["late"]) == ["late"]
    assert target.read("late.rank_2") == b"1"
