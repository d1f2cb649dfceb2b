"""Training and evaluation mode: what user code has set, kept through evaluation."""

from __future__ import annotations

import pytest
import torch

from raysgd.torch.objects.models import ModuleModes, begin_training


def student_and_teacher() -> tuple[torch.nn.Sequential, torch.nn.Module]:
    """A model with a frozen batch norm, and a model that only evaluates."""
    student = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout())
    student[1].eval()
    return student, torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()).eval()


def modes_of(*models: torch.nn.Module) -> list[bool]:
    return [part.training for model in models for part in model.modules()]


def test_evaluating_twice_gives_back_what_was_before_the_first_time() -> None:
    models, modes = student_and_teacher(), ModuleModes()
    before = modes_of(*models)
    for _ in range(2):
        modes.evaluate([*models, None])
        assert not any(modes_of(*models))
    modes.give_back()
    assert modes_of(*models) == before == [True, True, False, True, False, False, False]


def test_an_evaluation_that_sets_modes_by_itself_does_not_change_what_comes_back() -> None:
    models, modes = student_and_teacher(), ModuleModes()
    before = modes_of(*models)
    modes.evaluate(models)
    models[0].train()
    modes.note()
    modes.give_back()
    assert modes_of(*models) == before


def test_what_user_code_changes_after_the_evaluation_stays() -> None:
    (student, teacher), modes = student_and_teacher(), ModuleModes()
    modes.evaluate([student, teacher])
    student[1].train()  # thawed
    modes.give_back()
    assert modes_of(student) == [True, True, True, True]
    student[1].eval()  # and frozen again: nothing is given back twice
    modes.give_back()
    assert not student[1].training


class Merging(torch.nn.Linear):
    """Merges weights for evaluation, as layers for fine-tuning do."""

    is_merged = False

    def train(self, mode: bool = True) -> Merging:
        self.is_merged = not mode
        super().train(mode)
        return self


def test_a_part_that_does_more_than_note_its_mode_is_asked_to() -> None:
    model, modes = torch.nn.Sequential(Merging(1, 1)), ModuleModes()
    layer = model[0]
    assert isinstance(layer, Merging)
    modes.evaluate([model])
    assert layer.is_merged
    modes.give_back()
    assert (layer.is_merged, layer.training) == (False, True)


@pytest.mark.parametrize(("frozen", "trains"), [(False, True), (True, False)])
def test_a_model_that_evaluates_as_a_whole_begins_to_train_if_it_can(frozen: bool, trains: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout()).eval().requires_grad_(not frozen)
    begin_training(model)
    assert modes_of(model) == [trains] * 3


@pytest.mark.parametrize("training", ["the whole", "a part"])
def test_a_part_that_evaluates_beside_others_stays_so(training: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout()).eval()
    if training == "the whole":
        model.training = True
    else:
        model[1].train()
    before = modes_of(model)
    begin_training(model)
    assert modes_of(model) == before
