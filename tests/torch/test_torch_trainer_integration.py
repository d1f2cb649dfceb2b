"""Trainers over real workers: what they start, and what each call does on all of them."""

from __future__ import annotations

import copyreg
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from raysgd.exceptions import UnpicklableError
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE
from tests.torch.operators_for_tests import NUM_FEATURES, LinearOperator, dataset, samples_seen

pytestmark = pytest.mark.integration


class Inspected(LinearOperator):
    """Takes the batch size of the group, and tells its rank."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        return torch.utils.data.DataLoader(data, batch_size=self.config[BATCH_SIZE])

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any], **rest: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**super().train_epoch(iterator, info, **rest), "rank": self.world_rank}


@pytest.fixture(scope="module")
def pair(ray_cluster: None) -> Iterator[TorchTrainer]:
    """Two workers with one CPU each."""
    trainer = TorchTrainer(
        training_operator_cls=Inspected,
        num_workers=2,
        config={BATCH_SIZE: 9, "batch_size": "untouched", "num_samples": 21},
    )
    yield trainer
    trainer.shutdown()


@pytest.fixture(scope="module")
def single(ray_cluster: None) -> Iterator[TorchTrainer]:
    """One worker, whose operator exists in this function only."""

    class OnlyHere(LinearOperator):
        def make_model(self) -> torch.nn.Module:
            return weight_norm(super().make_model())

    trainer = TorchTrainer(training_operator_cls=OnlyHere)
    yield trainer
    trainer.shutdown()


# ------------------------------------------------------------------------------------------------ what is started


def test_operators_know_their_place(pair: TorchTrainer, single: TorchTrainer) -> None:
    def place(operator: TrainingOperator) -> Any:
        return operator.world_rank, operator.local_rank, operator._is_distributed, operator.device, operator.device_ids

    cpu = torch.device("cpu")
    assert pair.apply_all_operators(place) == [(0, 0, True, cpu, None), (1, 1, True, cpu, None)]
    assert single.apply_all_operators(place) == [(0, 0, False, cpu, None)]


def test_a_batch_size_of_the_group_is_divided_and_lowered(pair: TorchTrainer) -> None:
    assert pair.config == {BATCH_SIZE: 8, "batch_size": "untouched", "num_samples": 21}
    for config in pair.apply_all_operators(lambda operator: operator.config):
        assert config == {BATCH_SIZE: 4, "batch_size": "untouched", "num_samples": 21}


# ------------------------------------------------------------------------------------------------ calls


@pytest.mark.promise("A class for PyTorch")
def test_both_workers_train_on_their_shares_as_one(pair: TorchTrainer) -> None:
    result = pair.train()
    assert list(result)[:3] == ["num_samples", "epoch", "batch_count"]
    assert (result["num_samples"], result["batch_count"], result["rank"]) == (21, 3, pytest.approx(10 / 21))


def test_without_reduction_there_is_a_result_for_each_rank(pair: TorchTrainer) -> None:
    first, second = pair.train(reduce_results=False, profile=True)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert (first["num_samples"], second["num_samples"]) == (11, 10)
    assert first["epoch"] == second["epoch"]
    assert first["profile"] != second["profile"]
    assert [result["num_samples"] for result in pair.validate(reduce_results=False)] == [7, 6]


def test_an_operator_elsewhere_is_not_handed_out(pair: TorchTrainer) -> None:
    with pytest.raises(NotImplementedError, match="apply_all_operators"):
        pair.get_local_operator()


def test_a_model_from_elsewhere_is_a_copy_without_wrapper(pair: TorchTrainer) -> None:
    model = pair.get_model()
    assert type(model) is torch.nn.Linear
    before = model.weight.clone()
    pair.train()
    assert torch.equal(model.weight, before)
    assert not torch.equal(pair.get_model().weight, before)
    assert torch.equal(pair.get_model(to_cpu=True).weight, pair.get_model().weight)


def test_a_parametrized_model_from_elsewhere_computes_what_it_computes_there(single: TorchTrainer) -> None:
    single.train()
    model, features = single.get_model(), torch.ones(2, NUM_FEATURES)
    [expected] = single.apply_all_operators(lambda operator: operator.model(features).detach())  # type: ignore[operator]
    assert torch.equal(model(features), expected)
    model.load_state_dict(single.state_dict()["models"][0])


def test_data_of_a_call_are_used_in_the_steps_of_one_process(pair: TorchTrainer) -> None:
    data = dataset(21, seed=3)
    with TorchTrainer(training_operator_cls=LinearOperator, use_local=True, config={"batch_size": 8}) as single:
        single.get_local_operator().model.load_state_dict(pair.get_model().state_dict())
        pair.apply_all_operators(samples_seen)
        for num_steps in (2, 2):  # of three steps; the second call goes on, and begins another pass
            pair.train(num_steps=num_steps, dataset=data)
            single.train(num_steps=num_steps, dataset=data)
        seen = pair.apply_all_operators(samples_seen)
        assert sorted(number for rank in seen for batch in rank for number in batch) == sorted([*range(21), *range(8)])
        expected, found = single.get_model().state_dict(), pair.get_model().state_dict()
        assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())
        assert pair.validate(dataset=data)["val_loss"] == pytest.approx(
            single.validate(dataset=data)["val_loss"], abs=1e-6
        )


def test_functions_of_a_script_may_set_options_of_torch(pair: TorchTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process that has sent nothing yet.
    monkeypatch.delitem(copyreg.dispatch_table, type(torch.backends.cudnn), raising=False)
    script: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec("def allow(): torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark", script)
    assert pair.apply_all_workers(script["allow"]) == [None, None]


def test_what_cannot_be_sent_is_refused_and_the_workers_are_kept(pair: TorchTrainer) -> None:
    processes = pair.apply_all_workers(os.getpid)
    lock = threading.Lock()
    for call in (
        lambda: pair.train(info={"lock": lock}),
        lambda: pair.validate(info={"lock": lock}),
        lambda: pair.apply_all_workers(lambda: lock.locked()),
        lambda: pair.apply_all_operators(lambda operator: lock.locked()),
        lambda: pair.train(dataset=OnlyHalfSendable(lock)),
    ):
        with pytest.raises(UnpicklableError, match=r"cannot be sent to the workers.*lock.*Omit"):
            call()
    assert pair.train()["batch_count"] == 3
    assert pair.apply_all_workers(os.getpid) == processes


class OnlyHalfSendable:
    """The share of rank 0 can be sent, and that of rank 1 cannot."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def set_num_shards(self, num_shards: int) -> None:
        pass

    def get_shard(self, rank: int) -> list[Any]:
        return [self.lock] if rank else []
