"""The folder that a checkpoint of divided models is: in one process, whose tensors are whole.

Covers `raysgd.torch.checkpoints.divided_files`, too.
"""

from __future__ import annotations

import io
import os
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd._files import held
from raysgd.exceptions import CheckpointCorruptedError, UnsafeCheckpointError
from raysgd.torch.checkpoints import checkpoint_file, divided_files, divided_folder
from raysgd.torch.checkpoints.divided_folder import DIVIDED, RANKS, REST, WrittenPart
from raysgd.torch.objects.rng import RNG
from raysgd.worker.state.replica_state import RESUME
from tests.torch.operators_for_tests import equal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PART = "__0_0.distcp"


def state() -> dict[str, Any]:
    slots = {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}, 1: {"step": torch.tensor(3.0)}}
    return {
        "epoch": 3,
        "operator": {"best": 0.5, "seen": torch.arange(3)},
        "models": [{"a.weight": torch.randn(2, 3), "b/c": torch.arange(4), "size": torch.tensor(7)}],
        "optimizers": [{"state": slots, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]}],
        "schedulers": [],
    }


def write(path: Path, content: dict[str, Any]) -> Path:
    rest, tensors = divided_folder.split(content)
    with divided_folder.making(path) as folder:
        files, stored = divided_files.write_tensors(divided_folder.emptied(folder), tensors, 0, None)
        divided_folder.finish(folder, [WrittenPart(rest, None, stored, files)], rest)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    content = state()
    path = write(tmp_path / "last", content)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]
    assert sorted(entry.name for entry in path.iterdir()) == [".metadata", "__0_0.distcp", "rest.pt"]
    assert divided_folder.is_folder(path)
    assert equal(divided_files.opened(str(path), weights_only=True).read_whole(), content)


def test_a_rank_does_not_read_the_random_states_of_all(tmp_path: Path) -> None:
    states = [{"torch": torch.arange(5), "python": [1, 2]}] * 3
    content = {**state(), RESUME: {"samples": 4, RNG: states}}
    path = str(write(tmp_path / "last", content))
    assert equal(divided_files.opened(path, weights_only=True).read_whole(), content)
    of_rank = divided_files.opened(path, weights_only=True, for_rank=True)
    assert of_rank.rest[RESUME] == {"samples": 4}
    Path(path, RANKS).unlink()
    assert equal(of_rank.read_whole(), {**content, RESUME: {"samples": 4}})
    with pytest.raises(CheckpointCorruptedError, match=r"ranks\.pt"):
        divided_files.opened(path, weights_only=True)


def test_a_state_in_outline_has_shapes_and_takes_no_memory(tmp_path: Path) -> None:
    content = {**state(), "models": [{"large": torch.zeros(500, 20)}]}
    [model] = divided_files.opened(str(write(tmp_path / "last", content)), weights_only=True).outline()["models"]
    assert model["large"].shape == (500, 20)
    assert model["large"].untyped_storage().nbytes() == 4


def test_a_folder_takes_the_place_of_an_earlier_one_and_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "last").write_bytes(b"a file of before")
    for epoch in (1, 2):
        write(tmp_path / "last", {**state(), "epoch": epoch})
        assert divided_files.opened(str(tmp_path / "last"), weights_only=True).rest["epoch"] == epoch
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_a_failed_write_leaves_the_earlier_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "last", state())
    half = {**state(), "epoch": {"needs": Path("a")}, "models": 5}
    del half["optimizers"]
    with pytest.raises(ValueError, match="lacks"):
        write(path, half)
    assert divided_files.opened(str(path), weights_only=True).rest["epoch"] == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_the_folder_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").touch()
    with pytest.raises(IsADirectoryError, match="with something else in it"):
        write(tmp_path / "photos", state())
    assert [entry.name for entry in (tmp_path / "photos").iterdir()] == ["one.png"]


def test_parts_that_the_driver_cannot_see_are_missed(tmp_path: Path) -> None:
    here = WrittenPart(state(), None, [], {"__0_0.distcp": (0, "")})
    elsewhere = WrittenPart(None, None, [], {"__1_0.distcp": (10, "00")})
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(OSError, match=r"1 of 2 files that workers wrote are not in .* a path that all nodes share"):
        divided_folder.finish(tmp_path, [here, elsewhere], state())
    assert not divided_folder.is_folder(tmp_path)


def test_an_attempt_begins_with_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "__3_0.distcp").touch()
    assert divided_folder.emptied(tmp_path) == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "last", state()) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointCorruptedError, match="no intact checkpoint"):
        divided_files.opened(str(tmp_path / "last"), weights_only=True).read_whole()


def test_a_missing_file_is_found_by_the_rank_that_looks_at_it(tmp_path: Path) -> None:
    path = write(tmp_path / "last", state())
    folder = divided_files.opened(str(path), weights_only=True)
    (path / "__0_0.distcp").unlink()
    folder.check(0, 2)
    with pytest.raises(CheckpointCorruptedError, match=r"`__0_0\.distcp` is missing"):
        folder.check(1, 2)


class RunsCode:
    def __reduce__(self) -> Any:
        return exec, ("print('code ran')",)


def with_facts(path: Path, **changed: Any) -> Path:
    """The folder with something else in its index."""
    rest = checkpoint_file.read(path / REST)
    checkpoint_file.write(path / REST, {**rest, DIVIDED: {**rest[DIVIDED], **changed}})
    return path


def with_part(path: Path, part: bytes) -> Path:
    """The folder with a file that consists of this alone, whose checksum is right; all tensors lie there."""
    (path / PART).write_bytes(part)
    facts = checkpoint_file.read(path / REST)[DIVIDED]
    tensors = [
        (*each, tuple((first, length, PART, 0, len(part)) for first, length, *_ in pieces))
        for *each, pieces in facts["tensors"]
    ]
    return with_facts(path, tensors=tensors, files={PART: divided_files._facts_of(path / PART)})


def test_nothing_that_could_run_code_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "last", state())
    (path / ".metadata").write_bytes(pickle.dumps(RunsCode()))
    with pytest.raises(CheckpointCorruptedError, match=r"`\.metadata` is missing or does not match its checksum"):
        divided_files.opened(str(path), weights_only=True).read_whole()
    stream = io.BytesIO()
    torch.save(RunsCode(), stream)
    with_part(path, stream.getvalue())
    with pytest.raises(CheckpointCorruptedError, match=r"`__0_0\.distcp` cannot be read \(exec\)"):
        divided_files.opened(str(path), weights_only=True).read_whole()
    path = write(tmp_path / "other", {**state(), "operator": {"set": frozenset({1}), "kind": Path("a")}})
    with pytest.raises(UnsafeCheckpointError, match="weights_only=False"):
        divided_files.opened(str(path), weights_only=True)
    assert divided_files.opened(str(path), weights_only=False).rest["operator"]["kind"] == Path("a")
    assert "code ran" not in capfd.readouterr().out


def packed() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    return stream.getvalue()


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("part", "finding"),
    [
        (packed(), "compressed"),
        (b"nothing" * 100, "not a zip file"),
        (saved(torch.ones(3)), "another one than the index says"),
        (saved(torch.ones(2, 3, dtype=torch.float64)), "another one than the index says"),
        (saved(torch.empty(2, 3, device="meta")), "another one than the index says"),
        (saved([1]), "there is no tensor"),
    ],
    ids=["compressed", "text", "shorter", "of float64", "on meta", "a list"],
)
def test_a_part_is_what_the_index_says(part: bytes, finding: str, tmp_path: Path) -> None:
    content = {**state(), "models": [{"a": torch.randn(2, 3)}], "optimizers": []}
    path = with_part(write(tmp_path / "last", content), part)
    with pytest.raises(CheckpointCorruptedError, match=finding):
        divided_files.opened(str(path), weights_only=True).read_whole()


PLACE = ("models", 0, "a")
FLOATS = torch.float32


@pytest.mark.parametrize(
    ("tensor", "finding"),
    [
        ((PLACE, FLOATS, (2, 3), 0, ((0, 2, "../last/__0_0.distcp", 0, 500),)), "in no file of the list"),
        ((PLACE, FLOATS, (2, 3), 0, ((0, 2, ".hidden", 0, 500),)), "in no file of the list"),
        ((PLACE, FLOATS, (2, 3), 0, ((0, 2, PART, 10**6, 500),)), "outside of its file"),
        ((PLACE, FLOATS, (2, 3), 0, ((0, 2, PART, -1, 500),)), "has no size"),
        ((PLACE, FLOATS, (2, 3), 0, ((0, 1, PART, 0, 500),)), "is missing"),
        ((PLACE, FLOATS, (2, 3), 0, ((1, 1, PART, 0, 500),)), "do not follow"),
        ((PLACE, FLOATS, (2, 3), 0, ((0, 1, PART, 0, 500), (0, 1, PART, 0, 500))), "do not follow"),
        ((PLACE, FLOATS, (2, 3), 0, ((0, 0, PART, 0, 500),) * 2), "is empty"),
        ((PLACE, FLOATS, (10**9, 3), 0, ((0, 10**9, PART, 0, 500),)), "larger than its place"),
        ((PLACE, FLOATS, (0, 2**61, 2**61), 0, ()), "has no shape"),
        ((PLACE, FLOATS, (2, -3), 0, ()), "has no shape"),
        ((PLACE, FLOATS, (2, 3), 2, ()), "by no dimension"),
        ((PLACE, "float32", (2, 3), 0, ()), "of no kind"),
        ((PLACE, FLOATS, (2, 3), 0, ((0, 2),)), "contradicts itself"),
        ((PLACE,), "contradicts itself"),
        (((*PLACE, "b"), FLOATS, (0,), 0, ()), "no place for a tensor"),
        ((("models", 7, "b"), FLOATS, (0,), 0, ()), "no place for a tensor"),
        ((("operator", None), FLOATS, (0,), 0, ()), "has no place"),
    ],
)  # fmt: skip
def test_an_index_that_contradicts_itself_is_refused(tensor: Any, finding: str, tmp_path: Path) -> None:
    content = {**state(), "models": [{"a": torch.randn(2, 3), "size": torch.tensor(1)}], "optimizers": []}
    path = with_facts(write(tmp_path / "last", content), tensors=[tensor])
    with pytest.raises(CheckpointCorruptedError, match=finding):
        divided_files.opened(str(path), weights_only=True).outline()


def test_many_tensors_in_one_place_are_not_made_large(tmp_path: Path) -> None:
    path = write(tmp_path / "last", {**state(), "models": [{"a": torch.zeros(10_000)}], "optimizers": []})
    [entry] = checkpoint_file.read(path / REST)[DIVIDED]["tensors"]
    with_facts(path, tensors=[(("models", 0, str(number)), *entry[1:]) for number in range(10)])
    with pytest.raises(CheckpointCorruptedError, match="larger than its files"):
        divided_files.opened(str(path), weights_only=True)


def test_large_parts_of_small_tensors_are_not_read_again_and_again(tmp_path: Path) -> None:
    path = write(tmp_path / "last", {**state(), "models": [{"a": torch.zeros(10_000)}], "optimizers": []})
    [entry] = checkpoint_file.read(path / REST)[DIVIDED]["tensors"]
    *_, (piece,) = entry
    small = [(("models", 0, str(number)), entry[1], (1,), 0, ((0, 1, *piece[2:]),)) for number in range(20)]
    with_facts(path, tensors=small)
    with pytest.raises(CheckpointCorruptedError, match="in the same place many times"):
        divided_files.opened(str(path), weights_only=True)


@pytest.mark.parametrize("name", ["../a", "/a", "b/c", "..", ".", "", "a/", 3])
def test_only_files_of_the_folder_are_looked_at(name: Any, tmp_path: Path) -> None:
    path = with_facts(write(tmp_path / "last", state()), files={name: (3, "00")}, tensors=[])
    with pytest.raises(CheckpointCorruptedError, match="a file is elsewhere"):
        divided_files.opened(str(path), weights_only=True)


def test_a_state_that_holds_one_thing_many_times_is_copied_once(tmp_path: Path) -> None:
    tree: Any = []
    for _ in range(80):
        tree = [tree, tree]
    path = write(tmp_path / "last", state())
    rest = checkpoint_file.read(path / REST)
    checkpoint_file.write(path / REST, {**rest, "criterion": tree})
    assert len(divided_files.opened(str(path), weights_only=True).outline()["criterion"]) == 2


# ------------------------------------------------------------------------------------------------ killed saves


def leftover(path: Path, age_s: float) -> Path:
    path.mkdir()
    (path / PART).write_bytes(b"half")
    for each in (path / PART, path):
        os.utime(each, (time.time() - age_s,) * 2)
    return path


def test_what_killed_saves_have_left_is_removed_by_the_next(tmp_path: Path) -> None:
    leftover(tmp_path / ".raysgd-last-00000000.tmp", age_s=1000)
    young = leftover(tmp_path / ".raysgd-other-00000000.tmp", age_s=10)
    growing = leftover(tmp_path / ".raysgd-other-11111111.tmp", age_s=1000)
    os.utime(growing / PART)
    in_use = leftover(tmp_path / ".raysgd-other-22222222.tmp", age_s=1000)
    with held(in_use):
        path = write(tmp_path / "last", state())
    assert sorted(tmp_path.iterdir()) == [young, growing, in_use, path]


def test_the_former_folder_of_a_killed_save_goes_when_the_new_one_is_whole(tmp_path: Path) -> None:
    former = write(tmp_path / "last", state()).rename(tmp_path / ".raysgd-last-00000000.tmp.old")
    with pytest.raises(ValueError, match="lacks"):
        write(tmp_path / "last", {"epoch": 1, "models": []})
    assert list(tmp_path.iterdir()) == [former]
    of_another = leftover(tmp_path / ".raysgd-last-two-00000000.tmp.old", age_s=1000)
    for _ in range(2):
        write(tmp_path / "last", state())
    assert sorted(tmp_path.iterdir()) == [of_another, tmp_path / "last"]
