"""Loading states into memory that is there already."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from raysgd.torch.objects.loading import (
    check_model,
    check_optimizer,
    check_precision,
    check_schedulers,
    load_model,
    load_optimizer,
    with_own_numbers,
    with_own_options,
)

OPTIMIZERS = [
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
    lambda parameters: torch.optim.Adagrad(parameters),
]

LEFT_OUT = "what a file leaves out"


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


# ------------------------------------------------------------------------------------------------ schedulers


class Decay:
    """A learning rate of the user."""

    def __init__(self) -> None:
        self.factor = 0.9

    def __call__(self, epoch: int) -> float:
        return self.curve(epoch)

    def curve(self, epoch: int) -> float:
        return float(self.factor**epoch)

    @property
    def half(self) -> float:
        return self.factor / 2


class Own(schedulers.ReduceLROnPlateau):
    """A scheduler of the user, whose state has more and more names and kinds."""

    best_epoch = None
    stage = "low"

    def advance(self) -> None:
        self.stage, self.best_epoch, self.seen = "high", 3, [0.5]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 3]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 9),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, Decay()),
    "LambdaLR of a function": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, Decay()),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.1, 1.0),
    "CyclicLR of an object": lambda optimizer: schedulers.CyclicLR(optimizer, 0.1, 1.0, scale_fn=Decay()),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, 10),
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer), schedulers.LambdaLR(optimizer, Decay())], [2]
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer), schedulers.LambdaLR(optimizer, Decay())], optimizer
    ),
    "of the user": Own,
}  # fmt: skip


def scheduled(name: str, num_steps: int = 0, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), **{"lr": 0.1, "momentum": 0.9, **options})
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step(*((0.5,) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else ()))
    return optimizer, scheduler


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_scheduler_of_pytorch_goes_on_with_its_own_state(name: str, lr: Any) -> None:
    optimizer, scheduler = scheduled(name, 4, lr=lr)
    for num_steps in (0, 2):
        other_optimizer, other = scheduled(name, num_steps, lr=lr)
        saved = copy.deepcopy(scheduler.state_dict())
        check_schedulers([other], [saved])
        other.load_state_dict(saved)
        other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert other.get_last_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_file_with_numbers_leaves_the_rates_of_a_program_tensors(name: str) -> None:
    optimizer, scheduler = scheduled(name, 2, lr=torch.tensor(0.1))
    own = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    other_optimizer, other = scheduled(name, 4, lr=0.1)
    for state, rates in ((other_optimizer.state_dict(), other.state_dict()), own):
        check_schedulers([scheduler], [rates])
        check_optimizer(optimizer, state, [group["params"] for group in optimizer.param_groups])
        scheduler.load_state_dict(copy.deepcopy(with_own_numbers(scheduler, rates)))
        load_optimizer(optimizer, with_own_options(optimizer, state))
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
        assert scheduler.get_last_lr() == (other.get_last_lr() if rates is not own[1] else own[1]["_last_lr"])
        optimizer.step()
        scheduler.step(*((0.5,) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else ()))
        assert isinstance(scheduler.get_last_lr()[0], torch.Tensor)


@pytest.mark.parametrize("value", [True, torch.tensor(True), 1, torch.tensor(1), torch.tensor([0.5])])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_rate_of_another_form_in_a_file_lets_the_next_state_in(lr: Any, value: Any) -> None:
    optimizer, scheduler = scheduled("ReduceLROnPlateau", 1, lr=lr)
    own = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    changed = copy.deepcopy(own[0])
    changed["param_groups"][0]["lr"] = value
    for state in (changed, own[0]):
        check_schedulers([scheduler], [own[1]])
        check_optimizer(optimizer, state, [group["params"] for group in optimizer.param_groups])
        scheduler.load_state_dict(copy.deepcopy(with_own_numbers(scheduler, own[1])))
        load_optimizer(optimizer, with_own_options(optimizer, state))
        optimizer.step()
        scheduler.step(0.5)
    assert type(scheduler.get_last_lr()[0]) is type(lr)


def test_a_complex_rate_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = torch.tensor(1j)
    with pytest.raises(ValueError, match="'lr' is a `Tensor` instead of a `float`"):
        check_optimizer(optimizer, state, [[parameter]])


@pytest.mark.parametrize("name", ["lr", "initial_lr"])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_rate_that_is_larger_than_any_number_of_a_tensor_is_refused(name: str, lr: Any) -> None:
    optimizer, scheduler = scheduled("StepLR", lr=lr)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][name] = 2**2000
    with pytest.raises(ValueError, match="nothing was loaded"):
        check_optimizer(optimizer, state, [group["params"] for group in optimizer.param_groups])
    with pytest.raises(ValueError, match="nothing was loaded"):
        check_schedulers([scheduler], [{**scheduler.state_dict(), "base_lrs": [2**2000]}])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_state_of_an_earlier_version_of_pytorch_is_accepted(name: str) -> None:
    """What 2.4 saved: without names that are new, and with one that is gone."""

    def former(state: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in state.items() if key not in ("_is_initial", "default_min_lr")}
        inner = {key: [former(each) for each in kept[key]] for key in ("_schedulers",) if key in kept}
        return {**kept, **inner, "verbose": False}

    check_schedulers([scheduled(name)[1]], [former(scheduled(name, 3)[1].state_dict())])


def test_a_scheduler_of_the_user_may_save_new_names_and_kinds() -> None:
    _, scheduler = scheduled("of the user", 2)
    scheduler.advance()
    check_schedulers([scheduled("of the user")[1]], [scheduler.state_dict()])


INNER = ("_schedulers", 1)
FAULTS: list[tuple[str, tuple[Any, ...], Any]] = [
    *(("SequentialLR", (*INNER, name), 5) for name in ("get_lr", "step", "optimizer", "_get_closed_form_lr", "x")),
    *((name, (*INNER, "lr_lambdas"), LEFT_OUT) for name in ("SequentialLR", "ChainedScheduler")),
    *((name, (*INNER, "lr_lambdas", 0, "curve"), 5) for name in ("SequentialLR", "ChainedScheduler")),
    *(("SequentialLR", ("_schedulers",), value) for value in (LEFT_OUT, [], [{}, {}])),
    *(("ChainedScheduler", ("_schedulers",), value) for value in (LEFT_OUT, [], [{}, {}])),
    ("SequentialLR", ("_milestones",), [1, 2]),
    ("SequentialLR", ("_milestones", 0), "x"),
    *(("LambdaLR", ("lr_lambdas", 0, name), 5) for name in ("curve", "half", "__call__", "__class__", 7)),
    ("LambdaLR", ("lr_lambdas", 0, "factor"), "x"),
    ("LambdaLR", ("lr_lambdas",), LEFT_OUT),
    ("LambdaLR", ("lr_lambdas",), [None]),
    ("LambdaLR of a function", ("lr_lambdas", 0), {"__code__": 5}),
    ("CyclicLR of an object", ("_scale_fn_custom", "curve"), 5),
    ("CyclicLR", ("_scale_fn_custom",), {"x": 1}),
    *(("CyclicLR", (name,), value) for name, value in (("mode", "x"), ("scale_mode", "x"), ("use_beta1", True))),
    *((name, ("mode",), value) for name in ("ReduceLROnPlateau", "of the user") for value in ("x", "max", None)),
    ("ReduceLROnPlateau", ("threshold_mode",), "x"),
    ("ReduceLROnPlateau", ("best",), torch.tensor(0.5)),
    ("ReduceLROnPlateau", ("min_lrs",), [0, 0]),
    ("OneCycleLR", ("_anneal_func_type",), "_get_step_lr"),
    ("OneCycleLR", ("_schedule_phases", 0, "start_lr"), "params"),
    ("OneCycleLR", ("_schedule_phases", 0, "end_step"), torch.tensor(2.0)),
    ("OneCycleLR", ("_schedule_phases", 0, "end_lr"), LEFT_OUT),
    ("OneCycleLR", ("_schedule_phases",), []),
    ("OneCycleLR", ("cycle_momentum",), False),
    ("SWALR", ("_anneal_strategy",), "linear"),
    ("MultiStepLR", ("milestones", "x"), 1),
    ("MultiStepLR", ("milestones",), {2: 1}),
    *(("StepLR", (name,), 5) for name in ("get_lr", "step", "optimizer", "state_dict", "_update_lr", "x", 7)),
    *(("StepLR", ("gamma",), value) for value in (None, "x", True, torch.tensor(0.5), [0.5], 1j, LEFT_OUT)),
    ("StepLR", ("base_lrs",), [torch.tensor(0.1)]),
    ("StepLR", ("verbose",), "x"),
    ("of the user", ("advance",), 5),
    ("of the user", ("optimizer",), 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "value"), FAULTS, ids=str)
def test_a_state_of_a_scheduler_changes_nothing_but_numbers(name: str, place: tuple[Any, ...], value: Any) -> None:
    _, scheduler = scheduled(name)
    saved = copy.deepcopy(scheduler.state_dict())
    *path, last = place
    holder: Any = saved
    for step in path:
        holder = holder[step]
    if value is LEFT_OUT:
        del holder[last]
    else:
        holder[last] = value
    with pytest.raises(ValueError, match=re.escape(f"so nothing was loaded: [{str(place[0])!r}]")):
        check_schedulers([scheduler], [saved])


@pytest.mark.parametrize("name", ["initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"])
def test_a_group_without_what_a_scheduler_needs_is_refused(name: str) -> None:
    optimizer, _ = scheduled("OneCycleLR")
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0][name]
    with pytest.raises(ValueError, match=f"because it lacks {name}"):
        check_optimizer(optimizer, state, [group["params"] for group in optimizer.param_groups])


def test_a_name_that_code_of_the_user_adds_to_a_group_may_be_missing() -> None:
    """As in a snapshot from before the step that added it."""
    optimizer, _ = scheduled("StepLR")
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["warm_up"] = 3
    check_optimizer(optimizer, state, [group["params"] for group in optimizer.param_groups])
