"""How Horovod is built, as far as it can be told without building it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raysgd.horovod import recipe
from raysgd.horovod.recipe import MENDS, Mend, Target

CPU = Target(python="cp311", platform="linux-x86_64", torch="2.13.0+cpu", has_cuda=False)
GPU = replace(CPU, torch="2.13.0+cu130", has_cuda=True)

# ------------------------------------------------------------------------------------------------ mends


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
    assert recipe.options(GPU, {}) == {
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_PYTORCH": "1",
    }


def test_cuda_is_not_looked_for_where_pytorch_has_none() -> None:
    assert recipe.options(CPU, {}) == {**recipe.options(GPU, {}), "HOROVOD_WITHOUT_CUDA": "1"}


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
    defaults = {name: value for name, value in recipe.options(CPU, {}).items() if name not in gone}
    assert recipe.options(CPU, given) == {**defaults, **expected}


def test_the_build_runs_in_the_users_environment_with_additions() -> None:
    given = {"HOME": "/home/me", "PATH": "/bin", "HOROVOD_WITHOUT_NVTX": "1"}
    environment = recipe.build_environment(CPU, given, "/opt/cmake", "/env/bin", num_jobs=3)
    assert environment == {
        **recipe.options(CPU, given),
        "HOME": "/home/me",
        "PATH": "/env/bin:/bin",
        "MAKEFLAGS": "-j3",
        "HOROVOD_CMAKE": "/opt/cmake",
        "HOROVOD_LOCAL_VERSION": recipe.local_version(CPU, given),
    }


def test_the_number_of_compilers_is_the_users_to_choose() -> None:
    environment = recipe.build_environment(CPU, {"MAKEFLAGS": "-j1"}, "cmake", "/env/bin", num_jobs=3)
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
    assert recipe.local_version(target, environment) != recipe.local_version(CPU, {})
    assert recipe.cache_key(target, environment) != recipe.cache_key(CPU, {})


def test_another_mend_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe.local_version(CPU, {})
    monkeypatch.setattr(recipe, "MENDS", MENDS[1:])
    assert recipe.local_version(CPU, {}) != before


def test_what_has_no_part_in_the_build_has_none_in_the_name() -> None:
    other = {"HOME": "/root", "HOROVOD_RANK": "1", "HOROVOD_LOG_LEVEL": "debug"}
    assert recipe.cache_key(CPU, other) == recipe.cache_key(CPU, {})
    assert recipe.cache_key(CPU, {}).startswith("0.28.1-cp311-linux-x86_64-torch-2.13.0+cpu-raysgd.")


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/home/me/.cache/raysgd"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/raysgd"),
        ({"XDG_CACHE_HOME": "", "RAYSGD_CACHE": ""}, "/home/me/.cache/raysgd"),
        ({"XDG_CACHE_HOME": "/cache", "RAYSGD_CACHE": "/own"}, "/own"),
    ],
)
def test_wheels_are_kept_where_users_keep_such_things(environment: dict[str, str], folder: str) -> None:
    assert recipe.cache_folder(environment, "/home/me") == folder


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
    assert (recipe.usable_cmake({"/bin/cmake": answer}) is not None) is is_usable


def test_the_first_usable_cmake_is_taken() -> None:
    versions = {"/new": "cmake version 4.1.0", "/env": "cmake version 3.20.1", "/old": "cmake version 3.14.0"}
    assert recipe.usable_cmake(versions) == "/env"


def test_all_that_is_missing_is_named_at_once_with_what_to_do() -> None:
    missing = recipe.missing_tools(lambda name: False, {"/usr/bin/cmake": "cmake version 4.1.0\nmore"})
    assert [line.partition(":")[0] for line in missing] == [
        "a C++ compiler with C++20, such as g++ 11",
        "`make`",
        "CMake from 3.13 on, before 4 (/usr/bin/cmake is cmake version 4.1.0)",
    ]
    assert missing[2].endswith('pip install "cmake>=3.13,<4"')


def test_nothing_is_missing_where_all_is_there() -> None:
    assert recipe.missing_tools({"clang++", "make"}.__contains__, {"cmake": "cmake version 3.25.1"}) == []
    assert "none found" in recipe.missing_tools({"g++", "make"}.__contains__, {})[0]
