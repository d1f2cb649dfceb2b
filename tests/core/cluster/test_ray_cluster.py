"""Connecting to Ray's cluster, and what is asked of its head node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from raysgd.core.cluster import ray_cluster
from raysgd.core.cluster.ray_cluster import init_ray
from tests.helpers.run_if import RunIf


@pytest.mark.parametrize("has_variable", [True, False])
def test_an_address_where_nothing_answers_is_an_error_at_once(
    has_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    if has_variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConnectionError, match=rf"No Ray cluster answers at `{address}`.*RAY_ADDRESS"):
        init_ray(**({} if has_variable else {"address": address}))


@RunIf(modules=["ray._private.authentication"])
@pytest.mark.parametrize(
    ("token", "mode", "taken"), [(True, None, "token"), (True, "disabled", "disabled"), (False, None, "")]
)
def test_a_token_is_used_where_there_is_one_and_no_mode_is_set(
    token: bool, mode: str | None, taken: str, tmp_path: Path
) -> None:
    """As `ray start --head` uses it, so that what runs beside it is let in."""
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").write_text("c0ffee" * 6)
    names = [name for name in os.environ if name.startswith("RAY_AUTH")]
    environment = {name: value for name, value in os.environ.items() if name not in names}
    program = "import os; from raysgd.core.cluster import ray_cluster; ray_cluster._use_token()\n"
    program += "print(os.environ.get('RAY_AUTH_MODE', ''))"
    given = {**environment, "HOME": str(tmp_path), **({} if mode is None else {"RAY_AUTH_MODE": mode})}
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == taken


def test_the_head_of_a_cluster_is_gone_if_nothing_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not ray_cluster._is_gone(address)
    assert ray_cluster._is_gone(address)
    assert not ray_cluster._is_gone("")


def test_a_question_to_a_head_that_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(ray_cluster, "_head_address", lambda: address)
    assert ray_cluster.ask_head(never.wait, None) is None
    assert ray_cluster.ask_head(lambda: "answer", "none") == "answer"
    with pytest.raises(KeyError):
        ray_cluster.ask_head(lambda: {}["unknown"], "none")
