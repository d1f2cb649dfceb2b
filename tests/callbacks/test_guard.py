from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.callbacks import EMA, GradientNorms, Guard, WorkerCallback
from raysgd.exceptions import CallbackError
from raysgd.journal.journal import Journal
from raysgd.replay import find_jumps, replay, why
from raysgd.torch import TorchTrainer
from tests import bad_batches
from tests.bad_batches import INFINITE, NAN, SCALED, SIZE, Case, Manual, Own, Stock, Twice
from tests.replay.programs import Normed
from tests.torch.operators_for_tests import BatchNormOperator, LinearOperator, OwnEpochOperator

Make = Callable[..., TorchTrainer]


class Broken(BatchNormOperator):
    """Has a batch normalization, and features of NaN in the batches of `config["bad"]`."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["global_step"] in self.config["bad"]:
            batch = [batch[0] * torch.nan, *batch[1:]]
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("operator", [Stock, Own, Manual, Twice])
def test_a_step_with_a_nan_or_a_spike_changes_nothing_and_counts_nothing(operator: type[Stock]) -> None:
    faults = {0: NAN, 7 * SIZE + 3: NAN, 45 * SIZE + 1: SCALED, 46 * SIZE: NAN, 50 * SIZE + 2: SCALED}
    assert bad_batches.problems(Case(operator, 1, 1, 55, faults)) == []


@pytest.mark.parametrize("operator", [Stock, Own])
def test_an_infinite_loss_with_finite_gradients_is_bad_too_and_so_is_a_step_of_several_batches(
    operator: type[Stock],
) -> None:
    assert bad_batches.problems(Case(operator, 1, 1, 12, {5 * SIZE: INFINITE, 11 * SIZE: INFINITE})) == []
    assert bad_batches.problems(Case(operator, 1, 2, 13, {5 * SIZE: INFINITE, 12 * SIZE: NAN})) == []


@pytest.mark.parametrize("seed", range(1, 5))
def test_drawn_programs_leave_out_what_plain_pytorch_would(seed: int) -> None:
    assert bad_batches.problems(replace(bad_batches.drawn(seed), num_workers=1, dies_at=None)) == []


def test_clean_steps_cause_no_alarm() -> None:
    assert bad_batches.false_alarms(300) == bad_batches.false_alarms(300, spike=bad_batches.SPIKE) == []


def test_buffers_are_those_from_before_the_step(make_local: Make) -> None:
    trainer = make_local(Broken, config={"bad": [2, 4]})
    trainer.fit(1, callbacks=[Guard()])
    state = trainer.state_dict()["models"][0]
    assert all(bool(each.isfinite().all()) for each in state.values())
    assert int(state["1.num_batches_tracked"]) == 3
    assert math.isfinite(trainer.validate()["val_loss"])


def test_other_callbacks_do_not_see_the_step(make_local: Make) -> None:
    seen = []

    class Seeing(WorkerCallback):
        def __deepcopy__(self, memo: Any) -> Seeing:
            return self

        def on_gradients(self, operator: Any, optimizer: Any) -> None:
            seen.append("gradients")

        def on_optimizer_step(self, operator: Any, optimizer: Any) -> None:
            seen.append("optimizer")

        def on_step_end(self, operator: Any, step: int, metrics: Any) -> None:
            seen.append(f"end {step}")

    trainer = make_local(Broken, config={"bad": [1], "num_samples": 12})
    (result,) = trainer.fit(1, callbacks=[Seeing(), GradientNorms(), EMA(), Guard()])
    assert seen == ["gradients", "optimizer", "end 1", "gradients", "optimizer", "end 3"]
    assert math.isfinite(result["max_grad_norm"])
    assert (result["num_samples"], result["batch_count"]) == (8, 3)


def test_too_many_steps_of_an_epoch_end_the_run_with_their_numbers(make_local: Make, tmp_path: Path) -> None:
    trainer = make_local(Broken, config={"bad": [1, 3, 6, 8]}, split_batches=True)
    with pytest.raises(CallbackError, match=r"`Guard\(max_skipped=1\)`: steps 2, 4 of this epoch are bad, .* rank 0"):
        trainer.fit(2, callbacks=[Guard(max_skipped=1)], folder=tmp_path)
    found = why(tmp_path, 4)
    assert found.samples == ((12, 13, 14, 15),)
    assert "left out: the loss is not finite on rank 0" in str(found)
    with pytest.raises(ValueError, match="the journal has steps 1 to 3"):
        why(tmp_path, 5)
    make_local(Broken, config={"bad": [1, 3, 6, 8]}).fit(2, callbacks=[Guard(max_skipped=2)])


def test_raise_ends_the_run_at_the_step(make_local: Make) -> None:
    trainer = make_local(Broken, config={"bad": [3]})
    with pytest.raises(CallbackError, match=r'`Guard\(nonfinite="raise"\)`: in step 4, the loss is not finite on rank'):
        trainer.fit(1, callbacks=[Guard("raise")])
    assert all(bool(each.isfinite().all()) for each in trainer.state_dict()["models"][0].values())


class Overflowing(LinearOperator):
    """Has a loss that is too large for fp16, or NaN, in the batches of `config`."""

    def forward(self, features: Any, target: Any) -> Any:
        output, loss = super().forward(features, target)
        step = self.global_step
        factor = 1e30 if step in self.config["large"] else torch.nan if step in self.config["bad"] else 1.0
        return output, loss * factor


def test_overflows_of_fp16_are_no_bad_steps_but_a_nan_is(make_local: Make, tmp_path: Path) -> None:
    config = {"large": [1, 2], "bad": [3], "num_samples": 24}
    trainer = make_local(Overflowing, config=config, precision="fp16")
    trainer.fit(1, callbacks=[Guard()], folder=tmp_path)
    assert [(each.step, each.ranks) for each in Journal(tmp_path).left_out] == [(4, (0,))]
    assert all(bool(each.isfinite().all()) for each in trainer.state_dict()["models"][0].values())


def test_overflows_of_fp16_without_an_end_are_bad(make_local: Make, tmp_path: Path) -> None:
    trainer = make_local(Overflowing, config={"large": range(99), "bad": [], "num_samples": 88}, precision="fp16")
    trainer.fit(1, callbacks=[Guard()], folder=tmp_path)
    assert [(each.step, each.ranks) for each in Journal(tmp_path).left_out] == [(20, ()), (21, ()), (22, ())]


class ByScaler(LinearOperator):
    """Scales its loss and steps by the scaler of the library itself."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, _, target = batch
        with self.autocast():
            loss = self.criterion(self.model(features), target)
        self.optimizer.zero_grad()
        self._amp_scaler.scale(loss).backward()
        self._amp_scaler.step(self.optimizer)
        self._amp_scaler.update()
        return {"train_loss": loss.item(), "num_samples": len(target)}


def test_a_step_by_a_scaler_is_refused_because_the_scaler_hides_bad_steps(make_local: Make) -> None:
    with pytest.raises(ValueError, match=r"call `self.backward\(loss\)` and `self.optimizer_step\(\)` instead"):
        make_local(ByScaler, precision="fp16").fit(1, callbacks=[Guard()])


def test_rewind_restores_the_newest_state_that_is_old_enough(make_local: Make, tmp_path: Path) -> None:
    states = {}

    class Keeping(Broken):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            states[batch_info["global_step"]] = [each.detach().clone() for each in self.model.parameters()]
            return super().train_batch(batch, batch_info)

    config = {"bad": [9, 10], "num_samples": 80, "optimizer": "adam"}
    make_local(Keeping, config=config).fit(1, callbacks=[Guard(rewind=4), EMA()], folder=tmp_path)
    # Copies are those after 0, 4 and 8 steps; the newest that is four steps old is the one after 4.
    assert [(each.step, each.back_to) for each in Journal(tmp_path).left_out] == [(10, 4), (11, 4)]
    assert all(map(torch.equal, states[10], states[4]))
    assert all(map(torch.equal, states[11], states[4]))
    assert not any(map(torch.equal, states[9], states[4]))


class Spoiled(Normed):
    """Has losses of NaN in some steps."""

    def forward(self, features: Any, target: Any) -> Any:
        output, loss = super().forward(features, target)
        return output, loss * (torch.nan if self.global_step in (3, 12) else 1.0)


@pytest.mark.parametrize("rewind", [None, 3])
def test_the_journal_names_the_steps_and_a_replay_has_their_bits(
    make_local: Make, tmp_path: Path, rewind: int | None
) -> None:
    options: dict[str, Any] = {"seed": 7, "deterministic": True, "split_batches": True}
    trainer = make_local(Spoiled, **options)
    history = trainer.fit(2, folder=tmp_path, callbacks=[Guard(rewind=rewind)])
    found = why(history, 13)
    assert "left out: the loss is not finite on rank 0" in str(found)
    assert found.samples is not None
    assert "step 4 was left out" in str(find_jumps(history))
    assert [each.back_to for each in Journal(tmp_path).left_out] == [
        None if rewind is None else 0,
        rewind and 7,
    ]  # copies are those after 0, 4, 7 and 10 steps
    repeated = replay(history, 20, program=Spoiled)
    assert repeated.is_exact, str(repeated)
    weights, again = (each["models"][0] for each in (trainer.state_dict(), repeated.state))
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_the_state_is_saved_and_a_wrong_one_is_refused(make_local: Make) -> None:
    trainer = make_local(Broken, config={"bad": [1]})
    trainer.fit(1, callbacks=[Guard(spike=50)])
    state = trainer.state_dict()
    assert state["callbacks"]["Guard"]["skipped"] == [2]
    assert len(state["callbacks"]["Guard"]["norms"][0]) == 4
    state["callbacks"]["Guard"]["norms"] = [["1.0"]]
    guard = Guard()
    with pytest.raises(ValueError, match="The state of `Guard` does not match"):
        guard._check_state(trainer.get_local_operator(), state["callbacks"]["Guard"])


class Closing(LinearOperator):
    """Steps with a closure."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, _, target = batch

        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(features), target)
            loss.backward()
            return loss

        return {"train_loss": float(self.optimizer.step(closure)), "num_samples": len(target)}


def test_a_step_with_a_closure_is_refused(make_local: Make) -> None:
    with pytest.raises(ValueError, match="`Guard` decides once whether a step is taken"):
        make_local(Closing).fit(1, callbacks=[Guard()])


def test_a_train_epoch_of_the_users_is_refused(make_local: Make) -> None:
    with pytest.raises(CallbackError, match=r"`OwnEpochOperator` overrides `train_epoch`.*: override `train_batch`"):
        make_local(OwnEpochOperator).fit(1, callbacks=[Guard()])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nonfinite": "stop"}, '`nonfinite=\'stop\'`: allowed are "skip" and "raise"'),
        ({"spike": 1}, "`spike=1`: need a number above 1"),
        ({"max_skipped": -1}, "`max_skipped=-1`: need the number of steps"),
        ({"rewind": 0}, "`rewind=0`: need a number of steps"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Guard(**options)
