"""Loading states into memory that is there already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raysgd.torch.objects.loading import check_model, check_precision, load_model, load_optimizer

OPTIMIZERS = [
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
    lambda parameters: torch.optim.Adagrad(parameters),
]


def trained(make_optimizer: Any, num_steps: int, seed: int) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model.parameters())
    for _ in range(num_steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: Any) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = (model(torch.ones(4, 3)) - torch.tensor([1.0, -1.0])).square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in values for tensor in tensors_in(item)]


def test_a_lazy_module_without_shapes_is_refused_by_one_that_has_them() -> None:
    with pytest.raises(ValueError, match=r"shapes: .*any shape"):
        check_model(torch.nn.Linear(3, 2), torch.nn.LazyLinear(2).state_dict())


UNLIKE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda bias: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    lambda bias: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    lambda bias: torch.quantize_per_tensor(bias, 0.1, 0, torch.qint8),
    lambda bias: torch.nested.nested_tensor([bias]),
    lambda bias: bias.as_subclass(Weight),
]


class Weight(torch.Tensor):
    """Runs code of its own when it is copied."""


@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested tensors")
def test_tensors_that_cannot_be_copied_are_refused(unlike: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match="nothing was loaded"):
        check_model(model, {**model.state_dict(), "bias": unlike(model.bias.detach())})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64])
def test_a_model_gets_weights_of_other_dtypes(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(3, 2)
    saved = {name: torch.ones_like(value).to(dtype) for name, value in model.state_dict().items()}
    check_model(model, saved)
    load_model(model, saved)
    assert model.weight.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_own_steps", [0, 2])
def test_an_optimizer_goes_on_as_the_saved_one_did(make_optimizer: Any, num_own_steps: int) -> None:
    source_model, source = trained(make_optimizer, 3, seed=0)
    model, optimizer = trained(make_optimizer, num_own_steps, seed=1)
    saved = copy.deepcopy({"model": source_model.state_dict(), "optimizer": source.state_dict()})
    untouched = copy.deepcopy(saved)
    load_model(model, saved["model"])
    load_optimizer(optimizer, saved["optimizer"])
    for each in ((source_model, source), (model, optimizer)):
        step(*each)
    assert torch.equal(model.weight, source_model.weight)  # type: ignore[arg-type]
    for got, expected in zip(tensors_in(saved), tensors_in(untouched), strict=True):
        assert torch.equal(got, expected)
    kept = {tensor.data_ptr() for tensor in tensors_in(optimizer.state_dict())}
    assert not kept & {tensor.data_ptr() for tensor in tensors_in(saved)}


@pytest.mark.parametrize("own_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("saved_format", [torch.channels_last, torch.contiguous_format])
def test_slots_get_the_memory_format_of_their_parameter(own_format: Any, saved_format: Any) -> None:
    """A fused optimizer takes for granted that they have it."""

    def made(memory_format: Any) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        return model, torch.optim.Adam(model.parameters(), lr=0.1, fused=True)

    def step_of(model: torch.nn.Module, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        model(torch.arange(108.0).view(1, 3, 6, 6)).sin().sum().backward()
        optimizer.step()
        return model.weight.detach().clone()  # type: ignore[operator]

    (source_model, source), (model, optimizer) = made(saved_format), made(own_format)
    step_of(source_model, source)
    load_model(model, source_model.state_dict())
    load_optimizer(optimizer, source.state_dict())
    weight = model.weight
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()  # type: ignore[operator]
    torch.testing.assert_close(step_of(model, optimizer), step_of(source_model, source))


def test_an_optimizer_keeps_the_memory_that_it_has() -> None:
    _, source = trained(OPTIMIZERS[0], 3, seed=0)
    _, optimizer = trained(OPTIMIZERS[0], 2, seed=1)
    before = [tensor.data_ptr() for tensor in tensors_in(optimizer.state_dict()["state"])]
    load_optimizer(optimizer, source.state_dict())
    assert [tensor.data_ptr() for tensor in tensors_in(optimizer.state_dict()["state"])] == before


SCALER = {"scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_growth_tracker", 2**40),
        ("_growth_tracker", float("nan")),
        ("_growth_tracker", -1),
        ("growth_interval", 1.5),
        ("growth_interval", 10**30),
        ("scale", 10**400),
        ("scale", float("inf")),
        ("scale", 1e300),
        ("scale", 0.0),
        ("scale", torch.tensor([[2.0]])),
        ("growth_factor", torch.tensor(2.0)),
        ("growth_factor", True),
    ],
)
def test_a_gradient_scaler_gets_only_numbers_that_it_can_use(name: str, value: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    check_precision(scaler.state_dict(), SCALER)
    with pytest.raises(ValueError, match=f"mixed precision's '{name}'"):
        check_precision(scaler.state_dict(), {**SCALER, name: value})


class Sharing(torch.optim.SGD):
    """Its state holds what it should not be written to by accident."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": self.shared}

    def load_state_dict(self, state_dict: Any) -> None:
        self.shared = state_dict["state"]


def sharing(state: Any) -> Sharing:
    optimizer = Sharing(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.shared = state
    return optimizer


def test_what_is_no_memory_of_the_optimizers_own_is_not_written_to() -> None:
    whole, twice = torch.zeros(4), torch.zeros(2)
    optimizer = sharing({"view": whole[:2], "one": twice, "other": twice, "kind": torch.zeros(2, dtype=torch.int64)})
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.shared["parameter"] = parameter.data
    before = parameter.detach().clone()
    saved = {name: torch.full((2,), float(index)) for index, name in enumerate(("view", "one", "other", "kind"), 1)}
    saved["parameter"] = torch.ones(2, 2)
    load_optimizer(optimizer, {"state": saved, "param_groups": []})
    assert not whole.any()
    assert torch.equal(parameter, before)
    for name, expected in saved.items():
        assert torch.equal(optimizer.shared[name], expected)
        assert optimizer.shared[name] is not expected


def test_what_was_one_tensor_stays_one() -> None:
    optimizer = sharing({"a": torch.zeros(2), "b": torch.zeros(2)})
    one = torch.ones(2)
    load_optimizer(optimizer, {"state": {"a": one, "b": one}, "param_groups": []})
    assert optimizer.shared["a"] is optimizer.shared["b"]
    assert optimizer.shared["a"].tolist() == [1.0, 1.0]


class Remembers(torch.nn.Module):
    """Holds on to the extra state that it is given, tensors included."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.extra: Any = {"seen": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"seen": torch.ones(2)}, torch.ones(2)])
def test_extra_state_of_modules_is_a_copy(extra: Any) -> None:
    model, source = torch.nn.Sequential(Remembers()), torch.nn.Sequential(Remembers())
    source[0].extra = extra
    saved = source.state_dict()
    load_model(model, saved)
    (kept,), (given,) = tensors_in(model[0].extra), tensors_in(extra)
    assert torch.equal(kept, given)
    assert kept.data_ptr() != given.data_ptr()
    assert torch.equal(model[0].linear.weight, source[0].linear.weight)


def test_versions_of_layers_are_told() -> None:
    model = torch.nn.BatchNorm1d(2)
    told = []
    model.register_load_state_dict_pre_hook(lambda module, state, prefix, metadata, *rest: told.append(metadata))
    load_model(model, torch.nn.BatchNorm1d(2).state_dict())
    assert told == [{"version": 2}]
