"""Runs from someone else: what their folders name is not run, opened or obeyed, and what they say is escaped.

Covers `raysgd.replay.program` and `raysgd.journal.entries`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from raysgd.callbacks import Checkpointing
from raysgd.cli.main import main
from raysgd.journal.journal import Journal
from raysgd.replay import bisect, replay, why
from raysgd.replay.program import checkpoint_in_run, nearest_checkpoint
from raysgd.torch import TorchTrainer
from tests.replay import programs
from tests.replay.programs import Plain
from tests.torch.load_changed_files import write_folder

Make = Callable[..., TorchTrainer]
PROGRAM = f"{programs.__file__}:Plain"
ESCAPE = "x\x1b]0;owned\x07\x1b[2J\nno jumps in 30 steps"


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.fixture
def honest(make_local: Make, tmp_path: Path) -> Path:
    """A run of two epochs with 10 steps each and a checkpoint after each of them."""
    folder = tmp_path / "run"
    make_local(Plain, seed=2, config={"lr": 0.1}).fit(2, folder=folder, callbacks=[Checkpointing(keep_last=None)])
    return folder


def change(folder: Path, kind: str, change_line: Callable[[dict[str, Any]], object]) -> None:
    """Change all lines of a kind in the journal of a run."""
    path = folder / "journal" / "journal.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == kind:
            change_line(line)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_what_a_journal_says_of_compile_reaches_no_compiler(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[Any]()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model, **options: compiled.append(options))
    evil = {"options": {"cpp.cxx": [None, str(honest / "journal" / "steps.bin")]}}
    change(honest, "run", lambda line: line["options"]["step_options"].update(compile=evil))
    found = run("replay", honest, "--step", 3, "--program", PROGRAM)
    assert found.exit_code == 1
    assert "does not hold `compile` of the trainer, or it could name code: pass" in found.output
    assert "cpp.cxx" not in found.output
    (tmp_path / "options.json").write_text(json.dumps({"compile": {"mode": "default"}}))
    assert (
        run("replay", honest, "--step", 3, "--program", PROGRAM, "--options", tmp_path / "options.json").exit_code == 0
    )
    assert replay(honest, 3, program=Plain, options={"compile": False}).is_exact
    assert compiled == [{"mode": "default"}]


def test_only_options_that_the_journal_can_lack_are_passed_again(honest: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"`options` has 'num_workers': allowed are seed, .*, activation_checkpointing"
    ):
        replay(honest, 3, program=Plain, options={"num_workers": 2})
    for name, text, message in [
        ("--options", "[1]", "need an object"),
        ("--config", "{", "is no JSON file: Expecting"),
    ]:
        (tmp_path / "given.json").write_text(text)
        found = run("replay", honest, "--step", 3, "--program", PROGRAM, name, tmp_path / "given.json")
        assert found.exit_code == 1
        assert message in found.output


def outside(tmp_path: Path, name: str) -> str:
    """Return a location that is not in the folder of the run, where a checkpoint is."""
    copy = tmp_path / "elsewhere" / "epoch_0001.ckpt"
    copy.parent.mkdir()
    shutil.copy(tmp_path / "run" / "checkpoints" / "epoch_0001.ckpt", copy)
    (tmp_path / "run" / "link").symlink_to(copy)
    (tmp_path / "run" / "folder").symlink_to(copy.parent)
    return {"absolute": str(copy), "above": "checkpoints/../../elsewhere/epoch_0001.ckpt"}.get(name, name)


@pytest.mark.parametrize(
    "name",
    [
        "gs://bucket/epoch_0001.ckpt?endpoint_override=127.0.0.1:9&scheme=http",
        "s3://bucket/epoch_0001.ckpt",
        "absolute",
        "above",
        "link",
        "folder/epoch_0001.ckpt",
    ],
)
def test_a_checkpoint_outside_of_the_folder_is_read_only_from_where_the_user_says(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    location = outside(tmp_path, name)
    change(honest, "checkpoint", lambda line: line.update(location=location))
    monkeypatch.setattr("raysgd.storage._filesystems.opened", lambda *_: pytest.fail("a store was opened"))
    for command in ("replay", "why"):
        arguments = [command, honest, "--step", 12, "--program", PROGRAM, *(["--recompute"] * (command == "why"))]
        found = run(*arguments)
        assert found.exit_code == 1
        assert "the checkpoint of step 10 is not in the folder of the run" in found.output
        assert "`--checkpoints FOLDER`" in found.output
        assert "endpoint_override" not in found.output
    assert checkpoint_in_run(Journal(honest), 10) is None
    assert bisect(honest, honest).equal_at is None
    assert replay(honest, 12, program=Plain, begin=11).begin == 0, "which `bisect` asks for, and has no `--checkpoints`"
    if name != "link":  # whose name is that of no checkpoint
        replayed = replay(honest, 12, program=Plain, checkpoints=str(tmp_path / "elsewhere"))
        assert (replayed.begin, replayed.is_exact) == (10, True)
        shown = why(honest, 12, program=Plain, recompute=True, checkpoints=str(tmp_path / "elsewhere"))
        assert shown.checkpoint == str(tmp_path / "elsewhere" / "epoch_0001.ckpt")


def test_a_link_out_of_the_folder_that_the_user_names_is_not_followed(honest: Path, tmp_path: Path) -> None:
    path = honest / "checkpoints" / "epoch_0001.ckpt"
    path.rename(tmp_path / "secret.ckpt")
    path.symlink_to(tmp_path / "secret.ckpt")
    found = run("replay", honest, "--step", 12, "--program", PROGRAM, "--checkpoints", honest / "checkpoints")
    assert found.exit_code == 1
    assert "is a link out of its folder" in found.output


def test_a_link_in_the_folder_of_a_checkpoint_in_parts_is_not_followed_out_of_the_run(
    honest: Path, make_local: Make, tmp_path: Path
) -> None:
    trainer = make_local(Plain, seed=2)
    path = honest / "checkpoints" / "epoch_0001.ckpt"
    path.unlink()
    write_folder(path, trainer.state_dict())
    assert nearest_checkpoint(Journal(honest), 12) == (10, str(path))
    (path / "part-0.pt").rename(tmp_path / "secret.pt")
    (path / "part-0.pt").symlink_to(tmp_path / "secret.pt")
    for folder, message in ((None, "is not in the folder of the run"), (honest / "checkpoints", "out of its folder")):
        with pytest.raises(ValueError, match=message):
            nearest_checkpoint(Journal(honest), 12, folder)


def test_the_debugger_runs_no_commands_from_the_folder_of_a_run(honest: Path, tmp_path: Path) -> None:
    (honest / ".pdbrc").write_text(f"!open({str(tmp_path / 'owned')!r}, 'w')\n")
    command = [sys.executable, "-m", "raysgd", "replay", ".", "--step", "12", "--program", PROGRAM, "--pdb"]
    paths = {"PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
    done = subprocess.run(command, input="c\n", cwd=honest, env={**os.environ, **paths}, capture_output=True, text=True)
    assert "each loss has the bits that the run had" in done.stdout, done.stderr
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_no_location_becomes_a_uri_beside_a_relative_folder(
    honest: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    location = f"{scheme}:/evil/epoch_0001.ckpt?endpoint_override=127.0.0.1:9&scheme=http"
    (honest / location).parent.mkdir(parents=True)
    (honest / "checkpoints" / "epoch_0001.ckpt").rename(honest / location)
    change(honest, "checkpoint", lambda line: line.update(location=location))
    monkeypatch.setattr("raysgd.storage._filesystems.opened", lambda *_: pytest.fail("a store was opened"))
    monkeypatch.chdir(honest)
    assert nearest_checkpoint(Journal("."), 12) == (10, str(honest / location))
    assert why(".", 12, program=Plain, recompute=True).checkpoint == str(honest / location)


def test_checkpoints_that_were_deleted_are_skipped(honest: Path) -> None:
    checkpoints = honest / "checkpoints"
    (checkpoints / "epoch_0001.ckpt").unlink()
    assert nearest_checkpoint(Journal(honest), 15) == (0, None)
    assert nearest_checkpoint(Journal(honest), 15, str(checkpoints)) == (0, None)
    assert nearest_checkpoint(Journal(honest), 21) == (20, str(checkpoints / "epoch_0002.ckpt"))
    with pytest.raises(ValueError, match=r"`checkpoints='.*nowhere'`: there is no such folder"):
        nearest_checkpoint(Journal(honest), 15, str(checkpoints / "nowhere"))


@pytest.mark.parametrize(
    ("kind", "entries", "arguments"),
    [
        ("leg", {"data": {"order": ESCAPE}}, ("why", "--step", 3)),
        ("leg", {"data": {"kind": "undivided", "name": ESCAPE}}, ("why", "--step", 3)),
        ("leg", {"data": {"kind": ESCAPE}}, ("why", "--step", 3)),
        ("leg", {"num_workers": ESCAPE}, ("why", "--jumps")),
        ("leg", {"obstacle": ESCAPE}, ("replay", "--step", 3, "--program", PROGRAM)),
        ("run", {"format": ESCAPE, "raysgd": ESCAPE}, ("why", "--jumps")),
        ("run", {"config_left_out": [ESCAPE]}, ("replay", "--step", 3, "--program", PROGRAM)),
        ("checkpoint", {"location": f"../{ESCAPE}"}, ("replay", "--step", 12, "--program", PROGRAM)),
        ("checkpoint", {"location": "../x\0"}, ("why", "--jumps")),
    ],
)
def test_text_of_a_journal_is_escaped(honest: Path, kind: str, entries: Any, arguments: tuple[Any, ...]) -> None:
    data = entries.pop("data", {})
    change(honest, kind, lambda line: line.update(entries, **({"data": {**line["data"], **data}} if data else {})))
    command, *rest = arguments
    found = run(command, honest, *rest)
    assert all(character.isprintable() for line in found.output.split("\n") for character in line)
    assert "no jumps in 30 steps" not in found.output.splitlines()


def test_names_of_files_are_escaped(honest: Path) -> None:
    name = "checkpoints/a\x1b[2Jb\n.ckpt"
    shutil.copy(honest / "checkpoints" / "epoch_0001.ckpt", honest / name)
    change(honest, "checkpoint", lambda line: line.update(location=name) if line["step"] == 10 else None)
    found = run("replay", honest, "--step", 12, "--program", PROGRAM)
    assert found.exit_code == 0, found.output
    assert r"a\x1b[2Jb\n.ckpt" in found.output
    (honest / name).write_bytes(b"no checkpoint")
    found = run("replay", honest, "--step", 12, "--program", PROGRAM)
    assert found.exit_code == 1
    assert "\x1b" not in found.output


@pytest.mark.parametrize(
    "entries",
    [
        {"num_samples": 2**53, "batch_size": 2**27},
        {"num_samples": 2**53, "batch_size": 2**27, "rule": {"cap": 1, "num_shards": 0, "multiple": 1}},
    ],
)
def test_a_step_with_too_many_samples_is_not_listed(honest: Path, entries: dict[str, Any]) -> None:
    change(honest, "leg", lambda line: (line.update(num_workers=10_000), line["data"].update(entries)))
    found = run("why", honest, "--step", 3)
    assert "samples on 10000 workers: too many to list them" in found.output


@pytest.mark.parametrize(
    "models",
    [
        5,
        [5],
        [{5: torch.ones(2)}],
        [{"weight": torch.eye(2).to_sparse()}],
        [{"weight": torch.empty(3, device="meta")}],
    ],
    ids=["number", "list", "name", "sparse", "meta"],
)
def test_models_that_cannot_be_compared_are_refused(honest: Path, tmp_path: Path, models: Any) -> None:
    shutil.copytree(honest, other := tmp_path / "other")
    path = other / "checkpoints" / "epoch_0001.ckpt"
    torch.save({**torch.load(path), "models": models}, path)
    found = run("bisect", honest, other)
    assert found.exit_code == 1
    assert found.output.startswith("Error: ")
    assert isinstance(found.exception, SystemExit)


def test_errors_of_the_library_have_no_traceback(honest: Path) -> None:
    path = honest / "checkpoints" / "epoch_0001.ckpt"
    torch.save({**torch.load(path), "optimizers": [{"state": {0: 5}, "param_groups": []}]}, path)
    found = run("replay", honest, "--step", 12, "--program", PROGRAM)
    assert found.exit_code == 1
    assert "Error: " in found.output
    assert isinstance(found.exception, SystemExit)
