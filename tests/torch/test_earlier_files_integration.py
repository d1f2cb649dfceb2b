"""Files that two workers of earlier versions wrote: `tests/earlier_files` has them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.earlier_files import writing
from tests.earlier_files.reading import check_loaded_and_resumed, differences, outcomes, tolerance_of
from tests.earlier_files.writing import FILES, ON_TWO, divided, of_run, run_callbacks
from tests.helpers.processes import shipped


@pytest.fixture(scope="module", autouse=True)
def ships_the_operators() -> Iterator[None]:
    with shipped(writing):
        yield


@pytest.mark.parametrize("case", ON_TWO, ids=[case.name for case in ON_TWO])
def test_a_file_is_loaded_and_training_goes_on_as_it_did(case: writing.Case, ray_cluster: None) -> None:
    with case.start() as trainer:
        check_loaded_and_resumed(case, trainer)


def test_a_run_of_a_divided_model_resumes(ray_cluster: None, tmp_path: Path) -> None:
    name = "fit_of_a_divided_model"
    folder = shutil.copytree(FILES / name, tmp_path / name)
    with divided() as trainer:
        history = trainer.fit(4, callbacks=run_callbacks(folder), resume_from="auto")
        assert [row["epoch"] for row in history] == [1, 2, 3, 4]
        assert differences(of_run(trainer, history), outcomes()[name]["went_on"], tolerance_of("torch")) == []
