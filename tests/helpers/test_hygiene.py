"""The check that guards all other tests has to work itself."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from torch import distributed

from raysgd.air import session as of_air
from tests.helpers import hygiene
from tests.helpers.hygiene import Surroundings


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hygiene, "PATIENCE_S", 0.0)


def test_variables_that_were_added_changed_or_removed_are_named_and_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHANGED", "1")
    monkeypatch.setenv("REMOVED", "1")
    before = Surroundings.now()
    os.environ["ADDED"] = "1"
    os.environ["CHANGED"] = "2"
    del os.environ["REMOVED"]
    assert before.leaks() == [f"environment variable {name}" for name in ("ADDED", "CHANGED", "REMOVED")]
    assert (os.environ.get("ADDED"), os.environ["CHANGED"], os.environ["REMOVED"]) == (None, "1", "1")


def test_a_session_that_stays_open_is_named_and_closed() -> None:
    of_air.open_session(cast(Any, object()))
    assert Surroundings.now().leaks() == ["the session of a training function"]
    assert of_air.current_session() is None


def test_a_thread_that_runs_on_is_named() -> None:
    before, done = Surroundings.now(), threading.Event()
    thread = threading.Thread(target=done.wait, name="straggler")
    thread.start()
    [leak] = before.leaks()
    done.set()
    thread.join()
    assert "straggler" in leak
    assert before.leaks() == []


def test_own_files_are_named_and_those_of_others_are_not() -> None:
    before = Surroundings.now()
    ours = Path(tempfile.mkdtemp(prefix="raysgd"))
    others = Path(tempfile.mkdtemp(prefix="other"))
    leaks = before.leaks()
    ours.rmdir()
    others.rmdir()
    assert leaks == [f"file {ours}"]


def test_an_open_process_group_is_named_and_closed(tmp_path: Path) -> None:
    before = Surroundings.now()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert before.leaks() == ["an initialised process group of torch.distributed"]
    assert not distributed.is_initialized()
