"""The folder that a checkpoint of divided models is: in one process, whose tensors are whole."""

from __future__ import annotations

import io
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.exceptions import CheckpointCorruptedError, UnsafeCheckpointError
from raysgd.torch.checkpoints import checkpoint_file, divided
from raysgd.torch.checkpoints.divided import DIVIDED, RANKS, REST, WrittenPart
from raysgd.torch.objects.rng import RNG
from raysgd.trainer.worker.replica_state import RESUME
from tests.torch.operators_for_tests import equal

PART = "part-0.pt"
PLACE, FLOATS = ("models", 0, "a"), torch.float32


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
    with divided.making_folder(path) as folder:
        part = divided.write_part(divided.emptied_folder(folder), content, None, rank=0)
        divided.finish_folder(folder, [part], dict(part.rest or {}))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    content = state()
    path = write(tmp_path / "new" / "last", content)
    assert [entry.name for entry in path.parent.iterdir()] == ["last"]
    assert sorted(entry.name for entry in path.iterdir()) == ["part-0.pt", "rest.pt"]
    assert divided.is_folder(path)
    assert equal(divided.open_folder(str(path), weights_only=True).read_whole(), content)


@pytest.mark.parametrize("target", ["mine", "notes.txt", "nothing"])
def test_a_link_is_replaced_and_not_followed(target: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the only copy")
    write(tmp_path / "mine", state())
    before = sorted(entry.stat().st_mtime_ns for entry in (tmp_path / "mine").iterdir())
    (tmp_path / "last").symlink_to(target)
    path = write(tmp_path / "last", state())
    assert divided.is_folder(path)
    assert not path.is_symlink()
    assert before == sorted(entry.stat().st_mtime_ns for entry in (tmp_path / "mine").iterdir())
    assert (tmp_path / "notes.txt").read_text() == "the only copy"


def test_tied_tensors_and_views_are_written_with_memory_of_their_own(tmp_path: Path) -> None:
    large = torch.randn(100, 100)
    content = {
        **state(),
        "models": [{"embedding": large, "head": large, "row": large[3:4], "wide": large[:1].expand(50, 100)}],
    }
    path = write(tmp_path / "last", content)
    assert equal(divided.open_folder(str(path), weights_only=True).read_whole(), content)
    path = write(tmp_path / "row", {**state(), "models": [{"row": large[3:4]}]})
    assert (path / PART).stat().st_size < 10_000


def test_a_rank_does_not_read_the_random_states_of_all(tmp_path: Path) -> None:
    states = [{"torch": torch.arange(5), "python": [1, 2]}] * 3
    content = {**state(), RESUME: {"samples": 4, RNG: states}}
    path = str(write(tmp_path / "last", content))
    assert equal(divided.open_folder(path, weights_only=True).read_whole(), content)
    of_rank = divided.open_folder(path, weights_only=True, for_rank=True)
    assert of_rank.rest[RESUME] == {"samples": 4}
    Path(path, RANKS).unlink()
    assert equal(of_rank.read_whole(), {**content, RESUME: {"samples": 4}})
    with pytest.raises(CheckpointCorruptedError, match=r"ranks\.pt"):
        divided.open_folder(path, weights_only=True)


def test_a_state_in_outline_has_shapes_and_takes_no_memory(tmp_path: Path) -> None:
    content = {**state(), "models": [{"large": torch.zeros(500, 20)}]}
    [model] = divided.open_folder(str(write(tmp_path / "last", content)), weights_only=True).outline()["models"]
    assert model["large"].shape == (500, 20)
    assert model["large"].untyped_storage().nbytes() == 4


def test_a_folder_takes_the_place_of_an_earlier_one_and_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "last").write_bytes(b"a file of before")
    for epoch in (1, 2):
        write(tmp_path / "last", {**state(), "epoch": epoch})
        assert divided.open_folder(str(tmp_path / "last"), weights_only=True).rest["epoch"] == epoch
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_a_failed_write_leaves_the_earlier_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "last", state())
    half = {**state(), "epoch": {"needs": Path("a")}, "models": 5}
    del half["optimizers"]
    with pytest.raises(ValueError, match="lacks"):
        write(path, half)
    assert divided.open_folder(str(path), weights_only=True).rest["epoch"] == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_parts_that_the_driver_cannot_see_are_missed(tmp_path: Path) -> None:
    here = WrittenPart(state(), {}, None, (0, ""))
    elsewhere = WrittenPart(None, None, None, (10, "00"))
    (tmp_path / PART).touch()
    with pytest.raises(OSError, match=r"1 of 2 files that workers wrote are not in .* a path that all nodes share"):
        divided.finish_folder(tmp_path, [here, elsewhere], state())
    assert not divided.is_folder(tmp_path)


def test_an_attempt_begins_with_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "part-3.pt").touch()
    assert divided.emptied_folder(tmp_path) == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_found_by_the_rank_that_looks_at_it(tmp_path: Path) -> None:
    path = write(tmp_path / "last", state())
    folder = divided.open_folder(str(path), weights_only=True)
    (path / PART).unlink()
    folder.check(1, 2)
    with pytest.raises(CheckpointCorruptedError, match=r"`part-0\.pt` is missing"):
        folder.check(0, 2)


class RunsCode:
    def __reduce__(self) -> Any:
        return exec, ("print('code ran')",)


def with_facts(path: Path, **changed: Any) -> Path:
    """The folder with something else in its index."""
    rest = checkpoint_file.read(path / REST)
    checkpoint_file.write(path / REST, {**rest, DIVIDED: {**rest[DIVIDED], **changed}})
    return path


def with_part(path: Path, part: bytes) -> Path:
    """The folder with a file that consists of this alone, whose checksum is right."""
    (path / PART).write_bytes(part)
    return with_facts(path, files=[divided._facts_of(path / PART)])


@pytest.mark.parametrize("name", [REST, RANKS, PART])
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "last", state())
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(OSError, match="is not a regular file"):
        divided.open_folder(str(path), weights_only=True)


def test_nothing_that_could_run_code_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "last", state())
    stream = io.BytesIO()
    torch.save(RunsCode(), stream)
    with_part(path, stream.getvalue())
    with pytest.raises(CheckpointCorruptedError, match=r"`part-0\.pt` cannot be read \(exec\)"):
        divided.open_folder(str(path), weights_only=True).read_whole()
    path = write(tmp_path / "other", {**state(), "operator": {"set": frozenset({1}), "kind": Path("a")}})
    with pytest.raises(UnsafeCheckpointError, match="weights_only=False"):
        divided.open_folder(str(path), weights_only=True)
    assert divided.open_folder(str(path), weights_only=False).rest["operator"]["kind"] == Path("a")
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
        (saved({PLACE: torch.ones(3)}), "differs from its entry in the index"),
        (saved({PLACE: torch.ones(2, 3, dtype=torch.float64)}), "differs from its entry in the index"),
        (saved({PLACE: torch.empty(2, 3, device="meta")}), "differs from its entry in the index"),
        (saved({PLACE: [1]}), "values that are not tensors"),
        (saved([1]), "values that are not tensors"),
        (saved({}), "not those of the index"),
        (saved({PLACE: torch.ones(2, 3), "b": torch.ones(2, 3)}), "not those of the index"),
    ],
    ids=["compressed", "text", "shorter", "of float64", "on meta", "a list inside", "a list", "empty", "one more"],
)
def test_a_part_is_what_the_index_says(part: bytes, finding: str, tmp_path: Path) -> None:
    content = {**state(), "models": [{"a": torch.randn(2, 3)}], "optimizers": []}
    path = with_part(write(tmp_path / "last", content), part)
    with pytest.raises(CheckpointCorruptedError, match=finding):
        divided.open_folder(str(path), weights_only=True).read_whole()


@pytest.mark.parametrize(
    ("index", "finding"),
    [
        ({PLACE: (FLOATS, (10**9, 3), False)}, "larger than its files"),
        ({("models", 0, str(number)): (FLOATS, (200,), False) for number in range(10)}, "larger than its files"),
        ({PLACE: (FLOATS, (0, 2**61, 2**61), False)}, "has no shape"),
        ({PLACE: (FLOATS, (2, -3), False)}, "has no shape"),
        ({PLACE: (FLOATS, (), False)}, "has no shape"),
        ({PLACE: ("float32", (2, 3), False)}, "no valid dtype or sharding flag"),
        ({PLACE: (FLOATS, (2, 3), 0)}, "no valid dtype or sharding flag"),
        ({PLACE: (FLOATS, (2, 3))}, "contradicts itself"),
        ({(*PLACE, "b"): (FLOATS, (0,), False)}, "contradicts itself"),
        ({("models", 7, "b"): (FLOATS, (0,), False)}, "contradicts itself"),
        ({"models": (FLOATS, (0,), False)}, "has no path"),
        ([PLACE], "no list of tensors"),
    ],
)  # fmt: skip
def test_an_index_that_contradicts_itself_is_refused(index: Any, finding: str, tmp_path: Path) -> None:
    content = {**state(), "models": [{"a": torch.randn(2, 3), "size": torch.tensor(1)}], "optimizers": []}
    path = with_facts(write(tmp_path / "last", content), index=index)
    with pytest.raises(CheckpointCorruptedError, match=finding):
        divided.open_folder(str(path), weights_only=True)


def test_a_state_that_holds_one_thing_many_times_is_copied_once(tmp_path: Path) -> None:
    tree: Any = []
    for _ in range(80):
        tree = [tree, tree]
    path = write(tmp_path / "last", state())
    rest = checkpoint_file.read(path / REST)
    checkpoint_file.write(path / REST, {**rest, "criterion": tree})
    assert len(divided.open_folder(str(path), weights_only=True).outline()["criterion"]) == 2


# ------------------------------------------------------------------------------------------------ killed saves


def leftover(path: Path, age_s: float) -> Path:
    path.mkdir()
    (path / PART).write_bytes(b"half")
    for each in (path / PART, path):
        os.utime(each, (time.time() - age_s,) * 2)
    return path


def test_what_killed_saves_have_left_is_removed_by_the_next(tmp_path: Path) -> None:
    leftover(tmp_path / ".raysgd-last-00000000.tmp", age_s=4000)
    young = leftover(tmp_path / ".raysgd-other-00000000.tmp", age_s=3000)
    growing = leftover(tmp_path / ".raysgd-other-11111111.tmp", age_s=4000)
    os.utime(growing / PART)
    path = write(tmp_path / "last", state())
    assert sorted(tmp_path.iterdir()) == [young, growing, path]


def test_the_former_folder_of_a_killed_save_goes_when_the_new_one_is_whole(tmp_path: Path) -> None:
    former = write(tmp_path / "last", state()).rename(tmp_path / ".raysgd-last-00000000.tmp.old")
    with pytest.raises(ValueError, match="lacks"):
        write(tmp_path / "last", {"epoch": 1, "models": []})
    assert list(tmp_path.iterdir()) == [former]
    of_another = leftover(tmp_path / ".raysgd-last-two-00000000.tmp.old", age_s=1000)
    for _ in range(2):
        write(tmp_path / "last", state())
    assert sorted(tmp_path.iterdir()) == [of_another, tmp_path / "last"]
