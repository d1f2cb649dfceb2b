"""Which models are wrapped, and what becomes of wrappers in a new group, or where parameters are frozen.

Covers `raysgd.torch.parallel.strategy`.
"""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.arrays.division import BatchPlan
from raysgd.torch.parallel.strategy import DDP, Strategy
from raysgd.torch.parallel.tensors import unwrap
from tests.torch.wrapping import a_model, gradient, reformed, two_layers

pytestmark = pytest.mark.usefixtures("process_group")


def test_a_model_is_wrapped_with_the_options_of_the_user() -> None:
    model = a_model()
    wrapped = DDP().wrap(model, None, {"find_unused_parameters": True})
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.module is model
    assert wrapped.find_unused_parameters


def test_a_frozen_model_is_not_wrapped() -> None:
    frozen = a_model().requires_grad_(False)
    assert DDP().wrap(frozen, None, {}) is frozen
    empty = torch.nn.Identity()
    assert DDP().wrap(empty, None, {}) is empty


def test_a_single_replica_is_left_as_it_is() -> None:
    parallel, model = Strategy(), a_model()
    parallel.sync.leg.begin_batch(BatchPlan(weight=0.5))
    assert parallel.wrap(model, None, {}) is model
    parallel.attach([model])
    parallel.sync.begin_leg([model], may_run_backward=True)
    assert gradient(parallel, model) == [1.0, 1.0]
    with parallel.evaluating([model]):
        pass
    assert not parallel.sync.averages


def test_wrappers_of_pytorch_are_taken_off_and_a_model_that_holds_a_module_is_not() -> None:
    model = a_model()
    holder = torch.nn.Module()
    holder.module = model
    assert unwrap(DDP().wrap(model, None, {})) is model
    assert unwrap(torch.nn.DataParallel(model)) is model
    assert unwrap(holder) is holder
    assert unwrap(model) is model


def test_in_a_new_group_a_model_is_the_same_object_with_the_same_parameters() -> None:
    parallel, model = DDP(), a_model()
    wrapped = parallel.wrap(model, None, {})
    before = (id(wrapped), wrapped.module, model.weight, model.weight.detach().clone())
    reformed(parallel)
    assert (id(wrapped), wrapped.module, model.weight) == before[:3]
    assert torch.equal(model.weight, before[3])
    assert wrapped.process_group is dist.group.WORLD
    assert gradient(parallel, wrapped) == [1.0, 1.0]


def test_in_a_new_group_the_options_of_the_user_still_hold() -> None:
    parallel = DDP()
    wrapped = parallel.wrap(a_model(), None, {"find_unused_parameters": True, "bucket_cap_mb": 7})
    reformed(parallel)
    assert wrapped.find_unused_parameters
    assert wrapped.bucket_bytes_cap == 7 * 1024 * 1024


@pytest.mark.parametrize("is_training", [True, False])
def test_in_a_new_group_a_model_is_in_the_mode_it_was_in(is_training: bool) -> None:
    parallel = DDP()
    wrapped = parallel.wrap(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout()), None, {})
    wrapped.train(is_training)
    reformed(parallel)
    assert [module.training for module in wrapped.modules()] == [is_training] * 4


def test_in_a_new_group_the_hooks_of_the_user_are_called_once_each() -> None:
    parallel = DDP()
    wrapped = parallel.wrap(a_model(), None, {})
    calls: list[str] = []
    wrapped.register_forward_pre_hook(lambda *_: calls.append("before"))
    handle = wrapped.register_forward_hook(lambda *_: calls.append("after"))
    wrapped.module.register_forward_hook(lambda *_: calls.append("inside"))
    reformed(parallel)
    gradient(parallel, wrapped)
    assert calls == ["before", "inside", "after"]
    handle.remove()
    gradient(parallel, wrapped)
    assert calls[3:] == ["before", "inside"], "a handle from before still removes its hook"


def test_a_group_that_was_left_is_freed_without_a_search_for_garbage() -> None:
    """A process that loads data may be the one that searches; it has none of the group's threads, and would hang."""
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    parallel.attach([model])
    parallel.sync.begin_leg([model], may_run_backward=True)
    gradient(parallel, model)
    left = weakref.ref(dist.group.WORLD)
    gc.collect()
    gc.disable()
    try:
        reformed(parallel)
        gradient(parallel, model)
        deadline = time.monotonic() + 60  # a thread may not be quite done with the last exchange
        while left() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left() is None
    finally:
        gc.enable()


def test_in_a_new_group_gradients_are_weighted_as_before() -> None:
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    parallel.attach([model])
    for _ in range(2):
        reformed(parallel)
        parallel.sync.leg.begin_batch(BatchPlan(weight=0.25))
        assert gradient(parallel, model) == [0.25, 0.25]
        assert model._comm_hooks


def test_what_a_new_group_would_lose_is_an_obstacle() -> None:
    assert "not kept in sync" in str(Strategy().obstacle)
    plain = DDP()
    plain.sync.begin_leg([plain.wrap(a_model(), None, {})], may_run_backward=True)
    assert plain.obstacle is None, "a hook of the library's own is installed again"


def weighted_in(parallel: DDP, model: torch.nn.Module) -> list[bool]:
    """For each parameter whether its gradient went out weighted, as those do that are averaged, and no other."""
    parallel.sync.leg.begin_batch(BatchPlan(weight=0.0))
    for _ in range(2):  # an exchange that is not complete is found out in the next step
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
    return [bool((p.grad == 0).all()) if p.grad is not None else False for p in model.parameters()]


@pytest.mark.parametrize("was_frozen", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("is_frozen", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("is_agreed", [False, True])
def test_after_a_rewrap_what_a_model_trains_is_averaged_also_in_a_new_group(
    was_frozen: tuple[bool, bool], is_frozen: tuple[bool, bool], is_agreed: bool
) -> None:
    parallel, layers = DDP(), two_layers()
    for layer, frozen in zip(layers, was_frozen, strict=True):
        layer.requires_grad_(not frozen)
    model = parallel.wrap(layers, None, {})
    for layer, frozen in zip(layers, is_frozen, strict=True):
        layer.requires_grad_(not frozen)
    parallel.rewrap([model], is_agreed=is_agreed)
    for _ in range(2):
        parallel.attach([model])
        parallel.sync.begin_leg([model], may_run_backward=True)
        assert weighted_in(parallel, model) == [not frozen for frozen in is_frozen]
        parallel.sync.check()
        assert model.module is layers
        reformed(parallel)


def test_a_new_group_wraps_what_was_wrapped_whatever_is_frozen_at_the_moment() -> None:
    """As the discriminator of a GAN is, while the generator trains; its first layer never trains."""
    parallel, layers = DDP(), two_layers()
    layers[0].requires_grad_(False)
    model = parallel.wrap(layers, None, {})
    parallel.attach([model])
    parallel.sync.begin_leg([model], may_run_backward=True)
    layers.requires_grad_(False)
    reformed(parallel)
    assert not any(parameter.requires_grad for parameter in layers.parameters())
    layers[1].requires_grad_(True)
    assert weighted_in(parallel, model) == [False, True]


def test_a_model_may_be_all_frozen_when_it_is_wrapped_again() -> None:
    parallel, layers = DDP(), two_layers()
    model = parallel.wrap(layers, None, {})
    parallel.attach([model])
    parallel.sync.begin_leg([model], may_run_backward=True)
    layers.requires_grad_(False)
    parallel.rewrap([model])
    assert not any(parameter.requires_grad for parameter in layers.parameters())
    layers.requires_grad_(True)
    assert weighted_in(parallel, model) == [True, True]


def test_a_step_that_trains_what_is_not_wrapped_is_an_error() -> None:
    parallel, layers, teacher = DDP(), two_layers(), a_model().requires_grad_(False)
    layers[0].requires_grad_(False)
    models = [parallel.wrap(layers, None, {}), parallel.wrap(teacher, None, {})]
    parallel.attach(models)
    parallel.sync.begin_leg(models, may_run_backward=False)
    parallel.rewrap(models, is_agreed=True)
    parallel.sync.check()
    for part in (layers[0], teacher):
        part.requires_grad_(True)
        with pytest.raises(ValueError, match=r"Call `self.rewrap\(\)` after you unfreeze"):
            parallel.sync.check()
        part.requires_grad_(False)


def test_a_model_that_was_left_unwrapped_must_not_be_trained() -> None:
    parallel, teacher = DDP(), a_model().requires_grad_(False)
    models = [parallel.wrap(two_layers(), None, {}), parallel.wrap(teacher, None, {})]
    parallel.rewrap(models)
    teacher.requires_grad_(True)
    with pytest.raises(ValueError, match=r"without trainable parameters when it was registered \(`Linear`\)"):
        parallel.rewrap(models)
    parallel.rewrap(models[:1])  # it was registered anew, without this one


def test_a_model_that_the_user_wraps_is_none_of_ours() -> None:
    parallel, layers = DDP(), two_layers()
    layers[0].requires_grad_(False)
    model = DistributedDataParallel(layers)
    parallel.attach([model])
    parallel.sync.begin_leg([model], may_run_backward=True)
    reducer = model.reducer
    layers[0].requires_grad_(True)
    parallel.sync.check()
    parallel.rewrap([model])
    assert model.reducer is reducer


def test_in_an_evaluation_no_forward_pass_waits_for_others_and_after_one_that_failed_it_does_again() -> None:
    parallel = DDP()
    model = parallel.wrap(torch.nn.BatchNorm1d(2), None, {})
    assert model.require_forward_param_sync

    def fail() -> None:
        with parallel.evaluating([model, a_model()]):
            assert not model.require_forward_param_sync
            raise KeyError("user code")

    with pytest.raises(KeyError):
        fail()
    assert model.require_forward_param_sync
