"""Numbers that can be trusted: any number of workers reports, and does, what one process would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, Subset

from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.parallel.options import StepOptions
from tests.helpers.run_if import RunIf
from tests.torch.lab import Experiment, Findings, run_alone, run_together
from tests.torch.operators_for_tests import (
    BatchNormOperator,
    LinearOperator,
    OwnBatchOperator,
    OwnEpochOperator,
    ScheduledOperator,
    dataset,
)

pytestmark = pytest.mark.integration


class Laboratory(LinearOperator):
    """Raises on one rank when told to."""

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info.get("raises_on") == self.world_rank:
            raise ArithmeticError
        return super().validate_batch(batch, batch_info)


def start(num_workers: int, operator_cls: Any = Laboratory) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=operator_cls,
        num_workers=num_workers,
        min_workers=num_workers,
        num_cpus_per_worker=0.5,
        config={"num_samples": 23, "num_validation_samples": 13},
    )


@pytest.fixture(scope="module")
def two(ray_cluster: None) -> Iterator[TorchTrainer]:
    with start(2) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def three(ray_cluster: None) -> Iterator[TorchTrainer]:
    with start(3) as trainer:
        yield trainer


@pytest.fixture(params=[2, 3], ids=["two", "three"])
def lab(request: pytest.FixtureRequest, two: TorchTrainer, three: TorchTrainer) -> TorchTrainer:
    return {2: two, 3: three}[request.param]


def joined(experiment: Experiment, num_workers: int) -> Experiment:
    """The same for one process, which takes the workers' batches together."""
    return replace(experiment, config={**experiment.config, "batch_size": 4 * num_workers})


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def numbers(findings: Findings) -> list[int]:
    return sorted(number for rank in findings.seen for batch in rank for number in batch)


# ------------------------------------------------------------------------------------------------ as one process


EPOCHS = (("train", None), ("validate", None), ("train", 3), ("train", None), ("validate", 1), ("validate", None))


@pytest.mark.promise("The step of one process")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("num_samples", [16, 17, 19, 23])
@pytest.mark.parametrize("operator_cls", [LinearOperator, OwnBatchOperator])
def test_workers_report_and_learn_what_one_process_does(
    operator_cls: Any, num_samples: int, optimizer: str, lab: TorchTrainer
) -> None:
    experiment = Experiment(operator_cls, {"num_samples": num_samples, "optimizer": optimizer}, EPOCHS)
    together, alone = run_together(lab, experiment), run_alone(joined(experiment, lab.num_workers))
    for model in together.model:
        assert_close(model, alone.model[0])
    for found, expected in zip(together.results, alone.results, strict=True):
        assert list(found) == list(expected)
        means = [name for name in found if not name.startswith("last_") and name != "batch_count"]
        assert_close({name: found[name] for name in means}, {name: expected[name] for name in means})


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("num_samples", [17, 23])
def test_a_loop_of_the_users_own_learns_what_one_process_does(
    num_samples: int, optimizer: str, three: TorchTrainer
) -> None:
    experiment = Experiment(
        OwnEpochOperator, {"num_samples": num_samples, "optimizer": optimizer}, (("train", None), ("train", 3))
    )
    together, alone = run_together(three, experiment), run_alone(joined(experiment, three.num_workers))
    for model in together.model:
        assert_close(model, alone.model[0])


@pytest.mark.parametrize("operator_cls", [LinearOperator, OwnBatchOperator])
def test_the_gradient_of_all_workers_is_clipped_whoever_steps(operator_cls: Any, two: TorchTrainer) -> None:
    options = {"step_options": StepOptions(clip_grad_norm=0.5)}
    experiment = Experiment(operator_cls, {"num_samples": 19}, (("train", None),), options)
    together, alone = run_together(two, experiment), run_alone(joined(experiment, two.num_workers))
    for model in together.model:
        assert_close(model, alone.model[0])


class OnPlateau(ScheduledOperator):
    """Goes by a metric that differs between the ranks."""

    scheduler_metric = "rank"

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        result = TrainingOperator.train_epoch(self, iterator, info)
        return {**result, "best": self.scheduler.best}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "rank": float(self.world_rank)}


def test_all_workers_go_by_the_same_metric_when_they_lower_the_learning_rate(two: TorchTrainer) -> None:
    config = {"num_samples": 21, "scheduler": partial(ReduceLROnPlateau, patience=0)}
    found = run_together(two, Experiment(OnPlateau, config, options={"scheduler_step_freq": "epoch"}))
    # 8, 8 and 5 samples in three steps: rank 1 has 4, 4 and 2 of them.
    assert [worker["best"] for worker in found.single[0]] == pytest.approx([10 / 21] * 2)


def test_a_loop_of_the_users_own_counts_by_the_samples_that_it_reports(three: TorchTrainer) -> None:
    experiment = Experiment(OwnEpochOperator, {"num_samples": 23, "lr": 0.0})
    [found], [expected] = run_together(three, experiment).results, run_alone(experiment).results
    assert found["num_samples"] == 23
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-6)


@pytest.mark.promise("The metrics of one process")
@pytest.mark.parametrize("num_samples", [13, 1, 8, 25])
@pytest.mark.parametrize("operator_cls", [LinearOperator, BatchNormOperator])
def test_validation_sees_each_sample_once(operator_cls: Any, num_samples: int, lab: TorchTrainer) -> None:
    experiment = Experiment(operator_cls, {"num_validation_samples": num_samples}, (("validate", None),))
    together, alone = run_together(lab, experiment), run_alone(experiment)
    assert numbers(together) == list(range(num_samples))
    [found], [expected] = together.results, alone.results
    assert found["num_samples"] == num_samples
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)


class ValidatesWithStatistics(BatchNormOperator):
    """Takes over the statistics of rank 0 after a training, to be validated again elsewhere."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if "model" in config:
            self._original_models[0].load_state_dict(config["model"])


@pytest.mark.usefixtures("patient")
def test_if_one_rank_raises_in_an_evaluation_all_begin_with_the_first_batch_again(two: TorchTrainer) -> None:
    first = two.validate(num_steps=1)["val_loss"]
    two.validate()
    with pytest.raises(ArithmeticError):
        two.validate(num_steps=1, info={"raises_on": 1})
    assert two.validate(num_steps=1)["val_loss"] == first
    assert two.validate()["num_samples"] == 13 - 8


def test_validation_uses_the_statistics_of_rank_0_on_all_ranks(three: TorchTrainer) -> None:
    calls = (("train", None), ("train", None), ("validate", None))
    together = run_together(three, Experiment(BatchNormOperator, {"num_samples": 23}, calls))
    alone = run_alone(Experiment(ValidatesWithStatistics, {"model": together.model[0]}, (("validate", None),)))
    assert together.results[-1]["val_loss"] == pytest.approx(alone.results[0]["val_loss"], rel=1e-6)


@pytest.mark.promise("Each sample once")
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_uses_each_sample_once(shuffle: bool, lab: TorchTrainer) -> None:
    num_samples = 4 * lab.num_workers * 2 + 2 * lab.num_workers  # no rank has to repeat a sample
    findings = run_together(lab, Experiment(LinearOperator, {"num_samples": num_samples, "shuffle": shuffle}))
    assert numbers(findings) == list(range(num_samples))


# ------------------------------------------------------------------------------------------------ uneven data


def per_rank(numbers_of_rank: Callable[[int], list[int]]) -> type[LinearOperator]:
    """An operator whose ranks have data of their own, in loaders of different lengths."""

    class PerRank(LinearOperator):
        def make_loader(self, data: Any, shuffle: bool = False) -> Any:
            return DataLoader(Subset(dataset(40), numbers_of_rank(self.world_rank)), batch_size=4)

    return PerRank


class Joined(LinearOperator):
    """Takes ready batches, as one process would have seen them."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        tensors = dataset(40).tensors
        return [tuple(tensor[batch] for tensor in tensors) for batch in self.config["batches"]]


def uneven(rank: int) -> list[int]:
    """10 samples for rank 0, and ever fewer for those behind it."""
    return list(range(10 * rank, 10 * rank + 10 - 4 * rank))


def uneven_steps(num_workers: int) -> list[list[int]]:
    """The batches of all ranks, step by step, until all have run out."""
    batches = [[uneven(rank)[i : i + 4] for i in range(0, 10 - 4 * rank, 4)] for rank in range(num_workers)]
    return [list(chain(*step)) for step in zip_longest(*batches, fillvalue=[])]


NOT_DIVIDED = {"add_dist_sampler": False}


@pytest.mark.parametrize("base", [LinearOperator, OwnBatchOperator])
def test_ranks_with_loaders_of_different_lengths_learn_from_all_samples(base: Any, three: TorchTrainer) -> None:
    class Uneven(per_rank(uneven), base):  # type: ignore[misc]
        pass

    calls = (("train", None), ("train", None))
    together = run_together(three, Experiment(Uneven, {}, calls, NOT_DIVIDED))
    alone = run_alone(Experiment(Joined, {"batches": uneven_steps(three.num_workers)}, calls))
    for model in together.model:
        assert_close(model, alone.model[0])
    for found, expected in zip(together.results, alone.results, strict=True):
        assert found["num_samples"] == expected["num_samples"]
        assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-6)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 7])
def test_all_ranks_take_the_steps_asked_for_however_little_data_they_have(num_steps: int, three: TorchTrainer) -> None:
    calls = (("train", num_steps), ("train", num_steps), ("train", None))
    together = run_together(three, Experiment(per_rank(uneven), {}, calls, NOT_DIVIDED))
    assert len({len(seen) for seen in together.seen}) == 1
    batches = uneven_steps(three.num_workers)
    alone = run_alone(Experiment(Joined, {"batches": batches}, calls))
    assert [found["num_samples"] for found in together.results] == [found["num_samples"] for found in alone.results]
    assert [found["epoch"] for found in together.results] == [found["epoch"] for found in alone.results]
    assert_close(together.model[-1], alone.model[0])


class Streams(LinearOperator):
    """An iterable dataset, of which every rank has another length, and no rank knows it."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        class Stream(IterableDataset[Any]):
            def __iter__(stream) -> Iterator[Any]:
                return iter([dataset(40)[number] for number in uneven(self.world_rank)])

        return DataLoader(Stream(), batch_size=4)


def test_streams_of_different_lengths_do_not_hang(three: TorchTrainer) -> None:
    calls = (("train", None), ("validate", None), ("train", None))
    together = run_together(three, Experiment(Streams, {}, calls))
    num_samples = sum(len(uneven(rank)) for rank in range(three.num_workers))
    assert [found["num_samples"] for found in together.results] == [num_samples] * 3
    alone = run_alone(Experiment(Joined, {"batches": uneven_steps(three.num_workers)}, (("train", None),) * 2))
    assert_close(together.model[-1], alone.model[0])


def test_a_rank_without_data_is_an_error_and_not_a_wait(ray_cluster: None) -> None:
    with start(2) as trainer:
        pids = [info.pid for info in trainer.worker_group.infos]
        empty_for_rank_1 = per_rank(lambda rank: [] if rank else [0, 1])
        with pytest.raises(ValueError, match=r"(?s)loader of this rank is empty.*on rank 1,"):
            run_together(trainer, Experiment(empty_for_rank_1, {}, options=NOT_DIVIDED))
        assert trainer.train()["num_samples"] == 23
        assert [info.pid for info in trainer.worker_group.infos] != pids, "rank 0 waited, and had to be ended"


def test_an_epoch_without_any_data_is_no_error(three: TorchTrainer) -> None:
    empty = per_rank(lambda rank: [])
    [found] = run_together(three, Experiment(empty, {}, options=NOT_DIVIDED)).results
    assert found == {"num_samples": 0, "epoch": 1, "batch_count": 0}


def test_different_data_where_one_is_to_be_divided_is_refused(ray_cluster: None) -> None:
    with pytest.raises(ValueError, match=r"different train data.*add_dist_sampler=False"):
        start(2, per_rank(uneven))


# ------------------------------------------------------------------------------------------------ kinds of metrics


class Classifies(LinearOperator):
    """Predicts three classes badly, and counts with metric objects."""

    def setup(self, config: dict[str, Any]) -> None:
        from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

        super().setup(config)
        self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")
        self.f1 = MulticlassF1Score(num_classes=3, average="macro")

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, number, _ = batch
        self.seen.append(number.tolist())
        predicted, target = classes(features, number)
        for metric in (self.accuracy, self.f1):
            metric.update(predicted, target)
        return {"accuracy": self.accuracy, "f1": self.f1, "num_samples": len(number)}


def classes(features: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return features.argmax(dim=1), torch.where(number % 5 == 0, features.argmin(dim=1), features.argmax(dim=1))


@RunIf(modules=["torchmetrics"])
def test_metric_objects_are_merged_exactly_and_start_anew_each_time(three: TorchTrainer) -> None:
    config = {"num_validation_samples": 29}
    findings = run_together(three, Experiment(Classifies, config, (("validate", None),) * 2))
    features, number, _ = dataset(29, seed=1).tensors
    predicted, target = classes(features, number)
    for found in findings.results:
        assert found["accuracy"] == pytest.approx(accuracy_score(target, predicted))
        assert found["f1"] == pytest.approx(f1_score(target, predicted, average="macro"))
        assert found["num_samples"] == 29


@RunIf(modules=["torchmetrics"])
def test_without_merging_each_rank_has_the_value_of_its_own_share(three: TorchTrainer) -> None:
    findings = run_together(three, Experiment(Classifies, {"num_validation_samples": 29}, (("validate", None),)))
    features, number, _ = dataset(29, seed=1).tensors
    for own, seen in zip(findings.single[0], findings.seen, strict=True):
        share = [index for batch in seen for index in batch]
        predicted, target = classes(features[share], number[share])
        assert isinstance(own["accuracy"], float)
        assert own["accuracy"] == pytest.approx(accuracy_score(target, predicted))
    assert len({own["accuracy"] for own in findings.single[0]}) > 1
