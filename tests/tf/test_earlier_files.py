"""Files of earlier versions with Keras, in one process: `tests/earlier_files` has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.earlier_files.reading import check_loaded_and_resumed, differences, outcomes, tolerance_of
from tests.earlier_files.writing import WITH_KERAS, write


@pytest.mark.parametrize("number", [0, 1], ids=["creators", "operator"])
def test_a_file_is_loaded_and_training_goes_on_as_it_did(number: int, keras: str, keras_here: Any) -> None:
    case = WITH_KERAS[keras][number]
    with case.start() as trainer:
        check_loaded_and_resumed(case, trainer, keras)


@pytest.mark.parametrize("number", [0, 1], ids=["creators", "operator"])
def test_the_script_writes_the_same_training_today(number: int, keras: str, keras_here: Any, tmp_path: Path) -> None:
    case = WITH_KERAS[keras][number]
    assert differences(write(case, tmp_path), outcomes()[case.name], tolerance_of(keras)) == []
