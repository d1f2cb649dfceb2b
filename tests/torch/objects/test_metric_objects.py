from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import torchmetrics
from torch import distributed
from torchmetrics import Metric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
)
from torchmetrics.regression import (
    KendallRankCorrCoef,
    MeanAbsoluteError,
    MeanSquaredError,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
)
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from raysgd.core.numbers.meters import AverageMeterCollection
from raysgd.torch.objects.metric_objects import capture, remember
from tests.helpers.run_if import RunIf

pytestmark = pytest.mark.filterwarnings(
    "ignore:Metric `Spearman:UserWarning",  # keeps all samples, which is the point here
    "ignore:No negative samples:UserWarning",  # a small share may well have none
)

Batches = list[tuple[torch.Tensor, ...]]

# How many batches each of three workers gets, and how large the batches are.
BATCHES_PER_WORKER = [1, 4, 2]
BATCH_SIZES = [5, 1, 7, 3, 2, 8, 4]


def batches(make: Callable[[int], tuple[torch.Tensor, ...]]) -> Batches:
    torch.manual_seed(0)
    return [make(size) for size in BATCH_SIZES]


def split(data: Batches, counts: Sequence[int] = BATCHES_PER_WORKER) -> list[Batches]:
    data = list(data)
    return [[data.pop(0) for _ in range(count)] for count in counts]


def fed(metric: Metric, data: Batches) -> Metric:
    for batch in data:
        metric.update(*batch)
    return metric


def multiclass(size: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(size, 4), torch.randint(4, (size,))


def binary(size: int) -> tuple[torch.Tensor, ...]:
    return torch.rand(size), torch.randint(2, (size,))


def regression(size: int) -> tuple[torch.Tensor, ...]:
    target = torch.randn(size)
    return target + 0.5 * torch.randn(size), target


def weighted(size: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(()), torch.tensor(float(size))


def one_number(size: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(()),)


class MeanOfBatches(Metric):
    """A state that torchmetrics reduces by "mean": the mean over batches, whatever their size."""

    mean: torch.Tensor
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, number: torch.Tensor) -> None:
        self.mean = self.mean + (number - self.mean) / self._update_count

    def compute(self) -> torch.Tensor:
        return self.mean


class ProductOfBatches(Metric):
    """A metric with a merge rule of its own, which no reduction expresses."""

    logarithm: torch.Tensor
    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("logarithm", torch.tensor(0.0), dist_reduce_fx="max")

    def update(self, number: torch.Tensor) -> None:
        self.logarithm = self.logarithm + number.abs().log()

    def merge_state(self, incoming_state: Any) -> None:
        self.logarithm = self.logarithm + incoming_state.logarithm

    def compute(self) -> torch.Tensor:
        return self.logarithm.exp()


CASES: list[tuple[str, Callable[[], Metric], Callable[[int], tuple[torch.Tensor, ...]]]] = [
    ("accuracy", lambda: MulticlassAccuracy(4), multiclass),
    ("confusion matrix", lambda: MulticlassConfusionMatrix(4), multiclass),
    ("f1", BinaryF1Score, binary),
    ("auroc from lists", BinaryAUROC, binary),
    ("auroc from bins", lambda: BinaryAUROC(thresholds=20), binary),
    ("weighted mean", torchmetrics.MeanMetric, weighted),
    ("sum", torchmetrics.SumMetric, one_number),
    ("max", torchmetrics.MaxMetric, one_number),
    ("min", torchmetrics.MinMetric, one_number),
    ("cat", torchmetrics.CatMetric, one_number),
    ("r2, states side by side", R2Score, regression),
    ("pearson, states side by side", PearsonCorrCoef, regression),
    ("pearson of two outputs", lambda: PearsonCorrCoef(2), lambda size: tuple(torch.randn(2, size + 1, 2))),
    ("spearman", SpearmanCorrCoef, regression),
    ("kendall", KendallRankCorrCoef, regression),
    ("mean state", MeanOfBatches, one_number),
    ("own merge rule", ProductOfBatches, one_number),
    ("wrapper with a child", lambda: ClasswiseWrapper(MulticlassAccuracy(4, average=None)), multiclass),
    ("wrapper that remembers", lambda: MinMaxMetric(MulticlassAccuracy(4)), multiclass),
    ("composition", lambda: BinaryF1Score() + BinaryAUROC(), binary),
]


def close(left: Any, right: Any) -> None:
    """Compare nested results to float tolerance."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        left, right = list(left.values()), list(right.values())
    torch.testing.assert_close(torch.tensor(left), torch.tensor(right), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("make_metric", "make_batch"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
class TestMergingEqualsOneMetricFedWithEverything:
    def test_however_the_merging_is_grouped(self, make_metric: Any, make_batch: Any) -> None:
        data = batches(make_batch)
        captured = [capture(fed(make_metric(), share)) for share in split(data)]
        first, second, third = pickle.loads(pickle.dumps(captured))
        expected = capture(fed(make_metric(), data)).value()
        for _ in range(2):  # it leaves the states as they were
            close(first.merged_with([second]).merged_with([third]).value(), expected)
            close(first.merged_with([second.merged_with([third])]).value(), expected)

    @pytest.mark.parametrize("counts", [[0, 4, 3], [7, 0, 0], [3, 0, 4]], ids=str)
    def test_when_workers_saw_nothing(self, make_metric: Any, make_batch: Any, counts: list[int]) -> None:
        data = batches(make_batch)
        first, *others = (capture(fed(make_metric(), share)) for share in split(data, counts))
        close(first.merged_with(others).value(), capture(fed(make_metric(), data)).value())

    def test_after_a_capture_the_metric_starts_anew(self, make_metric: Any, make_batch: Any) -> None:
        data = batches(make_batch)
        metric = fed(make_metric(), data[:3])
        capture(metric)
        close(capture(fed(metric, data[3:])).value(), capture(fed(make_metric(), data[3:])).value())


def test_a_number_is_a_float_and_several_are_a_list() -> None:
    metric = MulticlassAccuracy(3, average="micro")
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    value = capture(metric).value()
    assert (value, type(value)) == (0.5, float)
    matrix = MulticlassConfusionMatrix(2)
    matrix.update(torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert capture(matrix).value() == [[1, 1], [0, 0]]


def test_a_dict_of_numbers_stays_a_dict() -> None:
    metric = ClasswiseWrapper(MulticlassAccuracy(2, average=None), labels=["cat", "dog"])
    metric.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    assert capture(metric).value() == {"multiclassaccuracy_cat": 0.5, "multiclassaccuracy_dog": 1.0}


def test_values_computed_before_the_capture_are_not_reused() -> None:
    metric: Any = torchmetrics.SumMetric()
    metric.update(1.0)
    metric.compute()
    metric._computed = torch.tensor(99.0)  # what a synchronised `compute` would have left
    assert capture(metric).value() == 1.0


def test_states_that_carry_a_graph_are_cut_off_from_it() -> None:
    metric = torchmetrics.SumMetric()
    parameter = torch.ones((), requires_grad=True)
    metric(parameter * 2)
    metric.sum_value = metric.sum_value + parameter  # not a leaf, hence not copyable as it is
    state = capture(metric)
    assert state.value() == 3.0
    assert not state.parts[0].sum_value.requires_grad


def test_a_state_never_communicates() -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("communicated")

    metric = BinaryAUROC(dist_sync_fn=refuse, distributed_available_fn=lambda: True, dist_sync_on_step=False)
    metric.update(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    assert pickle.loads(pickle.dumps(capture(metric))).value() == 1.0


def test_a_metric_tied_to_a_process_group_can_be_captured_and_stays_tied(tmp_path: Any) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = distributed.new_group([0])
        metric = torchmetrics.SumMetric(process_group=group)
        metric.update(2.0)
        state = capture(metric)
        assert metric.process_group is group
    finally:
        distributed.destroy_process_group()
    assert pickle.loads(pickle.dumps(state)).value() == 2.0


@pytest.mark.gpu
@RunIf(cuda=True)
def test_a_metric_on_a_gpu_leaves_a_state_on_the_cpu_and_stays_where_it_is() -> None:
    metric: Any = BinaryAUROC().to("cuda")
    metric.update(torch.tensor([0.1, 0.9], device="cuda"), torch.tensor([0, 1], device="cuda"))
    state = capture(metric)
    [part] = cast("tuple[Any]", state.parts)
    assert {tensor.device.type for tensor in part.preds} == {"cpu"}
    assert state.value() == 1.0
    assert metric.device.type == "cuda"
    metric.update(torch.tensor([0.9, 0.1], device="cuda"), torch.tensor([0, 1], device="cuda"))
    assert capture(metric).value() == 0.0


@pytest.mark.parametrize("thing", [torchmetrics.MetricCollection([BinaryF1Score()]), torch.ones(1)])
def test_other_things_are_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match=rf"`{type(thing).__name__}` is not a metric object.*`torchmetrics\.Metric`"):
        capture(thing)


class OnDevice(torch.Tensor):
    """A tensor that says that it is not in the host's memory."""

    is_cpu = False


class TestTensorsInMeters:
    def test_one_in_the_host_is_read_at_once_and_not_kept(self) -> None:
        meters = AverageMeterCollection(lambda tensors: pytest.fail("it was kept"))
        meters.update({"loss": torch.ones((1, 1), requires_grad=True) * 2, "batch_weight": torch.tensor(4.0)}, n=3)
        assert meters.summary().totals == {"loss": (8.0, 4.0)}
        with pytest.raises(ValueError, match="exactly one element"):
            meters.update({"loss": torch.ones(2)}, n=3)

    def test_gradients_are_not_kept(self) -> None:
        read: list[torch.Tensor] = []

        def to_floats(tensors: list[Any]) -> list[float]:
            read.extend(tensors)
            return torch.stack(tensors).tolist()

        meters = AverageMeterCollection(to_floats)
        meters.update({"loss": (torch.ones((), requires_grad=True) * 2).as_subclass(OnDevice)}, n=3)
        assert meters.summary()["loss"] == 2.0
        assert [tensor.requires_grad for tensor in read] == [False]


# ------------------------------------------------------------------------------------------------ forgetting


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    "make",
    [
        MeanSquaredError,
        SpearmanCorrCoef,
        lambda: MinMaxMetric(MeanSquaredError()),
        lambda: RunningMean(window=3),
        lambda: torchmetrics.MetricCollection([MeanSquaredError(), MeanAbsoluteError()]),
    ],
    ids=["sums", "lists", "a wrapper", "a window", "a collection"],
)
@pytest.mark.parametrize(
    "inside", [lambda metric: metric, lambda metric: {"validation": [(metric,)]}, torch.nn.Sequential]
)
@pytest.mark.parametrize("how", ["update", "forward"])
def test_a_metric_forgets_what_it_saw_since(make: Callable[[], Any], inside: Callable[[Any], Any], how: str) -> None:
    metric = make()
    first, second, padding = (regression(8) if not isinstance(metric, RunningMean) else one_number(8) for _ in range(3))
    for batch in (first, second):
        getattr(metric, how)(*batch)
    expected = copy.deepcopy(metric).compute()
    forget_the_rest = remember(Holder(inside(metric)))
    getattr(metric, how)(*padding)
    assert metric.compute() != expected
    forget_the_rest()
    assert metric.compute() == expected


def test_a_metric_that_was_reset_in_between_has_nothing_to_forget() -> None:
    metric = fed(MeanSquaredError(), [regression(8)])
    forget_the_rest = remember(Holder(metric))
    capture(fed(metric, [regression(8)]))
    forget_the_rest()
    assert metric.update_count == 0
