"""The number format of a training, and the flag that chooses it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from raysgd.torch import utils
from raysgd.torch.precision import (
    Apex,
    NativeAmp,
    Precision,
    choose_amp_backend,
    make_precision,
    saved_state,
)

CPU = torch.device("cpu")
THERE, ABSENT = object(), False


# ------------------------------------------------------------------------------------------------ the flag


@pytest.mark.parametrize(
    ("use_fp16", "native", "apex", "chosen"),
    [
        (False, THERE, THERE, False),
        (0, ABSENT, ABSENT, False),
        (True, THERE, ABSENT, True),
        (True, THERE, THERE, True),
        (1, THERE, ABSENT, True),
        (True, ABSENT, THERE, "apex"),
        ("apex", THERE, THERE, "apex"),
        ("apex", ABSENT, THERE, "apex"),
    ],
)
def test_the_flag_chooses_among_what_is_there(use_fp16: Any, native: Any, apex: Any, chosen: Any) -> None:
    assert choose_amp_backend(use_fp16, native, apex) == chosen


@pytest.mark.parametrize(("use_fp16", "native"), [(True, ABSENT), ("apex", THERE), ("apex", ABSENT)])
def test_what_is_asked_for_and_not_there_is_an_import_error(use_fp16: Any, native: Any) -> None:
    with pytest.raises(ImportError, match="apex"):
        choose_amp_backend(use_fp16, native, ABSENT)


@pytest.mark.parametrize("use_fp16", [None, "", "native", "fp16", "bf16", 2, -1, 1.0, [], ["apex"], torch.float16])
def test_any_other_value_is_refused_with_what_is_allowed(use_fp16: Any) -> None:
    with pytest.raises(ValueError, match=r'allowed are `False`, `True` .* `"apex"`'):
        choose_amp_backend(use_fp16)


def test_the_helper_has_its_public_address() -> None:
    assert utils.choose_amp_backend is choose_amp_backend


def test_apex_is_not_here_unless_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(ImportError, match="installs from source"):
        make_precision("apex", CPU)


# ------------------------------------------------------------------------------------------------ every precision


class PretendedAmp:
    """As much of `apex.amp` as the library calls, scaling losses by 8."""

    def __init__(self) -> None:
        self.state = {"loss_scale": 8.0}
        self.initialized_with: dict[str, Any] = {}

    def initialize(self, models: Any, optimizers: Any, **options: Any) -> tuple[Any, Any]:
        self.initialized_with = options
        return models, optimizers

    @contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        yield loss * 8
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(8)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture
def pretended_apex(monkeypatch: pytest.MonkeyPatch) -> PretendedAmp:
    module = ModuleType("apex")
    module.amp = PretendedAmp()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", module)
    return module.amp  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("use_fp16", "kind", "is_mixed"), [(False, Precision, False), (True, NativeAmp, True), ("apex", Apex, True)]
)
def test_the_flag_becomes_an_object(use_fp16: Any, kind: type, is_mixed: bool, pretended_apex: PretendedAmp) -> None:
    precision = make_precision(use_fp16, CPU)
    assert (type(precision), precision.flag, precision.is_mixed) == (kind, use_fp16, is_mixed)


def make_off(pretended_apex: PretendedAmp) -> Precision:
    return Precision()


def make_disabled(pretended_apex: PretendedAmp) -> Precision:
    return make_precision(True, CPU)


def make_fp16(pretended_apex: PretendedAmp) -> Precision:
    precision = NativeAmp(torch.float16, CPU)
    precision.load_state_dict({**precision.state_dict(), "scale": 256.0})  # the first scale overflows on purpose
    return precision


def make_bf16(pretended_apex: PretendedAmp) -> Precision:
    return NativeAmp(torch.bfloat16, CPU)


def make_apex(pretended_apex: PretendedAmp) -> Precision:
    return make_precision("apex", CPU)


@pytest.fixture(params=[make_off, make_disabled, make_fp16, make_bf16, make_apex])
def precision(request: pytest.FixtureRequest, pretended_apex: PretendedAmp) -> Precision:
    return request.param(pretended_apex)  # type: ignore[no-any-return]


def one_step(precision: Precision) -> SimpleNamespace:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    [model], [optimizer] = precision.prepare([model], [optimizer], lambda amp, *parts: amp.initialize(*parts))
    features = torch.linspace(-1, 1, 32).reshape(4, 8)
    with precision.forward():
        output = model(features)
        loss = torch.nn.functional.mse_loss(output, torch.ones(4, 1, dtype=output.dtype))
    precision.backward(loss, optimizer)
    precision.unscale(optimizer)
    gradient = model.weight.grad.clone()
    precision.step(optimizer)
    return SimpleNamespace(output=output, gradient=gradient, weight=model.weight.detach())


def test_a_step_is_that_of_fp32_up_to_the_shorter_format(precision: Precision) -> None:
    expected, found = one_step(Precision()), one_step(precision)
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[found.output.dtype]
    torch.testing.assert_close(found.gradient, expected.gradient, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.weight, expected.weight, atol=tolerance, rtol=tolerance)


def test_the_state_survives_a_round_trip(precision: Precision) -> None:
    one_step(precision)
    state = precision.state_dict()
    assert state == dict(state)
    precision.load_state_dict(state)
    assert precision.state_dict() == state


def test_a_missing_state_is_tolerated(precision: Precision) -> None:
    assert saved_state(precision, {"models": []}) is None


# ------------------------------------------------------------------------------------------------ each by itself


def test_formats_are_what_they_are_called() -> None:
    outputs = {make: one_step(make(PretendedAmp())).output.dtype for make in (make_off, make_fp16, make_bf16)}
    assert outputs == {make_off: torch.float32, make_fp16: torch.float16, make_bf16: torch.bfloat16}


def test_true_on_a_cpu_is_disabled_but_usable() -> None:
    precision = make_precision(True, CPU)
    assert not precision.scaler.is_enabled()
    with precision.namespace.autocast():
        assert torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype == torch.float32


def test_autocast_needs_no_arguments_where_it_is_live() -> None:
    with NativeAmp(torch.bfloat16, CPU).namespace.autocast():
        assert torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype == torch.bfloat16


def test_only_fp16_has_a_scaler_and_a_state() -> None:
    fp16, bf16 = NativeAmp(torch.float16, CPU), NativeAmp(torch.bfloat16, CPU)
    assert fp16.state_key == "amp_native"
    assert fp16.scaler.is_enabled()
    assert (bf16.scaler, bf16.state_key, bf16.state_dict()) == (None, None, {})


def test_a_scaler_goes_on_from_its_saved_state() -> None:
    first = NativeAmp(torch.float16, CPU)
    one_step(first)
    first.scaler.update(new_scale=64.0)
    second = NativeAmp(torch.float16, CPU)
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["scale"] == 64.0


def test_the_state_of_old_files_with_apex_is_found(pretended_apex: PretendedAmp) -> None:
    apex = Apex()
    assert saved_state(apex, {"amp": {"loss_scale": 2.0}}) == {"loss_scale": 2.0}
    assert saved_state(apex, {"amp": {"loss_scale": 2.0}, "amp_apex": {"loss_scale": 4.0}}) == {"loss_scale": 4.0}
    assert saved_state(NativeAmp(torch.float16, CPU), {"amp": {"loss_scale": 2.0}}) is None
    assert saved_state(Precision(), {"amp": {}, "amp_apex": {}, "amp_native": {}}) is None


def test_a_step_that_overflows_is_left_out() -> None:
    precision = NativeAmp(torch.float16, CPU)
    precision.load_state_dict({**precision.state_dict(), "scale": 2.0**40})
    step = one_step(precision)
    torch.manual_seed(0)
    assert torch.equal(step.weight, torch.nn.Linear(8, 1).weight)
    assert precision.state_dict()["scale"] == 2.0**39


def test_plain_fp32_offers_nothing_to_operators() -> None:
    assert (Precision.namespace, Precision.scaler, Precision.state_key) == (None, None, None)
