"""Which frames are the user's, and where code is."""

from __future__ import annotations

import json
import linecache
from pathlib import Path

import pytest
import torch

import raysgd
from raysgd.core.text.tracebacks import (
    defined_at,
    frames_of_user,
    is_of_library,
    short_name,
    shows_all_frames,
    with_code,
)
from raysgd.trainer.worker.operator import BaseOperator

PACKAGE = Path(raysgd.__file__).parent


@pytest.mark.parametrize(
    ("filename", "is_library", "short"),
    [
        (torch.nn.modules.linear.__file__, True, "torch/nn/modules/linear.py"),
        (json.__file__, True, "json/__init__.py"),
        (str(PACKAGE / "trainer" / "worker" / "operator.py"), True, "raysgd/trainer/worker/operator.py"),
        (__file__, False, __file__),
        ("/home/me/raysgd/train.py", False, "/home/me/raysgd/train.py"),
    ],
)
def test_what_is_installed_is_not_the_users_and_has_a_short_name(filename: str, is_library: bool, short: str) -> None:
    assert is_of_library(filename) == is_library
    assert short_name(filename) == short


def descend(depth: int) -> None:
    if depth:
        descend(depth - 1)
    json.loads("{")


@pytest.mark.parametrize(("depth", "num_kept"), [(0, 2), (1, 3), (20, 3)])
def test_of_a_traceback_the_users_first_and_last_frames_are_kept(depth: int, num_kept: int) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        descend(depth)
    link = frames_of_user(caught.value.__traceback__, 3)
    names = []
    while link is not None:
        names.append((link.tb_frame.f_code.co_name, link.tb_frame.f_locals.get("depth")))
        link = link.tb_next
    assert len(names) == num_kept
    assert names[0][0].startswith("test_of_a_traceback")
    assert names[-1] == ("descend", 0)


class Silent(BaseOperator):
    def train_batch(self) -> None: ...


def test_a_method_of_the_users_is_found_and_one_of_the_library_is_not_shown() -> None:
    line = Silent.train_batch.__code__.co_firstlineno
    assert defined_at(Silent, "train_batch") == f" `train_batch` is defined at {__file__}:{line}."
    assert defined_at(Silent, "setup") == ""
    assert defined_at(Silent, "nothing") == ""


def test_a_line_of_code_is_added_where_this_process_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my cells.py"
    path.write_text("a = 1\n    b = 2\n")
    linecache.checkcache()
    assert with_code(f"{path}:2 in Net.forward") == f"{path}:2 in Net.forward: b = 2"
    assert with_code(f"{path}:2 in <module>") == f"{path}:2 in <module>: b = 2"
    for place in (f"{path}:2 in f: c = 3", f"{path}:9 in f", "/nowhere/x.py:1 in f", "an unknown place"):
        assert with_code(place) == place


@pytest.mark.parametrize(("value", "expected"), [("full", True), ("FULL", True), ("", False), ("short", False)])
def test_the_user_can_have_all_frames(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSGD_TRACEBACK", value)
    assert shows_all_frames() == expected
