"""Which state and settings a spare validates, and who validates where there is no spare."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.driver.calls import EpochCalls
from raysgd.engine.snapshots import NewestSnapshot, Snapshot
from raysgd.exceptions import WorkersLostError
from raysgd.messages.settings import ReplicaSettings

ASKED: Any = None
SHARING: Any = SimpleNamespace(forget=lambda: None)
SETTINGS = ReplicaSettings(object, {"a": 1})


class Lost:
    """A state whose worker died before it had sent it."""

    def result(self, timeout_s: float | None = None) -> Snapshot:
        raise WorkersLostError("gone")


class Calls(EpochCalls):
    """Calls to a trainer that notes what its spare is to run, in one attempt after the other."""

    def __init__(self, *answers: Any, has_spares: bool = True) -> None:
        self.args: list[list[Any]] = []
        self.answers = list(answers)
        self.training: Any = SimpleNamespace(
            lend_spare=lambda: "loan" if has_spares else None,
            has_spares=has_spares,
            facts=["facts of then"],
            run_on_spare=self.run_on_spare,
        )
        unused: Any = None
        runner_cls = SimpleNamespace(validate_on_loan="function")
        super().__init__(runner_cls, self.training, unused, unused, use_local=False, sharing=unused)

    def run_on_spare(self, loan: Any, function: Any, make_args: Any, on_wait: Any) -> Any:
        assert (loan, function) == ("loan", "function")
        self.args += [make_args() for _ in self.answers]
        return self.answers[-1]

    def requests(self, name: str, asked: Any, dataset: Any, worlds: Any, sharing: Any = None, facts: Any = None) -> Any:
        return [(name, asked, dataset, len(worlds), sharing, facts)]

    def validate(self, asked: Any, dataset: Any) -> list[Any]:
        return ["of those that train"]

    def begin(self, state: Any, dataset: Any = None) -> Any:
        return self.begin_on_spare(ASKED, dataset, SETTINGS, SHARING, state)


SMALL = NewestSnapshot(Snapshot("small", ()))


def test_a_spare_is_given_settings_and_state_of_the_call_in_each_attempt() -> None:
    calls = Calls(None, "answer")
    validate = calls.begin(SMALL, "data")
    calls.training.facts = ["facts of now"]
    assert validate(lambda: None) == ["answer"]
    assert calls.args == [[SETTINGS, "small", "validation", ASKED, "data", 1, SHARING, "facts of then"]] * 2


def test_where_there_is_no_spare_the_workers_that_train_validate_at_once(caplog: pytest.LogCaptureFixture) -> None:
    validate = Calls(has_spares=False).begin(SMALL)
    assert "there is no spare" in caplog.text
    assert validate(lambda: None) == ["of those that train"]


def test_a_state_that_was_lost_on_its_way_is_not_replaced_by_a_later_one() -> None:
    calls = Calls("answer")
    with pytest.raises(WorkersLostError):
        calls.begin(Lost())(lambda: None)
    assert calls.args == []
