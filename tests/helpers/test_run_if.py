from __future__ import annotations

import pytest
import torch

from tests.helpers.run_if import RunIf, missing_requirements


def test_a_skip_names_all_that_is_missing_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert missing_requirements(cuda=True, min_python=(3, 10), modules=["json.decoder"], programs=["sh"]) == []
    mark = RunIf(min_gpus=2, min_python=(99, 1), modules=["no_such.module", "json.none"], programs=["no-such"])
    gpus, packages = "2 GPU(s) with CUDA, sees 1", "package `no_such.module`, package `json.none`"
    assert mark.args == (True,)
    assert mark.kwargs == {"reason": f"needs Python 99.1 or later, {gpus}, {packages}, program `no-such`"}
