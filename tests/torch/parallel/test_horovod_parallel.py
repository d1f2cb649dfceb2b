"""What Horovod makes of optimizers, in one process; with several ranks it is in `test_horovod_integration`."""

from __future__ import annotations

import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from raysgd.core.arrays.division import BatchPlan
from raysgd.core.connections.horovod import HorovodConnection, import_horovod
from raysgd.core.engine.shared.types import World
from raysgd.core.state.strict_reading import NotPlainError
from raysgd.exceptions import InvalidRegistrationError
from raysgd.torch import TorchTrainer
from raysgd.torch.driver import arguments
from raysgd.torch.parallel.horovod_parallel import HorovodParallel
from raysgd.torch.parallel.leg import Leg
from raysgd.trainer.worker.step_loop import StepRules
from tests.helpers.fakes import meeting
from tests.torch.operators_for_tests import LinearOperator, equal


@pytest.fixture
def parallel() -> Iterator[HorovodParallel]:
    """In a process in which Horovod runs, alone."""
    connection = HorovodConnection()
    connection.join(meeting(connection.open_endpoint("127.0.0.1")), World(0, 1))
    yield HorovodParallel(world_size=1)
    connection.leave()


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def compute_gradients(model: torch.nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


class Ether:
    """Horovod's broadcast between two ranks that take turns: what rank 0 has sent, rank 1 receives."""

    def __init__(self) -> None:
        self.sent: dict[str, torch.Tensor] = {}
        self.turn = 0

    def rank(self) -> int:
        return self.turn

    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> torch.Tensor:
        if self.turn == root:
            self.sent[name] = tensor.clone()
        assert self.sent[name].shape == tensor.shape
        return self.sent[name]


def test_the_state_of_an_optimizer_arrives_as_numbers_and_is_read_without_pickle(model: torch.nn.Module) -> None:
    ether = Ether()
    parallel = HorovodParallel.__new__(HorovodParallel)  # without Horovod
    parallel._hvd, parallel._pairs = ether, []
    first, second = torch.optim.Adam(model.parameters(), lr=0.3), torch.optim.Adam(model.parameters(), lr=0.1)
    compute_gradients(model)
    first.step()
    parallel._take_state_of_rank_0(first, first)
    ether.turn = 1
    parallel._take_state_of_rank_0(second, second)
    assert equal(second.state_dict(), first.state_dict())
    assert {tensor.dtype for tensor in ether.sent.values()} == {torch.int64, torch.uint8}
    small = copy.deepcopy(first.state_dict())
    small["state"][0]["exp_avg"] = torch.zeros(1)
    refused = [
        ({"evil": Evil(print)}, NotPlainError),
        ({"evil": Evil(DeviceMesh)}, NotPlainError),
        (small, ValueError),
    ]
    for sent, error in refused:
        content = io.BytesIO()
        torch.save(sent, content)
        ether.sent = {
            name: torch.tensor([len(content.getvalue())])
            if name.endswith("size")
            else torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
            for name in ether.sent
        }
        with pytest.raises(error):
            parallel._take_state_of_rank_0(second, second)
    assert equal(second.state_dict(), first.state_dict())


class Evil:
    """An object whose pickle calls a function."""

    def __init__(self, called: Any) -> None:
        self.called = called

    def __reduce__(self) -> Any:
        return self.called, ("cpu", [0])


# ------------------------------------------------------------------------------------------------ wrapping


def test_an_optimizer_becomes_one_of_horovod_for_the_same_parameters(
    parallel: HorovodParallel, model: torch.nn.Module
) -> None:
    plain = torch.optim.Adam(model.parameters(), lr=0.3, betas=(0.5, 0.6))
    wrapped = parallel.wrap_optimizer(plain)
    assert not parallel.sync.averages, "a rank alone has nothing to wait for"
    assert type(wrapped).__name__ == "Adam"
    assert isinstance(wrapped, torch.optim.Adam)
    assert hasattr(wrapped, "skip_synchronize")
    assert wrapped.defaults["lr"] == 0.3
    assert wrapped.param_groups[0]["betas"] == (0.5, 0.6)
    assert [*map(id, wrapped.param_groups[0]["params"])] == [*map(id, model.parameters())]


def test_registering_again_is_the_same_optimizer(parallel: HorovodParallel, model: torch.nn.Module) -> None:
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = parallel.wrap_optimizer(plain)
    assert parallel.wrap_optimizer(plain) is wrapped
    assert parallel.wrap_optimizer(wrapped) is wrapped


def test_parameters_that_are_unfrozen_later_are_refused(parallel: HorovodParallel, model: torch.nn.Module) -> None:
    parallel.sync.averages = True
    model.bias.requires_grad_(False)  # type: ignore[union-attr]
    parallel.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    parallel.rewrap([model])
    model.bias.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"unfrozen .* since `register`, but Horovod averages"):
        parallel.rewrap([model])


@pytest.mark.parametrize("optimizer_cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_state_travels_between_plain_and_wrapped(
    parallel: HorovodParallel, model: torch.nn.Module, optimizer_cls: Any
) -> None:
    options = {"lr": 0.1, "weight_decay": 0.01}
    plain = optimizer_cls(model.parameters(), **options)
    compute_gradients(model)
    plain.step()
    before = copy.deepcopy(plain.state_dict())
    wrapped = parallel.wrap_optimizer(plain)
    assert equal(wrapped.state_dict(), before)
    compute_gradients(model)
    wrapped.step()
    twin = torch.nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    other = optimizer_cls(twin.parameters(), **options)
    other.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    assert equal(other.state_dict(), wrapped.state_dict())
    for each, optimizer in ((model, wrapped), (twin, other)):
        optimizer.zero_grad()
        compute_gradients(each)
        optimizer.step()
    wrapped.load_state_dict(other.state_dict())
    assert equal([model.state_dict(), wrapped.state_dict()], [twin.state_dict(), other.state_dict()])


# ------------------------------------------------------------------------------------------------ using it


def test_old_horovod_code_still_works(parallel: HorovodParallel, model: torch.nn.Module) -> None:
    wrapped = parallel.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped.zero_grad(set_to_none=False)
        compute_gradients(model)
        wrapped.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with wrapped.skip_synchronize():
            wrapped.step()
        compute_gradients(model)
        wrapped.synchronize()
        wrapped.step()
    assert not torch.equal(model.weight, before)


def test_a_closure_is_evaluated(parallel: HorovodParallel, model: torch.nn.Module) -> None:
    wrapped = parallel.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def closure() -> float:
        compute_gradients(model)
        return 5.0

    before = model.bias.item()
    assert wrapped.step(closure) == 5.0
    assert model.bias.item() == pytest.approx(before - 0.2)


def test_hooks_on_the_step_are_called(parallel: HorovodParallel, model: torch.nn.Module) -> None:
    wrapped = parallel.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    called = []
    wrapped.register_step_post_hook(lambda *args: called.append(1))
    compute_gradients(model)
    wrapped.step()
    wrapped.load_state_dict(wrapped.state_dict())
    num_calls = len(called)
    assert num_calls
    wrapped.step()
    assert len(called) == 2 * num_calls, "as often after loading as before"


@pytest.mark.parametrize("loads", [False, True])
def test_a_scheduler_that_holds_the_plain_optimizer_acts_on_the_wrapped_one(
    parallel: HorovodParallel, model: torch.nn.Module, loads: bool
) -> None:
    plain = torch.optim.SGD(model.parameters(), lr=0.8)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        plain,
        [torch.optim.lr_scheduler.ExponentialLR(plain, 0.5), torch.optim.lr_scheduler.ConstantLR(plain, 0.1)],
        milestones=[9],
    )
    wrapped = parallel.wrap_optimizer(plain)
    if loads:
        wrapped.load_state_dict(wrapped.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for expected in (0.4, 0.2):
            compute_gradients(model)
            wrapped.step()
            scheduler.step()
            assert wrapped.param_groups[0]["lr"] == pytest.approx(expected)


def test_a_scheduler_of_the_wrapped_optimizer_works_as_well(parallel: HorovodParallel, model: torch.nn.Module) -> None:
    wrapped = parallel.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.8))
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute_gradients(model)
        wrapped.step()
        scheduler.step()
    assert wrapped.param_groups[0]["lr"] == 0.4


# ------------------------------------------------------------------------------------------------ what cannot work


def test_stepping_the_optimizer_from_before_is_refused(parallel: HorovodParallel, model: torch.nn.Module) -> None:
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel.wrap_optimizer(plain)
    with pytest.raises(
        RuntimeError, match=r"passed to `register`, which returned another optimizer.*Step the returned optimizer"
    ):
        plain.step()


def test_a_parameter_group_cannot_come_later(parallel: HorovodParallel, model: torch.nn.Module) -> None:
    wrapped = parallel.wrap_optimizer(torch.optim.SGD([model.weight], lr=0.1))
    with pytest.raises(RuntimeError, match=r"no group can be added now\. Add it before `register`"):
        wrapped.add_param_group({"params": [model.bias]})


def test_what_is_no_optimizer_of_pytorch_is_refused(parallel: HorovodParallel) -> None:
    class Steps:
        def step(self) -> None: ...

    with pytest.raises(InvalidRegistrationError, match=r"got `Steps`: Horovod needs a `torch.optim.Optimizer`"):
        parallel.wrap_optimizer(Steps())


def test_an_optimizer_that_cannot_be_made_anew_is_refused(parallel: HorovodParallel, model: torch.nn.Module) -> None:
    class Demanding(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr)

    with pytest.raises(InvalidRegistrationError, match=r"creates `Demanding` again .*'lr'.*default values"):
        parallel.wrap_optimizer(Demanding(model.parameters(), 0.1))


def test_a_parameter_of_two_optimizers_is_refused(parallel: HorovodParallel, model: torch.nn.Module) -> None:
    parallel.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidRegistrationError, match="Two optimizers have a parameter in common"):
        parallel.wrap_optimizer(torch.optim.SGD([model.bias], lr=0.1))


# ------------------------------------------------------------------------------------------------ weights


def test_a_gradient_is_weighted_on_its_way_out(parallel: HorovodParallel) -> None:
    gradient = torch.ones(3)
    assert parallel.sync.compress(gradient)[0] is gradient
    assert parallel.sync.decompress(gradient, None) is gradient
    parallel.sync.leg.begin_batch(BatchPlan(weight=0.5))
    assert parallel.sync.compress(gradient)[0].tolist() == [0.5] * 3
    parallel.sync.leg = Leg(StepRules(accumulate=2))
    assert parallel.sync.compress(gradient)[0] is gradient, "its loss was multiplied"
    strided = torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert parallel.sync.compress(strided)[0].is_contiguous(), "Horovod takes no other"


# ------------------------------------------------------------------------------------------------ the trainer


def test_a_trainer_without_ray_can_use_it(make_local: Callable[..., TorchTrainer]) -> None:
    trainer, twin = make_local(backend="horovod"), make_local()
    assert trainer.get_local_operator().optimizer.skip_synchronize is not None
    assert import_horovod().size() == 1
    assert equal([trainer.train(), trainer.validate()], [twin.train(), twin.validate()])
    assert equal(trainer.state_dict(), twin.state_dict())
    trainer.shutdown()
    assert not import_horovod().is_initialized()


def test_an_operator_may_average_by_hand(make_local: Callable[..., TorchTrainer]) -> None:
    class ByHand(LinearOperator):
        def register(self, **parts: Any) -> Any:
            found = super().register(**parts)
            assert found[1] is parts["optimizers"], "it is left alone"
            return found

    trainer = make_local(ByHand, backend="horovod", wrap_ddp=False)
    assert trainer.train()["num_samples"] == 20


# ------------------------------------------------------------------------------------------------ the driver


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("apex", "ddp", False), r'Apex does not work with `backend="horovod"`.*precision="fp16"'),
        (("fp32", "fsdp", False), r'`strategy="fsdp"` does not work with `backend="horovod"`'),
        (("fp32", "ddp", True), r"built for CPUs.*HOROVOD_GPU_OPERATIONS=NCCL python -m raysgd.horovod.install"),
    ],
)
def test_what_horovod_does_not_work_with_is_refused(options: tuple[str, str, bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments.check_horovod(*options)


def test_a_missing_horovod_is_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ImportError, match=r"which is not installed\. Run: python -m raysgd\.horovod\.install"):
        TorchTrainer(training_operator_cls=LinearOperator, backend="horovod", num_workers=2)
