"""The command that installs Horovod, in an environment where it did its work already: the tests need Horovod anyway."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysgd.horovod import install, recipe


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for wheels."""
    monkeypatch.setenv("RAYSGD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.program
def test_what_is_installed_is_left_alone(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"{recipe.VERSION}+{recipe.local_version(install.find_target(), os.environ)}"
    assert install.installed_version() == expected, "run `python -m raysgd.horovod.install`"
    assert install.main([]) == 0
    assert f"is installed already, in {sys.prefix}" in capsys.readouterr().out
    assert not cache.exists()


def test_the_mends_are_applied_in_place(tmp_path: Path) -> None:
    for mend in recipe.MENDS:
        path = tmp_path / mend.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + f"before\n{mend.old}\nafter\n")
    install.mend_all(tmp_path)
    for mend in recipe.MENDS:
        text = (tmp_path / mend.path).read_text()
        assert f"before\n{mend.new}\nafter\n" in text
        assert mend.old not in text


def test_another_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text("project(another)\n")
    with pytest.raises(install.InstallError, match=r"cannot be patched: `CMakeLists.txt` has 0 places"):
        install.mend_all(tmp_path)
    with pytest.raises(install.InstallError, match=r"cannot be patched: .*No such file"):
        install.mend_all(tmp_path / "nowhere")


def test_a_wheel_is_kept_in_one_step(tmp_path: Path) -> None:
    wheel = tmp_path / "horovod-0.whl"
    for content in (b"first", b"second"):
        wheel.write_bytes(content)
        kept = install.keep(wheel, tmp_path / "cache" / "key")
        assert kept.read_bytes() == content
    assert [path.name for path in kept.parent.iterdir()] == ["horovod-0.whl"]


def test_a_step_of_pip_that_fails_leaves_its_log_and_says_where(tmp_path: Path) -> None:
    with pytest.raises(install.InstallError, match=r"Fetching failed; the whole log is (\S+)\. Its end:") as caught:
        install._pip("install", "--no-index", str(tmp_path / "missing.whl"), task="fetching")
    [log] = [Path(word.rstrip(".")) for word in str(caught.value).split() if ".log" in word]
    assert "missing.whl" in log.read_text()
    log.unlink()


def test_a_failure_of_the_command_is_a_message_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_target() -> recipe.Target:
        raise install.InstallError("It needs torch.")

    monkeypatch.setattr(install, "find_target", find_target)
    assert install.main([]) == 1
    assert capsys.readouterr().err == "Horovod was not installed. It needs torch.\n"


def test_what_it_needs_and_is_not_installed_is_named() -> None:
    program = (
        "import importlib.util, sys; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name: None if name in ('torch', 'yaml') else find(name);"
        "from raysgd.horovod.install import main; sys.exit(main([]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert f'It needs torch, pyyaml in {sys.prefix}. Run: pip install "torch>=' in result.stderr


def test_tools_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(install.InstallError, match=r"this machine lacks:\n- a C\+\+ compiler.*\n- `make`.*\n- CMake"):
        install._find_tools()


@pytest.mark.program
def test_a_horovod_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.probe() is None
    monkeypatch.setattr(install, "_PROBE", "raise SystemExit('no such library')")
    assert install.probe() == "no such library"
