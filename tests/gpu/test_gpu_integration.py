"""What only a GPU can show. Skipped where there is none; run on a machine with one or more before a release."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.core.arrays.division import BatchPlan
from raysgd.core.connections.torch import TorchConnection
from raysgd.core.engine.shared.types import World
from raysgd.testing import kill_worker
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.options import FSDPOptions
from raysgd.torch.parallel.strategy import DDP
from raysgd.torch.resnet import ResNet18
from raysgd.torch.torch_runner import TorchRunner
from raysgd.train import Trainer
from raysgd.train.torch import TorchConfig
from raysgd.trainer.messages.epochs import EpochRequest
from tests.core.connections.ranks import boards_of
from tests.helpers.run_if import RunIf
from tests.torch import operators_for_tests
from tests.torch.operators_for_tests import BatchNormOperator, LinearOperator, OwnModelOperator, equal

pytestmark = [pytest.mark.gpu, pytest.mark.integration, RunIf(cuda=True)]

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 5e-2}


class Plain(LinearOperator):
    """Takes features and target alone, with the stock `prepare_batch`."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        features, _, target = data.tensors
        return DataLoader(TensorDataset(features, target), batch_size=4)

    def prepare_batch(self, batch: Any) -> Any:
        return TrainingOperator.prepare_batch(self, batch)


class Images(TrainingOperator):
    """A small residual network on random images."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = ResNet18({})
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        data = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(10, (256,)))
        self.register_data(train_loader=DataLoader(data, batch_size=64))


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    modules = (operators_for_tests, request.module)
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def make_local() -> Iterator[Callable[..., TorchTrainer]]:
    trainers = []

    def make(operator_cls: type[TrainingOperator] = Plain, **options: Any) -> TorchTrainer:
        trainers.append(TorchTrainer(training_operator_cls=operator_cls, use_local=True, **options))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.shutdown()


# ------------------------------------------------------------------------------------------------ one worker


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_every_format_learns_what_a_cpu_learns(precision: str, make_local: Callable[..., TorchTrainer]) -> None:
    options = {"accumulate_grad_batches": 2, "clip_grad_norm": 10.0}
    on_cpu, on_gpu = make_local(use_gpu=False, **options), make_local(use_gpu=True, precision=precision, **options)
    operator: Any = on_gpu.get_local_operator()
    assert (operator.device.type, operator.use_gpu, operator.device_ids) == ("cuda", True, [operator.device.index])
    if precision == "fp16":
        operator._raysgd.precision.load_state_dict({**operator._raysgd.precision.state_dict(), "scale": 1024.0})
    for _ in range(3):
        expected, found = on_cpu.train(), on_gpu.train()
    tolerance = TOLERANCE[precision]
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=tolerance, abs=tolerance)
    for name, tensor in on_cpu.get_model(to_cpu=True).state_dict().items():
        torch.testing.assert_close(
            on_gpu.get_model(to_cpu=True).state_dict()[name], tensor, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_stock_loop_never_waits_for_the_gpu(precision: str, make_local: Callable[..., TorchTrainer]) -> None:
    """Any wait of the host in a step is an error. (With fp16 the scaler itself has to look at its gradients.)"""

    class Strict(Images):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            torch.cuda.set_sync_debug_mode("error" if self.global_step else "default")
            try:
                return super().train_batch(batch, batch_info)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    make_local(Strict, use_gpu=True, precision=precision, clip_grad_norm=1.0).train()


def test_batches_come_pinned_and_nested_ones_are_copied(make_local: Callable[..., TorchTrainer]) -> None:
    class Nested(Plain):
        def prepare_batch(self, batch: Any) -> Any:
            features, target = batch
            self.was_pinned = features.is_pinned()
            (nested,), target = super().prepare_batch(({"a": [features]}, target))
            return (nested["a"][0],), target

    trainer = make_local(Nested, use_gpu=True)
    trainer.train()
    operator: Any = trainer.get_local_operator()
    assert operator.was_pinned


def test_activation_checkpointing_saves_memory(make_local: Callable[..., TorchTrainer]) -> None:
    class Deep(TrainingOperator):
        def setup(self, config: dict[str, Any]) -> None:
            layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(16)]
            model = torch.nn.Sequential(*layers)
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.01), criterion=torch.nn.MSELoss()
            )
            data = TensorDataset(torch.randn(8192, 512), torch.randn(8192, 512))
            self.register_data(train_loader=DataLoader(data, batch_size=4096))

    peaks = []
    for checkpointing in (False, True):
        trainer = make_local(Deep, use_gpu=True, activation_checkpointing=checkpointing)
        gc.collect()  # what the tests before have left would be freed inside `train`
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.7 * peaks[0]


def test_compiled_models_train_on_a_gpu(make_local: Callable[..., TorchTrainer]) -> None:
    operator_cls = type("PlainOwnModel", (Plain, OwnModelOperator), {})
    plain, compiled = (make_local(operator_cls, use_gpu=True, compile=each) for each in (False, True))
    assert compiled.train()["train_loss"] == pytest.approx(plain.train()["train_loss"], rel=1e-4)


# ------------------------------------------------------------------------------------------------ state


def test_a_state_goes_from_a_gpu_to_a_driver_without_one(ray_cluster: None, tmp_path: Path) -> None:
    with TorchTrainer(training_operator_cls=Plain, use_gpu=True, precision="fp16") as trainer:
        trainer.train()
        state = trainer.state_dict()
        path = trainer.save(tmp_path / "state")
        model = trainer.get_model(to_cpu=True)
    tensors = [*state["models"][0].values(), *model.state_dict().values()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    program = (
        "import sys; from raysgd.torch import TorchTrainer; from tests.gpu.test_gpu_integration import Plain\n"
        "with TorchTrainer(training_operator_cls=Plain, use_gpu=False, use_local=True) as trainer:\n"
        "    trainer.load(sys.argv[1]); trainer.train(); trainer.save(sys.argv[2])\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    back = tmp_path / "back"
    subprocess.run([sys.executable, "-c", program, str(path), str(back)], cwd=ROOT, env=environment, check=True)
    with TorchTrainer(training_operator_cls=Plain, use_gpu=True, use_local=True) as trainer:
        trainer.load(back)
        assert trainer.train()["epoch"] == 3


# ------------------------------------------------------------------------------------------------ groups


@pytest.fixture
def nccl_alone() -> Iterator[None]:
    """A NCCL group of one rank: all that one GPU allows."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl_alone")
def test_gradients_travel_by_nccl() -> None:
    parallel = DDP()
    model = parallel.wrap(torch.nn.Linear(2, 1, bias=False).cuda(), [torch.cuda.current_device()], {})
    parallel.attach([model])
    parallel.sync.begin_leg([model], may_run_backward=True)
    parallel.sync.leg.begin_batch(BatchPlan(1, weight=0.5))
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    assert model.module.weight.grad.tolist() == [[0.5, 0.5]]
    with parallel.evaluating([model]), torch.no_grad():
        model(torch.ones(1, 2, device="cuda"))


@pytest.mark.usefixtures("nccl_alone")
def test_models_are_divided_on_a_gpu() -> None:
    from raysgd.torch.parallel.fsdp import FSDP

    device = torch.device("cuda", torch.cuda.current_device())
    parallel = FSDP(device, 1, FSDPOptions(min_block_parameters=1))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    parallel.wrap(model, None, {})
    parallel.rebind_optimizers([optimizer])
    before = parallel.state_of(model)
    with parallel.evaluating([model]), torch.no_grad():
        model(torch.ones(2, 4, device=device))
    parallel.attach([model])
    parallel.sync.begin_leg([model], may_run_backward=False)
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()
    after = parallel.state_of(model)
    assert not equal(before, after)
    plain = parallel.plain_model(model)
    assert plain is not None
    assert equal(dict(plain.state_dict()), after)


@pytest.mark.parametrize("is_lost", [False, True])
def test_sums_count_once_the_gpu_has_completed_them_and_no_rank_is_lost(is_lost: bool) -> None:
    with boards_of(2) as boards:
        connection, queued = TorchConnection("nccl"), torch.cuda.Event()
        connection._board, connection._parts = boards[0], [boards[0]]
        torch.cuda._sleep(10**9)
        queued.record()
        if is_lost:
            boards[1].interrupt()
        with pytest.raises(dist.DistNetworkError) if is_lost else nullcontext():
            connection.wait_for_collectives()
        assert queued.query()


def place_of(operator: Any) -> tuple[str, int | None, str | None]:
    return str(operator.device), operator.device.index, os.environ.get("CUDA_VISIBLE_DEVICES")


def test_two_workers_share_a_gpu_over_gloo(ray_cluster: None) -> None:
    options = {"use_gpu": True, "num_workers": 2, "num_cpus_per_worker": 0.5, "num_gpus_per_worker": 0.5}
    with TorchTrainer(training_operator_cls=Plain, **options) as trainer:
        assert trainer.backend == "gloo"
        places = trainer.apply_all_operators(place_of)
        found = trainer.train()
        model = trainer.get_model(to_cpu=True)
    assert places[0] == places[1] or torch.cuda.device_count() > 1
    with TorchTrainer(training_operator_cls=Plain, use_gpu=False, num_workers=2, num_cpus_per_worker=0.5) as trainer:
        expected = trainer.train()
        other = trainer.get_model()
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_loss_is_survived_on_gpus(ray_cluster: None) -> None:
    """In fp16, where the scale is part of the state."""
    options = {"use_gpu": True, "num_workers": 2, "num_cpus_per_worker": 0.5, "num_gpus_per_worker": 0.5}
    options |= {"split_batches": True, "precision": "fp16", "min_workers": 1}
    found = []
    for is_killed in (False, True):
        with TorchTrainer(training_operator_cls=Plain, **options) as trainer:
            trainer.train()
            if is_killed:
                kill_worker(trainer, rank=1, at="step:2")
            trainer.train()
            found.append(trainer.state_dict())
            assert [event.kind for event in trainer.status().events if event.is_failure] == ["continued"] * is_killed
    before, after = found
    for name, tensor in before["models"][0].items():
        torch.testing.assert_close(after["models"][0][name], tensor, rtol=5e-3, atol=5e-3)


def place_of_function(config: dict[str, Any]) -> tuple[str, float]:
    """Trains a little; returns where, and the weight."""
    model = train.torch.prepare_model(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.ones_(model.module.weight)
    model(torch.full((1, 1), 1.0 + train.world_rank(), device=train.torch.get_device())).sum().backward()
    return train.torch.get_device().type, model.module.weight.grad.item()


def test_functions_share_a_gpu_over_gloo(ray_cluster: None) -> None:
    trainer = Trainer("torch", num_workers=2, use_gpu=True, resources_per_worker={"CPU": 0.5, "GPU": 0.5})
    trainer.start()
    try:
        assert trainer.run(place_of_function, config={}) == [("cuda", 1.5)] * 2
    finally:
        trainer.shutdown()


def test_two_ranks_of_nccl_on_a_gpu_are_refused_before_the_group_forms(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    hides = {"env_vars": {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}}
    resources = {"CPU": 0.5, "GPU": 0.5}
    trainer = Trainer(TorchConfig("nccl"), 2, True, resources, runtime_env=hides)
    with pytest.raises(ValueError, match=r"rank \d shares GPU 0 with another rank: NCCL runs several ranks"):
        trainer.start()


@RunIf(min_gpus=2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("use_local", [False, True])
def test_workers_side_by_side_have_a_gpu_each_and_see_all(ray_cluster: None, use_local: bool, parallel: str) -> None:
    options = {"use_gpu": True, "num_workers": 2, "use_local": use_local, "strategy": parallel, "precision": "bf16"}
    with TorchTrainer(training_operator_cls=Plain, **options) as trainer:
        assert trainer.backend == "nccl"
        places = trainer.apply_all_operators(place_of)
        trainer.train()
        trainer.validate()
        trainer.get_model(to_cpu=True)
    if not use_local:
        assert places[0][0] != places[1][0], "each sees both and computes on its own"
        assert places[0][2] == places[1][2]


@RunIf(min_gpus=2)
def test_batch_norms_look_at_the_batches_of_all_workers(ray_cluster: None) -> None:
    config = {"num_samples": 19, "batch_size": 4}  # of the last three, one worker gets none
    options = {"use_gpu": True, "num_workers": 2, "sync_batchnorm": True}
    with TorchTrainer(training_operator_cls=BatchNormOperator, config=config, **options) as trainer:
        trainer.train()
        found = trainer.get_model(to_cpu=True).state_dict()
    runner = TorchRunner(TorchSettings(BatchNormOperator, {**config, "batch_size": 8}), World(rank=0, size=1))
    runner.setup()
    runner.train_epoch(EpochRequest(None, {}, False, 0))
    for name, tensor in runner.state()["models"][0].items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
