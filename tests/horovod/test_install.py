"""The command that installs Horovod, in an environment where it did its work already, and how it builds it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raysgd.horovod import install
from raysgd.horovod.install import MENDS, Mend, Target


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for wheels."""
    monkeypatch.setenv("RAYSGD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.program
def test_what_is_installed_is_left_alone(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"{install.VERSION}+{install.local_version(install.find_target(), os.environ)}"
    assert install.installed_version() == expected, "run `python -m raysgd.horovod.install`"
    assert install.main([]) == 0
    assert f"is installed already, in {sys.prefix}" in capsys.readouterr().out
    assert not cache.exists()


def test_the_mends_are_applied_in_place(tmp_path: Path) -> None:
    for mend in install.MENDS:
        path = tmp_path / mend.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + f"before\n{mend.old}\nafter\n")
    install.mend_all(tmp_path)
    for mend in install.MENDS:
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


def test_a_wheel_that_another_user_could_have_put_there_is_not_installed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = install.Target("cp311", "linux-x86_64", "2.0", False)
    monkeypatch.setattr(install, "find_target", lambda: target)
    wheel = cache / "horovod" / install.cache_key(target, os.environ) / "horovod-0.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"")
    (cache / "horovod").chmod(0o777)
    with pytest.raises(install.InstallError, match=r"not installed: `.*/cache/horovod` is writable for other users"):
        install.install()
    with pytest.raises(install.InstallError, match=r"cannot be kept: `.*/cache/horovod` is writable for other users"):
        install.keep(wheel, cache / "horovod" / "key")


def test_a_step_of_pip_that_fails_leaves_its_log_and_says_where(tmp_path: Path) -> None:
    with pytest.raises(install.InstallError, match=r"Fetching failed; the whole log is (\S+)\. Its end:") as caught:
        install._pip("install", "--no-index", str(tmp_path / "missing.whl"), task="fetching")
    [log] = [Path(word.rstrip(".")) for word in str(caught.value).split() if ".log" in word]
    assert "missing.whl" in log.read_text()
    log.unlink()


def test_a_failure_of_the_command_is_a_message_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_target() -> install.Target:
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


CPU = Target(python="cp311", platform="linux-x86_64", torch="2.13.0+cpu", has_cuda=False)
GPU = replace(CPU, torch="2.13.0+cu130", has_cuda=True)

# ------------------------------------------------------------------------------------------------ the recipe


def test_a_mend_changes_its_place_and_nothing_else() -> None:
    mend = Mend("file", old="two\n", new="2\n", reason="it is shorter")
    assert mend.applied_to("one\ntwo\nthree\n") == "one\n2\nthree\n"


@pytest.mark.parametrize(("text", "num_places"), [("one\n", 0), ("two\ntwo\n", 2)])
def test_a_mend_is_refused_where_the_source_is_not_what_it_was_made_for(text: str, num_places: int) -> None:
    mend = Mend("some/file", old="  two\n", new="2\n", reason="it is shorter")
    with pytest.raises(ValueError, match=rf"`some/file` has {num_places} places that begin with 'two' instead of 1"):
        mend.applied_to(text.replace("two", "  two"))


def test_mends_of_one_file_do_not_meet() -> None:
    for mend in MENDS:
        others = [other for other in MENDS if other is not mend and other.path == mend.path]
        assert not [other for other in others if mend.old in other.old or mend.old in other.new], mend


# ------------------------------------------------------------------------------------------------ options


def test_what_is_built_is_pytorch_with_gloo_and_nothing_else() -> None:
    assert install.options(GPU, {}) == {
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_PYTORCH": "1",
    }


def test_cuda_is_not_looked_for_where_pytorch_has_none() -> None:
    assert install.options(CPU, {}) == {**install.options(GPU, {}), "HOROVOD_WITHOUT_CUDA": "1"}


@pytest.mark.parametrize(
    ("given", "expected", "gone"),
    [
        ({"HOROVOD_GPU_OPERATIONS": "NCCL"}, {"HOROVOD_GPU_OPERATIONS": "NCCL"}, ()),
        ({"HOROVOD_WITH_MPI": "1"}, {"HOROVOD_WITH_MPI": "1"}, ("HOROVOD_WITHOUT_MPI",)),
        ({"HOROVOD_WITHOUT_GLOO": "1"}, {"HOROVOD_WITHOUT_GLOO": "1"}, ("HOROVOD_WITH_GLOO",)),
        ({"HOROVOD_WITH_TENSORFLOW": "1"}, {"HOROVOD_WITH_TENSORFLOW": "1"}, ("HOROVOD_WITHOUT_TENSORFLOW",)),
        ({"HOROVOD_RANK": "3", "HOROVOD_LOG_LEVEL": "debug", "PATH": "/bin"}, {}, ()),
    ],
)
def test_the_environment_has_the_last_word_on_options_of_the_build(
    given: dict[str, str], expected: dict[str, str], gone: tuple[str, ...]
) -> None:
    defaults = {name: value for name, value in install.options(CPU, {}).items() if name not in gone}
    assert install.options(CPU, given) == {**defaults, **expected}


def test_the_build_runs_in_the_users_environment_with_additions() -> None:
    given = {"HOME": "/home/me", "PATH": "/bin", "HOROVOD_WITHOUT_NVTX": "1"}
    environment = install.build_environment(CPU, given, "/opt/cmake", "/env/bin", num_jobs=3)
    assert environment == {
        **install.options(CPU, given),
        "HOME": "/home/me",
        "PATH": "/env/bin:/bin",
        "MAKEFLAGS": "-j3",
        "HOROVOD_CMAKE": "/opt/cmake",
        "HOROVOD_LOCAL_VERSION": install.local_version(CPU, given),
    }


def test_the_number_of_compilers_is_the_users_to_choose() -> None:
    environment = install.build_environment(CPU, {"MAKEFLAGS": "-j1"}, "cmake", "/env/bin", num_jobs=3)
    assert environment["MAKEFLAGS"] == "-j1"


# ------------------------------------------------------------------------------------------------ keeping


@pytest.mark.parametrize(
    ("target", "environment"),
    [
        (replace(CPU, torch="2.12.0+cpu"), {}),
        (replace(CPU, python="cp312"), {}),
        (replace(CPU, platform="linux-aarch64"), {}),
        (GPU, {}),
        (CPU, {"HOROVOD_WITH_MPI": "1"}),
    ],
)
def test_whatever_is_built_differently_is_kept_apart(target: Target, environment: dict[str, str]) -> None:
    assert install.local_version(target, environment) != install.local_version(CPU, {})
    assert install.cache_key(target, environment) != install.cache_key(CPU, {})


def test_another_mend_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    before = install.local_version(CPU, {})
    monkeypatch.setattr(install, "MENDS", MENDS[1:])
    assert install.local_version(CPU, {}) != before


def test_what_has_no_part_in_the_build_has_none_in_the_name() -> None:
    other = {"HOME": "/root", "HOROVOD_RANK": "1", "HOROVOD_LOG_LEVEL": "debug"}
    assert install.cache_key(CPU, other) == install.cache_key(CPU, {})
    assert install.cache_key(CPU, {}).startswith("0.28.1-cp311-linux-x86_64-torch-2.13.0+cpu-raysgd.")


# ------------------------------------------------------------------------------------------------ tools


@pytest.mark.parametrize(
    ("answer", "is_usable"),
    [
        ("cmake version 3.12.4", False),
        ("cmake version 3.13.0", True),
        ("cmake version 3.31.10\n\nCMake suite", True),
        ("cmake version 4.0.2", False),
        ("", False),
    ],
)
def test_a_cmake_is_known_by_its_version(answer: str, is_usable: bool) -> None:
    assert (install.usable_cmake({"/bin/cmake": answer}) is not None) is is_usable


def test_the_first_usable_cmake_is_taken() -> None:
    versions = {"/new": "cmake version 4.1.0", "/env": "cmake version 3.20.1", "/old": "cmake version 3.14.0"}
    assert install.usable_cmake(versions) == "/env"


def test_all_that_is_missing_is_named_at_once_with_what_to_do() -> None:
    missing = install.missing_tools(lambda name: False, {"/usr/bin/cmake": "cmake version 4.1.0\nmore"})
    assert [line.partition(":")[0] for line in missing] == [
        "a C++ compiler with C++20, such as g++ 11",
        "`make`",
        "CMake from 3.13 on, before 4 (/usr/bin/cmake is cmake version 4.1.0)",
    ]
    assert missing[2].endswith('pip install "cmake>=3.13,<4"')


def test_nothing_is_missing_where_all_is_there() -> None:
    assert install.missing_tools({"clang++", "make"}.__contains__, {"cmake": "cmake version 3.25.1"}) == []
    assert "none found" in install.missing_tools({"g++", "make"}.__contains__, {})[0]
