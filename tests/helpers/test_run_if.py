from __future__ import annotations

import sys

import pytest
import torch

from tests.helpers.run_if import RunIf, missing_requirements


def test_asking_for_nothing_runs_the_test() -> None:
    assert missing_requirements() == []
    assert RunIf().args == (False,)


def test_an_older_python_than_asked_for_is_named() -> None:
    assert missing_requirements(min_python=(99, 1)) == ["Python 99.1 or later"]
    assert missing_requirements(min_python=sys.version_info[:2]) == []


def test_a_package_that_is_not_installed_is_named() -> None:
    assert missing_requirements(modules=["json", "no_such_package"]) == ["package `no_such_package`"]
    assert missing_requirements(modules=["no_such.module", "json.none"]) == [
        "package `no_such.module`",
        "package `json.none`",
    ]
    assert missing_requirements(modules=["json.decoder"]) == []


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_gpus_are_counted(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert missing_requirements(cuda=True) == ([] if num_gpus else ["1 GPU(s) with CUDA, sees 0"])
    assert missing_requirements(min_gpus=2) == ([] if num_gpus == 2 else [f"2 GPU(s) with CUDA, sees {num_gpus}"])


def test_the_reason_of_a_skip_names_everything_that_is_missing() -> None:
    mark = RunIf(min_python=(99, 1), modules=["no_such_package"])
    assert mark.args == (True,)
    assert mark.kwargs == {"reason": "needs Python 99.1 or later, package `no_such_package`"}
