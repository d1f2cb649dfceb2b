"""`raysgd why`, `raysgd replay` and `raysgd bisect`, as a user types them, and what they refuse by name.

Covers `raysgd.cli.main`, `raysgd.replay.questions` and `raysgd.replay.program`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils.data import DataLoader, TensorDataset

from raysgd.callbacks import Checkpointing
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.cli.main import main
from raysgd.core.history.history import History
from raysgd.journal.entries import BatchRule, LoaderLayout
from raysgd.journal.steps import CHECKS_FILE, STEPS
from raysgd.replay import find_jumps, replay, why
from raysgd.replay.program import batch_options_for, load_class
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.journal.made import HEADER, made_leg
from tests.journal.test_journal import OwnEpoch
from tests.replay import programs
from tests.replay.programs import Plain
from tests.torch.operators_for_tests import LinearOperator

Make = Callable[..., TorchTrainer]
PROGRAM = f"{programs.__file__}:Plain"


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.fixture
def plain_run(make_local: Make, tmp_path: Path) -> Path:
    """A run of three epochs with 10 steps each, one of which has a bad row."""
    trainer = make_local(Plain, seed=2, config={"bad": {"33": "nan"}, "lr": 0.1})
    trainer.fit(3, folder=tmp_path, callbacks=[Checkpointing(keep_last=None)])
    return tmp_path


def test_why_shows_the_step_among_its_neighbors(plain_run: Path) -> None:
    found = run("why", plain_run, "--step", 2)
    assert found.exit_code == 0
    lines = found.output.splitlines()
    assert lines[0] == "step 2, in epoch 1, on 1 worker"
    assert lines[2].split() == ["step", "loss", "norm", "weight"]
    assert [line.split()[-3] for line in lines[3:9]] == ["1", "2", "3", "4", "5", "6"]
    assert lines[4].startswith("  > ")
    assert len(lines[-1].removeprefix("rank 0: ").split(", ")) == 12


def test_the_jumps_and_the_row_of_one_are_found(plain_run: Path) -> None:
    found = run("why", plain_run, "--jumps")
    assert found.output.splitlines()[-1] == "1 of 30 steps begin a jump"
    step = int(found.output.splitlines()[1].split()[0])
    shown = run("why", plain_run, "--step", step, "--recompute", "--program", PROGRAM)
    assert shown.exit_code == 0, shown.output
    first = next(line.split() for line in shown.output.splitlines() if line.split()[:1] == ["nan"] and "33" in line)
    assert first == ["nan", "33", "0"]
    assert why(plain_run, step).samples == why(plain_run, step, program=Plain, recompute=True).samples


def test_replay_writes_the_state_of_the_step(plain_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    found = run("replay", plain_run, "--step", 20, "--program", PROGRAM, "--save", file)
    assert found.exit_code == 0, found.output
    assert found.output.splitlines() == [
        f"replayed steps 11 to 20, from {plain_run / 'checkpoints' / 'epoch_0001.ckpt'}",
        "each loss has the bits that the run had",
    ]
    saved = torch.load(file, weights_only=False)["models"][0]
    assert saved.keys() == Plain.make_model(None).state_dict().keys()  # type: ignore[arg-type]


def test_replay_says_that_another_program_is_not_the_run(plain_run: Path) -> None:
    found = run("replay", plain_run, "--step", 1, "--program", f"{programs.__file__}:Rectified")
    assert found.exit_code == 1
    assert "the replay is not the run: step 1 is the first that differs" in found.output


class OtherRate(WorkerCallback):
    """Uses another learning rate in one step, which the program does not."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.3 if operator.global_step + 1 == self.step else 0.1


@pytest.mark.parametrize("options", [{"deterministic": True}, {"split_batches": True}])
def test_a_replay_names_the_first_step_that_rounding_does_not_explain(
    make_local: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = make_local(Plain, seed=2, **options)
    trainer.fit(2, folder=tmp_path, callbacks=[Checkpointing(keep_last=None), OtherRate(14)])
    assert replay(tmp_path, 14, program=Plain).is_exact
    found = replay(tmp_path, 18, program=Plain)
    assert (found.is_same, found.first_different) == (False, 15)
    assert "step 15 is the first that differs" in str(found)
    assert ("more than rounding explains" in str(found)) == ("deterministic" not in options)


def test_other_bits_than_those_of_the_run_are_no_other_run(make_local: Make, tmp_path: Path) -> None:
    make_local(Plain, seed=2, split_batches=True).fit(1, folder=tmp_path)
    file = tmp_path / "journal" / "steps.bin"
    steps = np.fromfile(file, STEPS)
    steps["loss"][3] *= 1 + 1e-7
    steps.tofile(file)
    file.with_name(CHECKS_FILE).unlink()
    found = replay(tmp_path, 10, program=Plain)
    assert (found.is_exact, found.is_same, found.first_different) == (False, True, None)
    assert "rounding explains; `deterministic=True` keeps the bits" in str(found)


def test_a_run_that_only_steps_limit_can_be_replayed(make_local: Make, tmp_path: Path) -> None:
    make_local(Plain, seed=2).fit(max_steps=16, folder=tmp_path, callbacks=[Checkpointing(keep_last=None)])
    for step, begin in ((5, None), (10, None), (16, None), (16, 0)):
        assert replay(tmp_path, step, program=Plain, begin=begin).is_exact


def test_a_part_of_a_run_is_replayed_with_the_options_that_it_had(make_local: Make, tmp_path: Path) -> None:
    """The second program has another batch size, and clips."""
    saving = Checkpointing(keep_last=None)
    make_local(Plain, seed=2).fit(2, max_steps=14, folder=tmp_path, callbacks=[saving])
    options: dict[str, Any] = {"config": {"batch_size": 8}, "clip_grad_norm": 0.3}
    make_local(Plain, seed=2, **options).fit(
        3, folder=tmp_path, callbacks=[Checkpointing(keep_last=None)], resume_from="auto"
    )
    found = replay(tmp_path, 30, program=Plain, begin=0)
    assert (found.begin, found.is_exact) == (0, True), str(found)
    assert found.records[-1].norm is not None


def test_bisect_of_a_run_with_itself_finds_nothing(plain_run: Path) -> None:
    found = run("bisect", plain_run, plain_run)
    assert found.output.splitlines()[0] == "no difference in 30 steps"


def test_the_debugger_stops_before_the_step_with_the_global_batch(plain_run: Path) -> None:
    command = [sys.executable, "-m", "raysgd", "replay", str(plain_run), "--step", "12", "--program", PROGRAM, "--pdb"]
    typed = "p operator.global_step, len(batch[0]), len(global_batch[0])\nc\n"
    done = subprocess.run(command, input=typed, capture_output=True, text=True, check=True)
    assert "(11, 12, 12)" in done.stdout
    assert "each loss has the bits that the run had" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Pass `--step N`, or `--jumps`"),
        (["--step", 3, "--jumps"], "Pass `--step N`, or `--jumps`"),
        (["--step", 31], "the journal has steps 1 to 30, and none with this number. The nearest is 30"),
        (["--step", 3, "--recompute"], "`recompute` needs the program of the run: pass `--program"),
        (["--step", 3, "--recompute", "--program", "nothing"], "write `--program train.py:MyOperator`"),
        (["--step", 3, "--recompute", "--program", "no/file.py:Plain"], "there is no file `no/file.py`"),
        (["--step", 3, "--recompute", "--program", "no_module_here:Plain"], "No module named 'no_module_here'"),
        (["--step", 3, "--recompute", "--program", "json:dumps"], "is no `TrainingOperator` class"),
    ],
)
def test_wrong_arguments_of_why_are_refused(plain_run: Path, arguments: list[Any], message: str) -> None:
    found = run("why", plain_run, *arguments)
    assert found.exit_code
    assert message in " ".join(found.output.split())


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    found = run("why", tmp_path, "--jumps")
    assert found.exit_code == 1
    assert "has no journal. `TorchTrainer.fit` keeps one if you pass `folder=...`" in found.output


def test_a_history_knows_its_journal(make_local: Make, tmp_path: Path) -> None:
    history = make_local(LinearOperator).fit(1, folder=tmp_path)
    assert why(history, 2).samples == ((4, 5, 6, 7),)
    assert find_jumps(history).jumps == ()
    with pytest.raises(FileNotFoundError, match=r"pass `folder=\.\.\.` to `fit`"):
        why(History.from_json(history.to_json()), 2)


class Shaken(Plain):
    """Its config has an object."""

    def setup(self, config: dict[str, Any]) -> None:
        config["make"]()
        super().setup(config)


def nothing() -> None:
    """Do nothing."""


def test_what_the_journal_does_not_hold_of_the_config_is_asked_for(make_local: Make, tmp_path: Path) -> None:
    make_local(Shaken, seed=1, config={"make": nothing}).fit(1, folder=tmp_path)
    with pytest.raises(ValueError, match=r"does not hold the entries 'make' of the config.*`config=\{...\}` in Python"):
        replay(tmp_path, 3, program=Shaken)
    assert replay(tmp_path, 3, program=Shaken, config={"make": nothing}).is_exact


def test_entries_of_the_config_come_from_a_file(make_local: Make, tmp_path: Path) -> None:
    make_local(Plain, seed=1, config={"lr": 0.1, "api_key": "k"}).fit(1, folder=tmp_path / "run")
    asked = ("replay", tmp_path / "run", "--step", 3, "--program", PROGRAM)
    assert "the entries 'api_key' of the config" in run(*asked).output
    (tmp_path / "config.json").write_text(json.dumps({"api_key": "k"}))
    assert run(*asked, "--config", tmp_path / "config.json").exit_code == 0


def test_an_own_train_epoch_is_refused(make_local: Make, tmp_path: Path) -> None:
    make_local(OwnEpoch).fit(1, folder=tmp_path)
    with pytest.raises(ValueError, match="`OwnEpoch` overrides `train_epoch`"):
        replay(tmp_path, 1, program=OwnEpoch)


def test_the_dataset_of_a_fit_is_refused(make_local: Make, tmp_path: Path) -> None:
    data = DataLoader(programs.Points(), batch_size=12)
    make_local(Plain, seed=1).fit(1, folder=tmp_path, dataset=data)
    assert why(tmp_path, 2).samples == (tuple(range(12, 24)),)
    with pytest.raises(ValueError, match="the run trained on the `dataset` of `fit`"):
        replay(tmp_path, 2, program=Plain)
    with pytest.raises(ValueError, match="the run trained on the `dataset` of `fit`"):
        why(tmp_path, 2, program=Plain, recompute=True)


class Undivided(TrainingOperator):
    """Trains on a list of batches."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=[*DataLoader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch_size=4)])


def test_data_that_the_library_does_not_divide_have_losses_and_no_samples(make_local: Make, tmp_path: Path) -> None:
    make_local(Undivided).fit(2, folder=tmp_path)
    found = why(tmp_path, 3)
    assert found.record.loss > 0
    assert found.samples is None
    assert "did not divide the train data, a `list`" in str(found)


def test_a_lost_seed_is_named(make_local: Make, tmp_path: Path) -> None:
    class Unseeded(LinearOperator):
        def make_loader(self, data: Any, shuffle: bool = False) -> Any:
            torch.seed()
            return super().make_loader(data, shuffle=True)

    make_local(Unseeded).fit(1, folder=tmp_path)
    with pytest.raises(ValueError, match=r"trains on other data than the run: seed .* the run needs `seed=`"):
        replay(tmp_path, 2, program=Unseeded)


def test_a_journal_that_begins_late_needs_a_checkpoint(make_local: Make, tmp_path: Path) -> None:
    trainer = make_local(Plain, seed=1)
    trainer.train()
    trainer.fit(1, folder=tmp_path)
    with pytest.raises(ValueError, match="journal begins after step 10, and no checkpoint before the step is left"):
        replay(tmp_path, 12, program=Plain)


@pytest.mark.parametrize(
    ("leg", "message"),
    [
        (made_leg(2, strategy="fsdp"), '`strategy="fsdp"` cannot be replayed'),
        (made_leg(2, use_horovod=True), '`backend="horovod"` cannot be replayed'),
        (made_leg(1, precision="apex"), "Apex cannot be replayed"),
        (made_leg(2, window=4), "2 workers with `accumulate_grad_batches=4` and without"),
    ],
)
def test_what_one_process_cannot_do_is_refused(leg: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_options_for(leg)


@pytest.mark.parametrize("cap", [None, 3])
def test_a_run_that_halved_its_batches_is_replayed_with_those_of_the_leg(cap: int | None) -> None:
    leg = made_leg(
        2, batch_options={**HEADER["options"]["batch_options"], "split_batches": True, "micro_batch_size": "auto"}
    )
    assert isinstance(leg.data, LoaderLayout)
    leg = replace(leg, data=replace(leg.data, rule=BatchRule(cap=cap, num_shards=0, multiple=1)))
    assert batch_options_for(leg).micro_batch_size == cap


def test_a_class_itself_is_a_program() -> None:
    assert load_class(Plain) is Plain
    assert load_class("tests.replay.programs:Plain") is Plain
