"""What a saved state has for each parameter: what PyTorch's optimizers make is loaded, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from raysgd.torch.objects.loading import check_optimizer, load_optimizer, with_own_options
from tests.torch.objects.optimizers import OPTIONS, classes, model_for, step

Change = Callable[[dict[str, Any]], object]


def trained(kind: type, num_steps: int, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = model_for(kind)
    optimizer = kind(model.parameters(), **options)
    for _ in range(num_steps):
        step(model, optimizer)
    return model, optimizer


def load(optimizer: Any, state: dict[str, Any]) -> None:
    check_optimizer(optimizer, state, [group["params"] for group in optimizer.param_groups])
    load_optimizer(optimizer, with_own_options(optimizer, state))


def changed(optimizer: Any, change: Change) -> dict[str, Any]:
    state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    change(state)
    return state


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_each_optimizer_of_pytorch_goes_on_with_its_own_states(kind: type) -> None:
    for options in OPTIONS.get(kind.__name__, [{}]):
        for num_steps in (0, 1, 3):
            source_model, source = trained(kind, num_steps, **options)
            state = changed(source, lambda state: None)
            for num_own_steps in (0, 2):
                model, optimizer = trained(kind, num_own_steps, **options)
                model.load_state_dict(source_model.state_dict())
                load(optimizer, state)
                step(model, optimizer)
                expected, _ = trained(kind, num_steps + 1, **options)
                assert all(map(torch.equal, model.parameters(), expected.parameters())), options


@pytest.mark.parametrize("foreach", [True, None])
def test_a_number_of_steps_that_a_step_with_foreach_does_not_take_is_refused(foreach: bool | None) -> None:
    _, optimizer = trained(torch.optim.Adam, 2, foreach=foreach)
    with pytest.raises(ValueError, match="cannot load this state and take a step"):
        load(optimizer, changed(optimizer, lambda state: state["state"][1].update(step=torch.tensor(2))))


def test_a_switch_that_is_none_in_a_file_lets_the_next_state_in() -> None:
    _, optimizer = trained(torch.optim.Adam, 1)
    state = changed(optimizer, lambda state: None)
    load(optimizer, changed(optimizer, lambda state: state["param_groups"][0].update(maximize=None)))
    load(optimizer, state)
    assert optimizer.param_groups[0]["maximize"] is False


def test_a_slot_that_no_step_makes_has_numbers_at_least() -> None:
    _, optimizer = trained(torch.optim.Adam, 1)
    with pytest.raises(ValueError, match="has another shape or type"):
        load(optimizer, changed(optimizer, lambda state: state["state"][0].update(other=torch.empty(2, device="meta"))))


@pytest.mark.parametrize("rate", [torch.ones(2), torch.empty((), device="meta")], ids=["of two elements", "meta"])
def test_a_rate_that_is_a_tensor_without_one_number_is_refused(rate: torch.Tensor) -> None:
    _, optimizer = trained(torch.optim.SGD, 1, lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match="nothing was loaded"):
        load(optimizer, changed(optimizer, lambda state: state["param_groups"][0].update(lr=rate)))


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_a_slot_of_another_shape_or_type_is_refused(kind: type) -> None:
    """Each slot, one after the other."""
    for options in OPTIONS.get(kind.__name__, [{}]):
        _, optimizer = trained(kind, 2, **options)
        state = optimizer.state_dict()
        [index, *_] = state["state"] or [None]
        for name, value in state["state"].get(index, {}).items():
            if name == "al":
                continue  # scratch space of LBFGS, which it makes when it needs it
            large = torch.zeros(value.numel() + 1 if isinstance(value, torch.Tensor) else 5)
            for other in (large, torch.zeros(2, 2, device="meta"), large.to_sparse(), "x", torch.zeros(2, 2, 2)):
                slots = {**state["state"], index: {**state["state"][index], name: other}}
                with pytest.raises(ValueError, match="so nothing was loaded"):
                    load(trained(kind, 0, **options)[1], {**state, "state": slots})


ONES = ((0, 1.0), (1, True))
FAULTS: list[tuple[type, dict[str, Any], Change]] = [
    (torch.optim.Adam, {"fused": True}, lambda state: state["state"][0].update(exp_avg=torch.zeros(1))),
    (torch.optim.Adam, {}, lambda state: state["state"][0].update(exp_avg=torch.zeros(4, 5, dtype=torch.int64))),
    (torch.optim.Adam, {}, lambda state: state["state"][0].update(step=torch.tensor(-1.0))),
    (torch.optim.Adam, {}, lambda state: state["state"][0].update(step=torch.zeros(2))),
    (torch.optim.Adamax, {}, lambda state: state["state"][0].update(step=torch.tensor(-2.0))),
    (torch.optim.Adam, {}, lambda state: state["state"][0].update(step=torch.tensor(250, dtype=torch.uint8))),
    (torch.optim.Adam, {}, lambda state: [state["state"][at].update(step=torch.tensor(one)) for at, one in ONES]),
    (torch.optim.Adagrad, {}, lambda state: state["state"].update(x={"y": 1})),
    (torch.optim.Adam, {}, lambda state: state["state"][0].pop("exp_avg_sq")),
    (torch.optim.Adam, {}, lambda state: state["param_groups"][0].update(amsgrad=True)),
    (torch.optim.Adam, {}, lambda state: state["param_groups"][0].update(lr=torch.tensor(1j))),
    (torch.optim.Adam, {}, lambda state: state.pop("state")),
    (torch.optim.Adam, {}, lambda state: state["state"].update({0: 5})),
    (torch.optim.SGD, {"fused": True}, lambda state: state["state"].update({0: {"momentum_buffer": torch.zeros(1)}})),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}, lambda state: state["state"].pop(0)),
    (torch.optim.Muon, {}, lambda state: state["param_groups"][0].update(adjust_lr_fn=5)),
    (torch.optim.Adagrad, {}, lambda state: state["state"].pop(0)),
    (torch.optim.Adafactor, {}, lambda state: state["param_groups"][0].update(eps=("x", 1.0))),
    (torch.optim.LBFGS, {}, lambda state: state["state"][0]["old_dirs"].append(torch.zeros(3))),
    (torch.optim.LBFGS, {}, lambda state: state["state"][0]["old_dirs"].append(3)),
    (torch.optim.LBFGS, {}, lambda state: state["param_groups"][0].update(line_search_fn="x")),
    (torch.optim.LBFGS, {}, lambda state: state["state"][0]["old_dirs"].__setitem__(0, torch.zeros(2))),
    (torch.optim.LBFGS, {}, lambda state: state["state"][0]["old_stps"].__setitem__(0, torch.zeros(2))),
    (torch.optim.LBFGS, {}, lambda state: state["state"][0]["ro"].__setitem__(0, torch.zeros(2))),
    (torch.optim.LBFGS, {}, lambda state: state["state"][0].update(al=[None])),
    (torch.optim.LBFGS, {}, lambda state: state["state"][0].update(al=["x"] * 100)),
    *((torch.optim.LBFGS, {}, lambda state, al=al: state["state"][0].update(al=al)) for al in (3, None)),
]  # fmt: skip


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_a_state_with_which_no_step_can_be_taken_is_refused(fault: int) -> None:
    kind, options, change = FAULTS[fault]
    _, optimizer = trained(kind, 3, **options)
    with pytest.raises(ValueError, match="so nothing was loaded"):
        load(trained(kind, 0, **options)[1], changed(optimizer, change))


TENSORS = (torch.tensor(0.9), torch.tensor(0.99))
HONEST: list[tuple[type, dict[str, Any], Change]] = [
    # of PyTorch 1, which counted steps with a plain number, and kept a buffer without momentum
    (torch.optim.Adam, {}, lambda state: state["state"][0].update(step=3)),
    (torch.optim.SGD, {}, lambda state: state["state"].update({0: {"momentum_buffer": None}})),
    # of a program with other options
    (torch.optim.Adam, {"amsgrad": True}, lambda state: state["param_groups"][0].update(capturable=True)),
    (torch.optim.Adam, {}, lambda state: state["param_groups"][0].update(lr=torch.tensor(0.1))),
    (torch.optim.Adam, {"foreach": True}, lambda state: state["param_groups"][0].update(betas=TENSORS)),
    (torch.optim.SGD, {"momentum": 0.9}, lambda state: state["param_groups"][0].update(momentum=0)),
    (torch.optim.Adam, {}, lambda state: state["param_groups"][0].pop("decoupled_weight_decay")),
    # of a parameter that had no gradient yet
    (torch.optim.AdamW, {}, lambda state: state["state"].pop(1)),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(HONEST)))
def test_a_state_of_another_version_or_with_other_options_is_loaded(case: int) -> None:
    kind, options, change = HONEST[case]
    _, optimizer = trained(kind, 2, **options)
    for own in ({}, options):
        model, other = trained(kind, 0, **own)
        load(other, changed(optimizer, change))
        step(model, other)


def test_a_file_does_not_choose_how_steps_are_computed() -> None:
    _, source = trained(torch.optim.Adam, 1, fused=True)
    _, optimizer = trained(torch.optim.Adam, 0, foreach=True)
    load(optimizer, changed(source, lambda state: state["param_groups"][0].update(lr=torch.tensor(0.5))))
    [group] = optimizer.param_groups
    assert (group["fused"], group["foreach"], group["capturable"], group["lr"]) == (None, True, False, 0.5)


def test_each_element_of_a_slot_gets_its_own_memory() -> None:
    """A fused step would write past the one element."""
    _, source = trained(torch.optim.Adam, 1)
    state = changed(source, lambda state: state["state"][0].update(exp_avg=torch.zeros(1, 1).expand(4, 5)))
    _, optimizer = trained(torch.optim.Adam, 0, fused=True)
    load(optimizer, state)
    slot = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]
    assert slot.untyped_storage().nbytes() == slot.nbytes


class Factored(torch.optim.SGD):
    """Has slots like those of nobody else, and one more hyperparameter."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            slots = self.state[parameter]
            slots.update(
                row=torch.ones(3, 1), names=["a"], history=[torch.ones(len(slots))], scale=torch.ones(()), x=None
            )


def test_slots_of_optimizers_of_the_user_are_loaded_whatever_they_are() -> None:
    _, source = trained(Factored, 2)
    model, optimizer = trained(Factored, 0)
    load(optimizer, changed(source, lambda state: None))
    step(model, optimizer)
    assert optimizer.state_dict()["state"][0]["names"] == ["a"]


class OwnAdam(torch.optim.Adam):
    """A subclass by the user."""


def test_slots_of_fused_optimizers_of_the_user_have_the_shapes_of_the_parameters() -> None:
    _, source = trained(OwnAdam, 2, fused=True)
    load(trained(OwnAdam, 0, fused=True)[1], changed(source, lambda state: None))
    short = changed(source, lambda state: state["state"][0].update(exp_avg=torch.zeros(1)))
    with pytest.raises(ValueError, match="'exp_avg' of a parameter has another shape"):
        load(trained(OwnAdam, 0, fused=True)[1], short)
    load(trained(OwnAdam, 0)[1], short)  # whose step raises an error


def test_no_code_of_the_user_is_run_to_check_a_state() -> None:
    seen = list[Any]()
    _, source = trained(torch.optim.Adam, 1)
    _, optimizer = trained(torch.optim.Adam, 0)
    optimizer.register_step_post_hook(lambda *args: seen.append(args))
    hook = register_optimizer_step_post_hook(lambda *args: seen.append(args))
    try:
        load(optimizer, source.state_dict())
    finally:
        hook.remove()
    assert not seen


def test_complex_parameters_and_those_without_dimensions_keep_their_slots() -> None:
    for dtype, size in ((torch.complex128, (2, 3)), (torch.float64, ()), (torch.bfloat16, (4,)), (torch.complex64, ())):
        parameter = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        source, optimizer = torch.optim.Adam([parameter]), torch.optim.Adam([parameter])
        parameter.grad = torch.ones_like(parameter)
        source.step()
        load(optimizer, changed(source, lambda state: None))
        optimizer.step()
