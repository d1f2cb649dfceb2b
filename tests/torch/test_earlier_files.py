"""Files of earlier versions, in one process: `tests/earlier_files` has them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from raysgd.callbacks.sidecar import ENDING
from tests.earlier_files.reading import check_loaded_and_resumed, differences, outcomes, tolerance_of
from tests.earlier_files.writing import (
    FILES,
    LOCAL,
    Case,
    OneModel,
    local,
    of_run,
    plain,
    run_callbacks,
    weights,
    write,
)

pytest.importorskip("lightning.pytorch")  # here, because it leaves an environment variable behind
NEWEST = "epoch_0002.ckpt"


@pytest.mark.parametrize("case", LOCAL, ids=[case.name for case in LOCAL])
def test_a_file_is_loaded_and_training_goes_on_as_it_did(case: Case) -> None:
    with case.start() as trainer:
        check_loaded_and_resumed(case, trainer)


@pytest.mark.parametrize("case", LOCAL, ids=[case.name for case in LOCAL])
def test_the_script_writes_the_same_training_today(case: Case, tmp_path: Path) -> None:
    written = write(case, tmp_path)
    assert differences(written, outcomes()[case.name], tolerance_of("torch")) == []


def test_a_run_of_fit_resumes_with_its_history_and_the_states_of_callbacks(tmp_path: Path) -> None:
    folder = shutil.copytree(FILES / "fit", tmp_path / "fit")
    beside = json.loads((folder / f"{NEWEST}{ENDING}").read_text())
    with local(OneModel) as trainer:
        saving, stopping = run_callbacks(folder)
        trainer.fit(2, callbacks=[saving, stopping], resume_from="auto")  # which is done already
        states = {"Checkpointing": saving.state_dict(), "EarlyStopping": stopping.state_dict()}
        for each in beside["callbacks"]:
            assert {name: states[each["name"]][name] for name in each["state"]} == each["state"]
        history = trainer.fit(4, callbacks=run_callbacks(folder), resume_from="auto")
        assert list(history[:2]) == beside["history"]["rows"]
        assert len(history) == 4
        expected = outcomes()["fit"]["went_on"]
        assert differences(of_run(trainer, history), expected, tolerance_of("torch")) == []
    assert (folder / "epoch_0004.ckpt").exists()
    assert not (folder / NEWEST).exists()


def test_the_folder_of_a_divided_model_is_loaded_by_one_process() -> None:
    name = "fit_of_a_divided_model"
    with local(OneModel, config={"draws": False}) as trainer:
        trainer.load(FILES / name / NEWEST)
        assert weights(trainer) == outcomes()[name]["saved"]
        assert trainer.train()["epoch"] == 3


def test_a_file_of_two_workers_is_loaded_by_one_process_in_the_middle_of_its_pass() -> None:
    name = "two_workers_inside_a_pass.pt"
    with local(OneModel, "batch") as trainer:
        trainer.load(FILES / name)
        assert weights(trainer) == outcomes()[name]["saved"]
        result = trainer.train()
        [calls, *_] = outcomes()[name]["went_on"]["calls"]
        assert (result["epoch"], result["num_samples"]) == (calls["epoch"], calls["num_samples"])


def test_files_say_nothing_of_the_machine_that_wrote_them() -> None:
    told = re.compile(rb"/(home|root|tmp|work|usr|opt|Users)/|site-packages|\d+\.\d+\.\d+\.\d+|localhost")
    paths = [path for path in FILES.rglob("*") if path.is_file()]
    assert len(paths) > 10
    assert [str(path) for path in paths if told.search(path.read_bytes())] == []
    assert sum(path.stat().st_size for path in paths) < 300_000


def test_results_that_differ_are_found() -> None:
    expected = plain({"loss": 1.0, "rows": [{"epoch": 1}], "seconds": 3})
    assert differences({"loss": 1.0 + 1e-9, "rows": [{"epoch": 1}]}, expected, 1e-6) == []
    assert differences({"loss": 1.0 + 1e-9, "rows": [{"epoch": 1}]}, expected, 0.0) != []
    assert differences({"loss": 1.0, "rows": [{"epoch": 2}]}, expected, 1e-6) == ["/rows/0/epoch: 2 instead of 1"]
    assert differences({"loss": 1.0, "rows": []}, expected, 1e-6) == ["/rows: [] instead of [{'epoch': 1}]"]
    assert differences({"loss": 1.0}, expected, 1e-6) != []
