"""Communication hooks: where one is installed, what it weights, and what it remembers.

Covers `raysgd.torch.parallel.sync`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

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

from raysgd.core.arrays.division import BatchPlan
from raysgd.core.connections.group import Group
from raysgd.core.engine.shared.types import World
from raysgd.core.numbers.timing import EXCHANGE, USEFUL
from raysgd.torch.parallel.strategy import DDP
from raysgd.torch.parallel.sync import COMM_HOOK
from raysgd.trainer.worker.ledger import Ledger
from tests.torch.wrapping import a_model, gradient, reformed, two_layers

pytestmark = pytest.mark.usefixtures("process_group")


def test_a_hook_that_was_registered_by_hand_is_refused() -> None:
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match=r"`ddp_args=\{\"comm_hook\": \(state, hook\)\}`"):
        parallel.attach([model])


def wraps_by_hand(model: Any, _: Any, options: Any) -> Any:
    return DistributedDataParallel(model, **options)


@pytest.mark.parametrize(
    ("wraps", "made"),
    [
        (DDP().wrap, lambda: dist.new_group([0])),
        (DDP().wrap, lambda: dist.group.WORLD),
        (wraps_by_hand, dist.new_group),
    ],
)
def test_a_model_with_a_process_group_of_its_own_is_refused(wraps: Any, made: Any) -> None:
    with pytest.raises(
        ValueError, match=r"gradients are averaged over all workers.*`TorchTrainer\(strategy=\"none\"\)`"
    ):
        DDP().attach([wraps(a_model(), None, {"process_group": made()})])


def test_an_exchange_of_the_users_hook_is_timed() -> None:
    parallel = DDP()
    ledger = Ledger()
    model = parallel.wrap(a_model(), None, {"comm_hook": allreduce_hook})
    parallel.attach([model])
    parallel.sync.begin_leg([model], may_run_backward=False, ledger=ledger)
    ledger.enter(USEFUL)
    model(torch.ones(1, 2)).sum().backward()
    assert ledger.of_call().get(EXCHANGE)


def test_an_exchange_with_a_rank_that_is_elsewhere_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        size, waited_s = 2, 0.0

        def is_quick_for(self, num_bytes: int) -> bool:
            return True

        def add_up(self, numbers: object, row: object = None) -> None:
            raise ValueError("not at the same exchange")

        add_up_with = add_up

    monkeypatch.setattr("raysgd.torch.parallel.sync.mesh_group", Elsewhere)
    monkeypatch.setattr("raysgd.torch.parallel.undo.is_group_broken", lambda: True)
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    parallel.attach([model])
    parallel.sync.begin_leg([model], may_run_backward=True)
    with pytest.raises(ValueError, match="not at the same exchange"):
        gradient(parallel, model)
    with pytest.raises(dist.DistNetworkError, match="user code went on"):
        parallel.sync.check()


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 9])
def test_large_buckets_of_many_ranks_go_through_gloo(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    at_once: list[int] = []

    class Many(Group):
        def add_up(self, numbers: Any) -> None:
            at_once.append(numbers.nbytes)

    monkeypatch.setattr("raysgd.torch.parallel.sync.mesh_group", lambda: Many(World(0, num_ranks)))
    parallel, sizes = DDP(), (2**8, 2**11)
    models = [parallel.wrap(torch.nn.Linear(size, size, bias=False), None, {}) for size in sizes]
    parallel.attach(models)
    parallel.sync.begin_leg(models, may_run_backward=False)
    for model, size in zip(models, sizes, strict=True):
        model(torch.ones(1, size)).sum().backward()
    assert at_once == [4 * size**2 for size in sizes if num_ranks <= 8 or size == sizes[0]]
    assert models[1].module.weight.grad.norm() > 0


@pytest.mark.parametrize("hook", [None, allreduce_hook])
def test_gradients_of_padding_do_not_count_even_if_they_are_nan(hook: Any) -> None:
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {} if hook is None else {COMM_HOOK: hook})
    parallel.attach([model])
    parallel.sync.begin_leg([model], may_run_backward=False)
    parallel.sync.leg.begin_batch(BatchPlan(0, 4, 0.0, is_padding=True))
    model(torch.full((1, 2), torch.nan)).sum().backward()
    assert model.module.weight.grad.tolist() == [[0.0, 0.0]]


def test_a_model_with_a_hook_of_ours_can_be_copied_and_saved(tmp_path: Path) -> None:
    """As users do who keep the best one, or an average of the last; neither copies the other models of the operator."""

    def doubles(state, bucket):  # type: ignore[no-untyped-def]
        return allreduce_hook(dist.group.WORLD, bucket)

    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    hooked = parallel.wrap(a_model(), None, {COMM_HOOK: doubles})
    large = parallel.wrap(torch.nn.Linear(600, 600), None, {})
    parallel.attach([model, hooked, large])
    parallel.sync.begin_leg([model, hooked, large], may_run_backward=True)
    for each in (model, hooked):
        torch.save(each, tmp_path / "model.pt")
        assert (tmp_path / "model.pt").stat().st_size < 100_000
        for other in (copy.deepcopy(each), torch.load(tmp_path / "model.pt", weights_only=False)):
            assert torch.equal(other.module.weight, each.module.weight)
            other(torch.ones(1, 2)).sum().backward()
            assert other.module.weight.grad.tolist() == [[1.0, 1.0]]
        assert each.module.weight.grad is None


class _Counting:
    """A hook that is an object."""

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        return allreduce_hook(dist.group.WORLD, bucket)


def test_a_hook_with_a_state_does_not_go_on_in_another_wrapper() -> None:
    parallel, layers = DDP(), two_layers()
    model = parallel.wrap(layers, None, {COMM_HOOK: (PowerSGDState(None), powerSGD_hook)})
    layers[0].requires_grad_(False)
    with pytest.raises(ValueError, match="cannot wrap a model again, because a communication hook"):
        parallel.rewrap([model])


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
