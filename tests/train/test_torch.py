"""What a function for several workers uses of PyTorch.

Covers `raysgd.train._torch.loaders`: users reach it through the functions tested here.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from raysgd.core.engine.shared.types import World
from raysgd.torch.objects.precision import NativeAmp, Precision
from raysgd.train import collective
from raysgd.train import torch as helpers
from raysgd.train._torch.loaders import DeviceLoader, divided, over_global_batches
from raysgd.train._torch.prepared import Accelerator, ForwardInContext
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.messages import FunctionSpec
from raysgd.train.session import current_session


def inside(function: Callable[[], Any], rank: int = 0, size: int = 1) -> Any:
    """What a function returns that runs as if a trainer ran it."""
    replica = FunctionReplica(World(rank, size))
    replica.start(FunctionSpec(function, dict, "_timestamp"))
    ended = replica.next()
    return ended.value


def numbers(count: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def seen(loader: Any) -> list[int]:
    return [int(value) for (batch,) in loader for value in batch]


class TestOutsideOfAFunction:
    def test_devices_are_those_of_the_process(self) -> None:
        assert [helpers.get_device()] == helpers.get_devices()
        assert helpers.get_device() == torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu").device

    def test_exchanges_are_those_of_a_single_rank(self) -> None:
        collective.barrier()
        assert collective.broadcast_from_rank_zero({"a": 1}) == {"a": 1}

    def test_a_profiler_is_that_of_rank_0(self, tmp_path: Path) -> None:
        profiler = helpers.TorchWorkerProfiler(str(tmp_path))
        with torch.profiler.profile(on_trace_ready=profiler.trace_handler):
            torch.ones(1)
        [written] = profiler.get_and_clear_profile_traces().values()
        assert written[0][0].startswith("worker_0_")


class TestAccelerate:
    def test_comes_once(self) -> None:
        def function() -> None:
            helpers.accelerate(amp=True)
            helpers.accelerate()

        with pytest.raises(RuntimeError, match="call `accelerate` once"):
            inside(function)
        inside(helpers.accelerate)  # allowed again in the next run

    def test_comes_first(self) -> None:
        def function() -> None:
            helpers.get_device()
            helpers.accelerate()

        with pytest.raises(RuntimeError, match="before all other helpers"):
            inside(function)


def test_a_worker_without_gpus_computes_on_the_cpu() -> None:
    assert inside(helpers.get_device) == torch.device("cpu")


class TestModels:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"wrap_ddp": "fast"}, "`wrap_ddp='fast'`"),
            ({"parallel_strategy": True}, "`parallel_strategy=True`"),
            ({"wrap_ddp": False, "parallel_strategy": "ddp"}, "set the same option"),
            (
                {"parallel_strategy": "fsdp", "parallel_strategy_kwargs": {"cpu_offload": True}},
                "has cpu_offload. .*min_block_parameters",
            ),
        ],
    )
    def test_are_kept_equal_in_one_of_some_ways(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            inside(lambda: helpers.prepare_model(torch.nn.Linear(1, 1), **options))

    @pytest.mark.parametrize("options", [{}, {"wrap_ddp": "fsdp"}, {"parallel_strategy": "fsdp"}, {"wrap_ddp": None}])
    def test_of_a_single_worker_stay_whole(self, options: dict[str, Any]) -> None:
        model = torch.nn.Linear(1, 1)
        assert inside(lambda: helpers.prepare_model(model, **options)) is model
        assert "forward" not in vars(model)

    def test_and_optimizers_take_over_what_was_gathered(self) -> None:
        def function() -> None:
            first, second = (helpers.prepare_model(torch.nn.Linear(2, 1)) for _ in range(2))
            optimizers = [torch.optim.Adam(model.parameters()) for model in (first, second)]
            first(torch.ones(1, 2)).sum().backward()
            optimizers[0].step()
            helpers.load_state(second, helpers.gather_state(first))
            helpers.load_state(optimizers[1], helpers.gather_state(optimizers[0]))
            assert torch.equal(first.weight, second.weight)
            states = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
            assert torch.equal(states[0]["exp_avg"], states[1]["exp_avg"])
            assert states[0]["exp_avg"] is not states[1]["exp_avg"]

        inside(function)


class Picky(torch.nn.Linear):
    """A model that pickles in its own way."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "note": "pickled"}


class TestForwardInAContext:
    def model(self) -> tuple[torch.nn.Module, list[str]]:
        log: list[str] = []

        @contextmanager
        def context() -> Iterator[None]:
            log.append("in")
            yield
            log.append("out")

        model = Picky(2, 1)
        model.forward = ForwardInContext(model, context)  # type: ignore[method-assign]
        return model, log

    @pytest.mark.parametrize("through", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy])
    def test_is_not_taken_along(self, through: Callable[[Any], Any]) -> None:
        model, log = self.model()
        other = through(model)
        assert other.note == "pickled"
        given = torch.randn(3, 2)
        assert torch.equal(other(given), model(given))
        assert log == ["in", "out"]  # of the original alone
        with torch.no_grad():
            model.weight += 1  # type: ignore[operator]
        assert not torch.equal(other(given), model(given))


class TestOptimizers:
    def test_are_optimizers_with_the_state_of_the_other(self) -> None:
        weight = torch.nn.Parameter(torch.ones(1))
        inner = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
        outer = inside(lambda: helpers.prepare_optimizer(inner))
        assert isinstance(outer, torch.optim.Optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(outer, 1, gamma=0.1)
        weight.grad = torch.ones(1)
        outer.step()
        scheduler.step()
        assert float(weight.detach()) == 0.5
        assert inner.param_groups[0]["lr"] == pytest.approx(0.05)
        outer.zero_grad()
        assert weight.grad is None
        weight.grad = torch.ones(1)
        outer.zero_grad(set_to_none=False)
        assert float(weight.grad) == 0
        state = outer.state_dict()
        state["param_groups"][0]["lr"] = 7.0
        outer.load_state_dict(state)
        assert outer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 7.0
        outer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        assert len(inner.param_groups) == len(outer.param_groups) == 2

    def test_pass_a_closure_on(self) -> None:
        weight = torch.nn.Parameter(torch.ones(1))
        outer = inside(lambda: helpers.prepare_optimizer(torch.optim.SGD([weight], lr=0.5)))

        def closure() -> torch.Tensor:
            weight.grad = torch.ones(1)
            return torch.tensor(3.0)

        assert float(outer.step(closure)) == 3.0
        assert float(weight.detach()) == 0.5

    def prepared(self, optimizer: torch.optim.Optimizer, precision: Precision) -> torch.optim.Optimizer:
        def function() -> torch.optim.Optimizer:
            session = current_session()
            session.accelerator = Accelerator(precision, torch.device("cpu"))
            return helpers.prepare_optimizer(optimizer)

        made: torch.optim.Optimizer = inside(function)
        return made

    def test_take_no_closure_where_gradients_are_scaled(self) -> None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        prepared = self.prepared(optimizer, NativeAmp(torch.float16, torch.device("cpu")))
        with pytest.raises(ValueError, match="`closure`"):
            prepared.step(lambda: 1.0)

    @pytest.mark.parametrize("attached", ["before", "after", "to the original", "never", "never, and prepared twice"])
    def test_step_by_their_true_gradients_whenever_a_scheduler_was_attached(self, attached: str) -> None:
        weight = torch.nn.Parameter(torch.ones(1))
        precision = NativeAmp(torch.float16, torch.device("cpu"))
        original = torch.optim.SGD([weight], lr=0.2)
        if attached == "before":
            torch.optim.lr_scheduler.StepLR(original, 1, gamma=0.5)
        prepared = self.prepared(original, precision)
        if attached == "never, and prepared twice":
            prepared = self.prepared(prepared, precision)
        if attached in ("after", "to the original"):
            torch.optim.lr_scheduler.StepLR(prepared if attached == "after" else original, 1, gamma=0.5)
        for expected in (0.8, 0.6):
            precision.backward(weight.sum(), None)
            (original if attached == "to the original" else prepared).step()
            prepared.zero_grad()
            assert float(weight.detach()) == pytest.approx(expected)

    def test_leave_out_a_step_whose_gradients_have_overflowed(self) -> None:
        weight = torch.nn.Parameter(torch.ones(1))
        precision = NativeAmp(torch.float16, torch.device("cpu"))
        optimizer = self.prepared(torch.optim.SGD([weight], lr=0.2), precision)
        precision.backward(weight.sum() * float("inf"), None)
        optimizer.step()
        assert float(weight.detach()) == 1.0
        assert precision.has_skipped()


class TestLoaders:
    def prepared(self, loader: Any, rank: int = 0, size: int = 2, **options: Any) -> Any:
        return inside(lambda: helpers.prepare_data_loader(loader, **options), rank, size)

    def test_divide_the_samples(self) -> None:
        loader = DataLoader(numbers(), batch_size=2)
        parts = [seen(self.prepared(loader, rank)) for rank in range(2)]
        assert parts == [[0, 2, 4, 6], [1, 3, 5, 7]]

    def test_over_a_batch_sampler_hand_out_batches_of_the_part(self) -> None:
        data = numbers(9)
        loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, drop_last=True))
        parts = [self.prepared(loader, rank) for rank in range(2)]
        assert [[len(batch) for (batch,) in part] for part in parts] == [[2, 2], [2, 2]]
        for part in parts:
            part.sampler.set_epoch(3)
        other = [self.prepared(loader, rank) for rank in range(2)]
        assert sorted(seen(parts[0])) != sorted(seen(other[0]))

    def test_over_a_batch_sampler_that_cannot_be_divided_are_refused_with_advice(self) -> None:
        class ByLength(BatchSampler):
            pass

        loader = DataLoader(numbers(), batch_sampler=ByLength(RandomSampler(numbers()), 2, drop_last=False))
        with pytest.raises(ValueError, match=r"`batch_sampler=ByLength\(...\)`.*add_dist_sampler=False"):
            self.prepared(loader)
        assert sorted(seen(self.prepared(loader, add_dist_sampler=False))) == list(range(8))
        assert sorted(seen(self.prepared(loader, size=1))) == list(range(8))

    def test_keep_their_options(self) -> None:
        class Loader(DataLoader[Any]):
            """A loader of the user's own."""

        processes: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3}
        batches: dict[str, Any] = {"batch_size": 2, "drop_last": True, "collate_fn": list}
        given = Loader(numbers(9), multiprocessing_context="spawn", in_order=False, **processes, **batches)
        loader = self.prepared(given, move_to_device=False)
        for name in (*processes, *batches, "dataset", "multiprocessing_context", "in_order", "pin_memory_device"):
            assert getattr(loader, name) == getattr(given, name)
        assert type(loader) is Loader
        assert (len(given), len(loader)) == (4, 2)  # the original is untouched

    @pytest.mark.parametrize(("exact", "total"), [(False, 12), (True, 10)])
    def test_repeat_samples_to_be_even_unless_they_are_to_be_exact(self, exact: bool, total: int) -> None:
        loaders = [self.prepared(DataLoader(numbers(10), shuffle=True), rank, 3, exact=exact) for rank in range(3)]
        passes = []
        for epoch in range(2):
            for loader in loaders:
                loader.sampler.set_epoch(epoch)
            parts = [seen(loader) for loader in loaders]
            assert [len(part) for part in parts] == [len(loader) for loader in loaders]
            assert sum(map(len, parts)) == total
            assert sorted(set().union(*parts)) == list(range(10))
            assert parts[0] != sorted(parts[0])
            passes.append(parts)
        assert passes[0] != passes[1]

    def test_with_more_workers_than_samples_may_be_empty_if_they_are_to_be_exact(self) -> None:
        assert [seen(self.prepared(DataLoader(numbers(2)), rank, 3, exact=True)) for rank in range(3)] == [[0], [1], []]

    @pytest.mark.parametrize("options", [{"shuffle": True}, {}, {"sampler": [1, 0]}], ids=str)
    def test_of_a_run_that_shrank_to_one_worker_take_the_same_calls(self, options: dict[str, Any]) -> None:
        loader = self.prepared(DataLoader(numbers(2), **options), size=1)
        if "sampler" not in options:
            loader.sampler.set_epoch(1)
        assert sorted(seen(loader)) == [0, 1]

    def test_over_iterable_data_or_divided_already_are_left_alone(self) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return iter(range(3))

        stream = DataLoader(Stream(), batch_size=None)
        assert self.prepared(stream, move_to_device=False) is stream
        own = torch.utils.data.DistributedSampler(numbers(), num_replicas=4, rank=3, shuffle=False)
        assert seen(self.prepared(DataLoader(numbers(), sampler=own))) == [3, 7]

        class Third(SequentialSampler):
            """A sampler that divides the data, known by its names alone."""

            num_replicas, rank = 3, 1

            def __iter__(self) -> Iterator[int]:
                return iter(range(self.rank, 8, self.num_replicas))

        assert seen(self.prepared(DataLoader(numbers(), sampler=Third(numbers())))) == [1, 4, 7]

    @pytest.mark.parametrize(
        "sampler",
        [
            lambda data: SubsetRandomSampler(range(80)),
            lambda data: SubsetRandomSampler(range(80), generator=torch.Generator()),
            lambda data: RandomSampler(data, num_samples=20),
            lambda data: RandomSampler(data, replacement=True),
            lambda data: WeightedRandomSampler([1.0] * 80 + [0.0] * 20, 50),
            lambda data: RandomSampler(range(80)),
            lambda data: SequentialSampler(range(80)),
            lambda data: list(range(80)),
        ],
        ids=["subset", "generator", "fewer", "replacement", "weighted", "random-part", "part", "list"],
    )
    @pytest.mark.parametrize("exact", [False, True])
    def test_divide_what_a_sampler_draws(self, sampler: Any, exact: bool) -> None:
        data = numbers(100)
        loaders = []
        for rank in range(3):
            torch.manual_seed(rank)
            loaders.append(self.prepared(DataLoader(data, sampler=sampler(data)), rank, 3, exact=exact))
        given = sampler(data)
        passes = []
        for epoch in (0, 1, 0):
            for loader in loaders:
                loader.sampler.set_epoch(epoch)
            before = torch.get_rng_state()
            parts = [[int(index) for index in loader.sampler] for loader in loaders]
            assert torch.equal(torch.get_rng_state(), before)
            assert [len(part) for part in parts] == [len(loader) for loader in loaders]
            passes.append([row for rows in zip_longest(*parts) for row in rows if row is not None])
        assert passes[0] == passes[2]
        is_ordered = isinstance(given, SequentialSampler | list)
        assert (passes[0] == passes[1]) is is_ordered
        drawn = passes[0][: len(given)]
        assert passes[0][len(given) :] == ([] if exact else drawn[: -len(given) % 3])
        if isinstance(given, RandomSampler) and (given.replacement or len(given) == 20):
            assert (len(set(drawn)) < len(drawn)) is given.replacement
        elif isinstance(given, WeightedRandomSampler):
            assert max(drawn) < 80
        else:
            assert sorted(drawn) == list(range(80))

    def test_tell_a_sampler_the_epoch_and_follow_how_much_it_draws(self) -> None:
        class Shrinking(Sampler[int]):
            """A sampler that draws less with each epoch."""

            epoch = 0

            def __len__(self) -> int:
                return 10

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __iter__(self) -> Iterator[int]:
                return iter(range(10 - self.epoch))

        loaders = [self.prepared(DataLoader(numbers(10), sampler=Shrinking()), rank) for rank in range(2)]
        for loader in loaders:
            loader.sampler.set_epoch(5)
        assert [seen(loader) for loader in loaders] == [[0, 2, 4], [1, 3, 0]]

    def test_refuse_a_sampler_without_a_length(self) -> None:
        class Endless(Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                return count()

        with pytest.raises(ValueError, match=r"`sampler=Endless\(...\)`.*no `__len__`.*add_dist_sampler=False"):
            self.prepared(DataLoader(numbers(), sampler=Endless()))

    def test_say_when_a_sampler_is_replaced(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        self.prepared(DataLoader(numbers(), sampler=RandomSampler(numbers())))
        assert caplog.text == ""
        loader = DataLoader(numbers(), sampler=WeightedRandomSampler([1.0] * 8, 8))
        self.prepared(loader)
        assert "WeightedRandomSampler was replaced" in caplog.text

    def test_keep_the_form_of_a_batch(self) -> None:
        samples = [{"x": torch.tensor(1), "name": "a", "pair": (torch.tensor(2), [torch.tensor(3)])}]
        [batch] = self.prepared(DataLoader(samples), size=1)  # type: ignore[arg-type]
        assert batch["name"] == ["a"]
        assert batch["x"].tolist() == [1]
        assert batch["pair"][1][0].tolist() == [3]


class TestReproducibility:
    @pytest.fixture(autouse=True)
    def forget(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
        benchmark = torch.backends.cudnn.benchmark
        state = torch.get_rng_state()
        yield
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_rng_state(state)

    def test_two_runs_with_one_seed_do_the_same(self) -> None:
        def function(seed: int) -> list[float]:
            helpers.enable_reproducibility(seed)
            model = helpers.prepare_model(torch.nn.Linear(1, 1))
            loader = DataLoader(numbers(8), shuffle=True)
            loader = helpers.prepare_data_loader(loader)
            return [float(model(x.float())) for (x,) in loader]

        first, again, other = (inside(lambda seed=seed: function(seed)) for seed in (3, 3, 4))
        assert first == again != other
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

    def test_a_function_that_is_called_by_itself_does_what_one_worker_does(self) -> None:
        def function() -> list[float]:
            helpers.accelerate()
            helpers.enable_reproducibility(seed=3)
            model = helpers.prepare_model(torch.nn.Linear(1, 1))
            optimizer = helpers.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
            helpers.prepare_state(optimizer)
            for batch in helpers.prepare_data_loader(DataLoader(numbers(), batch_size=4, shuffle=True)):
                loss = model(batch[0].float().unsqueeze(1)).square().mean()
                optimizer.zero_grad()
                helpers.backward(loss)
                optimizer.step()
            helpers.load_state(model, helpers.gather_state(model))
            return [each.item() for each in model.parameters()]

        alone = function()
        assert function() == alone == inside(function), "also a second time in this process"

    def test_processes_of_a_loader_are_seeded_and_then_do_what_they_had_to(self) -> None:
        import random

        import numpy as np

        from raysgd.train._torch.loaders import _seed_process

        called: list[int] = []
        before = random.getstate(), np.random.get_state()
        try:
            torch.manual_seed(5)
            _seed_process(called.append, 3)
            first = random.random(), np.random.rand()
            _seed_process(None, 3)
            assert (random.random(), np.random.rand()) == first
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
        assert called == [3]

    def test_processes_of_loaders_draw_other_numbers_on_each_rank(self) -> None:
        def drawn(rank: int, seed: int | None) -> str:
            loader = DataLoader(Draws(), batch_size=2, num_workers=1, generator=torch.Generator().manual_seed(3))
            return str([batch.tolist() for batch in divided(loader, World(rank, 2), seed)])

        assert drawn(0, None) == drawn(0, None)
        assert len({drawn(rank, seed) for rank in range(2) for seed in (None, 7)}) == 4
        joint = [over_global_batches(DataLoader(Draws()), World(rank, 2), 7) for rank in range(2)]
        assert len({loader.generator.initial_seed() for loader in joint}) == 2


class Draws(torch.utils.data.Dataset[int]):
    """Draws a random number for each sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(2**30, ()))


def test_traces_are_read_once(tmp_path: Path) -> None:
    profiler = inside(lambda: helpers.TorchWorkerProfiler(str(tmp_path / "traces")), rank=1)
    schedule = torch.profiler.schedule(wait=0, warmup=0, active=1)
    options: dict[str, Any] = {"activities": [torch.profiler.ProfilerActivity.CPU], "schedule": schedule}
    with torch.profiler.profile(**options, on_trace_ready=profiler.trace_handler) as made:
        made.step()
        [(name, trace)] = profiler.get_and_clear_profile_traces()["_train_torch_profiler"]
        assert (name, "traceEvents" in trace) == ("worker_1_epoch_1.pt.trace.json", True)
        assert profiler.get_and_clear_profile_traces() == {"_train_torch_profiler": []}


class LoaderWithPosition(DataLoader[Any]):
    """Its position is that of the batch which was drawn last."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_loader_with_a_position_is_not_drawn_from_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", streams.append)
    device = torch.device("cuda", 0)
    DeviceLoader(LoaderWithPosition(numbers()), device, ahead=True)
    DeviceLoader(DataLoader(numbers()), device, ahead=False)
    assert streams == []
    DeviceLoader(DataLoader(numbers()), device, ahead=True)
    assert streams == [device]
