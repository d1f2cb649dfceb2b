"""The number format of a training, and the flag that chooses it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from raysgd.torch import TorchTrainer
from raysgd.torch.objects.precision import (
    PRECISIONS,
    Apex,
    NativeAmp,
    Precision,
    choose_amp_backend,
    choose_precision,
    make_precision,
    saved_state,
    warn_of_short_weights,
)
from tests.torch.apex_double import StrictAmp
from tests.torch.operators_for_tests import LinearOperator

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


@pytest.mark.parametrize("asks", [lambda: make_precision("apex", CPU), lambda: choose_precision(False, "apex")])
def test_apex_that_is_not_installed_says_how_to_install_it(asks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(ImportError, match=r"installs from source.*pip install --no-build-isolation"):
        asks()


@pytest.mark.parametrize(
    ("use_fp16", "precision", "chosen"),
    [
        (False, None, "fp32"),
        (True, None, "legacy"),
        ("apex", None, "apex"),
        *[(False, name, name) for name in PRECISIONS],
        (0, "bf16", "bf16"),
    ],
)
def test_either_flag_chooses(use_fp16: Any, precision: Any, chosen: str, pretended_apex: StrictAmp) -> None:
    assert choose_precision(use_fp16, precision) == chosen
    made = make_precision(use_fp16, CPU, precision)
    kinds = {"fp32": Precision, "apex": Apex}
    assert type(made) is kinds.get(chosen, NativeAmp)
    assert (made.is_mixed, made.flag) == (chosen != "fp32", {"fp32": False, "apex": "apex"}.get(chosen, True))
    assert made.can_defer == (chosen != "apex")


@pytest.mark.parametrize("precision", ["", "FP16", "float16", "16-mixed", True, 16, ["fp16"], torch.float16])
def test_an_unknown_precision_is_refused_with_what_is_allowed(precision: Any) -> None:
    with pytest.raises(ValueError, match=r'`precision=.*allowed are "fp32", "fp16", "bf16", "apex"'):
        choose_precision(False, precision)


@pytest.mark.parametrize("use_fp16", [True, "apex"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "apex"])
def test_two_choices_are_refused(use_fp16: Any, precision: str, pretended_apex: StrictAmp) -> None:
    with pytest.raises(ValueError, match="both choose a format"):
        choose_precision(use_fp16, precision)


# ------------------------------------------------------------------------------------------------ each by itself


@pytest.fixture
def pretended_apex(monkeypatch: pytest.MonkeyPatch) -> StrictAmp:
    module = ModuleType("apex")
    module.amp = StrictAmp()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", module)
    return module.amp  # type: ignore[attr-defined, no-any-return]


def make_fp16() -> Precision:
    precision = NativeAmp(torch.float16, CPU)
    precision.load_state_dict({**precision.state_dict(), "scale": 256.0})  # the first scale overflows on purpose
    return precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_needs_no_arguments_where_it_is_live(dtype: torch.dtype) -> None:
    with NativeAmp(dtype, CPU).namespace.autocast():
        assert torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype == dtype


def test_true_on_a_cpu_is_disabled_but_usable() -> None:
    precision = make_precision(True, CPU)
    assert not precision.scaler.is_enabled()
    with precision.namespace.autocast():
        assert torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype == torch.float32


def test_only_fp16_has_a_scaler_and_a_state() -> None:
    fp16, bf16 = NativeAmp(torch.float16, CPU), NativeAmp(torch.bfloat16, CPU)
    assert fp16.state_key == "amp_native"
    assert fp16.scaler.is_enabled()
    assert (bf16.scaler.is_enabled(), bf16.state_key, bf16.state_dict()) == (False, None, {})


def test_the_state_of_old_files_with_apex_is_found(pretended_apex: StrictAmp) -> None:
    apex = Apex()
    assert saved_state(apex, {"amp": {"loss_scale": 2.0}}) == {"loss_scale": 2.0}
    assert saved_state(apex, {"amp": {"loss_scale": 2.0}, "amp_apex": {"loss_scale": 4.0}}) == {"loss_scale": 4.0}
    assert saved_state(NativeAmp(torch.float16, CPU), {"amp": {"loss_scale": 2.0}}) is None
    assert saved_state(Precision(), {"amp": {}, "amp_apex": {}, "amp_native": {}}) is None


def grads_of(precision: Precision, scale_of: float) -> bool:
    """One step whose gradients overflow when `scale_of` is infinite; whether the precision says that it was skipped."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    [model], [optimizer] = precision.prepare([model], [optimizer], lambda amp, *parts: amp.initialize(*parts))
    before = model.weight.detach().clone()
    precision.backward(model(torch.ones(1, 1)).sum() * scale_of, optimizer)
    precision.step(optimizer)
    skipped = precision.has_skipped()
    assert skipped == torch.equal(model.weight.detach(), before)
    assert not precision.has_skipped(), "it is said once"
    return skipped


def test_a_skipped_step_is_reported_once(pretended_apex: StrictAmp) -> None:
    for make in (make_fp16, Apex):
        assert grads_of(make(), float("inf"))
        assert not grads_of(make(), 1.0)


def test_a_loaded_scale_that_is_lower_is_no_skipped_step(pretended_apex: StrictAmp) -> None:
    native = NativeAmp(torch.float16, CPU)
    native.load_state_dict({**native.state_dict(), "scale": 2.0})
    assert not native.has_skipped()
    apex = Apex()
    apex.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})
    assert not apex.has_skipped()


def test_several_optimizers_step_in_one_scale() -> None:
    """A change of the scale between their steps would leave the gradients of the second in the old one."""
    precision = make_fp16()
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    first, second = optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    precision.prepare(models, optimizers, lambda *_: None)
    precision.load_state_dict({**precision.state_dict(), "growth_interval": 1})  # grows at every update
    before = [model.weight.item() for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        precision.backward(model(torch.ones(1, 1)).sum(), optimizer)
    precision.step(first)
    precision.step(second)
    assert [old - model.weight.item() for old, model in zip(before, models, strict=True)] == pytest.approx([1.0, 1.0])
    assert precision.state_dict()["scale"] == 512.0


def test_a_loaded_state_replaces_a_step_that_only_one_of_two_optimizers_took() -> None:
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    precision = NativeAmp(torch.float16, torch.device("cpu"))
    precision.prepare(models, optimizers, lambda: None)
    saved = precision.state_dict()
    for is_whole in (False, True):
        for model, optimizer in zip(models, optimizers if is_whole else optimizers[:1], strict=False):
            precision.backward(model(torch.ones(1, 1)).sum(), optimizer)
            precision.unscale(optimizer)
            precision.step(optimizer)
        if not is_whole:
            precision.load_state_dict(saved)
            assert precision.state_dict() == saved


def test_an_optimizer_that_steps_alone_is_not_waited_for() -> None:
    precision = make_fp16()
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    often, _ = optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    precision.prepare(models, optimizers, lambda *_: None)
    precision.load_state_dict({**precision.state_dict(), "growth_interval": 1})
    for _ in range(3):
        precision.backward(models[0](torch.ones(1, 1)).sum(), often)
        precision.step(often)
    assert precision.state_dict()["scale"] == 256.0 * 2**3


def test_gradients_may_be_asked_for_in_true_size_twice() -> None:
    precision = make_fp16()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        precision.backward(model(torch.ones(1, 1)).sum(), optimizer)
        precision.unscale(optimizer)
        precision.unscale(optimizer)
        assert model.weight.grad.item() == 1.0
        precision.step(optimizer)


class _Linear(LinearOperator):
    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 1).to(self.config["dtype"]), _ToFloat())

    def prepare_batch(self, batch: Any) -> Any:
        features, numbers, target = batch
        return super().prepare_batch((features.to(self.config["dtype"]), numbers, target))


class _ToFloat(torch.nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.float()


class _OwnWay(torch.optim.SGD):
    """Stands for an optimizer with a copy in fp32."""


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_weights_in_16_bits_are_warned_of_with_the_line_to_write(
    dtype: torch.dtype, share: int, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchTrainer(training_operator_cls=_Linear, config={"dtype": dtype}, use_local=True) as trainer:
        trainer.train()
        [told] = [record.getMessage() for record in caplog.records if "rounds each update" in record.getMessage()]
        assert f"`_Linear` trains 2 parameters in {str(dtype).removeprefix('torch.')} with `SGD`" in told
        assert f"smaller than 1/{share} of its weight" in told
        assert "dtype=torch.float32" in told
        weight = torch.ones(1, dtype=dtype)
        assert weight.sub(0.99 / (2 * share)) == 1 != weight.sub(1.01 / share)


def test_other_weights_and_other_optimizers_are_not(caplog: pytest.LogCaptureFixture) -> None:
    TorchTrainer(training_operator_cls=_Linear, config={"dtype": torch.float32}, use_local=True).shutdown()
    short = torch.nn.Linear(3, 1).bfloat16()
    warn_of_short_weights([_OwnWay(short.parameters(), 0.1)], "Some")
    frozen = torch.nn.Linear(3, 1).bfloat16().requires_grad_(False)
    warn_of_short_weights([torch.optim.SGD(frozen.parameters(), 0.1)], "Some")
    assert "rounds each update" not in caplog.text
