"""How replicas are kept equal: what is wrapped, what is weighted, and when ranks wait for each other."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from raysgd.backends.torch import end_process_group
from raysgd.torch.exchanges import Exchanges
from raysgd.torch.parallel import COMM_HOOK, DDP, NoParallel, unwrap

pytestmark = pytest.mark.usefixtures("process_group")


def a_model() -> torch.nn.Module:
    return torch.nn.Linear(2, 1, bias=False)


def gradient(parallel: NoParallel, model: torch.nn.Module) -> list[float]:
    """The gradient of one step on inputs of 1, with the loss weighted as the stock loop does."""
    model.zero_grad()
    parallel.weighted(model(torch.ones(1, 2)).sum()).backward()
    return unwrap(model).weight.grad.tolist()[0]  # type: ignore[no-any-return, union-attr]


def test_a_single_replica_is_left_as_it_is() -> None:
    parallel, model = NoParallel(), a_model()
    parallel.step.weight = 0.5
    assert parallel.wrap(model, None, {}) is model
    parallel.arm([model], weight_in_hook=True)
    assert gradient(parallel, model) == [1.0, 1.0]
    with parallel.evaluating([model]):
        pass
    assert not parallel.synchronizes


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


@pytest.mark.parametrize("weight", [1.0, 0.25, 0.0])
def test_the_loss_is_weighted_where_only_the_library_computes_gradients(weight: float) -> None:
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    parallel.arm([model], weight_in_hook=False)
    parallel.step.weight = weight
    assert gradient(parallel, model) == [weight, weight]


def test_a_hook_is_installed_where_it_is_of_use() -> None:
    """All ranks have to do the same, so it may depend on nothing but the model, and on what its operator overrides."""
    parallel = DDP()
    small = parallel.wrap(a_model(), None, {})
    large = parallel.wrap(torch.nn.Linear(600, 600), None, {})
    short = parallel.wrap(a_model().bfloat16(), None, {})
    sparse = parallel.wrap(torch.nn.Embedding(3, 2, sparse=True), None, {})
    models = [small, large, short, sparse]
    parallel.arm(models, weight_in_hook=False)
    assert [bool(model._comm_hooks) for model in models] == [True, False, False, False]
    parallel.arm(models, weight_in_hook=True)
    assert all(model._comm_hooks for model in models)
    assert parallel.obstacle is None


def test_on_one_node_larger_models_are_exchanged_at_once_too_until_the_group_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [True, True, False, True]
    parallel = DDP()
    small, medium = parallel.wrap(a_model(), None, {}), parallel.wrap(torch.nn.Linear(600, 600), None, {})
    in_many_buckets = parallel.wrap(torch.nn.Linear(600, 600), None, {"bucket_cap_mb": 0.1})
    found = []
    for place in places:
        monkeypatch.setattr("raysgd.torch.parallel.is_on_one_node", lambda: place)  # noqa: B023
        if found:
            reformed(parallel)
        else:
            parallel.arm([small, medium, in_many_buckets], weight_in_hook=False)
        found.append([bool(model._comm_hooks) for model in (small, medium, in_many_buckets)])
        assert parallel.obstacle is None
    assert found == [[True, place, False] for place in places]


@pytest.mark.parametrize("weight", [1.0, 0.25, 0.0])
def test_the_gradient_is_weighted_once_where_user_code_may_compute_it(weight: float) -> None:
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    for _ in range(2):
        parallel.arm([model], weight_in_hook=True)
        parallel.step.weight = weight
        assert gradient(parallel, model) == [weight, weight]
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[weight, weight]]


def test_a_hook_of_the_users_own_stays_the_only_one() -> None:
    def doubles(state, bucket):  # type: ignore[no-untyped-def]  # torch takes no postponed annotations
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    model.register_comm_hook(None, doubles)
    parallel.arm([model], weight_in_hook=True)
    assert gradient(parallel, model) == [2.0, 2.0]


def test_an_exchange_with_a_rank_that_is_elsewhere_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        def add_up(self, numbers: object) -> None:
            raise ValueError("not at the same exchange")

    monkeypatch.setattr("raysgd.torch.parallel.exchanges_at_once", Elsewhere)
    parallel = DDP()
    parallel.exchanges = Exchanges(is_broken=lambda: True)
    model = parallel.wrap(a_model(), None, {})
    parallel.arm([model], weight_in_hook=True)
    with pytest.raises(ValueError, match="not at the same exchange"):
        gradient(parallel, model)
    with pytest.raises(dist.DistNetworkError, match="user code went on"):
        parallel.step.check()


def test_a_model_with_a_hook_of_ours_can_be_copied_and_saved(tmp_path: Path) -> None:
    """As users do who keep the best one, or an average of the last; neither copies the other models of the operator."""

    def doubles(state, bucket):  # type: ignore[no-untyped-def]
        return allreduce_hook(dist.group.WORLD, bucket)

    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    hooked = parallel.wrap(a_model(), None, {COMM_HOOK: doubles})
    large = parallel.wrap(torch.nn.Linear(600, 600), None, {})
    parallel.arm([model, hooked, large], weight_in_hook=True)
    for each in (model, hooked):
        torch.save(each, tmp_path / "model.pt")
        assert (tmp_path / "model.pt").stat().st_size < 100_000
        for other in (copy.deepcopy(each), torch.load(tmp_path / "model.pt", weights_only=False)):
            assert torch.equal(other.module.weight, each.module.weight)
            other(torch.ones(1, 2)).sum().backward()
            assert other.module.weight.grad.tolist() == [[1.0, 1.0]]
        assert each.module.weight.grad is None


# ------------------------------------------------------------------------------------------------ a new group


def change_group() -> None:
    end_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def reformed(parallel: DDP) -> None:
    """What happens to models whose group was left and formed anew."""
    change_group()
    parallel.reform()


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
    parallel.arm([model], weight_in_hook=True)
    gradient(parallel, model)
    left = weakref.ref(dist.group.WORLD)
    gc.collect()
    gc.disable()
    try:
        reformed(parallel)
        gradient(parallel, model)
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_armed", [False, True])
def test_in_a_new_group_gradients_are_weighted_as_before(is_armed: bool) -> None:
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    parallel.arm([model], weight_in_hook=is_armed)
    for _ in range(2):
        reformed(parallel)
        parallel.step.weight = 0.25
        assert gradient(parallel, model) == [0.25, 0.25]
        assert model._comm_hooks


def test_in_a_new_group_all_models_learn_and_frozen_ones_are_left_alone() -> None:
    parallel = DDP()
    first, second = (parallel.wrap(a_model(), None, {}) for _ in range(2))
    frozen = parallel.wrap(a_model().requires_grad_(False), None, {})
    reformed(parallel)
    assert [gradient(parallel, model) for model in (first, second)] == [[1.0, 1.0]] * 2
    assert not isinstance(frozen, DistributedDataParallel)


def test_what_a_new_group_would_lose_is_an_obstacle() -> None:
    assert "not kept equal" in str(NoParallel().obstacle)
    plain = DDP()
    plain.arm([plain.wrap(a_model(), None, {})], weight_in_hook=True)
    assert plain.obstacle is None, "a hook of the library's own is installed again"
    grouped = DDP()
    grouped.wrap(a_model(), None, {"process_group": dist.group.WORLD})
    assert grouped.obstacle == "`ddp_args` names a process group of its own"
    hooked = DDP()
    hooked.wrap(a_model(), None, {}).register_comm_hook(None, allreduce_hook)
    assert hooked.obstacle == "a model has a communication hook that was registered by hand"


class _Counting:
    """A hook that is an object."""

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        return allreduce_hook(dist.group.WORLD, bucket)


# ------------------------------------------------------------------------------------------------ frozen and unfrozen


def two_layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))


def weighted_in(parallel: DDP, model: torch.nn.Module) -> list[bool]:
    """For each parameter whether its gradient went out weighted, as those do that are averaged, and no other."""
    parallel.step.weight = 0.0
    for _ in range(2):  # an exchange that is not complete is found out in the next step
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
    return [bool((p.grad == 0).all()) if p.grad is not None else False for p in model.parameters()]


@pytest.mark.parametrize("was_frozen", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("is_frozen", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("has_new_group", [False, True])
def test_what_a_model_trains_is_averaged_whatever_was_frozen_when_it_was_wrapped(
    was_frozen: tuple[bool, bool], is_frozen: tuple[bool, bool], has_new_group: bool
) -> None:
    parallel, layers = DDP(), two_layers()
    for layer, frozen in zip(layers, was_frozen, strict=True):
        layer.requires_grad_(not frozen)
    model = parallel.wrap(layers, None, {})
    parallel.arm([model], weight_in_hook=True)
    parallel.match([model])
    for layer, frozen in zip(layers, is_frozen, strict=True):
        layer.requires_grad_(not frozen)
    if has_new_group:
        reformed(parallel)
    parallel.match([model])
    assert weighted_in(parallel, model) == [not frozen for frozen in is_frozen]
    parallel.step.check()
    assert model.module is layers


def test_a_model_that_is_all_frozen_for_a_while_stays_wrapped_as_it_was() -> None:
    """As the discriminator of a GAN is, while the generator trains."""
    parallel, layers = DDP(), two_layers()
    model = parallel.wrap(layers, None, {})
    parallel.arm([model], weight_in_hook=True)
    layers.requires_grad_(False)
    reducer = model.reducer
    parallel.match([model])
    assert model.reducer is reducer
    reformed(parallel)
    parallel.match([model])
    assert not any(parameter.requires_grad for parameter in layers.parameters())
    layers.requires_grad_(True)
    assert weighted_in(parallel, model) == [True, True]


def test_a_model_that_looks_for_unused_parameters_needs_no_new_wrapper_for_fewer() -> None:
    parallel, layers = DDP(), two_layers()
    model = parallel.wrap(layers, None, {"find_unused_parameters": True})
    reducer = model.reducer
    layers[0].requires_grad_(False)
    parallel.match([model])
    assert model.reducer is reducer


def test_a_parameter_that_is_unfrozen_inside_of_a_pass_is_an_error() -> None:
    parallel, layers = DDP(), two_layers()
    layers[0].requires_grad_(False)
    model = parallel.wrap(layers, None, {})
    parallel.arm([model], weight_in_hook=False)
    parallel.match([model])
    parallel.step.check()
    layers[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"unfrozen .* in the middle of a pass"):
        parallel.step.check()


def test_a_model_that_was_left_unwrapped_must_not_be_trained() -> None:
    parallel, teacher = DDP(), a_model().requires_grad_(False)
    models = [parallel.wrap(two_layers(), None, {}), parallel.wrap(teacher, None, {})]
    parallel.match(models)
    teacher.requires_grad_(True)
    with pytest.raises(ValueError, match=r"had nothing to train when it was registered \(`Linear`\)"):
        parallel.match(models)
    parallel.match(models[:1])  # it was registered anew, without this one


def test_a_model_that_the_user_wraps_is_none_of_ours() -> None:
    parallel, layers = DDP(), two_layers()
    layers[0].requires_grad_(False)
    model = DistributedDataParallel(layers)
    parallel.arm([model], weight_in_hook=True)
    parallel.match([model])
    reducer = model.reducer
    layers[0].requires_grad_(True)
    parallel.step.check()
    parallel.match([model])
    assert model.reducer is reducer


def test_a_hook_with_a_state_does_not_go_on_in_another_wrapper() -> None:
    parallel, layers = DDP(), two_layers()
    model = parallel.wrap(layers, None, {COMM_HOOK: (PowerSGDState(None), powerSGD_hook)})
    parallel.match([model])
    layers[0].requires_grad_(False)
    with pytest.raises(ValueError, match="frozen or unfrozen since `register`, and a communication hook"):
        parallel.match([model])


def test_a_communication_hook_that_remembers_something_is_an_obstacle() -> None:
    """What it remembers is of the rank and of the buckets; a new worker has nothing that fits."""
    remembering: list[object] = [
        (PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook),
        (dist.group.WORLD, allreduce_hook),
        _Counting(),
        (None, _Counting().__call__),
    ]
    for hook in remembering:
        parallel = DDP()
        parallel.wrap(a_model(), None, {COMM_HOOK: hook})
        assert "communication hook in `ddp_args` has a state" in str(parallel.obstacle)
    for hook in (fp16_compress_hook, (None, bf16_compress_hook)):
        parallel = DDP()
        model = parallel.wrap(a_model(), None, {COMM_HOOK: hook})
        assert parallel.obstacle is None
        reformed(parallel)
        assert gradient(parallel, model) == [1.0, 1.0]


def test_in_an_evaluation_no_forward_pass_waits_for_others() -> None:
    parallel = DDP()
    model = parallel.wrap(torch.nn.BatchNorm1d(2), None, {})
    assert model.require_forward_param_sync
    with parallel.evaluating([model, a_model()]):
        assert not model.require_forward_param_sync
    assert model.require_forward_param_sync


def fail_in_evaluation(parallel: NoParallel, model: torch.nn.Module) -> None:
    with parallel.evaluating([model]):
        raise KeyError("user code")


def test_a_failed_evaluation_leaves_the_model_as_it_was() -> None:
    parallel = DDP()
    model = parallel.wrap(torch.nn.BatchNorm1d(2), None, {})
    with pytest.raises(KeyError):
        fail_in_evaluation(parallel, model)
    assert model.require_forward_param_sync


def test_a_wrapper_is_taken_off_and_anything_else_stays() -> None:
    model = a_model()
    holder = torch.nn.Module()
    holder.module = model
    named = torch.nn.Module()
    named.module = "a name"  # type: ignore[assignment]
    assert unwrap(DDP().wrap(model, None, {})) is model
    assert unwrap(holder) is model
    assert unwrap(model) is model
    assert unwrap(named) is named


def test_a_step_without_samples_is_padding() -> None:
    step = NoParallel().step
    assert not step.is_padding, "unknown is not none"
    step.num_samples = 0
    assert step.is_padding


# ------------------------------------------------------------------------------------------------ weights of the user's


def weighed(parallel: NoParallel, model: torch.nn.Module, weight: float, factor: float = 1.0) -> list[float]:
    """The gradient of one step on inputs of 1, of a batch with this weight."""
    model.zero_grad()
    optimizer = object()
    parallel.step.keeps_gradients([optimizer], weight)
    loss = factor * model(torch.ones(1, 2)).sum()
    with parallel.weighting(loss, [optimizer], weight, model.parameters()) as loss:
        loss.backward()
    assert parallel.step.correction(optimizer) == (1.0 if weight else 0.0)
    return unwrap(model).weight.grad.tolist()[0]  # type: ignore[no-any-return, union-attr]


@pytest.mark.parametrize("weight_in_hook", [False, True])
@pytest.mark.parametrize("size", [2, 600])
def test_a_weight_of_the_users_takes_the_place_of_that_of_the_samples(weight_in_hook: bool, size: int) -> None:
    parallel = DDP()
    model = parallel.wrap(a_model() if size == 2 else torch.nn.Linear(2, 200_000, bias=False), None, {})
    parallel.arm([model], weight_in_hook)
    parallel.step.weight = 0.25
    assert weighed(parallel, model, 7.0) == [1.0, 1.0]
    assert gradient(parallel, model) == [0.25, 0.25]


@pytest.mark.parametrize("make", [NoParallel, DDP])
def test_a_batch_that_counts_nothing_has_no_gradient_even_where_its_loss_is_nan(make: type[NoParallel]) -> None:
    parallel = make()
    model = parallel.wrap(a_model(), None, {})
    parallel.arm([model], weight_in_hook=False)
    assert weighed(parallel, model, 0.0, factor=float("nan")) == [0.0, 0.0]
    assert weighed(parallel, model, 2.0) == [1.0, 1.0], "the next one has"


def test_a_model_with_a_process_group_of_its_own_takes_no_weights() -> None:
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {"process_group": dist.new_group([0])})
    parallel.arm([model], weight_in_hook=False)
    with pytest.raises(ValueError, match=r"does not work with `ddp_args=\{\"process_group\": ...\}`: allowed are"):
        weighed(parallel, model, 2.0)
