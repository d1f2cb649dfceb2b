"""Words of other libraries: what is to be written instead exists."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from raysgd import callbacks
from raysgd.core import synonyms as _synonyms
from raysgd.core.tables import read_table
from raysgd.tf import TFTrainer
from raysgd.torch import TorchTrainer
from raysgd.train import CheckpointConfig, RunConfig

TABLE = read_table(_synonyms.__file__)
NAMES = sorted({name for names in TABLE for name in names.split()})
OTHERS = (_synonyms.FUNCTION, "callback", _synonyms.METHOD, _synonyms.OPERATOR)
PLACES = (*_synonyms.PLACES, *OTHERS)


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize("place", PLACES)
def test_a_word_has_one_line_in_a_place(place: str) -> None:
    words = [name for names, row in TABLE.items() if place in row for name in names.split()]
    assert words
    assert len(words) == len(set(words))


def test_each_word_of_a_trainer_has_a_line_for_all_trainers() -> None:
    trainers = {_synonyms.TORCH, _synonyms.KERAS, _synonyms.FUNCTION}
    rows = [row for row in TABLE.values() if row.keys() & trainers]
    assert all(_synonyms.TORCH in row for row in rows), "the others may lack one, `TorchTrainer` may not"
    assert {key for row in TABLE.values() for key in row} == set(PLACES)


@pytest.mark.parametrize(
    ("place", "trainer"), [(_synonyms.TORCH, TorchTrainer), (_synonyms.KERAS, TFTrainer)], ids=["torch", "keras"]
)
def test_what_is_to_be_passed_is_there(place: str, trainer: Any) -> None:
    lines = {name: _synonyms.instead_of(name, place) or "" for name in NAMES}
    options = {option for line in lines.values() for option in re.findall(r"pass `(\w+)=[^`]*` to the trainer", line)}
    of_fit = {option for line in lines.values() for option in re.findall(r"trainer\.fit\(5, (\w+)=", line)}
    of_train = {option for line in lines.values() for option in re.findall(r"trainer\.train\((\w+)=", line)}
    assert set() < options <= parameters(trainer)
    assert set() < of_fit <= parameters(trainer.fit)
    assert set() < of_train <= parameters(trainer.train)


def test_callbacks_and_configs_can_be_made_as_the_lines_say() -> None:
    known = {**vars(callbacks), "CheckpointConfig": CheckpointConfig, "RunConfig": RunConfig}
    known |= {name: getattr(callbacks, name) for name in callbacks.__all__}
    lines = " ".join(line for row in TABLE.values() for line in row.values())
    made = set(re.findall(r"(?:Checkpointing|EarlyStopping|TensorBoardLogger|CheckpointConfig)\([^()]*\)", lines))
    assert len(made) > 5
    for expression in made - {"CheckpointConfig(...)"}:
        assert eval(expression, dict(known)) is not None


@pytest.mark.parametrize("place", [_synonyms.EARLY_STOPPING, _synonyms.CHECKPOINTING])
def test_what_a_callback_is_to_be_given_is_there(place: str) -> None:
    lines = [row[place] for row in TABLE.values() if place in row]
    options = {option for line in lines for option in re.findall(r"(?:write `|, )(\w+)=", line)}
    assert set() < options <= parameters(callbacks.Checkpointing) | parameters(getattr(callbacks, place))
