from __future__ import annotations

import importlib

import pytest

from raysgd.torch import constants


def test_the_names_are_those_of_existing_code() -> None:
    assert (constants.USE_FP16, constants.NUM_STEPS) == ("__use_fp16__", "__num_steps__")
    assert constants.SCHEDULER_STEP == "scheduler_step"
    assert {"batch", "epoch", "manual"} == constants.VALID_SCHEDULER_STEP


@pytest.mark.parametrize(("name", "default"), [("NCCL_TIMEOUT_S", 1800), ("SGD_PLACEMENT_GROUP_TIMEOUT_S", 100)])
def test_limits_come_from_the_environment_or_have_defaults(
    name: str, default: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert getattr(importlib.reload(constants), name) == default
    monkeypatch.setenv(name, "7")
    assert getattr(importlib.reload(constants), name) == 7
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ValueError, match=rf"environment variable `{name}=soon`: need a whole number of seconds"):
        importlib.reload(constants)
    monkeypatch.undo()
    importlib.reload(constants)
