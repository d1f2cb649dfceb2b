"""What the losses of PyTorch are called with, which labels their mean is over, and how often outputs are right."""

from __future__ import annotations

import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from raysgd.core.text.log_lines import Once
from raysgd.torch.objects.criteria import LossCall, LossCalls, accuracy, known, observable

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5])
SCORES = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(0, 4, (6, 5), generator=torch.Generator().manual_seed(1))
WITH_IGNORED = TARGET.where(TARGET != 3, -100)


class Likelihood(torch.nn.Module):
    """A criterion of a user's around one of PyTorch's."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.loss = torch.nn.NLLLoss(**options)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(output.log_softmax(dim=1), target)
        return loss


def heard(criterion: Any, output: Any = SCORES, target: Any = TARGET) -> list[LossCall]:
    calls, found = LossCalls(), list[LossCall]()
    with calls.on(criterion, found.append):
        calls.call(criterion, output, target)
    return found


@pytest.mark.parametrize(
    ("make", "target"),
    [
        (torch.nn.CrossEntropyLoss, TARGET),
        (torch.nn.CrossEntropyLoss, WITH_IGNORED),
        (partial(torch.nn.CrossEntropyLoss, label_smoothing=0.1), WITH_IGNORED),
        (partial(torch.nn.CrossEntropyLoss, ignore_index=2), TARGET),
        (partial(torch.nn.CrossEntropyLoss, weight=CLASS_WEIGHTS), WITH_IGNORED),
        (partial(torch.nn.CrossEntropyLoss, weight=CLASS_WEIGHTS, ignore_index=1, label_smoothing=0.1), TARGET),
        (partial(Likelihood, weight=CLASS_WEIGHTS, ignore_index=0), TARGET),
        (lambda **options: partial(functional.cross_entropy, weight=CLASS_WEIGHTS, **options), WITH_IGNORED),
        (
            lambda **options: torch.compile(torch.nn.CrossEntropyLoss(ignore_index=3, **options), backend="eager"),
            TARGET,
        ),
    ],
)
def test_a_mean_times_its_amount_is_the_sum(make: Any, target: torch.Tensor) -> None:
    mean, total = make(), make(reduction="sum")
    [comparison] = heard(mean, target=target)
    assert mean(SCORES, target).item() * comparison.amount == pytest.approx(total(SCORES, target).item())
    assert heard(total, target=target)[0].amount is None, "it is no mean"


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="this PyTorch has no fused loss")
def test_a_fused_loss_counts_labels_too() -> None:
    criterion = torch.nn.LinearCrossEntropyLoss(3, 4, weight=CLASS_WEIGHTS)
    target = TARGET[:, 0]
    [comparison] = heard(criterion, torch.randn(6, 3), target)
    assert (comparison.amount, comparison.reading) == (pytest.approx(CLASS_WEIGHTS[target].sum().item()), "values")


@pytest.mark.parametrize(
    ("criterion", "output", "target"),
    [
        (torch.nn.BCEWithLogitsLoss(weight=torch.rand(5), pos_weight=torch.rand(5)), SCORES, SCORES.sigmoid()),
        (torch.nn.MultiMarginLoss(weight=CLASS_WEIGHTS), SCORES[:, :, 0], TARGET[:, 0]),
        (torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), SCORES, SCORES.softmax(dim=1)),
        (torch.nn.MSELoss(), SCORES, SCORES),
    ],
)
def test_other_means_are_over_samples_whatever_their_weights(criterion: Any, output: Any, target: Any) -> None:
    halves = [criterion(output[part], target[part]) for part in (slice(0, 3), slice(3, 6))]
    assert criterion(output, target).item() == pytest.approx(sum(halves).item() / 2)  # type: ignore[union-attr]
    assert heard(criterion, output, target)[0].amount is None


def test_a_compiled_criterion_is_left_alone() -> None:
    criterion = torch.nn.CrossEntropyLoss()
    criterion.compile(backend="eager")
    with LossCalls().on(criterion, print):
        assert not criterion._forward_hooks
    assert len(heard(criterion)) == 1, "the library calls it by itself"


@pytest.mark.parametrize("makes_all", [False, True])
@pytest.mark.parametrize("criterion", [torch.nn.CrossEntropyLoss(), functional.cross_entropy, Likelihood()])
def test_a_call_is_told_once_with_the_labels_that_count(criterion: Any, makes_all: bool) -> None:
    calls, found = LossCalls(), list[LossCall]()
    calls.makes_all = makes_all
    with calls.on(criterion, found.append):
        for target in (WITH_IGNORED, TARGET):
            calls.call(criterion, SCORES, target)
    counted = [(int((TARGET != 3).sum()), TARGET.numel(), True), (TARGET.numel(), TARGET.numel(), False)]
    assert [(each.amount, each.num_labels, each.is_uneven) for each in found] == counted


class Halved(torch.nn.CrossEntropyLoss):
    """A loss over labels that user code has changed."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output / 2, target)


def compiled_in_place(criterion: torch.nn.Module) -> torch.nn.Module:
    criterion.compile(backend="eager")
    return criterion


compiled = partial(torch.compile, backend="eager")


@pytest.mark.parametrize("makes_all", [False, True])
@pytest.mark.parametrize(
    ("criterion", "is_exact"),
    [
        (functional.cross_entropy, True),
        (partial(functional.cross_entropy, ignore_index=3), True),
        (compiled(torch.nn.CrossEntropyLoss(ignore_index=3)), True),
        (compiled_in_place(torch.nn.CrossEntropyLoss(ignore_index=3)), True),
        (torch.nn.Sequential(compiled(torch.nn.CrossEntropyLoss(ignore_index=3))), True),
        (Halved(ignore_index=3), False),
        (compiled(Halved(ignore_index=3)), False),
        (compiled(Likelihood(ignore_index=3)), False),
        (partial(compiled(functional.cross_entropy), ignore_index=3), False),
    ],
)
def test_a_loss_over_labels_is_heard_whoever_calls_it(criterion: Any, is_exact: bool, makes_all: bool) -> None:
    calls, found, criterion = LossCalls(), list[LossCall](), observable(criterion)
    calls.makes_all = makes_all
    with calls.on(criterion, found.append):
        if isinstance(criterion, torch.nn.Sequential):
            criterion[0](SCORES, TARGET)
        elif makes_all:
            calls.call(criterion, SCORES, TARGET)
        else:
            criterion(SCORES, TARGET)
    is_default = getattr(criterion, "loss", None) is functional.cross_entropy
    amount = TARGET.numel() if is_default else int((TARGET != 3).sum())
    assert [(each.amount, each.result is not None) for each in found] == [(amount, is_exact)]


def test_a_function_counts_by_the_arguments_of_its_call() -> None:
    criterion, found = observable(functional.cross_entropy), list[LossCall]()
    with LossCalls().on(criterion, found.append):
        criterion(SCORES, TARGET, CLASS_WEIGHTS, ignore_index=3)
        criterion(SCORES, target=TARGET, reduction="sum")
    weight = CLASS_WEIGHTS[TARGET[TARGET != 3]].sum().item()
    assert [each.amount for each in found] == [pytest.approx(weight), None]


def test_a_function_keeps_its_attributes() -> None:
    criterion = pickle.loads(pickle.dumps(observable(partial(functional.cross_entropy, ignore_index=3))))
    assert criterion.keywords == {"ignore_index": 3}
    assert criterion(SCORES, TARGET) == functional.cross_entropy(SCORES, TARGET, ignore_index=3)


def test_criteria_that_need_no_help_stay_as_they_are() -> None:
    for criterion in (torch.nn.CrossEntropyLoss(), Halved(), functional.mse_loss, lambda output, target: output.sum()):
        assert observable(criterion) is criterion


@pytest.mark.parametrize("makes_all", [False, True])
def test_a_loss_has_a_hook_only_where_others_may_call_it(makes_all: bool) -> None:
    calls, criterion = LossCalls(), torch.nn.CrossEntropyLoss()
    calls.makes_all = makes_all
    with calls.on(criterion, print):
        assert bool(criterion._forward_hooks) is not makes_all


@pytest.mark.parametrize("num_labels", [0, 1, 64, 65, 300])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_ignored_labels_are_left_out_in_batches_of_any_size(num_labels: int, ignored: int) -> None:
    target = torch.arange(num_labels) % 4
    target[1::7] = ignored
    [found] = heard(torch.nn.CrossEntropyLoss(ignore_index=ignored), torch.zeros(num_labels, 4), target)
    assert (found.amount, found.num_labels) == (int((target != ignored).sum()), num_labels)


def test_listening_leaves_nothing_behind_in_the_criterion() -> None:
    criterion = Likelihood()
    assert len(heard(criterion)) == 1
    assert not criterion.loss._forward_hooks


# ------------------------------------------------------------------------------------------------ accuracy

SAMPLES, PLACES = 40, 5


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flipped(classes: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The same classes, but for every fourth, which is another one."""
    wrong = torch.arange(classes.numel()).reshape(classes.shape) % 4 == 0
    return torch.where(wrong, (classes + 1) % num_classes, classes)


def seen_by(criterion: Any, *args: Any, **kwargs: Any) -> list[LossCall]:
    comparisons: list[LossCall] = []
    with LossCalls().on(criterion, comparisons.append):
        criterion(*args, **kwargs)
    return comparisons


def share(*args: Any, **kwargs: Any) -> Any:
    return known(accuracy(*args, **kwargs), Once(), says_so=False).share


class LastIsClasses(torch.nn.Module):
    """A criterion of a user's that calls one of PyTorch's in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(output.flatten(0, 1), target.flatten())
        return loss


class Casting(torch.nn.Module):
    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(output.flatten(), target.flatten().float())
        return loss


@pytest.mark.parametrize("num_classes", [PLACES, 3])
def test_the_criterion_says_in_which_dimension_the_classes_are(num_classes: int) -> None:
    last = scores(SAMPLES, PLACES, num_classes)
    target = flipped(last.argmax(dim=2), num_classes)
    second, criterion = last.transpose(1, 2), torch.nn.CrossEntropyLoss()
    assert share(last, target, seen_by(LastIsClasses(), last, target)) == 0.75
    assert share(second, target, seen_by(criterion, second, target)) == 0.75
    assert share(last, target, seen_by(criterion, second, target)) == 0.75, "transposed on its way to the loss"
    assert share(second, target, seen_by(criterion, input=second, target=target)) == 0.75


@pytest.mark.parametrize("shape", [(SAMPLES, 1), (SAMPLES,)])
@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize(
    ("loss", "link"), [(torch.nn.BCEWithLogitsLoss(), torch.nn.Identity()), (torch.nn.BCELoss(), torch.nn.Sigmoid())]
)
def test_one_number_per_sample_is_compared_with_the_threshold_of_the_criterion(
    loss: torch.nn.Module, link: torch.nn.Module, casts: bool, shape: tuple[int, ...]
) -> None:
    logits = scores(SAMPLES)
    target, output = flipped((logits > 0).long(), 2).reshape(shape), link(logits).reshape(shape)
    target, criterion = (target.flatten(), Casting(loss)) if casts else (target.float(), loss)
    assert share(output, target, seen_by(criterion, output, target)) == 0.75


def test_several_labels_per_sample_count_one_by_one() -> None:
    output = scores(SAMPLES, 4)
    target = flipped((output > 0).long(), 2)
    assert share(output, target, seen_by(torch.nn.BCEWithLogitsLoss(), output, target.float())) == 0.75


@pytest.mark.parametrize("criterion", [functional.cross_entropy, partial(functional.cross_entropy, reduction="mean")])
def test_functions_of_pytorch_are_known(criterion: Any) -> None:
    output = scores(SAMPLES, PLACES, PLACES)
    target = flipped(output.argmax(dim=1), PLACES)
    assert share(output, target, heard(criterion, output, target)) == 0.75


def unknown(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


@pytest.mark.parametrize(
    ("shape", "dim", "target_shape"),
    [
        ((SAMPLES, 3), 1, (SAMPLES,)),
        ((SAMPLES, 3), 1, (SAMPLES, 1)),
        ((SAMPLES, 3, 4, 4), 1, (SAMPLES, 1, 4, 4)),
        ((SAMPLES, 3, PLACES), 1, (SAMPLES, PLACES)),
        ((SAMPLES, PLACES, 3), 2, (SAMPLES, PLACES)),
        ((SAMPLES, 1, 3), 2, (SAMPLES,)),
        ((1, 3), 1, (1,)),
    ],
)
def test_shapes_decide_where_they_have_one_reading(
    shape: tuple[int, ...], dim: int, target_shape: tuple[int, ...]
) -> None:
    output = scores(*shape)
    target = output.argmax(dim=dim).reshape(target_shape)
    assert share(output, target, heard(unknown, output, target)) == 1.0


@pytest.mark.parametrize(
    ("shape", "target_shape"),
    [
        ((SAMPLES, PLACES, PLACES), (SAMPLES, PLACES)),
        ((SAMPLES, 1), (SAMPLES,)),
        ((SAMPLES,), (SAMPLES,)),
        ((SAMPLES, 1, 4, 4), (SAMPLES, 4, 4)),
    ],
)
def test_shapes_with_several_readings_have_none(shape: tuple[int, ...], target_shape: tuple[int, ...]) -> None:
    output, target = scores(*shape), torch.ones(target_shape, dtype=torch.int64)
    assert accuracy(output, target) is None


class Transposing(torch.nn.CrossEntropyLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input.transpose(1, 2), target)


def test_a_loss_that_is_called_in_another_way_or_twice_decides_nothing() -> None:
    output = scores(SAMPLES, PLACES, PLACES)
    target = output.argmax(dim=2)
    assert accuracy(output, target, seen_by(Transposing(), output, target)) is None
    twice = 2 * seen_by(torch.nn.CrossEntropyLoss(), output, target)
    assert accuracy(output, target, twice) is None


@pytest.mark.parametrize(
    ("output", "target", "criterion"),
    [
        (scores(4, 1), scores(4, 1), torch.nn.MSELoss()),
        (scores(4, 1), torch.ones(4, 1, dtype=torch.int64), torch.nn.MSELoss()),
        (scores(4, 3), scores(4, 3).sigmoid(), torch.nn.BCEWithLogitsLoss()),
        (scores(4, 3), scores(4, 3).softmax(dim=1), torch.nn.CrossEntropyLoss()),
        (scores(4, 3), torch.ones(5, dtype=torch.int64), unknown),
        (scores(0, 3), torch.ones(0, dtype=torch.int64), unknown),
        ([scores(4, 3)], torch.ones(4, dtype=torch.int64), lambda output, target: output[0].sum()),
        (scores(4, 3), [1, 1, 1, 1], unknown),
    ],
    ids=["values", "counts", "soft labels", "probabilities", "sizes", "nothing", "several outputs", "a list"],
)
def test_where_nothing_is_classified_there_is_no_accuracy(output: Any, target: Any, criterion: Any) -> None:
    assert math.isnan(share(output, target, seen_by(criterion, output, target)))


@pytest.mark.parametrize("ignored", [-100, 0])
def test_ignored_labels_are_neither_right_nor_wrong(ignored: int) -> None:
    output = scores(SAMPLES, 4, PLACES)
    target = flipped(output.argmax(dim=1), 4)
    hidden = target.where(torch.arange(SAMPLES).reshape(-1, 1) % 4 == 1, ignored)  # these are all right
    criterion = torch.nn.CrossEntropyLoss(ignore_index=ignored)
    found = accuracy(output, hidden, seen_by(criterion, output, hidden))
    assert found is not None
    expected = (output.argmax(dim=1) == hidden)[hidden != ignored]
    assert found.share.item() == pytest.approx(expected.float().mean().item())
    assert found.num_labels == len(expected)
    if ignored < 0:
        assert accuracy(output, hidden) == found, "no class has a negative number, whatever the criterion"
    assert accuracy(output, hidden, ignored=ignored) == found


def test_a_batch_of_ignored_labels_alone_counts_nothing() -> None:
    output, target = scores(4, 3), torch.full((4,), -100)
    found = accuracy(output, target, seen_by(torch.nn.CrossEntropyLoss(), output, target))
    assert found is not None
    assert math.isnan(found.share)
    assert found.num_labels == 0


def test_a_weight_that_leaves_labels_out_does_not_say_which() -> None:
    output = scores(SAMPLES, 4, 3)
    target = output.argmax(dim=1)
    known_weights = {weight: accuracy(output, target, weight=weight) for weight in (None, SAMPLES * 3, SAMPLES, 7.5)}
    assert all(found is not None and found.share == 1.0 for found in known_weights.values())
    assert accuracy(output, target, weight=torch.tensor(17)) is None


def test_of_several_comparisons_that_of_the_output_counts() -> None:
    output, auxiliary = scores(SAMPLES, 3), scores(SAMPLES, 3, seed=1)
    target = output.argmax(dim=1)
    criterion = torch.nn.CrossEntropyLoss(ignore_index=0)
    both = seen_by(criterion, auxiliary, target) + seen_by(criterion, output, target)
    found = accuracy(output, target, both)
    assert found is not None
    assert (found.share, found.num_labels) == (1.0, (target != 0).sum())


def amount_with_copy(original: torch.Tensor, copy: torch.Tensor, target: torch.Tensor) -> Any:
    """Return the amount that a listener gets, with `target` on a device whose numbers cannot be read."""
    calls, found = LossCalls(), list[LossCall]()
    calls.note_copy(original, copy)
    with calls.on(torch.nn.CrossEntropyLoss(), found.append):
        calls.call(torch.nn.CrossEntropyLoss(), SCORES.to("meta"), target)
    return found[0].amount


@pytest.mark.parametrize(("target", "expected"), [(TARGET, 30), (WITH_IGNORED, int((TARGET != 3).sum()))])
def test_labels_of_a_copied_target_are_counted_in_host_memory(target: torch.Tensor, expected: int) -> None:
    copy = target.to("meta")
    assert amount_with_copy(target, copy, copy) == expected


def test_a_target_that_was_changed_on_the_device_is_counted_there() -> None:
    for change_original in (False, True):
        original = TARGET.clone()
        copy = original.to("meta")
        calls, found = LossCalls(), list[LossCall]()
        calls.note_copy(original, copy)
        (original if change_original else copy).clamp_(max=2)
        with calls.on(torch.nn.CrossEntropyLoss(), found.append):
            calls.call(torch.nn.CrossEntropyLoss(), SCORES.to("meta"), copy)
        assert found[0].amount.device.type == "meta"


def test_another_target_than_the_copied_one_is_counted_itself() -> None:
    copy = TARGET.to("meta")
    for original, target in ((TARGET, copy.clone()), (TARGET.float(), copy), (copy, copy)):
        assert amount_with_copy(original, copy, target).device.type == "meta"
