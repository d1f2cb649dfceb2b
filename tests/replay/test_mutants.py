"""Journals that were changed at random are refused with an error of the library, or are harmless."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.replay.mutants import ask, mutant_of, write_honest

NUM_OF_PART = 1000


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_honest(tmp_path_factory.mktemp("honest"))


def check(numbers: range, honest: list[Path], folder: Path) -> None:
    refused = list[bool]()
    for number in numbers:
        chosen, mutant = mutant_of(number, honest, folder)
        refused += ask(number, chosen, mutant)
        shutil.rmtree(mutant)
    assert len(refused) / 10 < sum(refused) < len(refused), "the changes are neither all harmless nor all refused"


@pytest.fixture
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.storage._filesystems.opened", lambda *_: pytest.fail("a store was opened"))


def test_a_few_mutants_are_refused_or_harmless(no_store: None, honest: list[Path], tmp_path: Path) -> None:
    check(range(100_000, 100_080), honest, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_mutants_are_refused_or_harmless(no_store: None, honest: list[Path], tmp_path: Path, part: int) -> None:
    check(range(part * NUM_OF_PART, (part + 1) * NUM_OF_PART), honest, tmp_path)
