"""The folder that a checkpoint of divided models is: in one process, whose tensors are whole.

Covers `raysgd.torch.divided_files`, too.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.exceptions import CheckpointCorruptedError, UnsafeCheckpointError
from raysgd.replicas.replica_state import RESUME
from raysgd.torch import checkpoint_file, divided_files, divided_folder
from raysgd.torch.divided_folder import RANKS, REST, WrittenPart
from raysgd.torch.rng import RNG
from tests.torch.operators_for_tests import equal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
        files = divided_files.write_part(divided_folder.emptied(folder), tensors, 0, None)
        divided_folder.finish(folder, [WrittenPart(rest, None, list(tensors), files)], rest)
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


def test_a_folder_of_before_has_them_in_the_rest(tmp_path: Path) -> None:
    content = {**state(), RESUME: {"samples": 4, RNG: [[1], [2]]}}
    path = write(tmp_path / "last", {**content, RESUME: {"samples": 4}})
    rest = checkpoint_file.read(path / REST)
    checkpoint_file.write(path / REST, {**rest, RESUME: content[RESUME]})
    assert equal(divided_files.opened(str(path), weights_only=True).read_whole(), content)


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


def test_nothing_that_could_run_code_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "last", state())
    (path / ".metadata").write_bytes(pickle.dumps(RunsCode()))
    with pytest.raises(CheckpointCorruptedError, match=r"it names `builtins.exec`"):
        divided_files.opened(str(path), weights_only=True)
    path = write(tmp_path / "other", {**state(), "operator": {"set": frozenset({1}), "kind": Path("a")}})
    with pytest.raises(UnsafeCheckpointError, match="weights_only=False"):
        divided_files.opened(str(path), weights_only=True)
    assert divided_files.opened(str(path), weights_only=False).rest["operator"]["kind"] == Path("a")
    assert "code ran" not in capfd.readouterr().out
