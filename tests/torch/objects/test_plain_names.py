"""Models that were compiled before `register`: files have the names of the model itself, and fit it either way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.torch import TorchTrainer
from raysgd.torch.objects.loading import with_names_of, with_plain_names
from tests.torch.operators_for_tests import LinearOperator, equal

Make = Callable[..., TorchTrainer]
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]


def make_model(compiled: str = "") -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.BatchNorm1d(1))
    if compiled == "part":
        model[1] = torch.compile(model[1], backend="eager")  # type: ignore[assignment]
    return torch.compile(model, backend="eager") if compiled == "whole" else model


class MayBeCompiled(LinearOperator):
    def make_model(self) -> Any:
        return make_model(self.config.get("compiled", ""))


@pytest.mark.parametrize(("before", "after"), [("whole", ""), ("", "whole"), ("part", "whole"), ("part", "part")])
def test_a_file_fits_the_model_compiled_or_not(before: str, after: str, make_local: Make, tmp_path: Path) -> None:
    first = make_local(MayBeCompiled, config={"compiled": before})
    first.train()
    path = first.save(tmp_path / "last.pt")
    [model] = torch.load(path)["models"]
    assert list(model) == NAMES
    second = make_local(MayBeCompiled, config={"compiled": after})
    second.load(path)
    assert second.train() == first.train()
    assert equal(second.state_dict(), first.state_dict())


@pytest.mark.parametrize("compiled", ["", "whole", "part"])
def test_a_state_with_the_names_of_a_compiled_model_fits_too(compiled: str, make_local: Make, tmp_path: Path) -> None:
    trainer = make_local(MayBeCompiled, config={"compiled": compiled})
    state = trainer.state_dict()
    state["models"] = [make_model("whole").state_dict()]
    assert next(iter(state["models"][0])) == "_orig_mod.0.weight"
    trainer.load_state_dict(state)
    assert equal(dict(trainer.state_dict()["models"][0]), dict(with_plain_names(state["models"][0])))
    torch.save(state, tmp_path / "other.pt")
    report = trainer.load(tmp_path / "other.pt", strict=False)
    assert report is not None
    assert report.is_complete
    del state["models"][0]["_orig_mod.1.bias"]
    with pytest.raises(ValueError, match=r"Missing: \['(1._orig_mod.|_orig_mod.1.|1.)bias'\]; unknown: nothing"):
        trainer.load_state_dict(state)


@pytest.mark.parametrize(("compiled", "norm"), [("whole", "_orig_mod.1"), ("part", "1._orig_mod")])
def test_the_versions_of_modules_keep_their_places(compiled: str, norm: str) -> None:
    model = make_model(compiled)
    saved = with_plain_names(model.state_dict())
    assert saved._metadata == make_model().state_dict()._metadata
    assert with_names_of(model, saved)._metadata[norm] == {"version": 2}


def test_other_states_stay_what_they_are() -> None:
    model = make_model()
    state = model.state_dict()
    assert with_plain_names(state) is with_names_of(model, state) is state
    assert with_names_of(model, 7) == 7
    assert with_names_of(model, {7: 0, "_orig_mod.more": 1}) == {7: 0, "more": 1}
